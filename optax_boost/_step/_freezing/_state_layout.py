"""Finds which leaves of an inner optimizer's state belong to params, and which are step counts.

In optax, a step count beside moments (trees of the params' structure) counts the steps of these
moments: Adam corrects the bias of `mu` and `nu` by the ``count`` of ``optax.ScaleByAdamState``. A
count that is alone in its state counts the steps of the run, as in ``optax.ScaleByScheduleState``.
In states of other authors, a learning rate schedule may read a count beside moments. So the
argument `counts` of :func:`freeze_layers` says whether the count is per group or of the run.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import itertools
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost._foundation import _masks, _types
from optax_boost._trace import _layer_groups

# The names of step counts in the states of optax. Other counters count something else: `mini_step`
# the micro-batches of a window, `steps_since_sync` the inner steps of SAM.
_STEP_COUNTS = ("count", "count_m2", "is_initial_step", "step", "t")
_PACKAGE = __name__.partition(".")[0]


@dataclasses.dataclass(frozen=True)
class StackedGroups:
  """The group of each layer of a stacked leaf: a param of `shape` with many layers along `axis`."""

  groups: tuple[int, ...]
  axis: int
  shape: tuple[int, ...]

  @property
  def last_group(self) -> int:
    """The last group of the layers; a value without an axis of layers is frozen with this group."""
    return max(self.groups)

  @functools.lru_cache(maxsize=4096)  # noqa: B019  # small, and equal for all instances of a leaf
  def axis_in(self, shape: tuple[int, ...]) -> int | None:
    """Returns the axis of layers in a value of the state that belongs to the leaf and has `shape`.

    The value may lack axes of the leaf. Returns None if no axis, or more than one, is possible.
    """
    candidates = set()
    for axes in itertools.combinations(range(len(self.shape)), len(shape)):
      if all(n in (1, self.shape[axis]) for n, axis in zip(shape, axes, strict=True)):
        candidates.add(axes.index(self.axis) if self.axis in axes else None)
    axis = candidates.pop() if len(candidates) == 1 else None
    return axis if axis is not None and shape[axis] == len(self.groups) else None

  def numbers_for(self, shape: tuple[int, ...]) -> _layer_groups.GroupNumber:
    """Returns the groups of the layers, as an array that broadcasts against a value of `shape`.

    If the value has no axis of layers, returns :attr:`last_group`.
    """
    axis = self.axis_in(shape)
    if axis is None:
      return self.last_group
    return np.array(self.groups).reshape([-1 if i == axis else 1 for i in range(len(shape))])


# The group of a leaf, or the groups of the layers of a stacked leaf.
LeafGroup: TypeAlias = int | StackedGroups


def leaf_groups(numbers: _types.Tree, leaves: _types.Tree) -> _types.Tree:
  """Returns the :data:`LeafGroup` of each leaf, as a tree of the structure of `leaves`.

  `numbers` has for each leaf the number of its group, or, for a stacked leaf, an array with the
  number of each layer's group, which broadcasts against the leaf.
  """

  def leaf_group(number: _layer_groups.GroupNumber, leaf: jax.Array) -> LeafGroup:
    if not isinstance(number, np.ndarray):
      return number
    axis = int(np.argmax(number.shape))
    return StackedGroups(tuple(number.ravel().tolist()), axis, jnp.shape(leaf))

  return jax.tree.map(leaf_group, numbers, leaves)


@dataclasses.dataclass(frozen=True)
class StateLayout:
  """Which leaves of an inner optimizer's state belong to params, and which are step counts.

  Attributes:
    groups: for each leaf of the state, the group of the param that the leaf belongs to, or None.
    counts: the indices, among the state's leaves, of the step counts that are kept for each group.
    shared: the types of states whose counts may belong to moments, but are shared by all groups.
    assumed: the types of other authors' states whose counts are taken to belong to moments.
    owners: for each leaf of the state, the index of the param that the leaf belongs to, or None.
    is_moment: for each leaf of the state, whether it is a moment beside one of `counts`.
  """

  structure: _types.TreeDef
  groups: Sequence[LeafGroup | None]
  counts: Sequence[int]
  shared: Sequence[str]
  assumed: Sequence[str]
  owners: Sequence[int | None]
  is_moment: Sequence[bool]

  def moments(self, state: _types.OptState) -> list[tuple[int, int | None] | None]:
    """Returns the param's index and the axis of its layers for each moment; None for other leaves.

    The axis is None if the param is not stacked, or if the moment has no axis of layers.
    """

    def moment(i: int, leaf: jax.Array) -> tuple[int, int | None] | None:
      owner, group = self.owners[i], self.groups[i]
      if owner is None or not self.is_moment[i]:
        return None
      return owner, group.axis_in(jnp.shape(leaf)) if isinstance(group, StackedGroups) else None

    return [moment(i, leaf) for i, leaf in enumerate(jax.tree.leaves(state))]

  @property
  def state_groups(self) -> _types.Tree:
    """The group of each leaf of the state, as a tree of the state's structure.

    A leaf that belongs to no param has -1.
    """
    return jax.tree.unflatten(self.structure, [-1 if g is None else g for g in self.groups])

  @property
  def count_positions(self) -> _types.Tree:
    """For each leaf of the state its position in `counts`, as a tree of the state's structure.

    A leaf that is not in `counts` has -1.
    """
    positions = {index: position for position, index in enumerate(self.counts)}
    leaves = [positions.get(index, -1) for index in range(len(self.groups))]
    return jax.tree.unflatten(self.structure, leaves)


def select(
  state_groups: _types.Tree,
  choose: Callable[[_layer_groups.GroupNumber, jax.Array, jax.Array], jax.Array],
  before: _types.OptState,
  after: _types.OptState,
) -> _types.OptState:
  """Returns a state that takes each leaf from the state before or after a step.

  A leaf is ``choose(group, old, new)``, where ``group`` is the leaf's group, or an array with the
  groups of its layers. A leaf that belongs to no param (group -1) is ``new``.
  """

  def select_leaf(group: LeafGroup, old: jax.Array, new: jax.Array) -> jax.Array:
    if group == -1:
      return new
    number = group.numbers_for(jnp.shape(new)) if isinstance(group, StackedGroups) else group
    return choose(number, old, new)

  leaves, structure = jax.tree.flatten(after)
  groups, old_leaves = jax.tree.leaves(state_groups), jax.tree.leaves(before)
  return jax.tree.unflatten(structure, map(select_leaf, groups, old_leaves, leaves))


@dataclasses.dataclass(frozen=True)
class _Owner:
  """The param that a leaf of the state belongs to: its index, and its group."""

  index: int
  group: LeafGroup


class _ParamsLikeTree:
  """Replaces a tree of the params' structure in a state, and holds the owners of its leaves."""

  def __init__(self, tree: _types.Tree, owners: _types.Tree):
    masked_or_owner = jax.tree.map(
      lambda value, owner: value if _masks.is_masked(value) else owner,
      tree,
      owners,
      is_leaf=_masks.is_masked,
    )
    self.owners: list[_Owner] = jax.tree.leaves(masked_or_owner)


def find_layout(
  inner: optax.GradientTransformation,
  state: _types.OptState,
  groups: _types.Tree,
  owner_of_counts: str | None,
) -> StateLayout:
  """Finds the :class:`StateLayout` of the state of `inner`.

  `groups` is the tree that :func:`leaf_groups` returns for the params; `owner_of_counts` is the
  argument `counts` of :func:`freeze_layers`. Raises TypeError if ``optax.tree.map_params`` can't
  map over the state.
  """
  leaves, structure = jax.tree.flatten(groups)
  owners = jax.tree.unflatten(structure, [_Owner(i, group) for i, group in enumerate(leaves)])
  try:
    marked = optax.tree.map_params(
      inner,
      _ParamsLikeTree,
      state,
      owners,
      transform_non_params=lambda x: x,
      is_leaf=lambda _: True,
    )
  except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
    raise TypeError(
      "`freeze_layers` needs an inner optimizer over whose state `optax.tree.map_params` can map,"
      f" unlike that of `optax.lbfgs`; it failed: {error}. Pass masks and labels as trees, or by"
      " `optax_boost.path_mask`; pass other trees, as muon's `muon_weight_dimension_numbers`, as"
      " functions of the params."
    ) from error
  found: list[_Owner | None] = []
  moments: list[bool] = []
  counts: list[int] = []
  types_by_kind: dict[str, dict[str, None]] = {"unclear": {}, "assumed": {}}
  kinds_per_group = ["moments", "assumed"] + (["unclear"] if owner_of_counts == "group" else [])

  def visit(node: _types.Tree, beside_count: bool) -> None:
    children = None if isinstance(node, _ParamsLikeTree) else _children(node)
    if children is None:
      owners = node.owners if isinstance(node, _ParamsLikeTree) else [None]
      found.extend(owners)
      moments.extend(beside_count and owner is not None for owner in owners)
      return
    kind = _kind_of_counts(node, children)
    if kind in types_by_kind and owner_of_counts is None:
      types_by_kind[kind][type(node).__name__] = None
    counted = kind in kinds_per_group and any(_is_counter(child) for _, child in children)
    for _, child in children:
      if counted and _is_counter(child):
        counts.append(len(found))
      visit(child, counted)

  visit(marked, False)
  if owner_of_counts == "run":
    counts.clear()
  return StateLayout(
    jax.tree.structure(state),
    [None if owner is None else owner.group for owner in found],
    counts,
    shared=list(types_by_kind["unclear"]),
    assumed=list(types_by_kind["assumed"]),
    owners=[None if owner is None else owner.index for owner in found],
    is_moment=moments,
  )


def _children(node: _types.Tree) -> list[tuple[str, Any]] | None:
  """Returns the name and the value of each child of a node; None for a leaf."""
  flat = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)[0]
  if len(flat) == 1 and flat[0][0] == ():
    return None
  return [(jax.tree_util.keystr(path, simple=True), child) for path, child in flat]


def _kind_of_counts(
  node: _types.Tree, children: list[tuple[str, Any]]
) -> Literal["moments", "assumed", "run", "unclear"]:
  """Returns what the counters in a node of the state count.

  "moments": the steps of the moments in the node. "run": all steps. "unclear": either of these.
  "assumed": as "moments", but by assumption, since the node is not a state of optax's own.
  `children` are the names and values in the node.
  """
  counters = [name for name, child in children if _is_counter(child)]
  # The counters of this package's methods count the steps of the run.
  if not counters or type(node).__module__.partition(".")[0] == _PACKAGE:
    return "run"
  if not any(isinstance(child, _ParamsLikeTree) for _, child in children):
    containers = [child for _, child in children if type(child) in (dict, list, tuple)]
    items = [item for container in containers for _, item in _children(container) or ()]
    return "unclear" if any(isinstance(item, _ParamsLikeTree) for item in items) else "run"
  remaining = [
    child
    for name, child in children
    if not (isinstance(child, _ParamsLikeTree) or (_is_counter(child) and name in _STEP_COUNTS))
  ]
  # If a child of the node is a state (also an empty one), the node is the state of a wrapper.
  is_wrapper = any(x is not None and not jax.tree_util.all_leaves([x]) for x in remaining)
  if is_wrapper and not any(name in _STEP_COUNTS for name in counters):
    return "run"
  # A scalar that is not a counter may be an estimate from all leaves, as in Prodigy. An array that
  # belongs to no param is a setting, such as the coefficients of Muon.
  has_scalars = any(jax.tree_util.all_leaves([x]) and jnp.ndim(x) == 0 for x in remaining)
  if is_wrapper or has_scalars:
    return "unclear"
  return "moments" if type(node).__module__.partition(".")[0] == "optax" else "assumed"


def _is_counter(value: Any) -> bool:
  """Returns whether a value is a scalar of a signed integer dtype or a bool."""
  if (
    isinstance(value, _ParamsLikeTree)
    or not jax.tree_util.all_leaves([value])
    or jnp.ndim(value) > 0
  ):
    return False
  dtype = jnp.result_type(value)
  return jnp.issubdtype(dtype, jnp.signedinteger) or jnp.issubdtype(dtype, jnp.bool_)

"""Finds which leaves of an inner optimizer's state belong to params, and which are step counts.

In optax, a step count beside moments (trees of the params' structure) counts the steps of these
moments: Adam corrects the bias of `mu` and `nu` by the ``count`` of ``optax.ScaleByAdamState``. A
count that is alone in its state counts the steps of the run, as in ``optax.ScaleByScheduleState``.
In states of other authors, the argument `counts` of :func:`freeze_layers` says which it is.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import itertools
from typing import Any, TypeAlias

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
  """

  structure: _types.TreeDef
  groups: Sequence[LeafGroup | None]
  counts: Sequence[int]

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


class _ParamsLikeTree:
  """Replaces a tree of the params' structure in a state, and holds the groups of its leaves."""

  def __init__(self, tree: _types.Tree, groups: _types.Tree):
    masked_or_group = jax.tree.map(
      lambda value, group: value if _masks.is_masked(value) else group,
      tree,
      groups,
      is_leaf=_masks.is_masked,
    )
    self.groups: list[LeafGroup] = jax.tree.leaves(masked_or_group)


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
  try:
    marked = optax.tree.map_params(
      inner,
      _ParamsLikeTree,
      state,
      groups,
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
  found: list[LeafGroup | None] = []
  counts: list[int] = []

  def visit(node: _types.Tree) -> None:
    children = None if isinstance(node, _ParamsLikeTree) else _children(node)
    if children is None:
      found.extend(node.groups if isinstance(node, _ParamsLikeTree) else [None])
      return
    counts_moments = _counts_moments(node, children, owner_of_counts)
    for _, child in children:
      if counts_moments and _is_counter(child):
        counts.append(len(found))
      visit(child)

  visit(marked)
  return StateLayout(jax.tree.structure(state), found, counts)


def _children(node: _types.Tree) -> list[tuple[str, Any]] | None:
  """Returns the name and the value of each child of a node; None for a leaf."""
  flat = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)[0]
  if len(flat) == 1 and flat[0][0] == ():
    return None
  return [(jax.tree_util.keystr(path, simple=True), child) for path, child in flat]


def _counts_moments(
  node: _types.Tree, children: list[tuple[str, Any]], owner_of_counts: str | None
) -> bool:
  """Returns whether the counters in a node of the state are kept for each group.

  `children` are the names and values in the node.
  """
  package = type(node).__module__.partition(".")[0]
  # The counters of this package's methods count the steps of the run.
  if owner_of_counts == "run" or package == _PACKAGE:
    return False
  others = [child for name, child in children if not (_is_counter(child) and name in _STEP_COUNTS)]
  if owner_of_counts == "group":
    items = [
      item for x in others if type(x) in (dict, list, tuple) for _, item in _children(x) or ()
    ]
    return any(isinstance(x, _ParamsLikeTree) for x in (*others, *items))
  # Another scalar may be an estimate from all leaves, as in Prodigy; a state is a wrapper's.
  beside = [x for x in others if not (x is None or isinstance(x, _ParamsLikeTree))]
  are_settings = all(jax.tree_util.all_leaves([x]) and jnp.ndim(x) > 0 for x in beside)
  has_moments = any(isinstance(x, _ParamsLikeTree) for x in others)
  return package == "optax" and has_moments and are_settings


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

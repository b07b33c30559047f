"""Finds the leaves of an inner optimizer's state that belong to params, and its step counts.

In optax, a step count beside trees of the params' structure counts the steps of these moments:
``count`` of ``optax.ScaleByAdamState``, by which Adam corrects the bias of `mu` and `nu`. A count
that is alone in its state counts the steps of the run, as in ``optax.ScaleByScheduleState``. In
states of other authors a count beside moments may be both, as a learning rate schedule in one
function with the moments reads it: the user says which.
"""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools
import itertools
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost._form import _compositions
from optax_boost._foundation import _masks
from optax_boost._trace import _layer_groups

# The names of step counts in the states of optax. Others count something else: `mini_step` the
# micro-batches of a window, `steps_since_sync` the inner steps of SAM.
_STEP_COUNTS = ("count", "count_m2", "is_initial_step", "step", "t")
_PACKAGE = __name__.partition(".")[0]


@dataclasses.dataclass(frozen=True)
class StackedGroups:
  """The groups of the layers of a stacked leaf.

  Attributes:
    groups: the group of each layer.
    axis: the axis of the layers in the leaf.
    shape: the shape of the leaf.
  """

  groups: tuple[int, ...]
  axis: int
  shape: tuple[int, ...]

  @property
  def last_group(self) -> int:
    """The group of values without the axis of layers: they are frozen when all layers are."""
    return max(self.groups)

  @functools.lru_cache(maxsize=4096)  # noqa: B019  # small, and equal for all instances of a leaf
  def axis_in(self, shape: tuple[int, ...]) -> int | None:
    """The axis of layers in a value made of the leaf, which may lack some of the leaf's axes.

    None if the value has no such axis, or if its shape does not tell.
    """
    found = set()
    for axes in itertools.combinations(range(len(self.shape)), len(shape)):
      if all(n in (1, self.shape[axis]) for n, axis in zip(shape, axes, strict=True)):
        found.add(axes.index(self.axis) if self.axis in axes else None)
    place = found.pop() if len(found) == 1 else None
    return place if place is not None and shape[place] == len(self.groups) else None

  def spread(self, of_layers: Any, shape: tuple[int, ...]) -> Any:
    """A vector with an entry per layer, in a shape that broadcasts against a value's."""
    place = self.axis_in(shape)
    return of_layers.reshape([-1 if axis == place else 1 for axis in range(len(shape))])

  def numbers_for(self, shape: tuple[int, ...]) -> _layer_groups.GroupNumber:
    """The groups of a value, in a shape that broadcasts against it."""
    has_axis = self.axis_in(shape) is not None
    return self.spread(np.array(self.groups), shape) if has_axis else self.last_group


# The group of a leaf, or of each of its layers.
LeafGroup: TypeAlias = int | StackedGroups


def leaf_groups(numbers: Any, leaves: Any) -> Any:
  """The groups of leaves, in their structure; `numbers` are those that broadcast against them."""

  def of_leaf(number: _layer_groups.GroupNumber, leaf: Any) -> LeafGroup:
    if not isinstance(number, np.ndarray):
      return number
    axis = int(np.argmax(number.shape))
    return StackedGroups(tuple(number.ravel().tolist()), axis, jnp.shape(leaf))

  return jax.tree.map(of_leaf, numbers, leaves)


@dataclasses.dataclass(frozen=True)
class StateLayout:
  """The owners of the leaves of an inner optimizer's state, in the order of ``jax.tree.leaves``.

  Attributes:
    structure: the structure of the state.
    groups: the group of each leaf that belongs to a leaf of the params; None for other leaves.
    counts: the places of the step counts that are kept for each group.
    shared: the types of states whose counts may be the moments', and are kept as the run's.
    assumed: the types of other authors' states whose counts are kept for each group.
    hidden: the transformations whose counts are kept as the run's, since their parts can't be
      called one by one.
  """

  structure: Any
  groups: Sequence[LeafGroup | None]
  counts: Sequence[int]
  shared: Sequence[str]
  assumed: Sequence[str]
  hidden: Sequence[str]

  @property
  def owners(self) -> Any:
    """The groups in the structure of the state; -1 for leaves that belong to no leaf."""
    return jax.tree.unflatten(self.structure, [-1 if g is None else g for g in self.groups])

  @property
  def places(self) -> Any:
    """The number of each count among `counts`, in the structure of the state; -1 for others."""
    numbers = {place: number for number, place in enumerate(self.counts)}
    leaves = [numbers.get(place, -1) for place in range(len(self.groups))]
    return jax.tree.unflatten(self.structure, leaves)


def below(tree: Any, wrappers: int) -> Any:
  """The state, or a tree of its structure, below a number of wrappers of ours."""
  for _ in range(wrappers):
    tree = tree.inner_state
  return tree


def select(
  owners: Any,
  choose: Callable[[_layer_groups.GroupNumber, Any, Any], Any],
  before: Any,
  after: Any,
) -> Any:
  """Combines two states: ``choose(group, before, after)``; leaves of no group are those after.

  `owners` are the groups of the leaves, in the structure of the states.
  """

  def select_leaf(group: LeafGroup, old: Any, new: Any) -> Any:
    if group == -1:
      return new
    number = group.numbers_for(jnp.shape(new)) if isinstance(group, StackedGroups) else group
    return choose(number, old, new)

  leaves, structure = jax.tree.flatten(after)
  kept = map(select_leaf, jax.tree.leaves(owners), jax.tree.leaves(before), leaves)
  return jax.tree.unflatten(structure, list(kept))


class _OfParams:
  """Replaces, in a state, a tree of the params' structure; holds the groups of its leaves."""

  def __init__(self, tree: Any, groups: Any):
    masked_or_group = jax.tree.map(
      lambda value, group: value if _masks.is_masked(value) else group,
      tree,
      groups,
      is_leaf=_masks.is_masked,
    )
    self.groups: list[LeafGroup] = jax.tree.leaves(masked_or_group)


def find_layout(
  inner: optax.GradientTransformation, state: Any, groups: Any, owner_of_counts: str | None = None
) -> StateLayout:
  """The layout of a state; `groups` are the groups of the params' leaves by :func:`leaf_groups`.

  `owner_of_counts` says whose the counts are beside moments: "group", "run"; None: as documented.
  """
  try:
    marked = optax.tree.map_params(
      inner, _OfParams, state, groups, transform_non_params=lambda x: x, is_leaf=lambda _: True
    )
  except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
    raise TypeError(
      "`freeze_layers` needs an inner optimizer over whose state `optax.tree.map_params` can map;"
      f" it failed: {error}. Masks and labels that are callables must take any tree: use"
      " `optax_boost.path_mask`, or pass them as trees. An `init` that computes with the params, as"
      " in `optax.lbfgs`, can't be used here."
    ) from error
  groups_of_state: list[LeafGroup | None] = []
  counts: list[int] = []
  names: dict[str, dict[str, None]] = {"unclear": {}, "assumed": {}}

  def visit(node: Any) -> None:
    if isinstance(node, _OfParams):
      groups_of_state.extend(node.groups)
      return
    children = _children(node)
    if children is None:
      groups_of_state.append(None)
      return
    kind = _kind_of_counts(node, children)
    if kind in names and owner_of_counts is None:
      names[kind][type(node).__name__] = None
    kept = ("moments", "assumed", *(("unclear",) if owner_of_counts == "group" else ()))
    for _, child in children:
      if kind in kept and _is_counter(child):
        counts.append(len(groups_of_state))
      visit(child)

  visit(marked)
  if owner_of_counts == "run":
    counts.clear()
  layout = StateLayout(
    jax.tree.structure(state),
    groups_of_state,
    counts,
    shared=list(names["unclear"]),
    assumed=list(names["assumed"]),
    hidden=[],
  )
  if owner_of_counts is not None:
    return layout
  hidden = dict(_hidden_counts(inner.update, layout.places))
  visible = [place for number, place in enumerate(counts) if number not in hidden]
  return dataclasses.replace(layout, counts=visible, hidden=sorted(set(hidden.values())))


def _hidden_counts(update: Callable[..., Any], places: Any) -> Iterator[tuple[int, str]]:
  """The numbers of counts inside what holds parts that can't be called one by one, and its name."""
  numbers = [number for number in jax.tree.leaves(places) if number >= 0]
  held = _compositions.parts(update) if numbers else []
  if not held:
    return
  states = _compositions.states_of_parts(update, places)
  if states is None:
    name = _compositions.name_in_optax(update)
    called = f"optax.{name}" if name else getattr(update, "__qualname__", repr(update))
    yield from ((number, called) for number in numbers)
    return
  for part, state in zip(held, states, strict=True):
    yield from _hidden_counts(part, state)


def _children(node: Any) -> list[tuple[str, Any]] | None:
  """The fields, entries or items of a node and their names; None for a leaf."""
  flat = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)[0]
  if len(flat) == 1 and flat[0][0] == ():
    return None
  return [(jax.tree_util.keystr(path, simple=True), child) for path, child in flat]


def _kind_of_counts(node: Any, children: list[tuple[str, Any]]) -> str:
  """Whose the counters in a node are: "moments", "run", "unclear", or "assumed" of moments."""
  counters = [name for name, child in children if _is_counter(child)]
  # The methods of this package count the steps of the run.
  if not counters or type(node).__module__.partition(".")[0] == _PACKAGE:
    return "run"
  if not any(isinstance(child, _OfParams) for _, child in children):
    containers = [child for _, child in children if type(child) in (dict, list, tuple)]
    items = [item for container in containers for _, item in _children(container) or ()]
    return "unclear" if any(isinstance(item, _OfParams) for item in items) else "run"
  remaining = [
    child
    for name, child in children
    if not (isinstance(child, _OfParams) or (_is_counter(child) and name in _STEP_COUNTS))
  ]
  # A state in this one, also an empty one, belongs to an optimizer that another one wraps.
  is_wrapper = any(x is not None and not jax.tree_util.all_leaves([x]) for x in remaining)
  if is_wrapper and not any(name in _STEP_COUNTS for name in counters):
    return "run"
  # Scalars may be estimates made of all leaves, as in Prodigy. Arrays that belong to no leaf are
  # settings, as the coefficients of Muon.
  has_scalars = any(jax.tree_util.all_leaves([x]) and jnp.ndim(x) == 0 for x in remaining)
  if is_wrapper or has_scalars:
    return "unclear"
  return "moments" if type(node).__module__.partition(".")[0] == "optax" else "assumed"


def _is_counter(value: Any) -> bool:
  """Whether a value is a scalar of a signed integer or a bool."""
  if isinstance(value, _OfParams) or not jax.tree_util.all_leaves([value]) or jnp.ndim(value) > 0:
    return False
  dtype = jnp.result_type(value)
  return jnp.issubdtype(dtype, jnp.signedinteger) or jnp.issubdtype(dtype, jnp.bool_)

"""What the leaves of an inner optimizer's state belong to: a leaf of the params, or a step count.

A step count beside trees of the params' structure counts the steps of these moments: ``count`` of
``optax.ScaleByAdamState``, by which Adam corrects the bias of `mu` and `nu`. A count that is alone
in its state counts the steps of the run: that of ``optax.ScaleByScheduleState``.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_boost import _groups
from optax_boost import _tree

# The names of step counts in the states of optax. Others count something else: `mini_step` the
# micro-batches of a window, `steps_since_sync` the inner steps of SAM.
_STEP_COUNTS = ("count", "count_m2", "is_initial_step", "step", "t")
_PACKAGE = __name__.partition(".")[0]


@dataclasses.dataclass(frozen=True)
class StateLayout:
  """What the leaves of an inner optimizer's state belong to, in the order of ``jax.tree.leaves``.

  Attributes:
    groups: the group of each leaf that belongs to a leaf of the params; None for the others.
    counts: the places of the step counts that belong to moments.
    unclear: the types of states whose integers may or may not belong to their moments.
  """

  groups: Sequence[_groups.GroupNumber | None]
  counts: Sequence[int]
  unclear: Sequence[str]

  def select(
    self, choose: Callable[[_groups.GroupNumber, Any, Any], Any], before: Any, after: Any
  ) -> Any:
    """Combines two states: ``choose(group, before, after)``; leaves of no group are those after."""
    structure: Any
    leaves, structure = jax.tree.flatten(after)
    triples = zip(self.groups, jax.tree.leaves(before), leaves, strict=True)
    chosen = [new if group is None else choose(group, old, new) for group, old, new in triples]
    return jax.tree.unflatten(structure, chosen)


class _OfParams:
  """Stands in a state for a tree of the params' structure; holds the groups of its leaves."""

  def __init__(self, tree: Any, numbers: Any):
    masked_or_group = jax.tree.map(
      lambda value, number: value if _tree.is_masked(value) else number,
      tree,
      numbers,
      is_leaf=_tree.is_masked,
    )
    self.groups: list[_groups.GroupNumber] = jax.tree.leaves(masked_or_group)


def find_layout(inner: optax.GradientTransformation, state: Any, numbers: Any) -> StateLayout:
  """The layout of a state; `numbers` are the groups of the params' leaves, in their structure."""
  try:
    marked = optax.tree.map_params(
      inner, _OfParams, state, numbers, transform_non_params=lambda x: x, is_leaf=lambda _: True
    )
  except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
    raise TypeError(
      "`freeze_layers` needs an inner optimizer over whose state `optax.tree.map_params` can map;"
      f" it failed: {error}. Masks and labels that are callables must take any tree: use"
      " `optax_boost.path_mask`, or pass them as trees. An `init` that computes with the params, as"
      " in `optax.lbfgs`, can't be used here."
    ) from error
  groups: list[_groups.GroupNumber | None] = []
  counts: list[int] = []
  unclear: dict[str, None] = {}

  def visit(node: Any) -> None:
    if isinstance(node, _OfParams):
      groups.extend(node.groups)
      return
    children = _children(node)
    if children is None:
      groups.append(None)
      return
    kind = _kind_of_counts(node, children)
    if kind == "unclear":
      unclear[type(node).__name__] = None
    for _, child in children:
      if kind == "moments" and _is_counter(child):
        counts.append(len(groups))
      visit(child)

  visit(marked)
  return StateLayout(groups, counts, list(unclear))


def _children(node: Any) -> list[tuple[str, Any]] | None:
  """The fields, entries or items of a node and their names; None for a leaf."""
  flat = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)[0]
  if len(flat) == 1 and flat[0][0] == ():
    return None
  return [(jax.tree_util.keystr(path, simple=True), child) for path, child in flat]


def _kind_of_counts(node: Any, children: list[tuple[str, Any]]) -> str:
  """Whether the counters in a node belong to "moments", to the "run", or are "unclear"."""
  counters = [child for _, child in children if _is_counter(child)]
  # The methods of this package count the steps of the run.
  if not counters or type(node).__module__.partition(".")[0] == _PACKAGE:
    return "run"
  if not any(isinstance(child, _OfParams) for _, child in children):
    containers = [child for _, child in children if type(child) in (dict, list, tuple)]
    items = [item for container in containers for _, item in _children(container) or ()]
    return "unclear" if any(isinstance(item, _OfParams) for item in items) else "run"
  is_clear = all(
    isinstance(child, _OfParams)
    or (_is_counter(child) and name in _STEP_COUNTS)
    # Settings, as the coefficients of Muon. Scalars may be estimates made of all leaves, as those of
    # Prodigy; an inner state means a wrapper, whose count may be that of the run.
    or (jax.tree_util.all_leaves([child]) and jnp.ndim(child) > 0)
    or not jax.tree.leaves(child)
    for name, child in children
  )
  return "moments" if is_clear else "unclear"


def _is_counter(value: Any) -> bool:
  """Whether a value is a scalar of a signed integer or a bool."""
  if isinstance(value, _OfParams) or not jax.tree_util.all_leaves([value]) or jnp.ndim(value) > 0:
    return False
  dtype = jnp.result_type(value)
  return jnp.issubdtype(dtype, jnp.signedinteger) or jnp.issubdtype(dtype, jnp.bool_)

"""Reads the argument `groups`, which says which leaves and layers share a subspace."""

import dataclasses
from typing import TypeAlias

import jax
import numpy as np

from optax_boost._foundation import _types, _warnings
from optax_boost._trace import _layer_axes, _layer_groups

# The argument `groups` of `dim_reduce`: the result of `layer_groups` or of `layer_axes`, regular
# expressions, or None for one group.
Plan: TypeAlias = _layer_groups.Groups | _layer_axes.LayerAxes | None


@dataclasses.dataclass(frozen=True)
class LeafGroups:
  """The group of each layer of a leaf; a leaf without axes of layers is a single layer."""

  axes: tuple[int, ...]  # the axes of layers
  numbers: tuple[int, ...]  # the group of each layer, in the order of the axes


@dataclasses.dataclass(frozen=True)
class SubspaceGroups:
  """The groups of all leaves of a tree."""

  leaves: tuple[LeafGroups, ...]  # in the order of the tree
  number: int  # the number of groups, G


def check_groups(plan: Plan) -> None:
  """Raises an error if `plan`, the argument `groups` of :func:`dim_reduce`, is invalid.

  Warns if `plan` is a result of `layer_axes` in which no leaf stacks layers.
  """
  if not isinstance(plan, _layer_axes.LayerAxes):
    if plan is not None:
      _layer_groups.count_groups(plan)
  elif not any(axes is not None and axes.stacked for axes in plan.axes):
    message = (
      "`groups` describes no leaf that holds many layers, so all leaves are one group. Pass regular"
      f" expressions, one per group, or None for one group. {plan.explain_unknown(plan.paths)}"
    )
    _warnings.warn(message.rstrip(), _warnings.NoEffectWarning)


def find_groups(tree: _types.Tree, plan: Plan, method: str) -> SubspaceGroups:
  """Returns to which subspace group each layer of each leaf of `tree` belongs.

  `plan` is the argument `groups` of :func:`dim_reduce`. Error messages name `method`.
  """
  if isinstance(plan, _layer_axes.LayerAxes):
    leaves = _layer_axes.leaves_of(tree, plan)
    last = max((leaf.num_layers for leaf in leaves if leaf.stacked), default=0)
    by_layer = [
      LeafGroups(leaf.stacked, tuple(range(leaf.num_layers)) if leaf.stacked else (last,))
      for leaf in leaves
    ]
    return SubspaceGroups(tuple(by_layer), max(last + any(not leaf.stacked for leaf in leaves), 1))
  if plan is None:
    return SubspaceGroups((LeafGroups((), (0,)),) * len(jax.tree.leaves(tree)), 1)
  numbers = _layer_groups.group_numbers(tree, plan, method)
  return SubspaceGroups(tuple(map(_leaf_groups, numbers)), _layer_groups.count_groups(plan))


def _leaf_groups(number: _layer_groups.GroupNumber) -> LeafGroups:
  if np.ndim(number) == 0:
    return LeafGroups((), (int(number),))
  axis = int(np.argmax(np.shape(number)))
  return LeafGroups((axis,), tuple(map(int, np.ravel(number))))

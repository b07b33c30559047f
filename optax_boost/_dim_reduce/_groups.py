"""The argument `groups`: which leaves and layers share a subspace."""

from typing import Any
from typing import TypeAlias

import jax
import numpy as np

from optax_boost import _base
from optax_boost._dim_reduce._linalg import Groups
from optax_boost._dim_reduce._linalg import LeafGroups
from optax_boost._trace import _groups
from optax_boost._trace import _layers

# A plan of `layer_groups`, the result of `layer_axes`, regular expressions, or None for one group.
Plan: TypeAlias = _groups.Groups | _layers.Layers | None


def check_groups(plan: Plan) -> None:
  """Checks the argument `groups`; warns if it describes layers, but no leaf holds many."""
  if not isinstance(plan, _layers.Layers):
    if plan is not None:
      _groups.count_groups(plan)
  elif not any(axes is not None and axes.layers for axes in plan.axes):
    _base.warn(
      "`groups` describes no leaf that holds many layers, so all leaves are one group. Pass regular"
      " expressions, one per group, or None for one group.",
      _base.NoEffectWarning,
    )


def find_groups(tree: Any, plan: Plan, method: str) -> Groups:
  """The groups of each leaf's layers.

  By a description of layers, layer i of all leaves is group i, and leaves without layers are the
  last group.
  """
  if isinstance(plan, _layers.Layers):
    leaves = _layers.leaves_of(tree, plan)
    last = max((leaf.layers for leaf in leaves if leaf.stacked), default=0)
    by_layer = [
      LeafGroups(leaf.stacked, tuple(range(leaf.layers)) if leaf.stacked else (last,))
      for leaf in leaves
    ]
    return Groups(tuple(by_layer), max(last + any(not leaf.stacked for leaf in leaves), 1))
  if plan is None:
    return Groups((LeafGroups((), (0,)),) * len(jax.tree.leaves(tree)), 1)
  numbers = _groups.layer_numbers(tree, plan, method)
  return Groups(tuple(map(_of_number, numbers)), _groups.count_groups(plan))


def _of_number(number: _groups.GroupNumber) -> LeafGroups:
  if np.ndim(number) == 0:
    return LeafGroups((), (int(number),))
  axis = int(np.argmax(np.shape(number)))
  return LeafGroups((axis,), tuple(map(int, np.ravel(number))))

"""Tells from the states before and after a call whether it made a step or left its batch out.

The classes of this package's states declare which fields tell this: `outcome` and `skips`
(:mod:`optax_boost._form._protocol`). The states of ``optax.MultiSteps``, ``optax.apply_if_finite``
and ``optax.partition`` are also read.
"""

from collections.abc import Hashable
import functools
import operator

import jax
import numpy as np
import optax

from optax_boost._form import _protocol
from optax_boost._foundation import _trees, _types


def made_step(before: optax.OptState, after: optax.OptState) -> _types.Condition:
  """Returns whether the call that led from state `before` to state `after` made a step.

  A wrapper's state tells this for all transformations inside. If no state tells, returns True.
  """

  def tells(node: _types.Tree) -> bool:
    optax_states = optax.PartitionState | optax.MultiStepsState | optax.ApplyIfFiniteState
    return isinstance(node, optax_states) or bool(_protocol.declared(node, "outcome"))

  made: _types.Condition = np.bool_(True)
  old_nodes = jax.tree.leaves(before, is_leaf=tells)
  new_nodes = jax.tree.leaves(after, is_leaf=tells)
  for old, new in zip(old_nodes, new_nodes, strict=True):
    if isinstance(new, optax.PartitionState):
      made = made & _part_made_step(old.inner_states, new.inner_states)
    elif isinstance(new, optax.MultiStepsState):
      emitted = new.gradient_step != old.gradient_step
      made = made & emitted & made_step(old.inner_opt_state, new.inner_opt_state)
    elif isinstance(new, optax.ApplyIfFiniteState):
      made = made & new.last_finite & made_step(old.inner_state, new.inner_state)
    elif tells(new):
      (field,) = _protocol.declared(new, "outcome")
      made = made & getattr(new, field)
  return made


def _part_made_step(
  before: dict[Hashable, optax.OptState], after: dict[Hashable, optax.OptState]
) -> _types.Condition:
  """Returns whether any of the transformations that ``optax.partition`` holds made a step."""
  inner = {key: getattr(part, "inner_state", part) for key, part in after.items()}
  # `optax.set_to_zero` moves no params, so its part does not count. Its state is an EmptyState,
  # while the states of `optax.sgd` and of other chains are tuples.
  moving = [key for key in after if not isinstance(inner[key], optax.EmptyState)]
  parts_made_step = [made_step(before[key], after[key]) for key in moving or after]
  return functools.reduce(operator.or_, parts_made_step, np.bool_(False))


def left_out(before: optax.OptState, after: optax.OptState) -> _types.BoolScalar | None:
  """Returns whether the call that led from state `before` to state `after` left its batch out.

  Such a call skipped its step or dropped its micro-batch. Returns None if no state counts this.
  """
  optax_states = optax.MultiStepsState | optax.ApplyIfFiniteState

  def counting(state: optax.OptState) -> list[optax.OptState]:
    return [
      node
      for node in _trees.nodes(state)
      if isinstance(node, optax_states) or _protocol.declared(node, "skips")
    ]

  flags = []
  for old, new in zip(counting(before), counting(after), strict=True):
    if isinstance(new, optax.MultiStepsState):
      # `should_skip` is what optax's `skip_not_finite` or `skip_large_updates` decided. The
      # micro-batch was left out only if, in addition, neither `mini_step` nor `gradient_step` has
      # changed.
      if isinstance(new.skip_state, dict) and "should_skip" in new.skip_state:
        counts = zip(old[:2], new[:2], strict=True)
        unmoved = functools.reduce(operator.and_, [x == y for x, y in counts])
        flags.append(new.skip_state["should_skip"] & unmoved)
    elif isinstance(new, optax.ApplyIfFiniteState):
      flags.append(new.total_notfinite != old.total_notfinite)
    else:
      skips = _protocol.declared(new, "skips")
      flags += [getattr(new, name) != getattr(old, name) for name in skips]
  return functools.reduce(operator.or_, flags) if flags else None

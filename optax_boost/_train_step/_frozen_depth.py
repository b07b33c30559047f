"""Knows on the host how many groups of layers the next step freezes: a program for each number."""

import weakref

import jax
import optax

from optax_boost._step import _slots, _state


class DepthReader:
  """Tells how many groups of layers the next step of an optimizer freezes.

  The schedule is a table on the host, and the number of steps made is on the device, since a step
  may be skipped. To read it, the host must wait until the previous step has ended. So the reader
  reads it only when the table may have changed: a skipped step only delays the change.
  """

  def __init__(self, tx: optax.GradientTransformation):
    step = _slots.step_of(tx)
    self._schedule = step.freezing.schedule if step is not None and step.freezing else None
    # The `count` that the last step returned, and for how many steps the number stays after it.
    self._last: tuple[weakref.ref[jax.Array], int, int] | None = None

  def read(self, opt_state: optax.OptState) -> tuple[int | None, int]:
    """Returns how many groups the next step freezes, and for how many steps the number stays.

    Returns ``(None, 0)`` if no groups freeze, if the arrays are traced or abstract, or for the
    state of another transformation, which the step refuses.
    """
    if self._schedule is None or not isinstance(opt_state, _state.StepState):
      return None, 0
    (count,) = jax.tree.leaves(opt_state.count)
    if isinstance(count, jax.core.Tracer | jax.ShapeDtypeStruct):
      return None, 0
    if self._last is not None and self._last[0]() is count and self._last[2] > 0:
      return self._last[1:]
    made = int(count)
    return int(self._schedule.frozen_groups(made)), self._schedule.frozen_for(made)

  def remember(self, opt_state: optax.OptState, depth: int | None, steps: int) -> None:
    """Remembers a state that a step returned; `depth` and `steps` are what `read` returned."""
    if depth is not None:
      (count,) = jax.tree.leaves(opt_state.count)
      self._last = weakref.ref(count), depth, steps - 1

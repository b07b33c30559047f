""":class:`StepState`: the state of all wrappers around an optimizer."""

from typing import Any, NamedTuple

import optax

from optax_boost._form import _protocol
from optax_boost._foundation import _types


@_protocol.declares(metrics=("notfinite_count",), skips=("notfinite_count",))
class LeftOutState(NamedTuple):
  """Which batches were left out.

  Attributes:
    notfinite_count: scalar int32, batches that were left out, or steps that were not made, since a
      gradient, weight, sum, or (with ``check="updates"``) result was not finite.
  """

  notfinite_count: _types.IntScalar


class Window(NamedTuple):
  """The window of micro-batches after a micro-batch.

  Attributes:
    is_due: whether the optimizer's step is due.
    is_full: whether the window has ended.
    weight_sum: the sum of the window's weights on this device.
    divisor: the sum of the weights, averaged over the devices.
    value_sum: the weighted sum of the window's losses, if ``update`` got them.
    state: the state of :func:`accumulate`, whose accumulator is not yet emptied.
  """

  is_due: _types.Condition
  is_full: Any = None
  weight_sum: Any = None
  divisor: Any = None
  value_sum: _types.FloatScalar | None = None
  state: Any = None


@_protocol.declares(outcome=("made",))
class StepState(NamedTuple):
  """State of a step. The state of a slot is None if its wrapper is not used.

  A field that one slot's state has is an attribute of this state, too: ``state.loss_scale``.

  Attributes:
    inner_state: the optimizer's state.
    made: scalar bool, whether the last call made a step.
    count: scalar int32, the number of steps made.
    left_out: which batches were left out; None if no wrapper leaves batches out.
    accumulation: the state of :func:`accumulate`.
    scaling: the state of :func:`dynamic_loss_scale`.
    precision: the state of :func:`master_weights` or :func:`stochastic_rounding`.
    averaging: the state of :func:`average_params`.
    spikes: the state of :func:`skip_spikes`.
    freezing: the state of :func:`freeze_layers`.
  """

  inner_state: optax.OptState
  made: _types.BoolScalar
  count: _types.IntScalar  # type: ignore[assignment]  # tuples have a method of this name
  left_out: Any = None
  accumulation: Any = None
  scaling: Any = None
  precision: Any = None
  averaging: Any = None
  spikes: Any = None
  freezing: Any = None

  def __getattr__(self, name: str) -> Any:
    """Returns the field `name` of the slot that has it."""
    states = {slot: getattr(self, slot) for slot in self._fields[3:]}
    slots = [slot for slot, state in states.items() if name in getattr(state, "_fields", ())]
    if len(slots) == 1:
      return getattr(states[slots[0]], name)
    raise AttributeError(
      f"This step's state has no `{name}`. Its `inner_state` is the state of the optimizer inside"
      " of the wrappers: pass it to functions of optax that read one optimizer's state."
      if not slots
      else f"`{name}` is a field of several states: {' and '.join(slots)}. Read one of them, such"
      f" as `state.{slots[0]}.{name}`."
    )


# The fields of a state that a wrapper fills.
SLOTS = StepState._fields[StepState._fields.index("accumulation") :]

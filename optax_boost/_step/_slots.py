""":class:`Step`: an optimizer and the slots around it."""

import dataclasses
from typing import Any

import optax

from optax_boost._form import _form
from optax_boost._foundation import _types


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
  """What a step does. A slot is None if its wrapper is not used.

  Attributes:
    inner: the optimizer.
    accumulation: windows of micro-batches.
    scaling: the loss scale.
    precision: float32 masters, or stochastic rounding.
    averaging: the average of the params.
    layer_rates: a factor for each group of layers.
    spikes: which gradient norms are spikes.
    freezing: which groups of layers are frozen.
    axis_name: the mesh axes over which gradients differ.
  """

  inner: optax.GradientTransformationExtraArgs
  accumulation: Any = None
  scaling: Any = None
  precision: Any = None
  averaging: Any = None
  layer_rates: Any = None
  spikes: Any = None
  freezing: Any = None
  axis_name: _types.AxisName | None = None

  @property
  def slots(self) -> dict[str, Any]:
    """Returns the filled slots by name."""
    names = [f.name for f in dataclasses.fields(self) if f.name not in ("inner", "axis_name")]
    return {name: slot for name in names if (slot := getattr(self, name)) is not None}

  @property
  def method(self) -> str:
    """Returns the name of the wrapper for error messages that concern no wrapper in particular."""
    return next(iter(self.slots.values())).method

  @property
  def checks_gradients(self) -> bool:
    """Returns whether a batch is left out if its gradient is not finite."""
    slots = self.scaling, self.precision and not self.precision.checks_updates, self.accumulation
    drops = self.accumulation and self.accumulation.not_finite == "drop"
    return bool(slots[0] or slots[1] or drops)

  @property
  def checks_updates(self) -> bool:
    """Returns whether a step is not made if its result would not be finite."""
    return any(slot and slot.checks_updates for slot in (self.scaling, self.precision))

  @property
  def leaves_out(self) -> bool:
    """Returns whether a batch may be left out."""
    return any((self.accumulation, self.scaling, self.precision, self.spikes))


def step_of(tx: optax.GradientTransformation) -> Step | None:
  """Returns the step of a transformation that a wrapper has made; None for any other."""
  form = _form.form_of(tx.update)
  return None if form is None else form.step

""":class:`Step`: an optimizer and the slots around it."""

import dataclasses
from typing import TYPE_CHECKING, Any

import optax

from optax_boost._form import _form
from optax_boost._foundation import _types

if TYPE_CHECKING:  # the modules of the slots import this one
  from optax_boost._step import (
    _accumulation,
    _average_params,
    _layerwise_decay,
    _skip_spikes,
  )
  from optax_boost._step._freezing import _freeze_layers
  from optax_boost._step._precision import _float32_optimizer, _loss_scale


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
  """What a step does. A slot is None if its wrapper is not used.

  Attributes:
    inner: the optimizer.
    axis_name: the mesh axes over which gradients differ.
    accumulation: windows of micro-batches.
    scaling: the loss scale.
    precision: float32 masters, or stochastic rounding.
    averaging: the average of the params.
    layer_rates: a factor for each group of layers.
    spikes: which gradient norms are spikes.
    freezing: which groups of layers are frozen.
  """

  inner: optax.GradientTransformationExtraArgs
  axis_name: _types.AxisName | None = None
  accumulation: "_accumulation.Accumulate | None" = None
  scaling: "_loss_scale.LossScale | None" = None
  precision: "_float32_optimizer.Float32Optimizer | None" = None
  averaging: "_average_params.AverageParams | None" = None
  layer_rates: "_layerwise_decay.LayerwiseDecay | None" = None
  spikes: "_skip_spikes.SkipSpikes | None" = None
  freezing: "_freeze_layers.FreezeLayers | None" = None

  @property
  def slots(self) -> dict[str, Any]:
    """Returns the filled slots by name."""
    names = [field.name for field in dataclasses.fields(self)][2:]
    return {name: slot for name in names if (slot := getattr(self, name)) is not None}

  @property
  def method(self) -> str:
    """Returns the name of the wrapper for error messages that concern no wrapper in particular."""
    return next(iter(self.slots.values())).method

  @property
  def checks_gradients(self) -> bool:
    """Returns whether a batch is left out if its gradient is not finite."""
    rounds = self.precision and self.precision.check == "gradients"
    drops = self.accumulation and self.accumulation.not_finite in ("drop", "restart")
    return bool(self.scaling or rounds or drops)

  @property
  def adds_first(self) -> bool:
    """Returns whether a micro-batch may be added to its window before its gradient is judged."""
    window = self.accumulation
    if window is None or window.is_off:
      return False
    return window.restarts or not (self.checks_gradients or self.spikes)

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

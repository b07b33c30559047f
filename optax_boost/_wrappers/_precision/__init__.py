"""The mixed-precision stack: loss scaling, float32 master weights, stochastic rounding."""

from optax_boost._wrappers._precision._loss_scale import (
  DynamicLossScaleState as DynamicLossScaleState,
  dynamic_loss_scale as dynamic_loss_scale,
)
from optax_boost._wrappers._precision._master_weights import (
  MasterWeightsState as MasterWeightsState,
  master_weights as master_weights,
)
from optax_boost._wrappers._precision._stochastic_rounding import (
  StochasticRoundingState as StochasticRoundingState,
  stochastic_rounding as stochastic_rounding,
)

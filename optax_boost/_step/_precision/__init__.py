"""Mixed precision: loss scaling, float32 master weights, stochastic rounding.

Modules:

  _loss_scale           the loss scale: which steps it skips, and when it grows or shrinks
  _rounding             rounds to nearest or stochastically; draws the random numbers
  _float32_optimizer    the wrapper behind the next two modules: steps in float32
  _master_weights       the arguments of ``master_weights``, and its state
  _stochastic_rounding  the arguments of ``stochastic_rounding``, and its state
"""

from optax_boost._step._precision._loss_scale import (
  DynamicLossScaleState as DynamicLossScaleState,
  dynamic_loss_scale as dynamic_loss_scale,
)
from optax_boost._step._precision._master_weights import (
  MasterWeightsState as MasterWeightsState,
  master_weights as master_weights,
)
from optax_boost._step._precision._stochastic_rounding import (
  StochasticRoundingState as StochasticRoundingState,
  stochastic_rounding as stochastic_rounding,
)

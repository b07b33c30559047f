"""For Flax Linen modules: train steps, levels, fewer BatchNorms, the normalized head.

Each function takes the module, and after it the arguments of the plain function in their order,
with variables in the place of params. Needs the extra ``flax``.
"""

from optax_boost.linen._adapter import BoundModel
from optax_boost.linen._adapter import split_loss
from optax_boost.linen._auto import auto_boost
from optax_boost.linen._batch_stats import estimate_batch_stats
from optax_boost.linen._groups import layer_axes
from optax_boost.linen._groups import layer_groups
from optax_boost.linen._head import NormalizedDense
from optax_boost.linen._less_bn import less_bn
from optax_boost.linen._train_step import TrainStep
from optax_boost.linen._train_step import make_train_step
from optax_boost.linen._train_step import variables

__all__ = [
  "BoundModel",
  "NormalizedDense",
  "TrainStep",
  "auto_boost",
  "estimate_batch_stats",
  "layer_axes",
  "layer_groups",
  "less_bn",
  "make_train_step",
  "split_loss",
  "variables",
]

"""For Flax NNX models: train steps, levels, fewer BatchNorms, the normalized head.

Each function takes the arguments of the plain function in their order, with the model in the place
of params. Needs the extra ``flax``.
"""

from optax_boost.nnx._adapter import split_loss
from optax_boost.nnx._auto import auto_boost
from optax_boost.nnx._batch_stats import averaged_model
from optax_boost.nnx._batch_stats import estimate_batch_stats
from optax_boost.nnx._groups import layer_axes
from optax_boost.nnx._groups import layer_groups
from optax_boost.nnx._head import NormalizedDense
from optax_boost.nnx._less_bn import less_bn
from optax_boost.nnx._train_step import TrainStep
from optax_boost.nnx._train_step import make_train_step

__all__ = [
  "NormalizedDense",
  "TrainStep",
  "auto_boost",
  "averaged_model",
  "estimate_batch_stats",
  "layer_axes",
  "layer_groups",
  "less_bn",
  "make_train_step",
  "split_loss",
]

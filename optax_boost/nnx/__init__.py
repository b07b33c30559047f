"""What Flax NNX models need: train steps, fewer BatchNorms, the normalized head.

Needs the extra ``flax``.
"""

from optax_boost.nnx._head import NormalizedDense
from optax_boost.nnx._train_step import TrainStep
from optax_boost.nnx._train_step import freeze_groups
from optax_boost.nnx._train_step import make_train_step

__all__ = [
  "NormalizedDense",
  "TrainStep",
  "freeze_groups",
  "make_train_step",
]

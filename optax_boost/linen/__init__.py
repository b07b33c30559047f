"""What Flax Linen modules need: train steps, fewer BatchNorms, the normalized head.

Needs the extra ``flax``.
"""

from optax_boost.linen._head import NormalizedDense
from optax_boost.linen._train_step import BoundModel
from optax_boost.linen._train_step import TrainStep
from optax_boost.linen._train_step import freeze_groups
from optax_boost.linen._train_step import make_train_step
from optax_boost.linen._train_step import variables

__all__ = [
  "BoundModel",
  "NormalizedDense",
  "TrainStep",
  "freeze_groups",
  "make_train_step",
  "variables",
]

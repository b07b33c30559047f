"""For Flax NNX models: pure losses, the train step in place, fewer BatchNorms, the normalized head.

Needs the extra ``flax``.
"""

# ruff: noqa: E402 (an error without Flax comes before the imports that need it)
from optax_boost._foundation import _extras

_extras.require_flax(__name__)

from optax_boost.nnx._averaged_model import averaged_model
from optax_boost.nnx._batch_stats import estimate_batch_stats
from optax_boost.nnx._less_bn import less_bn
from optax_boost.nnx._loss import split_loss
from optax_boost.nnx._normalized_dense import NormalizedDense
from optax_boost.nnx._train_step import make_train_step

__all__ = [
  "NormalizedDense",
  "averaged_model",
  "estimate_batch_stats",
  "less_bn",
  "make_train_step",
  "split_loss",
]

"""The train step and functions for Flax NNX models; needs the extra ``flax``.

The modules, each of which imports only modules above it:

  _model             splits models into structure and arrays, and merges them
  _loss              ``split_loss``: the loss of a model as a pure function
  _averaged_model    ``averaged_model``: a copy of a model with averaged params
  _batch_stats       ``estimate_batch_stats``: BatchNorm statistics for given params
  _normalized_dense  ``NormalizedDense``: a dense layer with normalized inputs and kernel
  _less_bn           ``less_bn``: a copy of a model with fewer BatchNorms
  _make_optimizer    ``make_optimizer``: an optimizer whose state is placed by a function
  _train_step        ``make_train_step``: a step that updates model and optimizer in place
"""

# ruff: noqa: E402 (an error without Flax comes before the imports that need it)
from optax_boost._foundation import _missing_package

_missing_package.require_flax(__name__)

from optax_boost.nnx._averaged_model import averaged_model
from optax_boost.nnx._batch_stats import estimate_batch_stats
from optax_boost.nnx._less_bn import less_bn
from optax_boost.nnx._loss import split_loss
from optax_boost.nnx._make_optimizer import make_optimizer
from optax_boost.nnx._normalized_dense import NormalizedDense
from optax_boost.nnx._train_step import make_train_step

__all__ = [
  "NormalizedDense",
  "averaged_model",
  "estimate_batch_stats",
  "less_bn",
  "make_optimizer",
  "make_train_step",
  "split_loss",
]

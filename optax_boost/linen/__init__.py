"""Functions for Flax Linen modules; needs the extra ``flax``.

The modules, each of which imports only modules above it:

  _module            a module with its variables, which a loss calls like a function
  _loss              ``split_loss``: the loss of a module as a pure function
  _batch_stats       ``estimate_batch_stats``: BatchNorm statistics for given params
  _normalized_dense  ``NormalizedDense``: a dense layer with normalized inputs and kernel
  _less_bn           ``less_bn``: a module with fewer BatchNorms
"""

# ruff: noqa: E402 (an error without Flax comes before the imports that need it)
from optax_boost._foundation import _missing_package

_missing_package.require_flax(__name__)

from optax_boost.linen._batch_stats import estimate_batch_stats
from optax_boost.linen._less_bn import less_bn
from optax_boost.linen._loss import split_loss
from optax_boost.linen._normalized_dense import NormalizedDense

__all__ = [
  "NormalizedDense",
  "estimate_batch_stats",
  "less_bn",
  "split_loss",
]

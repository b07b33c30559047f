"""For Flax Linen modules: pure losses, fewer BatchNorms, the normalized head.

Needs the extra ``flax``.
"""

# ruff: noqa: E402 (an error without Flax comes before the imports that need it)
from optax_boost._foundation import _extras

_extras.require_flax(__name__)

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

"""The statistics of BatchNorms, estimated in one pass over batches.

s_b   a BatchNorm's mean or variance in batch b, the mean over its uses in the forward pass
n_b   the batch's number of examples

s = sum_b n_b s_b / sum_b n_b
"""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from optax_boost import _base
from optax_boost import _full_gradient
from optax_boost import _tree
from optax_boost import _types

_METHOD = "estimate_batch_stats"
# Stands for a statistic that no call has computed.
UNREACHED = -jnp.inf


def add_use(mean: jax.Array, new: jax.Array, uses: jax.Array) -> jax.Array:
  """The mean over ``uses + 1`` uses of a statistic, from the mean over those before."""
  return jnp.where(uses > 0, mean + (new - mean) / (uses + 1), new)


def estimate(
  of_batch: jax.tree_util.Partial,
  statistics: _types.Tree,
  batches: Iterable[_types.Tree],
  weight_fn: _types.WeightFn | None,
) -> Any:
  """New statistics like the present ones, from ``of_batch(statistics, batch)`` of each batch."""
  if not jax.tree.leaves(statistics):
    _base.warn(f"`{_METHOD}` found no statistics of a BatchNorm.", _base.NoEffectWarning)
    return statistics
  estimated = _full_gradient.mean_over_batches(
    of_batch, statistics, batches, None, weight_fn, False, _METHOD, "batch statistics"
  )
  paths = _tree.leaf_paths(statistics)
  leaves = zip(paths, jax.tree.leaves(estimated), strict=True)
  idle = [path for path, leaf in leaves if jnp.any(leaf == UNREACHED)]
  if idle:
    _tree.warn_no_effect(
      f"`{_METHOD}` has reached no BatchNorm with the statistics {idle}: the call leaves it out.",
      paths,
    )

  def renew(old: jax.Array, new: jax.Array, path: str) -> jax.Array:
    return old if path in idle else new.astype(old.dtype)

  return _tree.map_with(renew, statistics, jax.tree.leaves(estimated), paths)

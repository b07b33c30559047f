"""Undoes what the forward pass has written if a wrapper leaves the batch out.

A wrapper leaves a batch out if it skips the step or drops the micro-batch. Before that, the forward
pass has written statistics, counts of random numbers and, in some layers, params. The train step
restores the old values, just as the wrapper keeps the params and the optimizer's state.
"""

import jax
import jax.numpy as jnp

from optax_boost._form import _finiteness
from optax_boost._foundation import _paths, _trees, _types


def skip_metrics(rejected: _types.BoolScalar | None, loss: _types.FloatScalar) -> _types.Metrics:
  """Returns two metrics: whether the batch was left out for its loss, or for its gradients."""
  if rejected is None:
    return {}
  finite = _finiteness.finite_entries(loss)
  return {
    "skipped/loss": (rejected & ~finite).astype(jnp.int32),
    "skipped/gradients": (rejected & finite).astype(jnp.int32),
  }


def keep_if_rejected(
  rejected: _types.BoolScalar | None, before: _types.Tree, after: _types.SameTree
) -> _types.SameTree:
  """Returns the tree `after` the step, or, if the batch was left out, with the leaves of `before`.

  The leaves are matched by path, since a loss may return other containers. A leaf that the forward
  pass has created stays.
  """
  if rejected is None:
    return after
  old_leaves = dict(zip(_paths.leaf_keys(before), jax.tree.leaves(before), strict=True))

  def keep(new: jax.Array, key: _types.KeyPath) -> jax.Array:
    old = old_leaves.get(key)
    if old is None or old is new or jnp.shape(old) != jnp.shape(new):
      return new
    if jnp.issubdtype(jnp.result_type(new), jax.dtypes.prng_key):
      return jnp.where(rejected, old, new)
    return jnp.where(rejected, jnp.asarray(old, jnp.result_type(new)), new)

  return _trees.map_with(keep, after, _paths.leaf_keys(after))

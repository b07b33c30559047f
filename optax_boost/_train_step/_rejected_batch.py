"""Restores statistics if a wrapper leaves a batch out.

A wrapper leaves a batch out if it skips the step or drops the micro-batch. The wrapper itself keeps
the params and the optimizer's state unchanged. But before the wrapper decides, the forward pass has
already changed statistics, counts of random numbers and, in some layers, params.
:func:`keep_if_rejected` restores these.
"""

import jax
import jax.numpy as jnp

from optax_boost._foundation import _paths, _trees, _types


def keep_if_rejected(
  rejected: _types.BoolScalar | None, before: _types.Tree, after: _types.SameTree
) -> _types.SameTree:
  """Returns a tree after a step; its leaves have their old values if the batch was left out.

  `before` and `after` are the tree before and after the step. `rejected` says whether the batch was
  left out, and is None if no wrapper can leave batches out. Leaves are matched by path, since a
  loss may return other containers. A leaf that is new, or has a new shape, is never replaced.
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

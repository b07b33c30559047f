"""One verdict for everything that a step writes.

A wrapper may leave a batch out: a step that is not made, or a micro-batch that is dropped. Its
forward pass has written statistics, counts of random numbers and, with some layers, params by then.
All of these are kept as they were before the step, like the params and the optimizer's state.
"""

from typing import Any

import jax
import jax.numpy as jnp

from optax_boost._form import _finiteness
from optax_boost._foundation import _paths, _trees, _types


def skip_metrics(rejected: Any, loss: jax.Array) -> _types.Metrics:
  """Whether the batch was left out, and why: for the loss, or for its gradients alone."""
  if rejected is None:
    return {}
  finite = _finiteness.finite_entries(loss)
  return {
    "skipped/loss": (rejected & ~finite).astype(jnp.int32),
    "skipped/gradients": (rejected & finite).astype(jnp.int32),
  }


def keep_if_rejected(rejected: Any, before: _types.Tree, after: _types.Tree) -> Any:
  """The tree after the step, or before it if the batch was left out.

  By path: a loss may return other containers than it was given, and variables that it has created,
  which are kept.
  """
  if rejected is None:
    return after
  old_leaves = dict(zip(_paths.leaf_keys(before), jax.tree.leaves(before), strict=True))

  def keep(new: Any, key: _types.KeyPath) -> Any:
    old = old_leaves.get(key)
    if old is None or old is new or jnp.shape(old) != jnp.shape(new):
      return new
    if jnp.issubdtype(jnp.result_type(new), jax.dtypes.prng_key):
      return jnp.where(rejected, old, new)
    return jnp.where(rejected, jnp.asarray(old, jnp.result_type(new)), new)

  return _trees.map_with(keep, after, _paths.leaf_keys(after))

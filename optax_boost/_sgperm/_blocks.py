"""Kernels on large leaves, some of their weight vectors at a time.

A kernel takes scratch memory of ten to twenty times its weights. That is much for a large leaf, and
nothing is gained by more vectors side by side than keep a device busy: on a CPU, what fits into its
cache is fastest, three times as fast as all of 2048 x 2048 weights at once.
"""

from collections.abc import Callable
from collections.abc import Sequence

import jax
import jax.numpy as jnp

# Weights that are worked on at once, on a CPU and on accelerators (there a guess, to bound memory).
_WEIGHTS, _MANY_WEIGHTS = 2**18, 2**22


def in_blocks(
  kernel: Callable[..., jax.Array], columns: Sequence[jax.Array], dtype: jax.typing.DTypeLike
) -> jax.Array:
  """Applies a kernel that treats each weight vector for itself.

  On several devices it is applied at once: the vectors may lie on all of them.

  Args:
    kernel: from arrays like `columns`, of any number of vectors, to an array like the first.
    columns: their last axis runs over the vectors; the first is (n, vectors).
    dtype: of the result.

  Returns:
    (n, vectors).
  """
  n, vectors = columns[0].shape
  most = _WEIGHTS if jax.default_backend() == "cpu" else _MANY_WEIGHTS
  width = max(1, most // max(1, n))
  if vectors <= width or jax.device_count() > 1:
    return kernel(*columns)
  blocks = -(-vectors // width)
  width = -(-vectors // blocks)

  def one(k: jax.Array, done: jax.Array) -> jax.Array:
    # The last block goes back into the one before it, where it finds the same.
    start = jnp.minimum(k * width, vectors - width)
    parts = [jax.lax.dynamic_slice_in_dim(x, start, width, -1) for x in columns]
    return jax.lax.dynamic_update_slice_in_dim(done, kernel(*parts), start, -1)

  return jax.lax.fori_loop(0, blocks, one, jnp.zeros((n, vectors), dtype))

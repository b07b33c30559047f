"""The tree of adaptive sums on Gram matrices: each gradient's coefficient in the result."""

import functools

import jax
import jax.numpy as jnp

# A node counts as zero where its squared norm is below this part of its summands' squared norms:
# below it, it consists of the Gram matrix's rounding errors.
_CANCELLED = 2.0**-18

_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST, optimize="optimal")


def coefficients(gram: jax.Array) -> jax.Array:
  """The coefficients ``(G, N)`` that follow from Gram matrices ``(G, N, N)``.

  NaN for groups whose Gram matrix is not finite.
  """
  inner = functools.partial(_einsum, "gki,gij,gkj->gk")
  squares = jnp.diagonal(gram, axis1=1, axis2=2)
  nodes = jnp.broadcast_to(jnp.eye(gram.shape[-1], dtype=gram.dtype), gram.shape)
  while nodes.shape[1] > 1:
    even = nodes.shape[1] // 2 * 2
    a, b = nodes[:, 0:even:2], nodes[:, 1:even:2]
    dot = inner(a, gram, b)

    def factor(x: jax.Array, dot: jax.Array = dot) -> jax.Array:
      square = inner(x, gram, x)
      usable = square > _CANCELLED * _einsum("gki,gi->gk", jnp.square(x), squares)
      return 1 - jnp.where(usable, dot / jnp.where(usable, 2 * square, 1), 0)

    pairs = factor(a)[..., None] * a + factor(b)[..., None] * b
    nodes = jnp.concatenate([pairs, nodes[:, even:]], axis=1)
  finite = jnp.all(jnp.isfinite(gram), axis=(1, 2))
  return jnp.where(finite[:, None], nodes[:, 0], jnp.nan)


def orthogonality(gram: jax.Array, weights: jax.Array, units: jax.Array) -> jax.Array:
  """The result's squared norm over the gradients' summed ones, over all groups.

  `units` ``(G,)`` are the powers of two by which the gradients were divided.
  """
  shares = jnp.square(units / jnp.max(units)).astype(gram.dtype)
  after = jnp.sum(shares * _einsum("gi,gij,gj->g", weights, gram, weights))
  before = jnp.sum(shares * jnp.trace(gram, axis1=1, axis2=2))
  ratio = after / jnp.where(before == 0, 1, before)
  return jnp.where(before == 0, 1, ratio).astype(jnp.float32)

"""The tree of adaptive sums on Gram matrices: the coefficients of all gradients in the result."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from optax_boost._adasum import _double
from optax_boost._adasum import _scales

# A node counts as zero where it cancels to less than this part of its summands: below it, norms are
# those of rounding errors.
_CANCELLED = 2.0**-14


class Weights(NamedTuple):
  """The coefficients that follow from the Gram matrices."""

  coefficients: jax.Array  # (G, N), of the scaled gradients y
  steps: jax.Array  # (G,), the result is 2**(12 steps) times the combination of them
  orthogonality: jax.Array  # as in AdasumState
  notfinite: jax.Array  # scalar bool, whether a Gram matrix has entries that are not finite


def weigh(gram: jax.Array, steps: jax.Array) -> Weights:
  """Runs the tree on Gram matrices ``(2, G, N, N)`` of gradients with scales ``(N, G)``.

  Coefficients are NaN for groups whose Gram matrix is not finite.
  """
  dtype, replicas = gram.dtype, gram.shape[-1]
  # A zero gradient is neutral: with one more, no node is without a partner.
  size = replicas + replicas % 2
  padding = [(0, 0), (0, size - replicas), (0, size - replicas)]
  products = _double.fast_two_sum(*(jnp.pad(word, padding) for word in gram))
  nodes = jnp.broadcast_to(_double.words(jnp.eye(size, dtype=dtype))[:, None], products.shape)
  scales = jnp.pad(steps.T, padding[:2], constant_values=-_scales.LARGEST_STEP)
  top = jnp.max(scales)
  lengths = _diagonal(products)[0]
  norms = jnp.sqrt(lengths)
  before = jnp.sum(lengths * _scales.power(scales - top, dtype) ** 2)

  # A loop over levels of one size, filled up with zeros: unrolled it would compile for seconds.
  def level(_: int, tree: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    rows, scales = tree  # of each node its products and, behind them, its coefficients
    summed = jnp.sum(jnp.abs(rows[0, :, :, size:]) * norms[:, None, :], axis=2)
    factors, largest = _pair_factors(rows[..., :size], _CANCELLED * summed, scales)
    rows = _add_pairs(rows, factors)
    products = _add_pairs(jnp.swapaxes(rows[..., :size], 2, 3), factors)
    unused = jnp.full_like(largest, -_scales.LARGEST_STEP)
    rows = jnp.concatenate([products, rows[..., size:]], axis=3)
    return rows, jnp.concatenate([largest, unused], axis=1)

  tree = jnp.concatenate([products, nodes], axis=3), scales
  rows, scales = jax.lax.fori_loop(0, (replicas - 1).bit_length(), level, tree)
  root, scale = rows[:, :, 0], scales[:, 0]
  after = jnp.sum(root[0, :, 0] * _scales.power(scale - top, dtype) ** 2)
  finite = jnp.all(jnp.isfinite(gram), axis=(0, 2, 3))
  return Weights(
    coefficients=jnp.where(finite[:, None], root[0, :, size : size + replicas], jnp.nan),
    steps=scale,
    orthogonality=jnp.where(before == 0, 1, after / before),
    notfinite=~jnp.all(finite),
  )


def _pair_factors(
  products: jax.Array, least: jax.Array, steps: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """The factors ``(2, G, K)`` of a level's nodes in their pairs' sums, and the pairs' scales.

  Of a pair with a member whose norm is at most its `least` both factors are m_A / m.
  """
  square, steps = (x.reshape(*x.shape[:-1], -1, 2) for x in (_diagonal(products), steps))
  product = _diagonal(products[..., 0::2, 1::2])[..., None]
  largest = jnp.max(steps, axis=-1, keepdims=True)
  own = _scales.power(steps - largest, products.dtype)
  usable = jnp.all(square[0] > least.reshape(own.shape) ** 2, axis=-1, keepdims=True)
  ratio = _double.divide(
    jnp.where(usable[None], product * own[None, ..., ::-1], 0),
    jnp.where(usable[None], 2 * square, 1),
  )
  factors = _double.add(_double.words(own), -ratio)
  return factors.reshape(*factors.shape[:2], -1), largest[..., 0]


def _add_pairs(x: jax.Array, factors: jax.Array) -> jax.Array:
  """Multiplies ``(2, G, K, ...)`` by factors ``(2, G, K)``, adds up pairs, and appends zeros."""
  scaled = _double.multiply(factors[..., None], x)
  pairs = _double.add(scaled[:, :, 0::2], scaled[:, :, 1::2])
  return jnp.concatenate([pairs, jnp.zeros_like(pairs)], axis=2)


def _diagonal(x: jax.Array) -> jax.Array:
  return jnp.diagonal(x, axis1=-2, axis2=-1)

r"""The methods "pairs" and "rank" of `sgperm`, which are faster than the paper's method "exact".

In a weight vector w of n entries with momentum m and value range R:

  epsilon = R (alpha + 1 / n)
  t       = w - epsilon m / max |m|        the target: the weight that a position should get

  pairs   In each of 32 rounds, for a random c, positions i and j = (c - i) mod n swap their weights
          if this brings them into the order of the targets: if (w_j - w_i) (t_j - t_i) < 0. The
          condition is the same for i and j, so a round is a permutation.
  rank    The position with the r-th smallest target gets the r-th smallest weight.

A swap lowers sum |w - t|^2 by -2 (w_j - w_i) (t_j - t_i). "rank" reaches the minimum of this sum
over all permutations (the rearrangement inequality), and "pairs" approaches the minimum.
"""

import jax
import jax.numpy as jnp

from optax_boost._foundation import _arrays
from optax_boost._methods._sgperm import _sorting

# The number of rounds of "pairs"; more rounds hardly improve the order.
ROUNDS = 32
# Fewest bits for a weight in a packed integer. With fewer, too many weights would become equal.
_LEAST_BITS = 16


def targets(weights: jax.Array, momentum: jax.Array, alpha: jax.Array) -> jax.Array:
  """Returns the targets t in at least float32; a momentum of NaN counts as zero."""
  dtype = _arrays.accumulator_dtype(weights.dtype)
  bracket = alpha.astype(dtype) + 1 / len(weights)
  spread = (jnp.max(weights, 0, keepdims=True) - jnp.min(weights, 0, keepdims=True)).astype(dtype)
  momentum = jnp.where(jnp.isnan(momentum), 0, momentum).astype(dtype)
  largest = jnp.max(jnp.abs(momentum), axis=0, keepdims=True)
  # `where` in the divisor avoids a division by zero in vectors whose momentum is zero.
  epsilon = jnp.where(largest > 0, spread * bracket, 0)
  return weights.astype(dtype) - epsilon * (momentum / jnp.where(largest > 0, largest, 1))


def pairs(weights: jax.Array, target: jax.Array, bits: jax.Array) -> jax.Array:
  """Runs the rounds of "pairs"; returns for each position the position whose weight it receives.

  `target` holds the targets t. `bits` has a random number for each round.
  """
  n = weights.shape[0]
  shifts = (bits % n).astype(jnp.int32)
  place_bits = (n - 1).bit_length()
  places = jax.lax.broadcasted_iota(jnp.int32, weights.shape, 0)

  def swap(k: jax.Array, moved: list[jax.Array]) -> list[jax.Array]:
    def partner(x: jax.Array) -> jax.Array:
      # Returns x[(c - i) mod n]. A gather would be slow on accelerators and on sharded arrays.
      return jnp.roll(jnp.flip(x, 0), shifts[k] + 1, 0)

    partners, partner_target = [partner(x) for x in moved], partner(target)
    weight, partner_weight = moved[0], partners[0]
    # Signs are compared, since a product of differences may underflow.
    swaps = (partner_weight > weight) & (partner_target < target)
    swaps |= (partner_weight < weight) & (partner_target > target)
    return [jnp.where(swaps, y, x) for x, y in zip(moved, partners, strict=True)]

  # Most of a round's time goes into moving arrays. So a weight and the place that it comes from are
  # packed into one integer, unless the place leaves fewer than `_LEAST_BITS` bits for the weight.
  if 32 - place_bits < _LEAST_BITS:
    return jax.lax.fori_loop(0, len(bits), swap, [weights, places])[1]
  packed = (_levels(weights, 32 - place_bits) << place_bits) | places
  (packed,) = jax.lax.fori_loop(0, len(bits), swap, [packed])
  return packed & ((1 << place_bits) - 1)


def _levels(weights: jax.Array, bits: int) -> jax.Array:
  """Returns each weight rounded to one of 2^bits equally spaced levels, as a signed integer."""
  # Levels are computed in float32, in which integers of up to 24 bits are exact.
  bits = min(bits, 24)
  dtype = _arrays.accumulator_dtype(weights.dtype)
  low = jnp.min(weights, axis=0, keepdims=True).astype(dtype)
  high = jnp.max(weights, axis=0, keepdims=True).astype(dtype)
  share = (weights.astype(dtype) - low) / jnp.where(high > low, high - low, 1)
  level = jnp.nan_to_num(share * (2**bits - 1))
  return level.astype(jnp.int32) - 2 ** (bits - 1)


def ranks(x: jax.Array) -> jax.Array:
  """Returns each entry's rank in its column; equal entries keep their order. NaN is not allowed."""
  return _sorting.inverse(_sorting.argsort(x))

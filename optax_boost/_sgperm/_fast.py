r"""Two faster ways to permute towards a target; not the paper's.

In a weight vector w of n entries with momentum m and value range R:

  epsilon = R (alpha + 1 / n)
  t       = w - epsilon m / max |m|        where each position would like its weight to be

  pairs   K rounds: with c drawn, positions i and (c - i) mod n swap their weights if that brings
          them into the order of their targets, (w_j - w_i) (t_j - t_i) < 0. Both ends see the same
          condition, so that a round is a permutation.
  rank    the position with the r-th smallest target gets the r-th smallest weight

Each swap, and so each round, lowers sum |w - t|^2: by -2 (w_j - w_i) (t_j - t_i). The assignment of
``rank`` is its minimum over all permutations (the rearrangement inequality); ``pairs`` tends to it.
"""

import jax
import jax.numpy as jnp

from optax_boost import _tree
from optax_boost._sgperm import _sorting


@jax.jit
def targets(
  weights: jax.Array, wishes: jax.Array, ranges: jax.Array, bracket: jax.Array
) -> jax.Array:
  """Where each position would like its weight to be.

  Args:
    weights: (n, vectors).
    wishes: the momentum, of the same shape; NaN counts as zero.
    ranges: (1, vectors).
    bracket: ``alpha + 1 / n``.

  Returns:
    (n, vectors), in at least float32.
  """
  dtype = _tree.accumulator_dtype(weights.dtype)
  wishes = jnp.where(jnp.isnan(wishes), 0, wishes).astype(dtype)
  largest = jnp.max(jnp.abs(wishes), axis=0, keepdims=True)
  # The inner `where` keeps vectors without any wish from dividing by zero.
  epsilon = jnp.where(largest > 0, ranges.astype(dtype) * bracket.astype(dtype), 0)
  return weights.astype(dtype) - epsilon * (wishes / jnp.where(largest > 0, largest, 1))


@jax.jit
def pairs(weights: jax.Array, flat: jax.Array, target: jax.Array, bits: jax.Array) -> jax.Array:
  """Swaps pairs of weights towards their targets.

  Args:
    weights: (n, vectors).
    flat: int32 of the same shape, what goes where its weight goes.
    target: from :func:`targets`.
    bits: random uint32, one for each round.

  Returns:
    `flat`, permuted.
  """
  shifts = (bits % weights.shape[0]).astype(jnp.int32)

  def partner(x: jax.Array, shift: jax.Array) -> jax.Array:
    # x[(c - i) mod n]: no gather, which sharded or on an accelerator is slow.
    return jnp.roll(jnp.flip(x, 0), shift + 1, 0)

  def swap(k: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    w, f = carry
    shift = shifts[k]
    other, wish = partner(w, shift), partner(target, shift)
    # The signs are compared, for the product may underflow.
    better = jnp.sign(other - w) * jnp.sign(wish - target) < 0
    return jnp.where(better, other, w), jnp.where(better, partner(f, shift), f)

  return jax.lax.fori_loop(0, bits.shape[0], swap, (weights, flat))[1]


@jax.jit
def by_rank(target: jax.Array, ordered: jax.Array) -> jax.Array:
  """Gives the r-th smallest weight to the position of the r-th smallest target.

  Args:
    target: (n, vectors), without NaN.
    ordered: (n, vectors), what stands for the weights, by rising weight.

  Returns:
    `ordered`, permuted.
  """
  ranks = _sorting.inverse(_sorting.argsort(target))
  return _sorting.gather(ordered, ranks)

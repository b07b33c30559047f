"""Sets of small numbers as 32-bit words: (words, ...), number 32 w + b is bit b of word w.

The nearest member above or below a number is then a reduction over a few words.
"""

import jax
import jax.numpy as jnp
import numpy as np

_ALL = np.uint32(0xFFFFFFFF)
_NONE = -(1 << 30)


def _relative(words: int, q: jax.Array) -> jax.Array:
  first = jnp.arange(words, dtype=jnp.int32) * 32
  return q[None] - first.reshape((words,) + (1,) * q.ndim)


def at(words: int, q: jax.Array) -> jax.Array:
  """The set of `q` alone, in so many words."""
  bit = _relative(words, q)
  inside = (bit >= 0) & (bit < 32)
  return jnp.where(inside, jnp.uint32(1) << jnp.clip(bit, 0, 31).astype(jnp.uint32), jnp.uint32(0))


def above(words: int, q: jax.Array) -> jax.Array:
  """The set of all numbers above `q`."""
  bit = _relative(words, q)
  shifted = _ALL << jnp.clip(bit + 1, 0, 31).astype(jnp.uint32)
  return jnp.where(bit >= 31, jnp.uint32(0), shifted)


def below(words: int, q: jax.Array) -> jax.Array:
  """The set of all numbers below `q`."""
  return ~above(words, q - 1)


def nearest(members: jax.Array, up: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Whether there are members; and the smallest (where `up`) or the largest, else 0."""
  first = jnp.arange(members.shape[0], dtype=jnp.int32) * 32
  first = first.reshape((-1,) + (1,) * up.ndim)
  lowest = jax.lax.population_count((members & -members) - 1)
  highest = 31 - jax.lax.clz(members)
  number = first + jnp.where(up, lowest, highest).astype(jnp.int32)
  best = jnp.max(jnp.where(members == 0, _NONE, jnp.where(up, -number, number)), axis=0)
  exists = best != _NONE
  return exists, jnp.where(exists, jnp.where(up, -best, best), 0)


def some(members: jax.Array) -> jax.Array:
  """Whether a set has members."""
  return jnp.any(members != 0, axis=0)

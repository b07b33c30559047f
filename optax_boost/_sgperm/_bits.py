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
  """The set of `q` alone.

  Args:
    words: how many words there are.
    q: int32 numbers.

  Returns:
    (words, ...) uint32.
  """
  bit = _relative(words, q)
  inside = (bit >= 0) & (bit < 32)
  return jnp.where(inside, jnp.uint32(1) << jnp.clip(bit, 0, 31).astype(jnp.uint32), jnp.uint32(0))


def above(words: int, q: jax.Array) -> jax.Array:
  """The set of all numbers above `q`.

  Args:
    words: how many words there are.
    q: int32 numbers.

  Returns:
    (words, ...) uint32.
  """
  bit = _relative(words, q)
  shifted = _ALL << jnp.clip(bit + 1, 0, 31).astype(jnp.uint32)
  return jnp.where(bit >= 31, jnp.uint32(0), shifted)


def below(words: int, q: jax.Array) -> jax.Array:
  """The set of all numbers below `q`.

  Args:
    words: how many words there are.
    q: int32 numbers.

  Returns:
    (words, ...) uint32.
  """
  return ~above(words, q - 1)


def nearest(members: jax.Array, up: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The smallest member, or the largest.

  Args:
    members: (words, ...) uint32.
    up: bool, whether the smallest is wanted.

  Returns:
    Whether there is one, and it; 0 if there is none.
  """
  first = jnp.arange(members.shape[0], dtype=jnp.int32) * 32
  first = first.reshape((-1,) + (1,) * up.ndim)
  lowest = jax.lax.population_count((members & -members) - 1)
  highest = 31 - jax.lax.clz(members)
  found = first + jnp.where(up, lowest, highest).astype(jnp.int32)
  best = jnp.max(jnp.where(members == 0, _NONE, jnp.where(up, -found, found)), axis=0)
  some = best != _NONE
  return some, jnp.where(some, jnp.where(up, -best, best), 0)


def some(members: jax.Array) -> jax.Array:
  """Whether a set has members.

  Args:
    members: (words, ...) uint32.

  Returns:
    bool.
  """
  return jnp.any(members != 0, axis=0)

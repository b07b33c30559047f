"""Rounds float32 params to half precision, to nearest or stochastically."""

from collections.abc import Sequence
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost._foundation import _arrays, _types


def round_stochastically(u: jax.typing.ArrayLike, x: jax.Array, dtype: _types.Dtype) -> jax.Array:
  r"""Rounds float32 numbers to neighbours in a 16-bit dtype, at random, so that the mean is `x`.

  .. math::
    q \left( \lfloor |x| / q \rfloor + [u < |x| / q - \lfloor |x| / q \rfloor] \right), \qquad
    u \sim U[0, 1)

  where :math:`q` is the distance between neighbours in `dtype`. A number beyond the range of
  `dtype` becomes the end of the range.
  """
  # XLA 18: all is computed in float32, since XLA may leave out a conversion to 16 bits and back.
  info = jnp.finfo(dtype)
  magnitude = jnp.abs(x)
  bits = jax.lax.bitcast_convert_type(magnitude, jnp.uint32) & jnp.uint32(0x7F800000)
  power = jax.lax.bitcast_convert_type(bits, jnp.float32)  # a power of two, <= `magnitude`
  # Multiplying by a power of two is exact, and raises small distances to normal float32 numbers.
  scale = jnp.where(power < 1, jnp.float32(2.0**64), jnp.float32(1))
  distance = jnp.maximum(power, info.smallest_normal.astype(jnp.float32)) * scale * float(info.eps)
  steps = magnitude * scale / distance
  below = jnp.floor(steps)
  up = (u < steps - below).astype(jnp.float32)
  rounded = jnp.minimum((below + up) * distance / scale, info.max.astype(jnp.float32))
  # Infinite and NaN params are returned unchanged.
  return jnp.where(jnp.isfinite(x), jnp.copysign(rounded, x), x).astype(dtype)


def round_to_nearest(x: jax.Array, dtype: _types.Dtype) -> jax.Array:
  """Rounds float32 to a 16-bit dtype; finite numbers beyond its range become the range's end."""
  limit = jnp.finfo(dtype).max.astype(x.dtype)
  return jnp.where(jnp.isfinite(x), jnp.clip(x, -limit, limit), x).astype(dtype)


def round_like(
  float32_params: optax.Params, params: optax.Params, key: jax.Array | None
) -> optax.Params:
  """Rounds `float32_params` to the dtypes of `params`: at random, or to nearest without a key."""
  leaves, structure = jax.tree.flatten(float32_params)
  targets = jax.tree.leaves(params)
  draws = [None] * len(leaves) if key is None else _draws(key, leaves, targets)

  def round_leaf(x: jax.Array, p: jax.Array, u: jax.Array | None) -> jax.Array:
    if x.dtype == p.dtype:
      return x
    return round_to_nearest(x, p.dtype) if u is None else round_stochastically(u, x, p.dtype)

  return jax.tree.unflatten(structure, map(round_leaf, leaves, targets, draws))


def _draws(
  key: jax.Array, leaves: Sequence[jax.Array], targets: Sequence[jax.Array]
) -> list[jax.Array | None]:
  """Returns for each leaf random numbers in [0, 1), one for each entry, or None.

  `targets` are the params to whose dtypes the leaves are rounded. A leaf has None if it has the
  dtype of its target already, so that it isn't rounded.
  """
  keys = jax.random.split(key, max(len(leaves), 1))
  draws: list[jax.Array | None] = [None] * len(leaves)
  for indices in _arrays.group_small_leaves([None] * len(leaves), leaves, targets):
    first = indices[0]
    if leaves[first].dtype == targets[first].dtype:
      continue
    draw = functools.partial(jax.random.uniform, shape=leaves[first].shape, dtype=jnp.float32)
    if len(indices) == 1:
      draws[first] = draw(keys[first])
      continue
    # XLA 8: one kernel draws all numbers; without the barrier, XLA makes a kernel for each leaf.
    stacked = jax.lax.optimization_barrier(jax.vmap(draw)(keys[np.array(indices)]))
    for i, u in zip(indices, stacked, strict=True):
      draws[i] = u
  return draws

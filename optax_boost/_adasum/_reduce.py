"""The Gram matrices of chunks of columns, and the combinations of them; also over devices."""

from collections.abc import Sequence
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np

from optax_boost import _arrays
from optax_boost import _base
from optax_boost._adasum import _coefficients
from optax_boost._adasum import _layout


@functools.partial(jax.jit, static_argnums=1)
def reduce_stacked(leaves: list[jax.Array], groups: tuple[int, ...]) -> list[jax.Array]:
  """:func:`adasum_reduce` on leaves and the numbers of their groups."""
  replicas = leaves[0].shape[0]
  layouts = _layout.layouts(
    [jax.eval_shape(lambda x: x[0], leaf) for leaf in leaves], groups, chunks=1
  )
  units = _units(jnp.stack(list(map(_largest, leaves))), groups)
  chunks = []
  for layout in layouts:
    rows = [leaves[i].reshape(replicas, -1 if leaves[i].size else 0) for i in layout.leaves]
    padding = jnp.zeros((replicas, layout.chunk - sum(row.shape[1] for row in rows)), layout.dtype)
    joined = jnp.concatenate([*rows, padding], axis=1)
    chunks.append(_layout.Chunk(layout, list(joined), jnp.asarray(layout.blocks[0])))
  weights = _coefficients.coefficients(_gram(chunks, units))
  return _layout.unpack(layouts, [_combine(chunk, weights) for chunk in chunks])


# Compiled as a whole also where `update` is called eagerly.
@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def reduce_over_devices(
  leaves: list[jax.Array],
  groups: tuple[int, ...],
  axes: tuple[str, ...],
  local_axes: tuple[str, ...],
  shard_axes: tuple[str, ...],
) -> tuple[list[jax.Array], jax.Array, jax.Array]:
  """The sums of all devices' leaves, the orthogonality, and whether a leaf was not finite."""
  replicas, nearby = jax.lax.axis_size(axes), jax.lax.axis_size(local_axes)
  every_axis = axes + local_axes + shard_axes
  layouts = _layout.layouts(leaves, groups, chunks=replicas * nearby)
  owner = jax.lax.axis_index(local_axes + axes)
  units = _units(jax.lax.pmax(jnp.stack(list(map(_largest, leaves))), every_axis), groups)
  chunks = []
  for layout in layouts:
    x = _layout.pack(leaves, layout, replicas * nearby, owner)
    if nearby > 1:
      x = _mean_nearby(x.reshape(nearby, replicas, layout.chunk), local_axes, nearby)
    if replicas > 1:
      x = jax.lax.all_to_all(x, axes, 0, 0, tiled=True)
    chunks.append(_layout.Chunk(layout, list(x), jnp.asarray(layout.blocks)[owner]))
  gram = jax.lax.psum(_gram(chunks, units), every_axis)
  weights = _coefficients.coefficients(gram)
  vectors = [_gather(_combine(chunk, weights), local_axes + axes) for chunk in chunks]
  orthogonality = _coefficients.orthogonality(gram, weights, units)
  return _layout.unpack(layouts, vectors), orthogonality, ~jnp.all(jnp.isfinite(gram))


def _largest(leaf: jax.Array) -> jax.Array:
  return jnp.max(jnp.abs(jax.lax.stop_gradient(leaf)), initial=0).astype(jnp.float32)


def _units(largest: jax.Array, groups: Sequence[int]) -> jax.Array:
  """For each group a power of two, at most its leaves' `largest` entry."""
  members = np.arange(max(groups) + 1)[:, None] == np.array(groups)
  of_groups = jnp.max(jnp.where(members, largest, 0), axis=1)
  exponents = jnp.frexp(jnp.where(jnp.isfinite(of_groups), of_groups, 0))[1]
  # Its inverse, too, must be a normal number.
  return jnp.ldexp(jnp.float32(1), jnp.clip(exponents - 1, -125, 125))


def _gram(chunks: Sequence[_layout.Chunk], units: jax.Array) -> jax.Array:
  """The chunks' part of the groups' Gram matrices ``(G, N, N)``, in units' squares."""
  return functools.reduce(jnp.add, [_gram_of_chunk(chunk, units) for chunk in chunks])


def _gram_of_chunk(chunk: _layout.Chunk, units: jax.Array) -> jax.Array:
  wide = _arrays.accumulator_dtype(chunk.layout.dtype)
  scales = (1 / units).astype(wide)
  replicas = len(chunk.rows)

  def add(turn: jax.Array, grams: jax.Array) -> jax.Array:
    x, _, counts, group = _layout.cut_block(chunk, turn)
    # Selected, not multiplied: entries of another leaf may be NaN.
    x = jnp.where(counts, x.astype(wide) * scales[group], 0)
    return grams.at[group].add(jnp.matmul(x, x.T, precision=jax.lax.Precision.HIGHEST))

  # Under `shard_map` the loop must know from the start that they vary as the gradients do.
  zero = jnp.where(False, chunk.rows[0][0].astype(wide), 0)
  zeros = jnp.broadcast_to(zero, (units.size, replicas, replicas))
  return jax.lax.fori_loop(0, len(chunk.blocks), add, zeros)


def _combine(chunk: _layout.Chunk, weights: jax.Array) -> jax.Array:
  """The chunk ``(M,)`` of the result, from coefficients ``(G, N)``."""
  layout = chunk.layout
  wide = _arrays.accumulator_dtype(layout.dtype)

  def mix(turn: jax.Array, result: jax.Array) -> jax.Array:
    x, start, counts, group = _layout.cut_block(chunk, turn)
    mixed = jnp.sum(weights[group].astype(wide)[:, None] * x.astype(wide), axis=0)
    old = jax.lax.dynamic_slice_in_dim(result, start, layout.block)
    new = jnp.where(counts, mixed.astype(layout.dtype), old)
    return jax.lax.dynamic_update_slice(result, new, (start,))

  return jax.lax.fori_loop(0, len(chunk.blocks), mix, chunk.rows[0])


def _mean_nearby(x: jax.Array, axes: tuple[str, ...], size: int) -> jax.Array:
  """Scatters ``x`` along its first axis over `axes` and averages it there."""
  # Divided first, or large gradients overflow; in float16 that would cost small ones their bits.
  wide = jnp.finfo(x.dtype).maxexp >= jnp.finfo(jnp.float32).maxexp
  summed = jax.lax.psum_scatter(x / size if wide else x, axes, scatter_dimension=0)
  return summed if wide else summed / size


def _gather(chunk: jax.Array, axes: tuple[str, ...]) -> jax.Array:
  """All chunks, concatenated, on all devices."""
  if not _base.varying_axes(jax.typeof(chunk)):
    return jax.lax.all_gather(chunk, axes, tiled=True)
  # `shard_map` tracks which arrays vary: it must be told that the result does not.
  if "to" in inspect.signature(jax.lax.all_gather).parameters:
    return jax.lax.all_gather(chunk, axes, tiled=True, to="invarying")
  # Below JAX 0.10 only a sum can say so. It moves twice the bytes.
  devices, owner = jax.lax.axis_size(axes), jax.lax.axis_index(axes)
  alone = jnp.where(jnp.arange(devices)[:, None] == owner, chunk, 0)
  return jax.lax.psum(alone.ravel(), axes)

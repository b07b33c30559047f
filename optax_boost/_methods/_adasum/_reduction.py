"""Computes adaptive sums along the tree, level by level, on one device or over several."""

from collections.abc import Callable, Sequence
import functools
import inspect
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from optax_boost._form import _finiteness
from optax_boost._foundation import _arrays, _mesh_axes, _types
from optax_boost._methods._adasum import _chunks, _pairs


@functools.partial(jax.jit, static_argnums=1)
def reduce_stacked(leaves: list[jax.Array], groups: tuple[int, ...]) -> list[jax.Array]:
  """Returns the adaptive sum of each leaf; leaves have the replicas along their first axis."""
  replicas = leaves[0].shape[0]
  layouts = _chunks.layouts(
    [jax.eval_shape(lambda x: x[0], leaf) for leaf in leaves], groups, chunks=1
  )
  largest = _largest_of_groups(jnp.stack(list(map(jax.vmap(_largest), leaves)), axis=1), groups)
  chunks = []
  for layout in layouts:
    rows = [leaves[i].reshape(replicas, -1 if leaves[i].size else 0) for i in layout.leaves]
    padding = jnp.zeros((replicas, layout.chunk - sum(row.shape[1] for row in rows)), layout.dtype)
    joined = jnp.concatenate([*rows, padding], axis=1)
    chunks.append(_chunks.Chunk(layout, list(joined), jnp.asarray(layout.blocks[0])))
  vectors, _, finite = _walk(chunks, largest, lambda sums: sums)
  return _only_finite(_chunks.unpack(layouts, vectors), groups, finite)


# Compiled as one program even if `update` is called without `jit`.
@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def reduce_over_devices(
  leaves: list[jax.Array],
  groups: tuple[int, ...],
  axes: tuple[str, ...],
  local_axes: tuple[str, ...],
  shard_axes: tuple[str, ...],
) -> tuple[list[jax.Array], jax.Array, jax.Array]:
  """Averages leaves over `local_axes`, and sums them adaptively over the replicas along `axes`.

  `groups` has the number of each leaf's group. Leaves may be sharded along `shard_axes`. Returns
  the sums, the orthogonality (see `AdasumState`), and whether a leaf was not finite.
  """
  replicas, nearby = jax.lax.axis_size(axes), jax.lax.axis_size(local_axes)
  every_axis = axes + local_axes + shard_axes
  layouts = _chunks.layouts(leaves, groups, chunks=replicas * nearby)
  owner = jax.lax.axis_index(local_axes + axes)
  is_this_replica = jnp.arange(replicas)[:, None] == jax.lax.axis_index(axes)
  largest = jnp.where(is_this_replica, jnp.stack(list(map(_largest, leaves))), 0)
  largest = jax.lax.pmax(_largest_of_groups(largest, groups), every_axis)
  chunks = []
  for layout in layouts:
    x = _chunks.pack(leaves, layout, replicas * nearby, owner)
    if nearby > 1:
      x = _mean_nearby(x.reshape(nearby, replicas, layout.chunk), local_axes, nearby)
    if replicas > 1:
      x = jax.lax.all_to_all(x, axes, 0, 0, tiled=True)
    chunks.append(_chunks.Chunk(layout, list(x), jnp.asarray(layout.blocks)[owner]))
  total = functools.partial(jax.lax.psum, axis_name=every_axis)
  chunks_of_result, orthogonality, finite = _walk(chunks, largest, total)
  vectors = [_gather(chunk, local_axes + axes) for chunk in chunks_of_result]
  outputs = _only_finite(_chunks.unpack(layouts, vectors), groups, finite)
  return outputs, orthogonality, ~jnp.all(finite)


def _largest(leaf: jax.Array) -> jax.Array:
  """Returns the largest magnitude in a leaf, or infinity if the leaf has a NaN."""
  largest = _arrays.widen(jnp.max(jnp.abs(jax.lax.stop_gradient(leaf)), initial=0))
  # `pmax` over devices may lose a NaN, but keeps infinity.
  return jnp.where(jnp.isnan(largest), jnp.inf, largest)


def _largest_of_groups(largest: jax.Array, groups: Sequence[int]) -> jax.Array:
  """Returns the largest magnitude in each group ``(G, N)`` from those in all leaves ``(N, L)``."""
  members = np.arange(max(groups) + 1)[:, None, None] == np.array(groups)
  return jnp.max(jnp.where(members, largest, 0), axis=2)


def _only_finite(
  leaves: list[jax.Array], groups: Sequence[int], finite: jax.Array
) -> list[jax.Array]:
  """Returns the leaves; leaves of a group whose entry of `finite` is False become NaN."""
  pairs = zip(leaves, groups, strict=True)
  return [jnp.where(finite[group], leaf, jnp.nan) for leaf, group in pairs]


def _walk(
  chunks: Sequence[_chunks.Chunk],
  largest: jax.Array,
  total: Callable[[_pairs.Sums], _pairs.Sums],
) -> tuple[list[jax.Array], jax.Array, jax.Array]:
  """Walks up the tree, and combines the nodes in `chunks`, one per dtype, level by level.

  `largest` (G, N) has the largest magnitude of each group in each gradient. ``total(sums)`` adds
  the sums of all devices. Returns the chunks of the result, the orthogonality, and for each group
  whether it is finite on all replicas.
  """
  levels = []
  nodes = [chunk.rows for chunk in chunks]
  factors, bounds = None, _pairs.bounds_of(largest)
  # A group is finite if its largest magnitude is finite.
  finite = jnp.all(_finiteness.finite_entries(largest), axis=1)
  while factors is None or bounds.shape[1] > 1:
    scales = _pairs.scales_of(bounds)
    passes = [_pass(*pair, factors, scales) for pair in zip(chunks, nodes, strict=True)]
    nodes = [new_nodes for new_nodes, _ in passes]
    sums = total(functools.reduce(functools.partial(jax.tree.map, jnp.add), [s for _, s in passes]))
    finite &= jnp.all(jnp.isfinite(sums.squares), axis=1)
    levels.append((sums, scales))
    factors, bounds = _pairs.pair_up(sums, scales)
  roots = [_pass(*pair, factors, None)[0][0] for pair in zip(chunks, nodes, strict=True)]
  result = [root.astype(chunk.layout.dtype) for root, chunk in zip(roots, chunks, strict=True)]
  return result, _pairs.orthogonality(*levels[0], *levels[-1]), finite


# The nodes that a pass has computed so far, and the sums over these nodes.
_Carry: TypeAlias = tuple[list[jax.Array], _pairs.Sums]


def _pass(
  chunk: _chunks.Chunk,
  nodes: list[jax.Array],
  factors: _pairs.Factors | None,
  scales: jax.Array | None,
) -> _Carry:
  """Combines the pairs of a chunk's nodes; returns the next level's nodes, and their sums.

  The sums are squared norms and inner products of the next level's nodes, scaled by 2^`scales`,
  over the entries of this chunk. If `factors` is None, the nodes are not combined, and the sums are
  taken over `nodes`. If `scales` is None, the sums are empty.
  """
  dtype = _arrays.accumulator_dtype(chunk.layout.dtype)
  # `results` begins as the first node of each pair, which the loop no longer needs. In the same
  # buffer, the loop replaces it, block by block, by the adaptive sum of the pair. A node without a
  # partner keeps its buffer.
  results = [] if factors is None else [node.astype(dtype) for node in nodes[::2]]
  size = (0 if scales is None else scales.shape[0], len(results) or len(nodes))

  def turn(number: _types.IntScalar, carry: _Carry) -> _Carry:
    results, sums = carry
    level = nodes
    if factors is not None:
      level = [results[i // 2] if i % 2 == 0 else node for i, node in enumerate(nodes)]
    x, start, counts, group = _chunks.cut_block(chunk, level, dtype, number)
    if factors is not None:
      old = x[::2]
      x = _pairs.combine(x, factors, group)
      new = jnp.where(counts, x, old)
      results = [
        jax.lax.dynamic_update_slice(result, row, (start,))
        for result, row in zip(results, new, strict=True)
      ]
    if scales is not None:
      # `where` instead of a product with 0, since entries of another leaf may be NaN.
      x = jnp.where(counts, x * _pairs.power(scales[group], dtype)[:, None], 0)
      even = len(x) // 2 * 2
      sums = _pairs.Sums(
        sums.squares.at[group].add(jnp.sum(x * x, axis=1)),
        sums.products.at[group].add(jnp.sum(x[0:even:2] * x[1:even:2], axis=1)),
      )
    return results, sums

  # The carry of `fori_loop` must keep its type. Under `shard_map` the sums vary over the gradients'
  # mesh axes, so the zeros at the start must vary over these axes, too.
  zero = jnp.where(False, chunk.rows[0][0].astype(dtype), 0)
  zeros = _pairs.Sums(jnp.broadcast_to(zero, size), jnp.broadcast_to(zero, (size[0], size[1] // 2)))
  results, sums = jax.lax.fori_loop(0, len(chunk.blocks), turn, (results, zeros))
  return (nodes if factors is None else results), sums


def _mean_nearby(x: jax.Array, axes: tuple[str, ...], size: int) -> jax.Array:
  """Returns the mean of `x` over the devices of `axes`, a different slice on each device.

  The first axis of `x` has `size` entries, one for each of these devices. Device number d gets only
  entry d of the mean.
  """
  # Gradients are divided before they are summed, so that sums of large gradients don't overflow.
  # In float16 small quotients would underflow, so the sums are divided instead.
  divides_first = jnp.finfo(x.dtype).maxexp >= jnp.finfo(jnp.float32).maxexp
  summed = jax.lax.psum_scatter(x / size if divides_first else x, axes, scatter_dimension=0)
  return summed if divides_first else summed / size


def _gather(chunk: jax.Array, axes: tuple[str, ...]) -> jax.Array:
  """Returns the concatenation of the chunks of all devices, the same on each device."""
  if not _mesh_axes.varying_axes(jax.typeof(chunk)):
    return jax.lax.all_gather(chunk, axes, tiled=True)
  # The output of `shard_map` may be replicated only if JAX knows that it is equal on all devices.
  if "to" in inspect.signature(jax.lax.all_gather).parameters:
    return jax.lax.all_gather(chunk, axes, tiled=True, to="invarying")
  # XLA 27: before JAX 0.10, JAX knows this only of results of `psum`, which moves twice the bytes.
  devices, owner = jax.lax.axis_size(axes), jax.lax.axis_index(axes)
  alone = jnp.where(jnp.arange(devices)[:, None] == owner, chunk, 0)
  return jax.lax.psum(alone.ravel(), axes)

"""Concatenates leaves into one vector, which is cut into chunks that the devices own."""

from collections.abc import Sequence
import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_boost._foundation import _types

# One loop goes over a chunk in blocks of columns. N rows of a block stay in the cache between
# their inner products, and the time to compile does not grow with the number of leaves. Longer
# chunks get longer blocks, because a turn of the loop costs an accelerator as much as a launch.
_SHORTEST_BLOCK = 2048
_MOST_BLOCKS = 256


class Layout(NamedTuple):
  """How the leaves of one dtype form a vector, and how devices share its chunks."""

  leaves: tuple[int, ...]  # indices among all leaves
  shapes: tuple[tuple[int, ...], ...]
  starts: tuple[int, ...]  # where each leaf starts in the vector
  dtype: _types.Dtype
  chunk: int  # M, the entries that one device owns
  block: int  # B, the columns of a block
  # (D, T, 4) int32, the blocks of each chunk: where the block starts in the chunk, which of its
  # columns count (from, to), and the group of their leaf.
  blocks: np.ndarray


class Chunk(NamedTuple):
  """The chunk that a device owns of a layout's vector."""

  layout: Layout
  # N vectors of M entries, one per replica. Stacking them would copy them.
  rows: list[jax.Array]
  blocks: jax.Array  # (T, 4), this chunk's part of `layout.blocks`


def layouts(
  leaves: Sequence[jax.Array | jax.ShapeDtypeStruct], groups: Sequence[int], chunks: int
) -> list[Layout]:
  """A layout for the leaves of each dtype, with D = `chunks` chunks."""
  by_dtype: dict[np.dtype, list[int]] = {}
  for i, leaf in enumerate(leaves):
    by_dtype.setdefault(jnp.result_type(leaf), []).append(i)
  layouts = []
  for dtype, members in by_dtype.items():
    shapes = tuple(jnp.shape(leaves[i]) for i in members)
    ends = list(itertools.accumulate(map(math.prod, shapes)))
    starts = (0, *ends[:-1])
    chunk = max(1, -(-ends[-1] // chunks))
    block = min(chunk, max(_SHORTEST_BLOCK, -(-chunk // _MOST_BLOCKS)))
    spans = list(zip(starts, ends, (groups[i] for i in members), strict=True))
    lists = [_blocks(spans, d * chunk, chunk, block) for d in range(chunks)]
    table = np.zeros((chunks, max(1, *map(len, lists)), 4), np.int32)
    for row, entries in zip(table, lists, strict=True):
      row[: len(entries)] = np.reshape(entries, (-1, 4))
    layouts.append(Layout(tuple(members), shapes, starts, dtype, chunk, block, table))
  return layouts


def _blocks(
  spans: Sequence[tuple[int, int, int]], origin: int, chunk: int, block: int
) -> list[tuple[int, int, int, int]]:
  """The rows of ``Layout.blocks`` for the chunk that begins at `origin`."""
  blocks = []
  for leaf_start, leaf_end, group in spans:
    low, high = max(leaf_start - origin, 0), min(leaf_end - origin, chunk)
    for first in range(low, high, block):
      # The last block starts early enough to lie in the chunk.
      start = min(first, chunk - block)
      blocks.append((start, first - start, min(first + block, high) - start, group))
  return blocks


def pack(leaves: Sequence[jax.Array], layout: Layout, chunks: int, owner: jax.Array) -> jax.Array:
  """Concatenates the leaves of a layout, padded with zeros, as chunks ``(D, M)``."""
  flat = [jnp.ravel(leaves[i]) for i in layout.leaves]
  # The exchange needs rows that `vmap` maps, and `vmap` doesn't map gradients that are equal on all
  # replicas. This vector without entries depends on the replica, so each row with it is mapped.
  mapped = jnp.full((0,), owner, layout.dtype)
  rows = []
  # XLA 17: row by row, as a concatenation of all leaves would be kept beside its rows.
  for origin in range(0, chunks * layout.chunk, layout.chunk):
    cuts = [slice(max(origin - s, 0), max(origin + layout.chunk - s, 0)) for s in layout.starts]
    pieces = [leaf[cut] for leaf, cut in zip(flat, cuts, strict=True)]
    padding = jnp.zeros(layout.chunk - sum(piece.size for piece in pieces), layout.dtype)
    rows.append(jnp.concatenate([*pieces, padding, mapped]))
  return jnp.stack(rows)


def unpack(layouts: Sequence[Layout], vectors: Sequence[jax.Array]) -> list[jax.Array]:
  """Cuts the vectors of all layouts into leaves, in their original order."""
  leaves = {}
  for layout, vector in zip(layouts, vectors, strict=True):
    for i, shape, start in zip(layout.leaves, layout.shapes, layout.starts, strict=True):
      leaves[i] = vector[start : start + math.prod(shape)].reshape(shape)
  return [leaves[i] for i in range(len(leaves))]


def cut_block(
  chunk: Chunk, rows: Sequence[jax.Array], dtype: _types.Dtype, turn: _types.IntScalar
) -> tuple[jax.Array, ...]:
  """Cuts block number `turn` of a chunk out of K rows.

  Returns the block ``(K, B)``, its first column in the chunk, a mask of the columns that belong to
  its leaf, and the group of that leaf.
  """
  start, low, high, group = chunk.blocks[turn]
  width = chunk.layout.block
  cut = [jax.lax.dynamic_slice_in_dim(row, start, width).astype(dtype) for row in rows]
  return jnp.stack(cut), start, (jnp.arange(width) >= low) & (jnp.arange(width) < high), group

"""Concatenates leaves into one vector, which is cut into chunks that the devices own."""

from collections.abc import Sequence
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# Chunks are worked through in blocks of columns: N rows of a block stay in the cache between
# their inner products, and one loop serves all leaves, so the time to compile does not grow with
# their number. Longer chunks get longer blocks, because a turn of the loop costs an accelerator as
# much as a kernel's launch.
_SHORTEST_BLOCK = 2048
_MOST_BLOCKS = 256


class Layout(NamedTuple):
  """The concatenation of the leaves of one dtype into a vector, and the chunks of the devices."""

  leaves: tuple[int, ...]  # positions among all leaves
  shapes: tuple[tuple[int, ...], ...]
  starts: tuple[int, ...]
  dtype: Any
  chunk: int  # M, the entries that one device owns
  block: int  # B, the columns that are worked on at once
  # (D, T, 4) int32, the blocks of each chunk: where the block starts in the chunk, which of its
  # columns count (from, to), and the group of their leaf.
  blocks: np.ndarray


class Chunk(NamedTuple):
  """The chunk that a device owns of a layout's vector."""

  layout: Layout
  # N vectors of M entries, one per replica; separate, as joining them would be a pass over memory.
  rows: list[jax.Array]
  blocks: jax.Array  # (T, 4), this chunk's part of `layout.blocks`


def layouts(leaves: Sequence[Any], groups: Sequence[int], chunks: int) -> list[Layout]:
  """Lays out the leaves of each dtype, each vector cut into D = `chunks` chunks."""
  by_dtype: dict[Any, list[int]] = {}
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
  """The blocks of the chunk that begins at `origin`, as :class:`Layout` lists them."""
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
  # `vmap` does not map gradients that are equal on all replicas; the exchange needs mapped rows.
  # This vector without entries depends on the replica, so every row that contains it is mapped.
  mapped = jnp.full((0,), owner, layout.dtype)
  rows = []
  # XLA 17: row by row, as a concatenation of all leaves would be kept beside its rows.
  for origin in range(0, chunks * layout.chunk, layout.chunk):
    cuts = [slice(max(origin - s, 0), max(origin + layout.chunk - s, 0)) for s in layout.starts]
    parts = [leaf[cut] for leaf, cut in zip(flat, cuts, strict=True)]
    padding = jnp.zeros(layout.chunk - sum(part.size for part in parts), layout.dtype)
    rows.append(jnp.concatenate([*parts, padding, mapped]))
  return jnp.stack(rows)


def unpack(layouts: Sequence[Layout], vectors: Sequence[jax.Array]) -> list[jax.Array]:
  """Cuts joined vectors into leaves again, in the order of all leaves."""
  leaves = {}
  for layout, vector in zip(layouts, vectors, strict=True):
    for i, shape, start in zip(layout.leaves, layout.shapes, layout.starts, strict=True):
      leaves[i] = vector[start : start + math.prod(shape)].reshape(shape)
  return [leaves[i] for i in range(len(leaves))]


def cut_block(
  chunk: Chunk, rows: Sequence[jax.Array], dtype: Any, turn: jax.Array
) -> tuple[jax.Array, ...]:
  """Cuts a block of columns out of K rows.

  Returns the block ``(K, B)``, its first column in the chunk, a mask of the columns that belong to
  its leaf, and the group of that leaf.
  """
  start, low, high, group = chunk.blocks[turn]
  width = chunk.layout.block
  parts = [jax.lax.dynamic_slice_in_dim(row, start, width).astype(dtype) for row in rows]
  return jnp.stack(parts), start, (jnp.arange(width) >= low) & (jnp.arange(width) < high), group

"""Concatenates the leaves of each dtype into one vector, and cuts it into one chunk per device."""

from collections.abc import Sequence
import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_boost._foundation import _types

# A loop goes over blocks of columns of a chunk (N rows, one per replica, M columns), since a loop
# compiles in the same time for any number of leaves. Blocks are short, so that their rows stay in
# the CPU's cache while inner products are taken. On an accelerator each turn of the loop costs a
# kernel launch, so long chunks have longer blocks instead of many more blocks.
_SHORTEST_BLOCK = 2048
_MOST_BLOCKS = 256


class Layout(NamedTuple):
  """Describes the vector of all leaves of one dtype, and how it is cut into chunks and blocks."""

  leaves: tuple[int, ...]  # indices among all leaves
  shapes: tuple[tuple[int, ...], ...]
  starts: tuple[int, ...]  # where each leaf starts in the vector
  dtype: _types.Dtype
  chunk: int  # M, the entries that one device owns
  block: int  # B, the columns of a block
  # (D, T, 4) int32, a row for each of T blocks of each of D chunks: the block's first column in the
  # chunk; the start and the end of the block's columns that count, which belong to one leaf; and
  # the number of the leaf's group.
  blocks: np.ndarray


class Chunk(NamedTuple):
  """The chunk of a layout's vector that one device computes, for the gradients of all replicas."""

  layout: Layout
  # N vectors of M entries, one per replica; a list, since one array of them would be a copy.
  rows: list[jax.Array]
  blocks: jax.Array  # (T, 4), this chunk's part of `layout.blocks`


def layouts(
  leaves: Sequence[jax.Array | jax.ShapeDtypeStruct], groups: Sequence[int], chunks: int
) -> list[Layout]:
  """Returns one layout per dtype of the leaves; each cuts its vector into `chunks` chunks.

  `groups` has the number of each leaf's group.
  """
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
  """Returns the rows of ``Layout.blocks`` for the chunk that begins at `origin` in the vector.

  `spans` has for each leaf its start and end in the vector, and the number of its group. `chunk` is
  the number of entries in a chunk, and `block` is the number of columns in a block.
  """
  blocks = []
  for leaf_start, leaf_end, group in spans:
    low, high = max(leaf_start - origin, 0), min(leaf_end - origin, chunk)
    for first in range(low, high, block):
      # The last block starts early enough to lie in the chunk.
      start = min(first, chunk - block)
      blocks.append((start, first - start, min(first + block, high) - start, group))
  return blocks


def pack(leaves: Sequence[jax.Array], layout: Layout, chunks: int, owner: jax.Array) -> jax.Array:
  """Concatenates the leaves of a layout to a vector; returns its chunks as an array (chunks, M).

  Zeros are added at the vector's end, so that all chunks have M entries. `owner` is the index of
  this device. The index changes no entry: under ``vmap`` over the devices, it only makes the result
  a batched array, as ``all_to_all`` requires.
  """
  flat = [jnp.ravel(leaves[i]) for i in layout.leaves]
  # Under `vmap`, `all_to_all` needs batched rows, but gradients that are equal on all replicas are
  # not batched. So an empty vector made from `owner` (the device's index, which is batched) is
  # concatenated with each row.
  mapped = jnp.full((0,), owner, layout.dtype)
  rows = []
  # XLA 17: each row is concatenated separately, since a concatenation of all leaves would stay in
  # memory beside the rows.
  for origin in range(0, chunks * layout.chunk, layout.chunk):
    cuts = [slice(max(origin - s, 0), max(origin + layout.chunk - s, 0)) for s in layout.starts]
    pieces = [leaf[cut] for leaf, cut in zip(flat, cuts, strict=True)]
    padding = jnp.zeros(layout.chunk - sum(piece.size for piece in pieces), layout.dtype)
    rows.append(jnp.concatenate([*pieces, padding, mapped]))
  return jnp.stack(rows)


def unpack(layouts: Sequence[Layout], vectors: Sequence[jax.Array]) -> list[jax.Array]:
  """Cuts the vectors of all layouts into leaves; returns the leaves in the order of the tree."""
  leaves = {}
  for layout, vector in zip(layouts, vectors, strict=True):
    for i, shape, start in zip(layout.leaves, layout.shapes, layout.starts, strict=True):
      leaves[i] = vector[start : start + math.prod(shape)].reshape(shape)
  return [leaves[i] for i in range(len(leaves))]


def cut_block(
  chunk: Chunk, rows: Sequence[jax.Array], dtype: _types.Dtype, turn: _types.IntScalar
) -> tuple[jax.Array, ...]:
  """Cuts a block of columns, block number `turn` of the chunk, out of K rows.

  A row is a node of the tree: M entries, the chunk's part of a gradient or of a sum. Returns the
  block ``(K, B)`` in `dtype`, the index of its first column in the chunk, a mask of the columns
  that count, and the number of a group. All columns that count belong to one leaf of this group.
  """
  start, low, high, group = chunk.blocks[turn]
  width = chunk.layout.block
  cut = [jax.lax.dynamic_slice_in_dim(row, start, width).astype(dtype) for row in rows]
  return jnp.stack(cut), start, (jnp.arange(width) >= low) & (jnp.arange(width) < high), group

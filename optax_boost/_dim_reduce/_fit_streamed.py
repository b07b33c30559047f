"""The subspaces of ``_fit.py``, with few of the snapshots in memory at a time."""

from collections.abc import Iterator
from collections.abc import Sequence
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_boost import _arrays
from optax_boost import _base
from optax_boost import _tree
from optax_boost._dim_reduce import _fit
from optax_boost._dim_reduce import _linalg
from optax_boost._dim_reduce import _subspace


def fit_subspace_streamed(
  snapshots: Sequence[Any],
  components: int,
  *,
  chunk: int,
  dtype: jax.typing.DTypeLike = jnp.float32,
  progress: bool = False,
) -> _subspace.Subspace:
  """The same as an exact :func:`fit_subspace`, with few of the snapshots in memory at a time.

  With c = `chunk` below the number m of snapshots, each is read about m / (2 c) + 3 times. A host
  loop, not for ``jit``.

  Args:
    snapshots: anything with ``len`` and ``[i]``, such as :func:`checkpoint_snapshots` or a list of
      NumPy arrays; each ``[i]`` is read several times, and must be the same each time.
    components: k, as in :func:`fit_subspace`.
    chunk: the number of snapshots held at a time, at least 2, beside the mean and the basis
      (k + 8 of them, and k more when it is refined). Raising it saves reading.
    dtype: as in :func:`fit_subspace`.
    progress: whether to show a progress bar; needs ``tqdm``, and is nothing without it.

  Returns:
    A :class:`Subspace`, sharded as the snapshots are.

  Raises:
    ValueError: as for :func:`fit_subspace`.
    TypeError: an argument or a leaf is of the wrong kind.

  Examples:
    >>> import jax.numpy as jnp, optax_boost
    >>> path = [{"w": jnp.array([3.0 * t, 4.0 * t])} for t in range(8)]
    >>> subspace = optax_boost.fit_subspace_streamed(path, components=1, chunk=3)
    >>> [round(float(x), 3) for x in subspace.basis["w"][0]]
    [0.6, 0.8]
  """
  _base.check_whole_number("components", components, static=True)
  _base.check_floating_dtype("dtype", dtype)
  _base.check_whole_number("chunk", chunk, static=True)
  _base.check_bool("progress", progress)
  if chunk < 2:
    raise ValueError(
      f"`chunk` must be at least 2: one snapshot to compare with another; got {chunk}."
    )
  if not hasattr(snapshots, "__len__") or not hasattr(snapshots, "__getitem__"):
    raise TypeError(
      "`fit_subspace_streamed` needs snapshots that can be read again by index, with `len` and"
      f" `[i]`; got {type(snapshots).__name__}. Of an iterator, make a list or use fit_subspace."
    )
  if _fit.holds_state(snapshots):
    raise TypeError(
      "`snapshots` must be a sequence of trees of params; got an optimizer state. One that has"
      " recorded snapshots holds them in memory: call `fit_subspace(state, components)`."
    )
  count = len(snapshots)
  _fit.check_enough(count, components)
  if count <= chunk:
    return _fit.fit_subspace([snapshots[i] for i in range(count)], components, dtype=dtype)
  return _fit_streamed(snapshots, components, chunk - 1, progress, jnp.dtype(dtype))


def _fit_streamed(
  snapshots: Sequence[Any], components: int, size: int, progress: bool, dtype: Any
) -> _subspace.Subspace:
  """Reads m snapshots in passes, `size` of them and one at a time.

  Snapshots are taken as distances to the first one, which are exact, and whose size is that of
  the centred ones: so their m x m Gram matrix can be centred afterwards, in float64.
  """
  count = len(snapshots)
  blocks = [slice(start, min(start + size, count)) for start in range(0, count, size)]
  origin = _fit.checked(_as_arrays(snapshots[0]))
  _fit.check_entries([x.shape for x in jax.tree.leaves(origin)], components)
  total_reads = sum(count - block.start for block in blocks) + 2 * count
  bar = _base.with_progress(range(total_reads), progress, "fitting the subspace", "snapshot")
  reads = iter(bar)

  def write(rows: Any, row: int, index: int) -> Any:
    next(reads)
    tree = _as_arrays(snapshots[index])
    _fit.check_like(tree, origin, index)
    return _write(rows, origin, tree, row)

  rows, single = _empty_rows(origin, size), _empty_rows(origin, 1)

  def read_blocks() -> Iterator[tuple[slice, int]]:
    """Puts each block into `rows`, of which a shorter last one leaves some as they were."""
    nonlocal rows
    for block in blocks:
      for row, index in enumerate(range(block.start, block.stop)):
        rows = write(rows, row, index)
      yield block, block.stop - block.start

  gram = np.zeros((count, count))
  for block, length in read_blocks():
    gram[block, block] = _inner(rows, rows)[:length, :length]
    for index in range(block.stop, count):
      single = write(single, 0, index)
      gram[block, index] = gram[index, block] = _inner(rows, single)[:length, 0]
  del single
  bad = np.flatnonzero(~np.isfinite(np.diagonal(gram)))
  # The first one is in all the distances.
  _fit.check_finite(bad[:1] if 0 in bad else bad)
  centring = np.eye(count) - 1 / count
  gram = centring @ gram @ centring
  vectors = np.linalg.eigh(gram)[1][:, ::-1][:, : _linalg.guarded(components, count)].T

  sums = _empty_rows(origin, 1), _empty_rows(origin, len(vectors))
  for block, length in read_blocks():
    coefficients = np.zeros((1 + len(vectors), size))
    coefficients[0, :length] = 1 / count
    coefficients[1:, :length] = vectors[:, block]
    sums = _accumulate(sums, rows, coefficients)
  shift, basis = sums[0], _orthonormalize(sums[1])
  parts = [np.asarray(_inner(rows, basis), np.float64)[:n] for _, n in read_blocks()]
  next(reads, None)  # Lets the progress bar arrive.
  coordinates = np.concatenate(parts)
  coordinates -= coordinates.mean(axis=0)
  subspace = _finish(origin, shift, basis, coordinates, np.trace(gram), count, components, dtype)
  _fit.check_rank(subspace, components)
  return subspace


def _as_arrays(tree: Any) -> Any:
  _tree.check_floating(tree, "fit_subspace_streamed", _fit.KEEP_OUT)
  return jax.tree.map(lambda x: x if isinstance(x, jax.Array) else np.asarray(x), tree)


def _empty_rows(like: Any, count: int) -> Any:
  def empty(x: Any) -> jax.Array:
    # A broadcast keeps the sharding of the leaf.
    zero = jnp.zeros_like(x, dtype=_arrays.accumulator_dtype(x.dtype))
    return jnp.broadcast_to(zero, (count, *zero.shape))

  return jax.tree.map(empty, like)


@functools.partial(jax.jit, donate_argnums=0)
def _write(rows: Any, origin: Any, snapshot: Any, row: int) -> Any:
  """Writes the distance of a snapshot to the first one into a row."""

  def write(x: jax.Array, first: jax.Array, leaf: jax.Array) -> jax.Array:
    distance = leaf.astype(x.dtype) - first.astype(x.dtype)
    return jax.lax.dynamic_update_index_in_dim(x, distance, row, 0)

  return jax.tree.map(write, rows, origin, snapshot)


@functools.partial(jax.jit, donate_argnums=0)
def _accumulate(sums: Any, rows: Any, coefficients: Any) -> Any:
  new = tuple(_linalg.combine(c, rows) for c in (coefficients[:1], coefficients[1:]))
  return jax.tree.map(jnp.add, sums, new)


_inner = jax.jit(_linalg.inner_products)
_orthonormalize = jax.jit(_linalg.orthonormalize, donate_argnums=0)


@functools.partial(jax.jit, static_argnums=(6, 7))
def _finish(
  origin: Any, shift: Any, basis: Any, coordinates: Any, total: Any, count: Any, k: int, dtype: Any
) -> _subspace.Subspace:
  mean = jax.tree.map(lambda o, s: o.astype(s.dtype) + s[0], origin, shift)
  return _fit.as_subspace(mean, _linalg.rayleigh_ritz(basis, coordinates, total, k), count, dtype)

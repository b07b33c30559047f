"""`PermutedParams`, a model whose params are a permutation of the initial params, and its file."""

from collections.abc import Sequence
import math
import os
from typing import Any, NamedTuple
import zipfile
import zlib

import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost._form import _protocol
from optax_boost._foundation import (
  _arrays,
  _checks,
  _files,
  _masks,
  _paths,
  _placement,
  _tree_checks,
)
from optax_boost._methods._sgperm import _execution


class PermutedParams(NamedTuple):
  """A model that :func:`sgperm` or :func:`laperm` trained; :func:`permuted_params` returns it.

  Attributes:
    params: exactly a permutation of the initial params. Leaves that the method doesn't permute are
      the leaves of the params passed to :func:`permuted_params`, or ``optax.MaskedNode()``.
    permutation: a tree like `params` of int32: for each entry of a leaf the index that the entry's
      value had in the raveled initial leaf. So `permutation` and the initial params determine the
      model. Leaves that the method doesn't permute are ``optax.MaskedNode()``.

  Examples:
    >>> import pathlib, tempfile, jax, jax.numpy as jnp, optax_boost
    >>> init = lambda seed: {"kernel": jax.random.normal(jax.random.key(seed), (30, 20))}
    >>> tx = optax_boost.sgperm(method="rank")
    >>> grads, params = jax.tree.map(jnp.sin, init(7)), init(7)
    >>> params, state = optax_boost.apply_gradients(tx, grads, tx.init(params), params)
    >>> model = optax_boost.permuted_params(state)
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "model.npz"
    >>> model.save(path)
    >>> again = optax_boost.PermutedParams.load(path, init(7))
    >>> bool(jnp.all(again.params["kernel"] == params["kernel"]))
    True
  """

  params: optax.Params
  permutation: optax.Params

  @classmethod
  def from_initial(cls, initial: optax.Params, permutation: optax.Params) -> "PermutedParams":
    """Returns the model whose params are a permutation of initial params.

    Args:
      initial: the params that the training started from.
      permutation: a tree like `initial` of integers. A leaf whose permutation is
        ``optax.MaskedNode()`` is not permuted.

    Returns:
      The model, whose params are exact.

    Raises:
      ValueError: `permutation` does not fit `initial`: its tree or a shape differs, or an index is
        out of range or occurs twice (checked outside ``jit``).
    """
    leaves, structure = jax.tree.flatten(initial, is_leaf=_masks.is_masked)
    paths = _paths.leaf_paths(initial, _masks.is_masked)
    indices = _aligned(permutation, initial)
    permuted = [
      _permuted(_paths.leaf_name(path), leaf, index)
      for path, leaf, index in zip(paths, leaves, indices, strict=True)
    ]
    return cls(jax.tree.unflatten(structure, permuted), permutation)

  def save(self, path: str | os.PathLike[str]) -> None:
    """Writes the permutation to one npz file, without the initial values.

    An existing file is replaced as a whole. For each weight the file holds the rank of the weight
    among the distinct values of its weight vector, in 8, 16 or 32 bits, deflated. Leaves that are
    not permuted are written with their values. If arrays are sharded over several processes, all
    processes must call `save`.

    Args:
      path: the file, ``*.npz`` by convention.

    Raises:
      ValueError: a leaf is masked.
      OSError: the file can't be written; an existing file is unchanged.
    """
    arrays: dict[str, Any] = {}
    paths = _paths.leaf_paths(self.params, _masks.is_masked)
    leaves = jax.tree.leaves(self.params, is_leaf=_masks.is_masked)
    indices = jax.tree.leaves(self.permutation, is_leaf=_masks.is_masked)
    for name, x, index in zip(paths, leaves, indices, strict=True):
      if _masks.is_masked(x):
        raise ValueError(
          "`PermutedParams.save` needs the values of leaves that are not permuted; got none for the"
          f" leaf '{_paths.leaf_name(name)}'. Call `permuted_params(opt_state, params)`."
        )
      values = _on_this_host(x)
      if _masks.is_masked(index):
        arrays[f"values/{name}"] = _widened(values)
        continue
      axes = _moving_axes(_on_this_host(index))
      arrays[f"ranks/{name}"] = _dense_ranks(_columns(_bits(values), axes))
      arrays[f"axes/{name}"] = np.array(axes, np.int8)
      arrays[f"checksum/{name}"] = _checksum(values)
    _files.write_atomically(path, lambda file: np.savez_compressed(file, **arrays))

  @classmethod
  def load(cls, path: str | os.PathLike[str], initial: optax.Params) -> "PermutedParams":
    """Returns the model in a file of :meth:`save`.

    Args:
      path: the file.
      initial: the params that the training started from. JAX's random numbers may differ between
        versions and implementations, so `load` compares a checksum of each leaf in the file.

    Returns:
      The saved model, bit for bit, in the dtypes and on the devices of `initial`.

    Raises:
      FileNotFoundError: the file doesn't exist.
      ValueError: the file is damaged or not made by :meth:`save`, or `initial` are other params.
    """
    arrays = _read(path)
    leaves, structure = jax.tree.flatten(initial)
    names, saved = _paths.leaf_paths(initial), {name.partition("/")[2] for name in arrays}
    if set(names) != saved:
      raise ValueError(
        f"`initial` must be the params that the training started from; '{os.fspath(path)}' has the"
        f" leaves {_checks.shorten(sorted(saved))}, and `initial` {_checks.shorten(names)}."
      )
    loaded = [_decoded(arrays, name, leaf) for name, leaf in zip(names, leaves, strict=True)]
    values, permutation = zip(*loaded, strict=True)
    return cls(jax.tree.unflatten(structure, values), jax.tree.unflatten(structure, permutation))


def permuted_params(
  opt_state: optax.OptState, params: optax.Params | None = None
) -> PermutedParams:
  """Returns the model in an optimizer state of :func:`sgperm` or :func:`laperm`.

  Args:
    opt_state: the state of any chain or wrapper that holds one `sgperm` or one `laperm`. With
      `laperm` the result is the model of the last synchronization.
    params: the params from which the result takes leaves that the method doesn't permute (masked or
      excluded leaves). None: such leaves are ``optax.MaskedNode()``.

  Returns:
    The :class:`PermutedParams`. Permuted leaves have the dtype that the method trained; under
    ``master_weights`` this is the dtype of the master weights.

  Raises:
    ValueError: the state holds no `sgperm` and no `laperm`, or more than one; or `params` have
      another tree; or ``init`` was called under ``vmap`` (then map over the state with
      ``jax.vmap``).

  Examples:
    >>> import jax.numpy as jnp, optax_boost
    >>> params = {"bias": jnp.array([0.25, 0.5, 0.125])}
    >>> tx = optax_boost.sgperm(alpha=1.0, method="rank")
    >>> grads = {"bias": jnp.array([1.0, 0.0, -1.0])}
    >>> _, state = tx.update(grads, tx.init(params), params)
    >>> model = optax_boost.permuted_params(state)
    >>> model.params["bias"].tolist(), model.permutation["bias"].tolist()
    ([0.125, 0.25, 0.5], [2, 0, 1])
  """
  states: list[Any] = list(_protocol.declaring_states(opt_state, "exact"))
  if len(states) != 1:
    raise ValueError(
      "`permuted_params` needs a state with exactly one of `sgperm` and `laperm` in it; got"
      f" {len(states)}. Pass the part of the optimizer state that belongs to one of them."
    )
  _tree_checks.require_one_run(states[0].count, "permuted_params")
  # The result is a copy, since a train step that donates its state deletes the state's arrays.
  exact, permutation = _arrays.copy_arrays((states[0].permuted_params, states[0].permutation))
  if params is None:
    return PermutedParams(exact, permutation)
  leaves, structure = jax.tree.flatten(params, is_leaf=_masks.is_masked)
  pairs = zip(leaves, _aligned(exact, params), strict=True)
  values = [p if _masks.is_masked(x) else x for p, x in pairs]
  trees = (values, _aligned(permutation, params))
  return PermutedParams(*(jax.tree.unflatten(structure, tree) for tree in trees))


def _on_this_host(x: jax.Array) -> np.ndarray:
  """Returns the whole array; if `x` is sharded over processes, all processes must call this."""
  if _placement.is_whole_here(x):
    return np.asarray(x)
  return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def _aligned(tree: optax.Params, params: optax.Params) -> list[Any]:
  """Returns for each leaf of `params` the leaf of `tree` that has the same path.

  If the method does not permute a leaf, ``optax.MaskedNode()`` is returned for the leaf. Raises
  ValueError if the trees differ in other leaves.
  """
  leaves = _masks.leaves_like(tree, params)
  if leaves is None:
    raise ValueError(
      f"`params` must have the structure that was permuted, {jax.tree.structure(tree)}; got"
      f" {jax.tree.structure(params)}."
    )
  return leaves


def _permuted(name: str, start: jax.Array, index: jax.Array) -> jax.Array:
  """Returns ``ravel(start)[index]``; raises ValueError if `index` is not a permutation.

  `start` is the initial leaf, and `name` its path for error messages. A masked leaf, or a leaf with
  a masked `index`, is returned unchanged.
  """
  if _masks.is_masked(start) or _masks.is_masked(index):
    return start
  integers = jnp.issubdtype(jnp.result_type(index), jnp.integer)
  if not integers or jnp.shape(index) != jnp.shape(start):
    raise ValueError(
      f"`permutation` must hold integers of the params' shapes; the leaf '{name}' is"
      f" {jnp.result_type(index)} of shape {jnp.shape(index)} for params of shape"
      f" {jnp.shape(start)}. Pass the `permutation` of these params."
    )
  check_indices(index, jnp.size(start), "permutation", name)
  if not jnp.size(start):
    # XLA 20: an empty leaf is copied, since JAX fails to gather from an empty leaf on Explicit axes
    # of a mesh that is not set.
    return jnp.array(start)
  return _execution.auto_sharded(lambda x, i: jnp.ravel(x)[i], start)(start, index)


def check_indices(index: jax.Array, size: int, argument: str, name: str) -> None:
  """Raises ValueError unless each column of `index` holds each number from 0 to `size` - 1 once.

  `index` is read as a matrix with `size` rows. The error message names `argument`, the argument
  that holds `index`, and the leaf `name`. Tracers, and arrays of which other processes hold a part,
  are not checked.
  """
  if isinstance(index, jax.core.Tracer) or not size or not _placement.is_whole_here(index):
    return
  columns = np.sort(np.asarray(index).reshape(size, -1), axis=0)
  wrong = columns[columns != np.arange(size)[:, None]]
  if wrong.size:
    raise ValueError(
      f"`{argument}` must hold each index from 0 to {size - 1} of the leaf '{name}' once; got"
      f" {wrong[0]} out of range or more than once, so that weights would be lost."
    )


def _read(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
  """Returns the arrays in a file by name; raises ValueError if it can't be read as an npz file."""
  try:
    with open(path, "rb") as file:
      loaded = np.load(file, allow_pickle=False)
      if isinstance(loaded, np.ndarray):
        raise ValueError("it is a single array")
      return dict(loaded)
  except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
    raise ValueError(
      f"`PermutedParams.load` needs a file of `PermutedParams.save`; got '{os.fspath(path)}', which"
      f" can't be read: {error}. Save the model again."
    ) from error


def _decoded(arrays: dict[str, np.ndarray], name: str, leaf: jax.Array) -> tuple[Any, Any]:
  """Returns the values and the permutation of a leaf that was saved in a file.

  `arrays` are the arrays in the file, `name` is the leaf's path, and `leaf` has its initial values.
  If the leaf was not permuted, its permutation is ``optax.MaskedNode()``. Raises ValueError if the
  training started from a leaf of another shape or, for a permuted leaf, from other values.
  """
  start, sharding = _on_this_host(leaf), jnp.asarray(leaf).sharding
  values = arrays.get(f"values/{name}")
  if values is not None and values.shape == start.shape:
    return _placement.put(values.astype(start.dtype), sharding), optax.MaskedNode()
  axes = arrays[f"axes/{name}"].tolist() if f"axes/{name}" in arrays else None
  if axes is not None and all(axis < start.ndim for axis in axes):
    ranks, first = arrays[f"ranks/{name}"], _columns(_bits(start), axes)
    if ranks.shape == first.shape:
      # If initial values are equal, ranks don't tell which of them an entry received. So equal
      # values are taken in the order of the initial leaf; any other order gives the same params.
      entries = _columns(np.arange(start.size, dtype=np.int32).reshape(start.shape), axes)
      by_rank = np.argsort(ranks, axis=0, kind="stable")
      by_start = np.argsort(first, axis=0, kind="stable")
      moved = np.empty_like(entries)
      np.put_along_axis(moved, by_rank, np.take_along_axis(entries, by_start, 0), 0)
      index = np.empty_like(entries, shape=start.shape)
      index.reshape(-1)[entries] = moved
      values = start.reshape(-1)[index]
      if _checksum(values) == arrays[f"checksum/{name}"]:
        return _placement.put(values, sharding), _placement.put(index, sharding)
  raise ValueError(
    "`initial` must be the params that the training started from; got other values for the leaf"
    f" '{_paths.leaf_name(name)}' of shape {start.shape}. Make the params with the same function,"
    " seed and random number generator."
  )


def _moving_axes(index: np.ndarray) -> list[int]:
  """Returns the axes along which a permutation moves entries; weight vectors run along them."""
  if not index.size:
    return []
  place = np.indices(index.shape, sparse=True)
  start = np.unravel_index(index, index.shape)
  return [axis for axis in range(index.ndim) if np.any(start[axis] != place[axis])]


def _columns(x: np.ndarray, axes: Sequence[int]) -> np.ndarray:
  """Returns a matrix whose columns are the leaf's weight vectors, which run along `axes`."""
  front = np.moveaxis(x, axes, range(len(axes)))
  length = math.prod(front.shape[: len(axes)])
  return front.reshape(length, math.prod(front.shape[len(axes) :]))


def _dense_ranks(columns: np.ndarray) -> np.ndarray:
  """Returns each entry's rank among the distinct entries of its column, as small unsigned ints."""
  order = np.argsort(columns, axis=0, kind="stable")
  ordered = np.take_along_axis(columns, order, 0)
  classes = np.zeros(columns.shape, np.int64)
  np.cumsum(ordered[1:] != ordered[:-1], axis=0, out=classes[1:])
  ranks = np.empty_like(classes)
  np.put_along_axis(ranks, order, classes, 0)
  return ranks.astype(np.min_scalar_type(np.max(classes, initial=0)))


def _bits(x: np.ndarray) -> np.ndarray:
  """Returns the bits of floats as unsigned integers, in which 0.0 and -0.0 differ."""
  return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}").reshape(x.shape)


def _widened(x: np.ndarray) -> np.ndarray:
  """Returns floats as float32 or float64, since NumPy has no bfloat16, and other arrays as is."""
  floating = jnp.issubdtype(x.dtype, jnp.floating)
  return x.astype(_arrays.accumulator_dtype(x.dtype)) if floating else x


def _checksum(values: np.ndarray) -> np.uint32:
  """Returns a checksum of floats, the same for bfloat16 and for float32 of the same values."""
  return np.uint32(zlib.crc32(_widened(values).tobytes()))

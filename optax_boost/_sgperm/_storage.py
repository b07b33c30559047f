"""Models that were trained by permuting weights, in files: a seed and small integers."""

from collections.abc import Callable
import json
import math
import os
from typing import Any
from typing import NoReturn
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost import _arrays
from optax_boost import _base
from optax_boost import _files
from optax_boost import _masking
from optax_boost import _tree
from optax_boost._sgperm import _permutation

_FORMAT = "optax_boost.permuted_params"
_VERSION = 1
_META, _DATA = "meta_json", "data"
_LARGEST_SEED = 2**64 - 1
# Entries packed at a time: a multiple of eight, so that each block fills whole bytes.
_BLOCK = 1 << 20


def save_permuted_params(
  path: str | os.PathLike[str],
  opt_state: optax.OptState,
  seed: int,
  params: optax.Params | None = None,
) -> None:
  """Writes a model that ``sgperm`` or ``laperm`` trained as a seed and integers.

  For each weight the file holds its place among the distinct initial values of its weight vector:
  at most ceil(log2 n) bits in a vector of n weights, 11 for n = 1,568, and one bit where the
  initial weights are random signs times a number. The initial values themselves are not in the
  file: :func:`load_permuted_params` makes them again from the seed.

  The file is either the old or the new one, never a part of it. Arrays on several machines must be
  gathered first.

  Args:
    path: the file, by custom ``*.npz``; one that exists is replaced, of a symbolic link its target.
    opt_state: the state of any chain that holds one of ``sgperm`` and ``laperm``. Of ``laperm`` the
      params of the last synchronization are saved.
    seed: the seed of the initial params, which `init_fn` will get.
    params: the params to take leaves from that were masked out or excluded; they are stored whole.

  Returns:
    Nothing.

  Raises:
    ValueError: the state holds no permutation, or several, or is that of a population; a leaf was
      masked out and `params` has none for it; the seed is out of range.
    TypeError: `path` is no path, or `seed` no whole number.
    OSError: the file can't be written; an old one is unchanged.

  Examples:
    >>> import pathlib, tempfile, jax, jax.numpy as jnp, optax_boost
    >>> init = lambda seed: {"kernel": jax.random.normal(jax.random.key(seed), (30, 20))}
    >>> params, tx = init(7), optax_boost.sgperm(method="rank")
    >>> _, state = tx.update(jax.tree.map(jnp.sin, params), tx.init(params), params)
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "model.npz"
    >>> optax_boost.save_permuted_params(path, state, seed=7)
    >>> loaded = optax_boost.load_permuted_params(path, init)
    >>> bool(jnp.all(loaded["kernel"] == optax_boost.permuted_params(state)["kernel"]))
    True
  """
  name = "save_permuted_params"
  _files.check_path("path", path)
  _base.check_whole_number("seed", seed, minimum=0, maximum=_LARGEST_SEED)
  state = _permutation.find_state(opt_state, name)
  like = state.permuted_params if params is None else params
  exact, indices = (
    _masking.leaves_like(tree, like) for tree in (state.permuted_params, state.permutation)
  )
  if exact is None or indices is None:
    raise ValueError(
      f"`{name}` needs `params` of the tree that the state was made for,"
      f" {jax.tree.structure(state.permuted_params)}; got {jax.tree.structure(like)}."
    )
  paths, own = _tree.leaf_paths(like, _tree.is_masked), jax.tree.leaves(like, _tree.is_masked)
  records, parts = [], []
  for text, given, values, index in zip(paths, own, exact, indices, strict=True):
    record, part = _encoded_leaf(text, values, index, given)
    records.append({"path": text, **record, "bytes": len(part)})
    parts.append(part)
  meta = {"format": _FORMAT, "version": _VERSION, "seed": int(seed), "leaves": records}
  contents: dict[str, Any] = {
    _META: np.frombuffer(json.dumps(meta).encode(), np.uint8),
    _DATA: np.frombuffer(b"".join(parts), np.uint8),
  }
  _files.write_atomically(path, lambda file: np.savez(file, **contents))


def load_permuted_params(
  path: str | os.PathLike[str], init_fn: Callable[[int], optax.Params]
) -> optax.Params:
  """Reads a model that :func:`save_permuted_params` wrote.

  Args:
    path: the file.
    init_fn: makes the initial params from the saved seed, as before the training. JAX's random
      numbers may differ between versions and implementations: that is found by a checksum.

  Returns:
    The params, equal to the saved ones to the last bit, on the devices of the initial ones and in
    their dtypes: those of half precision that were trained in ``master_weights`` are so again.

  Raises:
    FileNotFoundError: there is no such file.
    TypeError: `path` is no path, or `init_fn` no function.
    ValueError: the file is truncated, damaged or of another kind, or `init_fn` returns other params
      than those that the training started from; the message names it.

  Examples:
    >>> import pathlib, tempfile, jax.numpy as jnp, optax_boost
    >>> init = lambda seed: {"bias": jnp.arange(3.0) + seed}
    >>> tx = optax_boost.sgperm(alpha=1.0, method="rank")
    >>> grads = {"bias": jnp.array([-1.0, 0.0, 1.0])}
    >>> _, state = tx.update(grads, tx.init(init(4)), init(4))
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "model.npz"
    >>> optax_boost.save_permuted_params(path, state, seed=4)
    >>> optax_boost.load_permuted_params(path, init)["bias"].tolist()
    [6.0, 5.0, 4.0]
  """
  name = _files.check_path("path", path)
  _base.check_callable("init_fn", init_fn, "init_fn(seed)")
  seed, records, parts = _read(name)
  initial = init_fn(seed)
  paths = _tree.leaf_paths(initial)
  leaves, structure = jax.tree.flatten(initial)
  saved = [record["path"] for record in records]
  if paths != saved:
    raise ValueError(
      f"`init_fn` must return the params that {name} was saved from, with the leaves"
      f" {_base.shorten(saved)}; got {_base.shorten(paths)}."
    )
  loaded = [
    _decoded_leaf(name, seed, record, part, leaf)
    for record, part, leaf in zip(records, parts, leaves, strict=True)
  ]
  return jax.tree.unflatten(structure, loaded)


def _encoded_leaf(path: str, exact: Any, index: Any, given: Any) -> tuple[dict[str, Any], bytes]:
  """A leaf's record in the file, and its bytes."""
  leaf_name = _tree.leaf_name(path)
  if _tree.is_masked(exact):
    if _tree.is_masked(given):
      raise ValueError(
        "`save_permuted_params` needs the values of leaves that were not permuted; got none for"
        f" the leaf '{leaf_name}'. Pass them as `params`."
      )
    values = _whole(given, leaf_name)
    return _record(values, "raw"), values.tobytes()
  values, flat = _whole(exact, leaf_name), _whole(index, leaf_name)
  start = np.empty_like(values)
  start.reshape(-1)[flat.reshape(-1)] = values.reshape(-1)
  moving = _moving_axes(flat)
  columns = _columns(_as_bits(start), moving)
  order, classes = _classes(columns)
  own = np.empty_like(classes)
  np.put_along_axis(own, order, classes, 0)
  held = _from_columns(own, start.shape, moving).reshape(-1)[flat.reshape(-1)]
  bits = int(classes.max(initial=0)).bit_length()
  coding, part = _encode(held, bits)
  return _record(values, coding) | {"moving_axes": list(moving), "bits": bits}, part


def _record(values: np.ndarray, coding: str) -> dict[str, Any]:
  return {
    "shape": list(values.shape),
    "dtype": values.dtype.name,
    "coding": coding,
    "checksum": zlib.crc32(values.tobytes()),
  }


def _decoded_leaf(file: str, seed: int, record: dict[str, Any], part: Any, leaf: Any) -> Any:
  """The leaf as it was saved, from its initial values."""
  shape, dtype = tuple(record["shape"]), record["dtype"]
  # `master_weights` permutes what it widened: values of the narrow dtype, in another order.
  fits = _base.is_any_array(leaf) and leaf.shape == shape and _widens_to(leaf.dtype, dtype)
  values = _values(record, part, _arrays.whole(leaf).astype(dtype)) if fits else None
  if values is None or zlib.crc32(values.tobytes()) != record["checksum"]:
    _refuse(file, seed, record, leaf)
  return _arrays.put(values.astype(leaf.dtype), jnp.asarray(leaf).sharding)


def _refuse(file: str, seed: int, record: dict[str, Any], leaf: Any) -> NoReturn:
  """Says in what an initial leaf differs from the one that a file was saved from."""
  name, is_array = _tree.leaf_name(record["path"]), _base.is_any_array(leaf)
  shape, dtype = tuple(record["shape"]), record["dtype"]
  if not is_array or (leaf.shape, leaf.dtype.name) != (shape, dtype):
    got = f"{leaf.dtype} of shape {leaf.shape}" if is_array else _base.shorten(leaf)
    raise ValueError(
      f"`init_fn` must return the params that {file} was saved from, with {dtype} of shape {shape}"
      f" in the leaf '{name}'; got {got}."
    )
  raise ValueError(
    f"`init_fn` must return the params that the training started from; from the seed {seed} it gave"
    f" other values of the leaf '{name}' than those that {file} was saved with. Use the same"
    " function, and the same version and implementation of the random numbers."
  )


def _widens_to(narrow: Any, wide: str) -> bool:
  """Whether a dtype is another one, or is widened to it without loss."""
  return narrow.name == wide or (
    jnp.issubdtype(narrow, jnp.floating) and jnp.promote_types(narrow, wide).name == wide
  )


def _values(record: dict[str, Any], part: Any, start: np.ndarray) -> np.ndarray | None:
  """The values of a leaf; None where the initial ones have more distinct values than saved."""
  if record["coding"] == "raw":
    return np.frombuffer(part, start.dtype).reshape(start.shape)
  moving = tuple(record["moving_axes"])
  columns = _columns(_as_bits(start), moving)
  order, classes = _classes(columns)
  if classes.max(initial=0) >> record["bits"]:
    return None
  # Vectors with fewer distinct values than others leave zeros that no good file asks for.
  table = np.zeros((1 << record["bits"], columns.shape[1]), columns.dtype)
  np.put_along_axis(table, classes, np.take_along_axis(columns, order, 0), 0)
  bits = np.take_along_axis(table, _columns(part.reshape(start.shape), moving), 0)
  return _as_floats(_from_columns(bits, start.shape, moving), start.dtype)


def _moving_axes(index: np.ndarray) -> tuple[int, ...]:
  """The axes along which a permutation moves entries: at most those of the weight vectors."""
  if not index.size:
    return ()
  own, held = np.indices(index.shape, sparse=True), np.unravel_index(index, index.shape)
  return tuple(axis for axis in range(index.ndim) if np.any(held[axis] != own[axis]))


def _columns(x: np.ndarray, moving: tuple[int, ...]) -> np.ndarray:
  """A leaf with its weight vectors as columns."""
  rest = tuple(axis for axis in range(x.ndim) if axis not in moving)
  length = math.prod(x.shape[axis] for axis in moving)
  return x.transpose(moving + rest).reshape(length, -1 if x.size else 0)


def _from_columns(columns: np.ndarray, shape: tuple[int, ...], moving: tuple[int, ...]) -> Any:
  """The inverse of :func:`_columns`."""
  axes = moving + tuple(axis for axis in range(len(shape)) if axis not in moving)
  x = columns.reshape([shape[axis] for axis in axes]).transpose(np.argsort(axes).astype(int))
  return np.ascontiguousarray(x).reshape(shape)  # NumPy gives a scalar an axis.


def _as_bits(x: np.ndarray) -> np.ndarray:
  """Floats as unsigned integers, the sign in the lowest bit: the two zeros are 0 and 1."""
  # As a vector: NumPy 1 shifts scalars in 64 bits.
  bits = np.ravel(x).view(np.dtype(f"u{x.dtype.itemsize}"))
  return ((bits << 1) | (bits >> (8 * x.dtype.itemsize - 1))).reshape(x.shape)


def _as_floats(bits: np.ndarray, dtype: Any) -> np.ndarray:
  """The inverse of :func:`_as_bits`."""
  vector = np.ravel(bits)
  floats = ((vector >> 1) | (vector << (8 * bits.dtype.itemsize - 1))).view(dtype)
  return floats.reshape(bits.shape)


def _classes(columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """The order that sorts each column, and the ranks of its distinct values in that order."""
  order = np.argsort(columns, axis=0, kind="stable")
  ordered = np.take_along_axis(columns, order, 0)
  classes = np.zeros(columns.shape, np.int64)
  np.cumsum(ordered[1:] != ordered[:-1], axis=0, out=classes[1:])
  return order, classes


def _encode(values: np.ndarray, bits: int) -> tuple[str, bytes]:
  """Integers in the smaller of two codings: packed into so many bits, or deflated bytes."""
  packed = b"".join(
    np.packbits((values[i : i + _BLOCK, None] >> np.arange(bits)) & 1).tobytes()
    for i in range(0, len(values), _BLOCK)
  )
  # Low bytes first, then the next: deflate codes each by how frequent it is.
  planes = np.ascontiguousarray(values.astype("<u4").view(np.uint8).reshape(-1, 4).T)
  deflated = zlib.compress(planes[: -(-bits // 8)].tobytes(), 9)
  return ("deflated", deflated) if len(deflated) < len(packed) else ("packed", packed)


def _decode(part: bytes, coding: str, bits: int, size: int) -> np.ndarray:
  """The integers of :func:`_encode`."""
  if coding == "packed":
    if len(part) != -(-size * bits // 8):
      raise ValueError(f"{size} integers of {bits} bits have {len(part)} bytes")
    flat = np.unpackbits(np.frombuffer(part, np.uint8), count=size * bits)
    planes, width = flat.reshape(size, bits).T, 1
  elif coding == "deflated":
    count = -(-bits // 8)
    # One byte more than expected, so that a part that holds more fails to be reshaped.
    inflated = zlib.decompressobj().decompress(part, count * size + 1)
    planes, width = np.frombuffer(inflated, np.uint8).reshape(count, size), 8
  else:
    raise ValueError(f"{coding!r} is no coding of this version")
  values = np.zeros(size, np.int64)
  for i, plane in enumerate(planes):
    values |= plane.astype(np.int64) << (width * i)
  return values


def _read(path: str) -> tuple[int, list[dict[str, Any]], list[Any]]:
  """The seed, and of each leaf its record and its integers, or bytes."""
  if os.path.isdir(path):
    raise ValueError(f"`load_permuted_params` needs a file; {path} is a directory.")
  with open(path, "rb") as handle:
    try:
      return _checked(_files.read_arrays(handle), path)
    # NumPy, zipfile and json raise errors of a dozen types for files that are damaged or forged.
    except Exception as error:
      raise ValueError(
        "`load_permuted_params` needs a whole file that `save_permuted_params` wrote (format"
        f" {_FORMAT}, version {_VERSION}); {path} is truncated, damaged or of another kind:"
        f" {str(error) or type(error).__name__}. Save the model again."
      ) from error


def _checked(arrays: dict[str, Any], path: str) -> tuple[int, list[dict[str, Any]], list[Any]]:
  if set(arrays) != {_META, _DATA}:
    raise ValueError(f"its arrays are {_base.shorten(sorted(arrays))}")
  meta = _files.parse_json(arrays[_META].tobytes().decode(), path)
  if not isinstance(meta, dict) or (meta.get("format"), meta.get("version")) != (_FORMAT, _VERSION):
    raise ValueError(f"its {_META!r} is not that of this format and version")
  data, parts = arrays[_DATA].tobytes(), []
  for record in meta["leaves"]:
    parts.append(_checked_part(record, data[: record["bytes"]]))
    data = data[record["bytes"] :]
  if data:
    raise ValueError(f"it has {len(data)} bytes that belong to no leaf")
  return int(meta["seed"]), meta["leaves"], parts


def _checked_part(record: dict[str, Any], part: bytes) -> Any:
  """A leaf's integers, or the bytes of an unpermuted leaf, checked against its record."""
  name, size = record["path"], math.prod(record["shape"])
  if not isinstance(name, str) or not isinstance(record["checksum"], int):
    raise ValueError(f"a leaf has the path {name!r} and the checksum {record['checksum']!r}")
  if record["coding"] == "raw":
    expected = size * np.dtype(jnp.dtype(record["dtype"])).itemsize
    if len(part) != expected:
      raise ValueError(f"the leaf {name!r} has {len(part)} of {expected} bytes")
    return part
  bits, axes = record["bits"], record["moving_axes"]
  if not 0 <= bits <= 31 or sorted(set(axes) & set(range(len(record["shape"])))) != axes:
    raise ValueError(f"the leaf {name!r} has {bits} bits along the axes {axes}")
  integers = _decode(part, record["coding"], bits, size)
  if integers.max(initial=0) >> bits:
    raise ValueError(f"the leaf {name!r} has integers of more than {bits} bits")
  return integers


def _whole(x: Any, leaf_name: str) -> np.ndarray:
  """An array of a leaf that this process holds in whole."""
  if not _arrays.is_whole_here(x):
    raise ValueError(
      f"`save_permuted_params` needs arrays that this process holds in whole; the leaf"
      f" '{leaf_name}' is on other machines, too. Gather it with"
      " `jax.experimental.multihost_utils.process_allgather`."
    )
  return np.asarray(x)

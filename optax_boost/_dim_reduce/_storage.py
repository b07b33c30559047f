"""Subspaces in files: written whole or not at all, and read back only if nothing is amiss."""

import hashlib
import json
import os
import pathlib
from typing import Any
import uuid
import zipfile
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost import _tree
from optax_boost._dim_reduce import _subspace

_FORMAT = "optax_boost.subspace"
_VERSION = 1
_META = "meta_json"


def save_subspace(path: str | os.PathLike[str], subspace: _subspace.Subspace) -> None:
  """Writes a subspace to a file that any NumPy can read.

  It is written under a temporary name in the same folder and then renamed, so that the file is
  either the old or the new one, never a part of it. Of arrays on several machines, gather or
  checkpoint them first.

  Args:
    path: the file, by custom ``*.npz``; one that is there is replaced.
    subspace: what :func:`fit_subspace` returned.

  Returns:
    Nothing.

  Raises:
    TypeError: `subspace` is none.

  Examples:
    >>> import pathlib, tempfile, jax.numpy as jnp, optax_boost
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "subspace.npz"
    >>> snapshots = {"w": jnp.array([[0.0, 0.0], [3.0, 4.0], [6.0, 8.0]])}
    >>> optax_boost.save_subspace(path, optax_boost.fit_subspace(snapshots, components=1))
    >>> loaded = optax_boost.load_subspace(path, like={"w": jnp.zeros(2)})
    >>> loaded.mean["w"].tolist()
    [3.0, 4.0]
  """
  if not isinstance(subspace, _subspace.Subspace):
    raise TypeError(
      f"`save_subspace` needs a Subspace, as `fit_subspace` returns it; got"
      f" {type(subspace).__name__}."
    )
  arrays: dict[str, Any] = {}
  dtypes: dict[str, str] = {}
  for field, tree in subspace._asdict().items():
    for leaf_path, leaf in zip(_tree.leaf_paths(tree), jax.tree.leaves(tree), strict=True):
      array = np.asarray(leaf)
      name = f"{field}/{leaf_path}"
      dtypes[name] = array.dtype.name
      # NumPy's format knows no bfloat16.
      arrays[name] = (
        array if array.dtype.isbuiltin == 1 else array.view(f"uint{8 * array.itemsize}")
      )
  meta = {
    "format": _FORMAT,
    "version": _VERSION,
    "dtypes": dtypes,
    "sha256": _digest(arrays),
  }
  contents: dict[str, Any] = {_META: np.array(json.dumps(meta)), **arrays}
  target = pathlib.Path(path)
  temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
  try:
    with open(temporary, "xb") as file:
      np.savez(file, **contents)
      file.flush()
      os.fsync(file.fileno())
    os.replace(temporary, target)
  except BaseException:
    temporary.unlink(missing_ok=True)
    raise


def load_subspace(path: str | os.PathLike[str], like: optax.Params) -> _subspace.Subspace:
  """Reads a subspace that :func:`save_subspace` wrote.

  Args:
    path: the file.
    like: the params that it belongs to, or abstract values of them: they give the tree and, if
      they have a ``NamedSharding``, the devices.

  Returns:
    The subspace, equal to the saved one.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: the file is truncated, damaged or of another kind, or belongs to other params.

  Examples:
    >>> import pathlib, tempfile, jax.numpy as jnp, optax_boost
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "subspace.npz"
    >>> snapshots = jnp.array([[0.0, 1.0], [0.0, 2.0], [0.0, 3.0]])
    >>> optax_boost.save_subspace(path, optax_boost.fit_subspace(snapshots, components=1))
    >>> optax_boost.load_subspace(path, like=jnp.zeros(2)).basis.tolist()
    [[0.0, 1.0]]
  """
  arrays = _read(pathlib.Path(path))
  leaves, structure = jax.tree.flatten(like)
  shapes = {p: jnp.shape(x) for p, x in zip(_tree.leaf_paths(like), leaves, strict=True)}
  saved = {
    name.removeprefix("mean/"): x.shape for name, x in arrays.items() if name.startswith("mean/")
  }
  if saved != shapes:
    name = sorted(set(saved.items()) ^ set(shapes.items()))[0][0]
    raise ValueError(
      f"`load_subspace` needs the params that the subspace was fitted to; at {name!r} the file"
      f" {path} has {saved.get(name, 'nothing')} and `like` has {shapes.get(name, 'nothing')}."
      " Pass the params of that model, or fit a subspace to this one's snapshots."
    )

  def tree(field: str, stacked: bool) -> Any:
    found = [
      _place(arrays[f"{field}/{p}"], x, stacked) for p, x in zip(shapes, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, found)

  return _subspace.Subspace(
    mean=tree("mean", False),
    basis=tree("basis", True),
    explained_variance=jnp.asarray(arrays["explained_variance/"]),
    explained_variance_ratio=jnp.asarray(arrays["explained_variance_ratio/"]),
  )


def _digest(arrays: dict[str, Any]) -> str:
  digest = hashlib.sha256()
  for name in sorted(arrays):
    array = arrays[name]
    digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
    digest.update(np.ascontiguousarray(array).data if array.size else b"")
  return digest.hexdigest()


def _read(path: pathlib.Path) -> dict[str, Any]:
  # NumPy leaves a file open that it opened itself and can't read.
  with open(path, "rb") as handle:
    try:
      return _checked_arrays(handle)
    # What NumPy, zipfile and json raise for files that are cut short, damaged or of other kinds.
    except (
      AttributeError,
      EOFError,
      KeyError,
      NotImplementedError,
      OSError,
      TypeError,
      ValueError,
      zipfile.BadZipFile,
      zlib.error,
    ) as error:
      raise ValueError(
        f"`load_subspace` needs a whole file that `save_subspace` wrote (format {_FORMAT}, version"
        f" {_VERSION}); {path} is truncated, damaged or of another kind: {error}. Fit and save the"
        " subspace again."
      ) from error


def _checked_arrays(handle: Any) -> dict[str, Any]:
  with np.load(handle, allow_pickle=False) as file:
    arrays = {name: file[name] for name in file.files}
  meta = json.loads(str(arrays.pop(_META)))
  if (meta["format"], meta["version"]) != (_FORMAT, _VERSION):
    raise ValueError(f"it is {meta['format']!r}, version {meta['version']!r}")
  if meta["sha256"] != _digest(arrays):
    raise ValueError("its content does not match its checksum")
  return {name: x.view(jnp.dtype(meta["dtypes"][name])) for name, x in arrays.items()}


def _place(array: Any, like: Any, stacked: bool) -> jax.Array:
  sharding = getattr(like, "sharding", None)
  if not isinstance(sharding, jax.sharding.NamedSharding):
    return jnp.asarray(array)
  spec = jax.sharding.PartitionSpec(None, *sharding.spec) if stacked else sharding.spec
  return jax.device_put(array, jax.sharding.NamedSharding(sharding.mesh, spec))

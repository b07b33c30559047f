"""Subspaces in files: written whole or not at all, and refused where anything is amiss."""

import json
import os
from typing import Any
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost import _arrays
from optax_boost import _base
from optax_boost import _files
from optax_boost import _tree
from optax_boost._dim_reduce import _subspace

_FORMAT = "optax_boost.subspace"
_VERSION = 1
_META = "meta_json"


def save_subspace(path: str | os.PathLike[str], subspace: _subspace.Subspace) -> None:
  """Writes a subspace to a file that any NumPy can read.

  The file is either the old or the new one, never a part of it; threads and processes may save to
  it at once. Arrays on several machines must be gathered or checkpointed first.

  Args:
    path: the file, by custom ``*.npz``; one that exists is replaced, of a symbolic link its target.
    subspace: the subspace, from :func:`fit_subspace`.

  Returns:
    Nothing.

  Raises:
    TypeError: `subspace` is no Subspace of floating-point arrays, or `path` no path.
    ValueError: a number is not finite, the arrays' shapes do not fit each other, or two leaves have
      the same path.
    OSError: the file can't be written; an old one is unchanged.

  Examples:
    >>> import pathlib, tempfile, jax.numpy as jnp, optax_boost
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "subspace.npz"
    >>> snapshots = {"w": jnp.array([[0.0, 0.0], [3.0, 4.0], [6.0, 8.0]])}
    >>> optax_boost.save_subspace(path, optax_boost.fit_subspace(snapshots, components=1))
    >>> loaded = optax_boost.load_subspace(path, like={"w": jnp.zeros(2)})
    >>> loaded.mean["w"].tolist()
    [3.0, 4.0]
  """
  _files.check_path("path", path)
  _subspace.check_subspace(subspace)
  arrays: dict[str, Any] = {}
  for field, tree in subspace._asdict().items():
    for leaf_path, leaf in zip(_tree.leaf_paths(tree), jax.tree.leaves(tree), strict=True):
      name = f"{field}/{leaf_path}"
      if name in arrays or "\0" in name:
        raise ValueError(
          f"`save_subspace` needs leaves of different paths without null characters; got {name!r}"
          " more than once or with one. Rename keys."
        )
      if not _arrays.is_whole_here(leaf):
        raise ValueError(
          f"`save_subspace` needs arrays that this process holds in whole; {name!r} is on other"
          " machines, too. Gather it with `jax.experimental.multihost_utils.process_allgather`."
        )
      array = np.asarray(leaf)
      arrays[name] = np.ascontiguousarray(array, array.dtype.newbyteorder("=")).reshape(array.shape)
  problem = _problem_of(arrays)
  if problem:
    raise ValueError(f"`save_subspace` needs a subspace that can be trained in; {problem}.")
  dtypes = {name: array.dtype.name for name, array in arrays.items()}
  plain = {name: x.view(_stored_dtype(x.dtype)) for name, x in arrays.items()}
  meta = {"format": _FORMAT, "version": _VERSION, "dtypes": dtypes}
  contents: dict[str, Any] = {_META: np.array(json.dumps(meta)), **plain}
  _files.write_atomically(path, lambda file: np.savez(file, **contents))


def load_subspace(path: str | os.PathLike[str], like: optax.Params) -> _subspace.Subspace:
  """Reads a subspace that :func:`save_subspace` wrote.

  Args:
    path: the file.
    like: the params that it belongs to, or abstract values of them: they give the tree and, if
      they have a ``NamedSharding``, the devices.

  Returns:
    The subspace, equal to the saved one; float64 is rounded to float32, with a warning, where
    ``jax_enable_x64`` is off.

  Raises:
    FileNotFoundError: there is no such file.
    TypeError: `path` is no path, or `like` holds something else than arrays.
    ValueError: the file is truncated, damaged or of another kind, holds numbers that are not finite
      or arrays that do not fit each other, or belongs to other params; the message names it.

  Examples:
    >>> import pathlib, tempfile, jax.numpy as jnp, optax_boost
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "subspace.npz"
    >>> snapshots = jnp.array([[0.0, 1.0], [0.0, 2.0], [0.0, 3.0]])
    >>> optax_boost.save_subspace(path, optax_boost.fit_subspace(snapshots, components=1))
    >>> optax_boost.load_subspace(path, like=jnp.zeros(2)).basis.tolist()
    [[0.0, 1.0]]
  """
  leaves = _subspace.leaves_like(like)
  arrays = _read(_files.check_path("path", path))
  saved = {
    name.removeprefix("mean/"): x.shape for name, x in arrays.items() if name.startswith("mean/")
  }
  _subspace.check_shapes(
    saved,
    leaves,
    "`load_subspace` needs the params that the subspace was fitted to",
    f"the file {path}",
    "Pass the params of that model, or fit a subspace to this one's snapshots.",
  )
  if any(jnp.result_type(x) != x.dtype for x in arrays.values()):
    warnings.warn(
      f"`load_subspace` rounds the float64 arrays in {path} to float32: `jax_enable_x64` is off."
      " Turn it on to load the saved numbers.",
      stacklevel=2,
    )

  def tree(field: str, stacked: bool) -> Any:
    named = [(arrays[f"{field}/{path}"], leaf) for path, leaf in leaves.items()]
    placed = [_subspace.placed(array, leaf, stacked) for array, leaf in named]
    return jax.tree.unflatten(jax.tree.structure(like), placed)

  return _subspace.Subspace(
    mean=tree("mean", False),
    basis=tree("basis", True),
    explained_variance=jnp.asarray(arrays["explained_variance/"]),
    explained_variance_ratio=jnp.asarray(arrays["explained_variance_ratio/"]),
  )


def _read(path: str) -> dict[str, Any]:
  if os.path.isdir(path):
    raise ValueError(f"`load_subspace` needs a file; {path} is a directory.")
  with open(path, "rb") as handle:
    try:
      return _checked_arrays(handle, path)
    # NumPy, zipfile and json raise errors of a dozen types for files that are damaged or forged.
    except Exception as error:
      raise ValueError(
        f"`load_subspace` needs a whole file that `save_subspace` wrote (format {_FORMAT}, version"
        f" {_VERSION}); {path} is truncated, damaged or of another kind:"
        f" {str(error) or type(error).__name__}. Fit and save the subspace again."
      ) from error


def _checked_arrays(handle: Any, path: str) -> dict[str, Any]:
  plain = _files.read_arrays(handle)
  if _META not in plain:
    raise ValueError(f"it has no {_META!r}")
  meta = _files.parse_json(str(plain.pop(_META)), path)
  if not isinstance(meta, dict) or (meta.get("format"), meta.get("version")) != (_FORMAT, _VERSION):
    raise ValueError(f"its {_META!r} is not that of this format and version")
  dtypes = meta.get("dtypes")
  if not isinstance(dtypes, dict) or set(dtypes) != set(plain):
    raise ValueError("its 'dtypes' are not those of its arrays")
  arrays = {name: _as_floating(name, x, dtypes[name]) for name, x in plain.items()}
  problem = _problem_of(arrays)
  if problem:
    raise ValueError(problem)
  return arrays


def _as_floating(name: str, array: Any, saved: Any) -> Any:
  """The array in the floating dtype that it was saved from."""
  named = isinstance(saved, str) and saved in dir(jnp)
  if not named or not jnp.issubdtype(jnp.dtype(saved), jnp.floating):
    raise ValueError(f"{name!r} is of dtype {_base.shorten(saved)}, which is no floating dtype")
  dtype = np.dtype(jnp.dtype(saved))
  if array.dtype != _stored_dtype(dtype):
    raise ValueError(f"{name!r} is stored as {array.dtype}, not as {_stored_dtype(dtype)}")
  return array.view(dtype)


def _stored_dtype(dtype: Any) -> Any:
  """The dtype that stands for one in a file: NumPy's format knows no bfloat16."""
  numpys = dtype.name in ("float16", "float32", "float64")
  return dtype if numpys else np.dtype(f"uint{8 * dtype.itemsize}")


def _problem_of(arrays: dict[str, Any]) -> str | None:
  """The reason why arrays by name are no subspace, or None."""
  variances = ("explained_variance/", "explained_variance_ratio/")
  means = {n.removeprefix("mean/"): x for n, x in arrays.items() if n.startswith("mean/")}
  bases = {n.removeprefix("basis/"): x for n, x in arrays.items() if n.startswith("basis/")}
  named = {f"{field}/{n}" for field in ("mean", "basis") for n in means}
  if set(means) != set(bases) or set(arrays) != named | set(variances):
    return f"its arrays are {_base.shorten(sorted(arrays))}"
  shape = arrays[variances[0]].shape
  if len(shape) != 1 or not shape[0] or arrays[variances[1]].shape != shape:
    return f"its variances have shapes {[arrays[name].shape for name in variances]}"
  for name, mean in means.items():
    if bases[name].shape != (*shape, *mean.shape):
      return (
        f"'basis/{name}' has shape {bases[name].shape}, and 'mean/{name}' {mean.shape} with"
        f" {shape[0]} components"
      )
  for name, array in arrays.items():
    if not np.all(np.isfinite(array)):
      return f"{name!r} holds numbers that are not finite"
  return None

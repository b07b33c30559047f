"""The type `Subspace`, and functions that save, load, check and shard a subspace."""

import os
from typing import Any, NamedTuple
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost._foundation import _checks, _files, _paths, _placement, _tree_checks


class Subspace(NamedTuple):
  """A subspace of the params, as :func:`fit_subspace` finds it.

  Attributes:
    mean: a tree like the params, the mean of the snapshots in float32 (float64 for float64).
    basis: a tree like the params with leaves ``[k, *leaf.shape]``: k rows, the row with the largest
      variance first. The rows are orthonormal over the whole tree, or within each group if the
      subspace was fitted with `groups`.
    explained_variance: [k], the variances of the m snapshots along the rows, with m - 1 as divisor,
      summed over groups. NaN in a subspace from MindSpore's file, which has no variances.
    explained_variance_ratio: [k], the variances divided by the whole variance of the snapshots.

  Examples:
    >>> import pathlib, tempfile, jax.numpy as jnp, optax_boost
    >>> snapshots = {"w": jnp.array([[0.0, 0.0], [3.0, 4.0], [6.0, 8.0]])}
    >>> subspace = optax_boost.fit_subspace(snapshots, components=1)
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "subspace.npz"
    >>> subspace.save(path)
    >>> optax_boost.Subspace.load(path, like={"w": jnp.zeros(2)}).mean["w"].tolist()
    [3.0, 4.0]
  """

  mean: optax.Params
  basis: optax.Params
  explained_variance: jax.Array
  explained_variance_ratio: jax.Array

  @property
  def components(self) -> int:
    """Returns k, the dimension of the subspace."""
    return jnp.shape(self.explained_variance)[-1]

  def __repr__(self) -> str:
    ratio = self.explained_variance_ratio
    return f"Subspace(components={self.components}, explained_variance_ratio={ratio})"

  def save(self, path: str | os.PathLike[str]) -> None:
    """Writes the subspace to one npz file; replaces an existing file as a whole.

    bfloat16 is widened to float32. Gather arrays that are sharded over several machines first.

    Raises:
      ValueError: the arrays' shapes don't match, or this process holds only a part of an array.
      OSError: the file can't be written; an existing file is unchanged.
    """
    check_subspace(self)
    arrays: dict[str, Any] = {}
    for name, leaf in zip(_paths.leaf_paths(self), jax.tree.leaves(self), strict=True):
      if not _placement.is_whole_here(leaf):
        raise ValueError(
          f"`Subspace.save` needs arrays that this process holds in whole; {name!r} is on other"
          " machines, too. Gather it with `jax.experimental.multihost_utils.process_allgather`."
        )
      if name in arrays:
        raise ValueError(f"`Subspace.save` needs leaves of different paths; got two at {name!r}.")
      arrays[name] = np.asarray(leaf, jnp.promote_types(leaf.dtype, jnp.float32))
    _files.write_atomically(path, lambda file: np.savez(file, **arrays))

  @staticmethod
  def load(path: str | os.PathLike[str], like: optax.Params) -> "Subspace":
    """Returns the subspace in a file of :meth:`save`, or in a file of MindSpore's ``pca_mat``.

    Args:
      path: the file. A ``.npy`` file must be MindSpore's matrix ``[k, n]``, whose columns are the
        entries of the leaves of `like`, in order. Such a file has no mean and no variances.
      like: the params of the subspace, or their abstract values. The subspace gets their tree
        structure and, if they have a ``NamedSharding``, their sharding.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file is damaged or of another kind, or belongs to other params.
    """
    _tree_checks.check_floating(like, "Subspace.load")
    try:
      with open(path, "rb") as file:
        loaded = np.load(file, allow_pickle=False)
        is_matrix = isinstance(loaded, np.ndarray)
        saved = (
          _subspace_from_matrix(loaded, like)
          if is_matrix
          else _subspace_from_arrays(dict(loaded), like)
        )
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
      raise ValueError(
        f"`Subspace.load` needs a file of `Subspace.save` for the params `like`, or MindSpore's"
        f" `pca_mat` as .npy; can't read '{os.fspath(path)}': {error}. Pass its model's params."
      ) from error
    check_subspace(saved)
    return Subspace(
      mean=jax.tree.map(lambda x, leaf: placed(x, leaf, stacked=False), saved.mean, like),
      basis=jax.tree.map(placed, saved.basis, like),
      explained_variance=jnp.asarray(saved.explained_variance),
      explained_variance_ratio=jnp.asarray(saved.explained_variance_ratio),
    )


def _subspace_from_arrays(arrays: dict[str, np.ndarray], like: optax.Params) -> Subspace:
  """Returns the subspace in a file of :meth:`Subspace.save`, from the file's arrays by path.

  `like` are the params of the subspace. Raises ValueError if the arrays don't fit `like`.
  """
  variances: Any = arrays.get("explained_variance", np.zeros(0))
  basis = jax.tree.map(lambda x: jax.ShapeDtypeStruct((*variances.shape, *x.shape), x.dtype), like)
  expected = Subspace(like, basis, variances, variances)
  paths = _paths.leaf_paths(expected)
  saved_shapes = {name: array.shape for name, array in arrays.items()}
  shapes = dict(zip(paths, map(np.shape, jax.tree.leaves(expected)), strict=True))
  if saved_shapes != shapes:
    name = sorted(saved_shapes.items() ^ shapes.items())[0][0]
    raise ValueError(
      f"it has {saved_shapes.get(name, 'nothing')} at {name!r}, and `like` needs"
      f" {shapes.get(name, 'nothing')}"
    )
  return jax.tree.unflatten(jax.tree.structure(expected), [arrays[path] for path in paths])


def _subspace_from_matrix(matrix: np.ndarray, like: optax.Params) -> Subspace:
  """Returns a subspace whose basis is MindSpore's matrix [k, n], with mean 0 and variances NaN.

  The columns of the matrix are the entries of the leaves of `like`, in order.
  """
  leaves, structure = jax.tree.flatten(like)
  ends = np.cumsum([leaf.size for leaf in leaves])
  if matrix.ndim != 2 or matrix.shape[1] != ends[-1]:
    raise ValueError(
      f"a matrix [k, n] must have a column for each of the {ends[-1]} params; it has shape"
      f" {matrix.shape}"
    )
  columns = np.split(matrix.astype(np.float32), ends[:-1], axis=1)
  rows = [x.reshape(-1, *leaf.shape) for x, leaf in zip(columns, leaves, strict=True)]
  mean = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), like)
  unknown = jnp.full(len(matrix), np.nan, np.float32)
  return Subspace(mean, jax.tree.unflatten(structure, rows), unknown, unknown)


def check_subspace(value: Subspace) -> None:
  """Raises an error unless `value` is a Subspace of floats whose shapes fit each other."""
  _checks.check_type("subspace", value, Subspace, "a Subspace, as `fit_subspace` returns it")
  shape = np.shape(value.explained_variance)
  for path, leaf in zip(_paths.leaf_paths(value), jax.tree.leaves(value), strict=True):
    if not hasattr(leaf, "dtype") or not jnp.issubdtype(leaf.dtype, jnp.floating):
      got = getattr(leaf, "dtype", type(leaf).__name__)
      raise TypeError(
        f"`subspace` must be a Subspace of real floating-point arrays; got {got} at '{path}'."
      )
    if len(shape) != 1 or not (path.startswith("mean") or leaf.shape[:1] == shape):
      raise ValueError(
        "`subspace` must be a Subspace with one variance, one ratio and one row of the basis per"
        f" component; got {shape} variances and shape {leaf.shape} at '{path}'."
      )


def placed(array: jax.typing.ArrayLike, like: jax.Array, stacked: bool = True) -> jax.Array:
  """Returns `array`, sharded as `like` if the sharding of `like` is known.

  If `stacked`, `array` has a first axis that `like` lacks, and this axis is not sharded.
  """
  traced = isinstance(like, jax.core.Tracer)
  sharding = jax.typeof(like).sharding if traced else getattr(like, "sharding", None)
  if not isinstance(sharding, jax.sharding.NamedSharding) or not sharding.mesh.axis_names:
    return jnp.asarray(array)
  spec = jax.sharding.PartitionSpec(*[None] * stacked, *sharding.spec)
  sharding = jax.sharding.NamedSharding(sharding.mesh, spec)
  if not traced:
    # `put` moves each shard to its device. One device might not have memory for the whole array.
    return _placement.put(array, sharding)
  return _placement.place_by(jnp.asarray(array), sharding)

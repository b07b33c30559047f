"""A subspace of the params: its type, its file, its checks, its place on devices."""

import os
from typing import Any
from typing import NamedTuple
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost import _arrays
from optax_boost import _base
from optax_boost import _files
from optax_boost import _tree


class Subspace(NamedTuple):
  """A subspace of the params, as :func:`fit_subspace` finds it.

  Attributes:
    mean: a tree like the params, the mean of the snapshots in float32 (float64 for float64).
    basis: a tree like the params with leaves ``[k, *leaf.shape]``: k rows, the one of the largest
      variance first, orthonormal over the whole tree, or over each group that was fitted.
    explained_variance: [k], the variances along the rows, with m - 1 as divisor; of several groups
      their sum. NaN if it is not known, as from MindSpore's file.
    explained_variance_ratio: [k], the same as fractions of the snapshots' whole variance.

  Examples:
    >>> import pathlib, tempfile, jax.numpy as jnp, optax_boost
    >>> snapshots = {"w": jnp.array([[0.0, 0.0], [3.0, 4.0], [6.0, 8.0]])}
    >>> subspace = optax_boost.fit_subspace(snapshots, components=1)
    >>> subspace
    Subspace(1 component of 2 params, explained_variance_ratio=[1.0])
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
    """How many dimensions the subspace has, k."""
    return jnp.shape(self.explained_variance)[-1]

  def __repr__(self) -> str:
    try:
      entries = sum(np.size(leaf) for leaf in jax.tree.leaves(self.mean))
      ratios = [round(float(ratio), 4) for ratio in np.ravel(self.explained_variance_ratio)]
    except Exception:  # the leaves may be traced, or anything that a tree holds
      return f"Subspace{tuple(self)!r}"
    plural = "" if self.components == 1 else "s"
    return (
      f"Subspace({self.components} component{plural} of {entries:,} params,"
      f" explained_variance_ratio={ratios})"
    )

  def save(self, path: str | os.PathLike[str]) -> None:
    """Writes the subspace to one npz file; a file that exists is replaced as a whole.

    bfloat16 is widened to float32. Arrays on several machines must be gathered first.

    Args:
      path: the file.

    Raises:
      TypeError: a leaf is not a real floating-point array.
      ValueError: the arrays' shapes don't fit each other, or this process holds a part of one only.
      OSError: the file can't be written; an old one is unchanged.
    """
    check_subspace(self)
    arrays: dict[str, Any] = {}
    for name, leaf in _named_leaves(self):
      if not _arrays.is_whole_here(leaf):
        raise ValueError(
          f"`Subspace.save` needs arrays that this process holds in whole; {name!r} is on other"
          " machines, too. Gather it with `jax.experimental.multihost_utils.process_allgather`."
        )
      arrays[name] = np.asarray(leaf, jnp.promote_types(leaf.dtype, jnp.float32))
    _files.write_atomically(path, lambda file: np.savez(file, **arrays))

  @staticmethod
  def load(path: str | os.PathLike[str], like: optax.Params) -> "Subspace":
    """Reads a file of :meth:`save`, or MindSpore's ``pca_mat``.

    Args:
      path: the file; a ``.npy`` file with a matrix ``[k, n]`` is taken for MindSpore's, its columns
        for the entries of the leaves of `like`, in order. It has no mean and no variances.
      like: the params to which the subspace belongs, or abstract values of them: they give the tree
        and, if they have a ``NamedSharding``, the devices.

    Returns:
      The subspace.

    Raises:
      FileNotFoundError: there is no such file.
      TypeError: `like` holds anything but arrays.
      ValueError: the file is damaged or of another kind, or belongs to other params.
    """
    leaves = leaves_like(like)
    try:
      with open(path, "rb") as file:
        loaded = np.load(file, allow_pickle=False)
        named = loaded if isinstance(loaded, np.ndarray) else dict(loaded)
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
      raise ValueError(
        f"`Subspace.load` needs a file of `Subspace.save`, or MindSpore's `pca_mat` as .npy;"
        f" '{os.fspath(path)}' is damaged or of another kind: {error}. Fit and save it again."
      ) from error
    if isinstance(named, np.ndarray):
      named = _split_matrix(named, leaves, path)
    wanted = {f"mean/{name}": tuple(leaf.shape) for name, leaf in leaves.items()}
    k = np.shape(named.get(_VARIANCES[0], ()))
    wanted |= {f"basis/{name}": (*k, *leaf.shape) for name, leaf in leaves.items()}
    wanted |= dict.fromkeys(_VARIANCES, k)
    saved = {name: array.shape for name, array in named.items()}
    if saved != wanted:
      name = sorted(set(saved.items()) ^ set(wanted.items()))[0][0]
      raise ValueError(
        f"`Subspace.load` needs the params to which the subspace was fitted; '{os.fspath(path)}'"
        f" has {saved.get(name, 'nothing')} at {name!r}, and `like` needs"
        f" {wanted.get(name, 'nothing')}. Pass that model's params, or fit a subspace to this one."
      )
    mean = [placed(named[f"mean/{name}"], leaf, stacked=False) for name, leaf in leaves.items()]
    basis = [placed(named[f"basis/{name}"], leaf) for name, leaf in leaves.items()]
    structure = jax.tree.structure(like)
    variances = (jnp.asarray(named[name]) for name in _VARIANCES)
    loaded = Subspace(
      jax.tree.unflatten(structure, mean), jax.tree.unflatten(structure, basis), *variances
    )
    check_subspace(loaded)
    return loaded


_VARIANCES = ("explained_variance", "explained_variance_ratio")


def _named_leaves(subspace: Subspace) -> list[tuple[str, Any]]:
  """The leaves by their names in a file."""
  pairs = [(name, getattr(subspace, name)) for name in _VARIANCES]
  for field in ("mean", "basis"):
    tree = getattr(subspace, field)
    paths = (f"{field}/{path}" for path in _tree.leaf_paths(tree))
    pairs += zip(paths, jax.tree.leaves(tree), strict=True)
  if len(dict(pairs)) < len(pairs):
    raise ValueError("`Subspace.save` needs leaves of different paths. Rename keys.")
  return pairs


def _split_matrix(matrix: np.ndarray, leaves: dict[str, Any], path: Any) -> dict[str, np.ndarray]:
  """MindSpore's matrix ``[k, n]`` as the arrays of a file of ours."""
  sizes = [int(np.prod(leaf.shape)) for leaf in leaves.values()]
  if matrix.ndim != 2 or matrix.shape[1] != sum(sizes):
    raise ValueError(
      f"`Subspace.load` needs a matrix [k, n] with a column for each of the {sum(sizes)} params;"
      f" '{os.fspath(path)}' has shape {matrix.shape}. Pass the params of which it was made."
    )
  k = len(matrix)
  rows = np.split(matrix.astype(np.float32), np.cumsum(sizes)[:-1], axis=1)
  named = {f"mean/{name}": np.zeros(leaf.shape, np.float32) for name, leaf in leaves.items()}
  for (name, leaf), part in zip(leaves.items(), rows, strict=True):
    named[f"basis/{name}"] = part.reshape(k, *leaf.shape)
  return named | dict.fromkeys(_VARIANCES, np.full(k, np.nan, np.float32))


def check_subspace(value: Any) -> None:
  """Checks the argument `subspace`: its type, dtypes, and one number of components."""
  _base.check_type("subspace", value, Subspace, "a Subspace, as `fit_subspace` returns it")
  for path, leaf in zip(_tree.leaf_paths(value), jax.tree.leaves(value), strict=True):
    if not hasattr(leaf, "dtype") or not jnp.issubdtype(leaf.dtype, jnp.floating):
      got = getattr(leaf, "dtype", type(leaf).__name__)
      raise TypeError(
        f"`subspace` must be a Subspace of real floating-point arrays; got {got} at '{path}'."
      )
  shape = np.shape(value.explained_variance)
  if len(shape) != 1 or not shape[0] or np.shape(value.explained_variance_ratio) != shape:
    raise ValueError(
      f"`subspace` must be a Subspace with one variance, and one ratio, per component; got"
      f" shapes {shape} and {np.shape(value.explained_variance_ratio)}."
    )
  for path, leaf in zip(_tree.leaf_paths(value.basis), jax.tree.leaves(value.basis), strict=True):
    if leaf.shape[:1] != shape:
      raise ValueError(
        f"`subspace` must be a Subspace whose basis has one row per component, {shape[0]}; got"
        f" shape {leaf.shape} at 'basis/{path}'."
      )


def placed(array: Any, like: Any, stacked: bool = True, like_stacked: bool = False) -> jax.Array:
  """An array, or a stack of k, sharded as `like` is, or its rows are, as far as that is known."""
  traced = isinstance(like, jax.core.Tracer)
  sharding = jax.typeof(like).sharding if traced else getattr(like, "sharding", None)
  if not isinstance(sharding, jax.sharding.NamedSharding) or not sharding.mesh.axis_names:
    return jnp.asarray(array)
  spec = jax.sharding.PartitionSpec(*[None] * stacked, *sharding.spec[like_stacked:])
  sharding = jax.sharding.NamedSharding(sharding.mesh, spec)
  if not traced:
    # Before anything else, so that no device holds all of it.
    return _arrays.put(array, sharding)
  return _arrays.place_by(jnp.asarray(array), sharding)


def leaves_like(like: Any) -> dict[str, Any]:
  """The leaves of the argument `like` by path; refuses leaves without shape and dtype."""
  for leaf in jax.tree.leaves(like):
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
      raise TypeError(
        f"`like` must be a tree of arrays or abstract values; got a leaf {_base.shorten(leaf)}."
      )
  return dict(zip(_tree.leaf_paths(like), jax.tree.leaves(like), strict=True))

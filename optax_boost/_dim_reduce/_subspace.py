"""A subspace of the params: its type, its checks, its place on devices."""

from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost import _arrays
from optax_boost import _base
from optax_boost import _tree


class Subspace(NamedTuple):
  """A subspace of the params, as :func:`fit_subspace` finds it.

  Attributes:
    mean: a tree like the params, the mean of the snapshots in float32 (float64 for float64).
    basis: a tree like the params with leaves ``[k, *leaf.shape]``: k rows, the one of the largest
      variance first, orthonormal over the whole tree, or over each group that was fitted.
    explained_variance: [k], the variances along the rows, with m - 1 as divisor; of several groups
      their sum.
    explained_variance_ratio: [k], the same as fractions of the snapshots' whole variance.
  """

  mean: optax.Params
  basis: optax.Params
  explained_variance: jax.Array
  explained_variance_ratio: jax.Array

  @property
  def components(self) -> int:
    """How many dimensions the subspace has, k."""
    return jnp.shape(self.explained_variance)[-1]


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


def check_shapes(
  saved: dict[str, tuple[int, ...]], like: dict[str, Any], required: str, source: str, advice: str
) -> None:
  """Refuses saved leaves whose paths or shapes are not those of `like`."""
  shapes = {path: tuple(jnp.shape(leaf)) for path, leaf in like.items()}
  if saved != shapes:
    path = sorted(set(saved.items()) ^ set(shapes.items()))[0][0]
    raise ValueError(
      f"{required}; at {path!r} {source} has {saved.get(path, 'nothing')} and `like` has"
      f" {shapes.get(path, 'nothing')}. {advice}"
    )

"""The state of :func:`dim_reduce`, and the storage of a basis in it."""

from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_boost import _protocol
from optax_boost import _tree
from optax_boost._dim_reduce._subspace import Subspace

METHOD = "dim_reduce"


@_protocol.declares(
  metrics=(
    "line_search_steps",
    "accepted_rho",
    "curvature",
    "explained_gradient",
    "rejected_count",
    "dim_reduce/notfinite_count",
  )
)
class DimReduceState(NamedTuple):
  """State of :func:`dim_reduce`, for k components and G groups (1 without `groups`).

  Attributes:
    basis: the components, a copy; a tree like the params with leaves ``[k, *leaf.shape]``, sharded
      as these are.
    momentum: ``M``, the momentum of the whole gradient, like the params, in at least float32.
    projected_momentum: ``q``, ``[G, k]``; the residual momentum is ``M - P' q``.
    inverse_hessian: ``B``, ``[G, k, k]``.
    projected_gradient: ``[G, k]``, of the last step that was accepted.
    last_step: ``s``, ``[G, k]``, the last accepted step in the subspace.
    inner_state: the state of `inner`; None without it.
    snapshots: the newest params, leaves ``[m, *leaf.shape]``; None without `refresh_every`.
    count: scalar int32, the number of steps made.
    line_search_steps: scalar int32, how many trial points the last step evaluated.
    accepted_rho: scalar, the step length that the last step accepted; 0 where none was.
    next_rho: scalar, the first step length that the next search tries, with `max_search="auto"`.
    inner_scale: scalar, with `inner` and `max_search="auto"` the mean curvature of the loss along
      the first step that ``B`` learned from: ``s`` is the distance times this. Else 1.
    curvature: scalar, ``y's / s's`` of the last step: the mean curvature of the loss along the
      accepted step before. Where it is not positive, ``B`` was not updated.
    explained_gradient: scalar, ``|P g|^2 / |g|^2`` of the last step: the share of the gradient
      that lies in the subspace, if the rows of the basis are orthonormal.
    rejected_count: scalar int32, the steps that found no step length.
    refresh_count: scalar int32, how often the subspace was replaced.
    notfinite_count: scalar int32, the gradients, losses and new subspaces that were not finite.
  """

  basis: optax.Params
  momentum: optax.Updates
  projected_momentum: jax.Array
  inverse_hessian: jax.Array
  projected_gradient: jax.Array
  last_step: jax.Array
  inner_state: optax.OptState
  snapshots: optax.Params
  count: jax.Array  # type: ignore[assignment]  # hides the method of tuples
  line_search_steps: jax.Array
  accepted_rho: jax.Array
  next_rho: jax.Array
  inner_scale: jax.Array
  curvature: jax.Array
  explained_gradient: jax.Array
  rejected_count: jax.Array
  refresh_count: jax.Array
  notfinite_count: jax.Array


def fitting_basis(subspace: Subspace, params: Any) -> Any:
  """The basis, cut down to the leaves that the params have; refuses that of other params."""
  if not jax.tree.leaves(params):
    return params
  rows = _matched(subspace.basis, params)
  if rows is None:
    raise ValueError(
      f"`{METHOD}` needs a subspace of its params; got a basis of the structure"
      f" {jax.tree.structure(subspace.basis)} for params {jax.tree.structure(params)}. Fit the"
      " subspace to snapshots of these params."
    )
  k = subspace.components
  leaves = zip(_tree.leaf_paths(params), *map(jax.tree.leaves, (params, rows)), strict=True)
  for path, leaf, r in leaves:
    if jnp.shape(r) != (k, *jnp.shape(leaf)):
      raise ValueError(
        f"`{METHOD}` needs a basis of {k} rows of the params' shapes; got {jnp.shape(r)} for the"
        f" leaf '{_tree.leaf_name(path)}' of shape {jnp.shape(leaf)}. Fit the subspace to"
        " snapshots of these params."
      )
  return rows


def _matched(basis: Any, params: Any) -> Any:
  """The leaves of a basis in the structure of the params, or None if they are those of others.

  By path, not by structure: the states of a Flax NNX optimizer, and the snapshots in them, wrap
  their arrays in other variables than a model does.
  """
  rows = dict(zip(_tree.leaf_paths(basis), jax.tree.leaves(basis), strict=True))
  nodes, structure = jax.tree_util.tree_flatten_with_path(params, is_leaf=_tree.is_masked)
  matched, masked = [], []
  for key_path, leaf in nodes:
    path = _tree.path_string(key_path)
    if _tree.is_masked(leaf):
      masked.append(path)
      matched.append(leaf)
    elif path not in rows:
      return None
    else:
      matched.append(rows.pop(path))
  if all(any(path == m or path.startswith(f"{m}/") for m in masked) for path in rows):
    return jax.tree.unflatten(structure, matched)
  return None


def basis_dtype(rows: Any, leaf: Any) -> Any:
  """The dtype in which a basis is kept by default: bfloat16 stays, all else is widened."""
  narrow = jnp.result_type(rows) == jnp.bfloat16
  return jnp.bfloat16 if narrow else _tree.accumulator_dtype(jnp.result_type(leaf))


def placed(rows: Any, leaf: Any, dtype: Any) -> jax.Array:
  """A copy of a stack of leaves ``[k, *leaf.shape]``, each sharded like the params' leaf."""
  sharding = jax.typeof(leaf).sharding if isinstance(leaf, jax.core.Tracer) else None
  if sharding is None and isinstance(leaf, jax.Array):
    sharding = leaf.sharding
  if isinstance(sharding, jax.sharding.NamedSharding) and sharding.mesh.axis_names:
    spec = jax.sharding.PartitionSpec(None, *sharding.spec)
    stacked = jax.sharding.NamedSharding(sharding.mesh, spec)
    # Before anything else, so that no device holds all of it.
    if not isinstance(leaf, jax.core.Tracer):
      rows = jax.device_put(rows, stacked)
    elif jax.sharding.AxisType.Explicit in sharding.mesh.axis_types:
      rows = jax.sharding.reshard(rows, stacked)
  return jnp.array(jnp.asarray(rows).astype(dtype))


def identities(state: DimReduceState) -> jax.Array:
  """The inverse Hessians ``[G, k, k]`` to start from."""
  groups, k = state.projected_gradient.shape
  identity = jnp.eye(k, dtype=state.inverse_hessian.dtype)
  return jnp.broadcast_to(identity, (groups, k, k))

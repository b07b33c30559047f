"""The state of :func:`dim_reduce`, and functions that put a basis into this state."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost._form import _finiteness, _protocol
from optax_boost._foundation import _arrays, _masks, _paths, _placement, _trees, _types, _warnings
from optax_boost._methods._dim_reduce import _flax_boxes, _groups, _linalg, _subspace

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
    basis: a copy of the subspace's basis, a tree like the params with leaves ``[k, *leaf.shape]``,
      sharded as the params are.
    momentum: ``M``, the momentum of the whole gradient, like the params, in at least float32.
    projected_momentum: ``q``, ``[G, k]``; the residual momentum is ``M - P' q``.
    inverse_hessian: ``B``, ``[G, k, k]``.
    projected_gradient: ``[G, k]``, the projected gradient of the last step that was accepted.
    last_step: ``s``, ``[G, k]``, the last accepted step in the subspace.
    inner_state: the state of `inner`; None without it.
    count: scalar int32, the number of steps made.
    line_search_steps: scalar int32, the number of trials in the last step.
    accepted_rho: scalar float, the step length that the last step's search accepted, or 0.
    next_rho: scalar float, the first length that the next search tries, if `max_search` is "auto".
    inner_scale: scalar float. With `inner` and `max_search="auto"`, it is the mean curvature of the
      loss along the first step from which ``B`` learned, and ``s`` is `inner_scale` times the
      distance that the params moved in the subspace. Otherwise `inner_scale` is 1.
    curvature: scalar float, measured in the last step: the mean curvature of the loss along ``s``,
      the last step accepted before. It is ``(y . s) / (s . s)``, where ``y`` is the change of the
      projected gradient since ``s`` was accepted. If it is not positive, ``B`` was not updated.
    explained_gradient: scalar float, ``|P g|^2 / |g|^2`` of the last step: the share of the
      gradient that lies in the subspace, if the rows of the basis are orthonormal.
    rejected_count: scalar int32, the number of steps whose search accepted no step length.
    refresh_count: scalar int32, the number of times that the subspace was replaced.
    notfinite_count: scalar int32, the number of gradients, losses and new subspaces that were not
      finite.
  """

  basis: optax.Params
  momentum: optax.Updates
  projected_momentum: jax.Array
  inverse_hessian: jax.Array
  projected_gradient: jax.Array
  last_step: jax.Array
  inner_state: optax.OptState
  count: _types.IntScalar  # type: ignore[assignment]  # hides the method of tuples
  line_search_steps: _types.IntScalar
  accepted_rho: _types.FloatScalar
  next_rho: _types.FloatScalar
  inner_scale: _types.FloatScalar
  curvature: _types.FloatScalar
  explained_gradient: _types.FloatScalar
  rejected_count: _types.IntScalar
  refresh_count: _types.IntScalar
  notfinite_count: _types.IntScalar


def basis_like(subspace: _subspace.Subspace, params: optax.Params) -> optax.Params:
  """Returns a copy of the basis for the leaves of `params`, sharded as these leaves are.

  A basis in bfloat16 stays so; otherwise the copy has at least float32. Raises ValueError if the
  basis does not fit the params.
  """
  targets = jax.tree.leaves(params, is_leaf=_masks.is_masked)
  # `leaves_like` returns None if the trees don't match. Then all rows count as masked, which raises
  # the error below.
  rows = _masks.leaves_like(subspace.basis, params) or [optax.MaskedNode()] * len(targets)
  pairs = [(r, p) for r, p in zip(rows, targets, strict=True) if not _masks.is_masked(p)]
  if any(_masks.is_masked(r) for r, _ in pairs):
    raise ValueError(
      f"`{METHOD}` needs a subspace of its params; got a basis of the structure"
      f" {jax.tree.structure(subspace.basis)} for params {jax.tree.structure(params)}. Fit the"
      " subspace to snapshots of these params."
    )
  basis = []
  for path, (r, p) in zip(_paths.leaf_paths(params), pairs, strict=True):
    if jnp.shape(r) != (subspace.components, *jnp.shape(p)):
      raise ValueError(
        f"`{METHOD}` needs a basis of {subspace.components} rows of the params' shapes; got"
        f" {jnp.shape(r)} for the leaf '{_paths.leaf_name(path)}' of shape {jnp.shape(p)}. Fit the"
        " subspace to snapshots of these params."
      )
    dtype = r.dtype if r.dtype == jnp.bfloat16 else _arrays.accumulator_dtype(p.dtype)
    basis.append(jnp.array(_subspace.placed(r, p).astype(dtype)))
  return _flax_boxes.unboxed(jax.tree.unflatten(jax.tree.structure(params), basis))


def warn_of_long_rows(basis: optax.Params, groups: _groups.SubspaceGroups) -> None:
  """Warns if rows of the basis are longer than 1 within a group."""
  leaves = jax.tree.leaves(basis)
  if any(isinstance(x, jax.core.Tracer) for x in leaves) or not any(x.size for x in leaves):
    return
  squares = jnp.diagonal(_products(basis, basis, groups), axis1=1, axis2=2)
  # A row of length 1 may be longer after rounding to bfloat16, so the bound is 1.05.
  if _placement.is_whole_here(squares) and (longest := np.sqrt(np.max(squares))) > 1.05:
    _warnings.warn(
      f"`{METHOD}` needs a basis of rows that are orthonormal within each group; got rows of length"
      f" {longest:.3g}, with which training may diverge. Pass the `groups` of `fit_subspace`.",
      UserWarning,
    )


_products = jax.jit(_linalg.products, static_argnums=2)


def refresh_subspace(
  opt_state: optax.OptState, subspace: _subspace.Subspace, groups: _groups.Plan = None
) -> optax.OptState:
  """Replaces the subspace in an optimizer state, on the host or under jit.

  The residual momentum does not change; the quasi-Newton matrix starts again from the identity.

  Args:
    opt_state: the state of any chain with :func:`dim_reduce`. If the chain has several
      `dim_reduce`, the subspace of each of them is replaced.
    subspace: the new subspace, with the same number of components as the old one. If the new
      subspace is not finite, the old one stays, and `notfinite_count` grows.
    groups: the argument `groups` of :func:`dim_reduce`.

  Returns:
    The new optimizer state, which shares all other arrays with the old one.

  Raises:
    ValueError: the state has no :func:`dim_reduce`, or the subspace does not fit.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_boost
    >>> rows = jnp.eye(3)
    >>> first = optax_boost.Subspace(jnp.zeros(3), rows[:2], jnp.ones(2), jnp.ones(2) / 2)
    >>> tx = optax.chain(optax_boost.dim_reduce(first))
    >>> state = tx.init(jnp.zeros(3))
    >>> state = optax_boost.refresh_subspace(state, first._replace(basis=rows[1:]))
    >>> optax.tree.get(state, "basis").tolist()
    [[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
  """
  _subspace.check_subspace(subspace)
  _groups.check_groups(groups)

  def is_state(node: _types.Tree) -> bool:
    return isinstance(node, DimReduceState)

  def renewed(node: _types.Tree) -> _types.Tree:
    if not isinstance(node, DimReduceState):
      return node
    new_groups = _groups.find_groups(node.momentum, groups, "refresh_subspace")
    shape = (new_groups.number, subspace.components)
    if shape != node.projected_gradient.shape:
      raise ValueError(
        "`refresh_subspace` needs the number of groups and of components of the state's subspace,"
        f" {node.projected_gradient.shape}; got {shape}. Pass the `groups` of `dim_reduce` and fit"
        " that many components."
      )
    basis = basis_like(subspace, node.momentum)
    warn_of_long_rows(basis, new_groups)
    # An NNX optimizer wraps each array of its state in a variable. Unflattening with the structure
    # of `node` puts the new arrays into variables again.
    leaves = jax.tree.leaves(_renew(node, basis, new_groups))
    return jax.tree.unflatten(jax.tree.structure(node), leaves)

  if not _trees.find_states(opt_state, DimReduceState):
    raise ValueError(
      "`refresh_subspace` needs an optimizer state with a DimReduceState in it; got"
      f" {jax.tree.structure(opt_state)}. Is `optax_boost.dim_reduce` part of the chain?"
    )
  return jax.tree.map(renewed, opt_state, is_leaf=is_state)


@functools.partial(jax.jit, static_argnums=2)
def _renew(
  state: DimReduceState, basis: optax.Params, groups: _groups.SubspaceGroups
) -> DimReduceState:
  """Returns the state with the new basis, or with the old one if `basis` is not finite.

  Sets M <- M - P' q for the old basis P, and q <- 0, which keeps the residual momentum M - P' q.
  """
  good = _finiteness.all_finite(basis)
  removed = jnp.where(good, state.projected_momentum, 0)
  inside = _linalg.combine(removed, state.basis, groups)

  def fresh(new: jax.typing.ArrayLike, old: jax.Array) -> jax.Array:
    return jnp.where(good, new, old).astype(old.dtype)

  return state._replace(
    basis=_trees.map_leaves(lambda old, new: fresh(new, old), state.basis, basis),
    momentum=_trees.map_leaves(lambda m, x: m - x.astype(m.dtype), state.momentum, inside),
    projected_momentum=fresh(0, state.projected_momentum),
    inverse_hessian=fresh(_linalg.identities(state.inverse_hessian), state.inverse_hessian),
    projected_gradient=fresh(0, state.projected_gradient),
    last_step=fresh(0, state.last_step),
    next_rho=fresh(1, state.next_rho),
    inner_scale=fresh(1, state.inner_scale),
    refresh_count=_arrays.increment_if(good, state.refresh_count),
    notfinite_count=_arrays.increment_if(~good, state.notfinite_count),
  )

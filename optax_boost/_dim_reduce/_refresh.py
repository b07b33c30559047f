"""Replaces the subspace while training goes on in it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost import _arrays
from optax_boost import _tree
from optax_boost._dim_reduce import _layers
from optax_boost._dim_reduce import _linalg
from optax_boost._dim_reduce import _state
from optax_boost._dim_reduce import _subspace
from optax_boost._dim_reduce._state import DimReduceState


def refresh_subspace(
  opt_state: optax.OptState, subspace: _subspace.Subspace, groups: _layers.Groups | None = None
) -> optax.OptState:
  """Replaces the subspace in an optimizer state, on the host or under jit.

  The residual momentum stays exactly the same; the quasi-Newton matrix starts anew.

  Args:
    opt_state: the state of any chain that holds a :class:`DimReduceState`; of several, all are
      renewed.
    subspace: the new subspace, of as many components. If it is not finite, the old one stays, and
      `notfinite_count` grows.
    groups: the argument `groups` of :func:`dim_reduce`.

  Returns:
    The new optimizer state. Its other parts are those of `opt_state`, not copies.

  Raises:
    ValueError: there is no such state, or the subspace does not fit.
    TypeError: `subspace` is none, or `groups` are no groups.

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
  _subspace.check_subspace("subspace", subspace)
  plan = _layers.checked_groups(groups)

  def is_state(node: Any) -> bool:
    return isinstance(node, DimReduceState)

  def renewed(node: Any) -> Any:
    if not is_state(node):
      return node
    number, components = node.projected_gradient.shape
    basis = _state.basis_like(subspace, node.momentum)
    if subspace.components != components:
      raise ValueError(
        f"`refresh_subspace` needs a subspace of {components} components, as the state's; got"
        f" {subspace.components}. Fit as many, or make a new transformation."
      )
    of_leaves, count = _layers.find_groups(node.momentum, plan, "refresh_subspace")
    if count != number:
      raise ValueError(
        f"`refresh_subspace` needs the {number} groups that `dim_reduce` was given; got {groups!r}."
      )
    _state.warn_of_long_rows(basis, of_leaves, number)
    new = _jitted_renew(node, basis, of_leaves, _arrays.all_finite(basis))
    # An NNX optimizer wraps each array in a variable.
    return jax.tree.unflatten(jax.tree.structure(node), jax.tree.leaves(new))

  if not _tree.find_states(opt_state, DimReduceState):
    raise ValueError(
      "`refresh_subspace` needs an optimizer state with a DimReduceState in it; got"
      f" {jax.tree.structure(opt_state)}. Is `optax_boost.dim_reduce` part of the chain?"
    )
  return jax.tree.map(renewed, opt_state, is_leaf=is_state)


def refresh_if_due(
  state: DimReduceState, params: Any, refresh_every: int, groups: tuple[_layers.LeafGroups, ...]
) -> DimReduceState:
  """Keeps the params in the state, and fits the basis anew every `refresh_every` steps."""
  if not groups:
    return state
  number = jax.tree.leaves(state.snapshots)[0].shape[0]
  # Each share of the period has a slot, the last share the first one. Of the params that share a
  # slot the last stay: unconditional, the write is in place.
  period = max(refresh_every, number)
  slot = jnp.sum(state.count % period > np.arange(number) * period // number) % number
  held = _tree.map_leaves(
    lambda kept, leaf: jax.lax.dynamic_update_index_in_dim(kept, leaf, slot, 0),
    state.snapshots,
    params,
  )

  def renewed(carry: Any) -> Any:
    _, state = carry
    rows, structure = jax.tree.flatten(held)
    parts, total = {}, jnp.zeros([])
    for group, members in _layers.split(rows, groups):
      _, centred = _linalg.centre(members, jnp.ones(number, bool))
      pca = _linalg.gram_pca(centred, state.projected_gradient.shape[-1])
      total += pca.total
      parts[group] = pca.components
    basis = jax.tree.unflatten(structure, _layers.join(parts, rows, groups))
    return jnp.asarray(False), _renew(state, basis, groups, jnp.isfinite(total))

  # A loop of one turn or none: through a conditional the basis would be copied at every step, and
  # under `vmap` fitted at every step.
  due = (state.count > 0) & (state.count % refresh_every == 0)
  carry = (due, state._replace(snapshots=None))
  _, state = jax.lax.while_loop(lambda carry: carry[0], renewed, carry)
  return state._replace(snapshots=held)


def _renew(
  state: DimReduceState, basis: Any, groups: tuple[_layers.LeafGroups, ...], good: jax.Array
) -> DimReduceState:
  """The state with another basis, if it is `good`; the residual momentum is unchanged."""
  # M - P' q must not change, and q starts at 0.
  taken = jnp.where(good, state.projected_momentum, 0)

  def fresh(new: Any, old: Any) -> Any:
    return jnp.where(good, new, old).astype(old.dtype)

  def unchanged(m: jax.Array, rows: jax.Array, of_leaf: _layers.LeafGroups) -> jax.Array:
    return m - _linalg.lift(taken.astype(m.dtype), rows, of_leaf)

  return state._replace(
    basis=_tree.map_leaves(lambda old, new: fresh(new, old), state.basis, basis),
    momentum=_tree.map_leaves(unchanged, state.momentum, state.basis, groups),
    projected_momentum=fresh(0, state.projected_momentum),
    inverse_hessian=fresh(_state.identities(state), state.inverse_hessian),
    projected_gradient=fresh(0, state.projected_gradient),
    last_step=fresh(0, state.last_step),
    next_rho=fresh(1, state.next_rho),
    inner_scale=fresh(1, state.inner_scale),
    refresh_count=_arrays.increment_if(good, state.refresh_count),
    notfinite_count=_arrays.increment_if(~good, state.notfinite_count),
  )


_jitted_renew = jax.jit(_renew, static_argnums=2)

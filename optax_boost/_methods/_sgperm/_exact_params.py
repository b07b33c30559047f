"""Takes the exact new params from the state of ``sgperm`` or ``laperm``.

The new params are a permutation of earlier params. A param plus its update may miss the new param
by one rounding. So the state holds the new params.
"""

import functools

import jax
import jax.numpy as jnp
import optax

from optax_boost._foundation import _masks, _placement, _types


def exact_params(
  new: optax.Params,
  params: optax.Params,
  updates: optax.Updates,
  permuted_params: optax.Params,
  is_valid: _types.Condition = True,
) -> optax.Params:
  """Returns `new`, params plus updates, with the entries of `permuted_params`, which are exact.

  If `is_valid` is False, or `permuted_params` are of another tree, all entries are those of `new`.
  """
  trees = (new, params, updates, permuted_params)
  leaves = [_masks.leaves_like(tree, params) for tree in trees]
  fitting = [tree_leaves for tree_leaves in leaves if tree_leaves is not None]
  if len(fitting) < len(trees):
    return new
  structure: _types.TreeDef = jax.tree.structure(params, is_leaf=_masks.is_masked)
  replace = functools.partial(_exact_if_reached, is_valid)
  return jax.tree.unflatten(structure, list(map(replace, *fitting)))


def _exact_if_reached(
  is_valid: _types.Condition,
  new: jax.Array,
  old: jax.Array,
  update: jax.Array,
  exact: jax.Array | optax.MaskedNode,
) -> jax.Array:
  """Returns `exact` in entries where `update` equals ``exact - old``, and `new` in the others.

  `old` and `exact` are the old and the new param, and `new` is ``old + update``, which may be
  rounded. If `is_valid` is False, the state's exact params don't count, and `new` is returned.
  """
  if _masks.is_masked(exact) or jnp.shape(exact) != jnp.shape(new):
    return new
  exact = _placement.in_device_memory(exact).astype(new.dtype)
  dtype = jnp.promote_types(new.dtype, update.dtype)
  step = exact.astype(dtype) - old.astype(dtype)
  # The tolerance is relative to the step. Another transformation may have changed the update, such
  # as to zero in a frozen leaf. Then the update does not lead to `exact`, and `new` is taken.
  leads = jnp.isclose(update.astype(dtype), step, jnp.finfo(update.dtype).eps, 0, equal_nan=True)
  return jnp.where(leads & is_valid, exact, new)

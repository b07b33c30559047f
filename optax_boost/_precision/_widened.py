"""Steps in float32 of half-precision params: their gradients, their checks and their rounding."""

from collections.abc import Callable
from typing import Any
from typing import TypeAlias

import jax
import jax.numpy as jnp
import optax

from optax_boost import _conditional
from optax_boost import _in_place
from optax_boost import _tree

# Makes an inner step: the params in float32, their updates and the next inner state.
InnerStep: TypeAlias = Callable[[], tuple[optax.Params, optax.Updates, optax.OptState]]


def widen(tree: Any) -> Any:
  """A tree in at least float32."""
  return jax.tree.map(_tree.widen, tree)


def arguments(
  updates: optax.Updates, extra_args: dict[str, Any], params: optax.Params
) -> tuple[optax.Updates, dict[str, Any]]:
  """The gradients and extra arguments of an inner optimizer whose params are in float32."""

  def full_gradient(*args: Any, **kwargs: Any) -> Any:
    return widen(_tree.mask_like(extra_args["full_grad_fn"](*args, **kwargs), updates))

  # The closures take the wide params: the model computes in its params' dtype all the same.
  closures = {name: extra_args.get(name) for name in ("value_fn", "grad_fn", "full_grad_fn")}
  if closures["full_grad_fn"] is not None:
    closures["full_grad_fn"] = full_gradient
  extra = extra_args | {
    name: _at_rounded(function, params) for name, function in closures.items() if function
  }
  return _tree.map_gradients(widen, updates, extra)


def _at_rounded(function: Any, params: optax.Params) -> Any:
  """A function of wide params that hands their rounding to a function of the params."""

  def call(wide: optax.Params, *args: Any, grad_fn: Any = None, full_grad_fn: Any = None) -> Any:
    del grad_fn, full_grad_fn  # named, so that optax's line searches let them pass
    return function(jax.tree.map(lambda w, p: w.astype(p.dtype), wide, params), *args)

  return call


def spoilt(
  updates: optax.Updates, moves: optax.Updates, moved: optax.OptState, state: optax.OptState
) -> jax.Array:
  """Whether the inner optimizer could not cope with its gradients."""
  bad_moves = ~_tree.all_finite(moves)
  if _conditional.scales_loss(state):
    # It copes with overflows, and must keep its record of them: inside an accumulation they wait
    # in the sum for the end of the window.
    return bad_moves
  # The state is looked through only where something is wrong already.
  return _conditional.cond(
    bad_moves | ~_tree.all_finite(updates),
    lambda: bad_moves | ~_conditional.no_entry_lost(moved, state),
    lambda: bad_moves,
  )


def skips_by_itself(inner: optax.GradientTransformation, inner_state: optax.OptState) -> bool:
  """Whether an inner optimizer skips its own bad steps in place."""
  return _conditional.scales_loss(inner_state) and _in_place.is_in_place(inner)


def skipped_in_place(
  inner_step: InnerStep,
  updates: optax.Updates,
  inner_state: optax.OptState,
  extra_args: dict[str, Any],
) -> tuple[jax.Array, jax.Array]:
  """Whether a step in place is not made, and whether it is counted."""

  def check() -> tuple[jax.Array, jax.Array]:
    params, moves, _ = inner_step()
    landed = _in_place.all_finite(optax.apply_updates(params, moves))
    # One thing after the other, so that nothing is kept for the next.
    (sound,) = _in_place.checked_unless(
      landed, lambda: (_in_place.all_finite(inner_step()[1]),), landed
    )
    nested = _conditional.scales_loss(inner_state)
    finite = jnp.isfinite(_in_place.largest(updates)) | nested
    (kept,) = _in_place.checked_unless(
      finite, lambda: (_in_place.none_lost(inner_step()[2], inner_state),), finite
    )
    skipped = ~(sound & kept)
    return skipped, skipped | ~landed

  usual = _in_place.ordinary(_in_place.sum_squares(updates), jnp.float32(1), extra_args)
  skipped, bad = _in_place.checked_unless(usual, check, ~usual, ~usual)
  return skipped, bad


def step_key(key: jax.Array, data: jax.Array, count: jax.Array) -> jax.Array:
  """The key of a step; `data` are a state's raw key data, `key` is one of the same kind."""
  return jax.random.fold_in(jax.random.wrap_key_data(data, impl=jax.random.key_impl(key)), count)


def round_stochastically(key: jax.Array, x: jax.Array, dtype: Any) -> jax.Array:
  """Rounds float32 to one of two neighbours in a 16-bit dtype, such that the mean is `x`."""
  nearest = x.astype(dtype)
  error = x - nearest.astype(x.dtype)
  other = jnp.nextafter(nearest, jnp.where(error > 0, jnp.inf, -jnp.inf).astype(dtype))
  gap = jnp.abs(other.astype(x.dtype) - nearest.astype(x.dtype))
  chance = jnp.where(gap > 0, jnp.abs(error) / gap, 0.0)
  move = jax.random.uniform(key, x.shape, x.dtype) < chance
  return jnp.where(move & jnp.isfinite(other), other, nearest)


def round_like(wide: optax.Params, params: optax.Params, key: jax.Array | None) -> optax.Params:
  """Wide params, rounded to the params' dtypes and to the ends of their ranges."""
  leaves, structure = jax.tree.flatten(wide)
  keys = [None] * len(leaves) if key is None else jax.random.split(key, max(len(leaves), 1))

  def round_one(w: jax.Array, p: jax.Array, key: jax.Array | None) -> jax.Array:
    limit = jnp.finfo(p.dtype).max.astype(w.dtype)
    w = jnp.clip(w, -limit, limit)
    if key is None or w.dtype == p.dtype:
      return w.astype(p.dtype)
    return round_stochastically(key, w, p.dtype)

  rounded = map(round_one, leaves, jax.tree.leaves(params), keys)
  return jax.tree.unflatten(structure, rounded)


def difference(rounded: optax.Params, params: optax.Params) -> optax.Updates:
  """Updates in float32 that lead from params to new ones of their dtype."""
  return jax.tree.map(jnp.subtract, widen(rounded), widen(params))

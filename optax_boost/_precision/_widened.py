"""Steps in float32 of half-precision params: their gradients, their checks and their rounding."""

from collections.abc import Callable
from collections.abc import Sequence
import functools
from typing import Any
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost import _arrays
from optax_boost import _conditional
from optax_boost import _in_place
from optax_boost import _masking

Arguments: TypeAlias = tuple[optax.Updates, dict[str, Any]]
# Whether a flag holds on all devices: each runs the inner optimizer, with its collectives, or none.
Agree: TypeAlias = Callable[[jax.Array], jax.Array]


def widen(tree: Any) -> Any:
  """A tree in at least float32."""
  return jax.tree.map(_arrays.widen, tree)


def arguments(
  updates: optax.Updates, extra_args: dict[str, Any], params: optax.Params
) -> Arguments:
  """The gradients and extra arguments of an inner optimizer whose params are in float32."""

  def full_gradient(*args: Any, **kwargs: Any) -> Any:
    return widen(_masking.mask_like(extra_args["full_grad_fn"](*args, **kwargs), updates))

  # The closures take the wide params: the model computes in its params' dtype all the same.
  closures = {name: extra_args.get(name) for name in _masking.CLOSURES}
  if closures["full_grad_fn"] is not None:
    closures["full_grad_fn"] = full_gradient
  extra = extra_args | {
    name: _at_rounded(function, params) for name, function in closures.items() if function
  }
  return _masking.map_gradients(widen, updates, extra)


def _at_rounded(function: Any, params: optax.Params) -> Any:
  """A function of wide params that hands their rounding to a function of the params."""

  def rounded(w: Any, p: Any) -> Any:
    return w if _masking.is_masked(w) else w.astype(p.dtype)

  def call(wide: optax.Params, *args: Any) -> Any:
    return function(jax.tree.map(rounded, wide, params, is_leaf=_masking.is_masked), *args)

  return _masking.beside_closures(call)


def step(
  inner: optax.GradientTransformationExtraArgs,
  updates: optax.Updates,
  extra_args: dict[str, Any],
  inner_state: optax.OptState,
  wide: optax.Params,
  params: optax.Params,
  agree: Agree,
) -> tuple[optax.Params, jax.Array, optax.OptState]:
  """The wide params after a step, whether it is counted as bad, and the next inner state."""
  moves, moved = _inner_step(inner, arguments(updates, extra_args, params), inner_state, wide)
  skipped = ~agree(~_spoilt(updates, moves, moved, inner_state))
  stepped = _conditional.select(skipped, wide, optax.apply_updates(wide, moves))
  bad = skipped | ~agree(_conditional.no_entry_lost(stepped, wide))
  inner_state = _conditional.select(skipped, inner_state, moved)
  return _in_place.keep_finite(stepped, wide), bad, inner_state


def _inner_step(
  inner: optax.GradientTransformationExtraArgs,
  arguments: Arguments,
  inner_state: optax.OptState,
  wide: optax.Params,
) -> tuple[optax.Updates, optax.OptState]:
  """An inner optimizer's updates and its next state, in the dtypes of this one."""
  updates, extra_args = arguments
  moves, moved = inner.update(updates, inner_state, wide, **extra_args)
  return moves, _conditional.cast_like(moved, inner_state)


def _spoilt(
  updates: optax.Updates, moves: optax.Updates, moved: optax.OptState, state: optax.OptState
) -> jax.Array:
  """Whether the inner optimizer could not cope with its gradients."""
  bad_moves = ~_arrays.all_finite(moves)
  if _conditional.scales_loss(state):
    # It copes with overflows, and must keep its record of them: inside an accumulation they wait
    # in the sum for the end of the window.
    return bad_moves
  # The state is looked through only where something is wrong already.
  return _conditional.cond(
    bad_moves | ~_arrays.all_finite(updates),
    lambda: bad_moves | ~_conditional.no_entry_lost(moved, state),
    lambda: bad_moves,
  )


def skips_by_itself(inner: optax.GradientTransformation, inner_state: optax.OptState) -> bool:
  """Whether an inner optimizer skips its own bad steps in place."""
  return _conditional.scales_loss(inner_state) and _in_place.is_in_place(inner)


def skipped_in_place(
  inner: optax.GradientTransformationExtraArgs,
  gradients: _in_place.Gradients,
  inner_state: optax.OptState,
  make_wide: Callable[[], optax.Params],
  params: optax.Params,
  agree: Agree,
) -> tuple[jax.Array, jax.Array]:
  """Whether a step in place is not made, and whether it is counted."""
  updates, extra_args = gradients()

  def inner_step() -> tuple[optax.Params, optax.Updates, optax.OptState]:
    wide = make_wide()
    return wide, *_inner_step(inner, arguments(*gradients(), params), inner_state, wide)

  def check() -> tuple[jax.Array, jax.Array]:
    wide, moves, _ = inner_step()
    landed = agree(_in_place.none_lost(optax.apply_updates(wide, moves), wide))
    # One thing after the other, so that nothing is kept for the next.
    (sound,) = _in_place.checked_unless(
      landed, lambda: (_in_place.all_finite(inner_step()[1]),), landed
    )
    nested = _conditional.scales_loss(inner_state)
    finite = agree(jnp.isfinite(_in_place.largest(updates))) | nested
    (kept,) = _in_place.checked_unless(
      finite, lambda: (_in_place.none_lost(inner_step()[2], inner_state),), finite
    )
    skipped = ~agree(sound & kept)
    return skipped, skipped | ~landed

  usual = agree(_in_place.ordinary(_in_place.sum_squares(updates), jnp.float32(1), extra_args))
  skipped, bad = _in_place.checked_unless(usual, check, ~usual, ~usual)
  return skipped, bad


def step_key(key: jax.Array, data: jax.Array, count: jax.Array) -> jax.Array:
  """The key of a step; `data` are a state's raw key data, `key` is one of the same kind."""
  return jax.random.fold_in(jax.random.wrap_key_data(data, impl=jax.random.key_impl(key)), count)


def round_stochastically(u: jax.Array, x: jax.Array, dtype: Any) -> jax.Array:
  r"""Rounds float32 to a 16-bit dtype, up with the probability that makes the mean `x`.

  .. math::
    q \left( \lfloor |x| / q \rfloor + [u < |x| / q - \lfloor |x| / q \rfloor] \right), \qquad
    u \sim U[0, 1)

  with the distance :math:`q` between neighbours in `dtype`. Beyond the range it is the range's end.
  """
  # All of it in float32, as XLA may leave out a conversion to 16 bits and back.
  info = jnp.finfo(dtype)
  magnitude = jnp.abs(x)
  bits = jax.lax.bitcast_convert_type(magnitude, jnp.uint32) & jnp.uint32(0x7F800000)
  power = jax.lax.bitcast_convert_type(bits, jnp.float32)  # of two, at most `magnitude`
  # By powers of two, so exactly; larger, so that no distance is below the smallest normal number.
  scale = jnp.where(power < 1, jnp.float32(2.0**64), jnp.float32(1))
  distance = jnp.maximum(power, info.smallest_normal.astype(jnp.float32)) * scale * float(info.eps)
  steps = magnitude * scale / distance
  below = jnp.floor(steps)
  up = (u < steps - below).astype(jnp.float32)
  rounded = jnp.minimum((below + up) * distance / scale, info.max.astype(jnp.float32))
  return jnp.where(jnp.isfinite(x), jnp.copysign(rounded, x), x).astype(dtype)


def round_like(wide: optax.Params, params: optax.Params, key: jax.Array | None) -> optax.Params:
  """Wide params, rounded to the params' dtypes and to the ends of their ranges."""
  leaves, structure = jax.tree.flatten(wide)
  like = jax.tree.leaves(params)
  draws = [None] * len(leaves) if key is None else _draws(key, leaves, like)

  def round_one(w: jax.Array, p: jax.Array, u: jax.Array | None) -> jax.Array:
    if w.dtype == p.dtype:
      return w
    if u is not None:
      return round_stochastically(u, w, p.dtype)
    limit = jnp.finfo(p.dtype).max.astype(w.dtype)
    return jnp.where(jnp.isfinite(w), jnp.clip(w, -limit, limit), w).astype(p.dtype)

  rounded = map(round_one, leaves, like, draws)
  return jax.tree.unflatten(structure, rounded)


def _draws(key: jax.Array, wide: Sequence[jax.Array], like: Sequence[jax.Array]) -> list[Any]:
  """Random numbers in [0, 1) for leaves of another dtype; small leaves' are drawn in one kernel."""
  keys = jax.random.split(key, max(len(wide), 1))
  draws: list[Any] = [None] * len(wide)
  for same in _arrays.alike([None] * len(wide), wide, like):
    first = same[0]
    if wide[first].dtype == like[first].dtype:
      continue
    draw = functools.partial(jax.random.uniform, shape=wide[first].shape, dtype=jnp.float32)
    if len(same) == 1:
      draws[first] = draw(keys[first])
      continue
    # Behind the barrier, or XLA would compile a kernel that draws for each leaf.
    together = jax.lax.optimization_barrier(jax.vmap(draw)(keys[np.array(same)]))
    for i, u in zip(same, together, strict=True):
      draws[i] = u
  return draws


def difference(rounded: optax.Params, params: optax.Params) -> optax.Updates:
  """Updates in float32 that lead from params to new ones of their dtype."""

  def subtract(r: jax.Array, p: jax.Array) -> jax.Array:
    # Infinite params stay: their difference is NaN.
    return jnp.where(r == p, 0, _arrays.widen(r) - _arrays.widen(p))

  return jax.tree.map(subtract, rounded, params)

"""Steps in float32 of half-precision params: their gradients, their checks and their rounding."""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost import _arrays
from optax_boost import _base
from optax_boost import _conditional
from optax_boost import _in_place
from optax_boost import _masking
from optax_boost import _tree


@dataclasses.dataclass(eq=False)
class WideOptimizer:
  """Makes the steps of an optimizer in float32, and rounds its params to their own dtypes.

  States have the fields `count`, `notfinite_count`, `key` and `inner_state`, and `master_params` if
  the params in float32 are kept. Otherwise each step widens the params.
  """

  method: str
  state_type: Any
  inner: Any
  key: Any  # None: to nearest
  axis_name: str | tuple[str, ...] | None

  def __post_init__(self) -> None:
    self.inner = _base.check_transformation("inner", self.inner)
    self.key = None if self.key is None else _base.as_key("key", self.key)
    _base.check_axis_name("axis_name", self.axis_name)

  def transformation(self) -> optax.GradientTransformationExtraArgs:
    return _in_place.transformation(self.init, self.step)

  def init(self, params: optax.Params) -> Any:
    _tree.check_floating(params, self.method)
    wide = _arrays.copy_arrays(params, _arrays.accumulator_dtype)
    fields: dict[str, Any] = {
      "count": jnp.zeros([], jnp.int32),
      "notfinite_count": jnp.zeros([], jnp.int32),
      # A copy: the state is donated, the caller's key is not.
      "key": None if self.key is None else jnp.array(jax.random.key_data(self.key)),
      "inner_state": self.inner.init(wide),
    }
    if "master_params" in self.state_type._fields:
      # Copies: an inner state may hold its params, and all of it is donated together.
      fields["master_params"] = _arrays.copy_arrays(wide)
    return self.state_type(**fields)

  def step(
    self,
    gradients: _in_place.Gradients,
    state: Any,
    params: optax.Params,
    landing: _in_place.Landing,
  ) -> tuple[Any, Any]:
    updates, _ = gradients()
    _tree.check_update(self.method, updates, state, self.state_type, params, needs_params=True)
    widen, round_ = self._conversions(state)
    # The inner step lands in wide params, which are rounded to the params of either landing.
    landing_wide = dataclasses.replace(landing, in_params=True, guard=True)

    def arguments() -> tuple[optax.Updates, dict[str, Any]]:
      return _arguments(*gradients(), params)

    def step(own: Any, masters: Any, inner_state: Any) -> Any:
      wide = widen(own, masters)
      wide, inner_state = landing_wide.step(self.inner, arguments, inner_state, wide)
      return round_(wide, own), None if masters is None else wide, inner_state

    def skip(own: Any, masters: Any) -> Any:
      masters = widen(own, masters)
      return round_(masters, own), masters

    carry = params, _masters(state), state.inner_state
    nested = _in_place.is_in_place(self.inner)
    if _conditional.scales_loss(state.inner_state) and nested:
      # It skips its own bad steps.
      bad = jnp.asarray(False)
      new, masters, inner_state = step(*carry)
    else:
      skipped, bad = self._checks(gradients, arguments, state, lambda: widen(*carry[:2]))
      made, new, masters, inner_state = landing_wide.change_if(~skipped, step, *carry)
      if masters is not None:
        _, new, masters = landing_wide.change_if(~made, skip, new, masters)
    result = new if landing.in_params else _difference(new, params)
    return result, _next_state(state, masters, bad, inner_state)

  def _agree(self, flag: jax.Array) -> jax.Array:
    """Whether a flag holds on all devices: each runs the inner optimizer's collectives, or none."""
    return _conditional.agree(flag, self.axis_name, self.method)

  def _conversions(self, state: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """From params and their masters, or None, to wide params; and from these to params again."""

    def key_at(count: jax.Array) -> jax.Array | None:
      if self.key is None or state.key is None:
        return None
      key = jax.random.wrap_key_data(state.key, impl=jax.random.key_impl(self.key))
      return jax.random.fold_in(key, count)

    if _masters(state) is None:
      # A step in place rounds in one loop, which makes the key.
      return (
        lambda params, _: _widen(params),
        lambda wide, params: _round_like(wide, params, key_at(state.count)),
      )
    last_key, key = key_at(state.count - 1), key_at(state.count)

    def follow(m: jax.Array, p: jax.Array, expected: jax.Array) -> jax.Array:
      return jnp.where((p == expected) | ~jnp.isfinite(p), m, p.astype(m.dtype))

    def widen(params: Any, masters: Any) -> optax.Params:
      # The masters go where something else has moved their params since the last step. Rounding is
      # repeated with that step's key, so its own outcome is not such a move. The initial masters
      # are numbers of the params' dtype, which every key rounds to themselves.
      return jax.tree.map(follow, masters, params, _round_like(masters, params, last_key))

    return widen, lambda wide, params: _round_like(wide, params, key)

  def _checks(
    self,
    gradients: _in_place.Gradients,
    arguments: _in_place.Gradients,
    state: Any,
    make_wide: Callable[[], optax.Params],
  ) -> tuple[jax.Array, jax.Array]:
    """Whether the step is skipped, and whether it is counted."""
    updates, extra_args = gradients()

    def inner_step() -> tuple[optax.Params, optax.Updates, optax.OptState]:
      wide, (grads, extra) = make_wide(), arguments()
      moves, moved = self.inner.update(grads, state.inner_state, wide, **extra)
      return wide, moves, _conditional.cast_like(moved, state.inner_state)

    def check() -> tuple[jax.Array, jax.Array]:
      wide, moves, _ = inner_step()
      landed = self._agree(_in_place.none_lost(optax.apply_updates(wide, moves), wide))
      # One thing after the other, so that nothing is kept for the next.
      (sound,) = _in_place.checked_unless(landed, lambda: (_finite_moves(inner_step()[1]),), landed)
      nested = _conditional.scales_loss(state.inner_state)
      finite = self._agree(jnp.isfinite(_in_place.largest(updates))) | nested
      (kept,) = _in_place.checked_unless(
        finite, lambda: (_in_place.none_lost(inner_step()[2], state.inner_state),), finite
      )
      skipped = ~self._agree(sound & kept)
      return skipped, skipped | ~landed

    squares = _in_place.sum_squares(updates)
    usual = self._agree(_in_place.ordinary(squares, jnp.float32(1), extra_args))
    skipped, bad = _in_place.checked_unless(usual, check, ~usual, ~usual)
    return skipped, bad


def _masters(state: Any) -> optax.Params | None:
  return getattr(state, "master_params", None)


def _next_state(state: Any, wide: Any, bad: jax.Array, inner_state: optax.OptState) -> Any:
  masters = {} if _masters(state) is None else {"master_params": wide}
  return state._replace(
    count=optax.safe_increment(state.count),
    notfinite_count=_arrays.increment_if(bad, state.notfinite_count),
    inner_state=inner_state,
    **masters,
  )


def _widen(tree: Any) -> Any:
  """A tree in at least float32."""
  return jax.tree.map(_arrays.widen, tree)


def _arguments(
  updates: optax.Updates, extra_args: dict[str, Any], params: optax.Params
) -> tuple[optax.Updates, dict[str, Any]]:
  """The gradients and extra arguments of an inner optimizer whose params are in float32."""

  def full_gradient(*args: Any, **kwargs: Any) -> Any:
    return _widen(_masking.mask_like(extra_args["full_grad_fn"](*args, **kwargs), updates))

  # The closures take the wide params: the model computes in its params' dtype all the same.
  closures = {name: extra_args.get(name) for name in _masking.CLOSURES}
  if closures["full_grad_fn"] is not None:
    closures["full_grad_fn"] = full_gradient
  extra = extra_args | {
    name: _at_rounded(function, params) for name, function in closures.items() if function
  }
  return _masking.map_gradients(_widen, updates, extra)


def _at_rounded(function: Any, params: optax.Params) -> Any:
  """A function of wide params that hands their rounding to a function of the params."""

  def rounded(w: Any, p: Any) -> Any:
    return w if _tree.is_masked(w) else w.astype(p.dtype)

  def call(wide: optax.Params, *args: Any) -> Any:
    return function(jax.tree.map(rounded, wide, params, is_leaf=_tree.is_masked), *args)

  return _masking.ignoring_closures(call)


def _finite_moves(moves: optax.Updates) -> jax.Array:
  return _in_place.none_lost(moves, jax.tree.map(jnp.zeros_like, moves))


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


def _round_like(wide: optax.Params, params: optax.Params, key: jax.Array | None) -> optax.Params:
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
  for same in _arrays.stackable([None] * len(wide), wide, like):
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


def _difference(rounded: optax.Params, params: optax.Params) -> optax.Updates:
  """Updates in float32 that lead from params to new ones of their dtype."""

  def subtract(r: jax.Array, p: jax.Array) -> jax.Array:
    # Infinite params stay: their difference is NaN.
    return jnp.where(r == p, 0, _arrays.widen(r) - _arrays.widen(p))

  return jax.tree.map(subtract, rounded, params)

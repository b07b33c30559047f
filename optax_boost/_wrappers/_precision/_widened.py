"""Makes the steps of half-precision params in float32, checks them and rounds the new params."""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost._form import _driver, _finiteness, _protocol, _transformation
from optax_boost._foundation import _arrays, _base, _conditional, _masking, _tree


@dataclasses.dataclass(frozen=True, eq=False)
class WideOptimizer:
  """Makes the steps of an optimizer in float32, and rounds its params to their own dtypes.

  States have the fields `count`, `notfinite_count`, `key`, `inner_state` and `made`, and
  `master_params` if the params in float32 are kept. Otherwise each step widens the params.
  """

  method: str
  state_type: Any
  inner: optax.GradientTransformationExtraArgs
  key: jax.Array | None  # None: round to nearest
  axis_name: str | tuple[str, ...] | None
  checks_updates: bool

  def init(self, params: optax.Params) -> Any:
    wide_params = _arrays.copy_arrays(params, _arrays.accumulator_dtype)
    fields: dict[str, Any] = {
      "count": jnp.zeros([], jnp.int32),
      "notfinite_count": jnp.zeros([], jnp.int32),
      # A copy: the state is donated, the caller's key is not.
      "key": None if self.key is None else jnp.array(jax.random.key_data(self.key)),
      "inner_state": self.inner.init(wide_params),
      "made": jnp.zeros([], bool),
    }
    if "master_params" in self.state_type._fields:
      # Copies: an inner state may hold its params, and all of it is donated together.
      fields["master_params"] = _arrays.copy_arrays(wide_params)
    return self.state_type(**fields)

  def before(self, call: _driver.Call, state: Any) -> tuple[_driver.Call, Any, Any]:
    params = call.params

    def gradients() -> tuple[optax.Updates, dict[str, Any]]:
      return _wide_arguments(*call.gradients(), params)

    go: _driver.Condition = True
    finite = jnp.asarray(True)
    # If the result is checked, `inner` may handle gradients that are not finite. A loss scale
    # inside must see every overflow: it skips these steps itself.
    unseen = _protocol.unseen_by_scale(state.inner_state, call.gradients()[0])
    if unseen and not self.checks_updates:
      go = finite = call.holds(lambda: self._agree(_finiteness.all_finite(unseen)))
    place = call.place, getattr(state, "master_params", None)
    return _driver.Call(gradients, place, go, self._landing(call.landing, state)), state, finite

  def after(
    self, call: _driver.Call, outcome: _driver.Outcome, state: Any, finite: jax.Array
  ) -> tuple[Any, Any]:
    result, masters = outcome.result
    if not call.landing.in_params:
      result = _difference(result, call.place)
    kept = {} if masters is None else {"master_params": masters}
    return result, state._replace(
      count=_arrays.increment_if(outcome.made, state.count),
      notfinite_count=_arrays.increment_if(~finite | outcome.lost, state.notfinite_count),
      **kept,
    )

  def _landing(self, outer: _driver.Landing, state: Any) -> _driver.Landing:
    """A landing in float32 params; its place is a pair: the params' place, and masters or None."""

    def get(place: Any) -> optax.Params:
      params, masters = outer.get(place[0]), place[1]
      return _widen_tree(params) if masters is None else self._follow(masters, params)

    def put(place: Any, new: optax.Params, old: optax.Params) -> Any:
      params = outer.get(place[0])
      key = self._step_key(state)
      rounded = _round_like(new, params, key)
      if key is not None:
        # An entry that the step did not change, as in a frozen layer, is not rounded again.
        rounded = jax.tree.map(
          lambda n, o, r, p: jnp.where(n == o, p, r), new, old, rounded, params
        )
      return outer.put(place[0], rounded, params), None if place[1] is None else new

    def read(place: Any) -> optax.Params:
      return _widen_tree(outer.read(place[0])) if place[1] is None else place[1]

    landing = dataclasses.replace(outer, in_params=True, cast=None, get=get, put=put, read=read)
    return landing.checked(self._agree) if self.checks_updates else landing

  def _agree(self, flag: jax.Array) -> jax.Array:
    """Whether a flag holds on all devices, so that all run the inner collectives, or none does."""
    return _conditional.agree(flag, self.axis_name, self.method)

  def _step_key(self, state: Any) -> jax.Array | None:
    if self.key is None or state.key is None:
      return None
    key = jax.random.wrap_key_data(state.key, impl=jax.random.key_impl(self.key))
    return jax.random.fold_in(key, state.count)

  def _follow(self, masters: optax.Params, params: optax.Params) -> optax.Params:
    """The masters, replaced by params that were changed since the last step.

    A param was changed if it is not the rounding of its master: to nearest, or with a key to one of
    the two neighbours.
    """

    def follow(m: jax.Array, p: jax.Array) -> jax.Array:
      if m.dtype == p.dtype:
        return jnp.where(_finiteness.finite_entries(p), p, m)
      if self.key is None:
        is_rounding = p == _round_to_nearest(m, p.dtype)
      else:
        is_rounding = (p == round_stochastically(0.0, m, p.dtype)) | (
          p == round_stochastically(1.0, m, p.dtype)
        )
      return jnp.where(is_rounding | ~_finiteness.finite_entries(p), m, p.astype(m.dtype))

    return jax.tree.map(follow, masters, params)


def make(
  method: str,
  state_type: Any,
  inner: optax.GradientTransformation,
  key: Any,
  axis_name: str | tuple[str, ...] | None,
  check: str,
) -> optax.GradientTransformationExtraArgs:
  """Checks the arguments of a factory and makes its transformation."""
  _base.check_axis_name("axis_name", axis_name)
  _base.check_name("check", check, ("updates", "gradients"))
  optimizer = WideOptimizer(
    method,
    state_type,
    _base.check_transformation("inner", inner),
    None if key is None else _base.as_key("key", key),
    axis_name,
    check == "updates",
  )
  return _transformation.wrapper(method, state_type, optimizer, needs_params=True, keeps="rounding")


def _widen_tree(tree: Any) -> Any:
  """A tree in at least float32."""
  return jax.tree.map(_arrays.widen, tree)


# The extra arguments that are functions of the params.
_CLOSURES = ("value_fn", "obj_fn", "grad_fn", "full_grad_fn")


def _wide_arguments(
  updates: optax.Updates, extra_args: dict[str, Any], params: optax.Params
) -> tuple[optax.Updates, dict[str, Any]]:
  """The gradients and extra arguments of an inner optimizer whose params are in float32."""

  def full_gradient(*args: Any, **kwargs: Any) -> Any:
    return _widen_tree(_masking.mask_like(extra_args["full_grad_fn"](*args, **kwargs), updates))

  # The closures get float32 params and round them, so that the model computes in its own dtype.
  closures = {name: extra_args.get(name) for name in _CLOSURES}
  if closures["full_grad_fn"] is not None:
    closures["full_grad_fn"] = full_gradient
  extra = extra_args | {
    name: _at_rounded(function, params) for name, function in closures.items() if function
  }
  return _masking.map_gradients(_widen_tree, updates, extra)


def _at_rounded(function: Any, params: optax.Params) -> Any:
  """Makes a function of the params one of float32 params, which it rounds."""

  def rounded(w: Any, p: Any) -> Any:
    return w if _tree.is_masked(w) else w.astype(p.dtype)

  def call(wide: optax.Params, *args: Any) -> Any:
    return function(jax.tree.map(rounded, wide, params, is_leaf=_tree.is_masked), *args)

  return _masking.ignoring_closures(call)


def round_stochastically(u: jax.typing.ArrayLike, x: jax.Array, dtype: Any) -> jax.Array:
  r"""Rounds float32 to a 16-bit dtype, up with the probability that makes the mean `x`.

  .. math::
    q \left( \lfloor |x| / q \rfloor + [u < |x| / q - \lfloor |x| / q \rfloor] \right), \qquad
    u \sim U[0, 1)

  with the distance :math:`q` between neighbours in `dtype`. Beyond the range it is the range's end.
  """
  # XLA 18: in float32 throughout, as a conversion to 16 bits and back may be left out.
  info = jnp.finfo(dtype)
  magnitude = jnp.abs(x)
  bits = jax.lax.bitcast_convert_type(magnitude, jnp.uint32) & jnp.uint32(0x7F800000)
  power = jax.lax.bitcast_convert_type(bits, jnp.float32)  # of two, at most `magnitude`
  # A power of two scales exactly, and keeps every distance above the smallest normal number.
  scale = jnp.where(power < 1, jnp.float32(2.0**64), jnp.float32(1))
  distance = jnp.maximum(power, info.smallest_normal.astype(jnp.float32)) * scale * float(info.eps)
  steps = magnitude * scale / distance
  below = jnp.floor(steps)
  up = (u < steps - below).astype(jnp.float32)
  rounded = jnp.minimum((below + up) * distance / scale, info.max.astype(jnp.float32))
  # An infinity stays one: this is a guard of the rounding, and no decision about bad entries.
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
    return _round_to_nearest(w, p.dtype)

  rounded = map(round_one, leaves, like, draws)
  return jax.tree.unflatten(structure, rounded)


def _round_to_nearest(x: jax.Array, dtype: Any) -> jax.Array:
  """Float32 in a 16-bit dtype; a finite number beyond its range becomes the range's end."""
  limit = jnp.finfo(dtype).max.astype(x.dtype)
  return jnp.where(jnp.isfinite(x), jnp.clip(x, -limit, limit), x).astype(dtype)


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
    # XLA 8: drawn at once, and with a barrier, or a kernel would draw for each leaf.
    together = jax.lax.optimization_barrier(jax.vmap(draw)(keys[np.array(same)]))
    for i, u in zip(same, together, strict=True):
      draws[i] = u
  return draws


def _difference(rounded: optax.Params, params: optax.Params) -> optax.Updates:
  """The float32 updates that change params into their new values, which have the params' dtype."""

  def subtract(r: jax.Array, p: jax.Array) -> jax.Array:
    # Infinite params stay infinite: the difference of infinities would be NaN.
    return jnp.where(r == p, 0, _arrays.widen(r) - _arrays.widen(p))

  return jax.tree.map(subtract, rounded, params)

"""Runs an optimizer in float32 for half-precision params, and rounds the new params.

:func:`master_weights` and :func:`stochastic_rounding` are this wrapper, with and without masters,
which are float32 copies of the params before rounding.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_boost._form import _driver, _finiteness, _protocol, _transformation
from optax_boost._foundation import _arrays, _checks, _extra_args, _masks, _mesh_axes, _types
from optax_boost._wrappers._precision import _rounding


@dataclasses.dataclass(frozen=True, eq=False)
class _Float32Optimizer:
  """The checked arguments of :func:`master_weights` or :func:`stochastic_rounding`.

  If `state_type` has a field `master_params`, the state keeps the params in float32. Otherwise each
  step casts the params to float32.
  """

  method: str
  state_type: type[Any]
  inner: optax.GradientTransformationExtraArgs
  key: jax.Array | None  # None: round to nearest
  axis_name: _types.AxisName | None
  checks_updates: bool

  def init(self, params: optax.Params) -> optax.OptState:
    float32_params = _arrays.copy_arrays(params, _arrays.accumulator_dtype)
    fields: dict[str, Any] = {
      "count": jnp.zeros([], jnp.int32),
      "notfinite_count": jnp.zeros([], jnp.int32),
      # The key is copied, since the state may be donated, and the caller may use the key again.
      "key": None if self.key is None else jnp.array(jax.random.key_data(self.key)),
      "inner_state": self.inner.init(float32_params),
      "made": jnp.zeros([], bool),
    }
    if "master_params" in self.state_type._fields:
      # The masters are copied: `inner` may keep its params in its state, too, and a call can't
      # donate one array twice.
      fields["master_params"] = _arrays.copy_arrays(float32_params)
    return self.state_type(**fields)

  def before(
    self, call: _driver.Call, state: optax.OptState
  ) -> tuple[_driver.Call, optax.OptState, _types.BoolScalar]:
    params = call.params

    def gradients() -> tuple[optax.Updates, _types.ExtraArgs]:
      return _inner_arguments(*call.gradients(), params)

    makes_step: _types.Condition = True
    is_finite = jnp.asarray(True)
    # Gradients are not checked if the updates are checked, since `inner` may handle gradients that
    # are not finite. Gradients of a scaled loss are not checked either: the loss scale in `inner`
    # must see every overflow, and skips the step itself.
    unseen = _protocol.unseen_by_scale(state.inner_state, call.gradients()[0])
    if unseen and not self.checks_updates:
      makes_step = is_finite = call.passes(
        lambda: self._on_all_devices(_finiteness.all_finite(unseen))
      )
    stored_params = call.stored_params, getattr(state, "master_params", None)
    plan = self._plan(call.plan, state)
    return _driver.Call(gradients, stored_params, makes_step, plan), state, is_finite

  def after(
    self,
    call: _driver.Call,
    outcome: _driver.Outcome,
    state: optax.OptState,
    is_finite: _types.BoolScalar,
  ) -> tuple[Any, optax.OptState]:
    result, masters = outcome.result
    if not call.plan.applies_updates:
      result = _difference(result, call.stored_params)
    new_masters = {} if masters is None else {"master_params": masters}
    return result, state._replace(
      count=_arrays.increment_if(outcome.made, state.count),
      notfinite_count=_arrays.increment_if(
        ~is_finite | outcome.failed_check, state.notfinite_count
      ),
      **new_masters,
    )

  def _plan(self, outer: _driver.StepPlan, state: optax.OptState) -> _driver.StepPlan:
    """Returns the plan with which `inner` is called.

    Its stored params are a pair: the stored params of `outer`, the plan with which this wrapper is
    called, and the masters, or None without masters.
    """

    def read(stored: _driver.StoredParams) -> optax.Params:
      params, masters = outer.access.read(stored[0]), stored[1]
      return _widen(params) if masters is None else self._follow(masters, params)

    def write(
      stored: _driver.StoredParams, new: optax.Params, old: optax.Params
    ) -> _driver.StoredParams:
      params = outer.access.read(stored[0])
      key = self._step_key(state)
      rounded = _rounding.round_like(new, params, key)
      if key is not None:
        # An entry that the step did not change, as in a frozen layer, is not rounded again.
        rounded = jax.tree.map(
          lambda n, o, r, p: jnp.where(n == o, p, r), new, old, rounded, params
        )
      return outer.access.write(stored[0], rounded, params), None if stored[1] is None else new

    def read_new(stored: _driver.StoredParams) -> optax.Params:
      return _widen(outer.access.read_new(stored[0])) if stored[1] is None else stored[1]

    access = _driver.ParamsAccess(read, write, read_new)
    plan = dataclasses.replace(outer, applies_updates=True, cast_updates=None, access=access)
    return plan.with_check(self._on_all_devices) if self.checks_updates else plan

  def _on_all_devices(self, flag: _types.BoolScalar) -> _types.BoolScalar:
    """Returns whether a flag is True on all devices, so that all or none run collectives."""
    return _mesh_axes.on_all_devices(flag, self.axis_name, self.method)

  def _step_key(self, state: optax.OptState) -> jax.Array | None:
    if self.key is None or state.key is None:
      return None
    key = jax.random.wrap_key_data(state.key, impl=jax.random.key_impl(self.key))
    return jax.random.fold_in(key, state.count)

  def _follow(self, masters: optax.Params, params: optax.Params) -> optax.Params:
    """Returns the masters; where a param was changed since the last step, returns the param.

    A param was changed if it is not the rounded master: the nearest number or, if there is a key,
    one of the two neighbours. Where a param is not finite, returns the master.
    """

    def follow(m: jax.Array, p: jax.Array) -> jax.Array:
      if m.dtype == p.dtype:
        return jnp.where(_finiteness.finite_entries(p), p, m)
      if self.key is None:
        is_rounding = p == _rounding.round_to_nearest(m, p.dtype)
      else:
        is_rounding = (p == _rounding.round_stochastically(0.0, m, p.dtype)) | (
          p == _rounding.round_stochastically(1.0, m, p.dtype)
        )
      return jnp.where(is_rounding | ~_finiteness.finite_entries(p), m, p.astype(m.dtype))

    return jax.tree.map(follow, masters, params)


def make_wrapper(
  method: str,
  state_type: type[Any],
  inner: optax.GradientTransformation,
  key: jax.Array | int | None,
  axis_name: _types.AxisName | None,
  check: str,
) -> optax.GradientTransformationExtraArgs:
  """Checks the arguments of :class:`_Float32Optimizer`, and returns the wrapper."""
  _mesh_axes.check_axis_name("axis_name", axis_name)
  _checks.check_name("check", check, ("updates", "gradients"))
  wrapper = _Float32Optimizer(
    method,
    state_type,
    _checks.check_transformation("inner", inner),
    None if key is None else _checks.as_key("key", key),
    axis_name,
    check == "updates",
  )
  return _transformation.wrapper(method, state_type, wrapper, needs_params=True, keeps="rounding")


def _widen(tree: _types.SameTree) -> _types.SameTree:
  """Casts the leaves of a tree to at least float32."""
  return jax.tree.map(_arrays.widen, tree)


# The extra arguments that are functions of the params.
_CLOSURES = ("value_fn", "obj_fn", "grad_fn", "full_grad_fn")


def _inner_arguments(
  updates: optax.Updates, extra_args: _types.ExtraArgs, params: optax.Params
) -> tuple[optax.Updates, _types.ExtraArgs]:
  """Returns the gradients and extra arguments that the inner optimizer gets, in float32."""

  def full_gradient(*args: Any, **kwargs: Any) -> optax.Updates:
    return _widen(_masks.mask_like(extra_args["full_grad_fn"](*args, **kwargs), updates))

  # `inner` calls these functions with float32 params, which are cast back to the model's dtype.
  closures = {name: extra_args.get(name) for name in _CLOSURES}
  if closures["full_grad_fn"] is not None:
    closures["full_grad_fn"] = full_gradient
  extra = extra_args | {
    name: _cast_params_first(function, params) for name, function in closures.items() if function
  }
  return _extra_args.map_gradients(_widen, updates, extra)


def _cast_params_first(function: _types.Closure, params: optax.Params) -> _types.Closure:
  """Returns a function that casts float32 params to `params`' dtypes, then calls `function`."""

  def cast(x: Any, p: Any) -> Any:
    return x if _masks.is_masked(x) else x.astype(p.dtype)

  def call(float32_params: optax.Params, *args: Any) -> Any:
    return function(jax.tree.map(cast, float32_params, params, is_leaf=_masks.is_masked), *args)

  return _extra_args.accept_extra_args(call)


def _difference(rounded: optax.Params, params: optax.Params) -> optax.Updates:
  """Returns the float32 updates that change `params` to `rounded`, which has the same dtypes."""

  def subtract(r: jax.Array, p: jax.Array) -> jax.Array:
    # Infinite params stay infinite, since the difference of infinities would be NaN.
    return jnp.where(r == p, 0, _arrays.widen(r) - _arrays.widen(p))

  return jax.tree.map(subtract, rounded, params)

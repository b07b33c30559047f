"""Runs an optimizer in float32 for half-precision params, and rounds the new params.

:func:`master_weights` and :func:`stochastic_rounding` are this wrapper, with and without masters,
which are float32 copies of the params before rounding.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_boost._form import _finiteness
from optax_boost._foundation import _arrays, _checks, _extra_args, _masks, _placement, _types
from optax_boost._step import _wrapper
from optax_boost._step._precision import _rounding


@dataclasses.dataclass(frozen=True, eq=False)
class Float32Optimizer:
  """The slot of :func:`master_weights` or :func:`stochastic_rounding`.

  If `state_type` has a field `master_params`, the state keeps the params in float32. Otherwise each
  step casts the params to float32.
  """

  method: str
  state_type: type[Any]
  key: jax.Array | None  # None: round to nearest
  check: str | None

  @property
  def checks_updates(self) -> bool:
    """Returns whether a step is not made if its result would not be finite."""
    return self.check == "updates"

  def init(self, params: optax.Params) -> Any:
    """Returns the initial state; `params` are in float32."""
    fields: dict[str, Any] = {
      # The key is copied, since the state may be donated, and the caller may use the key again.
      "key": None if self.key is None else _placement.copy(jax.random.key_data(self.key)),
    }
    if "master_params" in self.state_type._fields:
      # The masters are copied: the optimizer may keep its params in its state, too, and a call
      # can't donate one array twice.
      fields["master_params"] = _arrays.copy_arrays(params)
    return self.state_type(**fields)

  def masters(self, state: Any) -> optax.Params | None:
    """Returns the masters in a state, or None."""
    return getattr(state, "master_params", None)

  def next(self, state: Any, masters: optax.Params | None) -> Any:
    """Returns the state after a step, with the new masters."""
    return state if masters is None else state._replace(master_params=masters)

  def widened(
    self, grads: optax.Updates, extra_args: _types.ExtraArgs, params: optax.Params
  ) -> tuple[optax.Updates, _types.ExtraArgs]:
    """Returns the gradients and extra arguments in float32."""

    def full_gradient(*args: Any, **kwargs: Any) -> optax.Updates:
      return _widen(_masks.mask_like(extra_args["full_grad_fn"](*args, **kwargs), grads))

    # The optimizer calls these functions with float32 params, which are cast to the model's dtype.
    closures = {name: extra_args.get(name) for name in _CLOSURES}
    if closures["full_grad_fn"] is not None:
      closures["full_grad_fn"] = full_gradient
    extra = extra_args | {
      name: _cast_params_first(function, params) for name, function in closures.items() if function
    }
    return _extra_args.map_gradients(_widen, grads, extra)

  def read(self, params: optax.Params, masters: optax.Params | None) -> optax.Params:
    """Returns the params that the optimizer sees, in float32."""
    return _widen(params) if masters is None else self._follow(masters, params)

  def write(
    self,
    state: Any,
    stored: tuple[optax.Params, optax.Params | None],
    new: optax.Params,
    old: optax.Params,
    count: _types.IntScalar,
  ) -> tuple[optax.Params, optax.Params | None]:
    """Returns the rounded params and the new masters, if there are masters."""
    params, masters = stored
    key = None
    if self.key is not None:
      key = jax.random.wrap_key_data(state.key, impl=jax.random.key_impl(self.key))
      key = jax.random.fold_in(key, count)
    rounded = _rounding.round_like(new, params, key)
    if key is not None:
      # An entry that the step did not change, as in a frozen layer, is not rounded again.
      rounded = jax.tree.map(lambda n, o, r, p: jnp.where(n == o, p, r), new, old, rounded, params)
    return rounded, None if masters is None else new

  def wide(self, params: optax.Params) -> optax.Params:
    """Returns the params in float32."""
    return _widen(params)

  def difference(self, rounded: optax.Params, params: optax.Params) -> optax.Updates:
    """Returns the float32 updates that change `params` to `rounded`, which has the same dtypes."""

    def subtract(r: jax.Array, p: jax.Array) -> jax.Array:
      # Infinite params stay infinite, since the difference of infinities would be NaN.
      return jnp.where(r == p, 0, _arrays.widen(r) - _arrays.widen(p))

    return jax.tree.map(subtract, rounded, params)

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
  check: str | None,
) -> optax.GradientTransformationExtraArgs:
  """Checks the arguments, and fills the slot."""
  _checks.check_name("check", check, ("updates", "gradients"), optional=True)
  key = None if key is None else _checks.as_key("key", key)
  slot = Float32Optimizer(method, state_type, key, check)
  return _wrapper.fill(inner, axis_name, precision=slot)


def _widen(tree: _types.SameTree) -> _types.SameTree:
  """Casts the leaves of a tree to at least float32."""
  return jax.tree.map(_arrays.widen, tree)


# The extra arguments that are functions of the params.
_CLOSURES = ("value_fn", "obj_fn", "grad_fn", "full_grad_fn")


def _cast_params_first(function: _types.Closure, params: optax.Params) -> _types.Closure:
  """Returns a function that casts float32 params to `params`' dtypes, then calls `function`."""

  def cast(x: Any, p: Any) -> Any:
    return x if _masks.is_masked(x) else x.astype(p.dtype)

  def call(float32_params: optax.Params, *args: Any) -> Any:
    return function(jax.tree.map(cast, float32_params, params, is_leaf=_masks.is_masked), *args)

  return _extra_args.accept_extra_args(call)

"""Extra arguments of ``update``: gradients, and functions of params."""

from collections.abc import Callable
from typing import Any, TypeVar

from optax_boost._foundation import _arrays, _masks, _types

_Value = TypeVar("_Value")


def require_extra(value: _Value | None, name: str, method: str, purpose: str) -> _Value:
  """Returns the extra argument `value`; if it is None, raises a ValueError with its `purpose`."""
  if value is None:
    raise ValueError(
      f"`{method}` needs the extra argument `{name}` ({purpose}); got none. Call"
      f" `tx.update(grads, state, params, {name}=...)`, or let"
      " `optax_boost.make_train_step` do it."
    )
  return value


def as_jax_gradients(extra_args: _types.ExtraArgs) -> _types.ExtraArgs:
  """Returns the extra arguments, with `value` and `grad` converted by :func:`_arrays.as_jax`."""
  return extra_args | {
    name: _arrays.as_jax(extra_args[name]) for name in ("value", "grad") if name in extra_args
  }


def map_gradients(
  function: Callable[[_types.Updates], _types.Updates],
  updates: _types.Updates,
  extra_args: _types.ExtraArgs,
) -> tuple[_types.Updates, _types.ExtraArgs]:
  """Returns `updates` and `extra_args` with `function` applied to all gradients in them."""
  extra = dict(extra_args)

  def apply(gradients: _types.Updates) -> _types.Updates:
    # `function` takes trees with all leaves of `updates`. A leaf that `gradients` alone hides is
    # filled in for the call, and hidden again in the result.
    seen = _masks.mask_like(gradients, updates)
    return _masks.mask_like(function(_masks.fill_masked(seen, updates)), seen)

  if extra.get("grad") is not None:
    if _masks.leaves_like(extra["grad"], updates) is None:
      # Inside ``optax.flatten``, `grad` has other leaves than `updates`. So `grad` is dropped, and
      # methods that need `grad` raise an error.
      del extra["grad"]
    else:
      extra["grad"] = apply(extra["grad"])
  if extra.get("grad_fn") is not None:
    grad_fn = extra["grad_fn"]
    extra["grad_fn"] = lambda *args, **kwargs: apply(grad_fn(*args, **kwargs))
  return function(updates), extra


def accept_extra_args(function: _types.Closure) -> _types.Closure:
  """Returns `function` with a signature that names the extra arguments of optax_boost's methods.

  optax's line searches refuse extra arguments that the signature of `function` does not name.
  """

  def call(
    params: _types.Params,
    *args: Any,
    grad_fn: _types.Unchecked = None,
    full_grad_fn: _types.Unchecked = None,
    obj_fn: _types.Unchecked = None,
    layers: _types.Unchecked = None,
    weight: _types.Unchecked = None,
    model_state: _types.Unchecked = None,
  ) -> Any:
    return function(params, *args)

  return call

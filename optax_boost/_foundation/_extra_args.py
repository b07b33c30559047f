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
  """Applies `function` to all gradients among the arguments of ``update``.

  Returns ``function(updates)`` and the extra arguments. `function` is applied to the extra argument
  `grad`, and to the gradients that the extra argument `grad_fn` returns.
  """
  extra = dict(extra_args)

  def apply(gradients: _types.Updates) -> _types.Updates:
    # `gradients` may hide leaves that `updates` has, but `function` needs a tree with all leaves of
    # `updates`. So `function` gets the leaves of `updates` in these places, and the results for
    # these leaves are hidden again.
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
  """Returns a function that takes the extra arguments of optax_boost's methods, and drops them.

  The returned function calls ``function(params, *args)``. The train step passes it as the extra
  argument `value_fn`. optax's line searches refuse extra arguments that the signature of `value_fn`
  does not name.
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

"""Extra arguments of ``update``: gradients, and functions of params."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from optax_boost._foundation import _arrays, _masks, _types

_Value = TypeVar("_Value")


def require_extra(value: _Value | None, name: str, method: str, purpose: str) -> _Value:
  """Returns an extra argument; ValueError if ``update`` lacks it. `purpose` describes it."""
  if value is None:
    raise ValueError(
      f"`{method}` needs the extra argument `{name}` ({purpose}); got none. Call"
      f" `tx.update(grads, state, params, {name}=...)`, or let"
      " `optax_boost.make_train_step` do it."
    )
  return value


def as_jax_gradients(extra_args: _types.ExtraArgs) -> _types.ExtraArgs:
  """The extra arguments of ``update`` with the loss and its gradient as :func:`as_jax` has them."""
  return extra_args | {
    name: _arrays.as_jax(extra_args[name]) for name in ("value", "grad") if name in extra_args
  }


def map_gradients(
  function: Callable[[_types.Tree], _types.Tree],
  updates: _types.Tree,
  extra_args: Mapping[str, Any],
) -> tuple[Any, _types.ExtraArgs]:
  """Applies a function to all gradients: `updates`, the extra arguments `grad` and `grad_fn`."""
  extra = dict(extra_args)

  def apply(gradients: _types.Tree) -> _types.Tree:
    # A method further inside may see fewer leaves than the function.
    seen = _masks.mask_like(gradients, updates)
    return _masks.mask_like(function(_masks.fill_masked(seen, updates)), seen)

  if extra.get("grad") is not None:
    if _masks.leaves_like(extra["grad"], updates) is None:
      # It has other leaves, as inside ``optax.flatten``. A method that needs `grad` then misses it.
      del extra["grad"]
    else:
      extra["grad"] = apply(extra["grad"])
  if extra.get("grad_fn") is not None:
    grad_fn = extra["grad_fn"]
    extra["grad_fn"] = lambda *args, **kwargs: apply(grad_fn(*args, **kwargs))
  return function(updates), extra


def ignoring_closures(function: _types.Closure) -> _types.Closure:
  """A function of params that lets the other extra arguments pass.

  optax's line searches pass them on, and look for their names in its signature.
  """

  def call(
    params: _types.Tree,
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

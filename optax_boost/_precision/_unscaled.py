"""Steps with gradients that carried a scale: unscaled in float32, checked where they land.

A scale keeps small gradients from vanishing in half precision. They would vanish after all if they
were cast back once unscaled; so the inner optimizer works in at least float32, its state included.
"""

from collections.abc import Callable
from typing import Any
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost import _base
from optax_boost import _conditional
from optax_boost import _tree

# From the inner optimizer's state to updates and its next state.
Step: TypeAlias = Callable[[optax.OptState], tuple[optax.Updates, optax.OptState]]

# Scales are float32, normal and finite.
_LARGEST = float(np.finfo(np.float32).max)
_SMALLEST = float(np.finfo(np.float32).tiny)


def check_scales(initial_scale: Any, minimum: Any, maximum: Any) -> None:
  """Checks the initial scale, its floor and its cap: float32 numbers, in order."""
  scales = {"minimum": minimum, "maximum": maximum, "initial_scale": initial_scale}
  for name, value in scales.items():
    _check_scale(name, value)
  if any(_base.is_array(value) for value in scales.values()):
    return
  if float(minimum) > float(maximum):
    raise ValueError(f"`minimum` must not be above `maximum`; got {minimum!r} and {maximum!r}.")
  if not float(minimum) <= float(initial_scale) <= float(maximum):
    raise ValueError(
      "`initial_scale` must be between `minimum` and `maximum`; got"
      f" {initial_scale!r}, not between {minimum!r} and {maximum!r}."
    )


def check_rule(growth_factor: Any, backoff_factor: Any, minimum: Any, maximum: Any) -> None:
  """Checks the numbers by which a scale grows and shrinks."""
  _base.check_number("growth_factor", growth_factor, minimum=1.0)
  _base.check_number("backoff_factor", backoff_factor, positive=True, below=1.0)
  _check_scale("minimum", minimum)
  _check_scale("maximum", maximum)


def next_scales(
  scale: jax.Array, growth_factor: Any, backoff_factor: Any, minimum: Any, maximum: Any
) -> tuple[jax.Array, jax.Array]:
  """A checked rule's scale after growth, and after an overflow."""
  check_rule(growth_factor, backoff_factor, minimum, maximum)
  grown = jnp.minimum(scale * jnp.float32(growth_factor), jnp.float32(maximum))
  shrunk = jnp.maximum(scale * jnp.float32(backoff_factor), jnp.float32(minimum))
  return grown, shrunk


def _check_scale(name: str, value: Any) -> None:
  _base.check_number(name, value, positive=True)
  if not _base.is_array(value) and not _SMALLEST <= float(value) <= _LARGEST:
    raise ValueError(
      f"`{name}` must be a float32 number, between {_SMALLEST:g} and {_LARGEST:g}; got"
      f" {_base.shorten(value)}."
    )


def divide(g: jax.Array, scale: jax.Array) -> jax.Array:
  """A gradient without its scale, in at least float32."""
  return g.astype(_tree.accumulator_dtype(g.dtype)) / scale


def init_inner(inner: optax.GradientTransformation, params: optax.Params) -> optax.OptState:
  """The inner optimizer's state, of the params in at least float32."""
  return inner.init(_tree.copy_arrays(params, _tree.accumulator_dtype))


def make_step(
  inner: optax.GradientTransformationExtraArgs,
  updates: optax.Updates,
  params: optax.Params | None,
  extra_args: dict[str, Any],
  unscaled: optax.Updates,
  unscaled_args: dict[str, Any],
) -> Step:
  """The inner optimizer's step with unscaled gradients.

  Updates have the dtype that `inner` gives them without a scale around it.
  """
  dtypes = _output_dtypes(inner, updates, params, extra_args)

  def step(inner_state: optax.OptState) -> tuple[optax.Updates, optax.OptState]:
    out, moved = inner.update(unscaled, inner_state, params, **unscaled_args)
    return out if dtypes is None else _conditional.cast_like(out, dtypes), moved

  return step


def _output_dtypes(
  inner: optax.GradientTransformationExtraArgs,
  updates: optax.Updates,
  params: optax.Params | None,
  extra_args: dict[str, Any],
) -> Any:
  """Shapes with the dtypes of the inner updates; None where nothing has half precision."""
  leaves = jax.tree.leaves((updates, params))
  if all(leaf.dtype == _tree.accumulator_dtype(leaf.dtype) for leaf in leaves):
    return None
  like = updates if params is None else params

  def update(updates: optax.Updates, like: optax.Params) -> optax.Updates:
    # Updates belong to the params: with float32 params they are float32.
    gradients = jax.tree.map(
      lambda g, p: g.astype(jnp.promote_types(g.dtype, p.dtype)), updates, like
    )
    return inner.update(gradients, inner.init(like), params, **extra_args)[0]

  return jax.eval_shape(update, updates, like)


def step_if(
  finite: jax.Array, step: Step, inner_state: optax.OptState
) -> tuple[optax.Updates, optax.OptState]:
  """Makes a step unless the gradients overflowed; a loss scale inside skips the step itself."""
  # It must see every overflow, or it would never come down.
  if _conditional.scales_loss(inner_state):
    out, moved = step(inner_state)
    return out, _conditional.cast_like(moved, inner_state)
  return _conditional.update_if(finite, step, inner_state)


def landed(updates: optax.Updates, params: optax.Params | None) -> jax.Array:
  """Whether the params, or without them the updates, are finite after the step."""
  if params is None:
    return _tree.all_finite(updates)
  return _conditional.no_entry_lost(optax.apply_updates(params, updates), params)

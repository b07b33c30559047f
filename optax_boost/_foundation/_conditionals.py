"""Computations that run only if a condition holds, and update buffers in place where XLA can."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_boost._foundation import _arrays, _mesh_axes, _types


def is_concrete(condition: _types.Unchecked) -> bool:
  """Returns whether a condition is not traced, so that Python's ``if`` can read it."""
  return not isinstance(condition, jax.core.Tracer)


def both(first: _types.Condition, second: _types.Condition) -> _types.Condition:
  """Returns ``first & second``, or one of them unchanged if the other is Python's True."""
  if first is True or first is second:
    return second
  return first if second is True else first & second


def cond(
  condition: _types.Condition,
  if_true: Callable[..., _types.SameTree],
  if_false: Callable[..., _types.SameTree],
  *args: Any,
) -> _types.SameTree:
  """Returns ``if_true(*args)`` or ``if_false(*args)``, by ``lax.cond`` if `condition` is traced."""
  if is_concrete(condition):
    return if_true(*args) if condition else if_false(*args)
  return jax.lax.cond(condition, if_true, if_false, *args)


def once_if(
  condition: _types.Condition, function: Callable[..., Sequence[Any]], *carry: Any
) -> tuple[Any, ...]:
  """Returns ``(called, *function(*carry))`` if `condition`, else ``(called, *carry)``.

  Updates buffers in place. The flag `called` has the value of `condition`, but a compiled program
  knows `called` only after `function` has run. A computation that must run after `function` uses
  `called` instead of `condition`.
  """

  def call(carry: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(_arrays.cast_like(tuple(function(*carry)), tuple(carry)))

  if is_concrete(condition):
    return (jnp.asarray(condition), *(call(carry) if condition else carry))
  if jax.sharding.get_abstract_mesh().manual_axes:
    carry = jax.tree.map(_mesh_axes.vary, carry, jax.eval_shape(call, carry))
  # XLA 10: `lax.cond` copies operands that a branch returns unchanged. So `function` is called by a
  # `while_loop` of one iteration or none.
  going, *carried = jax.lax.while_loop(
    lambda loop: loop[0], lambda loop: (loop[0] & False, *call(loop[1:])), (condition, *carry)
  )
  return (condition & ~going, *carried)


def replace_if(
  condition: Any, function: Callable[..., _types.SameTree], old: _types.SameTree, *operands: Any
) -> _types.SameTree:
  """Returns ``function(old, *operands)`` if `condition`, else `old`; updates buffers in place.

  Unlike the result of a while loop, the result can be differentiated in reverse mode, if `function`
  does not close over differentiated arrays.
  """

  @jax.custom_jvp
  def replaced(condition: _types.Condition, old: _types.Tree, *operands: Any) -> Any:
    _, new = once_if(condition, lambda kept: (function(kept, *operands),), old)
    return new

  @replaced.defjvp
  def replaced_jvp(primals: Any, tangents: Any) -> Any:
    condition, *arrays = primals
    _, *slopes = tangents
    _, slope = jax.jvp(function, tuple(arrays), tuple(slopes))
    slope = jax.tree.map(lambda x, y: jnp.where(condition, x, y), slope, slopes[0])
    return replaced(*primals), slope

  if is_concrete(condition):
    return function(old, *operands) if condition else old
  return replaced(condition, old, *operands)


def update_if(
  condition: _types.Condition,
  update: Callable[[optax.OptState], tuple[optax.Updates, optax.OptState]],
  state: optax.OptState,
  shapes: _types.Tree = None,
) -> tuple[optax.Updates, optax.OptState]:
  """Returns ``update(state)`` if `condition`, else zero updates and `state`.

  `shapes` is a tree with the type (shape, dtype and sharding) of each update. If `shapes` is None,
  `update` is traced once more to find the types.
  """

  def step(state: optax.OptState) -> tuple[optax.Updates, optax.OptState]:
    updates, moved = update(state)
    return updates, _arrays.cast_like(moved, state)

  def skip(state: optax.OptState) -> tuple[optax.Updates, optax.OptState]:
    # The zeros have the shardings of the updates, since on a mesh with Explicit axes both branches
    # must return the same shardings.
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype, device=s.sharding), shapes)
    return jax.tree.map(_mesh_axes.vary, zeros, shapes), state

  if is_concrete(condition) and condition:
    return step(state)
  if shapes is None:
    shapes, _ = jax.eval_shape(update, state)
  # On a mesh with Explicit axes, sharded zeros can be made only inside of a trace. So `lax.cond` is
  # called on such a mesh even if the condition is known.
  on_mesh = any(shape.sharding is not None for shape in jax.tree.leaves(shapes))
  return (jax.lax.cond if on_mesh else cond)(condition, step, skip, state)


def nan_if(condition: _types.Condition | None, tree: _types.SameTree) -> _types.SameTree:
  """Returns `tree`, with NaN in floating-point leaves if `condition`; None counts as False."""
  if condition is None:
    return tree

  def replaced(x: jax.Array) -> jax.Array:
    inexact = jnp.issubdtype(jnp.result_type(x), jnp.inexact)
    return jnp.where(condition, jnp.full_like(x, jnp.nan), x) if inexact else x

  return jax.tree.map(replaced, tree)

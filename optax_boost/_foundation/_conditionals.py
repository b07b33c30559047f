"""Computations under a condition, in place where XLA can."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_boost._foundation import _arrays, _mesh_axes, _types


def is_concrete(condition: _types.Unchecked) -> bool:
  """Whether a condition is known; ``lax.cond`` would then be compiled again at every step."""
  return not isinstance(condition, jax.core.Tracer)


def both(first: _types.Condition, second: _types.Condition) -> _types.Condition:
  """Whether two conditions hold; a condition that always holds is Python's True."""
  if first is True or first is second:
    return second
  return first if second is True else first & second


def cond(
  condition: jax.Array, if_true: Callable[..., Any], if_false: Callable[..., Any], *args: Any
) -> Any:
  """``lax.cond`` for traced conditions, a plain choice for known ones."""
  if is_concrete(condition):
    return if_true(*args) if condition else if_false(*args)
  return jax.lax.cond(condition, if_true, if_false, *args)


def once_if(condition: Any, function: Callable[..., Sequence[Any]], *carry: Any) -> tuple[Any, ...]:
  """Calls ``function(*carry)`` if `condition`, else returns `carry`; updates buffers in place.

  Returns ``(called, *results)``. `called` equals the condition, but a value that depends on it is
  computed after the call.
  """

  def call(carry: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(_arrays.cast_like(tuple(function(*carry)), tuple(carry)))

  if is_concrete(condition):
    return (jnp.asarray(condition), *(call(carry) if condition else carry))
  if jax.sharding.get_abstract_mesh().manual_axes:
    carry = jax.tree.map(_mesh_axes.vary, carry, jax.eval_shape(call, carry))
  # XLA 10: a loop of one turn or none, since `lax.cond` copies operands that a branch returns
  # unchanged.
  going, *carried = jax.lax.while_loop(
    lambda loop: loop[0], lambda loop: (loop[0] & False, *call(loop[1:])), (condition, *carry)
  )
  return (condition & ~going, *carried)


def replace_if(
  condition: Any, function: Callable[..., _types.SameTree], old: _types.SameTree, *operands: Any
) -> _types.SameTree:
  """``function(old, *operands)`` if `condition`, else `old`; in place, and differentiable.

  A while loop has no reverse-mode derivative, but one that makes at most one turn has. `function`
  must not close over arrays that are differentiated.
  """

  @jax.custom_jvp
  def replaced(condition: Any, old: Any, *operands: Any) -> Any:
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
  condition: jax.Array,
  update: Callable[[optax.OptState], tuple[optax.Updates, optax.OptState]],
  state: optax.OptState,
  shapes: _types.Tree = None,
) -> tuple[optax.Updates, optax.OptState]:
  """Makes an update under a condition; otherwise updates are zero and the state is `state`.

  `shapes` are the abstract updates, if they are known already.
  """

  def step(state: optax.OptState) -> tuple[optax.Updates, optax.OptState]:
    updates, moved = update(state)
    return updates, _arrays.cast_like(moved, state)

  def skip(state: optax.OptState) -> tuple[optax.Updates, optax.OptState]:
    # With the sharding of the type, which meshes with explicit axes ask of both branches.
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype, device=s.sharding), shapes)
    return jax.tree.map(_mesh_axes.vary, zeros, shapes), state

  if is_concrete(condition) and condition:
    return step(state)
  if shapes is None:
    shapes, _ = jax.eval_shape(update, state)
  # On a mesh with explicit axes zeros are made inside of a trace only.
  on_mesh = any(shape.sharding is not None for shape in jax.tree.leaves(shapes))
  return (jax.lax.cond if on_mesh else cond)(condition, step, skip, state)


def nan_if(condition: Any, tree: _types.SameTree) -> _types.SameTree:
  """NaN in all floating-point leaves if `condition`; None: the tree as it is."""
  if condition is None:
    return tree

  def replaced(x: Any) -> Any:
    inexact = jnp.issubdtype(jnp.result_type(x), jnp.inexact)
    return jnp.where(condition, jnp.full_like(x, jnp.nan), x) if inexact else x

  return jax.tree.map(replaced, tree)

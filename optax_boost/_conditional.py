"""Shared logic for skipping a step."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_boost import _base
from optax_boost import _protocol


def update_if(
  condition: jax.Array,
  update: Callable[[optax.OptState], tuple[optax.Updates, optax.OptState]],
  state: optax.OptState,
) -> tuple[optax.Updates, optax.OptState]:
  """Makes a step under a condition; otherwise updates are zero and the state stays as it was."""

  def step(state: optax.OptState) -> tuple[optax.Updates, optax.OptState]:
    updates, moved = update(state)
    return updates, cast_like(moved, state)

  def skip(state: optax.OptState) -> tuple[optax.Updates, optax.OptState]:
    # With the sharding of the type, which meshes with explicit axes ask of both branches.
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype, device=s.sharding), shapes)
    return jax.tree.map(vary, zeros, shapes), state

  if is_concrete(condition) and condition:
    return step(state)
  shapes, _ = jax.eval_shape(update, state)
  # On a mesh with explicit axes zeros are made inside of a trace only.
  on_mesh = any(shape.sharding is not None for shape in jax.tree.leaves(shapes))
  return (jax.lax.cond if on_mesh else cond)(condition, step, skip, state)


def is_concrete(condition: jax.Array) -> bool:
  """Whether a condition is known; ``lax.cond`` would then be compiled again at every step."""
  return not isinstance(condition, jax.core.Tracer)


def cond(
  condition: jax.Array, if_true: Callable[..., Any], if_false: Callable[..., Any], *args: Any
) -> Any:
  """``lax.cond`` for traced conditions, a plain choice for known ones."""
  if is_concrete(condition):
    return if_true(*args) if condition else if_false(*args)
  return jax.lax.cond(condition, if_true, if_false, *args)


def cast_like(tree: Any, like: Any) -> Any:
  """Gives each array its counterpart's dtype, as conditionals, scans and compiled steps need.

  Momentum of float16 params, for one, is float32 once a float32 gradient is added to it.
  """
  return jax.tree.map(lambda x, y: x if _dtype(x) == _dtype(y) else x.astype(_dtype(y)), tree, like)


def _dtype(x: Any) -> Any:
  return jnp.result_type(x) if not hasattr(x, "dtype") else x.dtype


def vary(x: Any, shape: Any) -> jax.Array:
  """Makes an array vary over the mesh axes over which another does in ``shard_map``."""
  varying = tuple(_base.varying_axes(shape) - _base.varying_axes(jax.typeof(x)))
  if not varying:
    return x
  if hasattr(jax.lax, "pcast"):
    return jax.lax.pcast(x, varying, to="varying")
  return jax.lax.pvary(x, varying)  # type: ignore[attr-defined]  # older JAX


def scales_loss(state: optax.OptState) -> bool:
  """Whether a state asks for a scale of the loss, and so must see every overflow."""
  return any(
    _protocol.LOSS_SCALE in _protocol.declared(node, "requests")
    for node in _protocol.declaring_states(state, "requests")
  )


def agree(flags: jax.Array, axis_name: str | tuple[str, ...] | None, method: str) -> jax.Array:
  """Whether flags hold on all devices along the mesh axes; None: on this one."""
  if axis_name is None:
    return flags
  _base.require_axis("axis_name", axis_name, method)
  return jax.lax.pmin(flags.astype(jnp.int32), axis_name) > 0

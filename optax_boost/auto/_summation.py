"""Adaptive summation around the user's optimizer: on gradients or updates, and its hierarchy."""

from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_boost import _adasum
from optax_boost import _base
from optax_boost import _tree

# Where the adaptive sum is taken: before the optimizer, or after it as in MindSpore and Horovod.
PLACES = ("gradients", "updates")


class Summation(NamedTuple):
  """The axes of adaptive summation, and its place: one of :data:`PLACES`."""

  # None: one replica.
  axis_name: Any = None
  # Over the devices of one server; None: no such axis.
  local_axis_name: Any = None
  on: str = "gradients"

  @property
  def every_axis(self) -> tuple[str, ...]:
    """All axes along which gradients differ."""
    names = (self.axis_name, self.local_axis_name)
    each = [(name,) if isinstance(name, str) else name for name in names if name is not None]
    return sum(each, ())


def summed(
  tx: optax.GradientTransformation, summation: Summation, device_number: int | None
) -> optax.GradientTransformationExtraArgs:
  """Puts adaptive summation before an optimizer, or after it; `device_number` None: any."""
  axis_name, local = summation.axis_name, summation.local_axis_name
  adasum = _adasum.adasum(axis_name, local_axis_name=local)
  if local is None:
    return optax.chain(adasum, tx) if summation.on == "gradients" else optax.chain(tx, adasum)
  if summation.on == "gradients":
    return optax.chain(_checked(local, device_number), adasum, tx)
  # A server's devices take the same step, from their mean gradient.
  return optax.chain(
    _checked(local, device_number), _mean_over(local), tx, _varying_along(local), adasum
  )


def _checked(local: Any, device_number: int | None) -> optax.GradientTransformation:
  def check(updates: Any, params: Any) -> Any:
    del params
    size = _base.require_axis("local_axis_name", local, "auto_boost")
    if device_number is not None and size != device_number:
      raise ValueError(
        f"`common.device_number` is {device_number}, but the axis local_axis_name={local!r} has"
        f" {size} devices. Set `common.device_number` to {size}, or to null for any size."
      )
    return updates

  return optax.stateless(check)


def _mean_over(local: Any) -> optax.GradientTransformation:
  names = (local,) if isinstance(local, str) else local

  def mean(updates: Any, params: Any) -> Any:
    del params
    leaves = jax.tree.leaves(updates)
    if leaves:
      _adasum._check_not_summed(leaves, names)

    def of_leaf(g: jax.Array) -> jax.Array:
      wide = g.astype(_tree.accumulator_dtype(g.dtype))
      return jax.lax.pmean(wide, names).astype(g.dtype)

    return jax.tree.map(of_leaf, updates)

  return optax.stateless(mean)


def _varying_along(local: Any) -> optax.GradientTransformation:
  """Lets `adasum` share the work among devices that hold the same updates.

  Under ``shard_map`` and ``vmap`` alike: ``jax.lax.pcast`` is for the former, and new.
  """

  def vary(updates: Any, params: Any) -> Any:
    del params
    never = jax.lax.axis_index(local) < 0
    return jax.tree.map(lambda u: jnp.where(never, jnp.zeros_like(u), u), updates)

  return optax.stateless(vary)

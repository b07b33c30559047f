"""Tests whether names of mesh axes are bound, and along which mesh axes an array varies."""

import jax
import jax.numpy as jnp

from optax_boost._foundation import _checks, _types


def check_axis_name(name: str, value: _types.Unchecked) -> None:
  """Raises TypeError unless an argument is a name of a mesh axis, a tuple of names, or None."""
  names = value if isinstance(value, tuple) else (value,)
  if value is not None and not (names and all(isinstance(n, str) for n in names)):
    raise TypeError(
      f"`{name}` must be the name of a mesh axis, a tuple of names, or None; got"
      f" {_checks.shorten(value)}."
    )


def require_axis(
  name: str, value: _types.AxisName | None, method: str, *, optional: bool = True
) -> int:
  """Returns the number of devices along the mesh axes `value`; 1 if `value` is None.

  Raises ValueError if the axes are not bound. The message advises to leave out the argument `name`
  if it is `optional`, else to leave out `method`.
  """
  if not value:
    return 1
  try:
    return jax.lax.axis_size(value)
  except NameError as error:
    raise ValueError(
      f"`{method}` was given {name}={value!r}, but no such axis is bound where `update` is called."
      " Call it inside `jax.shard_map` (or `jax.vmap`) over an axis of this name, or leave"
      f" `{name if optional else method}` out."
    ) from error


def bound_axis(value: _types.AxisName | None) -> _types.AxisName | None:
  """Returns the mesh axes `value` if a ``shard_map`` or ``vmap`` binds all of them, else None."""
  if not value:
    return None
  try:
    jax.lax.axis_size(value)
  except NameError:
    return None
  return value


def varying_axes(aval: _types.ArrayType) -> frozenset[str]:
  """Returns the mesh axes along which an array of type `aval` differs between devices."""
  # Older versions of JAX call the attribute `vma`.
  manual = getattr(aval, "manual_axis_type", None)
  return frozenset(manual.varying if manual is not None else getattr(aval, "vma", None) or ())


def vary(x: jax.Array, like: _types.ArrayType) -> jax.Array:
  """Marks an array in ``shard_map`` as varying along the axes along which `like` varies."""
  varying = tuple(varying_axes(like) - varying_axes(jax.typeof(x)))
  if not varying:
    return x
  if hasattr(jax.lax, "pcast"):
    return jax.lax.pcast(x, varying, to="varying")
  return jax.lax.pvary(x, varying)  # type: ignore[attr-defined]  # older JAX


def on_all_devices(flags: jax.Array, axis_name: _types.AxisName | None, method: str) -> jax.Array:
  """Returns for each flag whether it is True on all devices along the mesh axes `axis_name`.

  If `axis_name` is None, returns `flags` unchanged.
  """
  if axis_name is None:
    return flags
  require_axis("axis_name", axis_name, method)
  return jax.lax.pmin(flags.astype(jnp.int32), axis_name) > 0

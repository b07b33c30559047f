"""Names of mesh axes: which of them are bound, and along which of them an array varies."""

import jax
import jax.numpy as jnp

from optax_boost._foundation import _checks, _types


def check_axis_name(name: str, value: _types.Unchecked) -> None:
  """Raises TypeError unless an argument names one or several mesh axes, or is None."""
  names = value if isinstance(value, tuple) else (value,)
  if value is not None and not (names and all(isinstance(n, str) for n in names)):
    raise TypeError(
      f"`{name}` must be the name of a mesh axis, a tuple of names, or None; got"
      f" {_checks.shorten(value)}."
    )


def require_axis(
  name: str, value: _types.AxisName | None, method: str, *, optional: bool = True
) -> int:
  """Returns the size of mesh axes; raises ValueError unless they are bound around ``update``."""
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
  """Returns names of mesh axes if they are bound where this is called, else None."""
  if not value:
    return None
  try:
    jax.lax.axis_size(value)
  except NameError:
    return None
  return value


def varying_axes(aval: _types.ArrayType) -> frozenset[str]:
  """The mesh axes along which arrays of a type differ between devices in ``shard_map``."""
  # Later versions of JAX renamed `vma`.
  manual = getattr(aval, "manual_axis_type", None)
  return frozenset(manual.varying if manual is not None else getattr(aval, "vma", None) or ())


def vary(x: jax.Array, like: _types.ArrayType) -> jax.Array:
  """Marks an array as varying along the mesh axes along which `like` varies in ``shard_map``."""
  varying = tuple(varying_axes(like) - varying_axes(jax.typeof(x)))
  if not varying:
    return x
  if hasattr(jax.lax, "pcast"):
    return jax.lax.pcast(x, varying, to="varying")
  return jax.lax.pvary(x, varying)  # type: ignore[attr-defined]  # older JAX


def on_all_devices(flags: jax.Array, axis_name: _types.AxisName | None, method: str) -> jax.Array:
  """Whether flags hold on all devices along the mesh axes; without axes, returns the flags."""
  if axis_name is None:
    return flags
  require_axis("axis_name", axis_name, method)
  return jax.lax.pmin(flags.astype(jnp.int32), axis_name) > 0

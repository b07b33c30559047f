"""Where arrays are: their shardings, and memory of a device or its host."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from optax_boost._foundation import _types


def has_auto_axes_only(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> bool:
  """Whether the compiler places arrays along all axes of a mesh."""
  return set(mesh.axis_types) == {jax.sharding.AxisType.Auto}


def without_axes(
  sharding: jax.sharding.NamedSharding, axes: Sequence[int], instead: Any = None
) -> jax.sharding.NamedSharding:
  """A sharding with another entry for some axes that are sharded; None: whole on each device."""
  spec = [instead if axis in axes and x is not None else x for axis, x in enumerate(sharding.spec)]
  return jax.sharding.NamedSharding(
    sharding.mesh, jax.sharding.PartitionSpec(*spec), memory_kind=sharding.memory_kind
  )


def gather_axes(x: jax.Array, axes: Sequence[int]) -> jax.Array:
  """An array with some axes whole on each device of an Explicit mesh, to be sliced along them.

  On other meshes the compiler handles slicing.
  """
  sharding = jax.typeof(x).sharding
  if all(sharding.spec[axis] is None for axis in axes):
    return x
  return place_by(x, without_axes(sharding, axes))


def place_by(x: jax.Array, sharding: jax.sharding.NamedSharding) -> jax.Array:
  """An array with a sharding by the type of an array, which tells of Explicit meshes alone."""
  explicit = jax.sharding.AxisType.Explicit in sharding.mesh.axis_types
  return jax.sharding.reshard(x, sharding) if explicit else x


def is_whole_here(x: _types.Unchecked) -> bool:
  """Whether this process has all of an array: it has no other process's, or each has a copy."""
  return not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated


def put(x: Any, sharding: jax.sharding.Sharding) -> jax.Array:
  """An array on the devices of a sharding; with several processes each has all of it, or a part."""
  if sharding.is_fully_addressable or not getattr(x, "is_fully_addressable", True):
    return jax.device_put(x, sharding)
  # `device_put` would send all of it to all devices, to compare the processes' copies.
  host = np.asarray(x)
  return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def in_device_memory(x: jax.Array) -> jax.Array:
  """An array in the devices' own memory; a state may be kept in their host's."""
  on_host = getattr(jax.typeof(x), "memory_space", None) == jax.memory.Space.Host
  return jax.device_put(x, jax.memory.Space.Device) if on_host else x

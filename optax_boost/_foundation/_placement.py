"""The placement of arrays: shardings, processes, and memory of a device or its host."""

from collections.abc import Sequence

import jax
import numpy as np

from optax_boost._foundation import _types


def has_auto_axes_only(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> bool:
  """Whether all axes of a mesh are Auto, so that the compiler chooses shardings."""
  return set(mesh.axis_types) == {jax.sharding.AxisType.Auto}


def without_axes(
  sharding: jax.sharding.NamedSharding, axes: Sequence[int], instead: _types.SpecEntry = None
) -> jax.sharding.NamedSharding:
  """Replaces the entries of sharded axes in a sharding by `instead`; None replicates them."""
  spec = [instead if axis in axes and x is not None else x for axis, x in enumerate(sharding.spec)]
  return jax.sharding.NamedSharding(
    sharding.mesh, jax.sharding.PartitionSpec(*spec), memory_kind=sharding.memory_kind
  )


def gather_axes(x: jax.Array, axes: Sequence[int]) -> jax.Array:
  """Replicates an array along some axes of an Explicit mesh, so that it can be sliced along them.

  On other meshes the compiler handles slicing.
  """
  sharding = jax.typeof(x).sharding
  if all(sharding.spec[axis] is None for axis in axes):
    return x
  return place_by(x, without_axes(sharding, axes))


def place_by(x: jax.Array, sharding: jax.sharding.NamedSharding) -> jax.Array:
  """Reshards an array on an Explicit mesh; on other meshes, returns the array."""
  explicit = jax.sharding.AxisType.Explicit in sharding.mesh.axis_types
  return jax.sharding.reshard(x, sharding) if explicit else x


def is_whole_here(x: _types.Unchecked) -> bool:
  """Whether this process holds all entries of an array."""
  return not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated


def put(x: jax.typing.ArrayLike, sharding: jax.sharding.Sharding) -> jax.Array:
  """Puts an array on a sharding's devices; each process passes the whole array or its part."""
  if sharding.is_fully_addressable or not getattr(x, "is_fully_addressable", True):
    return jax.device_put(x, sharding)
  # `device_put` would send the array to all devices to compare the processes' copies.
  host = np.asarray(x)
  return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def in_device_memory(x: jax.Array) -> jax.Array:
  """Moves an array from host memory, where a state may be kept, to device memory."""
  on_host = getattr(jax.typeof(x), "memory_space", None) == jax.memory.Space.Host
  return jax.device_put(x, jax.memory.Space.Device) if on_host else x

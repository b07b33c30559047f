"""Where arrays are placed: shardings, processes, and the memory of the device or of its host."""

import collections
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from optax_boost._foundation import _types


def has_auto_axes_only(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> bool:
  """Returns whether all axes of a mesh are Auto, so that the compiler chooses the shardings."""
  return set(mesh.axis_types) == {jax.sharding.AxisType.Auto}


def without_axes(
  sharding: jax.sharding.NamedSharding, axes: Sequence[int], instead: _types.SpecEntry = None
) -> jax.sharding.NamedSharding:
  """Returns `sharding` with the mesh axes `instead` for the array axes `axes`.

  Array axes that `sharding` does not shard stay unsharded. If `instead` is None, the array is
  replicated along `axes`.
  """
  spec = [instead if axis in axes and x is not None else x for axis, x in enumerate(sharding.spec)]
  return jax.sharding.NamedSharding(
    sharding.mesh, jax.sharding.PartitionSpec(*spec), memory_kind=sharding.memory_kind
  )


def gather_axes(x: jax.Array, axes: Sequence[int]) -> jax.Array:
  """Returns `x`, replicated along the array axes `axes`, so that it can be sliced along them.

  If the mesh has no Explicit axes, returns `x` unchanged, since the compiler handles slicing.
  """
  sharding = jax.typeof(x).sharding
  if all(sharding.spec[axis] is None for axis in axes):
    return x
  return place_by(x, without_axes(sharding, axes))


def place_by(x: jax.Array, sharding: jax.sharding.NamedSharding) -> jax.Array:
  """Reshards an array if the mesh of `sharding` has Explicit axes; else returns it unchanged."""
  explicit = jax.sharding.AxisType.Explicit in sharding.mesh.axis_types
  return jax.sharding.reshard(x, sharding) if explicit else x


def is_whole_here(x: _types.Unchecked) -> bool:
  """Returns whether this process holds all entries of an array."""
  return not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated


def put(x: jax.typing.ArrayLike, sharding: jax.sharding.Sharding) -> jax.Array:
  """Puts an array on the devices of a sharding, which may belong to several processes.

  `x` is the whole array, the same in each process, or a global ``jax.Array`` of all processes.
  """
  if sharding.is_fully_addressable or not getattr(x, "is_fully_addressable", True):
    return jax.device_put(x, sharding)
  # Each process holds the whole array. `device_put` would send the array to all devices, to compare
  # the copies of the processes.
  host = np.asarray(x)
  return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def copy(x: jax.typing.ArrayLike) -> jax.Array:
  """Copies an array where it lies; compiles no program, unless the array is traced.

  If the array spans processes, each copies its own part, whether others do or not.
  """
  if isinstance(x, jax.core.Tracer) or not isinstance(x, jax.Array):
    return jnp.array(x)
  if x.is_fully_addressable:
    # Without a sharding, JAX puts a key that lies on several devices on one, and does not copy it;
    # with one, it commits an array that lies on one device.
    device = x.sharding if len(x.sharding.device_set) > 1 else None
    return jax.device_put(x, device, may_alias=False)
  shards = [copy(shard.data) for shard in x.addressable_shards]
  return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)


def have_own_memory(values: Sequence[_types.Unchecked]) -> list[bool]:
  """Returns for each value whether it is an array in whose memory no other array lies.

  ``jax.device_put`` returns an array in the memory of its argument if the argument is there
  already. A key shares the memory of the array from which it was made.
  """
  pointers: dict[int, list[int]] = {}
  kept: set[int] = set()  # JAX keeps the part of an array on each device as a further array
  for x in jax.live_arrays():
    try:
      parts = [shard.data for shard in x.addressable_shards]
      pointers[id(x)] = [part.unsafe_buffer_pointer() for part in parts]
    except RuntimeError:  # another thread has donated the array since
      continue
    kept.update(id(part) for part in parts if part is not x)
  users = collections.Counter(p for x, own in pointers.items() if x not in kept for p in own)
  own_pointers = [pointers.get(id(x), []) for x in values]
  return [bool(own) and all(users[p] == 1 for p in own) for own in own_pointers]


def in_device_memory(x: jax.Array) -> jax.Array:
  """Returns `x` in device memory; moves `x` if it is in host memory, where a state may be kept."""
  on_host = getattr(jax.typeof(x), "memory_space", None) == jax.memory.Space.Host
  return jax.device_put(x, jax.memory.Space.Device) if on_host else x

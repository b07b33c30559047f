"""Where weight vectors lie: each whole on a device, however their leaves are sharded."""

from collections.abc import Callable
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_boost import _arrays
from optax_boost._sgperm import _sorting


def mesh_of(arrays: list[jax.Array]) -> jax.sharding.AbstractMesh | None:
  """The mesh of several devices that arrays lie on, where its shardings are the compiler's."""
  meshes = [jax.typeof(x).sharding.mesh for x in arrays if isinstance(x, jax.core.Tracer)]
  return next((m for m in meshes if m.size > 1 and _arrays.is_auto(m)), None)


def on_stacks(
  kernel: Callable[..., jax.Array],
  stacks: list[tuple[jax.Array, ...]],
  axes: int,
  mesh: jax.sharding.AbstractMesh,
) -> list[tuple[jax.Array, jax.Array]]:
  """Runs a kernel on the vectors of several leaves; all cross devices in one exchange, or not."""
  shape, count = stacks[0][0].shape, len(stacks[0])
  hint = _hint(stacks[0][0], axes, mesh.size)
  stacked = _exchanged(stacks, axes, mesh, hint)
  vectors = [x.reshape(math.prod(x.shape[:axes]), *x.shape[axes:]) for x in stacked]
  places = kernel(*vectors)
  results = [places, _sorting.gather(vectors[0], places)]
  parts = [jnp.moveaxis(x.reshape(*shape[:axes], count, *shape[axes:]), axes, 0) for x in results]
  back = _exchanged([tuple(part) for part in parts], axes, mesh)
  return list(zip(*(jnp.moveaxis(x, axes, 0) for x in back), strict=True))


def _exchanged(
  stacks: list[tuple[jax.Array, ...]],
  axes: int,
  mesh: jax.sharding.AbstractMesh,
  hint: jax.Array | None = None,
) -> list[jax.Array]:
  """Stacks arrays on an axis behind the fan-in ones, which are whole on each device."""
  found: list[Any] = [None] * len(stacks)
  kinds = [(stack[0].shape, stack[0].dtype.itemsize) for stack in stacks]
  spec = jax.sharding.PartitionSpec(
    *[None] * axes, *[jax.sharding.PartitionSpec.UNCONSTRAINED] * (stacks[0][0].ndim + 1 - axes)
  )
  for kind in dict.fromkeys(kinds):
    alike = [k for k, other in enumerate(kinds) if other == kind]
    packed = jnp.stack([_cast(x, f"uint{8 * kind[1]}") for k in alike for x in stacks[k]], axes)
    packed = jax.lax.with_sharding_constraint(packed, jax.sharding.NamedSharding(mesh, spec))
    if hint is not None:
      packed = jnp.where(hint, 0, packed)
    for k, part in zip(alike, jnp.split(packed, len(alike), axes), strict=True):
      found[k] = _cast(part, stacks[k][0].dtype)
  return found


def _cast(x: jax.Array, dtype: Any) -> jax.Array:
  return jax.lax.bitcast_convert_type(x, dtype)


def _hint(floats: jax.Array, axes: int, devices: int) -> jax.Array | None:
  """False for each of the first outputs, in an array that is sharded as the longest fan-in axis.

  Shardings are not known under ``jit``. So the compiler carries this one, from the fan-in axis to
  an array with an entry for each of its shards, and from that to the outputs.
  """
  fan_in = int(np.argmax(floats.shape[:axes]))
  length, outputs = floats.shape[fan_in], math.prod(floats.shape[axes : axes + 1])
  shards = math.gcd(length, outputs, devices)
  if shards == 1:
    return None
  split = floats.reshape(*floats.shape[:fan_in], shards, -1, *floats.shape[fan_in + 1 :])
  # Nothing is above infinity, NaN neither, which the compiler does not know.
  never = jnp.any(split > jnp.inf, axis=[axis for axis in range(split.ndim) if axis != fan_in])
  spread = jnp.broadcast_to(never[:, None], (shards, outputs // shards))
  return spread.reshape(-1, *[1] * (floats.ndim - axes - 1))


def auto_sharded(function: Callable[..., Any], like: Any) -> Callable[..., Any]:
  """Leaves the shardings inside a function without closures over arrays to the compiler.

  Meshes with explicit axes ask how each result of a sort or gather is sharded. Results are sharded
  as the arrays of `like`, a tree like the results; None: not sharded.
  """

  def call(*args: Any) -> Any:
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty and (mesh_of_arrays := _explicit_mesh((like, args))) is not None:
      with jax.sharding.use_abstract_mesh(mesh_of_arrays):
        return call(*args)
    if mesh.empty or jax.sharding.AxisType.Explicit not in mesh.axis_types:
      return function(*args)
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    shardings = jax.tree.map(
      lambda x: replicated if x is None else jax.typeof(x).sharding,
      like,
      is_leaf=lambda x: x is None,
    )
    return jax.sharding.auto_axes(function, out_sharding=shardings)(*args)

  return call


def _explicit_mesh(arrays: Any) -> jax.sharding.AbstractMesh | None:
  """The mesh with explicit axes that arrays lie on, also outside of ``jax.set_mesh``."""
  # JAX before 0.8 has no way to enter it.
  if not hasattr(jax.sharding, "use_abstract_mesh"):
    return None
  meshes = [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(arrays)]
  explicit = jax.sharding.AxisType.Explicit
  return next((m for m in meshes if not m.empty and explicit in m.axis_types), None)


def sharded_like(old: jax.Array, new: jax.Array, floats: jax.Array) -> jax.Array:
  """Returns `new`, with a hint to shard it like `old`; `floats` is any array of their shape.

  The result of a sort or a gather has no sharding of its own. Under ``jit`` that of `old` is not
  known, but a choice between the two passes it on.
  """
  # Nothing is above infinity, NaN neither, which the compiler does not know.
  return jnp.where(floats > jnp.inf, old, new)

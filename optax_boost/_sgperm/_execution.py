"""How SGPerm's kernels run: some weight vectors at a time, and under meshes with explicit axes."""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

# Weights in a block, on a CPU and on accelerators (for these a guess, to bound memory).
_WEIGHTS, _MANY_WEIGHTS = 2**18, 2**22


def in_blocks(
  kernel: Callable[..., jax.Array], columns: Sequence[jax.Array], dtype: jax.typing.DTypeLike
) -> jax.Array:
  """Applies a kernel on arrays (..., vectors), each vector by itself; returns (n, vectors)."""
  n, vectors = columns[0].shape
  # A kernel takes scratch memory of ten to twenty times its weights, and nothing is gained by more
  # vectors side by side than keep a device busy: on a CPU, as many as fit into its cache.
  most = _WEIGHTS if jax.default_backend() == "cpu" else _MANY_WEIGHTS
  width = max(1, most // max(1, n))
  # The vectors may lie on all of several devices.
  if vectors <= width or jax.device_count() > 1:
    return kernel(*columns)
  blocks = -(-vectors // width)
  width = -(-vectors // blocks)

  def one(k: jax.Array, done: jax.Array) -> jax.Array:
    # The last block overlaps the one before it, and repeats its results.
    start = jnp.minimum(k * width, vectors - width)
    parts = [jax.lax.dynamic_slice_in_dim(x, start, width, -1) for x in columns]
    return jax.lax.dynamic_update_slice_in_dim(done, kernel(*parts), start, -1)

  return jax.lax.fori_loop(0, blocks, one, jnp.zeros((n, vectors), dtype))


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

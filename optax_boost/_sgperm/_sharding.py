"""Sorting and gathering under a mesh with explicit axes, where JAX asks how each result is sharded.

The answer is always the same: like the leaf.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def automatic(function: Callable[..., Any], like: Any) -> Callable[..., Any]:
  """Leaves the shardings inside a function to the compiler.

  Args:
    function: of arrays, without closures over any.
    like: arrays that are sharded as the results, in the results' tree; None: not sharded.

  Returns:
    A function that does the same, on meshes with explicit axes, too.
  """

  def call(*args: Any) -> Any:
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty and (mesh_of_arrays := _explicit_mesh((like, args))) is not None:
      with jax.sharding.use_abstract_mesh(mesh_of_arrays):
        return call(*args)
    if mesh.empty or jax.sharding.AxisType.Explicit not in mesh.axis_types:
      return function(*args)
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    shardings = jax.tree.map(
      lambda x: whole if x is None else jax.typeof(x).sharding, like, is_leaf=lambda x: x is None
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


def same_as(old: jax.Array, new: jax.Array, floats: jax.Array) -> jax.Array:
  """Returns `new`, with a hint at how to shard it.

  What comes out of a sort or a gather has no sharding of its own. Under ``jit`` that of `old` is
  not known, but it is passed on through a choice between the two.

  Args:
    old: an array that is sharded as `new` should be.
    new: an array of the same shape.
    floats: another one. None is above infinity, NaN neither, which the compiler does not know.

  Returns:
    `new`.
  """
  return jnp.where(floats > jnp.inf, old, new)

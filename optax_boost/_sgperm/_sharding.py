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
    The function; itself where no mesh has explicit axes.
  """
  mesh = jax.sharding.get_abstract_mesh()
  explicit = jax.sharding.AxisType.Explicit
  if mesh.empty or explicit not in mesh.axis_types:
    return function
  whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  shardings = jax.tree.map(
    lambda x: whole if x is None else jax.typeof(x).sharding, like, is_leaf=lambda x: x is None
  )
  return jax.sharding.auto_axes(function, out_sharding=shardings)


def same_as(old: jax.Array, new: jax.Array, finite: jax.Array) -> jax.Array:
  """Returns `new`, with a hint at how to shard it.

  What comes out of a sort or a gather has no sharding of its own. Under ``jit`` that of `old` is
  not known, but it is passed on through a choice between the two.

  Args:
    old: an array that is sharded as `new` should be.
    new: an array of the same shape.
    finite: another one that is never NaN, which the compiler does not know.

  Returns:
    `new`.
  """
  return jnp.where(finite == finite, new, old)

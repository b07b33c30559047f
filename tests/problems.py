"""Small problems that every method is run on, cheap to compile: no random numbers inside."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests import meshes


def params(
  dtype: Any = jnp.float32,
  conv: tuple[int, ...] = (3, 3, 2, 8),
  dense: tuple[int, ...] = (16, 8),
) -> dict[str, Any]:
  """Kernels of two shapes, biases and a normalization, with sizes that eight devices can share."""
  rng = np.random.default_rng(0)
  tree = {
    "conv": {"kernel": rng.normal(size=conv)},
    "dense": {"kernel": rng.normal(size=dense), "bias": np.zeros(8)},
    "norm": {"scale": rng.normal(1, 0.1, size=8)},
  }
  # NumPy casts: JAX would compile a conversion for each shape.
  return jax.tree.map(lambda x: jnp.asarray(np.asarray(x, dtype)), tree)


def target(like: Any) -> Any:
  """A target as far from zero as the params are."""
  return jax.tree.map(lambda x: jnp.asarray(_wave(x.shape, 0.0), x.dtype), like)


def distance(tree: Any, goal: Any) -> jax.Array:
  """Half the squared distance, in at least float32."""
  parts = jax.tree.map(
    lambda x, y: jnp.sum((x - y).astype(jnp.promote_types(x.dtype, jnp.float32)) ** 2),
    tree,
    goal,
  )
  return 0.5 * sum(jax.tree.leaves(parts), start=jnp.zeros([]))


def grads(tree: Any, step: jax.typing.ArrayLike = 0) -> Any:
  """Gradients of the distance to the target, with disturbances that depend on the step."""
  return jax.tree.map(lambda x: _gradient(x, step), tree)


# A function of its own to JAX: traced once for each shape, whatever program calls it.
@jax.jit
def _gradient(x: jax.Array, step: jax.typing.ArrayLike) -> jax.Array:
  wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
  disturbed = wide - _wave(x.shape, 0.0) + 0.1 * _wave(x.shape, 1.0 + jnp.asarray(step))
  return disturbed.astype(x.dtype)


def _wave(shape: tuple[int, ...], phase: jax.typing.ArrayLike) -> jax.Array:
  positions = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
  # A phase that is known needs no program.
  sin = np.sin if isinstance(phase, float) else jnp.sin
  return jnp.asarray(1.4 * sin(1.7 * positions + phase), jnp.float32)


def spec(tree: Any) -> Any:
  """Shapes and dtypes, and whether these are weak."""
  return jax.tree.map(lambda x: (x.shape, x.dtype, getattr(x, "weak_type", False)), tree)


def mesh(kind: str) -> jax.sharding.Mesh:
  """Eight devices along one axis of a kind."""
  return meshes.mesh((8,), ("x",), kind)


def last_axis_over(devices: jax.sharding.Mesh, x: Any) -> jax.NamedSharding:
  """The sharding of an array's last axis."""
  return jax.NamedSharding(devices, jax.P(*[None] * (x.ndim - 1), "x"))


def sharded(tree: Any, devices: jax.sharding.Mesh) -> Any:
  """Arrays whose last axis is spread over the devices."""
  return jax.tree.map(lambda x: jax.device_put(x, last_axis_over(devices, x)), tree)

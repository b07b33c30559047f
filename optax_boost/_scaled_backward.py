"""A boundary at which the backward pass changes its scale."""

import jax
import jax.numpy as jnp

from optax_boost import _arrays


@jax.custom_vjp
def group_boundary(x: jax.Array, ratio: jax.Array) -> jax.Array:
  """The identity, whose derivative multiplies the cotangent by `ratio`, in at least float32."""
  return x


def _boundary_backward(ratio: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
  return (_arrays.widen(g) * ratio).astype(g.dtype), jnp.zeros_like(ratio)


group_boundary.defvjp(lambda x, ratio: (x, ratio), _boundary_backward)

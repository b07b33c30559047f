"""Small problems that every method is run on."""

from typing import Any

import jax
import jax.numpy as jnp


def params(dtype: Any = jnp.float32) -> dict[str, Any]:
  """Kernels, biases and a normalization, with sizes that eight devices can share."""
  keys = jax.random.split(jax.random.key(0), 4)
  tree = {
    "conv": {"kernel": jax.random.normal(keys[0], (3, 3, 2, 8)), "bias": jnp.zeros(8)},
    "dense": {"kernel": jax.random.normal(keys[1], (16, 8)), "bias": jnp.ones(8)},
    "norm": {"scale": 1 + 0.1 * jax.random.normal(keys[2], (8,))},
  }
  return jax.tree.map(lambda x: x.astype(dtype), tree)


def target(like: Any) -> Any:
  """A target as far from zero as the params are."""
  leaves, structure = jax.tree.flatten(like)
  keys = jax.random.split(jax.random.key(1), len(leaves))
  return jax.tree.unflatten(
    structure,
    [
      jax.random.normal(k, x.shape, jnp.float32).astype(x.dtype)
      for k, x in zip(keys, leaves, strict=True)
    ],
  )


def distance(tree: Any, goal: Any) -> jax.Array:
  """Half the squared distance, in at least float32."""
  parts = jax.tree.map(
    lambda x, y: jnp.sum((x - y).astype(jnp.promote_types(x.dtype, jnp.float32)) ** 2),
    tree,
    goal,
  )
  return 0.5 * jnp.sum(jnp.stack(jax.tree.leaves(parts)))


@jax.jit
def grads(tree: Any, step: jax.typing.ArrayLike = 0) -> Any:
  """Gradients of the distance, with noise that depends on the step."""
  gradients = jax.grad(distance)(tree, target(tree))
  leaves, structure = jax.tree.flatten(gradients)
  keys = jax.random.split(jax.random.fold_in(jax.random.key(2), step), max(len(leaves), 1))
  noisy = [
    g + 0.1 * jax.random.normal(k, g.shape, jnp.float32).astype(g.dtype)
    for k, g in zip(keys, leaves, strict=False)
  ]
  return jax.tree.unflatten(structure, noisy)

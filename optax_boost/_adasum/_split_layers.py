"""A tree of leaves as the arrays of its layers, each of which AdaSum sums by itself."""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_boost._trace import _layer_axes


def split_layers(
  tree: Any, described: _layer_axes.LayerAxes | None
) -> tuple[list[str], list[jax.Array], Callable[[Sequence[jax.Array]], Any]]:
  """An array for each layer of each leaf, with the leaf's path, and the inverse of the split."""
  leaves = [
    leaf if leaf.num_layers else leaf._replace(axes=None)
    for leaf in _layer_axes.leaves_of(tree, described)
  ]

  def split(leaf: _layer_axes.Leaf, x: jax.Array) -> list[jax.Array]:
    if not leaf.stacked:
      return [x]
    front = jnp.moveaxis(x, leaf.stacked, range(len(leaf.stacked)))
    return list(front.reshape(leaf.num_layers, *leaf.shape_of_layer))

  def merge(leaf: _layer_axes.Leaf, arrays: list[jax.Array]) -> jax.Array:
    if not leaf.stacked:
      return arrays[0]
    front = jnp.stack(arrays).reshape(*leaf.stacked_shape, *leaf.shape_of_layer)
    return jnp.moveaxis(front, range(len(leaf.stacked)), leaf.stacked)

  def join(arrays: Sequence[jax.Array]) -> Any:
    remaining = iter(arrays)
    merged = [merge(leaf, [next(remaining) for _ in range(leaf.num_layers)]) for leaf in leaves]
    return jax.tree.unflatten(jax.tree.structure(tree), merged)

  pairs = zip(leaves, jax.tree.leaves(tree), strict=True)
  paths = [leaf.path for leaf in leaves for _ in range(leaf.num_layers)]
  return paths, [array for leaf, x in pairs for array in split(leaf, x)], join

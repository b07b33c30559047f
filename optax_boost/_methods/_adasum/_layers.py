"""Cuts leaves that hold several layers into one array per layer."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from optax_boost._foundation import _types
from optax_boost._trace import _layer_axes


def split_layers(
  tree: _types.Tree, layers: _layer_axes.LayerAxes | None
) -> tuple[list[str], list[jax.Array], Callable[[Sequence[jax.Array]], _types.Tree]]:
  """Cuts the leaves of `tree` into layers; returns the layers' paths, their arrays, and `join`.

  The path of a layer is the path of its leaf. The function ``join`` gets the layers' arrays, e.g.
  after they have been changed, and returns a tree like `tree`.
  """
  leaves = [
    leaf if leaf.num_layers else leaf._replace(axes=None)
    for leaf in _layer_axes.leaves_of(tree, layers)
  ]

  def split(leaf: _layer_axes.Leaf, x: jax.Array) -> list[jax.Array]:
    if not leaf.stacked:
      return [x]
    front = jnp.moveaxis(x, leaf.stacked, range(len(leaf.stacked)))
    return list(front.reshape(leaf.num_layers, *leaf.shape_of_layer))

  def merge(leaf: _layer_axes.Leaf, layers: list[jax.Array]) -> jax.Array:
    if not leaf.stacked:
      return layers[0]
    front = jnp.stack(layers).reshape(*leaf.stacked_shape, *leaf.shape_of_layer)
    return jnp.moveaxis(front, range(len(leaf.stacked)), leaf.stacked)

  def join(layers: Sequence[jax.Array]) -> _types.Tree:
    unused = iter(layers)
    merged = [merge(leaf, [next(unused) for _ in range(leaf.num_layers)]) for leaf in leaves]
    return jax.tree.unflatten(jax.tree.structure(tree), merged)

  pairs = zip(leaves, jax.tree.leaves(tree), strict=True)
  paths = [leaf.path for leaf in leaves for _ in range(leaf.num_layers)]
  return paths, [layer for leaf, x in pairs for layer in split(leaf, x)], join

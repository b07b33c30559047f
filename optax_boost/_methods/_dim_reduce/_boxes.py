"""Values in the place of the variables of NNX, and of the metadata of Linen, that hold them."""

from typing import Any

import jax

from optax_boost._foundation import _paths


def unboxed(tree: Any) -> Any:
  """A tree with the values of its boxes in their place.

  For a state's arrays of other shapes than the params: Flax shards an array as its box says, and
  the box of a param means the param's shape.
  """

  def value(node: Any) -> Any:
    # A mask, of which there are no leaves, may be in a box, too.
    return (
      jax.tree.leaves(node, is_leaf=lambda x: x is not node)[0] if _paths.is_box(node) else node
    )

  return jax.tree.map(value, tree, is_leaf=_paths.is_box)

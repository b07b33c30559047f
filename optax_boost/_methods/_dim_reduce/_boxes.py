"""Takes arrays out of boxes: NNX's variables and Linen's metadata."""

import jax

from optax_boost._foundation import _paths, _types


def unboxed(tree: _types.Tree) -> _types.Tree:
  """Returns the tree with the value of each box in place of the box.

  A param's box tells Flax how to shard the param, which is wrong for an array with one axis more.
  """

  def value(node: _types.Tree) -> _types.Tree:
    # `jax.tree.leaves(node)` would skip a mask in the box, since a mask has no leaves.
    return (
      jax.tree.leaves(node, is_leaf=lambda x: x is not node)[0] if _paths.is_box(node) else node
    )

  return jax.tree.map(value, tree, is_leaf=_paths.is_box)

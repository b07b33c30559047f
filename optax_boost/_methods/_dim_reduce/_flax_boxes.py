"""Takes arrays out of boxes: NNX variables and Linen metadata, each of which wraps one array."""

import jax

from optax_boost._foundation import _paths, _types


def unboxed(tree: _types.Tree) -> _types.Tree:
  """Returns the tree with the value of each box in place of the box.

  The box of a param tells Flax how to shard the param. The arrays of `tree` have one axis more than
  the params, so these boxes would be wrong for them.
  """

  def value(node: _types.Tree) -> _types.Tree:
    # `jax.tree.leaves(node)` would miss an `optax.MaskedNode` in the box, since it has no leaves.
    return (
      jax.tree.leaves(node, is_leaf=lambda x: x is not node)[0] if _paths.is_box(node) else node
    )

  return jax.tree.map(value, tree, is_leaf=_paths.is_box)

"""Replaces boxes, which are NNX's variables and Linen's metadata, by the values that they hold."""

import jax

from optax_boost._foundation import _paths, _types


def unboxed(tree: _types.Tree) -> _types.Tree:
  """Replaces each box in a tree by its value.

  The box of a param tells Flax how to shard the param. A state's array of another shape can't be
  sharded so, and must not be in that box.
  """

  def value(node: _types.Tree) -> _types.Tree:
    # A box may hold a mask, which has no leaves.
    return (
      jax.tree.leaves(node, is_leaf=lambda x: x is not node)[0] if _paths.is_box(node) else node
    )

  return jax.tree.map(value, tree, is_leaf=_paths.is_box)

"""The paths of leaves, by which patterns select leaves and messages name them."""

import jax

from optax_boost._foundation import _types

# The path from an NNX variable to its value, in versions of Flax.
_BOXED = [(jax.tree_util.GetAttrKey(name),) for name in ("value", "raw_value")]


def leaf_name(path: str) -> str:
  """A leaf's path for a message; a tree that is one array, whose path is empty, is "params"."""
  return path or "params"


def leaf_paths(tree: _types.Tree, is_leaf: _types.LeafTest | None = None) -> list[str]:
  """The path of each leaf, in the order of ``jax.tree.leaves``; ``""`` for a tree that is a leaf.

  The paths of leaves in NNX variables lack the last ``.value``, so patterns need not match it.
  """
  keys = leaf_keys(tree, is_leaf)
  return [jax.tree_util.keystr(path, simple=True, separator="/") for path in keys]


def leaf_keys(tree: _types.Tree, is_leaf: _types.LeafTest | None = None) -> list[_types.KeyPath]:
  """The path of each leaf as JAX's keys, which :func:`leaf_paths` joins."""
  flatten = jax.tree_util.tree_flatten_with_path
  paths = [path for path, _ in flatten(tree, is_leaf=is_leaf)[0]]
  boxes = set()
  if any(path[-1:] in _BOXED for path in paths):
    boxes = {path for path, node in flatten(tree, is_leaf=is_box)[0] if is_box(node)}
  return [path[:-1] if path[:-1] in boxes else path for path in paths]


def is_box(node: _types.Tree) -> bool:
  """Whether a node wraps one value, as NNX variables and Linen's partitioning metadata do."""
  # `is_leaf` makes a hidden value a child, too. A named tuple with a `value` is a container.
  children = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)[0]
  return len(children) == 1 and children[0][0] in _BOXED and not isinstance(node, tuple)

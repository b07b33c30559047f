"""The paths of leaves, which patterns match and messages show."""

from typing import Any

import jax

from optax_boost._foundation import _types

# The key of the value in an NNX variable. Versions of Flax name the attribute differently.
_BOXED = {jax.tree_util.GetAttrKey(name) for name in ("value", "raw_value")}


def leaf_name(path: str) -> str:
  """Returns a leaf's path for a message; "params" if the path is empty (the tree is one leaf)."""
  return path or "params"


def leaf_paths(tree: _types.Tree, is_leaf: _types.LeafTest | None = None) -> list[str]:
  """Returns the path of each leaf, in the order of ``jax.tree.leaves``; keys are joined by ``/``.

  A tree that is one leaf has the path ``""``. The path of a leaf in an NNX variable lacks the key
  ``.value``, so that patterns need not match ``.value``.
  """
  keys = leaf_keys(tree, is_leaf)
  return [jax.tree_util.keystr(path, simple=True, separator="/") for path in keys]


def leaf_pointers(tree: _types.Tree, is_leaf: _types.LeafTest | None = None) -> list[str]:
  """Returns the path of each leaf as a JSON pointer (RFC 6901), with a slash before each key.

  A slash inside of a key is written as ``~1``. So node A contains node B exactly if the pointer of
  B begins with the pointer of A and a slash: ``"net/linear"`` in Haiku is not inside of ``"net"``.
  """

  def escape(key: Any) -> str:
    name = jax.tree_util.keystr((key,), simple=True)
    return "/" + name.replace("~", "~0").replace("/", "~1")

  return ["".join(map(escape, path)) for path in leaf_keys(tree, is_leaf)]


def leaf_keys(tree: _types.Tree, is_leaf: _types.LeafTest | None = None) -> list[_types.KeyPath]:
  """Returns the path of each leaf as a tuple of JAX's keys, which :func:`leaf_paths` joins."""
  flatten = jax.tree_util.tree_flatten_with_path
  paths = [path for path, _ in flatten(tree, is_leaf=is_leaf)[0]]
  if not any(_BOXED & {*path} for path in paths):
    return paths
  boxes = {path for path, node in flatten(tree, is_leaf=is_box)[0] if is_box(node)}

  def without_box(path: _types.KeyPath) -> _types.KeyPath:
    return tuple(key for i, key in enumerate(path) if path[:i] not in boxes)

  return list(map(without_box, paths))


def is_box(node: _types.Tree) -> bool:
  """Returns whether a node wraps one value, as an NNX variable or Linen's metadata does."""
  # With this `is_leaf`, a child without leaves, such as an `optax.MaskedNode`, is found, too. A
  # named tuple with the single field `value` is a container, not a box.
  flatten = jax.tree_util.tree_flatten_with_path
  children = [path for path, _ in flatten(node, is_leaf=lambda x: x is not node)[0]]
  return children in [[(key,)] for key in _BOXED] and not isinstance(node, tuple)

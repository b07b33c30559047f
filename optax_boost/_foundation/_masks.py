"""Leaves that ``optax.masked`` or ``optax.partition`` hides."""

from typing import Any

import jax
import optax

from optax_boost._foundation import _paths, _types


def is_masked(value: _types.Tree) -> bool:
  """Whether a value stands for leaves that ``optax.masked`` or ``optax.partition`` hid."""
  return isinstance(value, optax.MaskedNode)


def masked_paths(tree: _types.Tree) -> list[str]:
  """The paths of the nodes that hide leaves."""
  nodes = zip(
    _paths.leaf_paths(tree, is_masked), jax.tree.leaves(tree, is_leaf=is_masked), strict=True
  )
  return [path for path, node in nodes if is_masked(node)]


def mask_like(tree: _types.Tree, masked: _types.Tree) -> _types.Tree:
  """Hides the leaves of `tree` that are hidden in `masked`; optax does not mask extra arguments."""
  if _same_structure(tree, masked):
    return tree
  return jax.tree.map(lambda m, t: m if is_masked(m) else t, masked, tree, is_leaf=is_masked)


def fill_masked(tree: _types.Tree, full: _types.Tree) -> _types.Tree:
  """Puts the leaves of `full` where ``optax.MaskedNode`` hides them in `tree`."""
  if _same_structure(tree, full):
    return tree
  return jax.tree.map(lambda t, f: f if is_masked(t) else t, tree, full, is_leaf=is_masked)


def _same_structure(first: _types.Tree, second: _types.Tree) -> bool:
  structures: list[Any] = [jax.tree.structure(tree) for tree in (first, second)]
  return bool(structures[0] == structures[1])


def leaves_like(tree: _types.Tree, like: _types.Tree) -> list[Any] | None:
  """The leaves of `tree` in the order of `like`'s, or None if the trees don't match.

  An ``optax.MaskedNode`` is a leaf that stands for any leaves below its path. By path, not by
  structure: an NNX optimizer wraps the arrays of its state in other variables than a model does.
  """
  structures: list[Any] = [jax.tree.structure(x, is_leaf=is_masked) for x in (tree, like)]
  if structures[0] == structures[1]:
    return jax.tree.leaves(tree, is_leaf=is_masked)
  leaves, targets = _leaves_by_path(tree), _leaves_by_path(like)
  if leaves is None or targets is None:
    return None
  if not (_covers(leaves, targets) and _covers(targets, leaves)):
    return None
  return [leaves.get(path, optax.MaskedNode()) for path in targets]


def _leaves_by_path(tree: _types.Tree) -> dict[str, Any] | None:
  """The leaves and masks of a tree by their paths, or None if two have the same path."""
  paths = _paths.leaf_paths(tree, is_masked)
  leaves = jax.tree.leaves(tree, is_leaf=is_masked)
  return dict(zip(paths, leaves, strict=True)) if len(set(paths)) == len(paths) else None


def _covers(first: dict[str, Any], second: dict[str, Any]) -> bool:
  """Whether each leaf of `second` has the path of one in `first`, or is below a mask there."""
  masks = [path for path, leaf in first.items() if is_masked(leaf)]
  prefixes = tuple(f"{path}/" if path else "" for path in masks)
  return all(
    is_masked(leaf) or path in first or path.startswith(prefixes) for path, leaf in second.items()
  )

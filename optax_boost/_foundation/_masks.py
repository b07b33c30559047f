"""Leaves that ``optax.masked`` or ``optax.partition`` hides."""

import jax
import optax

from optax_boost._foundation import _paths, _types


def is_masked(value: _types.Tree) -> bool:
  """Whether a node is an ``optax.MaskedNode``, which stands for hidden leaves."""
  return isinstance(value, optax.MaskedNode)


def masked_paths(tree: _types.Tree) -> list[str]:
  """The paths of the nodes that hide leaves in a tree."""
  nodes = zip(
    _paths.leaf_paths(tree, is_masked), jax.tree.leaves(tree, is_leaf=is_masked), strict=True
  )
  return [path for path, node in nodes if is_masked(node)]


def mask_like(tree: _types.Tree, masked: _types.Tree) -> _types.Tree:
  """Hides in `tree` the leaves that `masked` hides; optax does not mask extra arguments."""
  if _same_structure(tree, masked):
    return tree
  return jax.tree.map(lambda m, t: m if is_masked(m) else t, masked, tree, is_leaf=is_masked)


def fill_masked(tree: _types.Tree, full: _types.Tree) -> _types.Tree:
  """Replaces each ``optax.MaskedNode`` in `tree` by the leaves of `full` in its place."""
  if _same_structure(tree, full):
    return tree
  return jax.tree.map(lambda t, f: f if is_masked(t) else t, tree, full, is_leaf=is_masked)


def _same_structure(first: _types.Tree, second: _types.Tree) -> bool:
  structure: _types.TreeDef = jax.tree.structure(first)
  return structure == jax.tree.structure(second)


def leaves_like(tree: _types.Tree, like: _types.Tree) -> list[_types.Leaf] | None:
  """The leaves of `tree` in the order of the leaves of `like`; None if the trees don't match.

  An ``optax.MaskedNode`` is a leaf, and matches any leaves below its path. Trees are matched by
  path, since an NNX optimizer wraps arrays in other variables than the model does.
  """
  structure: _types.TreeDef = jax.tree.structure(tree, is_leaf=is_masked)
  if structure == jax.tree.structure(like, is_leaf=is_masked):
    return jax.tree.leaves(tree, is_leaf=is_masked)
  leaves, targets = _leaves_by_path(tree), _leaves_by_path(like)
  if leaves is None or targets is None:
    return None
  if not (_covers(leaves, targets) and _covers(targets, leaves)):
    return None
  return [leaves.get(path, optax.MaskedNode()) for path in targets]


def _leaves_by_path(tree: _types.Tree) -> dict[str, _types.Leaf] | None:
  """The leaves and masks of a tree by path; None if two have the same path."""
  paths = _paths.leaf_paths(tree, is_masked)
  leaves = jax.tree.leaves(tree, is_leaf=is_masked)
  return dict(zip(paths, leaves, strict=True)) if len(set(paths)) == len(paths) else None


def _covers(first: dict[str, _types.Leaf], second: dict[str, _types.Leaf]) -> bool:
  """Whether each leaf of `second` has the path of a leaf in `first`, or is below a mask there."""
  masks = [path for path, leaf in first.items() if is_masked(leaf)]
  prefixes = tuple(f"{path}/" if path else "" for path in masks)
  return all(
    is_masked(leaf) or path in first or path.startswith(prefixes) for path, leaf in second.items()
  )

"""Trees in which ``optax.masked`` or ``optax.partition`` hides leaves by a ``MaskedNode``."""

import jax
import optax

from optax_boost._foundation import _paths, _types


def is_masked(value: _types.Tree) -> bool:
  """Returns whether a node is an ``optax.MaskedNode``, which stands for hidden leaves."""
  return isinstance(value, optax.MaskedNode)


def masked_paths(tree: _types.Tree) -> list[str]:
  """Returns the path of each ``optax.MaskedNode`` in a tree."""
  nodes = zip(
    _paths.leaf_paths(tree, is_masked), jax.tree.leaves(tree, is_leaf=is_masked), strict=True
  )
  return [path for path, node in nodes if is_masked(node)]


def mask_like(tree: _types.Tree, masked: _types.Tree) -> _types.Tree:
  """Returns `tree` with an ``optax.MaskedNode`` in each place where `masked` has one.

  ``optax.masked`` masks the updates, but not extra arguments such as `grad`; callers mask these.
  """
  if _same_structure(tree, masked):
    return tree
  return jax.tree.map(lambda m, t: m if is_masked(m) else t, masked, tree, is_leaf=is_masked)


def fill_masked(tree: _types.Tree, full: _types.Tree) -> _types.Tree:
  """Returns `tree` with each ``optax.MaskedNode`` replaced by the leaves of `full` at its path."""
  if _same_structure(tree, full):
    return tree
  return jax.tree.map(lambda t, f: f if is_masked(t) else t, tree, full, is_leaf=is_masked)


def _same_structure(first: _types.Tree, second: _types.Tree) -> bool:
  structure: _types.TreeDef = jax.tree.structure(first)
  return structure == jax.tree.structure(second)


def leaves_like(tree: _types.Tree, like: _types.Tree) -> list[_types.Leaf] | None:
  """Returns the leaves of `tree` in the order of `like`'s leaves; None if the trees don't match.

  Leaves match by path, since an NNX optimizer wraps arrays in other variables than the model does.
  An ``optax.MaskedNode`` is a leaf that matches any leaves below its path.
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
  """Returns a tree's leaves and ``MaskedNode`` nodes by path; None if two have the same path."""
  paths = _paths.leaf_pointers(tree, is_masked)
  leaves = jax.tree.leaves(tree, is_leaf=is_masked)
  return dict(zip(paths, leaves, strict=True)) if len(set(paths)) == len(paths) else None


def _covers(first: dict[str, _types.Leaf], second: dict[str, _types.Leaf]) -> bool:
  """Returns whether `first` has a counterpart of each unmasked leaf of `second`.

  A counterpart is a leaf with the same path, or an ``optax.MaskedNode`` at or above the path.
  """
  masks = [path for path, leaf in first.items() if is_masked(leaf)]
  prefixes = tuple(f"{path}/" for path in masks)
  return all(
    is_masked(leaf) or path in first or path.startswith(prefixes) for path, leaf in second.items()
  )

"""Leaves that optax hides by masks, and gradients among extra arguments."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

from optax_boost._foundation import _tree, _types


def mask_like(tree: _types.Tree, masked: _types.Tree) -> _types.Tree:
  """Hides the leaves of `tree` that are hidden in `masked`; optax does not mask extra arguments."""
  if _same_structure(tree, masked):
    return tree
  return jax.tree.map(
    lambda m, t: m if _tree.is_masked(m) else t, masked, tree, is_leaf=_tree.is_masked
  )


def fill_masked(tree: _types.Tree, full: _types.Tree) -> _types.Tree:
  """Puts the leaves of `full` where ``optax.MaskedNode`` hides them in `tree`."""
  if _same_structure(tree, full):
    return tree
  return jax.tree.map(
    lambda t, f: f if _tree.is_masked(t) else t, tree, full, is_leaf=_tree.is_masked
  )


def _same_structure(first: _types.Tree, second: _types.Tree) -> bool:
  structures: list[Any] = [jax.tree.structure(tree) for tree in (first, second)]
  return bool(structures[0] == structures[1])


def leaves_like(tree: _types.Tree, like: _types.Tree) -> list[Any] | None:
  """The leaves of `tree` in the order of `like`'s, or None if the trees don't match.

  An ``optax.MaskedNode`` is a leaf that stands for any leaves below its path. By path, not by
  structure: an NNX optimizer wraps the arrays of its state in other variables than a model does.
  """
  structures: list[Any] = [jax.tree.structure(x, is_leaf=_tree.is_masked) for x in (tree, like)]
  if structures[0] == structures[1]:
    return jax.tree.leaves(tree, is_leaf=_tree.is_masked)
  leaves, targets = _leaves_by_path(tree), _leaves_by_path(like)
  if leaves is None or targets is None:
    return None
  if not (_covers(leaves, targets) and _covers(targets, leaves)):
    return None
  return [leaves.get(path, optax.MaskedNode()) for path in targets]


def _leaves_by_path(tree: _types.Tree) -> dict[str, Any] | None:
  """The leaves and masks of a tree by their paths, or None if two have the same path."""
  paths = _tree.leaf_paths(tree, _tree.is_masked)
  leaves = jax.tree.leaves(tree, is_leaf=_tree.is_masked)
  return dict(zip(paths, leaves, strict=True)) if len(set(paths)) == len(paths) else None


def _covers(first: dict[str, Any], second: dict[str, Any]) -> bool:
  """Whether each leaf of `second` has the path of one in `first`, or is below a mask there."""
  masks = [path for path, leaf in first.items() if _tree.is_masked(leaf)]
  prefixes = tuple(f"{path}/" if path else "" for path in masks)
  return all(
    _tree.is_masked(leaf) or path in first or path.startswith(prefixes)
    for path, leaf in second.items()
  )


def map_gradients(
  function: Callable[[_types.Tree], _types.Tree],
  updates: _types.Tree,
  extra_args: Mapping[str, Any],
) -> tuple[Any, _types.ExtraArgs]:
  """Applies a function to all gradients: `updates`, the extra arguments `grad` and `grad_fn`."""
  extra = dict(extra_args)

  def of_some(gradients: _types.Tree) -> _types.Tree:
    # A method further inside may see fewer leaves than the function.
    seen = mask_like(gradients, updates)
    return mask_like(function(fill_masked(seen, updates)), seen)

  if extra.get("grad") is not None:
    if leaves_like(extra["grad"], updates) is None:
      # Of other leaves, as inside ``optax.flatten``: whoever needs it says that it is missing.
      del extra["grad"]
    else:
      extra["grad"] = of_some(extra["grad"])
  if extra.get("grad_fn") is not None:
    grad_fn = extra["grad_fn"]
    extra["grad_fn"] = lambda *args, **kwargs: of_some(grad_fn(*args, **kwargs))
  return function(updates), extra


def ignoring_closures(function: _types.Closure) -> _types.Closure:
  """A function of params that lets the other extra arguments pass.

  optax's line searches pass them on, and look for their names in its signature.
  """

  def call(
    params: _types.Tree,
    *args: Any,
    grad_fn: _types.Unchecked = None,
    full_grad_fn: _types.Unchecked = None,
    obj_fn: _types.Unchecked = None,
    layers: _types.Unchecked = None,
    weight: _types.Unchecked = None,
    model_state: _types.Unchecked = None,
  ) -> Any:
    return function(params, *args)

  return call

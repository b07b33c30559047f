"""Maps over trees, nodes of trees, and functions that run once for each tree."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from optax_boost._foundation import _types

# How many trees' plans `once_per_tree` keeps.
_MOST_PLANS = 64
_MISSING = object()

_Plan = TypeVar("_Plan")
_State = TypeVar("_State")


def map_leaves(
  function: Callable[..., Any], tree: _types.SameTree, *trees: _types.Tree
) -> _types.SameTree:
  """``jax.tree.map`` over trees of which some may have their leaves in boxes (`_paths.is_box`)."""
  return map_with(function, tree, *map(jax.tree.leaves, trees))


def map_with(
  function: Callable[..., Any], tree: _types.SameTree, *columns: Sequence[Any]
) -> _types.SameTree:
  """Maps ``function(leaf, *entries)`` over a tree; each column has one entry for each leaf."""
  structure: _types.TreeDef
  leaves, structure = jax.tree.flatten(tree)
  rows = zip(leaves, *columns, strict=True)
  return jax.tree.unflatten(structure, [function(*row) for row in rows])


# From a node of a tree to its children and its static data; None for a leaf.
flatten_node = jax.tree_util.default_registry.flatten_one_level


def _indexed_nodes(tree: _types.Tree) -> list[tuple[tuple[int, ...], Any]]:
  """All nodes and leaves, each after those inside it, with the child indices that lead to it."""
  outside_in: list[tuple[tuple[int, ...], Any]] = []
  pending: list[tuple[tuple[int, ...], Any]] = [((), tree)]
  # A loop is faster than a tree map: an optimizer state has thousands of nodes.
  while pending:
    indices, node = pending.pop()
    outside_in.append((indices, node))
    flat = flatten_node(node)
    for i, child in enumerate(flat[0] if flat is not None else ()):
      pending.append(((*indices, i), child))
  return outside_in[::-1]


def nodes(tree: _types.Tree) -> list[Any]:
  """All nodes and leaves of a tree, each after those inside it."""
  return [node for _, node in _indexed_nodes(tree)]


def child_indices(tree: _types.Tree, node: _types.Tree) -> tuple[int, ...]:
  """The indices of children by which :func:`flatten_node` leads from a tree to one of its nodes."""
  return next(indices for indices, found in _indexed_nodes(tree) if found is node)


def find_states(opt_state: _types.Tree, state_type: type[_State]) -> list[_State]:
  """All states of a type in an optimizer state, at any depth."""

  def matches(node: _types.Tree) -> bool:
    return isinstance(node, state_type)

  return [node for node in jax.tree.leaves(opt_state, is_leaf=matches) if matches(node)]


def once_per_tree(plan: Callable[..., _Plan]) -> Callable[..., _Plan]:
  """Caches ``plan(tree, *static)`` by the tree's structure and shapes, so that it warns only once.

  `static` are hashable arguments.
  """
  plans: dict[Hashable, Any] = {}

  def cached(tree: _types.Tree, *static: Hashable) -> _Plan:
    leaves, structure = jax.tree.flatten(tree)
    key = (structure, tuple(jnp.shape(leaf) for leaf in leaves), *static)
    # One lookup: another thread may clear the plans between two.
    tree_plan = plans.get(key, _MISSING)
    if tree_plan is _MISSING:
      tree_plan = plan(tree, *static)
      if len(plans) >= _MOST_PLANS:
        plans.clear()
      plans[key] = tree_plan
    return tree_plan

  return cached

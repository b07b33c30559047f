"""Maps over trees, nodes of trees, and functions that run once for each tree."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from optax_boost._foundation import _types

# The number of results that `once_per_tree` keeps.
_MOST_PLANS = 64
_MISSING = object()

_Plan = TypeVar("_Plan")
_State = TypeVar("_State")


def map_leaves(
  function: Callable[..., Any], tree: _types.SameTree, *trees: _types.Tree
) -> _types.SameTree:
  """Maps as ``jax.tree.map`` does, even if only some trees wrap their leaves in NNX variables."""
  return map_with(function, tree, *map(jax.tree.leaves, trees))


def map_with(
  function: Callable[..., Any], tree: _types.SameTree, *columns: Sequence[Any]
) -> _types.SameTree:
  """Returns a tree of ``function(leaf, *entries)``; each column has one entry for each leaf."""
  structure: _types.TreeDef
  leaves, structure = jax.tree.flatten(tree)
  rows = zip(leaves, *columns, strict=True)
  return jax.tree.unflatten(structure, [function(*row) for row in rows])


# ``flatten_node(node)`` returns the children and the static data of a node, or None for a leaf.
flatten_node = jax.tree_util.default_registry.flatten_one_level


def nodes(tree: _types.Tree) -> list[Any]:
  """Returns all nodes and leaves of a tree, children before parents."""
  outside_in: list[Any] = []
  pending = [tree]
  # A loop, since a tree map is slower and an optimizer state has thousands of nodes.
  while pending:
    node = pending.pop()
    outside_in.append(node)
    flat = flatten_node(node)
    pending.extend(flat[0] if flat is not None else ())
  return outside_in[::-1]


def find_states(opt_state: _types.Tree, state_type: type[_State]) -> list[_State]:
  """Returns all states of a type in an optimizer state, at any depth."""

  def matches(node: _types.Tree) -> bool:
    return isinstance(node, state_type)

  return [node for node in jax.tree.leaves(opt_state, is_leaf=matches) if matches(node)]


def once_per_tree(plan: Callable[..., _Plan]) -> Callable[..., _Plan]:
  """Returns `plan` with a cache, so that ``plan(tree, *static)`` runs, and warns, once per tree.

  Trees with equal structures and shapes share a result, if the hashable arguments `static` are
  equal, too.
  """
  plans: dict[Hashable, Any] = {}

  def cached(tree: _types.Tree, *static: Hashable) -> _Plan:
    leaves, structure = jax.tree.flatten(tree)
    key = (structure, tuple(jnp.shape(leaf) for leaf in leaves), *static)
    # One lookup, since another thread may clear the cache between `in` and a lookup.
    tree_plan = plans.get(key, _MISSING)
    if tree_plan is _MISSING:
      tree_plan = plan(tree, *static)
      if len(plans) >= _MOST_PLANS:
        plans.clear()
      plans[key] = tree_plan
    return tree_plan

  return cached

"""Maps over trees, states inside of trees, and functions that run once for each tree."""

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
  """``jax.tree.map`` over trees of the same leaves, of which some may be in boxes."""
  return map_with(function, tree, *map(jax.tree.leaves, trees))


def map_with(
  function: Callable[..., Any], tree: _types.SameTree, *columns: Sequence[Any]
) -> _types.SameTree:
  """``function(leaf, *entries)`` of each leaf; each column is a list with an entry for each."""
  structure: Any
  leaves, structure = jax.tree.flatten(tree)
  rows = zip(leaves, *columns, strict=True)
  return jax.tree.unflatten(structure, [function(*row) for row in rows])


def find_states(opt_state: _types.Tree, state_type: type[_State]) -> list[_State]:
  """All states of a type in an optimizer state, at any depth."""

  def matches(node: _types.Tree) -> bool:
    return isinstance(node, state_type)

  return [node for node in jax.tree.leaves(opt_state, is_leaf=matches) if matches(node)]


def once_per_tree(plan: Callable[..., _Plan]) -> Callable[..., _Plan]:
  """Makes a function of a tree's paths and shapes run, and warn, once for each tree.

  Further arguments must be hashable.
  """
  plans: dict[Any, Any] = {}

  def cached(tree: _types.Tree, *static: Hashable) -> _Plan:
    leaves, structure = jax.tree.flatten(tree)
    key = (structure, tuple(jnp.shape(leaf) for leaf in leaves), *static)
    # Another thread may clear the plans at any time, so none is looked up twice.
    tree_plan = plans.get(key, _MISSING)
    if tree_plan is _MISSING:
      tree_plan = plan(tree, *static)
      if len(plans) >= _MOST_PLANS:
        plans.clear()
      plans[key] = tree_plan
    return tree_plan

  return cached

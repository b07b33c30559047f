"""Arguments that select leaves: patterns, trees of bools, or functions that return such trees."""

import jax

from optax_boost._foundation import _checks, _paths, _patterns, _types


def check_selector(argument: str, selector: _types.LeafSelector) -> None:
  """Raises unless an argument can be a selector of leaves.

  Factories call this check, when the tree whose leaves are selected is not known yet.
  """
  if selector is None or is_auto_selector(selector):
    return
  if _is_function(selector):
    _checks.check_callable(argument, selector, f"{argument}(params)", takes=1)
  elif isinstance(selector, str):
    _patterns.compile_pattern(argument, selector)
  elif isinstance(selector, list | tuple) and any(isinstance(p, str) for p in selector):
    for pattern in selector:
      _patterns.compile_pattern(argument, pattern)
  elif not all(isinstance(flag, bool) for flag in jax.tree.leaves(selector)):
    raise _not_a_selector(argument, selector)


def select(
  tree: _types.Tree,
  selector: _types.LeafSelector,
  argument: str,
) -> list[bool]:
  """Returns for each leaf, in the order of ``jax.tree.leaves``, whether it is selected."""
  paths = _paths.leaf_paths(tree)
  if selector is None:
    return [False] * len(paths)
  patterns = (selector,) if isinstance(selector, str) else selector
  if isinstance(patterns, list | tuple) and all(isinstance(p, str) for p in patterns):
    return [
      index is not None for index in _patterns.first_match(argument, patterns, paths, tree=tree)
    ]
  if isinstance(selector, bool) and not jax.tree_util.all_leaves([tree]):
    # Probably the user's selector was a function. `optax.inject_hyperparams` took this function for
    # a schedule, called it, and passed its result, a single bool, as the selector.
    raise _not_a_selector(argument, selector)
  mask = selector(tree) if _is_function(selector) else selector
  return _broadcast_mask(mask, tree, argument)


def is_auto_selector(selector: _types.LeafSelector) -> bool:
  """Returns whether a selector is "auto", which stands for the default rule of the method."""
  # The type is checked first, since `==` on an array returns an array.
  return isinstance(selector, str) and selector == "auto"


def _is_function(selector: _types.LeafSelector) -> bool:
  """Returns whether a selector is a function that makes a mask from the tree.

  An Equinox module of bools may be callable, but counts as a mask, not as a function.
  """
  return callable(selector) and not any(isinstance(x, bool) for x in jax.tree.leaves(selector))


def _not_a_selector(argument: str, got: _types.Unchecked) -> TypeError:
  return TypeError(
    f"`{argument}` must be patterns, a tree of bools, a callable that returns one, or"
    f" None; got {_checks.shorten(got)}. Under `optax.inject_hyperparams` a callable must be"
    " named in `static_args`, or it is taken for a schedule."
  )


def _broadcast_mask(mask: _types.Tree, tree: _types.Tree, argument: str) -> list[bool]:
  flags = jax.tree.leaves(mask)
  if not all(isinstance(flag, bool) for flag in flags):
    raise _not_a_selector(argument, mask)
  try:
    return jax.tree.leaves(jax.tree.broadcast(mask, tree))
  except ValueError as error:
    raise ValueError(
      f"`{argument}` must be a tree of bools with the structure of the tree that it selects from,"
      f" or a prefix of it; got {jax.tree.structure(mask)} for {jax.tree.structure(tree)}."
    ) from error

"""Leaf paths, selecting leaves by pattern, and checks of trees."""

from collections.abc import Callable, Hashable, Sequence
import re
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax

from optax_boost._foundation import _base, _types

# The key paths from an NNX variable to its value.
_BOXED = [(jax.tree_util.GetAttrKey(name),) for name in ("value", "raw_value")]
# How many trees' plans `once_per_tree` keeps.
_MOST_PLANS = 64
_MISSING = object()
_BIAS_OR_NORM = re.compile(r"(^|[/.])(bias|scale|beta|gamma)$")

_Plan = TypeVar("_Plan")
_State = TypeVar("_State")


class Constants(NamedTuple):
  """Arrays in a batch that are not examples: those of a second model."""

  arrays: tuple[Any, ...]


def is_constants(node: _types.Tree) -> bool:
  """Whether a node of a batch holds no examples."""
  return isinstance(node, Constants)


def leaf_name(path: str) -> str:
  """A leaf's path for a message; the only leaf of a bare array is called "params"."""
  return path or "params"


def leaf_paths(tree: _types.Tree, is_leaf: _types.LeafTest | None = None) -> list[str]:
  """The path of every leaf, in the order of ``jax.tree.leaves``; ``""`` for a single leaf.

  A trailing ``.value`` inside an NNX variable is dropped: patterns need not know of it.
  """
  keys = leaf_keys(tree, is_leaf)
  return [jax.tree_util.keystr(path, simple=True, separator="/") for path in keys]


def leaf_keys(tree: _types.Tree, is_leaf: _types.LeafTest | None = None) -> list[_types.KeyPath]:
  """The keys that :func:`leaf_paths` joins."""
  flatten = jax.tree_util.tree_flatten_with_path
  paths = [path for path, _ in flatten(tree, is_leaf=is_leaf)[0]]
  boxes = set()
  if any(path[-1:] in _BOXED for path in paths):
    boxes = {path for path, node in flatten(tree, is_leaf=is_box)[0] if is_box(node)}
  return [path[:-1] if path[:-1] in boxes else path for path in paths]


def is_box(node: _types.Tree) -> bool:
  """Whether a node wraps one value, as variables of NNX and Linen's partitioning metadata do."""
  # By its children, of which a mask hides none; named tuples are the user's own containers.
  children = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)[0]
  return len(children) == 1 and children[0][0] in _BOXED and not isinstance(node, tuple)


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


def is_masked(value: _types.Tree) -> bool:
  """Whether a value stands for leaves that ``optax.masked`` or ``optax.partition`` hid."""
  return isinstance(value, optax.MaskedNode)


def masked_paths(tree: _types.Tree) -> list[str]:
  """The paths of the nodes that hide leaves."""
  nodes = zip(leaf_paths(tree, is_masked), jax.tree.leaves(tree, is_leaf=is_masked), strict=True)
  return [path for path, node in nodes if is_masked(node)]


def is_bias_or_norm(path: str) -> bool:
  """Whether a leaf has the name of a bias or a normalization in Flax or MXNet."""
  return _BIAS_OR_NORM.search(path) is not None


def first_match(
  argument: str,
  patterns: Sequence[str],
  paths: Sequence[str],
  *,
  tree: _types.Tree = None,
  required: bool = False,
) -> list[int | None]:
  """For each path, the index of the first pattern that matches it; warns of idle patterns.

  Patterns of leaves that are masked in `tree` are not idle. If `required`, ValueError for them
  instead of a warning.
  """
  found = _matches(argument, patterns, paths, tree, required=required)
  return [matches[0] if matches else None for matches in found]


def assign_groups(
  argument: str,
  group_of_pattern: Sequence[tuple[str, int]],
  paths: Sequence[str],
  advice: str = "",
  *,
  tree: _types.Tree = None,
  hint: Callable[[str, Sequence[str]], str] | None = None,
) -> list[int | None]:
  """For each path, the group whose pattern matches it, or None; warns of idle patterns.

  Patterns of leaves that are masked in `tree` are not idle. ValueError for a path that patterns of
  two groups match; `advice` ends its message. ``hint(pattern, paths)`` ends the warning of an
  idle pattern.
  """
  groups: list[int | None] = []
  patterns = [pattern for pattern, _ in group_of_pattern]
  for path, matches in zip(
    paths, _matches(argument, patterns, paths, tree, hint=hint), strict=True
  ):
    first = matches[0] if matches else None
    groups.append(None if first is None else group_of_pattern[first][1])
    for other in matches:
      if group_of_pattern[other][1] != groups[-1]:
        raise ValueError(
          f"`{argument}` must put each leaf into one group; got the leaf '{leaf_name(path)}', which"
          f" {patterns[matches[0]]!r} of group {groups[-1]} and {patterns[other]!r} of group"
          f" {group_of_pattern[other][1]} match. Write patterns of which only one matches it."
          f"{advice}"
        )
  return groups


def _matches(
  argument: str,
  patterns: Sequence[str],
  paths: Sequence[str],
  tree: _types.Tree = None,
  *,
  hint: Callable[[str, Sequence[str]], str] | None = None,
  required: bool = False,
) -> list[list[int]]:
  """For each path, the indices of the patterns that match whole segments of it.

  Warns of patterns that match neither a path nor a leaf that is masked in `tree`; if `required`,
  raises ValueError. The rule of segments: :func:`optax_boost._foundation._base.compile_pattern`.
  """
  compiled = [_base.compile_pattern(argument, pattern) for pattern in patterns]
  matches = [[i for i, p in enumerate(compiled) if p.search(path)] for path in paths]
  matching = {i for match in matches for i in match}
  unmatched = [i for i in range(len(patterns)) if i not in matching]
  hidden = masked_paths(tree) if unmatched else []
  idle = [patterns[i] for i in unmatched if not any(map(compiled[i].search, hidden))]
  if idle and paths:
    hints = "".join(
      _whole_segments_hint(argument, pattern, paths) or (hint(pattern, paths) if hint else "")
      for pattern in idle
    )
    message = f"`{argument}` has patterns that match no leaf: {idle}.{hints}"
    if required:
      raise ValueError(_with_leaves(message, paths))
    warn_no_effect(message, paths)
  return matches


def _whole_segments_hint(argument: str, pattern: str, paths: Sequence[str]) -> str:
  """What to write instead of a pattern that matches parts of segments alone."""
  search = _base.compile_within_segments(argument, pattern).search
  path = next(filter(search, paths), None)
  if path is None:
    return ""
  hint = f" Patterns match whole segments of a path, and {pattern!r} a part of one in '{path}'"
  inner = f"({pattern})" if "|" in pattern else pattern
  for longer in (f"{inner}.*", f".*{inner}", f".*{inner}.*"):
    try:
      if _base.compile_pattern(argument, longer).search(path):
        return f"{hint}: write {longer!r}."
    except ValueError:
      continue  # flags, as `(?i)`, may stand at the start alone
  return f"{hint}."


def select(
  tree: _types.Tree,
  selector: _types.LeafSelector,
  argument: str,
) -> list[bool]:
  """Whether a selector selects each leaf, in the order of ``jax.tree.leaves``."""
  paths = leaf_paths(tree)
  if selector is None:
    return [False] * len(paths)
  patterns = (selector,) if isinstance(selector, str) else selector
  if isinstance(patterns, list | tuple) and all(isinstance(p, str) for p in patterns):
    return [index is not None for index in first_match(argument, patterns, paths, tree=tree)]
  if isinstance(selector, bool) and not jax.tree_util.all_leaves([tree]):
    # `inject_hyperparams` has called a callable as a schedule.
    raise _not_a_selector(argument, selector)
  mask = selector(tree) if _is_function(selector) else selector
  return _broadcast_mask(mask, tree, argument)


def is_auto_selector(selector: _types.LeafSelector) -> bool:
  """Whether a selector stands for the method's own rule."""
  # Arrays, which a user may pass by mistake, compare entry by entry.
  return isinstance(selector, str) and selector == "auto"


def _is_function(selector: _types.LeafSelector) -> bool:
  """Whether a selector is to be called; Equinox's modules of bools can be, and are not."""
  return callable(selector) and not any(isinstance(x, bool) for x in jax.tree.leaves(selector))


def _not_a_selector(argument: str, got: _types.Unchecked) -> TypeError:
  return TypeError(
    f"`{argument}` must be regular expressions, a tree of bools, a callable that returns one, or"
    f" None; got {_base.shorten(got)}. Under `optax.inject_hyperparams` a callable must be named in"
    " `static_args`, or it is taken for a schedule."
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


def check_selector(argument: str, selector: _types.LeafSelector) -> None:
  """Checks an argument that selects leaves, as far as that is possible without the tree."""
  if selector is None or is_auto_selector(selector) or _is_function(selector):
    return
  if isinstance(selector, str):
    _base.compile_pattern(argument, selector)
  elif isinstance(selector, list | tuple) and any(isinstance(p, str) for p in selector):
    for pattern in selector:
      _base.compile_pattern(argument, pattern)
  elif not all(isinstance(flag, bool) for flag in jax.tree.leaves(selector)):
    raise _not_a_selector(argument, selector)


def once_per_tree(plan: Callable[..., _Plan]) -> Callable[..., _Plan]:
  """Makes a function of a tree's paths and shapes run, and warn, once for each tree.

  Further arguments must be hashable.
  """
  plans: dict[Any, Any] = {}

  def cached(tree: _types.Tree, *static: Hashable) -> _Plan:
    leaves, structure = jax.tree.flatten(tree)
    key = (structure, tuple(jnp.shape(leaf) for leaf in leaves), *static)
    # Another thread may clear the plans at any time, so none is looked up twice.
    of_tree = plans.get(key, _MISSING)
    if of_tree is _MISSING:
      of_tree = plan(tree, *static)
      if len(plans) >= _MOST_PLANS:
        plans.clear()
      plans[key] = of_tree
    return of_tree

  return cached


def differentiated(params: _types.Tree) -> Any:
  """The params that gradients are of: of the pair for ``optax.lookahead``, the fast ones."""
  return params.fast if isinstance(params, optax.LookaheadParams) else params


def find_states(opt_state: _types.Tree, state_type: type[_State]) -> list[_State]:
  """All states of a type in an optimizer state, at any depth."""

  def matches(node: _types.Tree) -> bool:
    return isinstance(node, state_type)

  return [node for node in jax.tree.leaves(opt_state, is_leaf=matches) if matches(node)]


def warn_no_effect(message: str, paths: Sequence[str]) -> None:
  """Issues a :class:`NoEffectWarning` that lists the leaves."""
  _base.warn(_with_leaves(message, paths), _base.NoEffectWarning)


def _with_leaves(message: str, paths: Sequence[str]) -> str:
  shown = ", ".join(map(leaf_name, paths[:6])) + (", ..." if len(paths) > 6 else "")
  return f"{message} The leaves are: {shown}."


def refuse_pair(params: _types.Tree, method: str) -> None:
  """Raises ValueError for the pair of params of ``optax.lookahead``."""
  if isinstance(params, optax.LookaheadParams):
    raise ValueError(
      f"`{method}` needs gradients and params of the same tree structure; got the pair of params of"
      f" `optax.lookahead`. Put `{method}` inside: `optax.lookahead(optax.chain(...), ...)`."
    )


def check_same_tree(updates: _types.Tree, params: _types.Tree, method: str) -> None:
  """Raises ValueError for gradients whose structure or shapes differ from the params'."""
  if not isinstance(updates, optax.LookaheadParams):
    refuse_pair(params, method)
  got: Any = jax.tree.structure(updates)
  want: Any = jax.tree.structure(params)
  if got != want:
    update_paths, param_paths = leaf_paths(updates), leaf_paths(params)
    lacking = [path for path in param_paths if path not in update_paths]
    surplus = [path for path in update_paths if path not in param_paths]
    clauses = [f"lack {_base.shorten(lacking)}"] if lacking else []
    clauses += [f"have {_base.shorten(surplus)}"] if surplus else []
    differ = " and ".join(clauses) or f"have the containers {got} instead of {want}"
    raise ValueError(
      f"`{method}` needs gradients and params of the same tree structure; got gradients that"
      f" {differ}. Pass the params that the gradients were taken with respect to."
    )
  pairs = zip(jax.tree.leaves(updates), jax.tree.leaves(params), strict=True)
  for i, (update, param) in enumerate(pairs):
    if jnp.shape(update) != jnp.shape(param):
      raise ValueError(
        f"`{method}` needs gradients of the params' shapes; got {jnp.shape(update)} for the"
        f" leaf '{leaf_name(leaf_paths(updates)[i])}' of shape {jnp.shape(param)}."
      )


def same_shapes(first: _types.Tree, second: _types.Tree) -> bool:
  """Whether two trees have the same structure and shapes."""
  first_structure: Any
  first_leaves, first_structure = jax.tree.flatten(first)
  second_leaves, second_structure = jax.tree.flatten(second)
  if first_structure != second_structure:
    return False
  return list(map(jnp.shape, first_leaves)) == list(map(jnp.shape, second_leaves))


# The advice if all params are differentiated, even if a mask hides some from the optimizer; without
# and with statistics.
CLOSE_OVER = "Keep it out of the params: close over it."
KEEP_OUT = (
  "Keep it out of the params: close over it, or keep it in `model_state` (with Flax: in another"
  " collection or type of variable)."
)


def check_floating(tree: _types.Tree, method: str, advice: str | None = None) -> None:
  """Raises TypeError for leaves that are not real floating-point arrays.

  `advice` is where such a leaf belongs; None: hidden by a mask around `method`.
  """
  _check_dtype(tree, method, advice, jnp.floating, "real floating-point")


def check_inexact(tree: _types.Tree, method: str, advice: str | None = None) -> None:
  """Like :func:`check_floating`, but complex leaves may pass, too."""
  _check_dtype(tree, method, advice, jnp.inexact, "floating-point")


def _check_dtype(
  tree: _types.Tree, method: str, advice: str | None, dtype: jax.typing.DTypeLike, required: str
) -> None:
  for i, leaf in enumerate(jax.tree.leaves(tree)):
    # A Python float has no shape, dtype or sharding, and optax's optimizers refuse it, too.
    if not hasattr(leaf, "dtype"):
      conversion = ""
      if _is_python_number(leaf):
        conversion = " Convert them with `jax.tree.map(jnp.asarray, params)`."
      raise TypeError(
        f"`{method}` needs arrays as leaves; the leaf '{leaf_name(leaf_paths(tree)[i])}' is"
        f" {_base.shorten(leaf)} of type {type(leaf).__name__}.{_keep_out(leaf, 'params')}"
        f"{conversion}"
      )
    if not jnp.issubdtype(leaf.dtype, dtype):
      raise TypeError(
        f"`{method}` needs {required} leaves; the leaf '{leaf_name(leaf_paths(tree)[i])}' is"
        f" {leaf.dtype}. "
        + (advice or f"Leave it out with `optax.masked` or `optax.partition` around `{method}`.")
      )


def _is_python_number(leaf: _types.Unchecked) -> bool:
  return isinstance(leaf, int | float | complex)


def _keep_out(leaf: _types.Unchecked, name: str) -> str:
  """Advice for a leaf that can't be made an array, as functions and names in modules."""
  advice = f" Keep it out of `{name}`, as `equinox.filter(model, equinox.is_inexact_array)` does."
  return "" if _is_python_number(leaf) else advice


def check_traceable(name: str, tree: _types.Tree) -> None:
  """Raises TypeError for leaves that are neither arrays, abstract or not, nor numbers."""
  for path, leaf in zip(leaf_paths(tree), jax.tree.leaves(tree), strict=True):
    try:
      jax.eval_shape(lambda value: value, leaf)
    except (TypeError, ValueError, OverflowError) as error:
      raise TypeError(
        f"`{name}` must hold arrays, abstract or not, or numbers; the leaf '{leaf_name(path)}' is"
        f" {_base.shorten(leaf)} of type {type(leaf).__name__}.{_keep_out(leaf, name)}"
      ) from error

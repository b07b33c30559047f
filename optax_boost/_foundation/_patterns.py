"""Patterns that select leaves by the names in their paths, as the lines of a .gitignore do."""

from collections.abc import Callable, Sequence
import re
from typing import TypeAlias

from optax_boost._foundation import _checks, _masks, _paths, _types, _warnings

# Returns the path of the module or leaf that a pattern matches, for a leaf's path; or None.
Match: TypeAlias = Callable[[str], str | None]

# What regular expressions have, but hardly any name. `h.*.attn` is a pattern of PyTorch's names.
_REGULAR_EXPRESSION = re.compile(r"[\\^$(]|(?:^|\|)\.\*|[.\]]\+")
# The parts of a name in a pattern: stars, `?`, a set of characters, or any other character.
_PART = re.compile(r"\*+|\?|\[(!|(?!!))(\][^\]]*|[^\]]+)\]|.", re.DOTALL)
_ANY_NAMES = "((?:[^/]*/)*?)"  # as few as possible


def compile_pattern(argument: str, pattern: str) -> Match:
  """Compiles a user's pattern, as the docstring of ``path_mask`` explains patterns.

  The returned function takes the path of a leaf, and returns its beginning that the pattern
  matches, with slashes for dots: `blocks/*` matches ``blocks/1`` in ``blocks/1/kernel``. Raises
  TypeError unless `pattern` is a string, and ValueError if it is a regular expression.
  """
  match = compile_stars(argument, pattern)
  return lambda path: None if (found := match(path.replace(".", "/"))) is None else found[0]


def compile_stars(argument: str, pattern: str) -> Callable[[str], re.Match[str] | None]:
  """As :func:`compile_pattern`, for paths without dots; returns a match for each path, or None.

  The groups of a match are the texts that stars match. In a pattern without a slash, a further text
  comes first: the modules before the name.
  """
  if not isinstance(pattern, str):
    raise TypeError(
      f"`{argument}` must hold patterns, which are strings; got {_checks.shorten(pattern)}. Put"
      " bars between the alternatives of one pattern: 'head|*norm*'."
    )
  if _REGULAR_EXPRESSION.search(pattern):
    raise ValueError(
      f"`{argument}` has {_checks.shorten(pattern)}, a regular expression, but patterns are globs:"
      " 'kernel' matches this whole name at any depth, '*bias' each name with this end,"
      " 'blocks/[0-3]' four modules at the root, '**/attn/kernel' two names at any depth, and"
      " 'head|*norm*' the one or the other. The docstring of `path_mask` explains them."
    )
  try:
    alternatives = "|".join(map(_translate, pattern.split("|")))
    return re.compile(rf"(?:{alternatives})(?=/|\Z)").match
  except (ValueError, re.error) as error:
    raise ValueError(
      f"`{argument}` has {_checks.shorten(pattern)}, which is not a pattern: {error}."
    ) from error


def _translate(pattern: str) -> str:
  """Returns the regular expression of a pattern without bars; raises ValueError for a bad one."""
  pattern = pattern.replace(".", "/")
  names = pattern.strip("/").split("/")
  while len(names) > 1 and names[-1] == "**":
    names.pop()  # All leaves below a module are selected anyway.
  if names == [""]:
    raise ValueError("each part between bars needs a name")
  begins_anywhere = "/" not in pattern.rstrip("/")
  modules = (_ANY_NAMES if name == "**" else _translate_name(name) + "/" for name in names[:-1])
  return (_ANY_NAMES if begins_anywhere else "") + "".join(modules) + _translate_name(names[-1])


def _translate_name(name: str) -> str:
  expression = ""
  for part in _PART.finditer(name):
    if part[0] == "[":
      raise ValueError("a bracket is not closed within a name ('[[]' matches a bracket)")
    if part[2] is not None:
      characters = re.sub(r"([\[\]&~])", r"\\\1", part[2])
      expression += f"(?!/)[{'^' if part[1] else ''}{characters}]"
    else:
      expression += {"*": "([^/]*)", "?": "[^/]"}.get(part[0][0], re.escape(part[0]))
  # A name with brackets matches itself.
  return f"(?:{re.escape(name)}|{expression})" if "[" in name else expression


def exact_pattern(path: str, paths: Sequence[str]) -> str:
  """Returns a pattern of the one leaf or module at `path`, among leaves at `paths`."""
  # A question mark stands for a character that patterns can't have.
  pattern = re.sub(r"[\\^$(|+]", "?", path) or "*"
  match = compile_pattern("pattern", pattern)
  is_deeper = not re.search("[/.]", path) and any("/" in (match(each) or "") for each in paths)
  return f"/{pattern}" if is_deeper else pattern


def check_patterns(name: str, value: _types.Unchecked, words: str) -> None:
  """Raises unless `value` is a list or tuple of at least one pattern.

  `words` describe the required value in the message of the TypeError.
  """
  if not (isinstance(value, list | tuple) and value and all(isinstance(p, str) for p in value)):
    raise TypeError(f"`{name}` must be {words}; got {_checks.shorten(value)}.")
  for pattern in value:
    compile_pattern(name, pattern)


def first_match(
  argument: str,
  patterns: Sequence[str],
  paths: Sequence[str],
  *,
  tree: _types.Tree = None,
  required: bool = False,
) -> list[int | None]:
  """Returns for each path the index of the first pattern that matches the path, or None.

  Warns of a pattern that matches no path, unless it matches leaves that ``optax.masked`` hides in
  `tree`. If `required`, raises ValueError instead of warning.
  """
  matches_of_paths = _matches(argument, patterns, paths, tree, required=required)
  return [matches[0] if matches else None for matches in matches_of_paths]


def assign_groups(
  argument: str,
  group_of_pattern: Sequence[tuple[str, int]],
  paths: Sequence[str],
  advice: str = "Write patterns of which only one matches it.",
  *,
  tree: _types.Tree = None,
) -> list[int | None]:
  """Returns for each path the group of the pattern that matches the path, or None.

  Raises ValueError if patterns of two groups match a path; the message ends with `advice`. Warns as
  :func:`first_match` does.
  """
  groups: list[int | None] = []
  patterns = [pattern for pattern, _ in group_of_pattern]
  for path, matches in zip(paths, _matches(argument, patterns, paths, tree), strict=True):
    first = matches[0] if matches else None
    groups.append(None if first is None else group_of_pattern[first][1])
    for other in matches:
      if group_of_pattern[other][1] != groups[-1]:
        raise ValueError(
          f"`{argument}` must put each leaf into one group; got the leaf"
          f" '{_paths.leaf_name(path)}', which {patterns[matches[0]]!r} of group {groups[-1]}"
          f" and {patterns[other]!r} of group {group_of_pattern[other][1]} match. {advice}"
        )
  return groups


def _matches(
  argument: str,
  patterns: Sequence[str],
  paths: Sequence[str],
  tree: _types.Tree = None,
  *,
  required: bool = False,
) -> list[list[int]]:
  """Returns for each path the indices of all patterns that match the path.

  Warns if a pattern matches neither a path nor a leaf that ``optax.masked`` hides in `tree`. If
  `required`, raises ValueError instead. The message names `argument`, which holds the patterns,
  lists the leaves, and has a hint on the rules of patterns for each pattern.
  """
  compiled = [compile_pattern(argument, pattern) for pattern in patterns]
  matches = [[i for i, match in enumerate(compiled) if match(path) is not None] for path in paths]
  matching = {i for match in matches for i in match}
  unmatched = [i for i in range(len(patterns)) if i not in matching]
  hidden = _masks.masked_paths(tree) if unmatched else []
  idle = [patterns[i] for i in unmatched if all(compiled[i](path) is None for path in hidden)]
  if idle and paths:
    hints = "".join(_hint(argument, pattern, paths) for pattern in idle)
    leaves = _warnings.list_leaves(paths)
    message = f"`{argument}` has patterns that match no leaf: {idle}.{hints}{leaves}"
    if required:
      raise ValueError(message)
    _warnings.warn(message, _warnings.NoEffectWarning)
  return matches


def _hint(argument: str, pattern: str, paths: Sequence[str]) -> str:
  """Returns a hint if a pattern lacks `**/` or stars around a name; "" if neither would match."""
  anywhere = re.sub(r"(?:^|(?<=\|))(?:/|(?=[^|]*[/.]))", "**/", pattern)
  parts_of_names = re.sub(r"[^/.|]+", _widen, pattern)
  for wider, rule in (
    (anywhere, "a pattern with a slash or a dot begins at the root"),
    (parts_of_names, "a pattern matches whole names"),
  ):
    match = compile_pattern(argument, wider)
    path = next((path for path in paths if match(path) is not None), None)
    if path is not None:
      return f" Write {wider!r} to match '{_paths.leaf_name(path)}': {rule}."
  return ""


def _widen(name: re.Match[str]) -> str:
  without_stars = name[0].strip("*")
  return f"*{without_stars}*" if without_stars else name[0]

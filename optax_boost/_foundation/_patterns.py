"""Regular expressions that match whole segments of the paths of leaves."""

from collections.abc import Callable, Sequence
import re

from optax_boost._foundation import _checks, _masks, _paths, _types, _warnings

# A match begins and ends next to a `/` or a dot, or at an end of the path. In the names of PyTorch
# and MindSpore, such as `fc1.bias`, dots separate the modules.
_SEGMENT_BOUNDARY = r"(?:\A|\Z|(?<=[/.])|(?=[/.]))"
# Python allows flags such as `(?i)` only at the start of an expression.
_LEADING_FLAGS = re.compile(r"(?:\(\?[aiLmsux]+\))*")


def compile_pattern(argument: str, pattern: str) -> re.Pattern[str]:
  """Compiles a user's regular expression, so that ``search`` finds only whole segments of a path.

  For example, `blocks/1` matches in ``blocks/1/kernel``, but not in ``blocks/10/kernel``. Raises
  TypeError unless `pattern` is a string, and ValueError if it is not a regular expression.
  """
  compiled = _compile_within_segments(argument, pattern)
  flags = _LEADING_FLAGS.match(pattern)[0]  # type: ignore[index]  # it matches any string
  # A verbose expression may end with a comment, so a line break precedes the parenthesis.
  end = "\n)" if compiled.flags & re.VERBOSE else ")"
  whole = f"{flags}{_SEGMENT_BOUNDARY}(?:{pattern[len(flags) :]}{end}{_SEGMENT_BOUNDARY}"
  return re.compile(whole)


def _compile_within_segments(argument: str, pattern: _types.Unchecked) -> re.Pattern[str]:
  """Compiles a regular expression as it is: matches may begin and end within a segment."""
  if not isinstance(pattern, str):
    raise TypeError(
      f"`{argument}` must hold regular expressions, which are strings; got"
      f" {_checks.shorten(pattern)}."
    )
  try:
    return re.compile(pattern)
  except (re.error, RecursionError, OverflowError) as error:
    raise ValueError(
      f"`{argument}` has {_checks.shorten(pattern)}, which is not a regular expression: {error}."
      " Escape special characters with a backslash."
    ) from error


def check_patterns(name: str, value: _types.Unchecked, words: str) -> None:
  """Raises unless `value` is a list or tuple of at least one regular expression.

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
  hint: Callable[[str, Sequence[str]], str] | None = None,
) -> list[int | None]:
  """Returns for each path the group of the pattern that matches the path, or None.

  Raises ValueError if patterns of two groups match a path; the message ends with `advice`. Warns as
  :func:`first_match` does; the warning ends with the string ``hint(pattern, paths)``.
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
  hint: Callable[[str, Sequence[str]], str] | None = None,
  required: bool = False,
) -> list[list[int]]:
  """Returns for each path the indices of all patterns that match the path.

  Warns if a pattern matches neither a path nor a leaf that ``optax.masked`` hides in `tree`. If
  `required`, raises ValueError instead. The message names `argument`, which holds the patterns. The
  message ends with ``hint(pattern, paths)``, or with advice if the pattern matches a part of a
  segment. If there is no hint, the message lists the leaves.
  """
  compiled = [compile_pattern(argument, pattern) for pattern in patterns]
  matches = [[i for i, p in enumerate(compiled) if p.search(path)] for path in paths]
  matching = {i for match in matches for i in match}
  unmatched = [i for i in range(len(patterns)) if i not in matching]
  hidden = _masks.masked_paths(tree) if unmatched else []
  idle = [patterns[i] for i in unmatched if not any(map(compiled[i].search, hidden))]
  if idle and paths:
    hints = "".join(
      _whole_segments_hint(argument, pattern, paths) or (hint(pattern, paths) if hint else "")
      for pattern in idle
    )
    message = f"`{argument}` has patterns that match no leaf: {idle}."
    message += hints or _warnings.list_leaves(paths)
    if required:
      raise ValueError(message)
    _warnings.warn(message, _warnings.NoEffectWarning)
  return matches


def _whole_segments_hint(argument: str, pattern: str, paths: Sequence[str]) -> str:
  """Returns a hint if a pattern matches within a segment of a path, else an empty string."""
  path = next(filter(_compile_within_segments(argument, pattern).search, paths), None)
  if path is None:
    return ""
  return (
    f" Patterns match whole segments of a path, and {pattern!r} a part of one in '{path}': add"
    " '.*' for the rest of the segment."
  )

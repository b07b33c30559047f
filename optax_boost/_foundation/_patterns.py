"""Regular expressions that match whole segments of the paths of leaves."""

from collections.abc import Callable, Sequence
import re
from typing import Any

from optax_boost._foundation import _checks, _masks, _paths, _types, _warnings

# Where a match may begin and end: at either side of a `/`, and at the ends of a path. Names of
# PyTorch and MindSpore in a flat dict, as `fc1.bias`, have dots instead.
_SEGMENT_BOUNDARY = r"(?:\A|\Z|(?<=[/.])|(?=[/.]))"


# Python allows flags for a whole expression, as `(?i)`, only at its start.
_LEADING_FLAGS = re.compile(r"(?:\(\?[aiLmsux]+\))*")


def compile_pattern(argument: str, pattern: Any) -> re.Pattern[str]:
  """Compiles a user's regular expression so that ``search`` finds whole segments of a path.

  A match begins and ends at a segment boundary, so `blocks/1` is found in ``blocks/1/kernel`` and
  not in ``blocks/10/kernel``. TypeError for no string, ValueError for a bad expression.
  """
  compiled = compile_within_segments(argument, pattern)
  flags = _LEADING_FLAGS.match(pattern)[0]  # type: ignore[index]  # it matches anything
  # In a verbose expression, a comment may be last.
  end = "\n)" if compiled.flags & re.VERBOSE else ")"
  whole = f"{flags}{_SEGMENT_BOUNDARY}(?:{pattern[len(flags) :]}{end}{_SEGMENT_BOUNDARY}"
  return re.compile(whole)


def compile_within_segments(argument: str, pattern: _types.Unchecked) -> re.Pattern[str]:
  """Like :func:`compile_pattern`, but matches may begin and end within a segment."""
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
  """Checks a sequence of regular expressions, at least one; `words` say what else is allowed."""
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
          f"`{argument}` must put each leaf into one group; got the leaf"
          f" '{_paths.leaf_name(path)}', which {patterns[matches[0]]!r} of group {groups[-1]}"
          f" and {patterns[other]!r} of group {group_of_pattern[other][1]} match. Write"
          f" patterns of which only one matches it.{advice}"
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
  raises ValueError. The rule of segments: :func:`optax_boost._foundation.compile_pattern`.
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
    message = f"`{argument}` has patterns that match no leaf: {idle}.{hints}"
    if required:
      raise ValueError(_warnings._with_leaves(message, paths))
    _warnings.warn_no_effect(message, paths)
  return matches


def _whole_segments_hint(argument: str, pattern: str, paths: Sequence[str]) -> str:
  """What to write instead of a pattern that matches parts of segments alone."""
  search = compile_within_segments(argument, pattern).search
  path = next(filter(search, paths), None)
  if path is None:
    return ""
  hint = f" Patterns match whole segments of a path, and {pattern!r} a part of one in '{path}'"
  inner = f"({pattern})" if "|" in pattern else pattern
  for longer in (f"{inner}.*", f".*{inner}", f".*{inner}.*"):
    try:
      if compile_pattern(argument, longer).search(path):
        return f"{hint}: write {longer!r}."
    except ValueError:
      continue  # flags, as `(?i)`, may stand at the start alone
  return f"{hint}."

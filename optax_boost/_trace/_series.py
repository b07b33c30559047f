"""Series of blocks: modules that differ by a number, or steps of a scan, one after the other.

A series is found in a model, by the order of use, the data that each leaf meets and the places of
numbers in the paths; or it is selected by a pattern. A name means nothing.
"""

import collections
from collections.abc import Sequence
import fnmatch
import glob
import itertools
import re
from typing import NamedTuple

from optax_boost._trace import _leaf_uses, _model

_NUMBERED = re.compile(r"(.*?)\d+", re.DOTALL)
# At the end of a pattern: the steps of the scan that slices these leaves.
_STEPS = "[*]"


class Series(NamedTuple):
  """Blocks one after the other, and the pattern that selects them."""

  parts: list[_model.Part]
  pattern: str

  @property
  def length(self) -> int:
    """The number of blocks."""
    return sum(part.length for part in self.parts)

  @property
  def leaves(self) -> frozenset[int]:
    """The leaves of all its blocks."""
    return frozenset[int]().union(*(part.leaves for part in self.parts))


def find_series(model: _model.Model, num_kernels: int = 2) -> tuple[list[Series], list[Series]]:
  """All series, the outer before the inner, and the outermost of them, by first use.

  At least two blocks of a series have that many kernels.
  """
  numbered = _numbered_series(model, num_kernels)
  scans = [
    _series_of_scan(model, scan)
    for scan in model.layer_scans
    if len(scan.axis_of.keys() & set(model.kernels)) >= num_kernels
  ]
  outermost: list[Series] = []
  for series in [*scans, *numbered]:
    others = [other for other in [*numbered, *scans] if other is not series]
    if not any(_is_inside(series, other) for other in others):
      outermost.append(series)
  outermost.sort(key=lambda series: model.begin(series.parts[0]))
  inner: dict[str, Series] = {}
  for series in [*scans, *numbered]:
    if not any(series is other for other in outermost):
      # Series in the blocks of a series are one, as the rows of a stage are.
      pattern = _general(series.pattern)
      joined = inner.setdefault(pattern, Series([], pattern))
      joined.parts.extend(series.parts)
  return [*outermost, *inner.values()], outermost


def _general(pattern: str) -> str:
  """A pattern with `*` for each number, so that it selects its like in other blocks."""
  parent, slash, last = pattern.rpartition("/")
  return re.sub(r"\d+(?=/|$)", "*", parent) + slash + last


def _is_inside(series: Series, other: Series) -> bool:
  """Whether a series is within one block of another one, or within the steps of a scan."""
  if other.parts[0].scan is not None:
    touched = [part for part in series.parts if part.leaves & other.parts[0].leaves]
    return series.parts[0].scan is None and len(touched) > 1
  return any(series.leaves <= part.leaves for part in other.parts)


def _series_of_scan(model: _model.Model, scan: _leaf_uses.LayerScan) -> Series:
  leaves = model.in_order(scan.axis_of)
  paths = [model.leaves[i].path for i in leaves]
  names = paths[0].split("/")
  pattern = paths[0]
  for end in range(len(names) - 1, 0, -1):
    module = "/".join(names[:end])
    if all(path.startswith(f"{module}/") for path in paths):
      pattern = module
      break
  return Series([_model.Part(frozenset(leaves), scan)], glob.escape(pattern) + _STEPS)


def _numbered_series(model: _model.Model, num_kernels: int) -> list[Series]:
  """The modules whose names differ by a number, if they are one after the other.

  Two of them at least hold that many kernels; each follows the one before, and is used before the
  next is.
  """
  kernels = set(model.kernels)
  members: dict[str, set[int]] = {}
  for i in model.order:
    names = model.leaves[i].path.split("/")
    for end in range(1, len(names)):
      members.setdefault("/".join(names[:end]), set()).add(i)
  siblings: dict[str, list[str]] = {}
  for module in members:
    if match := _NUMBERED.fullmatch(module):
      siblings.setdefault(match[1], []).append(module)
  # A leaf that is used again, as a table of relative positions, would place only its first block.
  again = {leaf for leaf, number in collections.Counter(model.uses).items() if number > 1}
  series = []
  for stem, modules in siblings.items():
    parts = [_model.Part(frozenset(members[module])) for module in modules]
    places = [
      sorted(model.order[i] for i in (part.leaves & kernels) - again or part.leaves)
      for part in parts
    ]
    rows = sorted(zip(places, parts, modules, strict=True), key=lambda row: row[0])
    parts = [part for _, part, _ in rows]
    are_apart = all(a[-1] < b[0] for (a, *_), (b, *_) in itertools.pairwise(rows))
    are_chained = all(model.follows(b.leaves, a.leaves) for a, b in itertools.pairwise(parts))
    large = [part for part in parts if len(part.leaves & kernels) >= num_kernels]
    if are_apart and are_chained and len(large) > 1:
      pattern = _pattern_of(model, stem, [module for *_, module in rows])
      series.append(Series(parts, pattern))
  return sorted(series, key=lambda found: found.pattern.count("/"))


def _pattern_of(model: _model.Model, stem: str, modules: list[str]) -> str:
  """The shortest pattern that selects these modules and no others."""
  for numbers in ("*", "[0-9]*"):
    pattern = glob.escape(stem) + numbers
    if set(_matches(model, pattern)) == set(modules):
      return pattern
  return "|".join(map(glob.escape, modules))


def _matches(model: _model.Model, pattern: str) -> dict[str, list[int]]:
  """The modules or leaves that a pattern selects, by first use, and the leaves in each."""
  wanted = pattern.replace(".", "/").split("/")
  found: dict[str, list[int]] = {}
  for i in model.order:
    names = model.leaves[i].path.split("/")
    if end := _matched_length(names, wanted):
      found.setdefault("/".join(names[:end]), []).append(i)
  return found


def _matched_length(names: Sequence[str], wanted: Sequence[str]) -> int | None:
  """How many of a path's first names a pattern's names match; `**` is any number of names."""
  if not wanted:
    return 0
  if wanted[0] == "**":
    for skipped in range(len(names) + 1):
      rest = _matched_length(names[skipped:], wanted[1:])
      if rest is not None:
        return skipped + rest
    return None
  if not names or not fnmatch.fnmatchcase(names[0], wanted[0]):
    return None
  rest = _matched_length(names[1:], wanted[1:])
  return None if rest is None else 1 + rest


def select(model: _model.Model, patterns: str) -> Series:
  """The series of the blocks that any of the patterns between bars selects."""
  scan_of = {leaf: scan for scan in model.layer_scans for leaf in scan.axis_of}
  modules: dict[str, list[int]] = {}
  sliced: set[_leaf_uses.LayerScan] = set()
  for pattern in patterns.split("|"):
    selected = _matches(model, pattern.removesuffix(_STEPS))
    leaves = [leaf for members in selected.values() for leaf in members]
    scans = {scan_of[leaf] for leaf in leaves if leaf in scan_of}
    # What is in one scan alone can't be one after the other but by its steps.
    are_steps = len(scans) == 1 and all(leaf in scan_of for leaf in leaves)
    if not leaves or (pattern.endswith(_STEPS) and not scans):
      raise ValueError(_no_match(model, pattern, bool(leaves)))
    if pattern.endswith(_STEPS) or are_steps:
      sliced |= scans
    else:
      modules |= selected
  parts = [_model.Part(frozenset(leaves)) for leaves in modules.values()]
  parts += [_model.Part(frozenset(scan.axis_of), scan) for scan in sliced]
  parts.sort(key=lambda part: model.begin(part))
  seen: set[int] = set()
  for part in parts:
    if not seen.isdisjoint(part.leaves):
      path = model.leaves[min(seen & part.leaves)].path
      raise ValueError(f"`blocks` must select each leaf once; {patterns!r} selects '{path}' twice.")
    seen |= part.leaves
  return Series(parts, patterns)


def _no_match(model: _model.Model, pattern: str, has_leaves: bool) -> str:
  found = [series.pattern for series in find_series(model)[0]]
  hint = f"The series are: {', '.join(map(quoted, found))}." if found else ""
  if has_leaves:
    return f"`blocks` has {pattern!r}, but no scan over layers slices these leaves. {hint}".rstrip()
  modules = ", ".join(f"'{module}'" for module in list(model.top_modules())[:8])
  return (
    f"`blocks` has {pattern!r}, which selects nothing that the loss uses. {hint or ''} A pattern"
    f" begins at the root, as one of {modules}; `*` is any part of one name, `**` any names."
  ).replace("  ", " ")


def quoted(pattern: str) -> str:
  return f'"{pattern}"'

"""Series of blocks: modules in a row whose names differ by a number, or the steps of a scan."""

import collections
from collections.abc import Sequence
import fnmatch
import glob
import itertools
import re
from typing import NamedTuple

from optax_boost._trace import _leaf_uses, _traced_leaves

_NUMBERED = re.compile(r"(.*?)\d+", re.DOTALL)
# A pattern with this end selects the steps of the scan that slices the leaves.
_STEPS = "[*]"


class Series(NamedTuple):
  """Blocks in a row, and the pattern that selects them."""

  parts: list[_traced_leaves.Part]
  pattern: str

  @property
  def length(self) -> int:
    return sum(part.length for part in self.parts)

  @property
  def leaves(self) -> frozenset[int]:
    return frozenset[int]().union(*(part.leaves for part in self.parts))


def find_series(
  model: _traced_leaves.Model, num_kernels: int = 2
) -> tuple[list[Series], list[Series]]:
  """Returns two lists: all series, and the outermost series in the order of first uses.

  The list of all series begins with the outermost. In a series of modules, two or more modules have
  at least `num_kernels` kernels. In a scan, each step has at least `num_kernels` kernels.
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
      # Series inside of several outer blocks, such as the layers of each stage, become one series.
      pattern = _generalize(series.pattern)
      joined = inner.setdefault(pattern, Series([], pattern))
      joined.parts.extend(series.parts)
  return [*outermost, *inner.values()], outermost


def _generalize(pattern: str) -> str:
  """Returns the pattern with `*` in place of the numbers of outer modules."""
  parent, slash, last = pattern.rpartition("/")
  return re.sub(r"\d+(?=/|$)", "*", parent) + slash + last


def _is_inside(series: Series, other: Series) -> bool:
  """Returns whether a series lies in one block of another series, or in each step of a scan."""
  if other.parts[0].scan is not None:
    touched = [part for part in series.parts if part.leaves & other.parts[0].leaves]
    return series.parts[0].scan is None and len(touched) > 1
  return any(series.leaves <= part.leaves for part in other.parts)


def _series_of_scan(model: _traced_leaves.Model, scan: _leaf_uses.LayerScan) -> Series:
  leaves = model.in_order(scan.axis_of)
  paths = [model.leaves[i].path for i in leaves]
  names = paths[0].split("/")
  pattern = paths[0]
  for end in range(len(names) - 1, 0, -1):
    module = "/".join(names[:end])
    if all(path.startswith(f"{module}/") for path in paths):
      pattern = module
      break
  return Series([_traced_leaves.Part(frozenset(leaves), scan)], glob.escape(pattern) + _STEPS)


def _numbered_series(model: _traced_leaves.Model, num_kernels: int) -> list[Series]:
  """Returns the series of modules whose names differ by a number, the outermost first.

  Each module of a series gets data from the module before it, and the loss uses all kernels of a
  module before any kernel of the next. Two or more modules have `num_kernels` kernels or more.
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
  # The first use of a leaf that all blocks share, such as a table of relative positions, does not
  # tell when the leaf's module is used.
  again = {leaf for leaf, number in collections.Counter(model.uses).items() if number > 1}
  series = []
  for stem, modules in siblings.items():
    parts = [_traced_leaves.Part(frozenset(members[module])) for module in modules]
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
  return sorted(series, key=lambda each: each.pattern.count("/"))


def _pattern_of(model: _traced_leaves.Model, stem: str, modules: list[str]) -> str:
  """Returns the shortest pattern that selects these modules and no other modules.

  `stem` is the path of each module without the number at the end.
  """
  for numbers in ("*", "[0-9]*"):
    pattern = glob.escape(stem) + numbers
    if set(_matches(model, pattern)) == set(modules):
      return pattern
  return "|".join(map(glob.escape, modules))


def _matches(model: _traced_leaves.Model, pattern: str) -> dict[str, list[int]]:
  """Returns the leaves of each module or leaf that a pattern selects, by first use."""
  pattern_names = pattern.replace(".", "/").split("/")
  leaves_of: dict[str, list[int]] = {}
  for i in model.order:
    names = model.leaves[i].path.split("/")
    if end := _matched_length(names, pattern_names):
      leaves_of.setdefault("/".join(names[:end]), []).append(i)
  return leaves_of


def _matched_length(names: Sequence[str], pattern_names: Sequence[str]) -> int | None:
  """Matches a pattern with the start of a path; returns the number of names matched, or None.

  `names` are the segments of the path, and `pattern_names` the segments of the pattern. The
  path may be longer than the pattern. A `**` matches as few names as possible. Returns None for no
  match.
  """
  if not pattern_names:
    return 0
  if pattern_names[0] == "**":
    for skipped in range(len(names) + 1):
      remaining = _matched_length(names[skipped:], pattern_names[1:])
      if remaining is not None:
        return skipped + remaining
    return None
  if not names or not fnmatch.fnmatchcase(names[0], pattern_names[0]):
    return None
  remaining = _matched_length(names[1:], pattern_names[1:])
  return None if remaining is None else 1 + remaining


def select(model: _traced_leaves.Model, patterns: str) -> Series:
  """Returns the series that patterns select.

  `patterns` is one string, in which bars separate the patterns. Raises ValueError if one of these
  patterns selects nothing, or if a leaf is selected twice.
  """
  scan_of = {leaf: scan for scan in model.layer_scans for leaf in scan.axis_of}
  modules: dict[str, list[int]] = {}
  sliced: set[_leaf_uses.LayerScan] = set()
  for pattern in patterns.split("|"):
    selected = _matches(model, pattern.removesuffix(_STEPS))
    leaves = [leaf for members in selected.values() for leaf in members]
    scans = {scan_of[leaf] for leaf in leaves if leaf in scan_of}
    # If a single scan slices all selected leaves, the steps of the scan are the blocks.
    are_steps = len(scans) == 1 and all(leaf in scan_of for leaf in leaves)
    if not leaves or (pattern.endswith(_STEPS) and not scans):
      raise ValueError(_no_match(model, pattern, bool(leaves)))
    if pattern.endswith(_STEPS) or are_steps:
      sliced |= scans
    else:
      modules |= selected
  parts = [_traced_leaves.Part(frozenset(leaves)) for leaves in modules.values()]
  parts += [_traced_leaves.Part(frozenset(scan.axis_of), scan) for scan in sliced]
  parts.sort(key=lambda part: model.begin(part))
  seen: set[int] = set()
  for part in parts:
    if not seen.isdisjoint(part.leaves):
      path = model.leaves[min(seen & part.leaves)].path
      raise ValueError(f"`blocks` must select each leaf once; {patterns!r} selects '{path}' twice.")
    seen |= part.leaves
  return Series(parts, patterns)


def _no_match(model: _traced_leaves.Model, pattern: str, has_leaves: bool) -> str:
  """Returns the message for a pattern that selects no leaves, or no steps of a scan.

  `has_leaves` tells whether the pattern selects leaves.
  """
  if has_leaves:
    return (
      f"`blocks` has {pattern!r}, but no scan over layers slices these leaves. Omit {_STEPS!r}."
    )
  modules = ", ".join(f"'{module}'" for module in list(model.top_modules())[:8])
  return (
    f"`blocks` has {pattern!r}, which selects nothing that the loss uses. A pattern begins at the"
    f" root, as one of {modules}; `*` is any part of one name, `**` any names."
  )


def quoted(pattern: str) -> str:
  return f'"{pattern}"'

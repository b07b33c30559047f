"""Series of blocks: modules in a row whose names differ by a number, or layers of a scan."""

from collections.abc import Iterable, Sequence
import fnmatch
import glob
import itertools
import re
from typing import NamedTuple

from optax_boost._trace import _layer_scans, _traced_leaves

# A number in a name, with a letter in models such as Inception (`Mixed_5b`) and EfficientNet.
_DIGITS = re.compile(r"(\d+(?:[a-z](?![a-zA-Z]))?)")
_NUMBER = "\0"  # stands for a number in a stem
# Joins the patterns of modules that are one block.
_JOIN = "&"
# A pattern with this end selects the steps of the scan that slices the leaves.
_STEPS = "[*]"


class Series(NamedTuple):
  """Blocks in a row, and the pattern that selects them.

  `around` is the path of the module that holds numbered modules, with a slash; "" at the root.
  """

  parts: list[_traced_leaves.Part]
  pattern: str
  around: str = ""

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
  numbered = [
    series for series in _numbered_series(model, num_kernels) if not _are_stacks(model, series)
  ]
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


def _are_stacks(model: _traced_leaves.Model, series: Series) -> bool:
  """Returns whether each module of a series is the layers of one scan, as in AlphaFold."""
  kernels = set(model.kernels)
  return all(
    any(part.leaves & kernels <= scan.axis_of.keys() for scan in model.layer_scans)
    for part in series.parts
  )


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


def _series_of_scan(model: _traced_leaves.Model, scan: _layer_scans.LayerScan) -> Series:
  """Returns the series of a scan's steps; its pattern is as short as possible."""
  leaves = model.in_order(scan.axis_of)
  names = [model.leaves[i].path.split("/") for i in leaves]
  shared = [end for end in range(1, len(names[0])) if all(n[:end] == names[0][:end] for n in names)]
  pattern = glob.escape("/".join(names[0]))
  if shared:
    module = glob.escape("/".join(names[0][: shared[-1]]))
    selected = set[int]().union(*_matches(model, module).values())
    others = (other for other in model.layer_scans if other is not scan)
    if all(selected.isdisjoint(other.axis_of) for other in others):
      pattern = module
  return Series([_traced_leaves.Part(frozenset(leaves), scan)], pattern + _STEPS)


def _numbered_series(model: _traced_leaves.Model, num_kernels: int) -> list[Series]:
  """Returns the series of modules whose names differ by a number, the outermost first."""
  members: dict[str, set[int]] = {}
  for i in model.order:
    names = model.leaves[i].path.split("/")
    for end in range(1, len(names)):
      members.setdefault("/".join(names[:end]), set()).add(i)
  found = []
  for stem, modules in _siblings(members).items():
    series = _chain(model, stem, {m: members[m] for m in modules}, num_kernels)
    # If all numbers together don't count, as in `tower_0_block_1`, each number may count by itself.
    for position in range(stem.count(_NUMBER) if series is None else 0):
      apart: dict[str, list[str]] = {}
      for module in modules:
        apart.setdefault(_stem(module, position), []).append(module)
      chains = [
        _chain(model, each, {m: members[m] for m in some}, num_kernels)
        for each, some in apart.items()
      ]
      found += [chain for chain in chains if chain is not None]
    found += [series] if series is not None else []
  return sorted(found, key=lambda each: each.pattern.count("/"))


def _stem(module: str, position: int | None = None) -> str:
  """Returns a module's path with a mark in place of all numbers in the last name, or of one."""
  parent, slash, name = module.rpartition("/")
  parts = _DIGITS.split(name)
  for number, index in enumerate(range(1, len(parts), 2)):
    if position in (None, number):
      parts[index] = _NUMBER
  return parent + slash + "".join(parts)


def _siblings(modules: Iterable[str]) -> dict[str, list[str]]:
  """Returns the modules that have the same stem, by stem.

  Haiku, Keras and TensorFlow begin to number with the second module, as in ``block, block_1``.
  """
  siblings: dict[str, list[str]] = {}
  for module in modules:
    siblings.setdefault(_stem(module), []).append(module)
  for stem in list(siblings):
    first = stem.removesuffix(f"_{_NUMBER}")
    if first != stem:
      unnumbered = [
        module
        for module in siblings.get(first, [])
        if f"{module}_1" in siblings[stem] and f"{module}_0" not in siblings[stem]
      ]
      siblings[stem] = unnumbered + siblings[stem]
      if unnumbered:
        siblings[first] = [m for m in siblings[first] if m not in unnumbered]
  return siblings


def _chain(
  model: _traced_leaves.Model, stem: str, members: dict[str, set[int]], num_kernels: int
) -> Series | None:
  """Returns the series of modules with the leaves `members`, or None if they are not a series.

  In a series, each module gets data from the module before it, the loss uses all kernels of a
  module before any kernel of the next, and two or more modules have at least `num_kernels` kernels.
  """
  kernels = set(model.kernels)
  large = [leaves for leaves in members.values() if len(leaves & kernels) >= num_kernels]
  if len(large) < 2:
    return None
  # The first use of a leaf that all blocks share, such as a table of relative positions, does not
  # tell when the leaf's module is used.
  rows = sorted(
    (sorted(model.order[i] for i in (leaves & kernels) - model.again or leaves), module)
    for module, leaves in members.items()
  )
  modules = [module for _, module in rows]
  parts = [_traced_leaves.Part(frozenset(members[module])) for module in modules]
  are_apart = all(a[-1] < b[0] for (a, _), (b, _) in itertools.pairwise(rows))
  if are_apart and all(model.follows(b.leaves, a.leaves) for a, b in itertools.pairwise(parts)):
    parent, slash, _ = stem.rpartition("/")
    return Series(parts, _pattern_of(model, stem, modules), parent + slash)
  return None


def join_modules(model: _traced_leaves.Model, series: Series) -> list[str]:
  """Returns the pattern of blocks of several modules each, of which `series` has the first ones.

  After each module of the series, the last too, the loss uses kernels of modules with the same
  stems, as in ``attention_0, dense_0, dense_1, attention_1, dense_2, dense_3``. The returned list
  is empty if this is not so.
  """
  if series.parts[0].scan is not None:
    return []
  depth = series.around.count("/") + 1

  def modules_of(leaves: Iterable[int]) -> list[str]:
    paths = (model.leaves[i].path for i in leaves)
    inside = (path.split("/") for path in paths if path.startswith(series.around))
    return list(dict.fromkeys("/".join(names[:depth]) for names in inside))

  modules, firsts = modules_of(model.kernels), modules_of(series.leaves)
  stems = {module: stem for stem, some in _siblings(modules).items() for module in some}
  begins = [number for number, module in enumerate(modules) if module in firsts]
  ends = [*begins[1:], len(modules)]
  blocks = [modules[begin:end] for begin, end in zip(begins, ends, strict=True)]
  size = len(blocks[0])
  stems_of_blocks = [[stems[module] for module in block] for block in blocks]
  is_periodic = all(block == stems_of_blocks[0] for block in stems_of_blocks[:-1])
  if size == 1 or not is_periodic or stems_of_blocks[-1][:size] != stems_of_blocks[0]:
    return []
  return ["|".join(_JOIN.join(map(glob.escape, block[:size])) for block in blocks)]


def _pattern_of(model: _traced_leaves.Model, stem: str, modules: list[str]) -> str:
  """Returns a short pattern that selects these modules and no other modules."""
  parent, slash, _ = stem.rpartition("/")
  names = [_DIGITS.split(m.rpartition("/")[2]) for m in modules if _stem(m) == stem]
  if names:
    columns = [set(column) for column in zip(*names, strict=True)]
    stem = parent + slash + "".join(c.pop() if len(c) == 1 else _NUMBER for c in columns)
  for numbers in ("*", "[0-9]*"):
    pattern = glob.escape(stem).replace(_NUMBER, numbers)
    selected = set(_matches(model, pattern))
    if selected and selected <= set(modules):
      return "|".join([*(glob.escape(m) for m in modules if m not in selected), pattern])
  paths = (module.rpartition("/") for module in map(glob.escape, modules))
  by_length = (parent + slash + re.sub(r"\d", "[0-9]", name) for parent, slash, name in paths)
  pattern = "|".join(dict.fromkeys(by_length))
  if set().union(*(_matches(model, each) for each in pattern.split("|"))) == set(modules):
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
  sliced: set[_layer_scans.LayerScan] = set()
  for pattern in patterns.split("|"):
    if _JOIN in pattern:
      joined = [_matches(model, each) for each in pattern.split(_JOIN)]
      if not all(joined):
        raise ValueError(_no_match(model, pattern, has_leaves=False))
      modules[pattern] = [i for each in joined for members in each.values() for i in members]
      continue
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

"""Series: blocks in a row, which patterns of paths select."""

from collections.abc import Sequence
import itertools
import re
from typing import NamedTuple

from optax_boost._foundation import _patterns
from optax_boost._trace import _traced_leaves

JOIN = "&"  # joins the patterns of modules that are one block
STEPS = "[*]"  # a pattern with this end selects the steps of the scan that slices the leaves


class Series(NamedTuple):
  """Blocks in the order of use, and the pattern that selects them."""

  pattern: str
  parts: list[_traced_leaves.Part]

  @property
  def length(self) -> int:
    return sum(part.length for part in self.parts)

  @property
  def leaves(self) -> frozenset[int]:
    return frozenset[int]().union(*(part.leaves for part in self.parts))

  def __str__(self) -> str:
    kind = "stacked layers" if self.parts[0].scan is not None else "modules"
    return f"{quoted(self.pattern)} ({self.length} {kind})"


def quoted(pattern: str) -> str:
  return f'"{pattern}"'


def places(model: _traced_leaves.Model, part: _traced_leaves.Part) -> list[int]:
  """Returns the places of a part's kernels in the order of first uses, or else of all its leaves.

  The first use of a kernel that all blocks share, such as a table of relative positions, does not
  tell when its block is used.
  """
  kernels = part.leaves.intersection(model.kernels) - model.again or part.leaves
  return sorted(model.order[i] for i in kernels if i in model.order)


def select_all(model: _traced_leaves.Model, patterns: Sequence[str]) -> list[Series]:
  """Returns series side by side, one for each pattern; raises ValueError as :func:`select`."""
  selected = [select(model, pattern) for pattern in patterns]
  _check_once(model, [(series.pattern, series.leaves) for series in selected])
  return selected


def select(model: _traced_leaves.Model, patterns: str) -> Series:
  """Returns the series that patterns select.

  `patterns` is one string, in which bars separate the patterns. Raises ValueError if one of these
  patterns selects nothing, or if a leaf is selected twice.
  """
  scan_of = {leaf: scan for scan in model.layer_scans for leaf in scan.axis_of}
  pattern_of: dict[_traced_leaves.Part, str] = {}
  for pattern in patterns.split("|"):
    are_steps = pattern.endswith(STEPS)
    selected = [_matches(model, each) for each in pattern.removesuffix(STEPS).split(JOIN)]
    blocks = [leaves for modules in selected for leaves in modules.values()]
    leaves = list(itertools.chain(*blocks))
    scans = {scan_of[leaf] for leaf in leaves if leaf in scan_of}
    if not all(selected) or (are_steps and not scans):
      raise ValueError(_no_match(model, pattern, all(selected)))
    # If a single scan slices all selected leaves, the steps of the scan are the blocks.
    if are_steps or (len(scans) == 1 and all(leaf in scan_of for leaf in leaves)):
      parts = [_traced_leaves.Part(frozenset(scan.axis_of), scan) for scan in scans]
    else:
      parts = [
        _traced_leaves.Part(frozenset(each)) for each in ([leaves] if JOIN in pattern else blocks)
      ]
    pattern_of |= dict.fromkeys(parts, pattern)
  _check_once(model, [(pattern, part.leaves) for part, pattern in pattern_of.items()])
  return Series(patterns, sorted(pattern_of, key=lambda part: places(model, part)))


def _check_once(model: _traced_leaves.Model, selected: list[tuple[str, frozenset[int]]]) -> None:
  """Raises ValueError if two patterns, each given with its leaves, select one leaf."""
  pattern_of: dict[int, str] = {}
  for pattern, leaves in selected:
    for leaf in leaves:
      if leaf in pattern_of:
        raise ValueError(
          f"`blocks` must select each leaf once; got '{pattern_of[leaf]}' and '{pattern}' for"
          f" '{model.leaves[leaf].path}'."
        )
      pattern_of[leaf] = pattern


def _no_match(model: _traced_leaves.Model, pattern: str, has_leaves: bool) -> str:
  """Returns the message for a pattern that selects no leaves, or no steps of a scan.

  `has_leaves` tells whether the pattern selects leaves.
  """
  if has_leaves:
    return f"`blocks` has {pattern!r}, but no scan over layers slices these leaves. Omit {STEPS!r}."
  modules = ", ".join(f"'{module}'" for module in list(model.top_modules())[:8])
  return (
    f"`blocks` has {pattern!r}, which selects nothing that the loss uses. A pattern with a slash"
    f" begins at the root, as one of {modules}; `*` is any part of one name, `**` any names."
  )


def _matches(model: _traced_leaves.Model, pattern: str) -> dict[str, list[int]]:
  """Returns the leaves of each module or leaf that a pattern selects, by first use."""
  match = _patterns.compile_pattern("blocks", pattern)
  leaves_of: dict[str, list[int]] = {}
  for i in model.order:
    module = match(model.leaves[i].path)
    if module is not None:
      leaves_of.setdefault(module, []).append(i)
  return leaves_of


def from_root(model: _traced_leaves.Model, patterns: str) -> str:
  """Returns patterns with a slash before each single name that also matches below the root."""
  paths = [model.leaves[i].path for i in model.order]

  def anchor(pattern: re.Match[str]) -> str:
    name = pattern[0].removesuffix(STEPS)
    return _patterns.anchor(name, paths) + pattern[0].removeprefix(name)

  return re.sub(rf"[^|{JOIN}]+", anchor, patterns)

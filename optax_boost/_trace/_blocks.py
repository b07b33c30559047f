"""The blocks of a model along the data, of which groups of layers are made.

A *block* is the smallest run of leaves, or of layers of leaves, that a group takes whole: a module
that the model repeats, a step of a scan over layers, or the leaves before or after these. A leaf
has one block, or one for each of its layers if a scan slices it.

Blocks one after the other are a *series*. It is read from the order of use, from the data that each
leaf meets (``_flow``) and from the places of numbers in the paths; a name means nothing. Where that
leaves a choice, :class:`Unclear` names the patterns among which to choose.
"""

import collections
from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import fnmatch
import functools
import glob
import itertools
import re
from typing import NamedTuple

from optax_boost._foundation import _checks
from optax_boost._trace import _flow, _layer_axes, _leaf_uses

_NUMBERED = re.compile(r"(.*?)\d+", re.DOTALL)
# At the end of a pattern: the steps of the scan that slices these leaves.
_STEPS = "[*]"


class Unclear(Exception):
  """The trace leaves a choice between blocks; the text says which, and what to pass."""


class Part(NamedTuple):
  """Leaves of one block, or the leaves that a scan slices, which are a block for each step."""

  leaves: frozenset[int]
  scan: _leaf_uses.LayerScan | None = None

  @property
  def length(self) -> int:
    """The number of blocks."""
    return 1 if self.scan is None else self.scan.length


class Series(NamedTuple):
  """Blocks one after the other, and the pattern that selects them."""

  parts: list[Part]
  pattern: str

  @property
  def length(self) -> int:
    """The number of blocks."""
    return sum(part.length for part in self.parts)

  @property
  def leaves(self) -> frozenset[int]:
    """The leaves of all its blocks."""
    return frozenset[int]().union(*(part.leaves for part in self.parts))


class Blocks(NamedTuple):
  """The blocks of a model.

  Attributes:
    by_leaf: by the number of a leaf the number of its block; of a leaf that a scan slices, the
      number of each layer's block.
    num_blocks: how many blocks there are.
    origin: what was taken for blocks, and how to say otherwise.
  """

  by_leaf: dict[int, list[int]]
  num_blocks: int
  origin: str


@dataclasses.dataclass(frozen=True)
class Model:
  """The leaves of a traced loss, which are known by number, and their uses.

  Attributes:
    leaves: all leaves; a path has `/` between modules.
    uses: the leaves in the order of their uses; a leaf that is used again is repeated.
    scans: the scans over layers, in the order of the program.
    flow: the leaves upstream of each.
  """

  leaves: list[_layer_axes.Leaf]
  uses: list[int]
  scans: Sequence[_leaf_uses.LayerScan]
  flow: _flow.Flow

  @functools.cached_property
  def order(self) -> dict[int, int]:
    """The leaves by first use, and the place of each."""
    return {leaf: place for place, leaf in enumerate(dict.fromkeys(self.uses))}

  @functools.cached_property
  def kernels(self) -> list[int]:
    """The leaves that mix the entries of data, by first use; or matrices of unknown axes."""
    return [i for i in self.order if _is_kernel(self.leaves[i])]

  def in_order(self, leaves: Iterable[int]) -> list[int]:
    """The leaves among these that the loss uses, by first use."""
    return sorted(self.order.keys() & set(leaves), key=self.order.__getitem__)

  def follows(self, later: Iterable[int], earlier: Iterable[int]) -> bool:
    """Whether data that some of the first leaves meet were computed with some of the others."""
    return any(not self.flow.upstream[leaf].isdisjoint(earlier) for leaf in later)

  @functools.cached_property
  def layer_scans(self) -> list[_leaf_uses.LayerScan]:
    """The scans each of whose steps follows the step before, unlike a sum over experts."""
    ever = self.flow.ever_upstream
    return [
      scan
      for scan in self.scans
      if any(not ever[leaf].isdisjoint(scan.axis_of) for leaf in scan.axis_of)
    ]


def _is_kernel(leaf: _layer_axes.Leaf) -> bool:
  return len(leaf.shape) > 1 if leaf.axes is None else bool(leaf.axes.fan_in)


# ---- Which blocks


def blocks_by_default(model: Model, num_groups: int | None = None) -> Blocks:
  """The blocks of the outermost series, or of a plain chain of layers; raises :class:`Unclear`.

  If the number of groups is given, layers side by side are no question: none is cut between them.
  """
  every, outermost = _find_series(model)
  if not outermost:
    layers = _find_layers(model)
    if not _are_chained(model, layers):
      layers = _join_modules(model, layers)
    if _are_chained(model, layers):
      origin = 'blocks: each layer of a chain; for others pass blocks="..."'
      return _blocks_of_layers(model, layers, origin)
    origin = 'blocks: layers, those side by side together; for others pass blocks="..."'
    joined = _blocks_of_layers(model, _join_parallel(model, _find_layers(model)), origin)
    if num_groups is not None and joined.num_blocks >= num_groups:
      return joined
    every, outermost = _find_series(model, num_kernels=1)
  if len(outermost) != 1:
    raise Unclear(_ask_which_series(model, outermost) if outermost else _ask_for_blocks(model))
  (series,) = outermost
  origin = f"blocks: {_describe(series)}"
  inner = [other for other in every if other is not series and _is_finer(model, other, series)]
  if inner:
    origin += f"; for {inner[0].length} finer ones pass blocks={_quoted(inner[0].pattern)}"
  return _place(model, [series], f'{origin}; for others pass blocks="..."')


def blocks_of_layers(model: Model) -> Blocks:
  """The smallest blocks: a kernel with its biases and normalizations, or a layer of a scan."""
  origin = 'blocks: each layer, for want of larger ones; for others pass blocks="..."'
  return _blocks_of_layers(model, _find_layers(model), origin)


def blocks_of_patterns(model: Model, patterns: Sequence[str]) -> Blocks:
  """The blocks of a series for each pattern, side by side."""
  towers = [_select(model, pattern) for pattern in patterns]
  seen: dict[int, str] = {}
  for tower in towers:
    for leaf in tower.leaves:
      if leaf in seen:
        raise ValueError(
          f"`blocks` must select each leaf once; got '{seen[leaf]}' and '{tower.pattern}' for"
          f" '{model.leaves[leaf].path}'."
        )
      seen[leaf] = tower.pattern
  what = " side by side with ".join(map(_describe, towers))
  return _place(model, towers, f"blocks: {what}")


def check_patterns(blocks: object) -> tuple[str, ...]:
  """The argument `blocks` as one pattern for each series."""
  patterns = (blocks,) if isinstance(blocks, str) else blocks
  if not (
    isinstance(patterns, list | tuple) and patterns and all(isinstance(p, str) for p in patterns)
  ):
    raise TypeError(
      "`blocks` must be a pattern of paths, as 'encoder/layers/*', or a sequence of patterns, one"
      f" for each series side by side; got {_checks.shorten(blocks)}."
    )
  return tuple(patterns)


def _is_finer(model: Model, inner: Series, outer: Series) -> bool:
  """Whether a series has most of the kernels of another one, in more blocks."""
  kernels = [len(series.leaves.intersection(model.kernels)) for series in (inner, outer)]
  return inner.length > outer.length and 2 * kernels[0] > kernels[1]


def _describe(series: Series) -> str:
  kind = "steps of a scan" if series.parts[0].scan is not None else "modules"
  return f"{_quoted(series.pattern)} ({series.length} {kind})"


def _quoted(pattern: str) -> str:
  return f'"{pattern}"'


def _ask_which_series(model: Model, found: list[Series]) -> str:
  """The question that several series leave open, with each answer as code."""
  patterns = [series.pattern for series in found]
  beside = ", ".join(map(_quoted, patterns))
  chain = "|".join(patterns)
  listed = ", ".join(f"{_quoted(series.pattern)} ({series.length})" for series in found)
  leaves = [series.leaves for series in found]
  are_chained = all(map(model.follows, leaves[1:], leaves))
  answers = [
    f"blocks=({beside}) if they are side by side, each counted from its last block",
    f"blocks={_quoted(chain)} if they are one after the other",
  ]
  return (
    f"`layer_groups` finds {len(found)} series of blocks and must be told which to take:"
    f" {listed}. Pass {'; '.join(answers[::-1] if are_chained else answers)}; or the pattern of one"
    f" series, as blocks={_quoted(patterns[0])}, whose blocks are then the only ones."
  )


def _ask_for_blocks(model: Model) -> str:
  """The question if there is no series, with answers as code."""
  top = _top_modules(model)
  large = [m for m, leaves in top.items() if len(set(leaves).intersection(model.kernels)) > 1]
  answers = []
  if len(large) > 1:
    are_chained = all(model.follows(top[b], top[a]) for a, b in itertools.pairwise(large))
    patterns = [glob.escape(module) for module in large]
    code = _quoted("|".join(patterns)) if are_chained else f"({', '.join(map(_quoted, patterns))})"
    words = "one after the other" if are_chained else "side by side"
    answers.append(f"blocks={code} for these modules, {words}")
  wide = [m for m, leaves in top.items() if any(len(model.leaves[i].shape) > 1 for i in leaves)]
  every = dict.fromkeys(re.sub(r"\d+$", "*", glob.escape(module)) for module in wide or top)
  answers.append(f"blocks={_quoted('|'.join(every))} for each of these, one after the other")
  return (
    "`layer_groups` must be told the blocks of this model: there is no numbered series of modules"
    " with several kernels, one after the other, no scan over layers, and the layers are no plain"
    f" chain. Pass {'; or '.join(answers)}. In a pattern `*` is any part of a name."
  )


def _top_modules(model: Model) -> dict[str, list[int]]:
  """The outermost modules of which there are several, by first use, and their leaves."""
  paths = {i: model.leaves[i].path.split("/") for i in model.order}
  depth = 1
  while True:
    modules: dict[str, list[int]] = {}
    for i, names in paths.items():
      modules.setdefault("/".join(names[:depth]), []).append(i)
    if len(modules) > 1 or depth >= max(map(len, paths.values())):
      return modules
    depth += 1


# ---- Series


def _find_series(model: Model, num_kernels: int = 2) -> tuple[list[Series], list[Series]]:
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
  outermost.sort(key=lambda series: _begin(model, series.parts[0]))
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


def _begin(model: Model, part: Part) -> int:
  return min(model.order[leaf] for leaf in part.leaves if leaf in model.order)


def _series_of_scan(model: Model, scan: _leaf_uses.LayerScan) -> Series:
  leaves = model.in_order(scan.axis_of)
  paths = [model.leaves[i].path for i in leaves]
  names = paths[0].split("/")
  pattern = paths[0]
  for end in range(len(names) - 1, 0, -1):
    module = "/".join(names[:end])
    if all(path.startswith(f"{module}/") for path in paths):
      pattern = module
      break
  return Series([Part(frozenset(leaves), scan)], glob.escape(pattern) + _STEPS)


def _numbered_series(model: Model, num_kernels: int) -> list[Series]:
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
    parts = [Part(frozenset(members[module])) for module in modules]
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


def _pattern_of(model: Model, stem: str, modules: list[str]) -> str:
  """The shortest pattern that selects these modules and no others."""
  for numbers in ("*", "[0-9]*"):
    pattern = glob.escape(stem) + numbers
    if set(_matches(model, pattern)) == set(modules):
      return pattern
  return "|".join(map(glob.escape, modules))


# ---- Patterns


def _matches(model: Model, pattern: str) -> dict[str, list[int]]:
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


def _select(model: Model, patterns: str) -> Series:
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
  parts = [Part(frozenset(leaves)) for leaves in modules.values()]
  parts += [Part(frozenset(scan.axis_of), scan) for scan in sliced]
  parts.sort(key=lambda part: _begin(model, part))
  seen: set[int] = set()
  for part in parts:
    if not seen.isdisjoint(part.leaves):
      path = model.leaves[min(seen & part.leaves)].path
      raise ValueError(f"`blocks` must select each leaf once; {patterns!r} selects '{path}' twice.")
    seen |= part.leaves
  return Series(parts, patterns)


def _no_match(model: Model, pattern: str, has_leaves: bool) -> str:
  found = [series.pattern for series in _find_series(model)[0]]
  hint = f"The series are: {', '.join(map(_quoted, found))}." if found else ""
  if has_leaves:
    return f"`blocks` has {pattern!r}, but no scan over layers slices these leaves. {hint}".rstrip()
  modules = ", ".join(f"'{module}'" for module in list(_top_modules(model))[:8])
  return (
    f"`blocks` has {pattern!r}, which selects nothing that the loss uses. {hint or ''} A pattern"
    f" begins at the root, as one of {modules}; `*` is any part of one name, `**` any names."
  ).replace("  ", " ")


# ---- From series to blocks


def _place(model: Model, towers: Sequence[Series], origin: str) -> Blocks:
  """Numbers the blocks of series side by side, the last of each alike, and places other leaves.

  A leaf beside the blocks is before all of its series' if none is upstream of it; else with the
  last that is upstream; or after all blocks, if it is upstream of none.
  """
  depth = max(tower.length for tower in towers)
  places: dict[int, list[int]] = {}
  # The parts with their first blocks, and whether nothing is before them.
  parts: list[tuple[int, Part, bool]] = []
  for tower in towers:
    place = depth - tower.length
    for number, part in enumerate(tower.parts):
      parts.append((place, part, number == 0))
      numbers = list(range(place, place + part.length))
      for leaf in part.leaves:
        places[leaf] = numbers[::-1] if part.scan is not None and part.scan.reverse else numbers
      place += part.length
  for leaf in model.order:
    if leaf not in places:
      places[leaf] = [_place_beside(model, parts, leaf, depth)]
  kept = {place: number for number, place in enumerate(sorted(set().union(*places.values())))}
  by_leaf = {leaf: [kept[place] for place in numbers] for leaf, numbers in places.items()}
  return Blocks(by_leaf, len(kept), origin)


def _place_beside(
  model: Model, parts: list[tuple[int, Part, bool]], leaf: int, after_all: int
) -> int:
  """The place of a leaf that is in no block; -1 before all, `after_all` after all."""
  upstream = model.flow.upstream[leaf]
  before = [(place, part) for place, part, _ in parts if not upstream.isdisjoint(part.leaves)]
  inside = [place for place, part in before if part.scan and leaf in _shared(model, part.scan)]
  if inside:
    return min(inside)
  downstream = [
    (place, part, is_first) for place, part, is_first in parts if model.follows(part.leaves, [leaf])
  ]
  if not downstream:
    return after_all
  if before:
    return max(place + part.length - 1 for place, part in before)
  place, part, is_first = min(downstream, key=lambda row: row[0])
  return place - (is_first and model.order[leaf] < _begin(model, part))


def _shared(model: Model, scan: _leaf_uses.LayerScan) -> set[int]:
  """The leaves that all steps of a scan use: they enter it, or are used first between others."""
  order = list(model.order)
  positions = [model.order[i] for i in scan.axis_of if i in model.order]
  between = order[min(positions) : max(positions)] if positions else []
  sliced = {i for other in model.scans for i in other.axis_of}
  return set(scan.shared).union(set(between) - sliced)


def reused(model: Model, blocks_of_leaf: Mapping[int, list[int]]) -> set[int]:
  """The leaves that all steps of a scan use, or that are used again after a later block's."""
  furthest = 0
  seen: set[int] = set()
  again = set[int]().union(*(_shared(model, scan) for scan in model.scans))
  for leaf in model.uses:
    block = min(blocks_of_leaf[leaf])
    if leaf in seen and block < furthest:
      again.add(leaf)
    seen.add(leaf)
    furthest = max(furthest, block)
  return again


# ---- Layers


def _find_layers(model: Model) -> list[Part]:
  """Kernels and scans, by first use; the leaves of a recurrence are one layer."""
  scanned = {leaf for scan in model.layer_scans for leaf in scan.axis_of}
  layers: list[set[int]] = []
  for kernel in [i for i in model.kernels if i not in scanned]:
    joined = [layer for layer in layers if any(_recur(model, kernel, i) for i in layer)]
    layers = [layer for layer in layers if layer not in joined]
    layers.append({kernel}.union(*joined))
  for leaf in model.order.keys() - set(model.kernels) - scanned:
    for layer in layers:
      if any(_recur(model, leaf, i) for i in layer):
        layer.add(leaf)
        break
  parts = [Part(frozenset(layer)) for layer in layers]
  parts += [Part(frozenset(scan.axis_of), scan) for scan in model.layer_scans]
  return sorted(parts, key=lambda part: _begin(model, part))


def _recur(model: Model, first: int, second: int) -> bool:
  """Whether leaves are in one recurrence: used again, after each other, or in one loop."""
  ever = model.flow.ever_upstream
  pair = {first, second}
  return pair <= ever[first] & ever[second] or any(pair <= loop for loop in model.flow.recurrent)


def _are_chained(model: Model, layers: list[Part]) -> bool:
  """Whether each layer follows the one before; a single one of several kernels is no chain."""
  if len(layers) == 1 and layers[0].scan is None:
    return len(layers[0].leaves.intersection(model.kernels)) == 1
  return all(model.follows(b.leaves, a.leaves) for a, b in itertools.pairwise(layers))


def _join_modules(model: Model, layers: list[Part]) -> list[Part]:
  """The layers, with those of an innermost module as one, as the two factors of an adapter."""
  joined: dict[str, Part] = {}
  for number, layer in enumerate(layers):
    modules = {model.leaves[leaf].path.rpartition("/")[0] for leaf in layer.leaves}
    module = modules.pop() if len(modules) == 1 and layer.scan is None else ""
    key = module or f"/{number}"
    leaves = joined[key].leaves if key in joined else frozenset[int]()
    joined[key] = Part(layer.leaves | leaves, layer.scan)
  return sorted(joined.values(), key=lambda part: _begin(model, part))


def _join_parallel(model: Model, layers: list[Part]) -> list[Part]:
  """The layers, joined so that each follows all before it."""
  follows = [{k for k, a in enumerate(layers) if model.follows(b.leaves, a.leaves)} for b in layers]
  joined: list[Part] = []
  for number, layer in enumerate(layers):
    if all(set(range(number)) <= earlier for earlier in follows[number:]):
      joined.append(layer)
    else:
      joined[-1] = Part(joined[-1].leaves | layer.leaves)
  return joined


def _blocks_of_layers(model: Model, layers: list[Part], origin: str) -> Blocks:
  """A block for each layer and one for the tables before all; other leaves are with a layer.

  A bias or a normalization is with the only layer of its innermost module, else with the layer
  that is used last before it, and with the first if there is none.
  """
  by_leaf: dict[int, list[int]] = {}
  layers_of: dict[str, set[int]] = {}
  first = min((_begin(model, layer) for layer in layers), default=len(model.order))
  is_before = {
    i
    for i, place in model.order.items()
    if place < first and len(model.leaves[i].axes_of_layer) > 1
  }
  count = int(bool(is_before))
  begins: list[tuple[int, int, int]] = []
  for layer in layers:
    numbers = list(range(count, count + layer.length))
    count += layer.length
    begins.append((_begin(model, layer), numbers[0], numbers[-1]))
    for leaf in layer.leaves:
      is_reversed = layer.scan is not None and layer.scan.reverse
      by_leaf[leaf] = numbers[::-1] if is_reversed else numbers
      if layer.scan is None:
        layers_of.setdefault(model.leaves[leaf].path.rpartition("/")[0], set()).add(numbers[0])
  outer = {module for leaf in model.leaves for module in _modules_around(leaf.path)}
  shared = {i: scan for scan in model.layer_scans for i in _shared(model, scan)}
  for leaf, place in model.order.items():
    if leaf in by_leaf:
      continue
    module = model.leaves[leaf].path.rpartition("/")[0]
    own = layers_of.get(module, set())
    if leaf in is_before or (is_before and place < first):
      by_leaf[leaf] = [0]
    elif len(own) == 1 and module not in outer:
      by_leaf[leaf] = [min(own)]
    else:
      begun = [row for row in begins if row[0] < place] or begins[:1] or [(0, 0, 0)]
      _, begin, end = max(begun)
      by_leaf[leaf] = [begin if leaf in shared else end]
  return Blocks(by_leaf, max(count, 1), origin)


def _modules_around(path: str) -> list[str]:
  """The modules that hold the module of a leaf, the root among them."""
  names = path.split("/")[:-1]
  return ["/".join(names[:end]) for end in range(len(names))]

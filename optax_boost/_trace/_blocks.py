"""Divides a model into blocks, of which ``_layer_groups`` makes groups of layers.

A *block* is a module that the model repeats, a step of a scan over layers, or, in a model without
these, a layer. Repeated modules in a row, or the steps of a scan, are a *series* (``_series``). The
leaves that the loss uses before a series are a further block, and so are the leaves after it.
"""

from collections.abc import Mapping, Sequence
import contextlib
import glob
import itertools
import re
from typing import NamedTuple

from optax_boost._foundation import _checks, _types
from optax_boost._trace import _layer_scans, _series, _traced_leaves


class Unclear(Exception):
  """Raised if the trace doesn't tell the blocks; the message proposes values of `blocks`."""


class Blocks(NamedTuple):
  """The blocks of a model.

  Attributes:
    by_leaf: for each leaf that the loss uses, the numbers of its blocks: one number for each layer
      if the steps of a scan that slices the leaf are blocks, else a single number.
    origin: a line for ``print``, which tells what the blocks are, and how to choose other blocks.
  """

  by_leaf: dict[int, list[int]]
  num_blocks: int
  origin: str


def blocks_by_default(model: _traced_leaves.Model, num_groups: int | None = None) -> Blocks:
  """Returns the blocks of the model's only series, or else of a plain chain of layers.

  A series inside of another doesn't count. In a model without a series and without a chain, layers
  that are parallel share a block, if this makes at least `num_groups` blocks. Otherwise, or if
  `num_groups` is None, modules with one kernel each may be a series, too. Raises :class:`Unclear`
  if the model has several series, if many kernels are beside its series, or if none of these cases
  applies.
  """
  every, outermost = _series.find_series(model)
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
    every, outermost = _series.find_series(model, num_kernels=1)
    answers = (_series.join_modules(model, each) for each in outermost)
    of_several = next(filter(None, answers), [])
    # The dense layers inside of a block are no series of the model.
    outermost = [each for each in outermost if not _has_many_beside(model, [each], each.around)]
    if len(outermost) != 1 or of_several:
      pairs = itertools.pairwise(each.leaves for each in outermost)
      are_parallel = not any(model.follows(later, earlier) for earlier, later in pairs)
      raise Unclear(_ask_for_blocks(model, outermost if are_parallel else [], of_several))
  series, *others = outermost
  if others or _has_many_beside(model, outermost) or _series.join_modules(model, series):
    raise Unclear(_ask_which_series(model, outermost))
  origin = f"blocks: {_describe(series)}"
  inner = [other for other in every if other is not series and _is_finer(model, other, series)]
  if inner:
    origin += f"; for {inner[0].length} finer ones pass blocks={_series.quoted(inner[0].pattern)}"
  return _place(model, [series], f'{origin}; for others pass blocks="..."')


def blocks_of_layers(model: _traced_leaves.Model) -> Blocks:
  """Returns the smallest blocks: a kernel with its bias and normalization, or a step of a scan."""
  origin = 'blocks: each layer, for want of larger ones; for others pass blocks="..."'
  return _blocks_of_layers(model, _find_layers(model), origin)


def blocks_of_patterns(model: _traced_leaves.Model, patterns: Sequence[str]) -> Blocks:
  """Returns the blocks of parallel series, such as two towers; each pattern selects one series."""
  towers = [_series.select(model, pattern) for pattern in patterns]
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


def check_patterns(blocks: _types.Unchecked) -> tuple[str, ...]:
  """Checks the argument `blocks` of `layer_groups`, and returns a tuple of patterns."""
  patterns = (blocks,) if isinstance(blocks, str) else blocks
  if not (
    isinstance(patterns, list | tuple) and patterns and all(isinstance(p, str) for p in patterns)
  ):
    raise TypeError(
      "`blocks` must be a pattern of paths, as 'encoder/layers/*', or a sequence of patterns, one"
      f" for each series side by side; got {_checks.shorten(blocks)}."
    )
  return tuple(patterns)


def _is_finer(model: _traced_leaves.Model, inner: _series.Series, outer: _series.Series) -> bool:
  """Returns whether `inner` has more blocks than `outer`, and more than half as many kernels."""
  kernels = [len(series.leaves.intersection(model.kernels)) for series in (inner, outer)]
  return inner.length > outer.length and 2 * kernels[0] > kernels[1]


def _describe(series: _series.Series) -> str:
  kind = "stacked layers" if series.parts[0].scan is not None else "modules"
  return f"{_series.quoted(series.pattern)} ({series.length} {kind})"


def _has_many_beside(
  model: _traced_leaves.Model, series: Sequence[_series.Series], around: str = ""
) -> bool:
  """Returns whether a module has more kernels beside some series than in them.

  `around` is the path of the module, with a slash; "" is the whole model. Kernels that neither get
  data from the series nor give data to it count twice, since they are in no order with its blocks.
  """
  inside = frozenset[int]().union(*(each.leaves for each in series))
  beside = {i for i in model.order if model.leaves[i].path.startswith(around)} - inside
  unordered = {i for i in beside if not model.follows([i], inside)}
  unordered -= frozenset[int]().union(*(model.flow.upstream[i] for i in inside))
  return sum(map(model.count_kernels, (beside, unordered))) > model.count_kernels(inside)


def _ask_which_series(model: _traced_leaves.Model, outermost: list[_series.Series]) -> str:
  """Returns the message for a model with several series, or with many kernels beside its series."""
  inside = frozenset[int]().union(*(each.leaves for each in outermost))
  total, num_beside = map(model.count_kernels, (model.order, model.order.keys() - inside))
  found = ", ".join(f"{_series.quoted(each.pattern)} ({each.length})" for each in outermost)
  what = f"{len(outermost)} series of blocks and must be told which to take: {found}"
  if len(outermost) == 1:
    what = (
      f"the blocks {found}, but {num_beside} of {total} kernels beside them, and must be told"
      " whether they are the only blocks"
    )
  units = list(outermost)
  if _has_many_beside(model, outermost):
    units += [
      _series.Series([_traced_leaves.Part(frozenset(leaves))], glob.escape(module))
      for module, leaves in _modules_beside(model, outermost).items()
    ]
    units.sort(key=lambda unit: model.begin(unit.parts[0]))
  towers: list[list[_series.Series]] = []
  for unit in units:
    first = unit.parts[0].leaves
    before = [tower for tower in towers if model.follows(first, tower[-1].leaves)]
    if before:
      before[0].append(unit)
    else:
      towers.append([unit])
  joined = ["|".join(unit.pattern for unit in tower) for tower in towers]
  of_several = _series.join_modules(model, outermost[0])
  in_order = "if they are one after the other"
  beside = "if they are side by side, each counted from its last block"
  each_series = [each.pattern for each in outermost] if len(outermost) > 1 else []
  answers = _answers(
    model,
    (each_series if _are_interleaved(model, outermost) else [], "if number i of each is one block"),
    ([] if len(joined) > 1 else of_several, "if these modules are one block each"),
    (joined if len(units) > 1 else [], beside if len(joined) > 1 else in_order),
    (each_series, beside),
    (["|".join(unit.pattern for unit in units)] if len(units) > 1 else [], in_order),
    ([outermost[0].pattern], "for these blocks alone"),
  )
  return f"`layer_groups` finds {what}. Pass {answers}."


def _are_interleaved(model: _traced_leaves.Model, series: Sequence[_series.Series]) -> bool:
  """Returns whether block i of each series is used before block i + 1 of any of them."""
  begins = [[model.begin(part) for part in each.parts] for each in series]
  rows = list(zip(*begins, strict=False))
  return len({each.length for each in series}) == 1 < len(rows) and all(
    max(row) < min(after) for row, after in itertools.pairwise(rows)
  )


def _modules_beside(
  model: _traced_leaves.Model, outermost: Sequence[_series.Series]
) -> dict[str, list[int]]:
  """Returns modules without blocks of a series that may be blocks, too.

  These are the outermost modules with several kernels, or with one if none has several. A module is
  divided into its modules if it has more than twice as many kernels as any block.
  """
  parts = [part for each in outermost for part in each.parts]
  largest = max(model.count_kernels(part.leaves) // part.length for part in parts)
  inside = frozenset[int]().union(*(part.leaves for part in parts))
  within = {module for i in inside for module in _modules_of(model.leaves[i].path)}
  modules: dict[str, list[int]] = {}
  remaining = [(i, _modules_of(model.leaves[i].path)) for i in model.order.keys() - inside]
  while remaining:
    members: dict[str, list[int]] = {}
    for i, around in remaining:
      for module in [m for m in around if m not in within][:1]:
        members.setdefault(module, []).append(i)
    large = {
      module
      for module, leaves in members.items()
      if model.count_kernels(leaves) > 2 * largest
      and any(_modules_of(model.leaves[i].path)[-1] != module for i in leaves)
    }
    modules |= {m: leaves for m, leaves in members.items() if m not in large}
    within |= large
    remaining = [row for row in remaining if large.intersection(row[1])]
  sizes = {module: model.count_kernels(leaves) for module, leaves in modules.items()}
  smallest = 2 if max(sizes.values(), default=0) > 1 else 1
  return {module: leaves for module, leaves in modules.items() if sizes[module] >= smallest}


def _ask_for_blocks(
  model: _traced_leaves.Model, towers: Sequence[_series.Series], joined: list[str]
) -> str:
  """Returns the message for a model without a series of modules with several kernels each.

  `towers` are series of modules with one kernel each. `joined` has the pattern of blocks of several
  such modules, if there are any.
  """
  top = model.top_modules()
  large = [m for m, leaves in top.items() if len(set(leaves).intersection(model.kernels)) > 1]
  modules = list(map(glob.escape, large)) if len(large) > 1 else []
  are_chained = all(model.follows(top[b], top[a]) for a, b in itertools.pairwise(large))
  wide = [m for m, leaves in top.items() if any(len(model.leaves[i].shape) > 1 for i in leaves)]
  every = dict.fromkeys(re.sub(r"\d+$", "*", glob.escape(module)) for module in wide or top)
  in_order, side_by_side = (
    "for these modules, one after the other",
    "for these modules, side by side",
  )
  answers = _answers(
    model,
    (joined, "if these modules are one block each"),
    (["|".join(modules)] if are_chained else modules, in_order if are_chained else side_by_side),
    ([tower.pattern for tower in towers], "for these layers, side by side"),
    (["|".join(every)], "for each of these, one after the other"),
  )
  return (
    "`layer_groups` must be told the blocks of this model: there is no numbered series of modules"
    " with several kernels, one after the other, no scan over layers, and the layers are no plain"
    f" chain. Pass {answers}, where `*` is any part of a name."
  )


def _answers(model: _traced_leaves.Model, *answers: tuple[list[str], str]) -> str:
  """Returns values of `blocks` with words, each value once, without values that are refused."""
  texts: dict[str, str] = {}
  for patterns, words in answers:
    code = ", ".join(map(_series.quoted, patterns))
    code = f"({code})" if len(patterns) > 1 else code
    with contextlib.suppress(ValueError):
      if patterns and code not in texts:
        blocks_of_patterns(model, patterns)
        texts[code] = f"blocks={code} {words}"
  return "; or ".join(texts.values())


def _place(model: _traced_leaves.Model, towers: Sequence[_series.Series], origin: str) -> Blocks:
  """Returns the blocks of the parallel series `towers`, and of the leaves outside of these series.

  The last blocks of all series get the same number. Each block first gets a *place*, a preliminary
  number. In the end, the places that leaves have are numbered from 0, without gaps. `origin` is the
  line for ``print``.
  """
  depth = max(tower.length for tower in towers)
  places: dict[int, list[int]] = {}
  # For each part: the place of its first block, the part, and whether the part begins its series.
  parts: list[tuple[int, _traced_leaves.Part, bool]] = []
  for tower in towers:
    place = depth - tower.length
    for number, part in enumerate(tower.parts):
      parts.append((place, part, number == 0))
      places |= dict.fromkeys(part.leaves, part.numbers(place))
      place += part.length
  for leaf in model.order:
    if leaf not in places:
      places[leaf] = [_place_beside(model, parts, leaf, depth)]
  kept = {place: number for number, place in enumerate(sorted(set().union(*places.values())))}
  by_leaf = {leaf: [kept[place] for place in numbers] for leaf, numbers in places.items()}
  return Blocks(by_leaf, len(kept), origin)


def _place_beside(
  model: _traced_leaves.Model,
  parts: list[tuple[int, _traced_leaves.Part, bool]],
  leaf: int,
  after_all: int,
) -> int:
  """Returns the place (see `_place`) of a leaf that is in no series.

  `parts` are the rows that `_place` makes. The blocks of series have places from 0 on, which are
  less than `after_all`. The first case that applies decides:

  1. All steps of a scan use the leaf, and the leaf gets data from leaves that the scan slices: the
     place of the first step.
  2. No block gets data from the leaf: `after_all`.
  3. The leaf gets data from blocks: the place of the last of these blocks.
  4. The first block that gets data from the leaf begins a series, and the loss uses the leaf before
     this block: one place before the block, which is -1 for a block at place 0.
  5. Otherwise: the place of the first block that gets data from the leaf.
  """
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
  return place - (is_first and model.order[leaf] < model.begin(part))


def _shared(model: _traced_leaves.Model, scan: _layer_scans.LayerScan) -> set[int]:
  """Returns the leaves that all steps of a scan use.

  These are the leaves among the scan's constants. Further leaves count if the loss first uses them
  between first uses of leaves that the scan slices, and if no scan slices them.
  """
  order = list(model.order)
  positions = [model.order[i] for i in scan.axis_of if i in model.order]
  between = order[min(positions) : max(positions)] if positions else []
  sliced = {i for other in model.scans for i in other.axis_of}
  return set(scan.shared).union(set(between) - sliced)


def reused(model: _traced_leaves.Model, blocks_of_leaf: Mapping[int, list[int]]) -> set[int]:
  """Returns the leaves that all steps of a scan use, or that are used again after a later block."""
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


def _find_layers(model: _traced_leaves.Model) -> list[_traced_leaves.Part]:
  """Returns the layers by first use; a layer is a kernel, the leaves of a recurrence, or a scan."""
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
  parts = [_traced_leaves.Part(frozenset(layer)) for layer in layers]
  parts += [_traced_leaves.Part(frozenset(scan.axis_of), scan) for scan in model.layer_scans]
  return sorted(parts, key=lambda part: model.begin(part))


def _recur(model: _traced_leaves.Model, first: int, second: int) -> bool:
  """Returns whether two leaves belong to one recurrence.

  They do if every iteration of one recurrent loop uses both leaves, or if data that was computed
  with either leaf flows back into both leaves.
  """
  ever = model.flow.ever_upstream
  pair = {first, second}
  return pair <= ever[first] & ever[second] or any(pair <= loop for loop in model.flow.recurrent)


def _are_chained(model: _traced_leaves.Model, layers: list[_traced_leaves.Part]) -> bool:
  """Returns whether each layer gets data from the layer before it.

  A single layer counts as a chain if it is a scan, or if it has exactly one kernel.
  """
  if len(layers) == 1 and layers[0].scan is None:
    return len(layers[0].leaves.intersection(model.kernels)) == 1
  return all(model.follows(b.leaves, a.leaves) for a, b in itertools.pairwise(layers))


def _join_modules(
  model: _traced_leaves.Model, layers: list[_traced_leaves.Part]
) -> list[_traced_leaves.Part]:
  """Returns the layers, with layers of one innermost module (an adapter's factors) joined."""
  joined: dict[str, _traced_leaves.Part] = {}
  for number, layer in enumerate(layers):
    modules = {model.leaves[leaf].path.rpartition("/")[0] for leaf in layer.leaves}
    module = modules.pop() if len(modules) == 1 and layer.scan is None else ""
    key = module or f"/{number}"
    leaves = joined[key].leaves if key in joined else frozenset[int]()
    joined[key] = _traced_leaves.Part(layer.leaves | leaves, layer.scan)
  return sorted(joined.values(), key=lambda part: model.begin(part))


def _join_parallel(
  model: _traced_leaves.Model, layers: list[_traced_leaves.Part]
) -> list[_traced_leaves.Part]:
  """Joins parallel layers; returns the layers in the order of use.

  Each of the returned layers gets data from all layers before it.
  """
  follows = [{k for k, a in enumerate(layers) if model.follows(b.leaves, a.leaves)} for b in layers]
  joined: list[_traced_leaves.Part] = []
  for number, layer in enumerate(layers):
    if all(set(range(number)) <= earlier for earlier in follows[number:]):
      joined.append(layer)
    else:
      joined[-1] = _traced_leaves.Part(joined[-1].leaves | layer.leaves)
  return joined


def _blocks_of_layers(
  model: _traced_leaves.Model, layers: list[_traced_leaves.Part], origin: str
) -> Blocks:
  """Returns a block for each layer, or for each step of a layer that is a scan.

  If the loss uses tables (leaves of several axes) before all layers, all leaves before the layers
  are one more block, the first. Any other leaf, such as a bias, joins the layer in its own module,
  if this module has exactly one layer and no modules inside. Otherwise, the leaf joins the layer
  that began last before the leaf, or the first layer. `origin` is the line for ``print``.
  """
  by_leaf: dict[int, list[int]] = {}
  layers_of: dict[str, set[int]] = {}
  first = min((model.begin(layer) for layer in layers), default=len(model.order))
  is_before = {
    i
    for i, place in model.order.items()
    if place < first and len(model.leaves[i].axes_of_layer) > 1
  }
  count = int(bool(is_before))
  begins: list[tuple[int, int, int]] = []
  for layer in layers:
    begins.append((model.begin(layer), count, count + layer.length - 1))
    for leaf in layer.leaves:
      by_leaf[leaf] = layer.numbers(count)
      if layer.scan is None:
        layers_of.setdefault(model.leaves[leaf].path.rpartition("/")[0], set()).add(count)
    count += layer.length
  outer = {module for leaf in model.leaves for module in ["", *_modules_of(leaf.path)[:-1]]}
  shared = {i: scan for scan in model.layer_scans for i in _shared(model, scan)}
  for leaf, place in model.order.items():
    if leaf in by_leaf:
      continue
    module = model.leaves[leaf].path.rpartition("/")[0]
    siblings = layers_of.get(module, set())
    if leaf in is_before or (is_before and place < first):
      by_leaf[leaf] = [0]
    elif len(siblings) == 1 and module not in outer:
      by_leaf[leaf] = [min(siblings)]
    else:
      begun = [row for row in begins if row[0] < place] or begins[:1] or [(0, 0, 0)]
      _, begin, end = max(begun)
      by_leaf[leaf] = [begin if leaf in shared else end]
  return Blocks(by_leaf, max(count, 1), origin)


def _modules_of(path: str) -> list[str]:
  """Returns the paths of the modules that enclose a leaf, from the outermost on."""
  names = path.split("/")[:-1]
  return ["/".join(names[:end]) for end in range(1, len(names) + 1)]

"""Places the leaves beside the blocks of series, by the flow of data."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from optax_boost._trace import _layer_scans, _traced_leaves


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


def place(
  model: _traced_leaves.Model,
  towers: Sequence[Sequence[_traced_leaves.Part]],
  origin: str,
  *,
  are_all: bool = False,
) -> Blocks:
  """Returns the blocks of the parallel series `towers`, and of the leaves outside of these series.

  The last blocks of all series get the same number. Each block first gets a *place*, a preliminary
  number. In the end, the places that leaves have are numbered from 0, without gaps. If `are_all`,
  the series have all kernels, so no block is after them, and there is one before them only if it
  has tables (leaves of several axes). `origin` is the line for ``print``.
  """
  depths = [sum(part.length for part in tower) for tower in towers]
  depth = max(depths)
  places: dict[int, list[int]] = {}
  # For each part: the place of its first block, the part, and whether the part begins its series.
  parts: list[tuple[int, _traced_leaves.Part, bool]] = []
  for tower, length in zip(towers, depths, strict=True):
    place = depth - length
    for number, part in enumerate(tower):
      parts.append((place, part, number == 0))
      places |= dict.fromkeys(part.leaves, part.numbers(place))
      place += part.length
  for leaf in model.order:
    if leaf not in places:
      places[leaf] = [_place_beside(model, parts, leaf, None if are_all else depth)]
  first = [leaf for leaf in places if min(places[leaf]) < 0]
  if are_all and all(len(model.leaves[leaf].axes_of_layer) < 2 for leaf in first):
    places |= {leaf: [0] for leaf in first}
  kept = {place: number for number, place in enumerate(sorted(set().union(*places.values())))}
  by_leaf = {leaf: [kept[place] for place in numbers] for leaf, numbers in places.items()}
  return Blocks(by_leaf, len(kept), origin)


def _place_beside(
  model: _traced_leaves.Model,
  parts: list[tuple[int, _traced_leaves.Part, bool]],
  leaf: int,
  after_all: int | None,
) -> int:
  """Returns the place (see `place`) of a leaf that is in no series.

  `parts` are the rows that `place` makes. The blocks of series have places from 0 on. If there may
  be blocks after them, `after_all` is the place of these. The first case that applies decides:

  1. All steps of a scan use the leaf, and the leaf gets data from leaves that the scan slices: the
     place of the first step.
  2. No block gets data from the leaf, and `after_all` is a place: `after_all`.
  3. The leaf gets data from blocks: the place of the last of these blocks.
  4. The first block that gets data from the leaf begins a series, and the loss uses the leaf before
     this block: one place before the block, which is -1 for a block at place 0.
  5. A block gets data from the leaf: the place of the first such block.
  6. Otherwise: -1.
  """
  upstream = model.flow.upstream[leaf]
  before = [(place, part) for place, part, _ in parts if not upstream.isdisjoint(part.leaves)]
  inside = [
    place for place, part in before if part.scan and leaf in shared_leaves(model, part.scan)
  ]
  if inside:
    return min(inside)
  downstream = [row for row in parts if model.follows(row[1].leaves, [leaf])]
  if not downstream and after_all is not None:
    return after_all
  if before:
    return max(place + part.length - 1 for place, part in before)
  if not downstream:
    return -1
  place, part, is_first = min(downstream, key=lambda row: row[0])
  return place - (is_first and model.order[leaf] < model.begin(part))


def shared_leaves(model: _traced_leaves.Model, scan: _layer_scans.LayerScan) -> set[int]:
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
  again = set[int]().union(*(shared_leaves(model, scan) for scan in model.scans))
  for leaf in model.uses:
    block = min(blocks_of_leaf[leaf])
    if leaf in seen and block < furthest:
      again.add(leaf)
    seen.add(leaf)
    furthest = max(furthest, block)
  return again

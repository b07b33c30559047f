"""The blocks of a model along the forward pass, of which groups of layers are made.

A *block* is the smallest run of leaves, or of layers of leaves, that a group takes whole: a
numbered module that the model repeats, a step of a scan over layers, or the leaves before, between
or after these. A leaf has one block, or one for each of its layers if a scan slices it.

Blocks are found in two steps. First each leaf gets the name of a *unit*, such as the path of a
repeated module, or none; the leaves of a unit stay together. Then blocks are numbered by first use:
each unit is one, and so is each kernel without a unit, with the biases and normalizations that
belong to it.
"""

import collections
from collections.abc import Sequence
import dataclasses
import functools
import itertools
import re
from typing import NamedTuple
from typing import TypeAlias

from optax_boost import _tree
from optax_boost._trace import _layer_axes
from optax_boost._trace import _leaf_uses

_NUMBERED = re.compile(r"(.*?)\d+", re.DOTALL)
# Units beside the blocks. No module has such a name: a path has no empty segment.
_FIRST, _LAST = "/first", "/last"

# For each leaf the name of its unit, or None.
_Units: TypeAlias = list[str | None]


class Blocks(NamedTuple):
  """The blocks of a model.

  Attributes:
    of_leaf: by the number of a leaf the number of its block; of a leaf that a scan slices, the
      number of each layer's block.
    num_blocks: how many blocks there are.
  """

  of_leaf: dict[int, list[int]]
  num_blocks: int


@dataclasses.dataclass(frozen=True)
class Model:
  """The leaves of a traced loss, which are known by number, and their uses.

  Attributes:
    leaves: all leaves; a path has `/` between modules.
    uses: the leaves in the order of their uses; a leaf that is used again is repeated.
    scans: the scans over layers, in the order of the program.
  """

  leaves: list[_layer_axes.Leaf]
  uses: list[int]
  scans: Sequence[_leaf_uses.LayerScan]

  @functools.cached_property
  def order(self) -> list[int]:
    """The leaves by first use."""
    return list(dict.fromkeys(self.uses))

  @functools.cached_property
  def kernels(self) -> list[int]:
    """All leaves but biases and normalizations, by first use."""
    return [i for i in self.order if not _is_attached(self.leaves[i])]


def find_blocks(model: Model, num_blocks: int | None) -> Blocks:
  """The largest blocks of which there are at least `num_blocks`, else the smallest.

  None: one for each repeated module and each step of a scan, one for all leaves before these and
  one for all after.
  """
  modules = _repeated_modules(model)
  stages = {
    module
    for module in {m for chain in modules for m in chain}
    if _is_stage(model, modules, module)
  }
  # A leaf's block is the outermost of its modules that is no stage.
  outer = [list(itertools.takewhile(stages.__contains__, chain)) for chain in modules]
  inner = [chain[len(around) :] for chain, around in zip(modules, outer, strict=True)]
  outermost = _without_single_kernels(model, [chain[0] if chain else None for chain in inner])
  joined = _number_blocks(model, _with_leaves_beside(model, outermost))
  if num_blocks is None:
    return joined
  candidates = [joined, _number_blocks(model, outermost)]
  for level in range(max(map(len, modules), default=0)):
    units = [chain[min(level, len(chain) - 1)] if chain else None for chain in modules]
    if any(unit in chain[1:] for unit, chain in zip(units, inner, strict=True)):
      # Blocks are cut: the remainder of one may have no kernel, or others among its kernels.
      runs = [unit for unit, _ in itertools.groupby(units[i] for i in model.kernels)]
      units = [unit if runs.count(unit) == 1 else None for unit in units]
    else:
      units = _with_leaves_beside(model, _without_single_kernels(model, units))
    candidates.append(_number_blocks(model, units))
  enough = [blocks for blocks in candidates if blocks.num_blocks >= num_blocks]
  smallest = _number_blocks(model, [None] * len(model.leaves))
  return min(enough, key=lambda blocks: blocks.num_blocks, default=smallest)


def reused(model: Model, blocks_of_leaf: dict[int, list[int]]) -> set[int]:
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


def _is_attached(leaf: _layer_axes.Leaf) -> bool:
  """Whether a leaf is no kernel, but a bias or a normalization that goes with one."""
  # With layers side by side, biases may be matrices.
  return len(leaf.shape) <= 1 or _tree.is_bias_or_norm(leaf.path)


def _parents(path: str) -> list[str]:
  """The modules around a leaf or module, the root among them."""
  names = path.split("/") if path else []
  return ["/".join(names[:end]) for end in range(len(names))]


def _modules_around(path: str) -> list[str]:
  """The modules around a leaf, without the root; an entry of a list is a module, too."""
  modules = _parents(path)[1:]
  return [*modules, path] if path.rpartition("/")[2].isdigit() else modules


# ---- Repeated modules


def _repeated_modules(model: Model) -> list[list[str]]:
  """For each leaf the repeated modules that it is in, from the outermost in.

  A module is repeated if its name is numbered, its parent has others of this name, and two of them,
  or of those in like parents, hold the same leaves. It counts where its kernels come one after the
  other and no scan runs over them.
  """
  members: dict[str, set[int]] = {}
  for i, leaf in enumerate(model.leaves):
    for module in _modules_around(leaf.path):
      members.setdefault(module, set()).add(i)
  siblings: dict[str, list[str]] = {}
  alike: dict[str, list[str]] = {}
  for module in members:
    if match := _NUMBERED.fullmatch(module):
      siblings.setdefault(match[1], []).append(module)
      alike.setdefault(_without_numbers(module), []).append(module)
  scanned = {i for scan in model.scans for i in scan.axis_of}
  numbered = {
    i for modules in siblings.values() if len(modules) > 1 for m in modules for i in members[m]
  }
  # What several layers use, as a table of relative positions, may be used first amid one of them.
  shared = {i for i in model.kernels if model.uses.count(i) > 1} - numbered
  kernels = [i for i in model.kernels if i not in shared]

  def contents(module: str) -> frozenset[str]:
    return frozenset(model.leaves[i].path.removeprefix(module) for i in members[module])

  def is_repeated(modules: Sequence[str]) -> bool:
    of_kind = alike[_without_numbers(modules[0])]
    return len(modules) > 1 and len(set(map(contents, of_kind))) < len(of_kind)

  def is_together(module: str) -> bool:
    runs = [is_inside for is_inside, _ in itertools.groupby(kernels, members[module].__contains__)]
    return runs.count(True) == 1 and scanned.isdisjoint(members[module])

  chains: list[list[str]] = [[] for _ in model.leaves]
  for modules in filter(is_repeated, siblings.values()):
    for module in filter(is_together, modules):
      for i in members[module]:
        chains[i].append(module)
  return [sorted(chain, key=len) for chain in chains]


def _without_numbers(path: str) -> str:
  return re.sub(r"\d+", "#", path)


def _is_stage(model: Model, modules: list[list[str]], stage: str) -> bool:
  """Whether a module is a row of blocks, as in a ResNet, and not a block itself.

  All its kernels but one, which may change the resolution, are in numbered modules of several
  kernels; the others of a name have the same leaves, but for a projection in some. Nothing else
  is used between the first of these modules and the last.
  """
  inside = [i for i in model.order if stage in modules[i]]
  module_of = {
    i: modules[i][modules[i].index(stage) + 1] for i in inside if modules[i][-1] != stage
  }
  kernels = [i for i in inside if not _is_attached(model.leaves[i])]
  counts = collections.Counter(module_of[i] for i in kernels if i in module_of)
  blocks = {module: number for module, number in counts.items() if number > 1}
  outside = len(kernels) - sum(blocks.values())
  names: dict[str, list[set[str]]] = {}
  for block in blocks:
    paths = {model.leaves[i].path.removeprefix(block) for i in inside if module_of.get(i) == block}
    names.setdefault(block.rstrip("0123456789"), []).append(paths)
  are_alike = all(
    len(contents) > 1 and set[str]().union(*contents) == max(contents, key=len)
    for contents in names.values()
  )
  runs = [in_block for in_block, _ in itertools.groupby(module_of.get(i) in blocks for i in inside)]
  return bool(blocks) and are_alike and outside <= 1 and runs.count(True) == 1


def _without_single_kernels(model: Model, units: _Units) -> _Units:
  """Drops units of one kernel, unless these are most of the model.

  Beside blocks and scans they are convolutions between stages, or the layers of a head.
  """
  counts = collections.Counter(units[i] for i in model.kernels)
  outside = counts.pop(None, 0)
  if not model.scans and set(counts.values()) == {1} and len(counts) > outside:
    return units
  return [unit if counts[unit] > 1 else None for unit in units]


# ---- What is before, between and after blocks


def _with_leaves_beside(model: Model, units: _Units) -> _Units:
  """Units for the leaves beside blocks, so that these make no groups of their own.

  What is used before all blocks is one unit, what is used after them another. Between blocks, a
  module of several kernels is a block, too; another leaf goes with the block around which its
  module is, else a kernel with the block that follows and the rest with what is before it.
  """
  firsts, followers = _scans_by_first_leaf(model)
  units = [f"/scan {i}" if i in firsts else unit for i, unit in enumerate(units)]
  following = {i for first, leaf_ids in followers.items() for i in leaf_ids if i != first}
  order = [i for i in model.order if i not in following]
  inside = [position for position, i in enumerate(order) if units[i] is not None]
  if not inside:
    return units
  first, last = inside[0], inside[-1]
  runs = itertools.groupby(order[first:last], lambda i: units[i] is None)
  between = [list(run) for is_outside, run in runs if is_outside]
  joined = list(units)
  for i in order[:first]:
    joined[i] = _FIRST
  for i in order[last + 1 :]:
    joined[i] = _LAST
  # Biases or normalizations of a series, as `LayerNorm_0`, of which others are between the blocks,
  # belong to the first block or the last.
  series = {_without_numbers(model.leaves[i].path) for run in between for i in run}

  def in_series(i: int) -> bool:
    kind = _without_numbers(model.leaves[i].path)
    return _is_attached(model.leaves[i]) and "#" in kind and kind in series

  if all(map(in_series, order[:first])):
    for i in order[:first]:
      joined[i] = units[order[first]]
  for i in itertools.takewhile(in_series, order[last + 1 :]):
    joined[i] = units[order[last]]
  for run in between:
    before = order[order.index(run[0]) - 1]
    after = order[order.index(run[-1]) + 1]
    _join_between(model, units, joined, before, run, after)
  return joined


def _join_between(
  model: Model, units: _Units, joined: _Units, before: int, run: list[int], after: int
) -> None:
  """Chooses the units of a run of leaves between two leaves that have some."""
  paths = [leaf.path for leaf in model.leaves]
  with_unit = {module for i, unit in enumerate(units) if unit for module in _parents(paths[i])}
  kernels = [i for i in run if not _is_attached(model.leaves[i])]
  mixing = [i for i in kernels if (axes := model.leaves[i].axes) is None or axes.fan_in]
  of_module = collections.Counter(m for i in mixing for m in _parents(paths[i]))

  def own_block(i: int) -> str | None:
    around = [m for m in _parents(paths[i]) if m not in with_unit and of_module[m] > 1]
    return around[0] if around else None

  def nearness(i: int, other: int) -> int:
    pairs = zip(_parents(paths[i]), _parents(paths[other]), strict=False)
    return sum(1 for mine, theirs in pairs if mine == theirs)

  for i in kernels:
    is_nearer = nearness(i, before) > nearness(i, after)
    joined[i] = own_block(i) or units[before if is_nearer else after]
  latest = before
  for i in run:
    if units[before] == units[after]:
      joined[i] = units[before]
    elif i not in kernels:
      # The nearest; of equally near ones the one before it.
      near = max([latest, *kernels, after], key=lambda other: nearness(i, other))
      joined[i] = own_block(i) or joined[near]
    latest = i


# ---- From units to blocks


def _scans_by_first_leaf(
  model: Model,
) -> tuple[dict[int, _leaf_uses.LayerScan], dict[int, list[int]]]:
  """Scans by the leaf that each uses first, and the leaves that follow it into its steps."""
  scan_of: dict[int, _leaf_uses.LayerScan] = {}
  followers: dict[int, list[int]] = {}
  sliced = {i for scan in model.scans for i in scan.axis_of}
  order = model.order
  for scan in model.scans:
    for first in [i for i in order if i in scan.axis_of][:1]:
      later = order[order.index(first) :]
      shared = _shared(model, scan) - sliced
      scan_of[first] = scan
      followers[first] = [i for i in later if i in scan.axis_of or i in shared]
  return scan_of, followers


def _shared(model: Model, scan: _leaf_uses.LayerScan) -> set[int]:
  """The leaves that all steps of a scan use: they enter it, or are used first between others."""
  positions = [position for position, i in enumerate(model.order) if i in scan.axis_of]
  between = model.order[positions[0] : positions[-1]] if positions else []
  sliced = {i for other in model.scans for i in other.axis_of}
  return set(scan.shared).union(set(between) - sliced)


def _number_blocks(model: Model, units: _Units) -> Blocks:
  """Numbers the blocks by first use; a scan over layers has one for each step."""
  scan_of, followers = _scans_by_first_leaf(model)
  following = {i for first, leaf_ids in followers.items() for i in leaf_ids if i != first}
  of_leaf: dict[int, list[int]] = {}
  count = 0
  order = [i for i in model.order if i not in following]
  for members in _members_of_blocks(model.leaves, order, set(scan_of), units):
    first = next((i for i in members if i in scan_of), members[0])
    numbers = list(range(count, count + (scan_of[first].length if first in scan_of else 1)))
    count += len(numbers)
    for i in followers.get(first, []):
      of_layers = numbers[::-1] if scan_of[first].reverse else numbers
      of_leaf.setdefault(i, of_layers if i in scan_of[first].axis_of else numbers[:1])
    # Leaves used before a scan belong to its first step, leaves used after it to the last.
    for position, i in enumerate(members):
      is_before = position < members.index(first)
      of_leaf.setdefault(i, numbers[:1] if is_before else numbers[-1:])
  return Blocks(of_leaf, count)


def _members_of_blocks(
  leaves: list[_layer_axes.Leaf], order: list[int], scans: set[int], units: _Units
) -> list[list[int]]:
  """The leaves of each unit, and of each kernel or scan outside of units, by first use.

  Scans are known by their first leaves. Biases and normalizations are with their kernels.
  """
  modules = [leaf.path.rpartition("/")[0] for leaf in leaves]
  # A module with others in it may use its own leaves at any time.
  outer = {parent for module in modules for parent in _parents(module)}
  kernels = [i for i in order if i in scans or not _is_attached(leaves[i])]
  kernels_of: dict[str, list[int]] = {}
  first_of: dict[str | None, int] = {}
  for i in kernels:
    kernels_of.setdefault(modules[i], []).append(i)
    first_of.setdefault(units[i], i)
  for i in order:
    first_of.setdefault(units[i], i)  # of units without a kernel
  blocks: dict[int, list[int]] = {}
  last = (kernels or order or [0])[0]
  for i in order:
    # The kernel of an innermost module counts before the last one that was used.
    own = kernels_of.get(modules[i], [])
    if i in own:
      last = home = i
    else:
      home = own[0] if len(own) == 1 and modules[i] not in outer else last
    if (unit := units[i] or units[home]) is not None:
      home = first_of[unit]
    blocks.setdefault(home, []).append(i)
  # A kernel stands where it is used, even if its bias is used before it.
  return [blocks[k] for k in order if k in blocks]

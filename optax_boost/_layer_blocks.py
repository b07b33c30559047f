"""The blocks of a model along the forward pass: what groups of layers are made of."""

from collections.abc import Sequence
import itertools
import re

from optax_boost import _layers
from optax_boost import _leaf_uses
from optax_boost import _tree

_NUMBERED = re.compile(r"(.*?)\d+", re.DOTALL)


def find(
  leaves: list[_layers.Leaf], order: list[int], stacks: Sequence[_leaf_uses.Scan], wanted: int
) -> tuple[dict[int, list[int]], int]:
  """For each leaf its block, or its layers' blocks; and the number of blocks.

  The largest blocks of which there are `wanted`, else the smallest; `order` lists leaves by first
  use.
  """
  kernels = [i for i in order if not _is_attached(leaves[i])]
  modules = _modules(leaves, kernels, stacks)
  for largest in range(max(map(len, modules), default=0)):
    units = [chain[min(largest, len(chain) - 1)] if chain else None for chain in modules]
    # The remainder of a cut module may have no kernel, or others among its kernels.
    runs = [unit for unit, _ in itertools.groupby(units[i] for i in kernels)]
    units = [unit if runs.count(unit) == 1 else None for unit in units]
    places, number = _places(leaves, order, stacks, units)
    if number >= wanted:
      return places, number
  return _places(leaves, order, stacks, [None] * len(leaves))


def reused(events: list[int], places: dict[int, list[int]]) -> set[int]:
  """The leaves that are used again after a leaf of a later block."""
  furthest = 0
  seen: set[int] = set()
  found: set[int] = set()
  for leaf in events:
    block = min(places[leaf])
    if leaf in seen and block < furthest:
      found.add(leaf)
    seen.add(leaf)
    furthest = max(furthest, block)
  return found


def _modules(
  leaves: list[_layers.Leaf], kernels: list[int], stacks: Sequence[_leaf_uses.Scan]
) -> list[list[str]]:
  """For each leaf the repeated modules that it is in, from the outermost in.

  A module is repeated if its name is numbered and two of its kind hold the same leaves. It counts
  where its kernels come one after the other and no scan runs over them.
  """
  members: dict[str, set[int]] = {}
  for i, leaf in enumerate(leaves):
    for module in _parents(leaf.path)[1:]:
      members.setdefault(module, set()).add(i)
  kinds: dict[str, list[str]] = {}
  for module in members:
    if match := _NUMBERED.fullmatch(module):
      kinds.setdefault(match[1], []).append(module)
  scanned = {i for stack in stacks for i in stack.axis_of}

  def contents(module: str) -> frozenset[str]:
    return frozenset(leaves[i].path.removeprefix(module) for i in members[module])

  def is_block(module: str) -> bool:
    runs = [is_inside for is_inside, _ in itertools.groupby(kernels, members[module].__contains__)]
    return runs.count(True) == 1 and scanned.isdisjoint(members[module])

  chains: list[list[str]] = [[] for _ in leaves]
  for modules in kinds.values():
    if len(set(map(contents, modules))) == len(modules):
      continue  # no two have the same leaves
    for module in filter(is_block, modules):
      for i in members[module]:
        chains[i].append(module)
  return [sorted(chain, key=len) for chain in chains]


def _places(
  leaves: list[_layers.Leaf],
  order: list[int],
  stacks: Sequence[_leaf_uses.Scan],
  units: Sequence[str | None],
) -> tuple[dict[int, list[int]], int]:
  """For each leaf its block, or its layers' blocks; and the number of blocks."""
  # By the leaf of a stack that is used first; the others follow it.
  stack_of: dict[int, _leaf_uses.Scan] = {}
  followers: dict[int, list[int]] = {}
  sliced = {i for stack in stacks for i in stack.axis_of}
  for stack in stacks:
    for first in [i for i in order if i in stack.axis_of][:1]:
      later = order[order.index(first) :]
      stack_of[first] = stack
      followers[first] = [i for i in later if i in stack.axis_of or i in stack.shared - sliced]
  following = {i for first, leaf_ids in followers.items() for i in leaf_ids if i != first}
  places: dict[int, list[int]] = {}
  number = 0
  for block in _blocks(leaves, [i for i in order if i not in following], set(stack_of), units):
    first = next((i for i in block if i in stack_of), block[0])
    layers = list(range(number, number + (stack_of[first].length if first in stack_of else 1)))
    number += len(layers)
    for i in followers.get(first, []):
      slices = layers[::-1] if stack_of[first].reverse else layers
      places.setdefault(i, slices if i in stack_of[first].axis_of else layers[:1])
    # Leaves used before a scan belong to its first layer, leaves used after it to the last.
    for place, i in enumerate(block):
      places.setdefault(i, layers[:1] if place < block.index(first) else layers[-1:])
  return places, number


def _is_attached(leaf: _layers.Leaf) -> bool:
  # With layers side by side, biases may be matrices.
  return len(leaf.shape) <= 1 or _tree.is_bias_or_norm(leaf.path)


def _parents(module: str) -> list[str]:
  """The modules around a module, the root among them."""
  names = module.split("/") if module else []
  return ["/".join(names[:end]) for end in range(len(names))]


def _blocks(
  leaves: list[_layers.Leaf], order: list[int], stacks: set[int], units: Sequence[str | None]
) -> list[list[int]]:
  """Units, and kernels and stacks outside them, with their biases and normalizations."""
  modules = [leaf.path.rpartition("/")[0] for leaf in leaves]
  # A module with others in it may use its own leaves at any time.
  outer = {parent for module in modules for parent in _parents(module)}
  kernels = [i for i in order if i in stacks or not _is_attached(leaves[i])]
  kernels_of: dict[str, list[int]] = {}
  first_of: dict[str | None, int] = {}
  for i in kernels:
    kernels_of.setdefault(modules[i], []).append(i)
    first_of.setdefault(units[i], i)
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

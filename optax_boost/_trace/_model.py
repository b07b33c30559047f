"""A traced loss as blocks are made of: its leaves, their uses, and which are upstream of which."""

from collections.abc import Iterable, Sequence
import dataclasses
import functools
from typing import NamedTuple

from optax_boost._trace import _flow, _layer_axes, _leaf_uses


class Part(NamedTuple):
  """Leaves of one block, or the leaves that a scan slices, which are a block for each step."""

  leaves: frozenset[int]
  scan: _leaf_uses.LayerScan | None = None

  @property
  def length(self) -> int:
    """The number of blocks."""
    return 1 if self.scan is None else self.scan.length

  def numbers(self, first: int) -> list[int]:
    """The number of the block of each slice, if the block that is computed first has this one."""
    numbers = list(range(first, first + self.length))
    return numbers[::-1] if self.scan is not None and self.scan.reverse else numbers


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

  def begin(self, part: Part) -> int:
    """The place of the first use of a part's leaves."""
    return min(self.order[leaf] for leaf in part.leaves if leaf in self.order)

  def top_modules(self) -> dict[str, list[int]]:
    """The outermost modules of which there are several, by first use, and their leaves."""
    paths = {i: self.leaves[i].path.split("/") for i in self.order}
    depth = 1
    while True:
      modules: dict[str, list[int]] = {}
      for i, names in paths.items():
        modules.setdefault("/".join(names[:depth]), []).append(i)
      if len(modules) > 1 or depth >= max(map(len, paths.values())):
        return modules
      depth += 1


def _is_kernel(leaf: _layer_axes.Leaf) -> bool:
  return len(leaf.shape) > 1 if leaf.axes is None else bool(leaf.axes.fan_in)

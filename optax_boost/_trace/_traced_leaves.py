"""The leaves of a traced loss: their order of use, and which leaves follow which."""

import collections
from collections.abc import Iterable
import functools
from typing import NamedTuple

from optax_boost._trace import _layer_axes, _layer_scans, _leaf_uses


class Part(NamedTuple):
  """The leaves of one block; or the leaves that `scan` slices, with a block for each step."""

  leaves: frozenset[int]
  scan: _layer_scans.LayerScan | None = None

  @property
  def length(self) -> int:
    return 1 if self.scan is None else self.scan.length

  def numbers(self, first: int) -> list[int]:
    """Returns the number of each layer's block, in the order of the layers in a leaf.

    The block that runs first gets the number `first`.
    """
    numbers = list(range(first, first + self.length))
    return numbers[::-1] if self.scan is not None and self.scan.reverse else numbers


class Model:
  """The leaves of the params in a traced loss, and how the loss uses these leaves.

  A leaf's number is its index in ``jax.tree.leaves(params)``; sets of leaves hold such numbers.

  Attributes:
    leaves: the path, shape and axes of each leaf. In these paths, a `/` separates modules.
    uses: for each use of a leaf, the leaf's number, in the order of uses. A leaf that is used twice
      is listed twice.
    scans: the scans over layers, in the order of the program.
    flow: which leaves are upstream of each leaf.
  """

  def __init__(self, findings: _leaf_uses.Findings) -> None:
    axes = _layer_axes.describe(findings).axes
    # A dot in a key separates modules, too, since PyTorch has flat names, as `h.0.attn.weight`.
    paths = [path.replace(".", "/") for path in findings.paths]
    self.leaves = list(map(_layer_axes.Leaf, paths, findings.shapes, axes))
    self.uses, self.scans, self.flow = findings.order, findings.scans, findings

  @functools.cached_property
  def order(self) -> dict[int, int]:
    """Returns the position of each used leaf in the order of first uses."""
    return {leaf: place for place, leaf in enumerate(dict.fromkeys(self.uses))}

  @functools.cached_property
  def again(self) -> set[int]:
    """Returns the leaves that the loss uses several times."""
    return {leaf for leaf, number in collections.Counter(self.uses).items() if number > 1}

  @functools.cached_property
  def kernels(self) -> list[int]:
    """Returns the kernels in the order of first uses.

    A kernel is a leaf with a fan-in, or a leaf of unknown axes that has two or more axes.
    """
    return [i for i in self.order if _is_kernel(self.leaves[i])]

  def count_kernels(self, leaves: Iterable[int]) -> int:
    """Counts kernels among leaves; a leaf that a scan slices has a kernel for each step."""
    lengths = {leaf: scan.length for scan in self.layer_scans for leaf in scan.axis_of}
    return sum(lengths.get(i, 1) for i in set(leaves).intersection(self.kernels))

  def in_order(self, leaves: Iterable[int]) -> list[int]:
    """Returns the leaves without those that the loss does not use, sorted by first use."""
    return sorted(self.order.keys() & set(leaves), key=self.order.__getitem__)

  def follows(self, later: Iterable[int], earlier: Iterable[int]) -> bool:
    """Returns whether a leaf of `earlier` is upstream of a leaf of `later`."""
    return any(not self.flow.upstream[leaf].isdisjoint(earlier) for leaf in later)

  @functools.cached_property
  def layer_scans(self) -> list[_layer_scans.LayerScan]:
    """Returns the scans in which a leaf gets data from a slice of itself, as layers in a row do.

    A scan that sums over experts is not among them, nor a recurrence that takes other leaves than
    kernels step by step, such as positions.
    """
    ever, kernels = self.flow.ever_upstream, set(self.kernels)
    return [
      scan
      for scan in self.scans
      if any(i in ever[i] for i in scan.axis_of)
      and (kernels.intersection(scan.axis_of) or kernels.isdisjoint(scan.shared))
    ]

  def begin(self, part: Part) -> int:
    """Returns the position of a part's first used leaf in the order of first uses."""
    return min(self.order[leaf] for leaf in part.leaves if leaf in self.order)

  def top_modules(self) -> dict[str, list[int]]:
    """Returns the leaves of each module, at the outermost depth that has several modules.

    The leaves of a module are in the order of first uses.
    """
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
  return len(leaf.shape_of_layer) > 1 if leaf.roles is None else bool(leaf.roles.fan_in)

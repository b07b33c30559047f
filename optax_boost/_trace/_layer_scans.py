"""Layers that a leaf holds one after another: a scan slices them, or the program takes them.

The entries that a program takes of a leaf by an index, as ``w[0]``, ``w[1]``, ... in Python or
``w[i]`` by the counter of a loop, are layers if they are all entries along one axis, in their
order, and an entry meets data that were computed with the entry before it.
"""

from collections.abc import Mapping, Sequence
import itertools
from typing import NamedTuple

from optax_boost._trace import _axis_map


class LayerScan(NamedTuple):
  """A scan over layers that is not inside of another, or layers that the program takes by an index.

  Attributes:
    axes: for each leaf of which layers are taken, a pair of the leaf's number and the axis.
    shared: the leaves that all steps use.
    reverse: whether the first step takes the last layer.
  """

  axes: tuple[tuple[int, int], ...]
  shared: frozenset[int]
  length: int
  reverse: bool

  @property
  def axis_of(self) -> dict[int, int]:
    """Returns `axes` as a dict from leaves to axes."""
    return dict(self.axes)


class Meeting(NamedTuple):
  """The first equation in which a leaf, or an entry of it, meets data.

  Attributes:
    leaf: the leaf's number.
    picks: the entries of the leaf that the equation gets; empty for a whole leaf.
    loop: the number of the loop in which the equation is, or None.
    is_upstream: whether the data were computed with the leaf.
  """

  leaf: int
  picks: frozenset[_axis_map.Pick]
  loop: int | None
  is_upstream: bool


def find_indexed(
  meetings: Sequence[Meeting],
  shapes: Sequence[tuple[int, ...]],
  shared_by: Sequence[frozenset[int]],
) -> list[LayerScan]:
  """Returns the layers of leaves whose entries meet data one by one, taken by an index.

  Leaves are of the same layers if the program takes their entries in the same loop, or if it takes
  entry i of all of them before entry i + 1 of any. Entries that all get the same data, such as
  experts, don't count as layers. `shapes` has the shape of each leaf, and `shared_by` has the
  leaves that all iterations of a loop use.
  """
  of_leaf: dict[int, dict[int, Meeting]] = {}
  for place, meeting in enumerate(meetings):
    of_leaf.setdefault(meeting.leaf, {})[place] = meeting
  # By length, direction and loop: for each group of leaves, their axes, and for each layer the
  # range of places at which it is taken.
  found: dict[tuple[int, bool, int | None], list[tuple[dict[int, int], list[range]]]] = {}
  in_a_row = set()
  for leaf, rows in of_leaf.items():
    order = _layers_in_order(rows, shapes[leaf])
    if order is None:
      continue
    axis, reverse, places = order
    loops = {meeting.loop for meeting in rows.values()}
    loop = loops.pop() if len(places) < shapes[leaf][axis] else None
    if loop is not None or all(meeting.is_upstream for meeting in [*rows.values()][1:]):
      in_a_row.add(leaf)
    spans = [range(place, place + 1) for place in places]
    groups = found.setdefault((shapes[leaf][axis], reverse, loop), [])
    for axes, known in groups:
      pairs = zip(spans, known, strict=True)
      joined = [range(min(a.start, b.start), max(a.stop, b.stop)) for a, b in pairs]
      if all(a.stop <= b.start for a, b in itertools.pairwise(joined)):
        axes[leaf], known[:] = axis, joined
        break
    else:
      groups.append(({leaf: axis}, spans))
  return [
    LayerScan(
      tuple(sorted(axes.items())),
      (frozenset() if loop is None else shared_by[loop]).difference(axes),
      length,
      reverse,
    )
    for (length, reverse, loop), groups in found.items()
    for axes, _ in groups
    if not in_a_row.isdisjoint(axes)
  ]


def _layers_in_order(
  rows: Mapping[int, Meeting], shape: tuple[int, ...]
) -> tuple[int, bool, list[int]] | None:
  """Returns the axis of a leaf's layers, whether the last comes first, and where each is taken.

  `rows` are the meetings of the leaf by their places. Returns None if the leaf meets data
  otherwise than layer by layer.
  """
  if len({meeting.loop for meeting in rows.values()}) > 1:
    return None
  for axis, length in enumerate(shape):
    taken: dict[tuple[int, ...], int] = {}
    for place, meeting in rows.items():
      along = sorted(
        pick.indices or () for pick in meeting.picks if (pick.axis, pick.entries) == (axis, length)
      )
      if () in along or not along:
        break
      for indices in along:
        taken.setdefault(indices, place)
    else:
      # A loop may take several entries in an iteration.
      if len(set(map(len, taken))) != 1:
        continue
      order = [index for column in zip(*taken, strict=True) for index in column]
      reverse = order[0] > 0
      if order[:: -1 if reverse else 1] == list(range(length)):
        return axis, reverse, list(taken.values())
  return None

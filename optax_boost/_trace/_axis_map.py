"""Axis maps: which axes of a leaf (an array of the params) run along which dimensions of a value.

A reshape may split an axis of a leaf into *sub-axes*, and merge sub-axes into one dimension. So an
axis map holds a tuple of sub-axes for each dimension of a value, written ``axis:size`` here:

  kernel                [8, 12]      dims ((0:8,), (1:12,))
  kernel.reshape(8,3,4) [8, 3, 4]    dims ((0:8,), (1:3,), (1:4,))
  ... .reshape(24, 4)   [24, 4]      dims ((0:8, 1:3), (1:4,))
"""

from collections.abc import Iterable, Mapping, Sequence
import math
from typing import NamedTuple, TypeAlias

NO_AXIS = -1


class SubAxis(NamedTuple):
  """One factor of a dimension's size: a part of axis `axis` of a leaf.

  `axis` is `NO_AXIS` if no axis of the leaf runs along this part of the dimension.
  """

  axis: int
  size: int


# The sub-axes along a dimension, the outermost first. Their sizes multiply to the dimension's size,
# but along the dimension that `AxisMap.stack` adds, the tuple is empty.
Dimension: TypeAlias = tuple[SubAxis, ...]


class Pick(NamedTuple):
  """An axis of a leaf along which the program took one entry.

  Attributes:
    axis: the axis.
    number: the entry's index among `entries`; None if the program counts, as in a loop or a scan.
  """

  axis: int
  number: int | None = None
  entries: int = 0


class AxisMap(NamedTuple):
  """The axes of a leaf along the dimensions of a value.

  Attributes:
    leaf: the leaf's index in ``jax.tree.leaves(params)``.
    dims: for each dimension of the value, the sub-axes along it.
    picks: the entries that a scan, or an index in the program, took of the leaf.
    gathered: the axes along which data chose one slice of the leaf.
    contracted: the axes that a product with other params, or with constants, has summed over.
    has_inputs: whether the leaf was the kernel in such a product. If so, `contracted` is the fan-in
      of the leaf.
  """

  leaf: int
  dims: tuple[Dimension, ...]
  picks: frozenset[Pick] = frozenset()
  gathered: frozenset[int] = frozenset()
  contracted: frozenset[int] = frozenset()
  has_inputs: bool = False

  def axes(self, dims: Iterable[int] | None = None) -> frozenset[int]:
    """Returns the leaf's axes that run along the dimensions `dims` (None: all dimensions)."""
    chosen = self.dims if dims is None else [self.dims[i] for i in dims]
    return frozenset(part.axis for dim in chosen for part in dim if part.axis != NO_AXIS)

  @property
  def sliced(self) -> frozenset[int]:
    """Returns the axes along which the value holds one entry, or entries joined from several."""
    return frozenset(pick.axis for pick in self.picks)

  def is_part_of(self, other: "AxisMap") -> bool:
    """Returns whether this map tells only a part of what `other` tells of the same leaf.

    So it is in a value that combines a kernel with a norm, a mean or an entry of itself: some of
    the axes run along no dimension of the norm.
    """
    mine, theirs = (m.axes() | m.sliced | m.gathered for m in (self, other))
    return (
      self.leaf == other.leaf
      and (self.dims != other.dims or mine != theirs)
      and mine <= theirs
      and all(
        dim == whole or not self.axes([i])
        for i, (dim, whole) in enumerate(zip(self.dims, other.dims, strict=True))
      )
    )

  def first_slice(self) -> "AxisMap":
    """Returns the map of one slice along the first dimension, which a step of a scan gets."""
    return self.slice_along([0], by_data=False)._replace(dims=self.dims[1:])

  def stack(self) -> "AxisMap":
    """Returns the map of a scan's output, which stacks values along a new first dimension."""
    return self._replace(dims=((), *self.dims))

  def slice_along(self, dims: Iterable[int], by_data: bool) -> "AxisMap":
    """Returns a copy whose `gathered` (if `by_data`) or `picks` includes the axes along `dims`."""
    axes = self.axes(dims)
    if by_data:
      return self._replace(gathered=self.gathered | axes)
    return self._replace(picks=self.picks | set(map(Pick, axes)))

  def with_numbers(self, before: "AxisMap", numbers: Mapping[int, int]) -> "AxisMap":
    """Returns a copy in which the picks that `before` lacks have numbers.

    `before` is the map before an entry was taken along its dimensions. `numbers` has the numbers of
    the entry along these dimensions, if they are known.
    """
    taken = {
      Pick(dim[0].axis, numbers[i], size_of(dim))
      for i, dim in enumerate(before.dims)
      if i in numbers and len(dim) == 1
    }
    named = {pick for pick in taken if Pick(pick.axis) in self.picks - before.picks}
    return self._replace(picks=(self.picks - {Pick(pick.axis) for pick in named}) | named)

  def resize(self, shape: Sequence[int], by_data: bool) -> "AxisMap | None":
    """Returns the map after slicing or padding to `shape`, or None if `shape` has another rank.

    If the size of a dimension changes, the map records the leaf's axes along this dimension. If
    data chose the entries (`by_data`), these axes are added to `gathered`. Otherwise, if one entry
    is left, it is added to `picks`. The axes still run along the dimension: other entries may be
    joined to the one. A scalar is an exception: it may get a shape of any rank.
    """
    if not self.dims:
      return self._replace(dims=tuple(map(no_axis, shape)))
    if len(self.dims) != len(shape):
      return None
    dims, picks, gathered = [], set(self.picks), self.gathered
    for i, (dim, size) in enumerate(zip(self.dims, shape, strict=True)):
      if size_of(dim) != size:
        if by_data:
          gathered |= self.axes([i])
        elif size == 1:
          picks |= set(map(Pick, self.axes([i])))
        axis = dim[0].axis if len(dim) == 1 else NO_AXIS
        dim = (SubAxis(axis, size),)
      dims.append(dim)
    return self._replace(dims=tuple(dims), picks=frozenset(picks), gathered=gathered)

  def reshape(self, order: Sequence[int], shape: Sequence[int]) -> "AxisMap | None":
    """Returns the map after a transpose by the permutation `order` and a reshape to `shape`.

    Returns None if the sizes don't divide evenly, as in a reshape from [6, 4] to [4, 6].
    """
    dims = _split_and_merge([part for i in order for part in self.dims[i]], shape)
    return None if dims is None else self._replace(dims=dims)


def identity(leaf: int, shape: Sequence[int]) -> AxisMap:
  """Returns the map of the leaf itself: axis i runs along dimension i."""
  return AxisMap(leaf, tuple((SubAxis(axis, size),) for axis, size in enumerate(shape)))


def without_mixed(maps: Sequence[AxisMap]) -> list[AxisMap]:
  """Returns the maps of values that an equation combines entry by entry.

  If it combines two entries of a leaf, as the real and the imaginary part of a kernel, the picks of
  these entries are dropped: the leaf holds no layers along their axis.
  """
  entries: dict[tuple[int, tuple[Dimension, ...], frozenset[int]], list[frozenset[Pick]]] = {}
  for m in maps:
    entries.setdefault((m.leaf, m.dims, m.sliced), []).append(m.picks)
  return [
    m._replace(picks=frozenset.intersection(*entries[m.leaf, m.dims, m.sliced])) for m in maps
  ]


def no_axis(size: int) -> Dimension:
  """Returns a dimension of this size along which no axis runs."""
  return (SubAxis(NO_AXIS, size),)


def is_axis(dim: Dimension, shape: Sequence[int]) -> bool:
  """Returns whether one whole axis of a leaf of this shape, and nothing else, runs along `dim`."""
  return len(dim) == 1 and dim[0].axis != NO_AXIS and dim[0].size == shape[dim[0].axis]


def size_of(dim: Dimension) -> int:
  return math.prod(part.size for part in dim)


def _split_and_merge(parts: list[SubAxis], shape: Sequence[int]) -> tuple[Dimension, ...] | None:
  """Splits and merges the sub-axes `parts`, in order; returns the dimensions of `shape`.

  Returns None if a size is 0, or if the sizes don't divide evenly, as for sub-axes of sizes 6 and 4
  in shape [4, 6].
  """
  if 0 in shape:
    return None
  remaining = parts[::-1]
  dims: list[Dimension] = []
  for size in shape:
    dim: list[SubAxis] = []
    missing = size
    while missing > 1 or (not dim and remaining and remaining[-1].size == 1):
      axis, available = remaining.pop()
      if available == 1 < missing:
        continue  # a single entry, which is not joined to others
      taken = min(available, missing)
      if available % taken or missing % taken:
        return None
      if available > taken:
        remaining.append(SubAxis(axis, available // taken))
      dim.append(SubAxis(axis, taken))
      missing //= taken
    dims.append(tuple(dim) or no_axis(size))
  return tuple(dims)

"""What one equation does with a leaf: which of its axes are fan-in, outputs or layers there."""

from collections.abc import Sequence
import enum
from typing import NamedTuple, TypeAlias

from optax_boost._foundation import _types
from optax_boost._trace import _axis_map, _primitives
from optax_boost._trace._axis_map import AxisMap

Axes: TypeAlias = frozenset[int]
_NO_AXES: Axes = frozenset()


class UseKind(enum.Enum):
  """What an equation does with a leaf."""

  LOOKUP = enum.auto()  # data chooses rows of the leaf, such as an embedding
  INPUT = enum.auto()  # the leaf was a kernel's input: a learned query, its bias, or a scale
  CONTRACTED = enum.auto()  # a product with data sums over axes of the leaf
  GENERATED = enum.auto()  # a product with an operand that is not data sums over axes of the leaf
  ENTRYWISE = enum.auto()  # the equation sums over no axis of the leaf, such as adding a bias
  UNCLEAR = enum.auto()  # anything else
  UNKNOWN = enum.auto()  # no rule tells which axes of the leaf a result of the equation holds


class Use(NamedTuple):
  """An equation that uses a leaf.

  Attributes:
    leaf: the leaf's index in ``jax.tree.leaves(params)``.
    fan_in: the leaf's axes that a product sums over.
    stacked: the leaf's axes along which the leaf holds several layers or experts.
    window: the axes of `fan_in` along which a convolution slides.
    picks: the entries that the use takes along axes of `stacked`.
    primitive: the primitive after which the trace does not tell the axes, for `UseKind.UNKNOWN`.
  """

  leaf: int
  kind: UseKind
  fan_in: Axes = _NO_AXES
  stacked: Axes = _NO_AXES
  window: Axes = _NO_AXES
  picks: frozenset[_axis_map.Pick] = frozenset()
  primitive: str = ""


def in_equation(
  equation: _types.Equation,
  operand: int,
  axis_map: AxisMap,
  product: _primitives.Product | None,
  is_data: bool = False,
) -> Use:
  """Returns how an equation uses a leaf.

  `axis_map` is the map of the leaf in the operand with the index `operand`, which is data if
  `is_data`. `product` has the roles of the dimensions if the equation is a product.
  """
  if product is not None and operand < 2:
    return _in_product(axis_map, operand, product, is_data)
  rule = _primitives.rule_of(equation)
  if rule.is_lookup and operand == 0 and not axis_map.contracted:
    moved = _primitives.move(equation, 0, axis_map, 0, by_data=True)
    return of_entries(axis_map if moved is None else moved, UseKind.LOOKUP)
  kind = UseKind.ENTRYWISE if rule.is_entrywise else UseKind.UNCLEAR
  return of_entries(axis_map, kind)


def of_entries(axis_map: AxisMap, kind: UseKind = UseKind.ENTRYWISE) -> Use:
  """Returns a use without fan-in, for an equation that sums over no axis of the leaf."""
  stacked = axis_map.sliced - axis_map.axes() if axis_map.picks else _NO_AXES
  return Use(axis_map.leaf, kind, stacked=stacked, picks=axis_map.picks)


def _in_product(
  axis_map: AxisMap, operand: int, product: _primitives.Product, is_data: bool
) -> Use:
  contracted = axis_map.axes(product.contracted[operand])
  batch = axis_map.axes(product.batch[operand])
  window = axis_map.axes(product.window) if operand == 1 else _NO_AXES
  used = {*product.contracted[operand], *product.batch[operand]}
  outputs = axis_map.axes(d for d in range(len(axis_map.dims)) if d not in used)
  if window:
    joined, is_depthwise = _joined_kernels(axis_map, product)
    batch, outputs = batch | joined, outputs - joined
    contracted = window if is_depthwise else contracted
  if contracted & (outputs | batch) or (is_data and not outputs):
    return Use(axis_map.leaf, UseKind.UNCLEAR)
  fan_in, kind = contracted, UseKind.CONTRACTED
  if not contracted:
    fan_in, kind = axis_map.contracted, UseKind.GENERATED
  elif outputs and axis_map.has_inputs:
    fan_in |= axis_map.contracted  # a product with constants resized the kernel along these axes
  if not fan_in:
    return of_entries(axis_map)
  stacked = (axis_map.sliced | axis_map.gathered | batch) - outputs - fan_in
  return Use(axis_map.leaf, kind, fan_in, stacked, window, axis_map.picks)


def kernels(maps: Sequence[AxisMap], contracted: Sequence[int]) -> list[AxisMap]:
  """Returns those axis maps of an operand, among `maps`, whose leaves may be kernels of a product.

  The product sums over the operand's dimensions `contracted`. A kernel has an axis along one of
  them, and is not a scale (see `is_scale`). If outputs of an earlier kernel run along the same
  dimension, the leaf is not a kernel, but for example a bias that was added to the outputs.
  """
  free = free_dims(maps, contracted)
  return [
    m for m in maps if not m.has_inputs and m.axes(free) and not is_scale(maps, m, contracted)
  ]


def is_scale(maps: Sequence[AxisMap], axis_map: AxisMap, contracted: Sequence[int]) -> bool:
  """Returns whether a leaf of an operand only scales the operand's other leaves, of `maps`.

  A product sums over the operand's dimensions `contracted`. Along the other dimensions, the outputs
  of the product, a scale is broadcast: another leaf has axes there, and the scale has none.
  """
  kept = [dim for dim in range(len(axis_map.dims)) if dim not in contracted]
  is_broadcast = not axis_map.contracted and not axis_map.axes(kept)
  return is_broadcast and any(m.axes(kept) for m in maps)


def free_dims(maps: Sequence[AxisMap], dims: Sequence[int]) -> list[int]:
  """Returns the dimensions among `dims` along which no outputs of a kernel run.

  A kernel has outputs if it was multiplied with an input before (`has_inputs`).
  """
  return [dim for dim in dims if not any(m.has_inputs and m.axes([dim]) for m in maps)]


def kernel_of(
  first: Sequence[AxisMap],
  second: Sequence[AxisMap],
  product: _primitives.Product,
  are_leaves: tuple[bool, bool],
  named_kernels: frozenset[int],
) -> int | None:
  """Returns which operand (0 or 1) of a product without data is a kernel; None if neither is.

  `first` and `second` are the axis maps of the operands, and `are_leaves` tells which of them are
  computed from leaves. If both may be kernels, the second is, unless only leaves of the first have
  the names of kernels: are among `named_kernels`.
  """
  have_inputs = [any(m.has_inputs for m in maps) for maps in (first, second)]
  in_first, in_second = (
    {m.leaf for m in kernels(maps, dims)}
    for maps, dims in zip((first, second), product.contracted, strict=True)
  )
  # If both operands are activations, such as queries and keys, or are the same matrix, as in a
  # penalty, neither is a kernel.
  if all(have_inputs) or in_first & in_second:
    return None
  if in_first and in_second:
    only_first = in_first & named_kernels and not in_second & named_kernels
    return 0 if only_first else 1
  kernel = 0 if in_first else 1
  # A constant that an activation is multiplied with is not an input of a kernel.
  is_mixed = have_inputs[kernel] and not are_leaves[1 - kernel]
  return None if is_mixed else kernel


def inputs_of_kernels(
  maps: Sequence[AxisMap],
  product: _primitives.Product,
  operand: int,
  named_kernels: frozenset[int],
) -> list[AxisMap]:
  """Returns those axis maps of an operand whose leaves are not kernels in a product with data.

  If only outputs of kernels run along the dimensions of the operand that the product sums over, the
  operand is an activation, and none of its leaves is a kernel of this product. The first operand of
  a convolution is one, too. In any other operand, only the scales (see `is_scale`) are not kernels.
  """
  if product.window and operand == 0:
    return list(maps)
  contracted = product.contracted[operand]
  with_inputs = [m for m in maps if m.has_inputs]
  is_product = kernels(maps, contracted) or (
    len(with_inputs) == len(maps) and free_dims(maps, contracted)
  )
  # The operand may be the sum of a kernel and a product of kernels, as in adapters.
  is_sum = any(m.leaf in named_kernels and not m.contracted and m.axes(contracted) for m in maps)
  is_activation = with_inputs and not is_product and not is_sum
  return [m for m in maps if is_activation or is_scale(maps, m, contracted)]


def _joined_kernels(axis_map: AxisMap, product: _primitives.Product) -> tuple[Axes, bool]:
  """Returns the axes of a kernel that ``vmap`` has added, and whether a convolution is depthwise.

  `axis_map` is the map of the convolution's kernel; `product` has the roles of its dimensions.
  """
  ((_, outputs),) = (source for sources in product.sources for source in sources if source[0] == 1)
  groups, joined = product.groups, set()
  # `vmap` over kernels merges the axis of the kernels into the axis of the outputs, of which it is
  # the outer part. If the kernels have separate inputs, each is a group of the convolution.
  parts = axis_map.dims[outputs]
  for part in parts[:-1]:
    joined |= {part.axis} - {_axis_map.NO_AXIS, parts[-1].axis}
    if groups % part.size == 0:
      groups //= part.size
  inputs_of_group = _axis_map.size_of(axis_map.dims[product.contracted[1][0]])
  return frozenset(joined), groups > 1 and inputs_of_group == 1

"""Where the axes of a leaf are in a value that is made of it.

A value is made of a leaf entry by entry: by casts, transposes, reshapes, slices, sums with
constants. Its dimensions then hold axes of the leaf, or factors of them, for a reshape may split an
axis and merge others.
"""

from collections.abc import Iterable
from collections.abc import Sequence
import math
from typing import Any
from typing import NamedTuple

NO_AXIS = -1
# Primitives that change where entries are placed, or when they are computed.
_PLACING = ("all_gather", "pbroadcast", "ppermute", "pvary", "reshard", "sharding_constraint")
_SUMS = ("add", "add_any", "div", "max", "min", "mul", "neg", "rem", "sub")
_CHOICES = ("clamp", "select_n")
_CASTS = ("convert_element_type", "copy", "copy_p", "reduce_precision", "stop_gradient")
_FUNCTIONS = (
  *("abs", "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil", "cos"),
  *("cosh", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "integer_pow", "lgamma"),
  *("log", "log1p", "logistic", "pow", "round", "rsqrt", "sign", "sin", "sinh", "sqrt", "square"),
  *("tan", "tanh"),
)
_COMPARISONS = ("and", "eq", "ge", "gt", "is_finite", "le", "lt", "ne", "not", "or", "xor")
_COLLECTIVES = ("pmax", "pmin", "psum", "psum2", "psum_invariant")
# Primitives that compute each entry from the entries in its place, or from scalars.
POINTWISE = (*_SUMS, *_CHOICES, *_CASTS, *_FUNCTIONS, *_COMPARISONS)
ENTRYWISE = frozenset((*POINTWISE, *_PLACING, *_COLLECTIVES, "rev"))
# Primitives whose result holds some entries of an operand, or an operand among others.
_PARTS = frozenset(("concatenate", "dynamic_slice", "pad", "slice", "split"))
LOOKUPS = frozenset(("dynamic_slice", "gather"))


class Factor(NamedTuple):
  """Entries along a dimension that are entries along one axis of a leaf, or along none."""

  axis: int
  size: int


Dimension = tuple[Factor, ...]  # outermost first; the product of the sizes is the dimension's


class View(NamedTuple):
  """A value made of one leaf."""

  leaf: int
  dims: tuple[Dimension, ...]
  stacked: frozenset[int] = frozenset()  # axes along which it is one of many slices
  looked_up: frozenset[int] = frozenset()  # axes along which data chose its entries
  inner: frozenset[int] = frozenset()  # axes that were contracted with other params

  def axes(self, dims: Iterable[int] | None = None) -> frozenset[int]:
    """The leaf's axes in some dimensions, or in all."""
    chosen = self.dims if dims is None else [self.dims[i] for i in dims]
    return frozenset(f.axis for dim in chosen for f in dim if f.axis != NO_AXIS)


def whole(leaf: int, shape: Sequence[int]) -> View:
  """A leaf as it enters a program."""
  return View(leaf, tuple((Factor(axis, size),) for axis, size in enumerate(shape)))


def slice_first(view: View) -> View:
  """A view of one entry along the first dimension, as a scan takes it."""
  return view._replace(dims=view.dims[1:], stacked=view.stacked | view.axes([0]))


def stack_first(view: View) -> View:
  """A view of which a scan stacks several."""
  return view._replace(dims=((), *view.dims))


def is_axis(dim: Dimension, shape: Sequence[int]) -> bool:
  """Whether a dimension is one whole axis of a leaf of a shape."""
  return len(dim) == 1 and dim[0].axis != NO_AXIS and dim[0].size == shape[dim[0].axis]


def keeps_entries(equation: Any) -> bool:
  """Whether an equation combines or places entries, each on its own."""
  name = equation.primitive.name
  return name in ENTRYWISE or name in _PARTS or name.startswith(("dynamic_update", "scatter"))


def follow(
  equation: Any, operand: int, view: View, result: int, by_data: bool = False
) -> View | None:
  """A view of an operand in a result of an equation, or None where its entries are not there.

  `by_data` tells whether data chooses the entries of a slice.
  """
  name, settings = equation.primitive.name, equation.params
  shape = equation.outvars[result].aval.shape
  if (product := contraction(equation)) is not None:
    return _contract(product, operand, view, shape) if operand < 2 else None
  if name == "gather":
    return _gathered(view, settings, shape, by_data) if operand == 0 else None
  if name in ENTRYWISE or name in _PARTS:
    return _resized(view, shape, by_data) if name != "dynamic_slice" or operand == 0 else None
  if name == "transpose":
    return view._replace(dims=tuple(view.dims[i] for i in settings["permutation"]))
  if name == "reshape":
    dims = [view.dims[i] for i in settings["dimensions"] or range(len(view.dims))]
    regrouped = _regrouped([f for dim in dims for f in dim], shape)
    return None if regrouped is None else view._replace(dims=regrouped)
  if name == "broadcast_in_dim":
    places = {out: i for i, out in enumerate(settings["broadcast_dimensions"])}
    old = equation.invars[operand].aval.shape
    kept = {out: view.dims[i] for out, i in places.items() if old[i] == shape[out]}
    return view._replace(dims=tuple(kept.get(i, _no_axis(n)) for i, n in enumerate(shape)))
  if name == "squeeze" or (name.startswith("reduce_") and "axes" in settings):
    gone = settings["dimensions"] if name == "squeeze" else settings["axes"]
    return view._replace(dims=tuple(dim for i, dim in enumerate(view.dims) if i not in gone))
  return None


def _no_axis(size: int) -> Dimension:
  return (Factor(NO_AXIS, size),)


def size_of(dim: Dimension) -> int:
  return math.prod(f.size for f in dim)


def _resized(view: View, shape: Sequence[int], by_data: bool) -> View | None:
  """A view of a part of it, or with others around it; where it is one entry, it is a slice."""
  if not view.dims:
    return view._replace(dims=tuple(map(_no_axis, shape)))
  if len(view.dims) != len(shape):
    return None
  dims, chosen = [], []
  for i, (dim, size) in enumerate(zip(view.dims, shape, strict=True)):
    if size_of(dim) != size:
      if by_data or size == 1:
        chosen.append(i)
      axis = dim[0].axis if len(dim) == 1 and size != 1 else NO_AXIS
      dim = (Factor(axis, size),)
    dims.append(dim)
  return _chosen(view, chosen, by_data)._replace(dims=tuple(dims))


def _chosen(view: View, dims: Iterable[int], by_data: bool) -> View:
  """A view after some entries were chosen along dimensions."""
  axes = view.axes(dims)
  if by_data:
    return view._replace(looked_up=view.looked_up | axes)
  return view._replace(stacked=view.stacked | axes)


def _gathered(view: View, settings: Any, shape: Sequence[int], by_data: bool) -> View:
  """A view of what a ``gather`` takes of it."""
  numbers, sizes = settings["dimension_numbers"], settings["slice_sizes"]
  batched = numbers.operand_batching_dims
  gone = {*numbers.collapsed_slice_dims, *batched}
  kept = [i for i in range(len(view.dims)) if i not in gone]
  part = [
    i for i in range(len(view.dims)) if i not in batched and sizes[i] != size_of(view.dims[i])
  ]
  dims = list(map(_no_axis, shape))
  for out, i in zip(numbers.offset_dims, kept, strict=True):
    dims[out] = view.dims[i] if i not in part else _no_axis(shape[out])
  stacked = view.stacked | view.axes(batched)
  return _chosen(view._replace(stacked=stacked), part, by_data)._replace(dims=tuple(dims))


def _regrouped(factors: list[Factor], shape: Sequence[int]) -> tuple[Dimension, ...] | None:
  """Factors in the dimensions of another shape; None where one is split unevenly."""
  if 0 in shape:
    return None
  rest = factors[::-1]
  dims: list[Dimension] = []
  for size in shape:
    dim: list[Factor] = []
    lacking = size
    while lacking > 1 or (not dim and rest and rest[-1].size == 1):
      axis, own = rest.pop()
      part = min(own, lacking)
      if own % part or lacking % part:
        return None
      if own > part:
        rest.append(Factor(axis, own // part))
      dim.append(Factor(axis, part))
      lacking //= part
    dims.append(tuple(dim) or _no_axis(size))
  if dims:
    dims[-1] += tuple(rest[::-1])
  return tuple(dims)


class Contraction(NamedTuple):
  """Dimensions of the two operands of a product that sums over some of them."""

  contracted: tuple[tuple[int, ...], tuple[int, ...]]  # of each operand
  batch: tuple[tuple[int, ...], tuple[int, ...]]
  sources: tuple[tuple[tuple[int, int], ...], ...]  # operand and dimension, of each result's
  window: tuple[int, ...] = ()  # of the second operand, along which a convolution slides
  groups: int = 1  # of outputs of a convolution, each of which sees inputs of its own


def contraction(equation: Any) -> Contraction | None:
  """The dimensions of a matrix product or a convolution; None for other equations."""
  name, settings = equation.primitive.name, equation.params
  if name == "conv_general_dilated":
    numbers = settings["dimension_numbers"]
    (rows, inputs, *_), (outputs, features, *window) = numbers.lhs_spec, numbers.rhs_spec
    places = {numbers.out_spec[0]: ((0, rows),), numbers.out_spec[1]: ((1, outputs),)}
    sources = tuple(places.get(i, ()) for i in range(len(numbers.out_spec)))
    contracted = ((inputs,), (features, *window))
    groups = settings["feature_group_count"]
    return Contraction(contracted, ((), ()), sources, tuple(window), groups)
  looped: tuple[int, ...] = ()
  if name == "dot_general":
    contracted, batch = settings["dimension_numbers"]
  elif name in ("ragged_dot", "ragged_dot_general"):
    numbers = settings["ragged_dot_dimension_numbers"]
    contracted, batch = numbers.dot_dimension_numbers
    looped = tuple(numbers.rhs_group_dimensions)
  else:
    return None
  pairs = list(zip(*batch, strict=True))
  used = [{*contracted[0], *batch[0]}, {*contracted[1], *batch[1], *looped}]
  free = [
    ((i, d),) for i in range(2) for d in range(equation.invars[i].aval.ndim) if d not in used[i]
  ]
  return Contraction(
    (tuple(contracted[0]), tuple(contracted[1])),
    (tuple(batch[0]), (*batch[1], *looped)),
    (*(((0, a), (1, b)) for a, b in pairs), *free),
  )


def _contract(product: Contraction, operand: int, view: View, shape: Sequence[int]) -> View:
  """A view of an operand in its product with other params or constants."""
  dims = list(map(_no_axis, shape))
  for out, sources in enumerate(product.sources):
    for source, dim in sources:
      if source == operand:
        dims[out] = view.dims[dim]
  inner = view.inner | view.axes(product.contracted[operand])
  return view._replace(dims=tuple(dims), inner=inner)

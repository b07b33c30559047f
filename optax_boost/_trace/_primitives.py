"""The primitives that the analyses know: a table with one :class:`Rule` for each primitive.

A new primitive of JAX gets the rule of a similar primitive in :data:`RULES`, such as
``POINTWISE``, or a new rule. Primitives that hold a program (``scan``, ``cond``, ``jit``, ...) need
no entry, since ``_jaxpr.Interpreter`` enters them.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from optax_boost._foundation import _types
from optax_boost._trace import _axis_map
from optax_boost._trace._axis_map import AxisMap


class Product(NamedTuple):
  """The roles of the dimensions of a product's two operands.

  Attributes:
    contracted: for each operand, the dimensions that are summed over.
    batch: for each operand, the dimensions along which each slice is multiplied with one slice of
      the other operand.
    sources: for each dimension of the result, pairs (operand, dimension of the operand along it).
    window: the dimensions of the second operand along which a convolution slides.
    groups: the number of groups of a convolution's outputs; each group has separate inputs.
  """

  contracted: tuple[tuple[int, ...], tuple[int, ...]]
  batch: tuple[tuple[int, ...], tuple[int, ...]]
  sources: tuple[tuple[tuple[int, int], ...], ...]
  window: tuple[int, ...] = ()
  groups: int = 1


# Some dimensions of the first operand of a product, and some of the second.
_Dims: TypeAlias = tuple[Sequence[int], Sequence[int]]


class Rule(NamedTuple):
  """How a primitive carries the axes of leaves from its operands to its results.

  Attributes:
    move: ``move(equation, operand, axis_map, shape, by_data)`` makes the axis map of a result with
      this shape from the map of an operand, or returns None if the result does not hold the
      operand's entries. `by_data` tells whether data chose the indices of a lookup. `move` is None
      for primitives that are not in the table.
    is_entrywise: whether each entry of an operand goes to at most one entry of a result. A leaf
      that meets data in such a primitive has no fan-in there.
    is_pointwise: whether each operand is a scalar or has the result's shape, and each entry of the
      result depends only on the operands' entries at its index.
    is_lookup: whether the operands after the first are indices into the first.
    is_identity: whether each result is the operand in the same position.
    product: ``product(equation)`` returns the roles of a product's dimensions; None for other
      primitives.
  """

  move: Callable[[_types.Equation, int, AxisMap, Sequence[int], bool], AxisMap | None] | None
  is_entrywise: bool = False
  is_pointwise: bool = False
  is_lookup: bool = False
  is_identity: bool = False
  product: Callable[[_types.Equation], Product] | None = None


def _resize(
  equation: _types.Equation, operand: int, axis_map: AxisMap, shape: Sequence[int], by_data: bool
) -> AxisMap | None:
  return axis_map.resize(shape, by_data)


def _stretch(
  equation: _types.Equation, operand: int, axis_map: AxisMap, shape: Sequence[int], by_data: bool
) -> AxisMap | None:
  sizes = equation.invars[operand].aval.shape
  if sizes == shape:
    return axis_map
  resized = axis_map.resize(shape, by_data)
  if resized is None or not sizes:
    return resized
  # If a dimension of size 1 is stretched, all its entries are equal, so no axis runs along it.
  dims = (
    _axis_map.no_axis(size) if old == 1 else dim
    for dim, old, size in zip(resized.dims, sizes, shape, strict=True)
  )
  return resized._replace(dims=tuple(dims))


def _dynamic_slice(
  equation: _types.Equation, operand: int, axis_map: AxisMap, shape: Sequence[int], by_data: bool
) -> AxisMap | None:
  return axis_map.resize(shape, by_data) if operand == 0 else None


def _gather(
  equation: _types.Equation, operand: int, axis_map: AxisMap, shape: Sequence[int], by_data: bool
) -> AxisMap | None:
  if operand != 0:
    return None
  numbers = equation.params["dimension_numbers"]
  batched = numbers.operand_batching_dims
  sizes = [
    _axis_map.size_of(dim) if d in batched else size
    for d, (dim, size) in enumerate(zip(axis_map.dims, equation.params["slice_sizes"], strict=True))
  ]
  moved = axis_map.resize(sizes, by_data)
  if moved is None:
    return None
  # Along these dimensions of the result run the dimensions of the indices.
  outs = [d for d in range(len(shape)) if d not in numbers.offset_dims]
  batch_outs = [outs[d] for d in numbers.start_indices_batching_dims]
  chosen = [d for d in outs if d not in batch_outs and shape[d] > 1]
  dims = list(map(_axis_map.no_axis, shape))
  dropped = {*numbers.collapsed_slice_dims, *batched}
  kept = [i for i in range(len(sizes)) if i not in dropped]
  for out, i in zip(numbers.offset_dims, kept, strict=True):
    dims[out] = moved.dims[i]
  if by_data:
    return moved.slice_along(batched, by_data=False)._replace(dims=tuple(dims))
  for out, i in zip(batch_outs, batched, strict=True):
    dims[out] = axis_map.dims[i]
  if chosen:
    # The program picks many rows, as of a table. So the result is a part of the leaf, not an entry.
    moved = moved._replace(picks=axis_map.picks)
    if len(chosen) == len(numbers.start_index_map) == 1:
      (dim,) = numbers.start_index_map
      axis = axis_map.dims[dim][0].axis if len(axis_map.dims[dim]) == 1 else _axis_map.NO_AXIS
      dims[chosen[0]] = (_axis_map.SubAxis(axis, shape[chosen[0]]),)
  return moved._replace(dims=tuple(dims))


def _transpose(
  equation: _types.Equation, operand: int, axis_map: AxisMap, shape: Sequence[int], by_data: bool
) -> AxisMap:
  order = equation.params["permutation"]
  return axis_map._replace(dims=tuple(axis_map.dims[i] for i in order))


def _reshape(
  equation: _types.Equation, operand: int, axis_map: AxisMap, shape: Sequence[int], by_data: bool
) -> AxisMap | None:
  return axis_map.reshape(equation.params["dimensions"] or range(len(axis_map.dims)), shape)


def _broadcast(
  equation: _types.Equation, operand: int, axis_map: AxisMap, shape: Sequence[int], by_data: bool
) -> AxisMap:
  sizes = equation.invars[operand].aval.shape
  dims = list(map(_axis_map.no_axis, shape))
  for i, out in enumerate(equation.params["broadcast_dimensions"]):
    if sizes[i] == shape[out]:
      dims[out] = axis_map.dims[i]
  return axis_map._replace(dims=tuple(dims))


def _drop(dimensions: str) -> Callable[..., AxisMap]:
  """Returns a `move` that drops the dimensions that the equation's parameter `dimensions` lists."""

  def move(
    equation: _types.Equation, operand: int, axis_map: AxisMap, shape: Sequence[int], by_data: bool
  ) -> AxisMap:
    dropped = equation.params[dimensions]
    kept = tuple(dim for i, dim in enumerate(axis_map.dims) if i not in dropped)
    return axis_map._replace(dims=kept)

  return move


def _unstack(
  equation: _types.Equation, operand: int, axis_map: AxisMap, shape: Sequence[int], by_data: bool
) -> AxisMap:
  axis = equation.params["axis"]
  kept = (*axis_map.dims[:axis], *axis_map.dims[axis + 1 :])
  return axis_map.slice_along([axis], by_data=False)._replace(dims=kept)


def _stack(
  equation: _types.Equation, operand: int, axis_map: AxisMap, shape: Sequence[int], by_data: bool
) -> AxisMap:
  axis = equation.params["axis"]
  dims = (*axis_map.dims[:axis], _axis_map.no_axis(shape[axis]), *axis_map.dims[axis:])
  return axis_map._replace(dims=dims)


def _update(update: int) -> Rule:
  """Returns the rule of a primitive whose operand number `update` changes entries of operand 0.

  The result holds both operands' entries, if an update has as many dimensions as operand 0.
  """

  def move(
    equation: _types.Equation, operand: int, axis_map: AxisMap, shape: Sequence[int], by_data: bool
  ) -> AxisMap | None:
    return axis_map.resize(shape, by_data=False) if operand in (0, update) else None

  return Rule(move, is_entrywise=True)


def _dot_general(equation: _types.Equation) -> Product:
  contracted, batch = equation.params["dimension_numbers"]
  return _matrix_product(equation, contracted, batch)


def _ragged_dot(equation: _types.Equation) -> Product:
  numbers = equation.params["ragged_dot_dimension_numbers"]
  contracted, batch = numbers.dot_dimension_numbers
  return _matrix_product(equation, contracted, batch, tuple(numbers.rhs_group_dimensions))


def _matrix_product(
  equation: _types.Equation, contracted: _Dims, batch: _Dims, group_dims: tuple[int, ...] = ()
) -> Product:
  """Returns the roles of the dimensions of a matrix product.

  `group_dims` are the dimensions of operand 1 along which each group of rows of operand 0 has a
  separate kernel (``ragged_dot``).
  """
  pairs = list(zip(*batch, strict=True))
  used = [{*contracted[0], *batch[0]}, {*contracted[1], *batch[1], *group_dims}]
  free = [
    ((i, d),) for i in range(2) for d in range(equation.invars[i].aval.ndim) if d not in used[i]
  ]
  return Product(
    (tuple(contracted[0]), tuple(contracted[1])),
    (tuple(batch[0]), (*batch[1], *group_dims)),
    (*(((0, a), (1, b)) for a, b in pairs), *free),
  )


def _convolution(equation: _types.Equation) -> Product:
  numbers = equation.params["dimension_numbers"]
  rows, inputs, *_ = numbers.lhs_spec
  outputs, features, *window = numbers.rhs_spec
  sources = {numbers.out_spec[0]: ((0, rows),), numbers.out_spec[1]: ((1, outputs),)}
  return Product(
    contracted=((inputs,), (features, *window)),
    batch=((), ()),
    sources=tuple(sources.get(i, ()) for i in range(len(numbers.out_spec))),
    window=tuple(window),
    groups=equation.params["feature_group_count"],
  )


def _product_rule(product: Callable[[_types.Equation], Product]) -> Rule:
  def move(
    equation: _types.Equation, operand: int, axis_map: AxisMap, shape: Sequence[int], by_data: bool
  ) -> AxisMap | None:
    if operand > 1:
      return None
    dimensions = product(equation)
    dims = list(map(_axis_map.no_axis, shape))
    for out, sources in enumerate(dimensions.sources):
      for source, dim in sources:
        if source == operand:
          dims[out] = axis_map.dims[dim]
    contracted = axis_map.contracted | axis_map.axes(dimensions.contracted[operand])
    return axis_map._replace(dims=tuple(dims), contracted=contracted)

  return Rule(move, product=product)


# Each entry of a result is computed from the operands' entries at its index, and from scalars.
POINTWISE = Rule(_stretch, is_entrywise=True, is_pointwise=True)
# The primitive moves entries to other indices or devices, or combines entries of several devices.
# `cumsum`, which mixes entries along an axis, is not entrywise and has no rule, so the axes of
# leaves that enter it are unknown.
ENTRYWISE = Rule(_resize, is_entrywise=True)
# Each result equals an operand; the primitive is a hint to the compiler.
IDENTITY = Rule(_resize, is_entrywise=True, is_identity=True)
# A result holds some entries of one operand, or all entries of several operands.
PART = Rule(_resize, is_entrywise=True)
REDUCTION = Rule(_drop("axes"))

RULES: dict[str, Rule] = {
  **dict.fromkeys(
    (
      *("add", "add_any", "div", "max", "min", "mul", "mulhi", "neg", "reciprocal", "rem", "sub"),
      *("clamp", "select_n"),
    ),
    POINTWISE,
  ),
  **dict.fromkeys(
    (
      *("convert_element_type", "copy", "copy_p", "name", "reduce_precision", "stop_gradient"),
      *("bitcast_convert_type", "complex", "conj", "imag", "real", "nextafter"),
    ),
    POINTWISE,
  ),
  **dict.fromkeys(
    (
      *("abs", "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil", "cos"),
      *("cosh", "exp", "exp2", "expm1", "floor", "integer_pow", "log", "log1p", "log2", "logistic"),
      *("one_minus_square", "polynomial", "pow", "round", "rsqrt", "sign", "sin", "sinh", "sqrt"),
      *("square", "tan", "tanh"),
    ),
    POINTWISE,
  ),
  **dict.fromkeys(
    (
      *("bessel_i0e", "bessel_i1e", "digamma", "erf", "erf_inv", "erfc", "igamma"),
      *("igamma_grad_a", "igammac", "lgamma", "polygamma", "random_gamma_grad"),
      *("regularized_incomplete_beta", "zeta"),
    ),
    POINTWISE,
  ),
  **dict.fromkeys(
    (
      *("and", "clz", "eq", "ge", "gt", "is_finite", "le", "lt", "ne", "not", "or", "xor"),
      *("eq_to", "le_to", "lt_to", "population_count"),
      *("shift_left", "shift_right_arithmetic", "shift_right_logical"),
    ),
    POINTWISE,
  ),
  **dict.fromkeys(
    (
      *("device_put", "layout_constraint", "optimization_barrier", "pvary", "reshard"),
      *("sharding_constraint", "reduced_vary_cast_p", "vary_unreduced_cast_p"),
    ),
    IDENTITY,
  ),
  **dict.fromkeys(
    (
      *("all_gather", "all_gather_invariant", "all_gather_reduced", "pbroadcast", "ppermute"),
      *("reduce_scatter", "unreduced_psum", "unreduced_reduce_scatter"),
    ),
    ENTRYWISE,
  ),
  **dict.fromkeys(("pmax", "pmin", "psum", "psum2", "psum_invariant"), ENTRYWISE),
  "rev": ENTRYWISE,
  "tile": Rule(_stretch, is_entrywise=True),
  **dict.fromkeys(("concatenate", "pad", "slice", "split"), PART),
  "stack": Rule(_stack, is_entrywise=True),
  "unstack": Rule(_unstack, is_entrywise=True),
  "dynamic_slice": Rule(_dynamic_slice, is_entrywise=True, is_lookup=True),
  "gather": Rule(_gather, is_lookup=True),
  "dynamic_update_slice": _update(1),
  **dict.fromkeys(
    ("scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul", "scatter-sub"),
    _update(2),
  ),
  "transpose": Rule(_transpose),
  "reshape": Rule(_reshape),
  "broadcast_in_dim": Rule(_broadcast),
  "squeeze": Rule(_drop("dimensions")),
  **dict.fromkeys(
    ("reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod", "reduce_sum"), REDUCTION
  ),
  "reduce_xor": REDUCTION,
  "dot_general": _product_rule(_dot_general),
  **dict.fromkeys(("ragged_dot", "ragged_dot_general"), _product_rule(_ragged_dot)),
  "conv_general_dilated": _product_rule(_convolution),
}
_UNKNOWN = Rule(None)
# After these primitives, a kernel that data has scaled or masked is still a kernel.
SCALING = (
  *("mul", "div", "neg", "select_n", "convert_element_type"),
  *("broadcast_in_dim", "reshape", "squeeze", "transpose"),
)


def rule_of(equation: _types.Equation) -> Rule:
  """Returns the rule of an equation's primitive; for an unknown primitive, one without `move`."""
  return RULES.get(equation.primitive.name, _UNKNOWN)


def product_of(equation: _types.Equation) -> Product | None:
  """Returns the roles of a matrix product's or a convolution's dimensions, else None."""
  find = rule_of(equation).product
  return None if find is None else find(equation)


def move(
  equation: _types.Equation, operand: int, axis_map: AxisMap, result: int, by_data: bool = False
) -> AxisMap | None:
  """Returns the axis map of a leaf in an equation's result, made from the leaf's map in an operand.

  `axis_map` is the map in the operand; `operand` and `result` are indices. `by_data` tells whether
  data chose the indices of a lookup. Returns None if the result does not hold the operand's
  entries, or if the primitive has no rule.
  """
  moved_by = rule_of(equation).move
  if moved_by is None:
    return None
  return moved_by(equation, operand, axis_map, equation.outvars[result].aval.shape, by_data)


def axes_of_result(equation: _types.Equation, operand: int) -> tuple[int | None, ...]:
  """Returns, for each axis of an equation's result, which whole axis of an operand runs along it.

  Returns ``()`` if the result does not hold the operand's entries, or if there is no rule.
  """
  shape = equation.invars[operand].aval.shape
  moved = move(equation, operand, _axis_map.identity(0, shape), 0)
  dims = () if moved is None else moved.dims
  return tuple(dim[0].axis if _axis_map.is_axis(dim, shape) else None for dim in dims)

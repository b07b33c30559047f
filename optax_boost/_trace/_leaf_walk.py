"""Walks through the program of a loss, and notes where its leaves meet data.

A leaf *meets data* in an equation if one operand is computed from leaves alone and another from
data; the equation is a *use* of the leaf (``_uses``).

A kernel may enter a product before it meets data. If the other operand is an input of the kernel (a
table of learned queries, positions or noise), the result is an activation, and a later product with
data sums over outputs of the kernel. If the other operand is a kernel, too, as in ``x @ (a @ b)``,
the result is a kernel, and a later product with data sums over inputs of the first kernel. So the
later product tells an activation from a kernel.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from optax_boost._foundation import _types
from optax_boost._trace import _axis_map, _jaxpr, _numbers, _primitives, _uses
from optax_boost._trace._axis_map import AxisMap
from optax_boost._trace._data_kinds import DataKind
from optax_boost._trace._uses import Use, UseKind


class Value(NamedTuple):
  """The abstract value of a variable.

  Attributes:
    labels: a label for each dimension, as in an einsum. If an equation combines two values along
      a dimension of each, the two dimensions have the same label.
    data: whether the value is computed from data.
    leaves: the leaves that the value is computed from, and that have not met data.
    penalty: whether the value is a scalar that sums up params alone, as an L2 penalty.
    counted: whether the value is computed from numbers of the program alone, as a loop's counter.
    number: the value, if it is one integer that the program alone tells (``_numbers``).
    axis_maps: the axis maps of leaves that have not met data, and of kernels that data has looked
      up or scaled, such as the kernels of experts.
  """

  labels: tuple[int, ...]
  data: bool = False
  leaves: frozenset[int] = frozenset()
  penalty: bool = False
  counted: bool = False
  number: int | None = None
  axis_maps: tuple[AxisMap, ...] = ()


def _unique(axis_maps: Iterable[AxisMap]) -> tuple[AxisMap, ...]:
  """Returns each map once, without the maps that tell only a part of what another map tells.

  Maps that differ only in the indices of the entries that the program took are joined.
  """
  given = tuple(axis_maps)
  if len(given) < 2:
    return given
  found: dict[tuple[AxisMap, _uses.Axes], AxisMap] = {}
  for axis_map in given:
    key = axis_map._replace(picks=frozenset()), axis_map.sliced
    known = found.setdefault(key, axis_map)
    if known.picks != axis_map.picks:
      found[key] = known._replace(picks=known.picks | axis_map.picks)
  maps = tuple(found.values())
  if len({m.leaf for m in maps}) == len(maps):
    return maps
  return tuple(m for m in maps if not any(m.is_part_of(other) for other in maps))


class _Labels:
  """A union-find of labels: combining values along two dimensions unites the dimensions' labels."""

  def __init__(self) -> None:
    self._parents: list[int] = []

  def fresh(self) -> int:
    self._parents.append(len(self._parents))
    return self._parents[-1]

  def find(self, label: int) -> int:
    """Returns the label that stands for all labels that are united with `label`."""
    while self._parents[label] != label:
      self._parents[label] = label = self._parents[self._parents[label]]
    return label

  def unite(self, labels: Sequence[int]) -> int:
    """Unites labels, and returns the first."""
    for label in labels[1:]:
      self._parents[self.find(label)] = self.find(labels[0])
    return labels[0]


class LeafWalk(_jaxpr.Interpreter[Value]):
  """Notes where leaves meet data, by one definition of data.

  Attributes:
    uses: the uses of leaves in equations in which they meet data.
    early_uses: the uses of kernels in products without data.
    inputs: the first use of each leaf that was part of a kernel's input, or that data has looked
      up, by leaf.
    expert_uses: the uses of kernels that data has looked up or scaled.
    unknown_uses: the equations whose results have no axis map of a leaf that an operand has.
    num_meetings: the number of equations in which a leaf meets data for the first time.
  """

  def __init__(self, definition: DataKind, named_kernels: frozenset[int]) -> None:
    """Makes a walk; `named_kernels` are the leaves whose names mean a kernel."""
    self._definition, self._named_kernels = definition, named_kernels
    self.uses: list[Use] = []
    self.early_uses: list[Use] = []
    self.inputs: dict[int, Use] = {}
    self.expert_uses: list[Use] = []
    self.unknown_uses: list[Use] = []
    self.num_meetings = 0
    self._met: set[int] = set()  # the leaves that have met data
    self._labels = _Labels()
    self._axis_labels: list[tuple[int, ...]] = []  # for each leaf
    # The labels of the batch dimensions, and of the summed dimensions, in products with kernels.
    self._batch: set[int] = set()
    self._contracted: set[int] = set()
    # The results of `_aligned_dims`, by the id of the equation, operand and result.
    self._aligned: dict[tuple[int, int, int], tuple[tuple[int, int], ...]] = {}

  def leaf(self, shape: tuple[int, ...]) -> Value:
    """Returns the value of the next leaf of the params, and numbers the leaves from 0."""
    value, number = self.argument(shape, None), len(self._axis_labels)
    self._axis_labels.append(value.labels)
    axis_maps = (_axis_map.identity(number, shape),)
    return value._replace(leaves=frozenset([number]), axis_maps=axis_maps)

  def argument(self, shape: Sequence[int], kind: DataKind | None) -> Value:
    """Returns the value of another argument or a constant; it is never data if `kind` is None."""
    return Value(tuple(self._labels.fresh() for _ in shape), self._is_data(kind))

  def batch_axes(self) -> list[_uses.Axes]:
    """Returns for each leaf its axes along which each slice of the data has a separate kernel."""
    batch, contracted = (
      set(map(self._labels.find, labels)) for labels in (self._batch, self._contracted)
    )
    return [
      frozenset(
        axis for axis, label in enumerate(labels) if self._labels.find(label) in batch - contracted
      )
      for labels in self._axis_labels
    ]

  def constant(self, value: jax.typing.ArrayLike) -> Value:
    made = self.argument(np.shape(value), DataKind.CONSTANT if np.size(value) > 1 else None)
    number = None if made.data else _numbers.number_of(value)
    return made._replace(counted=True, number=number)

  def join(self, values: Sequence[Value]) -> Value:
    # The result has the labels of the first value, so that the carry of a loop reaches a fixpoint.
    labels = zip(*(v.labels for v in values), strict=True)
    return Value(
      tuple(map(self._labels.unite, labels)),
      any(v.data for v in values),
      frozenset().union(*(v.leaves for v in values)),
      any(v.penalty for v in values) and all(v.penalty or not v.leaves for v in values),
      all(v.counted for v in values),
      values[0].number if len({v.number for v in values}) == 1 else None,
      _unique(m for v in values for m in v.axis_maps),
    )

  def operation(self, equation: _types.Equation, inputs: list[Value]) -> list[Value]:
    rule = _primitives.rule_of(equation)
    if rule.is_identity:
      return inputs
    data = any(v.data for v in inputs)
    if equation.primitive.name == "random_wrap":
      # The equation makes a key from integers of the batch. Arrays drawn from the key are noise, so
      # the key counts as data only if noise does.
      data = data and self._is_data(DataKind.NOISE)
    if data:
      self._note_uses(equation, inputs)
    else:
      inputs = self._note_generated(equation, inputs)
    leaves = frozenset() if data else frozenset().union(*(v.leaves for v in inputs))
    summed = any(
      v.penalty or (v.leaves and atom.aval.size > 1 and not (rule.is_lookup or rule.is_entrywise))
      for v, atom in zip(inputs, equation.invars, strict=True)
    )
    counted = not data and not leaves and all(v.counted for v in inputs)
    number = _numbers.compute(equation, [v.number for v in inputs]) if counted else None
    values = [
      Value(
        self._result_labels(equation, inputs, result),
        data,
        leaves,
        bool(leaves) and summed and not variable.aval.shape,
        counted,
        number,
        _result_axis_maps(equation, inputs, result),
      )
      for result, variable in enumerate(equation.outvars)
    ]
    if leaves or rule.move is None:
      self._note_unknown(equation, inputs, values)
    return values

  def loop(
    self, equation: _types.Equation, body: _types.Jaxpr, inputs: list[Value], carry: slice
  ) -> list[Value]:
    arguments = [
      *inputs[: carry.start],
      *(value._replace(number=None) for value in inputs[carry]),  # may be a counter
      *map(self._slice, inputs[carry.stop :]),
    ]
    # An axis that the scan slices is known, even if nothing uses the slices.
    slices = [m for value in arguments[carry.stop :] for m in value.axis_maps]
    self.unknown_uses += [_uses.of_entries(m, UseKind.UNKNOWN) for m in slices]
    noted = (self.uses, self.early_uses, self.expert_uses, self.unknown_uses)
    lengths = list(map(len, noted))

    def run_iteration(inputs: list[Value]) -> list[Value]:
      # Drop the notes of the previous iteration, so that each use is noted once.
      for notes, length in zip(noted, lengths, strict=True):
        del notes[length:]
      return self.run(body, inputs)

    outputs = self.find_fixpoint(run_iteration, arguments, carry)
    carries = carry.stop - carry.start
    return [*outputs[:carries], *map(self._stack, outputs[carries:])]

  def _is_data(self, kind: DataKind | None) -> bool:
    return kind is not None and kind <= self._definition

  def _slice(self, value: Value) -> Value:
    """Returns the value of one slice of an array, as the body of a scan gets it."""
    axis_maps = _unique(m.first_slice() for m in value.axis_maps)
    return value._replace(axis_maps=axis_maps, labels=value.labels[1:])

  def _stack(self, value: Value) -> Value:
    """Returns the value of a scan's output, which stacks the values of the steps."""
    axis_maps = _unique(m.stack() for m in value.axis_maps)
    return value._replace(axis_maps=axis_maps, labels=(self._labels.fresh(), *value.labels))

  def _result_labels(
    self, equation: _types.Equation, inputs: list[Value], result: int
  ) -> tuple[int, ...]:
    """Returns a label for each dimension of the equation's result number `result`.

    If dimensions of operands run along a dimension of the result, their labels are united, and the
    dimension of the result gets the same label. Any other dimension, or a dimension of size 1, gets
    a new label.
    """
    shape = equation.outvars[result].aval.shape
    along: list[list[int]] = [[] for _ in shape]
    for operand, value in enumerate(inputs):
      for dim, out in self._aligned_dims(equation, operand, result):
        along[out].append(value.labels[dim])
    return tuple(
      self._labels.unite(labels) if labels and size > 1 else self._labels.fresh()
      for labels, size in zip(along, shape, strict=True)
    )

  def _aligned_dims(
    self, equation: _types.Equation, operand: int, result: int
  ) -> tuple[tuple[int, int], ...]:
    """Returns pairs: a dimension of an operand, and the dimension of a result along which it runs.

    `operand` and `result` are indices.
    """
    key = id(equation), operand, result
    if key not in self._aligned:
      shape = equation.invars[operand].aval.shape
      leaf = _axis_map.identity(0, shape)
      moved = _primitives.move(equation, operand, leaf, result, by_data=True)
      dims = moved.dims if moved is not None else ()
      self._aligned[key] = tuple(
        (dim[0].axis, out) for out, dim in enumerate(dims) if _axis_map.is_axis(dim, shape)
      )
    return self._aligned[key]

  def _note_uses(self, equation: _types.Equation, inputs: list[Value]) -> None:
    """Notes the uses of the leaves that meet data in an equation."""
    product = _primitives.product_of(equation)
    meeting: set[int] = set()
    for operand, value in enumerate(inputs):
      if value.penalty:
        continue
      meeting |= value.leaves
      inputs_of_kernels = []
      if product is not None and operand < 2 and not value.data:
        inputs_of_kernels = _uses.inputs_of_kernels(
          value.axis_maps, product, operand, self._named_kernels
        )
      for axis_map in value.axis_maps:
        if value.data:
          self._note_input(axis_map)
        use = _uses.in_equation(equation, operand, axis_map, product, value.data)
        if axis_map in inputs_of_kernels:
          kind = UseKind.ENTRYWISE if axis_map.has_inputs else UseKind.INPUT
          use = _uses.of_entries(axis_map, kind)
        elif use.kind == UseKind.CONTRACTED and product is not None:
          other = inputs[1 - operand]
          # The value holds a leaf that data has scaled, or slices that data has looked up. It is a
          # kernel if the other operand is data, too. Otherwise, it is an embedding.
          if value.data and not (other.data or product.window):
            continue
          self._note_product(product, operand, inputs)
          if value.data:
            self.expert_uses.append(use)
        if not value.data:
          self.uses.append(use)
    self.num_meetings += not meeting <= self._met
    self._met |= meeting

  def _note_generated(self, equation: _types.Equation, inputs: list[Value]) -> list[Value]:
    """Notes the use of a kernel in a product without data; returns the operands `inputs`.

    In the returned operands, `has_inputs` of the kernel's axis maps is True.
    """
    product = _primitives.product_of(equation)
    if product is None:
      return inputs
    first, second = inputs[:2]
    are_leaves = bool(first.leaves), bool(second.leaves)
    kernel = _uses.kernel_of(
      first.axis_maps, second.axis_maps, product, are_leaves, self._named_kernels
    )
    if kernel is None:
      return inputs
    value = inputs[kernel]
    kernels = _uses.kernels(value.axis_maps, product.contracted[kernel])
    uses = [_uses.in_equation(equation, kernel, m, product) for m in kernels]
    generated = [
      use._replace(kind=UseKind.GENERATED) for use in uses if use.kind == UseKind.CONTRACTED
    ]
    if generated:
      self._note_product(product, kernel, inputs)
      self.early_uses += generated
      for axis_map in inputs[1 - kernel].axis_maps:
        self._note_input(axis_map)
    # If the second operand is a constant, it may be a part of the kernel, not the kernel's input.
    if kernel == 0 and not inputs[1].leaves:
      return inputs
    maps = _unique(m._replace(has_inputs=True) if m in kernels else m for m in value.axis_maps)
    return [*inputs[:kernel], value._replace(axis_maps=maps), *inputs[kernel + 1 :]]

  def _note_unknown(
    self, equation: _types.Equation, inputs: list[Value], results: Sequence[Value]
  ) -> None:
    """Notes the leaves of whose axis maps in the operands no result of the equation has any."""
    if maps := [m for value in inputs for m in value.axis_maps]:
      kept = {m.leaf for value in results for m in value.axis_maps}
      self.unknown_uses += [
        _uses.of_entries(m, UseKind.UNKNOWN)._replace(primitive=equation.primitive.name)
        for m in maps
        if m.leaf not in kept
      ]

  def _note_input(self, axis_map: AxisMap) -> None:
    """Notes an entrywise use of a leaf, which tells the leaf's axes if no other use does."""
    self.inputs.setdefault(axis_map.leaf, _uses.of_entries(axis_map))

  def _note_product(self, product: _primitives.Product, kernel: int, inputs: list[Value]) -> None:
    """Notes the labels of a kernel's batch dimensions and of all contracted dimensions.

    `kernel` is the index of the operand that is the kernel.
    """
    self._batch |= {inputs[kernel].labels[dim] for dim in product.batch[kernel]}
    for value, dims in zip(inputs, product.contracted, strict=False):
      self._contracted |= {value.labels[dim] for dim in dims}


def _is_scaled(equation: _types.Equation, operand: int, axis_map: AxisMap) -> bool:
  """Returns whether a result is an operand's leaf, scaled or masked by other operands, or moved.

  The operand has the shape of the result, as a kernel beside a mask, or the others are equal along
  an axis of the leaf, as styles of StyleGAN are. Else, the leaf may scale activations.
  """
  if equation.primitive.name not in _primitives.SCALING or axis_map.contracted:
    return False
  shapes = [atom.aval.shape for atom in equation.invars]
  is_scaled = len(shapes) == 1 or shapes[operand] == equation.outvars[0].aval.shape
  return len(axis_map.axes()) > 1 and (
    is_scaled
    or any(size == 1 for shape in shapes for i, size in enumerate(shape) if axis_map.axes([i]))
  )


def _result_axis_maps(
  equation: _types.Equation, inputs: list[Value], result: int
) -> tuple[AxisMap, ...]:
  """Returns the axis maps of the equation's result number `result`."""
  by_data = _primitives.rule_of(equation).is_lookup and not all(v.counted for v in inputs[1:])
  # A kernel that data has looked up keeps its axis map until the kernel meets other data. A leaf
  # that data has scaled or masked keeps its map while it is only scaled.
  meets = any(v.data for v in inputs) and not by_data
  stay = _primitives.product_of(equation) is None and all(v.axis_maps or not v.data for v in inputs)
  found = []
  for operand, value in enumerate(inputs):
    for axis_map in value.axis_maps:
      is_kept = value.data and stay and axis_map.gathered
      if meets and not (is_kept or _is_scaled(equation, operand, axis_map)):
        continue
      moved = _primitives.move(equation, operand, axis_map, result, by_data)
      if moved is not None and moved.picks != axis_map.picks:
        numbers = _numbers.picked(equation, result, [v.number for v in inputs])
        moved = moved.with_numbers(axis_map, numbers)
      if moved is not None:
        found.append(moved)
  is_mixed = _primitives.rule_of(equation).is_pointwise and equation.primitive.name != "select_n"
  return _unique(_axis_map.without_mixed(found) if is_mixed and len(found) > 1 else found)

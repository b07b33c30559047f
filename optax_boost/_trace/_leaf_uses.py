"""Follows the leaves of params through a traced loss, to the equations that use them.

A *use* of a leaf is an equation in which the leaf meets data: one operand is computed from leaves
alone, another from data. A product's use tells the leaf's axes apart.

Which values are data is not certain: a generator's only input is noise, and a loss may close over
its batch. So there are several *definitions of data*, each wider than the one before:

  bit    by this definition, data are
   0     arrays of the batch
   1     these, and scalars of the batch
   2     these, and constants: arrays that the loss closes over, or that are part of the model
   3     these, and noise: what is drawn from keys
  4 - 7  as 0 - 3, and products of a kernel with arrays that are no data, as of a learned table

One run follows all definitions: whatever the analysis finds carries the set of those under which
it holds, as an integer with their bits.
"""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import enum
import functools
import operator
from typing import Any
from typing import NamedTuple
from typing import TypeAlias
from typing import TypeVar

import numpy as np

from optax_boost._trace import _axis_map
from optax_boost._trace import _jaxpr
from optax_boost._trace import _primitives
from optax_boost._trace._axis_map import AxisMap

_Key = TypeVar("_Key")
_Axes: TypeAlias = frozenset[int]
_NO_AXES: _Axes = frozenset()


class DataKind(enum.IntEnum):
  """Kinds of values that may be data, in the order in which definitions add them."""

  ARRAY = 0
  SCALAR = 1
  CONSTANT = 2
  NOISE = 3


# A set of definitions of data, as bits.
Definitions: TypeAlias = int
# The definitions without products, the narrowest first.
DEFINITIONS: tuple[Definitions, ...] = tuple(1 << kind for kind in DataKind)
_WITH_PRODUCTS: Definitions = 0b1111_0000
_ALL: Definitions = 0b1111_1111


def with_products(definition: Definitions) -> Definitions:
  """The definition that has the same kinds, and products with arrays that are no data."""
  return definition << len(DataKind)


def _definitions_with(kind: DataKind | None) -> Definitions:
  """The definitions by which a kind of values is data; no value of kind None is."""
  plain = 0 if kind is None else 0b1111 >> kind << kind
  return plain | with_products(plain)


class UseKind(enum.Enum):
  """What an equation does with a leaf."""

  CONTRACTED = enum.auto()  # a product sums over some of its axes
  GENERATED = enum.auto()  # the same, with an operand that is no data
  LOOKUP = enum.auto()  # data chooses its rows, as of an embedding
  ENTRYWISE = enum.auto()  # it keeps the entries apart, as the sum with a bias
  PENALTY = enum.auto()  # it takes a number that sums up params, as of a weight decay
  UNCLEAR = enum.auto()  # anything else


class Use(NamedTuple):
  """An equation in which a leaf meets data.

  Attributes:
    leaf: the leaf's number.
    kind: what the equation does with it.
    fan_in: the leaf's axes that the equation sums over.
    stacked: the leaf's axes along which the operand is one of several layers.
    window: the axes of the fan-in along which a convolution slides.
  """

  leaf: int
  kind: UseKind
  fan_in: _Axes = _NO_AXES
  stacked: _Axes = _NO_AXES
  window: _Axes = _NO_AXES


class LayerScan(NamedTuple):
  """A scan over layers, one after the other, that is in no other scan over layers.

  Attributes:
    axes: the leaves that it slices, by number, and the axis along which it slices them.
    shared: the leaves that all its steps use.
    length: its number of steps.
    reverse: whether it starts with the last slice.
  """

  axes: tuple[tuple[int, int], ...]
  shared: frozenset[int]
  length: int
  reverse: bool

  @property
  def axis_of(self) -> dict[int, int]:
    """The axis along which each leaf is sliced."""
    return dict(self.axes)


class Findings(NamedTuple):
  """What the analysis found under one definition of data.

  Attributes:
    uses: the uses in each equation that has some, those in penalties last.
    expert_uses: further uses, of kernels that data has looked up.
    scans: the scans over layers.
    batch_axes: for each leaf the axes along which some kernel, if not this leaf, is matched with
      data: there is one kernel for each slice of the data, as of experts and by ``vmap``.
    unknown_primitives: for each leaf the primitives without a rule that it went into, or that a
      value with an axis map of it went into.
  """

  uses: list[list[Use]]
  expert_uses: list[Use]
  scans: list[LayerScan]
  batch_axes: list[_Axes]
  unknown_primitives: list[tuple[str, ...]]


class Value(NamedTuple):
  """The abstract value of a variable; each set says under which definitions something holds.

  Attributes:
    labels: of the dimensions, as in an einsum: two have one label if values are combined along
      them.
    data: the value is computed from data.
    leaves: it is computed from this leaf, which has not met data.
    penalty: it is a number that sums up params, as a weight decay does.
    axis_maps: the axes of a leaf run like this; of leaves that have not met data, and of kernels
      that data has looked up.
  """

  labels: tuple[int, ...]
  data: Definitions = 0
  leaves: Mapping[int, Definitions] = {}
  penalty: Definitions = 0
  axis_maps: Mapping[AxisMap, Definitions] = {}

  @property
  def has_leaves(self) -> Definitions:
    """It is computed from some leaf that has not met data."""
    return _any(self.leaves.values())

  @property
  def has_axis_maps(self) -> Definitions:
    """It has some axis map."""
    return _any(self.axis_maps.values())


def _any(sets: Iterable[Definitions]) -> Definitions:
  return functools.reduce(operator.or_, sets, 0)


def _unite(
  mappings: Iterable[Mapping[_Key, Definitions]], under: Definitions = _ALL
) -> dict[_Key, Definitions]:
  """What holds in any of several mappings, under some definitions."""
  united: dict[_Key, Definitions] = {}
  for mapping in mappings:
    for key, definitions in mapping.items():
      if definitions & under:
        united[key] = united.get(key, 0) | definitions & under
  return united


class _Labels:
  """Labels of dimensions, of which some turn out to be one: values are combined along them."""

  def __init__(self) -> None:
    self._parents: list[int] = []

  def fresh(self) -> int:
    self._parents.append(len(self._parents))
    return self._parents[-1]

  def find(self, label: int) -> int:
    """The label that stands for all that are one with a label."""
    while self._parents[label] != label:
      self._parents[label] = label = self._parents[self._parents[label]]
    return label

  def unite(self, labels: Sequence[int]) -> int:
    """Makes labels one."""
    for label in labels[1:]:
      self._parents[self.find(label)] = self.find(labels[0])
    return labels[0]


class LeafUses(_jaxpr.Interpreter[Value]):
  """Notes the uses of leaves and the scans over layers; :meth:`under` returns them."""

  def __init__(self, named_kernels: frozenset[int] = frozenset()) -> None:
    """Makes an analysis.

    Args:
      named_kernels: the leaves with the name of a kernel. Of two leaves in a product without data
        the second is the kernel, unless only the first has the name of one.
    """
    self._named_kernels = named_kernels
    self._uses: list[list[tuple[Use, Definitions]]] = []  # of each equation that has some
    self._expert_uses: list[tuple[Use, Definitions]] = []
    self._scans: list[tuple[LayerScan, Definitions]] = []
    self._unknown: dict[tuple[int, str], Definitions] = {}
    self._shapes: list[tuple[int, ...]] = []  # of each leaf
    self._labels = _Labels()
    self._axis_labels: list[tuple[int, ...]] = []  # of each leaf
    # The labels along which kernels and data are matched slice by slice, and summed over.
    self._batch: dict[int, Definitions] = {}
    self._contracted: dict[int, Definitions] = {}
    # By equation, operand and result: which dimensions of the operand run along the result's.
    self._aligned: dict[tuple[int, int, int], tuple[tuple[int, int], ...]] = {}

  def leaf(self, shape: tuple[int, ...]) -> Value:
    """The next leaf, as it enters the program."""
    value, number = self.argument(shape, None), len(self._shapes)
    self._shapes.append(shape)
    self._axis_labels.append(value.labels)
    axis_maps = {_axis_map.identity(number, shape): _ALL}
    return value._replace(leaves={number: _ALL}, axis_maps=axis_maps)

  def argument(self, shape: Sequence[int], kind: DataKind | None) -> Value:
    """Another argument of the program, or a constant; None: it is data by no definition."""
    return Value(tuple(self._labels.fresh() for _ in shape), _definitions_with(kind))

  def note_result(self, loss: Value) -> None:
    """Notes the leaves that enter the loss without meeting data: in nothing but a penalty."""
    leaves = sorted(loss.leaves.items())
    self._uses.append([(Use(leaf, UseKind.PENALTY), under) for leaf, under in leaves])

  def under(self, definition: Definitions) -> Findings:
    """The findings under one definition of data."""
    uses = [[use for use, under in of_equation if under & definition] for of_equation in self._uses]
    of_experts = [use for use, under in self._expert_uses if under & definition]
    scans = [scan for scan, under in self._scans if under & definition]

    def noted(labels: dict[int, Definitions]) -> set[int]:
      return {self._labels.find(label) for label, under in labels.items() if under & definition}

    batch = noted(self._batch) - noted(self._contracted)
    batch_axes = [
      frozenset(axis for axis, label in enumerate(labels) if self._labels.find(label) in batch)
      for labels in self._axis_labels
    ]
    unknown = [
      tuple(
        name
        for (of_leaf, name), under in self._unknown.items()
        if of_leaf == leaf and under & definition
      )
      for leaf in range(len(self._shapes))
    ]
    return Findings(list(filter(None, uses)), of_experts, scans, batch_axes, unknown)

  def constant(self, value: Any) -> Value:
    return self.argument(np.shape(value), DataKind.CONSTANT if np.size(value) > 1 else None)

  def join(self, values: Sequence[Value]) -> Value:
    # The first one's labels stay, so that the carry of a loop settles.
    labels = zip(*(v.labels for v in values), strict=True)
    are_penalties = functools.reduce(
      operator.and_, (v.penalty | ~v.has_leaves & _ALL for v in values)
    )
    return Value(
      tuple(map(self._labels.unite, labels)),
      _any(v.data for v in values),
      _unite(v.leaves for v in values),
      _any(v.penalty for v in values) & are_penalties,
      _unite(v.axis_maps for v in values),
    )

  def operation(self, equation: Any, inputs: list[Value]) -> list[Value]:
    rule = _primitives.rule_of(equation)
    if rule.is_identity:
      return inputs
    data = _any(v.data for v in inputs)
    if equation.primitive.name == "random_wrap":
      # A key that the batch holds as integers: what is drawn from it is noise.
      data &= _definitions_with(DataKind.NOISE)
    if data:
      self._note_uses(equation, inputs, data)
    if not_data := _WITH_PRODUCTS & ~data:
      data |= self._note_generated(equation, inputs, not_data)
    leaves = _unite((v.leaves for v in inputs), _ALL & ~data)
    summed = _any(
      v.penalty | (v.has_leaves if atom.aval.shape else 0)
      for v, atom in zip(inputs, equation.invars, strict=True)
    )
    by_data = _any(v.data for v in inputs[1:]) if rule.is_lookup else 0
    values = [
      Value(
        self._result_labels(equation, inputs, result),
        data,
        leaves,
        0 if variable.aval.shape else _any(leaves.values()) & summed,
        _result_axis_maps(equation, inputs, result, by_data),
      )
      for result, variable in enumerate(equation.outvars)
    ]
    if not _primitives.is_known(equation):
      name = equation.primitive.name
      for axis_map, under in _unite(v.axis_maps for v in inputs).items():
        key = axis_map.leaf, name
        self._unknown[key] = self._unknown.get(key, 0) | under
    return values

  def loop(self, equation: Any, body: Any, inputs: list[Value], carry: slice) -> list[Value]:
    slices = [self._slice(value) for value in inputs[carry.stop :]]
    self._note_scan(equation, inputs, carry)
    lengths = len(self._uses), len(self._expert_uses), len(self._scans)

    def one_round(inputs: list[Value]) -> list[Value]:
      # Of the last round alone.
      del self._uses[lengths[0] :], self._expert_uses[lengths[1] :], self._scans[lengths[2] :]
      return self.run(body, inputs)

    outputs = self.settle(one_round, [*inputs[: carry.stop], *slices], carry)
    carries = carry.stop - carry.start
    return [*outputs[:carries], *map(self._stack, outputs[carries:])]

  def branches(self, branches: Sequence[Any], inputs: list[Value]) -> list[Value]:
    results = []
    noted: dict[int, Definitions] = {}
    for branch in branches:
      start = len(self._uses)
      results.append(self.run(branch, inputs))
      of_branch = self._uses[start:]
      # A leaf of two branches is used once.
      self._uses[start:] = [
        [(use, new) for use, under in uses if (new := under & ~noted.get(use.leaf, 0))]
        for uses in of_branch
      ]
      for use, under in (noted_use for uses in of_branch for noted_use in uses):
        noted[use.leaf] = noted.get(use.leaf, 0) | under
    return list(map(self.join, zip(*results, strict=True)))

  def _slice(self, value: Value) -> Value:
    """A value of which a scan takes one slice after the other."""
    axis_maps = _unite({m.first_slice(): under} for m, under in value.axis_maps.items())
    return value._replace(axis_maps=axis_maps, labels=value.labels[1:])

  def _stack(self, value: Value) -> Value:
    """A value whose copies a scan stacks."""
    axis_maps = _unite({m.stack(): under} for m, under in value.axis_maps.items())
    return value._replace(axis_maps=axis_maps, labels=(self._labels.fresh(), *value.labels))

  def _note_scan(self, equation: Any, inputs: list[Value], carry: slice) -> None:
    """Notes a scan over layers, under the definitions by which it slices leaves."""
    sliced = _unite(v.axis_maps for v in inputs[carry.stop :])
    # Without a carry, layers are computed independently.
    if not sliced or carry.stop == carry.start or not equation.params["length"]:
      return
    constant = _unite(v.axis_maps for v in inputs[: carry.start])
    scans: dict[LayerScan, Definitions] = {}
    for definition in (1 << bit for bit in range(_ALL.bit_length())):
      outer = {leaf for scan, under in self._scans if under & definition for leaf in scan.axis_of}
      axes = {
        m.leaf: m.dims[0][0].axis
        for m, under in sliced.items()
        if under & definition
        and not m.sliced
        and m.leaf not in outer
        and _axis_map.is_axis(m.dims[0], self._shapes[m.leaf])
      }
      shared = frozenset(m.leaf for m, u in constant.items() if u & definition and not m.sliced)
      if axes:
        length, reverse = equation.params["length"], equation.params["reverse"]
        scan = LayerScan(tuple(sorted(axes.items())), shared, length, reverse)
        scans[scan] = scans.get(scan, 0) | definition
    self._scans += scans.items()

  def _result_labels(self, equation: Any, inputs: list[Value], result: int) -> tuple[int, ...]:
    """The labels of a result: of the operands' dimensions that run along its own."""
    shape = equation.outvars[result].aval.shape
    along: list[list[int]] = [[] for _ in shape]
    for operand, value in enumerate(inputs):
      for dim, out in self._aligned_dims(equation, operand, result):
        along[out].append(value.labels[dim])
    return tuple(
      self._labels.unite(labels) if labels and size > 1 else self._labels.fresh()
      for labels, size in zip(along, shape, strict=True)
    )

  def _aligned_dims(self, equation: Any, operand: int, result: int) -> tuple[tuple[int, int], ...]:
    """The pairs of an operand's and a result's dimensions that run along each other."""
    key = id(equation), operand, result
    if key not in self._aligned:
      shape = equation.invars[operand].aval.shape
      moved = _primitives.move(equation, operand, _axis_map.identity(0, shape), result)
      dims = moved.dims if moved is not None else ()
      self._aligned[key] = tuple(
        (dim[0].axis, out) for out, dim in enumerate(dims) if _axis_map.is_axis(dim, shape)
      )
    return self._aligned[key]

  def _note_uses(self, equation: Any, inputs: list[Value], data: Definitions) -> None:
    """Notes the leaves that meet data in an equation, which has some by these definitions."""
    product = _primitives.product_of(equation)
    met: dict[int, Definitions] = {}  # outside of penalties
    uses: list[tuple[Use, Definitions]] = []
    for operand, value in enumerate(inputs):
      met = _unite([met, _unite([value.leaves], data & ~value.penalty)])
      for axis_map, holds in value.axis_maps.items():
        under = holds & data & ~value.penalty
        if not under:
          continue
        use = _use(equation, operand, axis_map, product)
        if use.kind == UseKind.CONTRACTED and product is not None:
          other = inputs[1 - operand]
          # An embedding and its kernel, or two embeddings, do not make the embedding a kernel.
          under &= ~(value.data & (~other.data | other.has_axis_maps))
          self._note_product(product, operand, inputs, under)
          if of_expert := under & value.data:
            self._expert_uses.append((use, of_expert))
        if under := under & ~value.data:
          uses.append((use, under))
    for leaf, under in met.items():
      if unclear := under & ~_any(told for use, told in uses if use.leaf == leaf):
        uses.append((Use(leaf, UseKind.UNCLEAR), unclear))
    # In the order of the leaves.
    uses.sort(key=lambda noted: noted[0].leaf)
    for leaf, holds in sorted(_unite((v.leaves for v in inputs), data).items()):
      if under := holds & ~met.get(leaf, 0):
        uses.append((Use(leaf, UseKind.PENALTY), under))
    if uses:
      self._uses.append(uses)

  def _note_generated(
    self, equation: Any, inputs: list[Value], not_data: Definitions
  ) -> Definitions:
    """Notes the kernel in a product without data; returns the definitions by which it is one."""
    product = _primitives.product_of(equation)
    if product is None:
      return 0
    kernel = self._kernel_of(equation, inputs, not_data)
    if kernel is None:
      return 0
    uses = []
    for axis_map, holds in inputs[kernel].axis_maps.items():
      use = _use_in_product(axis_map, kernel, product)
      if use.kind == UseKind.CONTRACTED and (under := holds & not_data):
        self._note_product(product, kernel, inputs, under)
        uses.append((use._replace(kind=UseKind.GENERATED), under))
    if uses:
      self._uses.append(uses)
    return not_data

  def _kernel_of(self, equation: Any, inputs: list[Value], not_data: Definitions) -> int | None:
    """The operand of a product without data that is a kernel, if the other can be its input."""
    # The same leaves under each of the definitions, for none of them has met data.
    first, second = (set(_unite([value.leaves], not_data)) for value in inputs[:2])
    if first and second:
      # A matrix times itself is a penalty.
      only_first = first & self._named_kernels and not second & self._named_kernels
      return None if first & second else (0 if only_first else 1)
    kernel = 0 if first else 1
    is_array = equation.invars[1 - kernel].aval.size > 1
    return kernel if (first or second) and is_array else None

  def _note_product(
    self, product: _primitives.Product, kernel: int, inputs: list[Value], under: Definitions
  ) -> None:
    """Notes the labels along which a product of a kernel and data matches and sums."""
    for dim in product.batch[kernel]:
      label = inputs[kernel].labels[dim]
      self._batch[label] = self._batch.get(label, 0) | under
    for value, dims in zip(inputs, product.contracted, strict=False):
      for label in (value.labels[dim] for dim in dims):
        self._contracted[label] = self._contracted.get(label, 0) | under


def scanned_axes(program: Any, leaves: range) -> dict[int, int]:
  """The axis along which a scan over layers slices each of some arguments of a program.

  `leaves` are the arguments' positions, by which the result counts from zero. No argument is data.
  """
  analysis = LeafUses()
  shapes = [variable.aval.shape for variable in program.jaxpr.invars]
  analysis.run(
    program,
    [
      analysis.leaf(shape) if i in leaves else analysis.argument(shape, None)
      for i, shape in enumerate(shapes)
    ],
  )
  scans = analysis.under(DEFINITIONS[DataKind.ARRAY]).scans
  return {leaf: axis for scan in scans for leaf, axis in scan.axes}


def _use(
  equation: Any, operand: int, axis_map: AxisMap, product: _primitives.Product | None
) -> Use:
  """The use of a leaf in an equation where an operand with this axis map meets data."""
  if product is not None and operand < 2:
    return _use_in_product(axis_map, operand, product)
  rule = _primitives.rule_of(equation)
  if rule.is_lookup and operand == 0:
    moved = _primitives.move(equation, 0, axis_map, 0, by_data=True)
    return Use(axis_map.leaf, UseKind.LOOKUP, stacked=_NO_AXES if moved is None else moved.sliced)
  kind = UseKind.ENTRYWISE if rule.is_entrywise else UseKind.UNCLEAR
  return Use(axis_map.leaf, kind, stacked=axis_map.sliced - axis_map.axes())


def _use_in_product(axis_map: AxisMap, operand: int, product: _primitives.Product) -> Use:
  contracted = axis_map.axes(product.contracted[operand])
  batch = axis_map.axes(product.batch[operand])
  window = axis_map.axes(product.window) if operand == 1 else _NO_AXES
  used = {*product.contracted[operand], *product.batch[operand]}
  outputs = axis_map.axes(d for d in range(len(axis_map.dims)) if d not in used)
  if window:
    joined, is_depthwise = _of_convolution(axis_map, product)
    batch, outputs = batch | joined, outputs - joined
    contracted = window if is_depthwise else contracted
  fan_in = contracted or axis_map.contracted
  if contracted & (outputs | batch) or (axis_map.gathered and not outputs):
    return Use(axis_map.leaf, UseKind.UNCLEAR)
  if not fan_in:
    stacked = axis_map.sliced - axis_map.axes()
    return Use(axis_map.leaf, UseKind.ENTRYWISE, stacked=stacked)
  stacked = (axis_map.sliced | axis_map.gathered | batch) - outputs - fan_in
  return Use(axis_map.leaf, UseKind.CONTRACTED, fan_in, stacked, window)


def _of_convolution(axis_map: AxisMap, product: _primitives.Product) -> tuple[_Axes, bool]:
  """The axes along which ``vmap`` joined kernels, and whether each of these is depthwise."""
  ((_, outputs),) = (source for sources in product.sources for source in sources if source[0] == 1)
  groups, joined = product.groups, set()
  # Kernels that `vmap` joined are the outer parts of the outputs, one group each.
  for part in axis_map.dims[outputs][:-1]:
    if groups % part.size == 0:
      groups //= part.size
      joined |= {part.axis} - {_axis_map.NO_AXIS}
  inputs_of_group = _axis_map.size_of(axis_map.dims[product.contracted[1][0]])
  return frozenset(joined), groups > 1 and inputs_of_group == 1


def _result_axis_maps(
  equation: Any, inputs: list[Value], result: int, by_data: Definitions
) -> dict[AxisMap, Definitions]:
  """The axis maps of a result: of leaves, or of kernels that data has looked up.

  `by_data` has the definitions by which data chose the result from its first operand.
  """
  maps: dict[AxisMap, Definitions] = {}
  # Kernels that data has looked up stay kernels until they meet other data.
  meets = _any(v.data for v in inputs) & ~by_data
  stays = 0
  if _primitives.product_of(equation) is None:
    stays = functools.reduce(operator.and_, (v.has_axis_maps | ~v.data for v in inputs), meets)
  for operand, value in enumerate(inputs):
    for axis_map, holds in value.axis_maps.items():
      under = holds & ~meets | holds & value.data & stays
      for moves, chosen in ((under & by_data, True), (under & ~by_data, False)):
        if moves:
          moved = _primitives.move(equation, operand, axis_map, result, chosen)
          if moved is not None:
            maps[moved] = maps.get(moved, 0) | moves
  return maps

"""Follows the leaves of params through a traced loss, to the equations that use them.

A leaf *meets data* in an equation if one operand is computed from leaves alone and another from
data; the equation is a *use* of the leaf. If the equation is a product, the use tells which axes of
the leaf are fan-in and which are outputs.

Which values are data is uncertain: a generator's only input is noise, and a loss may close over its
batch. So each run of the analysis uses one of four *definitions of data* (:class:`DataKind`).

A kernel may enter a product before it meets data. If the other operand is an input of the kernel (a
table of learned queries, positions or noise), the result is an activation, and a later product with
data sums over outputs of the kernel. If the other operand is a kernel, too, as in ``x @ (a @ b)``,
the result is a kernel, and a later product with data sums over inputs of the first kernel. So the
later product tells an activation from a kernel.
"""

from collections.abc import Iterable, Sequence
import enum
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from optax_boost._foundation import _types
from optax_boost._trace import _axis_map, _jaxpr, _primitives
from optax_boost._trace._axis_map import AxisMap

_Axes: TypeAlias = frozenset[int]
_NO_AXES: _Axes = frozenset()


class DataKind(enum.IntEnum):
  """Kinds of values that may be data; a definition of data includes a kind and all lower kinds."""

  ARRAY = 0  # arrays of the batch
  SCALAR = 1  # scalars of the batch
  CONSTANT = 2  # arrays that the loss closes over, or that are part of the model
  NOISE = 3  # arrays that are drawn from keys


def data_kind(aval: _types.ArrayType, flag: bool | None) -> DataKind | None:
  """Returns the kind of an argument of the loss, or None if the argument is never data.

  `flag` is True for data, and None for constants such as a model state.
  """
  # A key in the batch counts as data only if noise does. Otherwise, adding noise to weights would
  # be a use of the weights.
  if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
    return DataKind.NOISE
  if flag is None:
    return DataKind.CONSTANT if aval.size > 1 else None
  return DataKind.ARRAY if aval.size > 1 else DataKind.SCALAR


class UseKind(enum.Enum):
  """What an equation does with a leaf."""

  LOOKUP = enum.auto()  # data chooses rows of the leaf, such as an embedding
  INPUT = enum.auto()  # the leaf was a kernel's input: a learned query, its bias, or a scale
  CONTRACTED = enum.auto()  # a product with data sums over axes of the leaf
  GENERATED = enum.auto()  # a product with an operand that is not data sums over axes of the leaf
  ENTRYWISE = enum.auto()  # the equation sums over no axis of the leaf, such as adding a bias
  PENALTY = enum.auto()  # the operand is a scalar that sums up params alone, as an L2 penalty
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
  fan_in: _Axes = _NO_AXES
  stacked: _Axes = _NO_AXES
  window: _Axes = _NO_AXES
  picks: frozenset[_axis_map.Pick] = frozenset()
  primitive: str = ""


class LayerScan(NamedTuple):
  """A scan over layers that is not inside of another scan over layers.

  Attributes:
    axes: for each leaf that the scan slices, a pair of the leaf's number and the sliced axis.
    shared: the leaves that all steps of the scan use.
    reverse: whether the scan starts with the last slice.
  """

  axes: tuple[tuple[int, int], ...]
  shared: frozenset[int]
  length: int
  reverse: bool

  @property
  def axis_of(self) -> dict[int, int]:
    """Returns `axes` as a dict from leaves to axes."""
    return dict(self.axes)


class Findings(NamedTuple):
  """The results of the analysis.

  Attributes:
    uses: for each equation in which leaves meet data, its uses of leaves; penalties come last.
    early_uses: the uses of kernels in products without data, and of leaves as inputs of kernels.
    expert_uses: the uses of kernels that data has looked up.
    batch_axes: for each leaf, the axes along which each slice of the data has a separate kernel
      (experts, ``vmap``). In a product with the kernels, such an axis is a batch dimension. Leaves
      that enter no product, such as the biases of these kernels, have such axes, too.
    unknown_uses: the equations whose results have no axis map of a leaf that an operand has.
  """

  uses: list[list[Use]]
  early_uses: list[Use]
  expert_uses: list[Use]
  scans: list[LayerScan]
  batch_axes: list[_Axes]
  unknown_uses: list[Use]


class Value(NamedTuple):
  """The abstract value of a variable.

  Attributes:
    labels: a label for each dimension, as in an einsum. If an equation combines two values along
      a dimension of each, the two dimensions have the same label.
    data: whether the value is computed from data.
    counted: whether the value is computed from numbers of the program alone, as a loop's counter.
    leaves: the leaves that the value is computed from, and that have not met data.
    penalty: whether the value is a scalar that sums up params alone, as an L2 penalty.
    axis_maps: the axis maps of leaves that have not met data, and of kernels that data has looked
      up, such as the kernels of experts.
  """

  labels: tuple[int, ...]
  data: bool = False
  counted: bool = False
  leaves: frozenset[int] = frozenset()
  penalty: bool = False
  axis_maps: tuple[AxisMap, ...] = ()


def _unique(axis_maps: Iterable[AxisMap]) -> tuple[AxisMap, ...]:
  """Returns each map once, without the maps that tell only a part of what another map tells.

  Maps that differ only in the entries that constants chose are joined.
  """
  given = tuple(axis_maps)
  if len(given) < 2:
    return given
  found: dict[tuple[AxisMap, _Axes], AxisMap] = {}
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


class LeafUses(_jaxpr.Interpreter[Value]):
  """Collects the uses of leaves and the scans over layers; :meth:`findings` returns them."""

  def __init__(
    self, definition: DataKind = DataKind.ARRAY, named_kernels: frozenset[int] = frozenset()
  ) -> None:
    """Makes an analysis by one definition of data.

    `named_kernels` are the leaves whose names mean a kernel. In a product of two leaves, the second
    leaf is the kernel, unless only the first leaf has such a name.
    """
    self._definition, self._named_kernels = definition, named_kernels
    self._uses: list[list[Use]] = []  # for each equation that has uses
    self._early_uses: list[Use] = []
    # The first use of each leaf that was part of a kernel's input, or that data has looked up.
    self._inputs: dict[int, Use] = {}
    self._expert_uses: list[Use] = []
    self._scans: list[LayerScan] = []
    self._unknown_uses: list[Use] = []
    self._shapes: list[tuple[int, ...]] = []  # for each leaf
    self._labels = _Labels()
    self._axis_labels: list[tuple[int, ...]] = []  # for each leaf
    # The labels of the batch dimensions, and of the summed dimensions, in products with kernels.
    self._batch: set[int] = set()
    self._contracted: set[int] = set()
    # The results of `_aligned_dims`, by the id of the equation, operand and result.
    self._aligned: dict[tuple[int, int, int], tuple[tuple[int, int], ...]] = {}

  def leaf(self, shape: tuple[int, ...]) -> Value:
    """Returns the value of the next leaf of the params, and numbers the leaves from 0."""
    value, number = self.argument(shape, None), len(self._shapes)
    self._shapes.append(shape)
    self._axis_labels.append(value.labels)
    axis_maps = (_axis_map.identity(number, shape),)
    return value._replace(leaves=frozenset([number]), axis_maps=axis_maps)

  def argument(self, shape: Sequence[int], kind: DataKind | None) -> Value:
    """Returns the value of another argument or a constant; it is never data if `kind` is None."""
    return Value(tuple(self._labels.fresh() for _ in shape), self._is_data(kind))

  def note_result(self, loss: Value) -> None:
    """Notes that a penalty uses the leaves that enter the loss without having met data."""
    self._uses.append([Use(leaf, UseKind.PENALTY) for leaf in sorted(loss.leaves)])

  def findings(self) -> Findings:
    batch, contracted = (
      set(map(self._labels.find, labels)) for labels in (self._batch, self._contracted)
    )
    batch_axes = [
      frozenset(
        axis for axis, label in enumerate(labels) if self._labels.find(label) in batch - contracted
      )
      for labels in self._axis_labels
    ]
    return Findings(
      list(filter(None, self._uses)),
      [*self._early_uses, *self._inputs.values()],
      self._expert_uses,
      self._scans,
      batch_axes,
      self._unknown_uses,
    )

  def constant(self, value: jax.typing.ArrayLike) -> Value:
    kind = DataKind.CONSTANT if np.size(value) > 1 else None
    return self.argument(np.shape(value), kind)._replace(counted=True)

  def join(self, values: Sequence[Value]) -> Value:
    # The result has the labels of the first value, so that the carry of a loop reaches a fixpoint.
    labels = zip(*(v.labels for v in values), strict=True)
    return Value(
      tuple(map(self._labels.unite, labels)),
      any(v.data for v in values),
      all(v.counted for v in values),
      frozenset().union(*(v.leaves for v in values)),
      any(v.penalty for v in values) and all(v.penalty or not v.leaves for v in values),
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
    by_data = rule.is_lookup and not all(v.counted for v in inputs[1:])
    values = [
      Value(
        self._result_labels(equation, inputs, result),
        data,
        counted,
        leaves,
        bool(leaves) and summed and not variable.aval.shape,
        _result_axis_maps(equation, inputs, result, by_data),
      )
      for result, variable in enumerate(equation.outvars)
    ]
    if leaves or rule.move is None:
      self._note_unknown(equation, inputs, values)
    return values

  def loop(
    self, equation: _types.Equation, body: _types.Jaxpr, inputs: list[Value], carry: slice
  ) -> list[Value]:
    slices = [self._slice(value) for value in inputs[carry.stop :]]
    self._note_scan(equation, inputs, carry)
    noted: list[list[Any]] = [self._uses, self._early_uses, self._expert_uses, self._scans]
    noted.append(self._unknown_uses)
    lengths = list(map(len, noted))

    def run_iteration(inputs: list[Value]) -> list[Value]:
      # Drop the notes of the previous iteration, so that each use is noted once.
      for notes, length in zip(noted, lengths, strict=True):
        del notes[length:]
      return self.run(body, inputs)

    outputs = self.find_fixpoint(run_iteration, [*inputs[: carry.stop], *slices], carry)
    carries = carry.stop - carry.start
    return [*outputs[:carries], *map(self._stack, outputs[carries:])]

  def branches(self, branches: Sequence[_types.Jaxpr], inputs: list[Value]) -> list[Value]:
    results = []
    noted: set[int] = set()
    for branch in branches:
      start = len(self._uses)
      results.append(self.run(branch, inputs))
      # A leaf that several branches use counts as used once in the order of uses.
      branch_uses = self._uses[start:]
      self._uses[start:] = [[use for use in uses if use.leaf not in noted] for uses in branch_uses]
      self._early_uses += [use for uses in branch_uses for use in uses if use.leaf in noted]
      noted |= {use.leaf for uses in branch_uses for use in uses}
    return list(map(self.join, zip(*results, strict=True)))

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

  def _note_scan(self, equation: _types.Equation, inputs: list[Value], carry: slice) -> None:
    """Notes a scan if it runs over layers: it has a carry, and slices leaves."""
    sliced = inputs[carry.stop :]
    # The steps of a scan without a carry are independent, so its slices are not layers in a row.
    if not sliced or carry.stop == carry.start or not equation.params["length"]:
      return
    outer = {leaf for scan in self._scans for leaf in scan.axis_of}
    axes = {
      m.leaf: m.dims[0][0].axis
      for value in sliced
      for m in value.axis_maps
      if not m.sliced and m.leaf not in outer and _axis_map.is_axis(m.dims[0], self._shapes[m.leaf])
    }
    if axes:
      constants = (m for value in inputs[: carry.start] for m in value.axis_maps)
      shared = frozenset(m.leaf for m in constants if not m.sliced)
      length, reverse = equation.params["length"], equation.params["reverse"]
      self._scans.append(LayerScan(tuple(sorted(axes.items())), shared, length, reverse))

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
    met: set[int] = set()  # outside of penalties
    uses: list[Use] = []
    for operand, value in enumerate(inputs):
      if value.penalty:
        continue
      met |= value.leaves
      inputs_of_kernels = []
      if product is not None and operand < 2 and not value.data:
        inputs_of_kernels = self._inputs_of_kernels(value, product.contracted[operand])
      for axis_map in value.axis_maps:
        if value.data:
          self._note_input(axis_map)
        use = _use(equation, operand, axis_map, product)
        if axis_map in inputs_of_kernels:
          kind = UseKind.ENTRYWISE if axis_map.has_inputs else UseKind.INPUT
          use = _use_of_entries(axis_map, kind)
        elif use.kind == UseKind.CONTRACTED and product is not None:
          other = inputs[1 - operand]
          # The value holds slices of a leaf that data has looked up. They are kernels of experts
          # if the other operand is data without axis maps. Otherwise, they may be embeddings.
          if value.data and (not other.data or other.axis_maps):
            continue
          self._note_product(product, operand, inputs)
          if value.data:
            self._expert_uses.append(use)
        if not value.data:
          uses.append(use)
    uses += [Use(leaf, UseKind.UNCLEAR) for leaf in met - {use.leaf for use in uses}]
    uses.sort(key=lambda use: use.leaf)
    in_penalties = frozenset().union(*(v.leaves for v in inputs)) - met
    uses += [Use(leaf, UseKind.PENALTY) for leaf in sorted(in_penalties)]
    if uses:
      self._uses.append(uses)

  def _note_generated(self, equation: _types.Equation, inputs: list[Value]) -> list[Value]:
    """Notes the use of a kernel in a product without data; returns the operands `inputs`.

    In the returned operands, `has_inputs` of the kernel's axis maps is True.
    """
    product = _primitives.product_of(equation)
    kernel = None if product is None else self._kernel_of(inputs, product)
    if product is None or kernel is None:
      return inputs
    value = inputs[kernel]
    kernels = _kernels(value, product.contracted[kernel])
    uses = [_use_in_product(m, kernel, product) for m in kernels]
    generated = [
      use._replace(kind=UseKind.GENERATED) for use in uses if use.kind == UseKind.CONTRACTED
    ]
    if generated:
      self._note_product(product, kernel, inputs)
      self._early_uses += generated
      for axis_map in inputs[1 - kernel].axis_maps:
        self._note_input(axis_map)
    # If the second operand is a constant, it may be a part of the kernel, not the kernel's input.
    if kernel == 0 and not inputs[1].leaves:
      return inputs
    maps = _unique(m._replace(has_inputs=True) if m in kernels else m for m in value.axis_maps)
    return [*inputs[:kernel], value._replace(axis_maps=maps), *inputs[kernel + 1 :]]

  def _kernel_of(self, inputs: list[Value], product: _primitives.Product) -> int | None:
    """Returns which operand (0 or 1) of a product without data is a kernel; None if neither is."""
    have_inputs = [any(m.has_inputs for m in value.axis_maps) for value in inputs[:2]]
    kernels = [
      {m.leaf for m in _kernels(value, dims)}
      for value, dims in zip(inputs, product.contracted, strict=False)
    ]
    first, second = kernels
    # If both operands are activations, such as queries and keys, or are the same matrix, as in a
    # penalty, neither is a kernel.
    if all(have_inputs) or first & second:
      return None
    if first and second:
      only_first = first & self._named_kernels and not second & self._named_kernels
      return 0 if only_first else 1
    kernel = 0 if first else 1
    # A constant that an activation is multiplied with is not an input of a kernel.
    is_mixed = have_inputs[kernel] and not inputs[1 - kernel].leaves
    return None if is_mixed else kernel

  def _inputs_of_kernels(self, value: Value, contracted: Sequence[int]) -> list[AxisMap]:
    """Returns the axis maps of an operand's leaves that are not kernels in a product with data.

    The product sums over the operand's dimensions `contracted`. If only outputs of kernels run
    along these dimensions, the operand is an activation, and none of its leaves is a kernel of this
    product. In any other operand, only the scales (see `_is_scale`) are not kernels.
    """
    with_inputs = [m for m in value.axis_maps if m.has_inputs]
    is_product = _kernels(value, contracted) or (
      len(with_inputs) == len(value.axis_maps) and _free(value, contracted)
    )
    # The operand may be the sum of a kernel and a product of kernels, as in adapters.
    is_sum = any(
      m.leaf in self._named_kernels and not m.contracted and m.axes(contracted)
      for m in value.axis_maps
    )
    is_activation = with_inputs and not is_product and not is_sum
    return [m for m in value.axis_maps if is_activation or _is_scale(value, m, contracted)]

  def _note_unknown(
    self, equation: _types.Equation, inputs: list[Value], results: Sequence[Value]
  ) -> None:
    """Notes the leaves of whose axis maps in the operands no result of the equation has any."""
    if maps := [m for value in inputs for m in value.axis_maps]:
      kept = {m.leaf for value in results for m in value.axis_maps}
      self._unknown_uses += [
        _use_of_entries(m, UseKind.UNKNOWN)._replace(primitive=equation.primitive.name)
        for m in maps
        if m.leaf not in kept
      ]

  def _note_input(self, axis_map: AxisMap) -> None:
    """Notes an entrywise use of a leaf, which tells the leaf's axes if no other use does."""
    self._inputs.setdefault(axis_map.leaf, _use_of_entries(axis_map))

  def _note_product(self, product: _primitives.Product, kernel: int, inputs: list[Value]) -> None:
    """Notes the labels of a kernel's batch dimensions and of all contracted dimensions.

    `kernel` is the index of the operand that is the kernel.
    """
    self._batch |= {inputs[kernel].labels[dim] for dim in product.batch[kernel]}
    for value, dims in zip(inputs, product.contracted, strict=False):
      self._contracted |= {value.labels[dim] for dim in dims}


def scanned_axes(program: _types.Jaxpr, leaves: range) -> dict[int, int]:
  """Returns along which axis a scan over layers slices each leaf, as a dict from leaves to axes.

  `leaves` is a range of indices of the program's arguments; these arguments are the leaves. Key i
  of the dict is the leaf at position i of the range, so the keys begin at 0. A leaf that no scan
  over layers slices is not in the dict.
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
  return {leaf: axis for scan in analysis.findings().scans for leaf, axis in scan.axes}


def _use(
  equation: _types.Equation, operand: int, axis_map: AxisMap, product: _primitives.Product | None
) -> Use:
  """Returns how an equation uses a leaf.

  `axis_map` is the map of the leaf in the operand with the index `operand`. `product` has the roles
  of the dimensions if the equation is a product.
  """
  if product is not None and operand < 2:
    return _use_in_product(axis_map, operand, product)
  rule = _primitives.rule_of(equation)
  if rule.is_lookup and operand == 0 and not axis_map.contracted:
    moved = _primitives.move(equation, 0, axis_map, 0, by_data=True)
    return _use_of_entries(axis_map if moved is None else moved, UseKind.LOOKUP)
  kind = UseKind.ENTRYWISE if rule.is_entrywise else UseKind.UNCLEAR
  return _use_of_entries(axis_map, kind)


def _use_of_entries(axis_map: AxisMap, kind: UseKind = UseKind.ENTRYWISE) -> Use:
  """Returns a use without fan-in, for an equation that sums over no axis of the leaf."""
  stacked = axis_map.sliced - axis_map.axes() if axis_map.picks else _NO_AXES
  return Use(axis_map.leaf, kind, stacked=stacked, picks=axis_map.picks)


def _use_in_product(axis_map: AxisMap, operand: int, product: _primitives.Product) -> Use:
  contracted = axis_map.axes(product.contracted[operand])
  batch = axis_map.axes(product.batch[operand])
  window = axis_map.axes(product.window) if operand == 1 else _NO_AXES
  used = {*product.contracted[operand], *product.batch[operand]}
  outputs = axis_map.axes(d for d in range(len(axis_map.dims)) if d not in used)
  if window:
    joined, is_depthwise = _joined_kernels(axis_map, product)
    batch, outputs = batch | joined, outputs - joined
    contracted = window if is_depthwise else contracted
  if contracted & (outputs | batch) or (axis_map.gathered and not outputs):
    return Use(axis_map.leaf, UseKind.UNCLEAR)
  fan_in, kind = contracted, UseKind.CONTRACTED
  if not contracted:
    fan_in, kind = axis_map.contracted, UseKind.GENERATED
  elif outputs and axis_map.has_inputs:
    fan_in |= axis_map.contracted  # a product with constants resized the kernel along these axes
  if not fan_in:
    return _use_of_entries(axis_map)
  stacked = (axis_map.sliced | axis_map.gathered | batch) - outputs - fan_in
  return Use(axis_map.leaf, kind, fan_in, stacked, window, axis_map.picks)


def _kernels(value: Value, contracted: Sequence[int]) -> list[AxisMap]:
  """Returns the axis maps of the leaves of an operand that may be kernels of a product.

  The product sums over the operand's dimensions `contracted`. A kernel has an axis along one of
  them, and is not a scale (see `_is_scale`). If outputs of an earlier kernel run along the same
  dimension, the leaf is not a kernel, but for example a bias that was added to the outputs.
  """
  free = _free(value, contracted)
  return [
    m
    for m in value.axis_maps
    if not m.has_inputs and m.axes(free) and not _is_scale(value, m, contracted)
  ]


def _is_scale(value: Value, axis_map: AxisMap, contracted: Sequence[int]) -> bool:
  """Returns whether a leaf of an operand only scales the operand's other leaves.

  A product sums over the operand's dimensions `contracted`. Along the other dimensions, the outputs
  of the product, a scale is broadcast: another leaf has axes there, and the scale has none.
  """
  kept = [dim for dim in range(len(axis_map.dims)) if dim not in contracted]
  is_broadcast = not axis_map.contracted and not axis_map.axes(kept)
  return is_broadcast and any(m.axes(kept) for m in value.axis_maps)


def _free(value: Value, dims: Sequence[int]) -> list[int]:
  """Returns the dimensions among `dims` along which no outputs of a kernel run.

  A kernel has outputs if it was multiplied with an input before (`has_inputs`).
  """
  return [dim for dim in dims if not any(m.has_inputs and m.axes([dim]) for m in value.axis_maps)]


def _joined_kernels(axis_map: AxisMap, product: _primitives.Product) -> tuple[_Axes, bool]:
  """Returns the axes of a kernel that ``vmap`` has added, and whether a convolution is depthwise.

  `axis_map` is the map of the convolution's kernel; `product` has the roles of its dimensions.
  """
  ((_, outputs),) = (source for sources in product.sources for source in sources if source[0] == 1)
  groups, joined = product.groups, set()
  # `vmap` over kernels merges the axis of the kernels into the axis of the outputs, of which it is
  # the outer part. Each kernel is a group of the convolution.
  for part in axis_map.dims[outputs][:-1]:
    if groups % part.size == 0:
      groups //= part.size
      joined |= {part.axis} - {_axis_map.NO_AXIS}
  inputs_of_group = _axis_map.size_of(axis_map.dims[product.contracted[1][0]])
  return frozenset(joined), groups > 1 and inputs_of_group == 1


def _result_axis_maps(
  equation: _types.Equation, inputs: list[Value], result: int, by_data: bool
) -> tuple[AxisMap, ...]:
  """Returns the axis maps of the equation's result number `result`.

  `by_data` tells whether data chose entries of operand 0.
  """
  # A kernel that data has looked up keeps its axis map until the kernel meets other data.
  meets = any(v.data for v in inputs) and not by_data
  stay = _primitives.product_of(equation) is None and all(v.axis_maps or not v.data for v in inputs)
  moved = (
    _primitives.move(equation, operand, axis_map, result, by_data)
    for operand, value in enumerate(inputs)
    if not meets or (value.data and stay)
    for axis_map in value.axis_maps
  )
  return _unique(m for m in moved if m is not None)

"""Follows the leaves of params through a traced loss, to where they meet data."""

from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import numpy as np

from optax_boost._trace import _jaxpr
from optax_boost._trace import _views

CONTRACTED, ENTRYWISE, LOOKED_UP = "contracted", "entrywise", "looked up"
UNCLEAR, PENALTY = "unclear", "penalty"
# Contracted with an input that no data went into.
GENERATED = "generated"
_Axes = frozenset[int]
_NONE: frozenset[Any] = frozenset()


class Use(NamedTuple):
  """A leaf in an equation where it meets data."""

  leaf: int
  kind: str
  fan_in: _Axes = _NONE
  layers: _Axes = _NONE
  window: _Axes = _NONE


class Scan(NamedTuple):
  """A scan over layers, one after the other, that is in no other scan over layers."""

  axes: tuple[tuple[int, int], ...]  # leaves that it slices, by number, and the axis of the layers
  shared: frozenset[int]  # leaves that all layers use
  length: int
  reverse: bool

  @property
  def axis_of(self) -> dict[int, int]:
    """The axis of the layers, by leaf."""
    return dict(self.axes)


class Value(NamedTuple):
  """A value of the program."""

  data: bool = False  # whether data went into it
  leaves: frozenset[int] = _NONE  # that it is made of, until they meet data
  penalty: bool = False  # whether it is a number that sums up params, as a weight decay does
  views: frozenset[_views.View] = _NONE  # of `leaves`, or of kernels that data has looked up
  labels: tuple[int, ...] = ()  # of its dimensions


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
  """Notes the uses of leaves, and the scans over layers.

  Attributes:
    places: for each equation where leaves meet data the uses, by leaf, those in penalties last.
    experts: further uses, of kernels that data has looked up.
    scans: the scans over layers.
  """

  def __init__(
    self,
    *,
    constants_are_data: bool,
    noise_is_data: bool,
    named_kernels: frozenset[int] | None = None,
  ) -> None:
    """Makes an analysis.

    Args:
      constants_are_data: whether constants that are no scalars count as data.
      noise_is_data: whether what is drawn from keys counts as data.
      named_kernels: the leaves with the name of a kernel. If given, kernels make data of any input:
        of noise, of constants, and of other leaves, as a layer makes of a learned table. Of two
        leaves in a product the second is the kernel, unless only the first has the name of one.
    """
    self.places: list[list[Use]] = []
    self.experts: list[Use] = []
    self.scans: list[Scan] = []
    self._constants_are_data, self._noise_is_data = constants_are_data, noise_is_data
    self._named_kernels = named_kernels
    self._labels = _Labels()
    self._axis_labels: list[tuple[int, ...]] = []  # of each leaf
    self._shapes: list[tuple[int, ...]] = []  # of each leaf
    self._matched: set[int] = set()  # labels along which each layer has data of its own
    self._summed: set[int] = set()  # labels along which kernels and data are contracted

  def leaf(self, shape: tuple[int, ...]) -> Value:
    """The next leaf, as it enters the program."""
    value, number = self.value(shape), len(self._shapes)
    self._shapes.append(shape)
    self._axis_labels.append(value.labels)
    views = frozenset([_views.whole(number, shape)])
    return value._replace(leaves=frozenset([number]), views=views)

  def value(self, shape: Sequence[int], *, data: bool = False) -> Value:
    """A value of no leaf."""
    return Value(data, labels=tuple(self._labels.fresh() for _ in shape))

  def matched_axes(self, leaf: int) -> _Axes:
    """The axes of a leaf along which some kernel, if not this leaf, has data of its own."""
    matched = set(map(self._labels.find, self._matched))
    matched -= set(map(self._labels.find, self._summed))
    labels = enumerate(self._axis_labels[leaf])
    return frozenset(axis for axis, label in labels if self._labels.find(label) in matched)

  def constant(self, value: Any) -> Value:
    return self.value(np.shape(value), data=self._constants_are_data and np.size(value) > 1)

  def join(self, values: Sequence[Value]) -> Value:
    # The first one's labels stay, so that the carry of a loop settles.
    labels = zip(*(v.labels for v in values), strict=True)
    return Value(
      any(v.data for v in values),
      _NONE.union(*(v.leaves for v in values)),
      any(v.penalty for v in values) and all(v.penalty for v in values if v.leaves),
      _NONE.union(*(v.views for v in values)),
      tuple(map(self._labels.unite, labels)),
    )

  def operation(self, equation: Any, inputs: list[Value]) -> list[Value]:
    shapes = [variable.aval.shape for variable in equation.outvars]
    if equation.primitive.name == "random_wrap" and not self._noise_is_data:
      # A key that was passed as integers.
      return list(map(self.value, shapes))
    if equation.primitive.name == "optimization_barrier":
      return inputs
    data = any(v.data for v in inputs)
    if data:
      self._note_uses(equation, inputs)
    else:
      data = self._note_generated(equation, inputs)
    leaves = _NONE if data else _NONE.union(*(v.leaves for v in inputs))
    summed = any(
      v.penalty or (v.leaves and atom.aval.shape)
      for v, atom in zip(inputs, equation.invars, strict=True)
    )
    by_data = any(v.data for v in inputs[1:]) and equation.primitive.name in _views.LOOKUPS
    return [
      Value(
        data,
        leaves,
        bool(leaves) and summed and not shape,
        _moved_views(equation, inputs, i, by_data),
        self._moved_labels(equation, inputs, i, by_data),
      )
      for i, shape in enumerate(shapes)
    ]

  def loop(self, equation: Any, body: Any, inputs: list[Value], carry: slice) -> list[Value]:
    slices = [self._slice(value) for value in inputs[carry.stop :]]
    self._note_scan(equation, inputs, carry)
    lengths = len(self.places), len(self.experts), len(self.scans)

    def one_round(inputs: list[Value]) -> list[Value]:
      # Of the last round alone.
      del self.places[lengths[0] :], self.experts[lengths[1] :], self.scans[lengths[2] :]
      return self.run(body, inputs)

    outputs = self.settle(one_round, [*inputs[: carry.stop], *slices], carry)
    carries = carry.stop - carry.start
    return [*outputs[:carries], *map(self._stack, outputs[carries:])]

  def branches(self, branches: Sequence[Any], inputs: list[Value]) -> list[Value]:
    results = []
    noted: set[int] = set()
    for branch in branches:
      start = len(self.places)
      results.append(self.run(branch, inputs))
      own = self.places[start:]
      # A leaf of two branches is used once.
      self.places[start:] = [[use for use in uses if use.leaf not in noted] for uses in own]
      noted |= {use.leaf for uses in own for use in uses}
    return list(map(self.join, zip(*results, strict=True)))

  def _slice(self, value: Value) -> Value:
    """A value of which a scan takes one slice after the other."""
    views = frozenset(map(_views.slice_first, value.views))
    return value._replace(views=views, labels=value.labels[1:])

  def _stack(self, value: Value) -> Value:
    """A value whose copies a scan stacks."""
    views = frozenset(map(_views.stack_first, value.views))
    return value._replace(views=views, labels=(self._labels.fresh(), *value.labels))

  def _note_scan(self, equation: Any, inputs: list[Value], carry: slice) -> None:
    scanned = {leaf for scan in self.scans for leaf, _ in scan.axes}
    found = {
      view.leaf: view.dims[0][0].axis
      for view in _NONE.union(*(v.views for v in inputs[carry.stop :]))
      if not view.stacked
      and view.leaf not in scanned
      and _views.is_axis(view.dims[0], self._shapes[view.leaf])
    }
    # Without a carry, layers are computed independently.
    if found and carry.stop > carry.start and equation.params["length"]:
      views = _NONE.union(*(v.views for v in inputs[: carry.start]))
      self.scans.append(
        Scan(
          tuple(sorted(found.items())),
          frozenset(view.leaf for view in views if not view.stacked),
          equation.params["length"],
          equation.params["reverse"],
        )
      )

  def _moved_labels(
    self, equation: Any, inputs: list[Value], result: int, by_data: bool
  ) -> tuple[int, ...]:
    """The labels of a result: of the operands' dimensions that run along its own."""
    shape = equation.outvars[result].aval.shape
    found: list[list[int]] = [[] for _ in shape]
    for operand, value in enumerate(inputs):
      own = equation.invars[operand].aval.shape
      view = _views.follow(equation, operand, _views.whole(0, own), result, by_data)
      for d, dim in enumerate(view.dims if view is not None else ()):
        if _views.is_axis(dim, own):
          found[d].append(value.labels[dim[0].axis])
    return tuple(
      self._labels.unite(labels) if labels and size > 1 else self._labels.fresh()
      for labels, size in zip(found, shape, strict=True)
    )

  def _note_uses(self, equation: Any, inputs: list[Value]) -> None:
    """Notes the leaves that meet data in an equation."""
    product = _views.contraction(equation)
    place: dict[int, list[Use]] = {}
    for operand, value in enumerate(inputs):
      place |= {leaf: [] for leaf in value.leaves - set(place) if not value.penalty}
      for view in () if value.penalty else value.views:
        use = _use(equation, operand, view, product)
        if use.kind == CONTRACTED and product is not None:
          other = inputs[1 - operand]
          if value.data and (not other.data or other.views):
            continue  # An embedding and its kernel, or two embeddings.
          self._match(product, operand, inputs)
        if not value.data:
          place[view.leaf].append(use)
        elif use.kind == CONTRACTED:
          self.experts.append(use)
    penalties = {leaf for value in inputs for leaf in value.leaves} - set(place)
    uses = [use for leaf in sorted(place) for use in place[leaf] or [Use(leaf, UNCLEAR)]]
    if uses or penalties:
      self.places.append(uses + [Use(leaf, PENALTY) for leaf in sorted(penalties)])

  def _note_generated(self, equation: Any, inputs: list[Value]) -> bool:
    """Notes the leaves of a kernel in a product without data; returns whether it is one."""
    product = _views.contraction(equation)
    if product is None or self._named_kernels is None:
      return False
    kernel = self._kernel_of(equation, inputs)
    if kernel is None:
      return False
    uses = [_use_in_product(view, kernel, product) for view in inputs[kernel].views]
    generated = [use._replace(kind=GENERATED) for use in uses if use.kind == CONTRACTED]
    if generated:
      self._match(product, kernel, inputs)
    self.places.append(generated)
    return True

  def _kernel_of(self, equation: Any, inputs: list[Value]) -> int | None:
    """Which operand of a product is the kernel, if the other one can be its input."""
    named = self._named_kernels or _NONE
    first, second = (value.leaves for value in inputs[:2])
    if first and second:
      # A matrix times itself is a penalty.
      only_first = first & named and not second & named
      return None if first & second else (0 if only_first else 1)
    kernel = 0 if first else 1
    is_array = equation.invars[1 - kernel].aval.size > 1
    return kernel if (first or second) and is_array else None

  def _match(self, product: _views.Contraction, kernel: int, inputs: list[Value]) -> None:
    """Notes the labels along which a product of a kernel and data matches and sums."""
    self._matched |= {inputs[kernel].labels[d] for d in product.batch[kernel]}
    for value, dims in zip(inputs, product.contracted, strict=False):
      self._summed |= {value.labels[d] for d in dims}


def _use(equation: Any, operand: int, view: _views.View, product: _views.Contraction | None) -> Use:
  """The use of a leaf where a view of it meets data."""
  if product is not None and operand < 2:
    return _use_in_product(view, operand, product)
  if equation.primitive.name in _views.LOOKUPS and operand == 0:
    found = _views.follow(equation, 0, view, 0, by_data=True)
    return Use(view.leaf, LOOKED_UP, layers=found.stacked if found is not None else _NONE)
  kind = ENTRYWISE if _views.keeps_entries(equation) else UNCLEAR
  return Use(view.leaf, kind, layers=view.stacked - view.axes())


def _use_in_product(view: _views.View, operand: int, product: _views.Contraction) -> Use:
  contracted = view.axes(product.contracted[operand])
  batch = view.axes(product.batch[operand])
  window = view.axes(product.window) if operand == 1 else _NONE
  used = {*product.contracted[operand], *product.batch[operand]}
  outputs = view.axes(d for d in range(len(view.dims)) if d not in used)
  if window:
    joined, is_depthwise = _of_convolution(view, product)
    batch, outputs = batch | joined, outputs - joined
    contracted = window if is_depthwise else contracted
  fan_in = contracted or view.inner
  if contracted & (outputs | batch) or (view.looked_up and not outputs):
    return Use(view.leaf, UNCLEAR)
  if not fan_in:
    return Use(view.leaf, ENTRYWISE, layers=view.stacked - view.axes())
  layers = (view.stacked | view.looked_up | batch) - outputs - fan_in
  return Use(view.leaf, CONTRACTED, fan_in, layers, window)


def _of_convolution(view: _views.View, product: _views.Contraction) -> tuple[_Axes, bool]:
  """The axes along which ``vmap`` joined kernels, and whether each of these is depthwise."""
  ((_, outputs),) = (source for sources in product.sources for source in sources if source[0] == 1)
  groups, joined = product.groups, set()
  # Kernels that `vmap` joined are the outer parts of the outputs, one group each.
  for factor in view.dims[outputs][:-1]:
    if groups % factor.size == 0:
      groups //= factor.size
      joined |= {factor.axis} - {_views.NO_AXIS}
  inputs_of_group = _views.size_of(view.dims[product.contracted[1][0]])
  return frozenset(joined), groups > 1 and inputs_of_group == 1


def _moved_views(
  equation: Any, inputs: list[Value], result: int, by_data: bool
) -> frozenset[_views.View]:
  """The views that a result is: of leaves, or of kernels that data has looked up."""
  operands = [i for i, v in enumerate(inputs) if v.views]
  if any(v.data for v in inputs) and not by_data:
    # Kernels that data has looked up stay kernels until they meet other data.
    operands = [i for i in operands if inputs[i].data]
    if _views.contraction(equation) or not all(v.views for v in inputs if v.data):
      return _NONE
  moved = (
    _views.follow(equation, i, view, result, by_data) for i in operands for view in inputs[i].views
  )
  return frozenset(view for view in moved if view is not None)

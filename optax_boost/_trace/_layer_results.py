"""Computes the results of an optimizer's step one layer at a time.

The program of a step gets arrays that stack layers: gradients, params, moments. A result is *of
each layer* if its slice for a layer needs no more than this layer's slices of these arrays. So the
moments of Adam are, and a gradient that was clipped by its global norm is not. :func:`find` follows
each result back through the program: an equation that needs more of a value than the layer's slice
needs the *whole* value. :meth:`LayerResults.compute` then computes the slices with the program's
own equations.

>>> import jax, jax.numpy as jnp
>>> def momentum(g, w, m):
...   m = 0.5 * m + g
...   return w - 0.5 * m, m
>>> array = jnp.array([1.0, 2.0])
>>> program = jax.make_jaxpr(momentum)(array, array, array)
>>> results = find(program, 1, [{0: 0}])  # the gradient, input 0, stacks layers along its axis 0
>>> results.stacked  # the array number 0, the params, and number 1, the momentum
[{0: 0, 1: 0}]
>>> layer = array[1:]
>>> [x.tolist() for x in results.compute(0, jnp.int32(1), [layer, layer, layer])]
[[0.5], [3.0]]
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
import contextlib
import dataclasses
import functools
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_boost._foundation import _types
from optax_boost._trace import _frozen_scans, _jaxpr, _primitives

# What a value depends on: the number of a group of leaves whose layers are stacked, or this, for
# the gradients of other leaves, and other values that are not known before the backward pass ends.
_LATER = -1
# These keep the layers apart, if their rule says that an axis of the result is one of an operand.
_ALIGNED = (
  *("transpose", "reshape", "broadcast_in_dim", "squeeze", "dot_general"),
  *("reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod", "reduce_sum"),
)
_DERIVATIVE_CALLS = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")


class NotOfEachLayer(Exception):
  """A result needs more than one layer; the text says what needs it."""


class _Node(NamedTuple):
  """An equation whose operands and results are numbers of values."""

  equation: _types.Equation
  operands: tuple[int, ...]
  results: tuple[int, ...]
  call: _types.Equation  # the equation of the outermost program in which this one is


class _Slice(NamedTuple):
  """The slice of a value for a layer along an axis; the whole value if the axis is None."""

  value: int
  axis: int | None


class _Program(_jaxpr.Evaluator[int]):
  """A program as a list of nodes, without calls. The first values are its inputs."""

  def __init__(self, program: _types.Jaxpr) -> None:
    self.avals: list[Any] = [variable.aval for variable in program.jaxpr.invars]
    self.constants: dict[int, Any] = {}
    self.nodes: list[_Node] = []
    self._call: _types.Equation | None = None
    self.inputs = len(self.avals)
    self.outputs = self.run(program, range(self.inputs))
    self.producers = {result: node for node in self.nodes for result in node.results}

  def constant(self, value: Any) -> int:
    number = self._add(jax.typeof(value))
    self.constants[number] = value
    return number

  def visit(self, equation: _types.Equation, inputs: list[int]) -> Sequence[int]:
    outermost = self._call
    self._call = outermost or equation
    try:
      if _jaxpr.is_plain_call(equation) or equation.primitive.name in _DERIVATIVE_CALLS:
        program, *_ = _jaxpr.sub_jaxprs(equation)
        return self.run(program, inputs)
      results = tuple(self._add(variable.aval) for variable in equation.outvars)
      self.nodes.append(_Node(equation, tuple(inputs), results, self._call))
      return results
    finally:
      self._call = outermost

  def _add(self, aval: Any) -> int:
    self.avals.append(aval)
    return len(self.avals) - 1


@dataclasses.dataclass(frozen=True, eq=False)
class LayerResults:
  """Which arrays a step updates layer by layer, and the arithmetic.

  The inputs of the program are the gradients, the arrays that it updates, of which the params come
  first, and other values. Its results are the updated arrays.

  Attributes:
    stacked: for each group of leaves, the numbers of the arrays that are of each layer, with the
      axis along which they stack layers.
  """

  program: _Program
  count: int
  groups: Sequence[Mapping[int, int]]
  stacked: list[dict[int, int]]

  def operands(self, group: int) -> dict[int, int | None]:
    """Returns the inputs that :meth:`compute` needs, with the axis of the layers, or None.

    An input with an axis is of the group's leaves.
    """
    number = self.count
    axes = {i + number: axis for i, axis in self.stacked[group].items()} | dict(self.groups[group])
    used = {s.value for s in self._order(group) if s.value < self.program.inputs} | set(axes)
    return {i: axes.get(i) for i in sorted(used)}

  def compute(self, group: int, index: jax.Array, values: Sequence[Any]) -> list[jax.Array]:
    """Returns the slices of the group's arrays for a layer; `values` are its :meth:`operands`.

    A slice keeps the axis of the layers, with length 1.
    """
    known: dict[_Slice, Any] = {
      _Slice(i, axis): value
      for (i, axis), value in zip(self.operands(group).items(), values, strict=True)
    }
    for wanted in self._order(group):
      if wanted not in known:
        self._compute(wanted, known, index)
    outputs = self.program.outputs
    return [known[_Slice(outputs[i], axis)] for i, axis in self.stacked[group].items()]

  def compute_others(self, values: Sequence[Any], updated: Mapping[int, Any]) -> list[jax.Array]:
    """Returns all updated arrays, as wholes.

    Args:
      values: all inputs; anything for those that were updated layer by layer.
      updated: the updated arrays of the groups, by number.
    """
    known = {_Slice(i, None): value for i, value in enumerate(values)}
    outputs = [_Slice(output, None) for output in self.program.outputs]
    known |= {outputs[i]: array for i, array in updated.items()}
    for wanted in _order(self.program, outputs, lambda x: x not in known):
      if wanted not in known:
        self._compute(wanted, known, None)
    return [known[output] for output in outputs]

  def _order(self, group: int) -> list[_Slice]:
    outputs = self.program.outputs
    return _order(
      self.program, [_Slice(outputs[i], axis) for i, axis in self.stacked[group].items()]
    )

  def _compute(self, wanted: _Slice, known: dict[_Slice, Any], index: Any) -> None:
    """Adds a slice, or a whole value, to `known`."""
    value, axis = wanted
    if value in self.program.constants:
      constant = jnp.asarray(self.program.constants[value], self.program.avals[value].dtype)
      known.setdefault(_Slice(value, None), constant)
    node = self.program.producers.get(value)
    whole = _Slice(value, None)
    if axis is not None and (whole in known or node is None):
      known[wanted] = jax.lax.dynamic_slice_in_dim(known[whole], index, 1, axis)
    if wanted in known or node is None:
      return
    operands = [known[operand] for operand in _operands(self.program, wanted)]
    if axis is None:
      results = self.program.bind(node.equation, operands)
      known |= {_Slice(i, None): x for i, x in zip(node.results, results, strict=True)}
    elif node.equation.primitive.name == "random_bits":
      # A layer's numbers are drawn by its own key: others than in the whole array.
      aval = self.program.avals[value]
      shape = (*aval.shape[:axis], 1, *aval.shape[axis + 1 :])
      key = jax.random.fold_in(operands[0], index)
      known[wanted] = jax.random.bits(key, shape, aval.dtype)
    else:
      known[wanted] = _frozen_scans.compute_part(node.equation, operands, axis, 1)


def find(
  program: _types.Jaxpr, count: int, groups: Sequence[Mapping[int, int]], later: Iterable[int] = ()
) -> LayerResults:
  """Returns which results of a step are of each layer.

  Args:
    program: the program of the step: `count` gradients, then the arrays that it updates, of which
      the first `count` are the params, then others; it returns the updated arrays.
    count: the number of leaves.
    groups: groups of leaves whose gradients become known layer by layer: for each group, the
      numbers of its leaves, with the axis along which a leaf stacks layers.
    later: the inputs, besides gradients, that are not known inside of the backward pass.

  Raises:
    NotOfEachLayer: an array of a group's leaf needs the gradients of several layers.
  """
  flat = _Program(program)
  sources = _sources(flat, count, groups, later)
  stacked: list[dict[int, int]] = []
  for number, leaves in enumerate(groups):
    # The arrays that depend on the gradients of the group: its params, their moments, ...
    arrays = [i for i, x in enumerate(flat.outputs) if number in sources[x] or i in leaves]
    length, preferred = next((flat.avals[i].shape[axis], axis) for i, axis in leaves.items())
    check = functools.partial(_check, flat, count, leaves, set(arrays), sources)
    axes = dict(leaves)
    for i in leaves:
      check(_Slice(flat.outputs[i], leaves[i]))
    for i in [i for i in arrays if i not in leaves]:
      shape = flat.avals[flat.outputs[i]].shape
      options = [axis for axis in range(len(shape)) if shape[axis] == length]
      for axis in sorted(options, key=lambda x: x != preferred):
        with contextlib.suppress(NotOfEachLayer):
          check(_Slice(flat.outputs[i], axis))
          axes[i] = axis
          break
    stacked.append(axes)
  results = LayerResults(flat, count, groups, stacked)
  _check_axes(results)
  _check_others(results, sources)
  return results


def _sources(
  flat: _Program, count: int, groups: Sequence[Mapping[int, int]], later: Iterable[int]
) -> list[frozenset[int]]:
  """Returns for each value the groups of leaves on whose gradients or arrays it depends."""
  group_of = {i: number for number, leaves in enumerate(groups) for i in leaves}
  inputs = [frozenset[int]()] * flat.inputs
  for i in range(count):
    inputs[i] = frozenset([group_of.get(i, _LATER)])
    inputs[i + count] = frozenset([group_of[i]] if i in group_of else [])
  for i in later:
    inputs[i] = frozenset([_LATER])
  while True:
    sources = [*inputs, *[frozenset[int]()] * (len(flat.avals) - flat.inputs)]
    for node in flat.nodes:
      of_operands = frozenset[int]().union(*(sources[i] for i in node.operands))
      for result in node.results:
        sources[result] = of_operands
    before = list(inputs)
    for i, output in enumerate(flat.outputs):
      # Moments depend on the gradients of earlier steps, which are known, but a loop over the
      # layers of a group replaces them.
      inputs[i + count] |= sources[output] - {_LATER}
    if inputs == before:
      return sources


def _check(
  flat: _Program,
  count: int,
  leaves: Mapping[int, int],
  arrays: Collection[int],
  sources: Sequence[frozenset[int]],
  wanted: _Slice,
) -> None:
  """Raises NotOfEachLayer if a slice needs more than what is known of its group's layer."""
  for value, axis in _order(flat, [wanted], lambda x: bool(sources[x.value])):
    of_layer = axis is not None and (
      value >= flat.inputs or value in leaves or value - count in arrays
    )
    if sources[value] and not (of_layer and leaves.get(value, axis) == axis):
      raise NotOfEachLayer(_reason(flat, wanted, sources))


def _reason(flat: _Program, wanted: _Slice, sources: Sequence[frozenset[int]]) -> str:
  """Returns the name of the function that needs more than a layer for a slice of a result."""
  for x in reversed(_order(flat, [wanted], lambda x: bool(sources[x.value]))):
    for operand in _operands(flat, x):
      if sources[operand.value] and operand.axis is None and operand.value in flat.producers:
        return _maker(flat.producers[operand.value].call)
  return "the optimizer"


def _maker(equation: _types.Equation) -> str:
  """Returns the function that made the update function in which an equation stands."""
  traceback = getattr(equation.source_info, "traceback", None)
  for frame in getattr(traceback, "frames", ()):  # the innermost comes first
    maker, inside, _ = frame.function_name.partition(".<locals>.")
    *_, folder, file = ["", *pathlib.PurePath(frame.file_name).parts]
    if folder in ("_step", "_precision"):
      break  # what wrappers do themselves, or what calls the optimizer
    if inside and folder not in ("_foundation", "_form") and "/jax/" not in frame.file_name:
      # A private function of this package has the module of a method.
      return f"`{file.removesuffix('.py').lstrip('_') if maker.startswith('_') else maker}`"
  return f"an equation `{equation.primitive.name}`"


def _check_axes(results: LayerResults) -> None:
  """Raises NotOfEachLayer if an array is needed along another axis, or as a whole."""
  for group, axes in enumerate(results.stacked):
    for value, axis in results._order(group):
      array = value - results.count
      if value < results.program.inputs and array in axes and axis != axes[array]:
        raise NotOfEachLayer("the optimizer's state: an array in it is read along several axes")


def _check_others(results: LayerResults, sources: Sequence[frozenset[int]]) -> None:
  """Raises NotOfEachLayer if another array needs more than other gradients and updated arrays."""
  flat = results.program
  updated = {i + results.count for arrays in results.stacked for i in arrays}
  replaced = updated | {i for leaves in results.groups for i in leaves}
  known = {_Slice(flat.outputs[i - results.count], None) for i in updated}
  for output in flat.outputs:
    wanted = _Slice(output, None)
    order = _order(flat, [wanted], lambda x: x not in known)
    if wanted not in known and any(x.value in replaced for x in order):
      raise NotOfEachLayer(_reason(flat, wanted, sources))


def _order(
  flat: _Program,
  wanted: Sequence[_Slice],
  follow: Callable[[_Slice], bool] = lambda x: True,
) -> list[_Slice]:
  """Returns what must be computed for the slices `wanted`, operands first.

  Of a slice for which `follow` is false, the operands are left out.
  """
  order: dict[_Slice, None] = {}
  stack = [(x, False) for x in reversed(wanted)]
  while stack:
    x, is_ready = stack.pop()
    if x in order:
      continue
    if is_ready or not follow(x):
      order[x] = None
      continue
    stack += [(x, True), *((operand, False) for operand in _operands(flat, x))]
  return list(order)


def _operands(flat: _Program, wanted: _Slice) -> list[_Slice]:
  """Returns what an equation needs to compute a slice of a result, or the whole result."""
  value, axis = wanted
  node = flat.producers.get(value)
  if node is None:
    return [_Slice(value, None)] if axis is not None and value in flat.constants else []
  if axis is None:
    return [_Slice(i, None) for i in node.operands]
  if node.equation.primitive.name == "random_bits":
    return [_Slice(i, None) for i in node.operands]
  rule = _primitives.rule_of(node.equation)
  if rule.is_identity:
    return [_Slice(node.operands[node.results.index(value)], axis)]
  if rule.is_pointwise or node.equation.primitive.name in _ALIGNED:
    along = [_primitives.axes_of_result(node.equation, i) for i in range(len(node.operands))]
    axes = [of_result[axis] if of_result else None for of_result in along]
    spreads = node.equation.primitive.name == "broadcast_in_dim" or rule.is_pointwise
    if spreads or any(a is not None for a in axes):
      return [_Slice(i, a) for i, a in zip(node.operands, axes, strict=True)]
  return [_Slice(value, None)]

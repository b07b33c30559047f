"""Evaluates a loss with frozen layers in its scans, so that JAX skips their backward pass.

A leaf of which some layers are frozen enters the program as a *split array*: the leaf is cut along
the axis of the layers, and the frozen parts have passed ``stop_gradient``. A scan that slices the
leaf is computed as one scan for each part. JAX leaves out the backward pass of such a scan if no
trained param enters the scan: neither in a slice, nor as a constant, nor through the carry. An
equation that can't be computed part by part gets the concatenated leaf.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import itertools
from typing import Any, TypeAlias

import jax
from jax.extend import core as jax_core
import jax.numpy as jnp
import numpy as np

from optax_boost._foundation import _placement, _types
from optax_boost._trace import _jaxpr, _primitives


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _SplitArray:
  """An array that is cut into parts along an axis."""

  arrays: tuple[jax.Array, ...]
  axis: int = dataclasses.field(metadata={"static": True})

  @property
  def bounds(self) -> tuple[int, ...]:
    """Returns the indices along the axis at which the parts start and end."""
    return (0, *itertools.accumulate(part.shape[self.axis] for part in self.arrays))


_Splittable: TypeAlias = jax.Array | _SplitArray


def split_frozen(
  leaf: jax.Array,
  frozen: bool | np.ndarray,
  train: Callable[[jax.Array, tuple[int, ...], int], jax.Array] = lambda part, axes, start: part,
) -> _Splittable:
  """Returns a leaf for :func:`evaluate`, split if only some of its layers are frozen.

  `frozen` is a bool for the leaf, or an array of a bool for each layer that broadcasts against the
  leaf. Frozen parts have passed ``stop_gradient``. A trained one is ``train(part, (axis,),
  start)``, where `start` is the index of its first layer along `axis`, or ``train(leaf, (), 0)``.
  """
  if not np.any(frozen):
    return train(leaf, (), 0)
  if np.all(frozen):
    return jax.lax.stop_gradient(leaf)
  axis = int(np.argmax(np.shape(frozen)))
  flags = np.ravel(frozen)
  bounds = [0, *(np.flatnonzero(np.diff(flags)) + 1), len(flags)]
  pairs = zip(_split(leaf, axis, bounds), bounds, strict=False)
  return _SplitArray(
    tuple(jax.lax.stop_gradient(x) if flags[i] else train(x, (axis,), int(i)) for x, i in pairs),
    axis,
  )


def evaluate(program: _types.Jaxpr, arguments: Sequence[_Splittable]) -> list[jax.Array]:
  """Computes the results of a program; some of the arguments may be split arrays."""
  if not any(isinstance(argument, _SplitArray) for argument in arguments):
    return jax_core.jaxpr_as_fun(program)(*arguments)
  return SplitScans().evaluate(program, arguments)


def _split(value: _Splittable, axis: int, bounds: Sequence[int]) -> tuple[jax.Array, ...]:
  """Cuts an array, or a split array, along `axis` at the indices `bounds`; returns the parts.

  `bounds` begin with 0 and end with the length of the axis. If `value` is a split array whose parts
  lie along the same axis, `bounds` must include all of ``value.bounds``.
  """
  if isinstance(value, _SplitArray) and value.axis == axis:
    return tuple(
      part
      for array, (first, end) in zip(value.arrays, itertools.pairwise(value.bounds), strict=True)
      for part in _split(array, axis, [b - first for b in bounds if first <= b <= end])
    )
  array = _concatenate(value)
  if len(bounds) == 2:
    return (array,)
  array = _placement.gather_axes(array, (axis,))
  return tuple(jax.lax.slice_in_dim(array, *pair, axis=axis) for pair in itertools.pairwise(bounds))


def _concatenate(value: _Splittable) -> jax.Array:
  return jnp.concatenate(value.arrays, value.axis) if isinstance(value, _SplitArray) else value


def _concatenate_all(
  values: Sequence[_Splittable], variables: Sequence[_types.Atom]
) -> list[jax.Array]:
  """Concatenates the split arrays among `values`; returns all values as arrays.

  `variables` are the variables of the values in the program. A concatenated array gets the sharding
  of its variable.
  """
  return [
    _placement.place_by(_concatenate(value), variable.aval.sharding)
    if isinstance(value, _SplitArray)
    else value
    for value, variable in zip(values, variables, strict=True)
  ]


def compute_part(
  equation: _types.Equation, values: Sequence[jax.Array], axis: int, size: int
) -> jax.Array:
  """Computes an equation on parts of its operands; returns this part of the result.

  `values` are the parts of the operands. The part of the result has `size` entries along `axis`.
  """
  name, settings = equation.primitive.name, dict(equation.params)
  for key, value in equation.params.items():
    if isinstance(value, jax.sharding.NamedSharding):
      # A part may be too short to be sharded over all devices. So a sharding constraint lets the
      # compiler choose the sharding along the axis, and other equations don't shard the axis.
      instead = jax.sharding.PartitionSpec.UNCONSTRAINED if name == "sharding_constraint" else None
      settings[key] = _placement.without_axes(value, (axis,), instead)
  if name == "sharding_constraint":
    return jax.lax.with_sharding_constraint(values[0], settings["sharding"])
  key = {"reshape": "new_sizes", "broadcast_in_dim": "shape"}.get(name)
  if key is not None:
    sizes = settings[key]
    settings[key] = (*sizes[:axis], size, *sizes[axis + 1 :])
  (result,) = jax.tree.leaves(equation.primitive.bind(*values, **settings))
  return result


def _aligned_axes(equation: _types.Equation, operand: int) -> tuple[int | None, ...]:
  """Returns, for each axis of an equation's result, which axis of an operand runs along it.

  `operand` is the operand's index. The answer is None for an axis of the result along which no
  whole axis of the operand runs. Returns ``()`` if the equation can't be computed part by part.
  """
  shape = equation.invars[operand].aval.shape
  rule = _primitives.rule_of(equation)
  if rule.is_identity:
    return tuple(range(len(shape)))
  if not rule.is_pointwise and equation.primitive.name not in ("transpose", "reshape"):
    return ()
  return _primitives.axes_of_result(equation, operand)


class SplitScans(_jaxpr.Evaluator[_Splittable]):
  """Computes a program in which some values are split arrays."""

  def evaluate(self, program: _types.Program, arguments: Sequence[_Splittable]) -> list[jax.Array]:
    """Returns the results of a program as arrays."""
    outputs = getattr(program, "jaxpr", program).outvars
    return _concatenate_all(self.run(program, arguments), outputs)

  def visit(self, equation: _types.Equation, inputs: list[_Splittable]) -> Sequence[_Splittable]:
    is_split = any(isinstance(value, _SplitArray) for value in inputs)
    if is_split or _primitives.rule_of(equation).is_identity:
      return super().visit(equation, inputs)
    return self.bind(equation, inputs)

  def operation(self, equation: _types.Equation, inputs: list[_Splittable]) -> list[_Splittable]:
    if equation.primitive.name == "scan":
      return self._scan(equation, inputs)
    operands = range(len(inputs))
    if _primitives.rule_of(equation).is_identity:
      # XLA 26: each operand gets a separate barrier, since JAX differentiates all results of a
      # barrier if it differentiates one.
      return [self._result(equation, {i: inputs[i]}) for i in operands]
    if any(_aligned_axes(equation, i) for i in operands if isinstance(inputs[i], _SplitArray)):
      return [self._result(equation, dict(enumerate(inputs)))]
    return self.bind(equation, _concatenate_all(inputs, equation.invars))

  def _result(self, equation: _types.Equation, operands: dict[int, _Splittable]) -> _Splittable:
    """Computes a result of an equation from operands that may be split arrays.

    `operands` has the operands by their index. If the primitive returns its operands as they are,
    `operands` has only the one that becomes this result. The result is computed part by part, and
    is a split array, if the result keeps the axis along which the first split operand is split.
    """
    cut = {i: value for i, value in operands.items() if isinstance(value, _SplitArray)}
    orders = [(_aligned_axes(equation, i), value.axis) for i, value in cut.items()]
    if not orders or orders[0][1] not in orders[0][0]:
      values = _concatenate_all(list(operands.values()), [equation.invars[i] for i in operands])
      (result,) = jax.tree.leaves(equation.primitive.bind(*values, **equation.params))
      return result
    order, axis = orders[0]
    bounds = sorted({b for value in cut.values() if value.axis == axis for b in value.bounds})
    split = [
      _split(value, axis, bounds) if equation.invars[i].aval.shape else (value,) * (len(bounds) - 1)
      for i, value in operands.items()
    ]
    result_axis = order.index(axis)
    sizes = [end - start for start, end in itertools.pairwise(bounds)]
    parts = [
      compute_part(equation, values, result_axis, size)
      for *values, size in zip(*split, sizes, strict=True)
    ]
    return _SplitArray(tuple(parts), result_axis)

  def _scan(self, equation: _types.Equation, inputs: list[_Splittable]) -> list[_Splittable]:
    """Computes a scan as several scans in a row, one for each part of the arrays that it slices."""
    settings = equation.params
    consts, carries = _jaxpr.scan_operands(equation)
    shared, between = inputs[:consts], slice(consts, consts + carries)
    carry = _concatenate_all(inputs[between], equation.invars[between])
    slices = inputs[consts + carries :]
    bounds = sorted({0, settings["length"]}.union(*map(self.bounds_of, slices)))
    split = [self.split(value, bounds) for value in slices]
    stacked = []
    direction = -1 if settings["reverse"] else 1
    for i in range(len(bounds) - 1)[::direction]:
      parts = [parts[i] for parts in split]
      length = bounds[i + 1] - bounds[i]
      carry, results = self.scan_part(equation, shared, carry, parts, length)
      stacked.append(results)
    return [*carry, *(jnp.concatenate(parts) for parts in zip(*stacked[::direction], strict=True))]

  def bounds_of(self, value: _Splittable) -> Sequence[int]:
    """Returns the indices at which the parts of an array that a scan slices start and end."""
    return value.bounds if isinstance(value, _SplitArray) and value.axis == 0 else ()

  def split(self, value: _Splittable, bounds: Sequence[int]) -> Sequence[Any]:
    """Returns the parts of an array that a scan slices, between `bounds`."""
    return _split(value, 0, bounds)

  def scan_part(
    self,
    equation: _types.Equation,
    shared: Sequence[_Splittable],
    carry: list[jax.Array],
    slices: Sequence[Any],
    length: int,
  ) -> tuple[list[jax.Array], list[jax.Array]]:
    """Computes a scan over parts of the arrays that it slices; returns the carry and the results.

    `shared` are the values that all iterations use.
    """
    body = functools.partial(self.iterate, equation, shared)
    return run_scan(equation, body, carry, slices, length)

  def iterate(
    self,
    equation: _types.Equation,
    shared: Sequence[_Splittable],
    carry: list[jax.Array],
    slices: Sequence[jax.Array],
  ) -> tuple[list[jax.Array], list[jax.Array]]:
    """Computes an iteration of a scan; returns the carry and the results."""
    results = self.evaluate(equation.params["jaxpr"], [*shared, *carry, *slices])
    return results[: len(carry)], results[len(carry) :]


def run_scan(
  equation: _types.Equation, body: Callable[..., Any], carry: Any, slices: Any, length: int
) -> tuple[Any, Any]:
  """Calls ``jax.lax.scan`` with the settings of a scan in a program."""
  settings = equation.params
  unroll = min(settings["unroll"], length)
  return jax.lax.scan(
    body, carry, slices, length=length, reverse=settings["reverse"], unroll=unroll
  )

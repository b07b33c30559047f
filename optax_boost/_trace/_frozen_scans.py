"""Evaluates a loss in whose scans some layers are frozen, so that JAX skips their backward pass.

A leaf whose layers are partly frozen enters the program as a *split array*: in parts along the axis
of its layers, the frozen ones through ``stop_gradient``. A scan that slices the leaf is computed as
one scan for each part, and JAX drops the backward pass of a part that no trained param enters. No
result changes: where a trained param does enter, through constants or the carry, the backward pass
stays. Equations that can be computed part by part keep the parts; all others get the leaf whole.
"""

from collections.abc import Sequence
import dataclasses
import itertools
from typing import Any

import jax
from jax.extend import core as jax_core
import jax.numpy as jnp
import numpy as np

from optax_boost._foundation import _placement
from optax_boost._trace import _axis_map, _jaxpr, _primitives


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _SplitArray:
  """An array in parts along an axis, of which frozen ones have no derivative."""

  arrays: tuple[Any, ...]
  axis: int = dataclasses.field(metadata={"static": True})

  @property
  def bounds(self) -> tuple[int, ...]:
    """Where the parts start and end."""
    return (0, *itertools.accumulate(part.shape[self.axis] for part in self.arrays))


def in_parts(held: Any, leaf: Any, frozen: bool | np.ndarray) -> Any:
  """A leaf whose frozen layers come from `held`, for :func:`run`; `frozen` broadcasts to it."""
  if np.all(frozen) or not np.any(frozen):
    return held if np.all(frozen) else leaf
  axis = int(np.argmax(np.shape(frozen)))
  flags = np.ravel(frozen)
  bounds = [0, *(np.flatnonzero(np.diff(flags)) + 1), len(flags)]
  pairs = zip(_split(held, axis, bounds), _split(leaf, axis, bounds), bounds, strict=False)
  return _SplitArray(tuple(old if flags[i] else new for old, new, i in pairs), axis)


def run(program: Any, arguments: Sequence[Any]) -> list[Any]:
  """The results of a closed program, some of whose arguments may be in parts."""
  if not any(isinstance(argument, _SplitArray) for argument in arguments):
    return jax_core.jaxpr_as_fun(program)(*arguments)
  return _without_splits(_SplitScans().run(program, arguments), program.jaxpr.outvars)


def _split(value: Any, axis: int, bounds: Sequence[int]) -> tuple[Any, ...]:
  """A value in parts between bounds, which include the bounds of its own parts."""
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


def _concatenate(value: Any) -> Any:
  return jnp.concatenate(value.arrays, value.axis) if isinstance(value, _SplitArray) else value


def _without_splits(values: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
  """The values of variables, none in parts and all sharded as the variables are."""
  return [
    _placement.place_by(_concatenate(value), variable.aval.sharding)
    if isinstance(value, _SplitArray)
    else value
    for value, variable in zip(values, variables, strict=True)
  ]


def _compute_part(equation: Any, values: Sequence[Any], axis: int, size: int) -> Any:
  """Computes a part of an equation's result, with `size` entries along `axis`."""
  name, settings = equation.primitive.name, dict(equation.params)
  for key, value in equation.params.items():
    if isinstance(value, jax.sharding.NamedSharding):
      # A part may be too short for the devices: under `jit` the compiler chooses its place.
      instead = jax.sharding.PartitionSpec.UNCONSTRAINED if name == "sharding_constraint" else None
      settings[key] = _placement.without_axes(value, (axis,), instead)
  if name == "sharding_constraint":
    return jax.lax.with_sharding_constraint(values[0], settings["sharding"])
  if name == "reshape":
    sizes = settings["new_sizes"]
    settings["new_sizes"] = (*sizes[:axis], size, *sizes[axis + 1 :])
  (result,) = jax.tree.leaves(equation.primitive.bind(*values, **settings))
  return result


def _aligned_axes(equation: Any, operand: int) -> tuple[int | None, ...]:
  """For each axis of the result the operand's axis that runs along it, or None.

  ``()`` if the equation can't be computed part by part.
  """
  shape = equation.invars[operand].aval.shape
  rule = _primitives.rule_of(equation)
  if rule.is_identity:
    return tuple(range(len(shape)))
  if not rule.is_pointwise and equation.primitive.name not in ("transpose", "reshape"):
    return ()
  moved = _primitives.move(equation, operand, _axis_map.identity(0, shape), 0)
  dims = moved.dims if moved is not None else ()
  return tuple(dim[0].axis if _axis_map.is_axis(dim, shape) else None for dim in dims)


class _SplitScans(_jaxpr.Evaluator[Any]):
  """Computes a program with some of its leaves in parts."""

  def visit(self, equation: Any, inputs: list[Any]) -> Sequence[Any]:
    in_parts = any(isinstance(value, _SplitArray) for value in inputs)
    if in_parts or _primitives.rule_of(equation).is_identity:
      return super().visit(equation, inputs)
    return self.bind(equation, inputs)

  def operation(self, equation: Any, inputs: list[Any]) -> list[Any]:
    if equation.primitive.name == "scan":
      return self._scan(equation, inputs)
    operands = range(len(inputs))
    if _primitives.rule_of(equation).is_identity:
      # XLA 26: each alone, as all results of a barrier have a derivative if one operand has one.
      return [self._result(equation, {i: inputs[i]}) for i in operands]
    if any(_aligned_axes(equation, i) for i in operands if isinstance(inputs[i], _SplitArray)):
      return [self._result(equation, dict(enumerate(inputs)))]
    return self.bind(equation, _without_splits(inputs, equation.invars))

  def _result(self, equation: Any, operands: dict[int, Any]) -> Any:
    """The result of an equation that :func:`_aligned_axes` follows, in parts if it can."""
    cut = {i: value for i, value in operands.items() if isinstance(value, _SplitArray)}
    orders = [(_aligned_axes(equation, i), value.axis) for i, value in cut.items()]
    if not orders or orders[0][1] not in orders[0][0]:
      values = _without_splits(list(operands.values()), [equation.invars[i] for i in operands])
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
      _compute_part(equation, values, result_axis, size)
      for *values, size in zip(*split, sizes, strict=True)
    ]
    return _SplitArray(tuple(parts), result_axis)

  def _scan(self, equation: Any, inputs: list[Any]) -> list[Any]:
    """The results of a scan, part by part."""
    settings = equation.params
    consts, carries = _jaxpr.scan_operands(equation)
    shared, between = inputs[:consts], slice(consts, consts + carries)
    carry = _without_splits(inputs[between], equation.invars[between])
    slices = inputs[consts + carries :]
    in_parts = [value for value in slices if isinstance(value, _SplitArray) and value.axis == 0]
    bounds = sorted({0, settings["length"]}.union(*(value.bounds for value in in_parts)))
    split = [_split(value, 0, bounds) for value in slices]

    def body(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
      program = settings["jaxpr"]
      results = self.run(program, [*shared, *carry, *slices])
      results = _without_splits(results, program.jaxpr.outvars)
      return results[:carries], results[carries:]

    stacked = []
    direction = -1 if settings["reverse"] else 1
    for i in range(len(bounds) - 1)[::direction]:
      length = bounds[i + 1] - bounds[i]
      carry, results = jax.lax.scan(
        body,
        carry,
        [parts[i] for parts in split],
        length=length,
        reverse=settings["reverse"],
        unroll=min(settings["unroll"], length),
      )
      stacked.append(results)
    return [*carry, *(jnp.concatenate(parts) for parts in zip(*stacked[::direction], strict=True))]

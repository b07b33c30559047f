"""Scans over layers of which some are frozen, in a program that is differentiated.

A leaf whose layers are partly frozen enters the program in parts, the frozen ones behind
``stop_gradient``. A scan that slices the leaf runs over one part after the other, and JAX drops the
backward pass of a part that no trained param enters. No result changes: where a trained param does
enter, through constants or the carry, the backward pass stays. Other equations see the leaf whole.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost import _jaxpr
from optax_boost import _stacked


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Parts:
  """An array in parts along an axis."""

  arrays: tuple[Any, ...]
  axis: int = dataclasses.field(metadata={"static": True})

  @property
  def bounds(self) -> tuple[int, ...]:
    """Where the parts start and end."""
    return (0, *itertools.accumulate(part.shape[self.axis] for part in self.arrays))


def stop_layers(
  objective: Callable[[optax.Params], Any],
  frozen: Sequence[bool | np.ndarray],
  inspect: Callable[[Any], None],
) -> Callable[[optax.Params], Any]:
  """The objective with a derivative of zero for frozen leaves, and for frozen layers of leaves.

  `inspect` is called with the traced objective if a leaf is partly frozen.
  """

  def stopped(params: optax.Params) -> Any:
    leaves, structure = jax.tree.flatten(params)
    parts = list(map(in_parts, jax.lax.stop_gradient(leaves), leaves, frozen))
    if not any(isinstance(part, _Parts) for part in parts):
      return objective(jax.tree.unflatten(structure, parts))
    closed, shapes = jax.make_jaxpr(objective, return_shape=True)(params)
    inspect(closed)
    return jax.tree.unflatten(jax.tree.structure(shapes), run(closed, parts))

  return stopped


def in_parts(held: Any, leaf: Any, frozen: bool | np.ndarray) -> Any:
  """A leaf whose frozen layers come from `held`, for :func:`run`; `frozen` broadcasts to it."""
  if np.all(frozen) or not np.any(frozen):
    return held if np.all(frozen) else leaf
  axis = int(np.argmax(np.shape(frozen)))
  flags = np.ravel(frozen)
  bounds = [0, *(np.flatnonzero(np.diff(flags)) + 1), len(flags)]
  pairs = zip(_split(held, axis, bounds), _split(leaf, axis, bounds), bounds, strict=False)
  return _Parts(tuple(old if flags[i] else own for old, own, i in pairs), axis)


def run(program: Any, arguments: Sequence[Any], *, inline: bool = False) -> list[Any]:
  """The results of a program some of whose arguments are in parts; `inline` enters all calls."""
  return list(map(_whole, _CutScans(inline).run(program, arguments)))


def _split(value: Any, axis: int, bounds: Sequence[int]) -> tuple[Any, ...]:
  """A value in parts between bounds, among which are those of its own parts."""
  if isinstance(value, _Parts) and value.axis == axis:
    own = zip(value.arrays, itertools.pairwise(value.bounds), strict=True)
    return tuple(
      part
      for array, (first, end) in own
      for part in _split(array, axis, [b - first for b in bounds if first <= b <= end])
    )
  array = _whole(value)
  if len(bounds) == 2:
    return (array,)
  return tuple(jax.lax.slice_in_dim(array, *pair, axis=axis) for pair in itertools.pairwise(bounds))


def _whole(value: Any) -> Any:
  return jnp.concatenate(value.arrays, value.axis) if isinstance(value, _Parts) else value


class _CutScans(_jaxpr.Evaluator[Any]):
  """Computes a program with some of its leaves in parts."""

  def __init__(self, inline: bool) -> None:
    self._inline = inline

  def constant(self, value: Any) -> Any:
    return value

  def visit(self, equation: Any, inputs: list[Any]) -> Sequence[Any]:
    enters = self._inline and equation.primitive.name in _jaxpr.PLAIN_CALLS
    if enters or any(isinstance(value, _Parts) for value in inputs):
      return super().visit(equation, inputs)
    return self.bind(equation, inputs)

  def operation(self, equation: Any, inputs: list[Any]) -> list[Any]:
    name = equation.primitive.name
    if name == "scan":
      return self._scan(equation, inputs)
    if name == "transpose":
      order = equation.params["permutation"]
      parts = [jax.lax.transpose(part, order) for part in inputs[0].arrays]
      return [_Parts(tuple(parts), order.index(inputs[0].axis))]
    if name in _stacked.ENTRYWISE:
      return [self._entrywise(equation, inputs)]
    return self.bind(equation, list(map(_whole, inputs)))

  def _entrywise(self, equation: Any, inputs: list[Any]) -> _Parts:
    in_parts = [value for value in inputs if isinstance(value, _Parts)]
    axis = in_parts[0].axis
    bounds = sorted({b for value in in_parts if value.axis == axis for b in value.bounds})
    split = [
      _split(value, axis, bounds) if variable.aval.shape else (value,) * (len(bounds) - 1)
      for value, variable in zip(inputs, equation.invars, strict=True)
    ]
    bind = equation.primitive.bind
    parts = [bind(*values, **equation.params) for values in zip(*split, strict=True)]
    return _Parts(tuple(parts), axis)

  def _scan(self, equation: Any, inputs: list[Any]) -> list[Any]:
    """The results of a scan, part by part."""
    settings = equation.params
    consts, carries = settings["num_consts"], settings["num_carry"]
    shared, carry = inputs[:consts], list(map(_whole, inputs[consts : consts + carries]))
    slices = inputs[consts + carries :]
    in_parts = [value for value in slices if isinstance(value, _Parts) and value.axis == 0]
    bounds = sorted({0, settings["length"]}.union(*(value.bounds for value in in_parts)))
    split = [_split(value, 0, bounds) for value in slices]

    def body(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
      results = list(map(_whole, self.run(settings["jaxpr"], [*shared, *carry, *slices])))
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

"""Params that the forward pass of a stateful model writes: the update starts from these."""

from collections.abc import Sequence
import functools
from typing import Any
from typing import NamedTuple

import jax
import optax

from optax_boost._trace import _jaxpr

# The number of a value that is not a leaf of the params.
_OTHER = -1


class WrittenParams(NamedTuple):
  """New statistics, and the params after the forward pass."""

  model_state: Any
  params: optax.Params


def with_written_params(model_state: Any, before: optax.Params, after: optax.Params) -> Any:
  """Adds the params after the forward pass to new statistics, if any was replaced."""
  pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
  replaced = any(old is not new for old, new in pairs)
  return WrittenParams(model_state, after) if replaced else model_state


def take_written_params(
  params: optax.Params, model_state: Any, program: Any
) -> tuple[optax.Params, Any]:
  """The params as the forward pass left them, and the new statistics alone."""
  if not isinstance(model_state, WrittenParams):
    return params, model_state
  leaves, structure = jax.tree.flatten(params)
  inputs, outputs = program.jaxpr.invars, program.jaxpr.outvars
  # By the params' place in the outputs: the loss, its statistics, the params, aux.
  end = 1 + len(jax.tree.leaves(model_state))
  place = slice(end - len(leaves), end)
  copied = [x is y for x, y in zip(inputs, outputs[place], strict=False)]
  if not all(copied):
    # `nnx.remat` and `nnx.jit` return all variables of their modules as other arrays.
    copied = copied_inputs(program, len(leaves), place)
  left = zip(leaves, jax.tree.leaves(model_state.params), copied, strict=True)
  return jax.tree.unflatten(
    structure, [old if same else new for old, new, same in left]
  ), model_state.model_state


def copied_inputs(
  program: Any, number: int | None = None, place: slice = slice(None)
) -> list[bool]:
  """Whether a program returns each of its first inputs, all by default, in the outputs `place`."""
  inputs = len(program.jaxpr.invars)
  number = inputs if number is None else number
  numbers = [*range(number), *[_OTHER] * (inputs - number)]
  return [origin == i for i, origin in enumerate(_Copies().run(program, numbers)[place])]


class _Copies(_jaxpr.Interpreter[int]):
  """Finds the leaves that a program returns unchanged."""

  def constant(self, value: Any) -> int:
    return _OTHER

  def operation(self, equation: Any, inputs: list[int]) -> list[int]:
    return [_OTHER] * len(equation.outvars)

  def join(self, values: Sequence[int]) -> int:
    return values[0] if len(set(values)) == 1 else _OTHER

  def loop(self, equation: Any, body: Any, inputs: list[int], carry: slice) -> list[int]:
    # A carry that another round changes is not a copy.
    return self.settle(functools.partial(self.run, body), inputs, carry)

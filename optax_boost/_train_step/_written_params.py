"""Params that a forward pass changes (as with ``nnx.WeightNorm``), and to which a step adds."""

from collections.abc import Sequence
import functools
from typing import NamedTuple

import jax
import optax

from optax_boost._foundation import _trees, _types
from optax_boost._trace import _jaxpr
from optax_boost._train_step import _traced_loss

# In place of an input's index: the value is not a copy of an input.
_NO_COPY = -1


class WrittenParams(NamedTuple):
  """The statistics after a forward pass, and the params, some of which it has changed."""

  model_state: _types.ModelState
  params: optax.Params


def with_written_params(
  model_state: _types.ModelState, before: optax.Params, after: optax.Params
) -> _types.ModelState | WrittenParams:
  """Returns `model_state`, in a :class:`WrittenParams` if the forward pass replaced params."""
  pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
  replaced = any(old is not new for old, new in pairs)
  return WrittenParams(model_state, after) if replaced else model_state


def take_written_params(
  params: optax.Params, model_state: _types.ModelState, traced: _traced_loss.TracedLoss
) -> tuple[optax.Params, _types.ModelState]:
  """Returns the params and the statistics after a forward pass, whose result is `model_state`."""
  if not isinstance(model_state, WrittenParams):
    return params, model_state
  program = traced.program
  inputs, outputs = program.jaxpr.invars, program.jaxpr.outvars
  # The outputs are, in this order: the loss, the statistics, the params, aux.
  end = 1 + len(jax.tree.leaves(model_state))
  count = len(jax.tree.leaves(params))
  param_outputs = slice(end - count, end)
  copied = [x is y for x, y in zip(inputs, outputs[param_outputs], strict=False)]
  if not all(copied):
    # `nnx.remat` and `nnx.jit` return all variables of their modules as new arrays, so only the
    # equations of the program show which params are copies.
    copied = copied_inputs(program, count, param_outputs)
  written = jax.tree.leaves(model_state.params)
  new_params = _trees.map_with(
    lambda old, new, is_copy: old if is_copy else new, params, written, copied
  )
  return new_params, model_state.model_state


def copied_inputs(
  program: _types.Jaxpr, count: int | None = None, outputs: slice = slice(None)
) -> list[bool]:
  """Returns whether the i-th of `outputs` is a copy of input i, for i below `count` (None: all)."""
  inputs = len(program.jaxpr.invars)
  count = inputs if count is None else count
  origins = _CopyFinder().run(program, [*range(count), *[_NO_COPY] * (inputs - count)])
  return [origin == i for i, origin in enumerate(origins[outputs])]


class _CopyFinder(_jaxpr.Interpreter[int]):
  """Finds for each output of a program the index of the input that it copies, or `_NO_COPY`."""

  def constant(self, value: _types.Unchecked) -> int:
    return _NO_COPY

  def operation(self, equation: _types.Equation, inputs: list[int]) -> list[int]:
    return [_NO_COPY] * len(equation.outvars)

  def join(self, values: Sequence[int]) -> int:
    return values[0] if len(set(values)) == 1 else _NO_COPY

  def loop(
    self, equation: _types.Equation, body: _types.Jaxpr, inputs: list[int], carry: slice
  ) -> list[int]:
    # A carry is a copy only if no iteration changes it.
    return self.find_fixpoint(functools.partial(self.run, body), inputs, carry)

"""Finds the params that a forward pass changes, as with ``nnx.WeightNorm``.

The step adds its update to the changed params.
"""

from collections.abc import Sequence
import functools
from typing import NamedTuple

import jax
import optax

from optax_boost._foundation import _trees, _types
from optax_boost._trace import _jaxpr
from optax_boost._train_step import _traced_loss

# Stands for a value that is not a copy of an input. Other values are represented by the index of
# the input that they copy.
_NO_COPY = -1


class WrittenParams(NamedTuple):
  """The model state and the params after a forward pass that replaced some of the params."""

  model_state: _types.ModelState
  params: optax.Params


def with_written_params(
  model_state: _types.ModelState, before: optax.Params, after: optax.Params
) -> _types.ModelState | WrittenParams:
  """Returns the model state of a forward pass, with the params if the pass replaced any.

  `before` and `after` are the params before and after the forward pass. If an array was replaced,
  returns a :class:`WrittenParams` of `model_state` and `after`; otherwise `model_state` itself.
  """
  pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
  replaced = any(old is not new for old, new in pairs)
  return WrittenParams(model_state, after) if replaced else model_state


def take_written_params(
  params: optax.Params, model_state: _types.ModelState, traced: _traced_loss.TracedLoss
) -> tuple[optax.Params, _types.ModelState]:
  """Returns the params to which a step adds its update, and the model state.

  `params` are the params before the forward pass. `model_state` is what :func:`with_written_params`
  returned in the forward pass. `traced` is the loss as a jaxpr, which shows which params changed.
  """
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
    copied = _copied_inputs(program, count, param_outputs)
  if all(copied):
    return params, model_state.model_state
  written = jax.tree.leaves(model_state.params)
  new_params = _trees.map_with(
    lambda old, new, is_copy: old if is_copy else new, params, written, copied
  )
  return new_params, model_state.model_state


def _copied_inputs(program: _types.Jaxpr, count: int, outputs: slice) -> list[bool]:
  """Returns for each of the first `count` inputs whether the output in its place copies it.

  `outputs` is the slice of the outputs that are compared with these inputs, in order.
  """
  others = len(program.jaxpr.invars) - count
  origins = _CopyFinder().run(program, [*range(count), *[_NO_COPY] * others])
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

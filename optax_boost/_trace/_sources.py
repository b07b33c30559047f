"""Tells from which arguments of a program each of its results is computed.

A set of arguments is an integer, in which bit i stands for the source i of the caller's numbering.

>>> import jax
>>> program = jax.make_jaxpr(lambda x, y, z: (x + y, y * 2, 1.0))(1.0, 1.0, 1.0)
>>> sources_of_results(program, [0b001, 0b010, 0b100])
[3, 2, 0]
"""

from collections.abc import Mapping, Sequence
import functools
import operator

import jax
import numpy as np

from optax_boost._foundation import _types
from optax_boost._trace import _jaxpr


def sources_of_results(
  program: _types.Jaxpr,
  arguments: Sequence[int],
  carried: Mapping[int, int] | None = None,
  of_constants: int = 0,
) -> list[int]:
  """Returns the sources of each result of a program.

  `arguments` has the sources of each argument. `carried` maps an argument to the result that
  becomes this argument when the program runs again, as it does in each step; then the sources are
  those after any number of runs. Arrays in the program, but not numbers, have the sources
  `of_constants`.
  """
  sources, analysis = list(arguments), _Sources(of_constants)
  while True:
    results = analysis.run(program, sources)
    joined = list(sources)
    for argument, result in (carried or {}).items():
      joined[argument] |= results[result]
    if joined == sources:
      return results
    sources = joined


class _Sources(_jaxpr.Interpreter[int]):
  """Computes the sources of each value of a program."""

  def __init__(self, of_constants: int) -> None:
    self._of_constants = of_constants

  def constant(self, value: jax.typing.ArrayLike) -> int:
    return self._of_constants if np.size(value) > 1 else 0

  def join(self, values: Sequence[int]) -> int:
    return functools.reduce(operator.or_, values, 0)

  def operation(self, equation: _types.Equation, inputs: list[int]) -> Sequence[int]:
    return [self.join(inputs)] * len(equation.outvars)

  def visit(self, equation: _types.Equation, inputs: list[int]) -> Sequence[int]:
    results, settings = super().visit(equation, inputs), equation.params
    condition = 0
    if equation.primitive.name == "cond":
      condition = inputs[0]
    elif equation.primitive.name == "while":
      # The loop may make no iteration, so that its results are the carries that it got.
      start = inputs[settings["cond_nconsts"] + settings["body_nconsts"] :]
      results = list(map(operator.or_, results, start))
      of_condition = [*inputs[: settings["cond_nconsts"]], *results]
      condition = self.join(self.run(settings["cond_jaxpr"], of_condition))
    return [found | condition for found in results] if condition else results

  def loop(
    self, equation: _types.Equation, body: _types.Jaxpr, inputs: list[int], carry: slice
  ) -> list[int]:
    return self.find_fixpoint(functools.partial(self.run, body), inputs, carry)

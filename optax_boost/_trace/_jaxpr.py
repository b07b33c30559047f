"""An interpreter of traced programs.

:class:`Interpreter` walks over the equations of a jaxpr and computes a value for each variable: an
array, a number, a set of leaves, or another value that an analysis needs. A subclass defines how
the values of an equation's results follow from the values of its operands. The interpreter enters
the programs inside equations: scans, while loops, conditionals and calls. A call (``jit``,
``checkpoint``, custom derivatives, ``shard_map``, ...) is any equation with one program that has as
many arguments and results as the equation.

For example, this interpreter computes the length of the longest chain of products in a program:

>>> import jax, jax.numpy as jnp
>>> class LongestChain(Interpreter[int]):
...   def constant(self, value):
...     return 0
...   def operation(self, equation, inputs):
...     is_product = equation.primitive.name == "dot_general"
...     return [max(inputs, default=0) + is_product] * len(equation.outvars)
...   def join(self, values):
...     return max(values)
>>> program = jax.make_jaxpr(jax.jit(lambda x: x @ x @ x + x))(jnp.ones((2, 2)))
>>> LongestChain().run(program, [0])
[2]
"""

from collections.abc import Callable, Iterator, Sequence
import functools
from typing import Any, Generic, TypeVar

import jax
from jax.extend import core as jax_core

from optax_boost._foundation import _types

_Value = TypeVar("_Value")

# Calls that do nothing but compute their program. Calls with custom derivatives are not listed,
# since they also define the derivative of their program.
_PLAIN_CALLS = ("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2")


def uncached(function: Callable[..., Any]) -> Callable[..., Any]:
  """Returns a new function that calls `function`, so that JAX traces instead of using its cache.

  A cached trace shows no warnings, and is outdated if a function that `function` calls was
  redefined in a notebook (XLA 25).
  """
  return lambda *args: function(*args)


class Interpreter(Generic[_Value]):
  """Walks over a program, equation by equation; each analysis is a subclass.

  A subclass defines :meth:`constant`, :meth:`operation` and :meth:`join`. A subclass may override
  :meth:`loop` and :meth:`branches`. Unless overridden, :meth:`loop` runs one iteration.
  """

  def constant(self, value: jax.typing.ArrayLike) -> _Value:
    raise NotImplementedError

  def operation(self, equation: _types.Equation, inputs: list[_Value]) -> Sequence[_Value]:
    """Returns the values of the results of an equation that has no program to enter."""
    raise NotImplementedError

  def join(self, values: Sequence[_Value]) -> _Value:
    """Merges the values that a variable has in several branches or iterations into one value."""
    raise NotImplementedError

  def run(self, program: _types.Program, arguments: Sequence[_Value]) -> list[_Value]:
    """Returns the values of a program's results."""
    constants = map(self.constant, getattr(program, "consts", ()))
    jaxpr = getattr(program, "jaxpr", program)
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *arguments], strict=True))

    def read(atom: _types.Atom) -> _Value:
      return self.constant(atom.val) if isinstance(atom, jax_core.Literal) else values[atom]

    for equation in jaxpr.eqns:
      outputs = self.visit(equation, [read(atom) for atom in equation.invars])
      values |= zip(equation.outvars, outputs, strict=True)
    return [read(atom) for atom in jaxpr.outvars]

  def visit(self, equation: _types.Equation, inputs: list[_Value]) -> Sequence[_Value]:
    """Returns the values of an equation's results.

    Runs the programs inside the equation, or calls :meth:`operation` if there are none to enter.
    """
    name, settings = equation.primitive.name, equation.params
    if name == "scan":
      consts, carries = scan_operands(equation)
      return self.loop(equation, settings["jaxpr"], inputs, slice(consts, consts + carries))
    if name == "while":
      inputs = inputs[settings["cond_nconsts"] :]
      carry = slice(settings["body_nconsts"], len(inputs))
      return self.loop(equation, settings["body_jaxpr"], inputs, carry)
    if name == "cond":
      return self.branches(settings["branches"], inputs[1:])
    program = _called_program(equation)
    return self.operation(equation, inputs) if program is None else self.run(program, inputs)

  def loop(
    self, equation: _types.Equation, body: _types.Jaxpr, inputs: list[_Value], carry: slice
  ) -> Sequence[_Value]:
    """Returns the values of a loop's results; ``inputs[carry]`` are carried between iterations."""
    return self.run(body, inputs)

  def find_fixpoint(
    self, body: Callable[[list[_Value]], list[_Value]], inputs: list[_Value], carry: slice
  ) -> list[_Value]:
    """Runs a loop's body until joining its carries changes nothing; returns the last results."""
    while True:
      outputs = body(inputs)
      # The body's results begin with the carries, so `zip` stops after these.
      joined = list(map(self.join, zip(inputs[carry], outputs, strict=False)))
      if joined == inputs[carry]:
        return outputs
      inputs = [*inputs[: carry.start], *joined, *inputs[carry.stop :]]

  def branches(self, branches: Sequence[_types.Jaxpr], inputs: list[_Value]) -> Sequence[_Value]:
    """Returns the values of a conditional's results, each joined over all branches."""
    results = [self.run(branch, inputs) for branch in branches]
    return list(map(self.join, zip(*results, strict=True)))


class Evaluator(Interpreter[_Value]):
  """Computes a program with changed equations, on values that are pytrees of arrays.

  An evaluator enters only plain calls, such as ``jit``. It keeps scans and custom derivatives, for
  example, as single equations, which JAX differentiates.
  """

  def run(self, program: _types.Program, arguments: Sequence[_Value]) -> list[_Value]:
    self._template: Any = getattr(program, "jaxpr", program)
    return super().run(program, arguments)

  def constant(self, value: Any) -> Any:
    return value

  def operation(self, equation: _types.Equation, inputs: list[Any]) -> Sequence[Any]:
    return self.bind(equation, inputs)

  def visit(self, equation: _types.Equation, inputs: list[_Value]) -> Sequence[_Value]:
    """Computes the results of an equation; enters plain calls.

    The program of a ``jax.checkpoint`` is computed inside a new ``jax.checkpoint``.
    """
    program = _called_program(equation)
    if program is None or not is_plain_call(equation):
      return self.operation(equation, inputs)
    run: Callable[[list[_Value]], list[_Value]] = functools.partial(self.run, program)
    if "policy" in equation.params:  # a call of `jax.checkpoint`
      settings = {name: equation.params[name] for name in ("policy", "prevent_cse")}
      run = jax.checkpoint(run, **settings)
    return run(inputs)

  def bind(self, equation: _types.Equation, values: Sequence[Any]) -> list[Any]:
    """Computes the results of one equation, which is not changed, from its operands `values`.

    JAX computes a program that consists of this equation alone.
    """
    atoms = zip(equation.invars, values, strict=True)
    inputs = {atom: value for atom, value in atoms if not isinstance(atom, jax_core.Literal)}
    program = _with_equations(self._template, [equation], list(inputs), equation.outvars)
    return jax_core.jaxpr_as_fun(jax_core.ClosedJaxpr(program, []))(*inputs.values())


def _with_equations(
  jaxpr: Any, equations: Sequence[_types.Equation], inputs: Sequence[Any], outputs: Sequence[Any]
) -> Any:
  """Returns a jaxpr with other equations, inputs and results, without constants."""
  names = {"arg_names": ("",) * len(inputs), "result_paths": ("",) * len(outputs)}
  return jaxpr.replace(
    constvars=[],
    invars=list(inputs),
    outvars=list(outputs),
    eqns=list(equations),
    effects=frozenset().union(*(equation.effects for equation in equations)),
    debug_info=jaxpr.debug_info._replace(**names),
  )


def constant_results(program: _types.Jaxpr) -> dict[int, jax.Array]:
  """Computes the results of a program that do not depend on its arguments, by number."""
  # Without calls, some of whose results may depend on arguments, and others not.
  inline = functools.partial(Evaluator[Any]().run, program)
  program = jax.make_jaxpr(lambda *arguments: inline(arguments))(*program.in_avals)
  jaxpr = program.jaxpr
  depending = set(jaxpr.invars)
  equations = []
  for equation in jaxpr.eqns:
    if any(not isinstance(x, jax_core.Literal) and x in depending for x in equation.invars):
      depending |= set(equation.outvars)
    else:
      equations.append(equation)
  results = [
    i
    for i, x in enumerate(jaxpr.outvars)
    if not isinstance(x, jax_core.Literal) and x not in depending
  ]
  outputs = [jaxpr.outvars[i] for i in results]
  hoisted = _with_equations(jaxpr, equations, jaxpr.constvars, outputs)
  values = jax_core.jaxpr_as_fun(jax_core.ClosedJaxpr(hoisted, []))(*program.consts)
  return dict(zip(results, values, strict=True))


def scan_operands(equation: _types.Equation) -> tuple[int, int]:
  """Returns how many of a scan's operands are constants, and how many are carries.

  Constants come first, then carries, then sliced arrays. Only sliced arrays have another rank in
  the body of the scan, so comparing ranks tells the numbers. The scan's parameters tell the
  numbers, too, but the names of the parameters differ between versions of JAX.
  """
  body = equation.params["jaxpr"]
  body = getattr(body, "jaxpr", body)

  def count_unsliced(outer: Sequence[_types.Atom], inner: Sequence[_types.Atom]) -> int:
    pairs = zip(outer, inner, strict=True)
    return sum(len(x.aval.shape) == len(y.aval.shape) for x, y in pairs)

  carries = count_unsliced(equation.outvars, body.outvars)
  return count_unsliced(equation.invars, body.invars) - carries, carries


def sub_jaxprs(equation: _types.Equation) -> Iterator[_types.Program]:
  for setting in equation.params.values():
    for item in setting if isinstance(setting, list | tuple) else [setting]:
      if isinstance(item, jax_core.ClosedJaxpr | jax_core.Jaxpr):
        yield item


def is_plain_call(equation: _types.Equation) -> bool:
  """Returns whether an equation does nothing but compute its program."""
  return equation.primitive.name in _PLAIN_CALLS and _called_program(equation) is not None


def _called_program(equation: _types.Equation) -> _types.Program | None:
  """Returns the program that an equation calls, or None if the equation is not a call."""
  programs = list(sub_jaxprs(equation))
  if len(programs) != 1:
    return None
  jaxpr = getattr(programs[0], "jaxpr", programs[0])
  sizes = (len(jaxpr.invars), len(jaxpr.outvars))
  return programs[0] if sizes == (len(equation.invars), len(equation.outvars)) else None

"""An interpreter of traced programs.

JAX traces a function to a *jaxpr*: a list of equations, each of which applies a *primitive* to
variables and gives others. :class:`Interpreter` walks over the equations and gives each variable a
value of the analysis's own kind: an array, a number, a set of leaves. A subclass says how an
equation makes values of values; the interpreter enters the programs inside equations: scans, while
loops, conditionals, and calls (``jit``, ``checkpoint``, custom derivatives, ``shard_map``, ...),
which are all equations with one program of the same arguments and results.

The longest chain of products in a program, for example:

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

An :class:`Evaluator` computes the program again, with changed equations.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
import functools
from typing import Any, Generic, TypeVar

import jax
from jax.extend import core as jax_core

_Value = TypeVar("_Value")

# Calls that mean no more than their program; a custom derivative means more.
PLAIN_CALLS = ("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2")


def uncached(function: Callable[..., Any]) -> Callable[..., Any]:
  """A function under a new identity, so that it is traced, and warns, as it is now.

  JAX would hand out an earlier trace, also where a function that this one calls was redefined
  since, as in a notebook (XLA 25).
  """
  return lambda *args: function(*args)


class Interpreter(Generic[_Value]):
  """Follows a program, equation by equation; subclasses are the analyses.

  A subclass defines :meth:`constant`, :meth:`operation` and :meth:`join`. It may override
  :meth:`loop`, of which one round is followed, and :meth:`branches`.
  """

  def constant(self, value: Any) -> _Value:
    """The value of a constant; a neutral one in all analyses."""
    raise NotImplementedError

  def operation(self, equation: Any, inputs: list[_Value]) -> Sequence[_Value]:
    """The results of an equation that is not entered."""
    raise NotImplementedError

  def join(self, values: Sequence[_Value]) -> _Value:
    """The value of a result of which the program computes one of several values."""
    raise NotImplementedError

  def run(self, program: Any, arguments: Sequence[_Value]) -> list[_Value]:
    """The results of a program, closed or not."""
    constants = map(self.constant, getattr(program, "consts", ()))
    jaxpr = getattr(program, "jaxpr", program)
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *arguments], strict=True))

    def read(atom: Any) -> _Value:
      return self.constant(atom.val) if isinstance(atom, jax_core.Literal) else values[atom]

    for equation in jaxpr.eqns:
      outputs = self.visit(equation, [read(atom) for atom in equation.invars])
      values |= zip(equation.outvars, outputs, strict=True)
    return [read(atom) for atom in jaxpr.outvars]

  def visit(self, equation: Any, inputs: list[_Value]) -> Sequence[_Value]:
    """The results of an equation: of the program in it, or of :meth:`operation`."""
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
    program = _called(equation)
    return self.operation(equation, inputs) if program is None else self.run(program, inputs)

  def loop(self, equation: Any, body: Any, inputs: list[_Value], carry: slice) -> Sequence[_Value]:
    """The results of a loop after one round; `inputs` at `carry` come from the round before."""
    return self.run(body, inputs)

  def settle(
    self, body: Callable[[list[_Value]], list[_Value]], inputs: list[_Value], carry: slice
  ) -> list[_Value]:
    """The results of a loop at its fixpoint: rounds that start with the carry of all before."""
    while True:
      outputs = body(inputs)
      # Results begin with the carries.
      joined = list(map(self.join, zip(inputs[carry], outputs, strict=False)))
      if joined == inputs[carry]:
        return outputs
      inputs = [*inputs[: carry.start], *joined, *inputs[carry.stop :]]

  def branches(self, branches: Sequence[Any], inputs: list[_Value]) -> Sequence[_Value]:
    """The results of a conditional."""
    results = [self.run(branch, inputs) for branch in branches]
    return list(map(self.join, zip(*results, strict=True)))


class Evaluator(Interpreter[_Value]):
  """Computes a program again; values are pytrees of arrays.

  Only plain calls are entered, for other equations have derivatives or control flow of their own.
  """

  def run(self, program: Any, arguments: Sequence[_Value]) -> list[_Value]:
    """The results of a program, closed or not."""
    self._template = getattr(program, "jaxpr", program)
    return super().run(program, arguments)

  def constant(self, value: Any) -> Any:
    """A constant as it is."""
    return value

  def visit(self, equation: Any, inputs: list[_Value]) -> Sequence[_Value]:
    """As :meth:`Interpreter.visit`; what ``checkpoint`` did not save is again not saved."""
    program = _called(equation) if equation.primitive.name in PLAIN_CALLS else None
    if program is None:
      return self.operation(equation, inputs)
    run = functools.partial(self.run, program)
    return checkpointed(run, equation)(inputs) if is_checkpoint(equation) else run(inputs)

  def bind(self, equation: Any, values: Sequence[Any]) -> list[Any]:
    """Computes one equation, as a program of its own."""
    atoms = zip(equation.invars, values, strict=True)
    inputs = {atom: value for atom, value in atoms if not isinstance(atom, jax_core.Literal)}
    program = part(self._template, list(inputs), equation.outvars, [equation])
    return compute(program, inputs.values())


def scan_operands(equation: Any) -> tuple[int, int]:
  """How many operands of a scan are constants, and how many are carried; slices come last.

  By their ranks, for JAX's settings that tell have other names in each version.
  """
  body = equation.params["jaxpr"]
  body = getattr(body, "jaxpr", body)

  def whole(outer: Sequence[Any], inner: Sequence[Any]) -> int:
    pairs = zip(outer, inner, strict=True)
    return sum(len(x.aval.shape) == len(y.aval.shape) for x, y in pairs)

  carries = whole(equation.outvars, body.outvars)
  return whole(equation.invars, body.invars) - carries, carries


def is_checkpoint(equation: Any) -> bool:
  """Whether an equation is a call of ``jax.checkpoint``."""
  return "policy" in equation.params


def checkpointed(function: Callable[..., Any], equation: Any) -> Callable[..., Any]:
  """A function under ``jax.checkpoint`` with the settings of an equation."""
  settings = {name: equation.params[name] for name in ("policy", "prevent_cse")}
  return jax.checkpoint(function, **settings)


def part(jaxpr: Any, inputs: list[Any], outputs: list[Any], equations: list[Any]) -> Any:
  """A program of some equations of another one, between variables of it."""
  names = {"arg_names": ("",) * len(inputs), "result_paths": ("",) * len(outputs)}
  return jaxpr.replace(
    constvars=[],
    invars=inputs,
    outvars=outputs,
    eqns=equations,
    effects=frozenset().union(*(equation.effects for equation in equations)),
    debug_info=jaxpr.debug_info._replace(**names),
  )


def compute(program: Any, arguments: Iterable[Any]) -> list[Any]:
  """The results of a program without constants."""
  return jax_core.jaxpr_as_fun(jax_core.ClosedJaxpr(program, []))(*arguments)


def sub_jaxprs(equation: Any) -> Iterator[Any]:
  """The programs inside an equation, closed or not."""
  for setting in equation.params.values():
    for item in setting if isinstance(setting, list | tuple) else [setting]:
      if isinstance(item, jax_core.ClosedJaxpr | jax_core.Jaxpr):
        yield item


def _called(equation: Any) -> Any:
  """The one program that an equation stands for, with its arguments and results, or None."""
  programs = list(sub_jaxprs(equation))
  if len(programs) != 1:
    return None
  jaxpr = getattr(programs[0], "jaxpr", programs[0])
  sizes = (len(jaxpr.invars), len(jaxpr.outvars))
  return programs[0] if sizes == (len(equation.invars), len(equation.outvars)) else None

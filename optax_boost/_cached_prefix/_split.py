"""A loss in two programs: the frozen prefix, from data to activations, and the rest.

An activation is a value that depends on data and on frozen params and on nothing trained, and that
something trained works on. What depends on frozen params alone (a tied embedding) is computed in
the rest, and so is what depends on data alone (a mask, targets).
"""

from collections.abc import Callable
from collections.abc import Sequence
import functools
import operator
import re
from typing import Any
from typing import NamedTuple

import jax
from jax.extend import core as jax_core
import numpy as np

from optax_boost import _cut_scans
from optax_boost import _jaxpr

_TRAINED, _FROZEN, _DATA, _RANDOM = 1, 2, 4, 8

_METHOD = "cache_prefix"
# Primitives that read and write their operands and do little else; calls count by their program.
_CHEAP = re.compile(
  "abs|add|and|broadcast_in_dim|clamp|concatenate|convert_element_type|copy|cos|"
  "custom_jvp_call|div|eq|erf|exp|expand_dims|ge|gt|integer_pow|is_finite|jit|le|log|log1p|"
  "logistic|lt|max|min|mul|ne|neg|not|or|pjit|pow|reduce_max|reduce_min|reduce_precision|"
  "reduce_sum|reshape|rsqrt|select_n|sign|sin|slice|sqrt|square|squeeze|stop_gradient|sub|tanh|"
  "transpose"
)


class Split(NamedTuple):
  """The two programs of a loss."""

  activations: Callable[..., Any]  # from params, batch and key
  rest: Callable[..., Any]  # from params, batch with key, and the activations to the results
  shapes: list[jax.ShapeDtypeStruct]  # of the activations


def split(
  loss_fn: Callable[..., Any],
  params: Any,
  batch: Any,
  rng: Any,
  frozen: Sequence[bool | np.ndarray],
) -> Split:
  """Splits ``loss_fn(params, batch)``, or with a key ``loss_fn(params, batch, rng)``.

  `frozen` tells for each leaf whether it is frozen, or which of its layers are.
  """
  arguments = (params, batch) if rng is None else (params, batch, rng)
  closed, results = jax.make_jaxpr(_jaxpr.anew(loss_fn), return_shape=True)(*arguments)
  leaves = jax.tree.leaves(params)
  others = jax.tree.leaves(arguments[1:])

  def inlined(held: list[Any], trained: list[Any], others: list[Any]) -> list[Any]:
    inputs = list(map(_cut_scans.in_parts, held, trained, frozen))
    return _cut_scans.run(closed, [*inputs, *others], inline=True)

  # Each leaf twice: what is frozen is taken from the first, what is trained from the second.
  inputs = [*leaves, *leaves, *others]
  whole = jax.make_jaxpr(inlined)(leaves, leaves, others)
  keys = len(jax.tree.leaves(rng))
  kinds = [
    *[_FROZEN] * len(leaves),
    *[_TRAINED] * len(leaves),
    *[_DATA] * (len(others) - keys),
    *[_RANDOM] * keys,
  ]
  jaxpr = _hoisted(whole, kinds, inputs)
  kind = _dependences(jaxpr.jaxpr, kinds)
  border, before, after = _cut(jaxpr.jaxpr, kind)
  _check_border(jaxpr.jaxpr, kind, border)
  border, again = _without_cheap(jaxpr.jaxpr, kind, border)
  again |= set(map(id, after))
  after = [equation for equation in jaxpr.eqns if id(equation) in again]
  variables = [*jaxpr.jaxpr.constvars, *jaxpr.jaxpr.invars]
  first = _jaxpr.part(jaxpr.jaxpr, variables, border, before)
  second = _jaxpr.part(jaxpr.jaxpr, [*variables, *border], jaxpr.jaxpr.outvars, after)

  def activations(params: Any, *data: Any) -> list[Any]:
    own = jax.tree.leaves(params)
    return _jaxpr.compute(first, [*jaxpr.consts, *own, *own, *jax.tree.leaves(data)])

  def rest(params: Any, data: Any, activations: Sequence[Any]) -> Any:
    own = jax.tree.leaves(params)
    held = jax.lax.stop_gradient(own)
    values = [*jaxpr.consts, *held, *own, *jax.tree.leaves(data), *activations]
    return jax.tree.unflatten(jax.tree.structure(results), _jaxpr.compute(second, values))

  shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in border]
  return Split(activations, rest, shapes)


def _variables(atoms: Sequence[Any]) -> list[Any]:
  return [atom for atom in atoms if not isinstance(atom, jax_core.Literal)]


def _depends(atoms: Sequence[Any], kind: dict[Any, int]) -> int:
  """What some operands together depend on."""
  return functools.reduce(operator.or_, (kind[v] for v in _variables(atoms)), 0)


def _dependences(jaxpr: Any, kinds: Sequence[int]) -> dict[Any, int]:
  """What each variable depends on."""
  kind = dict(zip(jaxpr.invars, kinds, strict=True)) | dict.fromkeys(jaxpr.constvars, 0)
  for equation in jaxpr.eqns:
    kind |= dict.fromkeys(equation.outvars, _depends(equation.invars, kind))
  return kind


def _cut(jaxpr: Any, kind: dict[Any, int]) -> tuple[list[Any], list[Any], list[Any]]:
  """The activations, the equations up to them, and those that make something else."""
  before = [e for e in jaxpr.eqns if not _depends(e.invars, kind) & _TRAINED]
  after = [e for e in jaxpr.eqns if not _is_activation(_depends(e.invars, kind))]
  used = [atom for equation in after for atom in equation.invars] + list(jaxpr.outvars)
  variables = dict.fromkeys(_variables(used))
  return [v for v in variables if _is_activation(kind[v])], before, after


def _hoisted(program: Any, kinds: Sequence[int], arguments: Sequence[Any]) -> Any:
  """A program with its activations outside of what ``jax.checkpoint`` computes twice."""
  kind = _dependences(getattr(program, "jaxpr", program), kinds)
  return jax.make_jaxpr(lambda *values: _Hoisting(kind).run(program, values))(*arguments)


class _Hoisting(_jaxpr.Evaluator[Any]):
  """Computes a program again, each ``jax.checkpoint`` as its activations and a smaller one."""

  def __init__(self, kind: dict[Any, int]) -> None:
    self._kind = kind

  def visit(self, equation: Any, inputs: list[Any]) -> Sequence[Any]:
    if not _jaxpr.is_checkpoint(equation):
      return self.bind(equation, inputs)
    kinds = [_depends([atom], self._kind) for atom in equation.invars]
    closed = _hoisted(equation.params["jaxpr"], kinds, inputs)
    jaxpr, values = closed.jaxpr, [*closed.consts, *inputs]
    border, before, after = _cut(jaxpr, _dependences(jaxpr, kinds))
    variables = [*jaxpr.constvars, *jaxpr.invars]
    kept = _jaxpr.compute(_jaxpr.part(jaxpr, variables, border, before), values)
    rest = _jaxpr.part(jaxpr, [*variables, *border], jaxpr.outvars, after)
    compute_rest = functools.partial(_jaxpr.compute, rest)
    return _jaxpr.checkpointed(compute_rest, equation)([*values, *kept])


def _without_cheap(
  jaxpr: Any, kind: dict[Any, int], border: list[Any]
) -> tuple[list[Any], set[int]]:
  """The activations to keep, and the equations (by id) that compute the others from them.

  Cheap ones are computed again, such as the normalized input of the first trained layer.
  """
  makers = {variable: equation for equation in jaxpr.eqns for variable in equation.outvars}
  again: set[int] = set()

  def equations_from(others: set[Any], variable: Any) -> set[int] | None:
    """The equations from other activations to one; None: some are expensive, or it needs none."""
    found: set[int] = set()
    missing, used = [variable], False
    while missing:
      equation = makers.get(missing.pop())
      if equation is None or not _is_cheap(equation):
        return None
      if id(equation) not in found:
        found.add(id(equation))
        operands = _variables(equation.invars)
        used |= not others.isdisjoint(operands)
        missing += [v for v in operands if _is_activation(kind[v]) and v not in others]
    return found if used else None

  kept = list(border)
  for variable in reversed(border):
    equations = equations_from(set(kept) - {variable}, variable)
    if equations is not None:
      kept.remove(variable)
      again |= equations
  return kept, again


def _is_cheap(equation: Any) -> bool:
  inner = (e for p in _jaxpr.sub_jaxprs(equation) for e in getattr(p, "jaxpr", p).eqns)
  return bool(_CHEAP.fullmatch(equation.primitive.name)) and all(map(_is_cheap, inner))


def _is_activation(kind: int) -> bool:
  return not kind & _TRAINED and bool(kind & _FROZEN) and bool(kind & (_DATA | _RANDOM))


def _loops_over_data(equation: Any, kind: dict[Any, int]) -> bool:
  """Whether a scan slices data and works on them with frozen params and with trained ones."""
  if equation.primitive.name != "scan":
    return False
  consts, carries = _jaxpr.scan_operands(equation)
  constants = _depends(equation.invars[:consts], kind)
  slices = [_depends([atom], kind) for atom in equation.invars[consts + carries :]]
  return bool(constants & _FROZEN and constants & _TRAINED and _DATA in slices)


def _check_border(jaxpr: Any, kind: dict[Any, int], border: Sequence[Any]) -> None:
  if not border and any(_loops_over_data(equation, kind) for equation in jaxpr.eqns):
    raise ValueError(
      f"`{_METHOD}` found no activations: the loss scans over parts of the batch (micro-batches),"
      " and a scan's body is not split. Take the scan out of the loss: `accumulate` sums up"
      " gradients of micro-batches, each of which is a batch of the cache."
    )
  if not border:
    raise ValueError(
      f"`{_METHOD}` found no activations: nothing is computed from the data and the frozen groups"
      " alone. Freeze the groups from the first on, the embedding among them, and pass the number"
      " that is frozen in every step."
    )
  if any(kind[variable] & _RANDOM for variable in border):
    raise ValueError(
      f"`{_METHOD}` needs a prefix without random numbers; the frozen groups draw some from the"
      " loss's key (dropout). Turn them off there."
    )

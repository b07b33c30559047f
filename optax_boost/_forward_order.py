"""The order in which a loss uses its params, read from its trace."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple
from typing import TypeAlias

import jax
from jax.extend import core as jax_core
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost import _jaxpr


class _Value(NamedTuple):
  """The ingredients of a value of the trace."""

  data: bool  # whether data went into it
  params: frozenset[int]  # the leaves that it is made of, as long as it has not met data
  penalty: bool = False  # whether it is a number that sums up params, as a weight decay does


_NEUTRAL = _Value(False, frozenset())
_DATA = _Value(True, frozenset())

# A use is noted as the tuple of leaves that meet data in one equation. A leaf that meets it as part
# of a penalty is noted as ~leaf.
_Uses: TypeAlias = list[tuple[int, ...]]


def forward_uses(
  loss_fn: Callable[..., Any],
  params: optax.Params,
  *args: Any,
  data: Sequence[bool | None],
) -> list[int]:
  """The params' leaves, with repetitions, in the order in which the loss brings them to data.

  A `data` flag of None makes its argument a constant. Constants and scalar arguments count as data
  only where all leaves would otherwise meet data in one place or nowhere.
  """
  closed = jax.make_jaxpr(loss_fn)(params, *args)
  count = len(jax.tree.leaves(params))
  arguments = zip(closed.jaxpr.invars[count:], data, strict=True)
  kinds = [_argument(variable.aval, flag) for variable, flag in arguments]
  best: _Uses = []
  places = -1
  for accepted in ({_ARRAY}, {_ARRAY, _SCALAR}, {_ARRAY, _SCALAR, _CONSTANT}):
    values = [_Value(False, frozenset([i])) for i in range(count)]
    values += [_DATA if kind in accepted else _NEUTRAL for kind in kinds]
    uses: _Uses = []
    outputs = _inner(closed, values, uses, _DATA if _CONSTANT in accepted else _NEUTRAL)
    if outputs:
      # A loss without data: nothing but a penalty.
      uses.append(tuple(~leaf for leaf in sorted(outputs[0].params)))
    if _count_places(uses) > places:
      best, places = uses, _count_places(uses)
    if places > 1:
      break
  events = [event for use in best for event in use]
  uses_of_data = [event for event in events if event >= 0]
  return uses_of_data + sorted({~event for event in events if event < 0} - set(uses_of_data))


_ARRAY, _SCALAR, _CONSTANT = "array", "scalar", "constant"


def _argument(aval: Any, is_data: bool | None) -> str | None:
  # Noise on the weights, drawn ahead of the forward pass, is not where they are used.
  if is_data is False or jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
    return None
  if is_data is None:
    return _CONSTANT if aval.size > 1 else None
  return _ARRAY if aval.size > 1 else _SCALAR


def _count_places(uses: _Uses) -> int:
  """In how many equations leaves meet data for the first time."""
  seen: set[int] = set()
  places = 0
  for use in uses:
    new = {leaf for leaf in use if leaf >= 0} - seen
    places += bool(new)
    seen |= new
  return places


def _inner(jaxpr: Any, arguments: Sequence[_Value], uses: _Uses, constant: _Value) -> list[_Value]:
  """Follows the equations and notes the uses; `constant` stands for closed-over arrays."""

  def closed_over(value: Any) -> _Value:
    return constant if np.size(value) > 1 else _NEUTRAL

  constants = [closed_over(value) for value in getattr(jaxpr, "consts", ())]
  jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
  values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *arguments], strict=True))

  def read(atom: Any) -> _Value:
    return closed_over(atom.val) if isinstance(atom, jax_core.Literal) else values[atom]

  for equation in jaxpr.eqns:
    outputs = _equation(equation, [read(atom) for atom in equation.invars], uses, constant)
    values.update(zip(equation.outvars, outputs, strict=True))
  return [read(atom) for atom in jaxpr.outvars]


def _equation(equation: Any, inputs: list[_Value], uses: _Uses, constant: _Value) -> list[_Value]:
  name, settings = equation.primitive.name, equation.params
  if name == "scan":
    consts, carries = settings["num_consts"], settings["num_carry"]
    return _loop(settings["jaxpr"], inputs, consts, carries, uses, constant)
  if name == "while":
    skipped, consts = settings["cond_nconsts"], settings["body_nconsts"]
    body = inputs[skipped:]
    return _loop(settings["body_jaxpr"], body, consts, len(body) - consts, uses, constant)
  if name == "cond":
    return _branches(settings["branches"], inputs[1:], uses, constant)
  call = _jaxpr.inlined(equation)
  if call is not None:
    return _inner(call, inputs, uses, constant)
  joined = _join(inputs)
  if joined.data and joined.params:
    # Where a penalty meets the data is not where its params are used.
    used = {leaf for value in inputs if not value.penalty for leaf in value.params}
    uses.append((*sorted(used), *(~leaf for leaf in sorted(joined.params - used))))
    return [_DATA] * len(equation.outvars)
  summed = any(
    v.penalty or (v.params and atom.aval.shape)
    for v, atom in zip(inputs, equation.invars, strict=True)
  )
  return [
    joined._replace(penalty=bool(joined.params) and summed and not variable.aval.shape)
    for variable in equation.outvars
  ]


def _join(values: Iterable[_Value]) -> _Value:
  values = list(values)
  return _Value(any(v.data for v in values), frozenset[int]().union(*(v.params for v in values)))


def _loop(
  body: Any, inputs: list[_Value], consts: int, carries: int, uses: _Uses, constant: _Value
) -> list[_Value]:
  carry = inputs[consts : consts + carries]
  while True:
    # From the second round on the carry is a result of the body.
    arguments = [*inputs[:consts], *carry, *inputs[consts + carries :]]
    outputs = _inner(body, arguments, [], constant)
    merged = [_join(pair) for pair in zip(carry, outputs[:carries], strict=True)]
    if merged == carry:
      break
    carry = merged
  return _inner(body, arguments, uses, constant)


def _branches(
  branches: Sequence[Any], inputs: list[_Value], uses: _Uses, constant: _Value
) -> list[_Value]:
  all_uses: _Uses = []
  results = []
  for branch in branches:
    own: _Uses = []
    results.append(_inner(branch, inputs, own, constant))
    # A leaf of two branches is used once.
    noted = {leaf for use in all_uses for leaf in use}
    all_uses += [tuple(leaf for leaf in use if leaf not in noted) for use in own]
  uses += all_uses
  return [_join(values) for values in zip(*results, strict=True)]

"""The order in which a loss uses its params, read from its trace."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import jax
from jax.extend import core as jax_core
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost import _jaxpr


class _Value(NamedTuple):
  """What a value of the trace was made from.

  Attributes:
    data: whether data went into it.
    params: the leaves of the params that it is made of, as long as it has not met data.
    penalty: whether it is a number that sums up params, as a weight decay in the loss is.
  """

  data: bool
  params: frozenset[int]
  penalty: bool = False


_NEUTRAL = _Value(False, frozenset())
_DATA = _Value(True, frozenset())


def forward_uses(loss_fn: Callable[..., Any], params: optax.Params, *args: Any) -> list[int]:
  """The params' leaves in the order in which the loss brings them together with data.

  Args:
    loss_fn: ``loss_fn(params, *args)``.
    params: the params.
    *args: further arguments.

  Returns:
    Numbers of leaves, in the order of ``jax.tree.leaves``; a leaf that is used several times
    occurs several times, one that is never used does not.
  """
  closed = jax.make_jaxpr(loss_fn)(params, *args)
  count = len(jax.tree.leaves(params))
  values = [
    _Value(False, frozenset([i])) if i < count else _argument(variable.aval)
    for i, variable in enumerate(closed.jaxpr.invars)
  ]
  events: list[int] = []
  outputs = _walk(closed.jaxpr, _constants(closed), values, events)
  if outputs:
    # A loss without data: nothing but a penalty.
    events += [~leaf for leaf in sorted(outputs[0].params)]
  uses = [event for event in events if event >= 0]
  return uses + sorted({~event for event in events if event < 0} - set(uses))


def _argument(aval: Any) -> _Value:
  # Noise on the weights, drawn ahead of the forward pass, is not where they are used.
  return _NEUTRAL if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key) else _DATA


def _constants(closed: jax_core.ClosedJaxpr) -> list[_Value]:
  return [_DATA if np.size(c) > 1 else _NEUTRAL for c in closed.consts]


def _walk(
  jaxpr: Any, constants: Sequence[_Value], arguments: Sequence[_Value], events: list[int]
) -> list[_Value]:
  """Follows the equations, notes the uses, and says what the outputs are made from."""
  known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *arguments], strict=True))

  def read(atom: Any) -> _Value:
    return _NEUTRAL if isinstance(atom, jax_core.Literal) else known[atom]

  for equation in jaxpr.eqns:
    outputs = _equation(equation, [read(atom) for atom in equation.invars], events)
    known.update(zip(equation.outvars, outputs, strict=True))
  return [read(atom) for atom in jaxpr.outvars]


def _inner(jaxpr: Any, arguments: Sequence[_Value], events: list[int]) -> list[_Value]:
  if isinstance(jaxpr, jax_core.ClosedJaxpr):
    return _walk(jaxpr.jaxpr, _constants(jaxpr), arguments, events)
  return _walk(jaxpr, [], arguments, events)


def _equation(equation: Any, inputs: list[_Value], events: list[int]) -> list[_Value]:
  name, settings = equation.primitive.name, equation.params
  if name == "scan":
    consts, carries = settings["num_consts"], settings["num_carry"]
    return _loop(settings["jaxpr"], inputs, consts, carries, events)
  if name == "while":
    skipped, consts = settings["cond_nconsts"], settings["body_nconsts"]
    body = inputs[skipped:]
    return _loop(settings["body_jaxpr"], body, consts, len(body) - consts, events)
  if name == "cond":
    return _branches(settings["branches"], inputs[1:], events)
  call = _jaxpr.inlined(equation)
  if call is not None:
    return _inner(call, inputs, events)
  joined = _join(inputs)
  if joined.data and joined.params:
    # Where a penalty meets the data is not where its params are used; noted as ~leaf.
    uses = [leaf for value in inputs if not value.penalty for leaf in value.params]
    events += sorted(set(uses))
    events += [~leaf for leaf in sorted(joined.params - set(uses))]
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
  body: Any, inputs: list[_Value], consts: int, carries: int, events: list[int]
) -> list[_Value]:
  carry = inputs[consts : consts + carries]
  while True:
    # From the second round on the carry is what the body returns.
    arguments = [*inputs[:consts], *carry, *inputs[consts + carries :]]
    outputs = _inner(body, arguments, [])
    merged = [_join(pair) for pair in zip(carry, outputs[:carries], strict=True)]
    if merged == carry:
      break
    carry = merged
  return _inner(body, arguments, events)


def _branches(branches: Sequence[Any], inputs: list[_Value], events: list[int]) -> list[_Value]:
  found: list[int] = []
  results = []
  for branch in branches:
    own: list[int] = []
    results.append(_inner(branch, inputs, own))
    # What two branches use is used once.
    found += [leaf for leaf in own if leaf not in found]
  events += found
  return [_join(values) for values in zip(*results, strict=True)]

"""The order in which a loss uses its params, read from its trace."""

from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_boost import _jaxpr


class _Value(NamedTuple):
  """The ingredients of a value of the trace."""

  data: bool = False  # whether data went into it
  params: frozenset[int] = frozenset()  # the leaves that it is made of, until they meet data
  penalty: bool = False  # whether it is a number that sums up params, as a weight decay does


_NEUTRAL, _DATA = _Value(), _Value(data=True)
_ARRAY, _SCALAR, _CONSTANT, _KEY = "array", "scalar", "constant", "key"


def forward_uses(program: Any, leaves: int, data: Sequence[bool | None]) -> list[int]:
  """The params' leaves, with repetitions, in the order in which a traced loss brings them to data.

  `data` flags the other arguments; None makes one a constant. Scalars, constants and noise count as
  data, in this order, only where all leaves would otherwise meet data in one place or nowhere.
  """
  params = [_Value(params=frozenset([i])) for i in range(leaves)]
  arguments = zip(program.jaxpr.invars[leaves:], data, strict=True)
  kinds = [_argument(variable.aval, flag) for variable, flag in arguments]
  candidates = []
  accepted: set[str | None] = set()
  for kind in (_ARRAY, _SCALAR, _CONSTANT, _KEY):
    accepted = {*accepted, kind}
    order = _ForwardOrder(_DATA if _CONSTANT in accepted else _NEUTRAL, _KEY in accepted)
    values = [_DATA if kind in accepted else _NEUTRAL for kind in kinds]
    outputs = order.run(program, [*params, *values])
    if outputs:
      # A loss without data: nothing but a penalty.
      order.uses.append(tuple(~leaf for leaf in sorted(outputs[0].params)))
    candidates.append(order)
    if order.count_places() > 1:
      break
  best = max(candidates, key=_ForwardOrder.count_places)
  events = [event for use in best.uses for event in use]
  uses_of_data = [event for event in events if event >= 0]
  return uses_of_data + sorted({~event for event in events if event < 0} - set(uses_of_data))


def _argument(aval: Any, is_data: bool | None) -> str | None:
  if is_data is False:
    return None
  # Noise on the weights, drawn ahead of the forward pass, is not where they are used.
  if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
    return _KEY
  if is_data is None:
    return _CONSTANT if aval.size > 1 else None
  return _ARRAY if aval.size > 1 else _SCALAR


class _ForwardOrder(_jaxpr.Interpreter[_Value]):
  """Notes the uses of params: for each equation where they meet data, the tuple of leaves.

  A leaf that meets data as part of a penalty is noted as ~leaf.
  """

  def __init__(self, array_constant: _Value, noise_is_data: bool):
    self.uses: list[tuple[int, ...]] = []
    self._array_constant, self._noise_is_data = array_constant, noise_is_data

  def count_places(self) -> int:
    """In how many equations leaves meet data for the first time."""
    first: dict[int, int] = {}
    for place, use in enumerate(self.uses):
      for leaf in use:
        first.setdefault(leaf, place)
    return len({place for leaf, place in first.items() if leaf >= 0})

  def constant(self, value: Any) -> _Value:
    return self._array_constant if np.size(value) > 1 else _NEUTRAL

  def join(self, values: Sequence[_Value]) -> _Value:
    return _Value(any(v.data for v in values), frozenset[int]().union(*(v.params for v in values)))

  def operation(self, equation: Any, inputs: list[_Value]) -> list[_Value]:
    if equation.primitive.name == "random_wrap":
      # A key that was passed as integers.
      return inputs if self._noise_is_data else [_NEUTRAL]
    if equation.primitive.name == "optimization_barrier":
      return inputs
    joined = self.join(inputs)
    if joined.data and joined.params:
      # Where a penalty meets the data is not where its params are used.
      used = {leaf for value in inputs if not value.penalty for leaf in value.params}
      self.uses.append((*sorted(used), *(~leaf for leaf in sorted(joined.params - used))))
      return [_DATA] * len(equation.outvars)
    summed = any(
      v.penalty or (v.params and atom.aval.shape)
      for v, atom in zip(inputs, equation.invars, strict=True)
    )
    return [
      joined._replace(penalty=bool(joined.params) and summed and not variable.aval.shape)
      for variable in equation.outvars
    ]

  def loop(self, equation: Any, body: Any, inputs: list[_Value], carry: slice) -> list[_Value]:
    noted = len(self.uses)

    def one_round(inputs: list[_Value]) -> list[_Value]:
      del self.uses[noted:]
      return self.run(body, inputs)

    return self.settle(one_round, inputs, carry)

  def branches(self, branches: Sequence[Any], inputs: list[_Value]) -> list[_Value]:
    results = []
    noted: set[int] = set()
    for branch in branches:
      start = len(self.uses)
      results.append(self.run(branch, inputs))
      own = self.uses[start:]
      # A leaf of two branches is used once.
      self.uses[start:] = [tuple(leaf for leaf in use if leaf not in noted) for use in own]
      noted |= {leaf for use in own for leaf in use}
    return list(map(self.join, zip(*results, strict=True)))

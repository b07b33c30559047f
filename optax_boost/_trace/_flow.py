"""The flow of data through the leaves: which leaves are upstream of which leaves.

Leaf A is *upstream* of leaf B if B is used on data (values computed from the batch) that were
computed with A. The order in which a program uses A and B does not tell this, since a program uses
two parallel towers one after the other.

>>> import jax, jax.numpy as jnp
>>> def loss_fn(params, x):
...   left, right = x @ params["left"], x @ params["right"]
...   return jnp.sum((left + right) @ params["top"])
>>> params = {"left": jnp.ones((2, 2)), "right": jnp.ones((2, 2)), "top": jnp.ones((2, 2))}
>>> program = jax.make_jaxpr(loss_fn)(params, jnp.ones((2, 2)))
>>> [sorted(leaves) for leaves in trace_flow(program, 3, [True]).upstream]  # left, right, top
[[], [], [0, 1]]
"""

from collections.abc import Iterable, Sequence
import functools
import operator
from typing import NamedTuple

import jax
import numpy as np

from optax_boost._foundation import _types
from optax_boost._trace import _jaxpr, _leaf_uses, _primitives
from optax_boost._trace._leaf_uses import DataKind


class Flow(NamedTuple):
  """The leaves upstream of each leaf.

  Attributes:
    upstream: for each leaf, the leaves upstream of its first use (in a loop, its first iteration).
    ever_upstream: for each leaf, the leaves upstream of any of its uses, in any loop iteration.
    recurrent: for each loop whose iterations depend on each other, the leaves that every iteration
      uses.
  """

  upstream: tuple[frozenset[int], ...]
  ever_upstream: tuple[frozenset[int], ...]
  recurrent: tuple[frozenset[int], ...]


class _Value(NamedTuple):
  """The abstract value of a variable; a set of leaves is an integer whose bit i is leaf i.

  Attributes:
    is_data: whether the variable was computed from data.
    met_leaves: the leaves that were combined with data in the computation of the variable.
    unmet_leaves: the leaves that the variable was computed from, without data.
    is_penalty: whether the variable is a scalar that sums up params alone, as an L2 penalty.
  """

  is_data: bool = False
  met_leaves: int = 0
  unmet_leaves: int = 0
  is_penalty: bool = False


def trace_flow(program: _types.Jaxpr, num_leaves: int, data: Sequence[bool | None]) -> Flow:
  """Finds out, for each leaf of the params, which leaves are upstream of this leaf.

  The first `num_leaves` arguments of the program are the leaves. `data` has a flag for each other
  argument: True for data, None for constants. At first, only arrays of the batch count as data. If
  fewer than two equations use further leaves on data, the search starts again with one more kind of
  data (:class:`DataKind`).
  """
  for definition in DataKind:
    analysis = _FlowAnalysis(definition)
    loss_arguments = program.jaxpr.invars[num_leaves:]
    arguments = [_Value(unmet_leaves=1 << leaf) for leaf in range(num_leaves)]
    arguments += [
      _Value(is_data=kind is not None and kind <= definition)
      for kind in map(_leaf_uses.data_kind, [v.aval for v in loss_arguments], data)
    ]
    analysis.run(program, arguments)
    if analysis.num_meetings > 1:
      break

  def as_sets(upstream: dict[int, int]) -> tuple[frozenset[int], ...]:
    return tuple(_leaves_in(upstream.get(leaf, 0)) for leaf in range(num_leaves))

  loop_leaves = (_leaves_in(leaves) for leaves in dict.fromkeys(analysis.loops))
  ever = as_sets(analysis.ever_upstream)
  recurrent = tuple(leaves for leaves in loop_leaves if any(leaf in ever[leaf] for leaf in leaves))
  return Flow(as_sets(analysis.upstream), ever, recurrent)


def _leaves_in(bits: int) -> frozenset[int]:
  return frozenset(leaf for leaf in range(bits.bit_length()) if bits >> leaf & 1)


class _FlowAnalysis(_jaxpr.Interpreter[_Value]):
  """Collects the leaves upstream of each leaf, under one definition of data."""

  def __init__(self, definition: DataKind) -> None:
    self._definition = definition
    self.upstream: dict[int, int] = {}
    self.ever_upstream: dict[int, int] = {}
    self.num_meetings = 0
    self.loops: list[int] = []
    self._met = 0  # the leaves that met data in the current loop

  def constant(self, value: jax.typing.ArrayLike) -> _Value:
    return _Value(is_data=self._definition >= DataKind.CONSTANT and np.size(value) > 1)

  def join(self, values: Sequence[_Value]) -> _Value:
    return _Value(
      any(v.is_data for v in values),
      _unite(v.met_leaves for v in values),
      _unite(v.unmet_leaves for v in values),
      all(v.is_penalty or not v.unmet_leaves for v in values) and any(v.is_penalty for v in values),
    )

  def operation(self, equation: _types.Equation, inputs: list[_Value]) -> Sequence[_Value]:
    if _primitives.rule_of(equation).is_identity:
      return inputs
    if equation.primitive.name == "stop_gradient" and inputs[0].is_data:
      # A detached pass of the model is data like a batch, so its leaves are not upstream.
      return [_Value(is_data=True)]
    is_data = any(v.is_data for v in inputs)
    if equation.primitive.name == "random_wrap":
      is_data = is_data and self._definition >= DataKind.NOISE
    unmet_leaves = _unite(v.unmet_leaves for v in inputs)
    if not is_data:
      is_summed = any(
        v.is_penalty or (v.unmet_leaves and atom.aval.shape)
        for v, atom in zip(inputs, equation.invars, strict=True)
      )
      return [
        _Value(unmet_leaves=unmet_leaves, is_penalty=bool(is_summed and not variable.aval.shape))
        for variable in equation.outvars
      ]
    met_leaves = _unite(v.met_leaves for v in inputs)
    meeting = _unite(v.unmet_leaves for v in inputs if not v.is_penalty)
    self._note(meeting, met_leaves)
    return [_Value(True, met_leaves | meeting)] * len(equation.outvars)

  def loop(
    self, equation: _types.Equation, body: _types.Jaxpr, inputs: list[_Value], carry: slice
  ) -> Sequence[_Value]:
    met, self._met = self._met, 0
    outputs = self.find_fixpoint(lambda values: self.run(body, values), inputs, carry)
    shared = self._met & _unite(v.unmet_leaves for v in inputs[: carry.start])
    if shared:
      self.loops.append(shared)
    self._met |= met
    return outputs

  def _note(self, meeting: int, met_leaves: int) -> None:
    """Notes that the leaves `meeting` are used on data that were computed with `met_leaves`."""
    leaves = _leaves_in(meeting)
    self.num_meetings += any(leaf not in self.upstream for leaf in leaves)
    for leaf in leaves:
      self.upstream.setdefault(leaf, met_leaves)
      self.ever_upstream[leaf] = self.ever_upstream.get(leaf, 0) | met_leaves
    self._met |= meeting


def _unite(sets: Iterable[int]) -> int:
  return functools.reduce(operator.or_, sets, 0)

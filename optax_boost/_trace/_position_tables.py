"""Finds the tables of learned positions in the params of a model of tokens.

If the sequences of a batch are cut short (to *windows*), the loss reads fewer entries of a table of
positions. In a table of tokens, the tokens choose the entries, whatever the length. So the loss is
traced for windows and for whole sequences. A leaf is a table of positions if the two programs slice
different shapes from the leaf.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from optax_boost._foundation import _types
from optax_boost._trace import _jaxpr

_SAME_ENTRIES = (
  *("broadcast_in_dim", "convert_element_type", "copy", "copy_p", "expand_dims", "reshape"),
  *("sharding_constraint", "squeeze", "stop_gradient", "transpose"),
)
_Shape: TypeAlias = tuple[int, ...]


class _Value(NamedTuple):
  """The abstract value of a variable.

  Attributes:
    leaf: the number of the leaf whose entries the variable holds, or None.
    from_tokens: whether the variable is computed from tokens.
    counts: whether the variable is computed from what may be positions: an ``arange``, an array
      that the loss closes over, or an argument that does not hold tokens.
  """

  leaf: int | None = None
  from_tokens: bool = False
  counts: bool = False


class _TableReads(_jaxpr.Interpreter[_Value]):
  """Collects in `reads` each leaf that is sliced at positions, with the shape of the slice."""

  def __init__(self) -> None:
    self.reads: set[tuple[int, _Shape]] = set()

  def constant(self, value: Any) -> _Value:
    return _Value(counts=np.size(value) > 1)

  def join(self, values: Sequence[_Value]) -> _Value:
    leaves = {value.leaf for value in values}
    return _Value(leaves.pop() if len(leaves) == 1 else None, *_sources(values))

  def operation(self, equation: _types.Equation, inputs: list[_Value]) -> Sequence[_Value]:
    name, leaf = equation.primitive.name, inputs[0].leaf if inputs else None
    from_tokens, counts = _sources(inputs)
    is_slice = name in ("slice", "dynamic_slice") or (name == "gather" and counts)
    if leaf is not None and is_slice and not from_tokens:
      aval: Any = equation.outvars[0].aval
      self.reads.add((leaf, aval.shape))
    kept = leaf if name in _SAME_ENTRIES else None
    return [_Value(kept, from_tokens, counts or name == "iota")] * len(equation.outvars)


def _sources(values: Sequence[_Value]) -> tuple[bool, bool]:
  """Returns whether any value is computed from tokens, and whether any is from positions."""
  return any(value.from_tokens for value in values), any(value.counts for value in values)


def position_tables(
  windows: _types.Jaxpr, whole: _types.Jaxpr, by_tokens: Sequence[bool]
) -> list[int]:
  """Returns the numbers of the leaves that are tables of positions.

  `windows` is the program of the loss for a batch whose sequences are cut short, `whole` the
  program for the whole batch. `by_tokens` has a flag for each argument after the params: True for
  tokens, False for any other argument, which counts as positions.
  """

  def reads(program: _types.Jaxpr) -> set[tuple[int, _Shape]]:
    num_leaves = len(program.jaxpr.invars) - len(by_tokens)
    analysis = _TableReads()
    params = [_Value(leaf=leaf) for leaf in range(num_leaves)]
    others = [_Value(from_tokens=flag, counts=not flag) for flag in by_tokens]
    analysis.run(program, [*params, *others])
    return analysis.reads

  return sorted({leaf for leaf, _ in reads(windows) ^ reads(whole)})

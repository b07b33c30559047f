"""Params that the forward pass of a stateful model writes: the update starts from these."""

from collections.abc import Callable
from collections.abc import Sequence
import functools
from typing import Any
from typing import NamedTuple
from typing import TypeAlias

import jax
import optax

from optax_boost import _jaxpr

# The number of the leaf that a value is, or None.
_Leaf: TypeAlias = int | None


class WrittenParams(NamedTuple):
  """New statistics, and the params that the forward pass has written."""

  model_state: Any
  leaves: Sequence[Any]  # the written value of each leaf of the params, or None


def with_written_params(
  model_state: Any,
  before: optax.Params,
  after: optax.Params,
  forward: Callable[[optax.Params], optax.Params],
) -> Any:
  """Adds the written params to new statistics, if there are any.

  `forward` makes `after` of `before`; it is traced only if arrays were replaced.
  """
  leaves, structure = jax.tree.flatten(before)
  new_leaves = jax.tree.leaves(after)
  written = {i for i, new in enumerate(new_leaves) if new is not leaves[i]}
  if written:
    # `nnx.remat` and `nnx.jit` return all variables of their modules as other arrays.
    program = jax.make_jaxpr(forward)(jax.tree.unflatten(structure, leaves))
    copied = _Copies().run(program, range(len(leaves)))
    written = {i for i in written if copied[i] != i}
  if not written:
    return model_state
  return WrittenParams(
    model_state, [new if i in written else None for i, new in enumerate(new_leaves)]
  )


def take_written_params(params: optax.Params, model_state: Any) -> tuple[optax.Params, Any]:
  """The params as the forward pass has left them, and the new statistics alone."""
  if not isinstance(model_state, WrittenParams):
    return params, model_state
  leaves, structure = jax.tree.flatten(params)
  pairs = zip(leaves, model_state.leaves, strict=True)
  left = [leaf if written is None else written for leaf, written in pairs]
  return jax.tree.unflatten(structure, left), model_state.model_state


class _Copies(_jaxpr.Interpreter[_Leaf]):
  """Finds the leaves that a program returns as they are."""

  def constant(self, value: Any) -> _Leaf:
    return None

  def operation(self, equation: Any, inputs: list[_Leaf]) -> list[_Leaf]:
    return [None] * len(equation.outvars)

  def join(self, values: Sequence[_Leaf]) -> _Leaf:
    return values[0] if len(set(values)) == 1 else None

  def loop(self, equation: Any, body: Any, inputs: list[_Leaf], carry: slice) -> list[_Leaf]:
    # A carry that another round changes is no copy.
    return self.settle(functools.partial(self.run, body), inputs, carry)

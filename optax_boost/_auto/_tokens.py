"""Finds the batch of tokens in a traced loss: integers that index a table of the params."""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp

from optax_boost import _sequence_lengths
from optax_boost import _tree
from optax_boost._trace import _jaxpr


class TokenBatch(NamedTuple):
  """The batch of a loss of sequences.

  Attributes:
    leaf: the path of the tokens in the batch.
    full_length: the number of positions of which the loss reads tokens; those that it only
      predicts don't count, unless the number would have no divisor to begin with.
  """

  leaf: str
  full_length: int


class _Origins(NamedTuple):
  """What a value of the program is computed from."""

  data: frozenset[int] = frozenset()  # arguments that aren't params, by number
  params: bool = False  # whether params went into it


class _Lookups(_jaxpr.Interpreter[_Origins]):
  """Notes the lookups in tables of params, each with its indices' origins and shape."""

  def __init__(self) -> None:
    self.found: set[tuple[frozenset[int], tuple[int, ...]]] = set()

  def constant(self, value: Any) -> _Origins:
    """Constants come from no argument."""
    return _Origins()

  def operation(self, equation: Any, inputs: list[_Origins]) -> Sequence[_Origins]:
    """A result is made of all inputs."""
    if equation.primitive.name == "gather":
      table, indices = inputs[:2]
      # A loss looks its labels up in logits, which data went into.
      if table.params and not table.data and indices.data:
        self.found.add((indices.data, equation.invars[1].aval.shape))
    return [self.join(inputs)] * len(equation.outvars)

  def join(self, values: Sequence[_Origins]) -> _Origins:
    """Either origin."""
    data = frozenset().union(*(value.data for value in values))
    return _Origins(data, any(value.params for value in values))

  def loop(
    self, equation: Any, body: Any, inputs: list[_Origins], carry: slice
  ) -> Sequence[_Origins]:
    """The origins of all rounds."""
    return self.settle(lambda joined: self.run(body, joined), inputs, carry)


def find_tokens(
  program: Any, loss_fn: Callable[..., Any], params: Any, args: tuple[Any, ...]
) -> TokenBatch | str:
  """The one batch of tokens among a loss's arguments, or the reason why there is none.

  `program` is the trace of the loss. The batch's other leaves must be cut as :func:`cut_sequences`
  does by itself, and the loss must take the shorter windows.
  """
  lookups = _Lookups()
  inside = len(jax.tree.leaves(params))
  outside = len(program.jaxpr.invars) - inside
  lookups.run(
    program,
    [_Origins(params=True)] * inside + [_Origins(frozenset([i])) for i in range(outside)],
  )
  places = [(i, path) for i, arg in enumerate(args) for path in _tree.leaf_paths(arg)]
  leaves = jax.tree.leaves(args)
  numbers = sorted({number for origins, _ in lookups.found for number in origins})
  numbers = [number for number in numbers if jnp.ndim(leaves[number]) == 2]
  if not numbers:
    return "the loss looks no tokens of a batch up in its params"
  names = [repr(_tree.leaf_name(places[number][1])) for number in numbers]
  if len(numbers) > 1:
    return (
      f"the loss looks {' and '.join(names)} up; pass `sequence_length` if they belong together"
      " token by token"
    )
  tokens = jnp.shape(leaves[numbers[0]])[1]
  read = {size for _, shape in lookups.found for size in shape}
  where, batch_path = places[numbers[0]]
  reason = ""
  for full_length in (tokens - 1, tokens) if tokens - 1 in read else (tokens,):
    try:
      shortest = _sequence_lengths.sequence_length_warmup(full_length, 1000).lengths[0]
      loss = _loss_of_windows(loss_fn, params, args, where, shortest, full_length)
      if (loss.shape, loss.dtype) != (program.out_avals[0].shape, program.out_avals[0].dtype):
        raise ValueError("the loss of windows has another shape")
    except Exception as error:  # the user's loss may raise anything
      reason = reason or f"of {tokens} tokens: {str(error).splitlines()[0]}"
    else:
      return TokenBatch(batch_path, full_length)
  return reason


def _loss_of_windows(
  loss_fn: Callable[..., Any],
  params: Any,
  args: tuple[Any, ...],
  where: int,
  length: int,
  full_length: int,
) -> jax.ShapeDtypeStruct:
  """The abstract loss, with the argument number `where` cut into windows."""

  def loss_of_windows(params: Any, *args: Any) -> Any:
    batch = _sequence_lengths.cut_sequences(args[where], length, full_length)
    return loss_fn(params, *args[:where], batch, *args[where + 1 :])

  return jax.tree.leaves(jax.eval_shape(loss_of_windows, params, *args))[0]

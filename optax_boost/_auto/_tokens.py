"""Finds the batch of tokens in a traced loss: integers that index a table of the params."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import functools
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp

from optax_boost import _sequence_lengths
from optax_boost import _tree
from optax_boost._trace import _jaxpr


class TokenBatch(NamedTuple):
  """The tokens that a loss looks up.

  Attributes:
    names: of their leaves in the batch, for messages; none if the model isn't of tokens.
    full_length: the number of positions of which the loss reads tokens; those that it only
      predicts don't count, unless the number would have no divisor to begin with. None: the batch
      must stay whole.
    reason: why it must.
  """

  names: tuple[str, ...]
  full_length: int | None
  reason: str = ""


class _Origins(NamedTuple):
  """What a value of the program is computed from."""

  data: frozenset[int] = frozenset()  # arguments that aren't params, by number
  params: bool = False  # whether params went into it


class _Lookups(_jaxpr.Interpreter[_Origins]):
  """Notes the lookups in tables of params, each with its indices' origins and shape."""

  def __init__(self) -> None:
    self.found: set[tuple[_Origins, tuple[int, ...]]] = set()

  def constant(self, value: Any) -> _Origins:
    """Constants come from no argument."""
    return _Origins()

  def operation(self, equation: Any, inputs: list[_Origins]) -> Sequence[_Origins]:
    """A result is made of all inputs."""
    if equation.primitive.name == "gather":
      table, indices = inputs[:2]
      # A loss looks its labels up in logits, which data went into.
      if table.params and not table.data and indices.data:
        self.found.add((indices, equation.invars[1].aval.shape))
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
  program: Any,
  loss_fn: Callable[..., Any],
  params: Any,
  args: tuple[Any, ...],
  axes: Mapping[str, _sequence_lengths.LeafAxes] | None = None,
) -> TokenBatch:
  """The tokens among a loss's arguments, and whether their batch can be cut.

  `program` is the trace of the loss. The batch's other leaves must be cut as :func:`cut_sequences`
  does with `axes`, and the loss must take the shorter windows. Errors of `axes` are raised.
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
  numbers = sorted(
    {
      number
      for indices, _ in lookups.found
      for number in indices.data
      if _may_be_tokens(leaves[number], computed=indices.params)
    }
  )
  if not numbers:
    return TokenBatch((), None, "the loss looks no tokens of a batch up in its params")
  names = tuple(repr(path) if path else "the batch" for path in (places[n][1] for n in numbers))
  looks = f"the loss looks {' and '.join(names)} up"
  if jnp.ndim(leaves[numbers[0]]) > 2:
    looks += f", of shape {jnp.shape(leaves[numbers[0]])}"
    advice = "pass `sequence_length`, the number of its tokens, to `auto_boost`"
    return TokenBatch(names, None, f"{looks}; {advice}")
  where = places[numbers[0]][0]
  tokens = jnp.shape(leaves[numbers[0]])[1]
  read = {size for _, shape in lookups.found for size in shape}
  if axes is not None:
    _sequence_lengths.asked_axes(axes, _tree.leaf_paths(args[where]))
  lengths = (tokens - 1, tokens) if tokens - 1 in read else (tokens,)
  full_length, reason = _try_lengths(program, loss_fn, params, args, where, lengths, axes)
  if len(numbers) > 1:
    if full_length is not None:
      reason = f"pass `sequence_length={full_length}` to `auto_boost` if they belong together"
      reason += " token by token"
    return TokenBatch(names, None, f"{looks}; {reason}")
  if full_length is None:
    reason = f"of {tokens} tokens: {reason}"
  return TokenBatch(names, full_length, reason)


def _may_be_tokens(leaf: Any, *, computed: bool) -> bool:
  """Whether a leaf that is looked up is of tokens; `computed`: after a computation with params."""
  shape = jnp.shape(leaf)
  if len(shape) == 2:
    return shape[1] > 1  # else a value of each sequence
  # Images may be looked up in a codebook, by the entry that is nearest.
  return len(shape) > 2 and jnp.issubdtype(jnp.result_type(leaf), jnp.integer) and not computed


def _try_lengths(
  program: Any,
  loss_fn: Callable[..., Any],
  params: Any,
  args: tuple[Any, ...],
  where: int,
  lengths: tuple[int, ...],
  axes: Mapping[str, _sequence_lengths.LeafAxes] | None,
) -> tuple[int | None, str]:
  """The first full length at which the argument number `where` can be cut, or why there is none."""
  reason = ""
  for full_length in lengths:
    try:
      shortest = _sequence_lengths.sequence_length_warmup(full_length, 1000).lengths[0]
      cut = functools.partial(
        _sequence_lengths.cut_sequences, length=shortest, full_length=full_length, axes=axes
      )
      windows = jax.eval_shape(cut, args[where])
    except ValueError as error:
      advice = " Pass `axes` to `boost.optimizer`." if "axes=" in str(error) else ""
      reason = reason or f"{error}{advice}"
      continue
    try:
      shorter = [*args[:where], windows, *args[where + 1 :]]
      loss = jax.tree.leaves(jax.eval_shape(loss_fn, params, *shorter))[0]
      if (loss.shape, loss.dtype) != (program.out_avals[0].shape, program.out_avals[0].dtype):
        raise ValueError("it has another shape")
    except Exception as error:  # the user's loss may raise anything
      reason = reason or f"the loss of windows fails: {str(error).splitlines()[0]}"
      others = [*args[:where], *args[where + 1 :]]
      if any(full_length in jnp.shape(leaf)[1:] for leaf in jax.tree.leaves(others)):
        reason += "; only one argument is cut, so put all leaves of tokens into it"
    else:
      return full_length, ""
  return None, reason

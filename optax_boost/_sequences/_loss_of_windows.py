"""Checks before a training whether the loss can take *windows*, sequences that are cut short.

Two things can go wrong. If the batch holds positions, and the model cuts a table of positions to
the length of its input, the positions of later windows are beyond the end of the table; JAX clamps
such indices silently. If the loss takes a mean over the tokens of each sequence, the mean of a
window of padding is 0/0. So the loss of the first windows is computed once. Windows also leave the
last entries of a table of learned positions untrained; two traces of the loss find such a table.
"""

from collections.abc import Callable, Mapping
import contextlib
import functools
import math
from typing import Any, NamedTuple

import jax
from jax.experimental import checkify, multihost_utils
import jax.numpy as jnp
import numpy as np

from optax_boost._foundation import _paths, _types
from optax_boost._sequences import _cut, _schedule
from optax_boost._trace import _losses, _position_tables

# How much of a message about an index is sent to other processes.
_BYTES = 300


class _Result(NamedTuple):
  """A loss's value, and JAX's message about the first index that is out of bounds, or ""."""

  value: float
  index_error: str

  def is_sound(self, like: "_Result | None" = None) -> bool:
    """Returns whether the value is finite and no index is out of bounds.

    `like` is the result for whole sequences. If it has an index out of bounds, too, only the value
    is checked.
    """
    in_bounds = not self.index_error or (like is not None and bool(like.index_error))
    return math.isfinite(self.value) and in_bounds


def check_first_windows(
  loss_fn: _types.LossFn,
  params: _types.Params,
  args: tuple[Any, ...],
  schedule: _schedule.LengthSchedule,
  axes: Mapping[str, _cut.LeafAxes] | None,
) -> bool:
  """Computes the loss of the first windows; raises ValueError if the loss isn't sound.

  Returns True if the loss was computed, and False if it can't be: `args` lacks the batch, or arrays
  in `params` or `args` are abstract or traced. The batch, which is cut, is the loss's first
  argument after the params and a Flax model's state. A loss that isn't finite is not sound. An
  index that is out of bounds only in windows is an error only if positions that begin at 0 in each
  window would be in bounds.
  """
  number = int(_losses.is_stateful(loss_fn))
  leaves = jax.tree.leaves((params, args))
  if len(args) <= number or any(
    isinstance(leaf, jax.core.Tracer | jax.ShapeDtypeStruct) for leaf in leaves
  ):
    return False
  length, batch, named = schedule.lengths[0], args[number], dict(axes or {})
  compute = _loss_of_batch(loss_fn, params, args, number)

  def loss_of_windows(restarted: list[str]) -> _Result:
    treatments: dict[str, Any] = dict.fromkeys(restarted, "positions") | named
    return compute(_cut.cut_sequences(batch, length, schedule.full_length, treatments))

  try:
    windows = loss_of_windows([])
  except Exception as error:  # the user's loss may raise anything
    error.add_note(
      f"`boost.optimizer` computed the loss of windows of {length} tokens, cut from argument number"
      f" {number + 1} after the params. Put all leaves of tokens into this argument, or pass"
      " `boost.optimizer` no loss."
    )
    raise
  if windows.is_sound():
    return True
  whole = compute(batch)
  if windows.is_sound(like=whole):
    return True
  restarted = _unnamed_integers(batch, named)
  mended = loss_of_windows(restarted).is_sound(like=whole)
  if mended:
    for pattern in list(restarted):
      others = [other for other in restarted if other != pattern]
      if loss_of_windows(others).is_sound(like=whole):
        restarted = others
  elif math.isfinite(windows.value):
    return True
  advice = (
    "Divide a sum over tokens by the number of real tokens in the batch, since that of one sequence"
    " is 0 in a window of padding."
  )
  if mended:
    line = dict.fromkeys(restarted, "positions") | named
    advice = f"Positions that begin at 0 in each window mend it: pass `auto_boost` axes={line}."
  raise ValueError(
    f"The loss of windows of {length} tokens must be finite, with indices in bounds; got"
    f" {windows.index_error or windows.value}, and {whole.value:g} of whole sequences. {advice}"
  )


def position_tables(
  loss_fn: _types.LossFn,
  params: _types.Params,
  args: tuple[Any, ...],
  schedule: _schedule.LengthSchedule,
  axes: Mapping[str, _cut.LeafAxes] | None,
) -> list[str] | None:
  """Returns the paths of the params that are tables of learned positions.

  The loss is traced, but not computed: for the whole batch, and for the batch cut to the first
  length of `schedule`. A param is a table of positions if the two traces slice different shapes
  from the param. `axes` says how the leaves of the batch are cut, as in :func:`cut_sequences`. The
  batch is the first of `args`, or the second if the first is a Flax model's state. Returns None if
  `args` ends before the batch.
  """
  number = int(_losses.is_stateful(loss_fn))
  if len(args) <= number:
    return None
  batch, full = args[number], schedule.full_length
  cut = functools.partial(_cut.cut, axes=axes, reads_values=False)
  windows = jax.eval_shape(lambda batch: cut(batch, schedule.lengths[0], full), batch)

  def trace(batch: _types.Batch) -> _types.Jaxpr:
    return _losses.trace(loss_fn, params, (*args[:number], batch, *args[number + 1 :]))

  treatments = _cut.match_axes(axes, _paths.leaf_paths(batch))
  by_tokens = [
    *[False] * len(jax.tree.leaves(args[:number])),
    *(how != "positions" for how in treatments),
    *[False] * len(jax.tree.leaves(args[number + 1 :])),
  ]
  tables = _position_tables.position_tables(trace(windows), trace(batch), by_tokens)
  paths = _paths.leaf_paths(params)
  return [paths[leaf] for leaf in tables]


def _loss_of_batch(
  loss_fn: _types.LossFn, params: _types.Params, args: tuple[Any, ...], number: int
) -> Callable[[_types.Batch], _Result]:
  """Returns the loss as a function of the batch, which is argument `number` after the params."""

  def loss(params: _types.Params, batch: _types.Batch, args: tuple[Any, ...]) -> jax.Array:
    return jax.tree.leaves(loss_fn(params, *args[:number], batch, *args[number:]))[0]

  others = (*args[:number], *args[number + 1 :])
  checked = jax.jit(checkify.checkify(loss, errors=checkify.index_checks))
  plain = jax.jit(loss)

  def compute(batch: _types.Batch) -> _Result:
    # `checkify` fails for some programs with `jax.checkpoint` in JAX 0.10; these run unchecked.
    with contextlib.suppress(Exception):
      error, value = checked(params, batch, others)
      return _Result(float(value), (error.get() or "").split("\n", 1)[0].rstrip(". "))
    return _Result(float(plain(params, batch, others)), "")

  return lambda batch: _of_first_process(compute(batch))


def _of_first_process(result: _Result) -> _Result:
  """Returns the first process's result in all, so that all raise or none: each has its own rows."""
  text = np.frombuffer(result.index_error.encode().ljust(_BYTES)[:_BYTES], np.uint8)
  value, text = multihost_utils.broadcast_one_to_all((np.float32(result.value), text))
  return _Result(float(value), bytes(text).decode(errors="ignore").rstrip())


def _unnamed_integers(batch: _types.Batch, named: Mapping[str, _cut.LeafAxes]) -> list[str]:
  """Returns a pattern for each leaf of integers that may hold positions.

  These are the leaves with at least two axes that no pattern in `named` matches.
  """
  paths = _paths.leaf_paths(batch)
  rows = zip(paths, jax.tree.leaves(batch), _cut.match_axes(named, paths), strict=True)
  return [
    _cut.leaf_pattern(path, paths)
    for path, leaf, how in rows
    if how is None and jnp.ndim(leaf) > 1 and jnp.issubdtype(leaf.dtype, jnp.integer)
  ]

"""How many groups the next step freezes, as the host needs to know it to choose a compiled step.

The number is in the state, but reading it there waits for the step that computes it, and meanwhile
the device has nothing to do. It depends on the step count and a key alone, though. So the host
reads both once, works out the numbers of many steps together, and counts along.
"""

from collections.abc import Callable
import operator
from typing import Any

import jax
import numpy as np
import optax

from optax_boost import _protocol

# Steps whose depths are worked out together; the host waits for the device once in as many.
_CHUNK = 256


class HostDepths:
  """The depths of a train step's calls, one after the other."""

  def __init__(self) -> None:
    # Of the state that the last step returned: its first three arrays, by which it is recognized,
    # and its count. Holding all of it would keep the inner optimizer's memory.
    self._last: tuple[jax.Array, ...] = ()
    self._count: int | None = None
    # The depths of the steps from a count on.
    self._depths = np.empty(0, np.int32)
    self._start = 0
    self._many: Any = None
    # Which leaf holds the number inside a wrapper; -1: none.
    self._leaf: int | None = None

  def next(
    self, opt_state: optax.OptState, find_depth_at: Callable[[], _protocol.DepthAt]
  ) -> int | None:
    """How many groups the step from a state freezes.

    Args:
      opt_state: the optimizer's state.
      find_depth_at: finds the schedule; called once.

    Returns:
      The number; None where the state has none, or one that is traced.
    """
    state = _counting(opt_state)
    if state is None:
      return _value(self._inside(opt_state))
    if self._count is None or not _same(state, self._last):
      # From elsewhere, a checkpoint say. Whether a step follows is not known yet.
      self._last, self._depths = (), np.empty(0, np.int32)
      self._count = _value(state.count)
      return _value(state.frozen_groups)
    place = self._count - self._start
    if not 0 <= place < len(self._depths):
      self._work_out(find_depth_at, state)
      place = 0
    return int(self._depths[place])

  def made_step(self, opt_state: optax.OptState) -> None:
    """Counts a step.

    Args:
      opt_state: what it returned.
    """
    if self._count is None:
      # Nothing to count along with, as where nothing freezes.
      return
    state = _counting(opt_state)
    if state is None or isinstance(state.count, jax.core.Tracer):
      self._last, self._count = (), None
    else:
      self._last, self._count = _small_arrays(state), self._count + 1

  def _work_out(self, find_depth_at: Callable[[], _protocol.DepthAt], state: Any) -> None:
    if self._many is None:
      depth_at = find_depth_at()
      # One after the other, since a schedule need not understand `vmap`.
      self._many = jax.jit(lambda counts, key: jax.lax.map(lambda c: depth_at(c, key), counts))
    # Read anew, should anything have kept a step from being counted.
    self._count = self._start = int(state.count)
    counts = np.arange(self._count, self._count + _CHUNK, dtype=np.int32)
    # On values of the host: over many processes, each works them out for itself.
    arguments = jax.device_put((counts, np.asarray(state.key)))
    # Someone's trace may be under way around a state whose values are known.
    with jax.ensure_compile_time_eval():
      self._depths = np.asarray(self._many(*arguments))

  def _inside(self, opt_state: optax.OptState) -> Any:
    if self._leaf == -1:
      return None
    leaves = jax.tree.leaves(opt_state)
    if self._leaf is None:
      # Looking for a name takes a while in a large tree: once is enough.
      number = _protocol.requested(opt_state, _protocol.FROZEN_GROUPS)
      self._leaf = next((i for i, x in enumerate(leaves) if x is number), -1)
    return leaves[self._leaf] if self._leaf >= 0 else None


def _counting(opt_state: Any) -> Any | None:
  """The state of a `freeze` that counts every step, which one inside a wrapper may not."""
  if _protocol.FROZEN_GROUPS in _protocol.declared(opt_state, "requests"):
    return opt_state
  # What `optax.chain` keeps. Wrappers, which may skip inner updates, have types of their own.
  found = map(_counting, opt_state) if type(opt_state) is tuple else ()
  return next((state for state in found if state is not None), None)


def _small_arrays(state: Any) -> tuple[jax.Array, ...]:
  return state.count, state.frozen_groups, state.key


def _same(state: Any, last: tuple[jax.Array, ...]) -> bool:
  return len(last) > 0 and all(map(operator.is_, _small_arrays(state), last))


def _value(number: Any) -> int | None:
  # A checkpoint may hold NumPy's numbers.
  known = isinstance(number, jax.Array | np.ndarray | np.generic)
  known &= not isinstance(number, jax.core.Tracer)
  return int(number) if known else None

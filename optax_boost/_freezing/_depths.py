"""How many groups the next step freezes, as the host needs to know it to choose a compiled step.

The number is in the state, but reading it there waits for the step that computes it, and meanwhile
the device has nothing to do. It depends on the step count and a key alone, though. So the host
reads both once, works out the numbers of many steps together, and counts along.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

from optax_boost._freezing import _transform

# From a step count and raw key data to how many groups that step freezes.
DepthAt = Callable[[jax.Array, jax.Array], jax.Array]
# Steps whose depths are worked out together; the host waits for the device once in as many.
_CHUNK = 256


class HostDepths:
  """The depths of a train step's calls, one after the other."""

  def __init__(self) -> None:
    # The state that the last step returned, and its count.
    self._last: _transform.FreezeState | None = None
    self._count = 0
    # The depths of the steps from a count on.
    self._depths = np.empty(0, np.int32)
    self._start = 0
    self._many: Any = None
    # Which leaf holds the number inside a wrapper; -1: none.
    self._leaf: int | None = None

  def next(self, opt_state: optax.OptState, find_depth_at: Callable[[], DepthAt]) -> int | None:
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
    if self._last is None or not _same(state, self._last):
      # From elsewhere, a checkpoint say.
      self._depths = np.empty(0, np.int32)
      self._count = self._start = _value(state.count) or 0
      return _value(state.frozen_groups)
    place = self._count - self._start
    if place >= len(self._depths):
      place, self._start = 0, self._count
      self._depths = self._work_out(find_depth_at, state.key)
    return int(self._depths[place])

  def made_step(self, opt_state: optax.OptState) -> None:
    """Counts a step.

    Args:
      opt_state: what it returned.
    """
    state = _counting(opt_state)
    known = state is not None and not isinstance(state.count, jax.core.Tracer)
    self._last = state if known else None
    self._count += 1

  def _work_out(self, find_depth_at: Callable[[], DepthAt], key: jax.Array) -> np.ndarray:
    if self._many is None:
      depth_at = find_depth_at()
      # One after the other, since a schedule need not understand `vmap`.
      self._many = jax.jit(lambda counts, key: jax.lax.map(lambda c: depth_at(c, key), counts))
    counts = np.arange(self._count, self._count + _CHUNK, dtype=np.int32)
    # On values of the host: over many processes, each works them out for itself.
    return np.asarray(self._many(counts, np.asarray(key)))

  def _inside(self, opt_state: optax.OptState) -> Any:
    if self._leaf == -1:
      return None
    leaves = jax.tree.leaves(opt_state)
    if self._leaf is None:
      # Looking for a name takes a while in a large tree: once is enough.
      named = [value for _, value in optax.tree.get_all_with_path(opt_state, "frozen_groups")]
      self._leaf = next((i for i, x in enumerate(leaves) if named and x is named[0]), -1)
    return leaves[self._leaf] if self._leaf >= 0 else None


def _counting(opt_state: Any) -> _transform.FreezeState | None:
  """The state of a `freeze` that counts every step: one that no wrapper can make repeat a step."""
  if isinstance(opt_state, _transform.FreezeState):
    return opt_state
  # What `optax.chain` keeps. A wrapper that may skip its inner update has a type of its own.
  found = map(_counting, opt_state) if type(opt_state) is tuple else ()
  return next((state for state in found if state is not None), None)


def _same(state: _transform.FreezeState, last: _transform.FreezeState) -> bool:
  pairs = zip(state[:3], last[:3], strict=True)
  return all(ours is theirs for ours, theirs in pairs)


def _value(number: Any) -> int | None:
  known = isinstance(number, jax.Array) and not isinstance(number, jax.core.Tracer)
  return int(number) if known else None

"""How many groups the next step freezes, as the host needs to know it to choose a compiled step.

To read the number from the state would wait for the step that computes it. It depends on the step
count and a key alone, though: the host reads both once, works out the numbers of many steps
together, and counts along. A train step serves any number of trajectories and threads, so the
count belongs to a state: a table leads from the identity of the arrays that a step returned to
their place in their trajectory, and an entry goes with its array.
"""

from collections.abc import Callable
from collections.abc import Sequence
import operator
from typing import Any
from typing import NamedTuple
import weakref

import jax
import numpy as np
import optax

from optax_boost import _base
from optax_boost import _protocol

# Steps whose depths are worked out together; the host waits for the device once in as many.
_CHUNK = 256


class Place(NamedTuple):
  """Where a state stands in its trajectory."""

  # How many groups its step freezes; None: the state has no such number, or a traced one.
  depth: int | None
  # The depths of the steps after this one, as far as they were worked out.
  ahead: Sequence[int] = ()


NOWHERE = Place(None)


class _Entry(NamedTuple):
  """A state's place, and the arrays by which the state is known."""

  count_ref: weakref.ref[jax.Array]
  frozen_groups: jax.Array
  key: jax.Array
  place: Place

  def is_of(self, state: Any) -> bool:
    own = (self.count_ref(), self.frozen_groups, self.key)
    return all(map(operator.is_, own, (state.count, state.frozen_groups, state.key)))


class HostDepths:
  """The depths of a train step's calls, for any number of trajectories and threads."""

  def __init__(self) -> None:
    # By the identity of the count's array. Each access is one operation, so no lock is needed.
    self._entries: dict[int, _Entry] = {}
    self._many: Any = None
    # Which leaf holds the number inside a wrapper, by the state's structure.
    self._leaves: dict[Any, int] = {}
    # Whether states of a type ask for it; to look that up at every step takes too long.
    self._asks: dict[type, bool] = {}
    self._freezes = True

  def locate(
    self, opt_state: optax.OptState, find_depth_at: Callable[[], _protocol.DepthAt]
  ) -> Place:
    """Finds the place of a state before its step; `find_depth_at` finds the schedule, once."""
    if not self._freezes:
      return NOWHERE
    state = self._counting(opt_state)
    if state is None:
      return self._locate_inside(opt_state)
    number = id(state.count)
    entry = self._entries.get(number)
    if entry is None or not entry.is_of(state):
      # From elsewhere, a checkpoint say.
      return Place(_value(state.frozen_groups))
    if entry.place.depth is not None:
      return entry.place
    # Read anew, should anything have kept a step from being counted.
    count = int(np.asarray(state.count))
    depths = self._work_out(find_depth_at, count, state.key)
    place = Place(depths[0], depths[1:])
    self._entries[number] = entry._replace(place=place)
    return place

  def made_step(self, place: Place, opt_state: optax.OptState) -> None:
    """Notes the place of `opt_state`, which a step from `place` returned."""
    if place is NOWHERE:
      # The transformation freezes nothing, whatever the params.
      self._freezes = False
      return
    state = self._counting(opt_state)
    if state is None or isinstance(state.count, jax.core.Tracer):
      return
    place = Place(place.ahead[0] if place.ahead else None, place.ahead[1:])
    # Without a reference to this object, which would keep it alive.
    entries, number = self._entries, id(state.count)
    count_ref = weakref.ref(state.count, lambda _: entries.pop(number, None))
    entries[number] = _Entry(count_ref, state.frozen_groups, state.key, place)

  def _counting(self, opt_state: Any) -> Any | None:
    """The state of a `freeze_layers` that counts every step, which one inside a wrapper may not."""
    kind = type(opt_state)
    if kind not in self._asks:
      self._asks[kind] = _protocol.FROZEN_GROUPS in _protocol.declared(opt_state, "requests")
    if self._asks[kind]:
      return opt_state
    # The state of `optax.chain`. Wrappers, which may skip inner updates, have types of their own.
    if kind is tuple:
      for inner in opt_state:
        state = self._counting(inner)
        if state is not None:
          return state
    return None

  def _work_out(
    self, find_depth_at: Callable[[], _protocol.DepthAt], count: int, key: jax.Array
  ) -> list[int]:
    # As the counter on the device, which stays at the largest int32.
    counts = np.minimum(np.arange(count, count + _CHUNK), _base.LARGEST_COUNT).astype(np.int32)
    # On values of the host: over many processes, each works them out for itself.
    arguments = jax.device_put((counts, np.asarray(key)))
    # A search for errors by `jax.disable_jit` may be under way, under which loops are written out
    # and nothing that is compiled can be called.
    with jax.disable_jit(False):
      if self._many is None:
        depth_at = find_depth_at()
        # One after the other, since a schedule need not understand `vmap`. Compiled here, since
        # older JAX can't trace a loop while it evaluates at compile time.
        many = jax.jit(lambda counts, key: jax.lax.map(lambda c: depth_at(c, key), counts))
        self._many = many.lower(*arguments).compile()
      # Someone's trace may be under way, too, around a state whose values are known.
      with jax.ensure_compile_time_eval():
        return np.asarray(self._many(*arguments)).tolist()

  def _locate_inside(self, opt_state: optax.OptState) -> Place:
    """The place of a state whose wrapper may skip steps: its number is read at each of them."""
    leaves, structure = jax.tree.flatten(opt_state)
    if structure not in self._leaves:
      number = _protocol.requested(opt_state, _protocol.FROZEN_GROUPS)
      if number is None:
        return NOWHERE
      self._leaves[structure] = next(i for i, leaf in enumerate(leaves) if leaf is number)
    return Place(_value(leaves[self._leaves[structure]]))


def _value(number: Any) -> int | None:
  # A checkpoint may hold NumPy's numbers.
  known = isinstance(number, jax.Array | np.ndarray | np.generic)
  known &= not isinstance(number, jax.core.Tracer)
  return int(number) if known else None

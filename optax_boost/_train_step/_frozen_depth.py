"""Reads how many groups of layers the next step freezes; the step is compiled for each number."""

import operator
from typing import NamedTuple

import jax
import optax

from optax_boost._form import _protocol
from optax_boost._foundation import _trees, _types

# A reader remembers the depths of this number of states, and forgets the oldest states.
_MOST_REMEMBERED = 64


class _Remembered(NamedTuple):
  """What a reader remembers of a state that a step returned.

  Attributes:
    arrays: the arrays of the state that requests the frozen groups, without its inner states. If a
      user replaces one of these arrays, the reader reads the new state from the device.
    depth: the number of groups that the step has frozen.
    steps: for how many of the next steps `depth` is known to stay.
  """

  arrays: list[jax.Array]
  depth: int
  steps: int


class DepthReader:
  """Reads from optimizer states of one structure how many groups the next step freezes.

  To read an array from the device, the host waits until the previous step has ended. The field
  `frozen_for` of a state tells for how many steps the number does not change. So the reader
  remembers the states that steps return, and reads nothing during these steps. A skipped step does
  not advance the schedule, so the number stays for at least this number of calls.
  """

  def __init__(self, opt_state: optax.OptState):
    requesting = _protocol.requesting_state(opt_state, _protocol.FROZEN_GROUPS)
    self._freezes = requesting is not None
    # The key is the id of the first array in `arrays`.
    self._remembered: dict[int, _Remembered] = {}
    if self._freezes:
      self._path = _trees.child_indices(opt_state, requesting)
      fields = requesting._fields
      names = [name for name in fields if not isinstance(getattr(requesting, name), tuple)]
      self._fields = operator.attrgetter(*names)

  def read(self, opt_state: optax.OptState) -> tuple[int | None, int]:
    """Returns how many groups the next step freezes, and for how many steps this number stays.

    The number is None if no state freezes groups, or if the number is traced.
    """
    if not self._freezes:
      return None, 0
    # `read` and `remember` run in every step, so this loop is repeated instead of called.
    state = opt_state
    for index in self._path:
      state = _trees.flatten_node(state)[0][index]
    arrays = jax.tree.leaves(self._fields(state))
    if isinstance(arrays[0], jax.core.Tracer | jax.ShapeDtypeStruct):
      return None, 0
    remembered = self._remembered.pop(id(arrays[0]), None)
    if remembered is None or list(map(id, remembered.arrays)) != list(map(id, arrays)):
      return read_scalars(state.frozen_groups)[0], 1
    if remembered.steps > 0:
      return remembered.depth, remembered.steps
    depth, steps = read_scalars((state.frozen_groups, getattr(state, "frozen_for", 1)))
    return depth, steps

  def remember(self, opt_state: optax.OptState, depth: int | None, steps: int) -> None:
    """Remembers the state that a step returned; `depth` and `steps` are from :meth:`read`."""
    if depth is None:
      return
    state = opt_state
    for index in self._path:
      state = _trees.flatten_node(state)[0][index]
    arrays = jax.tree.leaves(self._fields(state))
    if len(self._remembered) >= _MOST_REMEMBERED:
      self._remembered.pop(next(iter(self._remembered)), None)
    self._remembered[id(arrays[0])] = _Remembered(arrays, depth, steps - 1)


def read_scalars(scalars: _types.Tree) -> list[int]:
  """Returns the values of scalars on the device, after waiting until they are computed."""
  return list(map(int, jax.device_get(jax.tree.leaves(scalars))))

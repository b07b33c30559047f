"""Reads how many groups of layers the next step freezes. The step is compiled for each number."""

import operator
from typing import NamedTuple
import weakref

import jax
import optax

from optax_boost._form import _protocol
from optax_boost._foundation import _trees, _types

# How many states a `DepthReader` remembers; it forgets the oldest states first.
_MOST_REMEMBERED = 64


class _Remembered(NamedTuple):
  """What a :class:`DepthReader` remembers about an optimizer state that a step returned.

  Attributes:
    arrays: weak references to the arrays in the freezing wrapper's state, without the arrays of its
      inner states. If a user replaces one of these arrays, the reader reads the number of groups
      from the device again.
    depth: the number of groups that were frozen in the step that returned the state.
    steps: how many of the next steps certainly freeze the same number of groups.
  """

  arrays: list[weakref.ref[jax.Array]]
  depth: int
  steps: int


class DepthReader:
  """Reads from optimizer states of one structure how many groups the next step freezes.

  To read an array from the device, the host must wait until the previous step has ended. The reader
  avoids most of these reads. The state's field `frozen_for` says for how many steps the number of
  frozen groups can't change. (A skipped step only delays the change.) The reader remembers the
  number for each state that a step returns, and reads the device again only after `frozen_for`
  steps.
  """

  def __init__(self, opt_state: optax.OptState):
    requesting = _protocol.requesting_state(opt_state, _protocol.FROZEN_GROUPS)
    self._freezes = requesting is not None
    # The key is the `id` of the first array in `_Remembered.arrays`.
    self._remembered: dict[int, _Remembered] = {}
    if self._freezes:
      self._path = _trees.child_indices(opt_state, requesting)
      names = ("frozen_groups", "frozen_for", "key")
      self._fields = operator.attrgetter(*(n for n in names if hasattr(requesting, n)))

  def read(self, opt_state: optax.OptState) -> tuple[int | None, int]:
    """Returns how many groups the next step freezes, and for how many steps the number stays.

    Returns ``(None, 0)`` if no state freezes groups, or if its arrays are traced or abstract.
    """
    if not self._freezes:
      return None, 0
    # `remember` repeats this loop. Both methods run in every step, and a call of a common function
    # would take time.
    state = opt_state
    for index in self._path:
      state = _trees.flatten_node(state)[0][index]
    arrays = jax.tree.leaves(self._fields(state))
    if isinstance(arrays[0], jax.core.Tracer | jax.ShapeDtypeStruct):
      return None, 0
    remembered = self._remembered.pop(id(arrays[0]), None)
    if remembered is None or any(
      ref() is not array for ref, array in zip(remembered.arrays, arrays, strict=True)
    ):
      return self._read_device(state)[0], 1
    if remembered.steps > 0:
      return remembered.depth, remembered.steps
    return self._read_device(state)

  @staticmethod
  def _read_device(state: optax.OptState) -> tuple[int, int]:
    """Returns the fields `frozen_groups` and `frozen_for` of a state that freezes groups.

    Raises ValueError if the state's schedule returned a number of groups that it doesn't declare.
    """
    depth, steps = read_scalars((state.frozen_groups, getattr(state, "frozen_for", 1)))
    if steps < 0:
      state.check_declared(steps)
    return depth, steps

  def remember(self, opt_state: optax.OptState, depth: int | None, steps: int) -> None:
    """Remembers an optimizer state that a step returned.

    `depth` and `steps` are what `read` returned before this step.
    """
    if depth is None:
      return
    state = opt_state
    for index in self._path:
      state = _trees.flatten_node(state)[0][index]
    arrays = jax.tree.leaves(self._fields(state))
    if len(self._remembered) >= _MOST_REMEMBERED:
      self._remembered.pop(next(iter(self._remembered)), None)
    self._remembered[id(arrays[0])] = _Remembered(list(map(weakref.ref, arrays)), depth, steps - 1)


def read_scalars(scalars: _types.Tree) -> list[int]:
  """Returns integer scalars as Python numbers; waits until the device has computed them."""
  return list(map(int, jax.device_get(jax.tree.leaves(scalars))))

"""How many groups a step freezes, which decides the program that it runs."""

import operator
from typing import Any, NamedTuple

import jax

from optax_boost._form import _protocol
from optax_boost._foundation import _trees, _types

# States that steps returned and that were not used since are forgotten beyond this number.
_MOST_RETURNED = 64


class _Returned(NamedTuple):
  """A state that a step has returned.

  Attributes:
    arrays: its own scalars. A user may put others into the state; then nothing is known of it.
    depth: how many groups the step before has frozen.
    steps: for how many steps from here on this stays, as far as known.
  """

  arrays: list[Any]
  depth: int
  steps: int


class DepthReader:
  """Reads from optimizer states of one structure how many groups the next step freezes.

  Reading waits until the step before has ended. A state says for how many steps its depth stays
  (`frozen_for`), so within these it is known of the states that steps return. A step that is
  skipped repeats its depth, so it stays for no fewer calls than steps.
  """

  def __init__(self, opt_state: _types.Tree):
    asking = _protocol.requesting_state(opt_state, _protocol.FROZEN_GROUPS)
    self._asks = asking is not None
    # By the identity of the first of their arrays.
    self._returned: dict[int, _Returned] = {}
    if self._asks:
      self._path = _trees.child_indices(opt_state, asking)
      own = [name for name in asking._fields if not isinstance(getattr(asking, name), tuple)]
      self._fields = operator.attrgetter(*own)

  def read(self, opt_state: _types.Tree) -> tuple[int | None, int]:
    """How many groups the next step freezes, and for how many steps this is known to stay.

    None: none, or a traced number.
    """
    if not self._asks:
      return None, 0
    # In a loop here, as in `follow`: these run in every step.
    state: Any = opt_state
    for index in self._path:
      state = _trees.flatten_node(state)[0][index]
    arrays = jax.tree.leaves(self._fields(state))
    if isinstance(arrays[0], jax.core.Tracer | jax.ShapeDtypeStruct):
      return None, 0
    returned = self._returned.pop(id(arrays[0]), None)
    if returned is None or list(map(id, returned.arrays)) != list(map(id, arrays)):
      return read_scalars(state.frozen_groups)[0], 1
    if returned.steps > 0:
      return returned.depth, returned.steps
    depth, steps = read_scalars((state.frozen_groups, getattr(state, "frozen_for", 1)))
    return depth, steps

  def follow(self, opt_state: _types.Tree, depth: int | None, steps: int) -> None:
    """Remembers the state that a step returned, with the results of :meth:`read` before it."""
    if depth is None:
      return
    state: Any = opt_state
    for index in self._path:
      state = _trees.flatten_node(state)[0][index]
    arrays = jax.tree.leaves(self._fields(state))
    if len(self._returned) >= _MOST_RETURNED:
      self._returned.pop(next(iter(self._returned)), None)
    self._returned[id(arrays[0])] = _Returned(arrays, depth, steps - 1)


def read_scalars(scalars: Any) -> list[int]:
  """The values of scalars on the device, once they were computed."""
  return list(map(int, jax.device_get(jax.tree.leaves(scalars))))

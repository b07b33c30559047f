"""A step in which each group of layers has step counts of its own.

Adam divides its moments by 1 - b^n, n being one count for all leaves. If a layer is thawed after a
thousand steps, its moments are zero still and n is 1000, so that its first steps are several times
too long. PyTorch counts the steps of each param. So does this module, for each group: an ``update``
whose state holds a count beside moments is called once for each class of groups that have been
trained in the same steps, with their counts in the state, and each leaf and layer takes the result
of its class. XLA drops what nothing takes.

Only the ``update`` that holds the counts is called repeatedly. The members of a chain, and what
other compositions hold, are told apart (:mod:`optax_boost._form._compositions`): clipping after
Adam takes the norm of the updates that are made.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_boost._form import _compositions
from optax_boost._foundation import _masks, _placement
from optax_boost._wrappers._freezing import _state_layout

# Equal for groups that one call serves.
_Key = Any


def classes_of(depths: Any, num_groups: int) -> list[int]:
  """The class of each group: two groups are in one if no depth freezes one of them alone."""
  if depths is None:
    return list(range(num_groups))
  return [sum(depth <= group for depth in depths) for group in range(num_groups)]


@dataclasses.dataclass(frozen=True, eq=False)
class GroupCounts:
  """The step counts of the groups, for one step.

  Attributes:
    layout: the groups and the counts in the inner optimizer's state.
    counts: for each count in the state, a vector with an entry per group.
    classes: the class of each group (:func:`classes_of`).
    groups: the group of each leaf, in the structure of the gradients.
    first: the first group that is trained in this step, if known.
  """

  layout: _state_layout.StateLayout
  counts: Sequence[jax.Array]
  classes: Sequence[int]
  groups: Any
  first: int

  def separated(self, update: Callable[..., Any], owners: Any, places: Any) -> Callable[..., Any]:
    """An ``update`` by groups; `owners` and `places` are of its own state."""
    return functools.partial(self._step, update, owners, places)

  def advanced(self, before: Any, after: Any, depth: Any, made: Any) -> tuple[jax.Array, ...]:
    """The groups' counts after a step from one inner state to another.

    Those of trained groups advance as the count in the state does.
    """
    old, new = jax.tree.leaves(before), jax.tree.leaves(after)
    is_trained = (np.arange(len(self.classes), dtype=np.int32) >= depth) & jnp.asarray(made)

    def advance(place: int, vector: jax.Array) -> jax.Array:
      x, y = _placement.in_device_memory(old[place]), _placement.in_device_memory(new[place])
      moved = y if vector.dtype == bool else vector + (y - x)
      return jnp.where(is_trained, moved, vector)

    return tuple(map(advance, self.layout.counts, self.counts))

  def _step(
    self,
    update: Callable[..., Any],
    owners: Any,
    places: Any,
    gradients: Any,
    state: Any,
    params: Any = None,
    **extra: Any,
  ) -> Any:
    counts = [place for place in jax.tree.leaves(places) if place >= 0]
    if not counts:
      return update(gradients, state, params, **extra)
    parts = _compositions.states_of_parts(update, owners)
    if parts is not None:
      counts_of_parts: Any = _compositions.states_of_parts(update, places)

      def replace(i: int, part: Callable[..., Any]) -> Callable[..., Any]:
        return functools.partial(self._step, part, parts[i], counts_of_parts[i])

      return _compositions.with_parts(update, replace)(gradients, state, params, **extra)

    return self._by_class(functools.partial(update, **extra), counts, owners, places)(
      gradients, state, params
    )

  def _by_class(
    self, update: Callable[..., Any], counts: Sequence[int], owners: Any, places: Any
  ) -> Callable[..., Any]:
    """An ``update`` that holds counts, called for each class of groups."""
    keys = [self._key(group, counts) for group in range(len(self.classes))]
    if len(set(keys[self.first :])) > 1 and isinstance(self.counts[counts[0]], jax.core.Tracer):
      # Traced once for all classes.
      update = jax.jit(update)

    def by_class(gradients: Any, state: Any, params: Any) -> Any:
      # The last group is never frozen: the counts in the state are its own.
      results = {keys[-1]: update(gradients, state, params)}
      for group in range(self.first, len(keys)):
        if keys[group] not in results:
          own = jax.tree.map(
            lambda x, place, group=group: self.counts[place][group] if place >= 0 else x,
            state,
            places,
          )
          results[keys[group]] = update(gradients, own, params)
      updates, states = zip(*results.values(), strict=True)
      groups = _masks.mask_like(self.groups, gradients)
      return _take(keys, list(results), groups, updates), _take(keys, list(results), owners, states)

    return by_class

  def _key(self, group: int, counts: Sequence[int]) -> _Key:
    """The group's counts if they are known, else its class."""
    values = [self.counts[place] for place in counts]
    if any(isinstance(value, jax.core.Tracer) for value in values):
      return self.classes[group]
    return tuple(np.asarray(value)[group].item() for value in values)


def _take(keys: Sequence[_Key], computed: Sequence[_Key], groups: Any, results: Any) -> Any:
  """A tree whose leaves and layers are the results of their groups.

  `keys` are those of the groups, `computed` those of the results. Groups without a result are
  frozen, and take the last group's.
  """

  def take(group: _state_layout.LeafGroup, *values: Any) -> Any:
    by_key = dict(zip(computed, values, strict=True))
    last = by_key[keys[-1]]
    if not isinstance(group, _state_layout.StackedGroups):
      return by_key.get(keys[group], last)
    numbers = group.numbers_for(jnp.shape(last))
    taken = last
    for key, value in by_key.items():
      is_own = np.array([own == key for own in keys])[numbers]
      if np.any(is_own):
        taken = value if np.all(is_own) else jnp.where(is_own, value, taken)
    return taken

  if len(results) == 1:
    return results[0]
  structure: Any = jax.tree.structure(results[0])
  leaves = map(jax.tree.leaves, (groups, *results))
  return jax.tree.unflatten(structure, list(map(take, *leaves)))

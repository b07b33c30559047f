"""A step in which each group of layers has step counts of its own.

Adam divides its moments by 1 - b^n, n being one count for all leaves. If a layer is thawed after a
thousand steps, its moments are still zero and n is 1000, so that its first steps are several times
too long. PyTorch counts the steps of each param. This module counts the steps of each group: if the
state of an ``update`` holds a count beside moments, the ``update`` is called once for each class of
groups that were trained in the same steps, with their counts in the state. Each leaf and layer
takes the result of its class; XLA drops the results that nothing takes.

Only the ``update`` whose state holds the counts is called repeatedly, not the chain or the other
composition around it (:mod:`optax_boost._form._compositions`). So clipping after Adam takes the
norm of the updates that are made.
"""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost._form import _compositions
from optax_boost._foundation import _masks, _placement, _types
from optax_boost._wrappers._freezing import _state_layout

# Equal for the groups that one call serves: their class, or their counts.
_CallKey: TypeAlias = int | tuple[Any, ...]


def group_classes(depths: Sequence[int] | np.ndarray | None, num_groups: int) -> list[int]:
  """The class of each group: two groups are in one if no depth freezes only one of them."""
  if depths is None:
    return list(range(num_groups))
  return [sum(depth <= group for depth in depths) for group in range(num_groups)]


@dataclasses.dataclass(frozen=True, eq=False)
class GroupCounts:
  """The step counts of the groups, for one step.

  Attributes:
    layout: the groups and the counts in the inner optimizer's state.
    counts: for each count in the state, a vector with an entry per group.
    classes: the class of each group (:func:`group_classes`).
    leaf_groups: the group of each leaf, in the structure of the gradients.
    first_trained: the first group that this step may train.
  """

  layout: _state_layout.StateLayout
  counts: Sequence[jax.Array]
  classes: Sequence[int]
  leaf_groups: _types.Tree
  first_trained: int

  def update_by_group(
    self, update: _compositions.Update, state_groups: _types.Tree, count_positions: _types.Tree
  ) -> _compositions.Update:
    """An ``update`` that uses each group's counts; both trees have the structure of its state."""
    return functools.partial(self._step, update, state_groups, count_positions)

  def advanced(
    self,
    before: _types.OptState,
    after: _types.OptState,
    depth: _types.IntScalar,
    made: _types.BoolScalar,
  ) -> tuple[jax.Array, ...]:
    """The groups' counts after a step that led from one inner state to another.

    The counts of trained groups advance as the count in the state does.
    """
    old, new = jax.tree.leaves(before), jax.tree.leaves(after)
    is_trained = (np.arange(len(self.classes), dtype=np.int32) >= depth) & jnp.asarray(made)

    def advance(index: int, vector: jax.Array) -> jax.Array:
      x, y = _placement.in_device_memory(old[index]), _placement.in_device_memory(new[index])
      advanced = y if vector.dtype == bool else vector + (y - x)
      return jnp.where(is_trained, advanced, vector)

    return tuple(map(advance, self.layout.counts, self.counts))

  def _step(
    self,
    update: _compositions.Update,
    state_groups: _types.Tree,
    count_positions: _types.Tree,
    gradients: optax.Updates,
    state: optax.OptState,
    params: optax.Params | None = None,
    **extra: Any,
  ) -> tuple[optax.Updates, optax.OptState]:
    """Makes a step, by :meth:`_step_by_class` for each held ``update`` whose state has counts."""
    positions = [position for position in jax.tree.leaves(count_positions) if position >= 0]
    if not positions:
      return update(gradients, state, params, **extra)
    held_groups = _compositions.held_states(update, state_groups)
    if held_groups is None:
      update = functools.partial(update, **extra)
      return self._step_by_class(
        update, positions, state_groups, count_positions, gradients, state, params
      )
    held_positions: Any = _compositions.held_states(update, count_positions)

    def replace(i: int, held_update: _compositions.Update) -> _compositions.Update:
      return self.update_by_group(held_update, held_groups[i], held_positions[i])

    return _compositions.replace_held_updates(update, replace)(gradients, state, params, **extra)

  def _step_by_class(
    self,
    update: _compositions.Update,
    positions: Sequence[int],
    state_groups: _types.Tree,
    count_positions: _types.Tree,
    gradients: optax.Updates,
    state: optax.OptState,
    params: optax.Params | None,
  ) -> tuple[optax.Updates, optax.OptState]:
    """Calls an ``update`` whose state holds counts once for each class of groups."""
    keys = [self._call_key(group, positions) for group in range(len(self.classes))]
    if len(set(keys[self.first_trained :])) > 1 and isinstance(
      self.counts[positions[0]], jax.core.Tracer
    ):
      # Traced once for all classes.
      update = jax.jit(update)
    # The last group is never frozen: the counts in the state are also its counts.
    results = {keys[-1]: update(gradients, state, params)}
    for group in range(self.first_trained, len(keys)):
      if keys[group] not in results:
        state_of_group = jax.tree.map(
          lambda x, position, group=group: self.counts[position][group] if position >= 0 else x,
          state,
          count_positions,
        )
        results[keys[group]] = update(gradients, state_of_group, params)
    updates, states = zip(*results.values(), strict=True)
    leaf_groups = _masks.mask_like(self.leaf_groups, gradients)
    return (
      _merge(keys, list(results), leaf_groups, updates),
      _merge(keys, list(results), state_groups, states),
    )

  def _call_key(self, group: int, positions: Sequence[int]) -> _CallKey:
    """The group's counts if they are concrete, else its class."""
    values = [self.counts[position] for position in positions]
    if any(isinstance(value, jax.core.Tracer) for value in values):
      return self.classes[group]
    return tuple(np.asarray(value)[group].item() for value in values)


def _merge(
  keys: Sequence[_CallKey],
  result_keys: Sequence[_CallKey],
  groups: _types.Tree,
  results: Sequence[_types.SameTree],
) -> _types.SameTree:
  """A tree in which each leaf and layer is taken from the result of its group.

  `keys` has the key of each group, `result_keys` the key of each result. A group without a result
  is frozen, and takes the result of the last group.
  """

  def take(group: _state_layout.LeafGroup, *values: jax.Array) -> jax.Array:
    value_by_key = dict(zip(result_keys, values, strict=True))
    last = value_by_key[keys[-1]]
    if not isinstance(group, _state_layout.StackedGroups):
      return value_by_key.get(keys[group], last)
    numbers = group.numbers_for(jnp.shape(last))
    merged = last
    for key, value in value_by_key.items():
      has_key = np.array([group_key == key for group_key in keys])[numbers]
      if np.any(has_key):
        merged = value if np.all(has_key) else jnp.where(has_key, value, merged)
    return merged

  if len(results) == 1:
    return results[0]
  leaves = map(jax.tree.leaves, (groups, *results))
  return jax.tree.unflatten(jax.tree.structure(results[0]), list(map(take, *leaves)))

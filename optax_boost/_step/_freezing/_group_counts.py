"""A step in which each group of layers has step counts of its own, as each param has in PyTorch.

Adam divides its moments by 1 - b^n with one count n for all leaves. If a layer is thawed after a
thousand steps, its moments are still zero but n is 1000, so its first steps are several times too
long. Here each group has a count. The optimizer's ``update`` is called once for each class of
groups (groups that are always trained in the same steps), with the counts of the class. Each leaf,
and each layer of a stacked leaf, takes the result of its class; XLA drops results that no leaf
takes. This needs an ``update`` in which moments of different classes don't meet.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost._foundation import _placement, _types
from optax_boost._step._freezing import _state_layout

# The key of a group. Groups with equal keys share one call of ``update``. A key is the tuple of the
# group's step counts if these are concrete, else the group's class.
_CallKey: TypeAlias = int | tuple[Any, ...]


def shared_counts(counts: jax.Array, classes: Sequence[int]) -> jax.Array:
  """Returns the counts of the groups; groups of a class get the smallest count among them.

  Their counts differ only after steps of another schedule. The smallest makes steps too short for
  some layers for a while, and another one would make steps too long.
  """
  if len({*classes}) == len(classes):
    return counts
  same = np.equal.outer(classes, classes)
  if counts.dtype == bool:
    return jnp.any(same & counts, axis=1)
  return jnp.min(jnp.where(same, counts, jnp.iinfo(counts.dtype).max), axis=1)


@dataclasses.dataclass(frozen=True, eq=False)
class GroupCounts:
  """Step counts for each group of layers, with which one step calls the inner ``update``.

  Attributes:
    layout: tells which leaves of the inner optimizer's state are step counts, and to which group
      each leaf of this state belongs.
    counts: for each entry of ``layout.counts``, a vector; its entry i is the count of group i.
    classes: the class of each group. Groups of a class are always trained in the same steps, so
      their counts are equal.
    leaf_groups: the group of each param, as a tree of the gradients' structure.
    first_trained: the first group that this step may train; the groups before it are frozen.
  """

  layout: _state_layout.StateLayout
  counts: Sequence[jax.Array]
  classes: Sequence[int]
  leaf_groups: _types.Tree
  first_trained: int

  def advanced(
    self,
    inner_state: _types.OptState,
    depth: _types.IntScalar | np.integer,
    made: _types.BoolScalar,
  ) -> tuple[jax.Array, ...]:
    """Returns the counts of all groups after a step; the counts of frozen groups are unchanged.

    `inner_state` is the inner optimizer's state after the step, `depth` is the number of frozen
    groups, and `made` tells whether the step was made.
    """
    leaves = jax.tree.leaves(inner_state)
    is_trained = (np.arange(len(self.classes), dtype=np.int32) >= depth) & jnp.asarray(made)

    def advance(index: int, vector: jax.Array) -> jax.Array:
      after = _placement.in_device_memory(leaves[index])
      advanced = after if vector.dtype == bool else vector + (after - vector[-1])
      return jnp.where(is_trained, advanced, vector)

    return tuple(map(advance, self.layout.counts, self.counts))

  def update_by_class(
    self,
    update: Callable[..., tuple[optax.Updates, optax.OptState]],
    gradients: optax.Updates,
    state: optax.OptState,
    params: optax.Params | None,
    **extra: Any,
  ) -> tuple[optax.Updates, optax.OptState]:
    """Calls ``update`` once for each class of groups; returns the merged updates and states."""
    if not self.counts:
      return update(gradients, state, params, **extra)
    update = functools.partial(update, **extra)
    count_positions, state_groups = self.layout.count_positions, self.layout.state_groups
    positions = range(len(self.counts))
    keys = [self._call_key(group, positions) for group in range(len(self.classes))]
    if len(set(keys[self.first_trained :])) > 1 and isinstance(
      self.counts[positions[0]], jax.core.Tracer
    ):
      # `jit` traces `update` once, not once for each class.
      update = jax.jit(update)
    results: dict[_CallKey, Any] = {}
    for group in range(len(keys) - 1, self.first_trained - 1, -1):
      if keys[group] not in results:
        state_of_group = jax.tree.map(
          lambda x, position, group=group: self.counts[position][group] if position >= 0 else x,
          state,
          count_positions,
        )
        results[keys[group]] = update(gradients, state_of_group, params)
    updates, states = zip(*results.values(), strict=True)
    return (
      _merge(keys, list(results), self.leaf_groups, updates),
      _merge(keys, list(results), state_groups, states),
    )

  def _call_key(self, group: int, positions: Sequence[int]) -> _CallKey:
    """Returns the counts of a group if they are concrete, else the class of the group.

    `positions` tells which of :attr:`counts` are meant.
    """
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
  """Returns a tree that takes each leaf, or layer of a stacked leaf, from the result of its group.

  `groups` has the group of each leaf. `keys` has the key of each group, and `result_keys` the key
  of each of the `results`. A group without a result is frozen; its leaves are taken from the result
  of the last group.
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

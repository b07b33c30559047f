"""Keeps the statistics of frozen layers unchanged, for example the running means of BatchNorms."""

from collections.abc import Callable, Mapping, Sequence
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost._foundation import _paths, _types
from optax_boost._trace import _layer_groups
from optax_boost._train_step import _replaced_values, _traced_loss

# Linen's collections, whose names may be in the paths of params, statistics and replaced values.
_COLLECTIONS = {"params", "batch_stats", _replaced_values.REPLACED_VALUES}
# The group of what is never frozen.
NEVER_FROZEN = np.iinfo(np.int32).max


def hold_statistics(
  before: _types.Tree,
  after: _types.Tree,
  params: optax.Params,
  groups: Sequence[_layer_groups.GroupNumber],
  depth: _types.IntScalar | np.integer,
  traced: _traced_loss.TracedLoss,
) -> _types.ModelState:
  """Returns the statistics after a step; frozen layers keep their old values.

  `before` and `after` are the model states before and after the forward pass. `groups` has the
  group of each leaf of `params`, and the first `depth` groups are frozen. A statistic belongs to
  the innermost module around it that has params, its own or further inside, and is frozen with the
  last group of these params. (Names of Linen's collections don't count.) A statistic of the root,
  such as a mean of the targets, is never frozen. Unsigned integers, which are keys and counts of
  draws, are never frozen. A leaf of `before` may stack the statistics of several layers; the
  program tells the axis of the layers.
  """
  if isinstance(depth, np.integer) and depth == 0:
    return after
  # Leaves are matched by path, since a loss may return other containers or more statistics.
  keys = _paths.leaf_keys(before)
  numbers = {path: number for number, path in enumerate(_paths.leaf_paths(before))}
  old_leaves, leaves = jax.tree.leaves(before), jax.tree.leaves(after)
  # An array that the loss returns unchanged, such as an adapter's base weight, is not a statistic.
  old_ids = set(map(id, old_leaves))
  changed = {
    keys[numbers[path]]: (numbers[path], i)
    for i, path in enumerate(_paths.leaf_paths(after))
    if path in numbers
    and id(leaves[i]) not in old_ids
    and _is_number(leaves[i])
    and jnp.shape(leaves[i]) == jnp.shape(old_leaves[numbers[path]])
    and not _replaced_values.in_collection(path)
  }
  values = {key: leaves[i] for key, (_, i) in changed.items()}

  def axes() -> dict[int, int]:
    found = traced.statistics_axes()
    return {n: found[old] for n, (old, _) in enumerate(changed.values()) if old in found}

  placed = groups_of_values(before, values, params, groups, axes)
  for group, (old, i) in zip(placed, changed.values(), strict=True):
    leaves[i] = _layer_groups.select_frozen(depth, group, old_leaves[old], leaves[i])
  return jax.tree.unflatten(jax.tree.structure(after), leaves)


def groups_of_values(
  model_state: _types.ModelState,
  values: Mapping[_types.KeyPath, jax.Array],
  params: optax.Params,
  groups: Sequence[_layer_groups.GroupNumber],
  find_axes: Callable[[], Mapping[int, int]],
) -> list[_layer_groups.GroupNumber]:
  """Returns the groups of `values`, entries of a model state by path.

  A value belongs to the innermost module around it that has params. If no path begins with the name
  of such a module, the first names of all paths don't count, such as the index of a tuple that
  holds the variables. The other arguments are those of :func:`hold_statistics`.
  """
  modules = _groups_of_modules(params, groups)
  axes = find_axes() if values and any(np.size(group) > 1 for group in groups) else {}
  names_of = {
    path: module.split("/")
    for path, module in zip(_paths.leaf_keys(model_state), _module_paths(model_state), strict=True)
  }

  def modules_around(names: Sequence[str], start: int) -> list[str]:
    around = ("/".join(names[start:end]) for end in range(len(names), start, -1))
    return [module for module in around if module in modules]

  starts = range(max(map(len, names_of.values()), default=0))
  start = next((i for i in starts if any(modules_around(n, i) for n in names_of.values())), 0)

  def group_of(number: int, path: _types.KeyPath) -> _layer_groups.GroupNumber:
    around = modules_around(names_of[path], start)
    if not around:  # the root, a part of which is never frozen
      return NEVER_FROZEN
    return _along(axes.get(number), _last_group(modules[around[0]]), values[path])

  return [group_of(number, path) for number, path in enumerate(values)]


def _groups_of_modules(
  params: optax.Params, groups: Sequence[_layer_groups.GroupNumber]
) -> dict[str, list[np.ndarray]]:
  """Returns for each module but the root the groups of its params: numbers, or one per layer."""
  modules: dict[str, list[np.ndarray]] = {}
  for module, group in zip(_module_paths(params), groups, strict=True):
    names = module.split("/") if module else []
    for end in range(1, len(names) + 1):
      modules.setdefault("/".join(names[:end]), []).append(np.ravel(group))
  return modules


def _last_group(groups: Sequence[np.ndarray]) -> np.ndarray:
  """Returns the last of several groups, each a number or one for each layer."""
  if len({np.size(group) for group in groups} - {1}) > 1:
    groups = list(map(np.max, groups))
  return np.ravel(functools.reduce(np.maximum, groups))


def _along(axis: int | None, group: np.ndarray, array: jax.Array) -> _layer_groups.GroupNumber:
  """Returns the group of an array whose layers are stacked along `axis` (None: is one layer's)."""
  if axis is None or group.size != array.shape[axis]:
    return int(np.max(group))
  return group.reshape([-1 if i == axis else 1 for i in range(array.ndim)])


def _is_inexact(x: _types.Unchecked) -> bool:
  return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def _is_number(x: _types.Unchecked) -> bool:
  """Returns whether an array holds numbers that aren't unsigned."""
  return _is_inexact(x) or jnp.issubdtype(jnp.result_type(x), jnp.signedinteger)


def _module_paths(tree: _types.Tree) -> list[str]:
  """Returns the path of each leaf's module, without the names of Linen's collections.

  Names in a flat tree, such as ``norm/scale`` and ``norm.scale``, count as paths. An index in a
  list is written with the length of the list, as in ``2 of 4``. So params and statistics in lists
  have the same path only if both lists have the same length.
  """
  lengths: dict[_types.KeyPath, int] = {}
  for path in _paths.leaf_keys(tree, lambda node: not jax.tree.leaves(node)):
    for depth, key in enumerate(path):
      if isinstance(key, jax.tree_util.SequenceKey):
        lengths[path[:depth]] = max(lengths.get(path[:depth], 0), key.idx + 1)

  def names(path: _types.KeyPath) -> list[str]:
    texts = [jax.tree_util.keystr((key,), simple=True) for key in path]
    for depth, text in enumerate(texts):
      if path[:depth] in lengths:
        texts[depth] = f"{text} of {lengths[path[:depth]]}"
    return re.split(r"[/.]", "/".join(texts))[:-1]

  modules = list(map(names, _paths.leaf_keys(tree)))
  # If one path begins with a Linen collection, all paths do.
  first = 1 if any(_COLLECTIONS & {*module[:1]} for module in modules) else 0
  return ["/".join(n for n in module[first:] if n not in _COLLECTIONS) for module in modules]

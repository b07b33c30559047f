"""Keeps the statistics of frozen layers unchanged, for example the running means of BatchNorms."""

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost._foundation import _paths, _trees, _types, _warnings
from optax_boost._trace import _layer_groups
from optax_boost._train_step._replaced_values import REPLACED_VALUES

# Linen's collections, whose names may come first in the paths of params and statistics.
_COLLECTIONS = (["params"], ["batch_stats"])
# The group of what is never frozen.
NEVER_FROZEN = np.iinfo(np.int32).max


def hold_statistics(
  before: _types.Tree,
  after: _types.Tree,
  params: optax.Params,
  groups: Sequence[_layer_groups.GroupNumber],
  depth: _types.IntScalar | np.integer,
  find_axes: Callable[[], Mapping[int, int]],
) -> _types.ModelState:
  """Returns the statistics after a step; frozen layers keep their old values.

  `before` and `after` are the model states before and after the forward pass. `groups` has the
  group of each leaf of `params`, and the first `depth` groups are frozen. A statistic belongs to
  the layer whose params have the same path, apart from the name of a Linen collection in front.
  Integers (counts of batches or draws) and statistics that belong to no layer have their new
  values. A leaf of `before` may stack the statistics of several layers: ``find_axes()`` maps the
  index of such a leaf to the axis of the layers.
  """
  # Leaves are matched by path, since a loss may return other containers or more statistics.
  numbered = enumerate(zip(_paths.leaf_paths(before), jax.tree.leaves(before), strict=True))
  old_leaves = {path: (number, leaf) for number, (path, leaf) in numbered}
  if not old_leaves:
    return after
  modules = _groups_of_modules(params, groups)
  axes = find_axes() if any(group.size > 1 for group in modules.values()) else {}

  def keep(new: jax.Array, path: str, module: str) -> jax.Array:
    if module not in modules or path not in old_leaves or not _is_inexact(new):
      return new
    number, old = old_leaves[path]
    if jnp.shape(old) != jnp.shape(new):
      return new
    group = _along(axes.get(number), modules[module], new)
    return _layer_groups.select_frozen(depth, group, old, new)

  leaves = jax.tree.leaves(after)
  paths, new_modules = _paths.leaf_paths(after), _module_paths(after)
  # An array that the loss returns unchanged, such as an adapter's base weight, is not a statistic.
  old_ids = {id(leaf) for _, leaf in old_leaves.values()}
  statistics = [
    path
    for path, x in zip(paths, leaves, strict=True)
    if _is_inexact(x) and id(x) not in old_ids and not path.startswith(REPLACED_VALUES)
  ]
  if statistics and not modules.keys() & new_modules:
    _warnings.warn_no_effect(
      "`hold_frozen_statistics` holds none: no statistics have the path of a layer's params, as"
      " 'norm/mean' next to 'norm/scale'. Pass hold_frozen_statistics=False if statistics of frozen"
      " layers are to be updated.",
      statistics,
    )
  return _trees.map_with(keep, after, paths, new_modules)


def groups_of_values(
  values: Mapping[_types.KeyPath, jax.Array],
  params: optax.Params,
  groups: Sequence[_layer_groups.GroupNumber],
  find_axes: Callable[[], Mapping[int, int]],
) -> list[_layer_groups.GroupNumber]:
  """Returns the groups of `values`, entries of a model state by path, which the gradient replaces.

  A value belongs to the innermost module around it that has params. The other arguments are those
  of :func:`hold_statistics`.
  """
  modules = _groups_of_modules(params, groups)
  is_stacked = bool(values) and any(group.size > 1 for group in modules.values())
  axes = find_axes() if is_stacked else {}

  def group_of(number: int, path: _types.KeyPath) -> _layer_groups.GroupNumber:
    module = jax.tree_util.keystr(path[1:-1], simple=True, separator="/")
    while module and module not in modules:
      module = module.rpartition("/")[0]
    if module not in modules:
      return NEVER_FROZEN
    return _along(axes.get(number), modules[module], values[path])

  return [group_of(number, path) for number, path in enumerate(values)]


def _groups_of_modules(
  params: optax.Params, groups: Sequence[_layer_groups.GroupNumber]
) -> dict[str, np.ndarray]:
  """Returns the last group in which each module has params: a number, or one for each layer."""
  modules: dict[str, np.ndarray] = {}
  for module, group in zip(_module_paths(params), groups, strict=True):
    modules[module] = np.maximum(modules.get(module, 0), np.ravel(group))
  return modules


def _along(axis: int | None, group: np.ndarray, array: jax.Array) -> _layer_groups.GroupNumber:
  """Returns the group of an array whose layers are stacked along `axis` (None: is one layer's)."""
  if axis is None or group.size != array.shape[axis]:
    return int(np.max(group))
  return group.reshape([-1 if i == axis else 1 for i in range(array.ndim)])


def _is_inexact(x: _types.Unchecked) -> bool:
  return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def _module_paths(tree: _types.Tree) -> list[str]:
  """Returns the path of each leaf's module, without the name of a Linen collection in front.

  An index in a list is written with the length of the list, as in ``2 of 4``. So params and
  statistics in lists have the same path only if both lists have the same length.
  """
  lengths: dict[_types.KeyPath, int] = {}
  for path in _paths.leaf_keys(tree, lambda node: not jax.tree.leaves(node)):
    for depth, key in enumerate(path):
      if isinstance(key, jax.tree_util.SequenceKey):
        lengths[path[:depth]] = max(lengths.get(path[:depth], 0), key.idx + 1)

  def names(path: _types.KeyPath) -> list[str]:
    texts = [jax.tree_util.keystr((key,), simple=True) for key in path[:-1]]
    for depth, text in enumerate(texts):
      if path[:depth] in lengths:
        texts[depth] = f"{text} of {lengths[path[:depth]]}"
    return "/".join(texts).split("/") if texts else []

  modules = list(map(names, _paths.leaf_keys(tree)))
  # If one path begins with a Linen collection, all paths do.
  first = 1 if any(module[:1] in _COLLECTIONS for module in modules) else 0
  return ["/".join(module[first:]) for module in modules]

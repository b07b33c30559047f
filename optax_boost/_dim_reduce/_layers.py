"""Which groups the leaves and layers of a tree are in, and the parts of leaves that a group has."""

from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
from typing import Any
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from optax_boost import _base
from optax_boost import _groups
from optax_boost import _layers
from optax_boost._dim_reduce import _subspace

# A plan of `layer_groups`, what `layer_axes` returns, or regular expressions.
Groups: TypeAlias = _groups.Groups | _layers.Layers
# The pattern of all leaves.
ONE_GROUP = ("",)


@dataclasses.dataclass(frozen=True)
class LeafGroups:
  """The groups of a leaf's layers; a leaf without axes of layers is one layer."""

  axes: tuple[int, ...]  # of the layers
  numbers: tuple[int, ...]  # by layer, in the order of the axes


def checked_groups(groups: Any) -> Groups:
  """The argument `groups`, None as the pattern of all leaves; warns if no layers are stacked."""
  if groups is None:
    return ONE_GROUP
  if not isinstance(groups, _layers.Layers):
    _groups.count_groups(groups)
  elif not any(axes is not None and axes.layers for axes in groups.axes):
    _base.warn(
      "`groups` describes no leaf that holds many layers, so all leaves are one group. Pass regular"
      " expressions, one per group, or None for one group.",
      _base.NoEffectWarning,
    )
  return groups


def find_groups(tree: Any, groups: Groups, method: str) -> tuple[tuple[LeafGroups, ...], int]:
  """The groups of each leaf's layers, and the number of groups.

  With stacked axes, layer i of all leaves is group i, and leaves without layers are the last group.
  """
  if not isinstance(groups, _layers.Layers):
    numbers = _groups.layer_numbers(tree, groups, method)
    return tuple(map(_of_number, numbers)), _groups.count_groups(groups)
  leaves = _layers.leaves_of(tree, groups)
  axes = [leaf.stacked for leaf in leaves]
  layers = [leaf.layers if leaf.stacked else 0 for leaf in leaves]
  last = max(layers, default=0)
  of_leaves = tuple(
    LeafGroups(of_leaf, tuple(range(number))) if of_leaf else LeafGroups((), (last,))
    for number, of_leaf in zip(layers, axes, strict=True)
  )
  # At least one group, which may be empty.
  return of_leaves, max(last + any(not of_leaf for of_leaf in axes), 1)


def _of_number(number: _groups.GroupNumber) -> LeafGroups:
  if np.ndim(number) == 0:
    return LeafGroups((), (int(number),))
  axis = int(np.argmax(np.shape(number)))
  return LeafGroups((axis,), tuple(map(int, np.ravel(number))))


def split(
  rows: Sequence[jax.Array], groups: Sequence[LeafGroups]
) -> Iterator[tuple[int, list[jax.Array]]]:
  """Each group's parts of stacked leaves, ``[m, *shape]``, with the layers after the rows."""
  for group in sorted({number for of_leaf in groups for number in of_leaf.numbers}):
    yield (
      group,
      [
        _layers_of(x, of_leaf, group) if of_leaf.axes else x
        for x, of_leaf in zip(rows, groups, strict=True)
        if group in of_leaf.numbers
      ],
    )


def join(
  parts: Mapping[int, Sequence[jax.Array]], like: Sequence[jax.Array], groups: Sequence[LeafGroups]
) -> list[jax.Array]:
  """The inverse of :func:`split`; the leaves are sharded like `like`."""
  rest = {group: iter(of_group) for group, of_group in parts.items()}
  leaves = []
  for x, of_leaf in zip(like, groups, strict=True):
    numbers = sorted(set(of_leaf.numbers))
    own = [next(rest[group]) for group in numbers]
    if of_leaf.axes:
      order = np.argsort(np.concatenate([_members(of_leaf, group) for group in numbers]))
      front = jnp.concatenate(own, axis=1)[:, order]
      shape = [x.shape[1 + axis] for axis in of_leaf.axes]
      front = front.reshape(len(front), *shape, *front.shape[2:])
      own = [jnp.moveaxis(front, range(1, 1 + len(shape)), [1 + axis for axis in of_leaf.axes])]
    leaves += [_subspace.placed(joined, x, like_stacked=True) for joined in own]
  return leaves


def _members(of_leaf: LeafGroups, group: int) -> np.ndarray:
  return np.flatnonzero(np.asarray(of_leaf.numbers) == group)


def _layers_of(x: jax.Array, of_leaf: LeafGroups, group: int) -> jax.Array:
  """A group's layers of a stacked leaf, as ``[m, layers, *rest]``."""
  number = len(of_leaf.axes)
  front = jnp.moveaxis(x, [1 + axis for axis in of_leaf.axes], range(1, 1 + number))
  layers = np.unravel_index(_members(of_leaf, group), front.shape[1 : 1 + number])
  index = (slice(None), *layers)
  mesh, spec = jax.typeof(front).sharding.mesh, jax.typeof(front).sharding.spec
  if jax.sharding.AxisType.Explicit not in mesh.axis_types:
    return front[index]
  # The layers of one group may lie on a part of the devices, so their axis is not sharded.
  spec = jax.sharding.PartitionSpec(spec[0], None, *spec[1 + number :])
  return front.at[index].get(out_sharding=jax.sharding.NamedSharding(mesh, spec))

""":class:`Constants`: arrays in a batch that are not examples."""

from typing import NamedTuple

import jax

from optax_boost._foundation import _types


class Constants(NamedTuple):
  """Arrays in a batch that are not examples, such as the params of a second model."""

  arrays: tuple[jax.Array, ...]


def is_constants(node: _types.Tree) -> bool:
  """Returns whether a node of a batch is a :class:`Constants`."""
  return isinstance(node, Constants)


def data_flags(data: _types.Batch) -> list[bool | None]:
  """Returns for each leaf of a batch True if it is data, None if it is in :class:`Constants`."""
  flags: list[bool | None] = []
  for node in jax.tree.leaves(data, is_leaf=is_constants):
    flags += [None] * len(jax.tree.leaves(node)) if is_constants(node) else [True]
  return flags

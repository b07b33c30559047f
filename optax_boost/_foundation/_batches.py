"""Batches, and the arrays in them that are not examples."""

from typing import Any, NamedTuple

import jax

from optax_boost._foundation import _types


class Constants(NamedTuple):
  """Arrays in a batch that are not examples: those of a second model."""

  arrays: tuple[Any, ...]


def is_constants(node: _types.Tree) -> bool:
  """Whether a node of a batch holds no examples."""
  return isinstance(node, Constants)


def data_flags(data: Any) -> list[bool | None]:
  """True for each leaf of a batch and of other data, None for the constants in it."""
  flags: list[bool | None] = []
  for node in jax.tree.leaves(data, is_leaf=is_constants):
    flags += [None] * len(jax.tree.leaves(node)) if is_constants(node) else [True]
  return flags

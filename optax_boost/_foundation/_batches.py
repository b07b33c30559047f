"""Batches, and the arrays in them that are not examples."""

from typing import Any, NamedTuple

from optax_boost._foundation import _types


class Constants(NamedTuple):
  """Arrays in a batch that are not examples: those of a second model."""

  arrays: tuple[Any, ...]


def is_constants(node: _types.Tree) -> bool:
  """Whether a node of a batch holds no examples."""
  return isinstance(node, Constants)

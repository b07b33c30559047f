"""Argument checks that the methods for Flax NNX share."""

from typing import Any

from flax import nnx

from optax_boost import _base


def check_model(model: Any) -> None:
  """Refuses all but NNX modules."""
  if not isinstance(model, nnx.Module):
    raise TypeError(f"`model` must be an NNX module; got {_base.shorten(model)}.")


def check_filter(name: str, value: Any) -> None:
  """Refuses all but NNX filters."""
  try:
    nnx.filterlib.to_predicate(value)
  except (TypeError, ValueError) as error:
    raise TypeError(
      f"`{name}` must be an NNX filter, as nnx.Param; got {_base.shorten(value)}."
    ) from error

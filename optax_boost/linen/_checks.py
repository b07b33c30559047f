"""Argument checks that the methods for Flax Linen share."""

from collections.abc import Mapping
from typing import Any

from flax import linen as nn

from optax_boost import _base


def check_module(module: Any) -> None:
  """Refuses all but Linen modules."""
  if not isinstance(module, nn.Module):
    raise TypeError(f"`module` must be a Linen module; got {_base.shorten(module)}.")


def check_variables(argument: str, variables: Any) -> None:
  """Refuses all but dicts of collections with a collection ``params``."""
  if not isinstance(variables, Mapping):
    raise TypeError(
      f"`{argument}` must be a dict of collections, as `module.init` returns it; got"
      f" {_base.shorten(variables)}."
    )
  if not are_variables(variables):
    raise ValueError(
      f"`{argument}` must be a dict of collections with a collection 'params', as `module.init`"
      f" returns it; got the keys {_base.shorten(list(variables))}."
    )


def are_variables(value: Any) -> bool:
  """Whether a value is a dict of collections with a collection ``params``."""
  return isinstance(value, Mapping) and isinstance(value.get("params"), Mapping)

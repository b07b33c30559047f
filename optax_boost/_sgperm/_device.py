"""The exact step of SGPerm on the device."""

from typing import Any


def permute(*args: Any, **kwargs: Any) -> Any:
  """Not yet."""
  raise NotImplementedError

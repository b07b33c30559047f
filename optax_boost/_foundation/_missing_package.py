"""The error for a missing package of one of our extras."""

import importlib.util


def require_flax(package: str) -> None:
  """Raises ImportError that names the extra to install, if Flax is missing."""
  if importlib.util.find_spec("flax") is None:
    raise ImportError(
      f"`{package}` needs Flax, which is not installed: pip install 'optax-boost[flax]'."
    )

"""The error for a missing package that an extra of optax_boost installs."""

import importlib.util


def require_flax(package: str) -> None:
  """Raises ImportError if Flax is missing; the message names the extra to install."""
  if importlib.util.find_spec("flax") is None:
    raise ImportError(
      f"`{package}` needs Flax, which is not installed: pip install 'optax-boost[flax]'."
    )

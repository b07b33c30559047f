"""What an extra of the package brings, asked for before it is imported."""

import importlib.util


def require_flax(package: str) -> None:
  """Raises ImportError, which names the extra to install, if Flax is not there.

  Args:
    package: the subpackage that needs it, by its whole name.
  """
  if importlib.util.find_spec("flax") is None:
    raise ImportError(
      f"`{package}` needs Flax, which is not installed: pip install 'optax-boost[flax]'."
    )

"""A progress bar, if ``tqdm`` is installed."""

from collections.abc import Iterable
import importlib.util
from typing import TypeVar

from optax_boost._foundation import _checks

_Item = TypeVar("_Item")


def with_progress(items: Iterable[_Item], progress: bool, desc: str, unit: str) -> Iterable[_Item]:
  """Returns an iterable that shows a progress bar, if `progress` is set and tqdm is installed."""
  _checks.check_bool("progress", progress)
  if not progress or importlib.util.find_spec("tqdm") is None:
    return items
  from tqdm import tqdm

  return tqdm(items, desc=desc, unit=unit)

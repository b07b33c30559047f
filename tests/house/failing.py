"""What ``test_gpu_benchmark`` runs in other processes, without JAX, whose import takes seconds."""

from collections.abc import Iterator
import os
import time


def two_items(failure: str) -> Iterator[int | str]:
  """Two items, and then trouble of some kind."""
  yield 1
  yield os.environ["ITEM"]
  if failure == "raises":
    raise ValueError("no more\nto say")
  if failure == "dies":
    os._exit(3)
  if failure == "hangs":
    time.sleep(60)

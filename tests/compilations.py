"""What XLA compiles: how many programs, and loops of which length."""

from collections.abc import Callable
import re
from typing import Any

import jax

_SEEN: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
  lambda event, *_, **__: _SEEN.append(event) if "backend_compile" in event else None
)


def count(function: Callable[[], Any]) -> int:
  """The programs compiled during a call."""
  return counted(function)[1]


def counted(function: Callable[[], Any]) -> tuple[Any, int]:
  """A call's result, and the programs compiled during it."""
  before = len(_SEEN)
  result = function()
  return result, len(_SEEN) - before


class Watched:
  """A function, and the programs compiled in each of its calls."""

  def __init__(self, function: Callable[..., Any]) -> None:
    self._function = function
    self.counts: list[int] = []

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    result, compiled = counted(lambda: self._function(*args, **kwargs))
    self.counts.append(compiled)
    return result

  def __getattr__(self, name: str) -> Any:
    return getattr(self._function, name)

  def compiled_once(self) -> bool:
    """Whether nothing was compiled after the first call."""
    return not any(self.counts[1:])


def loops(program: jax.stages.Compiled) -> list[int]:
  """The lines of each fused loop of a program for CPUs."""
  computations = re.split(r"\n(?=\S)", program.as_text() or "")
  return [text.count("\n") for text in computations if text.startswith("%fused")]

"""Work in other processes: a generator that can be given up, a pool with a core for each."""

from collections.abc import Callable, Iterable, Iterator
import concurrent.futures
import math
import multiprocessing
import os
import time
from typing import Any

# glibc would return the memory of large buffers to the system after each step and fetch it again,
# which took up to half of a step's time, at some sizes of a batch and not at others.
_KEEP_MEMORY = {
  "MALLOC_MMAP_THRESHOLD_": str(2**32),
  "MALLOC_TRIM_THRESHOLD_": str(2**33),
  "MALLOC_TOP_PAD_": str(2**28),
}


class GivenUp(Exception):
  """The process ended by itself, raised, or took too long; its text goes into the table."""


def items(
  function: Callable[..., Iterable[Any]],
  *arguments: Any,
  each: float = math.inf,
  whole: float = math.inf,
  environment: dict[str, str] | None = None,
) -> Iterator[Any]:
  """Yields what a generator yields in a new process.

  Args:
    function: a module's function.
    *arguments: of it.
    each: seconds that an item may take.
    whole: seconds that all of them may take.
    environment: variables to set before `function`'s module is imported.

  Raises:
    GivenUp: after the items that came.
  """
  context = multiprocessing.get_context("spawn")
  # Not a queue, whose thread would lose what a dying process has just made.
  receiver, sender = context.Pipe(duplex=False)
  # By name: to unpickle the function would import its module before the variables are set.
  name = (function.__module__, function.__qualname__)
  process = context.Process(target=_work, args=(name, arguments, environment or {}, sender))
  process.start()
  sender.close()
  end = time.monotonic() + whole
  try:
    while (result := _next(process, receiver, each, end)) is not None:
      yield result[0]
  finally:
    process.kill()
    process.join()


def _next(process: Any, receiver: Any, each: float, end: float) -> Any:
  start = time.monotonic()
  while time.monotonic() < min(start + each, end):
    try:
      if not receiver.poll(1):
        continue
      result = receiver.recv()
    except EOFError:
      process.join()
      raise GivenUp(f"the process ended with {process.exitcode}") from None
    if isinstance(result, str):
      raise GivenUp(result)
    return result
  raise GivenUp(f"not done within {time.monotonic() - start:.0f} s")


def _work(name: tuple[str, str], arguments: Any, environment: dict[str, str], sender: Any) -> None:
  import importlib

  os.environ.update(environment)
  try:
    for item in getattr(importlib.import_module(name[0]), name[1])(*arguments):
      sender.send((item,))
    sender.send(None)
  except Exception as error:  # the table says it
    message = (str(error).splitlines() or [""])[0]
    sender.send(f"{type(error).__name__}: {message[:200]}")


def core_pool(
  initialize: Callable[[], None] | None = None,
) -> concurrent.futures.ProcessPoolExecutor:
  """A pool of one process for each core, pinned to it where the system can.

  Of small networks, trainings on a core each are faster than one after the other on all.

  Args:
    initialize: a module's function, called first in each process.
  """
  os.environ.update({**_KEEP_MEMORY, **os.environ})
  cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
  # A fork of a process that runs JAX's threads may hang.
  context = multiprocessing.get_context("spawn")
  free = context.Queue()
  for core in cores:
    free.put(core)
  return concurrent.futures.ProcessPoolExecutor(len(cores), context, _take_core, (free, initialize))


def _take_core(free: Any, initialize: Callable[[], None] | None) -> None:
  if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {free.get()})
  if initialize is not None:
    initialize()

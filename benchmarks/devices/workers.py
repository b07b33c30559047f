"""Compiles cases in a process that can be given up."""

from collections.abc import Iterator
import multiprocessing
import queue
import time
from typing import Any
import warnings

from benchmarks.devices import cases
from benchmarks.devices import chips
from benchmarks.devices import programs


def compile_all(
  chip_name: str, layout: str, names: list[str], limit: float
) -> Iterator[tuple[str, dict[str, Any]]]:
  """Yields a record for each case; one that takes longer than `limit` seconds is given up."""
  context = multiprocessing.get_context("spawn")
  remaining = list(names)
  while remaining:
    results = context.Queue()
    process = context.Process(target=_work, args=(chip_name, layout, remaining, results))
    process.start()
    while remaining:
      record = _next(process, results, limit)
      name = remaining.pop(0)
      yield name, record
      if "ended" in record:
        break
    process.kill()
    process.join()


def _next(process: Any, results: Any, limit: float) -> dict[str, Any]:
  """The next record, or one that says why there is none."""
  deadline = time.monotonic() + limit
  while time.monotonic() < deadline:
    try:
      return results.get(timeout=1)
    except queue.Empty:
      if not process.is_alive() and results.empty():
        return {"error": f"the process ended with {process.exitcode}", "ended": True}
  return {"error": f"not compiled within {limit:.0f} s", "ended": True}


def _work(chip_name: str, layout: str, names: list[str], results: Any) -> None:
  """Compiles the cases and hands out each one's record."""
  warnings.simplefilter("ignore")
  for name in names:
    try:
      record = programs.compile_case(cases.CASES[name], chips.CHIPS[chip_name], layout)
    except Exception as error:  # the table says it, and the others go on
      record = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
    results.put(record)

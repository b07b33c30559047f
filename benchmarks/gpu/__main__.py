"""Runs every part in a process of its own and writes one table: ``python -m benchmarks.gpu``.

At most nine minutes on a GPU. Without one, ``--small`` takes small sizes, to try the command.
"""

import argparse
import pathlib
import time
from typing import Any

from benchmarks import _harness, _process
from benchmarks.gpu import SECONDS, parts

_COLUMNS = (
  "ms",
  "spread",
  "must move, MB",
  "least, ms",
  "over",
  "of the first",
  "temporary, MB",
  "peak, MB",
  "compile, s",
)
_ABOUT = """\
Milliseconds a step, the least of three measurements; spread: the largest over the least, less one.
Train steps are called from Python. Steps of optimizers are made inside of a program, so that their
time is the device's. Must move: the bytes that a step must read and write; least: their time at the
speed of a copy, measured in the same process; over: the step's time over it. Temporary: by XLA's
account of the program; peak: the most that the process has had in use on the device until then, so
rows of a part come in the order of their memory. A window's time is of a micro-batch. Compiling is
left out.
Each part ran in a process of its own."""


def _rows(part: str, small: bool, limit: float) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
  """The device, and the rows that a part finishes within its time."""
  rows = []
  # Every row comes at once, so that nothing is lost at the time limit.
  try:
    for row in _process.items(parts.run, part, small, whole=limit):
      print(part, *row, flush=True)
      rows.append(row)
  except _process.GivenUp as error:
    print(part, error, flush=True)
    rows.append(("the others", {"error": str(error)}))
  if rows and "GB/s" in rows[0][1]:
    name, facts = rows.pop(0)
    return f"{name}, a copy moves {facts['GB/s']:.0f} GB/s", rows
  return "none", rows


def _table(title: str, rows: list[tuple[str, Any]]) -> str:
  columns = [c for c in _COLUMNS if any(c in record for _, record in rows)]
  lines = [f"## {title}\n", "| | " + " | ".join(columns) + " |"]
  lines.append("|---" * (len(columns) + 1) + "|")
  for name, record in rows:
    if "error" in record:
      lines.append(f"| {name} | {record['error']} |" + " |" * (len(columns) - 1))
    else:
      cells = [f"{record[c]:.4g}" if c in record else "" for c in columns]
      lines.append(f"| {name} | {' | '.join(cells)} |")
  return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> None:
  """Measures the parts that the time allows, and writes the table after each."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("parts", nargs="*", choices=[[], *SECONDS], default=[])
  parser.add_argument("--small", action="store_true", help="sizes for a trial on a CPU")
  parser.add_argument("--limit", type=float, default=540.0, help="seconds in all")
  parser.add_argument("--out", type=pathlib.Path, default=_harness.HERE / "results")
  options = parser.parse_args(arguments)
  end = time.monotonic() + options.limit
  tables: list[str] = []
  for part in options.parts or SECONDS:
    # A part that hangs takes three times its own seconds, not those of all others.
    limit = end - time.monotonic()
    limit = limit if options.small else min(limit, 3 * SECONDS[part])
    device, rows = _rows(part, options.small, limit)
    tables.append(_table(part, rows))
    where = _harness.machine(["jax", "jaxlib", "optax", "flax"]) | {"device": device}
    _harness.replace(options.out / "gpu.md", _harness.page("gpu", _ABOUT, where, "\n".join(tables)))


if __name__ == "__main__":
  main()

"""Runs every part in a process of its own and writes one table: ``python -m benchmarks.gpu``.

At most nine minutes on a GPU. Without one it takes small sizes, to try the command.
"""

import argparse
import os
import pathlib
import time
from typing import Any

from benchmarks import _harness, _process
from benchmarks.gpu import parts

_LIMIT = 540.0
# Runs of the optimizers with XLA's command buffers off, as they are, and for all they know.
_COMMAND_BUFFERS = {
  "command buffers off": "--xla_gpu_enable_command_buffer=",
  "": "",
  "command buffers on": "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUDNN,CUSTOM_CALL,"
  "CONDITIONAL,WHILE --xla_gpu_graph_min_graph_size=1",
}
# The parts, each with its share of the time if all that come after it are to have theirs.
_SHARES = {
  "resnet50": 0.22,
  "optimizers": 0.27,
  "gpt2": 0.08,
  "sequences": 0.08,
  "sgperm": 0.12,
  "dim_reduce": 0.08,
  "freezing": 0.15,
}
_COLUMNS = ("ms", "spread", "temporary, MB", "whole, MB", "kernels", "compile, s")
_ABOUT = """\
Least milliseconds per step of five measurements; spread: the largest over the least, less one.
Whole: params, state, batch and temporaries, by XLA. Each part ran in a process of its own."""


def _rows(
  part: str, flags: str, small: bool, limit: float
) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
  """The device, and the rows that a part finishes within its time."""
  environment = {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()}
  rows = []
  # Every row comes at once, so that nothing is lost at the time limit.
  try:
    for row in _process.items(parts.run, part, small, whole=limit, environment=environment):
      print(part, *row, flush=True)
      rows.append(row)
  except _process.GivenUp as error:
    rows.append(("the others", {"error": str(error)}))
  device = rows.pop(0)[0] if rows and not rows[0][1] else "none"
  return device, rows


def _table(title: str, rows: list[tuple[str, Any]]) -> str:
  lines = [f"## {title}\n", "| | " + " | ".join(_COLUMNS) + " |"]
  lines.append("|---" * (len(_COLUMNS) + 1) + "|")
  for name, record in rows:
    if "error" in record:
      lines.append(f"| {name} | {record['error']} |" + " |" * (len(_COLUMNS) - 1))
    else:
      cells = [f"{record[c]:.4g}" if c in record else "" for c in _COLUMNS]
      lines.append(f"| {name} | {' | '.join(cells)} |")
  return "\n".join(lines) + "\n"


def main() -> None:
  """Measures the parts that the time allows, and writes the table after each."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("parts", nargs="*", choices=[[], *_SHARES], default=[])
  parser.add_argument("--small", action="store_true", help="sizes for a trial on a CPU")
  parser.add_argument("--limit", type=float, default=_LIMIT, help="seconds in all")
  parser.add_argument("--out", type=pathlib.Path, default=_harness.HERE / "results")
  options = parser.parse_args()
  names = options.parts or list(_SHARES)
  runs = [
    (part, title, flags)
    for part in names
    for title, flags in (_COMMAND_BUFFERS if part == "optimizers" else {"": ""}).items()
  ]
  end = time.monotonic() + options.limit
  tables: list[str] = []
  for i, (part, title, flags) in enumerate(runs):
    weights = [_SHARES[p] / sum(q == p for q, _, _ in runs) for p, _, _ in runs[i:]]
    limit = (end - time.monotonic()) * weights[0] / sum(weights)
    device, rows = _rows(part, flags, options.small, limit)
    name = f"{part}, {title}" if title else part
    tables.append(_table(name, rows))
    where = _harness.machine(["jax", "jaxlib", "optax", "flax"]) | {"device": device}
    _harness.replace(options.out / "gpu.md", _harness.page("gpu", _ABOUT, where, "\n".join(tables)))


if __name__ == "__main__":
  main()

"""Compiles the methods' steps for chips that are not there, and checks their bounds.

``python -m benchmarks.devices [--chip h100] [method ...]``; ``make devices`` brings the packages.
"""

import argparse
import os
import pathlib
from typing import Any

# Read when JAX starts: no chip is asked for.
os.environ.update(JAX_PLATFORMS="cpu", CUDA_VISIBLE_DEVICES="-1", TPU_SKIP_MDS_QUERY="1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # beside another process

from benchmarks import _harness
from benchmarks.devices import bounds, cases, chips, programs

_COLUMNS = ("kernels", "loops", "collectives", "sent, MB", "temporary, MB", "accessed, MB", "s")
_ABOUT = f"""\
Optimizer steps (`apply_gradients`, so in place where the method can; params and state donated) on
{cases.LEAVES} leaves of {cases.SHAPE[0]} x {cases.SHAPE[1]}, or 1,000 of 10 x 16, compiled by XLA
for chips that were not there: `make devices`. Kernels and loops: of the entry computation. Sent:
the results of collectives, in bytes per device. Accessed: XLA's estimate per device, with both
sides of conditionals and with copies between a TPU's memories; only TPUs have one. s: seconds to
trace and compile on the machine below. `adasum` runs on replicas, with whole params; all others
have the same program for whole params on slices of any size."""


def _row(name: str, record: dict[str, Any]) -> str:
  if "error" in record:
    return f"| {name} | {record['error']} |" + " |" * (len(_COLUMNS) - 1)
  collectives = ", ".join(f"{n} {kind}" for kind, n in sorted(record["collectives"].items()))
  accessed = record["bytes accessed"]
  cells = (
    record["kernels"],
    record["loops"],
    collectives or "none",
    f"{record['collective bytes'] / 1e6:.1f}",
    f"{record['temporary bytes'] / 1e6:.1f}",
    "" if accessed is None else f"{accessed / 1e6:.0f}",
    f"{record['seconds to compile']:.1f}",
  )
  return f"| {name} | " + " | ".join(map(str, cells)) + " |"


def main() -> int:
  """Prints and stores the table; returns 1 if a bound does not hold."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("methods", nargs="*", choices=[[], *cases.CASES], default=[])
  parser.add_argument("--chip", action="append", choices=list(chips.CHIPS))
  parser.add_argument("--limit", type=float, default=240.0, help="seconds for each program")
  parser.add_argument("--out", type=pathlib.Path, default=_harness.HERE / "results")
  options = parser.parse_args()
  names = options.methods or list(cases.CASES)
  records: dict[str, dict[str, dict[str, Any]]] = {}
  text = []
  for chip_name in options.chip or chips.CHIPS:
    chip = chips.CHIPS[chip_name]
    if chip.missing():
      print(f"{chip.title}: left out; it needs `pip install {chip.missing()}`")
      continue
    for layout in chips.layouts(chip):
      here = [name for name in names if cases.CASES[name].is_for(chip_name, layout)]
      if not here:
        continue
      title = f"{chip.title}, params {layout}"
      text += [f"\n## {title}\n", "| | " + " | ".join(_COLUMNS) + " |"]
      text += ["|---" * (len(_COLUMNS) + 1) + "|"]
      print(*text[-3:], sep="\n", flush=True)
      found = records.setdefault(chip_name, {}).setdefault(layout, {})
      for name, record in programs.compile_all(chip_name, layout, here, options.limit):
        found[name] = record
        text.append(_row(name, record))
        print(text[-1], flush=True)
  broken = bounds.broken(records)
  print(*broken, sep="\n")
  if not options.methods and records:
    where = _harness.machine(["jax", "jaxlib", "optax"])
    page = _harness.page("devices", _ABOUT, where, "\n".join(text).lstrip() + "\n")
    _harness.replace(options.out / "devices.md", page)
  return 1 if broken else 0


if __name__ == "__main__":
  raise SystemExit(main())

"""The bounds that the methods' programs keep."""

import math
from typing import Any

from benchmarks.devices import cases

_SHARDED = ("fan-in", "outputs")
_SLICES = ("v5e-8", "v5e-64", "v5e-256")
# The params' bytes: of all, and of a device's part.
_WHOLE = 4 * cases.LEAVES * math.prod(cases.SHAPE)
_PART = _WHOLE / 8
# Two reads of params and gradients, one of the momentum, two writes.
_LARS = (("all-reduce", 1), ("HBM bytes", 1.1 * 7 * _PART))
# In and out, whatever the number of devices.
_ADASUM = (
  *(("all-to-all", 1), ("all-reduce", 1), ("all-gather", 1)),
  *(("collective-permute", 0), ("collective bytes", 1.1 * 2 * _WHOLE)),
)

# Chip, layout, case, figure, the largest allowed value. "kernels / leaves" is per leaf of the case,
# "kernels / optax.sgd" in parts of another case's.
BOUNDS: tuple[tuple[str, str, str, str, float], ...] = (
  ("h100", "replicated", "lars", "kernels / leaves", 2.5),
  ("h100", "replicated", "lars, 1,000 leaves", "kernels / leaves", 1.5),
  ("h100", "replicated", "centralize, 1,000 leaves", "kernels / optax.sgd, 1,000 leaves", 1.5),
  *((c, "replicated", "adasum", f, n) for c in _SLICES for f, n in _ADASUM),
  *(("v5e-8", layout, "lars", f, n) for layout in _SHARDED for f, n in _LARS),
  *(
    (chip, layout, case, figure, most)
    for chip in ("v5e-8", "v5e-256")
    for layout in _SHARDED
    for case in ("dim_reduce", "dim_reduce, 10 leaves")
    for figure, most in (("all-reduce", 2), ("all-gather", 0), ("all-to-all", 0))
  ),
)


def broken(records: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
  """The bounds that measured programs break, in words."""
  found = []
  for chip, layout, case, figure, most in BOUNDS:
    record = records.get(chip, {}).get(layout, {}).get(case)
    if record is None:
      continue
    value = record["error"] if "error" in record else _figure(records[chip][layout], case, figure)
    if isinstance(value, str) or value > most:
      found.append(f"{case} on {chip}, params {layout}: {figure} {value}, at most {most}")
  return found


def _figure(records: dict[str, dict[str, Any]], case: str, figure: str) -> float:
  """A figure of a case's program; NaN, which breaks no bound, where a program is missing."""
  name, _, divisor = figure.partition(" / ")
  record = records.get(case, {"error": "left out"})
  if "error" in record:
    return math.nan
  value = record[name] if name in record else record["collectives"].get(name, 0)
  if divisor == "leaves":
    return value / cases.CASES[case].leaves
  return value / _figure(records, divisor, name) if divisor else value

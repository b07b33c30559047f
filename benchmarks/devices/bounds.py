"""The bounds that the methods' programs keep."""

import math
from typing import Any

from benchmarks.devices import cases

_SHARDED = ("fan-in", "outputs")
# The params' bytes: of all, and of a device's part.
_WHOLE = 4 * cases.LEAVES * math.prod(cases.SHAPE)
_PART = _WHOLE / 8
# Two reads of params and gradients, one of the momentum, two writes.
_LARS = (("all-reduce", 1), ("HBM bytes", 1.1 * 7 * _PART))
# In and out, whatever the number of devices, and a small all-reduce for each level of the tree. The
# one of the largest entries needs nothing of the all-to-all, so it takes no time of its own.
_ADASUM = (
  *(("all-to-all", 1), ("all-gather", 1)),
  *(("collective-permute", 0), ("collective bytes", 1.1 * 2 * _WHOLE)),
)
_ADASUM_LEVELS = {"v5e-8": 3, "v5e-64": 6, "v5e-256": 8}
# Kernels outside of the loops that make a step: two for each gradient's check, and one for each sum
# of a window.
_IN_PLACE = {
  "accumulate": 75,
  "dynamic_loss_scale": 55,
  "master_weights": 50,
}
# One loop for equal leaves, and the one that a step in place may leave out; fan-in shards cross
# once there and once back.
_PERMUTING = ("sgperm pairs", "sgperm rank", "sgperm exact", "laperm")
_LOOPS = {"sgperm pairs": 2, "sgperm rank": 2, "sgperm exact": 2}
# Besides the permutation, each leaf writes its exact params, with "rank" its ranks, too.
_KERNELS = {"sgperm pairs": 90, "sgperm rank": 90, "sgperm exact": 100, "laperm": 130}

# Chip, layout, case, figure, the largest allowed value. "kernels / leaves" is per leaf of the case,
# "kernels / optax.sgd" in parts of another case's.
BOUNDS: tuple[tuple[str, str, str, str, float], ...] = (
  ("h100", "replicated", "lars", "kernels / leaves", 2.5),
  ("h100", "replicated", "lars, 1,000 leaves", "kernels / leaves", 1.5),
  *(
    ("h100", "replicated", f"{method}, 1,000 leaves", "kernels / optax.sgd, 1,000 leaves", 1.5)
    for method in ("centralize", "accumulate", "dynamic_loss_scale")
  ),
  *((c, "replicated", "adasum", f, n) for c in _ADASUM_LEVELS for f, n in _ADASUM),
  *((c, "replicated", "adasum", "all-reduce", 1 + n) for c, n in _ADASUM_LEVELS.items()),
  *(("v5e-8", layout, "lars", f, n) for layout in _SHARDED for f, n in _LARS),
  *(
    (chip, layout, case, figure, most)
    for chip in ("v5e-8", "v5e-256")
    for layout in _SHARDED
    for case in ("dim_reduce", "dim_reduce, 10 leaves")
    for figure, most in (("all-reduce", 2), ("all-gather", 0), ("all-to-all", 0))
  ),
  *(
    ("h100", "replicated", method, figure, most)
    for method, kernels in _IN_PLACE.items()
    for figure, most in (("kernels", kernels), ("temporary bytes", 1_000_000))
  ),
  *(("h100", "replicated", case, "loops", most) for case, most in _LOOPS.items()),
  *(("h100", "replicated", case, "kernels", most) for case, most in _KERNELS.items()),
  *(
    (chip, layout, case, figure, 2 if (layout, figure) == ("fan-in", "all-to-all") else 0)
    for chip in ("v5e-8", "v5e-256")
    for layout in _SHARDED
    for case in _PERMUTING
    for figure in ("all-gather", "all-to-all", "collective-permute")
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

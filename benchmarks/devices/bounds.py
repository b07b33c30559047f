"""The bounds that the methods' programs keep."""

from typing import Any

# Kernels outside of the loops that make a step: two for each gradient's check, one for each sum.
_IN_PLACE = {
  "accumulate": 75,
  "dynamic_loss_scale": 55,
  "group_loss_scale": 55,
  "master_weights": 60,
}

# Chip, layout, case, figure, the largest allowed value.
BOUNDS: tuple[tuple[str, str, str, str, float], ...] = (
  ("v5e-8", "fan-in", "lars", "all-reduce", 1),
  ("v5e-8", "outputs", "lars", "all-reduce", 1),
  *(
    ("h100", "replicated", method, figure, most)
    for method, kernels in _IN_PLACE.items()
    for figure, most in (("kernels", kernels), ("temporary bytes", 1_000_000))
  ),
)


# SGPerm and LaPerm: one loop for equal leaves; fan-in shards cross once there and once back.
_PERMUTING = ("sgperm pairs", "sgperm rank", "sgperm exact", "laperm")
BOUNDS += (
  ("h100", "replicated", "sgperm pairs", "loops", 1),
  ("h100", "replicated", "sgperm rank", "loops", 1),
  ("h100", "replicated", "sgperm exact", "loops", 2),
  ("h100", "replicated", "sgperm pairs", "kernels", 60),
  ("h100", "replicated", "sgperm rank", "kernels", 75),
  ("h100", "replicated", "sgperm exact", "kernels", 85),
  ("h100", "replicated", "laperm", "kernels", 85),
  *(
    (chip, layout, case, figure, 2 if (layout, figure) == ("fan-in", "all-to-all") else 0)
    for chip in ("v5e-8", "v5e-256")
    for layout in ("outputs", "fan-in")
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
    value = record["error"] if "error" in record else _figure(record, figure)
    if isinstance(value, str) or value > most:
      found.append(f"{case} on {chip}, params {layout}: {figure} {value}, at most {most}")
  return found


def _figure(record: dict[str, Any], name: str) -> float:
  return record[name] if name in record else record["collectives"].get(name, 0)

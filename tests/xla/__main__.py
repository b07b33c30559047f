"""Prints a line for each row of docs/xla.md: ``make xla``, or ``python -m tests.xla 10 13``."""

import os
import sys

# Before JAX starts: sharding is checked on eight virtual devices, all else on the first of them.
os.environ["XLA_FLAGS"] = (
  os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from tests.xla import checks, table


def main(numbers: list[str]) -> None:
  """Checks the workarounds of these numbers, or all."""
  for row in table.rows():
    if numbers and str(row.number) not in numbers:
      continue
    check = checks.CHECKS.get(row.number)
    if check is None:
      verdict = f"shown by {row.shown_by.replace('`', '')}"
    else:
      finding = check()
      verdict = f"{'still needed' if finding.is_needed else 'NO LONGER NEEDED'}: {finding.figures}"
    print(f"{row.number:2} {row.title:45} {verdict}", flush=True)


if __name__ == "__main__":
  main(sys.argv[1:])

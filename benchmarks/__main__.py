"""All benchmarks, one after the other: ``python -m benchmarks``."""

import subprocess
import sys

NAMES = (
  "adasum",
  "auto_boost",
  "auto_boost_peer",
  "dim_reduce",
  "freezing",
  "growth",
  "in_place",
  "lars",
  "less_bn",
  "nnx_call",
  "optax_peers",
  "races",
  "remat",
  "sgperm",
  "stacked_layers",
  "sgperm_transformer",
  "svrg",
  "train_step",
)


def main() -> None:
  """Runs each benchmark in a process of its own, with the arguments given."""
  for name in NAMES:
    subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *sys.argv[1:]], check=True)


if __name__ == "__main__":
  main()

"""All benchmarks, one after the other: ``python -m benchmarks``."""

import argparse
import pathlib
import subprocess
import sys

NAMES = (
  "adasum",
  "auto_boost",
  "auto_boost_peer",
  "compile_time",
  "dim_reduce",
  "freezing",
  "growth",
  "in_place",
  "lars",
  "less_bn",
  "memory_short",
  "nnx_call",
  "optax_peers",
  "races",
  "remat",
  "sgperm",
  "stacked_layers",
  "sgperm_transformer",
  "spikes",
  "svrg",
  "train_step",
  "wrappers_on_a_mesh",
)


def main(arguments: list[str] | None = None) -> None:
  """Runs each benchmark in a process of its own, with the options given."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--rounds", type=int, help="to collect, of each; default: its own")
  parser.add_argument("--out", type=pathlib.Path, help="a folder for the results")
  given = vars(parser.parse_args(arguments))
  options = [f"--{name}={value}" for name, value in given.items() if value is not None]
  for name in NAMES:
    subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *options], check=True)


if __name__ == "__main__":
  main()

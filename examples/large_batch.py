"""Trains a small CNN with plain SGD and with optax_boost's methods, and compares them.

`python examples/large_batch.py` takes scikit-learn's digits; `--data file.npz` takes other images.
It prints a table and saves a picture of the curves.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
import sys
from typing import NamedTuple

import _command

NAME, OUT = "large_batch", "out/large_batch.png"

try:  # JAX takes seconds to import: long enough for a Ctrl-C.
  from _data import KEYS, Data, digits, from_npz
  from _methods import BASELINE, METHODS
  from _pictures import check_writable
  from _report import Report
  from _training import BATCH_SIZE, STEPS, default_epochs, race, steps_per_epoch
  import jax
  from matplotlib.figure import Figure
except KeyboardInterrupt:
  sys.exit(_command.interrupted(NAME))


class Plan(NamedTuple):
  """The arguments of a run, all checked."""

  data: Data
  methods: list[str]
  batch_size: int
  epochs: int
  seeds: range
  out: Path

  @property
  def steps(self) -> int:
    """Training steps in one run."""
    return self.epochs * steps_per_epoch(self.data, self.batch_size)


def _parser() -> argparse.ArgumentParser:
  methods = "\n".join(
    f"  {name.ljust(16)} {method.description}" for name, method in METHODS.items()
  )
  parser = _command.parser(
    NAME, __doc__, argparse.RawDescriptionHelpFormatter, epilog=f"methods:\n{methods}"
  )
  add = parser.add_argument
  add(
    "--data",
    metavar="FILE",
    help=f"npz file with {', '.join(KEYS)}; images grey (n, h, w) or colour (n, h, w, c);"
    " default: scikit-learn's digits",
  )
  add("--methods", metavar="A,B", default=",".join(METHODS), help="default: all of them")
  add("--epochs", type=int, help=f"default: as many as make about {STEPS} steps")
  add("--batch-size", type=int, help=f"default: {BATCH_SIZE}, or all images if there are fewer")
  add("--seed", type=int, default=0, help="the first seed; default: 0")
  add("--seeds", type=int, default=5, help="how many seeds; default: 5")
  add("--out", metavar="FILE", default=OUT, help=f"the picture; default: {OUT}")
  return parser


def prepare(argv: Sequence[str] | None) -> Plan:
  """Reads the command line and checks all of it, so that nothing fails after the training.

  Args:
    argv: the arguments; None: the process's.

  Returns:
    The plan of the run.

  Raises:
    ValueError: an argument or the data is wrong.
    OSError: the data can't be read, or the picture not be written.
  """
  options = _parser().parse_args(argv)
  methods = [name.strip() for name in options.methods.split(",")]
  for name in methods:
    if name not in METHODS:
      raise ValueError(f"unknown method '{name}'; choose from {', '.join(METHODS)}")
  if len(set(methods)) < len(methods):
    raise ValueError(f"--methods names a method twice: {options.methods}")
  _command.check_range(options, epochs=1, batch_size=1, seed=0, seeds=1)

  data = digits() if options.data is None else from_npz(options.data)
  images = len(data.train.labels)
  batch_size = min(BATCH_SIZE, images) if options.batch_size is None else options.batch_size
  if batch_size > images:
    raise ValueError(f"--batch-size {batch_size} is more than the {images} training images")
  epochs = default_epochs(data, batch_size) if options.epochs is None else options.epochs
  out = Path(options.out)
  check_writable(out)
  seeds = range(options.seed, options.seed + options.seeds)
  return Plan(data, methods, batch_size, epochs, seeds, out)


def _compare(plan: Plan) -> tuple[Figure, Path]:
  data = plan.data
  shape = " x ".join(map(str, data.train.images.shape[1:]))
  seeds, spread = f"seed {plan.seeds[0]}", ""
  if len(plan.seeds) > 1:
    seeds = f"seeds {plan.seeds[0]} to {plan.seeds[-1]}"
    spread = ", mean and one standard deviation"
  print(
    f"{data.name}: {len(data.train.labels):,} training and {len(data.test.labels):,} test images"
    f" of {shape}, {data.classes} classes\n"
    f"{plan.steps} steps (epochs: {plan.epochs}) in batches of"
    f" {plan.batch_size}, {seeds}, on {jax.default_backend()}",
    flush=True,
  )
  # The others are compared with the first.
  names = sorted(plan.methods, key=lambda name: name != BASELINE)
  chosen = {name: METHODS[name] for name in names}
  result = race(
    data,
    {name: method.make(plan.steps, **method.chosen) for name, method in chosen.items()},
    batch_size=plan.batch_size,
    epochs=plan.epochs,
    seeds=plan.seeds,
  )
  report = Report(result, BASELINE)
  print(f"\n{report.table()}\n\n{report.verdicts()}")
  if not result.complete:
    raise KeyboardInterrupt
  as_tuned = (data.name, plan.batch_size, plan.steps) == ("digits", BATCH_SIZE, STEPS)
  print(
    "\nEach method's hyperparameters were chosen on validation images of digits, for"
    f" {STEPS} steps in\nbatches of {BATCH_SIZE} (examples/tune.py)."
    + ("" if as_tuned else " Here others may be better, for any of them.")
    + "\nThe network has a single BatchNorm. With one after every convolution SGD needs no help: it"
    "\nthen does as well as the others (examples/_model.py)."
  )
  figure = report.picture(
    f"A small CNN on {data.name}: {plan.steps} steps in batches of {plan.batch_size}",
    f"{seeds.capitalize()}{spread}; dot: the first step at {report.target}% test accuracy or more",
  )
  return figure, plan.out


def main(argv: Sequence[str] | None = None) -> int:
  """Compares the methods; returns the exit status.

  Args:
    argv: the arguments; None: the process's.
  """
  return _command.run(NAME, prepare, _compare, argv)


if __name__ == "__main__":
  _command.end(main())

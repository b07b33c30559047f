"""Finds the hyperparameters that `_methods.py` holds: `python examples/tune.py [method ...]`.

Each point of a method's grid is trained on the digits' training part and measured on their
validation part, with seeds of its own; the test part is never looked at.
"""

import argparse
import itertools

from _data import digits
from _methods import METHODS
from _training import ACCURACY, BATCH_SIZE, default_epochs, race, steps_per_epoch
import numpy as np

SEEDS = range(1000, 1005)


def main(arguments: list[str] | None = None) -> None:
  """Prints each point of the grids, and the best of each method."""
  parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
  parser.add_argument("methods", nargs="*", metavar="method", help="default: all of them")
  names = parser.parse_args(arguments).methods or list(METHODS)
  for name in names:
    if name not in METHODS:
      parser.error(f"unknown method '{name}'; choose from {', '.join(METHODS)}")
  data = digits(test_on="validation")
  epochs = default_epochs(data, BATCH_SIZE)
  steps = epochs * steps_per_epoch(data, BATCH_SIZE)
  for name in names:
    method = METHODS[name]
    grid = itertools.product(*method.grid.values())
    points = [dict(zip(method.grid, values, strict=True)) for values in grid]
    result = race(
      data,
      {str(point): method.make(steps, **point) for point in points},
      batch_size=BATCH_SIZE,
      epochs=epochs,
      seeds=SEEDS,
      points=1,
    )
    found = []
    for point in points:
      # The mean is over all seeds: one that diverged is no better than guessing, and counts so.
      finals = result.curves[str(point)][ACCURACY][:, -1]
      found.append((float(np.mean(finals)), point))
      print(f"{name} {point}: {np.mean(finals):.2f} +- {np.std(finals):.2f} %", flush=True)
    print(f"{name}: best is {max(found, key=lambda one: one[0])[1]}", flush=True)


if __name__ == "__main__":
  main()

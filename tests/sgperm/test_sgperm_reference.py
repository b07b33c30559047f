"""What the benchmark divides by is the published algorithm: it repeats recorded runs."""

import numpy as np
import pytest

from benchmarks.peers import sgperm_reference
from tests.sgperm import oracle as oracle

# Conv, bias and dense; partitions with and without a remainder; ties; exact bounds; zeros.
NAMES = ("model", "bounds", "part_noremainder", "ties_both_part", "zeros_part", "full_bias")


@pytest.mark.parametrize("name", NAMES)
def test_the_benchmarks_reference_repeats_the_recorded_runs(name):
  arrays, meta = oracle.load(f"sgperm_{name}")
  numbers = range(meta["variables"])
  step = 0

  def recorded(rows, row, number):
    return rows[oracle.recorded_order(arrays, step, number, arrays[f"w{number}"][0].shape)[row]]

  hyper = {{"alpha0": "alpha", "lamda0": "lamda"}.get(k, k): v for k, v in meta["hyper"].items()}
  reference = sgperm_reference.Sgperm(
    [arrays[f"w{v}"][0] for v in numbers], **hyper, shuffle=recorded
  )
  for step in range(meta["steps"]):
    reference.step([arrays[f"g{v}"][step] for v in numbers])
    for v in numbers:
      np.testing.assert_allclose(reference.slots[v], arrays[f"m{v}"][step], rtol=1e-6, atol=1e-9)
      reference.slots[v][...] = arrays[f"m{v}"][step]
      np.testing.assert_array_equal(reference.variables[v], arrays[f"w{v}"][step + 1])


def test_the_shuffles_of_the_benchmarks_reference_are_permutations_of_the_rows():
  np.random.seed(0)
  rng = np.random.default_rng(0)
  start = rng.normal(size=(40, 3)).astype(np.float32)
  hyper = {"alpha": 0.5, "lamda": 0.3, "beta1": 1.0, "beta2": 1.0, "alpha_min": 0.0}
  more = {"lamda_max": 1.0, "momentum_lr": 1.0, "momentum": 0.0, "partition_size_min": 2}
  reference = sgperm_reference.Sgperm([start], **hyper, **more)
  for _ in range(3):
    reference.step([rng.normal(size=start.shape).astype(np.float32)])
  np.testing.assert_array_equal(np.sort(reference.variables[0], 0), np.sort(start, 0))
  assert np.any(reference.variables[0] != start)

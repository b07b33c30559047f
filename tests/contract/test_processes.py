"""Arrays that lie on the devices of several processes, as they do on pods."""

import pathlib
from typing import Any

import jax
import numpy as np
import pytest

from tests import meshes, several_processes
from tests.contract import processes, registry

# What the tests put around a step of the root hides it from the train step.
ROWS = [str(row) for row in registry.ROWS if not (row.is_root and row.extra)]


def run(folder: pathlib.Path, count: int, names: Any) -> None:
  several_processes.run(count, ["-m", "tests.contract.processes", str(folder), *names])


def test_two_processes_decide_alike_read_files_and_keep_held_arrays(tmp_path):
  run(tmp_path, 2, ["decisions", "prices", "files", "held_arrays", "opt_state_sharding"])


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_checks_of_several_processes(tmp_path, count):
  run(tmp_path, count, list(processes.CHECKS))


@pytest.mark.slow
def test_rows_of_two_processes(tmp_path):
  run(tmp_path, 2, ROWS)


@pytest.mark.slow
def test_a_checkpoint_of_two_processes_resumes_in_one(tmp_path):
  run(tmp_path, 2, ["checkpoint"])
  expected = processes.trained_alone()
  for sizes, names in (((1,), ("x",)), ((4,), ("x",)), ((4, 2), ("x", "y"))):
    params = processes.resume(tmp_path, meshes.mesh(sizes, names))
    jax.tree.map(
      lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), params, expected
    )

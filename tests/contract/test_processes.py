"""Arrays that lie on the devices of several processes, as they do on pods."""

from collections.abc import Sequence
import concurrent.futures
import os
import pathlib
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from tests import meshes
from tests.contract import processes, registry

ROOT = pathlib.Path(__file__).parents[2]
# Each process has as many of its own, whatever the tests have.
DEVICES = "--xla_force_host_platform_device_count=2"
LIMIT = 300
# What the tests put around a step of the root hides it from the train step.
ROWS = [str(row) for row in registry.ROWS if not (row.is_root and row.extra)]


def run(folder: pathlib.Path, count: int, names: Sequence[str]) -> None:
  """Runs checks in several processes, and ends all as soon as one fails or the time is over."""
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = str(probe.getsockname()[1])
  flags = f"{os.environ.get('XLA_FLAGS', '')} {DEVICES}"
  arguments = [[port, str(count), str(number), str(folder), *names] for number in range(count)]
  started = [
    subprocess.Popen(
      [sys.executable, "-m", "tests.contract.processes", *of_process],
      env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
      cwd=ROOT,
      stderr=subprocess.PIPE,
      text=True,
    )
    for of_process in arguments
  ]

  def wait(process: subprocess.Popen[str]) -> None:
    errors = process.communicate()[1]
    assert process.returncode == 0, errors

  with concurrent.futures.ThreadPoolExecutor(count) as pool:
    ends = [pool.submit(wait, process) for process in started]
    done, waiting = concurrent.futures.wait(ends, LIMIT, concurrent.futures.FIRST_EXCEPTION)
    for process in started:
      process.kill()
  for end in done:
    end.result()
  assert not waiting, f"{len(waiting)} processes had not ended after {LIMIT} s"


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

"""AdaSum between real processes on this machine: the same weights, and resuming after a death."""

import argparse
import concurrent.futures
import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "adasum_processes.py"
# The tests' own, but for the number of devices.
FLAGS = " ".join(f for f in os.environ["XLA_FLAGS"].split() if "device_count" not in f)


@pytest.fixture(scope="module")
def example(import_example):
  return import_example("adasum_processes")


def run(folder, *arguments, seconds=120):
  """Runs the example; when it hangs, kills it and all that it started."""
  process = subprocess.Popen(
    [sys.executable, str(SCRIPT), "--checkpoints", str(folder), *map(str, arguments)],
    env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": FLAGS},
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    start_new_session=True,
  )
  try:
    output, errors = process.communicate(timeout=seconds)
  finally:
    if process.poll() is None:
      os.killpg(process.pid, 9)
      process.communicate()
  return process.returncode, output, errors


def launch(example, folder, processes):
  """What ``--launch`` does, without a Python for the launcher alone."""
  steps = {"steps": 12, "every": 4, "die_after": 0, "pause": 0.0}
  return example.launch(argparse.Namespace(launch=processes, checkpoints=folder, **steps))


def weights(folder):
  with np.load(folder / "checkpoint.npz") as saved:
    return {name: saved[name] for name in saved}


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_all_processes_stop_when_one_dies_and_a_restart_reaches_the_weights_of_one_process(
  tmp_path, monkeypatch, capfd, example, processes
):
  one, many, steps = tmp_path / "one", tmp_path / "many", ("--steps", 12, "--every", 4)
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{probe.getsockname()[1]}"
  dying = ("--coordinator", address, "--processes", processes, *steps, "--die-after", 6)
  with concurrent.futures.ThreadPoolExecutor() as pool:
    runs = [pool.submit(run, many, *dying, "--process", i, seconds=60) for i in range(processes)]
    alone = pool.submit(run, one, "--devices", processes, *steps)
    *survivors, dead = (task.result() for task in runs)
    assert alone.result()[0] == 0
  assert dead[0] == 1
  for code, _, errors in survivors:
    assert code != 0
    # Which of the two comes first, the failing exchange or the missing heartbeat, is JAX's affair.
    ours, runtimes = "another process is gone", "most likely indicates that another task died"
    assert ours in errors or runtimes in errors
  assert "step 4 saved" in survivors[0][1]
  assert "step 8 saved" not in survivors[0][1]
  assert weights(many)["step"] == 4

  monkeypatch.setenv("PYTHONPATH", str(ROOT))
  code = launch(example, many, processes)
  output, errors = capfd.readouterr()
  assert code == 0, errors
  assert f"{processes} replicas, from step 4" in output
  # Two numbers have one sum; more are added in another order by Gloo than inside one process.
  tolerance = {} if processes == 2 else {"rtol": 1e-5, "atol": 1e-6}
  check = np.testing.assert_allclose if tolerance else np.testing.assert_array_equal
  found, expected = weights(many), weights(one)
  assert found.keys() == expected.keys()
  for name, value in found.items():
    check(value, expected[name], **tolerance)


def test_a_checkpoint_of_other_replicas_is_refused_and_kept(tmp_path, example):
  example.save(tmp_path, step=2, replicas=4, leaves=[np.ones(3)])
  before = (tmp_path / "checkpoint.npz").read_bytes()
  code, _, errors = run(tmp_path, "--devices", 2, "--steps", 4)
  assert code == 1
  assert "each of 4 replicas; there are 2 now. Start with 4 replicas" in errors
  with pytest.raises(SystemExit, match=r"each of 4 replicas; there are 8 now\. Start with 4"):
    example.load(tmp_path / "checkpoint.npz", 8)
  assert (tmp_path / "checkpoint.npz").read_bytes() == before


def test_the_launcher_ends_all_processes_when_one_fails(tmp_path, monkeypatch, capfd, example):
  script = tmp_path / "fails.py"
  script.write_text(
    "import sys, time\n"
    "if sys.argv[sys.argv.index('--process') + 1] == '1':\n"
    "  sys.exit('out of memory')\n"
    "time.sleep(60)\n"
  )
  monkeypatch.setattr(example, "__file__", str(script))
  assert launch(example, tmp_path, 2) == 1
  errors = capfd.readouterr().err
  assert "process 1 of 2 ended with status 1; the others were ended." in errors
  assert "Start again to resume from the last checkpoint" in errors
  assert "out of memory" in errors

"""`python -m benchmarks.gpu` runs to its end on a CPU, and loses no row of a process given up."""

import os
import pathlib
import subprocess
import sys
import time

import pytest

from benchmarks import _process

ROOT = pathlib.Path(__file__).resolve().parents[2]


def three(failure):
  """Two items, and then trouble of some kind."""
  yield 1
  yield os.environ["ITEM"]
  if failure == "raises":
    raise ValueError("no more\nto say")
  if failure == "dies":
    os._exit(3)
  if failure == "hangs":
    time.sleep(60)


@pytest.mark.parametrize(
  ("failure", "text"),
  [
    ("raises", "ValueError: no more"),
    ("dies", "the process ended with 3"),
    ("hangs", "not done within 1 s"),
  ],
)
def test_items_before_a_failure_come(failure, text):
  found = []
  limit = {"each": 1.0} if failure == "hangs" else {}

  def collect():
    for item in _process.items(three, failure, environment={"ITEM": "two"}, **limit):
      found.append(item)

  with pytest.raises(_process.GivenUp, match=text):
    collect()
  # To start takes longer than a second on a busy machine.
  assert found == [1, "two"] or (failure == "hangs" and found == [1, "two"][: len(found)])


def test_a_part_runs_to_its_end_on_a_cpu(tmp_path):
  command = [sys.executable, "-m", "benchmarks.gpu", "--small", "--out", str(tmp_path)]
  environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
  subprocess.run([*command, "dim_reduce"], env=environment, cwd=ROOT, check=True)
  page = (tmp_path / "gpu.md").read_text(encoding="utf-8")
  assert "| 1,000 params: dim_reduce | " in page
  assert "the others" not in page
  assert "device cpu" in page

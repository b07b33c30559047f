"""The programs of the page "On many machines", over several processes."""

import os
import re

import pytest

from tests import several_processes

pytestmark = pytest.mark.slow


def run(form, what, folder, **environment):
  arguments = ["-m", "tests.house.many_machines", form, what]
  return several_processes.run(2, arguments, CHECKPOINTS=str(folder), **environment)


@pytest.mark.parametrize("form", ["NNX", "Linen", "JAX"])
def test_a_program_of_the_page_trains_and_resumes_over_two_processes(form, tmp_path):
  first, second = run(form, "whole", tmp_path)
  assert re.search(r"^loss 0\.\d+$", first, re.MULTILINE)
  assert "loss" not in second


def test_processes_of_one_device_each_may_split_a_layer(tmp_path):
  one = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1"
  assert "loss" in run("JAX", "whole", tmp_path, XLA_FLAGS=one)[0]


def test_all_processes_save_and_end_after_the_same_step_when_one_is_preempted(tmp_path):
  ends = [
    re.findall(r"ended after (\d+) steps", text) for text in run("JAX", "preempted", tmp_path)
  ]
  assert ends[0] == ends[1]
  # It was saved at this step, which is not always one of every third.
  assert max(int(path.name) for path in tmp_path.iterdir()) == int(*ends[0]) >= 6


def test_a_process_with_an_error_ends_at_once(tmp_path):
  with pytest.raises(AssertionError, match="OSError: no such file"):
    run("JAX", "broken", tmp_path)

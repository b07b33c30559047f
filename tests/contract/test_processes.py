"""Arrays that lie on the devices of two processes, as they do on pods."""

import os
import pathlib
import socket
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
# Each process has as many of its own, whatever the tests have.
DEVICES = "--xla_force_host_platform_device_count=2"


@pytest.mark.parametrize("rows", [("dim_reduce",), pytest.param((), marks=pytest.mark.slow)])
def test_rows_and_files_of_two_processes(rows):
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = str(probe.getsockname()[1])
  flags = f"{os.environ.get('XLA_FLAGS', '')} {DEVICES}"
  both = [
    subprocess.Popen(
      [sys.executable, "-m", "tests.contract.processes", port, str(number), *rows],
      env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
      cwd=ROOT,
      stderr=subprocess.PIPE,
      text=True,
    )
    for number in range(2)
  ]
  try:
    errors = [process.communicate(timeout=300)[1] for process in both]
  finally:
    for process in both:
      process.kill()
  assert [process.returncode for process in both] == [0, 0], "\n".join(errors)

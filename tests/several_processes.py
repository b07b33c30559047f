"""Starts the processes of a program, as a cluster does, with one time limit for all."""

from collections.abc import Sequence
import concurrent.futures
import os
import pathlib
import socket
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
# Each process has as many of its own, whatever the tests have.
DEVICES = "--xla_force_host_platform_device_count=2"
LIMIT = 600


def run(count: int, arguments: Sequence[str], **environment: str) -> list[str]:
  """Runs Python with `arguments` in `count` processes, and returns what each printed.

  They find each other by the variables that SLURM sets. As soon as one fails, or when the time is
  over, all are ended.
  """
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = str(probe.getsockname()[1])
  common = {
    "JAX_PLATFORMS": "cpu",
    "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
    "JAX_COORDINATOR_PORT": port,
    "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {DEVICES}",
    "SLURM_JOB_ID": "1",
    "SLURM_STEP_NODELIST": "127.0.0.1",
    "SLURM_NTASKS": str(count),
    "SLURM_LOCALID": "0",
  }
  started = [
    subprocess.Popen(
      [sys.executable, *arguments],
      env=os.environ | common | {"SLURM_PROCID": str(number)} | environment,
      cwd=ROOT,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    for number in range(count)
  ]

  def wait(process: subprocess.Popen[str]) -> str:
    output, errors = process.communicate()
    assert process.returncode == 0, output + errors
    return output

  with concurrent.futures.ThreadPoolExecutor(count) as pool:
    ends = [pool.submit(wait, process) for process in started]
    done, waiting = concurrent.futures.wait(ends, LIMIT, concurrent.futures.FIRST_EXCEPTION)
    for process in started:
      process.kill()
  outputs = [end.result() for end in ends if end in done]
  assert not waiting, f"{len(waiting)} processes had not ended after {LIMIT} s"
  return outputs

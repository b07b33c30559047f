"""The memory-bandwidth floors in C, compiled for this machine when asked for."""

from collections.abc import Callable, Sequence
import ctypes
import pathlib
import subprocess
import tempfile
import time
from typing import Any

import numpy as np

_SOURCE = pathlib.Path(__file__).with_name("_stream.c")
_FLAGS = ("-O3", "-march=native", "-Wall", "-pthread", "-shared", "-fPIC")


def lars_passes(size: int) -> Callable[[], float]:
  """Builds the two passes of LARS over `size` parameters, on all cores.

  Args:
    size: number of float32 parameters.

  Returns:
    A function that makes both passes and returns their seconds.

  Raises:
    OSError: there is no C compiler.
    subprocess.CalledProcessError: it does not take the source.
  """
  function = _compiled().lars_passes
  rng = np.random.default_rng(0)
  arrays = [rng.standard_normal(size, dtype=np.float32) for _ in range(3)]
  return _timed(function, arrays, size)


def read_pass(size: int, times: int) -> Callable[[], float]:
  """Builds a pass that reads `size` floats `times` times, on all cores.

  Args:
    size: number of float32 values.
    times: how often to read them all.

  Returns:
    A function that reads and returns its seconds.

  Raises:
    OSError: there is no C compiler.
    subprocess.CalledProcessError: it does not take the source.
  """
  values, total = np.full(size, 1e-3, np.float32), np.zeros(1, np.float32)
  once = _timed(_compiled().read_pass, [values, total], size)
  return lambda: sum(once() for _ in range(times))


def _compiled() -> ctypes.CDLL:
  with tempfile.TemporaryDirectory() as folder:
    library = pathlib.Path(folder, "stream.so")
    command = ["cc", *_FLAGS, str(_SOURCE), "-o", str(library)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return ctypes.CDLL(str(library))


def _timed(function: Any, arrays: Sequence[np.ndarray], size: int) -> Callable[[], float]:
  def run() -> float:
    pointers = [a.ctypes.data_as(ctypes.c_void_p) for a in arrays]
    start = time.perf_counter()
    failed = function(*pointers, ctypes.c_size_t(size))
    seconds = time.perf_counter() - start
    if failed:
      raise RuntimeError("the C pass could not start its threads")
    return seconds

  run()
  return run

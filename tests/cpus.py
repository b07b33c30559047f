"""The tests that compare numbers, as if on other processors: `make test-cpus`.

XLA compiles for a smaller set of instructions if it is told so: sums are then added up in another
order, and products are fused with sums or not. Each setting is a set of instructions, a level of
optimization and a number of threads. Settings of one thread run side by side, each on a processor
of its own. With SSE4_2, tests of float16 are skipped (tests/conftest.py).
"""

import concurrent.futures
import os
import pathlib
import queue
import re
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[1]
# Golden traces, and references in NumPy.
FILES = (
  *("accumulate", "adasum/test_adasum.py", "centralize", "lars", "normalized_dense"),
  *(f"dim_reduce/test_{name}.py" for name in ("mindspore", "dim_reduce", "subspace")),
  *("precision/test_precision.py", "svrg", "full_gradient", "contract/test_doors.py"),
)
SETS = ("SSE4_2", "AVX", "AVX2", "AVX512", "own")


class Setting(NamedTuple):
  """How programs are compiled and run."""

  instructions: str
  level: int
  threads: int

  def __str__(self) -> str:
    return f"{self.instructions:8} level {self.level}, {self.threads} threads"


def settings() -> list[Setting]:
  """All settings that this machine can run, the smallest set of instructions first."""
  cpuinfo = pathlib.Path("/proc/cpuinfo")
  known = cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else ""
  has = {"SSE4_2": "sse4_2", "AVX": "avx", "AVX2": "avx2", "AVX512": "avx512f"}
  sets = [name for name in SETS if name not in has or re.search(rf"\b{has[name]}\b", known)]
  return [Setting(name, level, n) for name in sets for level in (0, 3) for n in (1, 2)]


def command(setting: Setting) -> list[str]:
  """The pytest of a setting."""
  files = [f"tests/{name}" for name in FILES]
  chosen = "not slow" if setting.level else "not slow and not optimized"
  return [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", chosen, *files]


def run(setting: Setting, processors: set[int], programs: str) -> tuple[Setting, str, float]:
  """Runs a setting on some processors: pytest's last line, and the seconds.

  Compiled programs are kept in the folder `programs`, for the setting of another number of threads.
  """
  flags = [f"--xla_backend_optimization_level={setting.level}"] if setting.level else []
  if setting.instructions != "own":
    flags.append(f"--xla_cpu_max_isa={setting.instructions}")
  start = time.perf_counter()
  done = subprocess.run(
    command(setting),
    cwd=ROOT,
    env=os.environ
    | {
      "XLA_FLAGS": " ".join(flags),
      "PYTHONPATH": str(ROOT),
      "JAX_COMPILATION_CACHE_DIR": programs,
    },
    preexec_fn=lambda: os.sched_setaffinity(0, processors),
    capture_output=True,
    text=True,
    check=False,
  )
  seconds = time.perf_counter() - start
  counted = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr[-200:]
  if done.returncode:
    print(done.stdout[-6000:], done.stderr[-2000:], sep="\n", flush=True)
  return setting, f"{'passed' if done.returncode == 0 else 'FAILED'}: {counted}", seconds


def run_alone(
  setting: Setting, free: queue.SimpleQueue[int], programs: str
) -> tuple[Setting, str, float]:
  """As `run`, on a processor that runs no other setting."""
  processor = free.get()
  try:
    return run(setting, {processor}, programs)
  finally:
    free.put(processor)


def main(chosen: list[str]) -> int:
  """Runs all settings, or those whose set of instructions is named; 1 if any fails."""
  own = sorted(os.sched_getaffinity(0))
  todo = [s for s in settings() if not chosen or s.instructions in chosen]
  alone = [s for s in todo if s.threads == 1]
  together = [s for s in todo if s.threads > 1]
  failed = False

  def report(setting: Setting, result: str, seconds: float) -> None:
    nonlocal failed
    failed |= result.startswith("FAILED")
    print(f"{setting} | {result} | {seconds:.0f} s", flush=True)

  free: queue.SimpleQueue[int] = queue.SimpleQueue()
  for processor in own:
    free.put(processor)
  with tempfile.TemporaryDirectory() as programs:
    with concurrent.futures.ThreadPoolExecutor(len(own)) as pool:
      jobs = [pool.submit(run_alone, s, free, programs) for s in alone]
      for job in concurrent.futures.as_completed(jobs):
        report(*job.result())
    for setting in together:
      report(*run(setting, set(own[: setting.threads]), programs))
  return int(failed)


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))

"""Settings of the whole suite, made before JAX starts.

Users run programs that XLA optimizes at level 3, its default. Most tests run programs at level 0
with older CPU emitters, which compile in half the time. Their results differ from users' results in
the last bits only, and the tolerances of the tests allow for that. Tests of the last bits are
marked `optimized`; ``make test`` runs them first, at level 3, in a pytest of its own. The verbs
``make evidence`` and ``make xla`` run at level 3, too. ``python -m pytest FILE`` runs both kinds at
level 0 unless XLA_FLAGS names a level: add ``-m "not optimized"``, or set
``XLA_FLAGS=--xla_backend_optimization_level=3``.

On CPUs the tests run on eight virtual devices, or on as many as DEVICES says. Tests that need more
than there are, as on a machine with one GPU, are skipped (tests/meshes.py). Products of the tests'
models have the highest precision there, too: JAX's default for float32 on a GPU is TF32.
"""

import atexit
import functools
import gc
import importlib
import importlib.util
import mmap
import os
import pathlib
import shutil
import tempfile

import pytest


def _xla_knows(flag: str) -> bool:
  """Whether the installed XLA has a flag: an unknown one ends the process.

  The name is searched as a whole string, since names of removed flags remain in longer names.
  """
  package = importlib.util.find_spec("jaxlib").submodule_search_locations[0]
  for library in pathlib.Path(package).glob("libjax_common*"):
    with library.open("rb") as file:
      content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
      return content.find(f"\0{flag}\0".encode()) >= 0
  return False


# Sharding is tested on eight virtual devices, unless DEVICES is another number.
_DEVICES = int(os.environ.get("DEVICES", "8"))
_flags = [os.environ.get("XLA_FLAGS", ""), f"--xla_force_host_platform_device_count={_DEVICES}"]
# The suite spends most of its time on compiling small programs. These flags halve that time: no
# optimization by LLVM, XLA's older CPU emitters, one thread for each program, constants that are
# computed by the program. They are left out if XLA_FLAGS names a level of optimization.
_FASTER_TO_COMPILE = {
  "xla_backend_optimization_level": "0",
  "xla_cpu_use_fusion_emitters": "false",
  "xla_cpu_parallel_codegen_split_count": "1",
  "xla_disable_hlo_passes": "constant_folding",
}
if "xla_backend_optimization_level" not in _flags[0]:
  _flags += [f"--{flag}={value}" for flag, value in _FASTER_TO_COMPILE.items() if _xla_knows(flag)]
os.environ["XLA_FLAGS"] = " ".join(_flags)
_ON_SSE = "xla_cpu_max_isa=SSE4_2" in _flags[0]
os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")
os.environ.setdefault("MPLBACKEND", "Agg")
# Tracebacks of the line that traced each operation take a sixth of the time to lower and compile.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
# JAX looks up the file of each frame that an error passes, to hide its own frames: 20 ms an error.
os.environ.setdefault("JAX_TRACEBACK_FILTERING", "off")
# The tests build the same small programs over and over. All processes of a run share them on disk,
# so each is compiled once. JAX_COMPILATION_CACHE_DIR names a folder that keeps them for later runs.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
  os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="programs-")
  atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
# Names of operations are left in the keys of this cache: JAX copies a program to take them out.
os.environ.setdefault("JAX_COMPILATION_CACHE_INCLUDE_METADATA_IN_KEY", "1")


def pytest_collection_finish():
  """Lets the garbage collector run less often, and never over the objects that imports made.

  Tracing makes millions of objects, few of them in cycles; collecting took a thirtieth of the time.
  """
  gc.collect()
  gc.freeze()
  gc.set_threshold(200_000, 10, 20)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
  """Skips tests of float16 for SSE4.2: jaxlib can't convert it without later instructions."""
  report = yield
  error = "" if call.excinfo is None else str(call.excinfo.value)
  if _ON_SSE and "Failed to materialize symbols" in error:
    reason = "jaxlib can't convert float16 with the instructions of SSE4.2"
    report.outcome, report.longrepr = "skipped", (str(item.path), 0, reason)
  return report


@pytest.fixture(scope="module")
def import_example():
  """Imports a module of examples/ as `python examples/demo.py` imports it."""
  with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(pathlib.Path(__file__).parents[1] / "examples"))
    yield importlib.import_module


@pytest.fixture
def x64():
  """64-bit types, switched off after the test."""
  import jax

  jax.config.update("jax_enable_x64", True)
  yield
  jax.config.update("jax_enable_x64", False)


@pytest.fixture
def collect_garbage():
  """Collects the garbage of this test alone: to look through all of a worker takes seconds."""
  gc.freeze()
  return gc.collect


@pytest.fixture(scope="session", autouse=True)
def _one_mlir_context():
  """Makes all programs of a worker in one MLIR context.

  JAX makes a context for each program, registers all operations in it, keeps it as long as the
  program, and slows down as contexts accumulate. With one context a worker can keep programs that
  later modules use again, and takes 2.5 GB in the end. JAX has no option for it. If JAX has no
  ``make_ir_context``, nothing is changed.
  """
  from jax._src.interpreters import mlir

  with pytest.MonkeyPatch.context() as patch:
    if hasattr(mlir, "make_ir_context"):
      patch.setattr(mlir, "make_ir_context", functools.cache(mlir.make_ir_context))
    yield

"""Settings of the whole suite, made before JAX starts."""

import atexit
import importlib
import os
import pathlib
import shutil
import tempfile

import pytest

# Sharding is tested on eight virtual devices.
os.environ["XLA_FLAGS"] = (
  os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ.setdefault("MPLBACKEND", "Agg")
# The tests build the same small programs over and over: kept on disk for the run, with all of its
# processes in common, each is compiled once. Who names a folder keeps them from run to run.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
  os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="programs-")
  atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")


@pytest.fixture(scope="module")
def import_example():
  """Imports a module of examples/ as `python examples/demo.py` imports it."""
  with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(pathlib.Path(__file__).parents[1] / "examples"))
    yield importlib.import_module


@pytest.fixture(scope="module", autouse=True)
def _forget_compiled_programs():
  """Keeps a worker from holding the programs of all modules, which are gigabytes."""
  yield
  import jax

  jax.clear_caches()

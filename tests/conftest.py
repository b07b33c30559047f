"""Settings of the whole suite, made before JAX starts."""

import os

import pytest

# Sharding is tested on eight virtual devices.
os.environ["XLA_FLAGS"] = (
  os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ.setdefault("MPLBACKEND", "Agg")


@pytest.fixture(scope="module", autouse=True)
def _forget_compiled_programs():
  """Keeps a worker from holding the programs of all modules, which are gigabytes."""
  yield
  import jax

  jax.clear_caches()

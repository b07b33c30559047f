"""Settings of the whole suite, made before JAX starts."""

import os

# Sharding is tested on eight virtual devices.
os.environ["XLA_FLAGS"] = (
  os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ.setdefault("MPLBACKEND", "Agg")

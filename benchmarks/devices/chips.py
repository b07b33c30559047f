"""The chips that programs are compiled for, described well enough for XLA."""

import dataclasses
import importlib.util
from typing import Any

import jax
from jax.experimental import topologies
import numpy as np

# What XLA asks of the driver where there is a chip.
_H100 = """\
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84929347584 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 } registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 7 }
runtime_version { major: 12 minor: 9 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
_CUDA_PACKAGES = "jax-cuda12-plugin jax-cuda12-pjrt nvidia-cuda-nvcc-cu12"


@dataclasses.dataclass(frozen=True)
class Chip:
  """A chip, or a slice of several.

  Attributes:
    title: its name in tables.
    platform: "tpu" or "cuda".
    topology: its name for XLA.
    requires: the module to import, and the packages from PyPI that bring it.
  """

  title: str
  platform: str
  topology: str
  requires: tuple[str, str]

  def missing(self) -> str | None:
    """The packages to install, if they are not there."""
    module, packages = self.requires
    return packages if importlib.util.find_spec(module) is None else None

  def mesh(self) -> jax.sharding.Mesh:
    """All of its devices along the axis "x"."""
    if self.platform == "cuda":
      options = {"target_config": _H100, "topology": self.topology}
      described = topologies.get_topology_desc(platform="cuda", **options)
    else:
      described = topologies.get_topology_desc(self.topology, self.platform)
    return jax.sharding.Mesh(np.array(described.devices).reshape(-1), ("x",))


CHIPS = {
  "h100": Chip("H100", "cuda", "1x1x1", ("jax_cuda12_plugin", _CUDA_PACKAGES)),
  "v5e-8": Chip("TPU v5e 2x4", "tpu", "v5e:2x4", ("libtpu", "libtpu")),
  "v5e-64": Chip("TPU v5e 8x8", "tpu", "v5e:8x8", ("libtpu", "libtpu")),
  "v5e-256": Chip("TPU v5e 16x16", "tpu", "v5e:16x16", ("libtpu", "libtpu")),
}

_SPECS = {
  "replicated": (),
  "outputs": (None, "x"),
  "fan-in": ("x", None),
}


def layouts(chip: Chip) -> tuple[str, ...]:
  """How params lie on the chip's devices."""
  return tuple(_SPECS) if chip.platform == "tpu" else ("replicated",)


def sharding(
  mesh: jax.sharding.Mesh, layout: str, shape: tuple[int, ...], leaf: tuple[int, ...]
) -> Any:
  """The sharding of an array whose last axes are those of a leaf, fan-in and outputs.

  Others, and those that do not fit, lie whole.
  """
  spec = _SPECS[layout] if shape[-2:] == leaf else ()
  spec = (None,) * (len(shape) - 2) + spec if spec else ()
  fits = all(axis is None or n % mesh.size == 0 for axis, n in zip(spec, shape, strict=False))
  return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*(spec if fits else ())))

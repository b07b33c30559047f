"""AdaSum against the mean: ``python -m benchmarks.adasum --rounds 40 --out benchmarks/results``."""

import argparse
from collections.abc import Callable, Sequence
import math
import os
import pathlib
import time
from typing import Any

# Before JAX starts.
os.environ["XLA_FLAGS"] = (
  os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import jax
import numpy as np

from benchmarks import _harness
import optax_boost

_OURS, _MEAN, _GATHER = "optax_boost.adasum", "lax.pmean per leaf", "all-gather, reduce locally"
_ABOUT = f"""\
One reduction of float32 gradients over 8 virtual CPU devices in `shard_map`, jitted. Ratios are
medians of the ratios within a round; below 1 is faster than the contender in the column's head.
The virtual devices share this machine's cores and its memory, so the times are those of all work
and all copies together, not of wires; `{_MEAN}` is what data-parallel training does without
AdaSum. `{_GATHER}` gathers all gradients on every device and calls `adasum_reduce` there. Temporary
memory is per device."""

Shapes = Sequence[tuple[int, ...]]
AXIS = "replicas"


def mean(grads: Any) -> Any:
  return jax.tree.map(lambda g: jax.lax.pmean(g, AXIS), grads)


def adasum(grads: Any) -> Any:
  tx = optax_boost.adasum(AXIS)
  return tx.update(grads, tx.init(grads))[0]


def gather(grads: Any) -> Any:
  return optax_boost.adasum_reduce(jax.lax.all_gather(grads, AXIS))


def contender(
  name: str, reduce: Callable[[Any], Any], shapes: Shapes, devices: int = 8
) -> _harness.Contender:
  """Compiles one reduction.

  Args:
    name: of the contender.
    reduce: works on a list of leaves inside `shard_map`.
    shapes: of the leaves.
    devices: how many reduce.
  """
  mesh = jax.make_mesh(
    (devices,), (AXIS,), devices=jax.devices()[:devices],
    axis_types=(jax.sharding.AxisType.Auto,),
  )  # fmt: skip
  split = jax.sharding.PartitionSpec(AXIS)
  rng = np.random.default_rng(0)
  grads = [
    jax.device_put(
      rng.standard_normal((devices, *shape), dtype=np.float32), jax.NamedSharding(mesh, split)
    )
    for shape in shapes
  ]

  # Each device returns its own copy: nothing is optimized away.
  def one(grads: Any) -> Any:
    return jax.tree.map(lambda u: u[None], reduce(jax.tree.map(lambda g: g[0], grads)))

  step = jax.jit(jax.shard_map(one, mesh=mesh, in_specs=split, out_specs=split, check_vma=False))
  start = time.perf_counter()
  compiled = step.lower(grads).compile()
  facts = {
    "trace and compile, s": time.perf_counter() - start,
    "temp, copies of the leaves": compiled.memory_analysis().temp_size_in_bytes
    / (4 * sum(map(math.prod, shapes))),
  }

  def run() -> float:
    start = time.perf_counter()
    jax.block_until_ready(step(grads))
    return time.perf_counter() - start

  run()
  run()
  return _harness.Contender(name, run, facts)


def compare(title: str, shapes: Shapes, rounds: int, *, gathered: bool = True) -> dict[str, Any]:
  """Runs all contenders on one list of leaves.

  Args:
    title: of the table.
    shapes: of the leaves.
    rounds: quiet rounds to collect.
    gathered: whether to run the all-gather, which takes N times the memory.
  """
  # Compile times are compared: let nobody pay for JAX's own warming up.
  for reduce in (mean, adasum, gather):
    contender("warm up", reduce, [(2, 2), (2,)])
  contenders = [contender(_OURS, adasum, shapes), contender(_MEAN, mean, shapes)]
  if gathered:
    contenders.append(contender(_GATHER, gather, shapes))
  return _harness.compare(contenders, [_MEAN], rounds, title)


def main() -> None:
  """Measures all lists and writes the table."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--rounds", type=int, default=40, help="quiet rounds to collect")
  parser.add_argument("--out", type=pathlib.Path, default=_harness.HERE / "results")
  options = parser.parse_args()
  rounds = options.rounds
  comparisons = [
    compare("20 leaves, 1e6 floats", [(50_000,)] * 20, rounds),
    compare("1 leaf, 1e6 floats", [(1_000_000,)], rounds),
    compare("161 leaves, 1.61e6 floats", [(100, 100)] * 161, rounds),
    compare("1 leaf, 1e7 floats", [(10_000_000,)], max(1, rounds // 2), gathered=False),
  ]
  where = _harness.machine(["jax", "jaxlib", "numpy"])
  _harness.write("adasum", _ABOUT, comparisons, where, options.out)


if __name__ == "__main__":
  main()

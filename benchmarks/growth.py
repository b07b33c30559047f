"""How the cost of a step grows: ``python -m benchmarks.growth --rounds 15``.

With the number of parameters, of leaves, of a subspace's components and of devices.
"""

import argparse
from collections.abc import Callable, Sequence
import dataclasses
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

from benchmarks import (
  _harness,
  adasum,  # Makes eight devices, before JAX starts.
  plot,
)
import optax_boost

_BASE, _MEAN = "optax.sgd", "lax.pmean"
# On a busy machine the many tables would wait long for quiet rounds.
_PATIENCE = 1
_ABOUT = f"""\
One optimizer step (`update` and `optax.apply_updates` in one jit, params and state donated) in
float32. Ratios are medians of the ratios within a round to `{_BASE}` with momentum on the same
leaves; for devices, to `{_MEAN}` over as many. Up to some 1e6 parameters all fits into cache, and
handling arguments counts. Devices are virtual and share this machine's cores. Leaves are square
kernels of one size."""


def shapes_of(size: int, leaves: int) -> list[tuple[int, ...]]:
  """Square kernels of one size, about `size` numbers in all."""
  side = max(1, round((size / leaves) ** 0.5))
  return [(side, side)] * leaves


def arrays(shapes: Sequence[tuple[int, ...]], scale: float, *leading: int) -> list[jax.Array]:
  rng = np.random.default_rng(0)
  return [
    jnp.asarray(scale * rng.standard_normal((*leading, *s), dtype=np.float32)) for s in shapes
  ]


def subspace(shapes: Sequence[tuple[int, ...]], components: int) -> optax_boost.Subspace:
  size = sum(int(np.prod(s)) for s in shapes)
  variance = jnp.ones(components)
  rows = arrays(shapes, size**-0.5, components)
  return optax_boost.Subspace(arrays(shapes, 1.0), rows, variance, variance / components)


METHODS: dict[str, Callable[[], optax.GradientTransformation]] = {
  "lars": lambda: optax_boost.lars(0.1, weight_decay=1e-4),
  "centralize, sgd": lambda: optax.chain(optax_boost.centralize(), optax.sgd(0.1, 0.9)),
  "dynamic_loss_scale(sgd)": lambda: optax_boost.dynamic_loss_scale(optax.sgd(0.1, 0.9)),
  "accumulate(sgd, 4)": lambda: optax_boost.accumulate(optax.sgd(0.1, 0.9), 4),
}


def contender(
  name: str,
  tx: optax.GradientTransformation,
  shapes: Sequence[tuple[int, ...]],
  grads: list[jax.Array],
) -> _harness.Contender:
  """Compiles one step; `grads` is what all contenders share."""
  params = arrays(shapes, 0.05)
  state = tx.init(params)

  def update(params, state, grads):
    extra = {"value": jnp.zeros([]), "value_fn": lambda p: p[0][0, 0]}
    updates, state = optax.with_extra_args_support(tx).update(grads, state, params, **extra)
    return optax.apply_updates(params, updates), state

  start = time.perf_counter()
  step = jax.jit(update, donate_argnums=(0, 1)).lower(params, state, grads).compile()
  facts = {
    "trace and compile, s": time.perf_counter() - start,
    "state bytes": sum(x.nbytes for x in jax.tree.leaves(state)),
    "temp bytes": step.memory_analysis().temp_size_in_bytes,
  }

  return _harness.carried(name, step, (params, state), grads, facts=facts)


def compare_leaves(size: int, leaves: int, rounds: int, title: str) -> dict[str, Any]:
  shapes = shapes_of(size, leaves)
  grads = arrays(shapes, 0.01)
  made = {_BASE: lambda: optax.sgd(0.1, 0.9), **METHODS}
  contenders = [
    contender(name, make(), shapes, grads) for name, make in tqdm(made.items(), desc="compiling")
  ]
  return _harness.compare(contenders, [_BASE], rounds, title, _PATIENCE)


def compare_components(components: int, rounds: int) -> dict[str, Any]:
  shapes = shapes_of(1_000_000, 40)
  grads = arrays(shapes, 0.01)
  reduced = optax_boost.dim_reduce(subspace(shapes, components), max_search=None)
  contenders = [
    contender(_BASE, optax.sgd(0.1, 0.9), shapes, grads),
    contender("dim_reduce, no search", reduced, shapes, grads),
  ]
  title = f"{components} components, 1e6 parameters in 40 leaves"
  return _harness.compare(contenders, [_BASE], rounds, title, _PATIENCE)


def compare_devices(devices: int, rounds: int) -> dict[str, Any]:
  reductions = {_MEAN: adasum.mean, "adasum": adasum.adasum}
  contenders = [
    dataclasses.replace(adasum.contender(name, reduce, [(50_000,)] * 20, devices), facts={})
    for name, reduce in reductions.items()
  ]
  title = f"{devices} {'device' if devices == 1 else 'devices'}, 1e6 floats in 20 leaves"
  return _harness.compare(contenders, [_MEAN], rounds, title, _PATIENCE)


def main() -> None:
  """Measures all axes and writes the table."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--rounds", type=int, default=15, help="quiet rounds to collect")
  parser.add_argument("--largest", type=float, default=1e8, help="most parameters")
  parser.add_argument("--out", type=pathlib.Path, default=_harness.HERE / "results")
  options = parser.parse_args()
  rounds = options.rounds
  comparisons = []

  def measured(axis: str, at: float, comparison: dict[str, Any]) -> None:
    comparisons.append({"axis": axis, "at": at, **comparison})

  for size in (1e5, 1e6, 1e7, 1e8):
    if size <= options.largest:
      title = f"{size:.0e} parameters in 40 leaves"
      measured("parameters", size, compare_leaves(int(size), 40, rounds, title))
  for leaves in (10, 100, 1000, 2000):
    title = f"1e6 parameters in {leaves:,} leaves"
    measured("leaves", leaves, compare_leaves(1_000_000, leaves, rounds, title))
  for components in (8, 32, 128):
    measured("components", components, compare_components(components, rounds))
  for devices in (1, 2, 4, 8):
    measured("devices", devices, compare_devices(devices, rounds))
  where = _harness.machine(["jax", "jaxlib", "optax", "numpy"])
  _harness.write("growth", _ABOUT, comparisons, where, options.out)
  if options.out == _harness.HERE / "results":
    lines = {
      name: [
        (found["at"], row["ratios"][_BASE])
        for found in comparisons
        for row in found["rows"]
        if found["axis"] == "parameters" and row["name"] == name
      ]
      for name in METHODS
    }
    title = f"time of one optimizer step / time of {_BASE}'s"
    figure = plot.ratios(lines, "parameters", title, _BASE, "log")
    plot.small(figure, plot.FIGURES / "growth.png")


if __name__ == "__main__":
  main()

"""What a TPU v5e would gain from AutoBoost's levels: ``python -m benchmarks.devices.resnet50``.

An estimate, from programs that are compiled and not run.
"""

import argparse
import os
import pathlib
from typing import Any

# Read when JAX starts: no chip is asked for.
os.environ.update(JAX_PLATFORMS="cpu", CUDA_VISIBLE_DEVICES="-1", TPU_SKIP_MDS_QUERY="1")

import jax
import jax.numpy as jnp
import optax

from benchmarks import _harness, models
from benchmarks.devices import chips, programs
import optax_boost.linen

# Bytes and operations per second, and the bytes of memory, of one chip by its data sheet.
_BANDWIDTH, _OPERATIONS, _MEMORY = 819e9, 197e12, 16e9
_BATCH = 128
_SIDE = 224
# The shares of a training's steps that the levels freeze.
_SHARES = {"O1": 0.3, "O2": 0.45}
_O0, _FEWER, _FROZEN, _BOTH = "O0", "fewer BatchNorms", "half frozen", "both"
_ABOUT = f"""\
**Estimates**: nothing was run. One train step of ResNet-50 (bfloat16, images of {_SIDE} x {_SIDE},
SGD with momentum and weight decay) compiled by XLA for one TPU v5e. Accessed and FLOPs are XLA's
counts for the program; ms is the larger of accessed / 819 GB/s and FLOPs / 197 TFLOP/s, the chip's
data sheet. `{_FROZEN}`: the first of two groups of layers, as the levels freeze it. Temporaries are
XLA's, without params, state and batch; with these, the memory at {_BATCH} and {2 * _BATCH} images
gives, by a straight line, the largest batch. `python -m benchmarks.devices.resnet50`."""


def program(row: str, batch_size: int) -> dict[str, float]:
  """Compiles a row's train step.

  Args:
    row: which of the four.
    batch_size: images per step.
  """
  batch = {
    "x": jax.ShapeDtypeStruct((batch_size, _SIDE, _SIDE, 3), jnp.bfloat16),
    "y": jax.ShapeDtypeStruct((batch_size,), jnp.int32),
  }
  module: Any = models.ResNet()
  if row in (_FEWER, _BOTH):
    boost = optax_boost.auto_boost("O1", total_steps=100)
    module = boost.model(optax_boost.linen.less_bn, module, batch["x"])
  variables = jax.eval_shape(module.init, jax.random.key(0), batch["x"])
  loss, *arrays = optax_boost.linen.split_loss(models.image_loss, module, variables)
  tx = optax.chain(optax.add_decayed_weights(1e-4), optax.sgd(0.1, momentum=0.9))
  if row in (_FROZEN, _BOTH):
    tx = optax_boost.freeze_layers(tx, models.HALVES, optax_boost.fixed_freezing(2, 1))
  step = optax_boost.make_train_step(loss, tx)
  _, compiled = programs.compile_train_step(chips.CHIPS["v5e-8"], step, arrays, batch)
  cost = compiled.cost_analysis()
  return {
    "bytes": cost["bytes accessed"],
    "flops": cost["flops"],
    "temporary": compiled.memory_analysis().temp_size_in_bytes,
    "whole": programs.whole_bytes(compiled),
  }


def seconds(figures: dict[str, float]) -> float:
  """The time of a step that keeps either memory or arithmetic busy."""
  return max(figures["bytes"] / _BANDWIDTH, figures["flops"] / _OPERATIONS)


def main() -> None:
  """Compiles the programs and writes the page."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--out", type=pathlib.Path, default=_harness.HERE / "results")
  options = parser.parse_args()
  found = {row: program(row, _BATCH) for row in (_O0, _FEWER, _FROZEN, _BOTH)}
  base = found[_O0]
  lines = [
    f"| {_BATCH} images | accessed, GB | TFLOP | temporary, GB | ms | O0 over it |",
    "|---" * 6 + "|",
  ]
  for row, figures in found.items():
    lines.append(
      f"| {row} | {figures['bytes'] / 1e9:.1f} ({figures['bytes'] / base['bytes']:.2f}) |"
      f" {figures['flops'] / 1e12:.2f} ({figures['flops'] / base['flops']:.2f}) |"
      f" {figures['temporary'] / 1e9:.2f} | {1e3 * seconds(figures):.1f} |"
      f" {seconds(base) / seconds(figures):.2f} |"
    )
    print(lines[-1], flush=True)
  lines += ["", "| level | share of frozen steps | steps per second over O0 |", "|---|---|---|"]
  for level, share in _SHARES.items():
    mean = (1 - share) * seconds(found[_FEWER]) + share * seconds(found[_BOTH])
    lines.append(f"| {level} | {share} | {seconds(base) / mean:.2f} |")
  lines += ["", "| | MB per further image | largest batch in 16 GB |", "|---|---|---|"]
  for row in (_O0, _BOTH):
    whole = found[row]["whole"]
    per_image = (program(row, 2 * _BATCH)["whole"] - whole) / _BATCH
    largest = _BATCH + (_MEMORY - whole) / per_image
    lines.append(f"| {row} | {per_image / 1e6:.1f} | {largest:.0f} |")
    print(lines[-1], flush=True)
  where = _harness.machine(["jax", "libtpu", "flax"])
  page = _harness.page("resnet50_tpu", _ABOUT, where, "\n".join(lines) + "\n")
  _harness.replace(options.out / "resnet50_tpu.md", page)


if __name__ == "__main__":
  main()

"""Memory and FLOPs of fine-tuning GPT-2: ``python -m benchmarks.devices.gpt2``.

From programs that are compiled for a TPU v5e and an H100, and not run.
"""

import argparse
import os
import pathlib
from typing import Any

# Read when JAX starts: no chip is asked for.
os.environ.update(JAX_PLATFORMS="cpu", CUDA_VISIBLE_DEVICES="-1", TPU_SKIP_MDS_QUERY="1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax
import jax.numpy as jnp
import optax

from benchmarks import _harness
from benchmarks import models
from benchmarks.devices import chips
import optax_boost

_BATCH, _LENGTH, _WINDOW = 8, 512, 2
_CHIPS = ("h100", "v5e-8")
_ABOUT = f"""\
One train step of GPT-2 (12 blocks of 768 that the loss scans over, each recomputed in the backward
pass; bfloat16, params in float32; {_BATCH} sequences of {_LENGTH}) with AdamW, compiled by XLA for
one chip that was not there. Whole: params, optimizer state, batch and temporaries, those that share
memory counted once. State: the optimizer's. FLOPs are XLA's for the TPU, a scan's body counted
once; XLA has none for the H100. `python -m benchmarks.devices.gpt2`."""


def optimizers(model: models.GPT2, params: Any, tokens: Any) -> dict[str, Any]:
  """The contenders, by name."""
  adamw = optax.adamw(1e-4)
  axes = optax_boost.stacked_axes(model.loss, params, tokens)
  return {
    "AdamW": adamw,
    f"a window of {_WINDOW} of {model.layers}, in order": optax_boost.active_window(
      adamw, axes, _WINDOW, every=50
    ),
  }


def program(
  chip: chips.Chip, model: models.GPT2, tx: optax.GradientTransformation
) -> dict[str, float | None]:
  """Compiles a train step."""
  one = jax.sharding.SingleDeviceSharding(chip.mesh().devices.flat[0])

  def place(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one)

  step = optax_boost.make_train_step(model.loss, tx)
  params = jax.eval_shape(model.init, jax.random.key(0))
  state = jax.tree.map(place, jax.eval_shape(step.init, params))
  tokens = place(jax.ShapeDtypeStruct((_BATCH, _LENGTH + 1), jnp.int32))
  compiled = step.lower(state, tokens).compile()
  memory = compiled.memory_analysis()
  arguments, results = memory.argument_size_in_bytes, memory.output_size_in_bytes
  cost = compiled.cost_analysis() or {}
  return {
    "whole": arguments + results - memory.alias_size_in_bytes + memory.temp_size_in_bytes,
    "temporary": memory.temp_size_in_bytes,
    "state": sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.opt_state)),
    "flops": cost.get("flops"),
  }


def main() -> None:
  """Compiles the programs and writes the page."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--out", type=pathlib.Path, default=_harness.HERE / "results")
  options = parser.parse_args()
  model = models.GPT2()
  params = jax.eval_shape(model.init, jax.random.key(0))
  tokens = jax.ShapeDtypeStruct((_BATCH, _LENGTH + 1), jnp.int32)
  lines = []
  for name in _CHIPS:
    chip = chips.CHIPS[name]
    if chip.missing():
      print(f"{chip.title}: left out; it needs `pip install {chip.missing()}`")
      continue
    lines += [f"## One {chip.title.removesuffix(' 2x4')}", ""]
    lines += ["| | whole, MB | state, MB | temporary, MB | GFLOP |", "|---" * 5 + "|"]
    for row, tx in optimizers(model, params, tokens).items():
      found = program(chip, model, tx)
      sizes = [f"{(found[key] or 0) / 1e6:.0f}" for key in ("whole", "state", "temporary")]
      flops = f"{found['flops'] / 1e9:.0f}" if found["flops"] else ""
      lines.append(f"| {row} | {' | '.join(sizes)} | {flops} |")
      print(lines[-1], flush=True)
    lines.append("")
  where = _harness.machine(["jax", "jaxlib", "optax"])
  page = _harness.page("gpt2_memory", _ABOUT, where, "\n".join(lines))
  _harness.replace(options.out / "gpt2_memory.md", page)


if __name__ == "__main__":
  main()

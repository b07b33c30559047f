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

from benchmarks import _harness, models
from benchmarks.devices import chips, programs
import optax_boost

_BATCH, _LENGTH = 8, 512
_CHIPS = ("h100", "v5e-8")
_ABOUT = f"""\
One train step of GPT-2 (12 blocks of 768 that the loss scans over, each recomputed in the backward
pass; bfloat16, params in float32; {_BATCH} sequences of {_LENGTH}) with AdamW, compiled by XLA for
one chip that was not there. Whole: params, optimizer state, batch and temporaries, those that share
memory counted once. State: the optimizer's. FLOPs are XLA's for the TPU, a scan's body counted
once; XLA has none for the H100.
`python -m benchmarks.devices.gpt2`."""


def transformations(params: Any) -> dict[str, Any]:
  """The contenders, by name."""
  adamw = optax.adamw(1e-4)
  names = ["tokens|positions", "blocks[*]", "norm"]
  groups = optax_boost.layer_groups(params, names, num_groups=2)
  frozen = optax_boost.freeze_layers(adamw, groups, optax_boost.fixed_freezing(2, 1))
  return {"AdamW": adamw, "first half frozen": frozen}


def program(
  chip: chips.Chip, model: models.GPT2, tx: optax.GradientTransformation, tokens: Any
) -> dict[str, float | None]:
  """Compiles a train step."""
  step = optax_boost.make_train_step(model.loss, tx)
  params = jax.eval_shape(model.init, jax.random.key(0))
  state, compiled = programs.compile_train_step(chip, step, (params,), tokens)
  cost = compiled.cost_analysis() or {}
  return {
    "whole": programs.whole_bytes(compiled),
    "temporary": compiled.memory_analysis().temp_size_in_bytes,
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
  for chip_name in _CHIPS:
    chip = chips.CHIPS[chip_name]
    if chip.missing():
      print(f"{chip.title}: left out; it needs `pip install {chip.missing()}`")
      continue
    lines += [f"## One {chip.title.removesuffix(' 2x4')}", ""]
    lines += ["| | whole, MB | state, MB | temporary, MB | GFLOP |", "|---" * 5 + "|"]
    for name, tx in transformations(params).items():
      found = program(chip, model, tx, tokens)
      sizes = [f"{(found[key] or 0) / 1e6:.0f}" for key in ("whole", "state", "temporary")]
      flops = f"{found['flops'] / 1e9:.0f}" if found["flops"] else ""
      lines.append(f"| {name} | {' | '.join(sizes)} | {flops} |")
      print(lines[-1], flush=True)
    lines.append("")
  where = _harness.machine(["jax", "jaxlib", "optax"])
  page = _harness.page("gpt2_memory", _ABOUT, where, "\n".join(lines))
  _harness.replace(options.out / "gpt2_memory.md", page)


if __name__ == "__main__":
  main()

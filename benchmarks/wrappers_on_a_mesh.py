"""What wrappers keep and send on eight devices: ``python -m benchmarks.wrappers_on_a_mesh``."""

import argparse
from collections.abc import Callable
import math
import os
import pathlib
import re
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import optax
from tqdm import tqdm

from benchmarks import _harness
import optax_boost

_LAYERS, _WIDTH, _BASE = 8, 128, "`optax.adamw`"
_COLLECTIVES = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
_ABOUT = f"""\
One train step of {_LAYERS} layers of {_WIDTH} x {_WIDTH} in bfloat16, compiled for eight virtual
devices of a CPU; nothing is run. Bytes per param: params and state. Arrays: all that collectives
send, gradients and, under FSDP, params. Numbers: collectives on single numbers alone (norms,
finiteness), each of which waits for all devices. In brackets: above the first row. Data parallel:
the batch is sharded, params and state are whole on each device. FSDP: all are sharded."""

GROUPS = [str(i) for i in range(_LAYERS)]
WRAPPERS: dict[str, Callable[[optax.GradientTransformation], optax.GradientTransformation]] = {
  _BASE: lambda tx: tx,
  "clipping by the global norm": lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx),
  "`accumulate`": lambda tx: optax_boost.accumulate(tx, 4),
  "`optax.MultiSteps`": lambda tx: optax.MultiSteps(tx, 4).gradient_transformation(),
  "`dynamic_loss_scale`": optax_boost.dynamic_loss_scale,
  "`skip_spikes`": optax_boost.skip_spikes,
  "`master_weights`": optax_boost.master_weights,
  "`stochastic_rounding`": lambda tx: optax_boost.stochastic_rounding(tx, key=0),
  "`average_params`": lambda tx: optax_boost.average_params(tx, decay=0.999),
  "`layerwise_decay`": lambda tx: optax_boost.layerwise_decay(tx, GROUPS, 0.8),
  "`freeze_layers`, half frozen": lambda tx: optax_boost.freeze_layers(
    tx, GROUPS, optax_boost.fixed_freezing(_LAYERS, _LAYERS // 2)
  ),
}


def five(tx: optax.GradientTransformation) -> optax.GradientTransformation:
  """Five wrappers in one step."""
  for name in ("accumulate", "master_weights", "dynamic_loss_scale", "skip_spikes"):
    tx = WRAPPERS[f"`{name}`"](tx)
  return WRAPPERS["`average_params`"](tx)


WRAPPERS["five: scale, spikes, window, masters, average"] = five


def loss_fn(params: Any, x: jax.Array) -> jax.Array:
  """A stack of dense layers."""
  for name in GROUPS:
    x = jnp.tanh(x @ params[name])
  return jnp.mean(jnp.square(x - 1).astype(jnp.float32))


def figures(tx: optax.GradientTransformation, spec: jax.P) -> tuple[float, list[int]]:
  """Bytes per param, the arrays in collectives, and the collectives on single numbers alone."""
  mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

  def abstract(spec: jax.P) -> jax.ShapeDtypeStruct:
    sharding = jax.NamedSharding(mesh, spec)
    return jax.ShapeDtypeStruct((_WIDTH, _WIDTH), jnp.bfloat16, sharding=sharding)

  step = optax_boost.make_train_step(loss_fn, tx)
  state = step.init({name: abstract(spec) for name in GROUPS})
  text = step.lower(state, abstract(jax.P("x"))).compile().as_text()
  arrays_sent, operations = 0, 0
  for result in re.findall(rf"= (.+?) (?:{_COLLECTIVES})(?:-start)?\(", text):
    shapes = re.findall(r"\w+\[([\d,]*)\]", result)
    sent = sum(math.prod(map(int, filter(None, shape.split(",")))) > 16 for shape in shapes)
    arrays_sent += sent
    operations += not sent
  arrays = [x for x in jax.tree.leaves(state) if x.ndim]
  size = _LAYERS * _WIDTH**2
  return sum(x.size * x.dtype.itemsize for x in arrays) / size, [arrays_sent, operations]


def main() -> None:
  """Compiles the steps and writes the table."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--rounds", type=int, help="not used: nothing is timed")
  parser.add_argument("--out", type=pathlib.Path, default=_harness.HERE / "results")
  options = parser.parse_args()
  table = [
    "| | bytes per param | data parallel: arrays | numbers | FSDP: arrays | numbers |",
    "|---" * 6 + "|",
  ]
  base: list[int] = []
  for name, wrap in tqdm(WRAPPERS.items()):
    found = [figures(wrap(optax.adamw(1e-3)), spec) for spec in (jax.P(), jax.P("x"))]
    counts = [count for _, of_layout in found for count in of_layout]
    base = base or counts
    cells = [f"{n} [{n - m:+d}]" for n, m in zip(counts, base, strict=True)]
    table.append(f"| {name} | {found[0][0]:.1f} | {' | '.join(cells)} |")
  packages = ["jax", "jaxlib", "optax"]
  _harness.write_lines("wrappers_on_a_mesh", _ABOUT, table, packages, options.out)
  print("\n".join(table))


if __name__ == "__main__":
  main()

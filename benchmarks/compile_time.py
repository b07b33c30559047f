"""How long a train step compiles, by leaves and devices: ``python -m benchmarks.compile_time``."""

import argparse
from collections.abc import Callable
import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax
from tqdm import tqdm

from benchmarks import _harness
import optax_boost

_LEAVES, _DEVICES, _WIDTH = (10, 100, 1000), (8, 64, 512), 512
_ADAMW, _STEP, _WRAPPERS = "optax.adamw", "train step of it", "train step, five wrappers"
_ABOUT = f"""\
Seconds of processor time, of all threads, to trace, lower and compile one train step (forward,
backward, AdamW, state donated) for virtual devices of a CPU. The model has layers of {_WIDTH} x
{_WIDTH}, a kernel and a bias of bfloat16 each; params, state and batch are sharded over all
devices. Arrays are abstract, so nothing is run. `{_ADAMW}` is a jitted function written by hand;
the five wrappers are `accumulate`, `master_weights`, `dynamic_loss_scale`, `skip_spikes` and
`average_params`. Each number of devices has a process of its own, in which the contenders take
turns; a cell has the least of the rounds, and in brackets the ratio to `{_ADAMW}`."""


def loss_fn(params: Any, x: jax.Array) -> jax.Array:
  """A stack of dense layers."""
  for layer in params:
    x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
  return jnp.mean(jnp.square(x - 1).astype(jnp.float32))


def wrapped(adamw: optax.GradientTransformation) -> optax.GradientTransformation:
  """All in one step."""
  tx = optax_boost.master_weights(optax_boost.accumulate(adamw, 4))
  tx = optax_boost.skip_spikes(optax_boost.dynamic_loss_scale(tx))
  return optax_boost.average_params(tx, decay=0.999)


def by_hand(tx: optax.GradientTransformation, params: Any, batch: Any) -> jax.stages.Lowered:
  """The least that a loop can do."""

  def step(params: Any, state: Any, batch: jax.Array) -> Any:
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss

  # The train step's state has the right shardings.
  state = optax_boost.make_train_step(loss_fn, tx).init(params).opt_state
  return jax.jit(step, donate_argnums=(0, 1)).lower(params, state, batch)


def train_step(tx: optax.GradientTransformation, params: Any, batch: Any) -> jax.stages.Lowered:
  """A step of the package."""
  step = optax_boost.make_train_step(loss_fn, tx)
  return step.lower(step.init(params), batch)


def measure(rounds: int, all_leaves: list[int]) -> dict[str, dict[str, float]]:
  """The least seconds on this process's devices, by leaves and contender."""
  mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
  places = jax.NamedSharding(mesh, jax.P("x"))

  def abstract(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=places)

  def adamw() -> optax.GradientTransformation:
    return optax.adamw(1e-3)

  contenders: dict[str, Callable[[Any, Any], jax.stages.Lowered]] = {
    _ADAMW: lambda *given: by_hand(adamw(), *given),
    _STEP: lambda *given: train_step(adamw(), *given),
    _WRAPPERS: lambda *given: train_step(wrapped(adamw()), *given),
  }
  found = {}
  for leaves in all_leaves:
    layer = {"kernel": abstract(_WIDTH, _WIDTH), "bias": abstract(_WIDTH)}
    params, seconds = [layer] * (leaves // 2), {}
    # The first round makes the imports that the next rounds share.
    for _ in range(rounds + (leaves == min(all_leaves))):
      for name, lower in contenders.items():
        jax.clear_caches()
        start = time.process_time()
        lower(params, abstract(_WIDTH, _WIDTH)).compile()
        seconds[name] = min(time.process_time() - start, seconds.get(name, float("inf")))
    found[str(leaves)] = seconds
  return found


def in_process(devices: int, rounds: int, leaves: list[int]) -> dict[str, dict[str, float]]:
  """Runs `measure` in a process with so many devices."""
  flags = f"--xla_force_host_platform_device_count={devices}"
  command = [sys.executable, "-m", "benchmarks.compile_time", "--rounds", str(rounds), "--here"]
  command += ["--leaves", *map(str, leaves)]
  environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
  done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
  found: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
  return found


def main() -> None:
  """Measures and writes the table."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--rounds", type=int, default=1, help="of which the least counts")
  parser.add_argument("--leaves", type=int, nargs="+", default=list(_LEAVES))
  parser.add_argument("--out", type=pathlib.Path, default=_harness.HERE / "results")
  parser.add_argument("--here", action="store_true", help="on the devices of this process")
  options = parser.parse_args()
  if options.here:
    print(json.dumps(measure(options.rounds, options.leaves)))
    return
  columns = _ADAMW, _STEP, _WRAPPERS
  table = [f"| leaves | devices | {' | '.join(columns)} |", "|---" * 5 + "|"]
  found = {
    devices: in_process(devices, options.rounds, options.leaves) for devices in tqdm(_DEVICES)
  }
  for leaves in options.leaves:
    for devices in _DEVICES:
      seconds = found[devices][str(leaves)]
      cells = [f"{seconds[x]:.2f} [{seconds[x] / seconds[_ADAMW]:.2f}]" for x in columns]
      table.append(f"| {leaves} | {devices} | {' | '.join(cells)} |")
  _harness.write_lines("compile_time", _ABOUT, table, ["jax", "jaxlib", "optax"], options.out)
  print("\n".join(table))


if __name__ == "__main__":
  main()

"""What accumulation sends between eight devices: ``python -m benchmarks.devices.windows``.

Programs are compiled and not run.
"""

import argparse
from collections.abc import Iterator
import dataclasses
import math
import os
import pathlib
import re
from typing import Any

# Read when JAX starts: no chip is asked for.
os.environ.update(JAX_PLATFORMS="cpu", CUDA_VISIBLE_DEVICES="-1", TPU_SKIP_MDS_QUERY="1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # beside another process

import jax
import jax.numpy as jnp
import optax

from benchmarks import _harness
from benchmarks.devices import chips
import optax_boost

_LAYERS, _WIDTH, _ROWS = 12, 1024, 512
_EIGHT = {
  "eight TPU v5e": chips.CHIPS["v5e-8"],
  "eight H100": dataclasses.replace(chips.CHIPS["h100"], topology="1x1x8"),
}
_ABOUT = f"""\
A micro-step of a window of four with Adam, of {_LAYERS} layers of width {_WIDTH} in a scan, on
eight devices: whole params on each, {_ROWS} rows divided, compiled by XLA for chips that were not
there. Sent: elements that all-reduces add up, over n params, in each micro-step, and at a
window's end beside these; of single numbers, only their all-reduces are counted. Temporary: over
4 n bytes, per device. `python -m benchmarks.devices.windows`."""
_COLUMNS = "each micro-step | window's end | all-reduces of single numbers | temporary"


def _loss_fn(params: Any, x: jax.Array) -> jax.Array:
  def layer(h: jax.Array, p: Any) -> tuple[jax.Array, None]:
    return h + jnp.tanh(h @ p["up"]) @ p["down"], None

  h, _ = jax.lax.scan(layer, x, params["layers"])
  return jnp.mean((h @ params["head"] - 1) ** 2)


def _arrays(mesh: jax.sharding.Mesh) -> tuple[Any, jax.ShapeDtypeStruct]:
  """Returns abstract params and an abstract batch."""
  inner = 4 * _WIDTH
  shapes = {"up": (_LAYERS, _WIDTH, inner), "down": (_LAYERS, inner, _WIDTH)}
  on_all, by_row = (jax.sharding.NamedSharding(mesh, jax.P(*spec)) for spec in ((), ("x",)))
  make = lambda shape, sharding: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)  # noqa: E731
  layers = {name: make(shape, on_all) for name, shape in shapes.items()}
  return {"layers": layers, "head": make((_WIDTH, 1), on_all)}, make((_ROWS, _WIDTH), by_row)


def _programs(params: Any, batch: jax.ShapeDtypeStruct) -> Iterator[tuple[str, jax.stages.Lowered]]:
  multi = optax.MultiSteps(optax.adam(1e-3), 4).gradient_transformation()

  def by_hand(params: Any, state: Any, batch: jax.Array) -> tuple[Any, Any]:
    updates, state = multi.update(jax.grad(_loss_fn)(params, batch), state, params)
    return optax.apply_updates(params, updates), state

  on_all = jax.sharding.NamedSharding(batch.sharding.mesh, jax.P())
  place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_all)  # noqa: E731
  state = jax.tree.map(place, jax.eval_shape(multi.init, params))
  step = jax.jit(by_hand, donate_argnums=(0, 1))
  yield "optax.MultiSteps", step.lower(params, state, batch)
  for not_finite in ("drop", "restart"):
    for sharding in (None, batch.sharding):
      tx = optax_boost.accumulate(
        optax.adam(1e-3), 4, not_finite=not_finite, batch_sharding=sharding
      )
      train = optax_boost.make_train_step(_loss_fn, tx)
      computation = train.computation
      step = jax.jit(lambda s, b, c=computation: c.step(s, b, None, {}), donate_argnums=0)
      name = f'accumulate, "{not_finite}"' + (", batch_sharding" if sharding else "")
      yield name, step.lower(train.init(params), batch)


def _sent(text: str) -> tuple[int, int, int]:
  """Returns the elements sent in each micro-step and at a window's end, and the scalar sums."""
  micro = end = single = 0
  in_entry = False
  for line in text.splitlines():
    if line.endswith("{"):
      in_entry = line.startswith("ENTRY")
    match = re.search(r"= (\(.*?\)|\S+) ([a-z-]+?)(?:-start)?\(", line)
    if not match or match[2] not in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all"):
      continue
    shapes = re.findall(r"\w+\[([\d,]+)\]", match[1])
    size = sum(math.prod(map(int, shape.split(","))) for shape in shapes)
    backward = "transpose(" in line
    single += not size
    micro += size * (1 if in_entry else _LAYERS) * (in_entry or backward)
    end += size * (not in_entry and not backward)
  return micro, end, single


def main() -> None:
  """Compiles the programs and writes the page."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--out", type=pathlib.Path, default=_harness.HERE / "results")
  options = parser.parse_args()
  lines = []
  for title, chip in _EIGHT.items():
    params, batch = _arrays(chip.mesh())
    n = sum(x.size for x in jax.tree.leaves(params))
    lines += [f"## {title}", "", f"| | {_COLUMNS} |", "|---" * 5 + "|"]
    for name, lowered in _programs(params, batch):
      compiled = lowered.compile()
      micro, end, single = _sent(compiled.as_text())
      temporary = compiled.memory_analysis().temp_size_in_bytes / (4 * n)
      lines.append(f"| {name} | {micro / n:.2f} n | {end / n:.2f} n | {single} | {temporary:.2f} |")
      print(title, lines[-1], flush=True)
    lines.append("")
  _harness.write_lines("windows", _ABOUT, lines, ["jax", "libtpu", "optax"], options.out)


if __name__ == "__main__":
  main()

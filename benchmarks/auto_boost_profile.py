"""What a step of AutoBoost's networks consists of: ``python -m benchmarks.auto_boost_profile``."""

import argparse
from collections.abc import Callable
import operator
import pathlib
import time
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

from benchmarks import _harness, auto_boost
import optax_boost
import optax_boost.nnx

# A name, the shape of a batch, blocks per stage, steps per measurement.
_NETWORKS = (
  ("ResNet-11, 8 x 8, batch 64", (64, 8, 8, 1), 1, 20),
  ("ResNet-29, 32 x 32, batch 32", (32, 32, 32, 3), 3, 2),
)
_STEPS = 240
_GROUPS = optax_boost.auto_boost("O1", total_steps=_STEPS).on["freeze_layers"]["param_groups"]
_ABOUT = """\
Milliseconds of processor time (of both cores, so that other work on the machine counts little) per
step: the least of several measurements in turns. `O0` is the network as it is, `fewer BatchNorms`
after `less_bn`. `step` is the compiled step of `make_train_step` with SGD, momentum and weight
decay; `k frozen` the same with the first k of the levels' groups frozen. `BatchNorm's` is what the
step saves with all BatchNorms replaced by the identity. `the call` is the Python of
`nnx.make_train_step` around it: on one small image, the call's time less the compiled step's. The
last rows are what the levels' schedules make of it: O0's time over the level's."""

Work = Callable[[], Any]


def _least(works: dict[str, Work], number: int, rounds: int) -> dict[str, float]:
  for work in works.values():
    jax.block_until_ready(work())
  found: dict[str, list[float]] = {name: [] for name in works}
  for _ in range(rounds):
    for name, work in works.items():
      start = time.process_time()
      for _ in range(number):
        # One after the other: what is dispatched ahead would count towards the next work.
        jax.block_until_ready(work())
      found[name].append(1e3 * (time.process_time() - start) / number)
  return {name: min(values) for name, values in found.items()}


def _split(model: Any) -> tuple[Any, Any, Any]:
  graphdef, params, rest = nnx.split(model, nnx.Param, ...)
  return graphdef, nnx.as_pure(params), nnx.as_pure(rest)


def _pure_step(model: Any, batch: Any, tx: Any) -> Work:
  graphdef, params, rest = _split(model)

  def pure_loss(params: Any, rest: Any, batch: Any) -> Any:
    model = nnx.merge(graphdef, params, rest)
    loss = auto_boost.loss_fn(model, batch)
    return loss, nnx.as_pure(nnx.state(model, nnx.Not(nnx.Param)))

  step = optax_boost.make_train_step(pure_loss, tx, has_model_state=True)
  state = step.init(params, rest)

  def work() -> Any:
    nonlocal state
    state, metrics = step(state, batch)
    return state.step, metrics

  return work


def _without_norms(model: Any) -> Any:
  for _, block in nnx.iter_modules(model):
    if isinstance(block, auto_boost.Bottleneck):
      block.norms = nnx.List([_Identity() for _ in block.norms])
  model.norm = _Identity()
  return model


class _Identity(nnx.Module):
  def __call__(self, x: Any) -> Any:
    return x


def _sgd() -> optax.GradientTransformation:
  return optax.chain(optax.add_decayed_weights(1e-4), optax.sgd(1e-3, momentum=0.9, nesterov=True))


def _parts(make: Callable[[], Any], batch: Any) -> dict[str, Work]:
  model = make()
  graphdef, params, rest = _split(model)

  def loss(params: Any, rest: Any, batch: Any) -> Any:
    return auto_boost.loss_fn(nnx.merge(graphdef, params, rest), batch)

  forward, both = jax.jit(loss), jax.jit(jax.value_and_grad(loss))
  groups = optax_boost.layer_groups(params, auto_boost.BLOCKS, num_groups=_GROUPS)
  works: dict[str, Work] = {
    "forward": lambda: forward(params, rest, batch),
    "forward and backward": lambda: both(params, rest, batch),
    "step": _pure_step(model, batch, _sgd()),
    "step without BatchNorms": _pure_step(_without_norms(make()), batch, _sgd()),
  }
  for depth in range(1, _GROUPS):
    always = optax_boost.fixed_freezing(_GROUPS, depth)
    tx = optax_boost.freeze_layers(_sgd(), groups, always)
    works[f"step, {depth} frozen"] = _pure_step(model, batch, tx)
  return works


def _call(make: Callable[[], Any], batch: Any, rounds: int) -> float:
  one = jax.tree.map(lambda x: x[:1, :4, :4] if x.ndim > 1 else x[:1], batch)
  step, model = optax_boost.nnx.make_train_step(auto_boost.loss_fn), make()
  optimizer = nnx.Optimizer(model, _sgd(), wrt=nnx.Param)
  works = {"whole": lambda: step(model, optimizer, one), "pure": _pure_step(make(), one, _sgd())}
  found = _least(works, 50, rounds)
  return found["whole"] - found["pure"]


def _mean_step(level: str, steps: list[float]) -> float:
  """A step of a level on average over a training, from that of each depth."""
  first = optax_boost.auto_boost(level, total_steps=_STEPS).on["freeze_layers"]["first"]
  schedule = optax_boost.progressive_freezing(_GROUPS, _STEPS, first, anneal=False)
  depths = [int(schedule.frozen_groups(t)) for t in range(_STEPS)]
  return float(np.mean([steps[depth] for depth in depths]))


def profile(shape: tuple[int, ...], blocks: int, number: int, rounds: int) -> str:
  """Measures one network.

  Args:
    shape: of a batch of images.
    blocks: in each stage.
    number: of steps in one measurement.
    rounds: how many measurements.

  Returns:
    The table.
  """
  rng = np.random.default_rng(0)
  x = rng.normal(size=shape).astype(np.float32)
  batch = {"x": jnp.array(x), "y": jnp.array(rng.integers(0, 10, shape[0], np.int32))}
  boost = optax_boost.auto_boost("O1", total_steps=_STEPS)

  def plain() -> Any:
    return auto_boost.ResNet(shape[-1], blocks, rngs=nnx.Rngs(0))

  def fewer() -> Any:
    return boost.model(optax_boost.nnx.less_bn, plain(), batch["x"])

  makes = {"O0": plain, "fewer BatchNorms": fewer}
  works = {
    (name, part): work for name, make in makes.items() for part, work in _parts(make, batch).items()
  }
  found = _least(works, number, rounds)
  calls = {name: _call(make, batch, rounds) for name, make in makes.items()}
  columns: dict[str, dict[str, float]] = {name: {} for name in makes}
  for (name, part), value in found.items():
    columns[name][part] = value
  base = columns["O0"]["step"] + calls["O0"]

  def row(name: str, values: list[float]) -> str:
    cells = (f"{value:.2f} ({value / base:.0%})" for value in values)
    return f"| {name} | " + " | ".join(cells) + " |"

  def each(value: Callable[[dict[str, float]], float]) -> list[float]:
    return [value(column) for column in columns.values()]

  frozen = [f"step, {depth} frozen" for depth in range(1, _GROUPS)]
  lines = [
    f"|  | {' | '.join(columns)} |",
    "| --- | --- | --- |",
    row("forward", each(lambda c: c["forward"])),
    row("backward", each(lambda c: c["forward and backward"] - c["forward"])),
    row("optimizer and the rest", each(lambda c: c["step"] - c["forward and backward"])),
    row("**step**", each(lambda c: c["step"])),
    row("of it BatchNorm's", each(lambda c: c["step"] - c["step without BatchNorms"])),
    *(row(part, each(operator.itemgetter(part))) for part in frozen),
    row("the call", list(calls.values())),
  ]
  for level in ("O1", "O2"):
    cells = []
    for name, column in columns.items():
      steps = [column["step"], *(column[part] for part in frozen)]
      cells.append(f"{base / (_mean_step(level, steps) + calls[name]):.2f}")
    lines.append(f"| {level}'s schedule | " + " | ".join(cells) + " |")
  return "\n".join(lines)


def main() -> None:
  """Measures and writes the tables."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--rounds", type=int, default=7)
  parser.add_argument("--networks", type=int, nargs="+", default=[0, 1], help="default: both")
  parser.add_argument("--out", type=pathlib.Path, default=_harness.HERE / "results")
  options = parser.parse_args()
  where = _harness.machine(["jax", "jaxlib", "flax"])
  sections = []
  for index in tqdm(options.networks):
    name, *network = _NETWORKS[index]
    sections.append(f"## {name}\n\n{profile(*network, options.rounds)}\n")
  page = _harness.page("Profile of AutoBoost's networks", _ABOUT, where, "\n".join(sections))
  _harness.replace(options.out / "auto_boost_profile.md", page)


if __name__ == "__main__":
  main()

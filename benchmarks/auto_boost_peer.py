"""AutoBoost's levels and MindSpore's on a CPU: ``python -m benchmarks.auto_boost_peer``."""

import argparse
import contextlib
import functools
import pathlib
from typing import Any

from flax import nnx
import numpy as np
import optax
from tqdm import tqdm

from benchmarks import _harness, auto_boost
import optax_boost.nnx

_BASE, _THEIR_BASE = "O0", "MindSpore O0"
_BATCH = 16
_ABOUT = f"""\
A ResNet-11 of bottleneck blocks on 8 x 8 images in batches of {_BATCH} (small, as MindSpore's
convolutions are slow on a CPU), SGD with Nesterov momentum and weight decay. One measurement is
{auto_boost.STEPS} train steps, nothing compiled: of ours a whole training, of MindSpore and of
`reference` so many steps of one that goes on. What a level saves is read against the own O0: in
the column `x {_BASE}` for ours, in `x {_THEIR_BASE}` for MindSpore 2.10.0 (graph mode,
`BoostTrainOneStepCell`, each level in a process of its own). `reference` are ours with the
reference's settings: the interval schedule of ten groups, 30 % of the steps frozen, the normalized
head. `no centralization` is MindSpore's level with `gc_flag` off. MindSpore documents AutoBoost
for Ascend only. On one device its O2 is its O1."""


def ours(name: str, boost: Any, batch: dict[str, np.ndarray]) -> _harness.Contender:
  """A level here, its steps compiled."""

  def made() -> Any:
    fresh = auto_boost.ResNet(1, 1, rngs=nnx.Rngs(0))
    return boost.model(optax_boost.nnx.less_bn, fresh, batch["x"])

  inner = optax.chain(optax.add_decayed_weights(1e-4), optax.sgd(0.05, momentum=0.9, nesterov=True))
  split = optax_boost.nnx.split_loss(auto_boost.loss_fn, made())
  tx = boost.optimizer(inner, *split, batch, groups=auto_boost.names(boost))
  step = optax_boost.nnx.make_train_step(auto_boost.loss_fn)

  def start() -> tuple[Any, nnx.Optimizer]:
    model = made()
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

  return auto_boost.contender(name, start, step, batch)


def main() -> None:
  """Measures and writes the table."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--rounds", type=int, default=12, help="to collect, quiet if possible")
  parser.add_argument("--out", type=pathlib.Path, default=_harness.HERE / "results")
  options = parser.parse_args()
  rng = np.random.default_rng(0)
  x = rng.standard_normal((_BATCH, 8, 8, 1), dtype=np.float32)
  batch = {"x": x, "y": rng.integers(0, 10, _BATCH, np.int32)}
  make = functools.partial(optax_boost.auto_boost, total_steps=auto_boost.STEPS + 1)
  levels = {
    _BASE: make("O0"),
    "O1": make("O1"),
    "O2": make("O2"),
    "O1, reference": make("O1", config={}),
  }
  theirs = {
    "MindSpore, no boost": "plain",
    _THEIR_BASE: "O0",
    "MindSpore O1": "O1",
    "MindSpore O1, no centralization": "O1-gc_flag",
    "MindSpore O2": "O2",
    "MindSpore O2, no centralization": "O2-gc_flag",
  }
  contenders = [ours(name, level, batch) for name, level in tqdm(levels.items(), desc="compiling")]
  script, arguments = "mindspore_auto_boost.py", (str(_BATCH), str(auto_boost.STEPS))
  with contextlib.ExitStack() as running:
    contenders += [
      running.enter_context(_harness.peer(name, _harness.MINDSPORE, script, level, *arguments))
      for name, level in tqdm(theirs.items(), desc="starting MindSpore")
    ]
    title = f"ResNet-11, 8 x 8 images, batches of {_BATCH}"
    comparison = _harness.compare(contenders, [_BASE, _THEIR_BASE], options.rounds, title, 1)
  where = _harness.machine(["jax", "jaxlib", "optax", "flax"])
  _harness.write("auto_boost_peer", _ABOUT, [comparison], where, options.out)


if __name__ == "__main__":
  main()

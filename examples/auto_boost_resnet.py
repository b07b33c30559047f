"""Trains a bottleneck ResNet on digits at AutoBoost's levels, and compares time and accuracy.

`python examples/auto_boost_resnet.py` runs O0, O1 and O2. With `--config
examples/configs/documented.json`, a file of MindSpore's schema, all levels but O0 are MindSpore's,
with the settings of the file. It prints what each level does, then a table: test accuracy over the
seeds, and the mean time of a step next to O0's. Steps that compile (the first two, and the
first of each depth of freezing) don't count. A picture shows the same, seed by seed.
"""

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path
import time
from typing import NamedTuple

from _data import batches, digits
from _pictures import check_writable, save
from flax import nnx
import jax
import jax.numpy as jnp
from matplotlib.figure import Figure
import numpy as np
import optax
from tqdm import tqdm

import optax_boost
import optax_boost.nnx

BATCH_SIZE = 64
WIDTHS = (16, 32, 64)
BASELINE = "O0"
# The layers in the order of the forward pass: blocks, and single layers for many groups.
BLOCKS = ["stem|norm", "block_*", "head"]
LAYERS = ["stem|norm", "block_*/conv_*|block_*/norm_*", "head"]


class Bottleneck(nnx.Module):
  """Three convolutions and a shortcut, which has one of its own where the width changes."""

  def __init__(self, inputs: int, width: int, stride: int, *, rngs: nnx.Rngs):
    def conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nnx.Conv:
      return nnx.Conv(inputs, outputs, (size, size), strides=stride, use_bias=False, rngs=rngs)

    def norm(width: int) -> nnx.BatchNorm:
      return nnx.BatchNorm(width, momentum=0.9, rngs=rngs)

    outputs = 4 * width
    self.conv_1, self.norm_1 = conv(inputs, width, 1), norm(width)
    self.conv_2, self.norm_2 = conv(width, width, 3, stride), norm(width)
    self.conv_3, self.norm_3 = conv(width, outputs, 1), norm(outputs)
    self.conv_4, self.norm_4 = conv(inputs, outputs, 1, stride), norm(outputs)

  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps feature maps to feature maps."""
    y = nnx.relu(self.norm_1(self.conv_1(x)))
    y = self.norm_3(self.conv_3(nnx.relu(self.norm_2(self.conv_2(y)))))
    return nnx.relu(y + self.norm_4(self.conv_4(x)))


class ResNet(nnx.Module):
  """A stem, three bottleneck blocks and a linear head."""

  def __init__(self, classes: int, *, rngs: nnx.Rngs):
    self.stem = nnx.Conv(1, WIDTHS[0], (3, 3), use_bias=False, rngs=rngs)
    self.norm = nnx.BatchNorm(WIDTHS[0], momentum=0.9, rngs=rngs)
    self.block_1 = Bottleneck(WIDTHS[0], WIDTHS[0], 1, rngs=rngs)
    self.block_2 = Bottleneck(4 * WIDTHS[0], WIDTHS[1], 2, rngs=rngs)
    self.block_3 = Bottleneck(4 * WIDTHS[1], WIDTHS[2], 2, rngs=rngs)
    self.head = nnx.Linear(4 * WIDTHS[2], classes, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps images ``(n, h, w, 1)`` to logits ``(n, classes)``."""
    x = nnx.relu(self.norm(self.stem(x)))
    x = self.block_3(self.block_2(self.block_1(x)))
    return self.head(jnp.mean(x, (1, 2)))


def loss_fn(model: ResNet, batch: dict[str, jax.Array]) -> jax.Array:
  """Mean cross-entropy."""
  logits = model(batch["images"])
  return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]))


def number_of_steps(epochs: int) -> int:
  """The length of a training."""
  return epochs * (len(digits().train.labels) // BATCH_SIZE)


class Result(NamedTuple):
  """One training run: its test accuracy, and the seconds of a step that compiles nothing."""

  accuracy: float
  seconds: float


def run(boost: optax_boost.AutoBoost, epochs: int, seeds: Iterable[int]) -> Iterator[Result]:
  """Trains and evaluates a model per seed.

  Args:
    boost: the level, decided on.
    epochs: passes over the training images.
    seeds: of the initial weights and the order of the images.

  Yields:
    A :class:`Result` per seed.
  """
  data = digits()
  sample = {"images": data.train.images[:BATCH_SIZE], "labels": data.train.labels[:BATCH_SIZE]}

  def fresh(seed: int) -> ResNet:
    return ResNet(data.classes, rngs=nnx.Rngs(seed))

  # One transformation and one step for all seeds, so that each depth compiles once.
  less_bn = optax_boost.nnx.less_bn
  prepared = boost.model(less_bn, fresh(0), sample["images"])
  steps = number_of_steps(epochs)
  # The rate rises in the first tenth of the steps, then falls to 0; an average needs a rate that
  # still moves the params.
  last = 0.005 if "average_params" in boost.on else 0.0
  rate = optax.warmup_cosine_decay_schedule(0.0, 0.05, steps // 10, steps, last)
  sgd = optax.sgd(rate, momentum=0.9, nesterov=True)
  inner = optax.chain(optax.add_decayed_weights(1e-4), sgd)
  split = optax_boost.nnx.split_loss(loss_fn, prepared)
  names = LAYERS if boost.on.get("grad_freeze", {}).get("param_groups", 2) > 5 else BLOCKS
  tx = boost.optimizer(inner, *split, sample, groups=names)
  step = optax_boost.nnx.make_train_step(loss_fn)
  compiled: set[int] = set()
  for seed in seeds:
    model = boost.model(less_bn, fresh(seed), sample["images"])
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    seconds: list[float] = []
    for number, batch in enumerate(batches(data.train, BATCH_SIZE, epochs, seed)):
      start = time.perf_counter()
      metrics = jax.block_until_ready(step(model, optimizer, batch))
      depth = int(metrics.get("frozen_groups", 0))
      # The second one also compiles the schedule.
      if depth in compiled and number > 1:
        seconds.append(time.perf_counter() - start)
      compiled.add(depth)
    if "average_params" in boost.on:
      model = optax_boost.nnx.averaged_model(optimizer, model)
      images = [batch["images"] for batch in batches(data.train, BATCH_SIZE, 1, seed)]
      model = optax_boost.nnx.estimate_batch_stats(model, images)
    model.eval()
    right = jnp.argmax(model(data.test.images), -1) == data.test.labels
    yield Result(float(jnp.mean(right)), float(np.mean(seconds)))


def picture(results: dict[str, list[Result]]) -> Figure:
  """Draws accuracy against the time of a step, a dot per seed."""
  figure = Figure(figsize=(6, 4), layout="constrained")
  axes = figure.subplots()
  for level, found in results.items():
    accuracy, seconds = np.array(found).T
    (dots,) = axes.plot(1e3 * seconds, 100 * accuracy, "o", alpha=0.5)
    mean = (1e3 * np.mean(seconds), 100 * np.mean(accuracy))
    axes.plot(*mean, "D", color=dots.get_color(), markersize=9, label=level)
  axes.set_xlim(left=0)
  axes.set_xlabel("ms per step")
  axes.set_ylabel("test accuracy, %")
  axes.set_title("AutoBoost's levels on digits\n(a dot per seed, a diamond at their mean)")
  axes.legend()
  return figure


def main(arguments: list[str] | None = None) -> None:
  """Trains at every level and prints the table."""
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--levels", nargs="+", default=[BASELINE, "O1", "O2"])
  parser.add_argument("--config", type=Path, help="a JSON file of MindSpore's schema")
  parser.add_argument("--epochs", type=int, default=15)
  parser.add_argument("--seeds", type=int, default=3)
  parser.add_argument("--out", type=Path, default=Path("out/auto_boost.png"), help="the picture")
  options = parser.parse_args(arguments)
  if options.epochs < 1 or options.seeds < 1:
    parser.error("--epochs and --seeds must be at least 1")
  try:
    boosts = {
      level: optax_boost.auto_boost(
        level,
        config=options.config if level != BASELINE else None,
        total_steps=number_of_steps(options.epochs),
      )
      for level in dict.fromkeys([BASELINE, *options.levels])
    }
    check_writable(options.out)
  except (ValueError, NotImplementedError, OSError) as error:
    parser.error(str(error))
  results: dict[str, list[Result]] = {}
  for level, boost in boosts.items():
    runs = run(boost, options.epochs, range(options.seeds))
    results[level] = list(tqdm(runs, desc=level, unit="seed", total=options.seeds, leave=False))
    print(f"{boost.explain()}\n")
  print("level  test accuracy    ms per step  of O0's")
  base = np.mean([result.seconds for result in results[BASELINE]])
  for level, found in results.items():
    accuracy, seconds = np.array(found).T
    spread = f"{100 * np.mean(accuracy):5.1f} +- {100 * np.std(accuracy):.1f} %"
    print(f"{level:5}  {spread:15}  {1e3 * np.mean(seconds):11.2f}  {np.mean(seconds) / base:7.2f}")
  save(picture(results), options.out)
  print(f"\nThe picture is in {options.out}")


if __name__ == "__main__":
  main()

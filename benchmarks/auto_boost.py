"""AutoBoost's levels: ``python -m benchmarks.auto_boost --out benchmarks/results``.

With the environment variable ``OPTAX_BOOST_DATA``, a folder that holds an npz file of CIFAR-10
images (see ``--cifar``), it trains on those as well as on digits.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools
import json
import os
import pathlib
import time
from typing import Any, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from tqdm import tqdm

from benchmarks import _harness, _process
import optax_boost.nnx

_BASE = "O0"
# Steps of a training whose time is taken, after a first one. O1 freezes in 6 of them, O2 in 9.
STEPS = 20
_PEAK_RATE = 0.05
_TRAINING_BATCH = 64
# The parts that measure speed: a title, the shape of a batch, blocks per stage.
_NETWORKS: dict[str, tuple[str, tuple[int, ...], int]] = {
  "speed-8": ("Images of 8 x 8, batch 64: ResNet-11", (64, 8, 8, 1), 1),
  "speed-16": ("Images of 16 x 16, batch 64: ResNet-11", (64, 16, 16, 3), 1),
  "speed-32": ("Images of 32 x 32, batch 32: ResNet-29", (32, 32, 32, 3), 3),
}
_TIMED = (
  _BASE,
  "fewer BatchNorms",
  "fewer BatchNorms, normalized head",
  "freezing",
  "O1",
  "O2",
  "O1, reference",
)
# On the larger network, whose programs take long to compile.
_FEWER = (_BASE, "fewer BatchNorms", "freezing", "O1", "O2")
# The parts that train on CIFAR-10: the share of the steps, whether images are augmented, the most
# seeds, the contenders. The short one takes a little longer than O1.
_TRAININGS: dict[str, tuple[float, bool, int, tuple[str, ...]]] = {
  "cifar": (1, False, 5, (_BASE, "O1", "O2")),
  "cifar-methods": (
    1,
    False,
    5,
    (
      _BASE,
      "fewer BatchNorms",
      "fewer BatchNorms, centralized",
      "O1, in turns",
      "O2, in turns",
    ),
  ),
  "cifar-short": (0.79, False, 5, (_BASE,)),
  "cifar-long": (5, True, 2, (_BASE, "fewer BatchNorms, centralized", "O1", "O2")),
}
_PARTS = (*_NETWORKS, "digits", *_TRAININGS)
_ABOUT = f"""\
`optax_boost.auto_boost` on bottleneck ResNets (a stem, a number of blocks in each of three stages
of widths 16, 32 and 64, a head), SGD with Nesterov momentum and weight decay. One
measurement is a whole training of {STEPS} steps of the NNX train step (and one before them), data
on the host, nothing compiled: the levels freeze in the last 30 and 45 % of it. Columns are medians
of the ratios of seconds within a round: what O0 has over a row is by how much it makes more steps
per second. Rows between O0 and O1 are single methods of O1; `O1, reference` are MindSpore's
defaults, whose schedule is random in how many groups it freezes, so its training goes on and on.

Accuracies are of the ResNet-11 after equally many steps, on all test images. The learning rate
rises in the first tenth of the steps, then falls to 0 (cosine). A seed means the same initial
weights and the same batches at every level. `augmented` images are shifted by up to two pixels and
mirrored at random. `in turns` freezes the same layers all along the training: in every third (O1)
and every second step (O2)."""

Data = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


class Bottleneck(nnx.Module):
  """Three convolutions and a shortcut, which has one of its own where the width changes."""

  def __init__(self, inputs: int, width: int, stride: int, *, rngs: nnx.Rngs):
    outputs = 4 * width
    shapes = [(inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1)]
    if inputs != outputs:
      shapes.append((inputs, outputs, 1, stride))
    self.convs = nnx.List(
      [
        nnx.Conv(i, o, (size, size), strides=s, use_bias=False, rngs=rngs)
        for i, o, size, s in shapes
      ]
    )
    self.norms = nnx.List([nnx.BatchNorm(o, momentum=0.9, rngs=rngs) for _, o, _, _ in shapes])

  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps feature maps to feature maps."""
    y = x
    for i in range(3):
      y = self.norms[i](self.convs[i](y))
      y = nnx.relu(y) if i < 2 else y
    return nnx.relu(y + (self.norms[3](self.convs[3](x)) if len(self.convs) == 4 else x))


class ResNet(nnx.Module):
  """A stem, three stages of bottleneck blocks, and a head."""

  def __init__(self, channels: int, blocks: int, *, rngs: nnx.Rngs):
    self.stem = nnx.Conv(channels, 16, (3, 3), use_bias=False, rngs=rngs)
    self.norm = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
    made, inputs = [], 16
    for stage, width in enumerate((16, 32, 64)):
      for block in range(blocks):
        made.append(Bottleneck(inputs, width, 2 if stage and not block else 1, rngs=rngs))
        inputs = 4 * width
    self.blocks = nnx.List(made)
    self.head = nnx.Linear(inputs, 10, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps images to logits."""
    x = nnx.relu(self.norm(self.stem(x)))
    for block in self.blocks:
      x = block(x)
    return self.head(jnp.mean(x, (1, 2)))


def loss_fn(model: ResNet, batch: dict[str, jax.Array]) -> jax.Array:
  """Cross-entropy."""
  losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])
  return jnp.mean(losses)


# The layers of a `ResNet` in the order of the forward pass: its blocks, and its single layers.
BLOCKS = ["stem|/norm", "blocks/*", "head"]
LAYERS = ["stem|/norm", "blocks/*/convs/*|blocks/*/norms/*", "head"]


def names(boost: Any) -> list[str]:
  """The names of what a level freezes: blocks, or single layers for MindSpore's ten groups."""
  return LAYERS if boost.on.get("grad_freeze", {}).get("param_groups", 2) > 5 else BLOCKS


def contenders(total_steps: int) -> dict[str, Any]:
  """The levels, and the methods of O1 one by one.

  Args:
    total_steps: the length of the training.

  Returns:
    What :func:`optax_boost.auto_boost` makes, by name.
  """

  def make(level: str, config: Any = None) -> Any:
    return optax_boost.auto_boost(level, config=config, total_steps=total_steps)

  def some(*methods: str, **less_bn_options: Any) -> Any:
    level = make("O1")
    on = {method: level.on[method] for method in methods}
    if less_bn_options:
      on["less_bn"] |= less_bn_options
    return dataclasses.replace(level, on=on)

  def in_turns(share: float) -> Any:
    freezing = {"param_groups": 2, "freeze_type": 0, "freeze_p": share}
    return make("O1", {"less_bn": {"fn_flag": False}, "grad_freeze": freezing})

  return {
    _BASE: make("O0"),
    "fewer BatchNorms": some("less_bn"),
    "fewer BatchNorms, centralized": some("less_bn", "centralize"),
    "fewer BatchNorms, normalized head": some("less_bn", fn_flag=True),
    "freezing": some("freeze_layers"),
    "O1": make("O1"),
    "O2": make("O2"),
    # All along the training.
    "O1, in turns": in_turns(0.7),
    "O2, in turns": in_turns(0.55),
    "O1, reference": make("O1", {}),
  }


class Trainer:
  """A level on one network: the step is compiled once, for all seeds.

  Args:
    boost: the level, decided on.
    channels: of the images.
    blocks: in each stage.
    batch: of the form of all batches.
    steps: of a training: the learning rate rises in the first tenth, then falls to 0.
  """

  def __init__(self, boost: Any, channels: int, blocks: int, batch: Any, steps: int):
    self._boost, self._shape, self._batch = boost, (channels, blocks), batch
    rate = optax.warmup_cosine_decay_schedule(0.0, _PEAK_RATE, steps // 10, steps)
    sgd = optax.sgd(rate, momentum=0.9, nesterov=True)
    inner = optax.chain(optax.add_decayed_weights(5e-4), sgd)
    split = optax_boost.nnx.split_loss(loss_fn, self.model(0))
    self._tx = boost.optimizer(inner, *split, batch, groups=names(boost))
    self.step = optax_boost.nnx.make_train_step(loss_fn)

  def fresh(self, seed: int) -> ResNet:
    """The network as it is without the level."""
    return ResNet(*self._shape, rngs=nnx.Rngs(seed))

  def model(self, seed: int) -> Any:
    """The network that is trained."""
    return self._boost.model(optax_boost.nnx.less_bn, self.fresh(seed), self._batch["x"])

  def start(self, seed: int) -> tuple[Any, Any]:
    """A model and its optimizer."""
    model = self.model(seed)
    return model, nnx.Optimizer(model, self._tx, wrt=nnx.Param)

  def averaged(self, model: Any, optimizer: nnx.Optimizer, images: np.ndarray) -> Any:
    """The model with the level's averaged params, or as it is where the level keeps none."""
    if "average_params" not in self._boost.on:
      return model
    parts = np.split(images[: 20 * _TRAINING_BATCH], 20)
    model = optax_boost.nnx.averaged_model(optimizer, model)
    return optax_boost.nnx.estimate_batch_stats(model, parts)

  def accuracy(self, model: Any, images: np.ndarray, labels: np.ndarray) -> float:
    """Test accuracy in percent."""
    evaluated = nnx.clone(model)
    evaluated.eval()
    predict = nnx.jit(lambda model, x: jnp.argmax(model(x), -1))
    parts = range(0, len(labels), 500)
    found = [predict(evaluated, images[i : i + 500]) for i in parts]
    return 100 * float(np.mean(np.concatenate(found) == labels))


def contender(
  name: str, start: Callable[[], tuple[Any, Any]], step: Any, batch: Any
) -> _harness.Contender:
  """Times whole trainings, or, of the reference's settings, one that goes on and on.

  Args:
    name: its name.
    start: makes a model and its optimizer.
    step: the train step.
    batch: the batch of all steps.

  Returns:
    What has compiled all that it needs, and measures the seconds of :data:`STEPS` steps.
  """
  kept = start() if "reference" in name else None

  def run() -> float:
    model, optimizer = kept or start()
    # A new model's first call takes it apart.
    jax.block_until_ready(step(model, optimizer, batch))
    begin = time.perf_counter()
    for _ in range(STEPS):
      metrics = step(model, optimizer, batch)
    jax.block_until_ready((metrics, nnx.state(model)))
    return time.perf_counter() - begin

  begin = time.perf_counter()
  run()
  # A random schedule may take some time to have frozen each number of groups.
  for _ in range(6 if kept else 0):
    run()
  return _harness.Contender(name, run, {"first steps, s": time.perf_counter() - begin})


def speed(part: str, rounds: int, names: Sequence[str]) -> dict[str, Any]:
  """Compares the seconds of contenders on one network.

  Args:
    part: which.
    rounds: to measure.
    names: the contenders.
  """
  title, shape, blocks = _NETWORKS[part]
  chosen = contenders(STEPS + 1)
  rng = np.random.default_rng(0)
  x = rng.normal(size=shape).astype(np.float32)
  batch = {"x": x, "y": rng.integers(0, 10, shape[0], np.int32)}
  able = []
  for name in tqdm(names, desc="compiling", leave=False):
    trainer = Trainer(chosen[name], shape[-1], blocks, batch, STEPS + 1)
    able.append(contender(name, functools.partial(trainer.start, 0), trainer.step, batch))
  return _harness.compare(able, [_BASE], rounds, title, patience=1)


def batches(
  x: np.ndarray,
  y: np.ndarray,
  steps: int,
  seed: int,
  augmented: bool = False,
  size: int = _TRAINING_BATCH,
) -> Iterator[dict[str, Any]]:
  """Batches of images in random order; `augmented`: shifted by up to two pixels and mirrored."""
  rng = np.random.default_rng(seed)
  order = np.empty(0, int)
  for _ in range(steps):
    if len(order) < size:
      order = rng.permutation(len(y))
    chosen, order = order[:size], order[size:]
    yield {"x": moved(x[chosen], rng) if augmented else x[chosen], "y": y[chosen]}


def moved(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
  """Shifts images by up to two pixels and mirrors half of them, at random."""
  number, size = x.shape[:2]
  padded = np.pad(x, ((0, 0), (2, 2), (2, 2), (0, 0)))
  down, right = rng.integers(0, 5, (2, number, 1))
  place = np.arange(size)
  columns = np.where(rng.integers(0, 2, (number, 1)), size - 1 - place, place) + right
  rows = place + down
  return padded[np.arange(number)[:, None, None], rows[:, :, None], columns[:, None, :]]


class Training(NamedTuple):
  """One training of the small network.

  Attributes:
    data: the name of the images: ``"digits"``, or the path of an npz file.
    steps: how many.
    augmented: whether images are moved at random.
    name: of the contender.
    seed: of the initial weights and the batches.
  """

  data: str
  steps: int
  augmented: bool
  name: str
  seed: int


def accuracy(training: Training) -> float:
  """Trains once.

  Args:
    training: what.

  Returns:
    The test accuracy, in percent.
  """
  data, steps, augmented, name, seed = training
  x, y, test_x, test_y = digits() if data == "digits" else cifar(pathlib.Path(data))
  sample = next(batches(x, y, 1, 0))
  trainer = Trainer(contenders(steps)[name], x.shape[-1], 1, sample, steps)
  model, optimizer = trainer.start(seed)
  for batch in batches(x, y, steps, seed, augmented):
    trainer.step(model, optimizer, batch)
  return trainer.accuracy(trainer.averaged(model, optimizer, x), test_x, test_y)


def accuracies(
  data: str, steps: int, augmented: bool, names: Sequence[str], seeds: int
) -> dict[str, list[float]]:
  """Trains with some of the contenders on the small network, a training per core at a time.

  Args:
    data: the name of the images; see :class:`Training`.
    steps: of each training.
    augmented: whether images are moved at random.
    names: the contenders.
    seeds: how many of each.

  Returns:
    Test accuracies by name, one per seed.
  """
  trainings = [Training(data, steps, augmented, n, seed) for seed in range(seeds) for n in names]
  with _process.core_pool() as pool:
    done = tqdm(pool.map(accuracy, trainings), total=len(trainings), desc=f"{steps} steps")
    values = dict(zip(trainings, done, strict=True))
  return {name: [v for t, v in values.items() if t.name == name] for name in names}


def _scaled(x: np.ndarray, y: np.ndarray, test_x: np.ndarray, test_y: np.ndarray) -> Data:
  mean, spread = x.mean(), x.std()
  scaled = [((part - mean) / spread).astype(np.float32) for part in (x, test_x)]
  return scaled[0], y.astype(np.int32), scaled[1], test_y.astype(np.int32)


def digits() -> Data:
  """Scikit-learn's digits: 1,397 to train, 400 to test."""
  bunch = load_digits()
  order = np.random.default_rng(0).permutation(len(bunch.target))
  train, test = order[:-400], order[-400:]
  x = bunch.images[..., None]
  return _scaled(x[train], bunch.target[train], x[test], bunch.target[test])


def cifar(path: pathlib.Path) -> Data:
  """CIFAR-10 images, averaged to 16 x 16, so that a CPU makes enough steps with enough seeds."""
  with np.load(path) as file:
    names = ("train_images", "train_labels", "test_images", "test_labels")
    x, y, test_x, test_y = (file[name] for name in names)
  halved = [part.reshape(-1, 16, 2, 16, 2, 3).mean((2, 4)) for part in (x, test_x)]
  return _scaled(halved[0], y, halved[1], test_y)


def accuracy_table(title: str, found: dict[str, list[float]]) -> str:
  """Writes accuracies, and each seed's difference from O0 in points."""
  base = np.array(found[_BASE])
  lines = [
    f"## {title}\n",
    "| | test accuracy, % | against O0, points | seeds |",
    "|---|---|---|---|",
  ]
  for name, values in found.items():
    gain = np.array(values) - base
    against = "" if name == _BASE else f"{gain.mean():+.2f} ± {gain.std(ddof=1):.2f}"
    each = ", ".join(f"{value:.2f}" for value in values)
    lines.append(
      f"| {name} | {np.mean(values):.2f} ± {np.std(values, ddof=1):.2f} | {against} | {each} |"
    )
  return "\n".join(lines) + "\n\nMean ± one standard deviation.\n"


def main() -> None:
  """Measures and writes the tables."""
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--rounds", type=int, default=12, help="rounds on digits; a third on 32x32")
  parser.add_argument("--steps", type=int, default=300, help="of each training on digits")
  parser.add_argument("--cifar-steps", type=int, default=1250, help="on CIFAR-10; long: times 5")
  parser.add_argument("--seeds", type=int, default=5, help="of each training; long: two")
  parser.add_argument("--cifar", default="cifar10_24k.npz", help="in the folder OPTAX_BOOST_DATA")
  parser.add_argument("--out", type=pathlib.Path, default=_harness.HERE / "results")
  parser.add_argument("--parts", nargs="+", choices=_PARTS, default=_PARTS, help="default: all")
  options = parser.parse_args()
  folder = os.environ.get("OPTAX_BOOST_DATA")
  images = folder and str(pathlib.Path(folder) / options.cifar)
  # Parts that are left out keep what an earlier run found.
  found = _harness.OUT / "auto_boost_parts.json"
  parts = json.loads(found.read_text(encoding="utf-8")) if found.is_file() else {}
  for part in options.parts:
    if part in _NETWORKS:
      large = part == "speed-32"
      rounds = max(2, options.rounds // 4) if large else options.rounds
      parts[part] = speed(part, rounds, _FEWER if large else _TIMED)
    elif part == "digits":
      title = f"Digits: ResNet-11, {options.steps} steps in batches of {_TRAINING_BATCH}"
      names = [_BASE, "O1", "O2"]
      parts[part] = title, accuracies("digits", options.steps, False, names, options.seeds)
    elif images:
      share, augmented, seeds, names = _TRAININGS[part]
      steps = round(share * options.cifar_steps)
      title = (
        f"CIFAR-10, 20,000 images averaged to 16 x 16{', augmented' if augmented else ''}:"
        f" ResNet-11, {steps} steps in batches of {_TRAINING_BATCH}"
        f"{', method by method' if part == 'cifar-methods' else ''}"
      )
      values = accuracies(images, steps, augmented, names, min(seeds, options.seeds))
      parts[part] = title, values
    _write(parts, options.out)
    _harness.replace(found, json.dumps(parts))


def _write(parts: dict[str, Any], folder: pathlib.Path) -> None:
  comparisons = [parts[part] for part in _NETWORKS if part in parts]
  tables = {part: parts[part] for part in _PARTS if part in parts and part not in _NETWORKS}
  where = _harness.machine(["jax", "jaxlib", "optax", "flax"])
  _harness.write("auto_boost", _ABOUT, comparisons, where, folder)
  with (folder / "auto_boost.md").open("a") as file:
    file.write("".join("\n" + accuracy_table(*table) for table in tables.values()))


if __name__ == "__main__":
  main()

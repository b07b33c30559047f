"""Trainings by the clock, at levels and without: ``python -m benchmarks.gpu.trainings``.

``sequences`` trains transformers on the Python sources of this machine's packages, ``images FILE``
a bottleneck ResNet on CIFAR-10 (an ``.npz`` with ``train_images`` uint8, ``train_labels``,
``test_images`` and ``test_labels``). Each takes at most eight minutes on an H100. Without a GPU,
``--small`` takes small sizes, to try the command.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator
import dataclasses
import functools
import pathlib
import sysconfig
import time
from typing import Any, NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import _harness, models
from benchmarks.gpu import sizes
import optax_boost
import optax_boost.linen

_LEVELS = ("O1", "O2")
_ABOUT = {
  "sequences": """\
Transformers of 8 blocks (rotary positions, bfloat16 and cuDNN's attention on a GPU) on Python
sources of the installed packages, as bytes; AdamW (b2 0.95, decay 0.1, gradients clipped at 1), a
warm-up of a tenth, cosine to 0. O0 has the best of its batches and rates; a level has the same, and
as many steps as fit into its share of O0's time. Loss: of whole sequences held out, nats a byte.
Seconds: by the clock, without compiling, one run each.""",
  "images": """\
A bottleneck ResNet (blocks 3, 3, 3, width 32) on 20,000 CIFAR-10 images of 32 x 32, cropped and
mirrored at random, in batches of 128; momentum SGD with decay, a warm-up of a tenth, cosine to 0
or, where a level averages the params, to a tenth. Accuracy on 4,000 images held out. Seconds: by
the clock; an epoch that compiles counts as the median epoch with as many frozen groups. One run
each.""",
}

Row = tuple[str, dict[str, float]]


@dataclasses.dataclass(frozen=True)
class Plan:
  """A transformer's trainings.

  Attributes:
    model: the transformer.
    tries: O0's batches and rates.
    tokens: that O0 trains on.
    shares: of O0's time, for O1; O2 has the first.
    sources: folders whose Python files are the text.
    megabytes: of text.
    held_out: whole sequences of the test loss.
  """

  model: models.GPT2
  tries: tuple[tuple[int, float], ...]
  tokens: int
  shares: tuple[float, ...]
  sources: tuple[pathlib.Path, ...]
  megabytes: float
  held_out: int


def plans(small: bool) -> list[Plan]:
  """Attention is a large part of a step in the first; the second has small batches."""
  if small:
    package = (pathlib.Path(optax_boost.__file__).parent,)
    model = sizes.transformer(16, 64, layers=1)
    return [Plan(model, ((4, 1e-3), (2, 1e-3)), 1024, (0.75,), package, 0.1, 8)]
  packages = tuple(pathlib.Path(sysconfig.get_paths()[name]) for name in ("stdlib", "purelib"))
  return [
    Plan(
      sizes.transformer(512, 8192),
      ((4, 1e-3), (4, 5e-4), (2, 1e-3)),
      600 * 32_768,
      (0.75, 0.9),
      packages,
      120,
      128,
    ),
    Plan(
      sizes.transformer(512, 1024),
      ((16, 1e-3), (16, 5e-4)),
      350 * 32_768,
      (0.75, 0.9),
      packages,
      120,
      1024,
    ),
  ]


def source_text(folders: Iterable[pathlib.Path], megabytes: float) -> np.ndarray:
  """Python sources of some folders, each file once, in a random order: uint8."""
  files = sorted({path for folder in folders for path in folder.rglob("*.py") if path.is_file()})
  parts: dict[bytes, None] = {}
  total = 0
  for i in np.random.default_rng(0).permutation(len(files)):
    content = files[i].read_bytes()
    if len(content) >= 200 and content not in parts:
      parts[content] = None
      total += len(content)
    if total > 1e6 * megabytes:
      break
  return np.frombuffer(b"\n".join(parts), np.uint8)


class RateState(NamedTuple):
  """State of `_warm_cosine`: the steps made, and what the training sets after `init`."""

  count: jax.Array
  peak: jax.Array
  total: jax.Array


def _warm_cosine() -> optax.GradientTransformation:
  """A rate whose peak and length are in the state, so that all trainings share a program."""

  def init(params: Any) -> RateState:
    del params
    return RateState(jnp.zeros([], jnp.int32), jnp.ones([]), jnp.ones([]))

  def update(updates: Any, state: RateState, params: Any = None) -> Any:
    del params
    done = state.count / state.total
    fall = 0.5 * (1 + jnp.cos(jnp.pi * jnp.clip((done - 0.1) / 0.9, 0, 1)))
    rate = state.peak * jnp.where(done < 0.1, 10 * done, fall)
    return jax.tree.map(lambda u: -rate * u, updates), state._replace(count=state.count + 1)

  return optax.GradientTransformation(init, update)


class Sequences:
  """Trains a plan's transformer."""

  def __init__(self, plan: Plan):
    self.plan, self.full = plan, plan.model.length
    text = source_text(plan.sources, plan.megabytes)
    cut = len(text) * 95 // 100
    self.text = jnp.asarray(text[:cut])
    held_out = text[cut:][: plan.held_out * (self.full + 1)]
    held_out = held_out[: len(held_out) // (self.full + 1) * (self.full + 1)]
    self.test = held_out.reshape(-1, self.full + 1)
    tx = optax.chain(
      optax.clip_by_global_norm(1.0),
      optax.scale_by_adam(b2=0.95),
      optax.add_decayed_weights(
        0.1, mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params)
      ),
      _warm_cosine(),
    )
    self.step = optax_boost.make_train_step(plan.model.loss, tx)
    self.init, self.loss = jax.jit(plan.model.init), jax.jit(plan.model.loss)
    self._cut = jax.jit(self._batch, static_argnums=(2, 3))

  def _batch(self, text: jax.Array, seed: Any, count: int, length: int) -> jax.Array:
    starts = jax.random.randint(jax.random.key(seed), (count, 1), 0, len(text) - self.full - 1)
    tokens = text[starts + jnp.arange(self.full + 1)].astype(jnp.int32)
    return optax_boost.cut_sequences(tokens, length, self.full)

  def batch(self, number: int, count: int, length: int) -> jax.Array:
    """So many whole sequences, cut to a length."""
    return self._cut(self.text, np.int32(number), count, length)

  def start(self, seed: int, peak: float, steps: int) -> Any:
    """The state before a training of so many steps."""
    state = self.step.init(self.init(jax.random.key(seed)))
    opt_state = optax.tree.set(state.opt_state, peak=jnp.float32(peak), total=jnp.float32(steps))
    return state._replace(opt_state=opt_state)

  def prices(self, count: int) -> dict[int, float]:
    """The price of each length of a level; its programs are compiled then."""
    whole = self.batch(0, count, self.full)
    schedule = optax_boost.sequence_length_warmup(self.full, 1000)
    step = self.step.on_copy(self.start(0, 1e-3, 1000))
    return optax_boost.length_prices(step, whole, schedule)

  def train(
    self, seed: int, count: int, peak: float, steps: int, length_of: Callable[[int], int]
  ) -> dict[str, float]:
    """Trains on so many whole sequences a step; the programs are compiled already."""
    state = jax.block_until_ready(self.start(seed, peak, steps))
    start = time.perf_counter()
    for i in range(steps):
      batch = self.batch(100_000 * (seed + 1) + i, count, length_of(i))
      state, _ = self.step(state, batch)
    jax.block_until_ready(state)
    seconds = time.perf_counter() - start
    rows = np.split(self.test, range(8, len(self.test), 8))
    losses = [float(self.loss(state.params, jnp.asarray(r, jnp.int32))) for r in rows]
    loss = float(np.average(losses, weights=list(map(len, rows))))
    return {"steps": steps, "seconds": seconds, "loss": loss}


def sequences(small: bool) -> Iterator[Row]:
  """O0 at several batches and rates, then the levels at the best, two seeds."""
  for plan in plans(small):
    made, full = Sequences(plan), plan.model.length
    whole = functools.partial(_whole, full)
    title = f"width {plan.model.width}, {full:,} tokens"
    tries: dict[tuple[int, float], dict[str, float]] = {}
    for count, rate in plan.tries:
      made.train(0, count, rate, 2, whole)  # compiles
      steps = plan.tokens // (count * full)
      tries[count, rate] = made.train(0, count, rate, steps, whole)
      yield f"{title}: O0, batch {count}, rate {rate:g}", tries[count, rate]
    (count, rate), base = min(tries.items(), key=lambda item: item[1]["loss"])
    prices = made.prices(count)
    for length, price in prices.items():
      yield f"{title}: a step of {length:,}", {"of O0's": price}
    trained = functools.partial(at_level, made, count, rate, int(base["steps"]), prices)
    for level, share in [*(("O1", share) for share in plan.shares), ("O2", plan.shares[0])]:
      yield f"{title}: {level}, {share} of the time", trained(level, share, 0)
    yield f"{title}: O0, seed 1", made.train(1, count, rate, int(base["steps"]), whole)
    share = plan.shares[0]
    yield f"{title}: O1, {share} of the time, seed 1", trained("O1", share, 1)


def _whole(full: int, step: int) -> int:
  del step
  return full


def at_level(
  made: Sequences,
  count: int,
  rate: float,
  whole_steps: int,
  prices: dict[int, float],
  level: str,
  share: float,
  seed: int,
) -> dict[str, float]:
  """Trains at a level for a share of O0's time: the more steps, the less its steps take.

  Lengths that save no time are left out. If none is left, the level is O0, and isn't trained.
  """

  def schedule(steps: int) -> optax_boost.LengthSchedule:
    boost = optax_boost.auto_boost(level, steps, sequence_length=made.full, length_prices=prices)
    assert boost.length_schedule is not None
    return boost.length_schedule

  if len(schedule(1000).lengths) == 1:
    return {"as O0, lengths": 1}
  mean = np.mean([prices[schedule(1000)(i)] for i in range(1000)])
  steps = max(2, round(share * whole_steps / mean))
  return made.train(seed, count, rate, steps, schedule(steps))


class ResNet(nn.Module):
  """A bottleneck ResNet for images of 32 x 32."""

  blocks: tuple[int, ...] = (3, 3, 3)
  width: int = 32
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
    """Maps images [batch, height, width, channels] to logits."""

    def conv_norm(x: jax.Array, width: int, size: int, stride: int = 1) -> jax.Array:
      x = nn.Conv(width, (size, size), (stride, stride), use_bias=False, dtype=self.dtype)(x)
      return nn.BatchNorm(use_running_average=not train, momentum=0.9, dtype=self.dtype)(x)

    x = nn.relu(conv_norm(x.astype(self.dtype), self.width, 3))
    for stage, count in enumerate(self.blocks):
      width = self.width * 2**stage
      for block in range(count):
        stride = 2 if stage and not block else 1
        h = nn.relu(conv_norm(x, width, 1))
        h = nn.relu(conv_norm(h, width, 3, stride))
        h = conv_norm(h, 4 * width, 1)
        x = nn.relu(h + (x if block else conv_norm(x, 4 * width, 1, stride)))
    return nn.Dense(10)(jnp.mean(x.astype(jnp.float32), (1, 2)))


@jax.jit
def augmented(images: jax.Array, indices: jax.Array, seed: Any) -> jax.Array:
  """Images cropped after padding by 4, and mirrored, at random; between -1 and 1."""
  places, mirrored = jax.random.split(jax.random.key(seed))
  offsets = jax.random.randint(places, (len(indices), 2), 0, 9)
  mirrored = jax.random.bernoulli(mirrored, 0.5, (len(indices),))
  side = images.shape[1]

  def one(image: jax.Array, offset: jax.Array, mirror: jax.Array) -> jax.Array:
    padded = jnp.pad(image, ((4, 4), (4, 4), (0, 0)))
    cropped = jax.lax.dynamic_slice(padded, (offset[0], offset[1], 0), (side, side, 3))
    return jnp.where(mirror, cropped[:, ::-1], cropped)

  return jax.vmap(one)(images[indices], offsets, mirrored).astype(jnp.float32) / 127.5 - 1


class Images:
  """Trains the ResNet on a file of images."""

  def __init__(self, file: pathlib.Path, epochs: int, small: bool):
    with np.load(file) as found:
      self.images = jnp.asarray(found["train_images"])
      self.labels = np.asarray(found["train_labels"], np.int32)
      self.test = np.asarray(found["test_images"], np.float32) / 127.5 - 1
      self.test_labels = np.asarray(found["test_labels"], np.int32)
    self.count = 8 if small else 128
    self.epochs, self.each = epochs, len(self.labels) // self.count
    on_gpu = jax.default_backend() == "gpu"
    self.module = (
      ResNet((1,), 4) if small else ResNet(dtype=jnp.bfloat16 if on_gpu else jnp.float32)
    )

  def batch(self, order: np.ndarray, number: int) -> dict[str, jax.Array]:
    """The batch of a step, in the order of the epoch."""
    place = number % self.each * self.count
    indices = order[place : place + self.count]
    x = augmented(self.images, jnp.asarray(indices), np.int32(number))
    return {"x": x, "y": jnp.asarray(self.labels[indices])}

  def train(self, level: str, rate: float) -> dict[str, float]:
    """Trains at a level, and evaluates."""
    steps = self.epochs * self.each
    boost = optax_boost.auto_boost(level, steps)
    sample = self.batch(np.arange(len(self.labels)), 0)
    module = self.module
    if level != "O0":
      module = boost.model(optax_boost.linen.less_bn, module, sample["x"])
    variables = jax.jit(module.init)(jax.random.key(0), sample["x"])
    loss, params, stats = optax_boost.linen.split_loss(models.image_loss, module, variables)
    last = 0.1 * rate if "average_params" in boost.on else 0.0
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, steps // 10, steps, last)
    sgd = optax.chain(
      optax.add_decayed_weights(5e-4), optax.sgd(schedule, momentum=0.9, nesterov=True)
    )
    layers = ["Conv_*|BatchNorm_*", "Dense_0"]
    tx = boost.optimizer(sgd, loss, params, stats, sample, groups=layers)
    step = optax_boost.make_train_step(loss, tx)
    state = step.init(params, stats)
    seconds: dict[int, list[float]] = {}
    rng = np.random.default_rng(0)
    for epoch in range(self.epochs):
      start, order = time.perf_counter(), rng.permutation(len(self.labels))
      for i in range(self.each):
        state, metrics = step(state, self.batch(order, epoch * self.each + i))
      depth = int(jax.block_until_ready(metrics).get("frozen_groups", 0))
      seconds.setdefault(depth, []).append(time.perf_counter() - start)
    clock = sum(len(times) * float(np.median(times)) for times in seconds.values())
    variables = {"params": state.params, **state.model_state}
    if "average_params" in boost.on:
      averaged = optax_boost.averaged_params(state.opt_state, state.params)
      batches = (self.batch(order, i)["x"] for i in range(min(20, self.each)))
      variables = optax_boost.linen.estimate_batch_stats(
        module, variables | {"params": averaged}, batches
      )
    return {"steps": steps, "seconds": clock, "accuracy, %": 100 * self.accuracy(module, variables)}

  def accuracy(self, module: Any, variables: Any) -> float:
    """The share of right answers on test data."""
    apply = jax.jit(lambda x: jnp.argmax(module.apply(variables, x, train=False), -1))
    found = [np.asarray(apply(x)) for x in np.split(self.test, range(1000, len(self.test), 1000))]
    return float(np.mean(np.concatenate(found) == self.test_labels))


def images(file: pathlib.Path, epochs: int, small: bool) -> Iterator[Row]:
  """O0 at two rates, then the levels at the better one, for as many epochs."""
  made = Images(file, epochs, small)
  results = {}
  for rate in (0.1, 0.05):
    results[rate] = made.train("O0", rate)
    yield f"O0, rate {rate}", results[rate]
  best = max(results, key=lambda rate: results[rate]["accuracy, %"])
  for level in _LEVELS:
    row = made.train(level, best)
    yield f"{level}, rate {best}", row | {"of O0's": row["seconds"] / results[best]["seconds"]}


def main(arguments: list[str] | None = None) -> None:
  """Trains, prints each row as it comes, and writes the page after each."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("what", choices=list(_ABOUT))
  parser.add_argument("file", nargs="?", type=pathlib.Path, help="of images")
  parser.add_argument("--epochs", type=int, default=60, help="over the images, at most 100")
  parser.add_argument("--small", action="store_true", help="sizes for a trial on a CPU")
  parser.add_argument("--out", type=pathlib.Path, default=_harness.HERE / "results")
  options = parser.parse_args(arguments)
  if (options.what == "images") != (options.file is not None):
    parser.error("`images` needs a file, and `sequences` takes none")
  rows = (
    sequences(options.small)
    if options.file is None
    else images(options.file, options.epochs, options.small)
  )
  where = _harness.machine(["jax", "jaxlib", "optax", "flax"])
  where |= {"device": jax.devices()[0].device_kind}
  lines: list[str] = []
  for name, row in rows:
    cells = ", ".join(f"{column} {value:.4g}" for column, value in row.items())
    lines.append(f"| {name} | {cells} |")
    print(lines[-1], flush=True)
    table = "\n".join(["| training | result |", "|---|---|", *lines])
    name = f"gpu_{options.what}"
    page = _harness.page(name, _ABOUT[options.what], where, table)
    _harness.replace(options.out / f"{name}.md", page)


if __name__ == "__main__":
  main()

"""LARS's claim as MXNet tests it: LeNet-5 on MNIST in batches of 8,000 above 98 % in ten epochs.

``make evidence PARTS=lars`` trains LeNet-5 by LARS and by SGD with momentum, rates and warm-ups
tuned in the same way for both, in batches of 128 to 8,000, with and without BatchNorm, and MXNet's
own setting. It needs ``mnist.npz`` in ``OPTAX_BOOST_DATA``.
"""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from matplotlib.ticker import LogLocator
import numpy as np
import optax
import pytest

import optax_boost
from tests.evidence import common, report, runs

pytestmark = pytest.mark.slow
SEEDS = (0, 1, 2)
EPOCHS = 10
# Images whose gradients are computed at once, and over which BatchNorm takes its statistics.
CHUNK = 250
SGD, LARS, LITERAL = "SGD, momentum 0.9", "LARS, coefficient 0.01", "MXNet's setting, LARS"
# With the default coefficient: biases and BatchNorms at the rate itself, and with ratios of theirs,
# as `optax.lars` has them.
DEFAULT, WITHOUT_EXCLUSION = "LARS, coefficient 0.001", "LARS, coefficient 0.001, exclude=None"
COEFFICIENTS = {LARS: 0.01, DEFAULT: 0.001, WITHOUT_EXCLUSION: 0.001, LITERAL: 14.0}
LECUNS, MXNETS = (6, 16, 120, 84), (20, 50, 500)


class Run(NamedTuple):
  """One training.

  Attributes:
    optimizer: SGD, LITERAL, or one of LARS, DEFAULT and WITHOUT_EXCLUSION.
    batch: its size.
    normalized: whether BatchNorm follows each hidden layer.
    rate: the highest.
    warmup: the share of the steps in which the rate rises linearly.
    epochs: of images.
    widths: channels of two convolutions, then of hidden dense layers.
  """

  optimizer: str
  batch: int
  normalized: bool
  rate: float
  warmup: float = 0.1
  epochs: int = EPOCHS
  widths: tuple[int, ...] = LECUNS


def init(key, widths, normalized, mxnets):
  """Uniform within 0.01 as MXNet's default, else normal with variance 1 / fan-in."""
  c1, c2, *hidden = widths
  dense = [16 * c2, *hidden, 10]
  shapes = [(5, 5, 1, c1), (5, 5, c1, c2), *itertools.pairwise(dense)]
  params = {}
  keys = jax.random.split(key, len(shapes))
  for i, (key, shape) in enumerate(zip(keys, shapes, strict=True)):
    if mxnets:
      kernel = jax.random.uniform(key, shape, minval=-0.01, maxval=0.01)
    else:
      kernel = jax.random.normal(key, shape) / np.sqrt(np.prod(shape[:-1]))
    params[f"layer{i}"] = {"kernel": kernel, "bias": jnp.zeros(shape[-1])}
    if normalized and i < len(shapes) - 1:
      params[f"norm{i}"] = {"scale": jnp.ones(shape[-1]), "bias": jnp.zeros(shape[-1])}
  return params


def convolution(x, kernel, columns):
  """A valid 5 x 5 convolution as a matrix product for each group of output columns.

  XLA's convolutions are slow on CPUs in scans, and for few channels everywhere.
  """
  n, height, width, c = x.shape
  out = kernel.shape[-1]
  rows, groups, wide = height - 4, (width - 4) // columns, columns + 4
  band = np.zeros((columns, wide, 5), np.float32)
  for column in range(columns):
    band[column, column + np.arange(5), np.arange(5)] = 1
  matrix = jnp.einsum("jwq,hqco->hwcjo", band, kernel).reshape(5 * wide * c, columns * out)
  parts = [x[:, :, g * columns : g * columns + wide].reshape(n, height, -1) for g in range(groups)]
  stacked = jnp.stack(parts, axis=2)  # (n, height, groups, wide c)
  patches = jnp.concatenate([stacked[:, h : h + rows] for h in range(5)], axis=-1)
  return (patches.reshape(n * rows * groups, -1) @ matrix).reshape(n, rows, width - 4, out)


def pooled(x):
  x = jnp.maximum(x[:, 0::2], x[:, 1::2])
  return jnp.maximum(x[:, :, 0::2], x[:, :, 1::2])


def logits_of(params, x, statistics=None):
  """Logits and each BatchNorm's mean and variance; `statistics` replace those of this batch."""
  x, used = x[..., None], []
  layers = len([name for name in params if name.startswith("layer")])
  for i in range(layers):
    layer = params[f"layer{i}"]
    if i < 2:
      x = pooled(convolution(x, layer["kernel"], columns=(8, 4)[i]))
    else:
      x = x.reshape(len(x), -1) @ layer["kernel"]
    x += layer["bias"]
    if f"norm{i}" in params:
      axes = tuple(range(x.ndim - 1))
      mean, variance = (
        statistics[len(used)] if statistics else (jnp.mean(x, axes), jnp.var(x, axes))
      )
      used.append((mean, variance))
      norm = params[f"norm{i}"]
      x = (x - mean) * jax.lax.rsqrt(variance + 1e-5) * norm["scale"] + norm["bias"]
    if i < layers - 1:
      x = jnp.tanh(x)
  return x, used


def loss_fn(params, x, y):
  return common.cross_entropy(logits_of(params, x)[0], y)


def make_tx(run, rate, steps):
  # MXNet counts steps from one, and epochs without the incomplete batch.
  end, first = (70, 7) if run.optimizer == LITERAL else (steps, run.warmup * steps)

  def schedule(count):
    falling = jnp.clip((end - count - 1) / (end - first), 0, 1) ** 2
    return rate * jnp.minimum((count + 1) / first, falling)

  if run.optimizer == SGD:
    return optax.sgd(schedule, momentum=0.9)
  exclude = None if run.optimizer == WITHOUT_EXCLUSION else "auto"
  coefficient = COEFFICIENTS[run.optimizer]
  return optax_boost.lars(schedule, trust_coefficient=coefficient, exclude=exclude)


@functools.partial(jax.jit, static_argnames="run")
def epoch(run, rate, params, opt_state, x, y, order):
  """Steps over `order`'s rows of image numbers."""
  per_epoch = len(order)
  tx = make_tx(run, rate, per_epoch * run.epochs)

  def step(carry, rows):
    params, opt_state = carry

    def add(total, rows):
      loss, grads = jax.value_and_grad(loss_fn)(params, x[rows], y[rows])
      return jax.tree.map(jnp.add, total, (loss, grads)), None

    chunks = rows.reshape(max(1, run.batch // CHUNK), -1)
    zeros = (jnp.zeros([]), jax.tree.map(jnp.zeros_like, params))
    (loss, grads), _ = jax.lax.scan(add, zeros, chunks)
    grads = jax.tree.map(lambda g: g / len(chunks), grads)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss / len(chunks)

  (params, opt_state), losses = jax.lax.scan(step, (params, opt_state), order)
  return params, opt_state, losses


@jax.jit
def statistics_of(params, x):
  """BatchNorm's statistics, averaged over chunks of training images."""
  chunks = x[: 20 * CHUNK].reshape(-1, CHUNK, *x.shape[1:])
  return jax.tree.map(
    lambda s: jnp.mean(s, 0), jax.lax.map(lambda x: logits_of(params, x)[1], chunks)
  )


@jax.jit
def predict(params, statistics, x):
  return logits_of(params, x, statistics)[0]


def train(run, seed):
  """Accuracies in % and the mean loss of the last epoch.

  Under the tuning seed 10,000 images are kept for validation, else they are trained on, too.
  """
  literal, tuning = run.optimizer == LITERAL, seed == runs.TUNING_SEED
  parts = {part: (x[..., 0], y) for part, (x, y) in common.images("mnist", unit=literal).items()}
  x, y = parts["train"]
  if not tuning:
    x, y = (np.concatenate(pair) for pair in zip(parts["train"], parts["validation"], strict=True))
  size = len(y)
  params = init(jax.random.key(seed), run.widths, run.normalized, literal)
  x, y, rng = jnp.asarray(x), jnp.asarray(y), np.random.default_rng(seed)
  opt_state = make_tx(run, 0.1, 100).init(params)
  program = run._replace(rate=0.0)  # one program for all rates
  losses = []
  for _ in range(run.epochs):
    order = rng.permutation(size)
    if literal:  # the last batch is filled up from the beginning
      order = np.concatenate([order, order[: -size % run.batch]])
    order = order[: len(order) // run.batch * run.batch].reshape(-1, run.batch)
    params, opt_state, losses = epoch(program, run.rate, params, opt_state, x, y, order)
  statistics = statistics_of(params, x) if run.normalized else None
  held_out = ["validation", "test"] if tuning else ["test"]
  logits = functools.partial(predict, params, statistics)
  found = {part: common.scores(logits, *parts[part])["accuracy"] for part in held_out}
  return found | {"train loss": float(jnp.mean(losses))}


# Batch, whether there is BatchNorm, the epochs to tune in, and a first rate for each optimizer.
CELLS = (
  (8000, False, EPOCHS, {SGD: 0.4, LARS: 2.0, DEFAULT: 5.0, WITHOUT_EXCLUSION: 20.0}),
  (8000, True, EPOCHS // 2, {SGD: 0.4, LARS: 2.0}),
  (1000, False, 2, {SGD: 0.1, LARS: 1.0}),
  (128, False, 2, {SGD: 0.02, LARS: 0.5}),
)


def rates_tuned():
  """The trainings tried for each batch, BatchNorm and optimizer, with their validation accuracy.

  From the first rate on, rates are doubled and halved until the best has worse neighbours. Then
  three times the warm-up is tried with the best rate and twice that; if it is better, rates are
  doubled and halved again.
  """
  tried = {}
  for batch, normalized, epochs, first in CELLS:
    for optimizer, rate in first.items():
      tried[batch, normalized, optimizer] = {
        Run(optimizer, batch, normalized, rate, epochs=epochs): None
      }
  while True:
    new = [(run, runs.TUNING_SEED) for cell in tried.values() for run in cell if cell[run] is None]
    if not new:
      return tried
    values = dict(zip(new, runs.train_all(train, new), strict=True))
    for cell in tried.values():
      for run in cell:
        cell[run] = values[run, runs.TUNING_SEED]["validation"] if cell[run] is None else cell[run]
      best = max(cell, key=cell.get)
      near = [best._replace(rate=best.rate * factor) for factor in (0.5, 2)]
      if best.warmup == 0.1 and all(run in cell for run in near):
        near = [best._replace(rate=best.rate * factor, warmup=0.3) for factor in (1, 2)]
      cell.update({run: None for run in near if run not in cell})


def picture(tried, outcome):
  """Accuracy by rate where batches are 8,000, and of the best settings by batch."""
  titles = [
    *(f"batch 8,000, {bn} BatchNorm: validation, %" for bn in ("no", "with")),
    "no BatchNorm, tuned: test, %",
  ]
  figure, panels = report.panels(titles, 3.7, 3.6)
  batches = [cell[0] for cell in CELLS[1:]]
  for optimizer, colour in {SGD: report.LIGHT, LARS: report.BLUE}.items():
    style = {"marker": "o", "color": colour, "label": optimizer}
    for axes, normalized in zip(panels, (False, True), strict=False):
      cell = tried[8000, normalized, optimizer]
      rates = sorted((run.rate, cell[run]) for run in cell if run.warmup == 0.1)
      axes.plot(*zip(*rates, strict=True), **style)
      axes.set(xlabel="highest rate", ylim=(90, 99.5))
    scores = [outcome[batch, False, optimizer].values("test") for batch in batches]
    report.points(panels[2], batches, scores, **style)
  for axes in panels:
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.minorticks_off()
  panels[2].set_xticks(batches, [f"{batch:,}" for batch in batches])
  panels[2].set_xlabel("batch")
  report.legend_below(figure, 2)
  return figure


@pytest.mark.parametrize("literal", [(LECUNS,), (LECUNS, MXNETS)], ids=["LeCun's", "MXNet's"])
def test_lars_and_sgd_from_batches_of_128_to_8000(literal):
  """Of MXNet's network, which takes five times as long, only MXNet's setting, and last."""
  common.need("mnist")
  tried = rates_tuned()
  best = {key: max(cell, key=cell.get)._replace(epochs=EPOCHS) for key, cell in tried.items()}
  for widths in literal:
    best[8000, False, LITERAL, widths] = Run(LITERAL, 8000, False, 0.01, widths=widths)
  outcome = runs.tune(train, {key: [run] for key, run in best.items()}, SEEDS)
  rows = [
    [
      f"{batch:,}",
      "after each hidden layer" if normalized else "none",
      optimizer + (f", {'-'.join(map(str, widths[0]))}" if widths else ""),
      f"{found.setting.rate:g}",
      "one epoch" if widths else f"{100 * found.setting.warmup:.0f} %",
      found.spread("test"),
      f"{min(found.values('test')):.2f}",
      found.spread("train loss", "{:.4f}"),
    ]
    for (batch, normalized, optimizer, *widths), found in outcome.items()
  ]
  lines = [
    [
      f"{run.batch:,}",
      "yes" if run.normalized else "no",
      run.optimizer,
      f"{run.rate:g}",
      f"{100 * run.warmup:.0f} %",
      f"{value:.2f}",
    ]
    for cell in tried.values()
    for run, value in sorted(cell.items())
  ]
  header = ["batch", "BatchNorm", "optimizer", "rate", "warm-up"]
  page = report.words(
    "lars",
    tests=report.table([*header, "test accuracy, %", "least", "training loss"], rows),
    tuning=report.table([*header, "accuracy"], lines),
    lecuns="-".join(map(str, LECUNS)),
    mxnets="-".join(map(str, MXNETS)),
    **{"epochs": EPOCHS, "half": EPOCHS // 2, "seeds": len(SEEDS), "chunk": CHUNK},
  )
  report.write("lars", *page, picture(tried, outcome))
  for (_, _, optimizer, *_), found in outcome.items():
    if optimizer != LITERAL:
      assert min(found.values("test")) > 90

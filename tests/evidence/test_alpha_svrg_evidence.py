"""Is alpha-SVRG worth three times the gradients? As its paper does it, on CIFAR-10.

``make evidence PARTS=alpha_svrg`` runs this where the environment variable ``OPTAX_BOOST_DATA``
names a folder with ``cifar10*.npz``, and writes ``benchmarks/results/alpha_svrg_evidence.md``.

From the paper (arXiv 2311.05589): AdamW, a coefficient that falls linearly from 0.75 to 0 over the
training, a snapshot and its full gradient once an epoch, augmented images, a network with
LayerNorms. "Small data" stands for its Pets, Flowers and STL-10: few images, many epochs.
"""

import functools
from typing import NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp
from matplotlib.figure import Figure
import numpy as np
import optax
import pytest

from benchmarks import auto_boost
import optax_boost
import optax_boost.linen
from tests.evidence import common
from tests.evidence import report
from tests.evidence import runs

pytestmark = pytest.mark.slow
SEEDS = (0, 1, 2)
BATCH = 64
WEIGHT_DECAY = 0.05
# Points of a curve.
LOOKS = 5


class Regime(NamedTuple):
  """How much data there is, for how long it is trained, and which rates are tried."""

  images: int
  epochs: int
  rates: tuple[float, ...]


REGIMES = {
  "16,000 images": Regime(16_000, 5, (1e-3, 2.5e-3, 6e-3, 1.5e-2)),
  "1,000 images": Regime(1_000, 30, (2.5e-3, 6e-3, 1.5e-2, 3.5e-2)),
}
ADAMW, LONGER, OURS = "AdamW", "AdamW, three times the epochs", "alpha-SVRG"
METHODS = (ADAMW, LONGER, OURS)


class Setting(NamedTuple):
  """One training."""

  regime: str
  method: str
  rate: float


class Network(nn.Module):
  """Two stages of residual convolutions after LayerNorms, 93,000 params."""

  @nn.compact
  def __call__(self, x):
    def residual(x):
      return x + nn.Conv(x.shape[-1], (3, 3))(nn.gelu(nn.LayerNorm()(x)))

    x = residual(nn.Conv(32, (2, 2), strides=2)(x))
    x = residual(residual(nn.Conv(64, (2, 2), strides=2)(nn.LayerNorm()(x))))
    return nn.Dense(10)(nn.LayerNorm()(x.mean((1, 2))))


def loss_fn(model, batch):
  logits = model(batch["x"])
  return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]))


@functools.cache
def data():
  return common.images("cifar10", halved=True)


@jax.jit
def evaluate(params, x, y):
  """Sums of losses and of right answers."""
  logits = Network().apply({"params": params}, x)
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
  return losses.sum(), (logits.argmax(-1) == y).sum()


def scores(params, x, y):
  """The mean loss, and accuracy in percent."""
  parts = [evaluate(params, x[i : i + 1000], y[i : i + 1000]) for i in range(0, len(y), 1000)]
  loss, right = np.sum(np.asarray(parts, np.float64), 0) / len(y)
  return float(loss), 100 * float(right)


def train(setting, seed):
  """Trains once; epochs of gradients count every gradient of an image."""
  regime = REGIMES[setting.regime]
  x, y = (a[: regime.images] for a in data()["train"])
  ours = setting.method == OURS
  epochs = regime.epochs * (3 if setting.method == LONGER else 1)
  per_epoch = len(y) // BATCH
  steps = epochs * per_epoch
  rate = optax.warmup_cosine_decay_schedule(0.0, setting.rate, steps // 10, steps)
  # As arrays in the state, rates need no program of their own.
  tx = optax.inject_hyperparams(optax.adamw)(0.0, weight_decay=WEIGHT_DECAY)
  if ours:
    tx = optax.chain(optax_boost.svrg(None, optax.linear_schedule(0.75, 0.0, steps)), tx)
  step = optax_boost.linen.make_train_step(loss_fn, Network(), tx)
  state = step.init(Network().init(jax.random.key(seed), x[:1]))
  rng = np.random.default_rng(seed)
  points, ratios = [], []
  for epoch in range(epochs):
    if ours:
      seen = auto_boost.moved(x, rng)
      whole = ({"x": seen[i : i + 500], "y": y[i : i + 500]} for i in range(0, len(y), 500))
      state = step.refresh(state, whole)
    order = rng.permutation(len(y))
    for i in range(per_epoch):
      chosen = order[i * BATCH : (i + 1) * BATCH]
      adamw = state.opt_state[-1] if ours else state.opt_state
      adamw.hyperparams["learning_rate"] = jnp.asarray(rate(epoch * per_epoch + i), jnp.float32)
      batch = {"x": auto_boost.moved(x[chosen], rng), "y": y[chosen]}
      state, metrics = step(state, batch)
    if ours:
      ratios.append(float(metrics["variance_ratio"]))
    if (epoch + 1) % (epochs // LOOKS) == 0:
      loss, accuracy = scores(state.params, *data()["validation"])
      work = (epoch + 1) * (3 if ours else 1)
      points.append({"epochs": epoch + 1, "work": work, "loss": loss, "accuracy": accuracy})
  return {
    "validation": points[-1]["accuracy"],
    "points": points,
    "ratios": ratios,
    "train loss": scores(state.params, x, y)[0],
    "test loss": scores(state.params, *data()["test"])[0],
    "test accuracy": scores(state.params, *data()["test"])[1],
  }


@functools.cache
def tuned():
  grids = {
    (name, method): [Setting(name, method, rate) for rate in regime.rates]
    for name, regime in REGIMES.items()
    for method in METHODS
  }
  return runs.tune(train, grids, SEEDS)


def found(regime, method, key):
  return [result[key] for result in tuned()[regime, method].results]


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("method", METHODS)
def test_every_contender_trains(regime, method):
  common.need("cifar10")
  assert np.min(found(regime, method, "test accuracy")) > 25  # chance: 10


def test_with_many_images_gradients_are_better_spent_on_epochs():
  common.need("cifar10")
  longer, ours = (found("16,000 images", method, "test accuracy") for method in (LONGER, OURS))
  assert min(longer) > max(ours)


def section(regime):
  rows = []
  for method in METHODS:
    outcome = tuned()[regime, method]
    cells = [
      report.spread(found(regime, method, key), form)
      for key, form in (("train loss", "{:.3f}"), ("test loss", "{:.3f}"))
    ]
    validation, test = (found(regime, method, key) for key in ("validation", "test accuracy"))
    ratios = [f"{np.mean(r):.2f}" for r in zip(*found(regime, method, "ratios"), strict=True)]
    rows.append(
      [
        method,
        f"{outcome.results[0]['points'][-1]['work']}",
        f"{outcome.setting.rate:g}{' (edge of the grid)' if outcome.at_edge else ''}",
        *cells,
        f"{report.spread(validation)} %",
        f"{report.spread(test)} %",
        f"{ratios[0]}, {ratios[len(ratios) // 2]}, {ratios[-1]}" if ratios else "",
      ]
    )
  header = (
    "",
    "epochs of gradients",
    "rate",
    "training loss",
    "test loss",
    "validation accuracy",
    "test accuracy",
    "variance ratio: first, middle, last epoch",
  )
  tries = [
    f"{method}: "
    + ", ".join(f"{s.rate:g}: {accuracy:.2f} %" for s, accuracy in tuned()[regime, method].tried)
    for method in METHODS
  ]
  epochs = REGIMES[regime].epochs
  return (
    f"## {regime}, {epochs} epochs\n\n{report.table(header, rows)}\n"
    f"Validation accuracy by rate, another seed: {'; '.join(tries)}.\n"
  )


def picture():
  figure = Figure(figsize=(9, 5.6), dpi=110)
  figure.set_layout_engine("constrained")
  colors = dict(zip(METHODS, ("#9A9A9A", "black", "#0072B2"), strict=True))
  panels = figure.subplots(len(REGIMES), 2, sharey="row")
  for pair, regime in zip(panels, REGIMES, strict=True):
    for axes, key in zip(pair, ("epochs", "work"), strict=True):
      for method, color in colors.items():
        points = found(regime, method, "points")
        x = [p[key] for p in points[0]]
        curves = np.array([[p["accuracy"] for p in run] for run in points])
        axes.plot(x, curves.mean(0), color=color, marker=".", label=method)
        axes.fill_between(x, curves.min(0), curves.max(0), color=color, alpha=0.15, lw=0)
      label = {"epochs": "epochs", "work": "epochs of gradients"}[key]
      axes.set_xlabel(label)
      axes.set_title(regime, fontsize=10, loc="left")
      axes.spines[["top", "right"]].set_visible(False)
    pair[0].set_ylabel("validation accuracy, %")
  panels[0][0].legend(fontsize=8, frameon=False)
  return figure


def test_the_results_are_written():
  common.need("cifar10")
  about = (
    "alpha-SVRG as in its paper (arXiv 2311.05589): AdamW with weight decay"
    f" {WEIGHT_DECAY:g}, a coefficient that falls linearly from 0.75 to 0 over the training, a"
    " snapshot and its full gradient once an epoch, the same augmented batch for both gradients of"
    " a step. CIFAR-10 averaged to 16 x 16 pixels, shifted by up to two pixels and mirrored at"
    " random, batches of 64, a convolutional network with LayerNorms and 93,000 params. The rate"
    " rises in the first tenth of the steps, then falls to 0 (cosine); its peak was chosen for each"
    f" row by the accuracy on 4,000 validation images. Mean ± standard deviation over {len(SEEDS)}"
    " seeds. An epoch of alpha-SVRG costs three epochs of gradients: two gradients in each step and"
    " the full gradient. AdamW with three times the epochs has its whole schedule at that length."
    " The variance ratio is that of the corrected gradients' squared deviations from the full"
    " gradient to the plain gradients', over an epoch: above 1 the correction adds noise."
  )
  data = {
    regime: {
      method: {
        "rate": tuned()[regime, method].setting.rate,
        "tried": [(s.rate, v) for s, v in tuned()[regime, method].tried],
        "seeds": tuned()[regime, method].results,
      }
      for method in METHODS
    }
    for regime in REGIMES
  }
  body = "\n".join(map(section, REGIMES))
  report.write(
    "alpha_svrg", "alpha-SVRG at equal epochs and at equal gradients", about, body, data, picture()
  )

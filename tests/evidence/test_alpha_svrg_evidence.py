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
import numpy as np
import optax
import pytest

from benchmarks import auto_boost
import optax_boost
import optax_boost.linen
from tests.evidence import common, report, runs

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
METHODS = {ADAMW: report.LIGHT, LONGER: "black", OURS: report.BLUE}


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


@jax.jit
def predict(params, x):
  return Network().apply({"params": params}, x)


def train(setting, seed):
  """Trains once; epochs of gradients count every gradient of an image."""
  regime, data = REGIMES[setting.regime], common.images("cifar10", halved=True)
  x, y = (a[: regime.images] for a in data["train"])
  ours = setting.method == OURS
  epochs = regime.epochs * (3 if setting.method == LONGER else 1)
  per_epoch = len(y) // BATCH
  steps = epochs * per_epoch
  rate = optax.warmup_cosine_decay_schedule(0.0, setting.rate, steps // 10, steps)
  # As arrays in the state, rates need no program of their own.
  tx = optax.inject_hyperparams(optax.adamw)(0.0, weight_decay=WEIGHT_DECAY)
  if ours:
    tx = optax.chain(optax_boost.svrg(None, optax.linear_schedule(0.75, 0.0, steps)), tx)
  variables = Network().init(jax.random.key(seed), x[:1])
  loss, *arrays = optax_boost.linen.split_loss(common.classify, Network(), variables)
  step = optax_boost.make_train_step(loss, tx)
  state = step.init(*arrays)
  rng = np.random.default_rng(seed)
  batches = common.batches(x, y, BATCH, rng)
  points, ratios = [], []
  for epoch in range(epochs):
    if ours:
      seen = auto_boost.moved(x, rng)
      whole = ({"x": seen[i : i + 500], "y": y[i : i + 500]} for i in range(0, len(y), 500))
      state = step.refresh(state, whole)
    for i in range(per_epoch):
      adamw = state.opt_state[-1] if ours else state.opt_state
      adamw.hyperparams["learning_rate"] = jnp.asarray(rate(epoch * per_epoch + i), jnp.float32)
      batch = next(batches)
      state, metrics = step(state, batch | {"x": auto_boost.moved(batch["x"], rng)})
    if ours:
      ratios.append(float(metrics["variance_ratio"]))
    if (epoch + 1) % (epochs // LOOKS) == 0:
      found = common.scores(functools.partial(predict, state.params), *data["validation"])
      work = (epoch + 1) * (3 if ours else 1)
      points.append({"epochs": epoch + 1, "work": work, **found})
  ends = {"train": (x, y), "test": data["test"]}
  ends = {k: common.scores(functools.partial(predict, state.params), *v) for k, v in ends.items()}
  return {
    "validation": points[-1]["accuracy"],
    "points": points,
    "ratios": [ratios[0], ratios[len(ratios) // 2], ratios[-1]] if ours else [],
    "train loss": ends["train"]["loss"],
    "test loss": ends["test"]["loss"],
    "test accuracy": ends["test"]["accuracy"],
  }


HEADER = (
  *("", "epochs of gradients", "rate", "training loss", "test loss", "validation accuracy"),
  *("test accuracy", "variance ratio: first, middle, last epoch"),
)


def section(regime, tuned):
  rows = [
    [
      method,
      outcome.values("points")[0][-1]["work"],
      outcome.rate,
      *(outcome.spread(key, "{:.3f}") for key in ("train loss", "test loss")),
      *(f"{outcome.spread(key)} %" for key in ("validation", "test accuracy")),
      ", ".join(f"{np.mean(r):.2f}" for r in zip(*outcome.values("ratios"), strict=True)),
    ]
    for method, outcome in tuned.items()
  ]
  tries = [
    f"{method}: " + ", ".join(f"{s.rate:g}: {accuracy:.2f} %" for s, accuracy in outcome.tried)
    for method, outcome in tuned.items()
  ]
  return (
    f"## {regime}, {REGIMES[regime].epochs} epochs\n\n{report.table(HEADER, rows)}\n"
    f"Validation accuracy by rate, another seed: {'; '.join(tries)}.\n"
  )


def picture(outcomes):
  words = {"epochs": "epochs", "work": "epochs of gradients"}
  places = [(regime, key) for regime in REGIMES for key in words]
  figure, panels = report.panels([regime for regime, _ in places], 3.6, 3.2)
  for axes, (regime, key) in zip(panels, places, strict=True):
    for method, outcome in outcomes[regime].items():
      points = outcome.values("points")
      accuracies = [[p["accuracy"] for p in run] for run in points]
      style = {"color": METHODS[method], "marker": "."}
      report.curve(axes, [p[key] for p in points[0]], accuracies, method, **style)
    axes.set(xlabel=words[key], ylabel="validation accuracy, %")
  panels[0].legend(fontsize=9, frameon=False)
  return figure


def test_with_many_images_gradients_are_better_spent_on_epochs():
  common.need("cifar10")
  grids = {
    (name, method): [Setting(name, method, rate) for rate in regime.rates]
    for name, regime in REGIMES.items()
    for method in METHODS
  }
  tuned = runs.tune(train, grids, SEEDS)
  outcomes = {regime: {m: tuned[regime, m] for m in METHODS} for regime in REGIMES}
  sections = "\n".join(section(*pair) for pair in outcomes.items())
  numbers = {"decay": WEIGHT_DECAY, "batch": BATCH, "seeds": len(SEEDS)}
  page = report.words(
    "alpha_svrg",
    sections=sections,
    **numbers,
  )
  report.write("alpha_svrg", *page, picture(outcomes))
  for key, outcome in tuned.items():
    assert min(outcome.values("test accuracy")) > 25, key  # chance: 10
  longer, ours = (tuned["16,000 images", m].values("test accuracy") for m in (LONGER, OURS))
  assert min(longer) > max(ours)

"""Does SVRG do what it promises? On real data, against solvers that don't know it.

``make evidence PARTS=svrg`` writes ``benchmarks/results/svrg_evidence.md`` and ``.png``.
"""

import functools
import time
from typing import NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.optimize
from sklearn import datasets, linear_model

import optax_boost
import optax_boost.linen
from tests.evidence import common, report, runs

pytestmark = pytest.mark.slow
BATCH = 32
DECAY = 1e-2
SEEDS = (0, 1, 2)


# Logistic regression: strongly convex, so that the optimum is known to all digits.


class Convex(NamedTuple):
  """A training: scikit-learn's data, the method, the dtype."""

  data: str
  method: str
  dtype: str


# Learning rate, steps.
PROBLEMS = {"breast_cancer": (0.1, 40_000), "digits": (0.05, 60_000)}


def problem(name):
  """Standardized features with a column of ones, labels as one-hot rows."""
  x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
  x = (x - x.mean(0)) / np.maximum(x.std(0), 1e-9)
  x = np.concatenate([x, np.ones((len(x), 1))], 1)
  return {"x": x, "y": np.eye(y.max() + 1)[y]}


def objective(w, batch):
  log_likelihood = jnp.sum(batch["y"] * jax.nn.log_softmax(batch["x"] @ w), -1)
  return -jnp.mean(log_likelihood) + 0.5 * DECAY * jnp.sum(w**2)


def optimum(data):
  """The minimum by SciPy in float64, and by scikit-learn; they must agree."""
  shape = (data["x"].shape[1], data["y"].shape[1])
  with jax.enable_x64(True):
    value_and_grad = jax.jit(jax.value_and_grad(lambda w: objective(w.reshape(shape), data)))
    found = scipy.optimize.minimize(
      lambda w: tuple(np.asarray(x, np.float64) for x in value_and_grad(w)),
      np.zeros(np.prod(shape)),
      jac=True,
      method="L-BFGS-B",
      options={"maxiter": 20000, "maxfun": 40000, "ftol": 0, "gtol": 1e-13, "maxcor": 50},
    )
    # scikit-learn sums the losses, takes the ones as a feature, and of two classes fits the
    # difference of the columns, whose penalty is then half of ours.
    two = data["y"].shape[1] == 2
    strength = (2 if two else 1) / (DECAY * len(data["x"]))
    classifier = linear_model.LogisticRegression(
      C=strength, fit_intercept=False, tol=1e-12, max_iter=20000
    ).fit(data["x"], data["y"].argmax(1))
    weights = classifier.coef_.T
    if two:
      weights = np.concatenate([-weights / 2, weights / 2], 1)
    by_sklearn = float(objective(jnp.asarray(weights), data))
  assert abs(by_sklearn - found.fun) < 1e-10
  return float(found.fun)


def solve(setting, seed):
  """Gaps of the objective in float64 to its optimum, after every second pass over the data.

  SVRG's two gradients per step and a pass over the data every two epochs make 2.5 times the work of
  SGD, which therefore takes 2.5 times as many steps.
  """
  data, (rate, steps) = problem(setting.data), PROBLEMS[setting.data]
  n, (features, classes) = len(data["x"]), (data["x"].shape[1], data["y"].shape[1])
  count, dtype = n // BATCH, setting.dtype
  every, full, tx = 2 * count, None, optax.identity()
  with jax.enable_x64(True):
    held = jax.tree.map(lambda a: jnp.asarray(a, dtype), data)
    if setting.method == "SVRG":
      tx = optax_boost.svrg(refresh_every=every)
      whole = jax.tree.map(lambda a: a[None], held)
      full = functools.partial(optax_boost.full_gradient, batches=whole, stacked=True)
    else:
      every, steps = int(2.5 * every), int(2.5 * steps)
    rng = np.random.default_rng(seed)
    order = np.concatenate([rng.permutation(n)[: count * BATCH] for _ in range(steps // count + 1)])
    rows = jnp.asarray(order.reshape(-1, BATCH)[: steps // every * every].reshape(-1, every, BATCH))
    chain = optax.chain(tx, optax.sgd(rate))
    step = optax_boost.make_train_step(objective, chain, full_grad_fn=full)

    @jax.jit
    def run(state, rows):
      def period(state, rows):
        def one(state, some):
          return step(state, jax.tree.map(lambda a: a[some], held))[0], None

        state, _ = jax.lax.scan(one, state, rows)
        return state, objective(state.params.astype(jnp.float64), data)

      return jax.lax.scan(period, state, rows)

    _, values = run(step.init(jnp.zeros((features, classes), dtype)), rows)
    return {"gaps": np.asarray(values - optimum(data)).tolist()}


@functools.cache
def gaps():
  settings = [
    Convex(data, method, dtype)
    for data in PROBLEMS
    for dtype in ("float64", "float32")
    for method in ("SVRG", "SGD")
  ]
  results = runs.train_all(solve, [(setting, 0) for setting in settings])
  return {s: np.abs(result["gaps"]) for s, result in zip(settings, results, strict=True)}


@pytest.mark.parametrize("name", PROBLEMS)
def test_svrg_reaches_the_optimum_linearly_although_sgd_stalls(name):
  curve = gaps()[name, "SVRG", "float64"]
  assert curve[-1] < 1e-10
  assert gaps()[name, "SVRG", "float32"][-1] < 1e-6
  assert min(gaps()[name, "SGD", dtype][-1] for dtype in ("float64", "float32")) > 1e-5
  # Between the start and rounding, the logarithm of the gap falls along a line.
  places = np.flatnonzero((curve < 1e-3) & (curve > 1e-11))
  assert len(places) > 20
  assert np.corrcoef(places, np.log(curve[places]))[0, 1] < -0.99


# A convolutional network, where plain SVRG is known to do harm.


class Network(nn.Module):
  @nn.compact
  def __call__(self, x):
    x = nn.relu(nn.Conv(16, (3, 3))(x))
    x = nn.relu(nn.Conv(32, (3, 3), strides=2)(x))
    x = nn.relu(nn.Conv(32, (3, 3), strides=2)(x))
    return nn.Dense(10)(x.reshape(len(x), -1))


TRAIN, EPOCHS, RATE = 1500, 20, 0.05
ALPHA = "alpha-SVRG"
METHODS = ("SGD", "SGD, three times the epochs", "SVRG", ALPHA)
COLUMNS = (
  *("train loss", "test loss", "test accuracy, %"),
  *("variance ratio, epoch 1", "variance ratio, largest", "seconds"),
)


def train(method, seed):
  """Trains once on digits."""
  ours = method in ("SVRG", ALPHA)
  epochs, per_epoch = (EPOCHS if ours or method == "SGD" else 3 * EPOCHS), TRAIN // BATCH
  falling = optax.linear_schedule(0.75, 0.0, epochs * per_epoch)
  coefficient = falling if method == ALPHA else 1.0
  x, y = datasets.load_digits(return_X_y=True)
  order = np.random.default_rng(1).permutation(len(x))
  x, y = (x[order].reshape(-1, 8, 8, 1) / 16).astype(np.float32), y[order].astype(np.int32)
  train, test = (x[:TRAIN], y[:TRAIN]), (x[TRAIN:], y[TRAIN:])
  sgd = optax.sgd(optax.cosine_decay_schedule(RATE, epochs * per_epoch), momentum=0.9)
  tx = optax.chain(optax_boost.svrg(None, coefficient), sgd) if ours else sgd
  network = Network()
  variables = network.init(jax.random.key(seed), x[:1])
  loss, *arrays = optax_boost.linen.split_loss(common.classify, network, variables)
  step = optax_boost.make_train_step(loss, tx)
  state = step.init(*arrays)
  batches = common.batches(*train, BATCH, np.random.default_rng(seed))
  start, ratios = time.perf_counter(), []
  full = [{"x": x[i : i + 300], "y": y[i : i + 300]} for i in range(0, TRAIN, 300)]
  for _ in range(epochs):
    if ours:
      state = step.refresh(state, full)
    for _ in range(per_epoch):
      state, metrics = step(state, next(batches))
    ratios.append(float(metrics["variance_ratio"]) if ours else 1.0)
  seconds = time.perf_counter() - start
  predict = functools.partial(network.apply, {"params": state.params})
  of_train, of_test = (common.scores(predict, *part) for part in (train, test))
  # The last epochs' learning rate is near zero, and the snapshot near the params.
  values = (of_train["loss"], of_test["loss"], of_test["accuracy"], ratios[0], max(ratios), seconds)
  return dict(zip(COLUMNS, values, strict=True))


def picture():
  """The gaps along the run, by problem; float64 and float32 of a method in one colour."""
  figure, panels = report.panels(list(PROBLEMS), 4.5, 3.5)
  for axes, name in zip(panels, PROBLEMS, strict=True):
    for (data, method, dtype), curve in gaps().items():
      if data == name:
        share = np.linspace(0, 1, len(curve) + 1)[1:]
        style = {"color": report.BLUE if method == "SVRG" else report.LIGHT}
        style["linestyle"] = "-" if dtype == "float64" else "--"
        axes.semilogy(share, np.maximum(curve, 1e-16), label=f"{method}, {dtype}", **style)
    axes.set(xlabel="share of the run (equal work)", ylabel="gap to the optimum")
  report.legend_below(figure, 2)
  return figure


def test_networks_train_with_every_method():
  tuned = runs.tune(train, {method: [method] for method in METHODS}, SEEDS)
  dtypes = ("float64", "float32")
  header = (
    "data",
    "learning rate",
    "SVRG steps",
    *(f"{d}: {m}" for d in dtypes for m in ["SVRG", "SGD"]),
  )
  lines = [
    [name, rate, f"{steps:,}"]
    + [f"{gaps()[name, m, d][-1]:.1e}" for d in dtypes for m in ("SVRG", "SGD")]
    for name, (rate, steps) in PROBLEMS.items()
  ]
  rows = [[m, *(found.spread(key, "{:.3g}") for key in COLUMNS)] for m, found in tuned.items()]
  page = report.words(
    "svrg",
    convex=report.table(header, lines),
    networks=report.table(("method", *COLUMNS), rows),
    **{"decay": DECAY, "batch": BATCH, "images": TRAIN, "epochs": EPOCHS, "rate": RATE},
    seeds=len(SEEDS),
  )
  report.write("svrg", *page, picture(), in_card=False)
  for method, outcome in tuned.items():
    assert min(outcome.values("test accuracy, %")) > 90, method

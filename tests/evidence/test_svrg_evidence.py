"""Does SVRG do what it promises? On real data, against solvers that don't know it.

``make evidence`` runs this and writes ``benchmarks/results/svrg_evidence.md`` and ``.png``.
"""

import functools
import pathlib
import time

from flax import linen as nn
import jax
import jax.numpy as jnp
from matplotlib import pyplot as plt
import numpy as np
import optax
import pytest
import scipy.optimize
from sklearn import datasets
from sklearn import linear_model
from tqdm import tqdm

import optax_boost
import optax_boost.linen

pytestmark = pytest.mark.slow
RESULTS = pathlib.Path(__file__).parent.parent.parent / "benchmarks" / "results"
BATCH = 32
DECAY = 1e-2
SEEDS = (0, 1, 2)


# Logistic regression: strongly convex, so that the optimum is known to all digits.


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
    classifier = linear_model.LogisticRegression(
      C=(2 if two else 1) / (DECAY * len(data["x"])), fit_intercept=False, tol=1e-12, max_iter=20000
    ).fit(data["x"], data["y"].argmax(1))
    weights = classifier.coef_.T
    if two:
      weights = np.concatenate([-weights / 2, weights / 2], 1)
    theirs = float(objective(jnp.asarray(weights), data))
  return float(found.fun), theirs


def solve(data, tx, rate, steps, every, full, dtype):
  """Objectives in float64 after every `every` steps of a train step under one scan."""
  with jax.enable_x64(True):
    rng = np.random.default_rng(0)
    n = len(data["x"])
    count = n // BATCH
    order = np.concatenate([rng.permutation(n)[: count * BATCH] for _ in range(steps // count + 1)])
    rows = jnp.asarray(order.reshape(-1, BATCH)[: steps // every * every].reshape(-1, every, BATCH))
    held = jax.tree.map(lambda a: jnp.asarray(a, dtype), data)
    whole = jax.tree.map(lambda a: jnp.asarray(a)[None], data)
    whole = jax.tree.map(lambda a: a.astype(dtype), whole)
    step = optax_boost.make_train_step(
      objective,
      optax.chain(tx, optax.sgd(rate)),
      full_grad_fn=functools.partial(optax_boost.full_gradient, stacked=True, batches=whole)
      if full
      else None,
    )

    @jax.jit
    def run(state, rows):
      def outer(state, rows):
        def inner(state, some):
          return step(state, jax.tree.map(lambda a: a[some], held))[0], None

        state, _ = jax.lax.scan(inner, state, rows)
        return state, objective(state.params.astype(jnp.float64), data)

      return jax.lax.scan(outer, state, rows)

    start = jnp.zeros((data["x"].shape[1], data["y"].shape[1]), dtype)
    _, values = run(step.init(start), rows)
    return np.asarray(values)


# Name, learning rate, steps.
PROBLEMS = (("breast_cancer", 0.1, 40_000), ("digits", 0.05, 60_000))


@functools.cache
def convex_runs():
  runs = {}
  for name, rate, steps in tqdm(PROBLEMS, desc="logistic regression"):
    data = problem(name)
    best, by_sklearn = optimum(data)
    period = 2 * (len(data["x"]) // BATCH)
    curves = {}
    for dtype in (jnp.float64, jnp.float32):
      svrg = optax_boost.svrg(refresh_every=period)
      label = jnp.dtype(dtype).name
      curves[f"SVRG, {label}"] = solve(data, svrg, rate, steps, period, True, dtype) - best
      # Two gradients per step and a pass over the data every two epochs make 2.5 times the work.
      plain = optax.identity()
      longer = solve(data, plain, rate, int(2.5 * steps), int(2.5 * period), False, dtype)
      curves[f"SGD, {label}"] = longer - best
    runs[name] = {
      "rate": rate,
      "steps": steps,
      "optimum": best,
      "sklearn": by_sklearn,
      "curves": curves,
    }
  return runs


@pytest.mark.parametrize("name", [p[0] for p in PROBLEMS])
def test_svrg_reaches_the_optimum_where_sgd_stalls(name):
  run = convex_runs()[name]
  curves = {key: np.abs(curve[-1]) for key, curve in run["curves"].items()}
  assert curves["SVRG, float64"] < 1e-10
  assert curves["SVRG, float32"] < 1e-6
  assert curves["SGD, float64"] > 1e-5
  assert curves["SGD, float32"] > 1e-5
  assert abs(run["sklearn"] - run["optimum"]) < 1e-10


@pytest.mark.parametrize("name", [p[0] for p in PROBLEMS])
def test_svrg_converges_linearly(name):
  curve = convex_runs()[name]["curves"]["SVRG, float64"]
  # Past the first fast directions and before rounding, the logarithm of the gap falls on a line.
  inside = (curve < 1e-3) & (curve > 1e-11)
  places = np.flatnonzero(inside)
  assert len(places) > 20
  correlation = np.corrcoef(places, np.log(curve[inside]))[0, 1]
  assert correlation < -0.99


# A convolutional network, where plain SVRG is known to do harm.


class Network(nn.Module):
  @nn.compact
  def __call__(self, x):
    x = nn.relu(nn.Conv(16, (3, 3))(x))
    x = nn.relu(nn.Conv(32, (3, 3), strides=2)(x))
    x = nn.relu(nn.Conv(32, (3, 3), strides=2)(x))
    return nn.Dense(10)(x.reshape(len(x), -1))


def classify(model, batch):
  logits = model(batch["x"])
  return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]))


TRAIN = 1500
EPOCHS = 20
METHODS = {
  "SGD": (None, EPOCHS),
  "SGD, three times the epochs": (None, 3 * EPOCHS),
  "SVRG": (1.0, EPOCHS),
  "alpha-SVRG": (optax.linear_schedule(0.75, 0.0, EPOCHS * (TRAIN // BATCH)), EPOCHS),
}


def train(coefficient, epochs, seed, rate=0.05):
  x, y = datasets.load_digits(return_X_y=True)
  order = np.random.default_rng(1).permutation(len(x))
  x = (x[order].reshape(-1, 8, 8, 1) / 16).astype(np.float32)
  y = y[order].astype(np.int32)
  per_epoch = TRAIN // BATCH
  schedule = optax.cosine_decay_schedule(rate, epochs * per_epoch)
  sgd = optax.sgd(schedule, momentum=0.9)
  tx = sgd if coefficient is None else optax.chain(optax_boost.svrg(None, coefficient), sgd)
  step = optax_boost.linen.make_train_step(classify, Network(), tx)
  state = step.init(Network().init(jax.random.key(seed), x[:1]))
  rng = np.random.default_rng(seed)
  start, ratios = time.perf_counter(), []
  full = [{"x": x[i : i + 300], "y": y[i : i + 300]} for i in range(0, TRAIN, 300)]
  for _ in range(epochs):
    if coefficient is not None:
      state = step.refresh(state, full)
    shuffled = rng.permutation(TRAIN)
    for i in range(per_epoch):
      some = shuffled[i * BATCH : (i + 1) * BATCH]
      state, metrics = step(state, {"x": x[some], "y": y[some]})
    if coefficient is not None:
      ratios.append(float(metrics["variance_ratio"]))
  seconds = time.perf_counter() - start
  logits = Network().apply({"params": state.params}, x)
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
  return {
    "train loss": float(losses[:TRAIN].mean()),
    "test loss": float(losses[TRAIN:].mean()),
    "test accuracy, %": 100 * float((logits.argmax(1) == y)[TRAIN:].mean()),
    # The last epochs' learning rate is near zero, and the snapshot near the params.
    "variance ratio, epoch 1": ratios[0] if ratios else 1.0,
    "variance ratio, largest": max(ratios, default=1.0),
    "seconds": seconds,
  }


@functools.cache
def network_runs():
  tasks = [(name, seed) for name in METHODS for seed in SEEDS]
  runs = {name: [] for name in METHODS}
  for name, seed in tqdm(tasks, desc="networks"):
    runs[name].append(train(*METHODS[name], seed))
  return runs


def test_networks_train_with_every_method():
  for name, seeds in network_runs().items():
    for run in seeds:
      assert run["test accuracy, %"] > 90, name


def test_the_results_are_written():
  convex, networks = convex_runs(), network_runs()
  lines = [
    "# SVRG: evidence",
    "",
    "Made by `make evidence`. What is asserted is in `tests/evidence/test_svrg_evidence.py`.",
    "",
    f"## Logistic regression, L2 {DECAY:g}, batches of {BATCH}, constant learning rate",
    "",
    "Gap of the objective (in float64) to the optimum that SciPy's L-BFGS-B found, after the last",
    "step; scikit-learn finds the same optimum to 1e-10. SGD makes 2.5 times as many steps: the",
    "same number of gradients of an example.",
    "",
    "| data | learning rate | SVRG steps | float64: SVRG | SGD | float32: SVRG | SGD |",
    "|---|---|---|---|---|---|---|",
  ]
  for name, run in convex.items():
    gaps = [
      f"{abs(run['curves'][f'{method}, {dtype}'][-1]):.1e}"
      for dtype in ("float64", "float32")
      for method in ("SVRG", "SGD")
    ]
    lines.append(f"| {name} | {run['rate']} | {run['steps']:,} | {' | '.join(gaps)} |")
  columns = list(networks["SGD"][0])
  lines += [
    "",
    f"## A CNN on digits, {TRAIN} images, {EPOCHS} epochs, momentum 0.9, cosine from 0.05",
    "",
    "Mean and standard deviation over three seeds. An epoch of SVRG computes three times the",
    "gradients of one of SGD: two per step and one full pass.",
    "",
    f"| method | {' | '.join(columns)} |",
    f"|{'---|' * (len(columns) + 1)}",
  ]
  for name, seeds in networks.items():
    cells = []
    for column in columns:
      values = [run[column] for run in seeds]
      cells.append(f"{np.mean(values):.3g} ± {np.std(values):.2g}")
    lines.append(f"| {name} | {' | '.join(cells)} |")
  RESULTS.mkdir(parents=True, exist_ok=True)
  (RESULTS / "svrg_evidence.md").write_text("\n".join(lines) + "\n", encoding="utf-8")

  figure, axes = plt.subplots(1, len(convex), figsize=(9, 3.5), sharey=True)
  for axis, (name, run) in zip(axes, convex.items(), strict=True):
    for label, curve in run["curves"].items():
      share = np.linspace(0, 1, len(curve) + 1)[1:]
      axis.semilogy(share, np.maximum(np.abs(curve), 1e-16), label=label)
    axis.set(title=name, xlabel="share of the run (equal work)", ylabel="gap to the optimum")
    axis.legend(fontsize=7)
  figure.tight_layout()
  figure.savefig(RESULTS / "svrg_evidence.png", dpi=110)
  plt.close(figure)

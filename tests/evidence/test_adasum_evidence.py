"""AdaSum's claim: a learning rate tuned for one replica needs no retuning for many.

``make evidence PARTS=adasum`` tunes the rate of one replica, then trains with N = 8, 32 and 128 at
equal epochs: the mean of their gradients at that rate, at sqrt(N) and at N times it, at a rate
tuned for N, and AdaSum at the rate of one replica. It needs ``mnist.npz`` in ``OPTAX_BOOST_DATA``.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
import numpy as np
import optax
import pytest

import optax_boost
from tests.evidence import common
from tests.evidence import report
from tests.evidence import runs

pytestmark = pytest.mark.slow
SEEDS = (0, 1, 2)
REPLICAS = (8, 32, 128)
PER_REPLICA = 16
EPOCHS = 2
# Of one replica; widened until the best lies inside.
RATES = {
  "SGD": (0.05, 0.1, 0.2),
  "momentum": (0.005, 0.01, 0.02),
  "Adam": (0.001, 0.002, 0.004),
}
SAME, ROOT, TIMES, TUNED = (
  "mean, same rate",
  "mean, sqrt(N) times the rate",
  "mean, N times the rate",
  "mean, rate tuned for N",
)
OURS, OURS_TUNED = "AdaSum, same rate", "AdaSum, rate tuned for N"
METHODS = (SAME, ROOT, TIMES, TUNED, OURS, OURS_TUNED)
COLOURS = {
  SAME: "#9A9A9A",
  ROOT: "#E69F00",
  TIMES: "#D55E00",
  TUNED: "#000000",
  OURS: "#0072B2",
  OURS_TUNED: "#56B4E9",
}


class Run(NamedTuple):
  """One training: the inner optimizer, how replicas are joined, their count, the peak rate."""

  optimizer: str
  adasum: bool
  replicas: int
  rate: float


@functools.cache
def mnist():
  return {part: (x.reshape(len(x), -1), y) for part, (x, y) in common.images("mnist").items()}


def init(key):
  keys = jax.random.split(key)
  return [
    {"kernel": jax.random.normal(k, (m, n)) * np.sqrt(2 / m), "bias": jnp.zeros(n)}
    for k, m, n in zip(keys, (784, 128), (128, 10), strict=True)
  ]


def logits(params, x):
  hidden = jax.nn.relu(x @ params[0]["kernel"] + params[0]["bias"])
  return hidden @ params[1]["kernel"] + params[1]["bias"]


def loss_fn(params, x, y):
  return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits(params, x), y))


def direction(optimizer):
  """The inner optimizer without its rate."""
  return {
    "SGD": optax.identity(),
    "momentum": optax.trace(0.9),
    "Adam": optax.scale_by_adam(),
  }[optimizer]


def joined(adasum, stacked):
  """The replicas' sum of either kind, and how many times as long as their mean it is."""
  mean = jax.tree.map(lambda x: jnp.mean(x, 0), stacked)
  if not adasum:
    return mean, 1.0
  result = optax_boost.adasum_reduce(stacked)
  return result, optax.tree.norm(result) / optax.tree.norm(mean)


@functools.partial(jax.jit, static_argnames=("optimizer", "adasum", "replicas"))
def trained(key, rate, x, y, optimizer, adasum, replicas):
  """Params after `EPOCHS`, and the steps' lengths over those of the mean.

  The rate rises over the first tenth and falls linearly to zero. AdaSum joins gradients under SGD
  and, as Horovod does, the steps of momentum and Adam, whose states then stay with the replicas.
  """
  tx = direction(optimizer)
  steps = len(x) // (PER_REPLICA * replicas)
  total = EPOCHS * steps
  params = init(key)
  deltas = adasum and optimizer != "SGD"
  state = tx.init(params)
  if deltas:
    state = jax.tree.map(lambda s: jnp.broadcast_to(s, (replicas, *s.shape)), state)

  def step(carry, rows):
    params, state, count = carry
    done = (count + 1) / total
    now = rate * jnp.minimum(done / 0.1, (1 - done) / 0.9)
    if not adasum:
      grads = jax.grad(loss_fn)(params, x[rows.ravel()], y[rows.ravel()])
      updates, state = tx.update(grads, state)
      longer = 1.0
    else:
      updates = jax.vmap(jax.grad(loss_fn), in_axes=(None, 0, 0))(params, x[rows], y[rows])
      if deltas:
        updates, state = jax.vmap(tx.update)(updates, state)
      updates, longer = joined(True, updates)
    params = jax.tree.map(lambda p, u: p - now * u, params, updates)
    return (params, state, count + 1), longer

  def epoch(carry, key):
    order = jax.random.permutation(key, len(x))[: steps * replicas * PER_REPLICA]
    return jax.lax.scan(step, carry, order.reshape(steps, replicas, PER_REPLICA))

  keys = jax.random.split(jax.random.fold_in(key, 1), EPOCHS)
  (params, _, _), longer = jax.lax.scan(epoch, (params, state, 0), keys)
  return params, jnp.exp(jnp.mean(jnp.log(longer)))


def train(run, seed):
  """Accuracies in %, the last training loss, the geometric mean of the steps' lengths."""
  parts = {part: tuple(map(jnp.asarray, pair)) for part, pair in mnist().items()}
  params, longer = trained(
    jax.random.key(seed), run.rate, *parts["train"], run.optimizer, run.adasum, run.replicas
  )
  found = {"train loss": float(loss_fn(params, *parts["train"])), "longer": float(longer)}
  for part in ("validation", "test"):
    x, y = parts[part]
    found[part] = 100 * float(jnp.mean(jnp.argmax(logits(params, x), -1) == y))
  return found


# Least squares: the eigenvalues fall as 1 / i, labels have noise, the loss is its expectation.
FEATURES, NOISE, MOST_STEPS, GOAL = 256, 0.1, 1000, 0.05
LEAST_SQUARES_RATES = (0.8, 1.6, 3.2)


@functools.partial(jax.jit, static_argnames=("adasum", "replicas"))
def losses_of(key, rate, adasum, replicas):
  """The excess loss over its start's after each step at a constant rate."""
  eigenvalues = 1 / jnp.arange(1, FEATURES + 1)
  start, stream = jax.random.split(key)
  optimum = jax.random.normal(start, (FEATURES,))

  def excess(w):
    return jnp.sum(eigenvalues * (w - optimum) ** 2)

  def gradient(w, key):
    of_x, of_noise = jax.random.split(key)
    x = jax.random.normal(of_x, (PER_REPLICA, FEATURES)) * jnp.sqrt(eigenvalues)
    noise = NOISE * jax.random.normal(of_noise, (PER_REPLICA,))
    return (x @ (w - optimum) - noise) @ x / PER_REPLICA

  def step(w, key):
    grads = jax.vmap(gradient, in_axes=(None, 0))(w, jax.random.split(key, replicas))
    w = w - rate * joined(adasum, grads)[0]
    return w, excess(w)

  zero = jnp.zeros(FEATURES)
  _, losses = jax.lax.scan(step, zero, jax.random.split(stream, MOST_STEPS))
  return losses / excess(zero)


def solve(run, seed):
  """The steps until the excess loss is GOAL of its start, NaN if more than MOST_STEPS."""
  below = np.asarray(losses_of(jax.random.key(seed), run.rate, run.adasum, run.replicas)) < GOAL
  steps = float(np.argmax(below) + 1) if below.any() else np.nan
  return {"validation": -steps, "steps": steps}


def contenders(optimizer, rate, tuned=True):
  """The grids of all methods for each count of replicas, from the rate of one replica."""
  grids = {}
  for n in REPLICAS:

    def mean(power, n=n):
      return Run(optimizer, False, n, rate * n**power)

    grids |= {(n, SAME): [mean(0)], (n, ROOT): [mean(0.5)], (n, TIMES): [mean(1)]}
    grids[n, OURS] = [Run(optimizer, True, n, rate)]
    if tuned:
      grids[n, TUNED] = [mean(power) for power in (0, 0.25, 0.5, 0.75, 1)]
      factors = (0.5, 1, 2, 4)
      grids[n, OURS_TUNED] = [Run(optimizer, True, n, rate * factor) for factor in factors]
  return grids


def tuned_inside(train, grids):
  """As `runs.tune`; grids whose best rate is the first or last go on, in the same ratio."""
  while True:
    outcome = runs.tune(train, grids, seeds=())
    if not any(tuned.at_edge for tuned in outcome.values()):
      return runs.tune(train, grids, SEEDS)
    for key, tuned in outcome.items():
      grid = grids[key]
      ratio = grid[-1].rate / grid[-2].rate if len(grid) > 1 else 1.0
      if tuned.at_edge and tuned.setting == grid[0]:
        grids[key] = [grid[0]._replace(rate=grid[0].rate / ratio), *grid]
      elif tuned.at_edge:
        grids[key] = [*grid, grid[-1]._replace(rate=grid[-1].rate * ratio)]


def found_by(train, optimizer, rates, tuned=True):
  """The outcome of one replica under ``(1, SAME)``, and of all methods by ``(N, method)``."""
  alone = tuned_inside(train, {(1, SAME): [Run(optimizer, False, 1, rate) for rate in rates]})
  rate = alone[1, SAME].setting.rate
  return alone | tuned_inside(train, contenders(optimizer, rate, tuned))


def values(tuned, key):
  return [result[key] for result in tuned.results]


def table_of(outcome, key, form):
  """Rows of methods, columns of counts of replicas; the rate where it was tuned."""
  alone = outcome[1, SAME]
  single = report.spread(values(alone, key), form)
  rows = []
  for method in METHODS:
    if (REPLICAS[0], method) not in outcome:
      continue
    cells = []
    for n in REPLICAS:
      tuned = outcome[n, method]
      got = values(tuned, key)
      cell = report.spread(got, form) if np.isfinite(got).all() else "not reached"
      cells.append(f"{cell} ({tuned.setting.rate / alone.setting.rate:.3g})")
    rows.append([method, *cells])
  header = [f"1 replica: {single}, rate {alone.setting.rate:g}", *(f"N = {n}" for n in REPLICAS)]
  return report.table(header, rows)


def drawn(networks, quadratic):
  """A panel for each inner optimizer, and one for least squares."""
  shown = [*networks.items(), ("least squares", quadratic)]
  figure = Figure(figsize=(3.4 * len(shown), 3.9), layout="constrained")
  panels = figure.subplots(1, len(shown))
  for axes, (name, outcome) in zip(panels, shown, strict=True):
    key = "steps" if name == "least squares" else "test"
    for method in METHODS[:-1]:
      if (REPLICAS[0], method) not in outcome:
        continue
      points = [outcome[n, method if n > 1 else SAME] for n in (1, *REPLICAS)]
      y = np.array([np.mean(values(point, key)) for point in points])
      error = [np.std(values(point, key), ddof=1) for point in points]
      axes.errorbar(
        (1, *REPLICAS), y, error, marker="o", markersize=4, color=COLOURS[method], label=method
      )
    axes.set_xscale("log", base=2)
    axes.set_xticks((1, *REPLICAS), map(str, (1, *REPLICAS)))
    axes.set_xlabel("replicas")
    if key == "test":
      axes.set_ylim(86, 99)
      axes.set_title(f"{name}: test accuracy, %", loc="left", fontsize=10)
    else:
      axes.set_yscale("log")
      axes.yaxis.set_major_formatter("{x:g}")
      axes.yaxis.set_minor_formatter(NullFormatter())
      axes.set_title(f"{name}: steps", loc="left", fontsize=10)
    axes.grid(axis="y", color="#E5E5E5")
    axes.spines[["top", "right"]].set_visible(False)
  handles, labels = panels[0].get_legend_handles_labels()
  figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
  return figure


def test_adasum_at_the_rate_of_one_replica():
  common.need("mnist")
  networks = {
    name: found_by(train, name, rates, tuned=name == "SGD") for name, rates in RATES.items()
  }
  quadratic = found_by(solve, "SGD", LEAST_SQUARES_RATES)
  body = ""
  for name, outcome in networks.items():
    joins = "gradients" if name == "SGD" else "the replicas' steps"
    body += f"\n## MNIST, {name}: test accuracy, %; AdaSum of {joins}\n\n"
    body += table_of(outcome, "test", "{:.2f}")
    longer = ", ".join(
      f"{np.mean(values(outcome[n, OURS], 'longer')):.2g} at N = {n}" for n in REPLICAS
    )
    body += f"\nAdaSum's result over the mean's length, geometric mean over the steps: {longer}.\n"
  body += f"\n## Least squares: steps to {GOAL:g} of the excess loss\n\n"
  body += table_of(quadratic, "steps", "{:.0f}")
  tried = {**networks, "least squares": quadratic}
  about = (
    f"784-128-10 with ReLU on MNIST, {PER_REPLICA} images per replica and step, {EPOCHS} epochs of"
    f" 50,000 images whatever the count of replicas; the rate rises over the first tenth of the"
    f" steps and falls linearly to zero. In brackets the rate over that of one replica. That one"
    f" was chosen by the accuracy on 10,000 other images with another seed, of rates that differ by"
    f" factors of two; the mean's tuned rates of some that differ by the fourth root of N, AdaSum's"
    f" by two, more where the best was the first or last. Mean and standard deviation"
    f" over {len(SEEDS)} seeds. Replicas are simulated on one device by"
    f" `optax_boost.adasum_reduce`. Least squares: {FEATURES} features, the i-th of variance 1/i,"
    f" labels with noise of deviation {NOISE:g}, a constant rate, chosen by the steps."
  )
  data = {
    name: [
      {"replicas": n, "method": method, **tuned._asdict()} for (n, method), tuned in outcome.items()
    ]
    for name, outcome in tried.items()
  }
  report.write("adasum", "AdaSum: evidence", about, body, data, drawn(networks, quadratic))
  for name, outcome in networks.items():
    for key, tuned in outcome.items():
      if key[1] in (SAME, TUNED) or (key[1] == OURS and key[0] == REPLICAS[0]):
        assert min(values(tuned, "test")) > 80, (name, key)

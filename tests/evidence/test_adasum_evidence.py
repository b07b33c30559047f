"""AdaSum's claim: a learning rate tuned for one replica needs no retuning for many.

``make evidence PARTS=adasum`` tunes the rate of one replica, then trains with N = 8, 32 and 128 at
equal epochs: the mean of their gradients at that rate, at sqrt(N) and at N times it, at a rate
tuned for N, and AdaSum at the rate of one replica. It needs ``mnist.npz`` in ``OPTAX_BOOST_DATA``.
"""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from matplotlib.ticker import NullFormatter
import numpy as np
import optax
import pytest

import optax_boost
from tests.evidence import common, report, runs

pytestmark = pytest.mark.slow
SEEDS = (0, 1, 2)
OPTIMIZERS = {
  "SGD": optax.identity(),
  "momentum": optax.trace(0.9),
  "Adam": optax.scale_by_adam(),
}
SAME, ROOT, TIMES, TUNED = (
  "mean, same rate",
  "mean, sqrt(N) times the rate",
  "mean, N times the rate",
  "mean, rate tuned for N",
)
OURS, OURS_TUNED = "AdaSum, same rate", "AdaSum, rate tuned for N"
METHODS = {
  SAME: report.LIGHT,
  ROOT: report.YELLOW,
  TIMES: report.ORANGE,
  TUNED: "black",
  OURS: report.BLUE,
  OURS_TUNED: report.SKY,
}


class Task(NamedTuple):
  """A training.

  Attributes:
    data: as in `common.images`; "" for least squares.
    optimizer: of `OPTIMIZERS`. AdaSum joins gradients under SGD and, as Horovod does, the steps of
      momentum and Adam, whose states then stay with the replicas.
    rates: of one replica; widened until the best lies inside.
    widths: of a dense network with ReLU.
    per_replica: examples in a step.
    epochs: whatever the count of replicas.
    replicas: the counts that are compared with one.
    tuned: whether rates are tuned for each count.
  """

  data: str
  optimizer: str
  rates: tuple[float, ...]
  widths: tuple[int, ...] = (784, 128, 10)
  per_replica: int = 16
  epochs: int = 2
  replicas: tuple[int, ...] = (8, 32, 128)
  tuned: bool = False


LEAST_SQUARES = "least squares"
TASKS = {
  "MNIST, SGD": Task("mnist", "SGD", (0.05, 0.1, 0.2), tuned=True),
  "MNIST, momentum": Task("mnist", "momentum", (0.005, 0.01, 0.02)),
  "MNIST, Adam": Task("mnist", "Adam", (0.001, 0.002, 0.004)),
  "digits, momentum": Task(
    "digits", "momentum", (0.025, 0.05, 0.1), (64, 128, 64, 10), 32, 12, (8,), tuned=True
  ),
  LEAST_SQUARES: Task("", "SGD", (0.8, 1.6, 3.2), tuned=True),
}


class Run(NamedTuple):
  """One training: of what, how replicas are joined, their count, the peak rate."""

  task: str
  adasum: bool
  replicas: int
  rate: float


def init(key, widths):
  keys = jax.random.split(key, len(widths) - 1)
  return [
    {"kernel": jax.random.normal(key, shape) * np.sqrt(2 / shape[0]), "bias": jnp.zeros(shape[1])}
    for key, shape in zip(keys, itertools.pairwise(widths), strict=True)
  ]


def logits(params, x):
  for layer in params[:-1]:
    x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
  return x @ params[-1]["kernel"] + params[-1]["bias"]


def loss_fn(params, x, y):
  return common.cross_entropy(logits(params, x), y)


def joined(adasum, stacked):
  """The replicas' sum of either kind, and how many times as long as their mean it is."""
  mean = jax.tree.map(lambda x: jnp.mean(x, 0), stacked)
  if not adasum:
    return mean, 1.0
  result = optax_boost.adasum_reduce(stacked)
  return result, optax.tree.norm(result) / optax.tree.norm(mean)


@functools.partial(jax.jit, static_argnames="run")
def trained(key, rate, x, y, run):
  """Params after the epochs, and the geometric mean of the steps' lengths over the mean's.

  The rate rises over the first tenth and falls linearly to zero.
  """
  task, replicas = TASKS[run.task], run.replicas
  tx = OPTIMIZERS[task.optimizer]
  steps = len(x) // (task.per_replica * replicas)
  total = task.epochs * steps
  params = init(key, task.widths)
  of_steps = run.adasum and task.optimizer != "SGD"
  state = tx.init(params)
  if of_steps:
    state = jax.tree.map(lambda s: jnp.broadcast_to(s, (replicas, *s.shape)), state)

  def step(carry, rows):
    params, state, count = carry
    done = (count + 1) / total
    now = rate * jnp.minimum(done / 0.1, (1 - done) / 0.9)
    longer = 1.0
    if run.adasum:
      updates = jax.vmap(jax.grad(loss_fn), in_axes=(None, 0, 0))(params, x[rows], y[rows])
      if of_steps:
        updates, state = jax.vmap(tx.update)(updates, state)
      updates, longer = joined(True, updates)
    else:
      updates = jax.grad(loss_fn)(params, x[rows.ravel()], y[rows.ravel()])
    if not of_steps:
      updates, state = tx.update(updates, state)
    params = jax.tree.map(lambda p, u: p - now * u, params, updates)
    return (params, state, count + 1), longer

  def epoch(carry, key):
    order = jax.random.permutation(key, len(x))[: steps * replicas * task.per_replica]
    return jax.lax.scan(step, carry, order.reshape(steps, replicas, task.per_replica))

  keys = jax.random.split(jax.random.fold_in(key, 1), task.epochs)
  (params, _, _), longer = jax.lax.scan(epoch, (params, state, 0), keys)
  return params, jnp.exp(jnp.mean(jnp.log(longer)))


# Least squares: the eigenvalues fall as 1 / i, labels have noise, the loss is its expectation.
FEATURES, NOISE, MOST_STEPS, GOAL = 256, 0.1, 1000, 0.05


@functools.partial(jax.jit, static_argnames=("adasum", "replicas"))
def excess_losses(key, rate, adasum, replicas):
  """The excess loss over its start's after each step at a constant rate."""
  per_replica = TASKS[LEAST_SQUARES].per_replica
  eigenvalues = 1 / jnp.arange(1, FEATURES + 1)
  start, stream = jax.random.split(key)
  optimum = jax.random.normal(start, (FEATURES,))

  def excess(w):
    return jnp.sum(eigenvalues * (w - optimum) ** 2)

  def gradient(w, key):
    x_key, noise_key = jax.random.split(key)
    x = jax.random.normal(x_key, (per_replica, FEATURES)) * jnp.sqrt(eigenvalues)
    noise = NOISE * jax.random.normal(noise_key, (per_replica,))
    return (x @ (w - optimum) - noise) @ x / per_replica

  def step(w, key):
    grads = jax.vmap(gradient, in_axes=(None, 0))(w, jax.random.split(key, replicas))
    w = w - rate * joined(adasum, grads)[0]
    return w, excess(w)

  zero = jnp.zeros(FEATURES)
  _, losses = jax.lax.scan(step, zero, jax.random.split(stream, MOST_STEPS))
  return losses / excess(zero)


def train(run, seed):
  """Accuracies in %; of least squares, the steps to GOAL of the excess loss, NaN if too many."""
  key = jax.random.key(seed)
  if run.task == LEAST_SQUARES:
    below = np.asarray(excess_losses(key, run.rate, run.adasum, run.replicas)) < GOAL
    steps = float(np.argmax(below) + 1) if below.any() else np.nan
    return {"validation": -steps, "score": steps}
  data = common.images(TASKS[run.task].data, unit=TASKS[run.task].data == "digits")
  parts = {part: (x.reshape(len(x), -1), y) for part, (x, y) in data.items()}
  params, longer = trained(key, run.rate, *parts["train"], run._replace(rate=0.0))
  predict = functools.partial(logits, params)
  validation, test = (
    common.scores(predict, *parts[part])["accuracy"] for part in ("validation", "test")
  )
  return {"validation": validation, "score": test, "longer": float(longer)}


def tuned_inside(grids):
  """As `runs.tune`; grids whose best rate is the first or last go on, in the same ratio."""
  while True:
    outcome = runs.tune(train, grids, seeds=())
    if not any(tuned.at_edge for tuned in outcome.values()):
      return runs.tune(train, grids, SEEDS)
    for key, tuned in outcome.items():
      grid = grids[key]
      if tuned.at_edge:
        ratio = grid[-1].rate / grid[-2].rate
        lower = grid[0]._replace(rate=grid[0].rate / ratio)
        upper = grid[-1]._replace(rate=grid[-1].rate * ratio)
        grids[key] = [lower, *grid] if tuned.setting == grid[0] else [*grid, upper]


def outcome_of(name):
  """The outcome of one replica under ``(1, SAME)``, and of all methods by ``(N, method)``."""
  task = TASKS[name]
  alone = tuned_inside({(1, SAME): [Run(name, False, 1, rate) for rate in task.rates]})
  rate = alone[1, SAME].setting.rate
  grids = {}
  for n in task.replicas:
    factors = {SAME: (1,), ROOT: (n**0.5,), TIMES: (n,), OURS: (1,)}
    if task.tuned:
      quarters = tuple(n**power for power in (0, 0.25, 0.5, 0.75, 1))
      factors |= {TUNED: quarters, OURS_TUNED: (0.5, 1, 2, 4)}
    for method, several in factors.items():
      adasum = method in (OURS, OURS_TUNED)
      grids[n, method] = [Run(name, adasum, n, rate * factor) for factor in several]
  return alone | tuned_inside(grids)


def section(name, outcome):
  """Rows of methods, columns of counts of replicas; in brackets the rate over one replica's."""
  task, alone = TASKS[name], outcome[1, SAME]
  steps = name == LEAST_SQUARES
  form = "{:.0f}" if steps else "{:.2f}"
  rows = []
  for method in METHODS:
    cells = []
    for tuned in [outcome[n, method] for n in task.replicas if (n, method) in outcome]:
      reached = np.isfinite(tuned.values("score")).all()
      cell = tuned.spread("score", form) if reached else "not reached"
      cells.append(f"{cell} ({tuned.setting.rate / alone.setting.rate:.3g})")
    rows += [[method, *cells]] if cells else []
  single = f"1 replica: {alone.spread('score', form)}, rate {alone.setting.rate:g}"
  table = report.table([single, *(f"N = {n}" for n in task.replicas)], rows)
  if steps:
    return f"\n## Least squares: steps to {GOAL:g} of the excess loss\n\n{table}"
  joins = "gradients" if task.optimizer == "SGD" else "the replicas' steps"
  longer = [f"{np.mean(outcome[n, OURS].values('longer')):.2g} at N = {n}" for n in task.replicas]
  return (
    f"\n## {name}: test accuracy, %; AdaSum of {joins}\n\n{table}\nAdaSum's result over the mean's"
    f" length, geometric mean over the steps: {', '.join(longer)}.\n"
  )


def picture(outcomes):
  """A panel for each task with several counts of replicas."""
  shown = {name: found for name, found in outcomes.items() if len(TASKS[name].replicas) > 1}
  figure, panels = report.panels([f"{name}: test accuracy, %" for name in shown], 3.4, 3.9)
  for axes, (name, outcome) in zip(panels, shown.items(), strict=True):
    counts = (1, *TASKS[name].replicas)
    for method, colour in METHODS.items():
      if method != OURS_TUNED and (counts[-1], method) in outcome:
        scores = [outcome[n, method if n > 1 else SAME].values("score") for n in counts]
        report.points(axes, counts, scores, method, color=colour, marker="o", markersize=4)
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, map(str, counts))
    axes.set(xlabel="replicas")
    if name == LEAST_SQUARES:
      axes.set_title("least squares: steps", loc="left", fontsize=10)
      axes.set_yscale("log")
      axes.yaxis.set_major_formatter("{x:g}")
      axes.yaxis.set_minor_formatter(NullFormatter())
    else:
      axes.set_ylim(86, 99)
  report.legend_below(figure, 3)
  return figure


def test_adasum_at_the_rate_of_one_replica():
  common.need("mnist")
  outcomes = {name: outcome_of(name) for name in TASKS}
  sections = "".join(section(name, outcome) for name, outcome in outcomes.items())
  numbers = {"seeds": len(SEEDS), "features": FEATURES, "noise": NOISE}
  page = report.words(
    "adasum",
    sections=sections,
    **numbers,
  )
  report.write("adasum", *page, picture(outcomes))
  for name, outcome in outcomes.items():
    for (n, method), tuned in outcome.items():
      holds = method in (SAME, TUNED) or (method == OURS and n == TASKS[name].replicas[0])
      if holds and name != LEAST_SQUARES:
        assert min(tuned.values("score")) > 80, (name, n, method)

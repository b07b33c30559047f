"""Is DimReduce worth its steps? On images, against a learning-rate drop and an average.

``make evidence PARTS=dim_reduce`` runs this on digits and on ``mnist.npz`` and ``cifar10*.npz`` in
the folder of the environment variable ``OPTAX_BOOST_DATA``. It writes
``benchmarks/results/dim_reduce_evidence.md`` and its picture.
"""

import functools
import itertools
import time
from typing import NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
import optax_boost.linen
from tests.evidence import common, report, runs

pytestmark = pytest.mark.slow
SEEDS = (0, 1, 2)
BATCH = 64
SNAPSHOTS = 48
# Points at which a phase is looked at.
LOOKS = 8


class Task(NamedTuple):
  """The network's widths, the epochs of the whole schedule, and what every method must reach."""

  widths: tuple[int, ...]
  epochs: int
  least: float
  batches: tuple[int, ...] = (64, 512)
  components: tuple[int, ...] = (40,)


TASKS = {
  "digits": Task((16, 32, 32), 12, 94, (64, 256, 512), (20, 40)),
  "mnist": Task((8, 16, 16), 8, 94),
  "cifar10": Task((16, 32, 32), 8, 45),
}
RATES = (0.02, 0.05, 0.1)
BEFORE, SGD, AVERAGE, OURS = (
  *("after the first phase", "SGD, rate dropped twice"),
  *("average of the snapshots", "DimReduce"),
)
COLOURS = {SGD: report.LIGHT, AVERAGE: report.YELLOW, OURS: report.BLUE}


class Setting(NamedTuple):
  """The rate of SGD, and a setting of DimReduce.

  Attributes:
    task: of `TASKS`.
    rate: of SGD.
    batch: of DimReduce; 0 for SGD and the average instead.
    k: components of the subspace.
    alpha: of `optax_boost.dim_reduce`.
    max_search: of `optax_boost.dim_reduce`.
    late: whether the snapshots are of the second half of phase one.
  """

  task: str
  rate: float
  batch: int = 0
  k: int = 0
  alpha: float = 0.0
  max_search: int = 0
  late: bool = True


def grid(task, rate):
  """Settings of DimReduce; one thing is changed at a time, but for what depends on the batch."""
  settings = []
  for batch, k in itertools.product(TASKS[task].batches, TASKS[task].components):
    base = Setting(task, rate, batch, k, 1e-3, 8)
    settings += [base, base._replace(alpha=0.0), base._replace(alpha=1e-2)]
    settings += [base._replace(max_search=2), base._replace(late=False)]
  return settings


class Network(nn.Module):
  """Three convolutions, no normalization: an average of its params needs no new statistics."""

  widths: tuple[int, ...]

  @nn.compact
  def __call__(self, x):
    for layer, width in enumerate(self.widths):
      strides = 1 if layer == 0 and x.shape[1] < 16 else 2
      x = nn.relu(nn.Conv(width, (3, 3), strides=strides)(x))
    return nn.Dense(10)(x.reshape(len(x), -1))


class Phase:
  """Trains one network on one data set, and looks at it."""

  def __init__(self, setting, seed):
    self.network, self.epochs = Network(TASKS[setting.task].widths), TASKS[setting.task].epochs // 2
    data, held_out = (
      common.images(setting.task),
      "validation" if seed == runs.TUNING_SEED else "test",
    )
    self.train = tuple(part[:8000] for part in data["train"])
    self.held_out = tuple(part[:4000] for part in data[held_out])
    self.predict = jax.jit(lambda params, x: self.network.apply({"params": params}, x))

  def make_step(self, tx):
    variables = jax.eval_shape(self.network.init, jax.random.key(0), self.train[0][:1])
    loss, _, _ = optax_boost.linen.split_loss(common.classify, self.network, variables)
    return optax_boost.make_train_step(loss, tx)

  def look(self, params, **more):
    predict = functools.partial(self.predict, params)
    train, test = (common.scores(predict, *part) for part in (self.train, self.held_out))
    scores = {"train loss": train["loss"], "test loss": test["loss"], "accuracy": test["accuracy"]}
    return more | scores

  def run(self, step, state, size, seed):
    """Trains until the phase's gradients are spent; a trial of a search is a third of one."""
    batches = common.batches(*self.train, size, np.random.default_rng(seed))
    # Compiled, on a copy, before the clock runs.
    sample = next(common.batches(*self.train, size, np.random.default_rng(0)))
    jax.block_until_ready(step(jax.tree.map(jnp.array, state), sample))
    points, cost, seconds, trials, rejected = [], 0.0, 0.0, [], []
    for goal in np.linspace(0, self.epochs, LOOKS + 1)[1:]:
      start = time.perf_counter()
      while cost < goal - 1e-9:
        state, metrics = step(state, next(batches))
        trials.append(int(metrics.get("line_search_steps", 0)))
        rejected.append(float(metrics.get("accepted_rho", 1)) == 0)
        cost += (1 + trials[-1] / 3) * size / len(self.train[1])
      jax.block_until_ready(state)
      seconds += time.perf_counter() - start
      points.append(self.look(state.params, epochs=cost, seconds=seconds))
    facts = {"steps": len(trials), "trials per step": float(np.mean(trials))}
    return state, points, facts | {"rejected, %": 100 * float(np.mean(rejected))}


def train(setting, seed):
  """The points of the first phase and of the second one by each method."""
  phase = Phase(setting, seed)
  steps = phase.epochs * (len(phase.train[1]) // BATCH)
  drops = {steps: 0.1, steps + steps // 2: 0.1}
  sgd = optax.sgd(optax.piecewise_constant_schedule(setting.rate, drops), momentum=0.9)
  every = steps // (2 * SNAPSHOTS)
  record = optax_boost.record_trajectory(every=every, capacity=2 * SNAPSHOTS)
  step = phase.make_step(optax.chain(sgd, record))
  params = phase.network.init(jax.random.key(seed), phase.train[0][:1])["params"]
  state = step.init(params, {})
  state, first, _ = phase.run(step, state, BATCH, seed)
  kept = optax_boost.snapshots(state.opt_state)
  kept = jax.tree.map(lambda x: x[-SNAPSHOTS:] if setting.late else x[::2], kept)
  found = {BEFORE: first}
  if not setting.batch:
    average = jax.tree.map(lambda x: jnp.mean(x, 0), kept)
    found[AVERAGE] = [phase.look(average, epochs=0.0, seconds=0.0)]
    _, found[SGD], facts = phase.run(step, state, BATCH, 100 + seed)
    facts["params"] = sum(leaf.size for leaf in jax.tree.leaves(average))
  else:
    subspace = optax_boost.fit_subspace(kept, setting.k)
    tx = optax_boost.dim_reduce(subspace, alpha=setting.alpha, max_search=setting.max_search)
    step = phase.make_step(tx)
    start = step.init(state.params, {})
    _, found[OURS], facts = phase.run(step, start, setting.batch, 100 + seed)
    facts["variance explained, %"] = 100 * float(subspace.explained_variance_ratio.sum())
  last = found[OURS if setting.batch else SGD][-1]
  return {"validation": -last["test loss"], "points": found, "facts": facts}


@functools.cache
def results(task):
  """SGD at its best rate, and DimReduce's best setting at that rate."""
  sgd = runs.tune(train, {SGD: [Setting(task, rate) for rate in RATES]}, SEEDS)[SGD]
  return sgd, runs.tune(train, {OURS: grid(task, sgd.setting.rate)}, SEEDS)[OURS]


def points(task):
  """By method, the points of all seeds."""
  sgd, ours = (tuned.values("points") for tuned in results(task))
  methods = {method: [found[method] for found in sgd] for method in (BEFORE, SGD, AVERAGE)}
  return methods | {OURS: [found[OURS] for found in ours]}


def section(task):
  sgd, ours = results(task)
  s, half = ours.setting, TASKS[task].epochs // 2
  forms = {"train loss": "{:.3g}", "test loss": "{:.3g}", "accuracy": "{:.2f}", "seconds": "{:.3g}"}
  rows = [
    [m, *(report.spread([run[-1][key] for run in seeds], form) for key, form in forms.items())]
    for m, seeds in points(task).items()
  ]
  facts = [
    f"{key} {report.spread([found[key] for found in ours.values('facts')], '{:.4g}')}"
    for key in ours.values("facts")[0]
  ]
  when = "the second half" if s.late else "all"
  tried = [[*map(str, setting[2:]), f"{-value:.4f}"] for setting, value in ours.tried]
  rates = ", ".join(f"{setting.rate:g}: {-value:.4f}" for setting, value in sgd.tried)
  return (
    f"\n## {task}: {sgd.values('facts')[0]['params']:,} params\n\n{half} epochs of SGD in batches"
    f" of {BATCH} at {s.rate:g}, momentum 0.9; then {half} more by each method. DimReduce:"
    f" k = {s.k}, alpha {s.alpha:g}, at most {s.max_search} trials, batches of {s.batch}, subspace"
    f" of {SNAPSHOTS} snapshots over {when} of the first phase.\n\n"
    + report.table(["method", "training loss", "test loss", "test accuracy, %", "seconds"], rows)
    + f"\nDimReduce: {', '.join(facts)}.\n\nValidation losses: SGD by rate {rates}.\n\n"
    + report.table([*Setting._fields[2:], "validation loss"], tried)
  )


def picture():
  figure, panels = report.panels([f"{task}: test loss" for task in TASKS], 4, 3.6)
  for axes, task in zip(panels, TASKS, strict=True):
    found = points(task)
    for method, colour in COLOURS.items():
      losses = [[point["test loss"] for point in run] for run in found[method]]
      x = TASKS[task].epochs // 2 + np.mean(
        [[p["epochs"] for p in run] for run in found[method]], 0
      )
      if method == AVERAGE:
        axes.axhline(np.mean(losses), color=colour, linestyle=":", label=method)
      else:
        report.curve(axes, x, losses, method, color=colour, marker=".")
    axes.set(xlabel="epochs of gradients")
    axes.legend(frameon=False, fontsize=9)
  return figure


def test_every_method_trains():
  common.need(*TASKS)
  sections = "".join(map(section, TASKS))
  page = report.words(
    "dim_reduce",
    sections=sections,
    seeds=len(SEEDS),
  )
  report.write("dim_reduce", *page, picture())
  for task in TASKS:
    for method, seeds in points(task).items():
      if method != BEFORE:
        assert min(run[-1]["accuracy"] for run in seeds) > TASKS[task].least, (task, method)
    batch, size = results(task)[1].setting.batch, len(Phase(Setting(task, 0.1), 0).train[1])
    # As many gradients as SGD, but for the last step.
    for run in points(task)[OURS]:
      assert 0 <= run[-1]["epochs"] - TASKS[task].epochs // 2 < 4 * batch / size

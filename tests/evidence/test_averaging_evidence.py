"""MindSpore's claim for DimReduce in MindSpore's form, against averages of the same snapshots.

A training is cut at 70 of 90 units; SGD, a cool-down or DimReduce goes on for two units, or the
snapshots are averaged, which takes none. ``make evidence PARTS=averaging`` writes
``benchmarks/results/averaging_evidence.md`` and its picture.
"""

import functools
import hashlib
import inspect
import pickle
import sys
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
BATCH, UNIT = 64, 20  # steps in a unit
CUT, MORE, WHOLE = 70, 2, 90  # units
# As in MindSpore's tutorial: two snapshots in a unit, those of the first units left out.
SNAPSHOTS, EVERY = 80, UNIT // 2
WINDOWS = (5, 10, 20, 40)
RATES = (0.1, 0.3, 0.9)
# Batches, drawn from the training images, for the statistics of BatchNorms.
STATISTICS = 40

AT_CUT, GOES_ON, COOL_DOWN = "at the cut", "SGD goes on", "cool-down"
FULL, MINDSPORE, OURS = "the whole schedule", "DimReduce, MindSpore's settings", "DimReduce, tuned"
COLOURS = {"average": report.BLUE, "DimReduce": report.ORANGE}


class Second(NamedTuple):
  """A second phase of DimReduce."""

  rate: float  # SGD's before it
  components: int
  batch: int
  alpha: float
  max_search: int | str


class Block(nn.Module):
  """Two convolutions and a shortcut."""

  width: int
  stride: int

  @nn.compact
  def __call__(self, x, train):
    def conv(x, stride, size=3):
      x = nn.Conv(self.width, (size, size), strides=stride, use_bias=False)(x)
      return nn.BatchNorm(not train, momentum=0.9)(x)

    y = conv(nn.relu(conv(x, self.stride)), 1)
    return nn.relu(y + (x if x.shape == y.shape else conv(x, self.stride, 1)))


class ResNet(nn.Module):
  """ResNet-8, half as wide as usual."""

  @nn.compact
  def __call__(self, x, train=False):
    x = nn.Conv(8, (3, 3), use_bias=False)(x)
    x = nn.relu(nn.BatchNorm(not train, momentum=0.9)(x))
    for stage, width in enumerate((8, 16, 32)):
      x = Block(width, 1 + (stage > 0))(x, train)
    return nn.Dense(10)(jnp.mean(x, (1, 2)))


NETWORK = ResNet()


def loss_fn(model, batch):
  return common.cross_entropy(model(batch["x"], train=True), batch["y"])


def data():
  return common.images("cifar10", halved=True)


def batches(size, seed):
  return common.batches(*data()["train"], size, np.random.default_rng(seed))


def make_step(tx):
  variables = jax.eval_shape(NETWORK.init, jax.random.key(0), data()["train"][0][:1])
  loss, _, _ = optax_boost.linen.split_loss(loss_fn, NETWORK, variables)
  return optax_boost.make_train_step(loss, tx)


@functools.cache
def sgd_step():
  """One program for all rates."""
  sgd = optax.inject_hyperparams(optax.sgd)(0.0, momentum=0.9)
  tx = optax.chain(optax.add_decayed_weights(5e-4), sgd)
  recording = optax.chain(tx, optax_boost.record_trajectory(every=EVERY, capacity=SNAPSHOTS))
  return make_step(recording)


def go_on(state, rates, some):
  """SGD with a rate for each step."""
  for rate in rates:
    rate = jnp.asarray(rate, jnp.float32)
    state = state._replace(opt_state=optax.tree.set(state.opt_state, learning_rate=rate))
    state, _ = sgd_step()(state, next(some))
  return state


predict = jax.jit(NETWORK.apply)


def call_in_training(model, x):
  return model(x, train=True)


def measure(params, statistics, estimated=True):
  """Accuracy and loss, with statistics that are estimated again or the running ones."""
  variables = {"params": params, **statistics}
  if estimated:
    some = batches(BATCH, 12345)
    inputs = (next(some)["x"] for _ in range(STATISTICS))
    variables = optax_boost.linen.estimate_batch_stats(
      NETWORK, variables, inputs, forward_fn=call_in_training
    )
  predict_with = functools.partial(predict, variables)
  return {
    f"{part} {key}": value
    for part in ("validation", "test")
    for key, value in common.scores(predict_with, *data()[part]).items()
  }


def averages(state):
  """The average of each window of snapshots."""
  rows = optax_boost.snapshots(state.opt_state)
  return {n: jax.tree.map(lambda x, n=n: jnp.mean(x[-n:], 0), rows) for n in WINDOWS}


def at_cut(rate, seed):
  """The state after 70 units, which trainings of the second phase share."""
  source = hashlib.sha256(inspect.getsource(sys.modules[__name__]).encode()).hexdigest()[:16]
  path = runs.KEPT / f"averaging-{source}-{rate}-{seed}.pickle"
  if not path.exists():
    variables = NETWORK.init(jax.random.key(seed), data()["train"][0][:1])
    rates = schedule(rate)[: CUT * UNIT]
    _, *arrays = optax_boost.linen.split_loss(loss_fn, NETWORK, variables)
    state = go_on(sgd_step().init(*arrays), rates, batches(BATCH, seed))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(jax.device_get(state)))
  return jax.tree.map(jnp.asarray, pickle.loads(path.read_bytes()))


def schedule(rate):
  """The rate at each step: two units of warm-up, then a cosine."""
  cosine = optax.warmup_cosine_decay_schedule(0.0, rate, 2 * UNIT, WHOLE * UNIT)
  return np.asarray(jax.vmap(cosine)(jnp.arange(WHOLE * UNIT)))


def first(rate, seed):
  """SGD at a peak rate, with all that needs no more than its snapshots."""
  state, rates = at_cut(rate, seed), schedule(rate)
  copy = functools.partial(jax.tree.map, jnp.array)
  found = {AT_CUT: measure(state.params, state.model_state)}
  found[f"{AT_CUT}, running statistics"] = measure(state.params, state.model_state, estimated=False)

  def add_averages(state, units):
    for n, average in averages(state).items():
      found[f"average of the last {n}, {units} units"] = measure(average, state.model_state)

  add_averages(state, CUT)
  now, more = CUT * UNIT, MORE * UNIT
  falling = rates[now] * (1 - (np.arange(more) + 1) / (more + 1))
  cooled = go_on(copy(state), falling, batches(BATCH, 1000 + seed))
  found[COOL_DOWN] = measure(cooled.params, cooled.model_state)
  some = batches(BATCH, 1000 + seed)
  state = go_on(copy(state), rates[now : now + more], some)
  found[GOES_ON] = measure(state.params, state.model_state)
  add_averages(state, CUT + MORE)
  state = go_on(state, rates[now + more :], some)
  found[FULL] = measure(state.params, state.model_state)
  taken = int(optax.tree.get(state.opt_state, "snapshot_count"))
  return {
    "validation": found[FULL]["validation accuracy"],
    "contenders": found,
    "snapshots": taken,
    "params": sum(leaf.size for leaf in jax.tree.leaves(state.params)),
  }


def second(setting, seed):
  """DimReduce for two units of gradients; the trials of its line search come on top."""
  state = at_cut(setting.rate, seed)
  subspace = optax_boost.fit_subspace(optax_boost.snapshots(state.opt_state), setting.components)
  # A callable, so that one program serves every subspace.
  tx = optax_boost.dim_reduce(
    lambda params: subspace, alpha=setting.alpha, max_search=setting.max_search
  )
  step = make_step(tx)
  state = step.init(state.params, state.model_state)
  some, trials, rejected = batches(setting.batch, 1000 + seed), [], []
  for _ in range(MORE * UNIT * BATCH // setting.batch):
    state, metrics = step(state, next(some))
    trials.append(int(metrics["line_search_steps"]))
    rejected.append(float(metrics["accepted_rho"]) == 0)
  scores = measure(state.params, state.model_state)
  return {
    "validation": scores["validation accuracy"],
    "scores": scores,
    "trials per step": float(np.mean(trials)),
    "rejected, %": 100 * float(np.mean(rejected)),
    "variance explained, %": 100 * float(jnp.sum(subspace.explained_variance_ratio)),
  }


def mindspores(rate):
  return Second(rate, 32, BATCH, 1e-3, 2)


def settings(rate):
  """MindSpore's settings, and changes of them."""
  own = mindspores(rate)
  large = own._replace(batch=512, max_search=8)
  return [
    own,
    own._replace(max_search="auto"),
    own._replace(max_search=8, alpha=1e-2),
    large,
    *(large._replace(alpha=alpha) for alpha in (1e-2, 3e-2, 1e-1)),
    large._replace(alpha=1e-2, components=40),
    large._replace(alpha=1e-2, batch=1280),
  ]


def units_of(name):
  if name == FULL:
    return WHOLE
  more = name in (GOES_ON, COOL_DOWN, OURS, MINDSPORE) or f"{CUT + MORE} units" in name
  return CUT + MORE if more else CUT


def picture(scores):
  """Test accuracies, in groups of as much training; a line for the training that was cut."""
  groups = {
    CUT: f"cut at {CUT} of {WHOLE} units",
    CUT + MORE: f"{CUT + MORE} units",
    WHOLE: f"all {WHOLE} units",
  }
  names = {units: [name for name in scores if units_of(name) == units] for units in groups}
  title = f"Test accuracy after {CUT} to {WHOLE} units of training, %"
  figure, (axes,) = report.panels([title], 7.5, 5.4, grid="x")
  labels = []
  for units, heading in groups.items():
    labels.append(heading)
    for name in sorted(names[units], key=lambda name: (name != AT_CUT, "average" not in name)):
      if "running" in name:
        continue
      values = [score["test accuracy"] for score in scores[name]]
      mean, deviation = np.mean(values), np.std(values, ddof=1)
      colour = next((c for word, c in COLOURS.items() if word in name), report.GREY)
      style = {"fmt": "o", "color": colour, "capsize": 3}
      axes.errorbar(mean, len(labels), xerr=deviation, **style)
      place = {"xytext": (6, 0), "textcoords": "offset points", "va": "center"}
      axes.annotate(f"{mean:.2f}", (mean + deviation, len(labels)), color=colour, **place)
      if name == AT_CUT:
        axes.axvline(mean, color=colour, linewidth=0.8, linestyle=":")
      labels.append(name.partition(f", {units} units")[0])
  axes.set_yticks(range(len(labels)), labels)
  for tick, label in zip(axes.get_yticklabels(), labels, strict=True):
    tick.set_fontweight("bold" if label in groups.values() else "normal")
  axes.tick_params(axis="y", length=0)
  axes.set_ylim(len(labels) - 0.4, -0.6)
  axes.set_xlabel("mean and standard deviation of three seeds")
  return figure


def test_every_continuation_of_a_shortened_training_keeps_its_accuracy():
  common.need("cifar10")
  sgd = runs.tune(first, {"SGD": RATES}, SEEDS)["SGD"]
  grids = {OURS: settings(sgd.setting), MINDSPORE: [mindspores(sgd.setting)]}
  reduced = runs.tune(second, grids, SEEDS)
  scores = {
    name: [contenders[name] for contenders in sgd.values("contenders")]
    for name in sgd.values("contenders")[0]
  } | {name: tuned.values("scores") for name, tuned in reduced.items()}
  # The windows are chosen by the training by which the rate was chosen.
  (tuning,) = runs.train_all(first, [(sgd.setting, runs.TUNING_SEED)])
  windows = [
    max(
      (f"average of the last {n}, {units} units" for n in WINDOWS),
      key=lambda name: tuning["contenders"][name]["validation accuracy"],
    )
    for units in (CUT, CUT + MORE)
  ]
  forms = {"test accuracy": "{:.2f}", "test loss": "{:.4f}", "validation accuracy": "{:.2f}"}
  rows = [
    [
      name,
      units_of(name),
      *(report.spread([score[key] for score in scores[name]], form) for key, form in forms.items()),
    ]
    for name in sorted(scores, key=units_of)
  ]
  header = ("", "units", "test accuracy, %", "test loss", "validation accuracy, %")
  rates = [[f"{rate:g}", f"{value:.2f}"] for rate, value in sgd.tried]
  tried = [[*setting[1:], f"{value:.2f}"] for setting, value in reduced[OURS].tried]
  facts = [
    f"{name} ({', '.join(map(str, tuned.setting[1:]))}): "
    + "; ".join(
      f"{key} {tuned.spread(key)}"
      for key in ("trials per step", "rejected, %", "variance explained, %")
    )
    for name, tuned in reduced.items()
  ]
  page = report.words(
    "averaging",
    table=report.table(header, rows),
    windows=", ".join(windows),
    rates=report.table(("SGD's peak rate", "validation accuracy, %"), rates),
    settings=report.table((*Second._fields[1:], "validation accuracy, %"), tried),
    facts=".\n\n".join(facts) + ".",
    params=sgd.values("params")[0],
    **{"batch": BATCH, "unit": UNIT, "whole": WHOLE, "cut": CUT, "more": MORE},
    **{"snapshots": SNAPSHOTS, "statistics": STATISTICS},
  )
  report.write("averaging", *page, picture(scores))
  assert not sgd.at_edge
  assert min(sgd.values("validation")) > 45
  assert set(sgd.values("snapshots")) == {2 * WHOLE}
  for name, several in scores.items():
    assert min(score["test accuracy"] for score in several) > 40, name

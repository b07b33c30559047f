"""Is DimReduce worth its steps? On images, against a learning-rate drop and an average.

``make evidence`` runs this on digits and, where the environment variable ``OPTAX_BOOST_DATA`` names
a folder with them, on ``mnist.npz`` and ``cifar10*.npz``. It writes
``benchmarks/results/dim_reduce_evidence.md`` and ``.png``, with what was measured before, on data
that are not there now, from ``out/``.
``python -m tests.evidence.test_dim_reduce_evidence digits`` prints the losses on
validation images by which the settings below were chosen.
"""

import functools
import itertools
import pathlib
import sys
import time
from typing import NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp
from matplotlib import pyplot as plt
import numpy as np
import optax
import pytest
from tqdm import tqdm

from benchmarks import plot
import optax_boost
import optax_boost.linen
from tests.evidence import common

pytestmark = pytest.mark.slow
RESULTS = pathlib.Path(__file__).parent.parent.parent / "benchmarks" / "results"
SEEDS = (0, 1, 2)
BATCH = 64
SNAPSHOTS = 48
# Points at which a second phase is looked at.
LOOKS = 8
# A second phase of steps with a line search goes on beyond equal gradients, for equal time.
LONGER = 1.5


class Setting(NamedTuple):
  """What was chosen on validation images; `late`: snapshots of the second half of phase one."""

  rate: float
  alpha: float
  max_search: int
  k: int
  batch: int
  late: bool


class Task(NamedTuple):
  """The network's widths, the epochs of the whole schedule, a setting, and how it was found."""

  widths: tuple[int, ...]
  epochs: int
  setting: Setting
  found: str


TASKS = {
  "digits": Task(
    (16, 32, 32),
    12,
    Setting(0.1, 1e-3, 8, 20, 256, True),
    "Validation losses: SGD 0.080, average 0.058, DimReduce 0.054; with k = 40 at best 0.055.",
  ),
  "mnist": Task(
    (8, 16, 16),
    8,
    Setting(0.05, 1e-2, 8, 40, 512, True),
    "Validation losses: SGD 0.122, average 0.126, DimReduce 0.125; with MindSpore's two trials"
    " 0.135, 19 % of the steps rejected.",
  ),
  "cifar10": Task(
    (16, 32, 32),
    8,
    Setting(0.02, 0.0, 8, 40, 512, True),
    "Validation losses: SGD 1.454, average 1.492, DimReduce 1.480. With MindSpore's two trials"
    " and alpha 0.001 it was 1.458 in batches of 64 and 1.473 in batches of 512, but every step in"
    " the subspace was rejected, so that only slow SGD outside of it was left; of the other"
    " settings, this is the best.",
  ),
}
SGD, AVERAGE = "SGD, rate dropped twice", "average of the snapshots"
OURS, FROM_AVERAGE = "DimReduce", "DimReduce from the average"
METHODS = (SGD, AVERAGE, OURS, FROM_AVERAGE)


@functools.cache
def data(name):
  """Parts ``train``, ``validation`` and ``test``, each images and labels."""
  if name == "digits":
    parts = {part: (x[..., None], y) for part, (x, y) in common.digits().items()}
  else:
    with np.load(common.file_of(name)) as file:
      x, y = file["train_images"][:10_000], file["train_labels"][:10_000]
      parts = {"train": (x[:8000], y[:8000]), "validation": (x[8000:], y[8000:])}
      parts["test"] = (file["test_images"][:4000], file["test_labels"][:4000])
  images = parts["train"][0].astype(np.float32)
  axes = tuple(range(images.ndim if images.ndim < 4 else 3))
  mean, spread = images.mean(axes), images.std(axes)

  def scaled(x, y):
    x = ((x - mean) / spread).astype(np.float32)
    return {"x": x.reshape(*x.shape[:3], -1), "y": y.astype(np.int32)}

  return {part: scaled(*pair) for part, pair in parts.items()}


class Network(nn.Module):
  """Three convolutions, no normalization: an average of its params needs no new statistics."""

  widths: tuple[int, ...]

  @nn.compact
  def __call__(self, x):
    for layer, width in enumerate(self.widths):
      strides = 1 if layer == 0 and x.shape[1] < 16 else 2
      x = nn.relu(nn.Conv(width, (3, 3), strides=strides)(x))
    return nn.Dense(10)(x.reshape(len(x), -1))


def classify(model, batch):
  logits = model(batch["x"])
  return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]))


class Runs:
  """All runs on one data set. Steps are compiled once, and before anything is timed."""

  def __init__(self, name, held_out="test"):
    self.task = TASKS[name]
    self.network = Network(self.task.widths)
    self.train, self.held_out = data(name)["train"], data(name)[held_out]
    self.size = len(self.train["y"])
    self.per_epoch = self.size // BATCH
    self.subspace = None
    self.steps = {}

  @property
  def phase(self):
    """The steps of either phase of SGD."""
    return self.task.epochs // 2 * self.per_epoch

  def step(self, key, make):
    if key not in self.steps:
      self.steps[key] = optax_boost.linen.make_train_step(classify, self.network, make())
    return self.steps[key]

  def sgd(self, rate):
    half = self.phase // 2
    schedule = optax.piecewise_constant_schedule(rate, {self.phase: 0.1, self.phase + half: 0.1})
    record = optax_boost.record_trajectory(every=self.phase // (2 * SNAPSHOTS), capacity=96)
    tx = optax.chain(optax.sgd(schedule, momentum=0.9), record)
    return self.step(("sgd", rate), lambda: tx)

  def dim_reduce(self, s):
    # A callable, so that one compiled step serves every subspace.
    return self.step(
      (s.alpha, s.max_search, s.k, s.batch),
      lambda: optax_boost.dim_reduce(
        lambda params: self.subspace, alpha=s.alpha, max_search=s.max_search
      ),
    )

  def measure(self, params):
    found = {}
    for part, examples in (("train", self.train), ("test", self.held_out)):
      logits = self.logits(params, examples["x"])
      losses = optax.softmax_cross_entropy_with_integer_labels(logits, examples["y"])
      found[f"{part} loss"] = float(losses.mean())
    found["test accuracy, %"] = 100 * float((logits.argmax(1) == examples["y"]).mean())
    return found

  @functools.cached_property
  def _apply(self):
    return jax.jit(lambda params, x: self.network.apply({"params": params}, x))

  def logits(self, params, x):
    return np.concatenate([self._apply(params, x[i : i + 1000]) for i in range(0, len(x), 1000)])

  def batches(self, size, seed):
    rng = np.random.default_rng(seed)
    while True:
      order = rng.permutation(self.size)
      for i in range(self.size // size):
        some = order[i * size : (i + 1) * size]
        yield {part: values[some] for part, values in self.train.items()}

  def train_for(self, step, state, batches, size, epochs, looks, spent=0.0):
    """Trains until so many epochs of gradients are spent; a trial of a search is a third of one."""
    points, seconds, cost = [], spent, 0.0
    # Compiled, on a copy, before the clock runs.
    copy = jax.tree.map(jnp.array, state)
    jax.block_until_ready(step(copy, next(self.batches(size, 0))))
    steps, trials, rejected = 0, [], 0
    for goal in np.linspace(0, epochs, looks + 1)[1:]:
      while cost < goal - 1e-9:
        batch = next(batches)
        start = time.perf_counter()
        state, metrics = step(state, batch)
        trials.append(int(metrics.get("line_search_steps", 0)))
        seconds += time.perf_counter() - start
        rejected += int(metrics.get("accepted_rho", 1) == 0)
        steps += 1
        cost += (1 + trials[-1] / 3) * size / self.size
      start = time.perf_counter()
      jax.block_until_ready(state)
      seconds += time.perf_counter() - start
      points.append({"epochs": cost, "seconds": seconds, **self.measure(state.params)})
    facts = {
      "steps": steps,
      "trials per step": np.mean(trials),
      "rejected, %": 100 * rejected / steps,
    }
    return state, points, {key: float(value) for key, value in facts.items()}

  def first_phase(self, seed, rate):
    step = self.sgd(rate)
    state = step.init(self.network.init(jax.random.key(seed), self.train["x"][:1]))
    epochs = self.task.epochs // 2
    state, points, _ = self.train_for(step, state, self.batches(BATCH, seed), BATCH, epochs, LOOKS)
    return state, points

  def kept(self, state, late):
    rows = optax_boost.snapshots(state.opt_state)
    return jax.tree.map(lambda x: x[-SNAPSHOTS:] if late else x[::2], rows)

  def second_phase(self, method, state, seed, s, longer=LONGER):
    """The points of a method after the first phase, and facts of it."""
    epochs = self.task.epochs // 2
    if method == SGD:
      copy = jax.tree.map(jnp.array, state)
      batches = self.batches(BATCH, 100 + seed)
      return self.train_for(self.sgd(s.rate), copy, batches, BATCH, epochs, LOOKS)[1:]
    kept = self.kept(state, s.late)
    average = jax.tree.map(lambda x: jnp.mean(x, 0), kept)
    if method == AVERAGE:
      return [{"epochs": 0.0, "seconds": 0.0, **self.measure(average)}], {}
    for _ in range(2):
      start = time.perf_counter()
      self.subspace = jax.block_until_ready(optax_boost.fit_subspace(kept, s.k))
      fitting = time.perf_counter() - start
    params = jax.tree.map(jnp.array, state.params) if method == OURS else average
    step = self.dim_reduce(s)
    explained = float(self.subspace.explained_variance_ratio.sum())
    looks = round(LOOKS * longer)
    _, points, facts = self.train_for(
      *(step, step.init({"params": params}), self.batches(s.batch, 100 + seed), s.batch),
      *(longer * epochs, looks, fitting),
    )
    return points, facts | {"variance explained, %": 100 * explained, "fit, s": fitting}


@functools.cache
def results(name):
  """All seeds on one data set: the first phase that methods share, and each one's second."""
  runs, task, seeds = Runs(name), TASKS[name], []
  for seed in tqdm(SEEDS, desc=name):
    state, points = runs.first_phase(seed, task.setting.rate)
    found = {"first": points}
    for method in METHODS:
      after, facts = runs.second_phase(method, state, seed, task.setting)
      found[method] = {"points": after, "facts": facts}
    seeds.append(found)
  size = sum(leaf.size for leaf in jax.tree.leaves(state.params))
  about = {"params": size, "images": runs.size, "epochs": task.epochs}
  about |= {"setting": task.setting._asdict(), "found": task.found}
  return about | {"seeds": seeds}


def wanted():
  return [name for name in TASKS if name == "digits" or common.file_of(name)]


@pytest.mark.parametrize("name", TASKS)
def test_every_method_trains(name):
  if name not in wanted():
    pytest.skip(f"no {name}*.npz in OPTAX_BOOST_DATA")
  least = {"digits": 94, "mnist": 94, "cifar10": 45}[name]
  found = results(name)
  for seed in found["seeds"]:
    for method in METHODS:
      assert seed[method]["points"][-1]["test accuracy, %"] > least, method
    # As many gradients as SGD, but for the last step.
    spent = seed[OURS]["points"][LOOKS - 1]["epochs"]
    assert 0 <= spent - found["epochs"] // 2 < 4 * found["setting"]["batch"] / found["images"]


def at_equal_gradients(seed, method):
  return seed[method]["points"][: LOOKS if method != AVERAGE else 1][-1]


def at_equal_time(seed, method):
  """The last point within the time of SGD's second phase, or the first there is."""
  limit = seed[SGD]["points"][-1]["seconds"]
  points = seed[method]["points"]
  return ([point for point in points if point["seconds"] <= limit] or points[:1])[-1]


def cell(values, form="{:.3g}"):
  return f"{form.format(np.mean(values))} ± {np.std(values):.2g}"


def section(name, found):
  s = Setting(**found["setting"])
  half = found["epochs"] // 2
  lines = [
    "",
    f"## {name}: {found['images']:,} training images, {found['params']:,} params",
    "",
    f"{half} epochs of SGD in batches of {BATCH} at {s.rate:g}, momentum 0.9; then {half} more by"
    f" each method. DimReduce: k = {s.k}, alpha {s.alpha:g}, at most {s.max_search} trials, batches"
    f" of {s.batch}, subspace of {SNAPSHOTS} snapshots over"
    f" {'the second half' if s.late else 'all'} of the first phase. {found['found']}",
    "",
    "| method | training loss | test loss | test accuracy, % | test loss at equal time |"
    " accuracy at equal time, % | seconds |",
    "|---|---|---|---|---|---|---|",
  ]
  seeds = found["seeds"]
  rows = {"after the first phase": ([seed["first"][-1] for seed in seeds], None)}
  for method in METHODS:
    rows[method] = (
      [at_equal_gradients(seed, method) for seed in seeds],
      [at_equal_time(seed, method) for seed in seeds],
    )
  for label, (equal, timed) in rows.items():
    cells = [cell([p[key] for p in equal]) for key in ("train loss", "test loss")]
    cells.append(cell([p["test accuracy, %"] for p in equal], "{:.2f}"))
    if timed is None:
      cells += ["", "", ""]
    else:
      cells.append(cell([p["test loss"] for p in timed]))
      cells.append(cell([p["test accuracy, %"] for p in timed], "{:.2f}"))
      cells.append(cell([p["seconds"] for p in equal]))
    lines.append(f"| {label} | {' | '.join(cells)} |")
  facts = {key: [seed[OURS]["facts"][key] for seed in seeds] for key in seeds[0][OURS]["facts"]}
  lines += [
    "",
    "DimReduce: " + ", ".join(f"{key} {cell(v, '{:.4g}')}" for key, v in facts.items()) + ".",
  ]
  return lines


def picture(known):
  figure, axes = plt.subplots(len(known), 2, figsize=(9, 3.1 * len(known)), squeeze=False)
  for pair, (name, found) in zip(axes, known.items(), strict=True):
    seeds, half = found["seeds"], found["epochs"] // 2
    for axis, key in zip(pair, ("epochs", "seconds"), strict=True):

      def curve(runs, key):
        return [np.mean([[p[k] for p in run] for run in runs], 0) for k in (key, "test loss")]

      before, losses = curve([seed["first"] for seed in seeds], key)
      axis.plot(before, losses, color="grey", label="first phase, SGD")
      for color, method in zip(("C0", "C1", "C2", "C3"), METHODS, strict=True):
        x, y = curve([seed[method]["points"] for seed in seeds], key)
        if method == AVERAGE:
          axis.axhline(y[0], color=color, ls=":", label=method)
        else:
          axis.plot(before[-1] + x, y, color=color, marker=".", label=method)
      # The last half of the first phase, and all of the second.
      best = min(line.get_ydata()[-1] for line in axis.lines)
      axis.set(ylim=(0.9 * best, 1.05 * losses[len(losses) // 2]), ylabel="test loss")
      axis.axvline(before[-1], color="lightgrey", lw=0.8, zorder=0)
      labels = {"epochs": "epochs of gradients", "seconds": "seconds"}
      axis.set(xlabel=labels[key], title=f"{name}, {half} + {half} epochs")
  axes[0][0].legend(fontsize=7)
  figure.tight_layout()
  figure.savefig(RESULTS / "dim_reduce_evidence.png", dpi=110)
  plt.close(figure)


def write(known):
  """The report of all that is known, by data set."""
  lines = [
    "# DimReduce: evidence",
    "",
    "Made by `make evidence` (`tests/evidence/test_dim_reduce_evidence.py`). A CNN of three"
    " convolutions without normalization, in float32 on two shared CPU cores; mean and standard"
    f" deviation over {len(SEEDS)} seeds. SGD's rate and DimReduce's settings were chosen by the"
    " loss on validation images that are in neither of the other parts, with another seed: 3 of the"
    " former, at the best of these 10 to 30 of the latter. The networks are small and the schedules"
    " short; on digits and CIFAR-10 they were shortened after validation losses on longer ones no"
    " longer fell in the second phase. Equal"
    " gradients: DimReduce stops when it has spent as much as SGD, a trial of its line search"
    " counted as a third of a gradient on its batch. Equal time: the last of some points before"
    f" SGD's time is over, at most {LONGER:g} times the gradients; with the fit of the subspace,"
    " without compilation. The average is that of the snapshots that the subspace is fitted to, and"
    " costs nothing.",
  ]
  for name, found in known.items():
    lines += section(name, found)
  lines += ["", "![test loss by gradients and by time](dim_reduce_evidence.png)"]
  (RESULTS / "dim_reduce_evidence.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
  picture(known)
  plot.small(plot.dim_reduce(known), plot.FIGURES / "dim_reduce.png")


def test_the_results_are_written():
  found = {name: results(name) for name in wanted()}
  write(common.added("dim_reduce", found, TASKS))


def tune(name, batches, ks):
  """Prints validation losses; seed 100 is none of those that are reported."""
  runs = Runs(name, "validation")
  task = TASKS[name]
  starts = {}
  for rate in (0.02, 0.05, 0.1):
    starts[rate], points = runs.first_phase(100, rate)
    setting = task.setting._replace(rate=rate)
    after, _ = runs.second_phase(SGD, starts[rate], 100, setting)
    averages = {}
    for late in (False, True):
      (point,), _ = runs.second_phase(AVERAGE, starts[rate], 100, setting._replace(late=late))
      averages[late] = point["test loss"]
    losses = [points[-1]["test loss"], after[-1]["test loss"], *averages.values()]
    columns = "first phase {:.4f}, dropped {:.4f}, average of all {:.4f}, of the late {:.4f}"
    print(f"rate {rate}: {columns.format(*losses)}", flush=True)
  grid = itertools.product(batches, ks, (0.0, 1e-3, 1e-2), (8, 2), (True, False))
  for batch, k, alpha, max_search, late in grid:
    # One thing at a time, but for what depends on the batch.
    if (max_search, late) != (8, True) and (alpha != 1e-3 or (max_search, late) == (2, False)):
      continue
    s = Setting(task.setting.rate, alpha, max_search, k, batch, late)
    points, facts = runs.second_phase(OURS, starts[s.rate], 100, s, longer=1)
    print(
      f"{s}: train {points[-1]['train loss']:.4f}, validation {points[-1]['test loss']:.4f},"
      f" trials {facts['trials per step']:.2f}, rejected {facts['rejected, %']:.0f} %,"
      f" {points[-1]['seconds']:.1f} s",
      flush=True,
    )


if __name__ == "__main__":
  large = sys.argv[1] != "digits"
  tune(sys.argv[1], (64, 512) if large else (64, 256, 512), (40,) if large else (20, 40))

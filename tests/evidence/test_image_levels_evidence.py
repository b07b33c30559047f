"""AutoBoost's levels on images, as the time until O0's score with its best batch and peak rate.

``make evidence PARTS=image_levels`` trains on digits and on ``cifar10*.npz`` in the folder of
the environment variable ``OPTAX_BOOST_DATA``.
"""

import dataclasses
import functools
import itertools
import time
from typing import NamedTuple

from flax import nnx
import jax
import numpy as np
import optax
import pytest

from benchmarks import auto_boost as networks
import optax_boost
import optax_boost.nnx
from tests.evidence import common, report, runs, times

pytestmark = pytest.mark.slow
SEEDS = (0, 1, 2)
# The time of a training is its number of steps times the mean of a step in short trainings of this
# many steps. Every contender trains once a round, in turns of a few steps.
TIMED, TURN, ROUNDS = 31, 3, 6


class Task(NamedTuple):
  """A training; O0's batch and peak rate are chosen from a grid, at the first batch's time."""

  title: str
  data: str
  steps: int
  batches: tuple[int, ...] = (32, 16, 64)
  rates: tuple[float, ...] = (0.025, 0.05)


AUGMENTED, LARGER = "cifar10, augmented", "cifar10, 32 x 32"
TASKS = {
  "digits": Task("Digits: ResNet-11", "digits", 100, (32, 16), (0.05, 0.1, 0.2)),
  "cifar10": Task("CIFAR-10 at 16 x 16: ResNet-11", "cifar10", 800, rates=(0.025, 0.05, 0.1)),
  AUGMENTED: Task("CIFAR-10 at 16 x 16, augmented: ResNet-11", "cifar10", 4000, (32, 16)),
  LARGER: Task("CIFAR-10 at 32 x 32: ResNet-11", "cifar10", 500, (32, 16)),
}
O0, LEVELS = "O0", ("O1", "O2")
# Shares of O0's steps that a contender trains for: fewer, while its mean score is O0's or above, or
# else more, in O0's time.
FEWER, MORE = (0.85, 0.7, 0.55), (1.2, 1.4)
COLOURS = {O0: report.GREY, "O1": report.BLUE, "O2": report.ORANGE}
# The rate falls to 0, or, where an average is evaluated, to this share of its peak: better on
# validation images than 0.
LAST_RATE = 0.1


class Setting(NamedTuple):
  """A training: of what, at which level, with which batch, peak rate and number of steps."""

  task: str
  name: str
  batch: int
  rate: float
  steps: int


def boost_of(setting, steps):
  """The decision for a setting, with as many steps between snapshots as in its whole training."""
  short, whole = (
    optax_boost.auto_boost(setting.name, total_steps=n).on for n in (steps, setting.steps)
  )
  on = {k: v | {n: whole[k][n] for n in v if n == "every"} for k, v in short.items()}
  return dataclasses.replace(optax_boost.auto_boost("O0"), on=on)


def rate(boost, peak, steps):
  last = LAST_RATE * peak if "average_params" in boost.on else 0.0
  return optax.warmup_cosine_decay_schedule(0.0, peak, steps // 10, steps, last)


class Images:
  """A ResNet-11 with BatchNorm, Nesterov momentum and weight decay."""

  def __init__(self, setting, steps):
    self.setting, self.steps, self.boost = setting, steps, boost_of(setting, steps)
    halved = setting.task not in ("digits", LARGER)
    self.parts = common.images(TASKS[setting.task].data, halved)
    x, y = self.parts["train"]
    self.sample = {"x": x[: setting.batch], "y": y[: setting.batch]}
    sgd = optax.sgd(rate(self.boost, setting.rate, steps), momentum=0.9, nesterov=True)
    inner = optax.chain(optax.add_decayed_weights(5e-4), sgd)
    split = optax_boost.nnx.split_loss(networks.loss_fn, self.model(0))
    self.tx = self.boost.optimizer(inner, *split, self.sample, groups=networks.BLOCKS)
    self.step = optax_boost.nnx.make_train_step(networks.loss_fn)

  def model(self, seed):
    x = self.sample["x"]
    model = networks.ResNet(x.shape[-1], 1, rngs=nnx.Rngs(seed))
    return self.boost.model(optax_boost.nnx.less_bn, model, x)

  def start(self, seed):
    model = self.model(seed)
    return model, nnx.Optimizer(model, self.tx, wrt=nnx.Param)

  def advance(self, state, batch):
    return state, self.step(*state, batch)

  def batches(self, seed):
    augmented = self.setting.task == AUGMENTED
    return networks.batches(*self.parts["train"], self.steps, seed, augmented, self.setting.batch)

  def scores(self, state):
    model, optimizer = state
    if "average_params" in self.boost.on:
      model = optax_boost.nnx.averaged_model(optimizer, model)
      x = self.parts["train"][0][:1280]
      model = optax_boost.nnx.estimate_batch_stats(model, np.split(x, len(x) // 32))
    model = nnx.clone(model)
    model.eval()
    predict = functools.partial(nnx.jit(lambda model, x: model(x)), model)
    return {
      part: common.scores(predict, *self.parts[part])["accuracy"] for part in ("validation", "test")
    }


def train(setting, seed):
  """Scores on validation and test data, the larger the better."""
  made = Images(setting, setting.steps)
  state = made.start(seed)
  for batch in made.batches(seed):
    state, _ = made.advance(state, batch)
  return made.scores(state)


def measure(chosen, seed):
  """Processor seconds of a step of each setting over the first's: the medians of all rounds."""
  del seed
  trainers = {setting: Images(setting, TIMED) for setting in chosen}
  # The first round compiles.
  rounds = [list(seconds_in_turns(trainers).values()) for _ in range(1 + ROUNDS)][1:]
  return {"ratios": np.median([np.divide(r, r[0]) for r in rounds], 0).tolist()}


def seconds_in_turns(trainers):
  """Processor seconds of a training by each, a few steps at a time: other work slows all alike."""
  states, batches = {}, {name: made.batches(0) for name, made in trainers.items()}
  for name, made in trainers.items():
    # A new model's first call takes it apart.
    states[name], metrics = made.advance(made.start(0), next(batches[name]))
    jax.block_until_ready(metrics)
  seconds = dict.fromkeys(trainers, 0.0)
  for _ in range(0, TIMED - 1, TURN):
    for name, made in trainers.items():
      begin = time.process_time()
      for batch in itertools.islice(batches[name], TURN):
        states[name], metrics = made.advance(states[name], batch)
      jax.block_until_ready(metrics)
      seconds[name] += time.process_time() - begin
  return seconds


def tuned(task):
  """O0 with the batch and the peak rate that are best on validation data in as much time."""
  _, _, steps, batches, rates, *_ = TASKS[task]
  first = tuple(Setting(task, O0, batch, rates[0], steps) for batch in batches)
  costs = runs.train_all(measure, [(first, 0)])[0]["ratios"]
  grid = [
    setting._replace(rate=rate, steps=round(steps / cost))
    for setting, cost in zip(first, costs, strict=True)
    for rate in rates
  ]
  return runs.tune(train, {O0: grid}, SEEDS)[O0]


def curve(setting, ratio, target):
  """Scores of all seeds by share of O0's steps: the fewest that reach the target, and less."""
  scores = {}

  def reaches(share):
    part = setting._replace(steps=round(share * setting.steps))
    results = runs.train_all(train, [(part, seed) for seed in SEEDS])
    scores[share] = np.array([result["test"] for result in results])
    return scores[share].mean() >= target

  if reaches(1.0):
    all(map(reaches, FEWER))
  else:
    any(reaches(share) for share in MORE if ratio * share <= 1)
  return dict(sorted(scores.items()))


def outcome(task):
  """The grid of O0, and each level's times, scores by share and seed, and times to O0's score."""
  chosen, levels = tuned(task), {}
  whole = tuple(chosen.setting._replace(name=name) for name in (O0, *LEVELS))
  ratios = runs.train_all(measure, [(whole, 0)])[0]["ratios"]
  targets = [result["test"] for result in chosen.results]
  for setting, ratio in zip(whole, ratios, strict=True):
    scores = curve(setting, ratio, np.mean(targets))
    times, by_seed = [ratio * share for share in scores], np.transpose(list(scores.values()))
    pairs = zip([np.mean(targets), *targets], [by_seed.mean(0), *by_seed], strict=True)
    # A seed means the same initial weights and the same batches.
    to_score, *of_seeds = (times.time_to(target, times, seed) for target, seed in pairs)
    lacks = np.mean(targets) - by_seed.mean(0).max()
    found = {"ratio": ratio, "scores": scores, "to score": to_score}
    levels[setting.name] = found | {"by seed": of_seeds, "lacks": lacks}
  return {"setting": chosen.setting, "tried": chosen.tried, "levels": levels}


def summary(found):
  """O0's time over each level's, to O0's score."""
  lines = []
  for task, result in found.items():
    for name in LEVELS:
      level = result["levels"][name]
      lacks = f", lacks {level['lacks']:.2g}" if np.isinf(level["to score"]) else ""
      seeds = ", ".join(map(times.speed, level["by seed"]))
      line = (times.speed(level["to score"]) + lacks, seeds, f"{1 / level['ratio']:.2f}")
      lines.append((TASKS[task].title, name, *line))
  return report.table(("", "", "to O0's score", "by seed", "steps per time"), lines)


def section(task, result):
  form = "{:.2f}"
  chosen = result["setting"]
  lines = [
    (name, f"{share:g}", f"{level['ratio'] * share:.2f}", report.spread(scores, form))
    for name, level in result["levels"].items()
    for share, scores in level["scores"].items()
  ]
  tried = ", ".join(
    f"{s.batch}/{s.rate:g}/{s.steps:,}: {form.format(score)}" for s, score in result["tried"]
  )
  words = f"## {TASKS[task].title}, {chosen.steps:,} steps\n\nBatch {chosen.batch}, peak rate"
  words += f" {chosen.rate:g}. Tried (batch/rate/steps: validation): {tried}.\n\n"
  return words + report.table(("", "share of steps", "time", "test accuracy, %"), lines)


def picture(found):
  """Bars from O0's time; a level that doesn't reach O0's score has words in the place of a bar."""
  title = "Times as fast as plain training (O0) to its accuracy"
  figure, (axes,) = report.panels([title], 5.8, 4.4, grid="x")
  for name, offset in zip(LEVELS, (-0.19, 0.19), strict=True):
    for row, result in enumerate(found.values()):
      level, at = result["levels"][name], row + offset
      style = {"color": COLOURS[name], "va": "center"}
      if np.isinf(level["to score"]):
        words = f"{name} stays {level['lacks']:.1f} points below O0's accuracy"
        axes.text(1.02, at, words, **style)
        continue
      speed, seeds = 1 / level["to score"], [1 / t for t in level["by seed"] if np.isfinite(t)]
      axes.barh(at, speed - 1, 0.34, left=1, color=COLOURS[name])
      axes.plot(seeds, [at] * len(seeds), "k|", markersize=11)
      some = f" ({len(seeds)} of {len(SEEDS)})" if len(seeds) < len(SEEDS) else ""
      words = f"{name}: {speed:.2f}{some}"
      axes.text(1.02, at, words, transform=axes.get_yaxis_transform(), **style)
  axes.axvline(1, color=COLOURS[O0])
  titles = [TASKS[task].title.partition(":")[0].replace(", ", ",\n") for task in found]
  axes.set_yticks(range(len(found)), titles)
  axes.tick_params(axis="y", length=0)
  axes.invert_yaxis()
  axes.set_xlabel(f"short lines: single seeds; (2 of {len(SEEDS)}): the third never")
  return figure


def test_levels_of_images_reach_the_score_of_plain_training():
  common.need(*(task.data for task in TASKS.values()))
  found = {task: outcome(task) for task in TASKS}
  page = report.words(
    "image_levels",
    summary=summary(found),
    sections="\n".join(section(task, result) for task, result in found.items()),
    **{"tuning_seed": runs.TUNING_SEED, "last_rate": LAST_RATE, "rounds": ROUNDS},
    **{"timed": TIMED - 1, "turn": TURN, "seeds": len(SEEDS)},
  )
  report.write("image_levels", *page, picture(found))
  for task in ("digits", "cifar10"):
    levels = found[task]["levels"]
    assert levels["O1"]["to score"] < 1 / 1.2, levels
    assert levels["O2"]["to score"] < 1 / 1.3, levels

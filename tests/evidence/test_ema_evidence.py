"""Do averages of the params replace a falling rate, or add to one? A small transformer on text.

``make evidence PARTS=ema`` trains on the sources of Python's standard library, which need no
download, and writes ``benchmarks/results/ema_evidence.md``.
"""

import functools
import math
from typing import NamedTuple

import jax
import numpy as np
import pytest

from tests.evidence import average_trainings, report, runs
from tests.evidence.average_trainings import (
  CONSTANT,
  COOL_DOWN,
  COSINE,
  DECAYS,
  LAST,
  STARTS,
  STEPS,
)

pytestmark = pytest.mark.slow
SEEDS = (0, 1, 2, 3, 4)
# The search for a rate begins here, and goes on in factors of two.
RATE = 4e-3
SCHEDULES = (CONSTANT, COOL_DOWN, COSINE)
EMA, MEAN = "EMA", "uniform average"
# What to choose from on validation data, besides the rate.
CHOICES = {LAST: (LAST,), EMA: tuple(DECAYS), MEAN: tuple(STARTS)}
COLOURS = {LAST: report.GREY, EMA: report.BLUE, MEAN: report.ORANGE}


class Tuned(NamedTuple):
  """A schedule and what is evaluated, with the best rate and average on validation data.

  Attributes:
    setting: of the training.
    name: of the params to evaluate at: the last ones or an average.
    tried: the loss and the best name, by rate.
  """

  setting: average_trainings.Setting
  name: str
  tried: dict[float, tuple[float, str]]


@functools.cache
def tuned(schedule, kind):
  """The rate and the average on validation data: half and twice of the rate are worse."""
  training = COSINE if schedule == COSINE else CONSTANT
  tried, best = {}, RATE
  while True:
    fresh = [rate for rate in (best / 2, best, best * 2) if rate not in tried]
    settings = [average_trainings.Setting(training, rate) for rate in fresh]
    pairs = [(setting, runs.TUNING_SEED) for setting in settings]
    for rate, result in zip(fresh, runs.train_all(average_trainings.train, pairs), strict=True):
      losses = result["final"][schedule]
      tried[rate] = min(
        (losses[name] if math.isfinite(losses[name]) else math.inf, name) for name in CHOICES[kind]
      )
    lowest = min(tried, key=tried.get)
    if lowest == best:
      return Tuned(average_trainings.Setting(training, best), tried[best][1], tried)
    best = lowest


@functools.cache
def results(setting):
  """The results of all seeds."""
  return runs.train_all(average_trainings.train, [(setting, seed) for seed in SEEDS])


def losses(schedule, kind, name=None):
  """Test losses at the end, by seed: of the chosen params, or of others of the same training."""
  found = tuned(schedule, kind)
  return [result["final"][schedule][name or found.name] for result in results(found.setting)]


def gains(schedule, kind):
  """What is gained over the last params at a constant rate at equal seeds: equal batches."""
  return np.subtract(losses(CONSTANT, LAST), losses(schedule, kind))


def curves(schedule, name):
  """Test losses along the trainings that EMA's rate was chosen for: (seeds, looks)."""
  return np.array([result["curves"][name] for result in results(tuned(schedule, EMA).setting)])


def summary():
  rows = [
    [
      schedule,
      kind if kind == LAST else f"{kind}, `{tuned(schedule, kind).name}`",
      f"{tuned(schedule, kind).setting.rate:g}",
      report.spread(losses(schedule, kind), "{:.4f}"),
      report.spread(gains(schedule, kind), "{:.4f}"),
    ]
    for schedule in SCHEDULES
    for kind in CHOICES
  ]
  return report.table(("rate", "evaluated at", "peak", "test loss", "gain, nats"), rows)


def looks():
  """The steps at which EMAs are evaluated along the training."""
  return [STEPS * (i + 1) // average_trainings.LOOKS for i in range(average_trainings.LOOKS)]


def along(schedule):
  """Mean test losses of the last params and of each EMA, at several steps."""
  means = {name: curves(schedule, name).mean(0) for name in (LAST, *DECAYS)}
  lowest = np.min(list(means.values()), 0)
  rows = [
    [
      name,
      f"{1 / (1 - DECAYS[name]):.0f}" if name in DECAYS else "",
      *(
        f"**{loss:.4f}**" if loss == least else f"{loss:.4f}"
        for loss, least in zip(mean, lowest, strict=True)
      ),
    ]
    for name, mean in means.items()
  ]
  header = ("", "1 / (1 - decay)", *(f"step {count:,}" for count in looks()))
  return report.table(header, rows)


def every_average():
  """Mean test losses at the end of each schedule, at the rate that its EMA was chosen with."""
  rows = [
    [name, *(f"{np.mean(losses(schedule, EMA, name)):.4f}" for schedule in SCHEDULES)]
    for name in (LAST, *DECAYS, *STARTS)
  ]
  return report.table(("", *SCHEDULES), rows)


def tries():
  return "; ".join(
    f"{schedule}, {kind}: "
    + ", ".join(f"{rate:g}: {loss:.4f}" for rate, (loss, _) in sorted(found.tried.items()))
    for schedule in SCHEDULES
    for kind in CHOICES
    for found in [tuned(schedule, kind)]
  )


def picture():
  titles = ("test loss after the last step", "test loss along the training")
  figure, (left, right) = report.panels(titles, 5.0, 3.8)
  for place, kind in enumerate(CHOICES):
    places = np.arange(len(SCHEDULES)) + (place - 1) / 6
    values = [losses(schedule, kind) for schedule in SCHEDULES]
    report.points(left, places, values, kind, fmt="o", color=COLOURS[kind])
  left.set_xticks(range(len(SCHEDULES)), ["constant rate", "cool-down", "cosine"])
  left.set(xlim=(-0.5, len(SCHEDULES) - 0.5), ylabel="nats per character")
  left.legend(frameon=False)
  for schedule, style in ((CONSTANT, "-"), (COSINE, "--")):
    for name, kind in ((LAST, LAST), (tuned(CONSTANT, EMA).name, EMA)):
      label = f"{schedule}: {kind}"
      runs_of = curves(schedule, name)
      report.curve(right, looks(), runs_of, label, color=COLOURS[kind], linestyle=style, marker=".")
  right.set(xlabel="steps", xticks=looks())
  right.legend(frameon=False)
  return figure


def write():
  params = jax.eval_shape(average_trainings._transformer.init, jax.random.key(0))
  page = report.words(
    "ema",
    summary=summary(),
    constant=along(CONSTANT),
    cosine=along(COSINE),
    every=every_average(),
    tries=tries(),
    params=sum(p.size for p in jax.tree.leaves(params)),
    steps=STEPS,
    batch=average_trainings.BATCH,
    length=average_trainings._transformer.LENGTH,
    weight_decay=average_trainings.WEIGHT_DECAY,
    warm_up=average_trainings.WARM_UP,
    cooling=STEPS - average_trainings.COOLING,
    constant_rate=f"{tuned(CONSTANT, EMA).setting.rate:g}",
    cosine_rate=f"{tuned(COSINE, EMA).setting.rate:g}",
    seeds=len(SEEDS),
  )
  report.write("ema", *page, picture())


def test_averages_replace_a_falling_rate_and_add_nothing_to_one():
  write()
  cooled = np.mean(gains(COOL_DOWN, LAST))
  for kind in (EMA, MEAN):
    assert min(gains(CONSTANT, kind)) > 0, kind
    assert abs(np.mean(gains(CONSTANT, kind)) - cooled) < 0.02, kind
    for schedule in (COOL_DOWN, COSINE):
      added = np.mean(gains(schedule, kind)) - np.mean(gains(schedule, LAST))
      assert abs(added) < 0.01, (schedule, kind)

"""AutoBoost's levels on long sequences, as the time until a tuned O0's score.

``make evidence PARTS=long_levels`` trains on ``tinyshakespeare.txt`` in the folder of the
environment variable ``OPTAX_BOOST_DATA``, and on the sources of Python's standard library.
"""

import functools

import numpy as np
import pytest

from tests.evidence import common, level_times, report, runs, sequence_trainings
from tests.evidence.sequence_trainings import LONG_TASKS, O0, O1, O2, Ladder

pytestmark = pytest.mark.slow
# The levels that are trained, by task. The other tasks take longer than was at hand.
ROWS = {
  "rotary 256": (O1, O2),
  "learned 256": (O1,),
  "learned 256 x 4": (O1,),
  "512": (O1, O2),
  "sources 512": (O1,),
  "wide 512": (O1,),
  "1024": (O1,),
}
# Tried on validation data in this share of O0's time, at each task named.
LADDERS = {
  "512": (
    O0,
    Ladder((8, 4, 2, 1), 0.5),
    Ladder((8, 4, 2, 1), 0.6),
    Ladder((32, 8, 2, 1), 0.5),
    Ladder((16, 4, 1), 0.5),
    Ladder((16, 4, 1), 0.6),
  ),
}
LADDER_SHARE = 0.65
# The shares of O0's time that are tried differ by this factor; so many are tried below equal steps.
FACTOR, BELOW = 1.2, 3


@functools.cache
def ladders(name):
  """The validation losses of each schedule of lengths, and of O0 in all of its time."""
  setting = level_times.tuned(name)[0]
  settings = [
    setting._replace(form=form, time=setting.time * (1 if form == O0 else LADDER_SHARE))
    for form in LADDERS[name]
  ]
  results = level_times.train_all(settings, level_times.TUNING_SEEDS)
  return {
    form: [-result["validation"] for result in found]
    for form, found in zip(LADDERS[name], results, strict=True)
  }


def mean_cost(setting, form):
  """The mean time of a step, in that of a step of O0: O1's share of O0's time at equal steps."""
  steps = len(sequence_trainings.plan(setting._replace(form=form)))
  return setting.time / steps


def around_the_score(first):
  """A search that begins at a share, and goes on until O0's score lies between two."""

  def search(reaches):
    share = first
    if reaches(share):
      for _ in range(BELOW):
        share /= FACTOR
        if not reaches(share):
          break
    else:
      while share < 1 and not reaches(share := min(1.0, share * FACTOR)):
        pass

  return search


@functools.cache
def measured_again(name):
  """Measures the time of a step of each shape after the trainings, on a machine at rest."""
  task, batch = LONG_TASKS[name], level_times.tuned(name)[0].batch
  shapes = sequence_trainings.shapes(task, batch)
  (measured,) = runs.train_all(sequence_trainings.measure, [((name, shapes), 1)])
  return dict(zip(shapes, measured["ratios"], strict=True)), measured


def share_of_time(name, form, share):
  """The share of O0's time that a training takes by the costs that were measured again."""
  setting, costs = level_times.tuned(name)[0], measured_again(name)[0]
  plan = sequence_trainings.plan(setting._replace(form=form, time=share * setting.time))
  return sum(costs[shape] for shape in plan) / len(sequence_trainings.plan(setting))


def outcome(name):
  """O0's setting, and the results of each form by share of O0's time."""
  setting, tried, _ = level_times.tuned(name)
  forms = {O0: {1.0: level_times.o0(name)}}
  for form in ROWS[name]:
    curve = level_times.curve(name, form, around_the_score(mean_cost(setting, form)))
    forms[form] = {share_of_time(name, form, share): found for share, found in curve.items()}
  costs, measured = measured_again(name)
  return {
    "setting": setting._replace(costs=tuple(costs.items())),
    "tried": tried,
    "measured": measured,
    "forms": forms,
  }


def summary(everything):
  lines = []
  for name, found in everything.items():
    task, whole = LONG_TASKS[name], level_times.loss(found["forms"][O0][1.0])
    about = task.title, f"{task.attention_share:.2f}", whole
    for form in ROWS[name]:
      shares, curves = level_times.to_score(found, form), found["forms"][form]
      speeds = [level_times.speed(share, list(curves)) for share in shares]
      setting = level_times.tuned(name)[0]
      cost = share_of_time(name, form, mean_cost(setting, form))
      lines.append((
        *(about if form == O1 else ("",) * 3),
        title(form), speeds[0], ", ".join(speeds[1:]), f"{1 / cost:.2f}",
        f"{cost / shares[0]:.2f}", level_times.loss(curves[cost]),
      ))  # fmt: skip
  header = (
    *("", "L / 6d", "O0's test loss", "", "times as fast", "by seed"),
    *("by cheaper steps", "by steps that teach more", "loss after as many steps"),
  )
  return report.table(header, lines)


def title(form):
  if isinstance(form, str):
    return form
  lengths = ", ".join("L" if n == 1 else f"L/{n}" for n in form.divisors)
  return f"{lengths}; full from {form.full_from:g}"


def section(name, found):
  batch, full = found["setting"].batch, LONG_TASKS[name].length
  shapes = [(batch * n, full // n) for n in (32, 16, 8, 4, 2)]
  return level_times.section(name, found, shapes, title)


def ladder_table():
  lines = []
  for name in LADDERS:
    for form, losses in ladders(name).items():
      first = LONG_TASKS[name].title if form == O0 else ""
      words = "O0, in all of the time" if form == O0 else title(form)
      lines.append((first, words, *(f"{x:.3f}" for x in (np.mean(losses), *losses))))
  seeds = (f"seed {seed}" for seed in level_times.TUNING_SEEDS)
  return report.table(("", "lengths", "validation loss", *seeds), lines)


def picture(everything):
  """How many times as fast each level is, a row for each training: the mean, and each seed."""
  rows = [(name, form) for name in everything for form in ROWS[name]]
  figure, (axes,) = report.panels([""], 7.0, 0.45 * len(rows) + 0.7, grid="x")
  axes.axvline(1, color=report.GREY, linestyle=":", zorder=0)
  for row, (name, form) in enumerate(rows):
    shares = level_times.to_score(everything[name], form)
    mean, *seeds = 1 / np.array(shares)
    color = report.BLUE if form == O1 else report.ORANGE
    axes.plot(seeds, [row] * len(seeds), ".", color=color, markersize=4)
    axes.plot(mean, row, "o", color=color, markersize=8)
    label = level_times.speed(shares[0], list(everything[name]["forms"][form]))
    axes.text(max([1, mean, *seeds]) + 0.04, row, label, color=color, va="center", fontsize=9)
  names = [f"{LONG_TASKS[name].title}, {title(form)}" for name, form in rows]
  axes.set_yticks(range(len(rows)), names)
  axes.set_ylim(len(rows) - 0.5, -0.5)
  axes.set_xlabel("times as fast to O0's loss; small: each seed")
  return figure


def test_levels_reach_the_score_of_plain_training_on_long_sequences():
  common.need(sequence_trainings.SHAKESPEARE)
  everything = {name: outcome(name) for name in ROWS}
  sections = "\n".join(section(name, found) for name, found in everything.items())
  page = report.words(
    "long_levels",
    summary=summary(everything),
    ladders=ladder_table(),
    sections=sections,
    seeds=len(level_times.SEEDS),
    tuning_seed=runs.TUNING_SEED,
    tuning_seeds=len(level_times.TUNING_SEEDS),
    close=level_times.CLOSE,
    share=LADDER_SHARE,
    rounds=sequence_trainings.ROUNDS,
    timed=sequence_trainings.TIMED,
  )
  report.write("long_levels", *page, picture(everything), in_card=False)
  for name, found in everything.items():
    assert level_times.to_score(found, O1)[0] < 1, name

"""AutoBoost's levels on transformers, as the time until a tuned O0's score.

``make evidence PARTS=levels`` trains on ``tinyshakespeare.txt`` in the folder of the environment
variable ``OPTAX_BOOST_DATA``, and on the sources of Python's standard library.
"""

import functools

import numpy as np
import pytest

from tests.evidence import common, report, runs, sequence_trainings, times
from tests.evidence.sequence_trainings import DROPPED, O0, O1, O2, SHORT, SMALL, TASKS

pytestmark = pytest.mark.slow
SEEDS = (0, 1, 2)
CONTROLLED = "rotary"  # the training with controls
# Shares of O0's time; the search for O0's score begins at the second.
SHARES = (1.0, 0.77, 0.65, 0.55, 0.45)


@functools.cache
def costs(name, tried):
  """The time of a step of each shape, in that of the first, and all that `measure` says."""
  task = TASKS[name]
  # One of the tasks with the same programs.
  alike = next(
    other
    for other, t in TASKS.items()
    if (t.rotary, t.length, t.masked) == (task.rotary, task.length, task.masked)
  )
  (measured,) = runs.train_all(sequence_trainings.measure, [((alike, tried), 0)])
  return dict(zip(tried, measured["ratios"], strict=True)), measured


@functools.cache
def tuned(name):
  """O0's best batch and peak rate on validation data: better than half and twice of each."""
  task = TASKS[name]
  first = sequence_trainings.TOKENS_OF_A_BATCH // task.length
  batches = tuple(n for n in (first, 2 * first, 4 * first, first // 2, first // 4) if n)
  table, _ = costs(name, tuple((batch, task.length) for batch in batches))
  steps = task.budget * sequence_trainings.TOKENS / sequence_trainings.TOKENS_OF_A_BATCH
  tried = {}
  best = (first, 6e-3)
  if task.budget > 1:
    shorter = next(n for n, t in TASKS.items() if t == task._replace(title=t.title, budget=1))
    best = tuned(shorter)[0].batch, tuned(shorter)[0].rate
  while True:
    batch, rate = best
    cross = [best, (batch // 2, rate), (batch * 2, rate), (batch, rate / 2), (batch, rate * 2)]
    cross = [pair for pair in cross if pair[0] in batches and pair not in tried]
    settings = [
      sequence_trainings.Setting(name, O0, b, r, steps / table[b, task.length]) for b, r in cross
    ]
    results = train_all(settings, [runs.TUNING_SEED])
    tried |= {pair: result["validation"] for pair, (result,) in zip(cross, results, strict=True)}
    highest = max(tried, key=tried.get)
    if highest == best:
      break
    best = highest
  batch, rate = best
  ratios, measured = costs(name, sequence_trainings.shapes(task, batch))
  time = steps / table[batch, task.length]
  setting = sequence_trainings.Setting(name, O0, batch, rate, time, tuple(ratios.items()))
  return setting, tried, measured


def train_all(settings, seeds=SEEDS):
  """The results of each setting, one for each seed."""
  runs_of = [(setting, seed) for setting in settings for seed in seeds]
  results = runs.train_all(sequence_trainings.train, runs_of)
  return [results[i : i + len(seeds)] for i in range(0, len(results), len(seeds))]


def mean_test(results):
  return np.mean([result["test"] for result in results])


@functools.cache
def o0(name):
  """O0's results."""
  return train_all([tuned(name)[0]])[0]


@functools.cache
def curve(name, form):
  """A ladder's results by share of O0's time: the least that reaches O0's score, and around."""
  setting, results = tuned(name)[0]._replace(form=form), {}

  def reaches(share):
    (results[share],) = train_all([setting._replace(time=share * setting.time)])
    return mean_test(results[share]) >= mean_test(o0(name))

  if reaches(SHARES[1]):
    all(map(reaches, SHARES[2:]))
  else:
    reaches(SHARES[0])
  return dict(sorted(results.items()))


@functools.cache
def control(name, form):
  """A control's results, in the share of O0's time at which a ladder is first tried."""
  setting, share = tuned(name)[0], SHARES[1]
  (results,) = train_all([setting._replace(form=form, time=share * setting.time)])
  return {share: results}


def outcome(name):
  """O0's setting, and the results of each form by share of O0's time."""
  setting, tried, measured = tuned(name)
  forms = {O0: {1.0: o0(name)}}
  levels = (O1, O2) if TASKS[name].budget == 1 else (O1,)
  forms |= {level: curve(name, level) for level in levels}
  if name == CONTROLLED:
    forms |= {form: control(name, form) for form in (SHORT, DROPPED, SMALL)}
  return {"setting": setting, "tried": tried, "measured": measured, "forms": forms}


def to_score(found, form):
  """The share of O0's time until O0's mean score, and until each seed's own."""
  ladder, whole = found["forms"][form], found["forms"][O0][1.0]
  scores = np.array([[result["test"] for result in results] for results in ladder.values()])
  targets = [result["test"] for result in whole]
  pairs = zip([np.mean(targets), *targets], [scores.mean(1), *scores.T], strict=True)
  return [times.time_to(target, list(ladder), reached) for target, reached in pairs]


def speed(share, tried):
  """How many times as fast, or a bound, if the shares that were tried don't tell more."""
  if share == min(tried):
    return f"over {times.speed(share)}"
  if np.isinf(share) and max(tried) < 1:
    return f"under {times.speed(max(tried))}"
  return times.speed(share)


def summary(everything):
  lines = []
  for name, found in everything.items():
    cells = [report.spread([-result["test"] for result in found["forms"][O0][1.0]], "{:.3f}")]
    for level in (O1, O2):
      tried = list(found["forms"].get(level, []))
      speeds = [speed(share, tried) for share in to_score(found, level)] if tried else [""]
      cells += [speeds[0], ", ".join(speeds[1:])]
    lines.append((TASKS[name].title, *cells))
  header = ("", "O0's test loss", O1, "by seed", O2, "by seed")
  return report.table(header, lines)


def section(name, found):
  setting, measured = found["setting"], found["measured"]
  costs, full = dict(setting.costs), TASKS[name].length
  tried = ", ".join(
    f"{batch}/{rate:g}: {-score:.3f}" for (batch, rate), score in sorted(found["tried"].items())
  )
  lengths = ", ".join(
    f"{n}: {costs[setting.batch * full // n, n]:.2f}" for n in (full // 8, full // 4, full // 2)
  )
  seconds = setting.time * measured["milliseconds"] / 1e3
  text = (
    f"## {TASKS[name].title}\n\nO0: batch {setting.batch}, peak rate {setting.rate:g},"
    f" {len(sequence_trainings.plan(setting)):,} steps, about {seconds:.0f} s. Tried"
    f" (batch/rate: validation): {tried}. A step's time by length, over one of {full}:"
    f" {lengths}.\n\n"
  )
  lines = [
    (form, f"{share:g}", f"{results[0]['steps']:,}",
     report.spread([-result["test"] for result in results], "{:.3f}"),
     ", ".join(f"{x:.2f}" for x in np.mean([r["positions"] for r in results], 0)))
    for form, shares in found["forms"].items()
    for share, results in shares.items()
  ]  # fmt: skip
  header = ("", "time", "steps", "test loss", "by position, in eighths of the sequence")
  return text + report.table(header, lines)


def picture(everything):
  """How many times as fast each level is, a row for each training: the mean, and each seed."""
  figure, (axes,) = report.panels([""], 7.0, 0.55 * len(everything) + 1.0, grid="x")
  axes.axvline(1, color=report.GREY, linestyle=":", zorder=0)
  for row, found in enumerate(everything.values()):
    for level, color, below in ((O1, report.BLUE, -0.15), (O2, report.ORANGE, 0.15)):
      if level not in found["forms"]:
        continue
      shares = to_score(found, level)
      label = speed(shares[0], list(found["forms"][level]))
      mean, *seeds = 1 / np.array(shares)
      seeds = list(filter(None, seeds))
      place = {"color": color, "va": "center", "fontsize": 9}
      axes.plot(seeds, [row + below] * len(seeds), ".", color=color, markersize=4)
      if mean:
        axes.plot(mean, row + below, "o", color=color, markersize=8, label=level * (row == 0))
      axes.text(max([1, mean, *seeds]) + 0.04, row + below, label, **place)
  axes.set_yticks(range(len(everything)), [TASKS[name].title for name in everything])
  axes.invert_yaxis()
  axes.set_xlabel("times as fast to O0's loss; small: each seed")
  report.legend_below(figure, 2)
  return figure


def test_levels_reach_the_score_of_plain_training():
  common.need(sequence_trainings.SHAKESPEARE)
  everything = {name: outcome(name) for name in TASKS}
  numbers = {
    "rounds": sequence_trainings.ROUNDS,
    "timed": sequence_trainings.TIMED,
    "turn": sequence_trainings.TURN,
    "tuning_seed": runs.TUNING_SEED,
    "seeds": len(SEEDS),
  }
  sections = "\n".join(section(name, found) for name, found in everything.items())
  page = report.words("levels", summary=summary(everything), sections=sections, **numbers)
  report.write("levels", *page, picture(everything))
  for name, found in everything.items():
    assert to_score(found, O1)[0] < 1, name

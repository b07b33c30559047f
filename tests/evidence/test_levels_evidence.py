"""AutoBoost's levels on transformers, as the time until a tuned O0's score.

``make evidence PARTS=levels`` trains on ``tinyshakespeare.txt`` in the folder of the environment
variable ``OPTAX_BOOST_DATA``, and on the sources of Python's standard library.
"""

import functools

import numpy as np
import pytest

from tests.evidence import common, level_times, report, runs, sequence_trainings
from tests.evidence.sequence_trainings import DROPPED, O0, O1, O2, SHORT, SMALL, TASKS

pytestmark = pytest.mark.slow
CONTROLLED = "rotary"  # the training with controls
# Shares of O0's time; the search for O0's score begins at the second.
SHARES = (1.0, 0.77, 0.65, 0.55, 0.45)


@functools.cache
def curve(name, form):
  """A ladder's results by share of O0's time: the least that reaches O0's score, and around."""
  setting, results = level_times.tuned(name)[0]._replace(form=form), {}

  def reaches(share):
    (results[share],) = level_times.train_all([setting._replace(time=share * setting.time)])
    return level_times.mean_test(results[share]) >= level_times.mean_test(level_times.o0(name))

  if reaches(SHARES[1]):
    all(map(reaches, SHARES[2:]))
  else:
    reaches(SHARES[0])
  return dict(sorted(results.items()))


@functools.cache
def control(name, form):
  """A control's results, in the share of O0's time at which a ladder is first tried."""
  setting, share = level_times.tuned(name)[0], SHARES[1]
  (results,) = level_times.train_all([setting._replace(form=form, time=share * setting.time)])
  return {share: results}


def outcome(name):
  """O0's setting, and the results of each form by share of O0's time."""
  setting, tried, measured = level_times.tuned(name)
  forms = {O0: {1.0: level_times.o0(name)}}
  levels = (O1, O2) if TASKS[name].budget == 1 else (O1,)
  forms |= {level: curve(name, level) for level in levels}
  if name == CONTROLLED:
    forms |= {form: control(name, form) for form in (SHORT, DROPPED, SMALL)}
  return {"setting": setting, "tried": tried, "measured": measured, "forms": forms}


def summary(everything):
  lines = []
  for name, found in everything.items():
    cells = [report.spread([-result["test"] for result in found["forms"][O0][1.0]], "{:.3f}")]
    for level in (O1, O2):
      tried = list(found["forms"].get(level, []))
      shares = level_times.to_score(found, level) if tried else []
      speeds = [level_times.speed(share, tried) for share in shares] or [""]
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
      shares = level_times.to_score(found, level)
      label = level_times.speed(shares[0], list(found["forms"][level]))
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
    "seeds": len(level_times.SEEDS),
  }
  sections = "\n".join(section(name, found) for name, found in everything.items())
  page = report.words("levels", summary=summary(everything), sections=sections, **numbers)
  report.write("levels", *page, picture(everything))
  for name, found in everything.items():
    assert level_times.to_score(found, O1)[0] < 1, name

"""AutoBoost's levels on transformers, as the time until a tuned O0's score.

``make evidence PARTS=levels`` trains on ``tinyshakespeare.txt`` in the folder of the environment
variable ``OPTAX_BOOST_DATA``, and on the sources of Python's standard library.
"""

import numpy as np
import pytest

from tests.evidence import common, level_times, report, runs, sequence_trainings
from tests.evidence.sequence_trainings import DROPPED, O0, O1, O2, SHORT, SMALL, TASKS

pytestmark = pytest.mark.slow
CONTROLLED = "rotary"  # the training with controls
# Shares of O0's time; the search for O0's score begins at the second.
SHARES = (1.0, 0.77, 0.65, 0.55, 0.45)


def around_the_score(reaches):
  """Tries the least share that reaches O0's score, and those around."""
  if reaches(SHARES[1]):
    all(map(reaches, SHARES[2:]))
  else:
    reaches(SHARES[0])


def outcome(name):
  """O0's setting, and the results of each form by share of O0's time."""
  setting, tried, measured = level_times.tuned(name)
  forms = {O0: {1.0: level_times.o0(name)}}
  levels = (O1, O2) if TASKS[name].budget == 1 else (O1,)
  forms |= {level: level_times.curve(name, level, around_the_score) for level in levels}
  if name == CONTROLLED:
    share = SHARES[1]
    controls = (SHORT, DROPPED, SMALL)
    forms |= {form: {share: level_times.train(name, form, share)} for form in controls}
  return {"setting": setting, "tried": tried, "measured": measured, "forms": forms}


def summary(everything):
  lines = []
  for name, found in everything.items():
    cells = [level_times.loss(found["forms"][O0][1.0])]
    for level in (O1, O2):
      tried = list(found["forms"].get(level, []))
      shares = level_times.to_score(found, level) if tried else []
      speeds = [level_times.speed(share, tried) for share in shares] or [""]
      cells += [speeds[0], ", ".join(speeds[1:])]
    lines.append((TASKS[name].title, *cells))
  header = ("", "O0's test loss", O1, "by seed", O2, "by seed")
  return report.table(header, lines)


def section(name, found):
  batch, full = found["setting"].batch, TASKS[name].length
  return level_times.section(name, found, [(batch * n, full // n) for n in (8, 4, 2)])


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

"""The time in which a level reaches a tuned O0's score, and a training's section of a page."""

import functools

import numpy as np

from tests.evidence import report, runs, sequence_trainings, times
from tests.evidence.sequence_trainings import ALL_TASKS, O0

SEEDS = (0, 1, 2)
# In short trainings of long sequences, rates of a batch whose losses are so close with one seed are
# tried with three.
CLOSE = 0.02
TUNING_SEEDS = tuple(runs.TUNING_SEED + n for n in range(3))


@functools.cache
def costs(name, tried):
  """The time of a step of each shape, in that of the first, and all that `measure` says."""
  task = ALL_TASKS[name]
  # One of the tasks with the same programs.
  alike = next(other for other, t in ALL_TASKS.items() if t.programs == task.programs)
  (measured,) = runs.train_all(sequence_trainings.measure, [((alike, tried), 0)])
  return dict(zip(tried, measured["ratios"], strict=True)), measured


@functools.cache
def tuned(name):
  """O0's best batch and peak rate on validation data: better than half and twice of each."""
  task = ALL_TASKS[name]
  first = max(1, sequence_trainings.TOKENS_OF_A_BATCH // task.length)
  around = (first, 2 * first, 4 * first, first // 2, first // 4)
  batches = task.batches or tuple(filter(None, around))
  table, _ = costs(name, tuple((batch, task.length) for batch in batches))
  steps = task.budget * sequence_trainings.TOKENS / (first * task.length)
  tried = {}

  def score(pairs, seeds):
    settings = [
      sequence_trainings.Setting(name, O0, b, r, steps / table[b, task.length]) for b, r in pairs
    ]
    for pair, results in zip(pairs, train_all(settings, seeds), strict=True):
      tried[pair] = np.mean([result["validation"] for result in results])

  best = (first, 6e-3)
  if task.budget > 1:
    shorter = next(n for n, t in ALL_TASKS.items() if t == task._replace(title=t.title, budget=1))
    best = tuned(shorter)[0].batch, tuned(shorter)[0].rate
  while True:
    batch, rate = best
    cross = [best, (batch // 2, rate), (batch * 2, rate), (batch, rate / 2), (batch, rate * 2)]
    score([pair for pair in cross if pair[0] in batches and pair not in tried], TUNING_SEEDS[:1])
    highest = max(tried, key=tried.get)
    if highest == best:
      break
    best = highest
  close = [pair for pair in tried if pair[0] == best[0] and tried[pair] > tried[best] - CLOSE]
  if name in sequence_trainings.LONG_TASKS and task.budget == 1 and len(close) > 1:
    score(close, TUNING_SEEDS)
    best = max(close, key=tried.get)
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
def train(name, form, share):
  """A form's results in this share of O0's time."""
  setting = tuned(name)[0]
  return train_all([setting._replace(form=form, time=share * setting.time)])[0]


def curve(name, form, search):
  """A form's results by share of O0's time, for the shares that ``search(reaches)`` tries.

  ``reaches(share)`` trains, and tells whether the mean score is O0's.
  """
  results = {}

  def reaches(share):
    results[share] = train(name, form, share)
    return mean_test(results[share]) >= mean_test(o0(name))

  search(reaches)
  return dict(sorted(results.items()))


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


def section(name, found, shapes, title=str):
  """O0's setting and the costs of steps of these shapes, and a row for each training."""
  setting, measured, task = found["setting"], found["measured"], ALL_TASKS[name]
  costs = dict(setting.costs)
  tried = ", ".join(
    f"{batch}/{rate:g}: {-score:.3f}" for (batch, rate), score in sorted(found["tried"].items())
  )
  lengths = ", ".join(f"{length}: {costs[batch, length]:.2f}" for batch, length in shapes)
  seconds = setting.time * measured["milliseconds"] / 1e3
  text = (
    f"## {task.title}\n\nO0: batch {setting.batch}, peak rate {setting.rate:g},"
    f" {len(sequence_trainings.plan(setting)):,} steps, about {seconds:.0f} s. Tried"
    f" (batch/rate: validation): {tried}. A step's time by length, over one of {task.length}:"
    f" {lengths}.\n\n"
  )
  lines = [
    (title(form), f"{round(share, 2):g}", f"{results[0]['steps']:,}", loss(results),
     ", ".join(f"{x:.2f}" for x in np.mean([r["positions"] for r in results], 0)))
    for form, shares in found["forms"].items()
    for share, results in shares.items()
  ]  # fmt: skip
  header = ("", "time", "steps", "test loss", "by position, in eighths of the sequence")
  return text + report.table(header, lines)


def loss(results):
  """The test loss of several seeds."""
  return report.spread([-result["test"] for result in results], "{:.3f}")

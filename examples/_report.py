"""What large_batch.py shows: a table, what each method bought, and a picture of the curves."""

from typing import NamedTuple

from _training import ACCURACY
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
import numpy as np

from optax_boost import RaceResult

LOSS = "training loss"


class Row(NamedTuple):
  """One method's line in the table; each array has one number per seed, nan where it diverged.

  Attributes:
    name: the method.
    loss: training loss at the end.
    accuracy: test accuracy at the end, in percent.
    gain: accuracy minus the baseline's, in points, the mean over the seeds and half of its 95%
      interval, which one seed has not; None without a baseline.
    p_value: of the gain, after Holm's correction for the number of methods.
    steps_to_target: steps until the mean accuracy first reached the target, None if it never did.
    speed: training steps per second.
  """

  name: str
  loss: np.ndarray
  accuracy: np.ndarray
  gain: tuple[float, float | None] | None
  p_value: float
  steps_to_target: int | None
  speed: float


class Report:
  """The results of all runs, ready to be shown.

  Args:
    result: of the race.
    baseline: the method that the others are compared with, if it is among them.
  """

  def __init__(self, result: RaceResult, baseline: str):
    self._result = result
    self._baseline = baseline
    # The round number that the baseline reaches at the end, on average.
    reached = self._mean_accuracy(result.baseline)[-1]
    self.target = 5 * int(reached // 5) if np.isfinite(reached) else 0
    self.rows = [self._row(name) for name in result.curves]

  def _mean_accuracy(self, name: str) -> np.ndarray:
    alive = ~self._result.diverged(name)
    rows = self._result.curves[name][ACCURACY]
    return rows[alive].mean(0) if alive.any() else np.full(rows.shape[1], np.nan)

  def _row(self, name: str) -> Row:
    result, steps = self._result, self._result.spent[name]["steps"]
    compared = name != self._baseline and self._baseline in result.curves
    reached = self._mean_accuracy(name) >= self.target
    return Row(
      name,
      result.values(name, LOSS),
      result.values(name, ACCURACY),
      result.difference(name, ACCURACY) if compared else None,
      result.p_values(ACCURACY, ["steps"])[name]["steps"] if compared else np.nan,
      int(steps[np.argmax(reached)]) if reached.any() else None,
      steps[-1] / result.totals(name, "seconds")[:, -1].mean(),
    )

  def table(self) -> str:
    """The table, with a line on how to read it."""
    against, to_target = f"against {self._baseline}", f"steps to {self.target}%"
    cells = [("method", "training loss", "test accuracy", against, to_target, "steps/s", "seeds")]
    cells += [
      (
        row.name,
        _mean_and_spread(row.loss, "{:.3f}"),
        f"{_mean_and_spread(row.accuracy, '{:.1f}')}%".replace("-%", "-"),
        "-" if row.gain is None else _mean_and_interval(*row.gain),
        "never" if row.steps_to_target is None else str(row.steps_to_target),
        f"{row.speed:.1f}",
        _seeds(row),
      )
      for row in self.rows
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
      "  ".join(
        cell.rjust(width) if i else cell.ljust(width)
        for i, (cell, width) in enumerate(zip(line, widths, strict=True))
      )
      for line in cells
    ]
    lines.insert(1, "-" * len(lines[0]))
    notes = [
      "Both at the last step; the loss with dropout. ± is the standard deviation over seeds; where",
      f"compared with {self._baseline}, in percentage points, the 95% interval of the paired mean.",
      "p below: of that difference, after Holm's correction for the number of methods.",
      "Steps to: until the mean accuracy gets there. Steps/s: without compiling and evaluating.",
    ]
    return "\n".join([*lines, "", *notes])

  def verdicts(self) -> str:
    """One line per method on what it bought."""
    if self._baseline not in self._result.curves:
      return f"Without {self._baseline} among the methods there is nothing to compare with."
    baseline = next(row for row in self.rows if row.name == self._baseline)
    others = [row for row in self.rows if row is not baseline]
    width = max((len(row.name) for row in others), default=0)
    heading = f"What it bought, compared with {baseline.name}"
    heading += f" ({self.target}% after {baseline.steps_to_target} steps):"
    return "\n".join([heading, *(f"  {r.name.ljust(width)}  {self._verdict(r)}" for r in others)])

  def _verdict(self, row: Row) -> str:
    gain, half = row.gain
    if np.isnan(gain):
      return "diverged"
    if half is None:
      accuracy = "one seed says nothing about accuracy (--seeds 3 or more)"
    elif row.p_value > 0.05:
      accuracy = f"no clear difference in accuracy (p = {row.p_value:.2g})"
    else:
      more = "more" if gain > 0 else "LESS"
      accuracy = f"{abs(gain):.1f} points {more} accuracy (p = {row.p_value:.2g})"
    steps = row.steps_to_target
    return f"{accuracy}; {self.target}% " + (
      "never reached" if steps is None else f"after {steps} steps"
    )

  def picture(self, title: str, subtitle: str) -> Figure:
    """Draws test accuracy and training loss against steps.

    Args:
      title: what was trained on what.
      subtitle: how to read it.

    Returns:
      The figure.
    """
    figure = self._result.plot(quantities=(ACCURACY, LOSS), against=("steps",))
    figure.set_size_inches(12, 5.6)
    figure.get_layout_engine().set(rect=(0.01, 0.01, 0.98, 0.84), wspace=0.04)
    figure.text(0.02, 0.95, title, fontsize=17, fontweight="bold", va="center")
    figure.text(0.02, 0.892, subtitle, fontsize=12, color="#444444", va="center")
    left, right = figure.axes
    left.set_title("Test accuracy", fontsize=14, loc="left")
    left.set_ylim(0, 100)
    left.yaxis.set_major_formatter(PercentFormatter(decimals=0))
    right.set_title("Training loss (cross-entropy, logarithmic)", fontsize=14, loc="left")
    curves = left.get_lines()
    left.axhline(self.target, color="#5A5A5A", linewidth=1.2, linestyle=(0, (2, 3)))
    for row, curve in zip(self.rows, curves, strict=True):
      if row.steps_to_target is not None:
        steps, mean = curve.get_data()
        at = list(steps).index(row.steps_to_target)
        colour = curve.get_color()
        left.plot(
          steps[at], mean[at], "o", markersize=9, color=colour, markeredgecolor="white", zorder=5
        )
    return figure


def _seeds(row: Row) -> str:
  lost = int(np.isnan(row.loss).sum())
  return f"{len(row.loss)}, {lost} diverged" if lost else str(len(row.loss))


def _mean_and_spread(values: np.ndarray, form: str) -> str:
  values = values[np.isfinite(values)]
  if not len(values):
    return "-"
  spread = [np.std(values, ddof=1)] if len(values) > 1 else []
  return " ± ".join(form.format(number) for number in [np.mean(values), *spread])


def _mean_and_interval(mean: float, half: float | None) -> str:
  if np.isnan(mean):
    return "-"
  return " ± ".join([f"{mean:+.1f}", *([] if half is None else [f"{half:.1f}"])])

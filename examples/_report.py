"""What the demo shows at the end: a table, what each method bought, and a picture of the curves."""

from collections.abc import Mapping
from collections.abc import Sequence
from itertools import cycle
import os
from pathlib import Path
from typing import NamedTuple

from _training import Curves
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from matplotlib.ticker import MaxNLocator
from matplotlib.ticker import PercentFormatter
import numpy as np
from scipy import stats

# Okabe and Ito's colours, told apart by colour-blind eyes too; the baseline is grey.
_BASELINE_COLOUR = "#5A5A5A"
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")

FORMATS = (".png", ".pdf", ".svg")


class Row(NamedTuple):
  """One method's line in the table; each array has one number per seed.

  Attributes:
    name: the method.
    loss: training loss at the end.
    accuracy: test accuracy at the end, in percent.
    gain: accuracy minus the baseline's with the same seed, in points; None without a baseline.
    steps_to_target: steps until the mean accuracy first reached the target, None if it never did.
    speed: training steps per second, the median over the runs' points.
  """

  name: str
  loss: np.ndarray
  accuracy: np.ndarray
  gain: np.ndarray | None
  steps_to_target: int | None
  speed: float


class Report:
  """The results of all runs, ready to be shown.

  Args:
    runs: for each method, the curves of each seed.
    baseline: the method that the others are compared with, if it is among them.
  """

  def __init__(self, runs: Mapping[str, Sequence[Curves]], baseline: str):
    self._runs = runs
    self._baseline = baseline
    # The round number that the baseline reaches at the end, on average.
    reference = baseline if baseline in runs else next(iter(runs))
    self.target = 5 * int(self._mean_accuracy(reference)[-1] // 5)
    self.rows = [self._row(name) for name in runs]

  def _final_accuracy(self, name: str) -> np.ndarray:
    return np.array([100 * run.accuracy[-1] for run in self._runs[name]])

  def _mean_accuracy(self, name: str) -> np.ndarray:
    return np.mean([100 * run.accuracy for run in self._runs[name]], axis=0)

  def _row(self, name: str) -> Row:
    runs = self._runs[name]
    accuracy = self._final_accuracy(name)
    compared = name != self._baseline and self._baseline in self._runs
    reached = self._mean_accuracy(name) >= self.target
    return Row(
      name,
      np.array([run.loss[-1] for run in runs]),
      accuracy,
      accuracy - self._final_accuracy(self._baseline) if compared else None,
      int(runs[0].steps[np.argmax(reached)]) if reached.any() else None,
      float(np.median(np.concatenate([run.speed for run in runs]))),
    )

  def table(self) -> str:
    """The table, with a line on how to read it."""
    against, to_target = f"against {self._baseline}", f"steps to {self.target}%"
    cells = [("method", "training loss", "test accuracy", against, to_target, "steps/s", "seeds")]
    cells += [
      (
        row.name,
        _mean_and_spread(row.loss, "{:.3f}"),
        _mean_and_spread(row.accuracy, "{:.1f}") + "%",
        "-" if row.gain is None else _mean_and_interval(row.gain),
        "never" if row.steps_to_target is None else str(row.steps_to_target),
        f"{row.speed:.1f}",
        str(len(row.loss)),
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
      "Steps to: until the mean accuracy gets there. Steps/s: without compiling and evaluating.",
    ]
    return "\n".join([*lines, "", *notes])

  def verdicts(self) -> str:
    """One line per method on what it bought."""
    if self._baseline not in self._runs:
      return f"Without {self._baseline} among the methods there is nothing to compare with."
    baseline = next(row for row in self.rows if row.name == self._baseline)
    others = [row for row in self.rows if row is not baseline]
    width = max((len(row.name) for row in others), default=0)
    heading = f"What it bought, compared with {baseline.name}"
    heading += f" ({self.target}% after {baseline.steps_to_target} steps):"
    return "\n".join([heading, *(f"  {r.name.ljust(width)}  {self._verdict(r)}" for r in others)])

  def _verdict(self, row: Row) -> str:
    gain = np.mean(row.gain)
    if len(row.gain) < 2:
      accuracy = "one seed says nothing about accuracy (--seeds 3 or more)"
    elif abs(gain) <= _half_interval(row.gain):
      accuracy = "no clear difference in accuracy"
    else:
      accuracy = f"{abs(gain):.1f} points {'more' if gain > 0 else 'LESS'} accuracy"
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
    figure = Figure(figsize=(12, 5.6), dpi=150, layout="constrained")
    figure.get_layout_engine().set(rect=(0.01, 0.01, 0.98, 0.84), wspace=0.04)
    figure.text(0.02, 0.95, title, fontsize=17, fontweight="bold", va="center")
    figure.text(0.02, 0.892, subtitle, fontsize=12, color="#444444", va="center")
    left, right = figure.subplots(1, 2)
    steps = next(iter(self._runs.values()))[0].steps
    for axes in (left, right):
      axes.set_xlabel("training steps", fontsize=13)
      axes.tick_params(which="both", labelsize=12, length=0)
      axes.grid(color="#E5E5E5", linewidth=0.8)
      axes.spines[["top", "right", "left"]].set_visible(False)
      axes.set_xlim(0, steps[-1])
      axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    left.set_title("Test accuracy", fontsize=14, loc="left")
    left.set_ylim(0, 100)
    left.yaxis.set_major_formatter(PercentFormatter(decimals=0))
    right.set_title("Training loss (cross-entropy, logarithmic)", fontsize=14, loc="left")
    right.set_yscale("log")
    right.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    right.yaxis.set_major_formatter("{x:g}")
    right.yaxis.set_minor_formatter("")

    left.axhline(self.target, color=_BASELINE_COLOUR, linewidth=1.2, linestyle=(0, (2, 3)))
    colours = cycle(_COLOURS)
    labels = []
    for row in self.rows:
      colour = _BASELINE_COLOUR if row.name == self._baseline else next(colours)
      runs = self._runs[row.name]
      curve = _band(left, steps, np.array([100 * run.accuracy for run in runs]), colour)
      _band(right, steps, np.array([run.loss for run in runs]), colour, log=True)
      if row.steps_to_target is not None:
        at = list(steps).index(row.steps_to_target)
        left.plot(
          steps[at], curve[at], "o", markersize=9, color=colour, markeredgecolor="white", zorder=5
        )
      labels.append((float(np.mean(row.accuracy)), row.name, colour))
    _label_ends(left, labels)
    return figure


def _half_interval(values: np.ndarray) -> float:
  """Half the 95 % confidence interval of a mean, by Student's t."""
  return stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / np.sqrt(len(values))


def _mean_and_spread(values: np.ndarray, form: str) -> str:
  with np.errstate(invalid="ignore"):
    spread = [np.std(values, ddof=1)] if len(values) > 1 else []
  return " ± ".join(form.format(number) for number in [np.mean(values), *spread])


def _mean_and_interval(values: np.ndarray) -> str:
  half = [f"{_half_interval(values):.1f}"] if len(values) > 1 else []
  return " ± ".join([f"{np.mean(values):+.1f}", *half])


def _band(
  axes: Axes, steps: np.ndarray, values: np.ndarray, colour: str, log: bool = False
) -> np.ndarray:
  """Draws the mean over seeds between one standard deviation to both sides; returns the mean."""
  there, back = (np.log, np.exp) if log else (np.positive, np.positive)
  with np.errstate(all="ignore"):
    mean, spread = there(values).mean(0), there(values).std(0)
    axes.fill_between(
      steps, back(mean - spread), back(mean + spread), color=colour, alpha=0.15, linewidth=0
    )
  axes.plot(steps, back(mean), color=colour, linewidth=2.4, solid_capstyle="round")
  return back(mean)


def _label_ends(axes: Axes, labels: list[tuple[float, str, str]]) -> None:
  """Names the lines at their right ends, from the top, pushed down where they would overlap."""
  gap = 6.0
  height = np.inf
  for rank, (value, name, colour) in enumerate(sorted(labels, reverse=True)):
    lowest_free = gap * (len(labels) - 1 - rank)
    height = min(max(value, lowest_free), height - gap)
    axes.annotate(
      f"{name} {value:.1f}%",
      (axes.get_xlim()[1], height),
      (7, 0),
      textcoords="offset points",
      color=colour,
      fontsize=12,
      fontweight="bold",
      va="center",
      annotation_clip=False,
    )


def check_writable(path: Path) -> None:
  """Makes sure that a picture can be written, and leaves no trace but the folder.

  Args:
    path: where it is to go.

  Raises:
    OSError: the folder can't be made or written to.
    ValueError: the name has no ending of a picture, or is something else than a file.
  """
  if path.suffix.lower() not in FORMATS:
    raise ValueError(f"--out {path} must end in {', '.join(FORMATS)}")
  if path.exists() and not (path.is_file() and os.access(path, os.W_OK)):
    raise ValueError(f"--out {path} exists and is no file that can be overwritten")
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
  except FileExistsError as error:
    raise ValueError(f"--out {path} can't be written: {path.parent} is no folder") from error
  try:
    _temporary(path).touch()
  finally:
    _temporary(path).unlink(missing_ok=True)


def save(figure: Figure, path: Path) -> None:
  """Writes a picture under a temporary name and renames it, so that `path` is whole or not there.

  Args:
    figure: the picture.
    path: where it goes.

  Raises:
    OSError: it can't be written.
  """
  try:
    figure.savefig(_temporary(path), format=path.suffix.lower().lstrip("."))
    os.replace(_temporary(path), os.path.realpath(path))
  finally:
    _temporary(path).unlink(missing_ok=True)


def _temporary(path: Path) -> Path:
  return path.with_name(f".{path.name}.{os.getpid()}.part")

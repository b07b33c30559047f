"""What a race found: curves, compared at equal steps, equal gradient evaluations, equal time."""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import json
import math
import os
import pathlib
from typing import TYPE_CHECKING
from typing import Any

import numpy as np

if TYPE_CHECKING:
  from matplotlib.figure import Figure

LOSS = "training loss"
# What can be equal, and how it is called.
BUDGETS = {
  "steps": "steps",
  "gradient_evaluations": "gradient evaluations",
  "seconds": "wall time",
}
# Reached all the same: cumulated times and evaluations are sums of rounded numbers.
_ROUNDING = 1e-9


@dataclasses.dataclass(frozen=True)
class RaceCurves:
  """One method's curves, at ``m`` points of the training, for ``n`` seeds.

  Attributes:
    steps: ``(m,)``, the steps made.
    loss: ``(n, m)``, the mean training loss of the steps since the point before.
    metrics: by name, ``(n, m)``: what `evaluate` returned.
    gradient_evaluations: ``(m,)``, what was computed so far, in gradients of one batch; a value
      of the loss without its gradient counts a third. Where it varies, that of the first seed.
    seconds: ``(m,)``, the time that the steps took so far, for one seed alone, without compiling
      and evaluating; nan where it is not known.
    compile_seconds: what compiling the step took.
    seeds_at_once: how many seeds were trained at once.
  """

  steps: np.ndarray
  loss: np.ndarray
  metrics: Mapping[str, np.ndarray]
  gradient_evaluations: np.ndarray
  seconds: np.ndarray
  compile_seconds: float
  seeds_at_once: int

  @property
  def gradient_evaluations_per_step(self) -> float:
    """The mean over the run."""
    return float(self.gradient_evaluations[-1] / self.steps[-1])

  @property
  def seconds_per_step(self) -> float:
    """The mean over the run."""
    return float(self.seconds[-1] / self.steps[-1])

  @property
  def diverged(self) -> np.ndarray:
    """``(n,)``, whether the loss was not finite at the end."""
    return ~np.isfinite(self.loss[:, -1])


@dataclasses.dataclass(frozen=True)
class RaceResult:
  """What :func:`race` returns.

  Attributes:
    curves: by method, its :class:`RaceCurves`.
    seeds: the seeds, in the order of the curves' rows.
    baseline: the method that the others are compared with.
    complete: False after an interruption: there are fewer seeds than asked for, or fewer points.
    device: the kind of device that it ran on.
  """

  curves: Mapping[str, RaceCurves]
  seeds: tuple[int, ...]
  baseline: str
  complete: bool
  device: str

  @property
  def quantities(self) -> list[str]:
    """What can be compared: the metrics, and the training loss."""
    return [*self.curves[self.baseline].metrics, LOSS]

  def budget(self, of: str) -> float:
    """What every method has spent at the end, at least; those that always diverged aside.

    Args:
      of: ``"steps"``, ``"gradient_evaluations"`` or ``"seconds"``.

    Returns:
      The smallest total over the methods; nan if one is not known.
    """
    self._check(of, BUDGETS, "of")
    curves = self.curves.values()
    came_through = [one for one in curves if not one.diverged.all()] or curves
    return float(np.min([getattr(one, of)[-1] for one in came_through]))

  def values(self, name: str, quantity: str, of: str = "steps") -> np.ndarray:
    """A method's values where it has spent the budget.

    Args:
      name: the method.
      quantity: one of `quantities`.
      of: the budget, see :meth:`budget`.

    Returns:
      ``(n,)``, interpolated between the points of each seed's curve; nan for a seed that diverged,
      and where the budget is spent before the first point.
    """
    self._check(name, self.curves, "name")
    self._check(quantity, self.quantities, "quantity")
    curves = self.curves[name]
    at, x = self.budget(of), getattr(curves, of)
    found = [interpolate(x, y, at) for y in self.rows(name, quantity)]
    return np.where(curves.diverged, math.nan, found)

  def difference(self, name: str, quantity: str, of: str = "steps") -> tuple[float, float | None]:
    """The mean difference to the baseline, seed by seed.

    Args:
      name: the method.
      quantity: one of `quantities`.
      of: the budget, see :meth:`budget`.

    Returns:
      The mean of the paired differences over the seeds that neither method diverged on (nan
      without any), and half of its 95 % interval by Student's t (None for a single seed).
    """
    paired = self.values(name, quantity, of) - self.values(self.baseline, quantity, of)
    paired = paired[np.isfinite(paired)]
    return (float(np.mean(paired)) if paired.size else math.nan), half_interval(paired)

  def rows(self, name: str, quantity: str) -> np.ndarray:
    """A method's curves of one quantity, ``(n, m)``.

    Args:
      name: the method.
      quantity: one of `quantities`.

    Returns:
      The array.
    """
    curves = self.curves[name]
    return curves.loss if quantity == LOSS else curves.metrics[quantity]

  def table(self) -> str:
    """Markdown tables: one for each kind of budget, and one of what a step costs.

    Returns:
      The tables with a heading each. ± after a mean is the standard deviation over seeds, after a
      difference half of the 95 % interval of the paired mean.
    """
    parts, shared = [], self._coinciding()
    if not self.complete:
      parts.append(f"Interrupted: {self._extent()} is all there is.")
    for of, others in shared.items():
      names = [BUDGETS[of], *(BUDGETS[other] for other in others)]
      budget = self.budget(of)
      amount = f"{budget:.3g} s" if of == "seconds" else f"{budget:,.4g}"
      amount = "not known" if math.isnan(budget) else amount
      parts.append(f"At equal {' and '.join(names)} ({amount}):\n\n{self._comparison(of)}")
    parts.append(f"What it costs:\n\n{self._costs()}")
    return "\n\n".join(parts)

  def verdict(self, name: str, quantity: str | None = None) -> str:
    """One line on what a method changes.

    Args:
      name: the method.
      quantity: one of `quantities`; None: the first.

    Returns:
      By how much it is higher or lower than the baseline, for each kind of budget.
    """
    self._check(name, self.curves, "name")
    quantity = self.quantities[0] if quantity is None else quantity
    self._check(quantity, self.quantities, "quantity")
    lost = int(self.curves[name].diverged.sum())
    if lost == len(self.seeds):
      return f"{name}: diverged."
    notes = [f"diverged on {lost} of {len(self.seeds)} seeds"] if lost else []
    if name == self.baseline:
      return f"{name}: {'; '.join(['the baseline', *notes])}."
    findings: dict[str, list[str]] = {}
    for of in BUDGETS:
      finding = _finding(*self.difference(name, quantity, of))
      findings.setdefault(finding, []).append(BUDGETS[of])
    parts = [f"{text} at equal {' and '.join(where)}" for text, where in findings.items()]
    return f"{name}: {quantity} against {self.baseline}: {'; '.join([*parts, *notes])}."

  def plot(
    self,
    path: str | os.PathLike[str] | None = None,
    *,
    quantities: Sequence[str] | None = None,
    against: Sequence[str] = tuple(BUDGETS),
  ) -> "Figure":
    """Draws the curves: the mean over seeds between one standard deviation to both sides.

    Args:
      path: where to save the picture, by a temporary name and renamed; None: it is not saved.
      quantities: a row of panels each; None: the first of `quantities`.
      against: a column of panels each, of ``"steps"``, ``"gradient_evaluations"``, ``"seconds"``; a
        single column is laid on its side.

    Returns:
      A matplotlib figure.

    Raises:
      ImportError: matplotlib is not installed.
    """
    from optax_boost._race import _plot

    for quantity in (quantities := quantities or self.quantities[:1]):
      self._check(quantity, self.quantities, "quantities")
    for of in against:
      self._check(of, BUDGETS, "against")
    figure = _plot.draw(self, quantities, against)
    if path is not None:
      suffix = pathlib.Path(path).suffix.lstrip(".") or "png"
      _write(path, lambda partial: figure.savefig(partial, format=suffix))
    return figure

  def save(self, path: str | os.PathLike[str]) -> None:
    """Writes everything as JSON, whole or not at all.

    Args:
      path: the file.
    """
    text = json.dumps(_plain(dataclasses.asdict(self)), indent=1, allow_nan=False)
    _write(path, lambda partial: partial.write_text(text))

  @classmethod
  def load(cls, path: str | os.PathLike[str]) -> "RaceResult":
    """Reads what :meth:`save` wrote.

    Args:
      path: the file.

    Returns:
      The result.

    Raises:
      ValueError: the file holds something else.
    """
    try:
      read = json.loads(pathlib.Path(path).read_text())
      curves = {name: _curves(fields) for name, fields in read.pop("curves").items()}
      return cls(**read | {"curves": curves, "seeds": tuple(read["seeds"])})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
      raise ValueError(f"`load` needs a file that RaceResult.save wrote; got {path}.") from error

  def _check(self, value: Any, allowed: Any, argument: str) -> None:
    if value not in allowed:
      raise ValueError(f"`{argument}` must be one of {', '.join(allowed)}; got {value!r}.")

  def _extent(self) -> str:
    steps, seeds = int(self.curves[self.baseline].steps[-1]), len(self.seeds)
    return f"{seeds} seed{'s' if seeds > 1 else ''} of {steps} steps"

  def _coinciding(self) -> dict[str, list[str]]:
    """The budgets, and with each of them those that are the same for every method."""
    found: dict[str, list[str]] = {}
    for of in BUDGETS:
      shares = [_shares(self, of, other) for other in found]
      if any(shares):
        found[list(found)[shares.index(True)]].append(of)
      else:
        found[of] = []
    return found

  def _comparison(self, of: str) -> str:
    others = f"against {self.baseline}"
    header = ["method", *(x for q in self.quantities for x in (q, others)), "seeds"]
    lines = []
    for name, curves in self.curves.items():
      cells, lost = [name], int(curves.diverged.sum())
      for quantity in self.quantities:
        values = self.values(name, quantity, of)
        values = values[np.isfinite(values)]
        cells.append(plus_minus(values.mean(), _spread(values)) if values.size else "-")
        mean, half = self.difference(name, quantity, of)
        known = name != self.baseline and not math.isnan(mean)
        cells.append(plus_minus(mean, half, sign="+") if known else "-")
      seeds = len(self.seeds)
      lines.append([*cells, f"diverged: {lost} of {seeds}" if lost else str(seeds)])
    return markdown([header, *lines])

  def _costs(self) -> str:
    header = ["method", "gradients per step", "ms per step", "compiling", "seeds at once"]
    lines = [
      [
        name,
        f"{curves.gradient_evaluations_per_step:.3g}",
        f"{1e3 * curves.seconds_per_step:.3g}",
        f"{curves.compile_seconds:.1f} s",
        str(curves.seeds_at_once),
      ]
      for name, curves in self.curves.items()
    ]
    return markdown([header, *lines])


def interpolate(x: np.ndarray, y: np.ndarray, at: float) -> float:
  """A curve's value, where it is known to both sides.

  Args:
    x: ascending.
    y: of the same length; points that are not finite are left out.
    at: where.

  Returns:
    The value on the line between the neighbours; nan outside of the curve.
  """
  finite = np.isfinite(x) & np.isfinite(y)
  x, y = x[finite], y[finite]
  if not x.size or not x[0] * (1 - _ROUNDING) <= at <= x[-1] * (1 + _ROUNDING):
    return math.nan
  return float(np.interp(at, x, y))


def half_interval(values: np.ndarray) -> float | None:
  """Half of the 95 % interval of a mean, by Student's t.

  Args:
    values: the sample.

  Returns:
    The half width; None for less than two values.
  """
  # Imported late: nothing else needs SciPy, which JAX brings along.
  from scipy import special

  if len(values) < 2:
    return None
  quantile = special.stdtrit(len(values) - 1, 0.975)
  return float(quantile * np.std(values, ddof=1) / math.sqrt(len(values)))


def plus_minus(mean: float, spread: float | None, sign: str = "") -> str:
  """A mean with its spread, to the second digit of the spread.

  Args:
    mean: the mean.
    spread: its spread, or None.
    sign: ``"+"`` to show the sign of positive means.

  Returns:
    The text.
  """
  if spread is None:
    return f"{mean:{sign}.4g}"
  if not 1e-12 < spread < 1e6:
    return f"{mean:{sign}.4g} ± {spread:.2g}"
  decimals = max(0, 1 - math.floor(math.log10(spread)))
  if decimals > 5:
    return f"{mean:{sign}.3e} ± {spread:.1e}"
  return f"{mean:{sign}.{decimals}f} ± {spread:.{decimals}f}"


def markdown(lines: Sequence[Sequence[str]]) -> str:
  """A Markdown table whose columns line up as plain text.

  Args:
    lines: the cells, line by line; the first is the header.

  Returns:
    The table.
  """
  widths = [max(map(len, column)) for column in zip(*lines, strict=True)]

  def line(cells: Sequence[str]) -> str:
    padded = [
      cell.rjust(width) if i else cell.ljust(width)
      for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return f"| {' | '.join(padded)} |"

  rule = [("-" * width if i == 0 else "-" * (width - 1) + ":") for i, width in enumerate(widths)]
  return "\n".join([line(lines[0]), line(rule), *map(line, lines[1:])])


def _spread(values: np.ndarray) -> float | None:
  return float(np.std(values, ddof=1)) if len(values) > 1 else None


def _finding(mean: float, half: float | None) -> str:
  if math.isnan(mean):
    return "not known"
  direction = "higher" if mean > 0 else "lower"
  if half is None:
    return f"{direction} by {abs(mean):.3g} with the one seed, which says little"
  if abs(mean) <= half:
    return f"no clear difference ({plus_minus(mean, half, sign='+')})"
  return f"{direction} by {plus_minus(abs(mean), half)}"


def _shares(result: RaceResult, of: str, other: str) -> bool:
  """Whether two budgets are the same: every method spends the two in one proportion."""
  ratios = [getattr(c, of) / getattr(c, other) for c in result.curves.values()]
  return bool(np.allclose(ratios, np.ravel(ratios)[0], rtol=1e-6, atol=0))


def _plain(value: Any) -> Any:
  """What JSON knows; of numbers that are not finite, the names."""
  if isinstance(value, dict):
    return {key: _plain(item) for key, item in value.items()}
  if isinstance(value, np.ndarray):
    return _plain(value.tolist())
  if isinstance(value, list | tuple):
    return [_plain(item) for item in value]
  if isinstance(value, float) and not math.isfinite(value):
    return str(value)
  return value


def _array(values: list[Any], dtype: Any = float) -> np.ndarray:
  if any(isinstance(item, list) for item in values):
    return np.array([_array(item, dtype) for item in values])
  return np.array([float(item) for item in values]).astype(dtype)


def _curves(fields: dict[str, Any]) -> RaceCurves:
  return RaceCurves(
    steps=_array(fields["steps"], int),
    loss=_array(fields["loss"]),
    metrics={name: _array(rows) for name, rows in fields["metrics"].items()},
    gradient_evaluations=_array(fields["gradient_evaluations"]),
    seconds=_array(fields["seconds"]),
    compile_seconds=float(fields["compile_seconds"]),
    seeds_at_once=int(fields["seeds_at_once"]),
  )


def _write(path: str | os.PathLike[str], write: Any) -> None:
  """Writes under a temporary name and renames, so that the file is whole or not there."""
  target = pathlib.Path(path)
  partial = target.with_name(f".{target.name}.{os.getpid()}.part")
  try:
    write(partial)
    os.replace(partial, os.path.realpath(target))
  finally:
    partial.unlink(missing_ok=True)

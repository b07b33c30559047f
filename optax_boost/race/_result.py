"""The result of a race: curves, compared at equal steps, gradient evaluations and time."""

from collections.abc import Collection
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import math
import os
import pathlib
from typing import TYPE_CHECKING
from typing import Any

import numpy as np

from optax_boost import _base
from optax_boost import _files
from optax_boost.race import _curves
from optax_boost.race import _saved
from optax_boost.race import _text

if TYPE_CHECKING:
  from matplotlib.figure import Figure

# The budgets of a comparison, and their names in tables.
BUDGETS = {
  "steps": "steps",
  "gradient_evaluations": "gradient evaluations",
  "seconds": "wall time",
}
# Reached all the same: cumulated times and evaluations are sums of rounded numbers.
_ROUNDING = 1e-9


@dataclasses.dataclass(frozen=True)
class RaceResult:
  """The result of :func:`race`.

  Attributes:
    curves: by method, its :class:`RaceCurves`.
    seeds: the seeds, in the order of the curves' rows.
    baseline: the method that the others are compared with.
    complete: False after an interruption: seeds or points are missing.
    device: the kind of device that it ran on.
  """

  curves: Mapping[str, _curves.RaceCurves]
  seeds: tuple[int, ...]
  baseline: str
  complete: bool
  device: str

  def __post_init__(self) -> None:
    _base.check_type("curves", self.curves, Mapping, "a dict of RaceCurves")
    for name, curves in self.curves.items():
      if not (isinstance(name, str) and isinstance(curves, _curves.RaceCurves)):
        raise TypeError(
          "`curves` must hold RaceCurves by name; got"
          f" {_base.shorten(curves)} for {_base.shorten(name)}."
        )
    if not self.curves:
      raise ValueError("`curves` must hold at least one method; got none.")
    _base.check_type("seeds", self.seeds, tuple, "a tuple of seeds")
    check_seeds(self.seeds)
    _base.check_name("baseline", self.baseline, list(self.curves))
    _base.check_bool("complete", self.complete)
    _base.check_type("device", self.device, str, "a string")
    first = self.curves[self.baseline]
    for name, curves in self.curves.items():
      if len(curves.loss) != len(self.seeds):
        raise ValueError(
          f"`curves[{name!r}]` must have a row for each of the {len(self.seeds)} seeds; got"
          f" {len(curves.loss)}."
        )
      if not np.array_equal(curves.steps, first.steps) or set(curves.metrics) != set(first.metrics):
        raise ValueError(
          f"`curves[{name!r}]` must have the points and metrics of `curves[{self.baseline!r}]`,"
          " the baseline."
        )

  @property
  def quantities(self) -> list[str]:
    """The quantities to compare: the metrics, and the training loss."""
    return [*self.curves[self.baseline].metrics, _curves.LOSS]

  def budget(self, of: str) -> float:
    """The smallest total over the methods, but those that always diverged; nan if one is unknown.

    Args:
      of: ``"steps"``, ``"gradient_evaluations"`` or ``"seconds"``.
    """
    _base.check_name("of", of, list(BUDGETS))
    curves = self.curves.values()
    came_through = [one for one in curves if not one.diverged.all()] or curves
    return float(np.min([getattr(one, of)[-1] for one in came_through]))

  def rows(self, name: str, quantity: str) -> np.ndarray:
    """A method's curves of one of the `quantities`, ``(n, m)``."""
    _base.check_name("name", name, list(self.curves))
    _base.check_name("quantity", quantity, self.quantities)
    curves = self.curves[name]
    return curves.loss if quantity == _curves.LOSS else curves.metrics[quantity]

  def values(self, name: str, quantity: str, of: str = "steps") -> np.ndarray:
    """A method's values where it has spent the budget `of`, see :meth:`budget`.

    Returns:
      ``(n,)``, interpolated between the points of each seed's curve; nan for a seed that diverged,
      and where the budget is spent before the first point.
    """
    rows, curves, at = self.rows(name, quantity), self.curves[name], self.budget(of)
    values = [_interpolate(getattr(curves, of), row, at) for row in rows]
    return np.where(curves.diverged, math.nan, values)

  def difference(self, name: str, quantity: str, of: str = "steps") -> tuple[float, float | None]:
    """The mean difference to the baseline, seed by seed; arguments as for :meth:`values`.

    Returns:
      The mean of the paired differences over the seeds that neither method diverged on (nan
      without any), and half of its 95 % interval by Student's t (None for a single seed).
    """
    paired = self.values(name, quantity, of) - self.values(self.baseline, quantity, of)
    paired = paired[np.isfinite(paired)]
    return (float(np.mean(paired)) if paired.size else math.nan), _text.half_interval(paired)

  def table(self) -> str:
    """Markdown tables: one for each kind of budget, and one of the cost of a step.

    Returns:
      The tables with a heading each. ± after a mean is the standard deviation over seeds, after a
      difference half of the 95 % interval of the paired mean.
    """
    parts = []
    if not self.complete:
      steps, seeds = self.curves[self.baseline].steps[-1], len(self.seeds)
      extent = f"{seeds} seed{'s' if seeds > 1 else ''} of {steps} steps"
      parts.append(f"Interrupted: {extent} is all there is.")
    for of, *others in self._distinct_budgets():
      names = " and ".join(BUDGETS[name] for name in (of, *others))
      budget = self.budget(of)
      amount = f"{budget:.3g} s" if of == "seconds" else f"{budget:,.4g}"
      amount = "not known" if math.isnan(budget) else amount
      parts.append(f"At equal {names} ({amount}):\n\n{self._comparison(of)}")
    costs = [
      [
        name,
        f"{curves.gradient_evaluations_per_step:.3g}",
        f"{1e3 * curves.seconds_per_step:.3g}",
        f"{curves.compile_seconds:.1f} s",
        str(curves.seeds_at_once),
      ]
      for name, curves in self.curves.items()
    ]
    header = ["method", "gradients per step", "ms per step", "compiling", "seeds at once"]
    parts.append(f"Costs:\n\n{_text.markdown([header, *costs])}")
    return "\n\n".join(parts)

  def _distinct_budgets(self) -> list[list[str]]:
    """The budgets; together, those that every method spends in one proportion."""
    distinct: list[list[str]] = []
    for of in BUDGETS:
      for others in distinct:
        ratios = [getattr(c, of) / getattr(c, others[0]) for c in self.curves.values()]
        if np.allclose(ratios, np.ravel(ratios)[0], rtol=1e-6, atol=0):
          others.append(of)
          break
      else:
        distinct.append([of])
    return distinct

  def _comparison(self, of: str) -> str:
    others = f"against {self.baseline}"
    lines = [["method", *(x for q in self.quantities for x in (q, others)), "seeds"]]
    for name, curves in self.curves.items():
      cells = [name]
      for quantity in self.quantities:
        values = self.values(name, quantity, of)
        counted = values[np.isfinite(values)]
        spread = float(np.std(counted, ddof=1)) if len(counted) > 1 else None
        cell = _text.plus_minus(counted.mean(), spread) if counted.size else "-"
        without = np.sum(~np.isfinite(values) & ~curves.diverged)
        cells.append(f"{cell}, not finite: {without}" if counted.size and without else cell)
        mean, half = self.difference(name, quantity, of)
        known = name != self.baseline and not math.isnan(mean)
        cells.append(_text.plus_minus(mean, half, sign="+") if known else "-")
      lost, seeds = curves.diverged.sum(), len(self.seeds)
      lines.append([*cells, f"diverged: {lost} of {seeds}" if lost else str(seeds)])
    return _text.markdown(lines)

  def verdict(self, name: str, quantity: str | None = None) -> str:
    """One line: how much a quantity (None: the first) differs from the baseline's, per budget."""
    quantity = self.quantities[0] if quantity is None else quantity
    self.rows(name, quantity)  # checks the names
    lost, seeds = self.curves[name].diverged.sum(), len(self.seeds)
    if lost == seeds:
      return f"{name}: diverged."
    notes = [f"diverged on {lost} of {seeds} seeds"] if lost else []
    finite = np.isfinite(self.values(name, quantity, "steps"))
    if without := np.sum(~finite & ~self.curves[name].diverged):
      notes.append(f"not finite on {without} of {seeds} seeds")
    if name == self.baseline:
      return f"{name}: {'; '.join(['the baseline', *notes])}."
    findings: dict[str, list[str]] = {}
    for of in BUDGETS:
      finding = _text.finding(*self.difference(name, quantity, of))
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
      OSError: the file can't be written.
      TypeError: an argument is of the wrong kind.
      ValueError: a name is unknown, or matplotlib writes no such file.
    """
    from optax_boost.race import _plot

    quantities = self.quantities[:1] if quantities is None else quantities
    _check_names("quantities", quantities, self.quantities)
    _check_names("against", against, list(BUDGETS))
    figure = _plot.draw(self, quantities, against)
    if path is not None:
      suffix = pathlib.Path(_files.check_path("path", path)).suffix.lstrip(".").lower() or "png"
      _base.check_name("path's suffix", suffix, list(figure.canvas.get_supported_filetypes()))
      _files.write_atomically(path, lambda file: figure.savefig(file, format=suffix))
    return figure

  def save(self, path: str | os.PathLike[str]) -> None:
    """Writes a JSON file, whole or not at all; threads may save to one file at once.

    Raises:
      OSError: the file can't be written; the old one is unchanged.
    """
    data = _saved.text(self).encode()
    _files.write_atomically(path, lambda file: file.write(data))

  @classmethod
  def load(cls, path: str | os.PathLike[str]) -> "RaceResult":
    """Reads a file of :meth:`save`.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file holds something else; the message names it.
    """
    content = _files.read_json("path", path)
    try:
      return _saved.read(content, cls)
    except (ArithmeticError, TypeError, ValueError) as error:
      raise ValueError(
        f"`load` needs a file that RaceResult.save wrote; got {os.fspath(path)}: {error}"
      ) from error


def _interpolate(x: np.ndarray, y: np.ndarray, at: float) -> float:
  """The value at `at` of a curve over ascending `x`; nan outside of it. Drops infinities."""
  finite = np.isfinite(x) & np.isfinite(y)
  x, y = x[finite], y[finite]
  if not x.size or not x[0] * (1 - _ROUNDING) <= at <= x[-1] * (1 + _ROUNDING):
    return math.nan
  return float(np.interp(at, x, y))


def check_seeds(seeds: Collection[Any]) -> None:
  """Checks that seeds are whole numbers >= 0, each of them once."""
  for seed in seeds:
    _base.check_whole_number("seeds", seed, minimum=0, static=True)
  if len(set(seeds)) < len(seeds):
    raise ValueError(f"`seeds` must differ; got {_base.shorten(seeds)}.")


def _check_names(argument: str, names: Any, allowed: Sequence[str]) -> None:
  if isinstance(names, str) or not isinstance(names, Sequence):
    raise TypeError(f"`{argument}` must be a list of names; got {_base.shorten(names)}.")
  if not names:
    raise ValueError(f"`{argument}` must hold at least one of {', '.join(allowed)}; got none.")
  for name in names:
    _base.check_name(argument, name, allowed)

"""The result of a race: curves, compared at equal steps, gradient evaluations and time."""

from collections.abc import Collection
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

from optax_boost import _base
from optax_boost import _files

if TYPE_CHECKING:
  from matplotlib.figure import Figure

LOSS = "training loss"
# The budgets of a comparison, and their names in tables.
BUDGETS = {
  "steps": "steps",
  "gradient_evaluations": "gradient evaluations",
  "seconds": "wall time",
}
# Of the format of files; those without a version are of the first.
VERSION = 1
# Reached all the same: cumulated times and evaluations are sums of rounded numbers.
_ROUNDING = 1e-9


@dataclasses.dataclass(frozen=True)
class RaceCurves:
  """One method's curves, at ``m`` points of the training, for ``n`` seeds.

  Attributes:
    steps: ``(m,)``, the steps made.
    loss: ``(n, m)``, the mean training loss of the steps since the point before.
    metrics: by name, ``(n, m)``, the values of `evaluate`.
    gradient_evaluations: ``(m,)``, the evaluations so far, in gradients of one batch; a value of
      the loss without its gradient counts a third. Where it varies, that of the first seed.
    seconds: ``(m,)``, the time that the steps took so far, for one seed alone, without compiling
      and evaluating; nan if unknown.
    compile_seconds: the time to compile the step; nan if unknown.
    seeds_at_once: how many seeds were trained at once.
  """

  steps: np.ndarray
  loss: np.ndarray
  metrics: Mapping[str, np.ndarray]
  gradient_evaluations: np.ndarray
  seconds: np.ndarray
  compile_seconds: float
  seeds_at_once: int

  def __post_init__(self) -> None:
    _check_array("steps", self.steps, 1, kinds="iu")
    points = len(self.steps)
    if not points or np.any(np.diff(self.steps, prepend=0) <= 0):
      raise ValueError(
        f"`steps` must be whole numbers >= 1 that grow, at least one; got"
        f" {_base.shorten(self.steps.tolist())}."
      )
    _check_array("loss", self.loss, 2)
    if not len(self.loss) or self.loss.shape[1] != points:
      raise ValueError(
        f"`loss` must have a row for each seed, at least one, and {points} columns, the points of"
        f" `steps`; got shape {self.loss.shape}."
      )
    _base.check_type("metrics", self.metrics, Mapping, "a dict of arrays by name")
    for name, rows in self.metrics.items():
      if not isinstance(name, str) or name == LOSS:
        raise ValueError(
          f"`metrics` must have names other than '{LOSS}'; got {_base.shorten(name)}."
        )
      _check_array(f"metrics[{name!r}]", rows, 2)
      if rows.shape != self.loss.shape:
        raise ValueError(
          f"`metrics[{name!r}]` must have the shape of `loss`, {self.loss.shape}; got {rows.shape}."
        )
    for name in ("gradient_evaluations", "seconds"):
      spent = getattr(self, name)
      _check_array(name, spent, 1)
      known = spent[~np.isnan(spent)]
      if len(spent) != points or np.any(np.diff(known, prepend=0) < 0) or np.any(np.isinf(known)):
        raise ValueError(
          f"`{name}` must be {points} numbers >= 0 that do not fall, or nan; got"
          f" {_base.shorten(spent.tolist())}."
        )
    if not (isinstance(self.compile_seconds, float) and math.isnan(self.compile_seconds)):
      _base.check_number("compile_seconds", self.compile_seconds)
    _base.check_whole_number("seeds_at_once", self.seeds_at_once, static=True)

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
  """The result of :func:`race`.

  Attributes:
    curves: by method, its :class:`RaceCurves`.
    seeds: the seeds, in the order of the curves' rows.
    baseline: the method that the others are compared with.
    complete: False after an interruption: seeds or points are missing.
    device: the kind of device that it ran on.
  """

  curves: Mapping[str, RaceCurves]
  seeds: tuple[int, ...]
  baseline: str
  complete: bool
  device: str

  def __post_init__(self) -> None:
    _base.check_type("curves", self.curves, Mapping, "a dict of RaceCurves")
    for name, curves in self.curves.items():
      if not (isinstance(name, str) and isinstance(curves, RaceCurves)):
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
    return [*self.curves[self.baseline].metrics, LOSS]

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
    return curves.loss if quantity == LOSS else curves.metrics[quantity]

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
    return (float(np.mean(paired)) if paired.size else math.nan), _half_interval(paired)

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
    parts.append(f"Costs:\n\n{_markdown([header, *costs])}")
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
        values = values[np.isfinite(values)]
        spread = float(np.std(values, ddof=1)) if len(values) > 1 else None
        cells.append(_plus_minus(values.mean(), spread) if values.size else "-")
        mean, half = self.difference(name, quantity, of)
        known = name != self.baseline and not math.isnan(mean)
        cells.append(_plus_minus(mean, half, sign="+") if known else "-")
      lost, seeds = curves.diverged.sum(), len(self.seeds)
      lines.append([*cells, f"diverged: {lost} of {seeds}" if lost else str(seeds)])
    return _markdown(lines)

  def verdict(self, name: str, quantity: str | None = None) -> str:
    """One line: how much a quantity (None: the first) differs from the baseline's, per budget."""
    quantity = self.quantities[0] if quantity is None else quantity
    self.rows(name, quantity)  # checks the names
    lost, seeds = self.curves[name].diverged.sum(), len(self.seeds)
    if lost == seeds:
      return f"{name}: diverged."
    notes = [f"diverged on {lost} of {seeds} seeds"] if lost else []
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
      OSError: the file can't be written.
      TypeError: an argument is of the wrong kind.
      ValueError: a name is unknown, or matplotlib writes no such file.
    """
    from optax_boost.race import _plot

    quantities = self.quantities[:1] if quantities is None else quantities
    _check_names("quantities", quantities, self.quantities)
    _check_names("against", against, list(BUDGETS))
    suffix = "png"
    if path is not None:
      suffix = pathlib.Path(_files.check_path("path", path)).suffix.lstrip(".").lower() or suffix
    figure = _plot.draw(self, quantities, against)
    if path is not None:
      _base.check_name("path's suffix", suffix, list(figure.canvas.get_supported_filetypes()))
      _files.write_atomically(path, lambda file: figure.savefig(file, format=suffix))
    return figure

  def save(self, path: str | os.PathLike[str]) -> None:
    """Writes a JSON file, whole or not at all; threads may save to one file at once.

    Raises:
      OSError: the file can't be written; the old one is unchanged.
    """
    content = {"version": VERSION, **_to_json(dataclasses.asdict(self))}
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    _files.write_atomically(path, lambda file: file.write(text.encode()))

  @classmethod
  def load(cls, path: str | os.PathLike[str]) -> "RaceResult":
    """Reads a file of :meth:`save`.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file holds something else; the message names it.
    """
    content = _files.read_json("path", path)
    try:
      return _read_result(content)
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


def _half_interval(values: np.ndarray) -> float | None:
  """Half of the 95 % interval of the mean, by Student's t; None for less than two values."""
  # Imported late: nothing else needs SciPy, which JAX brings along.
  from scipy import special

  if len(values) < 2:
    return None
  quantile = special.stdtrit(len(values) - 1, 0.975)
  return float(quantile * np.std(values, ddof=1) / math.sqrt(len(values)))


def _plus_minus(mean: float, spread: float | None, sign: str = "") -> str:
  """A mean with its spread, to the second digit of the spread; `sign` "+" shows plus signs."""
  if spread is None:
    return f"{mean:{sign}.4g}"
  if not 1e-12 < spread < 1e6:
    return f"{mean:{sign}.4g} ± {spread:.2g}"
  decimals = max(0, 1 - math.floor(math.log10(spread)))
  if decimals > 5:
    return f"{mean:{sign}.3e} ± {spread:.1e}"
  return f"{mean:{sign}.{decimals}f} ± {spread:.{decimals}f}"


def _finding(mean: float, half: float | None) -> str:
  """A mean difference in words, with half of its interval."""
  if math.isnan(mean):
    return "not known"
  direction = "higher" if mean > 0 else "lower"
  if half is None:
    return f"{direction} by {abs(mean):.3g} with the one seed, which says little"
  if abs(mean) <= half:
    return f"no clear difference ({_plus_minus(mean, half, sign='+')})"
  return f"{direction} by {_plus_minus(abs(mean), half)}"


def _markdown(lines: Sequence[Sequence[str]]) -> str:
  """A Markdown table whose columns line up as plain text; the first line is the header."""
  columns = []
  # A user's names may hold what ends a cell.
  lines = [[" ".join(cell.replace("|", r"\|").splitlines()) for cell in line] for line in lines]
  for i, column in enumerate(zip(*lines, strict=True)):
    width = max(map(len, column))
    # The first column is the method's name; numbers are aligned to the right.
    rule = "-" * (width - 1) + ":" if i else "-" * width
    pad = str.rjust if i else str.ljust
    head, *cells = (pad(cell, width) for cell in column)
    columns.append([head, rule, *cells])
  return "\n".join(f"| {' | '.join(line)} |" for line in zip(*columns, strict=True))


def _to_json(value: Any) -> Any:
  """Values of JSON's types; numbers that are not finite become their names."""
  if isinstance(value, dict):
    return {key: _to_json(item) for key, item in value.items()}
  if isinstance(value, np.ndarray | np.generic):
    value = value.tolist()
  if isinstance(value, list | tuple):
    return [_to_json(item) for item in value]
  return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _read_result(content: Any) -> RaceResult:
  fields = _read_fields("the file", content, RaceResult, optional=("version",))
  version = fields.pop("version", VERSION)
  if type(version) is not int or version != VERSION:
    raise ValueError(f"`version` must be {VERSION}; got {_base.shorten(version)}.")
  _base.check_type("curves", fields["curves"], dict, "an object")
  _base.check_type("seeds", fields["seeds"], list, "a list")
  curves = {}
  for name, values in fields["curves"].items():
    try:
      curves[name] = _read_curves(values)
    except (ArithmeticError, TypeError, ValueError) as error:
      raise ValueError(f"`curves[{name!r}]`: {error}") from error
  return RaceResult(**fields | {"curves": curves, "seeds": tuple(fields["seeds"])})


def _read_curves(content: Any) -> RaceCurves:
  fields = _read_fields("the curves", content, RaceCurves)
  _base.check_type("steps", fields["steps"], list, "a list")
  for step in fields["steps"]:
    _base.check_whole_number("steps", step, static=True)
  _base.check_type("metrics", fields["metrics"], dict, "an object")
  metrics = {
    name: _read_rows(f"metrics[{name!r}]", rows) for name, rows in fields["metrics"].items()
  }
  return RaceCurves(
    np.array(fields["steps"], int),
    _read_rows("loss", fields["loss"]),
    metrics,
    _read_row("gradient_evaluations", fields["gradient_evaluations"]),
    _read_row("seconds", fields["seconds"]),
    _read_row("compile_seconds", [fields["compile_seconds"]])[0].item(),
    fields["seeds_at_once"],
  )


def _read_fields(
  where: str, content: Any, kind: Any, optional: Collection[str] = ()
) -> dict[str, Any]:
  """A copy of a JSON object that has the fields of a dataclass as its keys, and no others."""
  if not isinstance(content, dict):
    raise TypeError(f"{where} must be an object; got {_base.shorten(content)}.")
  names = [field.name for field in dataclasses.fields(kind)]
  missing = [name for name in names if name not in content]
  unknown = [name for name in content if name not in {*names, *optional}]
  if missing or unknown:
    listed = [f"lacks {_base.shorten(missing)}"] if missing else []
    listed += [f"has {_base.shorten(unknown)}, which is unknown"] if unknown else []
    raise ValueError(f"{where} {' and '.join(listed)}.")
  return dict(content)


def _read_row(name: str, values: Any) -> np.ndarray:
  _base.check_type(name, values, list, "a list")
  for value in values:
    # JSON has no names for them but strings.
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number or (isinstance(value, str) and value in ("nan", "inf", "-inf"))):
      raise TypeError(f"`{name}` must hold numbers; got {_base.shorten(value)}.")
  return np.array([float(value) for value in values])


def _read_rows(name: str, values: Any) -> np.ndarray:
  _base.check_type(name, values, list, "a list")
  rows = [_read_row(name, row) for row in values]
  lengths = [len(row) for row in rows]
  if len(set(lengths)) > 1:
    raise ValueError(f"`{name}` must have rows of one length; got {lengths}.")
  return np.array(rows).reshape(len(rows), max(lengths, default=0))


def check_seeds(seeds: Collection[Any]) -> None:
  """Checks that seeds are whole numbers >= 0, each of them once."""
  for seed in seeds:
    _base.check_whole_number("seeds", seed, minimum=0, static=True)
  if len(set(seeds)) < len(seeds):
    raise ValueError(f"`seeds` must differ; got {_base.shorten(seeds)}.")


def _check_array(name: str, value: Any, axes: int, kinds: str = "iuf") -> None:
  if not isinstance(value, np.ndarray) or value.dtype.kind not in kinds or value.ndim != axes:
    what = "whole numbers" if kinds == "iu" else "real numbers"
    got = f"shape {value.shape}, dtype {value.dtype}" if isinstance(value, np.ndarray) else value
    raise TypeError(
      f"`{name}` must be a NumPy array of {what} with {axes} axes; got {_base.shorten(got)}."
    )


def _check_names(argument: str, names: Any, allowed: Sequence[str]) -> None:
  if isinstance(names, str) or not isinstance(names, Sequence):
    raise TypeError(f"`{argument}` must be a list of names; got {_base.shorten(names)}.")
  if not names:
    raise ValueError(f"`{argument}` must hold at least one of {', '.join(allowed)}; got none.")
  for name in names:
    _base.check_name(argument, name, allowed)

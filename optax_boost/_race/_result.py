"""The result of a race: its curves, and their comparison at equal budgets.

For m comparisons whose p-values are p_1 <= ... <= p_m, Holm's method corrects them to

  q_i = max over j <= i of min(1, (m - j + 1) p_j)

The correction is valid even if the comparisons depend on each other.

Source: Holm, "A simple sequentially rejective multiple test procedure", 1979.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import math
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import special

from optax_boost._foundation import _checks
from optax_boost._race import _plot

if TYPE_CHECKING:
  from matplotlib.figure import Figure

LOSS = "training loss"
# Methods are compared after equal budgets; the values are the names in tables and pictures.
BUDGETS = {
  "steps": "steps",
  "gradient_evaluations": "gradient evaluations",
  "seconds": "seconds on one seed",
}
# The names of the columns that a race has with any `evaluate`.
COLUMNS = ("method", "seed", *BUDGETS, LOSS)
_SHORT_NAMES = {"steps": "steps", "gradient_evaluations": "gradient evaluations", "seconds": "time"}
# Words in a quantity's name that tell whether less or more of the quantity is better. Other
# quantities are called "higher" or "lower".
_LOWER_IS_BETTER = ("loss", "error", "perplexity")
_HIGHER_IS_BETTER = ("accuracy",)
# Totals are sums of rounded numbers, so they count as equal up to this relative error.
_ROUNDING = 1e-9
# Differences of accuracies in percent, each of which is rounded to float32, are equal up to this
# relative error.
_EQUAL = 1e-4
# The accepted probability of calling a difference real that is not.
_LEVEL = 0.05


@dataclasses.dataclass(frozen=True, eq=False)
class RaceResult:
  """The result of :func:`race`, with ``n`` seeds and ``m`` points in each training.

  Attributes:
    seeds: the seeds, in the order of the curves' rows.
    curves: arrays ``(n, m)`` by method and quantity: the metrics of `evaluate`, and the ``training
      loss``, the mean over the steps since the previous point.
    spent: arrays by method and budget, with what was spent until each point: ``steps`` ``(m,)``;
      ``gradient_evaluations`` ``(m,)`` of the first seed; ``seconds`` ``(n, m)`` that each seed's
      steps took, nan if seeds were trained at once.
    complete: False if the race was interrupted, so that seeds are missing.
    averaged: the methods of which `evaluate` measured an average of the params.
  """

  seeds: tuple[int, ...]
  curves: Mapping[str, Mapping[str, np.ndarray]]
  spent: Mapping[str, Mapping[str, np.ndarray]]
  complete: bool = True
  averaged: tuple[str, ...] = ()

  @property
  def baseline(self) -> str:
    """The first method, with which each other method is compared."""
    return next(iter(self.curves))

  @property
  def _compared(self) -> list[str]:
    return [name for name in self.curves if name != self.baseline]

  @property
  def quantities(self) -> list[str]:
    """The names of the metrics of `evaluate`, and ``"training loss"``."""
    return list(self.curves[self.baseline])

  def diverged(self, name: str) -> np.ndarray:
    """Returns for each seed whether the method's last loss was not finite, as an array ``(n,)``."""
    _checks.check_name("name", name, list(self.curves))
    return ~np.isfinite(self.curves[name][LOSS][:, -1])

  def budget(self, name: str, of: str) -> float:
    """Returns where a method is compared with the baseline: at the smaller of their two totals.

    Times are compared seed by seed, so that their error is a part of the differences; the result is
    then the mean over the seeds. If one of the two diverged on every seed, returns the total of the
    other. Returns nan if a total is unknown.

    Args:
      name: the name of the method.
      of: the kind of budget: ``"steps"``, ``"gradient_evaluations"`` or ``"seconds"``.
    """
    return float(np.mean(self.ends(name, of)))

  def ends(self, name: str, of: str) -> np.ndarray:
    """Returns the :meth:`budget` of each seed, as an array ``(n,)``; takes the same arguments."""
    _checks.check_name("name", name, list(self.curves))
    _checks.check_name("of", of, list(BUDGETS))
    pair = (name, self.baseline)
    came_through = [method for method in pair if not self.diverged(method).all()]
    return np.min([self.totals(method, of)[:, -1] for method in came_through or pair], axis=0)

  def totals(self, name: str, of: str) -> np.ndarray:
    """Returns what a method has spent until each point with each seed, as an array ``(n, m)``."""
    return np.broadcast_to(self.spent[name][of], self.curves[name][LOSS].shape)

  def values(self, name: str, quantity: str, of: str = "steps") -> np.ndarray:
    """Returns a method's values of a quantity, one for each seed, at the method's :meth:`budget`.

    Args:
      name: the name of the method.
      quantity: the name of the quantity, one of :attr:`quantities`.
      of: the kind of budget, as for :meth:`budget`.

    Returns:
      An array ``(n,)``, interpolated between the points of each seed's curve; nan for a seed that
      diverged, or whose curve begins after the budget.
    """
    return self._values_at(name, quantity, of, self.ends(name, of))

  def _values_at(self, name: str, quantity: str, budget: str, ends: np.ndarray) -> np.ndarray:
    _checks.check_name("quantity", quantity, self.quantities)
    spent, curves = self.totals(name, budget), self.curves[name][quantity]
    values = list(map(_interpolate, spent, curves, ends))
    return np.where(self.diverged(name), math.nan, values)

  def _differences(self, name: str, quantity: str, budget: str) -> np.ndarray:
    """Returns the method's value minus the baseline's at the budget, for each seed with both."""
    baseline = self._values_at(self.baseline, quantity, budget, self.ends(name, budget))
    differences = self.values(name, quantity, budget) - baseline
    return differences[np.isfinite(differences)]

  def difference(self, name: str, quantity: str, of: str = "steps") -> tuple[float, float | None]:
    """Returns a method's mean difference to the baseline; takes the arguments of :meth:`values`.

    Both values are taken at the method's :meth:`budget`, so no third method affects the difference.

    Returns:
      The mean over the seeds on which neither method nor baseline diverged (nan if there is none),
      and half of the mean's 95 % interval by Student's t. None instead of the half for a single
      seed, and if the difference is the same in each seed, as differences of accuracies on few
      examples may be. The interval is not corrected for the number of comparisons; the results of
      :meth:`p_values` are.
    """
    differences = self._differences(name, quantity, of)
    if len(differences) < 2 or (differences.any() and _all_equal(differences)):
      return (float(np.mean(differences)) if differences.size else math.nan), None
    quantile = special.stdtrit(len(differences) - 1, 1 - _LEVEL / 2)
    half = quantile * np.std(differences, ddof=1) / math.sqrt(len(differences))
    return float(np.mean(differences)), float(half)

  def p_values(
    self, quantity: str, budgets: Sequence[str] = tuple(BUDGETS)
  ) -> dict[str, dict[str, float]]:
    """Returns the p-value of each method's difference to the baseline, corrected by Holm's method.

    The p-values come from Student's t-test of the paired differences, or from the sign test if the
    difference is the same in each seed. If each difference with a
    corrected p-value of at most 0.05 is called real, the probability of one or more false calls is
    at most 0.05. Budgets at which a method has the same differences count as one comparison.

    Args:
      quantity: the quantity to compare.
      budgets: the kinds of budgets at which to compare it.

    Returns:
      The p-values by method and budget; nan with fewer than two seeds, and for identical curves.
    """
    _checks.check_name("quantity", quantity, self.quantities)
    for budget in budgets:
      _checks.check_name("budgets", budget, list(BUDGETS))
    tests = self._tests(quantity, budgets)

    def corrected(name: str, budget: str) -> float:
      if self._is_identical(name, quantity, budget):
        return math.nan
      return tests.get(self._test(name, quantity, budget), math.nan)

    return {
      name: {budget: corrected(name, budget) for budget in budgets} for name in self._compared
    }

  def _test(self, name: str, quantity: str, budget: str) -> tuple[str, bytes]:
    """Returns the key of the test that compares a method with the baseline at a budget.

    If a method has equal differences at several budgets, they are one test, with one key.
    """
    return name, self._differences(name, quantity, budget).tobytes()

  def _tests(self, quantity: str, budgets: Sequence[str]) -> dict[tuple[str, bytes], float]:
    """Returns the corrected p-value of each test, by the key that :meth:`_test` returns.

    A method that is identical at some budgets only, as an optimizer against itself is at all but
    equal time, counts there with the p-value 1: the number of comparisons is not chosen by results.
    """
    p_values = {}
    for name in self._compared:
      if all(self._is_identical(name, quantity, budget) for budget in budgets):
        continue
      for budget in budgets:
        differences = self._differences(name, quantity, budget)
        if len(differences) > 1:
          p_values[self._test(name, quantity, budget)] = p_value(differences)
    return dict(zip(p_values, holm(list(p_values.values())), strict=True))

  def _is_identical(self, name: str, quantity: str, budget: str) -> bool:
    """Returns whether method and baseline have equal curves, and equal values at the budget."""
    curves, baseline = self.curves[name][quantity], self.curves[self.baseline][quantity]
    # Even if the curves are equal step by step, the values at an equal time differ if one method
    # takes more time per step.
    same = np.array_equal(curves, baseline, equal_nan=True)
    return same and not self._differences(name, quantity, budget).any()

  def conclusion(self) -> str:
    """Says for each method whether the method is better than the baseline, and by how much.

    The first of `quantities` is compared, at each kind of budget. A method is called better or
    worse if its p-value is at most 0.05, corrected as in :meth:`p_values` for the comparisons in
    all sentences; else the sentence says that these seeds can't tell. Curves with the same bits in
    every seed are called identical.

    Returns:
      A line for each method except the baseline.
    """
    tests = self._tests(self.quantities[0], list(BUDGETS))
    return "\n".join(self._conclude(name, self.quantities[0], tests) for name in self._compared)

  def _conclude(self, name: str, quantity: str, tests: Mapping[tuple[str, bytes], float]) -> str:
    subject = f"`{name}` against `{self.baseline}`, {quantity}"
    for method in (name, self.baseline):
      if self.diverged(method).all():
        return f"{subject}: no comparison, since `{method}` diverged on every seed."
    # Budgets with the same outcome share one sentence.
    budgets: dict[str, list[str]] = {}
    for budget in BUDGETS:
      outcome = self._outcome(name, quantity, budget, tests)
      budgets.setdefault(outcome, []).append(_SHORT_NAMES[budget])
    parts = [
      f"{outcome} at equal {' and '.join(names)}" for outcome, names in budgets.items() if outcome
    ]
    return f"{subject}: {'; '.join(parts) or 'no comparison at an equal budget'}."

  def _outcome(
    self, name: str, quantity: str, budget: str, tests: Mapping[tuple[str, bytes], float]
  ) -> str:
    """Returns the part of a sentence that tells the outcome at one budget.

    Returns "" if no seed has values at the budget. `tests` is the result of :meth:`_tests`.
    """
    mean, half = self.difference(name, quantity, budget)
    seeds = len(self._differences(name, quantity, budget))
    if not seeds:
      return ""
    if self._is_identical(name, quantity, budget):
      return f"identical in {'the one seed' if seeds == 1 else f'all {seeds} seeds'}"
    if seeds == 1:
      return f"one seed can't tell (difference {mean:+.3g})"
    p = tests[self._test(name, quantity, budget)]
    interval = "the same in each"
    if half is not None:
      interval = f"95 % interval {mean - half:+.3g} to {mean + half:+.3g}"
    correction = ""
    if len(tests) > 1:
      correction = f"; p = {p:.2g} after Holm's correction for {len(tests)} comparisons"
    if p > _LEVEL:
      return f"these {seeds} seeds can't tell (difference {mean:+.3g}, {interval}{correction})"
    better = f"{_word(quantity, mean)} by {abs(mean):.3g}"
    return f"{better} ({interval} over {seeds} seeds{correction})"

  def to_dict(self) -> dict[str, list[Any]]:
    """Returns the curves as columns, for ``pandas.DataFrame(result.to_dict())`` or JSON.

    Returns:
      Lists of the same length, with an entry for each method, seed and point. The lists are named
      ``method``, ``seed``, ``steps``, ``gradient_evaluations``, ``seconds``, and as the quantities.
    """
    names = ("method", "seed", *BUDGETS, *self.quantities)
    columns: dict[str, list[Any]] = {name: [] for name in names}
    for method, curves in self.curves.items():
      for i, seed in enumerate(self.seeds):
        curves_of_seed = {quantity: rows[i] for quantity, rows in curves.items()}
        spent = {budget: self.totals(method, budget)[i] for budget in BUDGETS}
        for name, values in {**spent, **curves_of_seed}.items():
          columns[name] += values.tolist()
        columns["method"] += [method] * len(values)
        columns["seed"] += [seed] * len(values)
    return columns

  def table(self) -> str:
    """Returns Markdown tables: one for each quantity, and one of the cost of a step.

    Returns:
      The tables, each with a heading. A cell holds the mean ± the standard deviation over seeds,
      and in parentheses the paired difference to the baseline ± half of its 95 % interval. If
      methods have different budgets, each cell names its budget; the baseline's is its total. A
      sentence names the methods in `averaged`. If there are several methods, an explanation of the
      parentheses and :meth:`conclusion` follow.
    """
    sections = [] if self.complete else [f"Interrupted: of the seeds only {self.seeds} are there."]
    for quantity in self.quantities:
      notes = []
      for name in self.curves:
        lost, seeds = self.diverged(name).sum(), len(self.seeds)
        notes.append(f"diverged: {lost} of {seeds}" if lost else str(seeds))
      known = [of for of in BUDGETS if np.isfinite(self.totals(self.baseline, of)).any()]
      columns = [["method", *self.curves], *(self._column(quantity, of) for of in known)]
      lines = list(zip(*columns, ["seeds", *notes], strict=True))
      sections.append(f"{quantity.capitalize()}, with equal budgets:\n\n{_markdown(lines)}")
    costs = [["method", "gradients per step", "ms per step"]]
    for name in self.curves:
      steps = self.spent[name]["steps"][-1]
      gradients = self.spent[name]["gradient_evaluations"][-1] / steps
      milliseconds = 1e3 * self.totals(name, "seconds")[:, -1] / steps
      timed = milliseconds[np.isfinite(milliseconds)]
      costs.append([name, f"{gradients:.3g}", _mean_and_spread(timed) if timed.size else "-"])
    sections.append(f"Costs:\n\n{_markdown(costs)}")
    if self.averaged:
      names = ", ".join(f"`{name}`" for name in self.averaged)
      sections.append(f"Evaluated at the average of its params, not at the last ones: {names}.")
    if len(self.curves) > 1:
      sections += [
        "± after a mean: the standard deviation over the seeds. In parentheses: the difference to"
        f" `{self.baseline}`, seed by seed, ± half of its 95 % interval. An interval with 0 in it"
        " leaves open which method is better. Each interval is of one comparison alone; these"
        " sentences correct for the number of theirs:",
        self.conclusion(),
      ]
    return "\n\n".join(sections)

  def _column(self, quantity: str, budget: str) -> list[str]:
    """Returns a column of a table; the header names the budget if all comparisons share it."""
    compared = [name for name in self._compared if not self.diverged(name).all()]
    ends = {name: self.ends(name, budget) for name in self.curves}
    shared = {_amount(ends[name]) for name in compared or [self.baseline]}
    if len(shared) == 1:
      ends[self.baseline] = ends[(compared or [self.baseline])[0]]
      cells = [self._cell(name, quantity, budget, at) for name, at in ends.items()]
      return [f"{shared.pop()} {BUDGETS[budget]}", *cells]
    cells = []
    for name, at in ends.items():
      cell = self._cell(name, quantity, budget, at)
      cells.append(cell if cell == "-" else f"{cell} at {_amount(at)}")
    return [BUDGETS[budget], *cells]

  def _cell(self, name: str, quantity: str, budget: str, ends: np.ndarray) -> str:
    values = self._values_at(name, quantity, budget, ends)
    values = values[np.isfinite(values)]
    if not values.size:
      return "-"
    cell = _mean_and_spread(values)
    difference = self.difference(name, quantity, budget)
    is_compared = name != self.baseline and not math.isnan(difference[0])
    return f"{cell} ({_plus_minus(*difference, sign='+')})" if is_compared else cell

  def plot(
    self,
    quantities: Sequence[str] | None = None,
    against: Sequence[str] = tuple(BUDGETS),
  ) -> "Figure":
    """Draws the mean of each curve over seeds, in a band of one standard deviation to each side.

    Args:
      quantities: the quantities to draw, each in a row of panels; None: the first quantity.
      against: the budgets on the horizontal axes, each in a column of panels: ``"steps"``,
        ``"gradient_evaluations"``, ``"seconds"``. A single column is drawn as a row. Budgets that
        are equal for all methods, as steps and gradient evaluations often are, share one column.

    Returns:
      A matplotlib figure, which ``result.plot().savefig("race.png")`` saves.
    """
    quantities = self.quantities[:1] if quantities is None else quantities
    for quantity in quantities:
      _checks.check_name("quantities", quantity, self.quantities)
    for budget in against:
      _checks.check_name("against", budget, list(BUDGETS))
    return _plot.draw(self, quantities, {budget: BUDGETS[budget] for budget in against})


def p_value(differences: np.ndarray) -> float:
  """Returns the two-sided p-value of Student's t-test of whether the mean of `differences` is 0.

  Equal differences show nothing of how they vary, so their p-value is the sign test's.
  """
  count = len(differences)
  if not differences.any():
    return 1.0
  if _all_equal(differences):
    return 2.0 ** (1 - count)
  error = np.std(differences, ddof=1) / math.sqrt(count)
  return float(2 * special.stdtr(count - 1, -abs(np.mean(differences)) / error))


def _all_equal(differences: np.ndarray) -> bool:
  """Returns whether differences are equal up to the rounding of float32 accuracies."""
  return bool(np.ptp(differences) <= _EQUAL * np.abs(differences).max())


def holm(p_values: Sequence[float]) -> list[float]:
  """Returns the p-values corrected by Holm's method, in the order of `p_values`."""
  order = np.argsort(p_values, kind="stable")
  steps = np.arange(len(p_values), 0, -1) * np.asarray(p_values)[order]
  corrected = np.empty(len(p_values))
  corrected[order] = np.minimum(np.maximum.accumulate(steps), 1)
  return corrected.tolist()


def _interpolate(x: np.ndarray, y: np.ndarray, at: float) -> float:
  """Returns the value of a curve at x = `at`, by interpolation; nan outside of the curve.

  `x` and `y` are the curve's points, where `x` ascends. Points that aren't finite are left out.
  """
  finite = np.isfinite(x) & np.isfinite(y)
  x, y = x[finite], y[finite]
  if not x.size or not x[0] * (1 - _ROUNDING) <= at <= x[-1] * (1 + _ROUNDING):
    return math.nan
  return float(np.interp(at, x, y))


def _word(quantity: str, difference: float) -> str:
  """Returns the word for a quantity's difference to the baseline.

  It is "better" or "worse" if the quantity's name tells which, else "higher" or "lower".
  """
  lower = any(part in quantity.lower() for part in _LOWER_IS_BETTER)
  if lower or any(part in quantity.lower() for part in _HIGHER_IS_BETTER):
    return "better" if (difference < 0) == lower else "worse"
  return "higher" if difference > 0 else "lower"


def _amount(totals: np.ndarray) -> str:
  mean = totals.mean()
  return f"{mean:,.0f}" if mean >= 1000 else f"{mean:.4g}"


def _mean_and_spread(values: np.ndarray) -> str:
  return _plus_minus(values.mean(), np.std(values, ddof=1) if values.size > 1 else None)


def _plus_minus(mean: float, spread: float | None, sign: str = "") -> str:
  return f"{mean:{sign}.4g}" + ("" if spread is None else f" ± {spread:.2g}")


def _markdown(lines: Sequence[Sequence[str]]) -> str:
  """Returns a Markdown table with aligned columns; the first of `lines` is the header."""
  lines = [[cell.replace("|", r"\|") for cell in line] for line in lines]
  widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
  aligned = [list(map(str.rjust, line, widths)) for line in lines]
  rule = ["-" * (width - 1) + ":" for width in widths]
  return "\n".join(f"| {' | '.join(line)} |" for line in (aligned[0], rule, *aligned[1:]))

"""The picture of a race; needs matplotlib."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
  from matplotlib.axes import Axes
  from matplotlib.figure import Figure

# Okabe and Ito's colours, which the colour-blind can tell apart.
_BASELINE_COLOUR = "#333333"
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def draw(result: Any, quantities: Sequence[str], against: Mapping[str, str]) -> "Figure":
  """Draws a ``RaceResult``: a row of panels for each quantity, a column for each budget.

  `against` maps each budget to the label of its axis. Losses have a logarithmic axis. A budget that
  equals another one at every point gets no panels of its own: both names are on one axis.
  """
  try:
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
  except ImportError as error:
    raise ImportError(
      '`RaceResult.plot` needs matplotlib. Install it, or run `pip install ".[race]"` in a clone of'
      " optax_boost."
    ) from error
  against = _join_equal(result, against)
  # If there is one budget, the panels of all quantities are drawn in one row.
  rows, columns = (len(quantities), len(against)) if len(against) > 1 else (1, len(quantities))
  figure = Figure(figsize=(1 + 4.4 * columns, 0.6 + 3.6 * rows), dpi=150, layout="constrained")
  panels = figure.subplots(rows, columns, squeeze=False).reshape(len(quantities), len(against))
  compared = [name for name in result.curves if name != result.baseline]
  colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(compared)}
  colours = {name: colours.get(name, _BASELINE_COLOUR) for name in result.curves}
  for quantity, line in zip(quantities, panels, strict=True):
    for budget, axes in zip(against, line, strict=True):
      for name, colour in colours.items():
        _draw_curve(axes, result, name, quantity, budget, colour)
      if budget != "steps":
        for name in compared:
          _draw_ends(axes, result, name, budget, colours)
      axes.set_xlabel(against[budget])
      axes.set_axisbelow(True)
      axes.grid(color="#E5E5E5")
      axes.spines[["top", "right"]].set_visible(False)
      _set_ticks(axes, [result.curves[name][quantity] for name in colours], quantity)
    title = quantity + (" (logarithmic)" if line[0].get_yscale() == "log" else "")
    line[0].set_title(title, loc="left", fontsize=10, parse_math=False)
  for text in panels[0, 0].legend(frameon=False).get_texts():
    text.set_parse_math(False)
  marks: list[Patch | Line2D] = []
  if len(result.seeds) > 1:
    marks += [Patch(color=_BASELINE_COLOUR, alpha=0.15, label="one standard deviation over seeds")]
  if any(line.get_linestyle() == ":" for axes in figure.axes for line in axes.get_lines()):
    end = "here a method is compared with the first: the cheaper of them ends"
    marks += [Line2D([], [], color=_BASELINE_COLOUR, linestyle=":", label=end)]
  if marks:
    figure.legend(handles=marks, loc="outside lower left", frameon=False)
  return figure


def _join_equal(result: Any, against: Mapping[str, str]) -> dict[str, str]:
  """Leaves out budgets whose panels would look as an earlier one's, whose label then names both."""
  joined: dict[str, str] = {}
  for budget, label in against.items():
    for other in joined:
      totals = [(result.totals(name, other), result.totals(name, budget)) for name in result.curves]
      if all(np.array_equal(*pair) for pair in totals):
        joined[other] += f" = {label}"
        break
    else:
      joined[budget] = label
  return joined


def _set_ticks(axes: "Axes", curves: Sequence[np.ndarray], quantity: str) -> None:
  """Gives a loss a logarithmic axis; labels few ticks, with plain numbers if these are short."""
  from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

  axes.xaxis.set_major_locator(MaxNLocator(5))
  axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.6g}"))
  drawn = np.concatenate(list(map(np.ravel, curves)))
  if "loss" not in quantity or np.any(drawn <= 0):
    return
  axes.set_yscale("log")
  low, high = axes.get_ylim()
  decades = np.log10(high / low)
  if decades < 0.5:
    # A logarithmic axis may then have no round number at all.
    axes.yaxis.set_major_locator(MaxNLocator(5))
  else:
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 2.5 else (1,), numticks=8))
  axes.yaxis.set_minor_locator(NullLocator())
  if low > 1e-4 and high < 1e5:
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.6g}"))


def _draw_ends(
  axes: "Axes", result: Any, name: str, budget: str, colours: Mapping[str, str]
) -> None:
  """Marks where a method is compared with the baseline: where the curve of one of them ends."""
  ends = result.ends(name, budget)
  if not np.isfinite(ends).all():
    return
  totals = result.totals(result.baseline, budget)[:, -1]
  colour = colours[result.baseline if totals.mean() <= ends.mean() else name]
  axes.axvline(ends.mean(), color=colour, linestyle=":")


def _draw_curve(
  axes: "Axes", result: Any, name: str, quantity: str, budget: str, colour: str
) -> None:
  """Draws the mean of a method's curves between one standard deviation, at the mean totals.

  The curve of each seed is read at these totals, so the band shows the spread of the times, too.
  """
  diverged = result.diverged(name)
  # Seeds that diverged are left out. If all diverged, their mean is drawn while all are finite.
  chosen = ~diverged | diverged.all()
  rows, totals = result.curves[name][quantity][chosen], result.totals(name, budget)[chosen]
  x = totals.mean(0)
  values = np.array([np.interp(x, *curve) for curve in zip(totals, rows, strict=True)])
  with np.errstate(all="ignore"):
    mean, spread = values.mean(0), values.std(0)
  finite = np.isfinite(mean + spread) & np.isfinite(x)
  x, mean, spread = x[finite], mean[finite], spread[finite]
  label = f"{name} (diverged)" if diverged.all() else name
  axes.fill_between(x, mean - spread, mean + spread, color=colour, alpha=0.15, linewidth=0)
  # The baseline is dashed and above the others, so that curves below it show between its dashes.
  above = {"linestyle": (0, (4, 1.5)), "zorder": 3} if name == result.baseline else {}
  axes.plot(x, mean, color=colour, label=label, linewidth=2, **above)

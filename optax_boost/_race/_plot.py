"""The picture of a race; needs matplotlib."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
  from matplotlib.axes import Axes
  from matplotlib.figure import Figure

# Okabe and Ito's colours, which the colour-blind can tell apart.
_BASELINE_COLOUR = "#5A5A5A"
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def draw(result: Any, quantities: Sequence[str], against: Mapping[str, str]) -> "Figure":
  """Draws a ``RaceResult``: a row of panels for each quantity, a column for each budget.

  `against` maps each budget to the label of its axis. Losses have a logarithmic axis.
  """
  try:
    from matplotlib.figure import Figure
  except ImportError as error:
    raise ImportError(
      '`RaceResult.plot` needs matplotlib. Install it, or run `pip install ".[race]"` in a clone of'
      " optax_boost."
    ) from error
  # If there is one budget, the panels of all quantities are drawn in one row.
  rows, columns = (len(quantities), len(against)) if len(against) > 1 else (1, len(quantities))
  figure = Figure(figsize=(1 + 5 * columns, 1 + 4.0 * rows), dpi=150, layout="constrained")
  panels = figure.subplots(rows, columns, squeeze=False).reshape(len(quantities), len(against))
  compared = [name for name in result.curves if name != result.baseline]
  colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(compared)}
  colours = {name: colours.get(name, _BASELINE_COLOUR) for name in result.curves}
  for quantity, line in zip(quantities, panels, strict=True):
    values = np.concatenate([np.ravel(curves[quantity]) for curves in result.curves.values()])
    logarithmic = "loss" in quantity and not np.any(values <= 0)
    for budget, axes in zip(against, line, strict=True):
      for name, colour in colours.items():
        _draw_curve(axes, result, name, quantity, budget, colour)
      axes.set_xlabel(against[budget])
      axes.grid(color="#E5E5E5", linewidth=0.8)
      axes.spines[["top", "right", "left"]].set_visible(False)
      axes.set_yscale("log" if logarithmic else "linear")
      if budget != "steps":
        for at, name in _ends(result, compared, budget).items():
          axes.axvline(at, color=colours[name], linestyle=":")
    title = quantity + (" (logarithmic)" if logarithmic else "")
    line[0].set_title(title, loc="left", parse_math=False)
  for text in panels[0, 0].legend(frameon=False).get_texts():
    text.set_parse_math(False)
  return figure


def _ends(result: Any, compared: Sequence[str], budget: str) -> dict[float, str]:
  """Returns where curves end at a comparison, as a dict from total to the name of the curve.

  Each method in `compared` is compared with the baseline at the smaller of their two totals. The
  curve with this total ends there.
  """
  ends = {}
  for name in compared:
    at = result.budget(name, budget)
    if np.isfinite(at):
      ends[at] = result.baseline if result.spent[result.baseline][budget][-1] == at else name
  return ends


def _draw_curve(
  axes: "Axes", result: Any, name: str, quantity: str, budget: str, colour: str
) -> None:
  diverged = result.diverged(name)
  # Seeds that diverged are left out. If all diverged, their mean is drawn while all are finite.
  rows = result.curves[name][quantity][~diverged | diverged.all()]
  with np.errstate(all="ignore"):
    mean, spread = rows.mean(0), rows.std(0)
  x = result.spent[name][budget]
  finite = np.isfinite(mean + spread) & np.isfinite(x)
  x, mean, spread = x[finite], mean[finite], spread[finite]
  label = f"{name} (diverged)" if diverged.all() else name
  axes.fill_between(x, mean - spread, mean + spread, color=colour, alpha=0.15, linewidth=0)
  axes.plot(x, mean, color=colour, label=label, linewidth=2)

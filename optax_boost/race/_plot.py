"""The picture of a race; needs matplotlib."""

from collections.abc import Sequence
import itertools
from typing import TYPE_CHECKING
from typing import Any

import numpy as np

from optax_boost import _base

if TYPE_CHECKING:
  from matplotlib.figure import Figure

  from optax_boost.race import _result

# Okabe and Ito's colours, told apart by colour-blind eyes too; the baseline is grey.
_BASELINE_COLOUR = "#5A5A5A"
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_AXIS_LABELS = {
  "steps": "training steps",
  "gradient_evaluations": "gradient evaluations",
  "seconds": "seconds on one seed, without compiling",
}
_FONT = 13


def draw(
  result: "_result.RaceResult", quantities: Sequence[str], against: Sequence[str]
) -> "Figure":
  """Draws a row of panels for each quantity, a column for each budget; losses on a log scale."""
  try:
    from matplotlib import ticker
    from matplotlib.figure import Figure
  except ImportError as error:
    raise ImportError(
      f"`RaceResult.plot` needs matplotlib. {_base.install_advice('race')}"
    ) from error
  # A single column is laid on its side.
  rows, columns = (len(quantities), len(against)) if len(against) > 1 else (1, len(quantities))
  figure = Figure(figsize=(1 + 5.5 * columns, 1 + 4.0 * rows), dpi=150, layout="constrained")
  others = itertools.cycle(_COLOURS)
  colours = {
    name: _BASELINE_COLOUR if name == result.baseline else next(others) for name in result.curves
  }
  panels = figure.subplots(rows, columns, squeeze=False).reshape(len(quantities), len(against))
  for quantity, line in zip(quantities, panels, strict=True):
    logarithmic = "loss" in quantity and _all_positive(result, quantity)
    for of, axes in zip(against, line, strict=True):
      axes.set_xlabel(_AXIS_LABELS[of], fontsize=_FONT)
      axes.tick_params(which="both", labelsize=_FONT - 1, length=0)
      axes.grid(color="#E5E5E5", linewidth=0.8)
      axes.spines[["top", "right", "left"]].set_visible(False)
      for name, colour in colours.items():
        _draw_curve(axes, result, name, quantity, of, colour, logarithmic)
      ends = [getattr(curves, of)[-1] for curves in result.curves.values()]
      axes.set_xlim(0, max([end for end in ends if end > 0], default=1))
      axes.xaxis.set_major_locator(ticker.MaxNLocator(nbins=6 if of == "seconds" else 8))
      if logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
      if of != "steps" and np.isfinite(result.budget(of)):
        dotted = (0, (2, 3))
        axes.axvline(result.budget(of), color=_BASELINE_COLOUR, linewidth=1.2, linestyle=dotted)
    title = quantity + (" (logarithmic)" if logarithmic else "")
    line[0].set_title(title, fontsize=_FONT + 1, loc="left", parse_math=False)
  _name_lines(panels[0, 0], colours)
  return figure


def _all_positive(result: Any, quantity: str) -> bool:
  values = np.concatenate([np.ravel(result.rows(name, quantity)) for name in result.curves])
  values = values[np.isfinite(values)]
  return bool(values.size and (values > 0).all())


def _draw_curve(
  axes: Any, result: Any, name: str, quantity: str, of: str, colour: str, logarithmic: bool
) -> None:
  x, rows = getattr(result.curves[name], of), result.rows(name, quantity)
  alive = rows[~result.curves[name].diverged]
  # A method that never came through is shown as far as it got.
  rows = alive if len(alive) else rows
  scale, inverse = (np.log, np.exp) if logarithmic else (np.positive, np.positive)
  with np.errstate(all="ignore"):
    mean, spread = scale(rows).mean(0), scale(rows).std(0)
  finite = np.isfinite(mean) & np.isfinite(x)
  x, mean, spread = x[finite], mean[finite], spread[finite]
  low, high = inverse(mean - spread), inverse(mean + spread)
  axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
  label = name + ("" if len(alive) else " (diverged)")
  style = {"color": colour, "linewidth": 2.4, "solid_capstyle": "round"}
  axes.plot(x, inverse(mean), label=label, **style)


def _name_lines(axes: Any, colours: dict[str, str]) -> None:
  """Names the lines at their right ends, spread out where they would overlap."""
  to_share = axes.transData + axes.transAxes.inverted()
  ends = []
  for line, colour in zip(axes.get_lines(), colours.values(), strict=False):
    x, y = line.get_data()
    height = float(to_share.transform((x[-1], y[-1]))[1]) if len(x) else 0.0
    # The alternative form keeps trailing zeros, and a trailing point.
    last = f" {y[-1]:#.3g}".rstrip(".") if len(y) else ""
    ends.append((height, line.get_label() + last, colour))
  gap, height = 0.065, np.inf
  ends.sort(key=lambda end: -end[0])
  for rank, (natural, text, colour) in enumerate(ends):
    lowest_free = gap * (len(ends) - 1 - rank)
    height = min(max(natural, lowest_free), height - gap)
    axes.annotate(
      text,
      (1, to_share.inverted().transform((1, height))[1]),
      (7, 0),
      xycoords=("axes fraction", "data"),
      textcoords="offset points",
      color=colour,
      fontsize=_FONT - 1,
      fontweight="bold",
      va="center",
      annotation_clip=False,
      parse_math=False,
    )

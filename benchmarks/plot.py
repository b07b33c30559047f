"""Draws the results: ``python -m benchmarks.plot`` redraws all of ``results/*.json``."""

from collections.abc import Mapping
from collections.abc import Sequence
import json
import math
import pathlib
from typing import Any

from matplotlib.figure import Figure

_OURS, _OTHERS = "#0072B2", "#9A9A9A"


def draw(comparisons: Sequence[Mapping[str, Any]]) -> Figure:
  """Draws a panel for each comparison: ratios to its first reference, on a logarithmic axis.

  Args:
    comparisons: what `_harness.compare` returned.

  Returns:
    The figure. Whiskers span the quartiles; a peer that could not run is left out.
  """
  shown = [c for c in comparisons if c["references"]]
  columns = min(2, max(1, len(shown)))
  rows = math.ceil(max(1, len(shown)) / columns)
  lines = max([len(c["rows"]) for c in shown], default=1)
  figure = Figure(figsize=(7.5 * columns, (1.1 + 0.34 * lines) * rows), dpi=110)
  figure.set_layout_engine("constrained")
  panels = figure.subplots(rows, columns, squeeze=False).ravel()
  for axes, comparison in zip(panels, shown, strict=False):
    reference = comparison["references"][0]
    able = [row for row in comparison["rows"] if "ratios" in row][::-1]
    low, median, high = zip(*(row["ratios"][reference] for row in able), strict=True)
    names = [row["name"] for row in able]
    others = {*comparison["references"]}
    whiskers = [
      [m - q for m, q in zip(median, low, strict=True)],
      [q - m for m, q in zip(median, high, strict=True)],
    ]
    for place, name in enumerate(names):
      axes.errorbar(
        median[place], place, xerr=[[whiskers[0][place]], [whiskers[1][place]]], fmt="o",
        color=_OTHERS if name in others else _OURS, markersize=7, lw=2,
      )  # fmt: skip
    axes.set_yticks(range(len(names)), names)
    # Positions, not bars: a logarithmic axis has no zero for them to start from.
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")
    axes.grid(axis="y", color="#EEEEEE")
    axes.axvline(1, color="black", lw=0.8)
    for place, value in enumerate(median):
      axes.annotate(
        f"  {short(value)}", (high[place], place), va="center", fontsize=9, annotation_clip=False
      )
    axes.set_title(f"{comparison['title']}: time / {reference}", fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9)
    axes.margins(x=0.15)
  for axes in panels[len(shown) :]:
    axes.set_visible(False)
  return figure


def short(ratio: float) -> str:
  """Writes a ratio with two decimals, or more where they would be zeros."""
  return f"{ratio:.2f}" if ratio >= 0.01 else f"{ratio:.2g}"


def save(comparisons: Sequence[Mapping[str, Any]], path: pathlib.Path) -> None:
  """Draws and writes a picture, whole or not at all.

  Args:
    comparisons: what `_harness.compare` returned.
    path: of a PNG file.
  """
  partial = path.with_suffix(".partial")
  draw(comparisons).savefig(partial, format="png")
  partial.replace(path)


def main() -> None:
  """Redraws all results."""
  for path in sorted((pathlib.Path(__file__).parent / "results").glob("*.json")):
    save(json.loads(path.read_text())["comparisons"], path.with_suffix(".png"))


if __name__ == "__main__":
  main()

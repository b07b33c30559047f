"""Pictures of the results; those that the docs show go to ``docs/figures``."""

from collections.abc import Mapping
from collections.abc import Sequence
import io
import math
import pathlib
import textwrap
from typing import Any

from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import LogLocator
from PIL import Image
from PIL.PngImagePlugin import PngInfo

FIGURES = pathlib.Path(__file__).resolve().parent.parent / "docs" / "figures"
OURS, OTHERS = "#0072B2", "#9A9A9A"
_COMPILE = "trace and compile, s"


def draw(comparisons: Sequence[Mapping[str, Any]]) -> Figure:
  """Draws a panel for each comparison: ratios to its first reference, on a logarithmic axis.

  Args:
    comparisons: what `_harness.compare` returned. Where they name an `axis` and where they are on
      it, there is a panel for each axis instead, with a line for each contender.

  Returns:
    The figure. Whiskers span the quartiles; a peer that could not run is left out.
  """
  shown = [c for c in comparisons if c["references"]]
  if shown and all("axis" in c for c in shown):
    return _growth(shown)
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
    others = tuple(f"{name}," for name in comparison["references"])  # "Adam", "Adam, read twice"
    whiskers = [
      [m - q for m, q in zip(median, low, strict=True)],
      [q - m for m, q in zip(median, high, strict=True)],
    ]
    for place, name in enumerate(names):
      axes.errorbar(
        median[place], place, xerr=[[whiskers[0][place]], [whiskers[1][place]]], fmt="o",
        color=OTHERS if f"{name},".startswith(others) else OURS, markersize=7, lw=2,
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
    title = textwrap.fill(f"{comparison['title']}: time / {reference}", 64)
    axes.set_title(title, fontsize=10, loc="left")
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


def _growth(comparisons: Sequence[Mapping[str, Any]]) -> Figure:
  """Lines along each axis, and the seconds to compile where they grow with the leaves."""
  along: dict[str, list[Mapping[str, Any]]] = {}
  for comparison in comparisons:
    along.setdefault(comparison["axis"], []).append(comparison)
  panels = [(axis, "time") for axis in along] + [("leaves", _COMPILE)] * ("leaves" in along)
  colours: dict[str, Any] = {}
  figure = Figure(figsize=(10, 4 * math.ceil(len(panels) / 2)), dpi=70, layout="constrained")
  places = figure.subplots(math.ceil(len(panels) / 2), 2, squeeze=False).ravel()
  for axes, (axis, what) in zip(places, panels, strict=False):
    reference = along[axis][0]["references"][0]
    lines: dict[str, list[Any]] = {}
    for comparison in along[axis]:
      for row in comparison["rows"]:
        if what == _COMPILE:
          lines.setdefault(row["name"], []).append((comparison["at"], [row["facts"][_COMPILE]] * 3))
        elif row["name"] != reference:
          lines.setdefault(row["name"], []).append((comparison["at"], row["ratios"][reference]))
    for name, points in lines.items():
      at, values = zip(*points, strict=True)
      low, median, high = zip(*values, strict=True)
      colour = colours.setdefault(name, f"C{len(colours)}")
      axes.fill_between(at, low, high, color=colour, alpha=0.15, linewidth=0)
      axes.plot(at, median, marker="o", color=colour, label=name)
    axes.set(xscale="log", yscale="log", xlabel=axis, xticks=[c["at"] for c in along[axis]])
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.margins(y=0.45)  # room for the legend
    axes.grid(color="#E5E5E5")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(what if what == _COMPILE else f"time / {reference}", loc="left", fontsize=11)
    axes.legend(fontsize=9, frameon=False)
  for axes in places[len(panels) :]:
    axes.set_visible(False)
  return figure


def small(figure: Figure, path: pathlib.Path) -> None:
  """Writes a picture for the docs: some 1,200 pixels wide, in few colours.

  The file says how large its smallest text is (exponents aside), so that pages show it large
  enough to read.

  Args:
    figure: the picture.
    path: of a PNG file, written whole or not at all.
  """
  drawn = io.BytesIO()
  dpi = 1200 / figure.get_figwidth()
  figure.savefig(drawn, format="png", dpi=dpi)
  texts = (text for text in figure.findobj(Text) if text.get_visible() and text.get_text())
  about = PngInfo()
  about.add_text("smallest text, px", f"{min(t.get_fontsize() for t in texts) * dpi / 72:.1f}")
  few = Image.open(drawn).convert("RGB").quantize(96, dither=Image.Dither.NONE)
  partial = path.with_suffix(".partial")
  few.save(partial, format="png", optimize=True, pnginfo=about)
  partial.replace(path)

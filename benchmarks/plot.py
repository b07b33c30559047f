"""Pictures for the docs, which go to ``docs/figures``."""

from collections.abc import Mapping, Sequence
import io
import math
import pathlib
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import LogLocator
from PIL import Image
from PIL.PngImagePlugin import PngInfo

FIGURES = pathlib.Path(__file__).resolve().parent.parent / "docs" / "figures"
# Okabe and Ito's, which the colour-blind can tell apart, as in the pictures of races; and a grey.
BLUE, ORANGE, GREEN, PINK, YELLOW, SKY = COLOURS = (
  "#0072B2",
  "#D55E00",
  "#009E73",
  "#CC79A7",
  "#E69F00",
  "#56B4E9",
)
OURS, OTHERS = BLUE, "#9A9A9A"
_COMPILE = "trace and compile, s"


def clean(axes: Axes, grid: Literal["both", "x", "y"] = "both") -> None:
  """Gives a panel the style of all pictures: a light grid behind the curves, and no box."""
  axes.grid(axis=grid, color="#E5E5E5")
  axes.set_axisbelow(True)
  axes.spines[["top", "right"]].set_visible(False)


def growth(comparisons: Sequence[Mapping[str, Any]]) -> Figure:
  """Draws ratios to the first reference along each axis, and the seconds to compile by leaves.

  Args:
    comparisons: what `_harness.compare` returned, with the `axis` and where they are `at` on it.
  """
  along: dict[str, list[Mapping[str, Any]]] = {}
  for comparison in comparisons:
    along.setdefault(comparison["axis"], []).append(comparison)
  panels = [(axis, "time") for axis in along]
  if "leaves" in along:  # the seconds beside the ratios
    panels.insert(panels.index(("leaves", "time")) + 1, ("leaves", _COMPILE))
  colours: dict[str, Any] = {}
  figure = Figure(figsize=(7.5, 3.1 * math.ceil(len(panels) / 2)), layout="constrained")
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
      colour = colours.setdefault(name, COLOURS[sum(c != OTHERS for c in colours.values())])
      axes.fill_between(at, low, high, color=colour, alpha=0.15, linewidth=0)
      axes.plot(at, median, marker="o", color=colour, label=name)
    axes.set(xscale="log", yscale="log", xlabel=axis, xticks=[c["at"] for c in along[axis]])
    axes.xaxis.set_major_formatter(_short)
    axes.minorticks_off()
    clean(axes)
    title = what
    if what != _COMPILE:
      axes.axhline(1, color=colours.setdefault(reference, OTHERS), label=reference)
      title = f"time / time of {reference}"
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    alone = f"{next(iter(lines))}: " if len(lines) == 1 else ""
    axes.set_title(alone + title, loc="left", fontsize=10)
  shown = {
    label: handle
    for axes in places[: len(panels)]
    for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
  }
  for axes in places[len(panels) :]:
    axes.set_axis_off()
  # The four axes make five panels; the sixth place is the legend's.
  places[-1].legend(shown.values(), shown, loc="center left", frameon=False, fontsize=10)
  return figure


def _short(value: float, _: object) -> str:
  """A power of ten as such from 10,000 on, thousands with a k."""
  if value >= 1e4:
    return f"$10^{{{round(math.log10(value))}}}$"
  return f"{value / 1000:g}k" if value >= 1000 else f"{value:g}"


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

"""Pictures for the docs, which go to ``docs/figures``."""

from collections.abc import Mapping
from collections.abc import Sequence
import io
import math
import pathlib
from typing import Any

from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import LogLocator
from PIL import Image
from PIL.PngImagePlugin import PngInfo

FIGURES = pathlib.Path(__file__).resolve().parent.parent / "docs" / "figures"
OURS, OTHERS = "#0072B2", "#9A9A9A"
_COMPILE = "trace and compile, s"


def growth(comparisons: Sequence[Mapping[str, Any]]) -> Figure:
  """Draws ratios to the first reference along each axis, and the seconds to compile by leaves.

  Args:
    comparisons: what `_harness.compare` returned, with the `axis` and where they are `at` on it.
  """
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

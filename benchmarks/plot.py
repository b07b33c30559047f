"""Pictures for the docs, which go to ``docs/figures``."""

from collections.abc import Mapping, Sequence
import io
import pathlib
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
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


def clean(axes: Axes, grid: Literal["both", "x", "y"] = "both") -> None:
  """Gives a panel the style of all pictures: a light grid behind the curves, and no box."""
  axes.grid(axis=grid, color="#E5E5E5")
  axes.set_axisbelow(True)
  axes.spines[["top", "right"]].set_visible(False)


def ratios(
  lines: Mapping[str, Sequence[tuple[float, Sequence[float]]]],
  xlabel: str,
  title: str,
  reference: str,
  scale: Literal["linear", "log"] = "linear",
) -> Figure:
  """Draws ratios of times between their quartiles, and a line at 1 for the reference.

  Args:
    lines: by name, the places on the horizontal axis and the quartiles there.
    xlabel: the name of the horizontal axis.
    title: the ratio.
    reference: the name of the line at 1.
    scale: of both axes.
  """
  figure = Figure(figsize=(7.5, 3.8), layout="constrained")
  axes = figure.subplots()
  axes.axhline(1, color=OTHERS, label=reference)
  for colour, (name, points) in zip(COLOURS, lines.items(), strict=False):
    at, values = zip(*points, strict=True)
    low, median, high = zip(*values, strict=True)
    axes.fill_between(at, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.plot(at, median, marker="o", color=colour, label=name)
  axes.set(xscale=scale, yscale=scale, xlabel=xlabel)
  if scale == "log":
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
  else:
    axes.set_ylim(bottom=0)
  axes.minorticks_off()
  clean(axes)
  axes.set_title(title, loc="left", fontsize=11)
  handles, labels = axes.get_legend_handles_labels()
  handles.append(Patch(color=OTHERS, alpha=0.3))
  figure.legend(handles, [*labels, "shade: quartiles"], loc="outside right", frameon=False)
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

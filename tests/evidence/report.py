"""Pages of evidence: tables of means and standard deviations, panels, and where they are kept."""

from collections.abc import Sequence
import math
import pathlib
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
import numpy as np

from benchmarks import _harness, plot

PAGES = pathlib.Path(__file__).parent / "pages"
RESULTS = pathlib.Path(__file__).parent.parent.parent / "benchmarks" / "results"
BLUE, ORANGE, GREEN, PINK, YELLOW, SKY = plot.COLOURS
GREY, LIGHT = "#5A5A5A", plot.OTHERS


def spread(values: Sequence[float], form: str = "{:.2f}") -> str:
  """Mean ± standard deviation, the latter of a sample; one value alone."""
  mean = form.format(np.mean(values))
  deviation = form.replace("+", "").format(np.std(values, ddof=1)) if len(values) > 1 else ""
  return f"{mean} ± {deviation}" if deviation else mean


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  """A table in Markdown."""
  lines = [header, ["---"] * len(header), *rows]
  return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines) + "\n"


def panels(
  titles: Sequence[str],
  width: float = 4.0,
  height: float = 3.8,
  grid: Literal["both", "x", "y"] = "y",
) -> tuple[Figure, list]:
  """A figure with a panel for each title, at most two side by side, with a grid along one axis."""
  columns = min(2, len(titles))
  rows = math.ceil(len(titles) / columns)
  figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
  places = list(figure.subplots(rows, columns, squeeze=False).flat)
  for axes in places[len(titles) :]:
    axes.set_visible(False)
  places = places[: len(titles)]
  for axes, title in zip(places, titles, strict=True):
    axes.set_title(title, loc="left", fontsize=10)
    plot.clean(axes, grid)
  return figure, places


def curve(axes: Axes, x: Sequence[float], runs: Sequence[Sequence[float]], label: str, **style):
  """The mean of several seeds' curves, and a band from the least to the largest."""
  (line,) = axes.plot(x, np.mean(runs, 0), label=label, **style)
  band = (np.min(runs, 0), np.max(runs, 0))
  axes.fill_between(x, *band, color=line.get_color(), alpha=0.15, linewidth=0)


def points(axes: Axes, x: Sequence[float], runs: Sequence[Sequence[float]], label: str, **style):
  """Means and standard deviations of several seeds at each x."""
  deviations = np.std(runs, 1, ddof=1) if len(runs[0]) > 1 else None
  axes.errorbar(x, np.mean(runs, 1), deviations, label=label, capsize=3, **style)


def legend_below(figure: Figure, columns: int) -> None:
  """One legend for all panels, with the first one's labels."""
  handles, labels = figure.axes[0].get_legend_handles_labels()
  place = {"loc": "outside lower center", "ncols": columns}
  figure.legend(handles, labels, frameon=False, fontsize=9, **place)


def words(part: str, **parts: object) -> tuple[str, str, str]:
  """The title, the first paragraph and the rest of a page: its words, with numbers and tables."""
  text = (PAGES / f"{part}.md").read_text(encoding="utf-8").format(**parts)
  title, about, body = text.removeprefix("# ").split("\n\n", 2)
  return title, about, body


def write(
  part: str, title: str, about: str, body: str, figure: Figure, *, in_card: bool = True
) -> None:
  """Writes ``<part>_evidence.md`` to the results, and its picture.

  Args:
    part: as in ``make evidence PARTS=<part>``.
    title: of the page.
    about: a paragraph on the networks, the data and the choice of settings.
    body: tables.
    figure: the picture.
    in_card: whether a card shows the picture, too; then it goes to ``docs/figures``.
  """
  where = _harness.machine(["jax", "jaxlib", "optax"])
  about = f"{about}\n\nMade by `make evidence PARTS={part}`."
  folder = "../../docs/figures/" if in_card else ""
  picture = f"\n![{title}]({folder}{part}_evidence.png)\n"
  page = _harness.page(title, about, where, body + picture)
  _harness.replace(RESULTS / f"{part}_evidence.md", page)
  plot.small(figure, (plot.FIGURES if in_card else RESULTS) / f"{part}_evidence.png")

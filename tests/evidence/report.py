"""Pages of evidence: tables of means and standard deviations, and where they are kept."""

from collections.abc import Mapping
from collections.abc import Sequence
import json
import pathlib
from typing import Any

from matplotlib.figure import Figure
import numpy as np

from benchmarks import _harness
from benchmarks import plot

RESULTS = pathlib.Path(__file__).parent.parent.parent / "benchmarks" / "results"


def spread(values: Sequence[float], form: str = "{:.2f}") -> str:
  """Mean ± standard deviation, the latter of a sample."""
  deviation = np.std(values, ddof=1) if len(values) > 1 else 0.0
  return f"{form.format(np.mean(values))} ± {form.format(deviation)}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  """A table in Markdown."""
  lines = [header, ["---"] * len(header), *rows]
  return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def write(part: str, title: str, about: str, body: str, data: Any, figure: Figure) -> None:
  """Writes ``<part>_evidence.md`` and ``.png`` to the results, and a smaller picture.

  Args:
    part: as in ``make evidence PARTS=<part>``.
    title: of the page.
    about: a paragraph on the networks, the data and the choice of settings.
    body: tables.
    data: all figures, JSON-able, for ``out/<part>_evidence.json``.
    figure: the picture, which also goes to ``docs/figures`` in the size of a card.
  """
  where = _harness.machine(["jax", "jaxlib", "optax"])
  about = f"{about}\n\nMade by `make evidence PARTS={part}`."
  picture = f"\n![{title}]({part}_evidence.png)\n"
  _harness.replace(
    RESULTS / f"{part}_evidence.md", _harness.page(title, about, where, body + picture)
  )
  record: Mapping[str, Any] = {"machine": where, "results": data}
  _harness.replace(_harness.OUT / f"{part}_evidence.json", json.dumps(record) + "\n")
  figure.savefig(RESULTS / f"{part}_evidence.png", dpi=110)
  plot.small(figure, plot.FIGURES / f"{part}_evidence.png")

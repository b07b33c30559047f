"""Each figure with an interval, as `0.79 [0.72, 0.89]`, is in a stored table of its page."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [
  page
  for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
  if "build" not in page.relative_to(ROOT).parts
]
# A median and quartiles; tables set the median in bold.
FIGURE = re.compile(r"(\d[\d,]*\.?\d*)(?:\*\*)? +\[(\d[\d.,]*), (\d[\d.,]*)\]")
STORED = {
  table.name: set(FIGURE.findall(table.read_text(encoding="utf-8")))
  for table in RESULTS.glob("*.md")
}


def missing_figures(text):
  """The figures in no table that the page links to; in no table at all, if it links to none."""
  links = {name for name in re.findall(r"benchmarks/results/(\w+\.md)", text) if name in STORED}
  stored = set().union(*(STORED[name] for name in links or STORED))
  found = dict.fromkeys(FIGURE.findall(text))
  return ["{} [{}, {}]".format(*figure) for figure in found if figure not in stored]


def test_a_figure_that_differs_from_its_table_is_found():
  page = "It takes 0.79 [0.72, 0.89] ([table](../benchmarks/results/{}.md)), or 0.78 [0.72, 0.89]."
  assert missing_figures(page.format("optax_peers")) == ["0.78 [0.72, 0.89]"]
  assert len(missing_figures(page.format("lars"))) == 2
  assert missing_figures("It takes 0.79 [0.72, 0.89].") == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_figures_of_a_page_are_in_a_table_that_it_links_to(page):
  missing = missing_figures(page.read_text(encoding="utf-8"))
  assert not missing, (
    f"no table in benchmarks/results that {page.name} links to has {missing}: copy the figures of"
    " a table, and link to it"
  )

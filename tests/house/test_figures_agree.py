"""The figures of pages are in stored tables.

On every page this holds for figures with an interval, as `0.79 [0.72, 0.89]`; on README and the
page for choosing it holds for every decimal.
"""

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


FIRST_PAGES = (ROOT / "README.md", ROOT / "docs" / "choosing.md")
CODE = re.compile(r"^```.*?^```$|`[^`]*`", re.MULTILINE | re.DOTALL)
VERSION = re.compile(r"\b(?:python|jax|flax|optax) \d+\.\d+\b", re.IGNORECASE)
LINK = re.compile(r"\]\(([^)#]*)[^)]*\)")
# Quartiles, and what several seeds, positions or settings had.
SEVERAL = re.compile(r"(?:[\d./: ]+, )+[\d./: ]+")
NUMBER = re.compile(r"(?<![\w.-])\d[\d,]*(?:\.\d+)?(?![\w.]*\d)")


def passages(text):
  """The paragraphs, items of lists and rows of tables, without code and versions."""
  parts = re.split(r"\n(?=\n|\||- |\d\. )", CODE.sub("", text))
  return [VERSION.sub("", part) for part in parts]


def tables_behind(folder, passage):
  """The stored tables that a passage links to, itself or by a card."""
  pages = [(folder / link).resolve() for link in LINK.findall(passage) if link.endswith(".md")]
  for card in [page for page in pages if page.parent.name == "cards"]:
    links = LINK.findall(card.read_text(encoding="utf-8"))
    pages += [(card.parent / link).resolve() for link in links]
  return {page for page in pages if page.parent == RESULTS and page.suffix == ".md"}


def numbers(text):
  return [number.replace(",", "") for number in NUMBER.findall(text)]


def is_rounded(figure, number):
  """Whether `figure` is `number`, rounded to the figure's digits; either way at a tie."""
  half = 0.5 * 10.0 ** -len(figure.partition(".")[2])
  return abs(float(figure) - float(number)) <= half * (1 + 1e-9)


def unfounded_figures(folder, text):
  """The decimals in no table that their passage links to, itself or by a card."""
  unfounded = []
  for passage in passages(text):
    tables = tables_behind(folder, passage)
    stored = numbers(SEVERAL.sub("", "".join(t.read_text(encoding="utf-8") for t in tables)))
    figures = [number for number in numbers(LINK.sub("]", passage)) if "." in number]
    unfounded += [f for f in figures if not any(is_rounded(f, number) for number in stored)]
  return unfounded


def test_a_decimal_that_no_table_behind_its_passage_has_is_found():
  page = (
    "{} [all](benchmarks/results/half_frozen.md)\n- [a card](docs/cards/freeze_layers.md#cost) {}"
  )
  assert (
    unfounded_figures(ROOT, page.format("0.64, `0.9`, jax 0.10, 0.7.1 and 250.2 ms:", "24.70"))
    == []
  )
  assert unfounded_figures(ROOT, page.format("0.57 and 24.70 ms:", "0.57")) == ["0.57", "24.70"]
  assert unfounded_figures(ROOT, "half of it: 0.64") == ["0.64"]


@pytest.mark.parametrize("page", FIRST_PAGES, ids=lambda p: p.stem)
def test_every_decimal_of_the_first_pages_is_in_a_table_behind_its_passage(page):
  unfounded = unfounded_figures(page.parent, page.read_text(encoding="utf-8"))
  assert not unfounded, (
    f"{unfounded} of {page.name} are in no table of benchmarks/results that their paragraph, item"
    " or row links to, itself or by a card: copy the figures of a table, and link to it"
  )

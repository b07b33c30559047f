"""The figures of pages are in stored tables.

On every page this holds for figures with an interval, as `0.79 [0.72, 0.89]`; on README, the pages
for choosing and comparing, and in the cards' sections on cost and effect for every decimal.
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


CITING = (ROOT / "README.md", ROOT / "docs" / "choosing.md", ROOT / "docs" / "peers.md")
CARDS = sorted((ROOT / "docs" / "cards").glob("*.md"))
CODE = re.compile(r"^```.*?^```$|`[^`]*`", re.MULTILINE | re.DOTALL)
VERSION = re.compile(r"\b(?:python|jax|flax|optax) \d+\.\d+\b", re.IGNORECASE)
LINK = re.compile(r"\]\(([^)#]*)[^)]*\)")
SECTION = re.compile(r"^## (?:Cost|Measured)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
INTERVAL = re.compile(r"\[[\d.,]+, [\d.,]+\]")
# What several seeds or positions had.
SEVERAL = re.compile(r"(?:[\d./]+, )+[\d./]+")
NUMBER = re.compile(r"(?<![\w.-])\d[\d,]*(?:\.\d+)?(?![\w.]*\d)")


def passages(text):
  """The paragraphs, items of lists and rows of tables, without code and versions."""
  parts = re.split(r"\n(?=\n|\||- |\d\. )", CODE.sub("", text))
  return [VERSION.sub("", part) for part in parts]


def linked_tables(page, text):
  """The stored tables that a text on a page links to."""
  paths = [(page.parent / link).resolve() for link in LINK.findall(text)]
  return {path for path in paths if path.parent == RESULTS and path.suffix == ".md"}


def tables_behind(page, passage):
  """The stored tables that a passage links to, itself or by a card."""
  paths = [(page.parent / link).resolve() for link in LINK.findall(passage)]
  cards = [path for path in paths if path in CARDS]
  by_cards = [linked_tables(card, card.read_text(encoding="utf-8")) for card in cards]
  return linked_tables(page, passage).union(*by_cards)


def numbers(text):
  return [number.replace(",", "") for number in NUMBER.findall(text)]


def is_rounded(figure, number):
  """Whether `figure` is `number`, rounded to the figure's digits; either way at a tie."""
  half = 0.5 * 10.0 ** -len(figure.partition(".")[2])
  return abs(float(figure) - float(number)) <= half * (1 + 1e-9)


def unfounded_figures(passage, tables):
  """The decimals of a passage that are in none of the tables."""
  text = "\n".join(table.read_text(encoding="utf-8") for table in tables)
  stored = numbers(SEVERAL.sub("", text))
  figures = numbers(INTERVAL.sub("", LINK.sub("]", passage)))
  decimals = [figure for figure in figures if "." in figure]
  return [figure for figure in decimals if not any(is_rounded(figure, s) for s in stored)]


@pytest.mark.parametrize(
  ("text", "unfounded"),
  [
    ("[a table](benchmarks/results/half_frozen.md): 0.64, `0.9`, jax 0.10, 0.7.1, 250.2 ms", []),
    (
      "[a table](benchmarks/results/half_frozen.md): 0.57\n- [another](docs/devices.md) 0.64",
      ["0.57", "0.64"],
    ),
    ("| [a card](docs/cards/freeze_layers.md#cost) | 24.7 | 9.87 |", ["9.87"]),
  ],
)
def test_a_decimal_that_no_table_behind_its_passage_has_is_found(text, unfounded):
  page = ROOT / "README.md"
  parts = passages(text)
  assert [
    f for part in parts for f in unfounded_figures(part, tables_behind(page, part))
  ] == unfounded


@pytest.mark.parametrize("page", CITING, ids=lambda p: p.stem)
def test_a_decimal_is_in_a_table_that_its_passage_links_to_itself_or_by_a_card(page):
  for passage in passages(page.read_text(encoding="utf-8")):
    unfounded = unfounded_figures(passage, tables_behind(page, passage))
    assert not unfounded, (
      f"no table in benchmarks/results that this passage of {page.name} links to, itself or by a"
      f" card, has {unfounded}: copy the figures of a table, and link to it: {passage}"
    )


@pytest.mark.parametrize("card", CARDS, ids=lambda p: p.stem)
def test_a_decimal_of_a_cards_cost_and_effect_is_in_a_table_that_the_card_links_to(card):
  text = card.read_text(encoding="utf-8")
  tables = linked_tables(card, text)
  parts = [part for section in SECTION.findall(text) for part in passages(section)]
  unfounded = [figure for part in parts for figure in unfounded_figures(part, tables)]
  assert not unfounded, f"no table in benchmarks/results that {card.name} links to has {unfounded}"

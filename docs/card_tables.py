"""Writes the README's table of methods and the cards' index: ``python docs/card_tables.py``.

Both are made from the headers of the cards, between two comments that name this command.
"""

import pathlib
import re
from typing import NamedTuple

DOCS = pathlib.Path(__file__).parent
README = DOCS.parent / "README.md"
INDEX = DOCS / "cards" / "index.md"
HEADER = re.compile(
  r"# (?P<title>`.+)\n\n"
  r"- \*\*Does:\*\* (?P<does>.+)\n"
  r"- \*\*Verdict:\*\* (?P<verdict>.+)\n"
  r"- \*\*From:\*\* (?P<source>.+)\n\n"
)
TABLE = re.compile(r"(<!-- made by `python docs/card_tables.py` -->\n).*?(<!-- end -->)", re.DOTALL)


class Card(NamedTuple):
  """The header of a card.

  Attributes:
    file: its file name.
    title: the names of the method.
    does: what the method does, in one line.
    verdict: whether it helps, in one line.
    source: the software and the papers that it comes from.
  """

  file: str
  title: str
  does: str
  verdict: str
  source: str


def read_cards(folder: pathlib.Path = INDEX.parent) -> list[Card]:
  """The headers of all cards in `folder`, in the order of their file names.

  Raises:
    ValueError: a card's header has another form.
  """
  cards = []
  for path in sorted(folder.glob("*.md")):
    if path == INDEX:
      continue
    header = HEADER.match(path.read_text())
    if header is None:
      raise ValueError(
        f"{path} must begin with its header: '# `name`', then a list of three lines, "
        "'- **Does:**', '- **Verdict:**' and '- **From:**'. Copy another card's header."
      )
    cards.append(Card(path.name, **header.groupdict()))
  return cards


def with_table(page: str, rows: list[str]) -> str:
  """The page with `rows` in the place of its table."""
  table = "\n".join(["", *rows, "", ""])
  return TABLE.sub(lambda found: found[1] + table + found[2], page)


def readme_table(cards: list[Card]) -> list[str]:
  """Plain names: a relative link would lead nowhere on PyPI."""
  rows = [f"| {c.title} | {c.does} | {c.verdict} | {c.source} |" for c in cards]
  return ["| method | what it does | measured verdict | from |", "|---|---|---|---|", *rows]


def index_table(cards: list[Card]) -> list[str]:
  """The cards, linked."""
  rows = [f"| [{c.title}]({c.file}) | {c.verdict} |" for c in cards]
  return ["| card | verdict |", "|---|---|", *rows]


def pages() -> dict[pathlib.Path, str]:
  """What both pages must be."""
  cards = read_cards()
  return {
    README: with_table(README.read_text(), readme_table(cards)),
    INDEX: with_table(INDEX.read_text(), index_table(cards)),
  }


if __name__ == "__main__":
  for path, text in pages().items():
    path.write_text(text)

"""The rows of docs/xla.md, and the comments that name them."""

import pathlib
import re
from typing import NamedTuple

import optax_boost

ROOT = pathlib.Path(__file__).parents[2]
PAGE = ROOT / "docs" / "xla.md"
# The tests of an sdist run beside an installed package.
PACKAGE = pathlib.Path(optax_boost.__file__).parent


class Row(NamedTuple):
  """A workaround."""

  number: int
  title: str
  shown_by: str


def rows() -> list[Row]:
  """The rows of all tables of the page, in its order."""
  found = []
  for line in PAGE.read_text(encoding="utf-8").splitlines():
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    if line.startswith("|") and cells[0].isdigit():
      title = re.match(r"\*\*(.+?)\*\*", cells[1])[1]
      found.append(Row(int(cells[0]), title.rstrip("."), cells[-1]))
  return found


def named_in_code() -> dict[int, list[str]]:
  """By number, the files of the package whose comments or docstrings name it."""
  found: dict[int, list[str]] = {}
  for path in sorted(PACKAGE.rglob("*.py")):
    for number in re.findall(r"\bXLA (\d+)\b", path.read_text(encoding="utf-8")):
      found.setdefault(int(number), []).append(str(path.relative_to(PACKAGE.parent)))
  return found

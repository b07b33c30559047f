"""Writes the tables of methods and metrics, the sidebar and the reference.

``python docs/card_tables.py`` makes all of them from the cards: the table of metrics from their
sections `Metrics`, the rest from their headers. The files in which the public names are defined
come from the installed package. The tables and the sidebar stand between two
comments that name this command; the pages of the reference are made whole.
"""

from collections.abc import Iterator
import importlib
import inspect
import pathlib
import re
from typing import NamedTuple

DOCS = pathlib.Path(__file__).parent
CARDS = DOCS / "cards"
HEADER = re.compile(
  r"# (?P<title>`.+)\n\n"
  r"- \*\*Does:\*\* (?P<does>.+)\n"
  r"- \*\*Verdict:\*\* (?P<verdict>(?:Yes|No|Sometimes)\b.+)\n"
  r"- \*\*For:\*\* (?P<wish>.+)\n"
  r"- \*\*From:\*\* (?P<source>.+)\n"
  r"- \*\*API:\*\* (?P<names>.+)\n\n"
)
METRICS_HEADER = "| metric | of | dtype, meaning, unit | alarm |\n|---|---|---|---|\n"
METRIC = re.compile(
  r"\| `(?P<name>\S+)` \| (?P<of>every step(?:, if asked)?|wrappers that skip|`\w+`(?:, `\w+`)*)"
  r" \| (?P<dtype>float32|int32)(?P<shape>|, one per leaf): (?P<meaning>[^|]+)"
  r" \| (?P<alarm>[^|]+) \|\n"
)
# What users want: the six tools first, in the order of how many want them, then presets and
# comparisons, then what few need. The pages' index, the sidebar and choosing.md follow it.
WISHES = (
  "fine-tune a part of a model (`requires_grad`, LLRD)",
  "larger batches than fit (`MultiSteps`)",
  "half precision (AMP, `GradScaler`)",
  "a better model from the same run (EMA, SWA)",
  "a faster training from scratch (curriculum)",
  "a train step for any optimizer (line searches)",
  "presets and comparisons (`O1`, races)",
  "very large batches, bad batches (LARS, spikes)",
  "for study",
)
# Guides that the sidebar shows before the cards of a wish.
GUIDES = {WISHES[0]: "guides/fine_tuning"}
MADE = "<!-- made by `python docs/card_tables.py` -->\n"
BETWEEN = re.compile(f"({MADE}).*?(<!-- end -->)", re.DOTALL)


class Metric(NamedTuple):
  """A row of the section `Metrics` of a card.

  Attributes:
    name: the metric, as the train step returns it.
    of: the methods that have it; "every step", perhaps "if asked" by the argument `metrics`; or
      "wrappers that skip" steps or micro-batches.
    dtype: its dtype.
    shape: empty for a scalar, or ", one per leaf".
    meaning: its meaning and unit.
    alarm: which values tell of a fault.
  """

  name: str
  of: str
  dtype: str
  shape: str
  meaning: str
  alarm: str


class Card(NamedTuple):
  """The header of a card, and its metrics.

  Attributes:
    file: its file name.
    title: the names of the method.
    does: the effect of the method, in one line.
    verdict: whether it helps: yes, no or sometimes, in one short sentence.
    wish: the wish that it serves, of `WISHES`.
    source: the software and the papers that it comes from.
    names: the public names that the card describes.
    metrics: the rows of its section `Metrics`; none without one.
  """

  file: str
  title: str
  does: str
  verdict: str
  wish: str
  source: str
  names: str
  metrics: list[Metric]


def read_cards(folder: pathlib.Path = CARDS) -> list[Card]:
  """All cards in `folder`, in the order of their wishes.

  Raises:
    ValueError: a card's header or metrics have another form.
  """
  cards = []
  for path in sorted(folder.glob("*.md")):
    if path.name == "index.md":
      continue
    text = path.read_text(encoding="utf-8")
    header = HEADER.match(text)
    if header is None:
      raise ValueError(
        f"{path} must begin with its header: '# `name`', then a list of five lines, '- **Does:**', "
        "'- **Verdict:** Yes, No or Sometimes ...', '- **For:**', '- **From:**' and '- **API:**'. "
        "Copy another card's header."
      )
    card = Card(path.name, **header.groupdict(), metrics=read_metrics(path, text))
    if card.wish not in WISHES:
      raise ValueError(f"{path}: **For:** must be one of {WISHES}; got {card.wish!r}.")
    cards.append(card)
  return sorted(cards, key=lambda card: WISHES.index(card.wish))


def read_metrics(path: pathlib.Path, text: str) -> list[Metric]:
  """The metrics of a card; ValueError if its section `Metrics` is another table."""
  section = re.search(r"^## Metrics\n\n((?:\|.*\n)*)", text, re.MULTILINE)
  if section is None:
    return []
  lines = section[1].splitlines(keepends=True)
  rows = [METRIC.fullmatch(line) for line in lines[2:]]
  if "".join(lines[:2]) != METRICS_HEADER or not rows or None in rows:
    raise ValueError(
      f"{path}: the section 'Metrics' must be a table with the header '| metric | of | dtype,"
      " meaning, unit | alarm |' and rows '| `name` | `method` | int32: its meaning | its alarm |'."
      " The dtype may be float32, and ', one per leaf' may follow it. Copy another card's table."
    )
  return [Metric(**row.groupdict()) for row in rows if row is not None]


def wishes_table(cards: list[Card]) -> Iterator[str]:
  """Each wish with the methods that serve it, and whether they help."""
  yield "| you want | take | does it help? |"
  yield "|---|---|---|"
  last = ""
  for card in cards:
    wish = "" if card.wish == last else card.wish
    yield f"| {wish} | [{card.title}](cards/{card.file}) | {card.verdict} |"
    last = card.wish


def cards_table(cards: list[Card]) -> Iterator[str]:
  """Each method with its effect, its verdict and its origin."""
  yield "| method | effect | does it help? | origin |"
  yield "|---|---|---|---|"
  for card in cards:
    yield f"| [{card.title}]({card.file}) | {card.does} | {card.verdict} | {card.source} |"


def metrics_table(cards: list[Card]) -> Iterator[str]:
  """The metrics of every step, then those of the methods, with links to their cards."""
  yield METRICS_HEADER.rstrip("\n")
  rows = [(metric, card) for card in cards for metric in card.metrics]
  for metric, card in sorted(rows, key=lambda row: row[0].of != "every step"):
    of = metric.of if metric.of == "every step" else f"[{metric.of}](cards/{card.file})"
    yield (
      f"| `{metric.name}` | {of} | {metric.dtype}{metric.shape}: {metric.meaning}"
      f" | {metric.alarm} |"
    )


def caption(wish: str) -> str:
  """A wish as a heading, without the names that other software has for it."""
  return wish.partition(" (")[0].capitalize()


def sidebar(cards: list[Card]) -> Iterator[str]:
  """A table of contents for each wish: its guide, and the cards that serve it."""
  for wish in WISHES:
    pages = [f"cards/{card.file.removesuffix('.md')}" for card in cards if card.wish == wish]
    yield f"```{{toctree}}\n:caption: {caption(wish)}\n:hidden:"
    yield from [GUIDES[wish], *pages] if wish in GUIDES else pages
    yield "```\n"


def reference(card: Card) -> Iterator[str]:
  """The page of the public names in a card's header."""
  yield f"{MADE}\n# {card.title}: API\n"
  yield f"[The card](../cards/{card.file}) has its use, cost and measured effect.\n"
  yield "```{eval-rst}"
  for name in re.findall(r"`(.+?)`", card.names):
    is_class = name.split(".")[-1][0].isupper()
    yield f".. auto{'class' if is_class else 'function'}:: optax_boost.{name}"
    if is_class:
      yield "   :members:"
    if name.endswith("TrainStep"):
      yield "   :special-members: __call__"
  yield "```\n"


def sources(cards: list[Card]) -> Iterator[str]:
  """The reference for readers of the repository: the file in which each public name is defined."""
  yield f"{MADE}\n# Reference\n"
  yield "The public names by card. The docstrings have arguments, results, errors and an example.\n"
  yield "| card | names, with their files |"
  yield "|---|---|"
  root = pathlib.Path(importlib.import_module("optax_boost").__path__[0]).parent
  for card in cards:
    files = {}
    for name in re.findall(r"`(.+?)`", card.names):
      module, _, attribute = f"optax_boost.{name}".rpartition(".")
      found = inspect.unwrap(getattr(importlib.import_module(module), attribute))
      files[name] = pathlib.Path(inspect.getfile(found)).relative_to(root).as_posix()
    names = ", ".join(f"[`{name}`](../../{file})" for name, file in files.items())
    yield f"| [{card.title}](../cards/{card.file}) | {names} |"
  yield ""


def pages() -> dict[pathlib.Path, str]:
  """The pages with their generated parts renewed."""
  cards = read_cards()
  parts = {
    DOCS / "index.md": [wishes_table(cards), sidebar(cards)],
    DOCS / "metrics.md": [metrics_table(cards)],
    CARDS / "index.md": [cards_table(cards)],
  }
  texts = {DOCS / "reference" / card.file: "\n".join(reference(card)) for card in cards}
  texts[DOCS / "reference" / "README.md"] = "\n".join(sources(cards))
  for path, blocks in parts.items():
    made = ("\n".join(["", *lines, ""]) for lines in blocks)
    texts[path] = BETWEEN.sub(
      lambda found, made=made: f"{found[1]}{next(made)}\n{found[2]}",
      path.read_text(encoding="utf-8"),
    )
  return texts


if __name__ == "__main__":
  for path, text in pages().items():
    path.write_text(text, encoding="utf-8")

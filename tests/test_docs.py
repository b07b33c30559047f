"""Every Python block of the docs runs, in order, page by page; every page is linked; all builds."""

import pathlib
import re
import runpy
import subprocess
import sys

import pytest

import optax_boost

DOCS = pathlib.Path(__file__).parent.parent / "docs"
PAGES = sorted(p for p in DOCS.rglob("*.md") if "build" not in p.relative_to(DOCS).parts)
CARDS = sorted(p for p in (DOCS / "cards").glob("*.md") if p.name != "index.md")


def blocks(page):
  return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


@pytest.mark.parametrize(
  "page", [p for p in PAGES if blocks(p)], ids=lambda p: str(p.relative_to(DOCS))
)
def test_the_code_of_a_page_runs(page):
  namespace = {}
  for code in blocks(page):
    exec(compile(code, str(page.relative_to(DOCS)), "exec"), namespace)


HEADINGS = (
  "When to use it, and when not",
  "Code",
  "Knobs",
  "Cost",
  "Distributed",
  "Composes with",
  "Measured",
  "Deviations from the reference",
  "References",
)


@pytest.mark.parametrize("card", CARDS, ids=lambda p: p.stem)
def test_a_card_says_all_that_a_card_must(card):
  text = card.read_text()
  found = re.findall("^## (.*)$", text, re.MULTILINE)
  assert not set(HEADINGS) - set(found)


def test_readme_and_index_have_the_tables_that_the_cards_headers_make():
  for path, expected in runpy.run_path(str(DOCS / "card_tables.py"))["pages"]().items():
    assert path.read_text() == expected, f"{path}: run `python docs/card_tables.py`"


def test_a_card_without_a_header_is_refused_with_the_form_it_needs(tmp_path):
  script = runpy.run_path(str(DOCS / "card_tables.py"))
  (tmp_path / "method.md").write_text("# `method`\n\n**Verdict:** helps.\n")
  with pytest.raises(ValueError, match=r"method.md must begin with its header"):
    script["read_cards"](tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(DOCS)))
def test_a_picture_is_there_is_small_and_has_a_text_of_its_own(page):
  for text, target in re.findall(r"!\[(.*?)\]\((.*?)\)", page.read_text(), re.DOTALL):
    assert len(text) > 20
    assert (page.parent / target).stat().st_size < 80_000


def test_every_transformation_has_a_card():
  from tests import registry

  cards = "".join(card.read_text() for card in CARDS)
  missing = {name for name in registry.public_factories() if f"`{name}" not in cards}
  assert not missing - {"scale_by_lars_trust_ratio"}


@pytest.mark.parametrize("name", ["mxnet", "horovod", "sgperm"])
def test_a_migration_table_names_only_what_there_is(name):
  page = (DOCS / "migrating" / f"{name}.md").read_text()
  for row in re.findall(r"^\|[^|]*\|([^|]*)\|", page, re.MULTILINE):
    for used in re.findall(r"`([a-z_]+)\(", row):
      assert hasattr(optax_boost, used), used


def test_the_pages_build_without_a_warning(tmp_path):
  pytest.importorskip("furo")
  command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-E", "-b", "dummy"]
  result = subprocess.run(
    [*command, "-d", str(tmp_path / "trees"), str(DOCS), str(tmp_path / "out")],
    capture_output=True,
    text=True,
    check=False,
  )
  assert result.returncode == 0, result.stderr[-2000:]

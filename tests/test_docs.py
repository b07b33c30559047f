"""Every Python block of the docs runs, in order, page by page; every page is linked; all builds."""

import pathlib
import re
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


@pytest.mark.parametrize("card", CARDS, ids=lambda p: p.stem)
def test_a_card_says_all_that_a_card_must(card):
  text = card.read_text()
  for heading in ("When to use it, and when not", "Code", "Knobs", "Cost", "Distributed"):
    assert f"## {heading}\n" in text
  assert "**Verdict" in text.split("##")[0]


def test_every_transformation_has_a_card():
  from tests import registry

  cards = "".join(card.read_text() for card in CARDS)
  missing = {name for name in registry.public_factories() if f"`{name}" not in cards}
  assert not missing - {"scale_by_lars_trust_ratio"}


def test_migration_tables_name_only_what_there_is():
  names = set(dir(optax_boost))
  for page in (DOCS / "migrating").glob("*.md"):
    for row in re.findall(r"^\|[^|]*\|([^|]*)\|", page.read_text(), re.MULTILINE):
      for name in re.findall(r"`([a-z_]+)\(", row):
        assert name in names, f"{page.name}: {name}"


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

"""Workarounds for XLA have a row in docs/xla.md, and comments that name its number."""

import re

import pytest

from tests.xla import checks, table

ROWS = {row.number: row for row in table.rows()}


def test_numbers_are_unique():
  assert len(ROWS) == len(table.rows()) > 0


def test_every_row_is_named_in_the_code_and_every_number_has_a_row():
  assert set(table.named_in_code()) == set(ROWS)


def test_comments_about_xla_name_a_row():
  for path in table.PACKAGE.rglob("*.py"):
    for line in path.read_text(encoding="utf-8").splitlines():
      comment = line.partition("# ")[2]
      assert not re.search(r"\bXLA\b(?! \d)", comment) or re.search(r"\bXLA \d", comment), (
        f"{path}: give the workaround a row in docs/xla.md and name its number: {line}"
      )


def test_only_rows_that_name_make_xla_have_a_check_and_each_of_them_has():
  assert {n for n, row in ROWS.items() if row.shown_by == "`make xla`"} == set(checks.CHECKS)


@pytest.mark.parametrize("target", checks.REPLACED)
def test_code_that_a_check_replaces_exists(target):
  assert hasattr(*checks.find(target))

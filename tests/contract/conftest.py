"""Rows say in which columns they can't act; there the column must fail."""

import pytest

from tests.contract import registry


def pytest_collection_modifyitems(items):
  """Expects a failure of the columns that a row lists, so no row is listed that could act."""
  for item in items:
    row = getattr(item, "callspec", None) and item.callspec.params.get("row")
    if isinstance(row, registry.Row) and item.originalname in row.not_applicable:
      reason = row.not_applicable[item.originalname]
      item.add_marker(pytest.mark.xfail(reason=reason, strict=True))

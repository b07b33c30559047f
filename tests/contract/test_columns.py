"""A column of the contract asserts something for every row, or the row says why it can't act.

conftest.py runs what a row leaves out all the same, and expects it to fail.
"""

import ast
import inspect
import re
import textwrap

import pytest

from tests.apply_gradients import test_apply_gradients
from tests.contract import registry, test_contract, test_hostile
from tests.contract.bad_input import test_bad_input

COLUMNS = {
  name: function
  for module in (test_contract, test_hostile, test_apply_gradients, test_bad_input)
  for name, function in inspect.getmembers(module, inspect.isfunction)
  if name.startswith("test_") and "row" in inspect.signature(function).parameters
}


def asserts(statements: list[ast.stmt]) -> bool:
  """Whether every way through statements asserts something; loops count as run at least once."""
  for statement in statements:
    if isinstance(statement, ast.Return):
      return False
    if isinstance(statement, ast.If):
      if asserts(statement.body) and asserts(statement.orelse):
        return True
      if any(isinstance(node, ast.Return) for node in ast.walk(statement)):
        return False
    elif isinstance(statement, ast.For | ast.With):
      text = ast.unparse(statement).partition("\n")[0]
      if "pytest.raises" in text or asserts(statement.body):
        return True
    elif re.match(r"assert |(\w+\.)*assert_", ast.unparse(statement)):
      return True
  return False


def body(code: str) -> list[ast.stmt]:
  return ast.parse(textwrap.dedent(code)).body


@pytest.mark.parametrize("name", COLUMNS)
def test_every_code_path_of_a_column_asserts_something(name):
  (function,) = body(inspect.getsource(COLUMNS[name]))
  assert asserts(function.body), "list the rows that it is not for in their `not_applicable`"


@pytest.mark.parametrize(
  ("code", "expected"),
  [
    ("f()\nassert f()", True),
    ("chex.assert_trees_all_equal(a, b)", True),
    ("with pytest.raises(ValueError):\n  f()", True),
    ("for x in f():\n  assert x", True),
    ("if a:\n  assert f()\nelse:\n  assert g()", True),
    ("if a:\n  return\nassert f()", False),
    ("if a:\n  assert f()", False),
    ("for x in f():\n  if x:\n    assert x", False),
    ("f()", False),
  ],
)
def test_a_code_path_without_an_assertion_is_detected(code, expected):
  assert asserts(body(code)) == expected


@pytest.mark.parametrize("row", registry.ROWS, ids=str)
def test_a_row_excludes_existing_columns_only_and_gives_reasons(row):
  assert row.not_applicable.keys() <= COLUMNS.keys()
  assert all(len(reason.split()) > 2 for reason in row.not_applicable.values())

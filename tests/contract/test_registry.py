"""Every public factory has a row, and a complete signature and docstring."""

import inspect
import re
import sys
import typing

import optax
import pytest

import optax_boost
from tests.contract import registry
from tests.contract.orders import programs

SECTIONS = ["Args:", "Returns:", "Examples:"]


def test_every_public_factory_has_a_row():
  rows = {row.factory for row in registry.ROWS}
  assert registry.public_factories() - rows == set()
  assert rows - registry.public_factories() == set()


def test_every_wrapper_is_compared_with_the_interpreter():
  assert {programs.factory(name) for name in programs.WAYS} == set(registry.wrappers())


def test_the_page_on_trainers_names_methods_that_need_no_params():
  with open("docs/guides/trainers.md", encoding="utf-8") as file:
    sentence = file.read().partition(" without the params. ")[2].partition(" work there.")[0]
  named = set(re.findall(r"`(\w+)`", sentence))
  # A new method need not be named there.
  assert named
  assert named <= {row.factory for row in registry.ROWS if not row.needs_params}


def test_everything_public_is_documented_in_the_changelog():
  with open("CHANGELOG.md", encoding="utf-8") as file:
    text = file.read()
  missing = [name for name in optax_boost.__all__ if f"`{name}`" not in text]
  assert not missing, f"CHANGELOG.md lacks a line for {missing}"


@pytest.mark.parametrize("name", sorted(registry.public_factories()))
def test_factory_returns_extra_args_and_its_annotations_resolve(name):
  hints = typing.get_type_hints(getattr(optax_boost, name))
  assert hints["return"] is optax.GradientTransformationExtraArgs


@pytest.mark.parametrize(
  "name", [n for n in optax_boost.__all__ if inspect.isfunction(getattr(optax_boost, n))]
)
def test_function_has_the_sections_of_a_docstring_in_order(name):
  doc = inspect.getdoc(getattr(optax_boost, name))
  positions = [doc.find(section) for section in SECTIONS]
  assert all(p >= 0 for p in positions), f"{name}: {dict(zip(SECTIONS, positions, strict=True))}"
  assert positions == sorted(positions)


@pytest.mark.parametrize(
  "name", [n for n in optax_boost.__all__ if inspect.isfunction(getattr(optax_boost, n))]
)
def test_every_argument_is_described(name):
  function = getattr(optax_boost, name)
  doc = inspect.getdoc(function)
  args = doc[doc.find("Args:") : doc.find("Returns:")]
  missing = [p for p in inspect.signature(function).parameters if not re.search(rf"\b{p}: ", args)]
  assert not missing, f"{name} does not describe {missing}"


STATES = {
  value.__name__: value
  for name, module in list(sys.modules.items())
  if name.startswith("optax_boost._")
  for value in vars(module).values()
  if getattr(value, "__name__", "").endswith("State") and hasattr(value, "_fields")
}


@pytest.mark.parametrize("name", sorted(STATES))
def test_state_describes_its_fields(name):
  doc = inspect.getdoc(STATES[name])
  assert "Attributes:" in doc
  missing = [field for field in STATES[name]._fields if f"{field}: " not in doc]
  assert not missing, f"{name} does not describe {missing}"

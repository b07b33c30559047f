"""Bad input is refused in our own words: every public name, every argument, every kind of value."""

import importlib
import inspect
from typing import Any

from flax import linen
from flax import nnx
import jax.numpy as jnp
import pytest

import optax_boost
import optax_boost.auto
import optax_boost.linen
import optax_boost.nnx
from tests.bad_input import accepted
from tests.bad_input import kinds
from tests.bad_input import problem
from tests.bad_input import refusals
from tests.bad_input import table
from tests.bad_input import test_trees_and_states

# The attribute `optax_boost.race` is the function.
MODULES = [
  ("", optax_boost),
  ("", optax_boost.auto),
  ("", importlib.import_module("optax_boost.race")),
  ("nnx.", optax_boost.nnx),
  ("linen.", optax_boost.linen),
]


def public_names() -> dict[str, Any]:
  return {
    prefix + name: getattr(module, name) for prefix, module in MODULES for name in module.__all__
  }


def public_methods() -> dict[str, Any]:
  """The public methods that our classes define, by class and name."""
  found = {}
  for name, value in public_names().items():
    if inspect.isclass(value) and name not in ("linen.LessBN", "nnx.RemovedBatchNorm"):
      for method in vars(value):
        called = method == "__call__" or not method.startswith("_")
        field = method in getattr(value, "__dataclass_fields__", ())
        if called and not field and inspect.isroutine(inspect.getattr_static(value, method)):
          found[f"{name}.{method}"] = getattr(value, method)
  return found


def arguments_of(value: Any) -> set[str]:
  """Names of arguments, but for those that Flax and Python add."""
  # The signature of an NNX module is that of its metaclass.
  made_by_init = inspect.isclass(value) and issubclass(value, nnx.Module)
  parameters = inspect.signature(value.__init__ if made_by_init else value).parameters
  names = set(parameters) - {"self"}
  if inspect.isclass(value) and issubclass(value, linen.Module):
    names -= {"name", "parent"}
  return names


# The table is made by the first test, not by every worker that collects it.
NAMES = sorted(
  name
  for name, value in (public_names() | public_methods()).items()
  if name not in table.EXEMPT and arguments_of(value)
)


@pytest.mark.parametrize("name", NAMES)
def test_bad_values_of_an_argument_are_refused(name):
  entry = table.entries()[name]
  complaints = {}
  for argument, kind in entry.arguments.items():
    for label, bad in kind.items():
      found = refusals.complaint(lambda: entry.call(argument, bad.value), bad, argument)  # noqa: B023
      if (name, argument, label) in accepted.on_purpose():
        assert found == refusals.ACCEPTED, (
          f"{argument}: {label} is refused, but listed as accepted: {found}"
        )
      elif found:
        complaints[f"{argument}: {label}"] = found
  assert not complaints, "\n".join(f"{label}: {text}" for label, text in complaints.items())


@pytest.mark.filterwarnings("ignore::optax_boost.NoEffectWarning")
@pytest.mark.parametrize("name", NAMES)
def test_the_other_values_of_a_call_are_good(name):
  table.entries()[name].run({})


def test_every_public_name_and_argument_is_in_the_table():
  missing, entries = {}, table.entries()
  for name, value in (public_names() | public_methods()).items():
    if name in table.EXEMPT or (inspect.isclass(value) and name.endswith("Warning")):
      continue
    expected = arguments_of(value)
    if name not in entries:
      if expected:
        missing[name] = expected
      continue
    entry = entries[name]
    listed = set(entry.arguments) | set(entry.free)
    if expected - listed or listed - expected - set(entry.free):
      missing[name] = (expected - listed, listed - expected)
  assert not missing, "\n".join(f"{name}: {what}" for name, what in missing.items())


def test_the_table_and_the_list_of_what_is_accepted_name_nothing_else():
  known, entries = public_names() | public_methods(), table.entries()
  assert sorted(entries) == NAMES
  assert not [name for name in table.EXEMPT if name not in known]
  listed = {
    (name, argument, label)
    for name, entry in entries.items()
    for argument, kind in entry.arguments.items()
    for label in kind
  }
  for factory in problem.FACTORIES:
    listed |= {(factory, *name.split(": ")) for name, _, _ in test_trees_and_states.calls(factory)}
  assert not set(accepted.on_purpose()) - listed


def test_there_are_many_calls():
  kinds_of_all = [entry.arguments.values() for entry in table.entries().values()]
  assert sum(len(kind) for of_one in kinds_of_all for kind in of_one) >= 3000


def test_errors_that_are_not_ours_are_complained_about():
  """The harness itself: what it must not take for a refusal."""

  def complaint(call: Any, error: type[Exception] = TypeError) -> str:
    return refusals.complaint(call, kinds.Bad(None, error), "patterns")

  assert complaint(lambda: None) == refusals.ACCEPTED
  assert "not in our words" in complaint(lambda: jnp.ones(2) + "pattern")
  assert "must be" in complaint(lambda: optax_boost.path_mask("("))
  assert "does not name" in refusals.complaint(
    lambda: optax_boost.path_mask(3), kinds.Bad(3, TypeError, "axis"), "axis"
  )
  assert not complaint(lambda: optax_boost.path_mask(3))

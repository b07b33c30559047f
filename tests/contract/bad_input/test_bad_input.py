"""Bad input is refused with the argument and the value in the message."""

import functools
import inspect
import re
from typing import Any
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_boost
from optax_boost._foundation import _checks
import optax_boost.linen
import optax_boost.nnx
from tests.contract.bad_input import arguments

PARAMS, GRADS = arguments.PARAMS, arguments.GRADS
# Their arguments are all trees, states or records, which their methods' tests have.
WITHOUT_CALL = {
  *("path_mask", "refresh_subspace", "refresh_svrg", "snapshots"),
  "nnx.averaged_model",
  # Flax's own layers check most of their arguments.
  *("linen.NormalizedDense", "nnx.NormalizedDense"),
}
# Words that messages have for some arguments.
NOUNS = {"opt_state": "state", "batches": "batch", "first": "first|step"}


def mentions(message: str, value: Any) -> bool:
  """Whether a message has a plain value: its repr, type, shape or dtype."""
  if callable(value) or not isinstance(value, int | float | complex | str | bytes | jax.Array):
    return True
  words = [_checks.shorten(value, 30).removesuffix("..."), type(value).__name__]
  words += [str(getattr(value, name)) for name in ("shape", "dtype") if hasattr(value, name)]
  return any(word in message for word in words)


def refusal(call: Any, errors: Any, words: str, value: Any = None) -> str:
  """How a call is not refused as it must be, or an empty string."""
  try:
    with warnings.catch_warnings():
      warnings.simplefilter("ignore")
      call()
  except Exception as error:
    text = str(error)
    if isinstance(error, errors) and re.search(words, text) and mentions(text, value):
      return ""
    return f"{type(error).__name__}: {text[:300]}"
  return "accepted"


@pytest.mark.parametrize("name", arguments.CALLS)
def test_a_bad_value_is_refused_by_its_argument(name):
  complaints = {}
  for argument, label, value, errors in arguments.bad_values(name):
    call = functools.partial(arguments.CALLS[name], **{argument: value})
    complaints[argument, label] = refusal(call, errors, NOUNS.get(argument, argument), value)
  assert not (found := {k: v for k, v in complaints.items() if v}), found


def test_every_argument_of_a_public_function_has_a_kind():
  for prefix, module in (
    ("", optax_boost),
    ("nnx.", optax_boost.nnx),
    ("linen.", optax_boost.linen),
  ):
    for name in module.__all__:
      function = getattr(module, name)
      if inspect.isfunction(function):
        known = {*arguments.KINDS, *(k[1] for k in arguments.KINDS if isinstance(k, tuple))}
        if prefix + name in arguments.CALLS:
          known |= arguments.CALLS[prefix + name].bad_values.keys()
        missing = arguments.parameters(function).keys() - known - arguments.FREE
        assert not missing, (
          f"{prefix}{name}: {missing} need a kind in tests/contract/bad_input/arguments.py"
        )
        assert prefix + name in arguments.CALLS or prefix + name in WITHOUT_CALL, prefix + name


first_row_of_each_factory = pytest.mark.parametrize(
  "row", arguments.FIRST_ROWS, ids=lambda row: row.factory
)


def _like_params(leaf: Any) -> Any:
  return jax.tree.map(lambda p: leaf, PARAMS)


LEAVES = {
  "text": _like_params("a"),
  "Python floats": _like_params(1.0),
  "integers": jax.tree.map(lambda p: p.astype(int), PARAMS),
  "bools": jax.tree.map(lambda p: p > 0, PARAMS),
  "functions": _like_params(len),
  "keys": _like_params(jax.random.key(0)),
}
TREES = {
  "other tree": {"other": jnp.ones(2)},
  "leaf missing": {"conv": GRADS["conv"]},
  "other shapes": _like_params(jnp.ones(7)),
}
STATES = {
  "None": None,
  "empty": (),
  "number": 3,
  "params": PARAMS,
  "Adam's": optax.adam(0.1).init(PARAMS),
}


@first_row_of_each_factory
def test_params_of_another_kind_are_refused(row):
  init = row.make().init
  for label, tree in LEAVES.items():
    complaint = refusal(lambda: init(tree), TypeError, "leaf")  # noqa: B023
    assert not complaint, f"{label}: {complaint}"


def complaints(row, argument, values, errors, words):
  """By label, how ``update`` does not refuse values of one argument as it must."""
  tx = row.make()
  good = {"updates": GRADS, "state": tx.init(PARAMS), "params": PARAMS}
  found = {
    label: refusal(functools.partial(tx.update, **good | {argument: value}), errors, words)
    for label, value in values.items()
  }
  return {label: complaint for label, complaint in found.items() if complaint}


@first_row_of_each_factory
def test_gradients_of_other_params_are_refused(row):
  assert not complaints(row, "updates", TREES, ValueError, "gradients|leaf")


@first_row_of_each_factory
def test_params_that_the_state_was_not_made_for_are_refused(row):
  values = TREES | ({"None": None} if row.needs_params else {})
  assert not complaints(row, "params", values, ValueError, "params|leaf")


@first_row_of_each_factory
def test_states_of_other_params_or_transformations_are_refused(row):
  # A chain of optax raises ValueError.
  assert not complaints(row, "state", STATES, (TypeError, ValueError), "state")


def _states_of_others(state):
  """States that are not a method's own, though some are tuples of its length."""
  yield from STATES.values()
  yield optax.TraceState(trace=PARAMS)
  yield (optax.EmptyState(),) * len(state)
  yield tuple(reversed(state))
  yield (*state, optax.EmptyState())
  yield state[:-1]
  yield list(state)
  if hasattr(state, "_asdict"):
    yield state._asdict()


@first_row_of_each_factory
def test_states_of_other_transformations_are_refused_in_one_form(row):
  tx = row.make()
  state = tx.init(PARAMS)
  for other in _states_of_others(state):
    with pytest.raises(TypeError, match=r"needs the state that its own `init` made, .*; got"):
      tx.update(GRADS, other, PARAMS)

"""Every public callable with the kind of each of its arguments."""

import functools

from tests.bad_input import classes
from tests.bad_input import factories
from tests.bad_input import for_flax
from tests.bad_input import functions
from tests.bad_input import shared


@functools.cache
def entries() -> dict[str, shared.Entry]:
  """The table, by public name; of methods, the class's and the method's name."""
  return {
    **dict(factories.entries()),
    **functions.entries(),
    **classes.entries(),
    **for_flax.entries(),
  }


# Public names that are not called with values of a user's own, each with the reason.
_RECORD = "a record that one of our functions returns; the functions that take it check it"
_BY_FUNCTION = "made by the function of its name in lower case, whose arguments are checked"
EXEMPT = {
  "TrainState": _RECORD,
  "PermutedParams": _RECORD,
  "Subspace": _RECORD,
  "LayerGroups": _RECORD,
  "RaceResult": "made by race",
  "AutoBoost": _BY_FUNCTION,
  "nnx.AutoBoost": _BY_FUNCTION,
  "linen.AutoBoost": _BY_FUNCTION,
  "TrainStep": "made by make_train_step",
  "nnx.TrainStep": "made by make_train_step",
  "linen.TrainStep": "made by make_train_step",
  "nnx.RemovedBatchNorm": "put into a model by less_bn",
  "linen.LessBN": "made by less_bn; its `setup` and `__call__` are Linen's",
  "NoEffectWarning": "a warning",
  "PermutedParams.from_initial": "in tests/test_permuted_params.py",
  "PermutedParams.load": "in tests/test_permuted_params.py",
  "PermutedParams.save": "in tests/test_permuted_params.py",
  "Subspace.load": "in tests/test_subspace.py",
  "Subspace.save": "in tests/test_subspace.py",
  "StackedLayersWarning": "a warning",
}

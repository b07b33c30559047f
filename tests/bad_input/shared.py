"""An entry of the table, and the kinds that many of them share."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_boost
from tests.bad_input import kinds
from tests.bad_input import problem
from tests.bad_input.kinds import Bad
from tests.bad_input.kinds import Kind


@dataclasses.dataclass(frozen=True)
class Entry:
  """A public callable, ready to be given one bad argument.

  Attributes:
    function: the callable.
    good: from nothing to arguments with which it works.
    arguments: the kind of each argument; those of `*args` and `**kwargs` under their own names.
    then: what is done with the result, for arguments that are checked later.
    positional: arguments that are passed by position, the last of which is `*args`.
    free: arguments that may be anything, each with the reason.
  """

  function: Callable[..., Any]
  good: Callable[[], dict[str, Any]]
  arguments: dict[str, Kind]
  then: Callable[[Any], Any] = lambda result: result
  positional: tuple[str, ...] = ()
  free: dict[str, str] = dataclasses.field(default_factory=dict)

  def call(self, argument: str, value: Any) -> Any:
    """Calls the function with one argument replaced."""
    return self.run({argument: value})

  def run(self, changes: dict[str, Any]) -> Any:
    """Calls the function with some arguments replaced."""
    arguments = self.good() | changes
    args = [arguments.pop(name) for name in self.positional]
    *before, star = args or [()]
    return self.then(self.function(*before, *star, **arguments))


def any_error(known: Kind) -> Kind:
  """A kind whose values are refused as wrong values, whatever their type."""
  return {label: bad._replace(error=EITHER) for label, bad in known.items()}


def factory(
  name: str, use: Callable[[Any], Any] = problem.use, /, **arguments: Kind
) -> tuple[str, Entry]:
  """The entry of a function that returns a transformation."""
  good = functools.partial(dict, problem.FACTORIES[name])
  return name, Entry(getattr(optax_boost, name), good, arguments, use)


EITHER = (TypeError, ValueError)
# Kinds of which there are few.
TX = kinds.transformation()
FLAG = kinds.flag()
KEY = kinds.key()
RNG = kinds.rng()
PATH = kinds.path()
AXES = kinds.axes()
LAYERS = kinds.layers()
AXIS_NAME = kinds.axis_name()
COUNT = kinds.count()
FUNCTION = kinds.function()
OPTIONAL_FUNCTION = kinds.function(optional=True)
GROUPS = kinds.groups()
SELECTOR = kinds.selector()
NAME = kinds.name()
FLOAT_DTYPE = kinds.dtype(optional=True)
GROWTH = kinds.number(0.5, 0, -1)
BACKOFF = kinds.number(0, 1, -0.5)
POSITIVE = kinds.number(0, -1)
NOT_NEGATIVE = kinds.number(-1)
SHARE = kinds.number(-0.1, 1.0)

# A tree of other params.
OTHER = {"other": jnp.ones(2)}
PARAMS_KIND = {
  "text leaves": Bad({"conv": "a", "dense": "b"}, TypeError, "leaf"),
  "integers": Bad(jax.tree.map(lambda p: p.astype(int), problem.PARAMS), TypeError, "leaf"),
  "Python floats": Bad({"conv": 1.0}, TypeError, "leaf"),
  "bools": Bad({"conv": jnp.ones(2, bool)}, TypeError, "leaf"),
}
SUBSPACE = {
  "None": Bad(None, TypeError),
  "number": Bad(3, TypeError),
  "array": Bad(jnp.ones((2, 3)), TypeError),
  "tuple": Bad((problem.PARAMS, problem.PARAMS, 1, 1), TypeError),
  "params": Bad(problem.PARAMS, TypeError),
}
OPT_STATE = {
  "None": Bad(None, EITHER),
  "number": Bad(3, EITHER),
  "text": Bad("state", EITHER),
  "another optimizer's": Bad(optax.adam(0.1).init(problem.PARAMS), ValueError),
  "empty": Bad((), ValueError),
  "params": Bad(problem.PARAMS, ValueError),
}
SEEDS = kinds.without(kinds.count(static=True), "list") | {
  "empty": Bad([], ValueError),
  "fractions": Bad([0.5], TypeError),
  "negative": Bad([-1], ValueError),
  "twice": Bad([1, 1], ValueError),
  "floats": Bad(np.ones(2), TypeError),
}
SEEDS.pop("NumPy floats")
OVERRIDES = kinds.kind(
  {"list": ["conv"], "text": "conv", "number": 3, "number as pattern": {3: 0}},
  {"no such group": {"conv": 9}, "negative": {"conv": -1}, "broken": {"(": 0}},
) | {
  "fraction": Bad({"conv": 0.5}, EITHER),
  "text as group": Bad({"conv": "0"}, EITHER),
  "bool as group": Bad({"conv": True}, EITHER),
}
# Which of a loss's arguments are data, for arguments that are one array or a tuple of it.
DATA = kinds.kind({"number": 3, "numbers": [3], "nan": kinds.NAN, "bytes": b"x"}, {}) | {
  "another tree": Bad({"x": {"y": True}}, EITHER),
  "broken pattern": Bad("(", ValueError),
  "function to a number": Bad(lambda args: 3, EITHER),
}
BATCHES = {"number": Bad(3, TypeError), "None": Bad(None, TypeError), "empty": Bad([], ValueError)}


def arrays_of(value: Any) -> Kind:
  """Arrays; `value` has the wrong shape."""
  wrong_type = {"text": "a", "integers": jnp.ones(3, int), "function": len}
  known = kinds.kind(wrong_type, {"other shape": value}) | {"None": Bad(None, EITHER)}
  return {label: bad._replace(mention="two arrays|leaf") for label, bad in known.items()}


def head_arguments() -> dict[str, Kind]:
  return {
    "use_bias": FLAG,
    "dtype": FLOAT_DTYPE,
    "param_dtype": kinds.dtype(),
    "kernel_init": FUNCTION,
    "bias_init": FUNCTION,
    "multiplier_init": FUNCTION,
    "eps": NOT_NEGATIVE,
  }


def less_bn_arguments() -> dict[str, Kind]:
  return {
    "fn_flag": FLAG,
    "bias": FLAG,
    "predicate": OPTIONAL_FUNCTION,
    "multiplier": POSITIVE,
  }


PLAN = kinds.kind({"text": "all", "number": 3, "dict": {}, "list": ["norm"]}, {})
INPUTS = "the model's own inputs"


def inputs() -> Kind:
  known = kinds.kind(
    {"None": None, "text": "x"}, {"other features": jnp.ones((2, 5)), "scalar": jnp.ones([])}
  )
  return {label: bad._replace(mention="inputs|array") for label, bad in known.items()}

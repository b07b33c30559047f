"""Bad values by the kind of an argument, each with the exceptions that may refuse it."""

from collections.abc import Callable
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

HUGE = 10**400
COUNT = 2**31
NAN = float("nan")
# What `re` raises an error of its own type for: a group that stays open, a repeat count and a
# nesting beyond its limits, a look-behind of no fixed width.
BROKEN_PATTERNS = ("(", "x{99999999999}", "(" * 5000 + ")" * 5000, "(?<=a+)b")


class Bad(NamedTuple):
  """A value that an argument must refuse.

  Attributes:
    value: the value.
    error: the type of the exception, or several.
    mention: a regular expression that the message must match in place of the argument's name.
  """

  value: Any
  error: type[Exception] | tuple[type[Exception], ...]
  mention: str = ""


Kind = dict[str, Bad]


def kind(wrong_type: dict[str, Any], wrong_value: dict[str, Any]) -> Kind:
  """A kind of its values of wrong type and of those that are wrong though of the right type."""
  values = {label: Bad(value, TypeError) for label, value in wrong_type.items()}
  return values | {label: Bad(value, ValueError) for label, value in wrong_value.items()}


def without(known: Kind, *labels: str) -> Kind:
  """A kind but for some of its values."""
  missing = [label for label in labels if label not in known]
  assert not missing, missing
  return {label: bad for label, bad in known.items() if label not in labels}


def number(*out_of_range: float, optional: bool = False, schedule: bool = False) -> Kind:
  """Real numbers; `schedule`: or functions."""
  wrong_type = {
    "text": "0.5",
    "None": None,
    "bool": True,
    "list": [0.5],
    "complex": 0.5j,
    "function": len,
    "array of bools": jnp.ones([], bool),
    "array of objects": np.array(["a"], object),
    "complex array": jnp.ones([], complex),
  }
  wrong_type = _but(wrong_type, "None" if optional else "", "function" if schedule else "")
  wrong_value = {
    "nan": NAN,
    "NumPy nan": np.array(NAN),
    "inf": float("inf"),
    "-inf": -float("inf"),
    "10**400": HUGE,
    "-10**400": -HUGE,
    "vector": jnp.ones(2),
    "NumPy vector": np.ones(2),
  }
  wrong_value |= {f"{value}": value for value in out_of_range}
  # A concrete JAX scalar is checked as a number is; see `check_number`.
  in_jax = {f"JAX {value}": jnp.asarray(value) for value in (NAN, float("inf"), *out_of_range)}
  return kind(wrong_type, wrong_value | in_jax)


def count(
  minimum: int = 1, *, optional: bool = False, static: bool = False, schedule: bool = False
) -> Kind:
  """Whole numbers; `static`: no arrays, `schedule`: or functions."""
  wrong_type = {
    "text": "3",
    "None": None,
    "bool": True,
    "list": [3],
    "fraction": 2.5,
    "whole float": 3.0,
    "nan": NAN,
    "inf": float("inf"),
    "complex": 3j,
    "function": len,
    "array of floats": jnp.ones([]),
    "NumPy floats": np.ones(2),
  }
  wrong_type = _but(wrong_type, "None" if optional else "", "function" if schedule else "")
  if static:
    wrong_type["array"] = jnp.array(3)
  below = minimum - 1
  wrong_value = {f"{below}": below, "2**31": COUNT, "10**400": HUGE, "-10**400": -HUGE}
  either = (TypeError, ValueError)
  arrays = {"vector": jnp.ones(2, int), f"JAX {below}": jnp.asarray(below)}
  return kind(wrong_type, wrong_value) | {label: Bad(x, either) for label, x in arrays.items()}


def flag() -> Kind:
  """True or False."""
  values = {"0": 0, "text": "yes", "None": None, "nan": NAN, "array": np.ones(2, bool)}
  return kind(values, {})


def name(*, optional: bool = False) -> Kind:
  """One of several names."""
  wrong_type = {"number": 3, "None": None, "bool": True, "list": ["a"], "function": len}
  return kind(_but(wrong_type, "None" if optional else ""), {"unknown": "nobody", "empty": ""})


def transformation() -> Kind:
  """Transformations."""
  pair = (lambda params: (), lambda updates, state, params=None: (updates, state))
  values = {
    "factory": optax.sgd,
    "factory with arguments": optax.adam,
    "None": None,
    "text": "adam",
    "number": 0.1,
    "pair": pair,
    "function": lambda params: params,
    "state": optax.sgd(0.1).init(jnp.ones(2)),
  }
  return kind(values, {})


def function(*, optional: bool = False) -> Kind:
  """Functions."""
  wrong_type = {"number": 3, "text": "f", "None": None, "array": jnp.ones(2), "dict": {"f": len}}
  return kind(_but(wrong_type, "None" if optional else ""), {})


def dtype(*, optional: bool = False, all_floating: bool = True) -> Kind:
  """Floating dtypes."""
  wrong_type = {
    "None": None,
    "number": 3,
    "unknown": "float33",
    "int32": jnp.int32,
    "bool": bool,
    "complex": jnp.complex64,
    "array": jnp.ones(2),
    "function": len,
  }
  return kind(_but(wrong_type, "None" if optional else "", "" if all_floating else "int32"), {})


def key(*, optional: bool = False) -> Kind:
  """Keys or seeds."""
  wrong_type = {
    "text": "0",
    "None": None,
    "bool": True,
    "fraction": 0.5,
    "nan": NAN,
    "raw data": jnp.zeros(2, jnp.uint32),
    "NumPy floats": np.ones(2),
    "array of floats": jnp.ones([]),
    "function": len,
    "dict": {"params": 0},
  }
  wrong_value = {"2**64": 2**64, "10**400": HUGE, "several": jax.random.split(jax.random.key(0))}
  return kind(_but(wrong_type, "None" if optional else ""), wrong_value)


def rng() -> Kind:
  """One key that may be left out; no seeds."""
  wrong_type = {
    "text": "0",
    "seed": 3,
    "bool": True,
    "nan": NAN,
    "several": jax.random.split(jax.random.key(0)),
    "floats": jnp.ones(2),
    "scalar": jnp.ones([], jnp.uint32),
    "NumPy integers": np.ones(2, int),
    "function": len,
    "dict": {"params": jax.random.key(0)},
  }
  return kind(wrong_type, {})


def path(*, optional: bool = False) -> Kind:
  """Paths of files that may not exist."""
  wrong_type = {"number": 3, "None": None, "bytes": b"file", "list": ["file"], "function": len}
  wrong_value = {"empty": "", "null character": "a\0b"}
  return kind(_but(wrong_type, "None" if optional else ""), wrong_value)


def _broken(wrap: Callable[[str], Any]) -> dict[str, Any]:
  return {f"pattern {text[:8]}": wrap(text) for text in BROKEN_PATTERNS}


def pattern() -> Kind:
  """One regular expression."""
  wrong_type = {"number": 3, "None": None, "bytes": b"conv", "list": ["conv"]}
  return kind(wrong_type, _broken(lambda text: text))


def groups(*, optional: bool = False) -> Kind:
  """A plan, or regular expressions, one per group."""
  wrong_type = {
    "text": "conv",
    "None": None,
    "number": 2,
    "empty": [],
    "numbers": [3],
    "dict": {"conv": 0},
    "function": len,
    "bytes": [b"conv", b"dense"],
  }
  wrong_type = _but(wrong_type, "None" if optional else "")
  return kind(wrong_type, _broken(lambda text: [text, "dense"]))


def selector() -> Kind:
  """A set of leaves."""
  wrong_type = {
    "number": 3,
    "numbers": [3],
    "nan": NAN,
    "tree of numbers": {"conv": 1, "dense": 0},
    "bytes": b"conv",
    "array of bools": np.array([True, False]),
    "JAX array of bools": jnp.array([True, False]),
    "function to a number": lambda tree: 3,
    "function to None leaves": lambda tree: jax.tree.map(str, tree),
  }
  wrong_value = {"another tree": {"other": True}, "a list of bools": [True, False, True, True]}
  wrong_value |= _broken(lambda text: text)
  wrong_value["patterns, one broken"] = ["conv", "("]
  return kind(wrong_type, wrong_value)


def patterns_or_none() -> Kind:
  """One or several regular expressions, or None."""
  wrong_type = {"number": 3, "numbers": [3], "bytes": b"conv", "dict": {"conv": 0}, "bool": True}
  return kind(wrong_type, _broken(lambda text: text) | _broken(lambda text: ["conv", text]))


def layers() -> Kind:
  """What `layer_axes` returns, or None."""
  wrong = {"axes": {"conv": 0}, "text": "conv", "number": 0, "function": len, "list": ["conv"]}
  return {label: Bad(value, TypeError) for label, value in wrong.items()}


def axes() -> Kind:
  """Axes by regular expression, or None."""
  wrong_type = {
    "list": ["conv"],
    "text": "conv",
    "number": 0,
    "number as pattern": {3: 0},
    "axis as text": {"conv": "0"},
    "fraction": {"conv": 0.5},
    "bool": {"conv": True},
    "None as axis": {"conv": None},
    "axes in a dict": {"conv": {0: 1}},
    "function": len,
  }
  wrong_value = {"no such axis": {"kernel": 7}, "10**400": {"kernel": HUGE}}
  return kind(wrong_type, wrong_value | _broken(lambda text: {text: 0}))


def axis_name(*, optional: bool = True) -> Kind:
  """Names of mesh axes; none is bound where the suite calls."""
  wrong_type = {
    "number": 3,
    "None": None,
    "list": ["batch"],
    "empty": (),
    "number among names": ("batch", 3),
    "function": len,
    "bool": True,
    "array": np.array(["batch", "x"]),
    "mesh": jax.sharding.PartitionSpec("batch"),
  }
  wrong_type = _but(wrong_type, "None" if optional else "")
  return kind(wrong_type, {"unbound": "nowhere", "several unbound": ("nowhere", "never")})


def _but(values: dict[str, Any], *labels: str) -> dict[str, Any]:
  return {label: value for label, value in values.items() if label not in labels}

"""Types and argument checks that every method shares; imports nothing else of ours."""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import importlib.util
import math
import numbers
from typing import Any
from typing import TypeAlias

import jax
import jax.numpy as jnp

# A set of leaves: one or several regular expressions, a tree of bools, a callable from the
# params to such a tree (optax's mask convention), or None for no leaf.
LeafSelector: TypeAlias = Any
# Axes of a leaf, by regular expression.
AxesByPattern: TypeAlias = Mapping[str, int | Sequence[int]]


class NoEffectWarning(UserWarning):
  """A pattern, mask or method was given a tree in which it matches nothing."""


def check_number(
  name: str,
  value: Any,
  *,
  minimum: float = -math.inf,
  below: float = math.inf,
  positive: bool = False,
) -> None:
  """Checks a hyperparameter, if it is a concrete number.

  Traced values and arrays pass: under ``optax.inject_hyperparams`` a hyperparameter is an array
  whose value is not known when the transformation is built.

  Args:
    name: the argument's name, for the message.
    value: what came.
    minimum: smallest value allowed.
    below: the value must be smaller than this.
    positive: whether zero is refused too.

  Raises:
    TypeError: `value` is neither a real number nor an array.
    ValueError: `value` is a number out of range, or an array that is not a scalar.
  """
  if isinstance(value, jax.Array) or hasattr(value, "__jax_array__"):
    if jnp.ndim(value) != 0:
      raise ValueError(f"`{name}` must be a scalar; got an array of shape {jnp.shape(value)}.")
    return
  if isinstance(value, bool) or not isinstance(value, numbers.Real):
    raise TypeError(
      f"`{name}` must be a real number or a scalar array; got {value!r} of type"
      f" {type(value).__name__}."
    )
  allowed = [f">= {minimum:g}"] if minimum > -math.inf else []
  allowed += ["> 0"] if positive else []
  allowed += [f"< {below:g}"] if below < math.inf else []
  number = float(value)
  if not (minimum <= number < below and math.isfinite(number)) or (positive and number <= 0):
    raise ValueError(f"`{name}` must be finite and {' and '.join(allowed)}; got {value!r}.")


def check_whole_number(name: str, value: Any, *, minimum: int = 1, static: bool = False) -> None:
  """Checks an argument that counts something.

  Args:
    name: the argument's name, for the message.
    value: what came. Traced values and arrays pass, as in :func:`check_number`.
    minimum: smallest value allowed.
    static: whether they don't, because the count sets a shape.

  Raises:
    TypeError: `value` is no whole number.
    ValueError: `value` is below `minimum`, or an array that is not a scalar.
  """
  array = isinstance(value, jax.Array) or hasattr(value, "__jax_array__")
  if isinstance(value, bool) or not (array or isinstance(value, numbers.Integral)):
    raise TypeError(f"`{name}` must be a whole number; got {value!r}.")
  check_number(name, value, minimum=minimum)
  if static and not isinstance(value, numbers.Integral):
    raise TypeError(
      f"`{name}` sets a shape, so it must be a Python number; got {value!r}. Under"
      " `optax.inject_hyperparams` name it in `static_args`."
    )


def check_floating_dtype(name: str, value: Any) -> None:
  """Checks an argument that names a floating dtype.

  Args:
    name: the argument's name, for the message.
    value: what came.

  Raises:
    TypeError: `value` is no dtype, or one of another kind.
  """
  try:
    floating = jnp.issubdtype(jnp.dtype(value), jnp.floating)
  except TypeError:
    floating = False
  if not floating:
    raise TypeError(
      f"`{name}` must be a floating dtype, as jnp.float32 or jnp.bfloat16; got {value!r}."
    )


def check_learning_rate(learning_rate: Any) -> None:
  """Checks a learning rate: a number >= 0, a scalar array, or a schedule.

  Args:
    learning_rate: what came.

  Raises:
    TypeError: it is none of the three.
    ValueError: it is a number below zero or not finite.
  """
  if not callable(learning_rate):
    check_number("learning_rate", learning_rate, minimum=0.0)


def require_params(params: Any, method: str) -> None:
  """Refuses a call of ``update`` without params.

  Args:
    params: what came as `params`.
    method: the method's name, for the message.

  Raises:
    ValueError: `params` is None.
  """
  if params is None:
    raise ValueError(
      f"`{method}` needs the current params; got params=None. Call"
      " `tx.update(grads, state, params)`, or let `optax_boost.make_train_step` do it."
    )


def require_extra(value: Any, name: str, method: str, purpose: str) -> None:
  """Refuses a call of ``update`` without an extra argument that the method needs.

  Args:
    value: what came.
    name: the extra argument's name.
    method: the method's name.
    purpose: what the argument is, in a few words.

  Raises:
    ValueError: `value` is None.
  """
  if value is None:
    raise ValueError(
      f"`{method}` needs the extra argument `{name}` ({purpose}); got none. Call"
      f" `tx.update(grads, state, params, {name}=...)`, or let"
      " `optax_boost.make_train_step` do it."
    )


def with_progress(items: Iterable[Any], progress: bool, desc: str, unit: str) -> Iterable[Any]:
  """Shows a progress bar while something is iterated over, if wanted and if ``tqdm`` is there.

  Args:
    items: what is iterated over.
    progress: whether to show one.
    desc: what goes on.
    unit: what an item is.

  Returns:
    `items`, or the bar around it.
  """
  if not progress or importlib.util.find_spec("tqdm") is None:
    return items
  from tqdm import tqdm

  return tqdm(items, desc=desc, unit=unit)


def as_key(name: str, key: Any) -> jax.Array:
  """Makes a typed key of a key or a seed.

  Args:
    name: the argument's name, for the message.
    key: what came.

  Returns:
    A key as ``jax.random.key`` makes it.

  Raises:
    TypeError: it is neither a typed key nor an integer.
  """
  if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
    return key
  if not (jnp.ndim(key) == 0 and jnp.issubdtype(jnp.result_type(key), jnp.integer)):
    raise TypeError(f"`{name}` must be a key of `jax.random.key` or an integer seed; got {key!r}.")
  return jax.random.key(key)


def check_name(argument: str, value: Any, allowed: Sequence[str]) -> None:
  """Checks an argument that is one of several names.

  Args:
    argument: the argument's name, for the message.
    value: what came.
    allowed: the names.

  Raises:
    ValueError: it is none of them.
  """
  if value not in allowed:
    raise ValueError(f"`{argument}` must be one of {', '.join(map(repr, allowed))}; got {value!r}.")

"""Argument checks and warnings that every method shares."""

from collections.abc import Sequence
import inspect
import math
import numbers
import re
import sys
from typing import Any, TypeGuard
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost._foundation import _types

# The largest count that int32 holds: counts are compared with int32 counters on the device.
LARGEST_COUNT = 2**31 - 1
# Their frames may lie between a method and the user's line.
_LIBRARIES = ("optax_boost", "jax", "optax", "flax", "contextlib")


class NoEffectWarning(UserWarning):
  """A pattern, mask or method was given a tree in which it matches nothing."""


def warn(message: str, category: type[Warning]) -> None:
  """Warns of the user's line: the innermost one that is not in these libraries."""
  frame, level = sys._getframe(1), 2
  while frame.f_back and str(frame.f_globals.get("__name__")).partition(".")[0] in _LIBRARIES:
    frame, level = frame.f_back, level + 1
  warnings.warn(message, category, stacklevel=level)


def shorten(value: _types.Unchecked, limit: int = 80) -> str:
  """The repr of a value for a message, cut to `limit` characters; never raises."""
  try:
    text = repr(value)
  except Exception:
    # Python refuses to print integers of more than 4,300 digits.
    text = f"a value of type {type(value).__name__}"
  return text if len(text) <= limit else text[: limit - 3] + "..."


def is_array(value: _types.Unchecked) -> TypeGuard[jax.Array]:
  """Whether a value is a JAX array, traced ones and NNX variables included."""
  return isinstance(value, jax.Array) or hasattr(value, "__jax_array__")


def is_any_array(value: _types.Unchecked) -> TypeGuard[jax.Array | np.ndarray]:
  """Whether a value is a JAX or NumPy array."""
  return is_array(value) or isinstance(value, np.ndarray)


def is_integer(value: _types.Unchecked) -> bool:
  """Whether a value is a Python or NumPy integer; bools don't count."""
  return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _dtype_of(array: Any) -> Any:
  # Of an array of Python objects, JAX knows no dtype.
  return array.dtype if isinstance(array, np.ndarray | np.generic) else jnp.result_type(array)


def _is_real(dtype: Any) -> bool:
  return jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)


def concrete_number(value: _types.Unchecked) -> Any:
  """A number or scalar array as a number; None for traced arrays, whose values are unknown."""
  if not is_any_array(value):
    return value
  array = value if isinstance(value, np.ndarray | jax.Array) else value.__jax_array__()
  if jnp.ndim(array) or isinstance(array, jax.core.Tracer):
    return None
  if isinstance(array, np.ndarray) or array.is_fully_addressable or array.is_fully_replicated:
    return np.asarray(array)[()]
  return None


def check_floating_dtype(name: str, value: Any, *, optional: bool = False) -> None:
  """Raises TypeError unless an argument names a floating dtype."""
  try:
    # NumPy takes None for float64 and an array for its dtype.
    named = value is not None and not is_any_array(value)
    floating = named and jnp.issubdtype(jnp.dtype(value), jnp.floating)
  except (TypeError, ValueError):
    floating = False
  if not (floating or (optional and value is None)):
    raise TypeError(
      f"`{name}` must be a floating dtype, as jnp.float32 or jnp.bfloat16; got {shorten(value)}."
    )


def check_number(
  name: str,
  value: _types.Unchecked,
  *,
  minimum: float = -math.inf,
  maximum: float = math.inf,
  below: float = math.inf,
  positive: bool = False,
) -> None:
  """Checks a real hyperparameter: TypeError for another kind, ValueError out of range.

  Traced values pass, as under ``optax.inject_hyperparams``; `below` is exclusive.
  """
  if is_any_array(value):
    dtype = _dtype_of(value)
    if not _is_real(dtype):
      raise TypeError(f"`{name}` must be a real number; got an array of dtype {dtype}.")
    if jnp.ndim(value) != 0:
      raise ValueError(f"`{name}` must be a scalar; got an array of shape {jnp.shape(value)}.")
  elif isinstance(value, bool | np.bool_) or not isinstance(value, numbers.Real):
    raise TypeError(
      f"`{name}` must be a real number or a scalar array; got {shorten(value)} of type"
      f" {type(value).__name__}."
    )
  concrete = concrete_number(value)
  if concrete is None:
    return
  try:
    number = float(concrete)
  except OverflowError:
    number = math.inf
  bounds = [
    (math.isfinite(number), "finite", True),
    (number >= minimum, f">= {minimum:g}", minimum > -math.inf),
    (number <= maximum, f"<= {maximum:g}", maximum < math.inf),
    (number > 0, "> 0", positive),
    (number < below, f"< {below:g}", below < math.inf),
  ]
  if not all(holds for holds, _, applies in bounds if applies):
    required = " and ".join(text for _, text, applies in bounds if applies)
    advice = ""
    if is_array(value) and dtype in (jnp.float16, jnp.bfloat16):
      # In float16 65,536 is infinite, in bfloat16 0.999 is 1.
      advice = (
        f" Under `optax.inject_hyperparams` numbers have the params' dtype, here {dtype}: pass"
        " `hyperparam_dtype=jnp.float32`."
      )
    raise ValueError(f"`{name}` must be {required}; got {shorten(value)}.{advice}")


def check_whole_number(
  name: str,
  value: _types.Unchecked,
  *,
  minimum: int = 1,
  maximum: int = LARGEST_COUNT,
  static: bool = False,
) -> None:
  """Checks a count; traced arrays pass, but none if `static`: the program is made for it."""
  array = is_any_array(value) and jnp.issubdtype(_dtype_of(value), jnp.integer)
  if not (array or is_integer(value)):
    raise TypeError(f"`{name}` must be a whole number; got {shorten(value)}.")
  if static and not is_integer(value):
    raise TypeError(
      f"`{name}` shapes the program, so it must be a Python number; got {shorten(value)}. Pass"
      f" int({name}); under `optax.inject_hyperparams` name it in `static_args`."
    )
  concrete = concrete_number(value)
  if concrete is not None and not minimum <= int(concrete) <= maximum:
    bound = f">= {minimum}" if int(concrete) < minimum else f"<= {maximum}"
    raise ValueError(f"`{name}` must be {bound}; got {shorten(value)}.")
  check_number(name, value)


def check_bool(name: str, value: _types.Unchecked) -> None:
  """Raises TypeError unless an argument is True or False."""
  check_type(name, value, bool | np.bool_, "True or False")


def check_callable(
  name: str, value: _types.Unchecked, form: str = "", *, optional: bool = False
) -> None:
  """Raises TypeError unless an argument is callable; `form` shows the call in the message."""
  if not (callable(value) or (optional and value is None)):
    how = f", called as `{form}`" if form else ""
    raise TypeError(f"`{name}` must be callable{how}; got {shorten(value)}.")


def check_type(name: str, value: _types.Unchecked, kind: Any, words: str) -> None:
  """Raises TypeError unless an argument is of a type, which `words` describe."""
  if not isinstance(value, kind):
    raise TypeError(f"`{name}` must be {words}; got {shorten(value)}.")


def check_transformation(
  name: str, value: _types.Unchecked
) -> optax.GradientTransformationExtraArgs:
  """Checks an argument that is a transformation, and lets it swallow extra arguments."""
  if not isinstance(value, optax.GradientTransformation):
    hint = "Did you pass the factory instead of what it returns?"
    if isinstance(value, optax.MultiSteps):
      hint = "Pass its `.gradient_transformation()`."
    raise TypeError(
      f"`{name}` must be an optax.GradientTransformation; got {shorten(value)}. {hint}"
    )
  tx = optax.with_extra_args_support(value)
  parameters = inspect.signature(tx.update).parameters.values()
  if any(p.kind is p.VAR_KEYWORD for p in parameters):
    return tx
  names = {p.name for p in parameters}

  def update(
    updates: optax.Updates, state: optax.OptState, params: optax.Params = None, **extra_args: Any
  ) -> tuple[optax.Updates, optax.OptState]:
    accepted = {key: argument for key, argument in extra_args.items() if key in names}
    return tx.update(updates, state, params, **accepted)

  update.wraps = tx  # type: ignore[attr-defined]
  # Some of optax's methods refuse extra arguments that they don't name.
  return optax.GradientTransformationExtraArgs(tx.init, update)


def check_learning_rate(learning_rate: _types.Unchecked, name: str = "learning_rate") -> None:
  """Checks a learning rate: a number >= 0, a scalar array, or a schedule."""
  if not callable(learning_rate):
    check_number(name, learning_rate, minimum=0.0)


# Where a match may begin and end: at either side of a `/`, and at the ends of a path. Names of
# PyTorch and MindSpore in a flat dict, as `fc1.bias`, have dots instead.
_SEGMENT_BOUNDARY = r"(?:\A|\Z|(?<=[/.])|(?=[/.]))"
# Python allows flags for a whole expression, as `(?i)`, only at its start.
_LEADING_FLAGS = re.compile(r"(?:\(\?[aiLmsux]+\))*")


def compile_pattern(argument: str, pattern: Any) -> re.Pattern[str]:
  """Compiles a user's regular expression so that ``search`` finds whole segments of a path.

  A match begins and ends at a segment boundary, so `blocks/1` is found in ``blocks/1/kernel`` and
  not in ``blocks/10/kernel``. TypeError for no string, ValueError for a bad expression.
  """
  compiled = compile_within_segments(argument, pattern)
  flags = _LEADING_FLAGS.match(pattern)[0]  # type: ignore[index]  # it matches anything
  # In a verbose expression, a comment may be last.
  end = "\n)" if compiled.flags & re.VERBOSE else ")"
  whole = f"{flags}{_SEGMENT_BOUNDARY}(?:{pattern[len(flags) :]}{end}{_SEGMENT_BOUNDARY}"
  return re.compile(whole)


def compile_within_segments(argument: str, pattern: _types.Unchecked) -> re.Pattern[str]:
  """Like :func:`compile_pattern`, but matches may begin and end within a segment."""
  if not isinstance(pattern, str):
    raise TypeError(
      f"`{argument}` must hold regular expressions, which are strings; got {shorten(pattern)}."
    )
  try:
    return re.compile(pattern)
  except (re.error, RecursionError, OverflowError) as error:
    raise ValueError(
      f"`{argument}` has {shorten(pattern)}, which is not a regular expression: {error}. Escape"
      " special characters with a backslash."
    ) from error


def check_patterns(name: str, value: _types.Unchecked, words: str) -> None:
  """Checks a sequence of regular expressions, at least one; `words` say what else is allowed."""
  if not (isinstance(value, list | tuple) and value and all(isinstance(p, str) for p in value)):
    raise TypeError(f"`{name}` must be {words}; got {shorten(value)}.")
  for pattern in value:
    compile_pattern(name, pattern)


def check_axis_name(name: str, value: _types.Unchecked) -> None:
  """Raises TypeError unless an argument names one or several mesh axes, or is None."""
  names = value if isinstance(value, tuple) else (value,)
  if value is not None and not (names and all(isinstance(n, str) for n in names)):
    raise TypeError(
      f"`{name}` must be the name of a mesh axis, a tuple of names, or None; got {shorten(value)}."
    )


def require_axis(
  name: str, value: str | tuple[str, ...] | None, method: str, *, optional: bool = True
) -> int:
  """The size of mesh axes; ValueError unless they are bound around ``update``."""
  if not value:
    return 1
  try:
    return jax.lax.axis_size(value)
  except NameError as error:
    raise ValueError(
      f"`{method}` was given {name}={value!r}, but no such axis is bound where `update` is called."
      " Call it inside `jax.shard_map` (or `jax.vmap`) over an axis of this name, or leave"
      f" `{name if optional else method}` out."
    ) from error


_TAKE_OR_MAP = (
  "Take a member with `jax.tree.map(lambda x: x[i], state)`, or map over them with `jax.vmap`."
)


def require_one_run(count: Any, function: str, advice: str = _TAKE_OR_MAP) -> None:
  """Raises ValueError for the state of a population, whose `count` is not a scalar."""
  if jnp.ndim(count):
    raise ValueError(
      f"`{function}` needs the state of one run; got a population's of shape"
      f" {jnp.shape(count)}. {advice}"
    )


def bound_axis(value: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
  """The mesh axes if they are bound here, or None."""
  if not value:
    return None
  try:
    jax.lax.axis_size(value)
  except NameError:
    return None
  return value


def varying_axes(aval: Any) -> frozenset[str]:
  """The mesh axes along which an array of a type, or an abstract one, varies in ``shard_map``."""
  # Older versions of JAX have the second name.
  manual = getattr(aval, "manual_axis_type", None)
  return frozenset(manual.varying if manual is not None else getattr(aval, "vma", None) or ())


def require_params(params: _types.Tree, method: str) -> None:
  """Raises ValueError if ``update`` is called without params."""
  if params is None:
    raise ValueError(
      f"`{method}` needs the current params; got params=None. Call"
      " `tx.update(grads, state, params)`, or let `optax_boost.make_train_step` do it."
    )


# In all errors about the state of another transformation or of other params.
NEEDS_STATE = "needs the state that"
_OWN_STATE = (
  f"`{{method}}` {NEEDS_STATE} its own `init` made, {{required}}; got {{got}}. Pass the state of"
  " this transformation; a checkpoint must be restored into the structure of `tx.init(params)`."
)


def require_state(state: _types.Tree, state_type: type, method: str) -> None:
  """Raises TypeError for the state of another transformation."""
  if not isinstance(state, state_type):
    required, got = f"a {state_type.__name__}", f"a {type(state).__name__}"
    raise TypeError(_OWN_STATE.format(method=method, required=required, got=got))


def check_shapes_of_state(
  method: str, of_state: list[tuple[int, ...]], of_params: list[tuple[int, ...]]
) -> None:
  """Raises ValueError if the leaves that a state keeps have other shapes than the params'."""
  if of_state != of_params:
    raise ValueError(
      f"`{method}` needs the params that its state was made for, of shapes {shorten(of_state)}; got"
      f" {shorten(of_params)}. Start from `tx.init(params)`."
    )


def require_chain_state(
  state: Sequence[_types.Tree], state_types: Sequence[type], method: str
) -> None:
  """Raises TypeError for a tuple of states other than those of a method's chain."""
  types = [type(member) for member in state]
  if types != list(state_types):
    required = ", ".join(expected.__name__ for expected in state_types)
    got = ", ".join(actual.__name__ for actual in types)
    raise TypeError(_OWN_STATE.format(method=method, required=f"({required})", got=f"({got})"))


def require_extra(value: _types.Unchecked, name: str, method: str, purpose: str) -> None:
  """Raises ValueError if ``update`` lacks an extra argument; `purpose` describes it."""
  if value is None:
    raise ValueError(
      f"`{method}` needs the extra argument `{name}` ({purpose}); got none. Call"
      f" `tx.update(grads, state, params, {name}=...)`, or let"
      " `optax_boost.make_train_step` do it."
    )


def as_key(name: str, key: Any) -> jax.Array:
  """Makes a typed key of a key or an integer seed."""
  if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
    if key.shape:
      raise ValueError(f"`{name}` must be one key; got an array of keys of shape {key.shape}.")
    return key
  array = is_any_array(key) and jnp.ndim(key) == 0
  if not (is_integer(key) or (array and jnp.issubdtype(_dtype_of(key), jnp.integer))):
    raise TypeError(
      f"`{name}` must be a key of `jax.random.key` or an integer seed; got {shorten(key)}."
    )
  if is_integer(key) and not -(2**63) <= int(key) < 2**63:
    raise ValueError(f"`{name}` must be a seed that fits 64 bits; got {shorten(key)}.")
  return jax.random.key(key)


def check_key(name: str, key: _types.Unchecked) -> None:
  """Raises TypeError unless an argument is one key; a step would make a seed a key each time."""
  is_one_key, got = key is None, shorten(key)
  if isinstance(key, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    is_one_key = key.ndim == 0 if typed else key.ndim == 1 and key.dtype == jnp.uint32
    got = f"an array of shape {key.shape} and dtype {key.dtype}"
  if not is_one_key:
    raise TypeError(f"`{name}` must be one key of `jax.random.key`; got {got}.")


def check_name(
  argument: str, value: _types.Unchecked, allowed: Sequence[str], *, optional: bool = False
) -> None:
  """Checks an argument that is one of several names."""
  if optional and value is None:
    return
  error = ValueError if isinstance(value, str) else TypeError
  if error is TypeError or value not in allowed:
    names = [*map(repr, allowed), *(["None"] if optional else [])]
    raise error(f"`{argument}` must be one of {', '.join(names)}; got {shorten(value)}.")

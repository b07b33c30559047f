"""Checks of the arguments that users pass to factories."""

from collections.abc import Callable, Sequence
import inspect
import math
import numbers
import types
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost._foundation import _types

# The largest int32: counters on the device are int32.
LARGEST_COUNT = 2**31 - 1


def shorten(value: _types.Unchecked, limit: int = 80) -> str:
  """Returns the repr of a value for a message, cut to `limit` characters; never raises."""
  try:
    text = repr(value)
  except Exception:
    # `repr` raises, for example, for an integer of more than 4,300 digits.
    text = f"a value of type {type(value).__name__}"
  return text if len(text) <= limit else text[: limit - 3] + "..."


def is_array(value: _types.Unchecked) -> TypeGuard[jax.Array]:
  """Returns whether a value is a JAX array, a traced array, or an NNX variable."""
  return isinstance(value, jax.Array) or hasattr(value, "__jax_array__")


def is_any_array(value: _types.Unchecked) -> TypeGuard[jax.Array | np.ndarray]:
  """Returns whether a value is a NumPy array, or an array by :func:`is_array`."""
  return is_array(value) or isinstance(value, np.ndarray)


def is_integer(value: _types.Unchecked) -> bool:
  """Returns whether a value is a Python or NumPy integer; bools don't count."""
  return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _dtype_of(array: jax.typing.ArrayLike) -> jnp.dtype:
  # `jnp.result_type` raises for a NumPy array of Python objects.
  return array.dtype if isinstance(array, np.ndarray | np.generic) else jnp.result_type(array)


def _is_real(dtype: _types.Dtype) -> bool:
  return jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)


def concrete_number(value: _types.Unchecked) -> Any:
  """Returns the number in a scalar array, and any value that is not an array unchanged.

  Returns None if the array is traced or has axes, or if this process does not hold the number.
  """
  if not is_any_array(value):
    return value
  array = value if isinstance(value, np.ndarray | jax.Array) else value.__jax_array__()
  if jnp.ndim(array) or isinstance(array, jax.core.Tracer):
    return None
  if isinstance(array, np.ndarray) or array.is_fully_addressable or array.is_fully_replicated:
    return np.asarray(array)[()]
  return None


def check_floating_dtype(name: str, value: _types.Dtype | None, *, optional: bool = False) -> None:
  """Raises TypeError unless an argument is a floating dtype, or None if `optional`."""
  try:
    # `jnp.dtype` would read None as float64, and an array as the dtype of the array.
    is_name = value is not None and not is_any_array(value)
    floating = is_name and jnp.issubdtype(jnp.dtype(value), jnp.floating)
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
  above: float = -math.inf,
  below: float = math.inf,
) -> None:
  """Raises TypeError unless an argument is a real number, and ValueError if it is out of range.

  `above` and `below` are exclusive bounds. Traced numbers are not compared with the bounds.
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
    (number > above, f"> {above:g}", above > -math.inf),
    (number < below, f"< {below:g}", below < math.inf),
  ]
  if not all(holds for holds, _, applies in bounds if applies):
    required = " and ".join(text for _, text, applies in bounds if applies)
    advice = ""
    if is_array(value) and dtype in (jnp.float16, jnp.bfloat16):
      # The dtype alone may be the cause: 65,536 is infinite in float16, and 0.999 is 1 in bfloat16.
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
  """Raises TypeError or ValueError unless an argument is a whole number within bounds.

  A `static` number sets a shape, so it can't be an array. The bounds don't apply to traced arrays.
  """
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
  name: str,
  value: _types.Unchecked,
  form: str = "",
  *,
  optional: bool = False,
  takes: int | None = None,
) -> None:
  """Raises TypeError unless an argument is callable, or None if `optional`.

  The message shows how the argument is called: `form`, such as ``"loss_fn(params, batch)"``. If
  `takes` is not None, the argument must take this number of positional arguments.
  """
  if not (callable(value) or (optional and value is None)):
    how = f", called as `{form}`" if form else ""
    raise TypeError(f"`{name}` must be callable{how}; got {shorten(value)}.")
  if takes is None or value is None:
    return
  try:
    signature = inspect.signature(value)
  except ValueError:  # a function of C
    return
  try:
    signature.bind(*range(takes))
  except TypeError as error:
    raise TypeError(
      f"`{name}` is called as `{form}`; got a function of {signature}, which can't be called so:"
      f" {error}."
    ) from error


def call_schedule(call: str, function: Callable[..., Any], *args: Any) -> Any:
  """Returns ``function(*args)``; raises TypeError if it needs the number of a traced step.

  The message shows how the function is called: `call`, such as ``"every(step)"``.
  """
  try:
    return function(*args)
  except (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
  ) as error:
    raise TypeError(
      f"`{call}` must compute with `jnp`, since it is compiled with the step; got a function that"
      " needs a Python number, as `if`, `and`, `int()`, NumPy and indices of lists do. Write"
      " `jnp.where(step < 100, 0, 4)` for `0 if step < 100 else 4`, and `jnp.array(values)[step]`"
      " for `values[step]`."
    ) from error


def count_at(call: str, count: Any, step: jax.Array) -> jax.Array:
  """Returns the argument `count`, a whole number of at least 1, or its result if it is a function.

  A function is called with `step`; the message shows the `call`, such as ``"every(step)"``. Raises
  TypeError or ValueError for another number; a traced number below 1 counts as 1.
  """
  if callable(count):
    count = call_schedule(call, count, step)
    if is_any_array(count) and jnp.ndim(count):
      raise ValueError(f"`{call}` must return a scalar; got an array of shape {jnp.shape(count)}.")
    check_whole_number(call, count)
  return jnp.maximum(jnp.asarray(count, jnp.int32), 1)


def check_type(
  name: str, value: _types.Unchecked, kind: type | types.UnionType, words: str
) -> None:
  """Raises TypeError unless an argument is an instance of `kind`.

  `words` describe `kind` in the message, such as "True or False".
  """
  if not isinstance(value, kind):
    raise TypeError(f"`{name}` must be {words}; got {shorten(value)}.")


def check_transformation(
  name: str, value: _types.Unchecked
) -> optax.GradientTransformationExtraArgs:
  """Returns `value` as a transformation that takes any extra argument, or raises TypeError."""
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

  # `optax.with_extra_args_support` returns a transformation unchanged if it is declared to take
  # extra arguments, even if its `update` refuses unknown ones. The function above drops these.
  return optax.GradientTransformationExtraArgs(tx.init, update)


def check_learning_rate(learning_rate: _types.Unchecked, name: str = "learning_rate") -> None:
  """Raises unless an argument is a number >= 0, a scalar array, or a schedule."""
  if not callable(learning_rate):
    check_number(name, learning_rate, minimum=0.0)


def as_key(name: str, key: Any) -> jax.Array:
  """Returns a key unchanged, or the key of an integer seed; raises for any other argument."""
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
  """Raises TypeError unless an argument is None or a single key; an integer seed is refused."""
  is_one_key, got = key is None, shorten(key)
  if isinstance(key, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    is_one_key = key.ndim == 0 if typed else key.ndim == 1 and key.dtype == jnp.uint32
    got = f"an array of shape {key.shape} and dtype {key.dtype}"
  if not is_one_key:
    raise TypeError(
      f"`{name}` must be one key of `jax.random.key`; got {got}. Make one with"
      " `jax.random.key(seed)`; arrays of a batch are one tree, such as the tuple `(x, y)`."
    )


def check_name(
  argument: str, value: _types.Unchecked, allowed: Sequence[str], *, optional: bool = False
) -> None:
  """Raises TypeError or ValueError unless an argument is one of the names in `allowed`."""
  if optional and value is None:
    return
  error = ValueError if isinstance(value, str) else TypeError
  if error is TypeError or value not in allowed:
    names = [*map(repr, allowed), *(["None"] if optional else [])]
    raise error(f"`{argument}` must be one of {', '.join(names)}; got {shorten(value)}.")

r"""The schedules of SGPerm, in double precision whatever the device computes in.

  alpha <- max(beta1 alpha, alpha_min)      at the start of each step, the first included
  lamda <- min(beta2 lamda, lamda_max)

  alpha        how far a weight may move, as a share of the range of its vector
  lamda        the size of a subset, as a share of its vector

Python computes a table of alpha and lamda in float64, which the steps look up. So the size of a
subset, ``floor(lamda n)``, is computed in float64, and the bound on a change, ``alpha + 1 / k``, is
rounded only once, from float64 to the device's precision. There is no table if an argument is an
array of ``optax.inject_hyperparams``, whose value is not known before the steps run. Then the
device computes alpha and lamda in its own precision.
"""

from collections.abc import Callable
import math
import numbers as number_types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_boost._foundation import _types

# The most steps in the table. The device computes later values in its own precision.
_LONGEST = 65_536


def as_float(value: jax.typing.ArrayLike) -> Any:
  """Converts a number to a float; an array of ``optax.inject_hyperparams`` stays an array."""
  return float(value) if isinstance(value, number_types.Real | np.ndarray) else value


def _run_recurrence(
  alpha: float, lamda: float, beta1: float, beta2: float, alpha_min: float, lamda_max: float
) -> list[tuple[float, float]]:
  """Returns alpha and lamda of each step, up to the step after which neither changes.

  Returns only the first `_LONGEST` steps if alpha or lamda still changes after these steps.
  """
  values: list[tuple[float, float]] = []
  while len(values) < _LONGEST:
    alpha, lamda = max(beta1 * alpha, alpha_min), min(beta2 * lamda, lamda_max)
    if values and values[-1] == (alpha, lamda):
      break
    values.append((alpha, lamda))
  return values


class Schedules:
  """The values of alpha and lamda at each step."""

  def __init__(
    self,
    alpha: jax.typing.ArrayLike,
    lamda: jax.typing.ArrayLike,
    beta1: jax.typing.ArrayLike,
    beta2: jax.typing.ArrayLike,
    alpha_min: jax.typing.ArrayLike,
    lamda_max: jax.typing.ArrayLike,
  ) -> None:
    numbers = (alpha, lamda, beta1, beta2, alpha_min, lamda_max)
    self._numbers = tuple(as_float(x) for x in numbers)
    self._known = all(isinstance(x, float) for x in self._numbers)
    values = _run_recurrence(*self._numbers) if self._known else []
    self._alphas, self._lamdas = np.reshape(values, (-1, 2)).T
    self._ends = len(values) < _LONGEST
    # Whether lamda is 1 in every step, so that a weight vector is one subset.
    self.always_whole = self._known and self._ends and min(self._lamdas) == 1.0

  def _later(self, count: _types.IntScalar) -> tuple[_types.FloatScalar, _types.FloatScalar]:
    """Returns alpha and lamda in step `count`, computed on the device in closed form."""
    numbers = [jnp.asarray(x, float) for x in self._numbers]
    alpha, lamda, beta1, beta2, alpha_min, lamda_max = numbers
    steps = (count + 1).astype(alpha.dtype)
    alpha, lamda = beta1**steps * alpha, beta2**steps * lamda
    # If beta2 lamda is above lamda_max, lamda is lamda_max in the first step. If beta2 is below 1,
    # each later step multiplies this bound by beta2.
    bound = lamda_max * jnp.minimum(beta2 ** (steps - 1), 1)
    return jnp.maximum(alpha, alpha_min), jnp.minimum(lamda, bound)

  def _at(
    self, count: _types.IntScalar, table: np.ndarray, later: Callable[[], jax.Array]
  ) -> jax.Array:
    """Returns the value in step `count`: from `table`, or from ``later()``.

    ``later()`` computes the value on the device. It is used if there is no table, and in steps
    after the table's end if alpha or lamda still changes there. If neither changes, the table's
    last value is returned in these steps.
    """
    if not self._known:
      return jnp.asarray(later())
    entry = jnp.asarray(table)[jnp.minimum(count, len(table) - 1)]
    return entry if self._ends else jnp.where(count < _LONGEST, entry, later())

  def alpha(self, count: _types.IntScalar) -> _types.FloatScalar:
    """Returns alpha in step `count` (0 is the first), rounded to the device's precision."""
    return self._at(count, self._alphas.astype(jnp.zeros([]).dtype), lambda: self._later(count)[0])

  def lamda(self, count: _types.IntScalar) -> _types.FloatScalar:
    """Returns lamda in step `count`, rounded to the device's precision.

    The method `size` does not use this rounded lamda.
    """
    return self._at(count, self._lamdas.astype(jnp.zeros([]).dtype), lambda: self._later(count)[1])

  def size(self, count: _types.IntScalar, length: int, least: int) -> _types.IntScalar:
    """Returns how many entries a subset has in step `count`.

    Weight vectors have `length` entries. A subset has at least `least` entries, or the whole vector
    if the vector is shorter.
    """
    table = np.floor(self._lamdas * length).astype(np.int32)

    def later() -> jax.Array:
      return jnp.floor(self._later(count)[1] * length).astype(jnp.int32)

    return jnp.clip(self._at(count, table, later), min(least, length), length)

  def sizes(self, length: int, least: int) -> tuple[int, int]:
    """Returns the smallest and the largest size that a subset may have in any step.

    `length` and `least` are as in :meth:`size`.
    """
    if not self._known:
      return min(least, length), length
    lamda_max = self._numbers[5]
    lamdas = [*self._lamdas] if self._ends else [0.0, lamda_max]

    def size(lamda: float) -> int:
      return min(max(least, math.floor(lamda * length)), length)

    return size(min(lamdas)), size(max(lamdas))

  def brackets(self, count: _types.IntScalar, length: int) -> jax.Array:
    """Returns ``alpha + 1 / k`` in step `count` for k up to `length`, rounded once from float64."""
    alpha = self.alpha(count)
    rounded_off = self._alphas - self._alphas.astype(alpha.dtype)
    alpha_low = self._at(count, rounded_off.astype(alpha.dtype), lambda: jnp.zeros_like(alpha))
    exact = 1 / np.maximum(np.arange(length + 1), 1)
    high = exact.astype(alpha.dtype)
    low = jnp.asarray((exact - high).astype(high.dtype))
    # Knuth's two-sum computes the rounding error of this sum exactly.
    total = alpha + high
    rounded_high = total - alpha
    error = (alpha - (total - rounded_high)) + (high - rounded_high)
    return total + (error + (alpha_low + low))

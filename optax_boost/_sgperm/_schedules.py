r"""The schedules of SGPerm, in double precision whatever the device computes in.

  alpha <- max(beta1 alpha, alpha_min)      at the start of each step, the first included
  lamda <- min(beta2 lamda, lamda_max)

  alpha        how far a weight may move, as a share of the range of its vector
  lamda        the size of a subset, as a share of its vector

``floor(lamda n)`` and the rounding of ``alpha + 1 / k`` are those of float64: for numbers known as
the transformation is built, the recurrence runs in Python, and the steps look up its values.
"""

from collections.abc import Callable
import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Steps after which the schedules go on in the device's own precision.
_LONGEST = 65_536


def as_float(value: Any) -> Any:
  """A number as a float; an array, as ``optax.inject_hyperparams`` passes them, as it is."""
  known = isinstance(value, numbers.Real | np.ndarray)
  return float(value) if known else value


class Schedules:
  """The values of alpha and lamda at each step."""

  def __init__(
    self, alpha: Any, lamda: Any, beta1: Any, beta2: Any, alpha_min: Any, lamda_max: Any
  ) -> None:
    self._given = tuple(map(as_float, (alpha, lamda, beta1, beta2, alpha_min, lamda_max)))
    self._known = all(isinstance(x, float) for x in self._given)
    self._alphas: list[float] = []
    self._lamdas: list[float] = []
    if self._known:
      self._run()

  def _run(self) -> None:
    alpha, lamda, beta1, beta2, alpha_min, lamda_max = self._given
    while len(self._alphas) < _LONGEST:
      last = (alpha, lamda)
      alpha, lamda = max(beta1 * alpha, alpha_min), min(beta2 * lamda, lamda_max)
      if self._alphas and (alpha, lamda) == last:
        break
      self._alphas.append(alpha)
      self._lamdas.append(lamda)

  def _beyond(self, count: jax.Array) -> tuple[jax.Array, jax.Array]:
    alpha, lamda, beta1, beta2, alpha_min, lamda_max = (jnp.asarray(x, float) for x in self._given)
    steps = (count + 1).astype(alpha.dtype)
    later = jnp.maximum(beta1**steps * alpha, alpha_min)
    return later, jnp.minimum(beta2**steps * lamda, lamda_max)

  def _looked_up(self, table: np.ndarray, count: jax.Array, later: Callable[[], Any]) -> jax.Array:
    """A step's entry; past the table its last one, or `later` where the table was cut short."""
    entry = jnp.asarray(table)[jnp.minimum(count, len(table) - 1)]
    return entry if len(table) < _LONGEST else jnp.where(count < _LONGEST, entry, later())

  def _wide_alpha(self, count: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Alpha rounded, and its rounding error: nearly float64 on a device without it."""
    if not self._known:
      later, _ = self._beyond(count)
      return later, jnp.zeros_like(later)
    table = np.asarray(self._alphas)
    high = table.astype(jnp.zeros([]).dtype)
    low = (table - high).astype(high.dtype)
    return (
      self._looked_up(high, count, lambda: self._beyond(count)[0]),
      self._looked_up(low, count, lambda: 0),
    )

  def alpha(self, count: jax.Array) -> jax.Array:
    """Alpha in step `count`, from 0, rounded."""
    return self._wide_alpha(count)[0]

  def lamda(self, count: jax.Array) -> jax.Array:
    """Lamda in step `count`, rounded; sizes are :meth:`size`'s."""
    if not self._known:
      return self._beyond(count)[1]
    table = np.asarray(self._lamdas, jnp.zeros([]).dtype)
    return self._looked_up(table, count, lambda: self._beyond(count)[1])

  def size(self, count: jax.Array, length: int, least: int) -> jax.Array:
    """The size of a subset in step `count`, at most `length`."""

    def later() -> jax.Array:
      return jnp.floor(self._beyond(count)[1] * length).astype(jnp.int32)

    if not self._known:
      return jnp.clip(later(), min(least, length), length)
    table = np.floor(np.asarray(self._lamdas) * length).astype(np.int32)
    return jnp.clip(self._looked_up(table, count, later), min(least, length), length)

  def sizes(self, length: int, least: int) -> tuple[int, int]:
    """The smallest and the largest size of all steps, which shapes depend on."""
    smallest, largest = min(least, length), length
    if self._known:
      ends = [math.floor(x * length) for x in (min(self._lamdas), max(self._lamdas))]
      if len(self._lamdas) == _LONGEST:
        ends = [0, math.floor(self._given[5] * length)]
      smallest, largest = (min(max(least, end), length) for end in ends)
    return smallest, largest

  @property
  def always_whole(self) -> bool:
    """Whether lamda is 1 in every step, so that a weight vector is one subset."""
    return self._known and min(self._lamdas) == 1.0 and len(self._lamdas) < _LONGEST

  def brackets(self, count: jax.Array, length: int) -> jax.Array:
    """``alpha + 1 / k`` in step `count` for k up to `length`, rounded once from nearly float64."""
    alpha, alpha_low = self._wide_alpha(count)
    exact = 1 / np.maximum(np.arange(length + 1), 1)
    high = exact.astype(alpha.dtype)
    low = jnp.asarray((exact - high).astype(high.dtype))
    total = alpha + high
    part = total - alpha
    error = (alpha - (total - part)) + (high - part)
    return total + (error + (alpha_low + low))

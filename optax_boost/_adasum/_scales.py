"""Powers of two by which gradients are scaled, so that no inner product over- or underflows."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Gradients are scaled by powers of 2**12, up to 2**108 and down to 2**-108.
_SCALE_STEP = 12
LARGEST_STEP = 9


def is_wide(dtype: Any) -> bool:
  """Whether a dtype has at least the exponents of float32."""
  return bool(jnp.finfo(dtype).maxexp >= jnp.finfo(jnp.float32).maxexp)


def largest(leaf: jax.Array, axes: tuple[int, ...] | None = None) -> jax.Array:
  """The largest magnitude in a leaf, in float32."""
  return jnp.max(jnp.abs(leaf), axis=axes, initial=0).astype(jnp.float32)


def scale_steps(bounds: jax.Array, groups: Sequence[int]) -> jax.Array:
  """For each group the largest s with 2**(12 s) at most the largest of its leaves' `bounds`."""
  members = np.arange(max(groups) + 1)[:, None] == np.array(groups)
  of_groups = jnp.max(jnp.where(members, bounds[..., None, :], 0), axis=-1)
  steps = jnp.floor(jnp.log2(of_groups) / _SCALE_STEP)
  return jnp.clip(jnp.nan_to_num(steps), -LARGEST_STEP, LARGEST_STEP).astype(int)


def steps_of_bounds(means: jax.Array) -> jax.Array:
  """Reads the steps again from bounds that were averaged over up to 2,000 devices."""
  # A mean of powers of 2**12 lies less than a step below the largest of them, so the order in which
  # they were added up, and its rounding, changes nothing.
  exponents = jnp.log2(means.astype(jnp.float32))
  return jnp.floor((exponents + (_SCALE_STEP - 0.5)) / _SCALE_STEP).astype(int)


def power(steps: jax.Array, dtype: Any) -> jax.Array:
  """2**(12 steps), exactly; zero where `dtype` does not hold it."""
  exponents = np.arange(-2 * LARGEST_STEP, LARGEST_STEP + 1, dtype=np.float64)
  table = jnp.asarray((2.0 ** (_SCALE_STEP * exponents)).astype(dtype))
  return table[steps + 2 * LARGEST_STEP]

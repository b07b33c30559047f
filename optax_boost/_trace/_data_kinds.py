"""Which arguments of a loss, and which constants in it, count as data.

That is uncertain: a generator's only input is noise, and a loss may close over its batch. So each
run of an analysis uses one of four *definitions of data* (:class:`DataKind`).
"""

import enum

import jax
import jax.numpy as jnp

from optax_boost._foundation import _types


class DataKind(enum.IntEnum):
  """Kinds of values that may be data; a definition of data includes a kind and all lower kinds."""

  ARRAY = 0  # arrays of the batch
  SCALAR = 1  # scalars of the batch
  CONSTANT = 2  # arrays that the loss closes over, or that are part of the model
  NOISE = 3  # arrays that are drawn from keys


def kind_of(aval: _types.ArrayType, flag: bool | None) -> DataKind | None:
  """Returns the kind of an argument of the loss, or None if the argument is never data.

  `flag` is True for data, and None for constants such as a model state.
  """
  # A key in the batch counts as data only if noise does. Otherwise, adding noise to weights would
  # be a use of the weights.
  if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
    return DataKind.NOISE
  if flag is None:
    return DataKind.CONSTANT if aval.size > 1 else None
  return DataKind.ARRAY if aval.size > 1 else DataKind.SCALAR

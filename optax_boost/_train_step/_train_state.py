""":class:`TrainState`: the state that each step takes and returns."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_boost._foundation import _checks, _types


class TrainState(NamedTuple):
  """The state of a training: a pytree, which a checkpoint saves and restores as a whole.

  Attributes:
    params: the trainable arrays.
    opt_state: the state of the optax transformation.
    model_state: the mutable statistics (BatchNorm) that the loss returns, and the values that the
      gradient replaces (Flax's fp8 layers), or None. If a wrapper skips the step or drops the
      micro-batch, they do not change.
    step: scalar int32, the number of calls of the step.
  """

  params: optax.Params
  opt_state: optax.OptState
  model_state: _types.ModelState
  step: _types.IntScalar


def check_train_state(state: _types.Unchecked) -> None:
  words = "an `optax_boost.TrainState`: what `step.init` or the step before returned"
  _checks.check_type("state", state, TrainState, words)


def drop_weak_type(leaf: jax.typing.ArrayLike) -> jax.Array:
  """Returns a strongly typed array, since a weak type would make the next step compile again."""
  # A typed PRNG key has no attribute `weak_type`.
  if isinstance(leaf, jax.Array) and not getattr(leaf, "weak_type", False):
    return leaf
  return jnp.asarray(leaf, jnp.result_type(leaf))

"""The state that training carries from step to step."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_boost._foundation import _checks, _types


class TrainState(NamedTuple):
  """The state of a training; a tree, to be saved and restored whole.

  Attributes:
    params: the trainable arrays.
    opt_state: the transformation's state.
    model_state: mutable statistics (BatchNorm) that the loss returns, or None. They are kept as
      they were if a wrapper leaves a batch out.
    step: scalar int32, the number of calls of the step.
  """

  params: optax.Params
  opt_state: optax.OptState
  model_state: Any
  step: jax.Array


def check_train_state(state: _types.Unchecked) -> None:
  """Refuses all but states of a train step."""
  words = "an `optax_boost.TrainState`: what `step.init` or the step before returned"
  _checks.check_type("state", state, TrainState, words)


def drop_weak_type(leaf: Any) -> jax.Array:
  """An array of a dtype of its own; a weak one would compile the next step again."""
  # Typed PRNG keys have no weak type.
  if isinstance(leaf, jax.Array) and not getattr(leaf, "weak_type", False):
    return leaf
  return jnp.asarray(leaf, jnp.result_type(leaf))

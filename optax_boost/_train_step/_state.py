"""The state that training carries from step to step."""

from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_boost import _base


class TrainState(NamedTuple):
  """The state of a training; a tree, to be saved and restored whole.

  Attributes:
    params: the trainable arrays.
    opt_state: the transformation's state.
    model_state: mutable statistics (BatchNorm) that the loss returns anew, or None.
    step: scalar int32, the number of steps made.
  """

  params: optax.Params
  opt_state: optax.OptState
  model_state: Any
  step: jax.Array


def check_state(state: Any) -> None:
  """Refuses all but states of a train step."""
  if not isinstance(state, TrainState):
    raise TypeError(
      "`state` must be a TrainState: what `step.init` or the step before returned; got"
      f" {_base.shorten(state)}."
    )


def canonicalize_state(state: TrainState) -> TrainState:
  """Makes a fresh state look like the one that a step returns, so that nothing recompiles.

  Weak types are removed, and the optimizer state's own arrays are replicated over the mesh of the
  params. An array that occurs twice is copied, as donation demands.
  """
  arrays = [p for p in jax.tree.leaves(state.params) if isinstance(p, jax.Array)]
  # Inside a trace there is no placement to ask for.
  shardings = [p.sharding for p in arrays if not isinstance(p, jax.core.Tracer)]
  meshes = [s.mesh for s in shardings if isinstance(s, jax.sharding.NamedSharding)]
  replicated = meshes and jax.sharding.NamedSharding(meshes[0], jax.sharding.PartitionSpec())
  seen: set[int] = set()

  def canonicalize(leaf: Any) -> jax.Array:
    leaf = drop_weak_type(leaf)
    if replicated and not isinstance(leaf.sharding, jax.sharding.NamedSharding):
      leaf = jax.device_put(leaf, replicated)
    if id(leaf) in seen:
      leaf = jnp.array(leaf)
    seen.add(id(leaf))
    return leaf

  return jax.tree.map(canonicalize, state)


def check_shapes(before: optax.Params, after: optax.Params) -> None:
  """Refuses updates that broadcast the params, as an optimizer state of other params makes them."""
  for (path, old), new in zip(
    jax.tree.leaves_with_path(before), jax.tree.leaves(after), strict=True
  ):
    if jnp.shape(old) != jnp.shape(new):
      raise ValueError(
        "`state.opt_state` must be the state of this optimizer for these params; with it, a step"
        f" turns params{jax.tree_util.keystr(path)} of shape {jnp.shape(old)} into one of shape"
        f" {jnp.shape(new)}."
      )


def drop_weak_type(leaf: Any) -> jax.Array:
  """An array of a dtype of its own; a weak one would compile the next step anew."""
  # Typed PRNG keys have no weak type.
  if isinstance(leaf, jax.Array) and not getattr(leaf, "weak_type", False):
    return leaf
  return jnp.asarray(leaf, jnp.result_type(leaf))


def explain_other_state(
  error: Exception, state: TrainState, tx: optax.GradientTransformation
) -> None:
  """Raises an error of its own where an update failed on the state of another optimizer."""
  try:
    expected = jax.eval_shape(tx.init, state.params)
  except Exception:
    # The params do not fit either: the update's error says more.
    return
  if not same_shapes(expected, state.opt_state):
    raise TypeError(
      "`state` must hold the optimizer state that `step.init(params)` made, of the same"
      f" transformation and params: {_base.shorten(expected, 400)}; got"
      f" {_base.shorten(state.opt_state, 400)}. A checkpoint must be restored into the structure"
      " of `step.init(params)`."
    ) from error


def same_shapes(first: Any, second: Any) -> bool:
  """Whether two trees have the same structure and shapes."""
  leaves, structures = zip(*map(jax.tree.flatten, (first, second)), strict=True)
  shapes = [list(map(jnp.shape, of_one)) for of_one in leaves]
  return bool(structures[0] == structures[1]) and shapes[0] == shapes[1]

"""Finds and writes the values that the gradient replaces, such as the scales of Flax's fp8 layers.

Flax keeps these values in a collection of their own. A layer defines as the "gradient" of such a
value what the value is in the next step.
"""

from collections.abc import Sequence
import re

import jax
import jax.numpy as jnp

from optax_boost._form import _finiteness
from optax_boost._foundation import _paths, _trees, _types

# The name of Flax's collection.
REPLACED_VALUES = "_overwrite_with_gradient"


def find(model_state: _types.ModelState) -> dict[_types.KeyPath, jax.Array]:
  """Returns the leaves of a model state that the gradient replaces, by path.

  Flax's collection may be anywhere, since a model state may hold the variables of several modules.
  """
  keys, paths = _paths.leaf_keys(model_state), _paths.leaf_paths(model_state)
  leaves = zip(keys, paths, jax.tree.leaves(model_state), strict=True)
  return {key: leaf for key, path, leaf in leaves if in_collection(path)}


def in_collection(path: str) -> bool:
  """Returns whether the path of a leaf leads through Flax's collection."""
  return REPLACED_VALUES in re.split(r"[/.]", path)


def write(
  model_state: _types.ModelState, paths: Sequence[_types.KeyPath], values: Sequence[jax.Array]
) -> _types.ModelState:
  """Returns the model state with `values` at `paths`."""
  if not paths:
    return model_state
  new = dict(zip(paths, values, strict=True))
  return _trees.map_with(
    lambda leaf, path: new.get(path, leaf), model_state, _paths.leaf_keys(model_state)
  )


def lost(old: Sequence[jax.Array], new: Sequence[jax.Array]) -> _types.BoolScalar:
  """Returns whether values that were finite are not finite any more."""
  return ~_finiteness.none_lost(list(new), list(old))


def keep_unused(old: jax.Array, new: jax.Array) -> jax.Array:
  """Returns the new value; the old one if `new` is zero, as the gradient of an unused value is."""
  return jnp.where(jnp.any(new != 0), new, old)

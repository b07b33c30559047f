"""Whose state is this? Tells an optimizer's state from one of other params, or of another one."""

from collections.abc import Callable
import functools
from typing import Any
import warnings

import jax
import jax.numpy as jnp
import optax

from optax_boost._foundation import _paths, _types

_NUMBER_KINDS = (jnp.floating, jnp.complexfloating, jnp.integer)


def check(
  tx: optax.GradientTransformation, opt_state: optax.OptState, params: optax.Params
) -> None:
  """Raises ValueError unless `opt_state` has the arrays that ``tx.init(params)`` makes.

  Arrays of other params may broadcast against these. Once for each transformation and types.
  """
  structure: Any
  leaves, structure = jax.tree.flatten((opt_state, params))
  types = tuple((jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)
  try:
    found = _difference(tx.init, structure, types)
  except TypeError:  # an `init` that has no hash
    found = _difference.__wrapped__(tx.init, structure, types)
  if found:
    raise ValueError(
      "The optimizer state must be the one that this transformation's `init` made of these params;"
      f" {found}. Make it with `tx.init(params)` or `step.init(params)`; a checkpoint must be"
      " restored into the structure of what these return."
    )


@functools.lru_cache(maxsize=256)
def _difference(init: Callable[[optax.Params], Any], structure: Any, types: Any) -> str:
  opt_state, params = jax.tree.unflatten(
    structure, [jax.ShapeDtypeStruct(*shape_and_dtype) for shape_and_dtype in types]
  )
  try:
    with warnings.catch_warnings():
      # They were given when the state was made.
      warnings.simplefilter("ignore")
      expected = jax.eval_shape(init, params)
  except Exception:
    # An `init` that computes with the values of the params can't tell.
    return ""
  return difference(expected, opt_state)


def difference(expected: Any, state: _types.Tree) -> str:
  """What tells a state from the expected one; "": nothing."""
  required, present = set(_paths.leaf_paths(expected)), set(_paths.leaf_paths(state))
  if lacking := sorted(required - present):
    return f"it lacks the leaf '{lacking[0]}'"
  if surplus := sorted(present - required):
    return f"it has a leaf '{surplus[0]}' too many"
  return array_difference(expected, state)


def array_difference(expected: _types.Tree, state: _types.Tree) -> str:
  """An array of a state that differs from the expected one of the same path; "": none.

  An `init` of another author may make scalars that grow in the first update, and an update may
  change the precision, so only shapes of arrays and kinds of numbers must agree.
  """
  leaves = dict(zip(_paths.leaf_paths(state), jax.tree.leaves(state), strict=True))
  for path, array in zip(_paths.leaf_paths(expected), jax.tree.leaves(expected), strict=True):
    if path not in leaves or not array.shape:
      continue
    got = leaves[path]
    dtype = jnp.result_type(got)
    same_kind = any(
      jnp.issubdtype(dtype, k) and jnp.issubdtype(array.dtype, k) for k in _NUMBER_KINDS
    )
    if jnp.shape(got) != array.shape or not (dtype == array.dtype or same_kind):
      return (
        f"its leaf '{path}' must have the shape {array.shape} and the dtype {array.dtype}; got"
        f" {jnp.shape(got)} and {dtype}"
      )
  return ""

"""Tells the state of a transformation from one that was made of other params or by another one."""

from collections.abc import Callable
import functools
from typing import Any
import warnings

import jax
import jax.numpy as jnp
import optax

from optax_boost import _base
from optax_boost import _tree
from optax_boost import _types

_NUMBER_KINDS = (jnp.floating, jnp.complexfloating, jnp.integer)
# Of lookups, unpackings, tree maps and arithmetic that meet a tree which does not fit.
_ERRORS = (AssertionError, AttributeError, LookupError, TypeError, ValueError)


def step_with(
  method: str,
  init: Callable[[optax.Params], Any],
  trees: tuple[optax.Updates, Any, optax.Params | None],
  step: Callable[[], tuple[Any, Any]],
  *,
  in_params: bool = False,
) -> tuple[Any, Any]:
  """The result and the new state of a step; ValueError if `trees` hold the state of other params.

  `trees` are gradients, state and params. The result has the params' shapes if `in_params`, else
  the gradients'. States are compared with ``init(params)`` if the step fails, or if it changes
  shapes: arrays of other params may broadcast. So a good step costs a look at the shapes.
  """
  updates, state, params = trees
  explain = functools.partial(_explain, method, init, *trees)
  try:
    result, new_state = step()
  except _ERRORS as error:
    # Errors about a state say it already, at best.
    if _base.NEEDS_STATE not in str(error) and _fit(updates, params):
      explain(difference, error)
    raise
  if not (
    _tree.same_shapes(state, new_state)
    and _tree.same_shapes(params if in_params else updates, result)
  ):
    explain(array_difference)
  return result, new_state


def _fit(updates: optax.Updates, params: optax.Params | None) -> bool:
  """Whether gradients are of the params, so that an error can't be due to one of these two."""
  if params is None:
    return True

  def shapes(tree: _types.Tree) -> tuple[Any, ...]:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [getattr(leaf, "shape", None) for leaf in leaves]

  return shapes(updates) == shapes(_tree.differentiated(params))


def _explain(
  method: str,
  init: Callable[[optax.Params], Any],
  updates: optax.Updates,
  state: Any,
  params: optax.Params | None,
  compare: Callable[[Any, Any], str],
  error: Exception | None = None,
) -> None:
  expected = expected_state(init, updates if params is None else params)
  if expected is not None and (found := compare(expected, state)):
    of = "params of the gradients' shapes" if params is None else "these params"
    raise ValueError(
      f"`{method}` {_base.NEEDS_STATE} `tx.init` made of {of}; got another one: {found}. Make it"
      " with `tx.init(params)`; a checkpoint must be restored into the structure of"
      " `tx.init(params)`."
    ) from error


def expected_state(init: Callable[[optax.Params], Any], params: optax.Params) -> Any:
  """The types of a new optimizer state; None if `init` can't tell them for traced params."""
  try:
    with warnings.catch_warnings():
      # They were given when the state was made.
      warnings.simplefilter("ignore")
      return jax.eval_shape(init, params)
  except Exception:
    return None


def difference(expected: Any, state: _types.Tree) -> str:
  """What tells a state from the expected one; "": nothing."""
  if _tree.same_shapes(expected, state):
    return ""
  required, present = set(_tree.leaf_paths(expected)), set(_tree.leaf_paths(state))
  if lacking := sorted(required - present):
    return f"it lacks the leaf '{lacking[0]}'"
  if surplus := sorted(present - required):
    return f"it has a leaf '{surplus[0]}' too many"
  return array_difference(expected, state) or (
    f"it must be {_base.shorten(expected, 400)}; got {_base.shorten(state, 400)}"
  )


def array_difference(expected: _types.Tree, state: _types.Tree) -> str:
  """An array of a state that differs from the expected one of the same path; "": none.

  An `init` of another author may make scalars that grow in the first update, and an update may
  change the precision, so only shapes of arrays and kinds of numbers must agree.
  """
  leaves = dict(zip(_tree.leaf_paths(state), jax.tree.leaves(state), strict=True))
  for path, array in zip(_tree.leaf_paths(expected), jax.tree.leaves(expected), strict=True):
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

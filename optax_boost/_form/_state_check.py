"""Checks that raise for a state of another transformation, or of other params.

:func:`check` compares a whole optimizer state with the one that ``init`` makes; train steps and
``apply_gradients`` call it. The other functions check one transformation's state in ``update``.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias
import warnings
import weakref

import jax
import jax.numpy as jnp
import optax

from optax_boost._foundation import _checks, _paths, _trees, _types

_NUMBER_KINDS = (jnp.floating, jnp.complexfloating, jnp.integer)
# The shape and the dtype of an array.
_ArrayType: TypeAlias = tuple[tuple[int, ...], _types.Dtype]
_WRONG_TYPE = (
  "`{method}` needs the state that its own `init` made, {required}; got {got}. Pass what"
  " `tx.init(params)` returns, or a checkpoint that is restored into its structure."
)


def check_type(state: _types.OptState, state_type: type, method: str) -> None:
  """Raises TypeError unless `state` is a `state_type`, the class of the method's states."""
  if not isinstance(state, state_type):
    required, got = f"a {state_type.__name__}", f"a {type(state).__name__}"
    raise TypeError(_WRONG_TYPE.format(method=method, required=required, got=got))


def check_chain_types(
  states: Sequence[_types.OptState], state_types: Sequence[type], method: str
) -> None:
  """Raises TypeError unless the states of a method's chain have the classes `state_types`."""
  types = [type(state) for state in states]
  if types != list(state_types):
    required = ", ".join(expected.__name__ for expected in state_types)
    got = ", ".join(actual.__name__ for actual in types)
    raise TypeError(_WRONG_TYPE.format(method=method, required=f"({required})", got=f"({got})"))


def check_shapes(
  method: str, state_shapes: list[tuple[int, ...]], param_shapes: list[tuple[int, ...]]
) -> None:
  """Raises ValueError if the leaves in a state have other shapes than the params."""
  if state_shapes != param_shapes:
    raise ValueError(
      f"`{method}` needs the params that its state was made for, of shapes"
      f" {_checks.shorten(state_shapes)}; got {_checks.shorten(param_shapes)}. Start from"
      f" `tx.init(params)`."
    )


def check(
  tx: optax.GradientTransformation, opt_state: optax.OptState, params: optax.Params
) -> None:
  """Raises ValueError unless `opt_state` has the arrays that ``tx.init(params)`` makes.

  Without the check, a state of other params might broadcast against the params. The check runs once
  for each ``init`` and each combination of types.
  """
  structure: _types.TreeDef
  leaves, structure = jax.tree.flatten((opt_state, params))
  types = tuple((jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)
  try:
    differences = _DIFFERENCES.setdefault(tx.init, {})
  except TypeError:  # an `init` that has no hash, or to which there are no weak references
    differences = {}
  # The hash of a structure ignores the keys of dicts, which its text has.
  key = hash((str(structure), types))
  if key not in differences:
    differences[key] = _difference(tx.init, structure, types)
  difference = differences[key]
  if difference:
    raise ValueError(
      "The optimizer state must be the one that this transformation's `init` made of these params;"
      f" {difference}. Make it with `tx.init(params)`, `step.init(params)` or, for an NNX model as"
      " it is now, `nnx.Optimizer(model, tx, wrt=nnx.Param)`, or restore a checkpoint into the"
      " structure of what these return."
    )


# The result of :func:`_difference` for each `init`, by the hash of the types. This keeps no `init`
# alive, which may close over arrays, and no structure of a state, which may refer to an `init`.
_DIFFERENCES = weakref.WeakKeyDictionary[Callable[[optax.Params], optax.OptState], dict[int, str]]()


def _difference(
  init: Callable[[optax.Params], optax.OptState],
  structure: _types.TreeDef,
  types: tuple[_ArrayType, ...],
) -> str:
  """Returns, in words, how a state differs from the state that ``init(params)`` makes, or "".

  `structure` and `types` are the tree structure and the array types of ``(opt_state, params)``.
  """
  opt_state, params = jax.tree.unflatten(
    structure, [jax.ShapeDtypeStruct(*shape_and_dtype) for shape_and_dtype in types]
  )
  try:
    with warnings.catch_warnings():
      # The user saw the warnings of `init` when the state was made.
      warnings.simplefilter("ignore")
      expected = jax.eval_shape(init, params)
  except Exception:
    # If `init` computes with the values of the params, it can't run here: nothing is compared.
    return ""
  required, present = set(_paths.leaf_paths(expected)), set(_paths.leaf_paths(opt_state))
  advice, wraps = "", hasattr(expected, "inner_state")
  if wraps and not hasattr(opt_state, "inner_state"):
    advice = ": as the state of the optimizer inside, it goes to the field `inner_state`"
  elif hasattr(opt_state, "inner_state") and not wraps:
    advice = ": the state of the optimizer inside of this wrapper is its field `inner_state`"
  if lacking := sorted(required - present):
    return f"it lacks the leaf '{lacking[0]}'{advice}"
  if surplus := sorted(present - required):
    return f"it has a leaf '{surplus[0]}' too many{advice}"
  # A checkpoint that was restored without a target has dicts with the same keys.
  if tuples := _named_tuples(expected) - _named_tuples(opt_state):
    return f"it lacks the named tuple {sorted(tuples)[0]}"
  lists = [sum(type(node) is list for node in _trees.nodes(tree)) for tree in (expected, opt_state)]
  if lists[0] < lists[1]:
    return "it has a list in place of a tuple, as some file formats restore tuples"
  return _array_difference(expected, opt_state)


def _named_tuples(opt_state: optax.OptState) -> set[str]:
  """Returns the names of the classes of the named tuples in a state that hold arrays."""
  named = [node for node in _trees.nodes(opt_state) if hasattr(node, "_fields")]
  return {type(node).__name__ for node in named if jax.tree.leaves(node)}


def _array_difference(expected: optax.OptState, opt_state: optax.OptState) -> str:
  """Returns, in words, how an array differs from the expected array of the same path, or "".

  Shapes and kinds of numbers (floating, complex, integer) must agree. Dtypes may differ, since the
  first update of a transformation of another package may change a leaf's precision. Such an update
  may also make an array from a Python number, so scalars are not compared.
  """
  leaves = dict(zip(_paths.leaf_paths(opt_state), jax.tree.leaves(opt_state), strict=True))
  for path, array in zip(_paths.leaf_paths(expected), jax.tree.leaves(expected), strict=True):
    if not array.shape:
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

"""Arrays of leaves: dtypes, sums, counters, stacks of small ones."""

from collections.abc import Callable, Hashable, Sequence
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost._foundation import _types

# XLA 7: leaves of fewer entries are worked on together, as a kernel costs more than a copy.
_SMALL = 8192


# XLA 1: so many small leaves are reduced in one loop, which compiles in the square of their number.
_TOGETHER = 16


def increment_if(flag: jax.Array, count: jax.Array) -> jax.Array:
  """A saturating counter after a step in which its event may have happened."""
  return jnp.where(flag, optax.safe_increment(count), count)


def copy_arrays(
  tree: _types.SameTree, dtype_of: Callable[[jnp.dtype], jnp.dtype] = lambda dtype: dtype
) -> _types.SameTree:
  """Copies arrays into buffers of their own, so that params and state can both be donated.

  Abstract leaves stay abstract: zeros in their place would train from zero without an error.
  """

  def copy(leaf: Any) -> Any:
    dtype = dtype_of(leaf.dtype)
    if isinstance(leaf, jax.ShapeDtypeStruct):
      return leaf.update(dtype=dtype)
    # Given its own dtype, a weakly typed leaf would lose its weak type.
    return jnp.array(leaf) if dtype == leaf.dtype else jnp.array(leaf, dtype)

  return jax.tree.map(copy, tree)


def as_jax(tree: _types.SameTree) -> _types.SameTree:
  """A tree with copies as JAX's arrays in place of NumPy's arrays of floating-point numbers.

  Their dtypes are JAX's: float64 is float32 where JAX has no float64. To compute with the dtype of
  a NumPy array would mean to ask for float64.
  """
  leaves, structure = jax.tree.flatten(tree)
  is_numpy = [isinstance(x, np.ndarray | np.generic) for x in leaves]
  if not any(is_numpy):
    return tree
  pairs = zip(leaves, is_numpy, strict=True)
  return jax.tree.unflatten(
    structure, [jnp.array(x) if n and jnp.issubdtype(x.dtype, jnp.inexact) else x for x, n in pairs]
  )


def accumulator_dtype(dtype: _types.Dtype) -> jnp.dtype:
  """The dtype for reductions over values of `dtype`: at least float32, and one that JAX has."""
  dtype = jax.dtypes.canonicalize_dtype(dtype)
  # Not by promotion, which a user may have forbidden (`jax.numpy_dtype_promotion`).
  is_wide_enough = jnp.issubdtype(dtype, jnp.inexact) and jnp.dtype(dtype).itemsize >= 4
  return jnp.dtype(dtype if is_wide_enough else jnp.float32)


def widest_dtype(tree: _types.Tree) -> jnp.dtype:
  """The dtype for reductions over real leaves: float32, or float64 where a leaf has it."""
  dtypes = [accumulator_dtype(leaf.dtype) for leaf in jax.tree.leaves(tree)]
  return max(dtypes, key=lambda dtype: dtype.itemsize, default=jnp.dtype(jnp.float32))


def widen(x: jax.Array) -> jax.Array:
  """An array in :func:`accumulator_dtype`."""
  return x.astype(accumulator_dtype(x.dtype))


def divide(x: jax.Array, divisor: jax.Array, largest: float = float("inf")) -> jax.Array:
  """A quotient by a positive number, at most `largest`, made by multiplying.

  The product is computed again for each of its uses; a quotient would be stored (XLA 13). The two
  are equal to the last bit for powers of two.
  """
  dividend = widen(x)
  divisor = divisor.astype(dividend.real.dtype)
  # The inverse of a larger number would not be a normal one.
  if largest > 2.0**126:
    shift = jnp.where(divisor > 2.0**64, 2.0**-64, 1.0).astype(divisor.dtype)
    dividend, divisor = dividend * shift, divisor * shift
  return (dividend * (1 / divisor)).astype(x.dtype)


def zeros_like_wide(tree: _types.SameTree) -> _types.SameTree:
  """Zeros in :func:`accumulator_dtype`, sharded as the leaves are."""
  return jax.tree.map(lambda x: jnp.zeros_like(x, accumulator_dtype(x.dtype)), tree)


def sum_squares(x: jax.Array, axes: tuple[int, ...] | None = None) -> jax.Array:
  """The sum of squares over `axes` (None: all), in :func:`accumulator_dtype`."""
  widened = widen(x)
  return jnp.sum(widened * widened, axis=axes)


def sum_squares_together(leaves: Sequence[jax.Array]) -> jax.Array:
  """The sum of the squared magnitudes of all entries of leaves of one shape."""
  return jnp.sum(functools.reduce(jnp.add, [jnp.real(x * jnp.conj(x)) for x in leaves]))


def sum_squares_of_tree(tree: _types.Tree) -> jax.Array:
  """The sum of the squared magnitudes of all entries of all leaves, in at least float32."""
  sums = [
    sum_squares_together([widen(leaf) for leaf in leaves]) for (leaves,) in stackable_leaves(tree)
  ]
  return jnp.sum(jnp.stack(sums)) if sums else jnp.zeros([], jnp.float32)


def stackable(keys: Sequence[Hashable], *columns: Sequence[jax.Array]) -> list[list[int]]:
  """Groups leaves to be stacked: small ones of one type and key together, others alone.

  Only equal shapes are stacked, along a new axis: sharded leaves stay on their devices.
  """
  groups: dict[Hashable, list[int]] = {}
  for i, (key, *leaves) in enumerate(zip(keys, *columns, strict=True)):
    small = leaves[0].size < _SMALL
    types = tuple(jax.typeof(leaf) for leaf in leaves)
    groups.setdefault((key, types) if small else i, []).append(i)
  return list(groups.values())


def stackable_leaves(*trees: _types.Tree) -> list[list[list[jax.Array]]]:
  """Small leaves of one type together, so that one reduction does for them; of each tree."""
  columns = list(map(jax.tree.leaves, trees))
  groups = stackable([None] * len(columns[0]), *columns)
  chunks = [group[i : i + _TOGETHER] for group in groups for i in range(0, len(group), _TOGETHER)]
  return [[[leaves[i] for i in chunk] for leaves in columns] for chunk in chunks]


def cast_like(tree: _types.SameTree, like: _types.Tree) -> _types.SameTree:
  """Gives each array its counterpart's dtype, as conditionals, scans and compiled steps need.

  Momentum of float16 params, for one, is float32 once a float32 gradient is added to it.
  """
  return jax.tree.map(lambda x, y: x if _dtype(x) == _dtype(y) else x.astype(_dtype(y)), tree, like)


def _dtype(x: Any) -> Any:
  return jnp.result_type(x) if not hasattr(x, "dtype") else x.dtype

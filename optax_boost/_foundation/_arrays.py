"""Functions on arrays: dtypes, sums of squares, counters, and groups of small leaves."""

from collections.abc import Callable, Hashable, Sequence
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost._foundation import _placement, _types

# XLA 7: leaves with fewer entries than this are stacked and reduced in one kernel, since launching
# a kernel for each leaf costs more than copying the leaves.
_SMALL = 8192
# XLA 1: one loop reduces at most this number of leaves, since the time to compile a loop grows with
# the square of the number of leaves.
_TOGETHER = 16


def increment_if(flag: jax.Array, count: jax.Array) -> jax.Array:
  """Returns ``count + 1`` if `flag`, else `count`; stays at the largest integer of its dtype."""
  return jnp.where(flag, optax.safe_increment(count), count)


def copy_arrays(
  tree: _types.SameTree, dtype_of: Callable[[jnp.dtype], jnp.dtype] = lambda dtype: dtype
) -> _types.SameTree:
  """Copies the leaves of a tree into new buffers, which can be donated together with the tree.

  `dtype_of` maps the dtype of a leaf to the dtype of the copy. Abstract leaves stay abstract.
  """

  def copy(leaf: _types.ArrayOrShape) -> _types.ArrayOrShape:
    dtype = dtype_of(leaf.dtype)
    if isinstance(leaf, jax.ShapeDtypeStruct):
      return leaf.update(dtype=dtype)
    # A copy in the dtype of the leaf has its weak type, too.
    return _placement.copy(leaf) if dtype == leaf.dtype else jnp.asarray(leaf).astype(dtype)

  return jax.tree.map(copy, tree)


def as_jax(tree: _types.SameTree) -> _types.SameTree:
  """Returns a tree with its floating-point or complex NumPy arrays as JAX arrays.

  Without x64, float64 becomes float32.
  """

  def convert(leaf: _types.Leaf) -> _types.Leaf:
    is_numpy = isinstance(leaf, np.ndarray | np.generic)
    return jnp.array(leaf) if is_numpy and jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf

  return jax.tree.map(convert, tree)


def accumulator_dtype(dtype: _types.Dtype) -> jnp.dtype:
  """Returns the dtype in which arrays of `dtype` are summed, which is at least float32.

  Without x64, this is float32 for float64.
  """
  dtype = jax.dtypes.canonicalize_dtype(dtype)
  # Compare sizes, since the user may have forbidden promotion (`jax.numpy_dtype_promotion`).
  is_wide_enough = jnp.issubdtype(dtype, jnp.inexact) and jnp.dtype(dtype).itemsize >= 4
  return jnp.dtype(dtype if is_wide_enough else jnp.float32)


def widest_dtype(tree: _types.Tree) -> jnp.dtype:
  """Returns the dtype for a sum over all leaves, which are real: at least float32.

  The dtype is float64 if a leaf is float64, else float32.
  """
  dtypes = [accumulator_dtype(leaf.dtype) for leaf in jax.tree.leaves(tree)]
  return max(dtypes, key=lambda dtype: dtype.itemsize, default=jnp.dtype(jnp.float32))


def widen(x: jax.Array) -> jax.Array:
  """Casts an array to :func:`accumulator_dtype` of its dtype."""
  return x.astype(accumulator_dtype(x.dtype))


def divide(x: jax.Array, divisor: jax.Array, largest: float = float("inf")) -> jax.Array:
  """Returns ``x / divisor`` in the dtype of `x`; `divisor` is positive, and at most `largest`.

  Multiplies by the inverse of the divisor. XLA would store a quotient that is used twice, but it
  computes a product again for each use (XLA 13 in docs/xla.md). If the divisor is a power of two,
  the result is exact. If `largest` is at most 2^126, the inverse can't underflow, and the code that
  prevents an underflow is left out.
  """
  dividend = widen(x)
  divisor = divisor.astype(dividend.real.dtype)
  # In float32, the inverse of a number above 2^126 is subnormal, and may be flushed to zero.
  if largest > 2.0**126:
    shift = jnp.where(divisor > 2.0**64, 2.0**-64, 1.0).astype(divisor.dtype)
    dividend, divisor = dividend * shift, divisor * shift
  return (dividend * (1 / divisor)).astype(x.dtype)


def zeros_like_wide(tree: _types.SameTree) -> _types.SameTree:
  """Returns a tree of zeros in :func:`accumulator_dtype`, with the leaves' shapes and shardings."""
  return jax.tree.map(lambda x: jnp.zeros_like(x, accumulator_dtype(x.dtype)), tree)


def sum_squares(x: jax.Array, axes: tuple[int, ...] | None = None) -> jax.Array:
  """Returns the sum of the squares over `axes` (None: all axes) in :func:`accumulator_dtype`."""
  widened = widen(x)
  return jnp.sum(widened * widened, axis=axes)


def sum_squares_together(leaves: Sequence[jax.Array]) -> jax.Array:
  """Returns the sum of the squared magnitudes of all entries of leaves that have the same shape."""
  return jnp.sum(functools.reduce(jnp.add, [jnp.real(x * jnp.conj(x)) for x in leaves]))


def sum_squares_of_tree(tree: _types.Tree) -> jax.Array:
  """Returns the sum of the squared magnitudes of all entries of a tree, in at least float32."""
  sums = [
    sum_squares_together([widen(leaf) for leaf in leaves]) for (leaves,) in chunk_small_leaves(tree)
  ]
  return jnp.sum(jnp.stack(sums)) if sums else jnp.zeros([], jnp.float32)


def group_small_leaves(keys: Sequence[Hashable], *columns: Sequence[jax.Array]) -> list[list[int]]:
  """Returns groups of indices; the leaves of a group can be stacked and reduced in one kernel.

  Each column is a list of leaves, such as the weights or the gradients. The index ``i`` stands for
  ``keys[i]`` and the i-th leaf of each column. Indices are in one group if their leaves are small,
  their keys are equal, and their leaves have equal types (shape, dtype and sharding). Any other
  index is a group of its own. Callers stack the leaves of a group along a new axis, so sharded
  leaves stay on their devices.
  """
  groups: dict[Hashable, list[int]] = {}
  for i, (key, *leaves) in enumerate(zip(keys, *columns, strict=True)):
    small = leaves[0].size < _SMALL
    types = tuple(jax.typeof(leaf) for leaf in leaves)
    groups.setdefault((key, types) if small else i, []).append(i)
  return list(groups.values())


def chunk_small_leaves(*trees: _types.Tree) -> list[list[list[jax.Array]]]:
  """Returns the leaves of `trees` in chunks, each of which one loop can reduce.

  All trees have equally many leaves. A chunk has a list for each tree: its leaves at the positions
  of the chunk. These are one large leaf, or up to `_TOGETHER` small leaves of equal types.
  """
  columns = list(map(jax.tree.leaves, trees))
  groups = group_small_leaves([None] * len(columns[0]), *columns)
  chunks = [group[i : i + _TOGETHER] for group in groups for i in range(0, len(group), _TOGETHER)]
  return [[[leaves[i] for i in chunk] for leaves in columns] for chunk in chunks]


def cast_like(tree: _types.SameTree, like: _types.Tree) -> _types.SameTree:
  """Casts each array of `tree` to the dtype of the array in the same position of `like`.

  Conditionals, scans and compiled steps need results with the dtypes of their operands. But a
  float16 momentum, for example, becomes float32 when a float32 gradient is added.
  """
  return jax.tree.map(lambda x, y: x if _dtype(x) == _dtype(y) else x.astype(_dtype(y)), tree, like)


def _dtype(x: jax.typing.ArrayLike) -> jnp.dtype:
  return jnp.result_type(x) if not hasattr(x, "dtype") else x.dtype

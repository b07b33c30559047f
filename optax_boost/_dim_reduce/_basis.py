"""Products with a basis, which may be kept in half precision.

A basis of k rows is a tree like the params, its leaves of shape ``[k, *leaf.shape]``. It is never
reshaped: a contraction over all axes of a leaf stays on the devices that hold the leaf, and only
its k numbers cross them, where a flattened basis would be gathered. Leaves fall into G groups, each
with a subspace of its own; ``group_of_leaf`` numbers them in the order of ``jax.tree.leaves``.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_boost import _linalg

# Rows of a compressed basis that are widened at a time: enough to keep the cores busy, and few
# enough to stay in cache.
_BLOCK = 8
# A compressed leaf of at most so many numbers is widened whole, which takes memory: biases and
# scales, where the loops that spare it are not worth their time to compile.
_SMALL = 2**16


def contract(rows: jax.Array, leaf: jax.Array, dtype: Any) -> jax.Array:
  """Inner products over all axes of a leaf, replicated over its mesh.

  Args:
    rows: ``[k, *leaf.shape]``, of a floating dtype or compressed, see :func:`compress`.
    leaf: the leaf, or ``[m, *leaf.shape]`` for products with each of m; the rank decides.
    dtype: of the products and the sum.

  Returns:
    ``[k]`` or ``[k, m]``.
  """
  leaf = leaf.astype(dtype)
  if not _needs_loop(rows):
    return _linalg.contract(_widened(rows, dtype), leaf)
  k = rows.shape[0]
  whole = k - k % _BLOCK

  def block(i: jax.Array, products: jax.Array) -> jax.Array:
    some = jax.lax.dynamic_slice_in_dim(rows, i * _BLOCK, _BLOCK)
    part = _linalg.contract(expand(some, dtype), leaf)
    return jax.lax.dynamic_update_slice_in_dim(products, part, i * _BLOCK, 0)

  rest = _linalg.contract(expand(rows[whole:], dtype), leaf)
  if not whole:
    return rest
  products = jnp.concatenate([jnp.zeros((whole, *rest.shape[1:]), dtype), rest])
  return jax.lax.fori_loop(0, whole // _BLOCK, block, products)


def combine(coefficients: jax.Array, rows: jax.Array) -> jax.Array:
  """Linear combinations of rows.

  Args:
    coefficients: ``[k]``, or ``[c, k]`` for c combinations.
    rows: ``[k, *shape]``, of a floating dtype or compressed.

  Returns:
    ``[*shape]`` or ``[c, *shape]``, in the dtype of the coefficients.
  """
  dtype = coefficients.dtype
  if _needs_loop(rows):
    # Written out, so that it becomes one loop that expands each number where it is used.
    wide = [expand(row, dtype) for row in rows]
    sums = [
      sum(c * row for c, row in zip(cs, wide, strict=True)) for cs in jnp.atleast_2d(coefficients)
    ]
    return jnp.stack(sums) if coefficients.ndim == 2 else sums[0]
  return jax.lax.dot_general(
    coefficients,
    _widened(rows, dtype),
    (((coefficients.ndim - 1,), (0,)), ((), ())),
    precision=_linalg.PRECISION,
    preferred_element_type=dtype,
  )


def compress(rows: jax.Array) -> jax.Array:
  """Rounds to bfloat16 and keeps the bits as integers.

  CPUs have no arithmetic for bfloat16, and XLA would expand a whole array of them before each use.
  Bits it leaves alone until they are shifted into place, in the loop that needs them.

  Args:
    rows: an array of any floating dtype.

  Returns:
    An array of uint16.
  """
  return jax.lax.bitcast_convert_type(rows.astype(jnp.bfloat16), jnp.uint16)


def expand(rows: jax.Array, dtype: Any) -> jax.Array:
  """The inverse of :func:`compress`.

  Args:
    rows: an array of uint16.
    dtype: the dtype wanted, at least float32.

  Returns:
    The numbers.
  """
  bits = rows.astype(jnp.uint32) << 16
  return jax.lax.bitcast_convert_type(bits, jnp.float32).astype(dtype)


def _needs_loop(rows: jax.Array) -> bool:
  return rows.dtype == jnp.uint16 and rows.size > _SMALL


def _widened(rows: jax.Array, dtype: Any) -> jax.Array:
  return expand(rows, dtype) if rows.dtype == jnp.uint16 else rows.astype(dtype)


def project(
  basis: Any, tree: Any, group_of_leaf: Sequence[int], shape: tuple[int, ...]
) -> jax.Array:
  """Inner products of a basis with a tree like the params.

  Args:
    basis: leaves ``[k, *leaf.shape]``.
    tree: leaves of the params' shapes.
    group_of_leaf: the number of each leaf's group.
    shape: of the result, the numbers of groups and of components.

  Returns:
    ``[G, k]`` in at least float32.
  """
  pairs = list(zip(jax.tree.leaves(basis), jax.tree.leaves(tree), strict=True))
  dtype = inner_dtype(tree)
  sums: list[Any] = [None] * shape[0]
  for group, (rows, leaf) in zip(group_of_leaf, pairs, strict=True):
    part = contract(rows, leaf, dtype)
    sums[group] = part if sums[group] is None else sums[group] + part
  return jnp.stack([jnp.zeros(shape[1:], dtype) if part is None else part for part in sums])


def inner_dtype(tree: Any) -> Any:
  """The dtype of inner products over a tree: float32, or float64 where a leaf has it.

  Args:
    tree: a tree of floating-point arrays.

  Returns:
    A dtype.
  """
  return jnp.result_type(jnp.float32, *(leaf.dtype for leaf in jax.tree.leaves(tree)))

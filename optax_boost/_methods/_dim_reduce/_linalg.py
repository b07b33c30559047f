r"""Small dense linear algebra on trees of stacked leaves, in at least float32.

A stacked tree has leaves [m, *shape] and represents m vectors, its rows. The leaves, and the layers
in a leaf, are divided into G groups, and inner products are computed in each group separately. So
the inner products of m rows with l rows are [G, m, l]. These matrices are small and not sharded.
Large leaves are not reshaped or concatenated, so sharded leaves stay on their devices, and only
small matrices move between devices.
"""

from collections.abc import Sequence
import functools

import jax
import jax.numpy as jnp
import numpy as np

from optax_boost._foundation import _arrays, _placement, _trees, _types
from optax_boost._methods._dim_reduce._groups import LeafGroups, SubspaceGroups

# Products are computed in full float32. By default, accelerators would use fewer bits.
PRECISION = jax.lax.Precision.HIGHEST
matmul = functools.partial(jnp.matmul, precision=PRECISION)


def products(a: _types.Tree, b: _types.Tree, groups: SubspaceGroups) -> jax.Array:
  """Returns the inner products of the k rows of `a` and the m rows of `b`, [G, k, m].

  If `b` is a tree that is not stacked, the result is [G, k].
  """
  dtype = _arrays.widest_dtype((a, b))
  a_leaves = [x.astype(dtype) for x in jax.tree.leaves(a)]
  b_leaves = [x.astype(dtype) for x in jax.tree.leaves(b)]
  by_layer: list[jax.Array] = []
  numbers: list[int] = []
  for indices in _arrays.group_small_leaves(groups.leaves, a_leaves, b_leaves):
    leaf_groups = groups.leaves[indices[0]]
    if leaf_groups.axes:
      by_layer += [_contract(a_leaves[i], b_leaves[i], leaf_groups.axes) for i in indices]
      numbers += len(indices) * leaf_groups.numbers
    else:
      # XLA 9: one product for all leaves of `indices`, as XLA for CPUs compiles each product
      # separately.
      b_is_stacked = b_leaves[indices[0]].ndim == a_leaves[indices[0]].ndim
      a_joined = jnp.stack([a_leaves[i] for i in indices], 1)
      b_joined = jnp.stack([b_leaves[i] for i in indices], int(b_is_stacked))
      by_layer.append(_contract(a_joined, b_joined, ()))
      numbers += leaf_groups.numbers
  return _sum_by_group(by_layer, numbers, groups)


def identities(matrices: jax.Array) -> jax.Array:
  """Returns G identity matrices with the shape [G, k, k] and the dtype of `matrices`."""
  identity = jnp.eye(matrices.shape[-1], dtype=matrices.dtype)
  return jnp.broadcast_to(identity, matrices.shape)


def _contract(rows: jax.Array, leaf: jax.Array, layers: tuple[int, ...]) -> jax.Array:
  """Returns the inner products of k rows and a leaf in each of the leaf's L layers.

  The result is [L, k, m] if `leaf` has m stacked rows, and [L, k] if `leaf` is not stacked. It is
  not sharded. `layers` are the axes along which the leaf holds layers; an axis for the stacked rows
  is not counted.
  """
  is_stacked = leaf.ndim == rows.ndim
  within_layer = [axis for axis in range(rows.ndim - 1) if axis not in layers]
  contracted = (
    tuple(1 + axis for axis in within_layer),
    tuple(is_stacked + axis for axis in within_layer),
  )
  batch = tuple(1 + axis for axis in layers), tuple(is_stacked + axis for axis in layers)
  mesh = jax.typeof(rows).sharding.mesh
  out = None
  if jax.sharding.AxisType.Explicit in mesh.axis_types:
    # With Explicit axes, `dot_general` must be told how the sum over a sharded axis is sharded. It
    # is not sharded, since every device needs it.
    out = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  result = jax.lax.dot_general(
    rows,
    leaf,
    (contracted, batch),
    PRECISION,
    preferred_element_type=rows.dtype,
    out_sharding=out,
  )
  return result.reshape(-1, *result.shape[len(layers) :])


def _sum_by_group(
  by_layer: Sequence[jax.Array], numbers: Sequence[int], groups: SubspaceGroups
) -> jax.Array:
  """Returns the sum of products over the layers of each group.

  The arrays of `by_layer` have the products of one layer in each entry along their first axis.
  `numbers` has the group of each of these layers, in the order of the concatenated arrays.
  """
  # XLA 2: a contraction, since XLA would fuse a sum over leaves into the loop of each leaf, which
  # would compute the sum again.
  joined = jnp.concatenate(by_layer)
  member = np.equal.outer(np.arange(groups.number), np.array(numbers, int))
  return jnp.tensordot(jnp.asarray(member, joined.dtype), joined, 1, precision=PRECISION)


def combine(
  coefficients: jax.Array, rows: _types.SameTree, groups: SubspaceGroups
) -> _types.SameTree:
  """Returns linear combinations of k rows; each layer uses the coefficients of its group.

  If `coefficients` are [G, c, k], the result is a stacked tree of c rows. If they are [G, k], the
  result is a tree that is not stacked. Leaves of the result have at least float32.
  """

  def combine_leaf(x: jax.Array, leaf_groups: LeafGroups) -> jax.Array:
    x = _arrays.widen(x)
    if not leaf_groups.axes:
      group_coefficients = coefficients[leaf_groups.numbers[0]].astype(x.dtype)
      return jnp.tensordot(group_coefficients, x, 1, precision=PRECISION)
    layers = [x.shape[1 + axis] for axis in leaf_groups.axes]
    by_layer = coefficients[np.array(leaf_groups.numbers, int)].astype(x.dtype)
    by_layer = by_layer.reshape(*layers, *coefficients.shape[1:])
    # On a mesh with Explicit axes, both operands must be sharded alike along the axes of layers.
    sharding = jax.typeof(x).sharding
    spec = [sharding.spec[1 + axis] for axis in leaf_groups.axes] + [None] * (coefficients.ndim - 1)
    same = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*spec))
    by_layer = _placement.place_by(by_layer, same)
    batch = tuple(range(len(layers))), tuple(1 + axis for axis in leaf_groups.axes)
    combined = jax.lax.dot_general(
      by_layer,
      x,
      (((by_layer.ndim - 1,), (0,)), batch),
      PRECISION,
      preferred_element_type=x.dtype,
    )
    output_axes = coefficients.ndim - 2
    return jnp.moveaxis(combined, batch[0], [output_axes + axis for axis in leaf_groups.axes])

  return _trees.map_leaves(combine_leaf, rows, groups.leaves)

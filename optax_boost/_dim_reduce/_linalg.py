r"""Small dense linear algebra on trees of stacked leaves, in at least float32.

A stacked tree X has leaves [m, *shape]: m vectors of n entries in all, one to a row. Matrices of m
or k rows and columns are small and kept whole. No leaf is reshaped or concatenated, so a sharded
leaf stays on its devices, and only the small matrices cross them.

Principal component analysis, with C the rows of X minus their mean:

  G = C C'              [m, m]   Gram matrix of the centred rows
  G = U diag(s^2) U'             s: singular values of C, descending
  B = diag(1/s) U' C    [k, n]   the first k rows: the components

Forming G squares the condition: eigenvectors for s below sqrt(eps) s_1 are mixed with each other
and B's rows are no longer orthogonal. So a few rows more than wanted are taken, normalised and
orthogonalised, and a Rayleigh-Ritz step, an SVD of C B' [m, l] without squaring, sets them right.

The randomized form replaces the first two lines by a sketch Q' C with l = k + oversample rows, in
which l is far below m. Source: Halko, Martinsson, Tropp, "Finding Structure with Randomness",
SIAM Review 53 (2011), with one power iteration.
"""

from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_boost import _arrays
from optax_boost._dim_reduce import _layers

# Full float32 on accelerators, whose default is fewer bits.
PRECISION = jax.lax.Precision.HIGHEST


class PrincipalComponents(NamedTuple):
  """Components, a stacked tree of k orthonormal rows, with their variances."""

  components: Any  # leaves [k, *shape]; rows of zeros where the rows span fewer than k directions
  variances: jax.Array  # [k], squared singular values of the centred rows, descending
  total: jax.Array  # scalar, the sum of all squared singular values


def contract(rows: jax.Array, leaf: jax.Array, layers: tuple[int, ...] = ()) -> jax.Array:
  """Inner products of rows [k, *shape] over all axes of a leaf, replicated over its mesh.

  [k] for a leaf [*shape]; [k, m] for a stacked leaf [m, *shape]; [L, k] for a leaf [*shape] with L
  layers along the axes `layers`.
  """
  many = leaf.ndim == rows.ndim
  rest = [axis for axis in range(rows.ndim - 1) if axis not in layers]
  contracted = tuple(1 + axis for axis in rest), tuple(many + axis for axis in rest)
  mesh = jax.typeof(rows).sharding.mesh
  out = None
  if jax.sharding.AxisType.Explicit in mesh.axis_types:
    # The sum over a sharded axis has no sharding of its own: say that all devices need it.
    out = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  products = jax.lax.dot_general(
    rows,
    leaf,
    (contracted, (tuple(1 + axis for axis in layers), layers)),
    PRECISION,
    preferred_element_type=rows.dtype,
    out_sharding=out,
  )
  return products.reshape(-1, len(rows)) if layers else products


def combine_rows(coefficients: jax.Array, rows: jax.Array) -> jax.Array:
  """Linear combinations of the rows of one leaf, in the dtype of the coefficients.

  [*shape] for coefficients [k]; [c, *shape] for [c, k].
  """
  return jnp.tensordot(coefficients, rows.astype(coefficients.dtype), 1, precision=PRECISION)


def combine(coefficients: jax.Array, rows: Any) -> Any:
  """Linear combinations [l, m] of the rows of a stacked tree, in its leaves' dtypes."""
  return jax.tree.map(lambda x: combine_rows(coefficients.astype(x.dtype), x), rows)


def inner_products(a: Any, b: Any) -> jax.Array:
  """``A B'``, [m, l], of two stacked trees of m and l rows, float32 or wider."""
  return jax.tree.reduce(jnp.add, jax.tree.map(contract, a, b))


def project(
  basis: Any, tree: Any, groups: Sequence[_layers.LeafGroups], shape: tuple[int, ...]
) -> jax.Array:
  """Inner products [G, k] of a basis with a tree like the params, each group's for itself."""
  dtype = _arrays.widest_dtype(tree)
  bases, leaves = ([x.astype(dtype) for x in jax.tree.leaves(t)] for t in (basis, tree))
  products: list[list[jax.Array]] = [[] for _ in range(shape[0])]
  by_layer = []
  for same in _arrays.alike(groups, bases, leaves):
    of_leaf = groups[same[0]]
    if of_leaf.axes:
      numbers = np.array(of_leaf.numbers, int)
      each = [contract(bases[i], leaves[i], of_leaf.axes) for i in same]
      by_layer += [jax.ops.segment_sum(x, numbers, shape[0]) for x in each]
    else:
      # One product of all: XLA on CPUs compiles the code of each product by itself.
      rows, leaf = (jnp.stack([xs[i] for i in same], a) for xs, a in ((bases, 1), (leaves, 0)))
      products[of_leaf.numbers[0]].append(contract(rows, leaf))
  sums = [_sum_arrays(x) if x else jnp.zeros(shape[1:], dtype) for x in products]
  return sum(by_layer, start=jnp.stack(sums))


def _sum_arrays(arrays: Sequence[jax.Array]) -> jax.Array:
  """The sum of vectors by a contraction, for the reason in :func:`finite_rows`."""
  stacked = jnp.stack(arrays)
  return jnp.matmul(jnp.ones(len(arrays), stacked.dtype), stacked, precision=PRECISION)


def lift(columns: jax.Array, rows: jax.Array, of_leaf: _layers.LeafGroups) -> jax.Array:
  """Linear combinations of the rows of one leaf, each layer with its group's coefficients.

  [*shape] for columns [G, k]; [c, *shape] for columns [G, c, k].
  """
  if not of_leaf.axes:
    return combine_rows(columns[of_leaf.numbers[0]], rows)
  layers = [rows.shape[1 + axis] for axis in of_leaf.axes]
  by_layer = columns[np.array(of_leaf.numbers, int)].reshape(*layers, *columns.shape[1:])
  # On a mesh of Explicit axes layers must have one sharding.
  sharding = jax.typeof(rows).sharding
  spec = [sharding.spec[1 + axis] for axis in of_leaf.axes] + [None] * (columns.ndim - 1)
  same = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*spec))
  by_layer = _arrays.place_by(by_layer, same)
  batch = tuple(range(len(layers))), tuple(1 + axis for axis in of_leaf.axes)
  combined = jax.lax.dot_general(
    by_layer,
    rows.astype(columns.dtype),
    (((by_layer.ndim - 1,), (0,)), batch),
    PRECISION,
    preferred_element_type=columns.dtype,
  )
  several = columns.ndim - 2
  return jnp.moveaxis(combined, batch[0], [several + axis for axis in of_leaf.axes])


def per_row(values: jax.Array, like: jax.Array) -> jax.Array:
  """Expands one value per row, [m], to the rank of a stacked leaf, [m, 1, ..., 1]."""
  return jnp.expand_dims(values, tuple(range(1, like.ndim)))


def finite_rows(rows: Any) -> jax.Array:
  """Which rows of a stacked tree hold finite numbers only: [m], bool."""
  parts = [jnp.all(jnp.isfinite(x), axis=range(1, x.ndim)) for x in jax.tree.leaves(rows)]
  # Counted by a contraction: XLA would fuse `all` into the kernel of every leaf that uses it, and
  # compile for long where there are hundreds.
  flags = jnp.stack(parts).astype(jnp.float32)
  return jnp.matmul(jnp.ones(len(parts)), flags, precision=PRECISION) == len(parts)


def centre(rows: Any, used: jax.Array) -> tuple[Any, Any]:
  """The mean of the `used` rows, and these rows minus it; other rows may be NaN and become zero."""
  first = jnp.argmax(used)
  count = jnp.maximum(jnp.sum(used), 1)

  def one(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    # Snapshots differ little from each other: distances to the first are exact and small, and so
    # is the rounding of their mean. The mean of the snapshots would be rounded to their size.
    origin = jax.lax.dynamic_index_in_dim(x, first, keepdims=False)
    shifted = jnp.where(per_row(used, x), x - origin, 0)
    shift = jnp.sum(shifted, axis=0) / count.astype(x.dtype)
    return origin + shift, jnp.where(per_row(used, x), shifted - shift, 0)

  pairs = jax.tree.map(one, rows)
  return jax.tree.transpose(jax.tree.structure(rows), None, pairs)


def orthonormalize(rows: Any) -> Any:
  """Orthonormal rows: the first j span the space of the first j of `rows`, for every j.

  A row whose distance from the span of the earlier rows is below 1 % of its length (in float32;
  sqrt(1000 eps)) is treated as a rounding error and becomes zero.
  """
  gram = inner_products(rows, rows)
  norms = jnp.sqrt(jnp.diagonal(gram))
  # Unit rows are near to orthogonal even if their lengths were not comparable.
  scale = jnp.where(norms > 0, 1 / jnp.where(norms > 0, norms, 1), 0)
  unit = gram * scale[:, None] * scale[None, :]
  return combine(_orthonormalizer(unit) * scale[None, :], rows)


def _orthonormalizer(gram: jax.Array) -> jax.Array:
  """The lower triangular T for which T G T' is the identity, by the Gram-Schmidt process.

  A Cholesky factor, but with rows of zeros for dependent rows, instead of NaN everywhere.
  """
  size = len(gram)
  least = 1000 * jnp.finfo(gram.dtype).eps

  def times(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision=PRECISION)

  def add(j: jax.Array, done: jax.Array) -> jax.Array:
    row = (jnp.arange(size) == j).astype(gram.dtype)
    for _ in range(2):  # Twice is enough.
      row = row - times(times(done, times(gram, row)), done)
    square = times(row, times(gram, row))
    good = square > least
    row = jnp.where(good, row / jnp.sqrt(jnp.where(good, square, 1)), 0)
    return jax.lax.dynamic_update_index_in_dim(done, row, j, 0)

  # On the mesh of `gram`, where Explicit axes are part of types: `zeros_like` need not be.
  return jax.lax.fori_loop(0, size, add, jnp.where(False, gram, 0))


def _leading_directions(gram: jax.Array, count: int) -> jax.Array:
  """The eigenvectors of the largest eigenvalues, one to a row, the largest first."""
  _, vectors = jnp.linalg.eigh(gram)
  return vectors[:, ::-1][:, :count].T


def guarded(count: int, rows: int) -> int:
  """`count` + 8 directions, if there are that many rows: the last of them are inaccurate."""
  return min(count + 8, max(rows - 1, count))


def gram_pca(centred: Any, count: int) -> PrincipalComponents:
  """Principal components of m centred rows, fewer than m of them, by their Gram matrix."""
  gram = inner_products(centred, centred)
  return _refined(centred, _leading_directions(gram, guarded(count, len(gram))), centred, count)


def randomized_pca(centred: Any, count: int, sketch: jax.Array) -> PrincipalComponents:
  """Principal components of a sketch of m centred rows: [m, l] normal numbers, l >= `count`."""
  seen, _ = jnp.linalg.qr(inner_products(centred, combine(sketch.T, centred)))
  rows = combine(seen.T, centred)
  directions = _leading_directions(inner_products(rows, rows), len(sketch.T))
  return _refined(rows, directions, centred, count)


def _refined(rows: Any, directions: jax.Array, centred: Any, count: int) -> PrincipalComponents:
  basis = orthonormalize(combine(directions, rows))
  total = jax.tree.reduce(jnp.add, jax.tree.map(lambda x: jnp.sum(x * x), centred))
  return rayleigh_ritz(basis, inner_products(centred, basis), total, count)


def rayleigh_ritz(
  basis: Any, coordinates: jax.Array, total: jax.Array, count: int
) -> PrincipalComponents:
  """The principal components within the span of l rows that are nearly orthonormal, or zero.

  `coordinates`, [m, l], are the centred rows' inner products with them, `total` their sum of
  squares. Components with less than 100 eps of the first one's singular value are rounding errors:
  they and their variances are zero.
  """
  gram = inner_products(basis, basis)
  gram += jnp.diag(jnp.where(jnp.diagonal(gram) > 0, 0.0, 1.0).astype(gram.dtype))
  unit = jnp.eye(len(gram), dtype=gram.dtype)
  inverse = jax.scipy.linalg.solve_triangular(jnp.linalg.cholesky(gram), unit, lower=True)
  exact = jnp.matmul(coordinates.astype(gram.dtype), inverse.T, precision=PRECISION)
  _, singular, right = jnp.linalg.svd(exact, full_matrices=False)
  singular, right = singular[:count], right[:count]
  real = singular > 100 * jnp.finfo(singular.dtype).eps * singular[0]
  rotation = jnp.where(real[:, None], jnp.matmul(right, inverse, precision=PRECISION), 0)
  return PrincipalComponents(
    components=fix_signs(combine(rotation, basis)),
    variances=jnp.where(real, singular**2, 0),
    total=total,
  )


def fix_signs(rows: Any) -> Any:
  """Turns each row so that its entry of the largest magnitude is positive."""
  leaves = [x for x in jax.tree.leaves(rows) if x.size]
  if not leaves:
    return rows
  largest, smallest = (
    jnp.stack([extreme(x, axis=range(1, x.ndim)) for x in leaves]) for extreme in (jnp.max, jnp.min)
  )
  # Sorting is not fused into the kernels of the leaves, as a maximum would be: see `finite_rows`.
  sign = jnp.where(jnp.sort(largest, axis=0)[-1] >= -jnp.sort(smallest, axis=0)[0], 1, -1)
  return jax.tree.map(lambda x: x * per_row(sign.astype(x.dtype), x), rows)

r"""Small dense linear algebra on trees of stacked leaves, in at least float32.

A stacked tree X has leaves [m, *shape]: m vectors of n entries in all, one to a row. Matrices of m
or k rows and columns are small and kept whole; what has n entries is only ever contracted over all
axes of its leaves, or combined row by row. No leaf is reshaped or concatenated, so a sharded leaf
stays where it is and what crosses devices are the small matrices.

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

from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp

# Full float32 on accelerators, whose default is fewer bits.
PRECISION = jax.lax.Precision.HIGHEST


class PrincipalComponents(NamedTuple):
  """What a principal component analysis found.

  Attributes:
    components: stacked tree, leaves [k, *shape]; orthonormal rows, or zero where there is no k-th.
    variances: [k], squared singular values of the centred rows, descending; zero with their row.
    total: scalar, the sum of all squared singular values.
  """

  components: Any
  variances: jax.Array
  total: jax.Array


def contract(rows: jax.Array, leaf: jax.Array) -> jax.Array:
  """Inner products over all axes of a leaf, replicated over its mesh.

  Args:
    rows: [k, *shape], float32 or wider.
    leaf: [*shape] of the same dtype, or [m, *shape] for products with each of m; the rank decides.

  Returns:
    [k] or [k, m].
  """
  many = leaf.ndim == rows.ndim
  axes = tuple(range(1, rows.ndim)), tuple(range(many, leaf.ndim))
  mesh = jax.typeof(rows).sharding.mesh
  out = None
  if jax.sharding.AxisType.Explicit in mesh.axis_types:
    # The sum over a sharded axis has no sharding of its own: say that all devices need it.
    out = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  return jax.lax.dot_general(
    rows, leaf, (axes, ((), ())), PRECISION, preferred_element_type=rows.dtype, out_sharding=out
  )


def inner_products(a: Any, b: Any) -> jax.Array:
  """Inner products of the rows of two stacked trees, ``A B'``.

  Args:
    a: stacked tree, leaves [m, *shape], float32 or wider.
    b: stacked tree of the same structure, leaves [l, *shape].

  Returns:
    [m, l].
  """
  parts = [contract(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)]
  return _sum(parts)


def _sum(parts: list[jax.Array]) -> jax.Array:
  return sum(parts[1:], start=parts[0])


def combine(coefficients: jax.Array, rows: Any) -> Any:
  """Linear combinations of the rows of a stacked tree.

  Args:
    coefficients: [l, m].
    rows: stacked tree, leaves [m, *shape], float32 or wider.

  Returns:
    A stacked tree, leaves [l, *shape] in the dtypes of `rows`.
  """
  return jax.tree.map(
    lambda x: jax.lax.dot_general(
      coefficients.astype(x.dtype), x, (((1,), (0,)), ((), ())), PRECISION
    ),
    rows,
  )


def per_row(values: jax.Array, like: jax.Array) -> jax.Array:
  """Gives one value per row the rank of a stacked leaf.

  Args:
    values: [m].
    like: an array [m, *shape].

  Returns:
    [m, 1, ..., 1].
  """
  return jnp.expand_dims(values, tuple(range(1, like.ndim)))


def finite_rows(rows: Any) -> jax.Array:
  """Which rows of a stacked tree hold finite numbers only.

  Args:
    rows: stacked tree with at least one leaf.

  Returns:
    [m], bool.
  """
  parts = [jnp.all(jnp.isfinite(x), axis=range(1, x.ndim)) for x in jax.tree.leaves(rows)]
  # Counted by a contraction: what XLA can fuse, it repeats in the kernel of every leaf that uses
  # it, and compiles for long where there are hundreds.
  return jnp.ones(len(parts)) @ jnp.stack(parts).astype(jnp.float32) == len(parts)


def centre(rows: Any, used: jax.Array) -> tuple[Any, Any]:
  """The mean of some rows of a stacked tree, and these rows minus it.

  Args:
    rows: stacked tree, leaves [m, *shape] of any floating dtype.
    used: [m], bool: the rows that count. What the others hold does not matter.

  Returns:
    The mean, leaves [*shape], and the centred rows, leaves [m, *shape], zero where not used; both
    in float32 or wider.
  """
  first = jnp.argmax(used)
  count = jnp.maximum(jnp.sum(used), 1)

  def one(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    # Weights differ little from each other: distances to one of them are exact, and their mean is
    # as small as they are. The mean of the weights itself would be rounded to their size.
    origin = jax.lax.dynamic_index_in_dim(x, first, keepdims=False)
    shifted = jnp.where(per_row(used, x), x - origin, 0)
    shift = jnp.sum(shifted, axis=0) / count.astype(x.dtype)
    return origin + shift, jnp.where(per_row(used, x), shifted - shift, 0)

  leaves, structure = jax.tree.flatten(rows)
  means, centred = zip(*[one(x) for x in leaves], strict=True)
  return jax.tree.unflatten(structure, means), jax.tree.unflatten(structure, centred)


def orthonormalize(rows: Any) -> Any:
  """Orthonormal rows of which the first j span what the first j given ones do, for every j.

  Args:
    rows: stacked tree, leaves [k, *shape], in order of importance.

  Returns:
    A stacked tree like `rows`, orthonormal to about k eps, less where a row sticks out of the span
    of those before it by a few percent of its length. Where it does so by less than 1 % (in
    float32; sqrt(1000 eps)), it is taken for a rounding error and zero.
  """
  gram = inner_products(rows, rows)
  norms = jnp.sqrt(jnp.diagonal(gram))
  # Unit rows are near to orthogonal even if their lengths were not comparable.
  scale = jnp.where(norms > 0, 1 / jnp.where(norms > 0, norms, 1), 0)
  unit = gram * scale[:, None] * scale[None, :]
  return combine(orthonormalizer(unit) * scale[None, :], rows)


def orthonormalizer(gram: jax.Array) -> jax.Array:
  """The lower triangular T for which T G T' is the identity, by the Gram-Schmidt process.

  A Cholesky factor, but that dependent rows are left out instead of making everything nan.

  Args:
    gram: G, [k, k], with a diagonal of ones, or zeros for rows to leave out.

  Returns:
    T, [k, k], with rows of zeros for what depends on the rows before.
  """
  size = len(gram)
  least = 1000 * jnp.finfo(gram.dtype).eps

  def times(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision=PRECISION)

  def add(j: jax.Array, found: jax.Array) -> jax.Array:
    row = (jnp.arange(size) == j).astype(gram.dtype)
    for _ in range(2):  # Twice is enough.
      row = row - times(times(found, times(gram, row)), found)
    square = times(row, times(gram, row))
    good = square > least
    row = jnp.where(good, row / jnp.sqrt(jnp.where(good, square, 1)), 0)
    return jax.lax.dynamic_update_index_in_dim(found, row, j, 0)

  return jax.lax.fori_loop(0, size, add, jnp.zeros_like(gram))


def leading_directions(gram: jax.Array, count: int) -> jax.Array:
  """The eigenvectors of the largest eigenvalues of a symmetric matrix.

  Args:
    gram: [m, m].
    count: how many.

  Returns:
    [count, m], one eigenvector to a row, the largest first.
  """
  _, vectors = jnp.linalg.eigh(gram)
  return vectors[:, ::-1][:, :count].T


def guarded(count: int, rows: int) -> int:
  """How many directions to start from, so that the last of those wanted are not mixed with others.

  Args:
    count: how many are wanted.
    rows: how many centred rows there are.

  Returns:
    Eight more, or as many as there can be.
  """
  return min(count + 8, max(rows - 1, count))


def gram_pca(centred: Any, count: int) -> PrincipalComponents:
  """Principal components by the Gram matrix of the rows.

  Args:
    centred: stacked tree, leaves [m, *shape]: rows that sum to zero.
    count: how many components, below m.

  Returns:
    The components, their signs as :func:`fix_signs` leaves them.
  """
  gram = inner_products(centred, centred)
  basis = orthonormalize(combine(leading_directions(gram, guarded(count, len(gram))), centred))
  return rayleigh_ritz(basis, inner_products(centred, basis), total_square(centred), count)


def randomized_pca(centred: Any, count: int, sketch: jax.Array) -> PrincipalComponents:
  """Principal components of a random sketch of the rows.

  Args:
    centred: stacked tree, leaves [m, *shape]: rows that sum to zero.
    count: how many components.
    sketch: [m, l], normal random numbers, l at least `count`. Raising l makes it more exact.

  Returns:
    The components, their signs as :func:`fix_signs` leaves them.
  """
  seen, _ = jnp.linalg.qr(inner_products(centred, combine(sketch.T, centred)))
  rows = combine(seen.T, centred)
  basis = orthonormalize(
    combine(leading_directions(inner_products(rows, rows), len(sketch.T)), rows)
  )
  return rayleigh_ritz(basis, inner_products(centred, basis), total_square(centred), count)


def total_square(rows: Any) -> jax.Array:
  """The sum of the squares of all entries.

  Args:
    rows: a tree of arrays, float32 or wider.

  Returns:
    A scalar.
  """
  return _sum([jnp.sum(x * x) for x in jax.tree.leaves(rows)])


def rayleigh_ritz(
  basis: Any, coordinates: jax.Array, total: jax.Array, count: int
) -> PrincipalComponents:
  """The principal components within the span of rows that are orthonormal, or nearly so.

  Args:
    basis: stacked tree, leaves [l, *shape]; rows of zeros count nothing.
    coordinates: [m, l], the inner products of the centred rows with them.
    total: the sum of the squares of the centred rows.
    count: how many components, at most l and m.

  Returns:
    The components. Those with less than 100 eps of the first one's singular value are rounding
    errors: they and their variances are zero.
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
  """Turns each row so that its entry of the largest magnitude is positive.

  Args:
    rows: stacked tree, leaves [k, *shape].

  Returns:
    A stacked tree like `rows`; a row with two such entries of opposite sign stays as it is.
  """
  leaves = [x for x in jax.tree.leaves(rows) if x.size]
  if not leaves:
    return rows
  axes = [range(1, x.ndim) for x in leaves]
  largest = jnp.stack([jnp.max(x, axis=a) for x, a in zip(leaves, axes, strict=True)])
  smallest = jnp.stack([jnp.min(x, axis=a) for x, a in zip(leaves, axes, strict=True)])
  # Sorting is not fused into the kernels of the leaves, as a maximum would be: see `finite_rows`.
  sign = jnp.where(jnp.sort(largest, axis=0)[-1] >= -jnp.sort(smallest, axis=0)[0], 1, -1)
  return jax.tree.map(lambda x: x * per_row(sign.astype(x.dtype), x), rows)

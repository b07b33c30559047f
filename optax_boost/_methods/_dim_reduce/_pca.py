r"""Principal component analysis of m snapshots of n numbers, read in blocks; m is far below n.

  C = X - mean(X)        [m, n]   centred snapshots
  G = C C'               [m, m]   Gram matrix
  G = U diag(s^2) U'              s: singular values of C, descending
  B = diag(1/s) U' C     [k, n]   the first k rows: the components

Forming G squares the condition: eigenvectors for s below sqrt(eps) s_1 are mixed with each other
and B's rows are no longer orthogonal. So a few rows more than wanted are taken, normalised and
orthogonalised, and a Rayleigh-Ritz step, an SVD of C B' [m, l] without squaring, sets them right.

A worked example with m = 3 and n = 2. The snapshots lie on a line in the direction (0.6, 0.8):

  >>> from optax_boost._methods._dim_reduce import _groups
  >>> one_group = _groups.find_groups(jnp.zeros(2), None, "example")
  >>> snapshots = jnp.array([[0.0, 0.0], [3.0, 4.0], [6.0, 8.0]])
  >>> centred = Centred([(snapshots, jnp.ones(3, bool))])
  >>> [rows] = centred
  >>> rows.tolist(), centred.mean.tolist()
  ([[-3.0, -4.0], [0.0, 0.0], [3.0, 4.0]], [3.0, 4.0])
  >>> _products(rows, rows, one_group)[0].tolist()  # G
  [[25.0, 0.0, -25.0], [0.0, 0.0, 0.0], [-25.0, 0.0, 25.0]]

G has the eigenvalue s^2 = 50 with the eigenvector (-1, 0, 1) / sqrt(2). Its combination of the rows
is (6, 8) / sqrt(2), and divided by s it is (0.6, 0.8):

  >>> pca = principal_components([rows], k=1, sketch=None, groups=one_group)
  >>> [round(x, 3) for x in pca.rows[0].tolist()], round(float(pca.variances[0, 0]), 3)
  ([0.6, 0.8], 50.0)

The randomized form replaces the first two lines by a sketch Q' C with l rows, in which l is far
below m. Source: Halko, Martinsson, Tropp, "Finding Structure with Randomness", SIAM Review 53
(2011), with one power iteration.

Each of G groups of leaves and layers is analysed by itself: m x m matrices are [G, m, m].
"""

from collections.abc import Iterable, Iterator
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_boost._form import _finiteness
from optax_boost._foundation import _arrays
from optax_boost._methods._dim_reduce import _linalg
from optax_boost._methods._dim_reduce._groups import SubspaceGroups
from optax_boost._methods._dim_reduce._linalg import matmul

# More directions than wanted, of which the last are inaccurate.
GUARD = 8

_combine = jax.jit(_linalg.combine, static_argnums=2)
_products = jax.jit(_linalg.products, static_argnums=2)


class Components(NamedTuple):
  """Components of G groups, with their variances."""

  rows: Any  # a stacked tree of k orthonormal rows; zeros beyond the rank of a group's snapshots
  variances: jax.Array  # [G, k], squared singular values, descending
  total: jax.Array  # scalar, the sum of all squared singular values


class Centred:
  """Reads blocks of snapshots minus their mean, as often as it is iterated over.

  A block is a stacked tree and flags of the rows in use. Rows that are not in use, and *bad* rows
  that are not finite, become zero.
  """

  def __init__(self, blocks: Iterable[tuple[Any, jax.Array]]) -> None:
    self._blocks = blocks
    self._good: list[jax.Array] = []
    bad = []
    for rows, used in blocks:
      finite = _finite_rows(rows)
      good = used & finite
      if not self._good:
        # Snapshots differ little from each other: distances to the first are exact and small, and
        # so is the rounding of their mean. The snapshots' mean would be rounded to their size.
        self._origin = _first_row(rows, good)
        total = zero = jax.tree.map(jnp.zeros_like, self._origin)
      distances = _distances(rows, good, self._origin, zero)
      total = jax.tree.map(lambda t, x: t + jnp.sum(x, axis=0), total, distances)
      bad.append(used & ~finite)
      self._good.append(good)
    self.bad, self.count = jnp.concatenate(bad), jnp.sum(jnp.concatenate(self._good))
    self._shift = jax.tree.map(lambda x: x / jnp.maximum(self.count, 1).astype(x.dtype), total)
    self.mean = jax.tree.map(jnp.add, self._origin, self._shift)

  def __iter__(self) -> Iterator[Any]:
    def centre(block: tuple[Any, jax.Array], good: jax.Array) -> Any:
      return _distances(block[0], good, self._origin, self._shift)

    # Not a generator, whose variables would keep the last block in memory.
    return map(centre, self._blocks, self._good)


@jax.jit
def _finite_rows(rows: Any) -> jax.Array:
  """Which rows of a stacked tree hold finite numbers only: [m], bool."""
  by_leaf = [
    jnp.all(_finiteness.finite_entries(x), axis=range(1, x.ndim)) for x in jax.tree.leaves(rows)
  ]
  # XLA 2: counted by a contraction, since `all` would be computed in the loop of every leaf, and
  # hundreds of leaves would compile for long.
  flags = jnp.stack(by_leaf).astype(jnp.float32)
  return matmul(jnp.ones(len(by_leaf)), flags) == len(by_leaf)


@jax.jit
def _squares(rows: Any) -> jax.Array:
  return jax.tree.reduce(jnp.add, jax.tree.map(_arrays.sum_squares, rows))


@jax.jit
def _first_row(rows: Any, good: jax.Array) -> Any:
  first = jnp.argmax(good)
  return jax.tree.map(
    lambda x: jax.lax.dynamic_index_in_dim(_arrays.widen(x), first, keepdims=False), rows
  )


@jax.jit
def _distances(rows: Any, good: jax.Array, origin: Any, shift: Any) -> Any:
  def one(x: jax.Array, o: jax.Array, s: jax.Array) -> jax.Array:
    row_is_good = jnp.expand_dims(good, tuple(range(1, x.ndim)))
    return jnp.where(row_is_good, _arrays.widen(x) - o - s, 0)

  return jax.tree.map(one, rows, origin, shift)


def principal_components(
  centred: Iterable[Any], k: int, sketch: jax.Array | None, groups: SubspaceGroups
) -> Components:
  """The first k components of centred snapshots, fewer than m of these.

  `sketch`, [m, l] normal numbers, is for the randomized form; None: the exact one.
  """

  def products(directions: Any) -> jax.Array:
    return jnp.concatenate([_products(rows, directions, groups) for rows in centred], axis=1)

  def combine(coefficients: jax.Array) -> Any:
    start, total = 0, None
    for rows in centred:
      stop = start + len(jax.tree.leaves(rows)[0])
      block_sum = _combine(coefficients[..., start:stop], rows, groups)
      total = block_sum if total is None else jax.tree.map(jnp.add, total, block_sum)
      start = stop
    return total

  if sketch is None:
    gram = jnp.concatenate([products(rows) for rows in centred], axis=2)
    m = gram.shape[-1]
    rows = combine(_leading_directions(gram, min(k + GUARD, max(m - 1, k))))
  else:
    everywhere = jnp.broadcast_to(sketch.T, (groups.number, *sketch.T.shape))
    seen, _ = jnp.linalg.qr(products(combine(everywhere)))
    small = combine(seen.mT)
    directions = _leading_directions(_products(small, small, groups), sketch.shape[1])
    rows = _combine(directions, small, groups)
  basis = _orthonormalize(rows, groups)
  total = sum(_squares(rows) for rows in centred)
  return _rayleigh_ritz(basis, products(basis), total, k, groups)


def _leading_directions(gram: jax.Array, count: int) -> jax.Array:
  """The eigenvectors of the largest eigenvalues, one to a row, the largest first."""
  _, vectors = jnp.linalg.eigh(gram)
  return vectors[..., ::-1][..., :count].mT


def _orthonormalizer(gram: jax.Array) -> jax.Array:
  """T for which T X has orthonormal rows, from the Gram matrix [G, l, l] of X.

  Combinations shorter than 1 % of their rows (in float32; sqrt(1000 eps)) are treated as rounding
  errors and become zero.
  """
  norms = jnp.sqrt(jnp.diagonal(gram, axis1=-2, axis2=-1))
  # Unit rows are near to orthogonal even if their lengths were not comparable.
  scale = _inverse(norms, norms > 0)
  squares, vectors = jnp.linalg.eigh(gram * scale[:, :, None] * scale[:, None, :])
  lengths = jnp.sqrt(jnp.maximum(squares, 0))
  kept = squares > 1000 * jnp.finfo(gram.dtype).eps
  return _inverse(lengths, kept)[:, :, None] * vectors.mT * scale[:, None, :]


def _inverse(x: jax.Array, kept: jax.Array) -> jax.Array:
  return jnp.where(kept, 1 / jnp.where(kept, x, 1), 0)


@functools.partial(jax.jit, static_argnums=1)
def _orthonormalize(rows: Any, groups: SubspaceGroups) -> Any:
  return _linalg.combine(_orthonormalizer(_linalg.products(rows, rows, groups)), rows, groups)


@functools.partial(jax.jit, static_argnums=(3, 4))
def _rayleigh_ritz(
  basis: Any, coordinates: jax.Array, total: jax.Array, k: int, groups: SubspaceGroups
) -> Components:
  """The components within the span of l rows that are nearly orthonormal, or zero.

  `coordinates` are the centred snapshots' products with them. Components with less than 100 eps of
  the first one's singular value are rounding errors: they and their variances are zero.
  """
  exact = _orthonormalizer(_linalg.products(basis, basis, groups))
  _, singular, right = jnp.linalg.svd(matmul(coordinates, exact.mT), full_matrices=False)
  singular, right = singular[:, :k], right[:, :k]
  real = singular > 100 * jnp.finfo(singular.dtype).eps * singular[:, :1]
  rotation = jnp.where(real[..., None], matmul(right, exact), 0)
  # The entries of each component sum to a positive number, in each group.
  ones = jax.tree.map(lambda x: jnp.ones_like(x[0]), basis)
  sums = jnp.sum(rotation * _linalg.products(basis, ones, groups)[:, None], axis=-1)
  rows = _linalg.combine(jnp.where(sums < 0, -1, 1)[..., None] * rotation, basis, groups)
  return Components(rows, jnp.where(real, singular**2, 0), total)

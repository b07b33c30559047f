r"""Principal component analysis of m snapshots of n numbers, read in blocks; m is far below n.

  C = X - mean(X)        [m, n]   centred snapshots
  G = C C'               [m, m]   Gram matrix
  G = U diag(s^2) U'              s: singular values of C, descending
  B = diag(1/s) U' C     [k, n]   the first k rows: the components

The condition number of G is the square of the condition number of C. So eigenvectors of G whose s
is below sqrt(eps) s_1 are inaccurate mixtures, and the rows of B are not orthogonal. Therefore the
algorithm computes l rows, a few more than k, and makes them orthonormal. Then a Rayleigh-Ritz step
corrects them by an SVD of C B' [m, l], whose condition number is not squared.

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

G has the eigenvalue s^2 = 50 with the eigenvector (-1, 0, 1) / sqrt(2). With the eigenvector's
entries as coefficients, the rows combine to (6, 8) / sqrt(2). Divided by s this is (0.6, 0.8):

  >>> pca = principal_components([rows], k=1, sketch=None, groups=one_group)
  >>> [round(x, 3) for x in pca.rows[0].tolist()], round(float(pca.variances[0, 0]), 3)
  ([0.6, 0.8], 50.0)

The randomized algorithm avoids the Gram matrix: after one power iteration it reduces C to a sketch
Q' C of l rows, far fewer than m, and analyses the sketch. Source: Halko, Martinsson, Tropp,
"Finding Structure with Randomness", SIAM Review 53 (2011).

Each group of leaves and layers is analysed by itself, so for G groups an m x m matrix is [G, m, m].
"""

from collections.abc import Iterable, Iterator
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_boost._form import _finiteness
from optax_boost._foundation import _arrays, _types
from optax_boost._methods._dim_reduce import _linalg, _snapshot_blocks
from optax_boost._methods._dim_reduce._groups import SubspaceGroups
from optax_boost._methods._dim_reduce._linalg import matmul

# The number of extra directions, l - k. They are needed since the last of the l directions are
# inaccurate.
GUARD = 8

_combine = jax.jit(_linalg.combine, static_argnums=2)
_products = jax.jit(_linalg.products, static_argnums=2)


class Components(NamedTuple):
  """The first k principal components of each of G groups, with their variances."""

  # A stacked tree of k orthonormal rows, which are zero beyond the rank of a group's snapshots.
  rows: optax.Params
  variances: jax.Array  # [G, k], squared singular values, descending
  total: _types.FloatScalar  # the sum of all squared singular values


class Centred:
  """Iterates, as often as asked, over blocks of centred snapshots: snapshots minus their mean.

  Rows of a block that are not in use or not finite become zero.
  """

  def __init__(self, blocks: Iterable[_snapshot_blocks.Block]) -> None:
    self._blocks = blocks
    self._good: list[jax.Array] = []
    bad = []
    for rows, used in blocks:
      finite = _finite_rows(rows)
      good = used & finite
      if not self._good:
        # The rounding error of a mean grows with the size of the numbers. Snapshots differ little,
        # so the mean of their small distances to the first snapshot is more exact.
        self._origin = _first_row(rows, good)
        total = zero = jax.tree.map(jnp.zeros_like, self._origin)
      distances = _distances(rows, good, self._origin, zero)
      total = jax.tree.map(lambda t, x: t + jnp.sum(x, axis=0), total, distances)
      bad.append(used & ~finite)
      self._good.append(good)
    self.bad, self.count = jnp.concatenate(bad), jnp.sum(jnp.concatenate(self._good))
    self._shift = jax.tree.map(lambda x: x / jnp.maximum(self.count, 1).astype(x.dtype), total)
    self.mean = jax.tree.map(jnp.add, self._origin, self._shift)

  def __iter__(self) -> Iterator[optax.Params]:
    def centre(block: _snapshot_blocks.Block, good: jax.Array) -> optax.Params:
      return _distances(block[0], good, self._origin, self._shift)

    # `map` instead of a generator, whose local variables would keep the last block in memory.
    return map(centre, self._blocks, self._good)


@jax.jit
def _finite_rows(rows: optax.Params) -> jax.Array:
  """Returns for each row of a stacked tree whether all its numbers are finite: [m], bool."""
  by_leaf = [
    jnp.all(_finiteness.finite_entries(x), axis=range(1, x.ndim)) for x in jax.tree.leaves(rows)
  ]
  # XLA 2: a contraction counts the finite leaves. XLA would fuse `all` over leaves into the loop of
  # each leaf, which takes long to compile with hundreds of leaves.
  flags = jnp.stack(by_leaf).astype(jnp.float32)
  return matmul(jnp.ones(len(by_leaf)), flags) == len(by_leaf)


@jax.jit
def _squares(rows: optax.Params) -> _types.FloatScalar:
  return jax.tree.reduce(jnp.add, jax.tree.map(_arrays.sum_squares, rows))


@jax.jit
def _first_row(rows: optax.Params, good: jax.Array) -> optax.Params:
  first = jnp.argmax(good)
  return jax.tree.map(
    lambda x: jax.lax.dynamic_index_in_dim(_arrays.widen(x), first, keepdims=False), rows
  )


@jax.jit
def _distances(
  rows: optax.Params, good: jax.Array, origin: optax.Params, shift: optax.Params
) -> optax.Params:
  def distance(x: jax.Array, o: jax.Array, s: jax.Array) -> jax.Array:
    row_is_good = jnp.expand_dims(good, tuple(range(1, x.ndim)))
    return jnp.where(row_is_good, _arrays.widen(x) - o - s, 0)

  return jax.tree.map(distance, rows, origin, shift)


def principal_components(
  centred: Iterable[optax.Params], k: int, sketch: jax.Array | None, groups: SubspaceGroups
) -> Components:
  """Returns the first k components of m > k centred snapshots, which `centred` yields in blocks.

  `sketch` [m, l] has normally distributed random numbers for the randomized algorithm. If `sketch`
  is None, the components are computed exactly.
  """

  def products(directions: optax.Params) -> jax.Array:
    return jnp.concatenate([_products(rows, directions, groups) for rows in centred], axis=1)

  def combine(coefficients: jax.Array) -> optax.Params:
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
    group_sketches = jnp.broadcast_to(sketch.T, (groups.number, *sketch.T.shape))
    q, _ = jnp.linalg.qr(products(combine(group_sketches)))
    small = combine(q.mT)
    directions = _leading_directions(_products(small, small, groups), sketch.shape[1])
    rows = _combine(directions, small, groups)
  basis = _orthonormalize(rows, groups)
  total = sum(_squares(rows) for rows in centred)
  return _rayleigh_ritz(basis, products(basis), total, k, groups)


def _leading_directions(gram: jax.Array, count: int) -> jax.Array:
  """Returns the leading `count` eigenvectors of each of the G matrices `gram` [G, m, m].

  They are the rows of the result [G, count, m], the one with the largest eigenvalue first.
  """
  _, vectors = jnp.linalg.eigh(gram)
  return vectors[..., ::-1][..., :count].mT


def _orthonormalizer(gram: jax.Array) -> jax.Array:
  """Returns a matrix T such that T X has orthonormal rows, from the Gram matrix [G, l, l] of X.

  T first scales the rows of X to length one. Then T combines the scaled rows: the coefficients are
  the eigenvectors of the Gram matrix of the scaled rows. Finally, T scales each combination to
  length one. A combination shorter than sqrt(1000 eps), 0.01 in float32, is only a rounding error,
  so its row of T is zero.
  """
  norms = jnp.sqrt(jnp.diagonal(gram, axis1=-2, axis2=-1))
  # Without this scaling, T X would be less orthogonal if the lengths of rows of X differ much.
  scale = _inverse(norms, norms > 0)
  squares, vectors = jnp.linalg.eigh(gram * scale[:, :, None] * scale[:, None, :])
  lengths = jnp.sqrt(jnp.maximum(squares, 0))
  kept = squares > 1000 * jnp.finfo(gram.dtype).eps
  return _inverse(lengths, kept)[:, :, None] * vectors.mT * scale[:, None, :]


def _inverse(x: jax.Array, kept: jax.Array) -> jax.Array:
  return jnp.where(kept, 1 / jnp.where(kept, x, 1), 0)


@functools.partial(jax.jit, static_argnums=1)
def _orthonormalize(rows: optax.Params, groups: SubspaceGroups) -> optax.Params:
  return _linalg.combine(_orthonormalizer(_linalg.products(rows, rows, groups)), rows, groups)


@functools.partial(jax.jit, static_argnums=(3, 4))
def _rayleigh_ritz(
  basis: optax.Params,
  coordinates: jax.Array,
  total: _types.FloatScalar,
  k: int,
  groups: SubspaceGroups,
) -> Components:
  """Returns k components in the span of the l rows of `basis`.

  The rows of `basis` are nearly orthonormal, except for rows that are zero. `coordinates` [G, m, l]
  are the inner products of the centred snapshots with the rows of `basis`. `total` is the sum of
  squares of the centred snapshots. Components whose singular value is below 100 eps times the
  largest are rounding errors and become zero.
  """
  exact = _orthonormalizer(_linalg.products(basis, basis, groups))
  _, singular, right = jnp.linalg.svd(matmul(coordinates, exact.mT), full_matrices=False)
  singular, right = singular[:, :k], right[:, :k]
  real = singular > 100 * jnp.finfo(singular.dtype).eps * singular[:, :1]
  rotation = jnp.where(real[..., None], matmul(right, exact), 0)
  # The sign of a component is arbitrary. It is chosen such that the component's entries have a
  # positive sum in each group.
  ones = jax.tree.map(lambda x: jnp.ones_like(x[0]), basis)
  sums = jnp.sum(rotation * _linalg.products(basis, ones, groups)[:, None], axis=-1)
  rows = _linalg.combine(jnp.where(sums < 0, -1, 1)[..., None] * rotation, basis, groups)
  return Components(rows, jnp.where(real, singular**2, 0), total)

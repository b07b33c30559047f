"""Fits a subspace to snapshots of the params, by principal components."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost._foundation import _arrays, _checks, _types
from optax_boost._methods._dim_reduce import _groups, _pca, _snapshot_blocks, _subspace

_OVERSAMPLE = 10


def fit_subspace(
  snapshots: optax.OptState | optax.Params | Iterable[optax.Params],
  components: int,
  *,
  key: jax.Array | int | None = None,
  dtype: jax.typing.DTypeLike = jnp.float32,
  groups: _groups.Plan = None,
) -> _subspace.Subspace:
  r"""Fits the subspace that holds most of the variance of snapshots of the params.

  .. math::
    C = X - \bar{x}, \qquad C C^\top = U \Sigma^2 U^\top, \qquad B = \Sigma_k^{-1} U_k^\top C

  The m snapshots are the rows of :math:`X`, and the k components are the rows of :math:`B`. The
  eigenvectors :math:`U` of the Gram matrix :math:`C C^\top` give the components. The Gram matrix
  holds squares, so rounding makes components of small variance inexact. One Rayleigh-Ritz step
  corrects them. But in float32, components whose variance is below 1e-7 of the first component's
  variance stay less exact. Components whose variance is below 1e-10 of it are rounding errors, and
  `fit_subspace` raises an error. Sharded params are not gathered: only matrices of m or k rows and
  columns move between devices.

  Inside ``jit``, the values of the snapshots are not known, so they raise no error. `fit_subspace`
  leaves out snapshots that are not finite. If the snapshots span fewer directions than
  `components`, the last rows of the basis are zero.

  Args:
    snapshots: the state of a chain with :func:`record_trajectory`; a stacked tree, whose leaves
      have the snapshots along their first axis; or an iterable of trees. Lists, tuples and
      iterators are held in memory as a whole. Any other iterable is read several times, in blocks
      of k + 8 snapshots; about three blocks are in memory at a time.
    components: k, the dimension of the subspace; less than the number of snapshots. Static. Raising
      it explains more of the gradient, and takes more memory and time.
    key: None: computes the exact components. A key or an integer seed: computes the components of
      k + 10 random combinations of the snapshots, after one power iteration. This avoids the m x m
      Gram matrix, whose cost dominates for m in the hundreds. The components are as good as the
      exact ones if the variances decay.
    dtype: a floating dtype in which the basis is stored. It is computed in float32 or wider. In
      bfloat16 its rows are orthonormal to 3 digits only.
    groups: as in :func:`dim_reduce`; each group of leaves and layers is fitted separately. None:
      one group.

  Returns:
    A :class:`Subspace`, sharded as the snapshots are. ``None`` leaves stay ``None``.

  Raises:
    ValueError: there are too few snapshots, or they span too few directions; some are not finite,
      or their trees differ.

  Examples:
    >>> import jax, jax.numpy as jnp, optax_boost
    >>> t = jnp.linspace(-1.0, 1.0, 9)
    >>> path = {"a": jnp.stack([3 * t, 1 + 4 * t], axis=1), "b": t**2}
    >>> subspace = optax_boost.fit_subspace(path, components=2)
    >>> [round(float(x), 3) for x in subspace.basis["a"][0]]
    [0.6, 0.8]
    >>> [round(float(x), 3) for x in subspace.explained_variance_ratio]
    [0.987, 0.013]

  References:
    Halko, Martinsson, Tropp, `Finding Structure with Randomness
    <https://arxiv.org/abs/0909.4061>`_, 2011.
  """
  _checks.check_whole_number("components", components, static=True)
  _checks.check_floating_dtype("dtype", dtype)
  _groups.check_groups(groups)
  key = None if key is None else _checks.as_key("key", key)
  blocks, snapshot = _snapshot_blocks.read(snapshots, components + _pca.GUARD)
  leaf_groups = _groups.find_groups(snapshot, groups, "fit_subspace")
  if isinstance(blocks, _snapshot_blocks.StreamedBlocks):
    fitted = _fit(blocks, key, components, jnp.dtype(dtype), leaf_groups)
  else:
    ((_, used),) = blocks
    _check_enough(len(used) if isinstance(used, jax.core.Tracer) else int(used.sum()), components)
    fitted = _jitted_fit(blocks, key, components, jnp.dtype(dtype), leaf_groups)
  subspace, bad, rank, total = fitted
  if not isinstance(total, jax.core.Tracer):
    _check_fit(np.flatnonzero(bad), int(rank), total, components)
  return subspace


def _fit(
  blocks: Iterable[_snapshot_blocks.Block],
  key: jax.Array | None,
  components: int,
  dtype: _types.Dtype,
  groups: _groups.SubspaceGroups,
) -> tuple[_subspace.Subspace, jax.Array, _types.IntScalar, _types.FloatScalar]:
  """Computes the subspace of all blocks of snapshots; returns four values.

  They are: the subspace; for each of the m snapshots, whether it is not finite; in how many
  directions, at most `components`, the snapshots differ in the group where this number is smallest;
  and the sum of squares of the centred snapshots. If `key` is None, the components are exact.
  """
  centred = _pca.Centred(blocks)
  m, sketch = len(centred.bad), None
  _check_enough(m, components)
  if key is not None:
    shape = (m, min(m, components + _OVERSAMPLE))
    sketch = jax.random.normal(key, shape, _arrays.widest_dtype(centred.mean))
  reader = centred if isinstance(blocks, _snapshot_blocks.StreamedBlocks) else list(centred)
  pca = _pca.principal_components(reader, components, sketch, groups)
  with_leaves = sorted({number for leaf in groups.leaves for number in leaf.numbers})
  rank = jnp.min(jnp.sum(pca.variances > 0, axis=1)[np.array(with_leaves)])
  variance = jnp.sum(pca.variances, axis=0)
  subspace = _subspace.Subspace(
    mean=centred.mean,
    basis=jax.tree.map(lambda x: x.astype(dtype), pca.rows),
    explained_variance=variance / jnp.maximum(centred.count - 1, 1),
    explained_variance_ratio=variance / jnp.where(pca.total > 0, pca.total, 1),
  )
  return subspace, centred.bad, rank, pca.total


_jitted_fit = jax.jit(_fit, static_argnums=(2, 3, 4))


def _check_enough(count: int, components: int) -> None:
  """Raises ValueError unless the number of snapshots, `count`, exceeds the components."""
  if count <= components:
    raise ValueError(
      f"{components} components need at least {components + 1} snapshots, since their mean takes"
      f" one direction away; got {count}. Record more snapshots or fit fewer components."
    )


def _check_fit(bad: np.ndarray, rank: int, total: _types.FloatScalar, components: int) -> None:
  """Raises ValueError if snapshots are not finite, overflow or differ in too few directions.

  `bad` has the indices of the snapshots that are not finite. `rank` is the number of directions in
  which the snapshots differ, and `total` is the sum of squares of the centred snapshots.
  """
  if len(bad):
    raise ValueError(
      "`fit_subspace` needs snapshots of finite numbers; got others at the indices"
      f" {_checks.shorten(bad.tolist())}. Leave them out."
    )
  if not jnp.isfinite(total):
    raise ValueError(
      f"`fit_subspace` needs snapshots of finite variance; got a sum of squares of {total} in"
      f" {total.dtype}. Leave out the snapshots after the training diverged."
    )
  if rank < components:
    raise ValueError(
      f"{components} components need snapshots that differ in {components} directions; these differ"
      f" in {rank} by more than rounding. Take snapshots further apart or fit fewer components."
    )

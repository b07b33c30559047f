"""Subspaces in which the weights moved: principal components of snapshots of the params.

``_linalg.py`` has the mathematics.
"""

from collections.abc import Iterator
from collections.abc import Sequence
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_boost import _arrays
from optax_boost import _base
from optax_boost import _tree
from optax_boost._dim_reduce import _layers
from optax_boost._dim_reduce import _linalg
from optax_boost._dim_reduce import _subspace
from optax_boost._dim_reduce import _trajectory

_KEEP_OUT = "Leave it out of the snapshots, and put `optax.masked` around `dim_reduce`."


def fit_subspace(
  snapshots: Any,
  components: int,
  *,
  method: str = "exact",
  key: jax.Array | int | None = None,
  oversample: int = 10,
  dtype: jax.typing.DTypeLike = jnp.float32,
  groups: _layers.Groups | None = None,
) -> _subspace.Subspace:
  r"""Fits the subspace that holds most of the variance of snapshots of the params.

  .. math::
    C = X - \bar{x}, \qquad C C^\top = U \Sigma^2 U^\top, \qquad B = \Sigma_k^{-1} U_k^\top C

  The eigenvectors of the snapshots' m x m Gram matrix give the components; one Rayleigh-Ritz step
  then restores the digits that squaring lost. In float32, components with less than 1e-7 of the
  first one's variance are less exact, those with less than 1e-10 are rounding errors and are
  refused. Sharded params are not gathered: only matrices of m or k rows and columns cross devices.

  Inside ``jit``, snapshots that are not finite are left out instead of refused, and where there are
  fewer directions than `components`, the last rows of the basis are zero.

  Args:
    snapshots: the state of a chain with :func:`record_trajectory`; an iterable of trees; or a
      stacked tree (not a list or tuple), whose leaves have the snapshots along their first axis. An
      object of another class with ``len`` and ``[i]``, such as one that reads checkpoints, is read
      several times, and k + 8 of its snapshots are in memory at once, by the exact method without
      `groups`. Other iterables are held as a whole.
    components: k, the dimensions of the subspace; fewer than there are snapshots. Static. Raising
      it explains more of the gradient, and takes more memory and time.
    method: ``"exact"``, or ``"randomized"``: from k + `oversample` random combinations of the
      snapshots and one power iteration. It saves the m x m matrix, which is the cost of the exact
      one for m in the hundreds, and is as good where variances decay.
    key: a key or an integer seed, for the randomized method only.
    oversample: raising it makes the randomized method more exact.
    dtype: a floating dtype to store the basis in; computed in float32 or wider. With bfloat16 its
      rows are orthonormal to 3 digits only.
    groups: as in :func:`dim_reduce`: each group of leaves and layers is fitted for itself, as the
      same layers in leaves of their own. None: one group.

  Returns:
    A :class:`Subspace`, sharded as the snapshots are. ``None`` leaves stay ``None``.

  Raises:
    ValueError: there are too few snapshots, or they span too few directions; some are not finite,
      or their trees differ; an argument is out of range.
    TypeError: an argument or a leaf is of the wrong kind.

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
    Li, Tan, Huang, Tao, Liu, Huang, `Low Dimensional Trajectory Hypothesis is True: DNNs Can Be
    Trained in Tiny Subspaces <https://arxiv.org/abs/2103.11154>`_, 2022.
    Halko, Martinsson, Tropp, `Finding Structure with Randomness
    <https://arxiv.org/abs/0909.4061>`_, 2011.
  """
  _base.check_whole_number("components", components, static=True)
  _base.check_floating_dtype("dtype", dtype)
  _base.check_whole_number("oversample", oversample, static=True)
  _base.check_name("method", method, ("exact", "randomized"))
  groups = _layers.checked_groups(groups)
  key = None if key is None else _base.as_key("key", key)
  if method == "randomized" and key is None:
    raise ValueError("`fit_subspace(method='randomized')` needs `key`, as jax.random.key(0).")
  if isinstance(snapshots, Iterator):
    snapshots = list(snapshots)
  if _reads_again(snapshots):
    if method == "exact" and groups == _layers.ONE_GROUP and len(snapshots) > components + 8:
      _check_enough(len(snapshots), components)
      return _fit_streamed(snapshots, components, components + 7, jnp.dtype(dtype))
    snapshots = [snapshots[i] for i in range(len(snapshots))]
  rows, used = _stack(snapshots)
  count = len(used)
  sketch = None
  if method == "randomized" and key is not None:
    width = min(count, components + oversample)
    sketch = jax.random.normal(key, (count, width), _arrays.widest_dtype(rows))
  _check_enough(len(used) if isinstance(used, jax.core.Tracer) else int(used.sum()), components)
  leaves, structure = jax.tree.flatten(rows)
  one_row = jax.eval_shape(lambda: jax.tree.map(lambda x: x[0], rows))
  of_leaves, _ = _layers.find_groups(one_row, groups, "fit_subspace")
  fits = {}
  for group, members in _layers.split(leaves, of_leaves):
    fitted, finite, total = _jitted_fit(
      members, used, sketch, components=components, dtype=jnp.dtype(dtype)
    )
    if not isinstance(finite, jax.core.Tracer):
      _check_finite(np.flatnonzero(np.asarray(used & ~finite)))
      if not jnp.isfinite(total):
        raise ValueError(
          f"The variance of the snapshots overflows; got a sum of squares of {total} in"
          f" {total.dtype}. Leave out the snapshots after the training diverged."
        )
      _check_rank(fitted, components)
    fits[group] = fitted, total
  # One group's own numbers, to the bit.
  whole = next(iter(fits.values()))[0]
  if len(fits) > 1:
    totals = [total for _, total in fits.values()]
    explained = sum(fit.explained_variance_ratio * total for fit, total in fits.values())
    whole = whole._replace(
      explained_variance=sum(fit.explained_variance for fit, _ in fits.values()),
      explained_variance_ratio=explained / jnp.maximum(sum(totals), jnp.finfo(jnp.float32).tiny),
    )
  means = {group: [x[None] for x in fit.mean] for group, (fit, _) in fits.items()}
  bases = {group: fit.basis for group, (fit, _) in fits.items()}
  mean, basis = (_layers.join(parts, leaves, of_leaves) for parts in (means, bases))
  return whole._replace(
    mean=jax.tree.unflatten(structure, [x[0] for x in mean]),
    basis=jax.tree.unflatten(structure, basis),
  )


def _check_enough(count: int, components: int) -> None:
  """Refuses too few snapshots."""
  if count <= components:
    fewer = f", or ask for at most {count - 1} components" if count > 1 else "; two are the least"
    raise ValueError(
      f"{components} components need at least {components + 1} snapshots, since their mean takes"
      f" one direction away; got {count}. Record more of them{fewer}."
    )


def _check_finite(bad: Any) -> None:
  """Refuses snapshots that are not finite, by their indices."""
  if len(bad):
    shown = ", ".join(map(str, bad[:8])) + (", ..." if len(bad) > 8 else "")
    raise ValueError(
      f"A subspace can't be fitted to snapshots that are not finite; those with index {shown}"
      " are not. Leave them out."
    )


def _check_rank(subspace: _subspace.Subspace, components: int) -> None:
  """Refuses snapshots that differ in too few directions."""
  variances = np.asarray(subspace.explained_variance)
  rank = int(np.sum(variances > 0))
  if rank < components:
    fewer = f"Ask for at most {rank} components, or take" if rank else "Take"
    raise ValueError(
      f"{components} components need snapshots that differ in as many directions; these differ in"
      f" {rank}, the rest is rounding. {fewer} snapshots further apart."
    )


def _stack(snapshots: Any) -> tuple[Any, Any]:
  """The snapshots as a stacked tree, and which of its rows hold one."""
  if _tree.find_states(snapshots, _trajectory.TrajectoryState):
    state = _trajectory.one_trajectory(snapshots, "fit_subspace")
    (capacity,) = {len(x) for x in jax.tree.leaves(state.snapshots)} or {0}
    return _checked(state.snapshots), jnp.arange(capacity) < state.snapshot_count
  if any(map(_is_state, jax.tree.leaves(snapshots, is_leaf=_is_state))):
    raise ValueError(
      "`snapshots` must be trees of params, or an optimizer state that has recorded some; got"
      f" {_base.shorten(jax.tree.structure(snapshots), 200)}. Add"
      " `optax_boost.record_trajectory` to its chain before training."
    )
  # The fields of a named tuple are one tree.
  if isinstance(snapshots, list | tuple) and not hasattr(snapshots, "_fields"):
    return _stack_trees(snapshots)
  shapes = [jnp.shape(x) for x in jax.tree.leaves(_checked(snapshots))]
  if len({shape[:1] for shape in shapes}) > 1 or not shapes[0]:
    raise ValueError(
      "`fit_subspace` needs a stacked tree whose leaves all have the snapshots along their first"
      f" axis; got shapes {shapes}. Pass a list of trees, or an optimizer state that holds a"
      " TrajectoryState."
    )
  return jax.tree.map(jnp.asarray, snapshots), np.ones(shapes[0][0], bool)


def _reads_again(snapshots: Any) -> bool:
  """Whether this is a sequence that makes each snapshot on request, and not a pytree."""
  if _base.is_any_array(snapshots) or isinstance(snapshots, str | bytes):
    return False
  sequence = hasattr(snapshots, "__len__") and hasattr(snapshots, "__getitem__")
  return sequence and jax.tree_util.all_leaves([snapshots])


def _is_state(node: Any) -> bool:
  """Whether a node is a state of optax or of this package; a ``MaskedNode`` hides leaves only."""
  package = type(node).__module__.partition(".")[0]
  state = isinstance(node, tuple) and package in ("optax", "optax_boost")
  return state and not _tree.is_masked(node)


def _stack_trees(trees: Sequence[Any]) -> tuple[Any, Any]:
  if not trees:
    raise ValueError("`fit_subspace` needs snapshots; got an empty sequence.")
  for index, tree in enumerate(trees):
    _check_like(_checked(tree), trees[0], index)

  def stack(*leaves: Any) -> jax.Array:
    # NumPy arrays are joined on the host, and moved once.
    on_host = all(isinstance(x, np.ndarray) for x in leaves)
    return jnp.asarray(np.stack(leaves)) if on_host else jnp.stack(leaves)

  return jax.tree.map(stack, *trees), np.ones(len(trees), bool)


def _checked(tree: Any) -> Any:
  """A tree with at least one leaf, all of real floating-point numbers."""
  if not jax.tree.leaves(tree):
    raise ValueError("`fit_subspace` needs snapshots with at least one leaf; got an empty tree.")
  _tree.check_floating(tree, "fit_subspace", _KEEP_OUT)
  return tree


def _check_like(tree: Any, first: Any, index: int) -> None:
  """Refuses a snapshot of another structure or other shapes than the first."""
  got: Any = jax.tree.structure(tree)
  want: Any = jax.tree.structure(first)
  if got != want:
    raise ValueError(
      f"Snapshots must have one tree structure; number {index} has {got}, the first one {want}."
    )
  leaves = zip(_tree.leaf_paths(tree), jax.tree.leaves(tree), jax.tree.leaves(first), strict=True)
  for path, a, b in leaves:
    if jnp.shape(a) != jnp.shape(b):
      raise ValueError(
        f"Snapshots must have leaves of the same shapes; at '{path}' number {index} has"
        f" {jnp.shape(a)}, the first one {jnp.shape(b)}. A list or tuple is taken for"
        " snapshots: cut a stacked tree that is one into one tree per snapshot."
      )


@functools.partial(jax.jit, static_argnames=("components", "dtype"))
def _jitted_fit(
  rows: Any, used: jax.Array, sketch: jax.Array | None, *, components: int, dtype: Any
) -> tuple[_subspace.Subspace, jax.Array, jax.Array]:
  finite = _linalg.finite_rows(rows)
  used &= finite
  mean, centred = _linalg.centre(rows, used)
  if sketch is None:
    pca = _linalg.gram_pca(centred, components)
  else:
    pca = _linalg.randomized_pca(centred, components, sketch)
  return _as_subspace(mean, pca, jnp.sum(used), dtype), finite, pca.total


def _as_subspace(
  mean: Any, pca: _linalg.PrincipalComponents, count: jax.Array, dtype: Any
) -> _subspace.Subspace:
  """Principal components of `count` snapshots as a :class:`Subspace`."""
  return _subspace.Subspace(
    mean=mean,
    basis=jax.tree.map(lambda x: x.astype(dtype), pca.components),
    explained_variance=pca.variances / jnp.maximum(count - 1, 1),
    explained_variance_ratio=pca.variances / jnp.where(pca.total > 0, pca.total, 1),
  )


def _fit_streamed(snapshots: Any, components: int, size: int, dtype: Any) -> _subspace.Subspace:
  """Reads m snapshots in passes, with `size` + 1 of them in memory."""
  # Distances to the first snapshot are exact, and as small as the centred snapshots: so their
  # m x m Gram matrix can be centred afterwards, in float64.
  count = len(snapshots)
  blocks = [slice(start, min(start + size, count)) for start in range(0, count, size)]
  origin = _as_arrays(snapshots[0])

  def write(rows: Any, row: int, index: int) -> Any:
    tree = _as_arrays(snapshots[index])
    _check_like(tree, origin, index)
    return _write(rows, origin, tree, row)

  rows, single = _empty_rows(origin, size), _empty_rows(origin, 1)

  def read_blocks() -> Iterator[tuple[slice, int]]:
    """Writes each block into `rows`; a shorter last block leaves the other rows unchanged."""
    nonlocal rows
    for block in blocks:
      for row, index in enumerate(range(block.start, block.stop)):
        rows = write(rows, row, index)
      yield block, block.stop - block.start

  gram = np.zeros((count, count))
  for block, length in read_blocks():
    gram[block, block] = _inner(rows, rows)[:length, :length]
    for index in range(block.stop, count):
      single = write(single, 0, index)
      gram[block, index] = gram[index, block] = _inner(rows, single)[:length, 0]
  del single
  bad = np.flatnonzero(~np.isfinite(np.diagonal(gram)))
  # If the first one is not finite, no distance is.
  _check_finite(bad[:1] if 0 in bad else bad)
  centring = np.eye(count) - 1 / count
  gram = centring @ gram @ centring
  vectors = np.linalg.eigh(gram)[1][:, ::-1][:, : _linalg.guarded(components, count)].T

  sums = _empty_rows(origin, 1), _empty_rows(origin, len(vectors))
  for block, length in read_blocks():
    coefficients = np.zeros((1 + len(vectors), size))
    coefficients[0, :length] = 1 / count
    coefficients[1:, :length] = vectors[:, block]
    sums = _accumulate(sums, rows, coefficients)
  shift, basis = sums[0], _orthonormalize(sums[1])
  parts = [np.asarray(_inner(rows, basis), np.float64)[:n] for _, n in read_blocks()]
  coordinates = np.concatenate(parts)
  coordinates -= coordinates.mean(axis=0)
  subspace = _finish(origin, shift, basis, coordinates, np.trace(gram), count, components, dtype)
  _check_rank(subspace, components)
  return subspace


def _as_arrays(tree: Any) -> Any:
  return jax.tree.map(lambda x: x if isinstance(x, jax.Array) else np.asarray(x), _checked(tree))


def _empty_rows(like: Any, count: int) -> Any:
  def empty(x: Any) -> jax.Array:
    # A broadcast keeps the sharding of the leaf.
    zero = jnp.zeros_like(x, dtype=_arrays.accumulator_dtype(x.dtype))
    return jnp.broadcast_to(zero, (count, *zero.shape))

  return jax.tree.map(empty, like)


@functools.partial(jax.jit, donate_argnums=0)
def _write(rows: Any, origin: Any, snapshot: Any, row: int) -> Any:
  """Writes the distance of a snapshot to the first one into a row."""

  def write(x: jax.Array, first: jax.Array, leaf: jax.Array) -> jax.Array:
    distance = leaf.astype(x.dtype) - first.astype(x.dtype)
    return jax.lax.dynamic_update_index_in_dim(x, distance, row, 0)

  return jax.tree.map(write, rows, origin, snapshot)


@functools.partial(jax.jit, donate_argnums=0)
def _accumulate(sums: Any, rows: Any, coefficients: Any) -> Any:
  new = tuple(_linalg.combine(c, rows) for c in (coefficients[:1], coefficients[1:]))
  return jax.tree.map(jnp.add, sums, new)


_inner = jax.jit(_linalg.inner_products)
_orthonormalize = jax.jit(_linalg.orthonormalize, donate_argnums=0)


@functools.partial(jax.jit, static_argnums=(6, 7))
def _finish(
  origin: Any, shift: Any, basis: Any, coordinates: Any, total: Any, count: Any, k: int, dtype: Any
) -> _subspace.Subspace:
  mean = jax.tree.map(lambda o, s: o.astype(s.dtype) + s[0], origin, shift)
  return _as_subspace(mean, _linalg.rayleigh_ritz(basis, coordinates, total, k), count, dtype)

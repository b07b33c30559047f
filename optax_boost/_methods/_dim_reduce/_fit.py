"""Subspaces in which the weights moved: principal components of snapshots of the params.

Snapshots come as an optimizer state, as a stacked tree, as a list of trees, or as an iterable that
loads them one by one, for example from checkpoints. All are read in one form: *blocks*, each a
stacked tree of some snapshots and a flag for each of its rows, whether it is in use. `_pca` goes
over the blocks several times, so an iterable is read as often, and only some blocks of it are in
memory. The rows of a ring that is not full yet are not in use.

  >>> trees = [{"w": np.array(w)} for w in ([0.0, 0.0], [3.0, 4.0], [6.0, 8.0])]
  >>> [((rows, used),), first] = _read(trees, size=2)
  >>> rows["w"].tolist(), used.tolist()
  ([[0.0, 0.0], [3.0, 4.0], [6.0, 8.0]], [True, True, True])

  >>> class Loader:  # iterable over and over again: read in blocks of two
  ...   def __iter__(self):
  ...     return iter(trees)
  >>> blocks, first = _read(Loader(), size=2)
  >>> [rows["w"].shape for rows, used in blocks]
  [(2, 2), (1, 2)]
"""

from collections.abc import Iterable, Iterator, Sequence
import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_boost._foundation import _arrays, _checks, _masks, _tree_checks, _trees
from optax_boost._methods._dim_reduce import _groups, _pca, _subspace, _trajectory

_OVERSAMPLE = 10


def fit_subspace(
  snapshots: Any,
  components: int,
  *,
  key: jax.Array | int | None = None,
  dtype: jax.typing.DTypeLike = jnp.float32,
  groups: _groups.Plan = None,
) -> _subspace.Subspace:
  r"""Fits the subspace that holds most of the variance of snapshots of the params.

  .. math::
    C = X - \bar{x}, \qquad C C^\top = U \Sigma^2 U^\top, \qquad B = \Sigma_k^{-1} U_k^\top C

  The eigenvectors of the snapshots' m x m Gram matrix give the components; one Rayleigh-Ritz step
  then restores the digits that squaring lost. In float32, components with less than 1e-7 of the
  first one's variance are less exact, and components with less than 1e-10 are rounding errors and
  are refused. Sharded params are not gathered: only matrices of m or k rows and columns cross
  devices.

  Inside ``jit``, snapshots that are not finite are left out instead of refused, and where there are
  fewer directions than `components`, the last rows of the basis are zero.

  Args:
    snapshots: the state of a chain with :func:`record_trajectory`; a stacked tree, whose leaves
      have the snapshots along their first axis; or an iterable of trees. One that can be iterated
      over again, and is not a list or tuple, is read several times in blocks of k + 8 snapshots:
      about three blocks are in memory. Other iterables are held as a whole.
    components: k, the dimensions of the subspace; fewer than there are snapshots. Static. Raising
      it explains more of the gradient, and takes more memory and time.
    key: None: the exact components. A key or an integer seed: components of k + 10 random
      combinations of the snapshots, after one power iteration. That saves the m x m matrix, the
      cost of the exact ones for m in the hundreds, and is as good where variances decay.
    dtype: a floating dtype to store the basis in; computed in float32 or wider. With bfloat16 its
      rows are orthonormal to 3 digits only.
    groups: as in :func:`dim_reduce`: each group of leaves and layers is fitted for itself, as the
      same layers in leaves of their own. None: one group.

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
  blocks, snapshot = _read(snapshots, components + _pca.GUARD)
  leaf_groups = _groups.find_groups(snapshot, groups, "fit_subspace")
  if isinstance(blocks, _Blocks):
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
  blocks: Iterable[Any], key: jax.Array | None, components: int, dtype: Any, groups: Any
) -> tuple[_subspace.Subspace, jax.Array, jax.Array, jax.Array]:
  """The subspace, flags of the snapshots that are not finite, the rank, the sum of squares."""
  centred = _pca.Centred(blocks)
  m, sketch = len(centred.bad), None
  _check_enough(m, components)
  if key is not None:
    shape = (m, min(m, components + _OVERSAMPLE))
    sketch = jax.random.normal(key, shape, _arrays.widest_dtype(centred.mean))
  reader = centred if isinstance(blocks, _Blocks) else list(centred)
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
  """Refuses too few snapshots."""
  if count <= components:
    fewer = f", or ask for at most {count - 1} components" if count > 1 else "; two are the least"
    raise ValueError(
      f"{components} components need at least {components + 1} snapshots, since their mean takes"
      f" one direction away; got {count}. Record more of them{fewer}."
    )


def _check_fit(bad: np.ndarray, rank: int, total: jax.Array, components: int) -> None:
  """Refuses snapshots that are not finite, are too far apart, or differ in too few directions."""
  if len(bad):
    shown = ", ".join(map(str, bad[:8])) + (", ..." if len(bad) > 8 else "")
    raise ValueError(
      f"A subspace can't be fitted to snapshots that are not finite; those with index {shown}"
      " are not. Leave them out."
    )
  if not jnp.isfinite(total):
    raise ValueError(
      f"The variance of the snapshots overflows; got a sum of squares of {total} in"
      f" {total.dtype}. Leave out the snapshots after the training diverged."
    )
  if rank < components:
    fewer = f"Ask for at most {rank} components, or take" if rank else "Take"
    raise ValueError(
      f"{components} components need snapshots that differ in {components} directions; these differ"
      f" in {rank}, the rest is rounding. {fewer} snapshots further apart."
    )


def _read(snapshots: Any, size: int) -> tuple[Any, Any]:
  """Blocks of snapshots, stacked trees with flags of the rows in use; and a single snapshot."""
  if isinstance(snapshots, Iterator):
    snapshots = list(snapshots)
  if _trees.find_states(snapshots, _trajectory.TrajectoryState):
    state = _trajectory.one_trajectory(snapshots, "fit_subspace")
    rows = _checked(state.snapshots)
    used = jnp.arange(len(jax.tree.leaves(rows)[0])) < state.snapshot_count
    return [(rows, used)], _first(rows)
  if any(map(_is_state, jax.tree.leaves(snapshots, is_leaf=_is_state))):
    raise ValueError(
      "`snapshots` must be trees of params, or an optimizer state that has recorded some; got"
      f" {_checks.shorten(jax.tree.structure(snapshots), 200)}. Add"
      " `optax_boost.record_trajectory` to its chain before training."
    )
  # The fields of a named tuple are one tree.
  is_sequence = isinstance(snapshots, list | tuple) and not hasattr(snapshots, "_fields")
  if is_sequence or _is_streamed(snapshots):
    first = next(iter(snapshots), None)
    if first is None:
      raise ValueError("`fit_subspace` needs snapshots; got an empty sequence.")
    if is_sequence:
      return [_stack(snapshots, first)], first
    return _Blocks(snapshots, first, size), first
  shapes = [jnp.shape(x) for x in jax.tree.leaves(_checked(snapshots))]
  if len({shape[:1] for shape in shapes}) > 1 or not shapes[0]:
    raise ValueError(
      "`fit_subspace` needs a stacked tree whose leaves all have the snapshots along their first"
      f" axis; got shapes {shapes}. Pass a list of trees, or an optimizer state that holds a"
      " TrajectoryState."
    )
  return [(jax.tree.map(jnp.asarray, snapshots), np.ones(shapes[0][0], bool))], _first(snapshots)


def _is_state(node: Any) -> bool:
  """Whether a node is a state of optax or of this package; a ``MaskedNode`` hides leaves only."""
  package = type(node).__module__.partition(".")[0]
  state = isinstance(node, tuple) and package in ("optax", "optax_boost")
  return state and not _masks.is_masked(node)


def _is_streamed(snapshots: Any) -> bool:
  """Whether this is an iterable that is not a pytree."""
  if _checks.is_any_array(snapshots) or isinstance(snapshots, str | bytes):
    return False
  iterable = hasattr(snapshots, "__iter__") or hasattr(snapshots, "__getitem__")
  return iterable and jax.tree_util.all_leaves([snapshots])


def _first(rows: Any) -> Any:
  return jax.eval_shape(lambda: jax.tree.map(lambda x: x[0], rows))


@dataclasses.dataclass(frozen=True)
class _Blocks:
  """Reads blocks of snapshots each time that it is iterated over."""

  snapshots: Iterable[Any]
  first: Any
  size: int

  def __iter__(self) -> Iterator[Any]:
    # Not a generator, whose variables would keep the last block in memory.
    trees = iter(self.snapshots)
    blocks = iter(lambda: list(itertools.islice(trees, self.size)), [])
    return map(_stack, blocks, itertools.repeat(self.first), itertools.count(0, self.size))


def _stack(trees: Sequence[Any], first: Any, start: int = 0) -> tuple[Any, np.ndarray]:
  """A block of snapshots that are like the first one; `start` is the number of their first."""
  for index, tree in enumerate(trees, start):
    if not _tree_checks.same_shapes(_checked(tree), first):
      got = _checks.shorten(jax.tree.map(jnp.shape, tree), 200)
      shapes = _checks.shorten(jax.tree.map(jnp.shape, first), 200)
      raise ValueError(
        f"Snapshots must have one tree structure and the same shapes; number {index} has {got}, the"
        f" first one {shapes}. A list or tuple is taken for snapshots: cut a stacked tree that is"
        " one into one tree per snapshot."
      )

  def stack(*leaves: Any) -> jax.Array:
    # NumPy arrays are joined on the host, and moved once.
    on_host = all(isinstance(x, np.ndarray) for x in leaves)
    return jnp.asarray(np.stack(leaves)) if on_host else jnp.stack(leaves)

  return jax.tree.map(stack, *trees), np.ones(len(trees), bool)


def _checked(tree: Any) -> Any:
  """A tree with at least one leaf, all of real floating-point numbers."""
  if not jax.tree.leaves(tree):
    raise ValueError("`fit_subspace` needs snapshots with at least one leaf; got an empty tree.")
  advice = "Leave it out of the snapshots, and put `optax.masked` around `dim_reduce`."
  _tree_checks.check_floating(tree, "fit_subspace", advice)
  return tree

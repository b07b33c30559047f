"""Reads snapshots of the params in blocks.

Snapshots come as an optimizer state, as a stacked tree, as a list of trees, or as an iterable that
loads them one by one, for example from checkpoints. A *block* is a stacked tree of some snapshots,
with a flag for each row that says whether the row is in use, since the optimizer state may have
room for more snapshots than it has taken. `_pca` iterates over the blocks several times, and so
reads an iterable several times. Only a few blocks of an iterable are in memory.

  >>> trees = [{"w": np.array(w)} for w in ([0.0, 0.0], [3.0, 4.0], [6.0, 8.0])]
  >>> [((rows, used),), first] = read(trees, size=2)
  >>> rows["w"].tolist(), used.tolist()
  ([[0.0, 0.0], [3.0, 4.0], [6.0, 8.0]], [True, True, True])

  >>> class Loader:  # can be iterated over again: read in blocks of two
  ...   def __iter__(self):
  ...     return iter(trees)
  >>> blocks, first = read(Loader(), size=2)
  >>> [rows["w"].shape for rows, used in blocks]
  [(2, 2), (1, 2)]
"""

from collections.abc import Iterable, Iterator, Sequence
import dataclasses
import itertools
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost._foundation import _checks, _masks, _tree_checks, _trees, _types
from optax_boost._methods._dim_reduce import _trajectory

# A stacked tree of snapshots, and for each of its rows whether the row is in use.
Block: TypeAlias = tuple[optax.Params, np.ndarray | jax.Array]


def read(snapshots: Any, size: int) -> tuple[Iterable[Block], optax.Params]:
  """Returns the snapshots in blocks, and one snapshot as an example of shapes and dtypes.

  The leaves of the example may be abstract. An iterable that can be read again has blocks of `size`
  snapshots. Snapshots in any other form are a single block.
  """
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
  # A named tuple is not a sequence of snapshots, but a tree.
  is_sequence = isinstance(snapshots, list | tuple) and not hasattr(snapshots, "_fields")
  if is_sequence or _is_streamed(snapshots):
    first = next(iter(snapshots), None)
    if first is None:
      raise ValueError("`fit_subspace` needs snapshots; got an empty sequence.")
    if is_sequence:
      return [_stack(snapshots, first)], first
    return StreamedBlocks(snapshots, first, size), first
  shapes = [jnp.shape(x) for x in jax.tree.leaves(_checked(snapshots))]
  if len({shape[:1] for shape in shapes}) > 1 or not shapes[0]:
    raise ValueError(
      "`fit_subspace` needs a stacked tree whose leaves all have the snapshots along their first"
      f" axis; got shapes {shapes}. Pass a list of trees, or an optimizer state that holds a"
      " TrajectoryState."
    )
  return [(jax.tree.map(jnp.asarray, snapshots), np.ones(shapes[0][0], bool))], _first(snapshots)


def _is_state(node: _types.Tree) -> bool:
  """Returns whether a node is a state of optax or of this package; ``MaskedNode`` doesn't count."""
  package = type(node).__module__.partition(".")[0]
  state = isinstance(node, tuple) and package in ("optax", "optax_boost")
  return state and not _masks.is_masked(node)


def _is_streamed(snapshots: _types.Tree) -> bool:
  """Returns whether the snapshots are an iterable that is neither a pytree nor an array."""
  if _checks.is_any_array(snapshots) or isinstance(snapshots, str | bytes):
    return False
  iterable = hasattr(snapshots, "__iter__") or hasattr(snapshots, "__getitem__")
  return iterable and jax.tree_util.all_leaves([snapshots])


def _first(rows: optax.Params) -> optax.Params:
  """Returns the shapes and dtypes of one snapshot of a stacked tree."""
  return jax.eval_shape(lambda: jax.tree.map(lambda x: x[0], rows))


@dataclasses.dataclass(frozen=True)
class StreamedBlocks:
  """An iterable of blocks of `size` snapshots; each iteration reads the snapshots again."""

  snapshots: Iterable[optax.Params]
  first: optax.Params
  size: int

  def __iter__(self) -> Iterator[Block]:
    # `map` instead of a generator, whose local variables would keep the last block in memory.
    trees = iter(self.snapshots)
    blocks = iter(lambda: list(itertools.islice(trees, self.size)), [])
    return map(_stack, blocks, itertools.repeat(self.first), itertools.count(0, self.size))


def _stack(trees: Sequence[optax.Params], first: optax.Params, start: int = 0) -> Block:
  """Returns a block of the snapshots `trees`; the first of them has the index `start`.

  Raises ValueError, which names an index, if a snapshot differs from `first` in structure or
  shapes.
  """
  for index, tree in enumerate(trees, start):
    if not _tree_checks.same_shapes(_checked(tree), first):
      got = _checks.shorten(jax.tree.map(jnp.shape, tree), 200)
      shapes = _checks.shorten(jax.tree.map(jnp.shape, first), 200)
      raise ValueError(
        f"Snapshots must have one tree structure and the same shapes; number {index} has {got}, the"
        f" first one {shapes}. If a stacked tree is a list or tuple, pass a list of one tree per"
        " snapshot instead."
      )

  def stack(*leaves: jax.typing.ArrayLike) -> jax.Array:
    # NumPy arrays are stacked on the host, so that only one array moves to the device.
    on_host = all(isinstance(x, np.ndarray) for x in leaves)
    return jnp.asarray(np.stack(leaves)) if on_host else jnp.stack(leaves)

  return jax.tree.map(stack, *trees), np.ones(len(trees), bool)


def _checked(tree: _types.SameTree) -> _types.SameTree:
  """Returns `tree`; raises an error if it has no leaf, or a leaf that is not floating-point."""
  if not jax.tree.leaves(tree):
    raise ValueError("`fit_subspace` needs snapshots with at least one leaf; got an empty tree.")
  advice = "Leave it out of the snapshots, and put `optax.masked` around `dim_reduce`."
  _tree_checks.check_floating(tree, "fit_subspace", advice)
  return tree

"""Batches of a race: the same for every method that has the same seed."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
import functools
from typing import Any
from typing import TypeAlias

import jax
import numpy as np

from optax_boost import _base
from optax_boost import _tree

Batches: TypeAlias = Callable[[int], Iterator[Any]]


def batches_of(data: Any, batch_size: int | None) -> Batches:
  """Makes endless batches, by seed, of arrays or of a function from the seed to batches."""
  if callable(data):
    if batch_size is not None:
      raise ValueError(
        "`batch_size` is for data that is a tree of arrays; got"
        f" batch_size={_base.shorten(batch_size)} for a function, whose batches are taken as they"
        " come. Let it make them of that size."
      )
    return lambda seed: _repeated(data, seed)
  examples = _examples(data)
  size = examples if batch_size is None else batch_size
  _base.check_whole_number("batch_size", size, static=True)
  if size > examples:
    raise ValueError(
      f"`batch_size` must be at most the number of examples, {examples}; got {size}."
    )
  if jax.default_backend() == "cpu":
    # NumPy picks examples some ten times faster than JAX does outside of jit.
    data = jax.tree.map(np.asarray, data)
  return lambda seed: _shuffled(data, examples, size, seed)


def _examples(data: Any) -> int:
  leaves = jax.tree.leaves(data)
  if not leaves:
    raise ValueError(
      "`data` must be a tree of arrays, or a function from the seed to batches; got an empty tree."
    )
  for path, leaf in zip(_tree.leaf_paths(data), leaves, strict=True):
    kind = np.asarray(leaf).dtype.kind if not isinstance(leaf, jax.Array) else "f"
    if kind in "OSUMm":
      raise TypeError(
        f"`data` must be arrays of numbers; got {_base.shorten(leaf)} at '{path}'. Encode text and"
        " objects before."
      )
  if not all(np.ndim(leaf) for leaf in leaves):
    raise ValueError("`data` must be arrays with a leading axis of examples; got a scalar.")
  lengths = {path: len(leaf) for path, leaf in zip(_tree.leaf_paths(data), leaves, strict=True)}
  if len(set(lengths.values())) > 1:
    raise ValueError(
      f"`data` must be arrays with one leading axis of examples; got the lengths {lengths}."
    )
  if not len(leaves[0]):
    raise ValueError("`data` must hold at least one example; got arrays of length 0.")
  return len(leaves[0])


@jax.jit
def _take(leaf: jax.Array, chosen: jax.Array) -> jax.Array:
  return leaf[chosen]


def _picked(leaf: Any, chosen: np.ndarray) -> Any:
  return _take(leaf, chosen) if isinstance(leaf, jax.Array) else leaf[chosen]


def _shuffled(data: Any, examples: int, size: int, seed: int) -> Iterator[Any]:
  """Whole batches, shuffled anew for each epoch; what is left over sits out that epoch."""
  rng = np.random.default_rng(seed)
  while True:
    order = rng.permutation(examples)
    for start in range(0, examples - size + 1, size):
      chosen = order[start : start + size]
      yield jax.tree.map(functools.partial(_picked, chosen=chosen), data)


def _repeated(data: Callable[[int], Iterable[Any]], seed: int) -> Iterator[Any]:
  while True:
    batch = None
    batches = data(seed)
    if not isinstance(batches, Iterable):
      raise TypeError(
        "`data` must be a function from the seed to an iterable of batches;"
        f" data({seed}) returned {_base.shorten(batches)}."
      )
    for batch in batches:
      yield batch
    if batch is None:
      raise ValueError(
        f"`data` must be a function from the seed to batches; data({seed}) gave none."
      )

"""Batches of a race: the same for every method that has the same seed."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
import functools
from typing import Any
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from optax_boost import _base
from optax_boost import _tree

# From a seed to endless batches.
Batches: TypeAlias = Callable[[int], Iterator[Any]]


def batches_of(data: Any, batch_size: int | None) -> Batches:
  """Makes batches of a tree of arrays, or of a function from the seed to batches."""
  if callable(data):
    if batch_size is not None:
      raise ValueError(
        "`batch_size` is for data that is a tree of arrays; got"
        f" batch_size={_base.shorten(batch_size)} for a function, whose batches are taken as they"
        " come. Let it make them of that size."
      )
    return functools.partial(_repeated, data, [None])
  examples = _count_examples(data)
  size = examples if batch_size is None else batch_size
  _base.check_whole_number("batch_size", size, static=True)
  if size > examples:
    raise ValueError(
      f"`batch_size` must be at most the number of examples, {examples}; got {size}."
    )
  if jax.default_backend() == "cpu":
    # NumPy picks examples some ten times faster than JAX does outside of jit. It knows no keys.
    data = jax.tree.map(lambda leaf: leaf if _is_key(leaf) else np.asarray(leaf), data)
  return lambda seed: _shuffled(data, examples, size, seed)


def _is_key(leaf: Any) -> bool:
  return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _count_examples(data: Any) -> int:
  # JAX warns of iterators in a tree.
  is_leaf = isinstance(data, Iterator) or jax.tree_util.all_leaves([data])
  is_array_or_text = isinstance(data, str) or hasattr(data, "__array__")
  if is_leaf and isinstance(data, Iterable) and not is_array_or_text:
    raise TypeError(
      "`data` must be a tree of arrays, or a function from the seed to an iterable of batches,"
      f" which every method goes through from its start; got {_base.shorten(data)}. Pass"
      " `lambda seed: loader` for a loader, a generator's function for a generator."
    )
  leaves = dict(zip(_tree.leaf_paths(data), jax.tree.leaves(data), strict=True))
  if not leaves:
    raise ValueError(
      "`data` must be a tree of arrays, or a function from the seed to batches; got an empty tree."
    )
  for path, leaf in leaves.items():
    if not isinstance(leaf, jax.Array) and np.asarray(leaf).dtype.kind in "OSUMm":
      raise TypeError(
        f"`data` must be arrays of numbers; got {_base.shorten(leaf)} at '{path}'. Encode text and"
        " objects before."
      )
    if not np.ndim(leaf):
      raise ValueError("`data` must be arrays with a leading axis of examples; got a scalar.")
  lengths = {path: len(leaf) for path, leaf in leaves.items()}
  examples = next(iter(lengths.values()))
  if len(set(lengths.values())) > 1:
    raise ValueError(
      f"`data` must be arrays with one leading axis of examples; got the lengths {lengths}."
    )
  if not examples:
    raise ValueError("`data` must hold at least one example; got arrays of length 0.")
  return examples


@jax.jit
def _take(leaf: jax.Array, chosen: jax.Array) -> jax.Array:
  return leaf[chosen]


def _pick(data: Any, chosen: np.ndarray) -> Any:
  return jax.tree.map(
    lambda leaf: _take(leaf, chosen) if isinstance(leaf, jax.Array) else leaf[chosen], data
  )


def _shuffled(data: Any, examples: int, size: int, seed: int) -> Iterator[Any]:
  """Whole batches, shuffled anew for each epoch; a remainder sits out that epoch."""
  rng = np.random.default_rng(seed)
  while True:
    order = rng.permutation(examples)
    for start in range(0, examples - size + 1, size):
      yield _pick(data, order[start : start + size])


def _repeated(data: Callable[[int], Iterable[Any]], latest: list[Any], seed: int) -> Iterator[Any]:
  """The batches of a seed without end; `latest` holds what `data` returned last, for any seed."""
  while True:
    batches = data(seed)
    if isinstance(batches, Iterator) and batches is latest[0]:
      raise ValueError(
        "`data` must return batches from their start at each call; data(seed) returned the same"
        f" iterator twice, {_base.shorten(batches)}, of which every method would get a part. Make"
        " it inside of the function."
      )
    latest[0] = batches
    if not isinstance(batches, Iterable):
      raise TypeError(
        "`data` must be a function from the seed to an iterable of batches;"
        f" data({seed}) returned {_base.shorten(batches)}."
      )
    empty = True
    for batch in batches:
      empty = False
      yield batch
    if empty:
      raise ValueError(
        f"`data` must be a function from the seed to batches; data({seed}) gave none."
      )

"""The exact step of SGPerm on the host, in NumPy; its search compiled by numba where there is one.

Only NumPy in here: it runs inside ``jax.pure_callback``, where a call into JAX may wait for the
very computation that waits for the callback.
"""

from collections.abc import Callable
import functools
import importlib.util
from typing import Any
from typing import NamedTuple

import numpy as np

from optax_boost._sgperm import _search


class Subsets(NamedTuple):
  """How each weight vector of a leaf is partitioned in a step; arrays or, in a callback, NumPy's.

  Attributes:
    order: int32. Of shape (vectors, n), each vector's positions after its shuffle; of shape (n,),
      the ranks (by weight, then position) after a shuffle that all vectors share.
    size: scalar int32, how many entries make a subset.
    brackets: (n + 1,), in the dtype of the weights: ``alpha + 1 / k`` by the size k of a subset.
  """

  order: Any
  size: Any
  brackets: Any


def have_numba() -> bool:
  """Whether numba is installed."""
  return importlib.util.find_spec("numba") is not None


@functools.cache
def compiled() -> Callable[..., None]:
  """The search, compiled at its first call and kept on disk where that can be written."""
  import numba

  try:
    return numba.njit(cache=True, nogil=True)(_search.search)
  except RuntimeError:  # There is no folder for the cache.
    return numba.njit(nogil=True)(_search.search)


def permute(
  weights: np.ndarray,
  wishes: np.ndarray,
  subsets: Subsets,
  ranges: np.ndarray,
  *,
  remainder: bool = True,
  compile_search: bool | None = None,
) -> np.ndarray:
  """One exact step for a stack of weight vectors.

  Args:
    weights: (vectors, n).
    wishes: the recommendations, of the same shape.
    subsets: the partition, alike for all or for each vector.
    ranges: (vectors,), the vectors' value ranges in the dtype of the weights.
    remainder: whether the subset that reaches the end of a vector takes part.
    compile_search: whether numba compiles the search. None: if it is installed.

  Returns:
    (vectors, n) int32: for each position the one whose weight it receives.
  """
  rows, n = weights.shape
  # A single subset is in natural order.
  size = min(int(subsets.size), n)
  values = weights.astype(np.promote_types(weights.dtype, np.float32))
  if size == n or subsets.order.ndim == 1:
    position = stable_argsort(values)
    label = np.empty(n, np.int64)
    label[subsets.order if size < n else slice(None)] = np.arange(n) // size
    label = np.broadcast_to(label, (rows, n))
  else:
    place = stable_argsort(np.take_along_axis(values, subsets.order, 1))
    position = np.take_along_axis(subsets.order, place, 1)
    label = place // size
  pieces = -(-n // size)
  row = np.arange(rows)[:, None]
  there = position + row * n
  wanted = wishes.ravel()[there]
  # The negation puts NaN among what takes no part.
  idle = ~(np.abs(wanted) > 0)
  if pieces > 1 and not remainder:
    idle = idle | (label == pieces - 1)
  group = np.where(idle, rows * pieces, row * pieces + label)
  group = group.astype(np.min_scalar_type(rows * pieces)).ravel()
  count = np.bincount(group, minlength=rows * pieces + 1)
  total = len(group) - count[-1]
  entries = np.argsort(group, kind="stable")[:total]
  # What takes no part is dropped below; alike, it would be ties, which sort slowly.
  apart = -1 - np.arange(n, dtype=np.float32)
  by_size = stable_argsort(np.where(idle, apart, np.abs(wanted)))[:, ::-1]
  by_size = (by_size + row * n).ravel()
  by_size = by_size[np.argsort(group[by_size], kind="stable")[:total]]
  slot = np.empty(len(group), np.int64)
  slot[entries] = np.arange(total)
  count = count[:-1].reshape(rows, pieces)
  epsilon = (ranges[:, None] * subsets.brackets[count]).astype(np.float64)
  there = there.ravel()[entries]
  found = _run(
    values.ravel()[there].astype(np.float64),
    (wanted < 0).ravel()[entries],
    slot[by_size],
    np.concatenate([[0], np.cumsum(count)]),
    epsilon.ravel(),
    have_numba() if compile_search is None else compile_search,
  )
  source = np.tile(np.arange(n, dtype=np.int32), (rows, 1)).ravel()
  source[there] = there[found] % n
  return source.reshape(rows, n)


def _run(
  weights: np.ndarray,
  up: np.ndarray,
  order: np.ndarray,
  starts: np.ndarray,
  epsilon: np.ndarray,
  compile_search: bool,
) -> np.ndarray:
  total = len(weights)
  given = (weights, up, order, starts, epsilon)
  if compile_search:
    source = np.arange(total)
    live, seen = np.ones(total, bool), np.full(total, -1)
    path, cursor = np.empty(total, np.int64), np.empty(total, np.int64)
    compiled()(*given, source, source + 1, source - 1, live, seen, path, cursor)
    return source
  # Ready-made lists cost a fraction of converted arrays.
  found, above, below = (list(range(start, total + start)) for start in (0, 1, -1))
  lists: list[Any] = [*(x.tolist() for x in given), found, above, below, [True] * total]
  _search.search(*lists, *([-1] * total for _ in range(3)))
  return np.asarray(found, np.int64)


def stable_argsort(values: np.ndarray) -> np.ndarray:
  """A stable argsort of each row.

  NumPy's unstable sort is several times faster, and what it leaves to do for equal values, a second
  one does.

  Args:
    values: (rows, n), without NaN.

  Returns:
    (rows, n) indices.
  """
  n = values.shape[1]
  order = np.argsort(values, axis=1)
  ordered = np.take_along_axis(values, order, 1)
  tied = np.flatnonzero(np.any(ordered[:, 1:] == ordered[:, :-1], axis=1))
  if len(tied):
    group = np.zeros((len(tied), n), np.int64)
    np.cumsum(ordered[tied, 1:] != ordered[tied, :-1], axis=1, out=group[:, 1:])
    order[tied] = np.sort(group * n + order[tied], axis=1) - group * n
  return order

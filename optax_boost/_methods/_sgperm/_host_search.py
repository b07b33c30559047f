"""The exact step of SGPerm on the host, in NumPy; numba, if installed, compiles the search.

This module must not call JAX: it runs inside ``jax.pure_callback``, where a call into JAX may wait
for the computation that waits for the callback.
"""

from collections.abc import Callable
import functools
import importlib.util
from typing import Any, NamedTuple, TypeAlias

import numpy as np

# A JAX array or, in the callback, a NumPy array.
Array: TypeAlias = Any
# A list or, for numba, a NumPy array.
Entries: TypeAlias = Any


class Work(NamedTuple):
  """The inputs of the exact step for one leaf, or for joined leaves."""

  weights: Array  # (n, vectors), before the step
  momentum: Array  # (n, vectors), the recommendations
  # int32, the entries of a vector in shuffled order: the first `size` are a subset, the next `size`
  # another, and so on. With shape (n, vectors), a column holds positions in its vector. With shape
  # (n,), all vectors share one order of ranks: rank r means the entry with the r-th smallest
  # weight, and equal weights are ranked by position.
  order: Array
  size: Array  # scalar int32, how many entries make a subset
  # (n + 1,), in the dtype of the weights: `alpha + 1 / k` for each number k of recommendations in a
  # subset.
  brackets: Array


def have_numba() -> bool:
  """Returns whether numba is installed."""
  return importlib.util.find_spec("numba") is not None


@functools.cache
def _compiled() -> Callable[..., None]:
  """Returns `_search`, compiled by numba and cached on disk if a folder for this is writable."""
  import numba

  try:
    return numba.njit(cache=True, nogil=True)(_search)
  except RuntimeError:  # No folder for the cache is writable.
    return numba.njit(nogil=True)(_search)


def permute(work: Work, *, remainder: bool) -> np.ndarray:
  """Makes one exact step; returns for each position the position whose weight it receives.

  The result is int32 (n, vectors). `remainder` says whether the last subset of a vector, which may
  be smaller, takes part.
  """
  weights = np.ascontiguousarray(work.weights.T)
  momentum = np.ascontiguousarray(work.momentum.T)
  rows, n = weights.shape
  size = min(int(work.size), n)
  values = weights.astype(np.promote_types(weights.dtype, np.float32))
  order = work.order.T
  # A single subset is not shuffled.
  if size == n or order.ndim == 1:
    position = _stable_argsort(values)
    label = np.empty(n, np.int64)
    label[order] = np.arange(n) // size
    label = np.broadcast_to(label, (rows, n))
  else:
    place = _stable_argsort(np.take_along_axis(values, order, 1))
    position = np.take_along_axis(order, place, 1)
    label = place // size
  subsets = -(-n // size)
  row = np.arange(rows)[:, None]
  flat = position + row * n
  recommended = momentum.ravel()[flat]
  # Entries without a recommendation are idle; NaN counts as no recommendation.
  idle = ~(np.abs(recommended) > 0)
  if subsets > 1 and not remainder:
    idle = idle | (label == subsets - 1)
  group = np.where(idle, rows * subsets, row * subsets + label)
  group = group.astype(np.min_scalar_type(rows * subsets)).ravel()
  count = np.bincount(group, minlength=rows * subsets + 1)[:-1]
  total = np.sum(count)
  entries = np.argsort(group, kind="stable")[:total]
  # Idle entries are dropped after this sort. They get distinct sizes, since equal sizes would make
  # the sort slow.
  distinct = -1 - np.arange(n, dtype=np.float32)
  by_size = _stable_argsort(np.where(idle, distinct, np.abs(recommended)))[:, ::-1]
  by_size = (by_size + row * n).ravel()
  by_size = by_size[np.argsort(group[by_size], kind="stable")[:total]]
  slot = np.empty(len(group), np.int64)
  slot[entries] = np.arange(total)
  ranges = np.max(weights, axis=1) - np.min(weights, axis=1)
  epsilon = ranges[:, None] * work.brackets[count.reshape(rows, subsets)]
  flat = flat.ravel()[entries]
  received = _run_search(
    values.ravel()[flat].astype(np.float64),
    (recommended < 0).ravel()[entries],
    slot[by_size],
    np.concatenate([[0], np.cumsum(count)]),
    epsilon.astype(np.float64).ravel(),
  )
  source = np.tile(np.arange(n, dtype=np.int32), rows)
  source[flat] = flat[received] % n
  return source.reshape(rows, n).T


def _run_search(weights: np.ndarray, *arrays: np.ndarray) -> np.ndarray:
  """Runs `_search`; returns for each entry the entry whose weight it receives.

  `weights` and `arrays` are the first five arguments of `_search`. If numba is installed, the
  search is compiled.
  """
  total = len(weights)
  if have_numba():
    links = np.arange(total)
    live, seen = np.ones(total, bool), np.full(total, -1)
    path, cursor = np.empty(total, np.int64), np.empty(total, np.int64)
    _compiled()(weights, *arrays, links, links + 1, links - 1, live, seen, path, cursor)
    return links
  # Plain Python reads lists much faster than arrays.
  lists: list[Entries] = [x.tolist() for x in (weights, *arrays)]
  source = list(range(total))
  lists += [source, list(range(1, total + 1)), list(range(-1, total - 1))]
  lists += [[True] * total, [-1] * total, [-1] * total, [-1] * total]
  _search(*lists)
  return np.asarray(source, np.int64)


def _stable_argsort(values: np.ndarray) -> np.ndarray:
  """Returns the stable argsort of each row of `values`, which have no NaN."""
  n = values.shape[1]
  # NumPy's unstable sort is several times faster than its stable sort, so rows are sorted unstably,
  # and a second sort puts the indices of equal values in order.
  order = np.argsort(values, axis=1)
  ordered = np.take_along_axis(values, order, 1)
  tied = np.flatnonzero(np.any(ordered[:, 1:] == ordered[:, :-1], axis=1))
  if len(tied):
    group = np.zeros((len(tied), n), np.int64)
    np.cumsum(ordered[tied, 1:] != ordered[tied, :-1], axis=1, out=group[:, 1:])
    order[tied] = np.sort(group * n + order[tied], axis=1) - group * n
  return order


# This function only indexes, compares and adds, since it must run both in plain Python on lists and
# compiled by numba on arrays.
def _search(
  weights: Entries,  # float64: their sums with epsilons are compared in float64
  up: Entries,  # whether the entry wants to increase; if not, it wants to decrease
  order: Entries,  # the entries of each subset, the largest recommendation first
  starts: Entries,  # where each subset starts, and where the last one ends
  epsilon: Entries,  # how far a weight of each subset may move, float64
  source: Entries,  # the result: the entry whose weight each entry receives; at first itself
  above: Entries,  # for each live entry the next live one; at first the next entry
  below: Entries,  # for each live entry the live one before it; at first the entry before it
  live: Entries,  # whether an entry may still be in a cycle
  seen: Entries,  # the last source whose search visited the entry; at first -1
  path: Entries,  # scratch, as is `cursor`
  cursor: Entries,
) -> None:
  """Finds the cycles of all subsets, and writes to `source` whose weight each entry receives.

  Entries are numbered through all subsets. The entries of a subset are sorted by rising weight.
  """
  for group in range(len(epsilon)):
    first, last = starts[group], starts[group + 1]
    reach = epsilon[group]
    for t in range(first, last):
      s = order[t]
      if not live[s]:
        continue
      w = weights[s]
      tied, closes = False, False
      link = above if up[s] else below
      # Goes along the links from s, while weights are within reach, to the nearest entry that wants
      # the opposite of s. All entries on the way want the same as s.
      end, step = s, link[s]
      while first <= step < last:
        if not (weights[step] - reach <= w if up[s] else w < weights[step] + reach):
          break
        tied = tied or weights[step] == weights[end]
        end = step
        if up[step] != up[s]:
          closes = weights[step] < w + reach if up[s] else w - reach <= weights[step]
          closes = closes or step != link[s]
          break
        step = link[step]
      length = 1
      path[0] = s
      if closes and not tied:
        while path[length - 1] != end:
          path[length] = link[path[length - 1]]
          length += 1
      elif closes:
        # An entry that wants to decrease cannot receive an equal weight, so the path may turn back.
        cursor[s], seen[s] = link[s], s
        while length > 0:
          i = path[length - 1]
          j = cursor[i]
          if up[i]:
            while j < last and j != s and seen[j] == s:
              j = above[j]
            inside = j < last and weights[j] < weights[i] + reach
          else:
            while j >= first and (weights[j] == weights[i] or (j != s and seen[j] == s)):
              j = below[j]
            inside = j >= first and weights[i] - reach <= weights[j]
          if not inside:
            length -= 1
            continue
          if j == s:
            break
          cursor[i] = above[j] if up[i] else below[j]
          cursor[j] = above[j] if up[j] else below[j]
          seen[j] = s
          path[length] = j
          length += 1
        length = max(length, 1)
      for k in range(length):
        i = path[k]
        source[i] = path[k + 1] if k + 1 < length else s
        live[i] = False
        lower, upper = below[i], above[i]
        if lower >= first:
          above[lower] = upper
        if upper < last:
          below[upper] = lower

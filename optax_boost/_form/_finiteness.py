"""The rule of finiteness for every method: an entry is bad if it is NaN or infinite.

:func:`finite_entries` is the rule's one definition. The other functions tell whether it holds for
all entries of a tree. Each entry becomes zero if it is finite, and NaN otherwise, so that the sum
tells exactly, in one pass over memory, whether a whole tree is finite.

Two proofs are cheaper, and rest on the definition: an entry whose square is finite is finite, and
if the largest magnitude of an array is finite, all of its entries are. A stricter definition keeps
them true if it bounds the magnitude, and passes all entries whose square is finite.
"""

import collections
from collections.abc import Callable, Sequence
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from optax_boost._foundation import _arrays, _conditionals, _placement

# XLA 1: of params with fewer entries than `_SMALL`, `_TOGETHER` are checked in one loop, which
# compiles in the square of their number.
_SMALL = 8192
_TOGETHER = 8
# XLA 12: entries that are summed before the next sums begin, as XLA for CPUs stores summands.
_LINK = 2**19


def finite_entries(x: jax.Array) -> jax.Array:
  """Which entries of a gradient, param or state are finite, bool of the shape of `x`."""
  return jnp.isfinite(x)


def all_finite(
  tree: Any, divisor: Any = 1.0, divide: Callable[[Any], Any] = lambda tree: tree
) -> jax.Array:
  """Whether every entry of ``divide(tree)``, a tree divided by a number, is finite.

  A finite sum of squares proves it, and XLA for CPUs computes the sum without storing anything.
  Only if the squares overflow, every entry is checked, in a loop. The inputs of a loop are stored,
  so `tree` should be one that is stored anyway.
  """
  tree = jax.lax.stop_gradient(tree)
  squares = _arrays.sum_squares_of_tree(tree).astype(jnp.float32) / divisor / divisor
  return _unless_proven(jnp.isfinite(squares), lambda: _every_entry_is_finite(divide(tree)))


def none_lost(new: Any, old: Any, new_state: Any = (), old_state: Any = ()) -> jax.Array:
  """Whether every entry that is finite in `old` is finite in `new`, and in the state likewise.

  An entry may be infinite in `old` by intention, as the first best loss of a search: it may stay
  infinite or become finite, but not NaN. Integers are always finite. A param's new value and its
  new moments are computed from the same arrays, so one loop checks both and reads the arrays once.
  """
  param_pairs, state_pairs = _inexact_pairs(new, old), _inexact_pairs(new_state, old_state)
  return _is_sound(_by_param(param_pairs, state_pairs))


def sum_is_finite(total: Any, addend: Any) -> jax.Array:
  """Whether ``total + addend`` is finite in all entries; a scalar bool.

  `total` is a sum that passed before. If the squares of the addend don't overflow, its entries are
  too small to carry a finite sum beyond the range, and `total` need not be read.
  """
  total, addend = jax.lax.stop_gradient((total, addend))

  def check() -> jax.Array:
    sums = jax.tree.map(lambda t, a: t + a.astype(t.dtype), total, addend)
    return _every_entry_is_finite(sums)

  if not all(_has_wide_range(leaf.dtype) for leaf in jax.tree.leaves(total)):
    return check()
  return _unless_proven(jnp.isfinite(_arrays.sum_squares_of_tree(addend)), check)


def _every_entry_is_finite(tree: Any) -> jax.Array:
  groups = [leaves for (leaves,) in _arrays.stackable_leaves(tree)]
  return _is_sound([[(leaf, None) for leaf in leaves] for leaves in groups])


def _unless_proven(proven: jax.Array, check: Callable[[], jax.Array]) -> jax.Array:
  """Makes a check unless its outcome is proven to be True."""
  # XLA 11: without the barrier the check would run in every step on TPUs.
  _, holds = _conditionals.once_if(
    ~proven, lambda _: (jax.lax.optimization_barrier(check()),), proven
  )
  return holds


def _has_wide_range(dtype: Any) -> bool:
  """Whether a dtype has at least float32's range, unlike float16."""
  return float(jnp.finfo(dtype).max) > 1e38


def _inexact_pairs(new: Any, old: Any) -> list[tuple[Any, Any]]:
  pairs = zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)
  return [pair for pair in pairs if jnp.issubdtype(jnp.result_type(pair[0]), jnp.inexact)]


def _by_param(
  param_pairs: Sequence[tuple[Any, Any]], state_pairs: Sequence[tuple[Any, Any]]
) -> list[list[tuple[Any, Any]]]:
  """Groups pairs of one shape: the pairs of a param, or of a few small params, are one group."""

  def kind(pair: tuple[Any, Any]) -> Any:
    array = jax.typeof(pair[0])
    return array.shape, _arrays.accumulator_dtype(array.dtype), array.sharding

  by_kind: dict[Any, list[list[tuple[Any, Any]]]] = {}
  for pair in param_pairs:
    by_kind.setdefault(kind(pair), []).append([pair])
  seen: collections.Counter[Any] = collections.Counter()
  for pair in state_pairs:
    params = by_kind.setdefault(kind(pair), [[]])
    # A tree of moments has the params' leaves in the params' order.
    params[seen[kind(pair)] % len(params)].append(pair)
    seen[kind(pair)] += 1
  groups = []
  for params in by_kind.values():
    together = _TOGETHER if math.prod(jnp.shape(params[0][0][0])) < _SMALL else 1
    for start in range(0, len(params), together):
      groups.append([pair for param in params[start : start + together] for pair in param])
  return groups


def _is_sound(groups: Sequence[Sequence[tuple[Any, Any]]]) -> jax.Array:
  """Whether no entry of pairs ``(new, old)`` is newly bad; with `old` None, whether none is bad."""
  groups = jax.lax.stop_gradient(groups)
  return jax.lax.platform_dependent(groups, cpu=_sums_in_links, default=_sums)


def _sums(groups: Sequence[Sequence[tuple[Any, Any]]]) -> jax.Array:
  """Whether all sums are finite, one for each array.

  XLA's compilers for GPUs and TPUs compute them without temporaries (`make devices`).
  """
  zero = jnp.zeros([], jnp.float32)
  products = [_zero_or_nan(new, old, zero) for group in groups for new, old in group]
  return jnp.isfinite(_total([jnp.sum(product) for product in products]))


def _sums_in_links(groups: Sequence[Sequence[tuple[Any, Any]]]) -> jax.Array:
  """Whether all sums are finite, one for each group, in links of :data:`_LINK` entries or more.

  XLA for CPUs stores the products that it sums (XLA 12). With links it stores a part of them at a
  time, which stays in the cache.
  """
  sums: list[jax.Array] = []
  link, entries = jnp.zeros([], jnp.float32), 0
  for group in groups:
    # The link is zero if all before it is finite; otherwise the answer is known.
    products = [_zero_or_nan(new, old, link) for new, old in group]
    sums.append(jnp.sum(functools.reduce(jnp.add, products)))
    entries += sum(product.size for product in products)
    if entries >= _LINK:
      link, entries = _total(sums), 0
  return jnp.isfinite(_total(sums))


def _zero_or_nan(new: jax.Array, old: jax.Array | None, link: jax.Array) -> jax.Array:
  """Zero for each finite entry, NaN for others; also zero for entries that may be bad.

  These are the entries that were bad before and did not turn into NaN.
  """
  x = _placement.in_device_memory(new) + link.astype(new.dtype)
  good = finite_entries(x)
  if old is not None:
    old = _placement.in_device_memory(old)
    turned_nan = jnp.isnan(x) & ~jnp.isnan(old)
    good |= ~(finite_entries(old) | turned_nan)
  return jnp.where(good, jnp.zeros([], _arrays.accumulator_dtype(x.dtype)).real, jnp.nan)


def _total(sums: Sequence[jax.Array]) -> jax.Array:
  zero = jnp.zeros([], jnp.float32)
  return jnp.sum(jnp.stack([zero, *(one.astype(jnp.float32) for one in sums)]))

"""Checks that all entries of trees are finite, by the rule of :func:`finite_entries`.

A check replaces good entries by zero and bad entries by NaN. So one sum, in one pass over memory,
is finite exactly if all entries are good. Two cheaper proofs rest on the rule: if an entry's square
is finite, so is the entry; if the largest magnitude in an array is finite, so are all entries. A
stricter rule must still accept every entry whose square is finite, or these proofs fail.
"""

import collections
from collections.abc import Callable, Sequence
import functools
import math
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

from optax_boost._foundation import _arrays, _conditionals, _placement, _types

# XLA 1: one loop checks `_TOGETHER` params, if each has fewer than `_SMALL` entries. The number is
# small, since the time to compile a loop grows with the square of the number of its params.
_SMALL = 8192
_TOGETHER = 8
# XLA 12: XLA for CPUs stores the terms of a sum. So the entries are summed in links, which are
# parts of at least this number of entries. The sum of a link is finished before the entries of the
# next link are read.
_LINK = 2**19

# A new array and the old array that it replaces, or None if there is no old array.
_Pair: TypeAlias = tuple[jax.Array, jax.Array | None]


def finite_entries(x: jax.Array) -> jax.Array:
  """Returns for each entry of a gradient, param or state whether it is neither NaN nor infinite."""
  return jnp.isfinite(x)


def all_finite(
  tree: _types.SameTree,
  divisor: jax.typing.ArrayLike = 1.0,
  divide: Callable[[_types.SameTree], _types.SameTree] = lambda tree: tree,
) -> _types.BoolScalar:
  """Returns whether all entries of ``divide(tree)`` are finite; `divide` divides by `divisor`.

  First, the squares of the entries of `tree` are summed, and the sum is divided by `divisor` twice.
  If the result is finite, all entries are finite. XLA for CPUs stores nothing for this sum. Only if
  the result is not finite, a loop checks every entry of ``divide(tree)``. XLA stores the loop's
  input, which should be stored anyway.
  """
  tree = jax.lax.stop_gradient(tree)
  squares = _arrays.sum_squares_of_tree(tree).astype(jnp.float32) / divisor / divisor
  return _unless_proven(jnp.isfinite(squares), lambda: _every_entry_is_finite(divide(tree)))


def none_lost(
  new: _types.Tree,
  old: _types.Tree,
  new_state: optax.OptState = (),
  old_state: optax.OptState = (),
) -> _types.BoolScalar:
  """Returns whether each entry that is finite in an old tree is finite in the new tree, too.

  An infinite entry of an old tree, such as the initial best loss of a search, must not become NaN.
  One loop checks a param and its moments, since XLA computes them from the same arrays.
  """
  param_pairs, state_pairs = _inexact_pairs(new, old), _inexact_pairs(new_state, old_state)
  return _is_sound(_group_by_param(param_pairs, state_pairs))


def sum_is_finite(total: _types.Tree, addend: _types.Tree) -> _types.BoolScalar:
  """Returns whether all entries of ``total + addend`` are finite; `total` must be finite.

  If the sum of the addend's squares is finite, its entries are too small to make the sum overflow.
  Then `total` is not read.
  """
  total, addend = jax.lax.stop_gradient((total, addend))

  def check() -> _types.BoolScalar:
    sums = jax.tree.map(lambda t, a: t + a.astype(t.dtype), total, addend)
    return _every_entry_is_finite(sums)

  if not all(_has_wide_range(leaf.dtype) for leaf in jax.tree.leaves(total)):
    return check()
  return _unless_proven(jnp.isfinite(_arrays.sum_squares_of_tree(addend)), check)


def _every_entry_is_finite(tree: _types.Tree) -> _types.BoolScalar:
  groups = [leaves for (leaves,) in _arrays.chunk_small_leaves(tree)]
  return _is_sound([[(leaf, None) for leaf in leaves] for leaves in groups])


def _unless_proven(
  proven: _types.BoolScalar, check: Callable[[], _types.BoolScalar]
) -> _types.BoolScalar:
  """Returns True if `proven`, else ``check()``."""
  # XLA 11: without the barrier, TPUs would run the check in every step, even if `proven`.
  _, holds = _conditionals.once_if(
    ~proven, lambda _: (jax.lax.optimization_barrier(check()),), proven
  )
  return holds


def _has_wide_range(dtype: _types.Dtype) -> bool:
  """Returns whether a dtype has at least the range of float32."""
  return float(jnp.finfo(dtype).max) > 1e38


def _inexact_pairs(new: _types.Tree, old: _types.Tree) -> list[_Pair]:
  """Returns the pairs ``(new, old)`` of leaves, but no integers, since these are always finite."""
  pairs = zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)
  return [pair for pair in pairs if jnp.issubdtype(jnp.result_type(pair[0]), jnp.inexact)]


def _group_by_param(
  param_pairs: Sequence[_Pair], state_pairs: Sequence[_Pair]
) -> list[list[_Pair]]:
  """Returns groups of pairs, each for one loop: a param with its moments, or a few small params."""

  def kind(pair: _Pair) -> tuple[Any, ...]:
    array = jax.typeof(pair[0])
    return array.shape, _arrays.accumulator_dtype(array.dtype), array.sharding

  by_kind: dict[Any, list[list[_Pair]]] = {}
  for pair in param_pairs:
    by_kind.setdefault(kind(pair), []).append([pair])
  seen: collections.Counter[Any] = collections.Counter()
  for pair in state_pairs:
    params = by_kind.setdefault(kind(pair), [[]])
    # Moments are trees like the params. So the state has the pairs of a kind in the order of the
    # params of this kind, first for one tree of moments, then for the next.
    params[seen[kind(pair)] % len(params)].append(pair)
    seen[kind(pair)] += 1
  groups = []
  for params in by_kind.values():
    together = _TOGETHER if math.prod(jnp.shape(params[0][0][0])) < _SMALL else 1
    for start in range(0, len(params), together):
      groups.append([pair for param in params[start : start + together] for pair in param])
  return groups


def _is_sound(groups: Sequence[Sequence[_Pair]]) -> _types.BoolScalar:
  """Returns whether no pair ``(new, old)`` has a newly bad entry (:func:`_zero_or_nan`)."""
  groups = jax.lax.stop_gradient(groups)
  return jax.lax.platform_dependent(groups, cpu=_sums_in_links, default=_sums)


def _sums(groups: Sequence[Sequence[_Pair]]) -> _types.BoolScalar:
  """Computes :func:`_is_sound` on GPUs and TPUs, where no terms are stored (`make devices`)."""
  zero = jnp.zeros([], jnp.float32)
  products = [_zero_or_nan(new, old, zero) for group in groups for new, old in group]
  return jnp.isfinite(_total([jnp.sum(product) for product in products]))


def _sums_in_links(groups: Sequence[Sequence[_Pair]]) -> _types.BoolScalar:
  """Computes :func:`_is_sound` on CPUs, where XLA stores the zeros and NaNs that it sums (XLA 12).

  Each link of at least `_LINK` entries depends on the sums of the link before, so that XLA stores
  the terms of one link at a time. They fit into the cache.
  """
  sums: list[jax.Array] = []
  link, entries = jnp.zeros([], jnp.float32), 0
  for group in groups:
    # `link` is the sum over all earlier links: zero, or NaN if they had a newly bad entry. Adding
    # `link` to each entry makes this group wait for the earlier links. If `link` is NaN, the result
    # is False.
    products = [_zero_or_nan(new, old, link) for new, old in group]
    sums.append(jnp.sum(functools.reduce(jnp.add, products)))
    entries += sum(product.size for product in products)
    if entries >= _LINK:
      link, entries = _total(sums), 0
  return jnp.isfinite(_total(sums))


def _zero_or_nan(new: jax.Array, old: jax.Array | None, link: jax.Array) -> jax.Array:
  """Returns NaN in entries of `new` that are newly bad, else zero.

  A bad entry is newly bad if it was finite in `old`, or if it is NaN and was infinite in `old`.
  Without `old`, every bad entry is newly bad. `link`, zero or NaN, is first added to each entry, so
  that the result depends on the sum of earlier links (:func:`_sums_in_links`).
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

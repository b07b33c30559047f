r"""The exact step of SGPerm on the device.

All subsets of all vectors advance together: a *lane* is a subset of a vector, and in turn t
each lane tries its source number t. Shapes depend on the smallest and the largest size that a
subset may ever have, not on its size in this step, so that nothing is compiled again while lamda
grows.

  n, m     entries of a vector, vectors
  P        most lanes of a vector
  W        words of 32 bits that hold a set of entries of a lane: entry 32 w + b is bit b of word w
  base     (P, 1), where a lane starts: its entries follow, by rising weight

Each source looks for the nearest live entry of the other direction in a few words of bits; each
cycle leaves a pair of links. The links of entries in a cycle freeze, and in the end tell which
weight each receives.
"""

import functools
import itertools
import math
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp

from optax_boost import _arrays
from optax_boost._sgperm import _host
from optax_boost._sgperm import _sorting

# Words of a vector in all lanes that are not worth a second program; and the most programs.
_FEW_WORDS, _BANDS = 64, 4


@functools.partial(jax.jit, static_argnames=("sizes", "remainder"))
def permute(work: _host.Work, *, sizes: tuple[int, int], remainder: bool) -> jax.Array:
  """One exact step, as on the host; `sizes`: the least and the largest of a subset, ever."""
  # Sets (W, P, m) meet flags (P, m) below. Users who forbid this forbid it to their own arrays.
  with jax.numpy_rank_promotion("allow"):
    return _permute(work, sizes, remainder)


def _permute(work: _host.Work, sizes: tuple[int, int], remainder: bool) -> jax.Array:
  n = work.weights.shape[0]
  size = jnp.minimum(work.size, n)
  position = _arranged(work.weights, work.order, size)
  values = _sorting.gather(work.weights, position)
  wanted = _sorting.gather(work.momentum, position)
  segment = jnp.arange(n, dtype=jnp.int32) // size
  pieces = -(-n // size)
  # The negation makes NaN idle.
  idle = jnp.logical_not(jnp.abs(wanted) > 0)
  if not remainder:
    idle |= ((pieces > 1) & (segment == pieces - 1))[:, None]
  lanes = -(-n // sizes[0])
  order = _by_size(jnp.where(idle, 0, jnp.abs(wanted)), segment, lanes)
  up, down = (wanted < 0) & ~idle, (wanted > 0) & ~idle

  def search(least: int, most: int) -> jax.Array:
    lanes, words = -(-n // least), -(-most // 32)
    found = _Search(values, up, down, order, size, lanes, words)
    return found.run(_ranges(work.weights), work.brackets)

  edges = _edges(n, *sizes)
  bands = [functools.partial(search, *band) for band in itertools.pairwise(edges)]
  # The dtype of the sizes: a list without entries would be of floats.
  band = jnp.searchsorted(jnp.array(edges[1:-1], size.dtype), size)
  received = jax.lax.switch(band, bands)
  source = _sorting.gather(position, received)
  return _sorting.scatter(jnp.zeros_like(position), position, source)


def _edges(n: int, least: int, most: int) -> list[int]:
  """Cuts the sizes of subsets into bands, each of which has a search of its own shapes.

  Small subsets need many lanes and large ones many words; at once they take several times as long.
  """
  small = -(-n // least) * -(-most // 32) <= _FEW_WORDS
  bands = 1 if small else min(_BANDS, max(1, math.ceil(math.log(most / least, 1.5))))
  return [round(least * (most / least) ** (k / bands)) for k in range(bands + 1)]


def _arranged(weights: jax.Array, order: jax.Array, size: jax.Array) -> jax.Array:
  """Positions, subset after subset, each by rising weight; equal weights in the subset's order."""
  whole = size == len(weights)
  if order.ndim == 1:
    label = jnp.where(whole, 0, _sorting.inverse(order) // size)
    return _sorting.argsort(weights)[_sorting.within_groups(label, jnp.arange(len(weights)))]
  rows = jax.lax.broadcasted_iota(jnp.int32, weights.shape, 0)
  # A single subset is in natural order.
  order = jnp.where(whole, rows, order)
  place = _sorting.argsort(_sorting.gather(weights, order))
  index = _sorting.within_groups(place // size, rows)
  return _sorting.gather(_sorting.gather(order, place), index)


def _ranges(weights: jax.Array) -> jax.Array:
  """The value range of each vector, rounded to the dtype of the weights; no step changes it."""
  spread = jnp.max(weights, axis=0) - jnp.min(weights, axis=0)
  return _rounded(spread, weights.dtype)


def _rounded(x: jax.Array, dtype: Any) -> jax.Array:
  """Rounds to a dtype. XLA may leave out a cast to the dtype and back (XLA 18)."""
  info: Any = jnp.finfo(dtype)
  return jax.lax.reduce_precision(x, int(info.nexp), int(info.nmant))


def _by_size(sizes: jax.Array, segment: jax.Array, lanes: int) -> jax.Array:
  """Each segment's entries by falling size, of equal ones the last first."""
  high = jnp.broadcast_to(jnp.flip(segment, 0)[:, None], sizes.shape).astype(jnp.uint32)
  index = _sorting.argsort(jnp.flip(-sizes, 0), high, (lanes - 1).bit_length())
  return sizes.shape[0] - 1 - index


def _gather(x: jax.Array, index: jax.Array) -> jax.Array:
  """x[index] in each column; out of bounds the nearest entry."""
  return jnp.take_along_axis(x, index, axis=0, mode="clip")


def _less(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
  """Whether x < a + b as in float64: the sum's exact error decides what its rounding left open."""
  total = a + b
  if total.dtype == jnp.float64:
    return x < total
  part = total - a
  error = (a - (total - part)) + (b - part)
  return (x < total) | ((x == total) & (error > 0))


def _some(members: jax.Array) -> jax.Array:
  """Whether a set has members."""
  return jnp.any(members != 0, axis=0)


def _nearest(members: jax.Array, up: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Whether a set has members; and the smallest (where `up`) or the largest, else 0."""
  first = jnp.arange(members.shape[0], dtype=jnp.int32) * 32
  first = first.reshape((-1,) + (1,) * up.ndim)
  lowest = jax.lax.population_count((members & -members) - 1)
  highest = 31 - jax.lax.clz(members)
  number = first + jnp.where(up, lowest, highest).astype(jnp.int32)
  none = -(1 << 30)
  best = jnp.max(jnp.where(members == 0, none, jnp.where(up, -number, number)), axis=0)
  exists = best != none
  return exists, jnp.where(exists, jnp.where(up, -best, best), 0)


class _Carry(NamedTuple):
  """The arrays that change from turn to turn."""

  up: jax.Array  # (W, P, m), the live entries that want to increase
  down: jax.Array  # (W, P, m), the live ones that want to decrease
  above: jax.Array  # (n, m), the next live entry
  below: jax.Array  # (n, m), the last live entry
  given: jax.Array  # (n, m), the entry whose weight comes here, where links do not say it, or -1
  parent: jax.Array  # (n, m), scratch of the general search


class _Walk(NamedTuple):
  """A general search under way."""

  carry: _Carry
  mode: jax.Array  # (P, m): 0 at rest, 1 searching, 2 removing the cycle
  entry: jax.Array  # (P, m), the current entry
  visited: jax.Array  # (W, P, m)
  path: jax.Array  # (W, P, m)


class _Search:
  """The cycle search of all lanes."""

  def __init__(
    self,
    values: jax.Array,
    up: jax.Array,
    down: jax.Array,
    order: jax.Array,
    size: jax.Array,
    lanes: int,
    words: int,
  ) -> None:
    self.n, self.m = values.shape
    self.words = words
    self.order, self.is_up, self.is_down = order, up, down
    self.base = (jnp.arange(lanes, dtype=jnp.int32) * size)[:, None]
    self.end = jnp.minimum(self.base + size, self.n)
    self.dtype = values.dtype
    self.values = _arrays.widen(values)
    tie = jnp.concatenate([jnp.zeros_like(up[:1]), values[1:] == values[:-1]])
    self.start_up, self.start_down, self.ties = self._sets([up, down, tie], size)
    # The first entry of a lane is tied with nothing before it.
    self.ties &= ~self._at(jnp.zeros((lanes, self.m), jnp.int32))

  def _sets(self, flags: list[jax.Array], size: jax.Array) -> list[jax.Array]:
    """Flags (n, m) as sets (W, P, m)."""
    inner = jnp.arange(self.words * 32, dtype=jnp.int32).reshape(self.words, 32, 1)
    row = self.base[:, 0] + inner
    inside = ((inner < size) & (row < self.n))[..., None]
    packed = sum(flag.astype(jnp.uint32) << k for k, flag in enumerate(flags))
    rows = jnp.where(inside, jnp.asarray(packed).at[row].get(mode="clip"), 0)
    bit = jnp.arange(32, dtype=jnp.uint32).reshape(1, 32, 1, 1)
    return [jnp.sum(((rows >> k) & 1) << bit, axis=1, dtype=jnp.uint32) for k in range(len(flags))]

  def run(self, ranges: jax.Array, brackets: jax.Array) -> jax.Array:
    """For each entry the one whose weight it receives."""
    live = jax.lax.population_count(self.start_up | self.start_down)
    count = jnp.sum(live, axis=0, dtype=jnp.int32)
    dtype = _arrays.accumulator_dtype(self.dtype)
    product = ranges.astype(dtype) * brackets.astype(dtype)[count]
    # XLA 18: rounded here, as the rounding in a later sum may be left out.
    self.epsilon = _rounded(product, self.dtype).astype(self.values.dtype)
    rows = jax.lax.broadcasted_iota(jnp.int32, (self.n, self.m), 0)
    takes_part = self.is_up | self.is_down
    next_one = jax.lax.cummin(jnp.where(takes_part, rows, self.n), axis=0, reverse=True)
    last_one = jax.lax.cummax(jnp.where(takes_part, rows, -1), axis=0)
    edge = jnp.full((1, self.m), self.n, jnp.int32)
    carry = _Carry(
      up=self.start_up,
      down=self.start_down,
      above=jnp.concatenate([next_one[1:], edge]),
      below=jnp.concatenate([-jnp.ones_like(edge), last_one[:-1]]),
      given=jnp.full_like(rows, -1),
      parent=rows,
    )
    turns = jnp.max(count, initial=0)
    end = jax.lax.fori_loop(0, turns, lambda t, c: self._turn(t, c, t < count), carry)
    linked = jnp.where(self.is_up, end.above, jnp.where(self.is_down, end.below, rows))
    return jnp.where(end.given >= 0, end.given, linked)

  def _bit(self, q: jax.Array) -> jax.Array:
    """The number of the bit of entry `q` as seen from each word."""
    first = jnp.arange(self.words, dtype=jnp.int32) * 32
    return q[None] - first.reshape((-1,) + (1,) * q.ndim)

  def _at(self, q: jax.Array) -> jax.Array:
    """The set of `q` alone."""
    bit = self._bit(q)
    one = jnp.uint32(1) << jnp.clip(bit, 0, 31).astype(jnp.uint32)
    return jnp.where((bit >= 0) & (bit < 32), one, jnp.uint32(0))

  def _above(self, q: jax.Array) -> jax.Array:
    """The set of all numbers above `q`."""
    bit = self._bit(q)
    shifted = jnp.uint32(0xFFFFFFFF) << jnp.clip(bit + 1, 0, 31).astype(jnp.uint32)
    return jnp.where(bit >= 31, jnp.uint32(0), shifted)

  def _below(self, q: jax.Array) -> jax.Array:
    """The set of all numbers below `q`."""
    return ~self._above(q - 1)

  def _unlinked(self, carry: _Carry, low: jax.Array, high: jax.Array, where: jax.Array) -> _Carry:
    """Takes a run of live entries out of the links."""
    before, after = _gather(carry.below, low), _gather(carry.above, high)
    inside = where & (before >= self.base)
    above = _sorting.scatter(carry.above, jnp.where(inside, before, self.n), after)
    inside = where & (after < self.end)
    below = _sorting.scatter(carry.below, jnp.where(inside, after, self.n), before)
    return carry._replace(above=above, below=below)

  def _turn(self, t: jax.Array, carry: _Carry, active: jax.Array) -> _Carry:
    """Each lane tries its source number t."""
    source = self.order.at[self.base[:, 0] + t].get(mode="clip")
    q = source - self.base
    this = self._at(q)
    up = _some(carry.up & this)
    active &= up | _some(carry.down & this)
    side = jnp.where(up, self._above(q), self._below(q))
    exists, other_q = _nearest(jnp.where(up, carry.down, carry.up) & side, up)
    other = self.base + other_q
    low_q, high_q = jnp.where(up, q, other_q), jnp.where(up, other_q, q)
    live = carry.up | carry.down
    between = self._above(low_q) & self._below(high_q)
    neighbours = jnp.logical_not(_some(live & between))
    tied = _some(live & self.ties & (between | self._at(high_q)))
    mine, theirs = _gather(self.values, source), _gather(self.values, other)
    low, high = jnp.where(up, mine, theirs), jnp.where(up, theirs, mine)
    # An entry reaches upwards to less than, downwards to no less than.
    down_reaches = jnp.logical_not(_less(low, high, -self.epsilon))
    up_reaches = _less(high, low, self.epsilon)
    closes = jnp.where(up, down_reaches, up_reaches)
    closes &= ~neighbours | (down_reaches & up_reaches)
    closes &= active & exists
    direct = closes & ~tied
    done = active & ~(closes & tied)
    gone = jnp.where(direct, between | self._at(low_q) | self._at(high_q), this)
    gone = jnp.where(done, gone, jnp.uint32(0))
    low_end, high_end = (jnp.where(direct, self.base + end, source) for end in (low_q, high_q))
    carry = self._unlinked(carry, low_end, high_end, done)
    last = jnp.where(done, jnp.where(direct, other, source), self.n)
    carry = carry._replace(
      up=carry.up & ~gone,
      down=carry.down & ~gone,
      given=_sorting.scatter(carry.given, last, source),
    )
    # An entry that wants to decrease cannot step to an equal weight: the path may wind.
    walk = _Walk(carry, (closes & tied).astype(jnp.int32), source, this, this)
    return jax.lax.while_loop(
      lambda w: jnp.any(w.mode > 0), lambda w: self._step(w, source), walk
    ).carry

  def _step(self, walk: _Walk, source: jax.Array) -> _Walk:
    """One step of the depth-first search, or of taking its cycle out."""
    carry, entry = walk.carry, walk.entry
    searching, removing = walk.mode == 1, walk.mode == 2
    q = entry - self.base
    this = self._at(q)
    up = _some(self.start_up & this)
    # Equal weights below are no targets: start below the first of them.
    _, first_equal = _nearest(~self.ties & self._below(q + 1), jnp.zeros_like(up))
    side = jnp.where(up, self._above(q), self._below(first_equal))
    free = (carry.up | carry.down) & ~walk.visited | self._at(source - self.base)
    exists, target_q = _nearest(free & side, up)
    target = self.base + target_q
    mine, theirs = _gather(self.values, entry), _gather(self.values, target)
    reaches = exists & jnp.where(
      up, _less(theirs, mine, self.epsilon), jnp.logical_not(_less(theirs, mine, -self.epsilon))
    )
    pushes = searching & reaches & (target != source)
    pops = searching & ~reaches
    fails = pops & (entry == source)
    ends = (searching & reaches & (target == source)) | fails

    receives = jnp.where(ends, source, jnp.where(pushes, target, -1))
    given = _sorting.scatter(carry.given, jnp.where(searching, entry, self.n), receives)
    parent = _sorting.scatter(carry.parent, jnp.where(pushes, target, self.n), entry)
    new = jnp.where(pushes, self._at(target_q), jnp.uint32(0))
    path = jnp.where(pops & ~fails, walk.path & ~this, walk.path | new)
    taken = jnp.where(ends, path, jnp.uint32(0))
    carry = carry._replace(
      up=carry.up & ~taken, down=carry.down & ~taken, given=given, parent=parent
    )
    carry = self._unlinked(carry, entry, entry, removing)
    follower, back = _gather(given, entry), _gather(parent, entry)
    removed = removing & (follower == source)
    mode = jnp.where(ends, 2, jnp.where(removed, 0, walk.mode))
    entry = jnp.where(pops & ~fails, back, jnp.where(removing, follower, entry))
    entry = jnp.where(pushes, target, jnp.where(ends, source, entry))
    return _Walk(carry, mode, entry, walk.visited | new, path)

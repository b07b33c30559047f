r"""The exact step of SGPerm on the device: a search for cycles of weights in sets of bits.

The algorithm is in the docstring of `_sgperm`. All subsets of all weight vectors are searched
together. A *lane* is one subset of one vector, sorted by rising weight. A *source* is the entry
from which a cycle starts. The entries of a lane are sources in turn, by falling magnitude of their
recommendations: in turn t each lane tries source number t. Entries without a recommendation are no
sources, so a step takes as many turns as the lane with the most sources has sources.

  n, m     entries of a vector, vectors
  P        the number of lanes of a vector if its subsets have the smallest size
  W        words of 32 bits that hold a set of entries of a lane: entry 32 w + b is bit b of word w
  base     (P, 1), the row of a lane's first entry; the other entries are in the rows after it

An entry is *live* until it has moved or has been a source. Each turn updates these arrays:

- `up` and `down` are sets of bits in each lane: the live entries that want to increase, and those
  that want to decrease. The nearest live entry above i is the lowest bit that is left when all bits
  up to i are cleared. This takes a few instructions for 32 entries, and no loop.
- `above` and `below` are a doubly linked list of the live entries of each vector. Entries that
  leave the list keep their links, so the links of a cycle's entries point along the cycle.
- `donor` has the exceptions: an entry in a cycle that wants to increase receives the weight of the
  entry in `above`, an entry that wants to decrease the weight of the entry in `below`. If an entry
  receives another weight, `donor` names the entry that gives this weight.

A worked example, a single lane with epsilon 2.5. A negative recommendation m means that the weight
wants to increase:

  entry     0     1     2     3     4     5
  weight    1     2     3     4     5     6        up    001011   (entry 0 is the last bit)
  m        -3    -1    +2    -4    +5    +1        down  110100

Sources are tried by falling |m|, of equal ones the last first: 4, 3, 0, 2, 5, 1.

  turn 0   Source 4 wants to decrease. The nearest live entry of `up` below 4 is 3, at a distance of
           1, so 3 and 4 exchange their weights. Both leave the list, which links 2 and 5.
  turn 1   Source 3 is no longer live.
  turn 2   Source 0 wants to increase. The nearest live entry of `down` above 0 is 2, at a distance
           of 2. Entry 1 is live and between them, so it joins the cycle 0, 1, 2. By `above`, 0
           receives the weight of 1, and 1 the weight of 2. By `donor`, 2 receives the weight of 0.
  turn 3   Source 2 is no longer live.
  turn 4   Source 5 finds no live entry of `up` below it. It leaves the list and keeps its weight.

The weights of the example are distinct. So each cycle has the closed form that the docstring of
`_sgperm` describes, and the search never turns back. The code gives the same result:

  >>> def received(weights, momentum):
  ...   n = len(weights)
  ...   columns = (jnp.array(x, jnp.float32)[:, None] for x in (weights, momentum))
  ...   brackets = jnp.full(n + 1, 2.5 / (max(weights) - min(weights)))  # so epsilon is 2.5
  ...   work = _host_search.Work(*columns, jnp.arange(n), jnp.int32(n), brackets)
  ...   return permute(work, sizes=(n, n), remainder=True)[:, 0].tolist()
  >>> received([1, 2, 3, 4, 5, 6], [-3, -1, 2, -4, 5, 1])
  [1, 2, 0, 4, 3, 5]

If weights in a cycle are equal, the search may have to turn back, since an entry that wants to
decrease cannot receive an equal weight. For lanes with such a cycle, a loop within the turn runs
the published depth-first search (:class:`_Walk`). In the next example, source 2 cannot step to
entry 1, so it steps to entry 0. From entry 0 the search goes to entry 1, is stuck, returns to entry
0, and closes the cycle of 2 and 0:

  >>> received([1, 2, 2], [-1, 1, 2])
  [2, 1, 0]

Shapes depend on the smallest and the largest size of subsets in all steps, not on the size in this
step, so nothing is compiled again while lamda grows.
"""

import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_boost._foundation import _arrays, _types
from optax_boost._methods._sgperm import _host_search, _sorting

# One compiled search serves all sizes of subsets if all lanes of a vector together have at most
# `_FEW_WORDS` words. Otherwise the sizes are divided into up to `_BANDS` bands, with a search for
# each.
_FEW_WORDS, _BANDS = 64, 4


@functools.partial(jax.jit, static_argnames=("sizes", "remainder"))
def permute(work: _host_search.Work, *, sizes: tuple[int, int], remainder: bool) -> jax.Array:
  """Makes one exact step; returns for each position the position whose weight it receives, (n, m).

  `sizes` are the smallest and the largest size of subsets in all steps. `remainder` says whether
  the last subset of a vector, which may be smaller, takes part.
  """
  # Sets (W, P, m) are combined with flags (P, m), which needs rank promotion. Rank promotion is
  # allowed here, since users may have forbidden it.
  with jax.numpy_rank_promotion("allow"):
    return _permute(work, sizes, remainder)


def _permute(work: _host_search.Work, sizes: tuple[int, int], remainder: bool) -> jax.Array:
  n = work.weights.shape[0]
  size = jnp.minimum(work.size, n)
  position = _by_subset_and_weight(work.weights, work.order, size)
  values = _sorting.gather(work.weights, position)
  recommended = _sorting.gather(work.momentum, position)
  subset = jnp.arange(n, dtype=jnp.int32) // size
  subsets = -(-n // size)
  # Entries without a recommendation are idle; NaN counts as no recommendation.
  idle = jnp.logical_not(jnp.abs(recommended) > 0)
  if not remainder:
    idle |= ((subsets > 1) & (subset == subsets - 1))[:, None]
  lanes = -(-n // sizes[0])
  order = _by_falling_size(jnp.where(idle, 0, jnp.abs(recommended)), subset, lanes)
  up, down = (recommended < 0) & ~idle, (recommended > 0) & ~idle

  def search(least: int, most: int) -> jax.Array:
    lanes, words = -(-n // least), -(-most // 32)
    lane_search = _Search(values, up, down, order, size, lanes, words)
    return lane_search.run(_ranges(work.weights), work.brackets)

  edges = _edges(n, *sizes)
  bands = [functools.partial(search, *band) for band in itertools.pairwise(edges)]
  # The dtype is given, since an empty list would become an array of floats.
  band = jnp.searchsorted(jnp.array(edges[1:-1], size.dtype), size)
  received = jax.lax.switch(band, bands)
  source = _sorting.gather(position, received)
  return _sorting.scatter(jnp.zeros_like(position), position, source)


def _edges(n: int, least: int, most: int) -> list[int]:
  """Returns the edges of the bands into which the sizes of subsets are divided.

  Sizes go from `least` to `most`, in vectors of `n` entries. Each band has a compiled search with
  its own shapes: small subsets need many lanes, and large subsets need many words. A single search
  for all sizes would have many lanes and many words, and take several times as long.
  """
  small = -(-n // least) * -(-most // 32) <= _FEW_WORDS
  bands = 1 if small else min(_BANDS, max(1, math.ceil(math.log(most / least, 1.5))))
  return [round(least * (most / least) ** (k / bands)) for k in range(bands + 1)]


def _by_subset_and_weight(weights: jax.Array, order: jax.Array, size: jax.Array) -> jax.Array:
  """Returns the positions in each vector, sorted by subset and, in a subset, by rising weight.

  `order` holds the shuffled entries, as in :class:`_host_search.Work`, and `size` is the number of
  entries in a subset. Equal weights keep the order that they have in `order`, or in the vector if
  `order` has shape (n,) or the whole vector is one subset.
  """
  whole = size == len(weights)
  if order.ndim == 1:
    label = jnp.where(whole, 0, _sorting.inverse(order) // size)
    return _sorting.argsort(weights)[_sorting.within_groups(label, jnp.arange(len(weights)))]
  rows = jax.lax.broadcasted_iota(jnp.int32, weights.shape, 0)
  # A single subset is not shuffled.
  order = jnp.where(whole, rows, order)
  place = _sorting.argsort(_sorting.gather(weights, order))
  index = _sorting.within_groups(place // size, rows)
  return _sorting.gather(_sorting.gather(order, place), index)


def _ranges(weights: jax.Array) -> jax.Array:
  """Returns the largest minus the smallest weight of each vector, rounded to the weights' dtype."""
  spread = jnp.max(weights, axis=0) - jnp.min(weights, axis=0)
  return _rounded(spread, weights.dtype)


def _rounded(x: jax.Array, dtype: _types.Dtype) -> jax.Array:
  """Returns `x` rounded to a dtype, without a cast.

  XLA may leave out a cast to the dtype and back, so that nothing would be rounded (XLA 18).
  """
  info: Any = jnp.finfo(dtype)
  return jax.lax.reduce_precision(x, int(info.nexp), int(info.nmant))


def _by_falling_size(sizes: jax.Array, subset: jax.Array, lanes: int) -> jax.Array:
  """Returns the row numbers (n, m), sorted by subset and, in a subset, by falling `sizes`.

  `sizes` are the magnitudes of the recommendations. `subset` has the number of each row's subset,
  which is below `lanes`. Of equal sizes the last row comes first.
  """
  high = jnp.broadcast_to(jnp.flip(subset, 0)[:, None], sizes.shape).astype(jnp.uint32)
  index = _sorting.argsort(jnp.flip(-sizes, 0), high, (lanes - 1).bit_length())
  return sizes.shape[0] - 1 - index


def _gather(x: jax.Array, index: jax.Array) -> jax.Array:
  """Returns ``x[index]`` in each column; an index out of bounds reads the first or last entry."""
  return jnp.take_along_axis(x, index, axis=0, mode="clip")


def _less(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
  """Returns whether x < a + b, as computed in float64."""
  total = a + b
  if total.dtype == jnp.float64:
    return x < total
  # If x equals the rounded sum, the sum's rounding error decides (by Knuth's two-sum).
  rounded_b = total - a
  error = (a - (total - rounded_b)) + (b - rounded_b)
  return (x < total) | ((x == total) & (error > 0))


def _any_member(members: jax.Array) -> jax.Array:
  """Returns for each set, words of bits (W, P, m), whether it has a member, (P, m)."""
  return jnp.any(members != 0, axis=0)


def _nearest(members: jax.Array, up: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns whether each set has members, and its lowest member if `up`, else its highest.

  For a set without members, the second result is 0. With one word, and entries 2, 4 and 5 in the
  set:

  >>> members = jnp.array([0b110100], jnp.uint32)
  >>> [int(_nearest(members, jnp.array(up))[1]) for up in (True, False)]
  [2, 5]
  """
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
  """The arrays that each turn of the search updates."""

  up: jax.Array  # (W, P, m), the live entries that want to increase
  down: jax.Array  # (W, P, m), the live entries that want to decrease
  above: jax.Array  # (n, m), for each live entry the next live one
  below: jax.Array  # (n, m), for each live entry the live one before it
  donor: jax.Array  # (n, m), the entry whose weight is received; -1: the one in `above` or `below`
  parent: jax.Array  # (n, m), for each entry on a path of a depth-first search the entry before it


class _Walk(NamedTuple):
  """The state of the depth-first searches, one for each lane whose path may turn back.

  A search takes an entry out of the linked list when its path reaches the entry, and puts the entry
  back when the path goes back. Entries are put back in reverse order. So the two entries to which a
  returning entry's links point are neighbours in the list again, and the returning entry is put
  between these two ("dancing links").
  """

  carry: _Carry
  searching: jax.Array  # (P, m), whether the lane's search is running
  entry: jax.Array  # (P, m), the last entry of the path
  visited: jax.Array  # (W, P, m), the entries that the search has reached
  path: jax.Array  # (W, P, m), the entries on the path


class _Search:
  """The search for cycles of weights in all lanes: the subsets of all vectors."""

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
    sets = self._sets([up, down, tie], size)
    self.start_up, self.start_down = sets[0], sets[1]
    # The entries whose weight equals the weight of the entry before, in the same lane.
    self.ties = sets[2] & ~self._only(jnp.zeros((lanes, self.m), jnp.int32))

  def _sets(self, flags: list[jax.Array], size: jax.Array) -> list[jax.Array]:
    """Returns for each array of flags (n, m) the sets (W, P, m) of entries whose flag is True.

    There is one set for each lane. `size` is the number of entries in a lane.
    """
    inner = jnp.arange(self.words * 32, dtype=jnp.int32).reshape(self.words, 32, 1)
    row = self.base[:, 0] + inner
    inside = ((inner < size) & (row < self.n))[..., None]
    packed = sum(flag.astype(jnp.uint32) << k for k, flag in enumerate(flags))
    rows = jnp.where(inside, jnp.asarray(packed).at[row].get(mode="clip"), 0)
    bit = jnp.arange(32, dtype=jnp.uint32).reshape(1, 32, 1, 1)
    return [jnp.sum(((rows >> k) & 1) << bit, axis=1, dtype=jnp.uint32) for k in range(len(flags))]

  def run(self, ranges: jax.Array, brackets: jax.Array) -> jax.Array:
    """Runs the search; returns for each entry the entry whose weight it receives, (n, m).

    `ranges` (m,) are the value ranges R of the vectors. `brackets` are as in
    :class:`_host_search.Work`; their products with `ranges` are the epsilons.
    """
    live = jax.lax.population_count(self.start_up | self.start_down)
    count = jnp.sum(live, axis=0, dtype=jnp.int32)
    dtype = _arrays.accumulator_dtype(self.dtype)
    product = ranges.astype(dtype) * brackets.astype(dtype)[count]
    # XLA 18: `_rounded` rounds the product. XLA could leave out a cast, and add the product
    # unrounded in later sums.
    self.epsilon = _rounded(product, self.dtype).astype(self.values.dtype)
    rows = jax.lax.broadcasted_iota(jnp.int32, (self.n, self.m), 0)
    takes_part = self.is_up | self.is_down
    next_member = jax.lax.cummin(jnp.where(takes_part, rows, self.n), axis=0, reverse=True)
    last_member = jax.lax.cummax(jnp.where(takes_part, rows, -1), axis=0)
    edge = jnp.full((1, self.m), self.n, jnp.int32)
    carry = _Carry(
      up=self.start_up,
      down=self.start_down,
      above=jnp.concatenate([next_member[1:], edge]),
      below=jnp.concatenate([-jnp.ones_like(edge), last_member[:-1]]),
      donor=jnp.full_like(rows, -1),
      parent=rows,
    )
    turns = jnp.max(count, initial=0)
    end = jax.lax.fori_loop(0, turns, lambda t, c: self._turn(t, c, t < count), carry)
    linked = jnp.where(self.is_up, end.above, jnp.where(self.is_down, end.below, rows))
    return jnp.where(end.donor >= 0, end.donor, linked)

  def _bit(self, q: jax.Array) -> jax.Array:
    """Returns for each word the number of entry `q`'s bit, counted from the word's first bit.

    The number is between 0 and 31 only in the word that has the bit.
    """
    first = jnp.arange(self.words, dtype=jnp.int32) * 32
    return q[None] - first.reshape((-1,) + (1,) * q.ndim)

  def _only(self, q: jax.Array) -> jax.Array:
    """Returns for each lane the set whose only member is entry `q`."""
    bit = self._bit(q)
    one = jnp.uint32(1) << jnp.clip(bit, 0, 31).astype(jnp.uint32)
    return jnp.where((bit >= 0) & (bit < 32), one, jnp.uint32(0))

  def _numbers_above(self, q: jax.Array) -> jax.Array:
    """Returns for each lane the set of all numbers above `q`."""
    bit = self._bit(q)
    shifted = jnp.uint32(0xFFFFFFFF) << jnp.clip(bit + 1, 0, 31).astype(jnp.uint32)
    return jnp.where(bit >= 31, jnp.uint32(0), shifted)

  def _numbers_below(self, q: jax.Array) -> jax.Array:
    """Returns for each lane the set of all numbers below `q`."""
    return ~self._numbers_above(q - 1)

  def _linked(
    self,
    carry: _Carry,
    before: jax.Array,
    after: jax.Array,
    new_above: jax.Array,
    new_below: jax.Array,
    where: jax.Array,
  ) -> _Carry:
    """Returns `carry` with ``above[before] = new_above`` and ``below[after] = new_below``.

    Skips lanes in which `where` is False, and indices `before` and `after` outside of their lane.
    """
    inside = where & (before >= self.base)
    above = _sorting.scatter(carry.above, jnp.where(inside, before, self.n), new_above)
    inside = where & (after < self.end)
    below = _sorting.scatter(carry.below, jnp.where(inside, after, self.n), new_below)
    return carry._replace(above=above, below=below)

  def _turn(self, t: jax.Array, carry: _Carry, active: jax.Array) -> _Carry:
    """Tries source number t in each lane that is `active`, and returns the updated arrays.

    A variable such as `source` holds an entry's row in the arrays (n, m). `source_q` holds the same
    entry's number in its lane.
    """
    source = self.order.at[self.base[:, 0] + t].get(mode="clip")
    source_q = source - self.base
    source_set = self._only(source_q)
    up = _any_member(carry.up & source_set)
    active &= up | _any_member(carry.down & source_set)
    beyond = jnp.where(up, self._numbers_above(source_q), self._numbers_below(source_q))
    exists, partner_q = _nearest(jnp.where(up, carry.down, carry.up) & beyond, up)
    partner = self.base + partner_q
    low_q = jnp.where(up, source_q, partner_q)
    high_q = jnp.where(up, partner_q, source_q)
    live = carry.up | carry.down
    between = self._numbers_above(low_q) & self._numbers_below(high_q)
    neighbours = jnp.logical_not(_any_member(live & between))
    tied = _any_member(live & self.ties & (between | self._only(high_q)))
    low = _gather(self.values, self.base + low_q)
    high = _gather(self.values, self.base + high_q)
    # An increase must be less than epsilon; a decrease may equal it.
    down_reaches = jnp.logical_not(_less(low, high, -self.epsilon))
    up_reaches = _less(high, low, self.epsilon)
    closes = jnp.where(up, down_reaches, up_reaches)
    closes &= ~neighbours | (down_reaches & up_reaches)
    closes &= active & exists
    direct, winds = closes & ~tied, closes & tied
    done = active & ~winds
    leaving = jnp.where(direct, between | self._only(low_q) | self._only(high_q), source_set)
    leaving = jnp.where(done, leaving, jnp.uint32(0))
    # The entries from `low_end` to `high_end` leave the list: a whole cycle, or the source alone.
    low_end = jnp.where(direct, self.base + low_q, source)
    high_end = jnp.where(direct, self.base + high_q, source)
    before, after = _gather(carry.below, low_end), _gather(carry.above, high_end)
    carry = self._linked(carry, before, after, after, before, active)
    last = jnp.where(done, jnp.where(direct, partner, source), self.n)
    carry = carry._replace(
      up=carry.up & ~leaving,
      down=carry.down & ~leaving,
      donor=_sorting.scatter(carry.donor, last, source),
    )
    walk = _Walk(carry, winds, entry=source, visited=source_set, path=source_set)
    return jax.lax.while_loop(
      lambda walk: jnp.any(walk.searching), lambda walk: self._step(walk, source), walk
    ).carry

  def _step(self, walk: _Walk, source: jax.Array) -> _Walk:
    """Adds an entry to the path of each running search, or removes the last; returns the new state.

    The new entry is the nearest entry within reach that the search has not visited. If there is
    none, the last entry is removed. A search ends if the nearest entry is `source`, where its path
    began, or if nothing is within reach of `source`.
    """
    carry, entry, searching = walk.carry, walk.entry, walk.searching
    entry_q = entry - self.base
    entry_set = self._only(entry_q)
    up = _any_member(self.start_up & entry_set)
    # An entry that wants to decrease can't receive an equal weight, so the search skips all entries
    # of the same weight.
    _, first_equal = _nearest(~self.ties & self._numbers_below(entry_q + 1), jnp.zeros_like(up))
    beyond = jnp.where(up, self._numbers_above(entry_q), self._numbers_below(first_equal))
    free = (carry.up | carry.down) & ~walk.visited | self._only(source - self.base)
    exists, target_q = _nearest(free & beyond, up)
    target = self.base + target_q
    weight, target_weight = _gather(self.values, entry), _gather(self.values, target)
    reaches = exists & jnp.where(
      up,
      _less(target_weight, weight, self.epsilon),
      jnp.logical_not(_less(target_weight, weight, -self.epsilon)),
    )
    closes = searching & reaches & (target == source)
    fails = searching & ~reaches & (entry == source)
    pushes = searching & reaches & (target != source)
    pops = searching & ~reaches & (entry != source)
    ends = closes | fails

    receives = jnp.where(ends, source, jnp.where(pushes, target, -1))
    donor = _sorting.scatter(carry.donor, jnp.where(searching, entry, self.n), receives)
    parent = _sorting.scatter(carry.parent, jnp.where(pushes, target, self.n), entry)
    # XLA 29: `parent` is written before it is read. In the other order XLA would copy `parent` in
    # each round, and a step with many equal weights would take a third longer.
    back = _gather(parent, entry)
    # A target is taken out of the list; an entry that the path leaves is put back.
    moved = jnp.where(pushes, target, entry)
    before, after = _gather(carry.below, moved), _gather(carry.above, moved)
    new_above, new_below = jnp.where(pushes, after, moved), jnp.where(pushes, before, moved)
    carry = self._linked(carry, before, after, new_above, new_below, pushes | pops)
    target_set = jnp.where(pushes, self._only(target_q), jnp.uint32(0))
    path = jnp.where(pops, walk.path & ~entry_set, walk.path | target_set)
    leaving = jnp.where(ends, path, jnp.uint32(0))
    carry = carry._replace(
      up=carry.up & ~leaving, down=carry.down & ~leaving, donor=donor, parent=parent
    )
    entry = jnp.where(pushes, target, jnp.where(pops, back, entry))
    return _Walk(carry, searching & ~ends, entry, walk.visited | target_set, path)

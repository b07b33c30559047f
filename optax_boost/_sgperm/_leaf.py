"""One leaf in a step: its weight vectors as columns, what they hold now and what is wished.

Functions here and in the kernels are jitted each for itself: outside of a user's ``jit``, which is
where ``init`` runs, their many small operations would be compiled one by one.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from optax_boost._sgperm import _exact
from optax_boost._sgperm import _fast
from optax_boost._sgperm import _host
from optax_boost._sgperm import _layout
from optax_boost._sgperm import _sharding
from optax_boost._sgperm import _sorting


class Leaf(NamedTuple):
  """One leaf at the start of a step.

  Attributes:
    layout: how it is cut into weight vectors.
    wishes: (n, vectors), the recommendations.
    initial: (n, vectors), the initial weights.
    flat: (n, vectors) int32, which entry of the raveled initial leaf stands where.
    initial_ranks: (n, vectors) int32, or None where the method has no need of them.
    ranges: (1, vectors).
  """

  layout: _layout.Layout
  wishes: jax.Array
  initial: jax.Array
  flat: jax.Array
  initial_ranks: jax.Array | None
  ranges: jax.Array

  @property
  def weights(self) -> jax.Array:
    """(n, vectors), the weights now."""
    return self._taken(self.initial)

  def _taken(self, initial: jax.Array) -> jax.Array:
    return _sorting.gather(initial, self.layout.position(self.flat))

  def work(self, subsets: _host.Subsets) -> _exact.Work:
    """What the exact step needs."""
    assert self.initial_ranks is not None
    ranks = self._taken(self.initial_ranks)
    return _exact.Work(self.weights, self.wishes, ranks, self.ranges[0], subsets)

  def target(self, bracket: jax.Array) -> jax.Array:
    """Where each weight is wished to be; see ``_fast``."""
    return _fast.targets(self.weights, self.wishes, self.ranges, bracket)

  def ordered(self) -> jax.Array:
    """(n, vectors) int32, the entries of the raveled initial leaf by rising weight."""
    assert self.initial_ranks is not None
    return sorted_entries(self.layout, self.initial_ranks)


def leaf(
  layout: _layout.Layout,
  wishes: jax.Array,
  initial: jax.Array,
  flat: jax.Array,
  initial_ranks: jax.Array | None,
  ranges: jax.Array,
) -> Leaf:
  """A :class:`Leaf` from arrays of the leaf's shape."""
  ranks = None if initial_ranks is None else layout.columns(initial_ranks)
  columns = layout.columns
  return Leaf(layout, columns(wishes), columns(initial), columns(flat), ranks, ranges)


@functools.partial(jax.jit, static_argnums=0)
def sorted_entries(layout: _layout.Layout, ranks: jax.Array) -> jax.Array:
  """The entries of the raveled initial leaf by rising weight.

  Args:
    layout: the leaf's.
    ranks: (n, vectors) int32, the initial ranks.

  Returns:
    (n, vectors) int32.
  """
  entries = jnp.arange(layout.length * layout.vectors, dtype=jnp.int32).reshape(layout.shape)
  return _sorting.gather(layout.columns(entries), _sorting.inverse(ranks))


@functools.partial(jax.jit, static_argnums=0)
def ranks_of(layout: _layout.Layout, x: jax.Array) -> jax.Array:
  """The ranks of a leaf's entries in their vectors; equal ones in natural order.

  Args:
    layout: the leaf's.
    x: the leaf.

  Returns:
    int32, of the leaf's shape.
  """
  if not layout.movable:
    return jnp.zeros(layout.shape, jnp.int32)

  def ranks(x: jax.Array) -> jax.Array:
    found = layout.leaf(_sorting.inverse(_sorting.argsort(layout.columns(x))))
    return _sharding.same_as(jnp.zeros_like(x, jnp.int32), found, x)

  return _sharding.automatic(ranks, x)(x)


@functools.partial(jax.jit, static_argnums=0)
def ranges_of(layout: _layout.Layout, x: jax.Array) -> jax.Array:
  """The value range of each weight vector.

  Args:
    layout: the leaf's.
    x: the leaf.

  Returns:
    (1, vectors), in the dtype of the leaf.
  """
  if not layout.movable:
    return jnp.zeros((1, layout.vectors), x.dtype)

  def ranges(x: jax.Array) -> jax.Array:
    columns = layout.columns(x)
    return jnp.max(columns, axis=0, keepdims=True) - jnp.min(columns, axis=0, keepdims=True)

  return _sharding.automatic(ranges, None)(x)

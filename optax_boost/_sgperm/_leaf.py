"""One leaf in a step: its weight vectors as columns, what they hold now and what is wished.

Functions here and in the kernels are jitted each for itself: outside of a user's ``jit``, which is
where ``init`` runs, their many small operations would be compiled one by one.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from optax_boost._sgperm import _blocks
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
    params: (n, vectors), the weights now, which rounding may have touched.
    initial: (n, vectors), the initial weights.
    position: (n, vectors) int32, where in its vector each weight was at first.
    initial_ranks: (n, vectors) int32, or None where the method has no need of them.
    ranges: (1, vectors).
  """

  layout: _layout.Layout
  wishes: jax.Array
  params: jax.Array
  initial: jax.Array
  position: jax.Array
  initial_ranks: jax.Array | None
  ranges: jax.Array

  def work(self, subsets: _host.Subsets) -> _exact.Work:
    """What the exact step needs."""
    assert self.initial_ranks is not None
    weights = _sorting.gather(self.initial, self.position)
    ranks = _sorting.gather(self.initial_ranks, self.position)
    return _exact.Work(weights, self.wishes, ranks, self.ranges[0], subsets)

  def target(self, bracket: jax.Array) -> jax.Array:
    """Where each weight is wished to be; see ``_fast``."""
    return _fast.targets(self.params, self.wishes, self.ranges, bracket)

  def ordered(self) -> jax.Array:
    """(n, vectors) int32, the places of the initial weights by rising weight."""
    assert self.initial_ranks is not None
    return _sorting.inverse(self.initial_ranks)


def leaf(
  layout: _layout.Layout,
  wishes: jax.Array,
  params: jax.Array,
  initial: jax.Array,
  flat: jax.Array,
  initial_ranks: jax.Array | None,
  ranges: jax.Array,
) -> Leaf:
  """A :class:`Leaf` from arrays of the leaf's shape."""
  ranks = None if initial_ranks is None else layout.columns(initial_ranks)
  position = layout.position(layout.columns(flat))
  wishes, params, initial = (layout.columns(x) for x in (wishes, params, initial))
  return Leaf(layout, wishes, params, initial, position, ranks, ranges)


@functools.partial(jax.jit, static_argnums=0)
def arranged(
  layout: _layout.Layout, initial: jax.Array, position: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """A leaf whose weights have been permuted.

  Args:
    layout: the leaf's.
    initial: the leaf at first.
    position: (n, vectors) int32, where in its vector each weight was at first.

  Returns:
    The leaf now, and for each entry which one of the raveled initial leaf it is.
  """
  values = _sorting.gather(layout.columns(initial), position)
  return layout.leaf(values), layout.leaf(layout.entries(position))


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
    found = layout.leaf(_blocks.in_blocks(_sorting.ranks, [layout.columns(x)], jnp.int32))
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

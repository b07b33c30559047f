"""One leaf in a step: its weight vectors as columns, what they hold now and what is wished.

Functions here and in the kernels are jitted each for itself: outside of a user's ``jit``, which is
where ``init`` runs, their many small operations would be compiled one by one.
"""

from collections.abc import Sequence
import functools
from typing import Any
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


def step(current: jax.Array, target: jax.Array, dtype: Any) -> jax.Array:
  """The update that takes weights to others, in the wider of their dtype and another.

  Args:
    current: the weights.
    target: the other weights, of the same dtype.
    dtype: the other dtype, of the gradients or of an inner optimizer's updates.

  Returns:
    The difference: ``optax.apply_updates`` lands on the target, or within one rounding of it.
  """
  wide = jnp.promote_types(current.dtype, dtype)
  return target.astype(wide) - current.astype(wide)


def check_finite(layouts: Sequence[_layout.Layout | None], leaves: Any, method: str) -> None:
  """Refuses initial weights that are not finite, where their values are known.

  Args:
    layouts: the leaves'; None for a leaf that is not permuted.
    leaves: the initial leaves.
    method: the method's name, for the message.

  Raises:
    ValueError: a leaf has a NaN or an infinity.
  """
  unknown = (jax.core.Tracer, jax.ShapeDtypeStruct)
  flags = [
    (lay, _finite(x))
    for lay, x in zip(layouts, leaves, strict=True)
    if lay is not None and not isinstance(x, unknown)
  ]
  for lay, flag in flags:
    if not flag:
      raise ValueError(
        f"`{method}` needs finite initial weights, for it keeps their values; the leaf"
        f" '{lay.name}' has a NaN or an infinity. Initialize it anew, or leave it to another"
        " optimizer with `optax.partition`."
      )


@jax.jit
def _finite(x: jax.Array) -> jax.Array:
  return jnp.all(jnp.isfinite(x))


def ranks_of(layout: _layout.Layout, x: Any) -> Any:
  """The ranks of a leaf's entries in their vectors; equal ones in natural order.

  Args:
    layout: the leaf's.
    x: the leaf, or a ``jax.ShapeDtypeStruct``.

  Returns:
    int32, of the leaf's shape; abstract as the leaf is.
  """
  if isinstance(x, jax.ShapeDtypeStruct):
    return x.update(dtype=jnp.int32)
  return _ranks(layout, x)


@functools.partial(jax.jit, static_argnums=0)
def _ranks(layout: _layout.Layout, x: jax.Array) -> jax.Array:
  if not layout.movable:
    return jnp.zeros(layout.shape, jnp.int32)

  def ranks(x: jax.Array) -> jax.Array:
    found = layout.leaf(_blocks.in_blocks(_sorting.ranks, [layout.columns(x)], jnp.int32))
    return _sharding.same_as(jnp.zeros_like(x, jnp.int32), found, x)

  return _sharding.automatic(ranks, x)(x)


def ranges_of(layout: _layout.Layout, x: Any) -> Any:
  """The value range of each weight vector.

  Args:
    layout: the leaf's.
    x: the leaf, or a ``jax.ShapeDtypeStruct``.

  Returns:
    (1, vectors), in the dtype of the leaf; abstract as the leaf is.
  """
  if isinstance(x, jax.ShapeDtypeStruct):
    return jax.ShapeDtypeStruct((1, layout.vectors), x.dtype)
  return _ranges(layout, x)


@functools.partial(jax.jit, static_argnums=0)
def _ranges(layout: _layout.Layout, x: jax.Array) -> jax.Array:
  if not layout.movable:
    return jnp.zeros((1, layout.vectors), x.dtype)

  def ranges(x: jax.Array) -> jax.Array:
    columns = layout.columns(x)
    return jnp.max(columns, axis=0, keepdims=True) - jnp.min(columns, axis=0, keepdims=True)

  return _sharding.automatic(ranges, None)(x)

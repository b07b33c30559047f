"""Leaves as stacks of weight vectors: one column per output, its incoming weights in it.

Functions here and in the kernels are jitted each for itself: outside of a user's ``jit``, which is
where ``init`` runs, their many small operations would be compiled one by one.
"""

from collections.abc import Iterable
from collections.abc import Sequence
import functools
import math
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_boost import _base
from optax_boost import _tree
from optax_boost._sgperm import _execution
from optax_boost._sgperm import _sorting


class Layout(NamedTuple):
  """How a leaf is cut into weight vectors.

  Attributes:
    path: the leaf's path.
    shape: the leaf's shape.
    fan_in: the axes that run along a weight vector, ascending.
  """

  path: str
  shape: tuple[int, ...]
  fan_in: tuple[int, ...]

  @property
  def name(self) -> str:
    """The path, for messages."""
    return _tree.leaf_name(self.path)

  @property
  def outputs(self) -> tuple[int, ...]:
    """The axes along which the vectors lie side by side."""
    return tuple(axis for axis in range(len(self.shape)) if axis not in self.fan_in)

  @property
  def length(self) -> int:
    """The number n of weights in a vector."""
    return math.prod(self.shape[axis] for axis in self.fan_in)

  @property
  def vectors(self) -> int:
    """The number of vectors."""
    return math.prod(self.shape[axis] for axis in self.outputs)

  @property
  def movable(self) -> bool:
    """Whether there is anything to permute."""
    return self.length > 1 and self.vectors > 0

  def columns(self, x: jax.Array) -> jax.Array:
    """The leaf as (n, vectors)."""
    return jnp.transpose(x, self.fan_in + self.outputs).reshape(self.length, self.vectors)

  def leaf(self, columns: jax.Array) -> jax.Array:
    """The inverse of :meth:`columns`."""
    axes = self.fan_in + self.outputs
    return jnp.transpose(columns.reshape([self.shape[a] for a in axes]), np.argsort(axes).tolist())

  def _runs(self) -> list[tuple[int, int]]:
    """Length and stride of the fan-in axes, contiguous ones merged into one."""
    runs: list[tuple[int, int]] = []
    for axis in reversed(self.fan_in):
      length, stride = self.shape[axis], math.prod(self.shape[axis + 1 :])
      if runs and stride == runs[0][0] * runs[0][1]:
        runs[0] = (runs[0][0] * length, runs[0][1])
      else:
        runs.insert(0, (length, stride))
    return runs

  def position(self, flat: jax.Array) -> jax.Array:
    """The places in their weight vectors of entries of the raveled leaf."""
    place = jnp.zeros_like(flat)
    for length, stride in self._runs():
      index = flat // stride
      outermost = length * stride == math.prod(self.shape)
      place = place * length + (index if outermost else index % length)
    return place

  def entries(self, position: jax.Array) -> jax.Array:
    """The entries of the raveled leaf at places (n, vectors) in their weight vectors."""
    shape = [self.shape[axis] for axis in self.outputs]
    flat = jnp.zeros(shape, jnp.int32)
    for k, axis in enumerate(self.outputs):
      index = jax.lax.broadcasted_iota(jnp.int32, shape, k)
      flat = flat + index * math.prod(self.shape[axis + 1 :])
    flat = flat.reshape(1, -1)
    for length, stride in reversed(self._runs()):
      flat = flat + position % length * stride
      position = position // length
    return flat


def layouts(
  tree: Any,
  layout: str,
  fan_in_axes: _base.AxesByPattern | None,
  stacked_axes: _base.AxesByPattern | None,
) -> list[Layout]:
  """The layout of every leaf, in the order of ``jax.tree.leaves``."""
  leaves = _tree.describe(tree, stacked_axes)
  paths, shapes = [x.path for x in leaves], [x.shape for x in leaves]
  named = _tree.axes_by_pattern(paths, shapes, fan_in_axes, "fan_in_axes")

  def axes_of(leaf: _tree.Leaf) -> tuple[int, ...]:
    if len(leaf.layer_axes) <= 1:
      return leaf.layer_axes
    return _tree.fan_in_axes(leaf, layout)

  return [
    Layout(leaf.path, leaf.shape, axes_of(leaf) if axes is None else axes)
    for leaf, axes in zip(leaves, named, strict=True)
  ]


def check_arguments(layout: Any, fan_in_axes: Any, stacked_axes: Any) -> None:
  """Checks the three arguments that both methods have."""
  _base.check_name("layout", layout, ("flax", "torch"))
  _tree.check_axes_by_pattern("fan_in_axes", fan_in_axes)
  _tree.check_axes_by_pattern("stacked_axes", stacked_axes)


def check_params(layouts: Iterable[Layout], initial: Any, method: str) -> None:
  """Refuses params whose permuted leaves are not those of the state."""
  layouts = list(layouts)
  shapes = [jnp.shape(x) for x in jax.tree.leaves(initial)]
  if [lay.shape for lay in layouts] == shapes:
    return
  detail = f"{len(layouts)} leaves for {len(shapes)}"
  for lay, shape in zip(layouts, shapes, strict=False):
    if lay.shape != shape:
      detail = f"shape {lay.shape} for {shape} in the leaf '{lay.name}'"
      break
  raise ValueError(
    f"`{method}` needs the params that its state was made for; got {detail}. Start from"
    " `tx.init(params)`."
  )


def check_finite(layouts: Sequence[Layout | None], leaves: Any, method: str) -> None:
  """Refuses initial weights that are not finite, where their values are known."""
  known = [
    (lay, _finite(x))
    for lay, x in zip(layouts, leaves, strict=True)
    if lay is not None and not isinstance(x, jax.core.Tracer | jax.ShapeDtypeStruct)
  ]
  for lay, finite in known:
    if not finite:
      raise ValueError(
        f"`{method}` needs finite initial weights, for it keeps their values; the leaf"
        f" '{lay.name}' has a NaN or an infinity. Initialize it anew, or leave it to another"
        " optimizer with `optax.partition`."
      )


@jax.jit
def _finite(x: jax.Array) -> jax.Array:
  return jnp.all(jnp.isfinite(x))


def ranks(layout: Layout, x: Any) -> Any:
  """The ranks of a leaf's entries in their vectors, equal ones in natural order; int32."""
  if isinstance(x, jax.ShapeDtypeStruct):
    return x.update(dtype=jnp.int32)
  return _ranks(layout, x)


@functools.partial(jax.jit, static_argnums=0)
def _ranks(layout: Layout, x: jax.Array) -> jax.Array:
  if not layout.movable:
    return jnp.zeros(layout.shape, jnp.int32)

  def sort(x: jax.Array) -> jax.Array:
    columns = _execution.in_blocks(_sorting.ranks, [layout.columns(x)], jnp.int32)
    return _execution.sharded_like(jnp.zeros_like(x, jnp.int32), layout.leaf(columns), x)

  return _execution.auto_sharded(sort, x)(x)


def ranges(layout: Layout, x: Any) -> Any:
  """The value range of each weight vector, (1, vectors) in the dtype of the leaf."""
  if isinstance(x, jax.ShapeDtypeStruct):
    return jax.ShapeDtypeStruct((1, layout.vectors), x.dtype)
  return _ranges(layout, x)


@functools.partial(jax.jit, static_argnums=0)
def _ranges(layout: Layout, x: jax.Array) -> jax.Array:
  if not layout.movable:
    return jnp.zeros((1, layout.vectors), x.dtype)

  def spread(x: jax.Array) -> jax.Array:
    columns = layout.columns(x)
    return jnp.max(columns, axis=0, keepdims=True) - jnp.min(columns, axis=0, keepdims=True)

  return _execution.auto_sharded(spread, None)(x)


@functools.partial(jax.jit, static_argnums=0)
def arranged(
  layout: Layout, initial: jax.Array, position: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """A leaf whose vectors hold the initial weights of places (n, vectors), and its permutation."""
  values = _sorting.gather(layout.columns(initial), position)
  return layout.leaf(values), layout.leaf(layout.entries(position))


def step(current: jax.Array, target: jax.Array, dtype: Any) -> jax.Array:
  """The update from weights to others of their dtype, in the wider of that and another.

  ``optax.apply_updates`` then lands on the target, or within one rounding of it.
  """
  wide = jnp.promote_types(current.dtype, dtype)
  return target.astype(wide) - current.astype(wide)

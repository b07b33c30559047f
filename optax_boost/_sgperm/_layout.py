"""Leaves as stacks of weight vectors: one column per output, its incoming weights in it."""

import math
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_boost import _base
from optax_boost import _tree


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

  def position(self, flat: jax.Array) -> jax.Array:
    """Where in its weight vector an entry of the raveled leaf lies."""
    strides = [math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape))]
    found = jnp.zeros_like(flat)
    for axis in self.fan_in:
      found = found * self.shape[axis] + flat // strides[axis] % self.shape[axis]
    return found


def layouts(
  tree: Any,
  layout: str,
  fan_in_axes: _base.AxesByPattern | None,
  stacked_axes: _base.AxesByPattern | None,
) -> list[Layout]:
  """The layout of every leaf.

  Args:
    tree: the params.
    layout: ``"flax"`` or ``"torch"``.
    fan_in_axes: by pattern, the axes along a weight vector.
    stacked_axes: by pattern, the axes along which layers are stacked.

  Returns:
    The layouts, in the order of ``jax.tree.leaves``.
  """
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

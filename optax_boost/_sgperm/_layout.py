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
  def name(self) -> str:
    """The path, for messages."""
    return self.path or "params"

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
    """Length and stride of the axes along a vector, those that are one in memory as one."""
    runs: list[tuple[int, int]] = []
    for axis in reversed(self.fan_in):
      length, stride = self.shape[axis], math.prod(self.shape[axis + 1 :])
      if runs and stride == runs[0][0] * runs[0][1]:
        runs[0] = (runs[0][0] * length, runs[0][1])
      else:
        runs.insert(0, (length, stride))
    return runs

  def position(self, flat: jax.Array) -> jax.Array:
    """Where in its weight vector an entry of the raveled leaf lies."""
    found = jnp.zeros_like(flat)
    for length, stride in self._runs():
      index = flat // stride
      outermost = length * stride == math.prod(self.shape)
      found = found * length + (index if outermost else index % length)
    return found

  def entries(self, position: jax.Array) -> jax.Array:
    """Which entry of the raveled leaf lies where in its vector.

    Args:
      position: (n, vectors) int32, places in the vectors.

    Returns:
      int32 of the same shape.
    """
    shape = [self.shape[axis] for axis in self.outputs]
    found = jnp.zeros(shape, jnp.int32)
    for k, axis in enumerate(self.outputs):
      here = jax.lax.broadcasted_iota(jnp.int32, shape, k)
      found = found + here * math.prod(self.shape[axis + 1 :])
    found = found.reshape(1, -1)
    for length, stride in reversed(self._runs()):
      found = found + position % length * stride
      position = position // length
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

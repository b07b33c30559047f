"""Leaves as stacks of weight vectors: one column per output, its incoming weights in it.

Functions here and in the kernels are jitted each for itself: outside of a user's ``jit``, as in
``init``, their many small operations would be compiled one by one.
"""

import dataclasses
import functools
import math
from typing import Any
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from optax_boost import _base
from optax_boost import _layers
from optax_boost import _method
from optax_boost import _protocol
from optax_boost import _tree
from optax_boost._sgperm import _execution
from optax_boost._sgperm import _sorting
from optax_boost._sgperm._execution import Weights


@dataclasses.dataclass(frozen=True)
class Layout:
  """How a leaf is cut into weight vectors."""

  path: str = dataclasses.field(compare=False)  # leaves that differ in it alone share programs
  shape: tuple[int, ...]
  fan_in: tuple[int, ...]  # the axes that run along a weight vector, ascending
  excluded: bool = False  # not permuted

  @property
  def name(self) -> str:
    """The path, for messages."""
    return _tree.leaf_name(self.path)

  @property
  def outputs(self) -> tuple[int, ...]:
    """The axes that number the vectors."""
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
    return self.length > 1 and self.vectors > 0 and not self.excluded

  def fan_in_first(self, x: jax.Array) -> jax.Array:
    """The leaf as (*fan_in, *outputs)."""
    return jnp.transpose(x, self.fan_in + self.outputs)

  def columns(self, x: jax.Array) -> jax.Array:
    """The leaf as (n, vectors)."""
    return self.fan_in_first(x).reshape(self.length, self.vectors)

  def leaf(self, columns: jax.Array) -> jax.Array:
    """The inverse of :meth:`columns` and of :meth:`fan_in_first`."""
    axes = self.fan_in + self.outputs
    return jnp.transpose(columns.reshape([self.shape[a] for a in axes]), np.argsort(axes).tolist())


class Cutter:
  """Cuts the leaves of a method's trees into weight vectors, and checks that they can be."""

  def __init__(
    self,
    method: str,
    layout: Literal["flax", "torch"],
    layers: _layers.Layers | None,
    exclude: _base.LeafSelector = None,
  ) -> None:
    _base.check_name("layout", layout, ("flax", "torch"))
    self._method, self._layers = method, _method.check_layers(layers)

    def layouts(tree: Any) -> list[Layout]:
      leaves = _layers.leaves_of(tree, layers)
      excluded = _tree.select(tree, exclude, "exclude")

      def fan_in(leaf: _layers.Leaf) -> tuple[int, ...]:
        vector = len(leaf.layer_axes) <= 1 or _tree.is_bias_or_norm(leaf.path)
        return leaf.layer_axes if vector else _layers.fan_in(leaf, layout)

      return [
        Layout(leaf.path, leaf.shape, fan_in(leaf), skip)
        for leaf, skip in zip(leaves, excluded, strict=True)
      ]

    # Of every leaf, in the order of `jax.tree.leaves`.
    self.layouts = _tree.once_per_tree(layouts)

  def for_init(self, params: Any) -> list[Layout]:
    """The layouts of params whose values, if they are known, are finite."""
    _tree.check_floating(params, self._method)
    layouts = self.layouts(params)
    for lay, x in zip(layouts, jax.tree.leaves(params), strict=True):
      unknown = isinstance(x, jax.core.Tracer | jax.ShapeDtypeStruct)
      if not (lay.excluded or unknown or _finite(x)):
        raise ValueError(
          f"`{self._method}` needs finite initial weights, for it keeps their values; the leaf"
          f" '{lay.name}' has a NaN or an infinity. Initialize it again, or leave it to another"
          " optimizer with `optax.partition`."
        )
    return layouts

  def for_update(self, updates: Any, state: Any, state_type: type, params: Any) -> list[Layout]:
    """The layouts of params that fit the gradients and the state."""
    _tree.check_update(self._method, updates, state, state_type, params, needs_params=True)
    layouts = self.layouts(params)
    held = [lay.shape for lay in layouts if not lay.excluded]
    shapes = [jnp.shape(x) for x in jax.tree.leaves(state.permuted_params)]
    if held != shapes:
      raise ValueError(
        f"`{self._method}` needs the params that its state was made for, of shapes"
        f" {_base.shorten(shapes)}; got {_base.shorten(held)}. Start from `tx.init(params)`."
      )
    if self._layers is None:
      _protocol.announce_layers(self._method, [lay.path for lay in layouts if lay.movable])
    return layouts


def _finite(x: jax.Array) -> bool:
  # Within a trace known arrays are not its arguments.
  with jax.ensure_compile_time_eval():
    return bool(_largest_is_finite(x))


@jax.jit
def _largest_is_finite(x: jax.Array) -> jax.Array:
  # On a CPU this compiles three times as fast as the conjunction of all entries.
  return jnp.isfinite(jnp.max(jnp.abs(x), initial=0))


def ranks(layout: Layout, x: Any) -> Any:
  """The ranks of a leaf's weights in their vectors, equal ones in natural order; int32."""
  return x.update(dtype=jnp.int32) if isinstance(x, jax.ShapeDtypeStruct) else _ranks(layout, x)


@functools.partial(jax.jit, static_argnums=0)
def _ranks(layout: Layout, x: jax.Array) -> jax.Array:
  if not layout.movable:
    return jnp.zeros(layout.shape, jnp.int32)

  def sort(x: jax.Array) -> jax.Array:
    columns = layout.columns(x)
    rows = jax.lax.broadcasted_iota(jnp.int32, columns.shape, 0)
    # Once in a training: XLA's own sort compiles four times as fast as `_sorting.argsort`.
    _, order = jax.lax.sort((columns, rows), dimension=0, num_keys=1)
    ranks = layout.leaf(_sorting.inverse(order))
    return _execution.sharded_like(jnp.zeros_like(x, jnp.int32), ranks, x)

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
  spread = functools.partial(jnp.ptp, axis=0, keepdims=True)
  return _execution.auto_sharded(lambda x: spread(layout.columns(x)), None)(x)


def identity(x: Any) -> Any:
  """The permutation of a leaf that changes nothing, int32."""
  if isinstance(x, jax.ShapeDtypeStruct):
    return x.update(dtype=jnp.int32)
  # A jit drops an argument without entries, and with it its mesh.
  return _entries(x) if x.size else jnp.zeros_like(x, dtype=jnp.int32)


@jax.jit
def _entries(x: jax.Array) -> jax.Array:
  """The entries of a raveled leaf, in its shape."""
  if x.size > np.iinfo(np.int32).max:
    raise ValueError(f"A leaf may have 2^31 - 1 entries at most; got one of shape {x.shape}.")
  entries = jnp.arange(x.size, dtype=jnp.int32).reshape(x.shape)
  # No weight is above infinity: zeros, sharded like the leaf.
  return entries + (x > jnp.inf).astype(jnp.int32)


@functools.partial(jax.jit, static_argnums=0)
def whole(layout: Layout, held: Weights, moved: Weights) -> Weights:
  """A leaf's weights, moved as (*fan_in, *outputs), in the leaf's shape and with its sharding."""

  def one(old: jax.Array, new: jax.Array) -> jax.Array:
    return _execution.sharded_like(old, layout.leaf(new), held.values)

  return jax.tree.map(one, held, moved)


def difference(current: jax.Array, target: jax.Array, dtype: Any) -> jax.Array:
  """The update from weights to others of their dtype, in the wider of that and another."""
  wide = jnp.promote_types(current.dtype, dtype)
  return target.astype(wide) - current.astype(wide)

"""Leaves as stacks of weight vectors: one column per output, its incoming weights in it."""

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from optax_boost._form import _finiteness, _state_check
from optax_boost._foundation import (
  _checks,
  _leaf_names,
  _paths,
  _selectors,
  _trees,
  _types,
)
from optax_boost._methods import _leaves
from optax_boost._trace import _layer_axes


@dataclasses.dataclass(frozen=True)
class Layout:
  """How a leaf is cut into weight vectors."""

  name: str = dataclasses.field(compare=False)  # leaves that differ in it alone share programs
  shape: tuple[int, ...]
  fan_in: tuple[int, ...]  # the axes that run along a weight vector
  excluded: bool = False  # not permuted

  @property
  def axes(self) -> tuple[int, ...]:
    """All axes, the fan-in first."""
    return self.fan_in + tuple(axis for axis in range(len(self.shape)) if axis not in self.fan_in)

  @property
  def length(self) -> int:
    """The number n of weights in a vector."""
    return math.prod(self.shape[axis] for axis in self.fan_in)

  @property
  def vectors(self) -> int:
    """The number of vectors."""
    return math.prod(self.shape[axis] for axis in self.axes[len(self.fan_in) :])

  @property
  def movable(self) -> bool:
    """Whether there is anything to permute."""
    return self.length > 1 and self.vectors > 0 and not self.excluded

  def fan_in_first(self, x: jax.Array) -> jax.Array:
    """The leaf as (*fan_in, *outputs)."""
    return jnp.transpose(x, self.axes)

  def columns(self, x: jax.Array) -> jax.Array:
    """The leaf as (n, vectors)."""
    return self.fan_in_first(x).reshape(self.length, self.vectors)

  def leaf(self, columns: jax.Array) -> jax.Array:
    """The inverse of :meth:`columns` and of :meth:`fan_in_first`."""
    shape = [self.shape[axis] for axis in self.axes]
    return jnp.transpose(columns.reshape(shape), np.argsort(self.axes).tolist())


class Cutter:
  """Cuts the leaves of a method's trees into weight vectors, and checks that they can be."""

  def __init__(
    self,
    method: str,
    layout: Literal["flax", "torch"],
    layers: _layer_axes.LayerAxes | None,
    exclude: _types.LeafSelector = None,
  ) -> None:
    _checks.check_name("layout", layout, ("flax", "torch"))
    self._method, self._layers = method, _leaves.check_layers(layers)

    def layout_of(leaf: _layer_axes.Leaf, excluded: bool) -> Layout:
      vector = len(leaf.axes_of_layer) <= 1 or _leaf_names.is_bias_or_norm(leaf.path)
      fan_in = leaf.axes_of_layer if vector else _layer_axes.fan_in(leaf, layout)
      return Layout(_paths.leaf_name(leaf.path), leaf.shape, fan_in, excluded)

    def layouts(tree: Any, layers: _layer_axes.LayerAxes | None) -> list[Layout]:
      excluded = _selectors.select(tree, exclude, "exclude")
      leaves = _layer_axes.leaves_of(tree, layers)
      permuted = [leaf for leaf, skip in zip(leaves, excluded, strict=True) if not skip]
      _leaves.warn_of_unknown_axes(method, permuted, layers)
      return list(map(layout_of, leaves, excluded))

    self._layouts = _trees.once_per_tree(layouts)

  def for_init(self, params: Any) -> list[Layout]:
    """The layouts of all leaves; ``update`` may get `layers` that change their axes.

    Refuses weights that are not finite, as far as their values are known.
    """
    layouts: list[Layout] = self._layouts(params, self._layers)
    for lay, x in zip(layouts, jax.tree.leaves(params), strict=True):
      unknown = isinstance(x, jax.core.Tracer | jax.ShapeDtypeStruct)
      if not (lay.excluded or unknown or _finite(x)):
        raise ValueError(
          f"`{self._method}` needs finite initial weights, for it keeps their values; the leaf"
          f" '{lay.name}' has a NaN or an infinity. Initialize it again, or leave it to another"
          " optimizer with `optax.partition`."
        )
    return layouts

  def for_update(self, state: Any, params: Any, layers: Any) -> list[Layout]:
    """The layouts of params that fit the state; `layers` as ``update`` gets it."""
    layouts: list[Layout] = self._layouts(params, _leaves.choose_layers(self._layers, layers))
    shapes = [lay.shape for lay in layouts if not lay.excluded]
    state_shapes = [jnp.shape(x) for x in jax.tree.leaves(state.permuted_params)]
    _state_check.check_shapes(self._method, state_shapes, shapes)
    return layouts


def _finite(x: jax.Array) -> bool:
  # Computed at once even inside a trace, as the values are known.
  with jax.ensure_compile_time_eval():
    return bool(_largest_is_finite(x))


@jax.jit
def _largest_is_finite(x: jax.Array) -> jax.Array:
  # The largest magnitude decides for all entries. On a CPU this compiles three times as fast as
  # `jnp.all` over all of them.
  return _finiteness.finite_entries(jnp.max(jnp.abs(x), initial=0))


def identity(x: Any) -> Any:
  """The permutation of a leaf that changes nothing, int32."""
  if isinstance(x, jax.ShapeDtypeStruct):
    return x.update(dtype=jnp.int32)
  # `jax.jit` drops an argument without entries, and with it the mesh.
  return _entries(x) if x.size else jnp.zeros_like(x, dtype=jnp.int32)


@jax.jit
def _entries(x: jax.Array) -> jax.Array:
  if x.size > np.iinfo(np.int32).max:
    raise ValueError(f"A leaf may have 2^31 - 1 entries at most; got one of shape {x.shape}.")
  entries = jnp.arange(x.size, dtype=jnp.int32).reshape(x.shape)
  # XLA 19: `x > inf` is always False, but never folded: these zeros are sharded as the leaf is.
  return entries + (x > jnp.inf).astype(jnp.int32)


def difference(gradient: jax.Array, current: jax.Array, target: jax.Array) -> jax.Array:
  """The update that leads from `current` to `target`, in the wider dtype of params and gradient."""
  dtype = jnp.promote_types(current.dtype, gradient.dtype)
  return target.astype(dtype) - current.astype(dtype)

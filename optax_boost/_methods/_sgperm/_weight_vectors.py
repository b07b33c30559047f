"""Cuts leaves into weight vectors: each vector holds the weights that lead into one output."""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost._form import _finiteness, _state_check
from optax_boost._foundation import (
  _checks,
  _leaf_names,
  _paths,
  _selectors,
  _trees,
  _types,
)
from optax_boost._methods import _layer_arguments
from optax_boost._trace import _layer_axes


@dataclasses.dataclass(frozen=True)
class Layout:
  """Describes how a leaf is cut into weight vectors."""

  # The path of the leaf. Equality ignores the path, so that leaves of equal layouts share a
  # compiled program.
  name: str = dataclasses.field(compare=False)
  shape: tuple[int, ...]
  fan_in: tuple[int, ...]  # the axes that run along a weight vector
  excluded: bool = False  # whether the argument `exclude` selects the leaf

  @property
  def axes(self) -> tuple[int, ...]:
    """Returns all axes of the leaf, the axes of the fan-in first."""
    return self.fan_in + tuple(axis for axis in range(len(self.shape)) if axis not in self.fan_in)

  @property
  def length(self) -> int:
    """Returns the number n of weights in a vector."""
    return math.prod(self.shape[axis] for axis in self.fan_in)

  @property
  def vectors(self) -> int:
    """Returns the number of vectors."""
    return math.prod(self.shape[axis] for axis in self.axes[len(self.fan_in) :])

  @property
  def movable(self) -> bool:
    """Returns whether the leaf is permuted: not excluded, and several weights in a vector."""
    return self.length > 1 and self.vectors > 0 and not self.excluded

  def fan_in_first(self, x: jax.Array) -> jax.Array:
    """Returns the leaf `x` with its axes in the order (*fan_in, *outputs)."""
    return jnp.transpose(x, self.axes)

  def columns(self, x: jax.Array) -> jax.Array:
    """Returns the leaf `x` as an array (n, vectors)."""
    return self.fan_in_first(x).reshape(self.length, self.vectors)

  def leaf(self, columns: jax.Array) -> jax.Array:
    """Returns the leaf from the result of :meth:`columns` or :meth:`fan_in_first`."""
    shape = [self.shape[axis] for axis in self.axes]
    return jnp.transpose(columns.reshape(shape), np.argsort(self.axes).tolist())


class Layouts:
  """Finds the layouts of a tree's leaves from the arguments of `sgperm` or `laperm`."""

  def __init__(
    self,
    method: str,
    layout: Literal["flax", "torch"],
    layers: _layer_axes.LayerAxes | None,
    exclude: _types.LeafSelector = None,
  ) -> None:
    _checks.check_name("layout", layout, ("flax", "torch"))
    _selectors.check_selector("exclude", exclude)
    self._method, self._layers = method, _layer_arguments.check_layers(layers)

    def layout_of(leaf: _layer_axes.Leaf, excluded: bool) -> Layout:
      vector = len(leaf.axes_of_layer) <= 1 or _leaf_names.is_bias_or_norm(leaf.path)
      fan_in = leaf.axes_of_layer if vector else _layer_axes.fan_in(leaf, layout)
      return Layout(_paths.leaf_name(leaf.path), leaf.shape, fan_in, excluded)

    def layouts(tree: _types.Tree, layers: _layer_axes.LayerAxes | None) -> list[Layout]:
      excluded = _selectors.select(tree, exclude, "exclude")
      leaves = _layer_axes.leaves_of(tree, layers)
      permuted = [leaf for leaf, skip in zip(leaves, excluded, strict=True) if not skip]
      _layer_arguments.warn_of_unknown_axes(method, permuted, layers)
      return list(map(layout_of, leaves, excluded))

    self._layouts = _trees.once_per_tree(layouts)

  def for_init(self, params: optax.Params) -> list[Layout]:
    """Returns the layouts of all leaves for ``init``.

    These layouts follow from the arguments of the factory alone, since ``init`` has no argument
    `layers`. Raises ValueError if a leaf is not finite; excluded leaves and tracers are not
    checked.
    """
    layouts: list[Layout] = self._layouts(params, self._layers)
    for lay, x in zip(layouts, jax.tree.leaves(params), strict=True):
      unknown = isinstance(x, jax.core.Tracer | jax.ShapeDtypeStruct)
      if not (lay.excluded or unknown or _finite(x)):
        raise ValueError(
          f"`{self._method}` needs finite initial weights, whose values it keeps; got a NaN or an"
          f" infinity in the leaf '{lay.name}'. Initialize the leaf again."
        )
    return layouts

  def for_update(
    self, permuted_params: optax.Params, params: optax.Params, layers: _types.Unchecked
  ) -> list[Layout]:
    """Returns the layouts of all leaves for ``update``.

    `layers` is the extra argument of ``update``. It is used if the factory got no `layers`. Raises
    ValueError if the state's `permuted_params` have other shapes than `params`.
    """
    layer_axes = _layer_arguments.choose_layers(self._layers, layers)
    layouts: list[Layout] = self._layouts(params, layer_axes)
    shapes = [lay.shape for lay in layouts if not lay.excluded]
    state_shapes = [jnp.shape(x) for x in jax.tree.leaves(permuted_params)]
    _state_check.check_shapes(self._method, state_shapes, shapes)
    return layouts


def _finite(x: jax.Array) -> bool:
  # `x` is a concrete array. But during a trace, e.g. if `jit` traces `init`, the jitted function
  # would return a tracer, and `bool` would fail. So the function runs outside of the trace.
  with jax.ensure_compile_time_eval():
    return bool(_largest_is_finite(x))


@jax.jit
def _largest_is_finite(x: jax.Array) -> jax.Array:
  # All entries are finite if the largest magnitude is finite. On a CPU this compiles three times as
  # fast as `jnp.all` over all entries.
  return _finiteness.finite_entries(jnp.max(jnp.abs(x), initial=0))


def identity(x: jax.Array | jax.ShapeDtypeStruct) -> jax.Array | jax.ShapeDtypeStruct:
  """Returns the identity as a permutation: each entry's index in the raveled leaf, int32."""
  if isinstance(x, jax.ShapeDtypeStruct):
    return x.update(dtype=jnp.int32)
  # `jax.jit` drops an empty argument, so the result of `_entries` would lose the mesh of `x`.
  return _entries(x) if x.size else jnp.zeros_like(x, dtype=jnp.int32)


@jax.jit
def _entries(x: jax.Array) -> jax.Array:
  if x.size > np.iinfo(np.int32).max:
    raise ValueError(f"A leaf may have 2^31 - 1 entries at most; got one of shape {x.shape}.")
  entries = jnp.arange(x.size, dtype=jnp.int32).reshape(x.shape)
  # XLA 19: `x > inf` is always False, but XLA can't know that, so the sum is sharded as the leaf.
  return entries + (x > jnp.inf).astype(jnp.int32)


def difference(gradient: jax.Array, current: jax.Array, target: jax.Array) -> jax.Array:
  """Returns target - current, in the wider of the dtypes of `current` and `gradient`."""
  dtype = jnp.promote_types(current.dtype, gradient.dtype)
  return target.astype(dtype) - current.astype(dtype)

"""The arguments `exclude`, `layers` and `axis_name` of methods that treat each layer by itself."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp

from optax_boost._foundation import (
  _checks,
  _mesh_axes,
  _patterns,
  _selectors,
  _trees,
  _types,
  _warnings,
)
from optax_boost._trace import _layer_axes

# For each leaf of a tree: the leaf, and True if `exclude` selects it, so the method skips it.
Plan: TypeAlias = list[tuple[_layer_axes.Leaf, bool]]


class Leaves:
  """Checks `exclude`, `layers` and `axis_name` of a method's factory, and applies them to trees.

  ``auto(leaves)`` is the method's rule for ``exclude="auto"``: it returns a list of bools, True for
  each leaf that the method skips. With `layers_only`, the method needs the axes of layers alone.
  """

  def __init__(
    self,
    method: str,
    exclude: _types.LeafSelector,
    auto: Callable[[list[_layer_axes.Leaf]], list[bool]],
    layers: _layer_axes.LayerAxes | None,
    axis_name: _types.AxisNames | None,
    *,
    layers_only: bool = False,
  ) -> None:
    _selectors.check_selector("exclude", exclude)
    _check_axis_names(axis_name)
    self.method, self._axis_name, self._layers = method, axis_name, check_layers(layers)

    def plan(tree: _types.Tree, layers: _layer_axes.LayerAxes | None) -> Plan:
      leaves = _layer_axes.leaves_of(tree, layers)
      auto_selected = _selectors.is_auto_selector(exclude)
      skipped = auto(leaves) if auto_selected else _selectors.select(tree, exclude, "exclude")
      leaves_and_skips = list(zip(leaves, skipped, strict=True))
      treated = [leaf for leaf, skip in leaves_and_skips if not skip]
      warn_of_unknown_axes(method, treated, layers, layers_only=layers_only)
      return leaves_and_skips

    self._plan = _trees.once_per_tree(plan)

  def plan(self, tree: _types.Tree, layers: _types.Unchecked = None) -> Plan:
    """Returns each leaf, and whether it is skipped; `layers` is ``update``'s extra argument."""
    return self._plan(tree, self.layer_axes(layers))

  def layer_axes(self, layers: _types.Unchecked) -> _layer_axes.LayerAxes | None:
    """Returns `layers` of the factory, or of ``update`` if the factory's argument is None."""
    return choose_layers(self._layers, layers)

  def mesh_axes(self, leaves: Sequence[_layer_axes.Leaf]) -> list[_types.AxisName | None]:
    """Returns each leaf's mesh axes, from `axis_name`.

    Raises ValueError if a mesh axis is not bound.
    """
    names = self._axis_name
    if isinstance(names, Mapping):
      first = _patterns.first_match("axis_name", list(names), [leaf.path for leaf in leaves])
      axes_by_pattern = [axes or None for axes in names.values()]
      axes_by_leaf = [None if index is None else axes_by_pattern[index] for index in first]
    else:
      axes_by_leaf = [names] * len(leaves)
    for axes in dict.fromkeys(axes_by_leaf):
      _mesh_axes.require_axis("axis_name", axes, self.method)
    return axes_by_leaf

  def map(
    self,
    function: Callable[[jax.Array, _layer_axes.Leaf, _types.AxisName | None], jax.Array],
    tree: _types.SameTree,
    layers: _types.Unchecked,
  ) -> _types.SameTree:
    """Returns `tree` with ``function(array, leaf, mesh_axes)`` in place of each leaf not excluded.

    `leaf` has the path, shape and axes of the array. `mesh_axes` are the mesh axes over which the
    array is sharded. `layers` is ``update``'s extra argument.
    """
    plan = self.plan(tree, layers)
    mesh_axes = self.mesh_axes([leaf for leaf, _ in plan])

    def map_one(
      x: jax.Array, leaf_and_skip: tuple[_layer_axes.Leaf, bool], mesh: _types.AxisName | None
    ) -> jax.Array:
      leaf, skip = leaf_and_skip
      return x if skip or not jnp.size(x) else function(x, leaf, mesh)

    return _trees.map_with(map_one, tree, plan, mesh_axes)


def _check_axis_names(names: _types.AxisNames | None) -> None:
  if not isinstance(names, Mapping):
    _mesh_axes.check_axis_name("axis_name", names)
    return
  for pattern, axes in names.items():
    _patterns.compile_pattern("axis_name", pattern)
    if not isinstance(axes, tuple) or axes:
      _mesh_axes.check_axis_name(f"axis_name[{pattern!r}]", axes)


def warn_of_unknown_axes(
  method: str,
  leaves: Sequence[_layer_axes.Leaf],
  described: _layer_axes.LayerAxes | None,
  *,
  layers_only: bool = False,
) -> None:
  """Warns of leaves with several axes of which the trace could not tell the fan-in and outputs.

  `described` is the result of the trace. If `described` is None, there was no trace, and there is
  no warning. The warning names `method`. With `layers_only`, a known axis of layers is enough.
  """
  if described is None:
    return
  many_axes = {
    leaf.path
    for leaf in leaves
    if len(leaf.shape) > 1 and not (layers_only and leaf.axes is not None)
  }
  if explanation := described.explain_unknown(many_axes):
    _warnings.warn(
      f"{explanation} Until then, `{method}` goes by the names and shapes of these leaves.",
      UserWarning,
    )


def choose_layers(
  factory_layers: _layer_axes.LayerAxes | None, update_layers: _types.Unchecked
) -> _layer_axes.LayerAxes | None:
  """Returns `layers` of the factory, or of ``update`` if the factory's argument is None."""
  return factory_layers or check_layers(update_layers)


def check_layers(layers: _types.Unchecked) -> _layer_axes.LayerAxes | None:
  """Returns `layers` as LayerAxes or None; raises TypeError if `layers` has another type.

  The train step passes DeferredLayerAxes, which trace the loss when they are asked for LayerAxes.
  Only methods with an argument `layers` ask, through this function. So the loss is not traced if no
  method needs the axes.
  """
  if isinstance(layers, _layer_axes.DeferredLayerAxes):
    return layers.describe()
  if layers is not None and not isinstance(layers, _layer_axes.LayerAxes):
    raise TypeError(
      "`layers` must be the result of `optax_boost.layer_axes(loss_fn, params, batch)`, or None;"
      f" got {_checks.shorten(layers)}."
    )
  return layers

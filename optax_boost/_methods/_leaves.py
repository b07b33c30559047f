"""The leaves that a method acts on, by its arguments `exclude`, `layers` and `axis_name`.

A method whose step has a keyword argument `layers` gets the axes of the layers from the train step,
which reads them from a trace of the loss (``extra_args`` in
:mod:`optax_boost._form._transformation`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

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

# Each leaf of a tree, and whether the method leaves it alone.
Plan: TypeAlias = list[tuple[_layer_axes.Leaf, bool]]


class Leaves:
  """The leaves of a tree, and which of them a method leaves alone.

  The arguments `exclude`, `layers` and `axis_name` of a factory, checked when it is called; `auto`
  is the method's own rule, for ``exclude="auto"``.
  """

  def __init__(
    self,
    method: str,
    exclude: _types.LeafSelector,
    auto: Callable[[list[_layer_axes.Leaf]], list[bool]],
    layers: _layer_axes.LayerAxes | None,
    axis_name: _types.AxisNames | None,
  ) -> None:
    _selectors.check_selector("exclude", exclude)
    _check_axis_names(axis_name)
    self.method, self._axis_name, self._layers = method, axis_name, check_layers(layers)

    def plan(tree: _types.Tree, layers: _layer_axes.LayerAxes | None) -> Plan:
      leaves = _layer_axes.leaves_of(tree, layers)
      auto_selected = _selectors.is_auto_selector(exclude)
      skipped = auto(leaves) if auto_selected else _selectors.select(tree, exclude, "exclude")
      leaves_and_skips = list(zip(leaves, skipped, strict=True))
      warn_of_unknown_axes(method, [leaf for leaf, skip in leaves_and_skips if not skip], layers)
      return leaves_and_skips

    self._plan = _trees.once_per_tree(plan)

  def plan(self, tree: _types.Tree, layers: Any = None) -> Plan:
    """Each leaf, and whether it is left alone; `layers` is the extra argument of ``update``."""
    return self._plan(tree, self.layer_axes(layers))

  def layer_axes(self, layers: Any) -> _layer_axes.LayerAxes | None:
    """The axes that the factory was given, else those of `layers`, or None."""
    return self._layers or check_layers(layers)

  def mesh_axes(self, leaves: Sequence[_layer_axes.Leaf]) -> list[Any]:
    """For each leaf the mesh axes over which it is sharded, which must be bound, or None."""
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
    function: Callable[[jax.Array, _layer_axes.Leaf, Any], jax.Array],
    tree: _types.Tree,
    layers: Any,
  ) -> Any:
    """``function(array, leaf, mesh_axes)`` of the leaves with entries that aren't left alone."""
    plan = self.plan(tree, layers)
    mesh_axes = self.mesh_axes([leaf for leaf, _ in plan])

    def map_one(x: jax.Array, leaf_and_skip: tuple[_layer_axes.Leaf, bool], mesh: Any) -> jax.Array:
      leaf, skip = leaf_and_skip
      return x if skip or not jnp.size(x) else function(x, leaf, mesh)

    return _trees.map_with(map_one, tree, plan, mesh_axes)


def _check_axis_names(names: _types.AxisNames | None) -> None:
  """Checks names of mesh axes, the same for all leaves or by regular expression, or None."""
  if not isinstance(names, Mapping):
    _mesh_axes.check_axis_name("axis_name", names)
    return
  for pattern, axes in names.items():
    _patterns.compile_pattern("axis_name", pattern)
    if not isinstance(axes, tuple) or axes:
      _mesh_axes.check_axis_name(f"axis_name[{pattern!r}]", axes)


def warn_of_unknown_axes(
  method: str, leaves: Sequence[_layer_axes.Leaf], described: _layer_axes.LayerAxes | None
) -> None:
  """Warns of leaves whose axes a primitive hides, so that a method goes by name and shape."""
  if described is None:
    return
  many_axes = {leaf.path for leaf in leaves if len(leaf.shape) > 1}
  if explanation := described.explain_unknown(many_axes):
    _warnings.warn(
      f"{explanation} `{method}` takes each of these leaves for one layer, and goes by its name and"
      " shape.",
      UserWarning,
    )


def check_layers(layers: Any) -> _layer_axes.LayerAxes | None:
  """A description of layers, which the train step makes on demand, or None; else TypeError."""
  if isinstance(layers, _layer_axes.DeferredLayerAxes):
    return layers.describe()
  if layers is not None and not isinstance(layers, _layer_axes.LayerAxes):
    raise TypeError(
      "`layers` must be the result of `optax_boost.layer_axes(loss_fn, params, batch)`, or None;"
      f" got {_checks.shorten(layers)}."
    )
  return layers

"""Arguments that many methods share, and the leaves that a method acts on."""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

from optax_boost import _base
from optax_boost import _layers
from optax_boost import _protocol
from optax_boost import _tree


class Leaves:
  """The leaves of a tree, and which of them a method leaves alone.

  The arguments `exclude`, `layers` and `axis_name` of a factory, checked when it is called; `auto`
  is the method's own rule, for ``exclude="auto"``.
  """

  def __init__(
    self,
    method: str,
    exclude: _base.LeafSelector,
    auto: Callable[[list[_layers.Leaf]], list[bool]],
    layers: _layers.Layers | None,
    axis_name: _base.AxisNames | None,
  ) -> None:
    _tree.check_selector("exclude", exclude)
    _tree.check_axis_names("axis_name", axis_name)
    self.method, self._axis_name, self._layers = method, axis_name, check_layers(layers)

    def plan(tree: Any, layers: _layers.Layers | None) -> list[tuple[_layers.Leaf, bool]]:
      leaves = _layers.leaves_of(tree, layers)
      auto_selected = _tree.is_auto(exclude)
      skipped = auto(leaves) if auto_selected else _tree.select(tree, exclude, "exclude")
      return list(zip(leaves, skipped, strict=True))

    self._plan = _tree.once_per_tree(plan)

  def of(self, tree: Any, layers: Any = None) -> list[tuple[_layers.Leaf, bool]]:
    """Each leaf, and whether it is left alone; `layers` is the extra argument of ``update``."""
    known = self._layers or check_layers(layers)
    leaves = self._plan(tree, known)
    if known is None:
      _protocol.announce_layers(self.method, [leaf.path for leaf, skip in leaves if not skip])
    return leaves

  def mesh_axes(self, paths: Sequence[str]) -> list[Any]:
    """For each leaf the mesh axes over which it is sharded, which must be bound, or None."""
    return _tree.axis_names(paths, self._axis_name, "axis_name", self.method)


def check_layers(layers: Any) -> _layers.Layers | None:
  """An argument that is a description of layers, or None; TypeError for anything else."""
  if layers is not None and not isinstance(layers, _layers.Layers):
    raise TypeError(
      "`layers` must be the result of `optax_boost.layer_axes(loss_fn, params, batch)`, or None;"
      f" got {_base.shorten(layers)}."
    )
  return layers


def wants_layers(update: Any) -> Any:
  """Marks a method's ``update``: the train step passes it `layers`, from its trace of the loss."""
  update.wants_layers = True
  return update

"""Frozen layers of a scan whose backward pass is computed all the same, and the reason."""

from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from optax_boost import _jaxpr
from optax_boost import _stacked

# Trained leaves; by their number, as leaves in general.
_Leaves = frozenset[int]
_NONE: _Leaves = frozenset()
# The names of constructs by the names of their primitives.
_CONSTRUCTS = {
  "custom_jvp_call": "custom_jvp",
  "custom_vjp_call": "custom_vjp",
  "while": "while_loop",
}


class _Value(NamedTuple):
  """A value of the program."""

  views: _stacked.Views  # the partly frozen leaves that it is
  parts: _stacked.Views  # of these, the leaves that the train step has in parts
  trained: _Leaves  # the leaves with respect to which all of its layers have a derivative


def explain_uncut_scans(
  program: Any, frozen: Sequence[bool | np.ndarray], paths: Sequence[str]
) -> str | None:
  """Words for a warning if a scan over partly frozen leaves of a traced loss saves nothing.

  `frozen` tells for each leaf whether it is frozen, or which of its layers are.
  """
  variables = getattr(program, "jaxpr", program).invars
  scans = _UncutScans(frozen, [len(variable.aval.shape) for variable in variables])
  scans.run(program, scans.arguments())
  if scans.enclosed is not None:
    construct, leaves = scans.enclosed
    return (
      f"`freeze_layers` saves no time on the layers of {_names(leaves, paths)}: the loss scans over"
      f" them inside `{construct}`, where the train step cuts no scan. Frozen layers stand still"
      f" all the same. Take the scan out of `{construct}`, or use `{construct}` in the scan's body."
    )
  if scans.joined is not None:
    construct, leaves = scans.joined
    return (
      f"`freeze_layers` saves no time on the layers of {_names(leaves, paths)}: they pass through"
      f" `{construct}` before the loss scans over them, and there the train step takes them as a"
      f" whole. Frozen layers stand still all the same. Move `{construct}` into the scan's body."
    )
  if scans.fed is not None:
    trained, leaves = scans.fed
    verb = "train" if len(trained) > 1 else "trains"
    return (
      f"`freeze_layers` saves no time on the frozen layers of {_names(leaves, paths)}: their inputs"
      f" depend on {_names(trained, paths)}, which {verb}, so the gradient passes through them."
      " Frozen layers stand still all the same. To save time, freeze their inputs, too: in the same"
      " group or an earlier one."
    )
  return None


def _names(leaves: _Leaves, paths: Sequence[str]) -> str:
  first, *others = sorted(paths[leaf] for leaf in leaves)
  return f"'{first}'" + (f" and {len(others)} more" if others else "")


def _leaves(views: _stacked.Views) -> _Leaves:
  return frozenset(view.leaf for view in views)


def _whole(value: _Value, cut: _Leaves = _NONE) -> _Value:
  """A value as it is where its parts are joined, but for those of the leaves `cut`."""
  trained = value.trained | (_leaves(value.parts) - cut)
  return value._replace(parts=_stacked.NO_VIEWS, trained=trained)


class _UncutScans(_jaxpr.Interpreter[_Value]):
  """Finds the scans over partly frozen leaves of which no backward pass is skipped.

  It follows parts as :func:`_cut_scans.run` does.
  """

  def __init__(self, frozen: Sequence[bool | np.ndarray], ranks: Sequence[int]) -> None:
    self.enclosed: tuple[str, _Leaves] | None = None  # a construct, and the leaves sliced in it
    self.joined: tuple[str, _Leaves] | None = None  # a construct, and leaves that come out of it
    self.fed: tuple[_Leaves, _Leaves] | None = None  # trained leaves, and those that they feed
    self._frozen = frozen
    self._ranks = ranks
    self._layer_axes = {
      i: int(np.argmax(np.shape(f))) for i, f in enumerate(frozen) if np.any(f) and not np.all(f)
    }
    self._constructs: list[str] = []
    self._joined_by: dict[int, str] = {}

  def arguments(self) -> list[_Value]:
    """The leaves."""
    values = []
    for i, (rank, frozen) in enumerate(zip(self._ranks, self._frozen, strict=True)):
      views = _stacked.view_leaf(i, rank) if i in self._layer_axes else _stacked.NO_VIEWS
      values.append(_Value(views, views, _NONE if np.any(frozen) else frozenset([i])))
    return values

  def constant(self, value: Any) -> _Value:
    return _Value(_stacked.NO_VIEWS, _stacked.NO_VIEWS, _NONE)

  def join(self, values: Sequence[_Value]) -> _Value:
    return _Value(
      _stacked.NO_VIEWS.union(*(v.views for v in values)),
      _stacked.NO_VIEWS.union(*(v.parts for v in values)),
      _NONE.union(*(v.trained for v in values)),
    )

  def visit(self, equation: Any, inputs: list[_Value]) -> Sequence[_Value]:
    name = equation.primitive.name
    if name == "scan" or name in _jaxpr.PLAIN_CALLS:
      return super().visit(equation, inputs)
    if not any(True for _ in _jaxpr.sub_jaxprs(equation)):
      return self.operation(equation, inputs)
    construct = _CONSTRUCTS.get(name, name)
    self._joined_by |= dict.fromkeys(_leaves(self.join(inputs).parts), construct)
    self._constructs.append(construct)
    outputs = super().visit(equation, list(map(_whole, inputs)))
    self._constructs.pop()
    return outputs

  def operation(self, equation: Any, inputs: list[_Value]) -> list[_Value]:
    views = _stacked.follow_views(equation, [v.views for v in inputs])
    parts = _stacked.follow_views(equation, [v.parts for v in inputs])
    stops = equation.primitive.name == "stop_gradient"
    outputs = []
    for i, variable in enumerate(equation.outvars):
      operands = [inputs[i]] if _stacked.passes_each(equation) else inputs
      trained = _NONE.union(*(_whole(v, _leaves(parts[i])).trained for v in operands))
      if stops or not jnp.issubdtype(variable.aval.dtype, jnp.inexact):
        trained = _NONE
      outputs.append(_Value(views[i], parts[i], trained))
    return outputs

  def loop(self, equation: Any, body: Any, inputs: list[_Value], carry: slice) -> list[_Value]:
    if equation.primitive.name == "scan":
      self._check(inputs[: carry.stop], inputs[carry.stop :])
      slices = [_whole(v)._replace(views=_stacked.NO_VIEWS) for v in inputs[carry.stop :]]
      inputs = [*inputs[: carry.start], *map(_whole, inputs[carry]), *slices]
    outputs = self.settle(lambda own: list(map(_whole, self.run(body, own))), inputs, carry)
    return [value._replace(views=_stacked.NO_VIEWS) for value in outputs]

  def _check(self, others: list[_Value], slices: list[_Value]) -> None:
    """Notes a scan over partly frozen leaves, if something keeps their backward pass."""
    leaves, cut = _NONE, _NONE
    # Of leaves in parts, the slices of frozen layers are constants.
    feeding = _NONE.union(*(_whole(v).trained for v in others))
    for value in slices:
      own = self._sliced(value.parts)
      leaves, cut = leaves | self._sliced(value.views), cut | own
      feeding |= _whole(value, own).trained
    if leaves and self._constructs:
      self.enclosed = self._constructs[-1], leaves
    elif leaves - cut:
      self.joined = self._joined_by[min(leaves - cut)], leaves - cut
    elif leaves and feeding:
      self.fed = feeding, leaves

  def _sliced(self, views: _stacked.Views) -> _Leaves:
    """The leaves whose layers a scan over a value slices."""
    return _leaves(
      frozenset(v for v in views if v.is_whole and v.axes[0] == self._layer_axes[v.leaf])
    )

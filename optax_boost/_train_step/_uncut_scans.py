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

  views: _stacked.Views  # the leaves that it is
  trained: _Leaves  # the trained leaves with respect to which it has a derivative


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


class _UncutScans(_jaxpr.Interpreter[_Value]):
  """Finds the scans over partly frozen leaves of which no backward pass is skipped."""

  def __init__(self, frozen: Sequence[bool | np.ndarray], ranks: Sequence[int]) -> None:
    self.enclosed: tuple[str, _Leaves] | None = None  # a construct, and the leaves sliced in it
    self.fed: tuple[_Leaves, _Leaves] | None = None  # trained leaves, and those that they feed
    self._frozen = frozen
    self._ranks = ranks
    self._layer_axes = {
      i: int(np.argmax(np.shape(f))) for i, f in enumerate(frozen) if np.any(f) and not np.all(f)
    }
    self._constructs: list[str] = []

  def arguments(self) -> list[_Value]:
    """The leaves."""
    return [
      _Value(_stacked.view_leaf(i, rank), _NONE if np.all(f) else frozenset([i]))
      for i, (rank, f) in enumerate(zip(self._ranks, self._frozen, strict=True))
    ]

  def constant(self, value: Any) -> _Value:
    return _Value(_stacked.NO_VIEWS, _NONE)

  def join(self, values: Sequence[_Value]) -> _Value:
    return _Value(
      _stacked.NO_VIEWS.union(*(v.views for v in values)), _NONE.union(*(v.trained for v in values))
    )

  def visit(self, equation: Any, inputs: list[_Value]) -> Sequence[_Value]:
    name = equation.primitive.name
    if name == "scan" or name in _jaxpr.PLAIN_CALLS:
      return super().visit(equation, inputs)
    self._constructs.append(_CONSTRUCTS.get(name, name))
    outputs = super().visit(equation, inputs)
    self._constructs.pop()
    return outputs

  def operation(self, equation: Any, inputs: list[_Value]) -> list[_Value]:
    views = _stacked.follow_views(equation, [v.views for v in inputs])
    stops = equation.primitive.name == "stop_gradient"
    trained = _NONE if stops else _NONE.union(*(v.trained for v in inputs))
    return [
      _Value(own, trained if jnp.issubdtype(variable.aval.dtype, jnp.inexact) else _NONE)
      for own, variable in zip(views, equation.outvars, strict=True)
    ]

  def loop(self, equation: Any, body: Any, inputs: list[_Value], carry: slice) -> list[_Value]:
    inputs = list(inputs)
    if equation.primitive.name == "scan":
      self._check(inputs[: carry.stop], inputs[carry.stop :])
      inputs[carry.stop :] = [v._replace(views=_stacked.NO_VIEWS) for v in inputs[carry.stop :]]
    while True:
      outputs = self.run(body, inputs)
      # From the second round on the carry is a result of the body.
      merged = list(map(self.join, zip(inputs[carry], outputs, strict=False)))
      if merged == inputs[carry]:
        return [v._replace(views=_stacked.NO_VIEWS) for v in outputs]
      inputs[carry] = merged

  def _check(self, whole: list[_Value], slices: list[_Value]) -> None:
    """Notes a scan over partly frozen leaves, if something keeps their backward pass."""
    leaves = frozenset(
      view.leaf
      for view in self.join(slices).views
      if view.leaf in self._layer_axes
      and len(view.axes) == self._ranks[view.leaf]
      and view.axes[0] == self._layer_axes[view.leaf]
    )
    # Of partly frozen leaves, the frozen layers' slices are constants.
    feeding = self.join(whole).trained | (self.join(slices).trained - set(self._layer_axes))
    if leaves and self._constructs:
      self.enclosed = self._constructs[-1], leaves
    elif leaves and feeding:
      self.fed = feeding, leaves

"""Leaves that hold many layers along an axis, read from a trace of the loss.

A model that scans over its layers keeps them in one leaf with an axis of layers. In the traced
loss such a leaf enters a ``scan`` among the operands that it slices: axis 0 there, whatever axis
of the leaf a transpose put first.
"""

from collections.abc import Callable
from collections.abc import Sequence
import math
import re
from typing import Any
from typing import NamedTuple

import jax
import optax

from optax_boost import _jaxpr
from optax_boost import _tree

# Primitives that change where entries lie or when they are computed.
_PLACING = ("optimization_barrier", "pvary", "reshard", "sharding_constraint")
# Primitives that treat each entry alone.
_CASTS = ("convert_element_type", "copy", "reduce_precision", "stop_gradient")
_SUMS = ("add", "add_any", "clamp", "div", "max", "min", "mul", "neg", "select_n", "sub")
_POWERS = ("cbrt", "integer_pow", "pow", "rsqrt", "sqrt", "square")
_EXPONENTIALS = ("exp", "exp2", "expm1", "log", "log1p", "logistic", "tanh")
_OTHERS = ("abs", "cos", "erf", "floor", "round", "sign", "sin", "tan")
_SAME_AXES = (*_PLACING, *_CASTS, *_SUMS, *_POWERS, *_EXPONENTIALS, *_OTHERS)


class Stack(NamedTuple):
  """Layers that a scan runs through, one after the other."""

  axes: dict[int, int]  # for each leaf that it slices, the axis of the layers
  shared: frozenset[int]  # leaves that all layers use
  length: int
  reverse: bool


class View(NamedTuple):
  """A value made of one leaf, whose axes it has in another order."""

  leaf: int
  axes: tuple[int | None, ...]  # for each axis of the value the leaf's, None for any other
  is_whole: bool = True  # whether it holds all slices of the leaf


Views = frozenset[View]
NO_VIEWS: Views = frozenset()


def stacked_axes_of(program: Any, params: optax.Params) -> dict[str, tuple[int, ...]]:
  """The leaves that scans slice, by regular expression, and the axes of the layers."""
  paths = _tree.leaf_paths(params)
  axes: dict[str, tuple[int, ...]] = {}
  found = follow_scans(program, len(paths))
  outermost = {place for stack in found.stacks for place in stack.axes.items()}
  for leaf, axis in sorted(
    found.sliced, key=lambda place: (place[0], place not in outermost, place)
  ):
    pattern = f"^{re.escape(paths[leaf])}$"
    axes[pattern] = (*axes.get(pattern, ()), axis)
  return axes


def layer_axes(loss_fn: Callable[..., Any], tree: Any) -> dict[int, int]:
  """The axis of layers of each leaf that an outermost scan slices."""
  stacks = follow_scans(jax.make_jaxpr(loss_fn)(tree), len(jax.tree.leaves(tree))).stacks
  return {leaf: axis for stack in stacks for leaf, axis in stack.axes.items()}


def follow_scans(program: Any, leaves: int) -> "SlicedAxes":
  """The scans of a program that slice its first arguments, so many leaves."""
  ranks = [len(variable.aval.shape) for variable in program.jaxpr.invars]
  views = [view_leaf(i, rank) for i, rank in enumerate(ranks[:leaves])]
  scans = SlicedAxes()
  scans.run(program, views + [NO_VIEWS] * (len(ranks) - leaves))
  return scans


def view_leaf(leaf: int, rank: int) -> Views:
  """A leaf as it enters a program."""
  return frozenset([View(leaf, tuple(range(rank)))])


def operand_axes(equation: Any, operand: int = 0) -> tuple[int | None, ...]:
  """For each axis of a result that of an operand along which entries stay where they are, or None.

  Of several results each is that of one operand. Scans are found, and cut, behind such equations.
  """
  name, shape = equation.primitive.name, equation.invars[operand].aval.shape
  if name == "transpose":
    return tuple(equation.params["permutation"])
  if name == "reshape":
    places = {(math.prod(shape[:axis]), size): axis for axis, size in enumerate(shape)}
    new = equation.outvars[0].aval.shape
    return tuple(places.get((math.prod(new[:axis]), size)) for axis, size in enumerate(new))
  return tuple(range(len(shape))) if name in _SAME_AXES else ()


def passes_each(equation: Any) -> bool:
  """Whether each result of an equation is that of the operand in its place."""
  return equation.primitive.name in _PLACING


def follow_views(equation: Any, inputs: Sequence[Views]) -> list[Views]:
  """The leaves that the results of an equation are, with their axes in another order."""
  moved = []
  for operand, views in enumerate(inputs):
    order = operand_axes(equation, operand)
    axes = {view: tuple(None if a is None else view.axes[a] for a in order) for view in views}
    moved.append(frozenset(view._replace(axes=axes[view]) for view in views))
  results = moved if passes_each(equation) else [NO_VIEWS.union(*moved)] * len(equation.outvars)
  ranks = [len(variable.aval.shape) for variable in equation.outvars]
  return [
    frozenset(v for v in views if len(v.axes) == rank and {*v.axes} != {None})
    for views, rank in zip(results, ranks, strict=True)
  ]


class SlicedAxes(_jaxpr.Interpreter[Views]):
  """Follows the leaves through a program; notes the axes along which scans slice them."""

  def __init__(self) -> None:
    self.sliced: set[tuple[int, int]] = set()  # leaf and axis
    # The outermost scans over layers, in the order of the program; a leaf counts in the first.
    self.stacks: list[Stack] = []

  def constant(self, value: Any) -> Views:
    return NO_VIEWS

  def join(self, values: Sequence[Views]) -> Views:
    return NO_VIEWS.union(*values)

  def operation(self, equation: Any, inputs: list[Views]) -> list[Views]:
    return follow_views(equation, inputs)

  def loop(self, equation: Any, body: Any, inputs: list[Views], carry: slice) -> list[Views]:
    slices = []
    of_stacks = {leaf for stack in self.stacks for leaf in stack.axes}
    axes = {
      view.leaf: view.axes[0]
      for view in NO_VIEWS.union(*inputs[carry.stop :])
      if view.is_whole and view.axes[0] is not None and view.leaf not in of_stacks
    }
    # Without a carry, layers are side by side.
    if axes and carry.stop > carry.start and equation.params["length"]:
      shared = frozenset(v.leaf for v in NO_VIEWS.union(*inputs[: carry.start]) if v.is_whole)
      self.stacks.append(Stack(axes, shared, equation.params["length"], equation.params["reverse"]))
    for views in inputs[carry.stop :]:
      self.sliced |= {(v.leaf, v.axes[0]) for v in views if v.axes[0] is not None}
      slices.append(frozenset(View(v.leaf, v.axes[1:], is_whole=False) for v in views))
    self.run(body, [*inputs[: carry.stop], *slices])
    return [NO_VIEWS] * len(equation.outvars)

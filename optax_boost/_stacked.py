"""Leaves that hold many layers along an axis, read from a trace of the loss.

A model that scans over its layers keeps them in one leaf with an axis of layers. In the traced
loss such a leaf enters a ``scan`` among the operands that it slices: axis 0 there, whatever axis
of the leaf a transpose put first.
"""

from collections.abc import Callable
from collections.abc import Sequence
import re
from typing import Any
from typing import NamedTuple

import jax
import optax

from optax_boost import _base
from optax_boost import _jaxpr
from optax_boost import _tree

# Primitives that treat each entry alone.
_ARITHMETIC = ("add", "add_any", "div", "mul", "neg", "select_n", "sub")
ENTRYWISE = (*_ARITHMETIC, "convert_element_type", "copy", "reduce_precision")
# Primitives that change a leaf's values or dtype but no axis.
_SAME_AXES = (*ENTRYWISE, "optimization_barrier", "pvary", "sharding_constraint", "stop_gradient")


class Stack(NamedTuple):
  """Layers that a scan runs through, one after the other."""

  axes: dict[int, int]  # for each leaf that it slices, the axis of the layers
  shared: frozenset[int]  # leaves that all layers use
  length: int
  reverse: bool


class View(NamedTuple):
  """A value made of one leaf, whose axes it has in another order."""

  leaf: int
  axes: tuple[int, ...]  # for each axis of the value, the leaf's


Views = frozenset[View]
NO_VIEWS: Views = frozenset()


def stacked_axes(
  loss_fn: Callable[..., Any], params: optax.Params, *args: Any
) -> dict[str, tuple[int, ...]]:
  """Finds the leaves that hold many layers, and the axes along which they are stacked.

  Read from a trace of the loss: a leaf is stacked where ``lax.scan``, ``lax.map``, ``nn.scan`` or
  ``nnx.scan`` slices it. Nothing is computed; arrays may be abstract.

  Args:
    loss_fn: the loss, as ``loss_fn(params, *args)``; aux is ignored.
    params: the params.
    *args: the loss's other arguments: statistics, batch, rng.

  Returns:
    The argument `stacked_axes` of :func:`lars`, :func:`centralize`, :func:`adasum`,
    :func:`sgperm` and :func:`laperm`: a pattern for each stacked leaf, with its axes: several for
    scans in scans, that of the outermost first. Empty where no scan slices a leaf, which
    :func:`active_window` refuses.

  Raises:
    TypeError: `loss_fn` is not callable, or a leaf of the other arguments is no array.

  Examples:
    >>> import jax, jax.numpy as jnp, optax_boost
    >>> def loss_fn(params, x):
    ...   x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["blocks"])
    ...   return jnp.mean(x @ params["head"])
    >>> params = {"blocks": jnp.ones((4, 8, 8)), "head": jnp.ones((8, 1))}
    >>> optax_boost.stacked_axes(loss_fn, params, jnp.ones((2, 8)))
    {'^blocks$': (0,)}
  """
  _base.check_callable("loss_fn", loss_fn, "loss_fn(params, *args)")
  _tree.check_traceable("params", params)
  _tree.check_traceable("args", args)
  paths = _tree.leaf_paths(params)
  axes: dict[str, tuple[int, ...]] = {}
  found = _follow(loss_fn, params, *args)
  outermost = {place for stack in found.stacks for place in stack.axes.items()}
  for leaf, axis in sorted(
    found.sliced, key=lambda place: (place[0], place not in outermost, place)
  ):
    pattern = f"^{re.escape(paths[leaf])}$"
    axes[pattern] = (*axes.get(pattern, ()), axis)
  return axes


def find_stacks(loss_fn: Callable[..., Any], params: Any, *args: Any) -> list[Stack]:
  """The outermost scans over layers, in the order of the program; a leaf counts in the first."""
  return _follow(loss_fn, params, *args).stacks


def layer_axes(loss_fn: Callable[..., Any], tree: Any) -> dict[int, int]:
  """The axis of layers of each leaf that an outermost scan slices."""
  return {leaf: axis for s in find_stacks(loss_fn, tree) for leaf, axis in s.axes.items()}


def _follow(loss_fn: Callable[..., Any], params: Any, *args: Any) -> "_SlicedAxes":
  closed = jax.make_jaxpr(loss_fn)(params, *args)
  ranks = [len(variable.aval.shape) for variable in closed.jaxpr.invars]
  leaves = len(jax.tree.leaves(params))
  views = [view_leaf(i, rank) for i, rank in enumerate(ranks[:leaves])]
  scans = _SlicedAxes(ranks)
  scans.run(closed, views + [NO_VIEWS] * (len(ranks) - leaves))
  return scans


def view_leaf(leaf: int, rank: int) -> Views:
  """A leaf as it enters a program."""
  return frozenset([View(leaf, tuple(range(rank)))])


def follow_views(equation: Any, inputs: Sequence[Views]) -> list[Views]:
  """The leaves that the results of an equation are, with their axes in another order."""
  outputs = [NO_VIEWS] * len(equation.outvars)
  if equation.primitive.name == "transpose":
    order = equation.params["permutation"]
    outputs = [frozenset(View(v.leaf, tuple(v.axes[a] for a in order)) for v in inputs[0])]
  elif equation.primitive.name in _SAME_AXES:
    rank = len(equation.outvars[0].aval.shape)
    views = frozenset(v for v in NO_VIEWS.union(*inputs) if len(v.axes) == rank)
    outputs = [views] * len(outputs)
  return outputs


class _SlicedAxes(_jaxpr.Interpreter[Views]):
  """Follows the leaves through a program; notes the axes along which scans slice them."""

  def __init__(self, ranks: Sequence[int]) -> None:
    self.sliced: set[tuple[int, int]] = set()  # leaf and axis
    self.stacks: list[Stack] = []
    self._ranks = ranks

  def constant(self, value: Any) -> Views:
    return NO_VIEWS

  def join(self, values: Sequence[Views]) -> Views:
    return NO_VIEWS.union(*values)

  def operation(self, equation: Any, inputs: list[Views]) -> list[Views]:
    return follow_views(equation, inputs)

  def loop(self, equation: Any, body: Any, inputs: list[Views], carry: slice) -> list[Views]:
    slices = []
    whole = {v.leaf: v.axes[0] for v in NO_VIEWS.union(*inputs[carry.stop :]) if self._is_whole(v)}
    axes = {
      leaf: axis for leaf, axis in whole.items() if not any(leaf in s.axes for s in self.stacks)
    }
    # Without a carry, layers are side by side.
    if axes and carry.stop > carry.start and equation.params["length"]:
      shared = frozenset(
        v.leaf for v in NO_VIEWS.union(*inputs[: carry.start]) if self._is_whole(v)
      )
      self.stacks.append(Stack(axes, shared, equation.params["length"], equation.params["reverse"]))
    for views in inputs[carry.stop :]:
      self.sliced |= {(v.leaf, v.axes[0]) for v in views}
      slices.append(frozenset(View(v.leaf, v.axes[1:]) for v in views))
    self.run(body, [*inputs[: carry.stop], *slices])
    return [NO_VIEWS] * len(equation.outvars)

  def _is_whole(self, view: View) -> bool:
    return len(view.axes) == self._ranks[view.leaf]

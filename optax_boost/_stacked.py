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
from jax.extend import core as jax_core
import optax

from optax_boost import _base
from optax_boost import _jaxpr
from optax_boost import _tree

# Primitives that change a leaf's values or dtype but no axis.
_SAME_AXES = (
  "convert_element_type",
  "copy",
  "mul",
  "add",
  "add_any",
  "sub",
  "neg",
  "div",
  "optimization_barrier",
  "pvary",
  "reduce_precision",
  "select_n",
  "sharding_constraint",
  "stop_gradient",
)


class _View(NamedTuple):
  """A value made of one leaf, whose axes it has in another order.

  Attributes:
    leaf: the leaf's number.
    axes: for each axis of the value, the leaf's.
  """

  leaf: int
  axes: tuple[int, ...]


_Views = frozenset[_View]


def stacked_axes(
  loss_fn: Callable[..., Any], params: optax.Params, *args: Any
) -> dict[str, tuple[int, ...]]:
  """Finds the leaves that hold many layers, and the axes along which they are stacked.

  Read from a trace of the loss: a leaf is stacked where ``lax.scan``, ``lax.map``, ``nn.scan`` or
  ``nnx.scan`` slices it, through ``jit``, ``remat``, custom derivatives, ``shard_map`` and
  transposes. Nothing is computed; arrays may be abstract.

  Args:
    loss_fn: the loss, as ``loss_fn(params, *args)``; aux is ignored.
    params: the params.
    *args: the loss's other arguments: statistics, batch, rng.

  Returns:
    Axes by regular expression, one for each stacked leaf; several axes where scans stand in scans.
    It is what the argument `stacked_axes` of :func:`lars`, :func:`centralize`, :func:`sgperm` and
    :func:`laperm` takes.

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
  closed = jax.make_jaxpr(loss_fn)(params, *args)
  shapes = [leaf.shape for leaf in _tree.describe(params)]
  views = [
    frozenset([_View(i, tuple(range(len(shapes[i]))))]) if i < len(shapes) else frozenset[_View]()
    for i in range(len(closed.jaxpr.invars))
  ]
  stacked: set[tuple[int, int]] = set()
  _walk(closed.jaxpr, views, stacked)
  paths = _tree.leaf_paths(params)
  return {
    f"^{re.escape(paths[leaf])}$": tuple(sorted(axis for i, axis in stacked if i == leaf))
    for leaf in sorted({leaf for leaf, _ in stacked})
  }


def _walk(jaxpr: Any, inputs: Sequence[_Views], stacked: set[tuple[int, int]]) -> list[_Views]:
  """Follows the leaves through a program; notes the axes along which scans slice them."""
  views = dict(zip(jaxpr.invars, inputs, strict=True))

  def read(atom: Any) -> _Views:
    return frozenset() if isinstance(atom, jax_core.Literal) else views.get(atom, frozenset())

  for equation in jaxpr.eqns:
    operands = [read(atom) for atom in equation.invars]
    if any(operands):
      outputs = _equation(equation, operands, stacked)
      views.update(zip(equation.outvars, outputs, strict=True))
  return [read(atom) for atom in jaxpr.outvars]


def _equation(
  equation: Any, operands: list[_Views], stacked: set[tuple[int, int]]
) -> Sequence[_Views]:
  name, settings = equation.primitive.name, equation.params
  nothing: list[_Views] = [frozenset()] * len(equation.outvars)
  if name == "scan":
    _scan(settings, operands, stacked)
    return nothing
  if name == "transpose":
    order = settings["permutation"]
    return [frozenset(_View(v.leaf, tuple(v.axes[a] for a in order)) for v in operands[0])]
  if name in _SAME_AXES:
    rank = len(equation.outvars[0].aval.shape)
    return [frozenset(v for views in operands for v in views if len(v.axes) == rank)] * len(nothing)
  if name == "cond":
    for branch in settings["branches"]:
      _walk(branch.jaxpr, operands[1:], stacked)
    return nothing
  call = _jaxpr.inlined(equation)
  if call is not None:
    return _walk(getattr(call, "jaxpr", call), operands, stacked)
  return nothing


def _scan(settings: Any, operands: list[_Views], stacked: set[tuple[int, int]]) -> None:
  sliced = settings["num_consts"] + settings["num_carry"]
  stacked |= {(v.leaf, v.axes[0]) for views in operands[sliced:] for v in views}
  body = [frozenset(_View(v.leaf, v.axes[1:]) for v in views) for views in operands[sliced:]]
  _walk(settings["jaxpr"].jaxpr, [*operands[:sliced], *body], stacked)

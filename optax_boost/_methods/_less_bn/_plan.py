"""Decides which BatchNorms are removed.

A residual block ends in an addition ``a + b`` whose operands are computed from one earlier value.
The operations that compute `a` are one side of the block, the operations that compute `b` the other
side. A side is the block's shortcut if it has at most one layer with weights, and fewer layers than
the opposite side. Any other side is a branch.
"""

from collections.abc import Callable, Collection, Sequence
import math
from typing import Any, Literal, NamedTuple, TypeAlias

import jax

from optax_boost._foundation import _checks, _warnings
from optax_boost._methods._less_bn import _data_graph

Role: TypeAlias = Literal["outside", "shortcut", "inner", "last"]
# The number of convolutions in the branch of a bottleneck block.
_BOTTLENECK = 3


class NormPlace(NamedTuple):
  """The position of a BatchNorm in the network.

  Attributes:
    path: the path of the BatchNorm's module.
    role: ``"inner"``: in the branch of a residual block, with another BatchNorm after it in the
      branch; ``"last"``: the last BatchNorm of a branch; ``"shortcut"``: in the shortcut of a
      residual block; ``"outside"``: in no residual block (the stem).
    layers: the number of layers with weights in the branch or shortcut that have a BatchNorm
      directly before or after them: 2 in a basic block, 3 in a bottleneck block. Layers of squeeze
      and excitation don't count.
  """

  path: str
  role: Role
  layers: int = 0


Predicate: TypeAlias = Callable[[NormPlace], bool]


class Trace(NamedTuple):
  """A traced model: a graph for each input, and the paths of all BatchNorms and dense layers."""

  graphs: list[_data_graph.DataGraph]
  norms: list[str]
  dense: list[str]


class Plan(NamedTuple):
  """The changes to a model.

  Attributes:
    removed: the paths of the BatchNorms that are removed.
    head: the path of the dense layer that is normalized, or None.
    norms: how many BatchNorms the model has.
  """

  removed: tuple[str, ...]
  head: str | None
  norms: int


PlanCallback: TypeAlias = Callable[[Plan], object]


def make_plan(
  trace: Callable[[tuple[Any, ...], dict[str, Any]], Trace],
  args: tuple[Any, ...],
  kwargs: dict[str, Any],
  fn_flag: bool,
  predicate: Predicate | None,
  on_plan: PlanCallback | None,
) -> Plan:
  """Checks the arguments of ``less_bn``, traces the model, and returns the plan.

  ``trace(args, kwargs)`` traces the model for the inputs `args` and `kwargs`. The other arguments
  are as in ``less_bn``.
  """
  _checks.check_bool("fn_flag", fn_flag)
  _checks.check_callable(
    "predicate", predicate, "predicate(place: NormPlace) -> bool", optional=True
  )
  _checks.check_callable("on_plan", on_plan, "on_plan(plan: Plan)", optional=True)
  if not any(map(_data_graph.is_abstract, jax.tree.leaves((args, kwargs)))):
    got = ", ".join(map(_checks.shorten, [*args, *kwargs.values()])) or "none"
    raise ValueError(
      "`less_bn` traces the model, so it needs the model's inputs, arrays or"
      f" jax.ShapeDtypeStruct, as for a call; got {got}."
    )
  graphs, norms, dense = trace(args, kwargs)
  places = {path: NormPlace(path, "outside") for path in norms}
  places |= {path: place for path, place in _find_places(graphs).items() if path in places}
  removed = tuple(
    path for path, place in places.items() if (predicate or _is_removed_by_default)(place)
  )
  if not removed:
    shown = "\n".join(f"  {p.path}: {p.role}, {p.layers} layers" for p in places.values())
    _warnings.warn(
      "`less_bn` removes no BatchNorm: none is inside a bottleneck block's residual branch, or"
      f" `predicate` selects none. The model's BatchNorms:\n{shown or '  none'}",
      _warnings.NoEffectWarning,
    )
  head = _last_dense(graphs, dense) if fn_flag else None
  if fn_flag and head is None:
    _warnings.warn(
      "`less_bn` finds no last dense layer to normalize: a layer with other weights comes after"
      " each of them, or there is none. Pass fn_flag=False.",
      _warnings.NoEffectWarning,
    )
  plan = Plan(removed, head, len(norms))
  if on_plan is not None:
    on_plan(plan)
  return plan


def _is_removed_by_default(place: NormPlace) -> bool:
  return place.role == "inner" and place.layers >= _BOTTLENECK


def _find_places(graphs: Sequence[_data_graph.DataGraph]) -> dict[str, NormPlace]:
  """Returns the place of each BatchNorm, by path.

  There is a graph for each input of the model. If an input passes a BatchNorm several times, the
  BatchNorm has the role "inner" only if it has this role in each pass. If the model has several
  inputs, the first input for which the BatchNorm is not "outside" decides the role, and the last
  input with this role decides the number of layers.
  """
  places: dict[str, NormPlace] = {}
  for graph in graphs:
    in_graph: dict[str, NormPlace] = {}
    for n, place in _places_in_blocks(graph).items():
      path = graph.nodes[n].path
      before = in_graph.setdefault(path, place)
      if before.role == "inner":
        in_graph[path] = place if place.role != "inner" or place.layers < before.layers else before
    for path, place in in_graph.items():
      if places.get(path, place).role in ("outside", place.role):
        places[path] = place
  return places


def _places_in_blocks(graph: _data_graph.DataGraph) -> dict[int, NormPlace]:
  """Returns the place of each BatchNorm's node in the innermost residual block around the node."""
  outside = {n: NormPlace(graph.nodes[n].path, "outside") for n in graph.norms}
  places = {n: (math.inf, place) for n, place in outside.items()}
  for end, node in enumerate(graph.nodes):
    if node.kind not in ("add", "add_any") or len(node.inputs) != 2:
      continue
    sides = [graph.between(graph.gate[end], operand) for operand in node.inputs]
    weights = [sum(map(graph.has_weights, side)) for side in sides]
    size = sum(map(len, sides))
    for side, layers, opposite in zip(sides, weights, reversed(weights), strict=True):
      for n in side:
        if n in places and size < places[n][0]:
          places[n] = size, _norm_place(graph, n, side, shortcut=layers <= 1 and layers < opposite)
  return {n: place for n, (_, place) in places.items()}


def _norm_place(
  graph: _data_graph.DataGraph, n: int, side: list[int], *, shortcut: bool
) -> NormPlace:
  norms = [m for m in side if graph.nodes[m].kind == "norm"]
  before = {graph.source(m) for m in norms}
  weights = [m for m in side if graph.has_weights(m)]
  layers = sum(m in before or graph.nodes[graph.source(m)].kind == "norm" for m in weights)
  inner = any(graph.leads_to(n, m) for m in norms)
  role: Role = "shortcut" if shortcut else "inner" if inner else "last"
  return NormPlace(graph.nodes[n].path, role, layers)


def _last_dense(graphs: Sequence[_data_graph.DataGraph], dense: Collection[str]) -> str | None:
  for graph in graphs:
    before = {
      n for out in graph.outputs for n in range(out + 1) if n == out or graph.leads_to(n, out)
    }
    weights = [_module(graph.nodes[n].path) for n in sorted(before) if graph.has_weights(n)]
    if weights and weights[-1] in dense:
      return weights[-1]
  return None


def _module(param: str) -> str:
  return param.rpartition("/")[0]

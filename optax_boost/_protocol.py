"""How a method speaks to the train step: through fields of its own state's type.

The class of a method's state may declare tuples of names:

  metrics   fields that the train step reports: ``("trust_ratio", "lars/notfinite_count")``. A name
            is the field's, or ends in it after a slash, so that no two methods share a name.
  requests  fields by which the state asks something of the loss: ``("loss_scale",)``
  steps     counters of the steps made: a step in which one does not grow was not made
  skips     counters of the steps not made
  parts     fields with the states of transformations that act in turn or side by side: their
            counters don't count, as that in `steps` tells whether one of them made a step
  observes  fields that follow the params after each step, as ``("average_params/average",)``: a
            wrapper around it must not change its updates, nor take back parts of its state
  exact     fields with the exact params after the step, to which its updates lead; a leaf that is
            not the method's is ``optax.MaskedNode()``

The train step knows four requests and no method:

  loss_scale        scalar float32; the loss is multiplied by it before it is differentiated
  frozen_groups     scalar int32; the backward pass of that many groups is not computed
  full_gradient     the mean gradient over all of the data, which ``TrainStep.refresh`` hands to
                    the state's method ``with_full_gradient(params, full_gradient)``
  weight_sum        sum of the extra arguments `weight`, the sizes of micro-batches

Declarations belong to types, so a param may bear any name. Which leaf is in which group is static
and can't be in the state, which holds arrays: it is an attribute of the method's ``update``, with
the name of the request. The field `hidden` of a state names the leaves that ``optax.masked`` hides
from its method.
"""

import collections
from collections.abc import Callable
import contextlib
import functools
import operator
import types
from typing import Any
from typing import NamedTuple
from typing import TypeVar

import jax
import numpy as np
import optax

from optax_boost import _base
from optax_boost import _tree

LOSS_SCALE = "loss_scale"
FROZEN_GROUPS = "frozen_groups"
FULL_GRADIENT = "full_gradient"
WEIGHT_SUM = "weight_sum"

_State = TypeVar("_State")
_Function = TypeVar("_Function", bound=Callable[..., Any])


def declares(**declarations: tuple[str, ...]) -> Callable[[type[_State]], type[_State]]:
  """Declares ``metrics=(...)`` and the like of a state's class, whose fields they must be.

  The same as ``metrics = (...)`` in the body of the class, which mypy refuses in a NamedTuple.
  """

  def declare(state_type: type[_State]) -> type[_State]:
    for kind, names in declarations.items():
      for name in names:
        _field(state_type, state_type, name.rpartition("/")[2], kind)
      setattr(state_type, kind, names)
    return state_type

  return declare


# Declarations for optax's states.
_OPTAX = {
  (optax.MultiStepsState, "steps"): ("gradient_step",),
  (optax.ApplyIfFiniteState, "skips"): ("total_notfinite",),
}


@functools.cache
def _names(state_type: Any, kind: str) -> tuple[str, ...]:
  names: Any = _OPTAX.get((state_type, kind)) or getattr(state_type, kind, None)
  # A field may be called `metrics`, too: its descriptor is not a tuple.
  is_declaration = isinstance(names, tuple) and all(isinstance(name, str) for name in names)
  return names if is_declaration else ()


def declared(state: Any, kind: str) -> tuple[str, ...]:
  """The names that the class of a state declares; `kind` is ``"metrics"``, ``"requests"``, ..."""
  state_type: Any = type(state)
  names = _names(state_type, kind)
  # Nor is a model of a class with an attribute `metrics` a state: moments are trees of its class.
  fields = (hasattr(state, name.rpartition("/")[2]) for name in names)
  return names if isinstance(state, tuple) or all(fields) else ()


# The children of a node and its static data; None for a leaf.
_flatten = jax.tree_util.default_registry.flatten_one_level


def _nodes(tree: Any) -> list[tuple[tuple[int, ...], Any]]:
  """All nodes and leaves of a tree, each after those inside it, with their place in it."""
  nodes: list[tuple[tuple[int, ...], Any]] = []
  pending: list[tuple[tuple[int, ...], Any]] = [((), tree)]
  # A loop, not a tree map: an optimizer state has thousands of nodes, and few declare anything.
  while pending:
    place, node = pending.pop()
    nodes.append((place, node))
    flat = _flatten(node)
    for i, child in enumerate(flat[0] if flat is not None else ()):
      pending.append(((*place, i), child))
  return nodes[::-1]


def declaring_states(opt_state: optax.OptState, kind: str) -> list[Any]:
  """The states that declare something, each after those inside it."""
  nodes: list[tuple[Any, Any]] = [(type(node), node) for _, node in _nodes(opt_state)]
  return [node for node_type, node in nodes if _names(node_type, kind) and declared(node, kind)]


def read_metrics(opt_state: optax.OptState) -> dict[str, Any]:
  """The declared metrics of all states; a name that occurs again is numbered: ``name_1``."""
  metrics: dict[str, Any] = {}
  times: collections.Counter[str] = collections.Counter()
  for state in declaring_states(opt_state, "metrics"):
    for name in declared(state, "metrics"):
      value = _field(state, type(state), name.rpartition("/")[2], "metrics")
      if value is not None:
        metrics[f"{name}_{times[name]}" if times[name] else name] = value
        times[name] += 1
  return metrics


def step_made(before: optax.OptState, after: optax.OptState) -> Any:
  """Whether a step was made, from all counters of steps made and skipped in an optimizer state."""

  def counts(node: Any) -> bool:
    return isinstance(node, optax.PartitionState) or any(
      declared(node, kind) for kind in ("steps", "skips")
    )

  made: Any = np.bool_(True)
  olds, news = (jax.tree.leaves(state, is_leaf=counts) for state in (before, after))
  for old, new in zip(olds, news, strict=True):
    if isinstance(new, optax.PartitionState):
      # Side by side: the params move where any of them does, but not by `optax.set_to_zero`.
      # That is one transformation without a state; a chain of such, as `optax.sgd`, moves params.
      states = new.inner_states
      inner = {key: getattr(part, "inner_state", part) for key, part in states.items()}
      moving = [key for key in states if not isinstance(inner[key], optax.EmptyState)]
      of_parts = [step_made(old.inner_states[key], states[key]) for key in moving or states]
      made = made & functools.reduce(operator.or_, of_parts, np.bool_(False))
    elif counts(new):
      for kind, moves in (("steps", True), ("skips", False)):
        for name in declared(new, kind):
          made = made & ((getattr(old, name) != getattr(new, name)) == moves)
      made = made & step_made(_inner(old), _inner(new))
  return made


def _inner(state: Any) -> list[Any]:
  """The nodes in a state, without its parts."""
  parts = [getattr(state, name) for name in declared(state, "parts")]
  children = jax.tree.leaves(state, is_leaf=lambda node: node is not state)
  return [child for child in children if not any(child is part for part in parts)]


def refuse_observers(method: str, opt_state: optax.OptState) -> None:
  """Refuses, inside a method that changes updates, states that follow the params after a step."""
  for node in declaring_states(opt_state, "observes"):
    wrapper = declared(node, "observes")[0].partition("/")[0]
    raise ValueError(
      f"`{method}` can't hold a `{wrapper}`, which follows the params after each step:"
      f" `{method}` changes its updates or its state afterwards. Put its wrapper around the whole:"
      f" `{wrapper}({method}(...))`."
    )


def is_requested(opt_state: optax.OptState, request: str) -> bool:
  """Whether any state makes a request."""
  return bool(_asking(opt_state, request))


def state_asking(opt_state: optax.OptState, request: str) -> Any:
  """The state that makes a request, None if there is none; ValueError for several."""
  states = _asking(opt_state, request)
  if len(states) > 1:
    types = ", ".join(type(state).__name__ for state in states)
    raise ValueError(
      f"`make_train_step` needs at most one state with a `{request}`; the optimizer state holds"
      f" {len(states)} ({types}). Put one such wrapper around the whole optimizer."
    )
  if not states:
    return None
  _field(states[0], type(states[0]), request, "requests")
  return states[0]


def requested(opt_state: optax.OptState, request: str) -> Any:
  """The value of a request, None where no state makes it; ValueError where several do."""
  state = state_asking(opt_state, request)
  return None if state is None else getattr(state, request)


def request_reader(opt_state: optax.OptState, request: str) -> Callable[[optax.OptState], Any]:
  """A function that reads a request from any state of this structure, without a search."""
  asking = state_asking(opt_state, request)
  places = [place for place, node in _nodes(opt_state) if asking is not None and node is asking]

  def read(node: optax.OptState) -> Any:
    for index in places[0] if places else ():
      node = _flatten(node)[0][index]
    return getattr(node, request) if places else None

  return read


def renew_full_gradients(
  opt_state: optax.OptState, params: optax.Params, full_gradient: optax.Updates
) -> optax.OptState:
  """Hands the mean gradient over all of the data to every state that asks; ValueError: none."""
  if not _asking(opt_state, FULL_GRADIENT):
    raise ValueError(
      "`refresh` needs an optimizer state that asks for the full gradient, such as the state of"
      f" `optax_boost.svrg` does; got {_base.shorten(jax.tree.structure(opt_state), 400)}."
    )

  def asks(node: Any) -> bool:
    return FULL_GRADIENT in declared(node, "requests")

  return jax.tree.map(
    lambda node: node.with_full_gradient(params, full_gradient) if asks(node) else node,
    opt_state,
    is_leaf=asks,
  )


def check_full_gradients(opt_state: optax.OptState) -> None:
  """Refuses a state that asks for the full gradient before a scale of the loss.

  It would compare gradients of the scaled loss with one of the loss itself.
  """
  if not _asking(opt_state, FULL_GRADIENT):
    return
  for _, chain in _nodes(opt_state):
    in_front: list[Any] = []
    # The state of `optax.chain`.
    for state in chain if type(chain) is tuple else ():
      if not _asking(state, LOSS_SCALE):
        in_front += _asking(state, FULL_GRADIENT)
      elif in_front:
        raise ValueError(
          f"`make_train_step` needs a method with a {type(in_front[0]).__name__} inside a loss"
          " scale, for the full gradient is not scaled; got it before one. Put the scale"
          " around the chain: dynamic_loss_scale(optax.chain(svrg(...), ...))."
        )


def _asking(opt_state: optax.OptState, request: str) -> list[Any]:
  states = declaring_states(opt_state, "requests")
  return [state for state in states if request in declared(state, "requests")]


def _field(state: Any, state_type: type, field: str, kind: str) -> Any:
  if not hasattr(state, field):
    raise TypeError(
      f"`{state_type.__name__}` declares `{field}` in its `{kind}`, but has no such field. Its"
      f" fields are: {', '.join(getattr(state_type, '_fields', ())) or 'unknown'}."
    )
  return getattr(state, field)


class GroupAssignment(NamedTuple):
  """Which leaf is in which group: the attribute `frozen_groups` of a method's ``update``."""

  # From a tree to its leaves' groups, in its structure; of layers in several groups an array that
  # broadcasts against the leaf.
  number: Callable[[Any], Any]
  num_groups: int


def with_attributes(**attributes: Any) -> Callable[[_Function], _Function]:
  """Gives a method's ``update`` attributes, for :func:`attributes_of`."""

  def give(function: _Function) -> _Function:
    vars(function).update(attributes)
    return function

  return give


def attributes_of(tx: optax.GradientTransformation, name: str) -> list[Any]:
  """The attributes of a name of all functions in a transformation, seen through its wrappers.

  Wrappers keep what they wrap in closures, attributes, partials or, under ``jax.jit``, in
  `__wrapped__`.
  """
  # By identity: wrappers made with `functools.wraps` bear the attributes of what they wrap.
  found: dict[int, Any] = {}
  seen: dict[int, Any] = {}
  pending: list[Any] = [tx]
  while pending:
    node = pending.pop()
    if id(node) in seen or isinstance(node, type | types.ModuleType):
      continue
    seen[id(node)] = node
    attributes = getattr(node, "__dict__", {})
    if isinstance(node, tuple | list):
      pending += node
    elif isinstance(node, dict):
      pending += node.values()
    elif isinstance(node, types.CellType):
      with contextlib.suppress(ValueError):  # empty until the function is defined
        pending.append(node.cell_contents)
    elif isinstance(node, types.MethodType):
      owner = node.__self__
      pending += [node.__func__, owner, *getattr(owner, "__dict__", {}).values()]
    elif callable(node):
      if name in attributes:
        found[id(attributes[name])] = attributes[name]
      pending += [*attributes.values(), *(getattr(node, "__closure__", None) or ())]
      if isinstance(node, functools.partial):
        pending += [node.func, node.args, node.keywords]
  return list(found.values())


def hidden_leaves(params: optax.Params) -> dict[str, optax.MaskedNode]:
  """The field `hidden` of a state: paths that ``optax.masked`` hides from the method, no arrays."""
  return dict.fromkeys(_tree.masked_paths(params), optax.MaskedNode())


def seen_leaves(state: Any, tree: Any) -> list[bool]:
  """Whether the method of a state sees each leaf; ``optax.partition`` hides the others."""
  hidden = [f"{path}/" for path in getattr(state, "hidden", ())]
  return [not f"{path}/".startswith(tuple(hidden)) for path in _tree.leaf_paths(tree)]

"""How a method speaks to the train step: through fields of its own state's type.

The class of a method's state may declare tuples of names:

  metrics   fields that the train step reports: ``("trust_ratio", "lars/notfinite_count")``. A name
            is the field's, or ends in it after a slash, so that no two methods share a name.
  requests  fields by which the state asks something of the loss: ``("loss_scale",)``
  outcome   the field that tells whether the last call made a step, ``("made",)``
  skips     fields that count the calls whose batch it left out: ``("notfinite_count",)``
  exact     fields with the exact params after the step, to which its updates lead; a leaf that is
            not the method's is ``optax.MaskedNode()``
  exact_if  fields with a scalar bool, if not every step leads to the exact params

The train step knows four requests and no method:

  loss_scale        scalar float32; the loss is multiplied by it before it is differentiated
  frozen_groups     scalar int32; the backward pass of that many groups is not computed. A field
                    `frozen_for`, scalar int32, says for how many steps, at least, it stays
  full_gradient     the mean gradient over all of the data, which ``TrainStep.refresh`` hands to
                    the state's method ``with_full_gradient(params, full_gradient)``
  weight_sum        sum of the extra arguments `weight`, the sizes of micro-batches

Declarations belong to types, so a param may bear any name. Which leaf is in which group is static
and can't be in the state, which holds arrays: the transformation's form holds it
(:mod:`optax_boost._form._transformation`). The field `hidden` of a state names the leaves that
``optax.masked`` hides from its method.
"""

import collections
from collections.abc import Callable
import functools
from typing import Any, NamedTuple, TypeVar

import jax
import optax

from optax_boost._foundation import _checks, _masks, _paths, _types

LOSS_SCALE = "loss_scale"
FROZEN_GROUPS = "frozen_groups"
FULL_GRADIENT = "full_gradient"
WEIGHT_SUM = "weight_sum"

_State = TypeVar("_State")


def declares(**declarations: tuple[str, ...]) -> Callable[[type[_State]], type[_State]]:
  """Declares ``metrics=(...)`` and the like of a state's class.

  The same as ``metrics = (...)`` in the body of the class, which mypy refuses in a NamedTuple.
  """

  def declare(state_type: type[_State]) -> type[_State]:
    for kind, names in declarations.items():
      for name in names if kind in _FIELDS else ():
        _field(state_type, state_type, name.rpartition("/")[2], kind)
      setattr(state_type, kind, names)
    return state_type

  return declare


# The declarations that name fields, and all.
_FIELDS = ("metrics", "requests", "outcome", "skips", "exact", "exact_if")
_KINDS = _FIELDS


@functools.cache
def _names(state_type: Any, kind: str) -> tuple[str, ...]:
  names: Any = getattr(state_type, kind, None)
  # A field may be called `metrics`, too: its descriptor is not a tuple.
  is_declaration = isinstance(names, tuple) and all(isinstance(name, str) for name in names)
  return names if is_declaration else ()


def _find_kinds(state_type: Any) -> tuple[str, ...]:
  return tuple(kind for kind in _KINDS if _names(state_type, kind))


# From the type of a node to the kinds of its declarations: none for most nodes of a state.
_kinds: Callable[[Any], tuple[str, ...]] = functools.cache(_find_kinds)


def declared(state: _types.Tree, kind: str) -> tuple[str, ...]:
  """The names that the class of a state declares; `kind` is ``"metrics"``, ``"requests"``, ..."""
  state_type: Any = type(state)
  names = _names(state_type, kind)
  if not names:
    return ()
  # Moments may be instances of a user's model class that has an attribute `metrics`; those are no
  # states.
  fields = (hasattr(state, name.rpartition("/")[2]) for name in names)
  is_state = isinstance(state, tuple) or (kind in _FIELDS and all(fields))
  return names if is_state else ()


# The children of a node and its static data; None for a leaf.
flatten_node = jax.tree_util.default_registry.flatten_one_level


def _nodes_with_indices(tree: _types.Tree) -> list[tuple[tuple[int, ...], Any]]:
  """All nodes and leaves of a tree, each after those inside it, with the indices that lead to it.

  An index is of a child among its parent's children.
  """
  outside_in: list[tuple[tuple[int, ...], Any]] = []
  pending: list[tuple[tuple[int, ...], Any]] = [((), tree)]
  # A loop, not a tree map: an optimizer state has thousands of nodes, and few declare anything.
  while pending:
    indices, node = pending.pop()
    outside_in.append((indices, node))
    flat = flatten_node(node)
    for i, child in enumerate(flat[0] if flat is not None else ()):
      pending.append(((*indices, i), child))
  return outside_in[::-1]


def nodes(tree: _types.Tree) -> list[Any]:
  """All nodes and leaves of a tree, each after those inside it."""
  return [node for _, node in _nodes_with_indices(tree)]


def declaring_states(opt_state: optax.OptState, kind: str) -> list[Any]:
  """The states that declare something, each after those inside it."""
  candidates = [node for node in nodes(opt_state) if kind in _kinds(type(node))]
  return [node for node in candidates if declared(node, kind)]


def read_metrics(opt_state: optax.OptState) -> _types.Metrics:
  """The declared metrics of all states; a name that occurs again is numbered: ``name_1``."""
  metrics: _types.Metrics = {}
  times: collections.Counter[str] = collections.Counter()
  for state in declaring_states(opt_state, "metrics"):
    for name in declared(state, "metrics"):
      value = _field(state, type(state), name.rpartition("/")[2], "metrics")
      if value is not None:
        metrics[f"{name}_{times[name]}" if times[name] else name] = value
        times[name] += 1
  return metrics


def unseen_by_scale(opt_state: optax.OptState, tree: _types.Tree) -> list[Any]:
  """The leaves of a tree that no loss scale in an optimizer state sees.

  A loss scale must see each overflow of the others, or it would never shrink.
  """
  asking = _asking(opt_state, LOSS_SCALE)
  seen = [seen_leaves(state, tree) for state in asking]
  leaves = jax.tree.leaves(tree)
  return [leaf for i, leaf in enumerate(leaves) if not any(flags[i] for flags in seen)]


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


def path_to(tree: _types.Tree, node: Any) -> tuple[int, ...]:
  """The indices of children that lead to a node of a tree, by :func:`flatten_node`."""
  return next(indices for indices, found in _nodes_with_indices(tree) if found is node)


def renew_full_gradients(
  opt_state: optax.OptState, params: optax.Params, full_gradient: optax.Updates
) -> optax.OptState:
  """Hands the mean gradient over all of the data to every state that asks; ValueError: none."""
  if not _asking(opt_state, FULL_GRADIENT):
    raise ValueError(
      "`refresh` needs an optimizer state that asks for the full gradient, such as the state of"
      f" `optax_boost.svrg` does; got {_checks.shorten(jax.tree.structure(opt_state), 400)}."
    )

  def asks(node: _types.Tree) -> bool:
    return FULL_GRADIENT in declared(node, "requests")

  return jax.tree.map(
    lambda node: node.with_full_gradient(params, full_gradient) if asks(node) else node,
    opt_state,
    is_leaf=asks,
  )


def _asking(opt_state: optax.OptState, request: str) -> list[Any]:
  states = declaring_states(opt_state, "requests")
  return [state for state in states if request in declared(state, "requests")]


def _field(state: _types.Tree, state_type: type, field: str, kind: str) -> Any:
  if not hasattr(state, field):
    raise TypeError(
      f"`{state_type.__name__}` declares `{field}` in its `{kind}`, but has no such field. Its"
      f" fields are: {', '.join(getattr(state_type, '_fields', ())) or 'unknown'}."
    )
  return getattr(state, field)


class GroupAssignment(NamedTuple):
  """Which leaf is in which group."""

  # From a tree to its leaves' groups, in its structure; of layers in several groups an array that
  # broadcasts against the leaf.
  number: Callable[[_types.Tree], _types.Tree]
  num_groups: int


def hidden_leaves(params: optax.Params) -> dict[str, optax.MaskedNode]:
  """The field `hidden` of a state: paths that ``optax.masked`` hides from the method, no arrays."""
  return dict.fromkeys(_masks.masked_paths(params), optax.MaskedNode())


def seen_leaves(state: _types.Tree, tree: _types.Tree) -> list[bool]:
  """Whether the method of a state sees each leaf; ``optax.partition`` hides the others."""
  hidden = [f"{path}/" for path in getattr(state, "hidden", ())]
  return [not f"{path}/".startswith(tuple(hidden)) for path in _paths.leaf_paths(tree)]

"""What the class of a state declares, for the train step and for transformations around it.

The class of a method's state may declare tuples of field names:

  metrics   fields that the train step reports: ``("trust_ratio", "lars/notfinite_count")``. A name
            is the field's, or ends in it after a slash, so that no two methods share a name.
  requests  fields by which the state requests something of the loss: ``("loss_scale",)``
  outcome   the field that tells whether the last call made a step: ``("made",)``
  skips     fields that count the calls that left their batch out: ``("notfinite_count",)``
  exact     fields that hold the exact params after the step, to which the updates lead; a leaf that
            the method does not change is ``optax.MaskedNode()``
  exact_if  fields with a scalar bool; the fields in `exact` count only if all of them are True

The train step knows four requests and no method by name:

  loss_scale        scalar float32; the loss is multiplied by it before it is differentiated
  frozen_groups     scalar int32; the backward pass of that many groups is not computed. The field
                    `frozen_for`, scalar int32, says for how many steps, at least, the number stays
  full_gradient     the mean gradient over all of the data, which ``TrainStep.refresh`` hands to
                    the state's method ``with_full_gradient(params, full_gradient)``
  weight_sum        the sum of the extra arguments `weight`, the sizes of micro-batches

A class declares, not an array, so params may have any names. The field `hidden` of a state names
the leaves that ``optax.masked`` hides from its method. The groups of leaves are static, so no state
can hold them: the form of the transformation does (:mod:`optax_boost._form._form`).
"""

import collections
from collections.abc import Callable
import functools
from typing import Any, NamedTuple, TypeVar

import jax
import optax

from optax_boost._foundation import _checks, _masks, _paths, _trees, _types

LOSS_SCALE = "loss_scale"
FROZEN_GROUPS = "frozen_groups"
FULL_GRADIENT = "full_gradient"
WEIGHT_SUM = "weight_sum"

_State = TypeVar("_State")


def declares(**declarations: tuple[str, ...]) -> Callable[[type[_State]], type[_State]]:
  """Adds declarations such as ``metrics=("trust_ratio",)`` to the class of a state.

  The statement ``metrics = ("trust_ratio",)`` in the class would do the same, but mypy refuses it
  in a NamedTuple.
  """

  def declare(state_type: type[_State]) -> type[_State]:
    for kind, names in declarations.items():
      for name in names:
        _field(state_type, state_type, name.rpartition("/")[2], kind)
      setattr(state_type, kind, names)
    return state_type

  return declare


@functools.cache
def _declared_names(state_type: type, kind: str) -> tuple[str, ...]:
  names: Any = getattr(state_type, kind, None)
  # A class may have a field `metrics`, too, which is a descriptor and not a tuple.
  is_declaration = isinstance(names, tuple) and all(isinstance(name, str) for name in names)
  return names if is_declaration else ()


def declared(state: _types.Tree, kind: str) -> tuple[str, ...]:
  """The names that the class of a state declares; `kind` is ``"metrics"``, ``"requests"``, ..."""
  state_type: Any = type(state)
  names = _declared_names(state_type, kind)
  if not names:
    return ()
  # Moments may be instances of a user's model class with an attribute `metrics`. They are no
  # states, and they lack the fields.
  fields = (hasattr(state, name.rpartition("/")[2]) for name in names)
  return names if isinstance(state, tuple) or all(fields) else ()


def declaring_states(opt_state: optax.OptState, kind: str) -> list[optax.OptState]:
  """The states in an optimizer state that declare a kind, each after those inside it."""
  return [
    node
    for node in _trees.nodes(opt_state)
    # Most nodes declare nothing, and the names of a class are cached.
    if _declared_names(type(node), kind) and declared(node, kind)  # type: ignore[arg-type]
  ]


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


def _requesting_states(opt_state: optax.OptState, request: str) -> list[optax.OptState]:
  states = declaring_states(opt_state, "requests")
  return [state for state in states if request in declared(state, "requests")]


def is_requested(opt_state: optax.OptState, request: str) -> bool:
  """Whether any state makes a request."""
  return bool(_requesting_states(opt_state, request))


def requesting_state(opt_state: optax.OptState, request: str) -> optax.OptState:
  """The state that makes a request, or None; raises ValueError if several states make it."""
  states = _requesting_states(opt_state, request)
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


def unseen_by_scale(opt_state: optax.OptState, tree: _types.Tree) -> list[jax.Array]:
  """The leaves of a tree that no loss scale in an optimizer state sees.

  A wrapper may act on overflows in these leaves only: a loss scale that does not see an overflow
  does not shrink.
  """
  seen = [seen_leaves(state, tree) for state in _requesting_states(opt_state, LOSS_SCALE)]
  leaves = jax.tree.leaves(tree)
  return [leaf for i, leaf in enumerate(leaves) if not any(flags[i] for flags in seen)]


def renew_full_gradients(
  opt_state: optax.OptState, params: optax.Params, full_gradient: optax.Updates
) -> optax.OptState:
  """Hands the mean gradient over all of the data to every state that requests it.

  Raises ValueError if no state does.
  """
  if not is_requested(opt_state, FULL_GRADIENT):
    raise ValueError(
      "`refresh` needs an optimizer state that asks for the full gradient, such as the state of"
      f" `optax_boost.svrg` does; got {_checks.shorten(jax.tree.structure(opt_state), 400)}."
    )

  def requests_it(node: _types.Tree) -> bool:
    return FULL_GRADIENT in declared(node, "requests")

  return jax.tree.map(
    lambda node: node.with_full_gradient(params, full_gradient) if requests_it(node) else node,
    opt_state,
    is_leaf=requests_it,
  )


def _field(state: _types.Tree, state_type: type, field: str, kind: str) -> Any:
  """The field of a state or of its class; raises TypeError if there is none."""
  if not hasattr(state, field):
    raise TypeError(
      f"`{state_type.__name__}` declares `{field}` in its `{kind}`, but has no such field. Its"
      f" fields are: {', '.join(getattr(state_type, '_fields', ())) or 'unknown'}."
    )
  return getattr(state, field)


class GroupAssignment(NamedTuple):
  """The group of each leaf, for the request `frozen_groups`.

  Attributes:
    number: from a tree to the tree of its leaves' groups. If a leaf holds layers of several groups,
      its entry is an array of groups that broadcasts against the leaf.
    num_groups: how many groups there are.
  """

  number: Callable[[_types.Tree], _types.Tree]
  num_groups: int


def hidden_leaves(params: optax.Params) -> dict[str, optax.MaskedNode]:
  """The field `hidden` of a state: the paths that ``optax.masked`` hides. It holds no arrays."""
  return dict.fromkeys(_masks.masked_paths(params), optax.MaskedNode())


def seen_leaves(state: optax.OptState, tree: _types.Tree) -> list[bool]:
  """Whether the method of a state sees each leaf, that is, ``optax.masked`` does not hide it."""
  hidden = [f"{path}/" for path in getattr(state, "hidden", ())]
  return [not f"{path}/".startswith(tuple(hidden)) for path in _paths.leaf_paths(tree)]

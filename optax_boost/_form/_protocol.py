"""Declarations in the class of a state, which the train step and outer transformations read.

The class of a method's state may declare tuples of field names:

  metrics   fields that the train step reports: ``("trust_ratio", "lars/notfinite_count")``. A
            prefix and a slash before a field's name distinguish the metrics of two methods.
  requests  fields by which the state asks something of the train step: ``("loss_scale",)``
  outcome   the field that tells whether the last call made a step: ``("made",)``
  skips     fields that count the calls that left their batch out: ``("notfinite_count",)``
  exact     fields that hold the exact params after the step, which params plus updates may miss by
            one rounding; a leaf that the method does not change is ``optax.MaskedNode()``
  exact_if  fields with a scalar bool; the fields in `exact` count only if all of them are True
  takes     names of extra arguments of ``update``, not of fields: ``("layers",)``
  across_devices  fields that ``update`` computes from the gradients of all devices, so that all
            devices must call it or none: ``("orthogonality",)``

The train step knows three requests and no method by name:

  loss_scale        scalar float32; the train step multiplies the loss by this number before it
                    differentiates the loss
  frozen_groups     scalar int32; the train step leaves out the backward pass of this number of
                    first groups of layers. The field `frozen_for`, scalar int32, is a number of
                    steps during which `frozen_groups` does not change. If it is negative, the
                    state's method ``check_declared(frozen_for)`` raises an error
  full_gradient     the mean gradient over all of the data, which ``TrainStep.refresh`` passes to
                    the state's method ``with_full_gradient(params, full_gradient)``

Declarations are attributes of the class, so a param named ``metrics`` is not taken for a
declaration. For the request `frozen_groups`, the train step must also know the groups of layers.
These are static, so the state's property `groups` returns them from a dict without arrays.
"""

import collections
from collections.abc import Callable
import functools
from typing import Any, TypeVar

import jax
import optax

from optax_boost._foundation import _checks, _trees, _types

LOSS_SCALE = "loss_scale"
FROZEN_GROUPS = "frozen_groups"
FULL_GRADIENT = "full_gradient"

_State = TypeVar("_State")


def declares(**declarations: tuple[str, ...]) -> Callable[[type[_State]], type[_State]]:
  """Returns a decorator that sets declarations, such as ``outcome=("made",)``, in a state's class.

  The decorator raises TypeError if the class lacks a declared field. Classes don't declare names by
  assignments in their bodies, since mypy refuses assignments in a NamedTuple.
  """

  def declare(state_type: type[_State]) -> type[_State]:
    for kind, names in declarations.items():
      for name in names if kind != "takes" else ():
        _field(state_type, state_type, name.rpartition("/")[2], kind)
      setattr(state_type, kind, names)
    return state_type

  return declare


@functools.cache
def _declared_names(state_type: type, kind: str) -> tuple[str, ...]:
  names: Any = getattr(state_type, kind, None)
  # A class may have a field called `metrics`. The attribute is then a descriptor, not a tuple.
  is_declaration = isinstance(names, tuple) and all(isinstance(name, str) for name in names)
  return names if is_declaration else ()


def declared(state: _types.Tree, kind: str) -> tuple[str, ...]:
  """Returns the names that a state's class declares as `kind`, such as ``"metrics"``."""
  state_type: Any = type(state)
  names = _declared_names(state_type, kind)
  if not names:
    return ()
  # A tree of moments may be an instance of a user's model class with an attribute `metrics`. That
  # tree is not a state, and lacks the fields.
  fields = (hasattr(state, name.rpartition("/")[2]) for name in names)
  return names if isinstance(state, tuple) or all(fields) else ()


def declaring_states(opt_state: optax.OptState, kind: str) -> list[optax.OptState]:
  """Returns the states in an optimizer state that declare `kind`, inner states first."""
  return [
    node
    for node in _trees.nodes(opt_state)
    # The cached names of the class are read first, since most nodes declare nothing.
    if _declared_names(type(node), kind) and declared(node, kind)  # type: ignore[arg-type]
  ]


def read_metrics(opt_state: optax.OptState) -> _types.Metrics:
  """Returns, by name, the fields that the states in an optimizer state declare as metrics.

  A second metric of the same name is returned as ``name_1``. A field that is None is left out.
  """
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
  """Returns whether any state in an optimizer state declares the request `request`."""
  return bool(_requesting_states(opt_state, request))


def takes(opt_state: optax.OptState, extra_argument: str) -> bool:
  """Returns whether any state in an optimizer state takes an extra argument of this name."""
  states = declaring_states(opt_state, "takes")
  return any(extra_argument in declared(state, "takes") for state in states)


def requesting_state(opt_state: optax.OptState, request: str) -> optax.OptState:
  """Returns the state in `opt_state` that declares a request, or None if no state does.

  Raises ValueError if several states declare the request.
  """
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


def renew_full_gradients(
  opt_state: optax.OptState, params: optax.Params, full_gradient: optax.Updates
) -> optax.OptState:
  """Returns `opt_state` with the full gradient put into each state that requests it.

  Raises ValueError if no state requests the full gradient.
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
  """Returns a field of a state or of its class; raises TypeError if there is no such field.

  `kind` is the declaration that names the field, such as ``"metrics"``.
  """
  if not hasattr(state, field):
    raise TypeError(
      f"`{state_type.__name__}` declares `{field}` in its `{kind}`, but has no such field. Its"
      f" fields are: {', '.join(getattr(state_type, '_fields', ())) or 'unknown'}."
    )
  return getattr(state, field)

"""Declarations in the class of a state, which the train step and outer transformations read.

The class of a method's state may declare tuples of field names:

  metrics   fields that the train step reports: ``("trust_ratio", "lars/notfinite_count")``. A
            prefix and a slash before a field's name distinguish the metrics of two methods.
  requests  fields by which the state asks something of the train step: ``("full_gradient",)``
  outcome   the field that tells whether the last call made a step: ``("made",)``
  skips     fields that count the calls that left their batch out: ``("notfinite_count",)``
  exact     the field that holds the exact params after the step, which params plus updates may miss
            by one rounding; the state's method ``exact_params(new, params, updates)`` puts them
            into `new`, which is params plus updates
  takes     names of extra arguments of ``update``, not of fields: ``("layers",)``
  across_devices  fields that ``update`` computes from the gradients of all devices, so that all
            devices must call it or none: ``("orthogonality",)``

The train step knows one request and no method by name:

  full_gradient     the mean gradient over all of the data, which ``TrainStep.refresh`` passes to
                    the state's method ``with_full_gradient(params, full_gradient)``

Declarations are attributes of the class, so a param named ``metrics`` is not taken for a
declaration.
"""

import collections
from collections.abc import Callable
import functools
from typing import Any, TypeVar

import jax
import optax

from optax_boost._foundation import _checks, _trees, _types

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


def apply_updates(
  params: optax.Params, updates: optax.Updates, opt_state: optax.OptState
) -> optax.Params:
  """Returns params plus updates, with the exact params that states in `opt_state` hold."""
  new: optax.Params = optax.apply_updates(params, updates)
  for state in declaring_states(opt_state, "exact"):
    new = state.exact_params(new, params, updates)  # type: ignore[attr-defined]
  return new


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

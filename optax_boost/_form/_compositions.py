"""Finds and replaces the transformations that a transformation holds.

A transformation of this package lists its held transformations in its
:class:`~optax_boost._form._form.Form`. A user's wrapper names one transformation, or a tuple of
several, in an attribute `wraps` of ``update``, or of the object that has the method ``update``. A
composition of optax, such as ``optax.chain``, keeps its held transformations in variables of
enclosing functions that its ``update`` uses; the table ``_OPTAX`` lists these variables.
"""

from collections.abc import Callable, Iterator, Sequence
import copy
import inspect
import itertools
import types
from typing import Any, NamedTuple, TypeAlias

import jax
import optax

from optax_boost._form import _form

# The function ``update`` of a transformation.
Update: TypeAlias = Callable[..., Any]


class _Composition(NamedTuple):
  """Where a composition of optax, such as ``optax.chain``, keeps its held transformations.

  Attributes:
    variables: the names of the variables that contain the held transformations. The ``update`` of
      the composition uses these variables of enclosing functions.
    states: a function that takes the composition's state and the values of these variables, and
      returns the states of the held transformations in the same order. None if the composition
      gives the held transformations params whose paths are not the paths of its own params.
  """

  variables: tuple[str, ...]
  states: Callable[..., Sequence[optax.OptState]] | None


def _in_fields(*fields: str) -> Callable[..., Sequence[optax.OptState]]:
  return lambda state, *values: [getattr(state, field) for field in fields]


_OPTAX = {
  "apply_if_finite": _Composition(("inner",), _in_fields("inner_state")),
  "chain": _Composition(("update_fns",), lambda state, members: list(state)),
  "conditionally_mask": _Composition(("inner",), _in_fields("inner_state")),
  "conditionally_transform": _Composition(("inner",), _in_fields("inner_state")),
  "inject_hyperparams": _Composition(("inner_factory",), _in_fields("inner_state")),
  "lookahead": _Composition(("fast_optimizer",), _in_fields("fast_state")),
  "masked": _Composition(("inner",), _in_fields("inner_state")),
  "named_chain": _Composition(
    ("transforms",), lambda state, members: [state[name] for name, _ in members]
  ),
  "partition": _Composition(
    ("transforms",), lambda state, members: [state.inner_states[k].inner_state for k in members]
  ),
  "sam": _Composition(("optimizer", "adv_optimizer"), _in_fields("opt_state", "adv_state")),
  "schedule_free": _Composition(("base_optimizer",), _in_fields("base_optimizer_state")),
  "split_real_and_imaginary": _Composition(("inner",), None),
  "with_extra_args_support": _Composition(("tx",), lambda state, tx: [state]),
}


def with_mapped_updates(
  tx: optax.GradientTransformationExtraArgs, function: Callable[[optax.Updates], optax.Updates]
) -> optax.GradientTransformationExtraArgs:
  """Returns a transformation with the states of `tx`, and with ``function(updates)`` as updates.

  `updates` are the updates of `tx`.
  """

  def update(
    grads: optax.Updates, state: optax.OptState, params: optax.Params | None = None, **extra: Any
  ) -> tuple[optax.Updates, optax.OptState]:
    updates, state = tx.update(grads, state, params, **extra)
    return function(updates), state

  update.mapped = tx, function  # type: ignore[attr-defined]
  return optax.GradientTransformationExtraArgs(tx.init, update)


def name_in_optax(update: Update) -> str | None:
  """Returns the name of the optax function that made an ``update``, such as ``"chain"``.

  Returns None for the ``update`` of any other package, and for a function that wraps an ``update``,
  as ``jax.jit`` does.
  """
  from_optax = (getattr(update, "__module__", None) or "").partition(".")[0] == "optax"
  if not from_optax or hasattr(update, "__wrapped__"):
    return None
  return getattr(update, "__qualname__", "").partition(".")[0]


def _variables(update: Any) -> dict[str, Any]:
  """Returns, by name, the variables of enclosing functions that an ``update`` uses."""
  names, cells = update.__code__.co_freevars, update.__closure__ or ()
  return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


def _composition(update: Update) -> _Composition | None:
  return _OPTAX.get(name_in_optax(update) or "")


def held_updates(update: Update) -> list[Update]:
  """Returns the ``update`` functions of the transformations that a transformation holds directly.

  The list is empty for ``optax.inject_hyperparams``, which makes its transformation in each step.
  """
  form = _form.form_of(update)
  if form is not None:
    return [tx.update for tx in form.wraps]
  if hasattr(update, "mapped"):
    return [update.mapped[0].update]
  owner = getattr(update, "__self__", None)
  if isinstance(owner, optax.MultiSteps):
    return [owner.inner_opt.update]
  for holder in (update, owner):
    wraps = getattr(holder, "wraps", None)
    if wraps is not None:
      wraps = [wraps] if isinstance(wraps, optax.GradientTransformation) else wraps
      return [tx.update for tx in wraps]
  if hasattr(update, "__wrapped__"):
    return [update.__wrapped__]
  composition = _composition(update)
  if composition is None:
    return []
  variables = _variables(update)
  updates: list[Update] = []
  for name in composition.variables if name_in_optax(update) != "inject_hyperparams" else ():
    _map_updates(variables[name], lambda held: updates.append(held) or held)  # type: ignore
  return updates


def held_states(update: Update, state: optax.OptState) -> Sequence[optax.OptState] | None:
  """Returns the states of the transformations that :func:`held_updates` lists, in the same order.

  For ``optax.inject_hyperparams``, returns the state of the transformation that each step makes.
  Returns None if callers must not call :func:`replace_held_updates` for this `update`. `state` is
  the state of the holding transformation, or another tree with the same structure. For such a tree,
  the results are parts of this tree.
  """
  form = _form.form_of(update)
  if form is not None:
    return [getattr(state, field) for field in form.held_state_fields] if form.rebuild else None
  if isinstance(getattr(update, "__self__", None), optax.MultiSteps):
    return [state.inner_opt_state]
  if _is_jitted(update) or hasattr(update, "mapped"):
    return [state]
  composition = _composition(update)
  if composition is None or composition.states is None:
    return None
  variables = _variables(update)
  return composition.states(state, *(variables[name] for name in composition.variables))


def replace_held_updates(update: Any, replace: Callable[[int, Update], Update]) -> Update:
  """Returns `update` with ``replace(i, held)`` in place of the i-th held ``update``.

  The function `update` itself is not changed. If ``jax.jit`` made it, the result is not jitted.
  """
  indices = itertools.count()

  def replaced(value: Any) -> Any:
    return _map_updates(value, lambda held: replace(next(indices), held))

  form = _form.form_of(update)
  if form is not None and form.rebuild is not None:
    return form.rebuild(*map(replaced, form.wraps)).update
  if _is_jitted(update):
    return replaced(update.__wrapped__)
  if hasattr(update, "mapped"):
    tx, function = update.mapped
    return with_mapped_updates(replaced(tx), function).update
  owner = getattr(update, "__self__", None)
  if isinstance(owner, optax.MultiSteps):
    inner, copied = owner.inner_opt, copy.copy(owner)
    attributes = [name for name, value in vars(owner).items() if value is inner]
    vars(copied).update(dict.fromkeys(attributes, replaced(inner)))
    return copied.update
  composition, variables = _composition(update), _variables(update)
  assert composition is not None
  if name_in_optax(update) == "inject_hyperparams":
    factory = variables["inner_factory"]
    new = {"inner_factory": lambda **hyperparams: replaced(factory(**hyperparams))}
  else:
    new = {name: replaced(variables[name]) for name in composition.variables}
  # Copy `update`, with new values of the variables that contain held transformations.
  names, cells = update.__code__.co_freevars, update.__closure__
  function = types.FunctionType(
    update.__code__,
    update.__globals__,
    update.__name__,
    update.__defaults__,
    tuple(
      types.CellType(new[name]) if name in new else cell
      for name, cell in zip(names, cells, strict=True)
    ),
  )
  function.__kwdefaults__ = update.__kwdefaults__
  return function


def _is_jitted(update: Update) -> bool:
  return hasattr(update, "__wrapped__") and isinstance(update, type(jax.jit(lambda: None)))


def _map_updates(value: Any, function: Callable[[Update], Update]) -> Any:
  """Returns `value` with ``function(update)`` in place of each ``update`` in it.

  `value` is an ``update``, a transformation, or a dict, list or tuple that contains some of these.
  """
  if isinstance(value, optax.GradientTransformation):
    return optax.GradientTransformationExtraArgs(value.init, function(value.update))
  if isinstance(value, dict):
    return {key: _map_updates(entry, function) for key, entry in value.items()}
  if isinstance(value, tuple | list):
    return type(value)([_map_updates(entry, function) for entry in value])
  return function(value) if callable(value) else value


def around_innermost(
  tx: optax.GradientTransformationExtraArgs,
  function: Callable[
    [optax.GradientTransformationExtraArgs], optax.GradientTransformationExtraArgs
  ],
) -> optax.GradientTransformationExtraArgs:
  """Returns `tx` with ``function(inner)`` in place of its innermost transformation `inner`.

  `inner` is the optimizer that the wrappers of this package in `tx` hold. Both transformations in a
  ``switch_after`` are replaced so. If `tx` is not a wrapper, returns ``function(tx)``.
  """
  form = _form.form_of(tx.update)
  if form is None or not form.holds_an_optimizer or form.rebuild is None:
    return function(tx)
  return form.rebuild(*(around_innermost(held, function) for held in form.wraps))


def updates_in(tx: optax.GradientTransformation) -> Iterator[Update]:
  """Yields the ``update`` of `tx` and of all transformations in it, outermost first."""
  pending = [tx.update]
  while pending:
    update = pending.pop()
    yield update
    pending += held_updates(update)


def forms(tx: optax.GradientTransformation) -> list[_form.Form]:
  """Returns the Forms of `tx` and of all transformations of this package in it, outermost first."""
  forms_or_none = map(_form.form_of, updates_in(tx))
  return [form for form in forms_or_none if form is not None]


def names_extra_argument(tx: optax.GradientTransformation, name: str) -> bool:
  """Returns whether `tx`, or a transformation inside of it, takes the extra argument `name`."""
  for update in updates_in(tx):
    form = _form.form_of(update)
    named = inspect.signature(update).parameters if form is None else form.extra_args
    if name in named:
      return True
  return False

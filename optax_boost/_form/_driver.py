"""Runs wrappers, which decide whether the transformation inside of them makes its step.

:func:`run` calls the method `before` of each wrapper, from the outside in, then makes or skips the
step of the innermost transformation, and calls `after` of each wrapper from the inside out. The
step is made only if every wrapper allows it. If not, neither params nor inner states change.

A :class:`StepPlan` tells whether the step returns updates or applies them to the params, and
whether the step is made in place. In place, the driver uses a while loop of at most one iteration,
which updates params and state in place (XLA 10), so that a skipped step costs nothing. Otherwise
the driver uses ``lax.cond``, which stores its results, such as updates (zeros if the step is
skipped), and copies the state. XLA materializes the inputs of a loop. So a :class:`Call` holds a
function that returns the gradients, and XLA fuses the wrappers' arithmetic on gradients into the
loop.
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import optax

from optax_boost._form import _exact_params, _finiteness, _form, _skipped_steps
from optax_boost._foundation import _arrays, _conditionals, _mesh_axes, _types

# A function without arguments that returns the gradients and the extra arguments of ``update``.
Gradients: TypeAlias = Callable[[], tuple[optax.Updates, _types.ExtraArgs]]
# Takes a transformation; returns one that makes other updates from states of the same structure.
Change: TypeAlias = Callable[
  [optax.GradientTransformationExtraArgs], optax.GradientTransformationExtraArgs
]
# The params, or a container that holds them and other arrays (:class:`ParamsAccess`).
StoredParams: TypeAlias = Any
# The result of a step: the new stored params, or updates.
StepResult: TypeAlias = Any


def _identity(x: Any) -> Any:
  return x


class ParamsAccess(NamedTuple):
  """How a step reads the params from its stored params, and writes the new params.

  Stored params are the params, or a container of the params and of more arrays, such as masters.

  Attributes:
    read: takes stored params; returns the params that the transformation sees.
    write: takes stored params, new params, and the old params that `read` returned; returns the new
      stored params.
    read_new: takes the new stored params; returns the new params that the transformation sees.
  """

  read: Callable[[StoredParams], optax.Params] = _identity
  write: Callable[[StoredParams, optax.Params, optax.Params], StoredParams] = (
    lambda stored, new, old: new
  )
  read_new: Callable[[StoredParams], optax.Params] = _identity


_DIRECT_ACCESS = ParamsAccess()


@dataclasses.dataclass(frozen=True)
class StepPlan:
  """How the innermost transformation makes its step. A wrapper may change the plan in `before`.

  Attributes:
    applies_updates: whether the step applies its updates and returns the new stored params. If
      False, the step returns the updates.
    in_place: whether a while loop makes the step, in place. If False, ``lax.cond`` makes the step,
      which has a reverse-mode derivative.
    checks_result: whether a step is skipped if it would make an entry NaN or infinite.
    on_all_devices: takes a flag; returns whether it is True on all devices that make the step.
    change: takes the innermost transformation; returns the transformation that the driver calls
      instead, such as one that scales the updates. If several wrappers change updates, the change
      of the innermost wrapper comes first. All changes are made before any wrapper's `after` is
      called, so every wrapper sees the updates that are added to the params.
    cast_updates: casts updates to their final dtypes, before they are applied. None: no cast.
    access: how the step reads and writes the params.
  """

  applies_updates: bool
  in_place: bool
  checks_result: bool = False
  on_all_devices: Callable[[_types.BoolScalar], _types.BoolScalar] = _identity
  change: Change = _identity
  cast_updates: Callable[[optax.Updates], optax.Updates] | None = None
  access: ParamsAccess = _DIRECT_ACCESS

  def with_check(
    self, on_all_devices: Callable[[_types.BoolScalar], _types.BoolScalar]
  ) -> "StepPlan":
    """Returns a plan that also skips a step that would make an entry NaN or infinite.

    `on_all_devices` takes the result of this check on one device, and returns whether the check has
    passed on all devices that make the step.
    """
    outer = self.on_all_devices
    return dataclasses.replace(
      self, checks_result=True, on_all_devices=lambda flag: outer(on_all_devices(flag))
    )

  def with_change(self, change: Change) -> "StepPlan":
    """Returns a plan with a further change, which acts before the changes of outer wrappers."""
    outer = self.change
    return dataclasses.replace(self, change=lambda tx: outer(change(tx)))

  def compute_if(
    self, condition: _types.Condition, function: Callable[..., Sequence[Any]], *carry: Any
  ) -> tuple[Any, ...]:
    """Returns ``(condition, *function(*carry))`` if `condition`, else ``(condition, *carry)``."""
    if condition is True:
      return condition, *function(*carry)
    if self.in_place:
      return _conditionals.once_if(condition, function, *carry)

    def call(*carry: Any) -> tuple[Any, ...]:
      return tuple(_arrays.cast_like(tuple(function(*carry)), carry))

    if jax.sharding.get_abstract_mesh().manual_axes:
      carry = jax.tree.map(_mesh_axes.vary, carry, jax.eval_shape(call, *carry))
    return condition, *_conditionals.cond(condition, call, lambda *carry: carry, *carry)


RETURN_UPDATES = StepPlan(applies_updates=False, in_place=False)
APPLY_IN_PLACE = StepPlan(applies_updates=True, in_place=True)


class Call(NamedTuple):
  """The arguments of a call of a transformation. A wrapper's `before` makes them for `inner`.

  Attributes:
    gradients: a function that returns the gradients and the extra arguments.
    stored_params: the stored params, from which ``plan.access`` reads the params; None if
      ``update`` got no params.
    makes_step: whether the step is made. A wrapper's `before` sets the condition of this wrapper
      only, and the driver combines this condition with the conditions of all outer wrappers.
    plan: how the innermost transformation makes its step.
  """

  gradients: Gradients
  stored_params: StoredParams
  makes_step: _types.Condition = True
  plan: StepPlan = RETURN_UPDATES

  @property
  def params(self) -> optax.Params | None:
    """Returns the params that the transformation sees; None if ``update`` got no params."""
    return None if self.stored_params is None else self.plan.access.read(self.stored_params)

  def passes(self, check: Callable[[], _types.BoolScalar]) -> _types.BoolScalar:
    """Returns ``check()`` if the step is made; else returns True and does not call `check`."""
    if self.makes_step is True:
      return check()
    _, passed = self.plan.compute_if(self.makes_step, lambda _: (check(),), jnp.asarray(True))
    return passed

  def compute_if(
    self, condition: _types.Condition, function: Callable[..., Sequence[Any]], *carry: Any
  ) -> Sequence[Any]:
    """Returns ``function(*carry)`` if `condition` holds and the step is made, else `carry`."""
    condition = _conditionals.both(self.makes_step, condition)
    _, *results = self.plan.compute_if(condition, function, *carry)
    return results


class Outcome(NamedTuple):
  """What a call of a transformation returns to the wrapper around it.

  Attributes:
    result: the new stored params, or the updates (zeros if no step was made).
    state: the new state of the called transformation.
    made: whether the innermost transformation made its step.
    failed_check: whether the step was skipped because its result would not have been finite.
  """

  result: StepResult
  state: optax.OptState
  made: _types.Condition
  failed_check: _types.BoolScalar


class Wrapper(Protocol):
  """A transformation that decides whether and how another transformation, `inner`, makes its step.

  Its state has the fields `inner_state` and `made`, which the driver sets. The class of the state
  declares ``outcome=("made",)`` (:mod:`optax_boost._form._protocol`), by which outer
  transformations and the train step find skipped steps.
  """

  @property
  def inner(self) -> optax.GradientTransformationExtraArgs:
    """Returns the transformation that the wrapper holds."""

  def init(self, params: optax.Params) -> optax.OptState:
    """Returns the initial state."""

  def before(self, call: Call, state: optax.OptState) -> tuple[Call, optax.OptState, Any]:
    """Returns the call of `inner`, the wrapper's new state, and the argument `context` of `after`.

    `call` is the call of the wrapper, and `state` is the wrapper's state. If ``call.makes_step`` is
    False, an outer wrapper skips the step, and the driver keeps `state` instead of the new state.
    """

  def after(
    self, call: Call, outcome: Outcome, state: optax.OptState, context: Any
  ) -> tuple[StepResult, optax.OptState]:
    """Returns the result of the wrapper's call, and the wrapper's new state.

    `outcome` is the result of the call of `inner`. `state` and `context` are the new state and the
    value that `before` returned. If ``call.makes_step`` is False, the driver undoes changes of
    scalars in the state, but not of arrays with axes. So `after` must change such arrays through
    ``call.compute_if``, which leaves them as they are in a skipped step.
    """


def pass_on(
  wrapper: Wrapper, call: Call, outcome: Outcome, state: optax.OptState, context: Any
) -> tuple[StepResult, optax.OptState]:
  """Serves as the method `after` of a wrapper that changes neither the result nor the state."""
  return outcome.result, state


def run(tx: optax.GradientTransformation, call: Call, state: optax.OptState) -> Outcome:
  """Makes or skips the step of `tx`, which may be a wrapper, and returns the outcome."""
  form = _form.form_of(tx.update)
  wrapper: Wrapper | None = None if form is None else form.wrapper
  if form is None or wrapper is None:
    return _run_innermost(tx, call, state)
  form.check(call.gradients()[0], state, call.params)
  inner_call, new_state, context = wrapper.before(call, state)
  new_state = _new_if(call.makes_step, new_state, state)
  makes_step = _conditionals.both(call.makes_step, inner_call.makes_step)
  outcome = run(wrapper.inner, inner_call._replace(makes_step=makes_step), state.inner_state)
  result, last_state = wrapper.after(call, outcome, new_state, context)
  last_state = _new_if(call.makes_step, last_state, new_state, scalars_only=True)
  last_state = last_state._replace(inner_state=outcome.state, made=jnp.asarray(outcome.made))
  # If several wrappers call `with_check`, only the innermost of them counts the steps that fail the
  # check. So the wrappers around a wrapper that calls `with_check` get False. A wrapper has called
  # `with_check` if its `before` has replaced the plan's `on_all_devices`.
  asks = inner_call.plan.on_all_devices is not call.plan.on_all_devices
  failed_check = jnp.asarray(False) if asks else outcome.failed_check
  return Outcome(result, last_state, outcome.made, failed_check)


def _new_if(
  condition: _types.Condition,
  new: optax.OptState,
  old: optax.OptState,
  *,
  scalars_only: bool = False,
) -> optax.OptState:
  """Returns the state `new` if `condition` holds, else the state `old`.

  If `scalars_only`, only scalars are selected by the condition; all other arrays are from `new`.
  """
  if condition is True:
    return new

  def select(x: jax.Array, y: jax.Array) -> jax.Array:
    return x if scalars_only and jnp.shape(x) else jnp.where(condition, x, y)

  pairs = {name: (x, getattr(old, name)) for name, x in new._asdict().items()}
  changed = {
    name: jax.tree.map(select, *pair) for name, pair in pairs.items() if pair[0] is not pair[1]
  }
  return new._replace(**changed)


def _run_innermost(tx: optax.GradientTransformation, call: Call, state: optax.OptState) -> Outcome:
  """Makes or skips the step of a transformation that is not a wrapper; returns the outcome."""
  plan = call.plan
  tx = plan.change(optax.with_extra_args_support(tx))

  def update(
    stored: StoredParams, state: optax.OptState
  ) -> tuple[optax.Params, optax.Updates, optax.OptState]:
    params = None if stored is None else plan.access.read(stored)
    grads, extra = call.gradients()
    updates, new_state = tx.update(grads, state, params, **extra)
    return params, updates if plan.cast_updates is None else plan.cast_updates(updates), new_state

  def apply(
    stored: StoredParams, params: optax.Params, updates: optax.Updates, new_state: optax.OptState
  ) -> tuple[StepResult, optax.OptState]:
    if not plan.applies_updates:
      return updates, new_state
    new_params = _exact_params.apply_updates(params, updates, new_state)
    return plan.access.write(stored, new_params, params), new_state

  def step(stored: StoredParams, state: optax.OptState) -> tuple[StepResult, optax.OptState]:
    return apply(stored, *update(stored, state))

  passed: _types.Condition = True
  checked: tuple[optax.Params, optax.Updates, optax.OptState] | None = None

  def check() -> _types.BoolScalar:
    nonlocal checked
    params, updates, new_state = update(call.stored_params, state)
    # The check sees the new state in the dtypes in which it is kept, since a number that is finite
    # in float32 may be infinite in float16.
    new_state = _arrays.cast_like(new_state, state)
    checked = params, updates, new_state
    new, old = updates, jax.tree.map(jnp.zeros_like, updates)
    if params is not None:
      new, old = optax.apply_updates(params, updates), params
    return plan.on_all_devices(_finiteness.none_lost(new, old, new_state, state))

  if plan.checks_result:
    passed = call.passes(check)
  makes_step = _conditionals.both(call.makes_step, passed)
  failed_check = jnp.asarray(False) if passed is True else ~passed
  made = makes_step
  if makes_step is True:
    result, new_state = step(call.stored_params, state)
  elif _conditionals.is_concrete(makes_step) and makes_step and checked is not None:
    # Outside of a trace, the check has already computed the updates. They are applied, without
    # computing them again.
    result, new_state = apply(call.stored_params, *checked)
  elif plan.applies_updates:
    made, result, new_state = plan.compute_if(makes_step, step, call.stored_params, state)
  else:
    shapes = None if checked is None else jax.tree.map(jax.typeof, checked[1])
    result, new_state = _conditionals.update_if(
      makes_step, lambda state: step(call.stored_params, state), state, shapes
    )
  made = _conditionals.both(made, _as_condition(_skipped_steps.made_step(state, new_state)))
  return Outcome(result, new_state, made, failed_check)


def _as_condition(flag: _types.Condition) -> _types.Condition:
  """Returns `flag`, a result of `made_step`, if it is a JAX array; else Python's True.

  If `flag` is not a JAX array, no state tells whether a step was made, so a step was made.
  """
  return flag if isinstance(flag, jax.Array) else True

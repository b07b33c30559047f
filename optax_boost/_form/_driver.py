"""Drives the steps of wrappers, each of which may skip a step.

A wrapper has two methods. `before` decides which gradients the inner transformation gets, and
whether the step is made; `after` computes the wrapper's new state from the step's outcome.
:func:`run` calls `before` of each wrapper from the outside in, makes the step of the innermost
transformation, which may be any of optax's, and calls `after` of each wrapper from the inside out.
The step is made only if every wrapper allows it; a skipped step changes neither params nor inner
states. Every wrapper sees the updates that are added to the params, in any nesting.

A :class:`StepPlan` tells whether the step returns updates, which the caller adds to the params, or
applies the updates to the params. ``lax.cond`` stores the updates that it returns (zeros if the
step is skipped), and copies the state. A while loop with at most one iteration updates params and
state in place (XLA 10), so that a skipped step costs nothing.

XLA materializes the inputs of a loop. So a :class:`Call` holds a function that returns the
gradients, and XLA fuses the wrappers' arithmetic on gradients into the loop's work on each leaf.
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
# A function that returns, for a transformation, one with the same structure of states, which makes
# other updates and new states.
Change: TypeAlias = Callable[
  [optax.GradientTransformationExtraArgs], optax.GradientTransformationExtraArgs
]
# The params, or the arrays from which :class:`ParamsAccess` reads the params.
StoredParams: TypeAlias = Any
# The result of a step: the new stored params, or updates.
StepResult: TypeAlias = Any


def _identity(x: Any) -> Any:
  return x


class ParamsAccess(NamedTuple):
  """Reads params from stored params, such as params with float32 masters, and writes new ones.

  Attributes:
    read: returns, from the stored params, the params that the transformation sees.
    write: returns the new stored params, from the stored params, the new params, and the old params
      that `read` returned.
    read_new: returns, from the new stored params, the new params that the transformation sees.
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
    applies_updates: whether the step's result is the new stored params; else the result is updates.
    in_place: whether a while loop makes the step, in place; else ``lax.cond`` makes the step, and
      has a reverse-mode derivative.
    checks_result: whether a step is skipped if it would make an entry NaN or infinite.
    on_all_devices: returns whether a flag holds on all devices that make the step together.
    change: returns the transformation that is called in place of the innermost transformation. The
      changes of inner wrappers act on the updates first.
    cast_updates: casts updates to their final dtypes, before they are applied. None: no cast.
    access: reads and writes the params.
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
    """Returns the plan, changed to skip a step that would make an entry NaN or infinite."""
    outer = self.on_all_devices
    return dataclasses.replace(
      self, checks_result=True, on_all_devices=lambda flag: outer(on_all_devices(flag))
    )

  def with_change(self, change: Change) -> "StepPlan":
    """Returns the plan with a further change, which acts before the changes of outer wrappers."""
    outer = self.change
    return dataclasses.replace(self, change=lambda tx: outer(change(tx)))

  def compute_if(
    self, condition: _types.Condition, function: Callable[..., Sequence[Any]], *carry: Any
  ) -> tuple[Any, ...]:
    """Returns ``(called, *results)``: ``function(*carry)`` if `condition`, else `carry`."""
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
  """A call of a transformation, which the driver passes from each wrapper to its inner one.

  Attributes:
    gradients: returns the gradients and extra arguments.
    stored_params: the params, as ``plan.access`` reads them; None if ``update`` got no params.
    makes_step: whether the step is made. The step is made only if every wrapper allows it: the
      driver combines the conditions of all wrappers.
    plan: how the step is made.
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
    """Returns ``check()`` if the step is made, else True, without calling `check`."""
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
  """The outcome of a call.

  Attributes:
    result: the new stored params, or updates: zeros if no step was made.
    state: the new state of the transformation.
    made: whether a step was made.
    failed_check: whether the step was skipped because its result would not have been finite.
  """

  result: StepResult
  state: optax.OptState
  made: _types.Condition
  failed_check: _types.BoolScalar


class Wrapper(Protocol):
  """A transformation that decides about the steps of another transformation, `inner`.

  The state of a wrapper has the fields `inner_state` and `made`, which the driver sets. The class
  of the state declares ``outcome=("made",)`` (:mod:`optax_boost._form._protocol`), so that outer
  transformations and the train step find skipped steps.
  """

  @property
  def inner(self) -> optax.GradientTransformationExtraArgs:
    """Returns the transformation about whose steps the wrapper decides."""

  def init(self, params: optax.Params) -> optax.OptState:
    """Returns the initial state."""

  def before(self, call: Call, state: optax.OptState) -> tuple[Call, optax.OptState, Any]:
    """Returns the call of `inner`, the new state, and a context for `after`.

    The driver keeps the old state if ``call.makes_step`` is False.
    """

  def after(
    self, call: Call, outcome: Outcome, state: optax.OptState, context: Any
  ) -> tuple[StepResult, optax.OptState]:
    """Returns the call's result and the new state, from the `outcome` of `inner`'s call.

    The driver keeps the old scalars if ``call.makes_step`` is False. Larger arrays of the state
    are updated by ``call.compute_if``, in place.
    """


def pass_on(
  wrapper: Wrapper, call: Call, outcome: Outcome, state: optax.OptState, context: Any
) -> tuple[StepResult, optax.OptState]:
  """Returns the result and state unchanged: the method `after` of a wrapper that needs none."""
  return outcome.result, state


def run(tx: optax.GradientTransformation, call: Call, state: optax.OptState) -> Outcome:
  """Makes or skips the step of a transformation, through all its wrappers; returns the outcome."""
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
  # Only the innermost wrapper that asks for the check of the result counts the steps that fail the
  # check, so outer wrappers see False.
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
  """Returns the new state if `condition`, else the old state.

  With `scalars_only`, arrays with axes are taken from the new state.
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
    # The new state is cast to the dtypes in which it will be kept, since a number that is finite in
    # float32 may be infinite in float16.
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
    # Outside of a trace, the update that was computed for the check is applied.
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
  """Returns a flag if it is an array, else True, since `made_step` found no state that tells."""
  return flag if isinstance(flag, jax.Array) else True

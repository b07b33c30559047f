"""Drives steps that may be skipped, for ``update`` and for steps in place.

A wrapper says what its inner transformation gets and whether a step is made (`before`), and what
becomes of the outcome (`after`). :func:`run` calls these two, from the outermost wrapper to the
innermost and back. On the way in the conditions join, and the changes of updates; the innermost
transformation, which may be any of optax's, makes its step under all of them at once; on the way
out each wrapper learns whether the step was made. So a step that is not made changes nothing, and
every wrapper sees the updates as they are added, in every nesting.

A :class:`Landing` says where a step's result goes: into updates, which the caller adds, or into the
params. Updates that leave a conditional are stored, as zeros if the step was not made, and state is
copied in and out. XLA updates the carry of a loop in place (XLA 10): so a step in place carries
params and inner state through a loop of one turn or none, and a skipped step costs nothing.

Loop inputs are materialized, so gradients are passed as a function: a wrapper's arithmetic on them
becomes a part of the loop's work on each leaf.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import optax

from optax_boost._form import _finiteness, _form, _protocol
from optax_boost._foundation import _arrays, _conditionals, _masks, _mesh_axes, _placement

# Makes the gradients and the extra arguments of ``update``.
Gradients: TypeAlias = Callable[[], tuple[optax.Updates, dict[str, Any]]]
# From a transformation to one with the same states, that changes its updates and new states.
Change: TypeAlias = Callable[
  [optax.GradientTransformationExtraArgs], optax.GradientTransformationExtraArgs
]
# A scalar bool array, or Python's True for a condition that always holds.
Condition: TypeAlias = Any


def _unchanged(x: Any) -> Any:
  return x


def _replaced(place: Any, new: Any, old: Any) -> Any:
  return new


@dataclasses.dataclass(frozen=True)
class Landing:
  """The destination of a step's result, and what happens to it on the way.

  Attributes:
    in_params: whether the result is new params; otherwise it is updates.
    in_place: whether a loop makes the step, in place; else a conditional, which can be
      differentiated in reverse mode.
    checks: whether a step is not made that would make an entry NaN or infinite.
    agree: from a flag to whether it holds on all devices that make the step together.
    change: from the innermost transformation to the one that is called in its place, of the same
      states. It changes what happens to updates; the changes of outer wrappers come last.
    cast: casts updates to their final dtypes, before they are added to the params. None: no cast.
    get: from the place where params are kept to the params of the transformation.
    put: from the place, new params and the params before to the new place.
    read: from the place after a step to the params after it.
  """

  in_params: bool
  in_place: bool
  checks: bool = False
  agree: Callable[[jax.Array], jax.Array] = _unchanged
  change: Change = _unchanged
  cast: Callable[[optax.Updates], optax.Updates] | None = None
  get: Callable[[Any], optax.Params] = _unchanged
  put: Callable[[Any, optax.Params, optax.Params], Any] = _replaced
  read: Callable[[Any], optax.Params] = _unchanged

  def checked(self, agree: Callable[[jax.Array], jax.Array]) -> "Landing":
    """The same landing, with the result checked for entries that become NaN or infinite."""
    outer = self.agree
    return dataclasses.replace(self, checks=True, agree=lambda flag: outer(agree(flag)))

  def changed(self, change: Change) -> "Landing":
    """The same landing, with a change before the changes of outer wrappers."""
    outer = self.change
    return dataclasses.replace(self, change=lambda tx: outer(change(tx)))

  def change_if(
    self, condition: Condition, function: Callable[..., Sequence[Any]], *carry: Any
  ) -> tuple[Any, ...]:
    """Calls ``function(*carry)`` if `condition`, else returns `carry`: ``(called, *results)``."""
    if condition is True:
      return condition, *function(*carry)
    if self.in_place:
      return _conditionals.once_if(condition, function, *carry)

    def call(*carry: Any) -> tuple[Any, ...]:
      return tuple(_arrays.cast_like(tuple(function(*carry)), carry))

    if jax.sharding.get_abstract_mesh().manual_axes:
      carry = jax.tree.map(_mesh_axes.vary, carry, jax.eval_shape(call, *carry))
    return condition, *_conditionals.cond(condition, call, lambda *carry: carry, *carry)

  def holds_if(self, condition: Condition, check: Callable[[], jax.Array]) -> jax.Array:
    """Makes a check if `condition` and returns whether it holds; True if it is not made."""
    if condition is True:
      return check()
    _, held = self.change_if(condition, lambda _: (check(),), jnp.asarray(True))
    return held


UPDATES = Landing(in_params=False, in_place=False)
PARAMS = Landing(in_params=True, in_place=True)


class Call(NamedTuple):
  """A call of a transformation.

  Attributes:
    gradients: makes its gradients and extra arguments.
    place: the params, or the place from which the landing gets them.
    go: whether the step is to be made. A wrapper can forbid a step, not force one: the driver adds
      the conditions of outer wrappers.
    landing: where it lands.
  """

  gradients: Gradients
  place: Any
  go: Condition = True
  landing: Landing = UPDATES

  @property
  def params(self) -> Any:
    """The params that the transformation sees; None if ``update`` was called without."""
    return None if self.place is None else self.landing.get(self.place)

  def holds(self, check: Callable[[], jax.Array]) -> jax.Array:
    """Makes a check if the step is to be made, else returns True."""
    return self.landing.holds_if(self.go, check)

  def change_if(
    self, condition: Condition, function: Callable[..., Sequence[Any]], *carry: Any
  ) -> Sequence[Any]:
    """``function(*carry)`` if `condition` and the step is to be made, else `carry`; in place."""
    _, *results = self.landing.change_if(_conditionals.both(self.go, condition), function, *carry)
    return results


class Outcome(NamedTuple):
  """The outcome of a call.

  Attributes:
    result: the new place of the params, or updates: zeros if no step was made.
    state: the new state of the transformation.
    made: whether a step was made.
    lost: whether it was not made because its result would not have been finite.
  """

  result: Any
  state: Any
  made: Condition
  lost: jax.Array


class Wrapper(Protocol):
  """A transformation that decides about the steps of another one, `inner`.

  Its state has the fields `inner_state` and `made`, which the driver sets. The state's class
  declares ``outcome=("made",)`` (:mod:`optax_boost._form._protocol`), by which transformations
  around it and the train step learn of skipped steps; ``_transformation.wrapper`` refuses a class
  that doesn't.
  """

  @property
  def inner(self) -> optax.GradientTransformationExtraArgs:
    """The transformation about whose steps it decides."""

  def init(self, params: optax.Params) -> Any:
    """Returns the initial state."""

  def before(self, call: Call, state: Any) -> tuple[Call, Any, Any]:
    """Returns the call of `inner`, the new state, and a context for `after`.

    The driver keeps the old state unless ``call.go``.
    """

  def after(self, call: Call, outcome: Outcome, state: Any, context: Any) -> tuple[Any, Any]:
    """Returns the call's result and the new state; `outcome` is the outcome of `inner`'s call.

    The driver keeps old scalars unless ``call.go``. Arrays change by ``call.change_if``, in place.
    """


def pass_on(
  wrapper: Wrapper, call: Call, outcome: Outcome, state: Any, context: Any
) -> tuple[Any, Any]:
  """The method `after` of a wrapper that adds nothing to the outcome."""
  return outcome.result, state


def run(tx: optax.GradientTransformation, call: Call, state: Any) -> Outcome:
  """Calls a transformation, through its wrappers."""
  form = _form.form_of(tx.update)
  wrapper: Wrapper | None = None if form is None else form.wrapper
  if form is None or wrapper is None:
    return _make(tx, call, state)
  form.check(call.gradients()[0], state, call.params)
  inner_call, new_state, context = wrapper.before(call, state)
  new_state = _new_if(call.go, new_state, state)
  inner_call = inner_call._replace(go=_conditionals.both(call.go, inner_call.go))
  outcome = run(wrapper.inner, inner_call, state.inner_state)
  result, last_state = wrapper.after(call, outcome, new_state, context)
  last_state = _new_if(call.go, last_state, new_state, scalars_only=True)
  last_state = last_state._replace(inner_state=outcome.state, made=jnp.asarray(outcome.made))
  # The innermost wrapper that asks for the check counts the steps that it prevents.
  asked = inner_call.landing.agree is not call.landing.agree
  lost = jnp.asarray(False) if asked else outcome.lost
  return Outcome(result, last_state, outcome.made, lost)


def _new_if(condition: Condition, new: Any, old: Any, *, scalars_only: bool = False) -> Any:
  """The new state if `condition`, else the old one."""

  def select(x: Any, y: Any) -> Any:
    return x if scalars_only and jnp.shape(x) else jnp.where(condition, x, y)

  changed = {name: getattr(new, name) for name in new._fields if condition is not True}
  pairs = {name: (x, getattr(old, name)) for name, x in changed.items()}
  return new._replace(
    **{name: jax.tree.map(select, x, y) for name, (x, y) in pairs.items() if x is not y}
  )


def _make(tx: optax.GradientTransformation, call: Call, state: Any) -> Outcome:
  """Makes the step of a transformation that is not a wrapper, if ``call.go`` and it is sound."""
  landing = call.landing
  tx = landing.change(optax.with_extra_args_support(tx))

  def update(place: Any, state: Any) -> tuple[Any, optax.Updates, optax.OptState]:
    params = None if place is None else landing.get(place)
    grads, extra = call.gradients()
    updates, moved = tx.update(grads, state, params, **extra)
    return params, updates if landing.cast is None else landing.cast(updates), moved

  def land(place: Any, params: Any, updates: optax.Updates, moved: Any) -> tuple[Any, Any]:
    if not landing.in_params:
      return updates, moved
    return landing.put(place, add_updates(params, updates, moved), params), moved

  def step(place: Any, state: Any) -> tuple[Any, optax.OptState]:
    return land(place, *update(place, state))

  sound: Condition = True
  ahead: Any = None

  def is_sound() -> jax.Array:
    nonlocal ahead
    params, updates, moved = update(call.place, state)
    # In the dtypes in which the state is kept: a number may be beyond the range of float16.
    moved = _arrays.cast_like(moved, state)
    ahead = params, updates, moved
    new, old = updates, jax.tree.map(jnp.zeros_like, updates)
    if params is not None:
      new, old = optax.apply_updates(params, updates), params
    return landing.agree(_finiteness.none_lost(new, old, moved, state))

  if landing.checks:
    sound = call.holds(is_sound)
  go = _conditionals.both(call.go, sound)
  lost = jnp.asarray(False) if sound is True else ~sound
  if go is True:
    made, (result, moved) = go, step(call.place, state)
  elif _conditionals.is_concrete(go) and go and ahead is not None:
    # Outside a trace, the step that was computed for the check is the step.
    made, (result, moved) = go, land(call.place, *ahead)
  elif landing.in_params:
    made, result, moved = landing.change_if(go, step, call.place, state)
  else:
    shapes = None if ahead is None else jax.tree.map(jax.typeof, ahead[1])
    made, (result, moved) = (
      go,
      _conditionals.update_if(go, lambda state: step(call.place, state), state, shapes),
    )
  return Outcome(result, moved, _conditionals.both(made, _made(state, moved)), lost)


def _made(before: Any, after: Any) -> Condition:
  """Whether a called transformation made a step, as its states tell."""
  made = _protocol.made_step(before, after)
  return made if isinstance(made, jax.Array) else True


def add_updates(
  params: optax.Params, updates: optax.Updates, state: optax.OptState
) -> optax.Params:
  """``optax.apply_updates``, without its rounding where a state holds the exact new params."""

  def reach(reached: Any, total: Any, param: Any, update: Any, exact: Any) -> Any:
    if _masks.is_masked(exact) or jnp.shape(exact) != jnp.shape(total):
      return total
    exact = _placement.in_device_memory(exact).astype(total.dtype)
    wide = jnp.promote_types(total.dtype, update.dtype)
    step = exact.astype(wide) - param.astype(wide)
    # Compared relative to the step: an update that was changed, as to zero in a frozen leaf, is
    # added.
    leads = jnp.isclose(update.astype(wide), step, jnp.finfo(update.dtype).eps, 0, equal_nan=True)
    return jnp.where(leads & reached, exact, total)

  new = optax.apply_updates(params, updates)
  structure: Any = jax.tree.structure(params, is_leaf=_masks.is_masked)
  for node in _protocol.declaring_states(state, "exact"):
    reached: Any = True
    for name in _protocol.declared(node, "exact_if"):
      reached = reached & getattr(node, name)
    reach_if = functools.partial(reach, reached)
    for name in _protocol.declared(node, "exact"):
      trees = (new, params, updates, getattr(node, name))
      leaves = [_masks.leaves_like(tree, params) for tree in trees]
      fitting = [of_tree for of_tree in leaves if of_tree is not None]
      if len(fitting) == len(trees):
        new = jax.tree.unflatten(structure, list(map(reach_if, *fitting)))
  return new

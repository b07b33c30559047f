"""Switches from one transformation to another, whose state is updated from the first step on."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_boost._form import _protocol, _skipped_steps, _transformation
from optax_boost._foundation import _arrays, _checks, _conditionals, _types
from optax_boost._step import _nesting

_METHOD = "switch_after"


@_protocol.declares(outcome=("made",))
class SwitchAfterState(NamedTuple):
  """State of :func:`switch_after`.

  Attributes:
    count: scalar int32, calls of ``update``.
    first_state: state of the first transformation; not updated after the switch.
    second_state: state of the second transformation, updated in every step.
    made: scalar bool, whether the transformation that acted in the last call made a step. An
      ``optax.MultiSteps`` makes a step only at the end of a window.
  """

  count: _types.IntScalar  # type: ignore[assignment]  # tuples have a method of this name
  first_state: optax.OptState
  second_state: optax.OptState
  made: _types.BoolScalar


def switch_after(
  step: jax.typing.ArrayLike,
  first: optax.GradientTransformation,
  second: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
  """Switches from `first` to `second` after a number of steps.

  Before the switch, `second` also gets the gradients, so that its moments are warm at the switch;
  its updates are dropped. After the switch, `first` is no longer computed.

  Args:
    step: the number of steps with the updates of `first`, at least 0. May be traced.
    first: the transformation before the switch.
    second: the transformation after the switch, computed from the first step on.

  Returns:
    An :class:`optax.GradientTransformationExtraArgs` that passes its extra arguments to both. Its
    updates have the wider dtype of the two transformations' updates.

  Raises:
    ValueError: `step` is below zero; in ``init``: `first` or `second` holds a wrapper such as
      :func:`accumulate`, which goes around :func:`switch_after`.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_boost
    >>> tx = optax_boost.switch_after(1, optax.sgd(1.0), optax.trace(decay=0.5))
    >>> state = tx.init(jnp.zeros(1))
    >>> for _ in range(3):
    ...   updates, state = tx.update(jnp.ones(1), state)
    ...   print(updates.tolist())
    [-1.0]
    [1.5]
    [1.75]

  References:
    Qiu, Suda, `Permute to Train <https://arxiv.org/abs/2003.02570>`_, 2020.
  """
  _checks.check_whole_number("step", step, minimum=0)
  first = _checks.check_transformation("first", first)
  second = _checks.check_transformation("second", second)

  return _SwitchAfter(step, first, second).transformation()


class _SwitchAfter(NamedTuple):
  """The checked arguments of :func:`switch_after`."""

  step: jax.typing.ArrayLike
  first: optax.GradientTransformationExtraArgs
  second: optax.GradientTransformationExtraArgs

  def transformation(self) -> optax.GradientTransformationExtraArgs:
    return _transformation.transformation(
      _METHOD,
      SwitchAfterState,
      self.init,
      self.act,
      allows_complex=True,
    )

  def init(self, params: optax.Params) -> SwitchAfterState:
    first_state, second_state = self.first.init(params), self.second.init(params)
    _nesting.refuse_steps(_METHOD, (first_state, second_state))
    return SwitchAfterState(
      jnp.zeros([], jnp.int32), first_state, second_state, jnp.zeros([], bool)
    )

  def act(
    self,
    updates: optax.Updates,
    state: SwitchAfterState,
    params: optax.Params | None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, SwitchAfterState]:
    second_updates, second_state = self.second.update(
      updates, state.second_state, params, **extra_args
    )

    def promote(u: jax.Array, v: jax.Array) -> jax.Array:
      return u.astype(jnp.promote_types(u.dtype, v.dtype))

    def update_first(first_state: optax.OptState) -> tuple[optax.Updates, optax.OptState]:
      first_updates, first_state = self.first.update(updates, first_state, params, **extra_args)
      return jax.tree.map(promote, first_updates, second_updates), first_state

    first_acts = state.count < self.step
    first_updates, first_state = _conditionals.update_if(
      first_acts, update_first, state.first_state
    )
    second_updates = jax.tree.map(promote, second_updates, first_updates)
    acting_updates = jax.tree.map(
      lambda u, v: jnp.where(first_acts, u, v), first_updates, second_updates
    )
    made = jnp.where(
      first_acts,
      _skipped_steps.made_step(state.first_state, first_state),
      _skipped_steps.made_step(state.second_state, second_state),
    )
    return acting_updates, SwitchAfterState(
      count=optax.safe_increment(state.count),
      first_state=first_state,
      second_state=_arrays.cast_like(second_state, state.second_state),
      made=made,
    )

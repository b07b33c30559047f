"""Switches from one transformation to another, whose state follows the gradients from the start."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_boost._form import _protocol, _skipped_steps, _transformation
from optax_boost._foundation import _arrays, _checks, _conditionals

_METHOD = "switch_after"
# The wrappers whose states make requests of the loss.
_WRAPPERS = {
  _protocol.LOSS_SCALE: "dynamic_loss_scale",
  _protocol.FROZEN_GROUPS: "freeze_layers",
}


@_protocol.declares(outcome=("made",))
class SwitchAfterState(NamedTuple):
  """State of :func:`switch_after`.

  Attributes:
    count: scalar int32, calls of ``update``.
    first_state: state of the first transformation; not updated after the switch.
    second_state: state of the second, which sees every step.
    made: scalar bool, whether the side that acts made a step in the last call. A side with
      :func:`accumulate` makes one at the end of a window only.
  """

  count: jax.Array  # type: ignore[assignment]  # tuples have a method of this name
  first_state: optax.OptState
  second_state: optax.OptState
  made: jax.Array


def switch_after(
  step: jax.typing.ArrayLike,
  first: optax.GradientTransformation,
  second: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
  """Lets `first` act for a number of steps, then `second`.

  Before the switch `second` sees the same gradients and params and its updates are dropped, so its
  moments are warm when it takes over. After the switch `first` is not computed any more.

  Args:
    step: for how many steps `first` acts; 0: `second` acts from the start. May be traced.
    first: the transformation before the switch.
    second: the transformation after it, computed from the first step on.

  Returns:
    An :class:`optax.GradientTransformationExtraArgs` that hands its extra arguments to both. Its
    updates have the wider of the two dtypes.

  Raises:
    ValueError: `step` is below zero; in ``init``: `first` or `second` holds a loss scale,
      :func:`freeze_layers` or :func:`average_params`, which go around the whole.

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

  step: Any
  first: optax.GradientTransformationExtraArgs
  second: optax.GradientTransformationExtraArgs

  def transformation(self) -> optax.GradientTransformationExtraArgs:
    return _transformation.transformation(
      _METHOD,
      SwitchAfterState,
      self.init,
      self.act,
      wraps=(self.first, self.second),
      allows_complex=True,
      part_states=("first_state", "second_state"),
      rebuild=lambda first, second: _SwitchAfter(self.step, first, second).transformation(),
    )

  def init(self, params: optax.Params) -> SwitchAfterState:
    first_state, second_state = self.first.init(params), self.second.init(params)
    _refuse_requests("first", first_state)
    _refuse_requests("second", second_state)
    return SwitchAfterState(
      jnp.zeros([], jnp.int32), first_state, second_state, jnp.zeros([], bool)
    )

  def act(
    self, updates: optax.Updates, state: SwitchAfterState, params: Any, **extra_args: Any
  ) -> tuple[optax.Updates, SwitchAfterState]:
    from_second, second_state = self.second.update(
      updates, state.second_state, params, **extra_args
    )

    def widened(u: jax.Array, v: jax.Array) -> jax.Array:
      return u.astype(jnp.promote_types(u.dtype, v.dtype))

    def of_first(first_state: optax.OptState) -> tuple[optax.Updates, optax.OptState]:
      out, first_state = self.first.update(updates, first_state, params, **extra_args)
      return jax.tree.map(widened, out, from_second), first_state

    first_acts = state.count < self.step
    from_first, first_state = _conditionals.update_if(first_acts, of_first, state.first_state)
    from_second = jax.tree.map(widened, from_second, from_first)
    out = jax.tree.map(lambda u, v: jnp.where(first_acts, u, v), from_first, from_second)
    made = jnp.where(
      first_acts,
      _skipped_steps.made_step(state.first_state, first_state),
      _skipped_steps.made_step(state.second_state, second_state),
    )
    return out, SwitchAfterState(
      count=optax.safe_increment(state.count),
      first_state=first_state,
      second_state=_arrays.cast_like(second_state, state.second_state),
      made=made,
    )


def _refuse_requests(name: str, state: optax.OptState) -> None:
  """Refuses a side whose state requests something of the loss, since every loss would change."""
  for node in _protocol.declaring_states(state, "requests"):
    for request in _WRAPPERS.keys() & set(_protocol.declared(node, "requests")):
      raise ValueError(
        f"`switch_after` can't hold a `{request}`, which `{name}` does ({type(node).__name__}): it"
        " acts on the loss of every step, before and after the switch. Put its wrapper around the"
        f" whole: `{_WRAPPERS[request]}(switch_after(...))`."
      )

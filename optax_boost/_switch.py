"""One transformation for the first steps, another after, whose state was kept warm meanwhile.

Source: the `continuous` sub-training of SGPerm, arXiv:2003.02570, which ends in an ordinary
optimizer.
"""

from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_boost import _base
from optax_boost import _tree


class SwitchAfterState(NamedTuple):
  """State of :func:`switch_after`.

  Attributes:
    count: scalar int32, steps made.
    first_state: state of the first transformation; stands still after the switch.
    second_state: state of the second, which sees every step.
  """

  count: jax.Array  # type: ignore[assignment]  # tuples have a method of this name
  first_state: optax.OptState
  second_state: optax.OptState


def switch_after(
  step: jax.typing.ArrayLike,
  first: optax.GradientTransformation,
  second: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
  """Lets `first` act for a number of steps, then `second`.

  Before the switch `second` sees the same gradients and params, and what it would do is dropped;
  so its moments are warm when it takes over. After the switch `first` is not computed any more.

  Args:
    step: for how many steps `first` acts; 0: `second` acts from the start. May be traced.
    first: what acts first.
    second: what acts then. It costs its time from the first step on, and a line search its trials.

  Returns:
    An :class:`optax.GradientTransformationExtraArgs` that hands its extra arguments to both. Its
    updates have the wider of the two dtypes.

  Raises:
    ValueError: `step` is below zero.
    TypeError: `step` is no whole number, `first` or `second` no transformation, or a leaf not
      floating-point.

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
  _base.check_whole_number("step", step, minimum=0)
  for name, tx in (("first", first), ("second", second)):
    if not isinstance(tx, optax.GradientTransformation):
      raise TypeError(
        f"`{name}` must be an optax.GradientTransformation; got {tx!r}. Did you pass the factory"
        " instead of what it returns?"
      )
  first, second = optax.with_extra_args_support(first), optax.with_extra_args_support(second)

  def init_fn(params: optax.Params) -> SwitchAfterState:
    _tree.check_floating(params, "switch_after")
    return SwitchAfterState(jnp.zeros([], jnp.int32), first.init(params), second.init(params))

  def update_fn(
    updates: optax.Updates,
    state: SwitchAfterState,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, SwitchAfterState]:
    _tree.check_floating(updates, "switch_after")
    from_second, second_state = second.update(updates, state.second_state, params, **extra_args)

    def act(first_state: optax.OptState) -> tuple[optax.Updates, optax.OptState]:
      out, first_state = first.update(updates, first_state, params, **extra_args)
      return jax.tree.map(lambda u, v: u.astype(_wider(u, v)), out, from_second), first_state

    def rest(first_state: optax.OptState) -> tuple[optax.Updates, optax.OptState]:
      shapes = jax.eval_shape(act, first_state)[0]
      return jax.tree.map(lambda u, s: u.astype(s.dtype), from_second, shapes), first_state

    out, first_state = jax.lax.cond(state.count < step, act, rest, state.first_state)
    count = optax.safe_increment(state.count)
    return out, SwitchAfterState(count, first_state, second_state)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _wider(u: jax.Array, v: jax.Array) -> Any:
  return jnp.promote_types(u.dtype, v.dtype)

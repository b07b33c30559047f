"""Gradient accumulation: k micro-steps, one step of the inner optimizer."""

from collections.abc import Callable
import functools
from typing import Any
from typing import Literal
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_boost import _arrays
from optax_boost import _base
from optax_boost import _conditional
from optax_boost import _in_place
from optax_boost import _protocol
from optax_boost import _tree

_METHOD = "accumulate"


@_protocol.declares(
  metrics=("accumulate/notfinite_count",),
  requests=(_protocol.WEIGHT_SUM,),
  steps=("inner_count",),
)
class AccumulateState(NamedTuple):
  """State of :func:`accumulate`.

  Attributes:
    count: scalar int32, micro-steps in the current window; 0 right after an inner step.
    inner_count: scalar int32, inner steps made.
    weight_sum: scalar float32, the weights in the current window.
    accumulator: tree of the params' structure, the weighted sum of the gradients in the window.
    notfinite_count: scalar int32, micro-batches whose gradient or weight was not finite, whose
      weight was negative, or whose gradient overflowed the sum.
    inner_state: the inner optimizer's state.
  """

  count: jax.Array  # type: ignore[assignment]  # tuples have a method of this name
  inner_count: jax.Array
  weight_sum: jax.Array
  accumulator: optax.Updates
  notfinite_count: jax.Array
  inner_state: optax.OptState


def accumulate(
  inner: optax.GradientTransformation,
  every: int | jax.Array | Callable[[jax.Array], jax.typing.ArrayLike],
  *,
  not_finite: Literal["drop", "keep"] | None = "drop",
  axis_name: str | tuple[str, ...] | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Averages the gradients of `every` micro-steps before one step of `inner`.

  .. math::
    G = \frac{\sum_i n_i g_i}{\sum_i n_i}

  for the gradients :math:`g_i` of the window's micro-batches and their weights :math:`n_i`. For
  batches larger than memory. The inner optimizer really runs once per window: its state, weight
  decay and schedules count inner steps. In between updates are exactly zero. The sum is kept in at
  least float32.

  Args:
    inner: the optimizer that sees the mean gradient.
    every: micro-steps per inner step, at least 1; or a function of the number of inner steps made.
      Raising it makes larger batches of the same memory, and fewer steps.
    not_finite: the treatment of micro-batches whose gradient is not finite or overflows the sum.
      ``"drop"``: they are left out of the mean, and a window of nothing else makes no inner step.
      ``"keep"``: they spoil the mean of their own window, for `inner` to see, such as
      ``optax.apply_if_finite``. Around a loss scale they are always kept. None: kept, but neither
      looked for nor counted, which saves a pass over the gradients.
    axis_name: inside ``shard_map``, the mesh axes over which the gradients differ, so that all
      devices leave out the same micro-batches. Not needed under ``jit``.

  Returns:
    An :class:`optax.GradientTransformationExtraArgs`. Its ``update`` takes an optional `weight`,
    the number of examples or tokens in the micro-batch, 1 unless given; `weight` of
    :func:`make_train_step` sets it. `inner` sees the other extra arguments of the window's
    last micro-step, and as `grad` the mean gradient; an :func:`accumulate` in it gets the window's
    weight.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_boost
    >>> tx = optax_boost.accumulate(optax.sgd(1.0), every=2)
    >>> params = jnp.zeros(2)
    >>> state = tx.init(params)
    >>> updates, state = tx.update(jnp.array([1.0, 2.0]), state, params)
    >>> updates.tolist()
    [0.0, 0.0]
    >>> updates, state = tx.update(jnp.array([3.0, 6.0]), state, params)
    >>> updates.tolist(), int(state.inner_count)
    ([-2.0, -4.0], 1)

  .. note::
    Where all micro-batches of a step are at hand at once, ``optax.microbatching`` needs no buffer
    between steps. ``optax.MultiSteps`` runs its inner optimizer at every micro-step, and a NaN
    stays in its accumulator.
  """
  inner = _base.check_transformation("inner", inner)
  if not callable(every):
    _base.check_whole_number("every", every)
  _base.check_name("not_finite", not_finite, ("drop", "keep"), optional=True)
  _base.check_axis_name("axis_name", axis_name)

  def init(params: optax.Params) -> AccumulateState:
    _tree.check_inexact(params, _METHOD)
    return AccumulateState(
      count=jnp.zeros([], jnp.int32),
      inner_count=jnp.zeros([], jnp.int32),
      weight_sum=jnp.zeros([], jnp.float32),
      accumulator=_arrays.zeros_like_wide(params),
      notfinite_count=jnp.zeros([], jnp.int32),
      inner_state=inner.init(params),
    )

  def step(
    gradients: _in_place.Gradients, state: Any, params: Any, landing: _in_place.Landing
  ) -> tuple[Any, AccumulateState]:
    g, extra_args = gradients()
    n = _checked(g, state, extra_args.pop("weight", 1.0))
    finite = _is_finite(g, n, state, not_finite)
    weight_sum = state.weight_sum + n
    weighted = jnp.isfinite(weight_sum) & (n >= 0)
    if axis_name is not None:
      weighted, finite = _conditional.agree(jnp.stack([weighted, finite]), axis_name, _METHOD)
    used = weighted & (finite | _keeps(state, not_finite))
    weight_sum = jnp.where(used, weight_sum, state.weight_sum)
    full = state.count + 1 >= _window(every, state.inner_count)
    stepping = full & (weight_sum > 0)

    def mean() -> tuple[optax.Updates, dict[str, Any]]:
      """The mean gradient of the window, also as `grad`, and its weight."""
      of_window = jax.tree.map(lambda t: _in_place.divide(t, weight_sum), total)
      of_window = _conditional.cast_like(of_window, g)
      extra = extra_args | ({"grad": of_window} if "grad" in extra_args else {})
      # Not for all: optax's line searches refuse arguments that their closures do not take.
      if _tree.find_states(state.inner_state, AccumulateState):
        extra["weight"] = weight_sum
      return of_window, extra

    def make(params: Any, inner_state: optax.OptState) -> tuple[Any, optax.OptState]:
      return landing.step(inner, mean, inner_state, params)

    def emptied(total: Any) -> tuple[Any]:
      # Without a value to read, all leaves of a shape would share one array of zeros.
      return (jax.tree.map(lambda t: jnp.where(ended, jnp.zeros_like(t), t), total),)

    total = jax.tree.map(lambda t, own: jnp.where(used, _plus(n, t, own), t), state.accumulator, g)
    made, result, inner_state = landing.step_if(stepping, make, params, state.inner_state)
    # A window of nothing but bad gradients ends without a step.
    ended = made | full
    _, accumulator = landing.change_if(ended, emptied, total)
    return result, AccumulateState(
      count=jnp.where(full, 0, state.count + 1),
      inner_count=_arrays.increment_if(stepping, state.inner_count),
      weight_sum=jnp.where(full, 0.0, weight_sum),
      accumulator=accumulator,
      notfinite_count=_arrays.increment_if(~(finite & weighted), state.notfinite_count),
      inner_state=inner_state,
    )

  return _in_place.transformation(init, step)


def _keeps(state: AccumulateState, not_finite: str | None) -> bool:
  # A loss scale that sees no overflow never comes down, and every micro-batch overflows.
  return not_finite != "drop" or _conditional.scales_loss(state.inner_state)


def _is_finite(
  g: optax.Updates, n: jax.Array, state: AccumulateState, not_finite: str | None
) -> jax.Array:
  """Whether a micro-batch's gradient, or its sum with the window's others, is finite."""
  finite = jnp.asarray(True)
  if not_finite is None:
    return finite
  keeps = _keeps(state, not_finite)

  def check() -> tuple[jax.Array]:
    add = functools.partial(_plus, n)
    return (_arrays.all_finite(g if keeps else jax.tree.map(add, state.accumulator, g)),)

  if not (keeps or _in_place.has_wide_range(state.accumulator)):
    return check()[0]
  usual = _in_place.ordinary(_in_place.sum_squares(g), n, {})
  return _in_place.checked_unless(usual, check, finite)[0]


def _checked(updates: optax.Updates, state: Any, weight: Any) -> jax.Array:
  """Checks the arguments of a micro-step; returns its weight in float32, a known one checked."""
  _base.require_state(state, AccumulateState, _METHOD)
  _tree.check_inexact(updates, _METHOD)
  _tree.check_same_tree(updates, state.accumulator, _METHOD)
  largest = float(jnp.finfo(jnp.float32).max)
  _base.check_number("weight", weight, minimum=0.0, maximum=largest)
  return jnp.asarray(weight, jnp.float32)


def _plus(weight: jax.Array, total: jax.Array, g: jax.Array) -> jax.Array:
  return total + (weight * g.astype(total.dtype)).astype(total.dtype)


def _window(every: Any, inner_count: jax.Array) -> jax.Array:
  """The number of micro-steps in the current window."""
  length = every(inner_count) if callable(every) else every
  if jnp.shape(length) != ():
    raise ValueError(
      "`every` must return a scalar, the number of micro-steps in a window; got an array of shape"
      f" {jnp.shape(length)}."
    )
  return jnp.asarray(length)

"""Gradient accumulation: k micro-steps, one step of the inner optimizer."""

from collections.abc import Callable
import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_boost._form import _compositions, _driver, _finiteness, _protocol, _transformation
from optax_boost._foundation import _arrays, _checks, _conditionals, _mesh_axes, _trees

_METHOD = "accumulate"


@_protocol.declares(
  metrics=("accumulate/notfinite_count",),
  requests=(_protocol.WEIGHT_SUM,),
  outcome=("made",),
  skips=("notfinite_count",),
)
class AccumulateState(NamedTuple):
  """State of :func:`accumulate`.

  Attributes:
    count: scalar int32, micro-steps in the current window; 0 right after an inner step.
    inner_count: scalar int32, windows at whose end the inner optimizer was called; it may have
      skipped its step.
    weight_sum: scalar float32 (float64 under x64), the weights in the current window.
    accumulator: tree of the params' structure, the weighted sum of the gradients in the window.
    notfinite_count: scalar int32, micro-batches whose gradient or weight was not finite, whose
      weight was negative, or whose gradient overflowed the sum.
    inner_state: the inner optimizer's state.
    made: scalar bool, whether the last call made an inner step.
  """

  count: jax.Array  # type: ignore[assignment]  # tuples have a method of this name
  inner_count: jax.Array
  weight_sum: jax.Array
  accumulator: optax.Updates
  notfinite_count: jax.Array
  inner_state: optax.OptState
  made: jax.Array


class _Window(NamedTuple):
  """The current window after a micro-step."""

  total: optax.Updates  # unchanged unless the micro-step is to be made
  full: jax.Array  # whether it ends
  steps: jax.Array  # whether the inner optimizer is called


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
      devices leave out the same micro-batches, and weights that differ count among the devices: the
      mean of `inner`'s gradients over the devices (``jax.lax.pmean``) is the mean over all
      examples. Not needed under ``jit``.

  Returns:
    An :class:`optax.GradientTransformationExtraArgs`. Its ``update`` takes an optional `weight`,
    the number of examples or tokens in the micro-batch, 1 unless given; `weight` of
    :func:`make_train_step` sets it. `inner` sees the other extra arguments of the window's
    last micro-step, and as `grad` the mean gradient; an :func:`accumulate` in it gets the window's
    weight. :func:`master_weights` and :func:`stochastic_rounding` inside get the mean in float32.

  Raises:
    ValueError: in ``init``: `inner` holds :func:`svrg`, whose snapshot's gradient would be of the
      last micro-batch alone.

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
  inner = _checks.check_transformation("inner", inner)
  if not callable(every):
    _checks.check_whole_number("every", every)
  _checks.check_name("not_finite", not_finite, ("drop", "keep"), optional=True)
  _mesh_axes.check_axis_name("axis_name", axis_name)

  method = _Accumulate(inner, every, not_finite, axis_name)
  return _transformation.wrapper(_METHOD, AccumulateState, method, allows_complex=True)


@dataclasses.dataclass(frozen=True, eq=False)
class _Accumulate:
  """The checked arguments of :func:`accumulate`."""

  inner: optax.GradientTransformationExtraArgs
  every: Any
  not_finite: str | None
  axis_name: str | tuple[str, ...] | None

  def init(self, params: optax.Params) -> AccumulateState:
    inner_state = self.inner.init(params)
    takes_gradients = _protocol.is_requested(inner_state, _protocol.FULL_GRADIENT)
    if takes_gradients and _checks.concrete_number(self.every) != 1:
      raise ValueError(
        "`accumulate` can't hold a method that takes gradients at other params, as `svrg` does:"
        " they would be of the window's last micro-batch, beside the mean gradient of all. Use"
        " larger batches, or `optax.microbatching` in the loss."
      )
    return AccumulateState(
      count=jnp.zeros([], jnp.int32),
      inner_count=jnp.zeros([], jnp.int32),
      weight_sum=jnp.zeros([], float),
      accumulator=_arrays.zeros_like_wide(params),
      notfinite_count=jnp.zeros([], jnp.int32),
      inner_state=inner_state,
      made=jnp.zeros([], bool),
    )

  def before(
    self, call: _driver.Call, state: AccumulateState
  ) -> tuple[_driver.Call, AccumulateState, _Window]:
    grads, extra_args = call.gradients()
    weight = _checked_weight(extra_args.pop("weight", 1.0))
    addend = jax.tree.map(lambda t, g: _weighted(weight, t, g), state.accumulator, grads)
    used, good = self._is_used(call, state, weight, addend)
    weight_sum = jnp.where(used, state.weight_sum + weight, state.weight_sum)
    full = state.count + 1 >= _length(self.every, state.inner_count)
    total = jax.tree.map(lambda t, a: jnp.where(used, t + a, t), state.accumulator, addend)
    divisor = weight_sum
    if self.axis_name is not None:
      divisor = jax.lax.pmean(weight_sum, self.axis_name)

    def mean() -> tuple[optax.Updates, dict[str, Any]]:
      """The mean gradient of the window, also as `grad`, and its weight."""
      of_window = jax.tree.map(lambda t: _arrays.divide(t, divisor), total)
      # Masters inside take the mean unrounded.
      if not any(form.keeps == "rounding" for form in _compositions.forms(self.inner)):
        of_window = _arrays.cast_like(of_window, grads)
      extra = extra_args | ({"grad": of_window} if "grad" in extra_args else {})
      # Not for every optimizer: optax's line searches refuse arguments that closures do not take.
      if _trees.find_states(state.inner_state, AccumulateState):
        extra["weight"] = weight_sum
      # A window may end with a micro-batch that is dropped, and its statistics with it.
      if extra.get("model_state") is not None:
        extra["model_state"] = _conditionals.nan_if(~good, extra["model_state"])
      return of_window, extra

    new_state = state._replace(
      count=jnp.where(full, 0, state.count + 1),
      weight_sum=jnp.where(full, 0.0, weight_sum),
      notfinite_count=_arrays.increment_if(~good, state.notfinite_count),
    )
    # A window that holds bad gradients only ends without a step.
    steps = full & (divisor > 0)
    return call._replace(gradients=mean, makes_step=steps), new_state, _Window(total, full, steps)

  def after(
    self,
    call: _driver.Call,
    outcome: _driver.Outcome,
    state: AccumulateState,
    window: _Window,
  ) -> tuple[Any, AccumulateState]:
    def emptied(total: Any) -> tuple[Any]:
      # XLA 14: without the old value, all leaves of a shape would be copies of one array of zeros.
      return (jax.tree.map(lambda t: jnp.where(ended, jnp.zeros_like(t), t), total),)

    ended = outcome.made | window.full
    (accumulator,) = call.compute_if(ended, emptied, window.total)
    return outcome.result, state._replace(
      inner_count=_arrays.increment_if(window.steps, state.inner_count), accumulator=accumulator
    )

  def _is_used(
    self, call: _driver.Call, state: AccumulateState, weight: jax.Array, addend: Any
  ) -> tuple[Any, jax.Array]:
    """Whether a micro-batch is added to the window, and whether it is good."""
    weighted = jnp.isfinite(state.weight_sum + weight) & (weight >= 0)
    grads, _ = call.gradients()
    # A loss scale that sees no overflow never shrinks, so every micro-batch would overflow.
    unseen = _protocol.unseen_by_scale(state.inner_state, grads)
    is_scaled = len(unseen) < len(jax.tree.leaves(grads))

    def check() -> jax.Array:
      if is_scaled or self.not_finite == "keep":
        return _finiteness.all_finite(grads)
      return _finiteness.sum_is_finite(state.accumulator, addend)

    finite = jnp.asarray(True) if self.not_finite is None else call.passes(check)
    usable = jnp.asarray(True)
    if self.not_finite == "drop":
      usable = finite
      if is_scaled:
        usable = _finiteness.all_finite(unseen) if unseen else jnp.asarray(True)
    if self.axis_name is not None:
      flags = jnp.stack([weighted, finite, usable])
      weighted, finite, usable = _mesh_axes.on_all_devices(flags, self.axis_name, _METHOD)
    # The sum is a part of the inner step's work, so the driver can't select it afterwards.
    return _conditionals.both(call.makes_step, weighted & usable), weighted & finite


def _checked_weight(weight: Any) -> jax.Array:
  """The weight of a micro-batch, a scalar float; checked if it is not traced."""
  largest = float(jnp.finfo(jnp.float32).max)
  _checks.check_number("weight", weight, minimum=0.0, maximum=largest)
  return jnp.asarray(weight, float)


def _weighted(weight: jax.Array, total: jax.Array, g: jax.Array) -> jax.Array:
  return (weight * g.astype(total.dtype)).astype(total.dtype)


def _length(every: Any, inner_count: jax.Array) -> jax.Array:
  """The number of micro-steps in the current window."""
  length = every(inner_count) if callable(every) else every
  if jnp.shape(length) != ():
    raise ValueError(
      "`every` must return a scalar, the number of micro-steps in a window; got an array of shape"
      f" {jnp.shape(length)}."
    )
  return jnp.asarray(length)

"""Gradient accumulation: the inner optimizer makes one step for the mean of k gradients."""

from collections.abc import Callable
import dataclasses
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from optax_boost._form import _compositions, _driver, _finiteness, _protocol, _transformation
from optax_boost._foundation import _arrays, _checks, _conditionals, _mesh_axes, _trees, _types

_METHOD = "accumulate"
_Every: TypeAlias = int | jax.Array | Callable[[jax.Array], jax.typing.ArrayLike]


@_protocol.declares(
  metrics=("accumulate/notfinite_count",),
  requests=(_protocol.WEIGHT_SUM,),
  outcome=("made",),
  skips=("notfinite_count",),
)
class AccumulateState(NamedTuple):
  """State of :func:`accumulate`.

  Attributes:
    count: scalar int32, the number of micro-steps so far in the current window; 0 when a window has
      ended. A window is the micro-steps whose mean gradient the inner optimizer gets.
    inner_count: scalar int32, the number of calls of the inner optimizer, including skipped steps.
    weight_sum: scalar float32 (float64 under x64), the sum of the weights in the current window.
    accumulator: tree of the params' structure, the weighted sum of the window's gradients.
    notfinite_count: scalar int32, micro-batches whose gradient or weight was not finite, whose
      weight was negative, or whose gradient made the sum overflow.
    inner_state: the inner optimizer's state.
    made: scalar bool, whether the last call made an inner step.
  """

  count: _types.IntScalar  # type: ignore[assignment]  # tuples have a method of this name
  inner_count: _types.IntScalar
  weight_sum: _types.FloatScalar
  accumulator: optax.Updates
  notfinite_count: _types.IntScalar
  inner_state: optax.OptState
  made: _types.BoolScalar


class _Window(NamedTuple):
  """The window after a micro-step, which ``before`` passes to ``after``.

  `is_full` tells whether the micro-step is the last one of the window. `calls_inner` tells whether
  the window then makes a step of the inner optimizer.
  """

  gradient_sum: optax.Updates  # the weighted sum, without a dropped micro-batch
  is_full: _types.BoolScalar
  calls_inner: _types.BoolScalar


def accumulate(
  inner: optax.GradientTransformation,
  every: _Every,
  *,
  not_finite: Literal["drop", "keep"] | None = "drop",
  axis_name: _types.AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Averages the gradients of `every` micro-steps before one step of `inner`.

  .. math::
    G = \frac{\sum_i n_i g_i}{\sum_i n_i}

  for the gradients :math:`g_i` and weights :math:`n_i` of the micro-batches in a window of `every`
  micro-steps. Use it for batches larger than memory. The inner optimizer is called once per window,
  so its state, weight decay and schedules advance once per window. The other micro-steps return
  updates of exactly zero. The sum is kept in at least float32.

  Args:
    inner: the optimizer that sees the mean gradient.
    every: the number of micro-steps per inner step, at least 1. Raising it gives larger batches in
      the same memory, and fewer steps. Or a function: it takes the number of inner steps so far,
      and returns the number of micro-steps for the next inner step.
    not_finite: what to do with a micro-batch whose gradient is not finite or makes the sum
      overflow. ``"drop"`` leaves the micro-batch out of the mean; a window that drops all its
      micro-batches ends without a step of `inner`. ``"keep"`` adds the micro-batch, so the mean is
      not finite, and `inner`, such as ``optax.apply_if_finite``, can skip the step. With a loss
      scale in `inner`, a micro-batch that overflows is added in either case, so that the scale
      shrinks. None: like ``"keep"``, without checking or counting gradients, which saves a pass.
    axis_name: as for :func:`dynamic_loss_scale`; all devices drop the same micro-batches. The
      weights may differ between devices: if `inner` averages its gradients over the devices
      (``jax.lax.pmean``), the result is the mean over all examples.

  Returns:
    An :class:`optax.GradientTransformationExtraArgs`. Its ``update`` takes an optional `weight`,
    the number of examples or tokens in the micro-batch; the default is 1. The argument `weight` of
    :func:`make_train_step` sets it. `inner` gets the mean gradient, also as the extra argument
    `grad`, and the other extra arguments of the window's last micro-step. An :func:`accumulate` in
    `inner` gets the window's sum of weights as its `weight`. A :func:`master_weights` or
    :func:`stochastic_rounding` in `inner` gets the mean in float32.

  Raises:
    ValueError: in ``init``: `inner` holds :func:`svrg`, which would compare the mean gradient with
      a gradient of the last micro-batch alone.

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
    If one call gets all micro-batches of a step, use ``optax.microbatching``, which needs no buffer
    between calls. ``optax.MultiSteps`` runs its inner optimizer at every micro-step, and a NaN
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
  every: _Every
  not_finite: str | None
  axis_name: _types.AxisName | None

  def init(self, params: optax.Params) -> AccumulateState:
    inner_state = self.inner.init(params)
    calls_grad_fn = _protocol.is_requested(inner_state, _protocol.FULL_GRADIENT)
    if calls_grad_fn and _checks.concrete_number(self.every) != 1:
      raise ValueError(
        "`accumulate` can't hold a method that takes gradients at other params, as `svrg` does:"
        " these would be of the window's last micro-batch alone. Use larger batches, or"
        " `optax.microbatching` in the loss."
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
    is_added, is_good = self._judge(call, state, weight, addend)
    weight_sum = jnp.where(is_added, state.weight_sum + weight, state.weight_sum)
    is_full = state.count + 1 >= _window_length(self.every, state.inner_count)
    gradient_sum = jax.tree.map(
      lambda t, a: jnp.where(is_added, t + a, t), state.accumulator, addend
    )
    divisor = weight_sum
    if self.axis_name is not None:
      divisor = jax.lax.pmean(weight_sum, self.axis_name)

    def inner_arguments() -> tuple[optax.Updates, _types.ExtraArgs]:
      mean = jax.tree.map(lambda t: _arrays.divide(t, divisor), gradient_sum)
      # `master_weights` and `stochastic_rounding` compute in float32, and get the mean in float32.
      if not any(form.keeps == "rounding" for form in _compositions.forms(self.inner)):
        mean = _arrays.cast_like(mean, grads)
      extra = extra_args | ({"grad": mean} if "grad" in extra_args else {})
      # `weight` is passed on only to an `accumulate` in `inner`, since optax's line searches refuse
      # arguments that they don't know.
      if _trees.find_states(state.inner_state, AccumulateState):
        extra["weight"] = weight_sum
      # Statistics of a dropped micro-batch are set to NaN, so that `average_params` ignores them.
      if extra.get("model_state") is not None:
        extra["model_state"] = _conditionals.nan_if(~is_good, extra["model_state"])
      return mean, extra

    new_state = state._replace(
      count=jnp.where(is_full, 0, state.count + 1),
      weight_sum=jnp.where(is_full, 0.0, weight_sum),
      notfinite_count=_arrays.increment_if(~is_good, state.notfinite_count),
    )
    # If all micro-batches of a window are dropped, the window ends without a step.
    calls_inner = is_full & (divisor > 0)
    inner_call = call._replace(gradients=inner_arguments, makes_step=calls_inner)
    return inner_call, new_state, _Window(gradient_sum, is_full, calls_inner)

  def after(
    self,
    call: _driver.Call,
    outcome: _driver.Outcome,
    state: AccumulateState,
    window: _Window,
  ) -> tuple[Any, AccumulateState]:
    def emptied(gradient_sum: optax.Updates) -> tuple[optax.Updates]:
      # XLA 14: if the result did not depend on `t`, all leaves would copy one array of zeros.
      return (jax.tree.map(lambda t: jnp.where(has_ended, jnp.zeros_like(t), t), gradient_sum),)

    has_ended = outcome.made | window.is_full
    (accumulator,) = call.compute_if(has_ended, emptied, window.gradient_sum)
    return outcome.result, state._replace(
      inner_count=_arrays.increment_if(window.calls_inner, state.inner_count),
      accumulator=accumulator,
    )

  def _judge(
    self,
    call: _driver.Call,
    state: AccumulateState,
    weight: _types.FloatScalar,
    addend: optax.Updates,
  ) -> tuple[_types.Condition, _types.BoolScalar]:
    """Returns whether a micro-batch is added, and whether its gradient and weight are valid.

    `addend` is the gradient times `weight`, which is to be added to the sum in `state`.
    """
    weight_is_valid = jnp.isfinite(state.weight_sum + weight) & (weight >= 0)
    grads, _ = call.gradients()
    # Gradients of a scaled loss are added even if they overflowed, since a loss scale in `inner`
    # shrinks only when it sees an overflow.
    unseen = _protocol.unseen_by_scale(state.inner_state, grads)
    is_scaled = len(unseen) < len(jax.tree.leaves(grads))

    def check() -> _types.BoolScalar:
      if is_scaled or self.not_finite == "keep":
        return _finiteness.all_finite(grads)
      return _finiteness.sum_is_finite(state.accumulator, addend)

    is_finite = jnp.asarray(True) if self.not_finite is None else call.passes(check)
    may_be_added = jnp.asarray(True)
    if self.not_finite == "drop":
      may_be_added = is_finite
      if is_scaled:
        may_be_added = _finiteness.all_finite(unseen) if unseen else jnp.asarray(True)
    if self.axis_name is not None:
      flags = jnp.stack([weight_is_valid, is_finite, may_be_added])
      weight_is_valid, is_finite, may_be_added = _mesh_axes.on_all_devices(
        flags, self.axis_name, _METHOD
      )
    # If a wrapper around `accumulate` skips the step, the micro-batch must not be added. The driver
    # undoes changes of scalars in the state, but not of larger arrays such as the sum.
    is_added = _conditionals.both(call.makes_step, weight_is_valid & may_be_added)
    return is_added, weight_is_valid & is_finite


def _checked_weight(weight: jax.typing.ArrayLike) -> _types.FloatScalar:
  """Returns the weight of a micro-batch as an array; raises if a concrete weight is invalid."""
  largest = float(jnp.finfo(jnp.float32).max)
  _checks.check_number("weight", weight, minimum=0.0, maximum=largest)
  return jnp.asarray(weight, float)


def _weighted(weight: _types.FloatScalar, total: jax.Array, g: jax.Array) -> jax.Array:
  return (weight * g.astype(total.dtype)).astype(total.dtype)


def _window_length(
  every: _Every,
  inner_count: _types.IntScalar,
) -> _types.IntScalar:
  """Returns the number of micro-steps in the window that follows `inner_count` inner steps."""
  length = every(inner_count) if callable(every) else every
  if jnp.shape(length) != ():
    raise ValueError(
      "`every` must return a scalar, the number of micro-steps in a window; got an array of shape"
      f" {jnp.shape(length)}."
    )
  return jnp.asarray(length)

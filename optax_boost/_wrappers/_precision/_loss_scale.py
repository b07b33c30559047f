"""Dynamic loss scaling, which keeps small gradients from vanishing in float16.

The loss is multiplied by a scale s before it is differentiated, and the gradients are divided by
it afterwards, in float32: cast back to float16, they would vanish after all. So the inner
optimizer works in at least float32, its state included. s follows the overflows:

  overflow             no step is made; from the h-th overflow since s last grew on:
                       s <- max(s * backoff, minimum)
  n steps without one  s <- min(s * growth, maximum)

Sources: MindSpore's ``DynamicLossScaleUpdateCell``; the hysteresis h is from Megatron's
``DynamicGradScaler``.
"""

from collections.abc import Callable
import dataclasses
import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_boost._form import _driver, _finiteness, _protocol, _transformation
from optax_boost._foundation import _arrays, _checks, _extra_args, _mesh_axes, _types

_METHOD = "dynamic_loss_scale"


def _next_scale(
  scale: jax.Array,
  count: jax.Array,
  overflows: jax.Array,
  finite: jax.Array,
  *,
  growth_interval: Any,
  hysteresis: Any,
  growth_factor: Any,
  backoff_factor: Any,
  minimum: Any,
  maximum: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The scale, its growth count and its hysteresis count after a step."""
  if growth_interval is None:
    return scale, count, overflows
  overflows = _arrays.increment_if(~finite, overflows)
  grows = finite & (count + 1 >= growth_interval)
  grown = jnp.minimum(scale * jnp.float32(growth_factor), jnp.float32(maximum))
  shrunk = jnp.maximum(scale * jnp.float32(backoff_factor), jnp.float32(minimum))
  shrinks = ~finite & (overflows >= hysteresis)
  scale = jnp.where(grows, grown, jnp.where(shrinks, shrunk, scale))
  count = jnp.where(finite & ~grows, count + 1, 0)
  return scale, count, jnp.where(grows, 0, overflows)


@_protocol.declares(
  metrics=("loss_scale", "loss_scale/notfinite_count"),
  requests=("loss_scale",),
  outcome=("made",),
  skips=("notfinite_count",),
)
class DynamicLossScaleState(NamedTuple):
  """State of :func:`dynamic_loss_scale`.

  Attributes:
    loss_scale: scalar float32, the factor of the next loss.
    growth_count: scalar int32, the steps without an overflow since the last one, or since the scale
      last grew.
    hysteresis_count: scalar int32, overflows since the scale last grew.
    notfinite_count: scalar int32, steps that were not made since a gradient was not finite, or with
      ``check="updates"`` since a param or the inner state would not have been.
    hidden: the paths of leaves that ``optax.masked`` hides from the method, without arrays. The
      train step takes the scale off their gradients.
    inner_state: the inner optimizer's state.
    made: scalar bool, whether the last call made a step.
  """

  loss_scale: jax.Array
  growth_count: jax.Array
  hysteresis_count: jax.Array
  notfinite_count: jax.Array
  hidden: dict[str, optax.MaskedNode]
  inner_state: optax.OptState
  made: jax.Array


def dynamic_loss_scale(
  inner: optax.GradientTransformation,
  initial_scale: jax.typing.ArrayLike = 2.0**15,
  growth_interval: jax.typing.ArrayLike | None = 2000,
  *,
  hysteresis: jax.typing.ArrayLike = 1,
  growth_factor: jax.typing.ArrayLike = 2.0,
  backoff_factor: jax.typing.ArrayLike = 0.5,
  minimum: jax.typing.ArrayLike = 1.0,
  maximum: jax.typing.ArrayLike = 2.0**24,
  axis_name: str | tuple[str, ...] | None = None,
  check: Literal["gradients", "updates"] = "gradients",
) -> optax.GradientTransformationExtraArgs:
  r"""Unscales the gradients of a scaled loss, and skips the steps that overflowed.

  The loss must be multiplied by the state's `loss_scale` before it is differentiated:
  :func:`make_train_step` does it; by hand, read ``optax.tree.get(opt_state, "loss_scale")``.

  A step whose unscaled gradients are not finite changes the scale and the counters only. Inside
  ``optax.partition`` and ``optax.masked`` :func:`make_train_step` takes the scale off the gradients
  of the other leaves.

  Args:
    inner: the optimizer; gradients and its state are in at least float32. For float16 params put
      :func:`master_weights` around the whole: ``master_weights(dynamic_loss_scale(inner))``.
    initial_scale: the first scale, between `minimum` and `maximum`.
    growth_interval: steps without an overflow before the scale grows; raising it risks fewer
      overflows and adapts more slowly. None: a static scale; overflows are skipped all the same.
    hysteresis: which overflow since the scale last grew is the first to shrink it; raising it
      tolerates rare overflows that a smaller scale would not prevent.
    growth_factor: factor of the scale when it grows, at least 1.
    backoff_factor: factor of the scale after an overflow, below 1.
    minimum: floor of the scale.
    maximum: cap of the scale.
    axis_name: inside ``shard_map``, the mesh axes over which the gradients differ: one device's
      overflow then counts for all.
    check: ``"gradients"`` skips a step whose gradients are not finite. A NaN that `inner` makes of
      finite gradients, as ``optax.adam(eps=0)`` does, goes into params and state; the next
      gradients are NaN, so that steps are skipped and counted. ``"updates"`` computes each step
      once more, ahead, and skips one whose result would not be finite, for more time.

  Returns:
    An :class:`optax.GradientTransformationExtraArgs`. The extra arguments `grad` and `grad_fn` are
    unscaled for `inner`; `value` and `value_fn` are of the loss itself. Updates have the dtype of
    gradients and params together; if `inner` is :func:`master_weights` or
    :func:`stochastic_rounding`, they stay float32.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_boost
    >>> tx = optax_boost.dynamic_loss_scale(optax.sgd(1.0), initial_scale=4.0)
    >>> params = jnp.zeros(2)
    >>> updates, state = tx.update(jnp.array([4.0, 8.0]), tx.init(params), params)
    >>> updates.tolist()
    [-1.0, -2.0]
    >>> updates, state = tx.update(jnp.array([jnp.inf, 8.0]), state, params)
    >>> updates.tolist(), float(state.loss_scale), int(state.notfinite_count)
    ([0.0, 0.0], 2.0, 1)

  .. note::
    ``optax.inject_hyperparams`` casts to the params' dtype, and in float16 a scale of 65,536 is
    infinite: pass ``hyperparam_dtype=jnp.float32``.

  References:
    Micikevicius et al., `Mixed Precision Training <https://arxiv.org/abs/1710.03740>`_, 2018.
  """
  if growth_interval is not None:
    _checks.check_whole_number("growth_interval", growth_interval)
  _checks.check_whole_number("hysteresis", hysteresis)
  _checks.check_number("growth_factor", growth_factor, minimum=1.0)
  _checks.check_number("backoff_factor", backoff_factor, positive=True, below=1.0)
  _mesh_axes.check_axis_name("axis_name", axis_name)
  _checks.check_name("check", check, ("updates", "gradients"))
  _check_scales(minimum, initial_scale, maximum)
  inner = _checks.check_transformation("inner", inner)
  next_scale = functools.partial(
    _next_scale,
    growth_interval=growth_interval,
    hysteresis=hysteresis,
    growth_factor=growth_factor,
    backoff_factor=backoff_factor,
    minimum=minimum,
    maximum=maximum,
  )
  known = _checks.concrete_number(maximum)
  largest = math.inf if known is None else float(known)
  method = _LossScale(inner, initial_scale, largest, next_scale, axis_name, check == "updates")
  return _transformation.wrapper(_METHOD, DynamicLossScaleState, method, changes="half")


def _check_scales(minimum: Any, initial_scale: Any, maximum: Any) -> None:
  """Checks the first scale, its floor and its cap: float32 numbers in this order."""
  scales = {"minimum": minimum, "initial_scale": initial_scale, "maximum": maximum}
  for name, value in scales.items():
    # NumPy prints the largest float32 as 3.4028235e38, which is rounded up.
    _checks.check_number(
      name, value, minimum=float(jnp.finfo(jnp.float32).tiny), maximum=3.4028235e38
    )
  low, first, high = map(_checks.concrete_number, scales.values())
  if None not in (low, first, high) and not low <= first <= high:
    raise ValueError(
      "`minimum`, `initial_scale` and `maximum` must be in this order, from the smallest to the"
      f" largest; got {', '.join(map(_checks.shorten, scales.values()))}."
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _LossScale:
  """The checked arguments of :func:`dynamic_loss_scale`."""

  inner: optax.GradientTransformationExtraArgs
  initial_scale: Any
  largest: float  # the cap of the scale; infinity if it is traced
  next_scale: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]
  axis_name: str | tuple[str, ...] | None
  checks_updates: bool

  def init(self, params: optax.Params) -> DynamicLossScaleState:
    return DynamicLossScaleState(
      loss_scale=jnp.asarray(self.initial_scale, jnp.float32),
      growth_count=jnp.zeros([], jnp.int32),
      hysteresis_count=jnp.zeros([], jnp.int32),
      notfinite_count=jnp.zeros([], jnp.int32),
      hidden=_protocol.hidden_leaves(params),
      inner_state=self.inner.init(_arrays.copy_arrays(params, _arrays.accumulator_dtype)),
      made=jnp.zeros([], bool),
    )

  def before(
    self, call: _driver.Call, state: DynamicLossScaleState
  ) -> tuple[_driver.Call, DynamicLossScaleState, jax.Array]:
    divide = functools.partial(self._unscale, state.loss_scale)

    def unscaled() -> tuple[optax.Updates, dict[str, Any]]:
      return _extra_args.map_gradients(divide, *call.gradients())

    def are_finite() -> jax.Array:
      grads, _ = call.gradients()
      return self._on_all_devices(_finiteness.all_finite(grads, state.loss_scale, divide))

    finite = call.passes(are_finite)
    makes_step: _types.Condition = finite
    # A loss scale inside must see every overflow, or it would never shrink.
    if _protocol.is_requested(state.inner_state, _protocol.LOSS_SCALE):
      unseen = _protocol.unseen_by_scale(state.inner_state, call.gradients()[0])
      makes_step = self._on_all_devices(_finiteness.all_finite(unseen)) if unseen else True
    scale, count, overflows = self.next_scale(
      state.loss_scale, state.growth_count, state.hysteresis_count, finite
    )
    new_state = state._replace(loss_scale=scale, growth_count=count, hysteresis_count=overflows)
    inner_call = call._replace(
      gradients=unscaled, makes_step=makes_step, plan=self._plan(call, state)
    )
    return inner_call, new_state, finite

  def after(
    self,
    call: _driver.Call,
    outcome: _driver.Outcome,
    state: DynamicLossScaleState,
    finite: jax.Array,
  ) -> tuple[Any, DynamicLossScaleState]:
    bad = ~finite | outcome.failed_check
    return outcome.result, state._replace(
      notfinite_count=_arrays.increment_if(bad, state.notfinite_count)
    )

  def _plan(self, call: _driver.Call, state: DynamicLossScaleState) -> _driver.StepPlan:
    plan = call.plan
    if self.checks_updates:
      plan = plan.with_check(self._on_all_devices)
    # Inside another loss scale gradients are float32 already; the outer one casts the updates.
    if plan.cast_updates is None:
      plan = dataclasses.replace(plan, cast_updates=_cast_to(call.gradients()[0], call.params))
    return plan

  def _on_all_devices(self, flag: jax.Array) -> jax.Array:
    return _mesh_axes.on_all_devices(flag, self.axis_name, _METHOD)

  def _unscale(self, scale: jax.Array, grads: optax.Updates) -> optax.Updates:
    """Gradients without the scale, in at least float32."""
    return jax.tree.map(lambda g: _arrays.divide(_arrays.widen(g), scale, self.largest), grads)


def _cast_to(
  grads: optax.Updates, params: optax.Params | None
) -> Callable[[optax.Updates], optax.Updates]:
  """Casts updates to the promoted dtype of gradient and param, as if there were no loss scale."""
  like = grads if params is None else params

  def cast(update: jax.Array, grad: jax.Array, param: jax.Array) -> jax.Array:
    return update.astype(jnp.promote_types(grad.dtype, param.dtype))

  return lambda updates: jax.tree.map(cast, updates, grads, like)

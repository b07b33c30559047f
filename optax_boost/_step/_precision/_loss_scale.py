"""Dynamic loss scaling, which keeps small gradients from vanishing in float16.

The loss is multiplied by a scale s before it is differentiated, and the gradients are divided by s
afterwards. The quotients stay in float32, since they would vanish in float16 after all. An overflow
(a step whose gradients are not finite) changes the scale:

  overflow                    the step is skipped; from the h-th overflow on since s last grew,
                              s <- max(s * backoff, minimum)
  n steps without overflow    s <- min(s * growth, maximum)

Sources: MindSpore's ``DynamicLossScaleUpdateCell``; Megatron's ``DynamicGradScaler`` for h.
"""

from collections.abc import Callable
import dataclasses
import functools
import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_boost._form import _protocol
from optax_boost._foundation import _arrays, _checks, _types
from optax_boost._step import _wrapper

_METHOD = "dynamic_loss_scale"


def _next_scale(
  scale: _types.FloatScalar,
  growth_count: _types.IntScalar,
  hysteresis_count: _types.IntScalar,
  is_finite: _types.BoolScalar,
  *,
  growth_interval: jax.typing.ArrayLike | None,
  hysteresis: jax.typing.ArrayLike,
  growth_factor: jax.typing.ArrayLike,
  backoff_factor: jax.typing.ArrayLike,
  minimum: jax.typing.ArrayLike,
  maximum: jax.typing.ArrayLike,
) -> tuple[_types.FloatScalar, _types.IntScalar, _types.IntScalar]:
  """Returns the scale, the growth count and the hysteresis count after a step.

  `is_finite` is False if the step overflowed. The keyword arguments are as in
  :func:`dynamic_loss_scale`.
  """
  if growth_interval is None:
    return scale, growth_count, hysteresis_count
  hysteresis_count = _arrays.increment_if(~is_finite, hysteresis_count)
  grows = is_finite & (growth_count + 1 >= growth_interval)
  larger = jnp.minimum(scale * jnp.float32(growth_factor), jnp.float32(maximum))
  smaller = jnp.maximum(scale * jnp.float32(backoff_factor), jnp.float32(minimum))
  shrinks = ~is_finite & (hysteresis_count >= hysteresis)
  scale = jnp.where(grows, larger, jnp.where(shrinks, smaller, scale))
  growth_count = jnp.where(is_finite & ~grows, growth_count + 1, 0)
  return scale, growth_count, jnp.where(grows, 0, hysteresis_count)


@_protocol.declares(metrics=("loss_scale",))
class DynamicLossScaleState(NamedTuple):
  """State of :func:`dynamic_loss_scale`.

  Attributes:
    loss_scale: scalar float32, the factor of the next loss.
    growth_count: scalar int32, the number of steps since the last overflow or growth of the scale.
    hysteresis_count: scalar int32, the number of overflows since the scale last grew.
  """

  loss_scale: _types.FloatScalar
  growth_count: _types.IntScalar
  hysteresis_count: _types.IntScalar


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
  axis_name: _types.AxisName | None = None,
  check: Literal["gradients", "updates"] = "gradients",
) -> optax.GradientTransformationExtraArgs:
  r"""Unscales the gradients of a scaled loss, and skips the steps that overflowed.

  The loss must be multiplied by the state's `loss_scale` before it is differentiated.
  :func:`make_train_step` does so; in your own loop, read
  ``optax.tree.get(opt_state, "loss_scale")``.

  A step whose unscaled gradients are not finite changes only the scale and the counters. The scale
  is of the whole loss, so the wrapper goes around ``optax.partition`` and ``optax.masked``.

  Args:
    inner: the optimizer. Its gradients and its state are in at least float32. For float16 params
      put :func:`master_weights` around it: ``master_weights(dynamic_loss_scale(inner))``.
    initial_scale: the first scale, between `minimum` and `maximum`.
    growth_interval: the steps without an overflow after which the scale grows; raising it risks
      fewer overflows and adapts more slowly. None: a static scale; overflows are still skipped.
    hysteresis: an overflow shrinks the scale if at least this many overflows, itself included,
      occurred since the scale last grew. Raising it tolerates rare overflows that a smaller scale
      would not prevent.
    growth_factor: the factor by which the scale grows, at least 1.
    backoff_factor: the factor by which an overflow shrinks the scale, above 0 and below 1.
    minimum: the smallest scale.
    maximum: the largest scale.
    axis_name: inside ``shard_map``, the mesh axes over which gradients or params differ, so that
      either all devices make a step or none does. Without it, a bad gradient on one device
      deadlocks a program whose inner optimizer has collectives. Not needed under ``jit``.
    check: ``"gradients"`` skips a step whose gradients are not finite. If `inner` makes a NaN from
      finite gradients, as ``optax.adam(eps=0)`` does, the NaN goes into params and state. Then all
      gradients are NaN, so all steps are skipped and counted. ``"updates"`` also skips a step whose
      new params or state would not be finite, but computes each step twice. With
      :func:`accumulate`, such a step loses the whole window.

  Returns:
    An :class:`optax.GradientTransformationExtraArgs`. `inner` gets the extra arguments `grad` and
    `grad_fn` unscaled; `value` and `value_fn` belong to the unscaled loss. Updates have the
    promoted dtype of gradients and params; if `inner` is :func:`master_weights` or
    :func:`stochastic_rounding`, updates stay float32.

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
  _checks.check_number("backoff_factor", backoff_factor, above=0.0, below=1.0)
  _checks.check_name("check", check, ("updates", "gradients"))
  _check_scales(minimum, initial_scale, maximum)
  next_scale = functools.partial(
    _next_scale,
    growth_interval=growth_interval,
    hysteresis=hysteresis,
    growth_factor=growth_factor,
    backoff_factor=backoff_factor,
    minimum=minimum,
    maximum=maximum,
  )
  concrete_maximum = _checks.concrete_number(maximum)
  largest = math.inf if concrete_maximum is None else float(concrete_maximum)
  slot = LossScale(initial_scale, largest, next_scale, check == "updates")
  return _wrapper.fill(inner, axis_name, scaling=slot)


def _check_scales(
  minimum: jax.typing.ArrayLike, initial_scale: jax.typing.ArrayLike, maximum: jax.typing.ArrayLike
) -> None:
  """Raises unless minimum <= initial_scale <= maximum, all in the range of float32."""
  scales = {"minimum": minimum, "initial_scale": initial_scale, "maximum": maximum}
  for name, value in scales.items():
    # NumPy prints the largest float32 rounded up. Users may copy this number, so it is allowed.
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
class LossScale:
  """The slot of :func:`dynamic_loss_scale`."""

  initial_scale: jax.typing.ArrayLike
  largest: float  # the argument `maximum`; infinity if it is traced
  next_scale: Callable[..., tuple[_types.FloatScalar, _types.IntScalar, _types.IntScalar]]
  checks_updates: bool
  method = _METHOD

  def init(self) -> DynamicLossScaleState:
    """Returns the state with the initial scale."""
    return DynamicLossScaleState(
      loss_scale=jnp.asarray(self.initial_scale, jnp.float32),
      growth_count=jnp.zeros([], jnp.int32),
      hysteresis_count=jnp.zeros([], jnp.int32),
    )

  def next(
    self, state: DynamicLossScaleState, is_finite: _types.BoolScalar
  ) -> DynamicLossScaleState:
    """Returns the state after a batch."""
    counts = state.growth_count, state.hysteresis_count
    return DynamicLossScaleState(*self.next_scale(state.loss_scale, *counts, is_finite))

  def unscale(self, scale: _types.FloatScalar, grads: optax.Updates) -> optax.Updates:
    """Returns the gradients divided by the scale, in at least float32."""
    return jax.tree.map(lambda g: _arrays.divide(_arrays.widen(g), scale, self.largest), grads)

  def cast(
    self, updates: optax.Updates, grads: optax.Updates, params: optax.Params | None
  ) -> optax.Updates:
    """Casts each update to the promoted dtype of its gradient and param."""

    def cast(update: jax.Array, grad: jax.Array, param: jax.Array) -> jax.Array:
      return update.astype(jnp.promote_types(grad.dtype, param.dtype))

    return jax.tree.map(cast, updates, grads, grads if params is None else params)

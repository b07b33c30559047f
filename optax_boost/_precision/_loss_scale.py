"""Dynamic loss scaling: small gradients vanish in float16, so the loss is scaled while it can be.

The loss is multiplied by a scale s before it is differentiated, and the gradients are divided by
it afterwards. s follows the overflows:

  overflow             no step is made; the h-th since s last grew, and each after it:
                       s <- max(s * backoff, minimum)
  n steps without one  s <- min(s * growth, maximum)

Sources: MindSpore's ``DynamicLossScaleUpdateCell``; the hysteresis h is that of Megatron's
``DynamicGradScaler``.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_boost import _arrays
from optax_boost import _base
from optax_boost import _protocol
from optax_boost._precision import _unscaled


@_protocol.declares(
  metrics=("loss_scale", "loss_scale/notfinite_count"),
  requests=("loss_scale",),
  skips=("notfinite_count",),
)
class DynamicLossScaleState(NamedTuple):
  """State of :func:`dynamic_loss_scale`.

  Attributes:
    loss_scale: scalar float32, the factor of the next loss.
    growth_count: scalar int32, steps since the scale last changed.
    hysteresis_count: scalar int32, overflows since the scale last grew.
    notfinite_count: scalar int32, steps that were skipped.
    inner_state: the inner optimizer's state.
  """

  loss_scale: jax.Array
  growth_count: jax.Array
  hysteresis_count: jax.Array
  notfinite_count: jax.Array
  inner_state: optax.OptState


def next_loss_scale(
  loss_scale: jax.Array,
  growth_count: jax.Array,
  finite: jax.Array,
  growth_interval: jax.typing.ArrayLike = 2000,
  growth_factor: jax.typing.ArrayLike = 2.0,
  backoff_factor: jax.typing.ArrayLike = 0.5,
  minimum: jax.typing.ArrayLike = 1.0,
  maximum: jax.typing.ArrayLike = 2.0**24,
) -> tuple[jax.Array, jax.Array]:
  """The loss scale after a step.

  Args:
    loss_scale: scalar float32, the scale that the step used.
    growth_count: scalar int32, steps since the scale last changed.
    finite: scalar bool, whether the step's gradients were finite.
    growth_interval: steps without an overflow before the scale grows.
    growth_factor: factor of the scale when it grows.
    backoff_factor: factor after an overflow.
    minimum: floor of the scale.
    maximum: cap of the scale.

  Returns:
    The new scale and count. A step that overflows when growth is due only shrinks.

  Raises:
    TypeError: an argument is of the wrong kind.
    ValueError: a number is out of range.

  Examples:
    >>> import jax.numpy as jnp, optax_boost
    >>> scale, count = jnp.float32(8.0), jnp.int32(0)
    >>> scale, count = optax_boost.next_loss_scale(scale, count, jnp.array(False))
    >>> float(scale), int(count)
    (4.0, 0)
  """
  _base.check_number("loss_scale", loss_scale, positive=True)
  _base.check_whole_number("growth_count", growth_count, minimum=0)
  _base.check_array("finite", finite, (), bools=True)
  _base.check_whole_number("growth_interval", growth_interval)
  grown, shrunk = _unscaled.next_scales(loss_scale, growth_factor, backoff_factor, minimum, maximum)
  due = growth_count + 1 >= growth_interval
  scale = jnp.where(finite, jnp.where(due, grown, loss_scale), shrunk)
  return scale, jnp.where(finite & ~due, growth_count + 1, 0).astype(jnp.int32)


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
) -> optax.GradientTransformationExtraArgs:
  r"""Unscales the gradients of a scaled loss, and skips the steps that overflowed.

  The loss must be multiplied by the state's `loss_scale` before it is differentiated:
  :func:`make_train_step` does it; by hand, read ``optax.tree.get(opt_state, "loss_scale")``.

  A step whose unscaled gradients or resulting params are not finite changes the scale and the
  counters only. The scale follows the gradients, not the params. Inside ``optax.partition`` and
  ``optax.masked`` :func:`make_train_step` takes the scale off the gradients of the other leaves.

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

  Returns:
    An :class:`optax.GradientTransformationExtraArgs`. The extra arguments `grad` and `grad_fn` are
    unscaled for `inner`; `value` and `value_fn` are of the loss itself. Updates have the dtype that
    `inner` gives without a scale around it.

  Raises:
    ValueError: a number is out of range, or the scales are not in order.
    TypeError: an argument or a leaf is of the wrong kind.

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
    _base.check_whole_number("growth_interval", growth_interval)
  _base.check_whole_number("hysteresis", hysteresis)
  _unscaled.check_rule(initial_scale, growth_factor, backoff_factor, minimum, maximum)

  def make_state(params: optax.Params, inner_state: optax.OptState) -> DynamicLossScaleState:
    # Inside `optax.partition` these are some of the leaves; the others' gradients keep no scale.
    numbers = [0] * len(jax.tree.leaves(params))
    _protocol.announce_groups(_protocol.LOSS_SCALE, params, numbers, 1)
    return DynamicLossScaleState(
      loss_scale=jnp.asarray(initial_scale, jnp.float32),
      growth_count=jnp.zeros([], jnp.int32),
      hysteresis_count=jnp.zeros([], jnp.int32),
      notfinite_count=jnp.zeros([], jnp.int32),
      inner_state=inner_state,
    )

  def next_state(
    state: DynamicLossScaleState, inner_state: optax.OptState, finite: jax.Array, made: jax.Array
  ) -> DynamicLossScaleState:
    # All leaves are one group.
    finite, made = finite[0], made[0]
    scale, count, overflows = state.loss_scale, state.growth_count, state.hysteresis_count
    if growth_interval is not None:
      overflows = _arrays.increment_if(~finite, overflows)
      rule = (growth_interval, growth_factor, backoff_factor, minimum, maximum)
      moved, count = next_loss_scale(scale, count, finite, *rule)
      scale = jnp.where(~finite & (overflows < hysteresis), scale, moved)
      # Growth has just been due where a finite step sets its count back.
      overflows = jnp.where(finite & (count == 0), 0, overflows)
    return DynamicLossScaleState(
      loss_scale=scale,
      growth_count=count,
      hysteresis_count=overflows,
      notfinite_count=_arrays.increment_if(~made, state.notfinite_count),
      inner_state=inner_state,
    )

  return _unscaled.UnscalingOptimizer(
    "dynamic_loss_scale",
    DynamicLossScaleState,
    inner,
    axis_name,
    maximum,
    make_state=make_state,
    scales_of=lambda state: state.loss_scale[None],
    number=lambda tree: jax.tree.map(lambda _: 0, tree),
    next_state=next_state,
  ).transformation()

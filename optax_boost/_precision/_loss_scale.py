"""Dynamic loss scaling: small gradients vanish in float16, so the loss is scaled while it can be.

The loss is multiplied by a scale s before it is differentiated, and the gradients are divided by
it afterwards. s follows the overflows:

  overflow             s <- max(s * backoff, minimum), no step is made
  n steps without one  s <- min(s * growth, maximum)

Source: Micikevicius et al., "Mixed Precision Training", arXiv:1710.03740; MindSpore's
``DynamicLossScaleUpdateCell``.
"""

from collections.abc import Callable
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_boost import _base
from optax_boost import _protocol
from optax_boost import _tree


@_protocol.declares(metrics=("loss_scale", "loss_scale/notfinite_count"), requests=("loss_scale",))
class DynamicLossScaleState(NamedTuple):
  """State of :func:`dynamic_loss_scale`.

  Attributes:
    loss_scale: scalar float32, what to multiply the next loss by.
    growth_count: scalar int32, steps since the scale last changed.
    notfinite_count: scalar int32, steps that were skipped.
    inner_state: the inner optimizer's state.
  """

  loss_scale: jax.Array
  growth_count: jax.Array
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
    loss_scale: the scale that the step used, float32.
    growth_count: steps since it last changed, int32.
    finite: whether the step's gradients were.
    growth_interval: steps without an overflow before the scale grows.
    growth_factor: what it grows by.
    backoff_factor: what it is multiplied by after an overflow.
    minimum: its floor.
    maximum: its cap.

  Returns:
    The new scale and count. A step that overflows when growth is due only shrinks.

  Examples:
    >>> import jax.numpy as jnp, optax_boost
    >>> scale, count = jnp.float32(8.0), jnp.int32(0)
    >>> scale, count = optax_boost.next_loss_scale(scale, count, jnp.array(False))
    >>> float(scale), int(count)
    (4.0, 0)
  """
  due = growth_count + 1 >= growth_interval
  grown = jnp.minimum(loss_scale * jnp.float32(growth_factor), jnp.float32(maximum))
  shrunk = jnp.maximum(loss_scale * jnp.float32(backoff_factor), jnp.float32(minimum))
  scale = jnp.where(finite, jnp.where(due, grown, loss_scale), shrunk)
  return scale, jnp.where(finite & ~due, growth_count + 1, 0).astype(jnp.int32)


def dynamic_loss_scale(
  inner: optax.GradientTransformation,
  initial_scale: jax.typing.ArrayLike = 2.0**15,
  growth_interval: jax.typing.ArrayLike = 2000,
  *,
  growth_factor: jax.typing.ArrayLike = 2.0,
  backoff_factor: jax.typing.ArrayLike = 0.5,
  minimum: jax.typing.ArrayLike = 1.0,
  maximum: jax.typing.ArrayLike = 2.0**24,
  axis_name: str | tuple[str, ...] | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Unscales the gradients of a scaled loss, and skips the steps that overflowed.

  The loss must be multiplied by the state's `loss_scale` before it is differentiated;
  :func:`make_train_step` finds it there and does it. By hand:
  ``optax.tree.get(opt_state, "loss_scale")``.

  A step whose gradients have a NaN or an infinity changes nothing but the scale and the counters:
  its updates are zero, the inner state stays as it was.

  Args:
    inner: the optimizer that sees the unscaled gradients. For float16 params, put
      :func:`master_weights` around the whole: ``master_weights(dynamic_loss_scale(inner))``
      unscales in float32.
    initial_scale: the scale to start with.
    growth_interval: steps without an overflow before the scale grows; raising it risks fewer
      overflows and adapts more slowly.
    growth_factor: what the scale grows by; above 1.
    backoff_factor: what it is multiplied by after an overflow; below 1.
    minimum: its floor.
    maximum: its cap.
    axis_name: inside ``shard_map``, the mesh axes over which the gradients differ: one device's
      overflow then counts for all. Not needed under ``jit``.

  Returns:
    An :class:`optax.GradientTransformationExtraArgs`. The extra arguments `grad` and `grad_fn` are
    unscaled for `inner`; `value` and `value_fn` are of the loss itself.

  Raises:
    ValueError: a number is out of range, or `minimum` above `maximum`.
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

  References:
    Micikevicius et al., `Mixed Precision Training <https://arxiv.org/abs/1710.03740>`_, 2018.
  """
  _base.check_number("initial_scale", initial_scale, positive=True)
  _base.check_number("growth_interval", growth_interval, minimum=1)
  _base.check_number("growth_factor", growth_factor, minimum=1.0)
  _base.check_number("backoff_factor", backoff_factor, positive=True, below=1.0)
  check_range(minimum, maximum)
  inner = optax.with_extra_args_support(inner)

  def init_fn(params: optax.Params) -> DynamicLossScaleState:
    _tree.check_floating(params, "dynamic_loss_scale")
    return DynamicLossScaleState(
      loss_scale=jnp.asarray(initial_scale, jnp.float32),
      growth_count=jnp.zeros([], jnp.int32),
      notfinite_count=jnp.zeros([], jnp.int32),
      inner_state=inner.init(params),
    )

  def update_fn(
    updates: optax.Updates,
    state: DynamicLossScaleState,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, DynamicLossScaleState]:
    _tree.check_floating(updates, "dynamic_loss_scale")

    def unscale(grads: optax.Updates) -> optax.Updates:
      return jax.tree.map(lambda g: divide(g, state.loss_scale), grads)

    extra = unscaled_arguments(extra_args, unscale)
    finite = _tree.all_finite(updates)
    if axis_name is not None:
      finite = jax.lax.pmin(finite.astype(jnp.int32), axis_name) > 0

    def step(inner_state: optax.OptState) -> tuple[optax.Updates, optax.OptState]:
      return inner.update(unscale(updates), inner_state, params, **extra)

    def skip(inner_state: optax.OptState) -> tuple[optax.Updates, optax.OptState]:
      return jax.tree.map(jnp.zeros_like, updates), inner_state

    out, inner_state = jax.lax.cond(finite, step, skip, state.inner_state)
    scale, count = next_loss_scale(
      state.loss_scale,
      state.growth_count,
      finite,
      growth_interval,
      growth_factor,
      backoff_factor,
      minimum,
      maximum,
    )
    return out, DynamicLossScaleState(
      loss_scale=scale,
      growth_count=count,
      notfinite_count=state.notfinite_count + jnp.logical_not(finite),
      inner_state=inner_state,
    )

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def check_range(minimum: Any, maximum: Any) -> None:
  """Checks the floor and the cap of a scale.

  Args:
    minimum: the floor.
    maximum: the cap.

  Raises:
    ValueError: one is not positive, or the floor is above the cap.
    TypeError: one is no number.
  """
  _base.check_number("minimum", minimum, positive=True)
  _base.check_number("maximum", maximum, positive=True)
  traced = any(isinstance(bound, jax.Array) for bound in (minimum, maximum))
  if not traced and float(minimum) > float(maximum):
    raise ValueError(f"`minimum` must not be above `maximum`; got {minimum!r} and {maximum!r}.")


def divide(g: jax.Array, scale: jax.Array) -> jax.Array:
  """A gradient without its scale, divided in at least float32.

  Args:
    g: a gradient, any floating dtype.
    scale: scalar float32.

  Returns:
    The quotient in the dtype of `g`.
  """
  return (g.astype(_tree.accumulator_dtype(g.dtype)) / scale).astype(g.dtype)


def unscaled_arguments(
  extra_args: dict[str, Any], unscale: Callable[[optax.Updates], optax.Updates]
) -> dict[str, Any]:
  """The extra arguments of ``update``, with those that are gradients unscaled.

  Args:
    extra_args: what came.
    unscale: from scaled to unscaled gradients.

  Returns:
    What the inner optimizer gets.
  """
  extra = dict(extra_args)
  if "grad" in extra:
    extra["grad"] = unscale(extra["grad"])
  if "grad_fn" in extra:
    scaled = extra["grad_fn"]
    extra["grad_fn"] = lambda *args, **kwargs: unscale(scaled(*args, **kwargs))
  return extra

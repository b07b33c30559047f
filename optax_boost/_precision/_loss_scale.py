"""Dynamic loss scaling: small gradients vanish in float16, so the loss is scaled while it can be.

The loss is multiplied by a scale s before it is differentiated, and the gradients are divided by
it afterwards, in float32: they would vanish after all if they were cast back. So the inner
optimizer works in at least float32, its state included. s follows the overflows:

  overflow             no step is made; the h-th since s last grew, and each after it:
                       s <- max(s * backoff, minimum)
  n steps without one  s <- min(s * growth, maximum)

Sources: MindSpore's ``DynamicLossScaleUpdateCell``; the hysteresis h is from Megatron's
``DynamicGradScaler``.
"""

from collections.abc import Callable
import dataclasses
import functools
import math
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_boost import _arrays
from optax_boost import _base
from optax_boost import _conditional
from optax_boost import _in_place
from optax_boost import _masking
from optax_boost import _protocol
from optax_boost import _tree

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
  skips=("notfinite_count",),
)
class DynamicLossScaleState(NamedTuple):
  """State of :func:`dynamic_loss_scale`.

  Attributes:
    loss_scale: scalar float32, the factor of the next loss.
    growth_count: scalar int32, the steps without an overflow since the last one, or since the scale
      last grew.
    hysteresis_count: scalar int32, overflows since the scale last grew.
    notfinite_count: scalar int32, steps that were skipped.
    hidden: the paths that ``optax.masked`` hides from it, without arrays; their gradients keep no
      scale.
    inner_state: the inner optimizer's state.
  """

  loss_scale: jax.Array
  growth_count: jax.Array
  hysteresis_count: jax.Array
  notfinite_count: jax.Array
  hidden: dict[str, optax.MaskedNode]
  inner_state: optax.OptState


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
  check_params: bool = False,
) -> optax.GradientTransformationExtraArgs:
  r"""Unscales the gradients of a scaled loss, and skips the steps that overflowed.

  The loss must be multiplied by the state's `loss_scale` before it is differentiated:
  :func:`make_train_step` does it; by hand, read ``optax.tree.get(opt_state, "loss_scale")``.

  A step whose unscaled gradients are not finite changes the scale and the counters only; a step
  that overflows params in float16, the counters. Inside ``optax.partition`` and ``optax.masked``
  :func:`make_train_step` takes the scale off the gradients of the other leaves.

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
    check_params: for an `inner` that makes NaN of ordinary gradients, as ``optax.adam(eps=0)``
      does. By default such an entry of the params keeps its value. If set, the step is computed
      once more, ahead, and one that loses an entry is skipped as a whole and counted.

  Returns:
    An :class:`optax.GradientTransformationExtraArgs`. The extra arguments `grad` and `grad_fn` are
    unscaled for `inner`; `value` and `value_fn` are of the loss itself. Updates have the dtype that
    `inner` gives without a scale around it.

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
  _base.check_number("growth_factor", growth_factor, minimum=1.0)
  _base.check_number("backoff_factor", backoff_factor, positive=True, below=1.0)
  _base.check_axis_name("axis_name", axis_name)
  _base.check_bool("check_params", check_params)
  _check_scales(minimum, initial_scale, maximum)
  inner = _base.check_transformation("inner", inner)
  next_scale = functools.partial(
    _next_scale,
    growth_interval=growth_interval,
    hysteresis=hysteresis,
    growth_factor=growth_factor,
    backoff_factor=backoff_factor,
    minimum=minimum,
    maximum=maximum,
  )
  known = _base.known_number(maximum)
  largest = math.inf if known is None else float(known)
  method = _LossScale(inner, initial_scale, largest, next_scale, axis_name, check_params)
  return _in_place.transformation(method.init, method.step)


def _check_scales(minimum: Any, initial_scale: Any, maximum: Any) -> None:
  """Checks the first scale, its floor and its cap: float32 numbers in this order."""
  scales = {"minimum": minimum, "initial_scale": initial_scale, "maximum": maximum}
  for name, value in scales.items():
    # NumPy prints the largest number rounded up.
    _base.check_number(
      name, value, minimum=float(jnp.finfo(jnp.float32).tiny), maximum=3.4028235e38
    )
  low, first, high = map(_base.known_number, scales.values())
  if None not in (low, first, high) and not low <= first <= high:
    raise ValueError(
      "`minimum`, `initial_scale` and `maximum` must be in this order, from the smallest to the"
      f" largest; got {', '.join(map(_base.shorten, scales.values()))}."
    )


class _LossScale(NamedTuple):
  """The checked arguments of :func:`dynamic_loss_scale`."""

  inner: optax.GradientTransformationExtraArgs
  initial_scale: Any
  largest: float  # if the cap of the scale is known
  next_scale: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]
  axis_name: str | tuple[str, ...] | None
  check_params: bool

  def init(self, params: optax.Params) -> DynamicLossScaleState:
    _tree.check_floating(params, _METHOD)
    return DynamicLossScaleState(
      loss_scale=jnp.asarray(self.initial_scale, jnp.float32),
      growth_count=jnp.zeros([], jnp.int32),
      hysteresis_count=jnp.zeros([], jnp.int32),
      notfinite_count=jnp.zeros([], jnp.int32),
      hidden=_protocol.hidden_leaves(params),
      inner_state=self.inner.init(_arrays.copy_arrays(params, _arrays.accumulator_dtype)),
    )

  def step(
    self,
    gradients: _in_place.Gradients,
    state: DynamicLossScaleState,
    params: optax.Params | None,
    landing: _in_place.Landing,
  ) -> tuple[Any, DynamicLossScaleState]:
    updates, extra_args = gradients()
    _tree.check_update(_METHOD, updates, state, DynamicLossScaleState, params)
    shapes = self._updates_like(updates, params, extra_args)
    nested = _in_place.is_in_place(self.inner)
    if nested and landing.in_params and shapes is not None:
      # Half-precision params move by updates that were rounded to their dtype.
      updates, state = self.step(gradients, state, params, _in_place.UPDATES)
      return _in_place.add_updates(params, updates, state), state
    inner = self.inner if shapes is None else self._cast(shapes)

    def unscaled() -> tuple[optax.Updates, dict[str, Any]]:
      return _masking.map_gradients(
        functools.partial(self._unscale, state.loss_scale), *gradients()
      )

    def step(params: Any, inner_state: Any) -> tuple[Any, optax.OptState]:
      guarded = dataclasses.replace(landing, guard=True)
      return guarded.step(inner, unscaled, inner_state, params)

    finite, landed = self._checks(inner, gradients, unscaled, state, params)
    made = finite & landed
    _, result, inner_state = landing.step_if(
      # A loss scale inside must see every overflow, or it would never come down.
      landed if _conditional.scales_loss(state.inner_state) else made,
      step,
      params,
      state.inner_state,
    )
    scale, count, overflows = self.next_scale(
      state.loss_scale, state.growth_count, state.hysteresis_count, finite
    )
    return result, state._replace(
      loss_scale=scale,
      growth_count=count,
      hysteresis_count=overflows,
      notfinite_count=_arrays.increment_if(~made, state.notfinite_count),
      inner_state=inner_state,
    )

  def _checks(
    self,
    inner: optax.GradientTransformationExtraArgs,
    gradients: _in_place.Gradients,
    unscaled: _in_place.Gradients,
    state: DynamicLossScaleState,
    params: optax.Params | None,
  ) -> tuple[jax.Array, jax.Array]:
    """Whether the unscaled gradients are finite, and whether the params stay so."""
    updates, extra_args = gradients()
    # A wrapper of ours checks its own steps.
    trusted = _in_place.is_in_place(inner) and not self.check_params

    def agree(flag: jax.Array) -> jax.Array:
      return _conditional.agree(flag, self.axis_name, _METHOD)

    def check() -> tuple[jax.Array, jax.Array]:
      finite = agree(jnp.isfinite(_in_place.largest(updates) / state.loss_scale))
      if trusted:
        return finite, jnp.ones_like(finite)
      grads, extra = unscaled()
      moves, _ = inner.update(grads, state.inner_state, params, **extra)
      zeros = jax.tree.map(jnp.zeros_like, moves)
      new, old = (moves, zeros) if params is None else (optax.apply_updates(params, moves), params)
      return finite, agree(_in_place.none_lost(new, old))

    wide = _in_place.has_wide_range(updates if params is None else params)
    if self.check_params or not (trusted or wide):
      return check()
    true = jnp.asarray(True)
    squares = _in_place.sum_squares(updates)
    usual = agree(_in_place.ordinary(squares, 1 / state.loss_scale, extra_args))
    finite, landed = _in_place.checked_unless(usual, check, true, true)
    return finite, landed

  def _unscale(self, scale: jax.Array, grads: optax.Updates) -> optax.Updates:
    """Gradients without the scale, in at least float32."""
    return jax.tree.map(lambda g: _in_place.divide(_arrays.widen(g), scale, self.largest), grads)

  def _cast(self, shapes: Any) -> optax.GradientTransformationExtraArgs:
    """The inner optimizer, with its updates in the dtypes of `shapes`, its states in their own."""

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
      out, moved = self.inner.update(updates, state, params, **extra_args)
      return _conditional.cast_like(out, shapes), _conditional.cast_like(moved, state)

    return optax.GradientTransformationExtraArgs(self.inner.init, update)

  def _updates_like(
    self, updates: optax.Updates, params: optax.Params | None, extra_args: dict[str, Any]
  ) -> Any:
    """Shapes with the dtypes that the inner optimizer gives its updates without a scale around it.

    Updates belong to the params: with float32 params they are float32. None: nothing has half
    precision.
    """
    leaves = jax.tree.leaves((updates, params))
    if all(leaf.dtype == _arrays.accumulator_dtype(leaf.dtype) for leaf in leaves):
      return None

    def update(updates: optax.Updates, like: optax.Params) -> optax.Updates:
      def promote(g: jax.Array, p: jax.Array) -> jax.Array:
        return g.astype(jnp.promote_types(g.dtype, p.dtype))

      gradients = jax.tree.map(promote, updates, like)
      return self.inner.update(gradients, self.inner.init(like), params, **extra_args)[0]

    return jax.eval_shape(update, updates, updates if params is None else params)

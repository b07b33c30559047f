"""Gradient accumulation: the inner optimizer makes one step for the mean of k gradients."""

from collections.abc import Callable
import dataclasses
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from optax_boost._form import _protocol
from optax_boost._foundation import _arrays, _checks, _extra_args, _types
from optax_boost._step import _device_sums, _state, _wrapper

_METHOD = "accumulate"
# The extra arguments that are functions of the params, for one batch.
_CLOSURES = ("value_fn", "obj_fn", "grad_fn", "full_grad_fn")
_Every: TypeAlias = int | jax.Array | Callable[[jax.Array], jax.typing.ArrayLike]


@_protocol.declares(takes=("weight",))
class AccumulateState(NamedTuple):
  """State of :func:`accumulate`.

  Attributes:
    count: scalar int32, the number of micro-batches so far in the current window; 0 when a window
      has ended. A window is the micro-batches whose mean gradient the inner optimizer gets.
    inner_count: scalar int32, the number of calls of the inner optimizer, including skipped steps.
    weight_sum: scalar float32 (float64 under x64), the sum of the weights in the current window,
      with `batch_sharding` of all devices.
    value_sum: scalar float32 (float64 under x64), the weighted sum of the window's losses.
    accumulator: tree of the params' structure, the weighted sum of the window's gradients. With
      `batch_sharding`, a leaf has a leading axis with the sum of each device.
  """

  count: _types.IntScalar  # type: ignore[assignment]  # tuples have a method of this name
  inner_count: _types.IntScalar
  weight_sum: _types.FloatScalar
  value_sum: _types.FloatScalar
  accumulator: optax.Updates


def accumulate(
  inner: optax.GradientTransformation,
  every: _Every,
  *,
  not_finite: Literal["drop", "keep", "restart"] | None = "drop",
  axis_name: _types.AxisName | None = None,
  batch_sharding: jax.sharding.NamedSharding | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Averages the gradients of `every` micro-steps before one step of `inner`.

  .. math::
    G = \frac{\sum_i n_i g_i}{\sum_i n_i}

  for the gradients :math:`g_i` and weights :math:`n_i` of the micro-batches in a window of `every`
  micro-steps. Use it for batches larger than memory. The inner optimizer is called once per window,
  so its state, weight decay and schedules advance once per window. The other micro-batches return
  updates of exactly zero. The sum is kept in at least float32.

  Args:
    inner: the optimizer that sees the mean gradient.
    every: the number of micro-steps per inner step, at least 1. Raising it gives larger batches in
      the same memory, and fewer steps. Or a function: it takes the number of inner steps so far,
      and returns the number of micro-steps for the next inner step, an integer; a number below 1
      that is computed on the device counts as 1.
    not_finite: what to do with a micro-batch whose gradient is not finite or makes the sum
      overflow. ``"drop"`` leaves it out, as if it had never come: it does not count in its window.
      ``"restart"`` begins the window again. ``"keep"`` adds the micro-batch, so the mean is not
      finite, and `inner`, such as ``optax.apply_if_finite``, can skip the step. None: as
      ``"keep"``. With a loss scale, masters or rounding that check gradients, a micro-batch that is
      not finite is left out in any case. Unless a micro-batch must be judged before it is added, as
      for ``"drop"``, :func:`make_train_step` adds gradients inside of the backward pass, layer by
      layer, so that the gradients of a scan over layers never exist at once
      (:meth:`TrainStep.explain`).
    axis_name: as for :func:`dynamic_loss_scale`; all devices drop the same micro-batches. The
      weights may differ between devices: if `inner` averages its gradients over the devices
      (``jax.lax.pmean``), the result is the mean over all examples.
    batch_sharding: how the batches lie on a mesh, as ``jax.NamedSharding(mesh, jax.P("data"))``. In
      data-parallel training on whole params, gradients are then reduced once per window, and not in
      each micro-batch. The train step computes the loss on each device for the device's own rows,
      in ``jax.shard_map``, and each device keeps its own sum. The loss must be a mean over rows, or
      over what `weight` counts. See the guide on data-parallel training for what this changes in
      BatchNorm, dropout, aux and gradient norms. None: gradients are those of the whole batch.

  Returns:
    An :class:`optax.GradientTransformationExtraArgs`. Its ``update`` takes an optional `weight`,
    the number of examples or tokens in the micro-batch; the default is 1. The argument `weight` of
    :func:`make_train_step` sets it. `inner` gets the mean gradient, also as the extra argument
    `grad`, the mean of the losses as `value`, and the other extra arguments of the window's last
    micro-batch. The mean gradient has the wider dtype of its gradient and its param; masters and
    :func:`stochastic_rounding` get it in float32.

  Raises:
    ValueError: in ``init``: `inner` holds :func:`svrg`, which would compare the mean gradient with
      a gradient of the last micro-batch alone; in ``update``: `inner` calls `value_fn` or
      `grad_fn`, as line searches do, unless `every` is 1; or, with `batch_sharding`, gradients do
      not come from a train step, or params are sharded over the devices that divide the batch.

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
  if not callable(every):
    _checks.check_whole_number("every", every)
  _checks.check_name("not_finite", not_finite, ("drop", "keep", "restart"), optional=True)
  device_sums = _device_sums.check(batch_sharding)
  slot = Accumulate(every, not_finite, device_sums)
  return _wrapper.fill(inner, axis_name, accumulation=slot)


@dataclasses.dataclass(frozen=True, eq=False)
class Accumulate:
  """The slot of :func:`accumulate`."""

  every: _Every
  not_finite: str | None
  device_sums: _device_sums.DeviceSums | None = None
  method = _METHOD

  def init(self, params: optax.Params, inner_state: optax.OptState) -> AccumulateState:
    """Returns an empty window; raises ValueError for an optimizer that calls `grad_fn`."""
    calls_grad_fn = _protocol.is_requested(inner_state, _protocol.FULL_GRADIENT)
    if calls_grad_fn and not self.is_off:
      raise ValueError(
        "`accumulate` can't hold a method that takes gradients at other params, as `svrg` does:"
        " these would be of the window's last micro-batch alone. Use larger batches, or"
        " `optax.microbatching` in the loss."
      )
    return AccumulateState(
      count=jnp.zeros([], jnp.int32),
      inner_count=jnp.zeros([], jnp.int32),
      weight_sum=jnp.zeros([], float),
      value_sum=jnp.zeros([], float),
      accumulator=(
        self.device_sums.init(params) if self.device_sums else _arrays.zeros_like_wide(params)
      ),
    )

  @property
  def restarts(self) -> bool:
    """Returns whether a micro-batch that is left out empties its window."""
    return self.not_finite == "restart"

  @property
  def is_off(self) -> bool:
    """Returns whether each window certainly is one micro-batch."""
    return _checks.concrete_number(self.every) == 1

  def take_weight(self, extra_args: _types.ExtraArgs) -> _types.FloatScalar:
    """Takes the weight of the micro-batch out of the extra arguments."""
    weight = extra_args.pop("weight", 1.0)
    largest = float(jnp.finfo(jnp.float32).max)
    _checks.check_number("weight", weight, minimum=0.0, maximum=largest)
    return jnp.asarray(weight, float)

  def weight_is_valid(
    self, state: AccumulateState, weight: _types.FloatScalar
  ) -> _types.BoolScalar:
    """Returns whether a weight is at least zero, and the window's sum with it is finite."""
    return jnp.isfinite(state.weight_sum + weight) & (weight >= 0)

  def addend(
    self, weight: _types.FloatScalar, accumulator: optax.Updates, grads: optax.Updates
  ) -> optax.Updates:
    """Returns what a micro-batch adds to the window's sum: its gradient times its weight."""

    def weighted(total: jax.Array, g: jax.Array) -> jax.Array:
      return (weight * g.astype(total.dtype)).astype(total.dtype)

    return jax.tree.map(weighted, accumulator, grads)

  def add(
    self,
    state: AccumulateState,
    weight: _types.FloatScalar,
    addend: optax.Updates,
    value: jax.Array | None,
    is_good: _types.BoolScalar,
    axis_name: _types.AxisName | None,
    added: optax.Updates | None = None,
  ) -> _state.Window:
    """Adds a micro-batch to its window, if it is good; a bad one is as if it had never come.

    If windows restart, a bad one ends its window, so that :meth:`close` empties the accumulator.
    `added` is the sum with the micro-batch, if the backward pass has added it.
    """

    def add_if(total: jax.Array, x: jax.Array) -> jax.Array:
      return jnp.where(is_good, total + x, jnp.zeros_like(total) if self.restarts else total)

    weight_sum = add_if(state.weight_sum, weight)
    value_sum = None if value is None else add_if(state.value_sum, weight * value)
    reached = add_if(state.count, jnp.ones([], jnp.int32))
    if added is None:
      added = jax.tree.map(add_if, state.accumulator, addend)
    is_full = is_good & (reached >= _window_length(self.every, state.inner_count))
    divisor = weight_sum if axis_name is None else jax.lax.pmean(weight_sum, axis_name)
    is_due = is_full & (divisor > 0)
    new_state = AccumulateState(
      count=jnp.where(is_full, 0, reached),
      inner_count=_arrays.increment_if(is_due, state.inner_count),
      weight_sum=jnp.where(is_full, 0.0, weight_sum),
      value_sum=state.value_sum if value_sum is None else jnp.where(is_full, 0.0, value_sum),
      accumulator=added,
    )
    ends = is_full | ~jnp.asarray(is_good) if self.restarts else is_full
    return _state.Window(is_due, ends, weight_sum, divisor, value_sum, new_state)

  def reduce(
    self, window: _state.Window, compute_if: Callable[..., tuple[Any, ...]]
  ) -> _state.Window:
    """Adds up the sums of the devices, if each has its own, for a step that is due."""
    if not self.device_sums:
      return window
    reduce = lambda sums: (self.device_sums.reduce(sums),)  # noqa: E731
    _, accumulator = compute_if(window.is_due, reduce, window.state.accumulator)
    return window._replace(state=window.state._replace(accumulator=accumulator))

  def mean(
    self,
    window: _state.Window,
    grads: optax.Updates,
    extra_args: _types.ExtraArgs,
    params: optax.Params | None,
  ) -> tuple[optax.Updates, _types.ExtraArgs]:
    """Returns the mean gradient of a window, and the extra arguments of the optimizer.

    The mean has the wider dtype of its gradient and its param.
    """

    def mean(total: jax.Array, g: jax.Array, p: jax.Array) -> jax.Array:
      quotient = _arrays.divide(total, window.divisor)
      return quotient.astype(jnp.promote_types(g.dtype, p.dtype))

    like = grads if params is None else params
    totals = window.state.accumulator
    if self.device_sums:
      totals = self.device_sums.total(totals)
    means = jax.tree.map(mean, totals, grads, like)
    if self.is_off:
      return means, extra_args | ({"grad": means} if "grad" in extra_args else {})
    # optax's line searches refuse a `value_fn` whose signature lacks an extra argument.
    refused = _extra_args.accept_extra_args(_refused)
    replaced = {"grad": means} | dict.fromkeys(_CLOSURES, refused)
    if window.value_sum is not None:
      replaced["value"] = window.value_sum / window.divisor
    present = {name for name, value in extra_args.items() if value is not None}
    return means, extra_args | {k: v for k, v in replaced.items() if k in present}

  def close(
    self,
    window: _state.Window,
    made: _types.BoolScalar,
    compute_if: Callable[..., tuple[Any, ...]],
  ) -> AccumulateState:
    """Returns the state after a call; a window that is full, or whose step was made, is emptied."""
    ends = window.is_full | made

    def emptied(total: optax.Updates) -> tuple[optax.Updates]:
      # XLA 14: if the result did not depend on `t`, all leaves would copy one array of zeros.
      return (jax.tree.map(lambda t: jnp.where(ends, jnp.zeros_like(t), t), total),)

    _, accumulator = compute_if(ends, emptied, window.state.accumulator)
    return window.state._replace(accumulator=accumulator)


def _refused(params: optax.Params, *args: Any) -> None:
  """Stands for the loss as a function of params, which a window does not have."""
  raise ValueError(
    "`accumulate` can't hold an optimizer that calls `value_fn` or `grad_fn`, as line searches do:"
    " these are functions of the window's last micro-batch alone. Use larger batches, or"
    " `optax.microbatching` in the loss."
  )


def _window_length(every: _Every, inner_count: _types.IntScalar) -> _types.IntScalar:
  """Returns the number of micro-steps in the window that follows `inner_count` inner steps."""
  return _checks.count_at("every(inner_count)", every, inner_count)

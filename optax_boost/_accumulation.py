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
  metrics=("accumulate/notfinite_count", "accumulate/skipped_count"), steps=("inner_count",)
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
    skipped_count: scalar int32, micro-batches that `accept_fn` left out.
    inner_state: the inner optimizer's state.
  """

  count: jax.Array  # type: ignore[assignment]  # tuples have a method of this name
  inner_count: jax.Array
  weight_sum: jax.Array
  accumulator: optax.Updates
  notfinite_count: jax.Array
  skipped_count: jax.Array
  inner_state: optax.OptState


def accumulate(
  inner: optax.GradientTransformation,
  every: int | jax.Array | Callable[[jax.Array], jax.typing.ArrayLike],
  *,
  not_finite: Literal["drop", "keep"] | None = "drop",
  accept_fn: Callable[..., jax.typing.ArrayLike] | None = None,
  accumulator_dtype: jax.typing.DTypeLike | None = None,
  axis_name: str | tuple[str, ...] | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Averages the gradients of `every` micro-steps before one step of `inner`.

  .. math::
    G = \frac{\sum_i n_i g_i}{\sum_i n_i}

  for the gradients :math:`g_i` of the window's micro-batches and their weights :math:`n_i`. For
  batches larger than memory. The inner optimizer really runs once per window, under ``lax.cond``:
  its state, weight decay and schedules count inner steps. In between updates are exactly zero.

  Args:
    inner: the optimizer that sees the mean gradient.
    every: micro-steps per inner step, at least 1; or a function of the number of inner steps made.
      Raising it makes larger batches of the same memory, and fewer steps.
    not_finite: the treatment of micro-batches whose gradient is not finite or overflows the sum.
      ``"drop"``: they are left out of the mean, and a window of nothing else makes no inner step.
      ``"keep"``: they spoil the mean of their own window, for `inner` to see, such as
      ``optax.apply_if_finite``. Around a loss scale they are always kept. None: kept, but neither
      looked for nor counted, which saves a pass over the gradients.
    accept_fn: ``accept_fn(updates, **extra_args)``, a scalar bool: whether a micro-batch counts in
      the mean. It does not readmit gradients that are not finite. None: all count.
    accumulator_dtype: dtype of the sum; None: at least float32.
    axis_name: inside ``shard_map``, the mesh axes over which the gradients differ, so that all
      devices leave out the same micro-batches. Not needed under ``jit``.

  Returns:
    An :class:`optax.GradientTransformationExtraArgs`. Its ``update`` takes an optional `weight`,
    the number of examples or tokens in the micro-batch, 1 unless given; ``make_train_step`` gives
    none. Of other extra arguments, `inner` sees those of the window's last micro-step, and as
    `grad` the mean gradient; an :func:`accumulate` in it gets the window's weight.

  Raises:
    ValueError: a number is out of range, or `not_finite` unknown.
    TypeError: an argument or a leaf is of the wrong kind.

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
  if not_finite is not None:
    _base.check_name("not_finite", not_finite, ("drop", "keep"))
  _base.check_callable("accept_fn", accept_fn, "accept_fn(updates, **extra_args)", optional=True)
  _base.check_floating_dtype("accumulator_dtype", accumulator_dtype, optional=True)
  _base.check_axis_name("axis_name", axis_name)

  method = _Accumulation(inner, every, not_finite, accept_fn, accumulator_dtype, axis_name)
  return _in_place.InPlaceTransformation(method.init, method.update, method.apply)


class _MicroStep(NamedTuple):
  """What becomes of a micro-batch."""

  used: jax.Array
  weight_sum: jax.Array
  full: jax.Array
  stepping: jax.Array
  state: AccumulateState  # after it, but for the accumulator and the inner state


class _Accumulation(NamedTuple):
  """The checked arguments of :func:`accumulate`."""

  inner: optax.GradientTransformationExtraArgs
  every: Any
  not_finite: str | None
  accept_fn: Any
  accumulator_dtype: Any
  axis_name: str | tuple[str, ...] | None

  def _sum_dtype(self, x: Any) -> Any:
    if self.accumulator_dtype is None:
      return _arrays.accumulator_dtype(x.dtype)
    is_complex = jnp.issubdtype(x.dtype, jnp.complexfloating)
    return (
      jnp.promote_types(x.dtype, self.accumulator_dtype) if is_complex else self.accumulator_dtype
    )

  def init(self, params: optax.Params) -> AccumulateState:
    _tree.check_inexact(params, _METHOD)
    return AccumulateState(
      count=jnp.zeros([], jnp.int32),
      inner_count=jnp.zeros([], jnp.int32),
      weight_sum=jnp.zeros([], jnp.float32),
      accumulator=jax.tree.map(lambda p: jnp.zeros_like(p, self._sum_dtype(p)), params),
      notfinite_count=jnp.zeros([], jnp.int32),
      skipped_count=jnp.zeros([], jnp.int32),
      inner_state=self.inner.init(params),
    )

  def _keeps(self, state: AccumulateState) -> bool:
    # A loss scale that sees no overflow never comes down, and every micro-batch overflows.
    return self.not_finite != "drop" or _conditional.scales_loss(state.inner_state)

  def _decide(
    self,
    updates: optax.Updates,
    state: AccumulateState,
    weight: jax.Array,
    extra_args: dict[str, Any],
    finite: jax.Array,
  ) -> _MicroStep:
    """Decides whether a micro-batch counts, and whether its window ends in a step."""
    weight_sum = state.weight_sum + weight
    weighted = jnp.isfinite(weight_sum) & (weight >= 0)
    accepted = _accepted(self.accept_fn, updates, extra_args)
    if self.axis_name is not None:
      flags = jnp.stack([weighted, finite, accepted])
      weighted, finite, accepted = _conditional.agree(flags, self.axis_name, _METHOD)
    used = weighted & jnp.where(finite, accepted, self._keeps(state))
    weight_sum = jnp.where(used, weight_sum, state.weight_sum)
    full = state.count + 1 >= _window(self.every, state.inner_count)
    stepping = full & (weight_sum > 0)
    after = state._replace(
      count=jnp.where(full, 0, state.count + 1),
      inner_count=_arrays.increment_if(stepping, state.inner_count),
      weight_sum=jnp.where(full, 0.0, weight_sum),
      notfinite_count=_arrays.increment_if(~(finite & weighted), state.notfinite_count),
      skipped_count=_arrays.increment_if(finite & weighted & ~accepted, state.skipped_count),
    )
    return _MicroStep(used, weight_sum, full, stepping, after)

  def _mean(
    self,
    total: optax.Updates,
    divide: Callable[..., jax.Array],
    micro: _MicroStep,
    like: optax.Updates,
    extra_args: dict[str, Any],
  ) -> tuple[optax.Updates, dict[str, Any]]:
    """The mean gradient of a window, also as the extra argument `grad`, and its weight."""
    weight = micro.weight_sum
    mean = jax.tree.map(lambda t: divide(t, weight), total)
    mean = _conditional.cast_like(mean, like)
    of_window = {"grad": mean} if "grad" in extra_args else {}
    # Not for all: optax's line searches refuse what their closures do not take.
    if _tree.find_states(micro.state.inner_state, AccumulateState):
      of_window["weight"] = weight
    return mean, extra_args | of_window

  def update(
    self,
    updates: optax.Updates,
    state: AccumulateState,
    params: optax.Params | None = None,
    *,
    weight: jax.typing.ArrayLike = 1.0,
    **extra_args: Any,
  ) -> tuple[optax.Updates, AccumulateState]:
    weight = _checked(updates, state, weight)
    added = jax.tree.map(functools.partial(_plus, weight), state.accumulator, updates)
    finite = jnp.asarray(True)
    if self.not_finite is not None:
      finite = _arrays.all_finite(updates if self._keeps(state) else added)
    micro = self._decide(updates, state, weight, extra_args, finite)
    total = _conditional.select(micro.used, added, state.accumulator)

    def step(inner_state: optax.OptState) -> tuple[optax.Updates, optax.OptState]:
      mean, extra = self._mean(total, _divide, micro, updates, extra_args)
      return self.inner.update(mean, inner_state, params, **extra)

    out, inner_state = _conditional.update_if(micro.stepping, step, state.inner_state)
    return out, micro.state._replace(
      accumulator=jax.tree.map(lambda t: jnp.where(micro.full, jnp.zeros_like(t), t), total),
      inner_state=inner_state,
    )

  def apply(
    self, gradients: _in_place.Gradients, state: AccumulateState, params: optax.Params, guard: bool
  ) -> tuple[optax.Params, AccumulateState]:
    updates, extra_args = gradients()
    weight = _checked(updates, state, extra_args.get("weight", 1.0))
    extra_args.pop("weight", None)
    plus = functools.partial(_plus, weight)

    def check() -> tuple[jax.Array]:
      if self._keeps(state):
        return (jnp.isfinite(_in_place.largest(updates)),)
      return (_in_place.all_finite(jax.tree.map(plus, state.accumulator, updates)),)

    finite = jnp.asarray(True)
    if self.not_finite is not None and (
      self._keeps(state) or _in_place.has_wide_range(state.accumulator)
    ):
      squares = _in_place.sum_squares(updates)
      usual = _in_place.ordinary(squares, weight, {})
      (finite,) = _in_place.checked_unless(usual, check, finite)
    elif self.not_finite is not None:
      (finite,) = check()
    micro = self._decide(updates, state, weight, extra_args, finite)
    emptied = micro.full & ~micro.stepping

    def grow(total: jax.Array, g: jax.Array) -> jax.Array:
      total = jnp.where(micro.used, plus(total, g), total)
      return jnp.where(emptied, jnp.zeros_like(total), total)

    def step(params: optax.Params, inner_state: optax.OptState) -> Any:
      def mean() -> tuple[optax.Updates, dict[str, Any]]:
        return self._mean(total, _in_place.divide, micro, updates, extra_args)

      return _in_place.apply(self.inner, mean, inner_state, params, guard)

    total = jax.tree.map(grow, state.accumulator, updates)
    made, params, inner_state = _in_place.once_if(micro.stepping, step, params, state.inner_state)
    # Without a value to read, all leaves of a shape would share one array of zeros.
    _, accumulator = _in_place.once_if(
      made,
      lambda total: (jax.tree.map(lambda t: jnp.where(made, jnp.zeros_like(t), t), total),),
      total,
    )
    return params, micro.state._replace(accumulator=accumulator, inner_state=inner_state)


def _checked(updates: optax.Updates, state: Any, weight: Any) -> jax.Array:
  """Checks the arguments of a micro-step; returns its weight in float32, a known one checked."""
  _base.require_state(state, AccumulateState, _METHOD)
  _tree.check_inexact(updates, _METHOD)
  _tree.check_same_tree(updates, state.accumulator, _METHOD)
  if jnp.ndim(weight) != 0:
    raise ValueError(
      "`weight` must be a scalar, the number of examples or tokens in the micro-batch; got an"
      f" array of shape {jnp.shape(weight)}."
    )
  largest = float(jnp.finfo(jnp.float32).max)
  _base.check_number("weight", weight, minimum=0.0, maximum=largest)
  return jnp.asarray(weight, jnp.float32)


def _plus(weight: jax.Array, total: jax.Array, g: jax.Array) -> jax.Array:
  return total + (weight * g.astype(total.dtype)).astype(total.dtype)


def _divide(total: jax.Array, weight: jax.Array) -> jax.Array:
  return total / weight.astype(total.dtype)


def _accepted(accept_fn: Any, updates: optax.Updates, extra_args: dict[str, Any]) -> jax.Array:
  if accept_fn is None:
    return jnp.asarray(True)
  accepted = accept_fn(updates, **extra_args)
  if jnp.shape(accepted) != () or jnp.result_type(accepted) != jnp.bool_:
    raise TypeError(
      "`accept_fn` must return a scalar bool, whether the micro-batch counts; got"
      f" {_base.shorten(accepted)}."
    )
  return jnp.asarray(accepted)


def _window(every: Any, inner_count: jax.Array) -> jax.Array:
  """The number of micro-steps in the current window."""
  length = every(inner_count) if callable(every) else every
  if jnp.shape(length) != ():
    raise ValueError(
      "`every` must return a scalar, the number of micro-steps in a window; got an array of shape"
      f" {jnp.shape(length)}."
    )
  return jnp.asarray(length)

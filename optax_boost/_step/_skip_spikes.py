"""Skips steps whose gradient norm or loss is far above those of the steps before."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost._form import _finiteness, _protocol
from optax_boost._foundation import _arrays, _checks, _extra_args, _types
from optax_boost._step import _wrapper

_METHOD = "skip_spikes"


class LossMeanState(NamedTuple):
  """The losses so far, in the state of :func:`skip_spikes`.

  Attributes:
    mean: scalar float32, the weighted mean of the losses.
    deviation: scalar float32, the weighted mean of their distances from the mean before them.
    count: scalar int32, the number of losses in the mean.
  """

  mean: _types.FloatScalar
  deviation: _types.FloatScalar
  count: _types.IntScalar  # type: ignore[assignment]  # tuples have a method of this name


@_protocol.declares(metrics=("gradient_norm", "skip_spikes/spike_count"), skips=("spike_count",))
class SkipSpikesState(NamedTuple):
  """State of :func:`skip_spikes`.

  Attributes:
    gradient_norm: scalar float32, the norm of the last gradient.
    norm_sums: float32, the weighted sum of the norms so far. Entry i is of the steps that freeze i
      groups of layers: the norm of fewer layers is smaller.
    norm_weights: float32, the sum of the weights in each entry of `norm_sums`; the mean of the
      norms is ``norm_sums / norm_weights``.
    norm_counts: int32, the number of norms in each mean.
    spike_count: scalar int32, the number of spikes, whose norms and losses are finite.
    losses: a :class:`LossMeanState`; None without `loss_factor`.
  """

  gradient_norm: _types.FloatScalar
  norm_sums: jax.Array
  norm_weights: jax.Array
  norm_counts: jax.Array
  spike_count: _types.IntScalar
  losses: Any = None


def skip_spikes(
  inner: optax.GradientTransformation,
  factor: jax.typing.ArrayLike | None = 5.0,
  decay: jax.typing.ArrayLike = 0.99,
  *,
  loss_factor: jax.typing.ArrayLike | None = None,
  start: jax.typing.ArrayLike = 20,
  axis_name: _types.AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Skips steps whose gradient norm or loss is far above those of the steps before.

  A step is skipped if

  .. math::
    n_t > f \, \frac{\sum_{i<t} d^{t-1-i} n_i}{\sum_{i<t} d^{t-1-i}}

  for the global norm :math:`n_t` of the gradient, `factor` f and `decay` d, or if the gradient is
  not finite. With `loss_factor` g, a step is also skipped if its loss :math:`l_t` is not finite, or

  .. math::
    l_t > m_t + g \, a_t

  for the mean :math:`m_t` of the losses before, with the same weights, and the mean :math:`a_t` of
  the distances :math:`|l_i - m_i|`. So the rule is the same for losses of any scale and sign, and
  a slow rise or fall of the loss widens its own limit.

  A skipped step changes neither params nor inner state; it is counted as a spike, or in
  `notfinite_count`. No norm or loss enters its mean as more than its limit, so a single spike
  changes the mean little; after a lasting rise the mean follows, and steps are made again. A norm
  that is zero or not finite does not enter the mean, nor does a loss that is not finite.

  Clipping by the global norm would only shorten the step: the params would still move along the bad
  gradient, and the moments would take the gradient in.

  Args:
    inner: the optimizer.
    factor: f, above 1: how many times the mean a norm may be. Raising it skips fewer steps. (With 1
      the mean could never rise, so that after a lasting rise of the norms no step would be made.)
      None: norms are not compared.
    decay: d, the weight of a norm divided by the weight of the next norm, from 0 to below 1; about
      1 / (1 - decay) norms count. Raising it makes the mean follow the norms more slowly.
    loss_factor: g, above 1: how many times the mean distance a loss may be above the mean. Raising
      it skips fewer steps. ``update`` then needs the loss as its extra argument `value`, which the
      train steps pass. None: losses are not compared.
    start: how many norms, or losses, the mean must have before a step with a finite one is skipped.
      Raising it skips fewer steps of a warm-up, in which norms change fast.
    axis_name: as for :func:`dynamic_loss_scale`; :math:`n_t^2` and the loss are averaged over the
      devices.

  Returns:
    An :class:`optax.GradientTransformationExtraArgs`. Norms are in float32; a norm beyond the range
    of float32 counts as not finite. With :func:`dynamic_loss_scale` the norm is of the unscaled
    gradient. With :func:`accumulate` each micro-batch is judged, and a spike is left out of its
    window.

  Raises:
    ValueError: `factor` and `loss_factor` are None; or, in ``update``, `loss_factor` is not, and
      there is no `value`.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_boost
    >>> tx = optax_boost.skip_spikes(optax.sgd(1.0), factor=5.0, start=2)
    >>> params = jnp.zeros(2)
    >>> state = tx.init(params)
    >>> for gradient in ([3.0, 4.0], [4.0, 3.0], [300.0, 400.0], [3.0, 4.0]):
    ...   updates, state = tx.update(jnp.array(gradient), state, params)
    ...   print(updates.tolist(), float(state.gradient_norm), int(state.spike_count))
    [-3.0, -4.0] 5.0 0
    [-4.0, -3.0] 5.0 0
    [0.0, 0.0] 500.0 1
    [-3.0, -4.0] 5.0 1
  """
  if factor is None and loss_factor is None:
    raise ValueError("`skip_spikes` needs `factor` or `loss_factor`; got None for both.")
  for name, value in (("factor", factor), ("loss_factor", loss_factor)):
    if value is not None:
      _checks.check_number(name, value, above=1.0)
  _checks.check_number("decay", decay, minimum=0.0, below=1.0)
  _checks.check_whole_number("start", start, minimum=1)
  return _wrapper.fill(inner, axis_name, spikes=SkipSpikes(factor, decay, loss_factor, start))


@dataclasses.dataclass(frozen=True, eq=False)
class SkipSpikes:
  """The slot of :func:`skip_spikes`."""

  factor: jax.typing.ArrayLike | None
  decay: jax.typing.ArrayLike
  loss_factor: jax.typing.ArrayLike | None
  start: jax.typing.ArrayLike
  method = _METHOD

  def init(self, num_groups: int) -> SkipSpikesState:
    """Returns the state without any norm; `num_groups` is the number of means."""
    return SkipSpikesState(
      gradient_norm=jnp.zeros([], jnp.float32),
      norm_sums=jnp.zeros(num_groups, jnp.float32),
      norm_weights=jnp.zeros(num_groups, jnp.float32),
      norm_counts=jnp.zeros(num_groups, jnp.int32),
      spike_count=jnp.zeros([], jnp.int32),
      losses=None if self.loss_factor is None else self._no_losses(),
    )

  def _no_losses(self) -> LossMeanState:
    return LossMeanState(
      mean=jnp.zeros([], jnp.float32),
      deviation=jnp.zeros([], jnp.float32),
      count=jnp.zeros([], jnp.int32),
    )

  def take_loss(self, extra_args: _types.ExtraArgs) -> jax.Array | None:
    """Returns the loss, a float32 scalar, from the extra arguments; None if it is not compared."""
    if self.loss_factor is None:
      return None
    value = _extra_args.require_extra(
      extra_args.get("value"), "value", _METHOD, "the loss, for `loss_factor`"
    )
    if jnp.ndim(value):
      raise ValueError(
        f"`{_METHOD}` needs a scalar loss as `value`; got an array of shape {jnp.shape(value)}."
      )
    return jnp.asarray(value, jnp.float32)

  def judge(
    self,
    state: SkipSpikesState,
    squares: _types.FloatScalar,
    loss: _types.FloatScalar | None,
    depth: _types.IntScalar | np.integer | int,
  ) -> tuple[_types.BoolScalar, _types.BoolScalar, SkipSpikesState]:
    """Returns whether a batch is a spike, whether its norm and loss are finite, and the new state.

    `squares` is the squared norm of the gradient, and `depth` the number of frozen groups.
    """
    norm = jnp.sqrt(squares)
    is_finite = _finiteness.finite_entries(norm)
    total, weight = state.norm_sums[depth], state.norm_weights[depth]
    count = state.norm_counts[depth]
    is_spike, limit = jnp.asarray(False), jnp.asarray(jnp.inf)
    if self.factor is not None:
      limit = jnp.where(count > 0, self.factor * total / jnp.maximum(weight, 1), jnp.inf)
      is_spike = is_finite & (count >= self.start) & (norm > limit)
    # The gradient of a masked loss may have norm zero. If such norms entered the mean, the limit
    # would approach zero, and any other norm would be a spike.
    enters_mean = is_finite & (norm > 0)
    total = jnp.where(enters_mean, self.decay * total + jnp.minimum(norm, limit), total)
    weight = jnp.where(enters_mean, self.decay * weight + 1, weight)
    losses = state.losses
    if loss is not None and self.loss_factor is not None:
      loss_is_finite = _finiteness.finite_entries(loss)
      is_judged = (losses.count >= self.start) & (losses.deviation > 0)
      loss_limit = losses.mean + self.loss_factor * losses.deviation
      loss_limit = jnp.where(is_judged, loss_limit, jnp.inf)
      is_finite, is_spike = is_finite & loss_is_finite, is_spike | (loss > loss_limit)
      losses = self._with_loss(losses, jnp.minimum(loss, loss_limit), loss_is_finite)
    is_spike = is_finite & is_spike
    new_state = SkipSpikesState(
      gradient_norm=norm,
      norm_sums=_with_entry(state.norm_sums, depth, total),
      norm_weights=_with_entry(state.norm_weights, depth, weight),
      norm_counts=_with_entry(state.norm_counts, depth, _arrays.increment_if(enters_mean, count)),
      spike_count=_arrays.increment_if(is_spike, state.spike_count),
      losses=losses,
    )
    return is_spike, is_finite, new_state

  def _with_loss(
    self, state: LossMeanState, loss: _types.FloatScalar, is_finite: _types.BoolScalar
  ) -> LossMeanState:
    """Returns the state with a loss in the means, if it is finite."""
    count = _arrays.increment_if(is_finite, state.count)
    weights = (1 - self.decay**count) / (1 - self.decay)  # their sum, with 1 for this loss

    def blend(mean: jax.Array, x: jax.Array) -> jax.Array:
      return jnp.where(is_finite, mean + (x - mean) / jnp.maximum(weights, 1), mean)

    distance = jnp.where(state.count > 0, jnp.abs(loss - state.mean), 0)
    return LossMeanState(blend(state.mean, loss), blend(state.deviation, distance), count)


def _with_entry(
  array: jax.Array, index: _types.IntScalar | np.integer | int, value: jax.Array
) -> jax.Array:
  return jnp.asarray(array).at[index].set(value)

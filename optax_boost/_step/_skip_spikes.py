"""Skips steps whose gradient norm is far above the mean of the norms before."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost._form import _finiteness, _protocol
from optax_boost._foundation import _arrays, _checks, _types
from optax_boost._step import _wrapper

_METHOD = "skip_spikes"


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
    spike_count: scalar int32, the number of spikes, whose norms are finite.
  """

  gradient_norm: _types.FloatScalar
  norm_sums: jax.Array
  norm_weights: jax.Array
  norm_counts: jax.Array
  spike_count: _types.IntScalar


def skip_spikes(
  inner: optax.GradientTransformation,
  factor: jax.typing.ArrayLike = 5.0,
  decay: jax.typing.ArrayLike = 0.99,
  *,
  start: jax.typing.ArrayLike = 20,
  axis_name: _types.AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Skips steps whose gradient norm is several times the mean norm of the steps before.

  A step is skipped if

  .. math::
    n_t > f \, \frac{\sum_{i<t} d^{t-1-i} n_i}{\sum_{i<t} d^{t-1-i}}

  for the global norm :math:`n_t` of the gradient, `factor` f and `decay` d, or if the gradient is
  not finite. A skipped step changes neither params nor inner state; it is counted as a spike, or in
  `notfinite_count`. No norm enters the mean as more than f times the mean before, so a single spike
  changes the mean little; after a lasting rise of the norms the mean follows, and steps are made
  again. A norm that is zero or not finite does not enter the mean.

  Clipping by the global norm would only shorten the step: the params would still move along the bad
  gradient, and the moments would take the gradient in.

  Args:
    inner: the optimizer.
    factor: f, above 1: how many times the mean a norm may be. Raising it skips fewer steps. (With 1
      the mean could never rise, so that after a lasting rise of the norms no step would be made.)
    decay: d, the weight of a norm divided by the weight of the next norm, from 0 to below 1; about
      1 / (1 - decay) norms count. Raising it makes the mean follow the norms more slowly.
    start: how many norms the mean must have before a step with a finite norm is skipped. Raising it
      skips fewer steps of a warm-up, in which norms change fast.
    axis_name: as for :func:`dynamic_loss_scale`; :math:`n_t^2` is averaged over the devices.

  Returns:
    An :class:`optax.GradientTransformationExtraArgs`. Norms are in float32; a norm beyond the range
    of float32 counts as not finite. With :func:`dynamic_loss_scale` the norm is of the unscaled
    gradient. With :func:`accumulate` each micro-batch is judged, and a spike is left out of its
    window.

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
  _checks.check_number("factor", factor, above=1.0)
  _checks.check_number("decay", decay, minimum=0.0, below=1.0)
  _checks.check_whole_number("start", start, minimum=1)
  return _wrapper.fill(inner, axis_name, spikes=SkipSpikes(factor, decay, start))


@dataclasses.dataclass(frozen=True, eq=False)
class SkipSpikes:
  """The slot of :func:`skip_spikes`."""

  factor: jax.typing.ArrayLike
  decay: jax.typing.ArrayLike
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
    )

  def judge(
    self,
    state: SkipSpikesState,
    squares: _types.FloatScalar,
    depth: _types.IntScalar | np.integer | int,
  ) -> tuple[_types.BoolScalar, _types.BoolScalar, SkipSpikesState]:
    """Returns whether a gradient is a spike, whether its norm is finite, and the new state.

    `squares` is the squared norm of the gradient, and `depth` the number of frozen groups.
    """
    norm = jnp.sqrt(squares)
    is_finite = _finiteness.finite_entries(norm)
    total, weight = state.norm_sums[depth], state.norm_weights[depth]
    count = state.norm_counts[depth]
    limit = jnp.where(count > 0, self.factor * total / jnp.maximum(weight, 1), jnp.inf)
    is_spike = is_finite & (count >= self.start) & (norm > limit)
    # The gradient of a masked loss may have norm zero. If such norms entered the mean, the limit
    # would approach zero, and any other norm would be a spike.
    enters_mean = is_finite & (norm > 0)
    total = jnp.where(enters_mean, self.decay * total + jnp.minimum(norm, limit), total)
    weight = jnp.where(enters_mean, self.decay * weight + 1, weight)
    new_state = SkipSpikesState(
      gradient_norm=norm,
      norm_sums=state.norm_sums.at[depth].set(total),
      norm_weights=state.norm_weights.at[depth].set(weight),
      norm_counts=state.norm_counts.at[depth].set(_arrays.increment_if(enters_mean, count)),
      spike_count=_arrays.increment_if(is_spike, state.spike_count),
    )
    return is_spike, is_finite, new_state

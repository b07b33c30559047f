r"""Skips steps whose gradient is far longer than the gradients before it.

With the norm n_t of the gradient in step t, and the mean m of the norms before it with weights that
fall by d from each to the one before:

  skipped   n_t > f m, or n_t is not finite
  m         takes min(n_t, f m), so that a lasting change of the norms is not skipped for ever
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_boost._form import _driver, _finiteness, _protocol, _transformation
from optax_boost._foundation import _arrays, _checks, _mesh_axes, _types

_METHOD = "skip_spikes"


@_protocol.declares(
  metrics=("gradient_norm", "skip_spikes/spike_count"), outcome=("made",), skips=("spike_count",)
)
class SkipSpikesState(NamedTuple):
  """State of :func:`skip_spikes`.

  Attributes:
    gradient_norm: scalar float32, the norm of the last gradient.
    norm_sum: scalar float32, the weighted sum of the norms so far.
    norm_weight: scalar float32, the sum of their weights; `norm_sum` over it is their mean.
    count: scalar int32, the norms in the mean.
    spike_count: scalar int32, steps that were not made.
    inner_state: the inner optimizer's state.
    made: scalar bool, whether the last call made a step.
  """

  gradient_norm: jax.Array
  norm_sum: jax.Array
  norm_weight: jax.Array
  count: jax.Array  # type: ignore[assignment]  # tuples have a method of this name
  spike_count: jax.Array
  inner_state: optax.OptState
  made: jax.Array


def skip_spikes(
  inner: optax.GradientTransformation,
  factor: jax.typing.ArrayLike = 5.0,
  decay: jax.typing.ArrayLike = 0.99,
  *,
  start: jax.typing.ArrayLike = 20,
  axis_name: _types.AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Makes no step whose gradient norm is a multiple of the usual one.

  .. math::
    n_t > f \, \frac{\sum_{i<t} d^{t-1-i} n_i}{\sum_{i<t} d^{t-1-i}}

  for the global norm :math:`n_t` of the gradient, `factor` f and `decay` d. Such a step, and one
  whose gradient is not finite, leaves params and the inner state as they are and is counted. The
  norm of a skipped step enters the mean as f times the mean, so that after a lasting change of the
  norms steps are made again; a norm that is zero or not finite does not enter it.

  Clipping by the global norm bounds such a step, and still moves the params along the bad gradient
  and takes it into the moments.

  Args:
    inner: the optimizer.
    factor: how many times the mean a norm may be, above 1. Raising it skips fewer steps.
    decay: weight of a norm against the one after it, from 0 to below 1; about 1 / (1 - decay) norms
      count. Raising it follows changes of the norms more slowly.
    start: norms that are gathered before the first step is skipped for its length. Raising it lets
      pass more of a warm-up, in which norms change fast.
    axis_name: inside ``shard_map``, the mesh axes over which the gradients differ: the root of the
      mean of their squared norms counts on all devices. Not needed under ``jit``.

  Returns:
    An :class:`optax.GradientTransformationExtraArgs`. Norms are in float32; a norm beyond its range
    counts as not finite. Around a :func:`dynamic_loss_scale` the norm is of the unscaled gradient,
    and overflows are left to it.

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
  inner = _checks.check_transformation("inner", inner)
  _checks.check_number("factor", factor, minimum=1.0)
  _checks.check_number("decay", decay, minimum=0.0, below=1.0)
  _checks.check_whole_number("start", start, minimum=1)
  _mesh_axes.check_axis_name("axis_name", axis_name)
  method = _SkipSpikes(inner, factor, decay, start, axis_name)
  return _transformation.wrapper(_METHOD, SkipSpikesState, method, allows_complex=True)


@dataclasses.dataclass(frozen=True, eq=False)
class _SkipSpikes:
  """The checked arguments of :func:`skip_spikes`."""

  inner: optax.GradientTransformationExtraArgs
  factor: Any
  decay: Any
  start: Any
  axis_name: _types.AxisName | None

  def init(self, params: optax.Params) -> SkipSpikesState:
    return SkipSpikesState(
      gradient_norm=jnp.zeros([], jnp.float32),
      norm_sum=jnp.zeros([], jnp.float32),
      norm_weight=jnp.zeros([], jnp.float32),
      count=jnp.zeros([], jnp.int32),
      spike_count=jnp.zeros([], jnp.int32),
      inner_state=self.inner.init(params),
      made=jnp.zeros([], bool),
    )

  def before(
    self, call: _driver.Call, state: SkipSpikesState
  ) -> tuple[_driver.Call, SkipSpikesState, None]:
    grads, _ = call.gradients()
    unseen = _protocol.unseen_by_scale(state.inner_state, grads)
    own = self._squares(unseen)
    squares = own
    if len(unseen) < len(jax.tree.leaves(grads)):
      # A loss scale inside sees the others, and their overflows.
      scale = _protocol.requesting_state(state.inner_state, _protocol.LOSS_SCALE).loss_scale
      squares = own + (self._squares(grads) - own) / scale / scale
    norm = jnp.sqrt(squares)
    finite = _finiteness.finite_entries(norm)
    limit = self.factor * state.norm_sum / jnp.maximum(state.norm_weight, 1)
    is_spike = finite & (state.count >= self.start) & (norm > limit)
    skips = is_spike | ~_finiteness.finite_entries(own)
    taken = jnp.where(is_spike, limit, norm)
    # After norms of zero, as of frozen or masked losses, every norm would be a spike.
    gathered = finite & (norm > 0)
    new_state = state._replace(
      gradient_norm=norm,
      norm_sum=jnp.where(gathered, self.decay * state.norm_sum + taken, state.norm_sum),
      norm_weight=jnp.where(gathered, self.decay * state.norm_weight + 1, state.norm_weight),
      count=_arrays.increment_if(gathered, state.count),
      spike_count=_arrays.increment_if(skips, state.spike_count),
    )
    return call._replace(makes_step=~skips), new_state, None

  after = _driver.pass_on

  def _squares(self, gradients: optax.Updates) -> jax.Array:
    squares = jnp.asarray(_arrays.sum_squares_of_tree(gradients), jnp.float32)
    if self.axis_name is not None:
      _mesh_axes.require_axis("axis_name", self.axis_name, _METHOD)
      squares = jax.lax.pmean(squares, self.axis_name)
    return squares

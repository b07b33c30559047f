"""Half-precision params without masters: each step rounds them stochastically.

Rounding to nearest loses every update below half the distance to the next number. Rounded up with
the probability that makes the mean right, such updates arrive on average.

Source: Gupta et al., "Deep Learning with Limited Numerical Precision", arXiv:1502.02551; Zamirai et
al., "Revisiting BFloat16 Training", arXiv:2010.06192.
"""

import functools
from typing import Any
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
from optax_boost._precision import _widened

_METHOD = "stochastic_rounding"


@_protocol.declares(metrics=("stochastic_rounding/notfinite_count",))
class StochasticRoundingState(NamedTuple):
  """State of :func:`stochastic_rounding`.

  Attributes:
    count: scalar int32, steps made.
    notfinite_count: scalar int32, steps in which an inner update, the inner state or a param in
      float32 would not have been finite.
    key: raw key data of the generator; each step's key is made of it and `count`.
    inner_state: the inner optimizer's state, of the params in float32.
  """

  count: jax.Array  # type: ignore[assignment]  # tuples have a method of this name
  notfinite_count: jax.Array
  key: jax.Array
  inner_state: optax.OptState


def stochastic_rounding(
  inner: optax.GradientTransformation,
  key: jax.Array | int,
  *,
  axis_name: str | tuple[str, ...] | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Trains half-precision params without float32 masters, rounded right on average.

  .. math::
    w \leftarrow R(w + \Delta), \qquad R(x) = \begin{cases}
      x_+ & \text{with probability } (x - x_-) / (x_+ - x_-) \\
      x_- & \text{otherwise} \end{cases}

  for the update :math:`\Delta` of the inner optimizer and the neighbours :math:`x_- \le x \le x_+`
  in the params' dtype, so that :math:`E[R(x)] = x`. The inner optimizer sees the params and the
  gradients in float32, and the sum is made in float32. :func:`master_weights` needs 4 bytes more
  per param and has no noise.

  A step in which the inner optimizer's updates or its state would turn NaN or infinite changes
  nothing and is counted. A param beyond the range of its dtype is rounded to its end. Params that
  are NaN or infinite stay so.

  Args:
    inner: the optimizer. Its state is in float32, unless it was told otherwise.
    key: a key of ``jax.random.key`` or a seed. Steps with equal keys and counts round alike, on one
      device and sharded.
    axis_name: inside ``shard_map``, the mesh axes over which gradients or params differ, so that
      all devices make a step or none does. Without it, a bad gradient on one device stops a program
      whose inner optimizer has collectives. Not needed under ``jit``.

  Returns:
    An :class:`optax.GradientTransformationExtraArgs` that needs `params`. Updates are float32
    (float64 for float64 params): ``optax.apply_updates`` adds them in float32 and rounds once,
    exactly to the rounded params unless a weight shrinks 32,768-fold in one step (float16:
    4,096-fold); :func:`apply_gradients` and :func:`make_train_step` write the rounded params.
    Params in float32 and float64 are not rounded. Wrappers of optax that skip steps go inside, as
    in ``stochastic_rounding(optax.apply_if_finite(inner, 5), key)``.

  Raises:
    ValueError: in ``update``: no params, gradients that do not fit, or an axis that is not bound.
    TypeError: a leaf is not floating-point, or an argument is of the wrong kind.

  Examples:
    >>> import jax, jax.numpy as jnp, optax, optax_boost
    >>> tx = optax_boost.stochastic_rounding(optax.sgd(1.0), key=0)
    >>> update = jax.jit(tx.update)
    >>> params = jnp.ones(1000, jnp.bfloat16)
    >>> state = tx.init(params)
    >>> for _ in range(100):  # each too small a step for bfloat16
    ...   updates, state = update(jnp.full(1000, -1e-3, jnp.bfloat16), state, params)
    ...   params = optax.apply_updates(params, updates)
    >>> round(float(params.astype(jnp.float32).mean()), 2), params.dtype
    (1.1, dtype(bfloat16))

  References:
    Gupta et al., `Deep Learning with Limited Numerical Precision
    <https://arxiv.org/abs/1502.02551>`_, 2015.
    Zamirai et al., `Revisiting BFloat16 Training <https://arxiv.org/abs/2010.06192>`_, 2020.
  """
  inner = _base.check_transformation("inner", inner)
  _base.check_axis_name("axis_name", axis_name)
  agree = functools.partial(_conditional.agree, axis_name=axis_name, method=_METHOD)
  method = _Rounding(inner, _base.as_key("key", key), agree)
  return _in_place.InPlaceTransformation(method.init, method.update, method.apply)


class _Rounding(NamedTuple):
  """The checked arguments of :func:`stochastic_rounding`."""

  inner: optax.GradientTransformationExtraArgs
  key: jax.Array
  agree: _widened.Agree

  def init(self, params: optax.Params) -> StochasticRoundingState:
    _tree.check_floating(params, _METHOD)
    return StochasticRoundingState(
      count=jnp.zeros([], jnp.int32),
      notfinite_count=jnp.zeros([], jnp.int32),
      # A copy: the state is donated, the caller's key is not.
      key=jnp.array(jax.random.key_data(self.key)),
      inner_state=self.inner.init(_arrays.copy_arrays(params, _arrays.accumulator_dtype)),
    )

  def update(
    self,
    updates: optax.Updates,
    state: StochasticRoundingState,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, StochasticRoundingState]:
    _tree.check_update(_METHOD, updates, state, StochasticRoundingState, params, needs_params=True)
    wide, bad, inner_state = _widened.step(
      self.inner,
      updates,
      extra_args,
      state.inner_state,
      _widened.widen(params),
      params,
      self.agree,
    )
    rounded = self._round(wide, params, state)
    return _widened.difference(rounded, params), _next_state(state, bad, inner_state)

  def apply(
    self,
    gradients: _in_place.Gradients,
    state: StochasticRoundingState,
    params: optax.Params,
    guard: bool,
  ) -> tuple[optax.Params, StochasticRoundingState]:
    del guard  # no finite param is rounded to another kind
    _tree.check_update(
      _METHOD, gradients()[0], state, StochasticRoundingState, params, needs_params=True
    )

    def widened() -> tuple[optax.Updates, dict[str, Any]]:
      return _widened.arguments(*gradients(), params)

    def step(params: Any, inner_state: Any) -> Any:
      wide = _widened.widen(params)
      wide, inner_state = _in_place.apply(self.inner, widened, inner_state, wide, guard=True)
      return self._round(wide, params, state), inner_state

    carry = params, state.inner_state
    if _widened.skips_by_itself(self.inner, state.inner_state):
      params, inner_state = step(*carry)
      return params, _next_state(state, jnp.asarray(False), inner_state)
    skipped, bad = _widened.skipped_in_place(
      self.inner,
      gradients,
      state.inner_state,
      lambda: _widened.widen(params),
      params,
      self.agree,
    )
    _, params, inner_state = _in_place.once_if(~skipped, step, *carry)
    return params, _next_state(state, bad, inner_state)

  def _round(
    self, wide: optax.Params, params: optax.Params, state: StochasticRoundingState
  ) -> optax.Params:
    key = _widened.step_key(self.key, state.key, state.count)
    return _widened.round_like(wide, params, key)


def _next_state(
  state: StochasticRoundingState, bad: jax.Array, inner_state: optax.OptState
) -> StochasticRoundingState:
  return StochasticRoundingState(
    count=optax.safe_increment(state.count),
    notfinite_count=_arrays.increment_if(bad, state.notfinite_count),
    key=state.key,
    inner_state=inner_state,
  )

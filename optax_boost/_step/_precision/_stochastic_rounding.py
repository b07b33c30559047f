"""Stochastic rounding: trains half-precision params without float32 copies.

Sources: Gupta et al., arXiv:1502.02551; Zamirai et al., arXiv:2010.06192.
"""

from typing import Literal, NamedTuple

import jax
import optax

from optax_boost._foundation import _checks, _types
from optax_boost._step._precision import _float32_optimizer


class StochasticRoundingState(NamedTuple):
  """State of :func:`stochastic_rounding`.

  Attributes:
    key: raw key data of the generator; each step's key is made from `key` and `count`.
  """

  key: jax.Array


def stochastic_rounding(
  inner: optax.GradientTransformation,
  key: jax.Array | int,
  *,
  axis_name: _types.AxisName | None = None,
  check: Literal["gradients", "updates"] | None = "gradients",
) -> optax.GradientTransformationExtraArgs:
  r"""Trains half-precision params without float32 masters, by rounding that is exact on average.

  .. math::
    w \leftarrow R(w + \Delta), \qquad R(x) = \begin{cases}
      x_+ & \text{with probability } \frac{x - x_-}{x_+ - x_-} \\
      x_- & \text{otherwise} \end{cases}

  for the update :math:`\Delta` of the inner optimizer and the neighbours :math:`x_- \le x \le x_+`
  in the params' dtype. So :math:`E[R(x)] = x`: small updates act on average, while rounding to
  nearest would lose them. The inner optimizer gets the params and the gradients in float32, and its
  updates are added in float32. :func:`master_weights` needs 4 more bytes per param, without noise.

  A step whose gradients are not finite changes nothing and is counted. A param beyond the range of
  its dtype is rounded to the end of the range. Params that are NaN or infinite are not changed.

  Args:
    inner: the optimizer. Its state is in float32, unless its arguments set another dtype.
    key: a key of ``jax.random.key`` or a seed. Steps with equal keys and counts round in the same
      way, on one device and sharded.
    axis_name: as for :func:`dynamic_loss_scale`.
    check: as for :func:`dynamic_loss_scale`. None: nothing is checked, so each step is made, and
      the optimizer may update one layer before the gradients of the next are known.

  Returns:
    An :class:`optax.GradientTransformationExtraArgs` that needs `params`. Updates are as for
    :func:`master_weights`: ``optax.apply_updates`` gives the rounded params, unless a weight
    shrinks 32,768-fold in one step (float16: 4,096-fold). :func:`apply_gradients` and
    :func:`make_train_step` always give the rounded params. Params in float32 and float64 are not
    rounded. Put wrappers of optax that skip steps inside, as in
    ``stochastic_rounding(optax.apply_if_finite(inner, 5), key)``.

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
  key = _checks.as_key("key", key)
  return _float32_optimizer.make_wrapper(
    "stochastic_rounding", StochasticRoundingState, inner, key, axis_name, check
  )

"""Master weights: float32 copies of half-precision params, in which small updates don't vanish.

Sources: Micikevicius et al., arXiv:1710.03740; MXNet's `multi_precision`.
"""

from typing import Literal, NamedTuple

import jax
import optax

from optax_boost._foundation import _types
from optax_boost._step._precision import _float32_optimizer


class MasterWeightsState(NamedTuple):
  """State of :func:`master_weights`.

  Attributes:
    master_params: tree of the params' structure, the weights in at least float32.
    key: raw key data of the generator for stochastic rounding, or None.
  """

  master_params: optax.Params
  key: jax.Array | None


def master_weights(
  inner: optax.GradientTransformation,
  *,
  key: jax.Array | int | None = None,
  axis_name: _types.AxisName | None = None,
  check: Literal["gradients", "updates"] | None = "gradients",
) -> optax.GradientTransformationExtraArgs:
  r"""Trains float32 copies of half-precision params, the masters; rounds them to the params.

  The inner optimizer gets the masters as its params, and the gradients in float32. Its updates are
  added to the masters. The updates that the wrapper returns move the params to the rounded masters.

  A step whose gradients are not finite changes nothing and is counted. A master beyond the range
  of the params' dtype is rounded to the end of the range. If a param was changed between two steps
  (by ``optax.lookahead`` or a projection), its master is set to the param.

  Args:
    inner: the optimizer of the masters.
    key: a key of ``jax.random.key`` or a seed, to round the params stochastically: the mean error
      is zero. None: round to nearest. The masters are never rounded.
    axis_name: as for :func:`dynamic_loss_scale`.
    check: as for :func:`dynamic_loss_scale`. None: nothing is checked, so each step is made, and
      the optimizer may update one layer before the gradients of the next are known.

  Returns:
    An :class:`optax.GradientTransformationExtraArgs` that needs `params`. Updates are float32
    (float64 for float64 params): ``optax.apply_updates`` adds them in float32 and rounds once. The
    sum is the rounded master, unless a weight shrinks 4,096-fold in one step; then the master is
    set to the param. Put wrappers of optax that skip steps inside, as in
    ``master_weights(optax.apply_if_finite(inner, 5))``.

  Examples:
    >>> import jax, jax.numpy as jnp, optax, optax_boost
    >>> tx = optax_boost.master_weights(optax.sgd(1.0))
    >>> update = jax.jit(tx.update)
    >>> params = jnp.ones(1, jnp.float16)
    >>> state = tx.init(params)
    >>> for _ in range(1000):  # each too small a step for float16
    ...   updates, state = update(jnp.full(1, -1e-4, jnp.float16), state, params)
    ...   params = optax.apply_updates(params, updates)
    >>> round(float(params[0]), 2), params.dtype
    (1.1, dtype('float16'))

  References:
    Micikevicius et al., `Mixed Precision Training <https://arxiv.org/abs/1710.03740>`_, 2018.
  """
  return _float32_optimizer.make_wrapper(
    "master_weights", MasterWeightsState, inner, key, axis_name, check
  )

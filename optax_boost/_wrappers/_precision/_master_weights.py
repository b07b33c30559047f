"""Master weights: small updates vanish in half precision (1 + 1e-4 is 1 in float16).

So the weights that training moves are float32 masters, and the model's params are their rounding.

Source: Micikevicius et al., "Mixed Precision Training", arXiv:1710.03740; MXNet's
`multi_precision`.
"""

from typing import Literal, NamedTuple

import jax
import optax

from optax_boost._form import _protocol
from optax_boost._wrappers._precision import _float32_optimizer


@_protocol.declares(
  metrics=("master_weights/notfinite_count",), outcome=("made",), skips=("notfinite_count",)
)
class MasterWeightsState(NamedTuple):
  """State of :func:`master_weights`.

  Attributes:
    master_params: tree of the params' structure, the weights in at least float32.
    count: scalar int32, steps made.
    notfinite_count: scalar int32, steps that were not made since a gradient was not finite, or with
      ``check="updates"`` since a master or the inner state would not have been.
    key: raw key data of the generator for stochastic rounding, or None.
    inner_state: the inner optimizer's state, of the masters.
    made: scalar bool, whether the last call made a step.
  """

  master_params: optax.Params
  count: jax.Array  # type: ignore[assignment]  # tuples have a method of this name
  notfinite_count: jax.Array
  key: jax.Array | None
  inner_state: optax.OptState
  made: jax.Array


def master_weights(
  inner: optax.GradientTransformation,
  *,
  key: jax.Array | int | None = None,
  axis_name: str | tuple[str, ...] | None = None,
  check: Literal["gradients", "updates"] = "gradients",
) -> optax.GradientTransformationExtraArgs:
  r"""Trains float32 masters of half-precision params; the params are always their rounding.

  The inner optimizer sees the masters as its params, and the gradients in float32. Its updates
  move the masters; the returned updates move the params to the masters' rounding.

  A step whose gradients are not finite changes nothing and is counted. A master beyond the range
  of the params' dtype is rounded to the range's end. If a param is changed between two steps (by
  ``optax.lookahead`` or a projection), its master is set to it.

  Args:
    inner: the optimizer of the masters.
    key: a key of ``jax.random.key`` or a seed, for stochastic rounding, whose error is zero on
      average; None: round to nearest. The masters are exact either way.
    axis_name: inside ``shard_map``, the mesh axes over which gradients or params differ, so that
      all devices make a step or none does. Without it, a bad gradient on one device deadlocks a
      program whose inner optimizer has collectives. Not needed under ``jit``.
    check: ``"gradients"`` skips a step whose gradients are not finite. A NaN that `inner` makes of
      finite gradients, as ``optax.adam(eps=0)`` does, goes into masters and state; the next
      gradients are NaN, so that steps are skipped and counted. ``"updates"`` computes each step
      once more, ahead, and skips one whose result would not be finite, for more time.

  Returns:
    An :class:`optax.GradientTransformationExtraArgs` that needs `params`. Updates are float32
    (float64 for float64 params): ``optax.apply_updates`` adds them in float32 and rounds once,
    exactly to the masters' rounding unless a weight shrinks 4,096-fold in one step; then the master
    follows the param. Wrappers of optax that skip steps go inside, as in
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

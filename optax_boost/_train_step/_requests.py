"""The answer to what an optimizer state asks of the loss: scales, a shorter backward pass."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost import _arrays
from optax_boost import _protocol
from optax_boost._train_step import _frozen_backward


class Requests:
  """The requests of an optimizer state, and their answer: a gradient."""

  def __init__(
    self,
    tx: optax.GradientTransformation,
    opt_state: optax.OptState,
    params: optax.Params,
    depth: int | None,
  ):
    self.opt_state = opt_state
    self._loss_scale = _protocol.requested(opt_state, _protocol.LOSS_SCALE)
    self.frozen_groups = _protocol.requested(opt_state, _protocol.FROZEN_GROUPS)
    if self._loss_scale is not None:
      _protocol.check_full_gradients(opt_state)
    groups: dict[str, _protocol.GroupAssignment] = {}
    if self._loss_scale is not None or self.frozen_groups is not None:
      groups = _protocol.collect_groups(tx, params)
    self.frozen = groups.get(_protocol.FROZEN_GROUPS)
    # Who asks for one scale need not announce its leaves; all have it then.
    self._has_scale = groups.get(_protocol.LOSS_SCALE)
    if self.frozen is not None and depth is not None:
      # A constant in the state: nothing is computed for frozen leaves in `update` either.
      self.frozen_groups = depth
      self.opt_state = _protocol.map_request(
        opt_state,
        _protocol.FROZEN_GROUPS,
        lambda state: state._replace(frozen_groups=np.int32(depth)),
      )

  def gradient_of(
    self,
    forward: Callable[[optax.Params], tuple[jax.Array, Any]],
  ) -> Callable[[optax.Params], tuple[optax.Updates, Any]]:
    """From params to the scaled gradient, zero for frozen leaves, and the output of `forward`."""

    def objective(params: optax.Params) -> tuple[jax.Array, Any]:
      value, rest = forward(params)
      return value, (value, rest)

    def scaled(params: optax.Params, cut: Any = lambda loss: loss) -> tuple[jax.Array, Any]:
      value, rest = cut(objective)(params)
      # In float32: a float16 loss times its scale would overflow.
      scale = self._loss_scale
      return value if scale is None else value.astype(jnp.float32) * scale, rest

    gradient = jax.grad(scaled, has_aux=True)
    if self.frozen is not None:
      gradient = _frozen_backward.cut_gradient(scaled, self.frozen, self.frozen_groups)

    def asked(params: optax.Params) -> tuple[optax.Updates, Any]:
      grads, rest = gradient(params)
      return self._unscale_unasked(grads), rest

    return asked

  def _unscale_unasked(self, grads: optax.Updates) -> optax.Updates:
    """Takes the loss scale off the gradients of leaves whose method did not ask for it."""
    if self._loss_scale is None or self._has_scale is None:
      return grads
    leaves, structure = jax.tree.flatten(grads)
    unscaled = [
      g if number == 0 else (_arrays.widen(g) / self._loss_scale).astype(g.dtype)
      for g, number in zip(leaves, self._has_scale.numbers(grads), strict=True)
    ]
    return jax.tree.unflatten(structure, unscaled)

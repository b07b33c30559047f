"""The loss of one step and its gradient, as functions of the params."""

from collections.abc import Callable
import dataclasses
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost._foundation import _extra_args, _masks, _types
from optax_boost._trace import _frozen_scans
from optax_boost._train_step import _state_requests, _traced_loss

# From params to the loss and aux.
LossWithAux: TypeAlias = Callable[[optax.Params], tuple[_types.FloatScalar, Any]]


@dataclasses.dataclass(frozen=True, eq=False)
class Objective:
  """The loss of a step, and the gradient that the optimizer state requests.

  Attributes:
    loss: from params to ``(loss, aux)``: the user's function, or the program traced from it.
    traced: the traced program, which computes no gradient for a part of a leaf's layers.
    scaling: the scale of the loss before it is differentiated. None: no scale.
    freezing: the layers that get no gradient. None: all get one.
    must_depend: whether it is an error if no gradient reaches the params.
  """

  loss: LossWithAux
  traced: _traced_loss.TracedLoss
  scaling: _state_requests.ScaleRequest | None
  freezing: _state_requests.FreezeRequest | None
  must_depend: bool = False

  def value_and_grad(
    self, params: optax.Params
  ) -> tuple[tuple[_types.FloatScalar, Any], optax.Updates]:
    """``(loss, aux)``, and the gradient of the scaled loss: zero for frozen leaves and layers."""
    loss = self._without_frozen_gradients()
    # A loss may depend on frozen layers only, so it is checked if none is known to be frozen.
    if self.must_depend and (self.freezing is None or self.freezing.frozen() is None):
      loss = _check_dependence(loss)
    if self.scaling is None:
      output, gradients = jax.value_and_grad(loss, has_aux=True)(params)
    else:
      apply_scale = self.scaling.apply

      def scaled(params: optax.Params) -> tuple[_types.FloatScalar, Any]:
        value, aux = loss(params)
        return apply_scale(value), (value, aux)

      gradients, output = jax.grad(scaled, has_aux=True)(params)
    gradients = steepest_ascent(gradients)
    if self.scaling is not None:
      gradients = self.scaling.unscale_unseen(gradients)
    # If the depth is known, gradients of frozen layers are zero already.
    if self.freezing is not None and self.freezing.frozen() is None:
      gradients = self.freezing.zero_frozen(gradients)
    return output, gradients

  def _without_frozen_gradients(self) -> LossWithAux:
    """The loss, whose derivative is zero for leaves and layers that are known to be frozen."""
    frozen = None if self.freezing is None else self.freezing.frozen()
    if frozen is None or not any(map(np.any, frozen)):
      return self.loss
    freezes_parts = any(np.any(flags) and not np.all(flags) for flags in frozen)

    def loss(params: optax.Params) -> tuple[_types.FloatScalar, Any]:
      leaves, structure = jax.tree.flatten(params)
      stopped = jax.lax.stop_gradient(leaves)
      leaves = list(map(_frozen_scans.split_frozen, stopped, leaves, frozen))
      if freezes_parts:
        return self.traced.run_with_leaves(params, leaves)
      return self.loss(jax.tree.unflatten(structure, leaves))

    return loss

  def closures(self, current: optax.Params) -> dict[str, _types.Closure]:
    """The loss and its gradient as functions of params, which are extra arguments of ``update``.

    `current` are the params whose values masked leaves have.
    """

    @_extra_args.accept_extra_args
    def value_fn(params: optax.Params) -> _types.FloatScalar:
      return self.loss(_masks.fill_masked(params, current))[0]

    grad_fn = accept_masked(lambda params: self.value_and_grad(params)[1], current)
    return {"value_fn": value_fn, "grad_fn": grad_fn, "obj_fn": value_fn}


def _check_dependence(
  loss: LossWithAux,
) -> LossWithAux:
  """The same loss, which raises ValueError under ``jax.grad`` if the params don't affect it."""

  def checked(params: optax.Params) -> tuple[_types.FloatScalar, Any]:
    value, aux = loss(params)
    # Under `jax.grad` the params and all that depends on them are tracers of one type.
    if type(value) not in map(type, jax.tree.leaves(params)):
      raise ValueError(
        "`loss_fn` must compute the loss from the params that it is given; no gradient of it"
        " reaches them, so nothing would be trained. Does it use a model of an outer scope, or"
        " `jax.lax.stop_gradient`?"
      )
    return value, aux

  return checked


def steepest_ascent(gradients: _types.SameTree) -> _types.SameTree:
  """Conjugates the gradients of complex params.

  ``jax.grad`` of a real loss gives the conjugate of the direction in which the loss grows fastest;
  optimizers take the direction itself.
  """
  return jax.tree.map(lambda g: jnp.conj(g) if jnp.iscomplexobj(g) else g, gradients)


def accept_masked(
  gradient: Callable[[optax.Params], optax.Updates], current: optax.Params
) -> _types.Closure:
  """The same gradient function, for params in which ``optax.masked`` may have hidden leaves.

  A hidden leaf has its value in `current`, and no gradient.
  """

  # A transformation may pass more: `optax.contrib.sam` passes the number of its inner step.
  def grad_fn(params: optax.Params, *_: Any) -> optax.Updates:
    return _masks.mask_like(gradient(_masks.fill_masked(params, current)), params)

  return grad_fn

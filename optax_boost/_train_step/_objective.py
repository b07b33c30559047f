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

# A function from params to ``(loss, aux)``.
LossWithAux: TypeAlias = Callable[[optax.Params], tuple[_types.FloatScalar, Any]]


@dataclasses.dataclass(frozen=True, eq=False)
class Objective:
  """The loss of a step, and the gradient that the optimizer state requests.

  Attributes:
    loss: a function from params to ``(loss, aux)``: the user's loss, or the program traced from it.
    traced: the traced program of the loss, which can freeze some of the layers in a leaf.
    scaling: the number by which the loss is multiplied before it is differentiated. None: no scale.
    freezing: the layers that get no gradient. None: all layers get a gradient.
    must_depend: whether to raise an error if the loss does not depend on the params.
  """

  loss: LossWithAux
  traced: _traced_loss.TracedLoss
  scaling: _state_requests.ScaleRequest | None
  freezing: _state_requests.FreezeRequest | None
  must_depend: bool = False

  def value_and_grad(
    self, params: optax.Params
  ) -> tuple[tuple[_types.FloatScalar, Any], optax.Updates]:
    """Returns ``(loss, aux)``, and the gradient of the scaled loss: zero in frozen layers."""
    loss = self._without_frozen_gradients()
    # The loss is checked only if no layer is known to be frozen: otherwise it may depend on frozen
    # layers alone, and no gradient is right.
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
    # If the number of frozen groups is known, the gradients of frozen layers are zero already.
    if self.freezing is not None and self.freezing.frozen() is None:
      gradients = self.freezing.zero_frozen(gradients)
    return output, gradients

  def _without_frozen_gradients(self) -> LossWithAux:
    """Returns the loss, with a zero derivative for leaves and layers known to be frozen."""
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
    """Returns the extra arguments of ``update`` that compute the loss and its gradient from params.

    A leaf that is masked in these params has its value in `current`.
    """

    @_extra_args.accept_extra_args
    def value_fn(params: optax.Params) -> _types.FloatScalar:
      return self.loss(_masks.fill_masked(params, current))[0]

    grad_fn = accept_masked(lambda params: self.value_and_grad(params)[1], current)
    return {"value_fn": value_fn, "grad_fn": grad_fn, "obj_fn": value_fn}


def _check_dependence(
  loss: LossWithAux,
) -> LossWithAux:
  """Returns the loss, which raises ValueError under ``jax.grad`` if it ignores the params."""

  def checked(params: optax.Params) -> tuple[_types.FloatScalar, Any]:
    value, aux = loss(params)
    # Under `jax.grad`, the params and all values computed from the params are tracers of one type.
    if type(value) not in map(type, jax.tree.leaves(params)):
      raise ValueError(
        "`loss_fn` must compute the loss from the params that it is given; no gradient of it"
        " reaches them, so nothing would be trained. Does it use a model of an outer scope, or"
        " `jax.lax.stop_gradient`?"
      )
    return value, aux

  return checked


def steepest_ascent(gradients: _types.SameTree) -> _types.SameTree:
  """Returns gradients in which those of complex params are conjugated.

  ``jax.grad`` of a real loss returns the conjugate of the direction in which the loss grows
  fastest; optimizers take the direction itself.
  """
  return jax.tree.map(lambda g: jnp.conj(g) if jnp.iscomplexobj(g) else g, gradients)


def accept_masked(
  gradient: Callable[[optax.Params], optax.Updates], current: optax.Params
) -> _types.Closure:
  """Returns the gradient function for params in which ``optax.masked`` may have hidden leaves.

  A hidden leaf has its value in `current`, and stays hidden in the gradient.
  """

  # A transformation may pass further arguments, such as `optax.contrib.sam` the number of its inner
  # step; these are ignored.
  def grad_fn(params: optax.Params, *_: Any) -> optax.Updates:
    return _masks.mask_like(gradient(_masks.fill_masked(params, current)), params)

  return grad_fn

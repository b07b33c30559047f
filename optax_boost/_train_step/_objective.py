"""The loss of one step and its gradient, as functions of the params."""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost._foundation import _extra_args, _masks, _types
from optax_boost._trace import _frozen_scans
from optax_boost._train_step import _state_requests, _traced_loss


@dataclasses.dataclass(frozen=True, eq=False)
class Objective:
  """The loss, and the gradient of it that the optimizer state asks for.

  Attributes:
    loss: from params to the loss, and aux: the user's function, or the program traced from it.
    traced: the program, for layers of a leaf of which some are frozen.
    scaling: the scale of the loss that is differentiated; None: 1.
    freezing: the layers without a gradient; None: all have one.
    must_depend: whether it is an error if no gradient reaches the params.
  """

  loss: Callable[[optax.Params], tuple[jax.Array, Any]]
  traced: _traced_loss.TracedLoss
  scaling: _state_requests.ScaleRequest | None
  freezing: _state_requests.FreezeRequest | None
  must_depend: bool = False

  def value_and_grad(self, params: optax.Params) -> tuple[tuple[jax.Array, Any], optax.Updates]:
    """The loss with aux, and the scaled gradient, zero for frozen leaves and layers."""
    loss = self._without_frozen_gradients()
    # A loss may depend, in a step, on layers alone that are frozen in it.
    if self.must_depend and (self.freezing is None or self.freezing.frozen() is None):
      loss = _depending(loss)
    if self.scaling is None:
      output, gradients = jax.value_and_grad(loss, has_aux=True)(params)
    else:
      apply_scale = self.scaling.apply

      def scaled(params: optax.Params) -> tuple[jax.Array, Any]:
        value, aux = loss(params)
        return apply_scale(value), (value, aux)

      gradients, output = jax.grad(scaled, has_aux=True)(params)
    gradients = steepest_ascent(gradients)
    if self.scaling is not None:
      gradients = self.scaling.unscale_unseen(gradients)
    # Those of a known depth are zero by now.
    if self.freezing is not None and self.freezing.frozen() is None:
      gradients = self.freezing.zero_frozen(gradients)
    return output, gradients

  def _without_frozen_gradients(self) -> Callable[[optax.Params], tuple[jax.Array, Any]]:
    """The loss, with a derivative of zero for leaves and layers that are known to be frozen."""
    frozen = None if self.freezing is None else self.freezing.frozen()
    if frozen is None or not any(map(np.any, frozen)):
      return self.loss
    is_cut = any(np.any(flags) and not np.all(flags) for flags in frozen)

    def loss(params: optax.Params) -> tuple[jax.Array, Any]:
      leaves, structure = jax.tree.flatten(params)
      held = jax.lax.stop_gradient(leaves)
      cut = list(map(_frozen_scans.in_parts, held, leaves, frozen))
      if is_cut:
        return self.traced.run_cut(params, cut)
      return self.loss(jax.tree.unflatten(structure, cut))

    return loss

  def closures(self, current: optax.Params) -> dict[str, _types.Closure]:
    """The loss and its gradient as extra arguments of ``update``: functions of params."""

    @_extra_args.ignoring_closures
    def value_fn(params: optax.Params) -> jax.Array:
      return self.loss(_masks.fill_masked(params, current))[0]

    grad_fn = accept_masked(lambda params: self.value_and_grad(params)[1], current)
    return {"value_fn": value_fn, "grad_fn": grad_fn, "obj_fn": value_fn}


def _depending(
  loss: Callable[[optax.Params], tuple[jax.Array, Any]],
) -> Callable[[optax.Params], tuple[jax.Array, Any]]:
  """The loss, to be differentiated; ValueError if no gradient of it reaches the params."""

  def checked(params: optax.Params) -> tuple[jax.Array, Any]:
    value, aux = loss(params)
    # JAX differentiates what it has wrapped as it has wrapped the params.
    if type(value) not in map(type, jax.tree.leaves(params)):
      raise ValueError(
        "`loss_fn` must compute the loss from the params that it is given; no gradient of it"
        " reaches them, so nothing would be trained. Does it use a model of an outer scope, or"
        " `jax.lax.stop_gradient`?"
      )
    return value, aux

  return checked


def steepest_ascent(gradients: _types.SameTree) -> _types.SameTree:
  """Gradients of ``jax.grad`` as optimizers take them: conjugated where params are complex.

  ``jax.grad`` of a real loss gives the conjugate of the direction in which the loss grows fastest.
  """
  return jax.tree.map(lambda g: jnp.conj(g) if jnp.iscomplexobj(g) else g, gradients)


def accept_masked(
  gradient: Callable[[optax.Params], optax.Updates], current: optax.Params
) -> _types.Closure:
  """A gradient function of params in which ``optax.masked`` may have hidden leaves."""

  # Transformations may pass more than params, as `optax.contrib.sam` the number of its inner step.
  def grad_fn(params: optax.Params, *_: Any) -> optax.Updates:
    return _masks.mask_like(gradient(_masks.fill_masked(params, current)), params)

  return grad_fn

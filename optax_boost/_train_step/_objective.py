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
  """The loss of a step and its gradient, with loss scale and frozen layers.

  Attributes:
    loss: a function from params to ``(loss, aux)``: the user's loss, or the jaxpr traced from it.
    traced: the loss as a jaxpr, which is used if only some of the layers in a leaf are frozen.
    scaling: the loss scale, or None.
    freezing: the frozen layers, or None.
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
    """Returns ``(loss, aux)`` and the scaled loss's gradient, which is zero in frozen layers."""
    loss = self._without_frozen_gradients()
    # If the number of frozen groups is static, the loss has no gradient in frozen layers. The loss
    # is not checked then, since it may depend on frozen layers only.
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
    # If the number of frozen groups is static, gradients in frozen layers are zero already, since
    # `_without_frozen_gradients` has stopped them.
    if self.freezing is not None and self.freezing.frozen() is None:
      gradients = self.freezing.zero_frozen(gradients)
    return output, gradients

  def _without_frozen_gradients(self) -> LossWithAux:
    """Returns the loss as a function whose gradient is zero in frozen layers.

    If no layer is frozen, or if the number of frozen groups is traced, returns `loss` unchanged.
    """
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
    """Returns, by name, the extra arguments of ``update`` that are functions of params.

    If ``optax.masked`` hides leaves of the params that such a function gets, the function uses the
    leaves of `current` in their place.
    """

    @_extra_args.accept_extra_args
    def value_fn(params: optax.Params) -> _types.FloatScalar:
      return self.loss(_masks.fill_masked(params, current))[0]

    grad_fn = accept_masked(lambda params: self.value_and_grad(params)[1], current)
    return {"value_fn": value_fn, "grad_fn": grad_fn, "obj_fn": value_fn}


def _check_dependence(
  loss: LossWithAux,
) -> LossWithAux:
  """Returns `loss` with a check that it depends on the params.

  If it does not, the returned function raises ValueError under ``jax.grad``.
  """

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
  """Conjugates complex gradients: ``jax.grad`` returns the conjugate of the direction of ascent."""
  return jax.tree.map(lambda g: jnp.conj(g) if jnp.iscomplexobj(g) else g, gradients)


def accept_masked(
  gradient: Callable[[optax.Params], optax.Updates], current: optax.Params
) -> _types.Closure:
  """Returns `gradient` as a function that also takes params with leaves hidden by ``optax.masked``.

  For a hidden leaf, `gradient` gets the leaf of `current`; in the result, the leaf is hidden again.
  """

  # Further arguments are ignored. `optax.contrib.sam`, for example, passes the number of its inner
  # step.
  def grad_fn(params: optax.Params, *_: Any) -> optax.Updates:
    return _masks.mask_like(gradient(_masks.fill_masked(params, current)), params)

  return grad_fn

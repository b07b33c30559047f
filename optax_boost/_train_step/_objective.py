"""The loss of one step and its gradient, as functions of the params."""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost._foundation import _extra_args, _masks, _types
from optax_boost._step import _addition
from optax_boost._trace import _frozen_scans, _layer_groups, _summing_scans
from optax_boost._train_step import _frozen_layers, _replaced_values, _traced_loss

# A function from ``(params, values)`` to ``(loss, aux)``, where the gradient replaces the values.
LossWithAux: TypeAlias = Callable[[_traced_loss.Differentiated], tuple[_types.FloatScalar, Any]]


@dataclasses.dataclass(frozen=True, eq=False)
class Objective:
  """The loss of a step and its gradient, with loss scale and frozen layers.

  Attributes:
    loss: a function from ``(params, values)`` to ``(loss, aux)``: the user's loss, or the jaxpr
      traced from it.
    traced: the loss as a jaxpr, which is used if only some of the layers in a leaf are frozen.
    values: the values that the gradient replaces (:mod:`optax_boost._train_step._replaced_values`).
    value_groups: the group of the layer of each value.
    loss_scale: scalar float32, the factor of the loss that is differentiated, or None.
    freezing: the frozen layers, or None.
    must_depend: whether to raise an error if the loss does not depend on the params.
  """

  loss: LossWithAux
  traced: _traced_loss.TracedLoss
  values: Sequence[jax.Array]
  value_groups: Sequence[_layer_groups.GroupNumber]
  loss_scale: _types.FloatScalar | None
  freezing: _frozen_layers.FrozenLayers | None
  must_depend: bool = False

  @property
  def scalars(self) -> tuple[_types.FloatScalar | None, Any]:
    """Returns the loss scale, and the number of frozen groups if it is traced."""
    is_static = self.freezing is None or self.freezing.is_static
    return self.loss_scale, None if is_static or self.freezing is None else self.freezing.depth

  def at(
    self, inputs: _traced_loss.Differentiated, arguments: tuple[Any, ...], scalars: tuple[Any, Any]
  ) -> "Objective":
    """Returns the objective for other inputs and arguments of the loss, and other `scalars`."""
    traced, (loss_scale, depth) = self.traced.at(inputs, arguments), scalars
    freezing = self.freezing
    if freezing is not None and depth is not None:
      freezing = dataclasses.replace(freezing, depth=depth)
    return dataclasses.replace(
      self,
      loss=traced.run,
      traced=traced,
      values=inputs[1],
      loss_scale=loss_scale,
      freezing=freezing,
    )

  def value_and_grad(
    self, params: optax.Params
  ) -> tuple[tuple[_types.FloatScalar, Any], optax.Updates, list[jax.Array]]:
    """Returns ``(loss, aux)``, the scaled loss's gradient, and the new values that it replaces.

    The gradient is zero in frozen layers, and the values of frozen layers are the old ones.
    """
    loss = self._without_frozen_gradients(params)
    if self.must_depend:
      loss = _check_dependence(loss)
    if self.loss_scale is None:
      output, derivatives = jax.value_and_grad(loss, has_aux=True)((params, self.values))
    else:
      loss_scale = self.loss_scale

      def scaled(inputs: _traced_loss.Differentiated) -> tuple[_types.FloatScalar, Any]:
        value, aux = loss(inputs)
        # In float32, since the product may overflow in float16.
        return value.astype(jnp.float32) * loss_scale, (value, aux)

      derivatives, output = jax.grad(scaled, has_aux=True)((params, self.values))
    gradients, new_values = derivatives
    gradients = steepest_ascent(gradients)
    if self.loss_scale is not None and self.values:
      # Quantization clips infinite gradients to finite ones, so the gradients of the params may not
      # show that the scaled loss has overflowed.
      overflow = _replaced_values.lost(self.values, new_values)
      nan = lambda g: jnp.where(overflow, jnp.asarray(jnp.nan, g.dtype), g)  # noqa: E731
      gradients = jax.tree.map(nan, gradients)
    # If the number of frozen groups is static, gradients in frozen layers are zero already, since
    # `_without_frozen_gradients` has stopped them.
    if self.freezing is not None and not self.freezing.is_static:
      gradients = self.freezing.zero_frozen(gradients)
    return (
      output,
      gradients,
      list(map(self._keep_frozen, self.value_groups, self.values, new_values)),
    )

  def value_and_added(
    self,
    params: optax.Params,
    addition: _addition.Addition,
    extra_args_of: Callable[[Any], _types.ExtraArgs],
  ) -> tuple[tuple[_types.FloatScalar, Any], _addition.Added, list[jax.Array]]:
    """Returns ``(loss, aux)``, the window's sum with the gradient, and the new values.

    The gradient is added inside of the backward pass, so it never exists as a whole.
    `extra_args_of` takes aux, and returns the extra arguments of ``update`` that the window reads.
    """
    sums, structure = jax.tree.flatten(
      addition.state.accumulation.accumulator, is_leaf=_masks.is_masked
    )
    sums = [None if _masks.is_masked(total) else total for total in sums]
    count = len(sums)
    frozen = self.frozen(params)

    def add(total: jax.Array, g: jax.Array, scalars: Any) -> tuple[jax.Array, Any]:
      return addition.add(total, steepest_ascent(g), scalars)

    def loss(tokens: _summing_scans.Tokens, values: Sequence[jax.Array]) -> Any:
      arguments = list(map(_frozen_scans.split_frozen, values, frozen[count:]))
      (value, aux), passed = self.traced.run_with_tokens(
        params, arguments, tokens, add, frozen[:count], once=addition.measures
      )
      if self.must_depend:
        require_dependence(value, tokens)
      scaled = value if self.loss_scale is None else value.astype(jnp.float32) * self.loss_scale
      return (scaled, passed), (value, aux)

    # Forward, tokens and scalars may have any values.
    tokens = _summing_scans.Tokens(sums, addition.scalars({}))
    (scaled, _), pull, output = jax.vjp(loss, tokens, self.values, has_aux=True)
    scalars = addition.scalars(extra_args_of(output[1]))
    tokens, new_values = pull((jnp.ones_like(scaled), tokens._replace(scalars=scalars)))
    kept = [optax.MaskedNode() if total is None else total for total in tokens.arrays]
    overflows: _types.Condition = False
    if self.loss_scale is not None and self.values:
      overflows = _replaced_values.lost(self.values, new_values)
    new_values = list(map(self._keep_frozen, self.value_groups, self.values, new_values))
    *_, squares = tokens.scalars
    return (
      output,
      _addition.Added(jax.tree.unflatten(structure, kept), squares, overflows),
      new_values,
    )

  def _keep_frozen(
    self, group: _layer_groups.GroupNumber, old: jax.Array, new: jax.Array
  ) -> jax.Array:
    """Returns the new value; the old one in frozen layers, or if the loss does not use it."""
    new = _replaced_values.keep_unused(old, new)
    if self.freezing is None:
      return new
    return _layer_groups.select_frozen(self.freezing.depth, group, old, new)

  def frozen(self, params: optax.Params) -> list[Any]:
    """Returns for each leaf of `params`, then for each value, what is statically frozen."""
    if self.freezing is None or not self.freezing.is_static:
      return [False] * (len(jax.tree.leaves(params)) + len(self.values))
    return [group < self.freezing.depth for group in (*self.freezing.groups, *self.value_groups)]

  def _without_frozen_gradients(self, params: optax.Params) -> LossWithAux:
    """Returns the loss as a function whose gradient is zero in frozen layers.

    If no layer is frozen, or if the number of frozen groups is traced, returns `loss` unchanged.
    """
    frozen = self.frozen(params)
    if not any(map(np.any, frozen)):
      return self.loss
    freezes_parts = any(np.any(flags) and not np.all(flags) for flags in frozen)

    def loss(inputs: _traced_loss.Differentiated) -> tuple[_types.FloatScalar, Any]:
      leaves, structure = jax.tree.flatten(inputs)
      leaves = list(map(_frozen_scans.split_frozen, leaves, frozen))
      if freezes_parts:
        return self.traced.run_with_leaves(inputs, leaves)
      return self.loss(jax.tree.unflatten(structure, leaves))

    return loss

  def closures(self, current: optax.Params) -> dict[str, _types.Closure]:
    """Returns, by name, the extra arguments of ``update`` that are functions of params.

    If ``optax.masked`` hides leaves of the params that such a function gets, the function uses the
    leaves of `current` in their place.
    """

    @_extra_args.accept_extra_args
    def value_fn(params: optax.Params) -> _types.FloatScalar:
      return self.loss((_masks.fill_masked(params, current), self.values))[0]

    grad_fn = accept_masked(lambda params: self.value_and_grad(params)[1], current)
    return {"value_fn": value_fn, "grad_fn": grad_fn, "obj_fn": value_fn}


def _check_dependence(
  loss: LossWithAux,
) -> LossWithAux:
  """Returns `loss` with a check that it depends on the params.

  If it does not, the returned function raises ValueError under ``jax.grad``.
  """

  def checked(inputs: _traced_loss.Differentiated) -> tuple[_types.FloatScalar, Any]:
    value, aux = loss(inputs)
    require_dependence(value, inputs)
    return value, aux

  return checked


def require_dependence(value: jax.Array, inputs: _types.Tree) -> None:
  """Raises ValueError if no derivative by `inputs` reaches a loss."""
  # Under `jax.grad`, the params and all values computed from the params are tracers of one type.
  if type(value) not in map(type, jax.tree.leaves(inputs)):
    raise ValueError(
      "`loss_fn` must compute the loss from the params that it is given; no gradient of it"
      " reaches them, so nothing would be trained. Does it use a model of an outer scope, or"
      " `jax.lax.stop_gradient`? In NNX, does `wrt` of the optimizer select variables that the"
      " loss uses?"
    )


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

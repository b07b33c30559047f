"""The gradient that an optimizer state asks for: scaled, and without frozen layers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost import _arrays
from optax_boost import _groups
from optax_boost import _protocol


class Requests:
  """What an optimizer state asks of the gradient.

  Attributes:
    opt_state: the state; a known depth is a constant in it, so that ``update`` computes nothing for
      frozen leaves either.
    groups: the group of each leaf; those that the method does not see are past the last. None:
      nothing is frozen.
    depth: how many groups are frozen, an int32 of NumPy if the step is compiled for it.
  """

  def __init__(
    self,
    tx: optax.GradientTransformation,
    opt_state: optax.OptState,
    params: optax.Params,
    depth: int | None,
  ):
    scaling = _protocol.state_asking(opt_state, _protocol.LOSS_SCALE)
    freezing = _protocol.state_asking(opt_state, _protocol.FROZEN_GROUPS)
    self.opt_state = opt_state
    self.groups: list[_groups.GroupNumber] | None = None
    self.depth: Any = None
    self._loss_scale = None if scaling is None else scaling.loss_scale
    self._is_scaled = _protocol.seen_leaves(scaling, params)
    if scaling is not None:
      _protocol.check_full_gradients(opt_state)
    if freezing is not None:
      self.groups = _group_numbers(tx, freezing, params)
      self.depth = freezing.frozen_groups if depth is None else np.int32(depth)
      structure: Any
      leaves, structure = jax.tree.flatten(opt_state)
      traced = freezing.frozen_groups
      self.opt_state = jax.tree.unflatten(
        structure, [self.depth if leaf is traced else leaf for leaf in leaves]
      )

  def gradient(
    self, loss: Callable[..., Any], params: optax.Params
  ) -> tuple[optax.Updates, tuple[jax.Array, Any]]:
    """The scaled gradient, zero for frozen leaves, and the output of the loss."""
    numbers = self.groups or [0] * len(self._is_scaled)
    is_known = self.groups is not None and isinstance(self.depth, np.integer)
    frozen = [number < self.depth for number in numbers] if is_known else None

    def scaled(params: optax.Params) -> tuple[jax.Array, Any]:
      value, rest = loss(params, frozen)
      # In float32: a float16 loss times its scale would overflow.
      scale = self._loss_scale
      return value if scale is None else value.astype(jnp.float32) * scale, (value, rest)

    def finish(g: jax.Array, number: _groups.GroupNumber, is_scaled: bool) -> jax.Array:
      if self._loss_scale is not None and not is_scaled:
        g = (_arrays.widen(g) / self._loss_scale).astype(g.dtype)
      if self.groups is None or is_known:
        return g
      return _groups.select_frozen(self.depth, number, jnp.zeros_like(g), g)

    grad, output = jax.grad(scaled, has_aux=True)(params)
    leaves, structure = jax.tree.flatten(grad)
    return jax.tree.unflatten(structure, map(finish, leaves, numbers, self._is_scaled)), output


def _group_numbers(
  tx: optax.GradientTransformation, state: Any, params: optax.Params
) -> list[_groups.GroupNumber]:
  assignments = _protocol.attributes_of(tx, _protocol.FROZEN_GROUPS)
  if len(assignments) != 1:
    raise ValueError(
      f"`make_train_step` needs to find the groups of {type(state).__name__} in the transformation;"
      f" it found {len(assignments)}. A wrapper of your own must hold the transformation that it"
      " wraps in a closure, an attribute or a `functools.partial`, and"
      " `optax.inject_hyperparams` belongs inside `freeze_layers`."
    )
  structure: Any
  leaves, structure = jax.tree.flatten(params)
  seen = _protocol.seen_leaves(state, params)
  pairs = zip(leaves, seen, strict=True)
  visible = jax.tree.unflatten(structure, [x if s else optax.MaskedNode() for x, s in pairs])
  numbers = iter(jax.tree.leaves(assignments[0].number(visible)))
  return [next(numbers) if s else assignments[0].num_groups for s in seen]

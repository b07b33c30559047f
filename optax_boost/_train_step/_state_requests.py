"""The loss scale and the frozen layers that an optimizer state requests from the train step.

The class of a state declares its requests (:mod:`optax_boost._form._protocol`).
"""

from collections.abc import Sequence
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost._form import _protocol
from optax_boost._foundation import _trees, _types
from optax_boost._trace import _layer_groups


@dataclasses.dataclass(frozen=True)
class ScaleRequest:
  """A loss scale, by which the train step multiplies the loss before it differentiates the loss.

  Attributes:
    scale: scalar float32.
  """

  scale: _types.FloatScalar

  def apply(self, loss: _types.FloatScalar) -> _types.FloatScalar:
    """Returns the loss times the scale, in float32, since the product may overflow in float16."""
    return loss.astype(jnp.float32) * self.scale


@dataclasses.dataclass(frozen=True)
class FreezeRequest:
  """The frozen layers: the first groups of layers, whose gradients are zero.

  If `depth` is static, a step computes no backward pass for them.

  Attributes:
    groups: the number of each leaf's group, or of the group of each of its layers.
    depth: how many groups are frozen, as a NumPy int32 if the number is static, else traced.
  """

  groups: Sequence[_layer_groups.GroupNumber]
  depth: _types.IntScalar | np.integer

  @property
  def is_static(self) -> bool:
    """Returns whether `depth` is static."""
    return isinstance(self.depth, np.integer)

  def num_frozen(self) -> _types.IntScalar:
    """Returns the number of frozen groups, a scalar int32; groups without layers don't count."""
    numbers = np.array(sorted({int(n) for group in self.groups for n in np.ravel(group)}), np.int32)
    return jnp.sum(numbers < self.depth, dtype=jnp.int32)

  def zero_frozen(self, gradients: optax.Updates) -> optax.Updates:
    """Returns the gradients, with zeros for frozen leaves and layers."""

    def zero(g: jax.Array, group: _layer_groups.GroupNumber) -> jax.Array:
      return _layer_groups.select_frozen(self.depth, group, jnp.zeros_like(g), g)

    return _trees.map_with(zero, gradients, self.groups)


def scale_request(opt_state: optax.OptState) -> ScaleRequest | None:
  """Returns the requested loss scale, or None; raises ValueError if several states request one."""
  state = _protocol.requesting_state(opt_state, _protocol.LOSS_SCALE)
  return None if state is None else ScaleRequest(state.loss_scale)


def freeze_request(
  opt_state: optax.OptState, params: optax.Params, depth: int | None
) -> tuple[FreezeRequest | None, optax.OptState]:
  """Finds the layers that an optimizer state asks the train step to freeze.

  The state holds the number of frozen groups as an array. `depth` is the same number, which the
  caller has read before the step, or None if the caller could not read it.

  Returns:
    The request, or None if no state in `opt_state` requests frozen layers; and the optimizer state.
    Unless `depth` is None, the constant `depth` replaces the array in this state, so that
    ``update`` computes nothing for frozen leaves.

  Raises:
    ValueError: several states request frozen layers.
  """
  state = _protocol.requesting_state(opt_state, _protocol.FROZEN_GROUPS)
  if state is None:
    return None, opt_state
  number_leaves = _layer_groups.numbering(state.groups, "freeze_layers")
  groups = jax.tree.leaves(number_leaves(params))
  traced = state.frozen_groups
  if depth is None:
    return FreezeRequest(groups, traced), opt_state
  constant = np.int32(depth)
  opt_state = jax.tree.map(lambda leaf: constant if leaf is traced else leaf, opt_state)
  return FreezeRequest(groups, constant), opt_state

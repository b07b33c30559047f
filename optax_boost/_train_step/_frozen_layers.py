""":class:`FrozenLayers`: the layers that a step freezes, which have no backward pass."""

from collections.abc import Sequence
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost._foundation import _trees, _types
from optax_boost._step import _slots
from optax_boost._trace import _layer_groups


@dataclasses.dataclass(frozen=True)
class FrozenLayers:
  """The first groups of layers, whose gradients are zero in a step.

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


def frozen_layers(
  step: _slots.Step | None,
  opt_state: optax.OptState,
  params: optax.Params,
  depth: int | None,
) -> FrozenLayers | None:
  """Returns the layers that a step with :func:`freeze_layers` freezes, or None.

  `depth` is the number of frozen groups, or None if the number is traced.
  """
  if step is None or step.freezing is None:
    return None
  groups = jax.tree.leaves(step.freezing.number_leaves(params))
  if depth is not None:
    return FrozenLayers(groups, np.int32(depth))
  return FrozenLayers(groups, step.freezing.schedule.frozen_groups(opt_state.count))

r"""Layer-wise decay of the learning rate: the first layers of a pretrained model move least.

u <- decay^(G - 1 - i) u    for the leaves and layers of group i among 0, ..., G - 1
"""

from collections.abc import Callable
import dataclasses

import jax
import optax

from optax_boost._foundation import _arrays, _checks, _types
from optax_boost._step import _wrapper
from optax_boost._trace import _layer_groups

_METHOD = "layerwise_decay"


def layerwise_decay(
  inner: optax.GradientTransformation,
  groups: _layer_groups.Groups,
  decay: jax.typing.ArrayLike = 0.75,
) -> optax.GradientTransformationExtraArgs:
  r"""Multiplies the updates of each group of layers by a factor, which is 1 for the last group.

  .. math::
    u \leftarrow \text{decay}^{G - 1 - i} \, u

  for the updates :math:`u` of `inner` in group i of G. So the learning rate and the weight decay in
  `inner` are scaled. An :func:`average_params` or :func:`master_weights` in `inner` gets the params
  to which the scaled updates have been added.

  Args:
    inner: the optimizer.
    groups: as for :func:`freeze_layers`. With a :class:`LayerGroups`, the layers of a stacked leaf
      (``nn.scan``) may have different factors.
    decay: the factor of a group divided by the factor of the next group, above 0 and at most 1.
      Raising it trains the first layers faster.

  Returns:
    An :class:`optax.GradientTransformationExtraArgs`. Updates, maybe complex, keep their dtype.

  Raises:
    ValueError: `inner` chooses the new params itself, as :func:`sgperm` and :func:`laperm` do.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_boost
    >>> tx = optax_boost.layerwise_decay(optax.sgd(1.0), ["embed", "body", "head"], 0.5)
    >>> grads = {"embed": jnp.ones(1), "body": jnp.ones(1), "head": jnp.ones(1)}
    >>> updates, _ = tx.update(grads, tx.init(grads))
    >>> [updates[name].item() for name in ("embed", "body", "head")]
    [-0.25, -0.5, -1.0]

  References:
    Clark, Luong, Le, Manning, `ELECTRA <https://arxiv.org/abs/2003.10555>`_, 2020; Bao, Dong, Piao,
    Wei, `BEiT <https://arxiv.org/abs/2106.08254>`_, 2021: decays of 0.65 to 0.75, as in ``timm``.
  """
  _checks.check_number("decay", decay, above=0.0, maximum=1.0)
  number_leaves = _layer_groups.numbering(groups, _METHOD)
  slot = LayerwiseDecay(number_leaves, _layer_groups.count_groups(groups), decay)
  return _wrapper.fill(inner, layer_rates=slot)


@dataclasses.dataclass(frozen=True, eq=False)
class LayerwiseDecay:
  """The slot of :func:`layerwise_decay`."""

  number_leaves: Callable[[_types.Tree], _types.Tree]
  num_groups: int
  decay: jax.typing.ArrayLike
  method = _METHOD

  def scaled(self, updates: optax.Updates, group_numbers: _types.Tree) -> optax.Updates:
    """Returns the updates times the factor of each group."""

    def scale(i: _layer_groups.GroupNumber, u: jax.Array) -> jax.Array:
      return (_arrays.widen(u) * self.decay ** (self.num_groups - 1 - i)).astype(u.dtype)

    return jax.tree.map(scale, group_numbers, updates)

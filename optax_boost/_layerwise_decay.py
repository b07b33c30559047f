r"""Layer-wise decay of the learning rate: the first layers of a pretrained model move least.

u <- decay^(G - 1 - i) u    for the leaves and layers of group i among 0, ..., G - 1
"""

from typing import Any
from typing import NamedTuple

import jax
import optax

from optax_boost import _arrays
from optax_boost import _base
from optax_boost import _groups
from optax_boost import _protocol
from optax_boost import _transformation

_METHOD = "layerwise_decay"


@_protocol.declares(scales=("layerwise_decay",))
class LayerwiseDecayState(NamedTuple):
  """State of :func:`layerwise_decay`. Its type lets :func:`make_train_step` check a chain's order.

  Attributes: none.
  """


def layerwise_decay(
  groups: _groups.Groups, decay: jax.typing.ArrayLike = 0.75
) -> optax.GradientTransformationExtraArgs:
  r"""Multiplies the updates of each group by a power of `decay`, of the last group by one.

  .. math::
    u \leftarrow \text{decay}^{G - 1 - i} \, u

  for group i of G. Put it after the optimizer, so that it scales the learning rate, and the weight
  decay that the optimizer adds: ``optax.chain(optax.adamw(rate), layerwise_decay(groups))``. Before
  an optimizer that normalizes its gradients, as Adam, it would do nothing:
  :func:`make_train_step` and :func:`apply_gradients` refuse that.

  Args:
    groups: a :class:`LayerGroups`, in which the layers of a stacked leaf have factors of their own;
      or regular expressions, one per group in the order of the forward pass, that match whole
      segments of the leaves' paths: ``"blocks/1"`` is not found in ``blocks/10``. A leaf that two
      match is an error; one that none matches is in the last group.
    decay: the factor from a group to the one before it, above 0 and at most 1. Raising it trains
      the first layers faster.

  Returns:
    An :class:`optax.GradientTransformationExtraArgs` without state. Updates keep their dtype.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_boost
    >>> decay = optax_boost.layerwise_decay(["embed", "body", "head"], 0.5)
    >>> tx = optax.chain(optax.sgd(1.0), decay)
    >>> grads = {"embed": jnp.ones(1), "body": jnp.ones(1), "head": jnp.ones(1)}
    >>> updates, _ = tx.update(grads, tx.init(grads))
    >>> [updates[name].item() for name in ("embed", "body", "head")]
    [-0.25, -0.5, -1.0]

  References:
    Clark, Luong, Le, Manning, `ELECTRA <https://arxiv.org/abs/2003.10555>`_, 2020; Bao, Dong, Piao,
    Wei, `BEiT <https://arxiv.org/abs/2106.08254>`_, 2021, whose 0.65 to 0.75 ``timm`` took over.
  """
  _base.check_number("decay", decay, positive=True, maximum=1.0)
  last = _groups.count_groups(groups) - 1
  number = _groups.numbering(groups, _METHOD)

  def init(params: optax.Params) -> LayerwiseDecayState:
    number(params)
    return LayerwiseDecayState()

  def step(updates: optax.Updates, state: Any, params: Any) -> tuple[optax.Updates, Any]:
    def scaled(i: Any, u: jax.Array) -> jax.Array:
      return (_arrays.widen(u) * decay ** (last - i)).astype(u.dtype)

    return jax.tree.map(scaled, number(updates), updates), state

  return _transformation.transformation(
    _METHOD, LayerwiseDecayState, init, step, allows_complex=True
  )

"""Groups of layers and stacked layers, read from the trace of a Linen module's loss."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from flax import linen as nn
import jax

from optax_boost import _base
from optax_boost import _groups
from optax_boost import _layers
from optax_boost.linen import _adapter


def layer_groups(
  loss_fn: Callable[..., Any],
  module: nn.Module,
  variables: Any,
  batch: Any,
  rng: jax.Array | None = None,
  *,
  rngs: Sequence[str] = ("dropout",),
  num_groups: int | None = None,
  overrides: Mapping[str, int] | None = None,
  data: _base.LeafSelector = None,
) -> _groups.LayerGroups:
  """Groups a model's params along the forward pass: :func:`optax_boost.layer_groups` for Linen.

  Collections other than ``params`` are no data.

  Args:
    loss_fn: ``loss_fn(model, batch)``, as for :func:`make_train_step`.
    module: the Linen module.
    variables: the output of ``module.init``.
    batch: a batch.
    rng: a key, if the module draws.
    rngs: the names of the module's rng streams.
    num_groups: see :func:`optax_boost.layer_groups`, as for the rest.
    overrides: group by regular expression.
    data: which leaves of `batch` are data; None: all of them.

  Returns:
    A :class:`optax_boost.LayerGroups`.

  Raises:
    ValueError: as :func:`optax_boost.layer_groups`; or `variables` has no collection ``params``.
    TypeError: as :func:`optax_boost.layer_groups`; or `module` is no Linen module.

  Examples:
    >>> from flax import linen as nn
    >>> import jax, jax.numpy as jnp, optax_boost.linen
    >>> module, x = nn.Sequential([nn.Dense(4), nn.Dense(1)]), jnp.ones((2, 3))
    >>> loss_fn = lambda model, x: jnp.mean(model(x))
    >>> variables = module.init(jax.random.key(0), x)
    >>> print(optax_boost.linen.layer_groups(loss_fn, module, variables, x, num_groups=2))
    group 0: 16 parameters (76.2 %): layers_0/kernel, layers_0/bias
    group 1: 5 parameters (23.8 %), never frozen: layers_1/kernel, layers_1/bias
  """
  loss, params, collections = _adapter.adapt(module, loss_fn, variables, rng, rngs)
  is_data = [*_groups.select_data(batch, data), *[False] * len(jax.tree.leaves(rng))]
  args = (batch, rng)
  return _groups.group_by_use(
    loss, params, collections, args, num_groups=num_groups, overrides=overrides, is_data=is_data
  )


def layer_axes(
  loss_fn: Callable[..., Any],
  module: nn.Module,
  variables: Any,
  batch: Any,
  rng: jax.Array | None = None,
  *,
  rngs: Sequence[str] = ("dropout",),
) -> _layers.Layers:
  """Reads what the axes of a model's params are: :func:`optax_boost.layer_axes` for Linen.

  Arguments as for :func:`layer_groups`.

  Returns:
    A description of all params, as :func:`optax_boost.layer_axes`.

  Raises:
    ValueError: `variables` has no collection ``params``.
    TypeError: an argument is of the wrong kind.

  Examples:
    >>> from flax import linen as nn
    >>> import jax, jax.numpy as jnp, optax_boost.linen
    >>> class Block(nn.Module):
    ...   @nn.compact
    ...   def __call__(self, x, _):
    ...     return nn.tanh(nn.Dense(8)(x)), None
    >>> axes = {"params": 0}
    >>> module = nn.scan(Block, variable_axes=axes, split_rngs={"params": True}, length=3)()
    >>> loss_fn = lambda model, x: jnp.mean(model(x, None)[0])
    >>> x = jnp.ones((2, 8))
    >>> variables = module.init(jax.random.key(0), x, None)
    >>> print(optax_boost.linen.layer_axes(loss_fn, module, variables, x))
    Dense_0/bias: layers (0,), outputs (1,)
    Dense_0/kernel: layers (0,), fan-in (1,), outputs (2,)
  """
  loss, params, collections = _adapter.adapt(module, loss_fn, variables, rng, rngs)
  return _layers.read(loss, params, collections, (batch, rng))

"""Groups of layers and stacked layers, read from the trace of an NNX model's loss."""

from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

from flax import nnx

from optax_boost import _base
from optax_boost import _groups
from optax_boost import _layers
from optax_boost.nnx import _adapter


def layer_groups(
  loss_fn: Callable[..., Any],
  model: Any,
  *args: Any,
  wrt: Any = nnx.Param,
  num_groups: int | None = None,
  overrides: Mapping[str, int] | None = None,
  data: _base.LeafSelector = None,
) -> _groups.LayerGroups:
  """Groups a model's params along the forward pass: :func:`optax_boost.layer_groups` for NNX.

  Variables that are not trained (the base weights of LoRA, statistics) are no data.

  Args:
    loss_fn: ``loss_fn(model, *args)``.
    model: the model; it is not changed.
    *args: the loss's other arguments, one of which may be an ``nnx.Rngs``.
    wrt: the filter of the trained variables, as in ``nnx.Optimizer``.
    num_groups: see :func:`optax_boost.layer_groups`, as for the rest.
    overrides: group by regular expression.
    data: which of `args` are data; None: all of them.

  Returns:
    A :class:`optax_boost.LayerGroups`.

  Raises:
    ValueError: as :func:`optax_boost.layer_groups`; or `model` has no variables of `wrt`.
    TypeError: as :func:`optax_boost.layer_groups`.

  Examples:
    >>> from flax import nnx
    >>> import jax.numpy as jnp, optax_boost.nnx
    >>> rngs = nnx.Rngs(0)
    >>> model = nnx.Sequential(nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 1, rngs=rngs))
    >>> loss_fn = lambda model, x: jnp.mean(model(x))
    >>> print(optax_boost.nnx.layer_groups(loss_fn, model, jnp.ones((2, 3)), num_groups=2))
    group 0: 16 parameters (76.2 %): layers/0/kernel, layers/0/bias
    group 1: 5 parameters (23.8 %), never frozen: layers/1/kernel, layers/1/bias
  """
  loss, params, model_state, args = _adapter.adapt(loss_fn, model, wrt, args)
  is_data = _groups.select_data(args, data)
  return _groups.group_by_use(
    loss, params, model_state, args, num_groups=num_groups, overrides=overrides, is_data=is_data
  )


def layer_axes(
  loss_fn: Callable[..., Any], model: Any, *args: Any, wrt: Any = nnx.Param
) -> _layers.Layers:
  """Reads what the axes of a model's params are: :func:`optax_boost.layer_axes` for NNX.

  Arguments as for :func:`layer_groups`.

  Returns:
    A description of all params, as :func:`optax_boost.layer_axes`.

  Raises:
    ValueError: `model` has no variables of `wrt`.
    TypeError: an argument is of the wrong kind.

  Examples:
    >>> from flax import nnx
    >>> import jax, jax.numpy as jnp, optax_boost.nnx
    >>> make = nnx.vmap(lambda key: nnx.Linear(8, 8, rngs=nnx.Rngs(key)))
    >>> model = make(jax.random.split(jax.random.key(0), 3))
    >>> run = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    >>> loss_fn = lambda model, x: jnp.mean(run(x, model))
    >>> print(optax_boost.nnx.layer_axes(loss_fn, model, jnp.ones((2, 8))))
    bias: layers (0,), outputs (1,)
    kernel: layers (0,), fan-in (1,), outputs (2,)
  """
  loss, params, model_state, args = _adapter.adapt(loss_fn, model, wrt, args)
  return _layers.read(loss, params, model_state, args)

"""``split_loss``: the loss of a Linen module as a pure function of arrays."""

from collections.abc import Mapping, Sequence
from typing import Any

from flax import errors, linen as nn
import jax

from optax_boost._foundation import _checks, _types
from optax_boost._trace import _losses
from optax_boost.linen import _module


def split_loss(
  loss_fn: _types.LossFn,
  module: nn.Module,
  variables: Mapping[str, Any],
  *,
  rngs: Sequence[str] = ("dropout",),
) -> tuple[_types.LossFn, _types.Params, _module.Collections]:
  """Turns the loss of a module into a pure function of arrays.

  :func:`optax_boost.make_train_step`, :func:`optax_boost.layer_groups`,
  :func:`optax_boost.layer_axes` and :func:`optax_boost.race` take the result.

  After a call of the model, the loss can read the variables other than params in
  ``model.collections``. For example, ``sum(jax.tree.leaves(model.collections["losses"]))`` adds the
  values that ``self.sow("losses", ...)`` stored in this step. Collections that ``module.init`` did
  not return are dropped. Values of a ``sow`` with a `reduce_fn` are carried from step to step, like
  other variables.

  Args:
    loss_fn: ``loss_fn(model, batch)``, where ``model(x, ...)`` applies the module, and
      ``model.encode(x, ...)`` its method ``encode``; returns the scalar loss, or ``(loss, aux)``.
    module: the Linen module.
    variables: the output of ``module.init``.
    rngs: the names of the module's rng streams.

  Returns:
    ``(loss, params, model_state)``. ``loss(params, model_state, batch, rng)`` returns the output of
    `loss_fn` and the new `model_state`, a dict of the collections other than ``params``. The loss
    splits the key `rng` into the module's rng streams. A train step replaces the collection of
    fp8 layers, ``_overwrite_with_gradient``, by its gradient, as Flax's ``TrainState`` does.

  Raises:
    TypeError: an argument has a wrong type.
    ValueError: `variables` has no collection ``params``.

  Examples:
    >>> from flax import linen as nn
    >>> import jax, jax.numpy as jnp, optax, optax_boost.linen
    >>> module, x = nn.Dense(1), jnp.eye(3)
    >>> loss, params, model_state = optax_boost.linen.split_loss(
    ...   lambda model, x: jnp.mean((model(x) - 1) ** 2), module, module.init(jax.random.key(0), x)
    ... )
    >>> print(optax_boost.layer_axes(loss, params, model_state, x))
    bias: outputs (0,)
    kernel: fan-in (0,), outputs (1,)
    >>> step = optax_boost.make_train_step(loss, optax.lbfgs())
    >>> state = step.init(params, model_state)
    >>> for _ in range(8):
    ...   state, metrics = step(state, x)
    >>> y = module.apply({"params": state.params, **state.model_state}, x)
    >>> bool(jnp.allclose(y, 1, atol=1e-2))
    True
  """
  _module.check(module)
  _checks.check_callable("loss_fn", loss_fn, "loss_fn(model, batch)")
  sequence = isinstance(rngs, Sequence) and not isinstance(rngs, str)
  if not (sequence and all(isinstance(name, str) for name in rngs)):
    raise TypeError(
      "`rngs` must be a sequence of names of rng streams, as ('dropout',); got"
      f" {_checks.shorten(rngs)}."
    )

  def loss(
    params: _types.Params,
    model_state: _types.ModelState,
    batch: _types.Batch,
    rng: jax.Array | None = None,
  ) -> tuple[Any, _module.Collections]:
    if not isinstance(model_state, Mapping):
      raise TypeError(
        "`model_state` must be a dict of the module's collections; got"
        f" {_checks.shorten(model_state)}. Pass the one that `split_loss` returned:"
        " step.init(params, model_state)."
      )
    _checks.check_key("rng", rng)
    keys = {} if rng is None else dict(zip(rngs, jax.random.split(rng, len(rngs)), strict=True))
    model = _module.BoundModel(module, params, model_state, keys)
    try:
      output = loss_fn(model, batch)
    except errors.InvalidRngError as error:
      error.add_note(
        f"A train step gives keys to the streams {tuple(rngs)} if it gets one, as in `step(state,"
        " batch, key)`. `split_loss(..., rngs=...)` names other streams."
      )
      raise
    return output, model.collections

  return _losses.stateful(loss), *_module.split_variables(variables)

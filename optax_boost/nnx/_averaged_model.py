"""``averaged_model``: a copy of an NNX model with averaged params."""

from typing import Any

from flax import nnx

from optax_boost._foundation import _checks
from optax_boost._step import _average_params
from optax_boost.nnx import _model


def averaged_model(optimizer: nnx.Optimizer, model: nnx.Module) -> Any:
  """Copies a model, with the averages of :func:`optax_boost.average_params` in place of its params.

  Args:
    optimizer: the model's optimizer, whose transformation has an
      :func:`optax_boost.average_params`.
    model: the model; it is not changed.

  Returns:
    A model of the same class, with new arrays. Variables that the optimizer does not train are
    copied. But if the optimizer averages statistics (the argument `model_state` of
    :func:`optax_boost.average_params`), the copy has the averages. If it does not, estimate the
    statistics of BatchNorms with :func:`estimate_batch_stats`.

  Raises:
    ValueError: the optimizer keeps no averages, or averages of another model.

  Examples:
    >>> from flax import nnx
    >>> import jax.numpy as jnp, optax, optax_boost.nnx
    >>> model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    >>> tx = optax_boost.average_params(optax.sgd(0.1), start=10)
    >>> optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    >>> step = optax_boost.nnx.make_train_step(lambda model, x: jnp.mean(model(x) ** 2))
    >>> for _ in range(20):
    ...   metrics = step(model, optimizer, jnp.ones((4, 1)))
    >>> averaged = optax_boost.nnx.averaged_model(optimizer, model)
    >>> bool(abs(averaged.kernel[0, 0]) > abs(model.kernel[0, 0]))
    True
  """
  _model.check(model)
  _checks.check_type(
    "optimizer", optimizer, nnx.Optimizer, "what `nnx.Optimizer(model, tx, wrt=nnx.Param)` returns"
  )
  copy = _model.copy(model)
  _, params, collections = _model.split(optimizer.wrt, copy)
  opt_state = _model.as_pure(optimizer.opt_state)
  averages = _average_params.averaging_state(opt_state)
  if averages is not None and averages.statistics:
    collections = _average_params.averaged_model_state(opt_state, collections)
  _model.write(_average_params.averaged_params(opt_state, params), collections, copy)
  return copy

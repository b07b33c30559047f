"""Averaged params in an NNX model, and BatchNorm statistics estimated for them."""

from collections.abc import Callable
from collections.abc import Iterable
import functools
import operator
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from optax_boost import _average_params
from optax_boost import _base
from optax_boost import _full_gradient
from optax_boost import _tree
from optax_boost.nnx import _adapter
from optax_boost.nnx import _less_bn

_METHOD = "estimate_batch_stats"
# Of the uses of a BatchNorm in a forward pass.
_TOTALS = ("sum_of_means", "sum_of_vars", "uses")


def averaged_model(optimizer: nnx.Optimizer, model: Any) -> Any:
  """A copy of a model with the averages that :func:`optax_boost.average_params` keeps.

  Args:
    optimizer: the model's optimizer, made with a transformation that holds an
      :func:`optax_boost.average_params`.
    model: the model; it is not changed.

  Returns:
    A model of the same class, with arrays of its own. Variables that the optimizer does not train
    are those of `model`; estimate the statistics of its BatchNorms with
    :func:`estimate_batch_stats`.

  Raises:
    TypeError: an argument is of the wrong kind.
    ValueError: the optimizer keeps no averages, or those of another model.

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
  _adapter.check_model(model)
  _base.check_type(
    "optimizer", optimizer, nnx.Optimizer, "what `nnx.Optimizer(model, tx, wrt=nnx.Param)` returns"
  )
  copy = _less_bn.copy_model(model)
  _, params, others = _adapter.split(optimizer.wrt, copy)
  opt_state = _adapter.as_pure(optimizer.opt_state)
  _adapter.write(_average_params.averaged_params(opt_state, params), others, copy)
  return copy


def estimate_batch_stats(
  model: Any,
  batches: Iterable[Any],
  *,
  forward_fn: Callable[[Any, Any], Any] | None = None,
  weight_fn: Callable[[Any], Any] | None = None,
  progress: bool = False,
) -> Any:
  """Estimates the statistics of a model's BatchNorms anew, in one pass over batches.

  Needed where params did not come from training alone, as averages: the running statistics are then
  those of other params. The new statistics are the exact means, over all batches, of the batches'
  means and variances, and not exponential averages, in which the last batches count most. Of a
  BatchNorm that a forward pass uses several times, all uses count alike.

  BatchNorms normalize by the batch, all other layers are in evaluation mode: no dropout. Params
  and all other variables stay as they are.

  Args:
    model: the model; it is not changed.
    batches: any iterable of trees of arrays, of the training data, in the size of training batches.
    forward_fn: ``forward_fn(model, batch)`` calls the model; its result is not used. None:
      ``model(batch)``. A model whose call says ``use_running_average`` to its BatchNorms, as by an
      argument `train`, needs one that sets it to False: ``lambda model, x: model(x, train=True)``.
    weight_fn: from a batch to its weight in the means. None: the number of its examples, which is
      the length of the leaves' first axis.
    progress: whether to show a progress bar, if ``tqdm`` is installed.

  Returns:
    A copy of the model with the new statistics, in the modes (``train()``, ``eval()``) of `model`.
    :class:`optax_boost.NoEffectWarning` names BatchNorms that no batch has reached in training
    mode; they keep their statistics.

  Raises:
    TypeError: an argument is of the wrong kind.
    ValueError: there is no batch, or batches differ in structure.

  Examples:
    >>> from flax import nnx
    >>> import jax.numpy as jnp, optax_boost.nnx
    >>> model = nnx.BatchNorm(1, rngs=nnx.Rngs(0))
    >>> batches = [jnp.array([[0.0], [2.0]]), jnp.array([[3.0], [9.0]])]
    >>> model = optax_boost.nnx.estimate_batch_stats(model, batches)
    >>> model.mean.tolist(), model.var.tolist()
    ([3.5], [5.0])
  """
  _adapter.check_model(model)
  _base.check_callable("forward_fn", forward_fn, "forward_fn(model, batch)", optional=True)
  _base.check_callable("weight_fn", weight_fn, "weight_fn(batch)", optional=True)
  copy = _less_bn.copy_model(model)
  norms = _less_bn.modules(copy, nnx.BatchNorm)
  if not norms:
    _tree.warn_no_effect(
      f"`{_METHOD}` found no `nnx.BatchNorm` in the model.",
      _tree.leaf_paths(_adapter.as_pure(nnx.state(copy))),
    )
    return copy
  working = nnx.clone(copy)
  working.eval()
  found: dict[str, nnx.BatchNorm] = _less_bn.modules(working, nnx.BatchNorm)
  for norm in found.values():
    norm.use_running_average = False
    norm.__class__ = _summing(type(norm))
    for name in _TOTALS:
      setattr(norm, name, nnx.BatchStat(jnp.zeros_like(norm.mean[...])))
  graphdef, state = nnx.split(working)
  estimated = _full_gradient.mean_over_batches(
    # Of one function and structure, all share a compiled program.
    jax.tree_util.Partial(
      _batch_statistics, jax.tree_util.Partial(forward_fn or operator.call), graphdef, state
    ),
    {path: (norm.mean[...], norm.var[...]) for path, norm in norms.items()},
    batches,
    None,
    weight_fn,
    progress,
    _METHOD,
    "batch statistics",
  )
  idle = [path for path, (_, var) in estimated.items() if not jnp.all(var >= 0)]
  if idle:
    _tree.warn_no_effect(
      f"`{_METHOD}` has reached no training mode of {idle}: the call leaves these BatchNorms out,"
      " or tells them to use running averages. Pass `forward_fn`.",
      list(norms),
    )
  for path, norm in norms.items():
    if path not in idle:
      mean, var = estimated[path]
      norm.mean[...] = mean.astype(norm.mean.dtype)
      norm.var[...] = var.astype(norm.var.dtype)
  return copy


def _batch_statistics(forward_fn: Any, graphdef: Any, state: Any, unused: Any, batch: Any) -> Any:
  """The mean and the variance of each BatchNorm, by its path."""
  model = nnx.merge(graphdef, state)
  forward_fn(model, batch)
  norms = _less_bn.modules(model, nnx.BatchNorm)
  return {path: _means(norm) for path, norm in norms.items()}


@functools.cache
def _summing(kind: type[nnx.BatchNorm]) -> type[nnx.BatchNorm]:
  """A class of BatchNorms that sum the statistics of all their uses in a forward pass."""

  class Summing(kind):  # type: ignore[misc, valid-type]
    """An instance of `kind` becomes one of this."""

    momentum: float
    axis_name: Any

    def __call__(self, *args: Any, **kwargs: Any) -> jax.Array:
      named = [*args[1:2], kwargs.get("use_running_average"), self.use_running_average]
      if next(mode for mode in named if mode is not None):
        return super().__call__(*args, **kwargs)
      own = self.mean[...], self.var[...], self.momentum, self.axis_name
      # Times a momentum of zero, old statistics that are not finite would be NaN. A class of the
      # user's may leave them alone: then the variance stays below zero.
      self.mean[...], self.var[...] = jnp.zeros_like(own[0]), jnp.full_like(own[1], -1)
      self.momentum = 0.0
      # Outside of the training's `shard_map` the batch is whole.
      self.axis_name = _base.bound_axis(self.axis_name)
      out = super().__call__(*args, **kwargs)
      reached = jnp.all(self.var[...] >= 0)
      for name, value in zip(_TOTALS, (self.mean[...], self.var[...], 1), strict=True):
        total = getattr(self, name)
        total[...] += jnp.where(reached, value, 0)
      self.mean[...], self.var[...], self.momentum, self.axis_name = own
      return out

  return Summing


def _means(norm: nnx.BatchNorm) -> tuple[jax.Array, jax.Array]:
  """The mean over a norm's uses of means and of variances; variances of -1 where there was none."""
  mean, var, uses = (getattr(norm, name)[...] for name in _TOTALS)
  some = jnp.maximum(uses, 1)
  return mean / some, jnp.where(uses > 0, var / some, -1)

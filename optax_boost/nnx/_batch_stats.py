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
from optax_boost import _batch_stats
from optax_boost.nnx import _adapter
from optax_boost.nnx import _less_bn


def averaged_model(optimizer: nnx.Optimizer, model: Any) -> Any:
  """A copy of a model with the averages that :func:`optax_boost.average_params` keeps.

  Args:
    optimizer: the model's optimizer, made with a transformation that holds an
      :func:`optax_boost.average_params`.
    model: the model; it is not changed.

  Returns:
    A model of the same class, with arrays of its own. Variables that the optimizer does not train
    are `model`'s; estimate the statistics of its BatchNorms with :func:`estimate_batch_stats`.

  Raises:
    ValueError: the optimizer keeps no averages, or another model's.

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
  _, params, collections = _adapter.split(optimizer.wrt, copy)
  opt_state = _adapter.as_pure(optimizer.opt_state)
  _adapter.write(_average_params.averaged_params(opt_state, params), collections, copy)
  return copy


def estimate_batch_stats(
  model: Any,
  batches: Iterable[Any],
  *,
  forward_fn: Callable[[Any, Any], Any] | None = None,
  weight_fn: Callable[[Any], Any] | None = None,
) -> Any:
  """Estimates the statistics of a model's BatchNorms again, in one pass over batches.

  Needed where params did not come from training alone, as averages: the running statistics then
  belong to other params. The new statistics are the exact means, over all batches, of the batches'
  means and variances, and not exponential averages, in which the last batches count most. If a
  forward pass uses a BatchNorm several times, all uses count the same.

  BatchNorms normalize by the batch, whatever the call says; all other layers are in evaluation
  mode: no dropout. Params and all other variables are not changed.

  Args:
    model: the model; it is not changed.
    batches: any iterable of trees of arrays, of the training data, in the size of training batches;
      each counts by its number of examples.
    forward_fn: ``forward_fn(model, batch)`` calls the model; its result is not used. None:
      ``model(batch)``.
    weight_fn: from a batch to its number of examples. None: the length of the leaves' first axis.

  Returns:
    A copy of the model with the new statistics, in the modes (``train()``, ``eval()``) of `model`.
    :class:`optax_boost.NoEffectWarning` names statistics that no batch has reached; they are kept.

  Raises:
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
  working = nnx.clone(copy)
  working.eval()
  for norm in _less_bn.modules(working, nnx.BatchNorm).values():
    kind: Any = type(norm)
    norm.__class__ = _averaging(kind)
    norm.use_running_average, norm.momentum = False, 0.0
    zeros = jnp.zeros_like(norm.mean[...])
    # A variance below zero is kept where no call computes one.
    norm.mean[...], norm.var[...], norm.uses = zeros, zeros - 1, nnx.BatchStat(zeros)
  # Of one function and structure, all share a compiled program.
  forward = jax.tree_util.Partial(forward_fn or operator.call)
  of_batch = jax.tree_util.Partial(_of_batch, forward, *nnx.split(working))
  norms = _less_bn.modules(copy, nnx.BatchNorm)
  statistics = {path: (norm.mean[...], norm.var[...]) for path, norm in norms.items()}
  batches, weight_fn = _adapter.close_batches(batches), _adapter.of_plain_batch(weight_fn)
  estimated = _batch_stats.estimate(of_batch, statistics, batches, weight_fn)
  for path, norm in norms.items():
    norm.mean[...], norm.var[...] = estimated[path]
  return copy


def _of_batch(forward_fn: Any, graphdef: nnx.GraphDef, state: Any, unused: Any, batch: Any) -> Any:
  """The mean and the variance of each BatchNorm, by its path."""
  model = nnx.merge(graphdef, state)
  forward_fn(model, _adapter.plain_batch(batch))
  pairs = {p: (n.mean[...], n.var[...]) for p, n in _less_bn.modules(model, nnx.BatchNorm).items()}
  return {
    path: tuple(jnp.where(jnp.all(pair[1] >= 0), x, _batch_stats.UNREACHED) for x in pair)
    for path, pair in pairs.items()
  }


@functools.cache
def _averaging(kind: type[nnx.BatchNorm]) -> type[nnx.BatchNorm]:
  """A class of BatchNorms that average the statistics of all their uses in a forward pass."""

  class Averaging(kind):  # type: ignore[misc, valid-type]
    """An instance of `kind` becomes one of this."""

    axis_name: Any

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
      if "use_running_average" in kwargs:
        kwargs["use_running_average"] = False
      elif kind.__call__ is nnx.BatchNorm.__call__:
        args = ()
      before, axis_name = (self.mean[...], self.var[...]), self.axis_name
      # Outside of the training's `shard_map` the batch is whole.
      self.axis_name = _base.bound_axis(axis_name)
      out = super().__call__(x, *args, **kwargs)
      self.axis_name = axis_name
      for statistic, mean in zip((self.mean, self.var), before, strict=True):
        statistic[...] = _batch_stats.add_use(mean, statistic[...], self.uses[...])
      self.uses[...] += 1
      return out

  return Averaging

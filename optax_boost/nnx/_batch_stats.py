"""``estimate_batch_stats``: new BatchNorm statistics for the params of an NNX model."""

from collections.abc import Callable, Iterable, Sequence
import functools
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from optax_boost._foundation import _checks, _full_gradient, _mesh_axes, _types
from optax_boost._methods import _batch_stats
from optax_boost.nnx import _model


def estimate_batch_stats(
  model: nnx.Module,
  batches: Iterable[_types.Batch],
  *,
  forward_fn: Callable[[Any, _types.Batch], Any] | None = None,
  weight_fn: _types.WeightFn | None = None,
  only: str | Sequence[str] | None = None,
  exclude: str | Sequence[str] | None = None,
) -> Any:
  """Estimates the statistics of a model's BatchNorms again, in one pass over batches.

  Use it for params that no training step has used, such as averaged params, since the running
  statistics belong to the params of the training steps. The new statistics are the exact means,
  over all batches, of the batches' means and variances, while running statistics are exponential
  averages, in which the last batches count most. If a forward pass uses a BatchNorm several times,
  all uses count the same.

  The pass estimates the BatchNorms that a call of the model would update in its current mode; these
  BatchNorms normalize by the batch. Frozen BatchNorms (``use_running_average=True``), and those
  that `only` and `exclude` leave out, normalize by their running statistics and keep them.
  ``model.eval()`` freezes all BatchNorms, so call ``model.train()`` first, or name the BatchNorms
  to estimate by `only`. All other layers are in evaluation mode, without dropout.

  Args:
    model: the model; it is not changed.
    batches: an iterable of trees of arrays from the training data. Use batches as large as in
      training. A batch's weight in the means is its number of examples.
    forward_fn: ``forward_fn(model, batch)`` calls the model; its result is not used. None: the pass
      calls ``model(batch)``.
    weight_fn: a function from a batch to its number of examples. None: the length of the first axis
      of the batch's leaves.
    only: the BatchNorms to estimate, frozen or not, as patterns of their paths (see
      :func:`optax_boost.path_mask`; ``"stem"`` matches ``stem/norm``). None: all that the forward
      pass updates.
    exclude: BatchNorms that keep their statistics, as patterns like `only`. None: excludes none.

  Returns:
    A copy of the model with the new statistics, in the modes (``train()``, ``eval()``) of `model`.
    BatchNorms that a batch does not reach keep their statistics, and an
    :class:`optax_boost.NoEffectWarning` names them and patterns that match no BatchNorm.

  Raises:
    ValueError: there is no batch; batches differ in structure; the forward pass updates no
      BatchNorm; NaN or infinite entries in a batch made the statistics not finite; or all
      variances are 0, as for single examples.

  Examples:
    >>> from flax import nnx
    >>> import jax.numpy as jnp, optax_boost.nnx
    >>> model = nnx.BatchNorm(1, rngs=nnx.Rngs(0))
    >>> batches = [jnp.array([[0.0], [2.0]]), jnp.array([[3.0], [9.0]])]
    >>> model = optax_boost.nnx.estimate_batch_stats(model, batches)
    >>> model.mean.tolist(), model.var.tolist()
    ([3.5], [5.0])
  """
  _model.check(model)
  form = "forward_fn(model, batch)"
  _checks.check_callable("forward_fn", forward_fn, form, optional=True, takes=2)
  _checks.check_callable("weight_fn", weight_fn, "weight_fn(batch)", optional=True, takes=1)
  copy = _model.copy(model)
  norms = _model.modules(copy, nnx.BatchNorm)
  selection = _batch_stats.select(list(norms), only, exclude)
  working = nnx.clone(copy)
  working.eval()
  for path, norm in _model.modules(working, nnx.BatchNorm).items():
    norm.use_running_average = norms[path].use_running_average
    kind: Any = type(norm)
    norm.__class__ = _averaging_class(kind)
    norm.is_chosen, norm.is_named = path in selection.paths, selection.named
    for name in _batch_stats.SUMS:
      setattr(norm, name, nnx.BatchStat(jnp.zeros_like(norm.mean[...])))
  # A `Partial`, so that calls with the same function and model structure share a compiled program.
  forward_fn = forward_fn or _batch_stats.call_model
  forward = jax.tree_util.Partial(_full_gradient.WeakFunction.of(forward_fn))
  summarize_batch = jax.tree_util.Partial(_summarize_batch, forward, *nnx.split(working))
  statistics = {path: {"mean": n.mean[...], "var": n.var[...]} for path, n in norms.items()}
  estimated = _batch_stats.estimate(
    summarize_batch, statistics, selection, batches, weight_fn, forward_fn
  )
  for path, new in estimated.items():
    norms[path].mean[...], norms[path].var[...] = new["mean"], new["var"]
  return copy


def _summarize_batch(
  forward_fn: Callable[[Any, _types.Batch], Any],
  graphdef: nnx.GraphDef,
  state: nnx.State,
  chosen: Iterable[str],
  batch: _types.Batch,
) -> dict[str, _batch_stats.Statistics]:
  """Calls the model on a batch; returns the batch's statistics of chosen BatchNorms, by path."""
  model = nnx.merge(graphdef, state)
  forward_fn(model, batch)
  norms = _model.modules(model, nnx.BatchNorm)
  return {
    path: _batch_stats.summarize_uses(
      *(getattr(norms[path], name)[...] for name in _batch_stats.SUMS)
    )
    for path in chosen
  }


class _Averaging(nnx.BatchNorm):
  """A BatchNorm that averages the statistics of all its uses in a forward pass."""

  axis_name: Any
  is_chosen: bool
  is_named: bool
  batch_mean: nnx.BatchStat[jax.Array]
  batch_var: nnx.BatchStat[jax.Array]
  uses: nnx.BatchStat[jax.Array]
  frozen_uses: nnx.BatchStat[jax.Array]

  def __call__(
    self, x: jax.Array, use_running_average: bool | None = None, **kwargs: Any
  ) -> jax.Array:
    frozen = self.use_running_average if use_running_average is None else use_running_average
    if not self.is_chosen or (frozen and not self.is_named):
      self.frozen_uses[...] += 1
      return super().__call__(x, use_running_average=True, **kwargs)
    running = self.mean[...], self.var[...]
    settings = self.momentum, self.axis_name
    # With momentum 0, a call stores 0 * running + batch. The running statistics are set to zero,
    # since 0 * NaN would be NaN.
    self.mean[...], self.var[...] = map(jnp.zeros_like, running)
    # Outside of the training's `shard_map`, the mesh axis is not bound. A mean over it is not
    # needed, since each device has the whole batch.
    self.momentum, self.axis_name = 0.0, _mesh_axes.bound_axis(self.axis_name)
    out = super().__call__(x, use_running_average=False, **kwargs)
    self.momentum, self.axis_name = settings
    for mean, statistic in ((self.batch_mean, self.mean), (self.batch_var, self.var)):
      mean[...] = _batch_stats.add_use(mean[...], statistic[...], self.uses[...])
    self.mean[...], self.var[...] = running
    self.uses[...] += 1
    return out


@functools.cache
def _averaging_class(kind: Any) -> type[nnx.BatchNorm]:
  """Returns a subclass of `kind` with :class:`_Averaging` between `kind` and ``nnx.BatchNorm``."""
  return _Averaging if kind is nnx.BatchNorm else type(kind)("Averaging", (kind, _Averaging), {})

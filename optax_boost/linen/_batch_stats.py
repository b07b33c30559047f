"""``estimate_batch_stats``: new BatchNorm statistics for the params of a Linen module."""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import inspect
from typing import Any

from flax import linen as nn, traverse_util
import jax
import jax.numpy as jnp

from optax_boost._foundation import _checks, _full_gradient, _mesh_axes, _types
from optax_boost._methods import _batch_stats
from optax_boost.linen import _module

_COLLECTION = "batch_stats"
_CALL_OF_NORM = inspect.unwrap(nn.BatchNorm.__call__)
_CALL_OF_DROPOUT = inspect.unwrap(nn.Dropout.__call__)


def estimate_batch_stats(
  module: nn.Module,
  variables: Mapping[str, Any],
  batches: Iterable[_types.Batch],
  *,
  forward_fn: Callable[[Any, _types.Batch], Any] | None = None,
  weight_fn: _types.WeightFn | None = None,
  only: str | Sequence[str] | None = None,
  exclude: str | Sequence[str] | None = None,
) -> dict[str, Any]:
  """Estimates BatchNorm statistics again, like :func:`optax_boost.nnx.estimate_batch_stats`.

  The pass estimates the BatchNorms that `forward_fn` would update, so call the module in its
  training mode. These BatchNorms normalize by the batch. Frozen BatchNorms
  (``use_running_average=True``), and those that `only` and `exclude` leave out, normalize by their
  running statistics and keep them. ``nn.Dropout`` does nothing; all other layers act as usual. If
  another layer needs a key in training, call the module in its evaluation mode and name the
  BatchNorms by `only`.

  Args:
    module: the module.
    variables: the module's params, for example averaged ones, and its other collections, among
      them ``batch_stats``.
    batches: see :func:`optax_boost.nnx.estimate_batch_stats`.
    forward_fn: ``forward_fn(model, batch)``, where ``model(x, ...)`` applies the module, such as
      ``lambda model, x: model(x, train=True)``; its result is not used. None: the pass calls
      ``model(batch)``.
    weight_fn: see :func:`optax_boost.nnx.estimate_batch_stats`.
    only: the BatchNorms to estimate, frozen or not, as patterns of their paths in ``batch_stats``
      (see :func:`optax_boost.path_mask`). None: all that the call updates.
    exclude: BatchNorms that keep their statistics, as patterns like `only`.

  Returns:
    The variables with the new statistics. BatchNorms that a batch does not reach keep their
    statistics, and an :class:`optax_boost.NoEffectWarning` names them and patterns that match no
    BatchNorm.

  Raises:
    ValueError: `variables` has no params; there is no batch; batches differ in structure; the call
      updates no BatchNorm; NaN or infinite entries in a batch made the statistics not finite; or
      all variances are 0, as for single examples.

  Examples:
    >>> from flax import linen as nn
    >>> import jax, jax.numpy as jnp, optax_boost.linen
    >>> module = nn.BatchNorm(use_running_average=False)
    >>> batches = [jnp.array([[0.0], [2.0]]), jnp.array([[3.0], [9.0]])]
    >>> variables = module.init(jax.random.key(0), batches[0])
    >>> variables = optax_boost.linen.estimate_batch_stats(module, variables, batches)
    >>> jax.tree.map(lambda x: x.tolist(), variables["batch_stats"])
    {'mean': [3.5], 'var': [5.0]}
  """
  _module.check(module)
  params, collections = _module.split_variables(variables)
  form = "forward_fn(model, batch)"
  _checks.check_callable("forward_fn", forward_fn, form, optional=True, takes=2)
  _checks.check_callable("weight_fn", weight_fn, "weight_fn(batch)", optional=True, takes=1)
  leaves = traverse_util.flatten_dict(collections.get(_COLLECTION, {}), keep_empty_nodes=True)
  paths = {path[:-1] for path in leaves if path[-1] == "mean" and (*path[:-1], "var") in leaves}
  norms = {"/".join(path): path for path in sorted(paths)}
  statistics = {
    name: {statistic: leaves[*path, statistic] for statistic in _batch_stats.STATISTICS}
    for name, path in norms.items()
  }
  selection = _batch_stats.select(list(norms), only, exclude)
  # The sums are stored in `batch_stats`, so that scans slice them like the statistics.
  with_sums = leaves | {
    (*norms[name], sum_name): jnp.zeros_like(statistics[name]["mean"])
    for name in selection.paths
    for sum_name in _batch_stats.SUMS
  }
  constants = {**collections, _COLLECTION: traverse_util.unflatten_dict(with_sums)}
  forward_fn = forward_fn or _batch_stats.call_model
  summary = _BatchSummary(module, _full_gradient.WeakFunction.of(forward_fn), selection)
  summarize_batch = jax.tree_util.Partial(summary, params, constants)
  estimated = _batch_stats.estimate(
    summarize_batch, statistics, selection, batches, weight_fn, forward_fn
  )
  leaves |= {
    (*norms[name], statistic): leaf
    for name, new in estimated.items()
    for statistic, leaf in new.items()
  }
  new_statistics = {_COLLECTION: traverse_util.unflatten_dict(leaves)} if leaves else {}
  return {"params": params, **collections, **new_statistics}


@dataclasses.dataclass(frozen=True, eq=False)
class _BatchSummary:
  """A function that computes a batch's statistics; equal objects share a compiled program."""

  module: nn.Module
  forward_fn: Callable[[Any, _types.Batch], Any]
  selection: _batch_stats.Selection

  def __eq__(self, other: object) -> bool:
    if not isinstance(other, _BatchSummary):
      return NotImplemented
    same = self.module is other.module and self.selection == other.selection
    return same and bool(self.forward_fn == other.forward_fn)

  def __hash__(self) -> int:
    return hash((id(self.module), self.forward_fn, self.selection))

  def __call__(
    self,
    params: _types.Params,
    constants: Mapping[str, Any],
    chosen: Iterable[str],
    batch: _types.Batch,
  ) -> dict[str, _batch_stats.Statistics]:
    model = _module.BoundModel(self.module, params, constants, {})

    def intercept(
      next_fun: Callable[..., Any],
      args: tuple[Any, ...],
      kwargs: dict[str, Any],
      context: nn.module.InterceptorContext,
    ) -> Any:
      norm: Any = context.module
      # The called method is compared, not the class, since the `__call__` of a user's subclass of
      # BatchNorm may call `BatchNorm.__call__`.
      original = getattr(context.orig_method, "func", None)
      # A BatchNorm that `less_bn` removed is still called, but has no statistics.
      if original is _CALL_OF_NORM and norm.has_variable(_COLLECTION, "mean"):
        return self._call_norm(norm, next_fun, args, kwargs)
      if original is _CALL_OF_DROPOUT:
        return args[0] if args else kwargs["inputs"]
      return next_fun(*args, **kwargs)

    with nn.intercept_methods(intercept):
      self.forward_fn(model, batch)
    leaves = traverse_util.flatten_dict(model.collections[_COLLECTION], sep="/")
    prefixes = {name: f"{name}/" if name else "" for name in chosen}
    return {
      name: _batch_stats.summarize_uses(
        *(leaves[prefix + sum_name] for sum_name in _batch_stats.SUMS)
      )
      for name, prefix in prefixes.items()
    }

  def _call_norm(
    self,
    norm: nn.BatchNorm,
    call: Callable[..., jax.Array],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
  ) -> jax.Array:
    """Calls a BatchNorm and returns its output.

    `call` is the call that Linen intercepted, with `args` and `kwargs`. If the statistics of the
    BatchNorm are to be estimated, the batch statistics of this call enter the mean over all calls
    of the BatchNorm in the forward pass.
    """
    x, (flag,) = args[:1], args[1:] or (kwargs.get("use_running_average"),)
    frozen = norm.use_running_average if flag is None else flag
    is_chosen = norm.has_variable(_COLLECTION, "uses")
    by_batch = is_chosen and (self.selection.named or not frozen)
    # Outside of the training's `shard_map`, the mesh axis is not bound. A mean over it is not
    # needed, since each device has the whole batch.
    axis_name = _mesh_axes.bound_axis(norm.axis_name)
    settings = {"momentum": 0.0, "use_running_average": None, "axis_name": axis_name}
    saved_settings = {name: getattr(norm, name) for name in settings}
    names = (*_batch_stats.STATISTICS, *_batch_stats.SUMS) if is_chosen else _batch_stats.STATISTICS
    before: dict[str, Any] = {name: norm.get_variable(_COLLECTION, name) for name in names}
    if by_batch:
      for name in _batch_stats.STATISTICS:
        # With momentum 0, a call stores 0 * running + batch. The running statistics are set to
        # zero, since 0 * NaN would be NaN.
        norm.put_variable(_COLLECTION, name, jnp.zeros_like(before[name]))
    # `vars`, since a Linen module refuses assignment.
    vars(norm).update(settings)
    try:
      out = call(*x, **{**kwargs, "use_running_average": not by_batch})
    finally:
      vars(norm).update(saved_settings)
    if by_batch:
      for name in _batch_stats.STATISTICS:
        new: Any = norm.get_variable(_COLLECTION, name)
        mean = _batch_stats.add_use(before[f"batch_{name}"], new, before["uses"])
        norm.put_variable(_COLLECTION, f"batch_{name}", mean)
        norm.put_variable(_COLLECTION, name, before[name])
    if is_chosen:
      count = "uses" if by_batch else "frozen_uses"
      norm.put_variable(_COLLECTION, count, before[count] + 1)
    return out

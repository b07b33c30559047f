"""BatchNorm statistics of a Linen module, estimated again for given params."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
import dataclasses
import inspect
import operator
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from optax_boost import _base
from optax_boost import _batch_stats
from optax_boost import _types
from optax_boost.linen import _adapter

_COLLECTION = "batch_stats"
_CALL = inspect.unwrap(nn.BatchNorm.__call__)
# Counts a BatchNorm's uses, in its collection, so that scans handle it as they do the statistics.
_USES = "uses"


def estimate_batch_stats(
  module: nn.Module,
  variables: Any,
  batches: Iterable[Any],
  *,
  forward_fn: Callable[[Any, Any], Any] | None = None,
  weight_fn: Callable[[Any], Any] | None = None,
) -> dict[str, Any]:
  """Estimates BatchNorm statistics again: :func:`optax_boost.nnx.estimate_batch_stats` for Linen.

  BatchNorms normalize by the batch whatever the call says. All other layers are as the call sets
  them: call the module in its evaluation mode, and there is no dropout.

  Args:
    module: the module.
    variables: its params, as averaged ones, and its other collections, ``batch_stats`` among them.
    batches: see :func:`optax_boost.nnx.estimate_batch_stats`.
    forward_fn: ``forward_fn(model, batch)``, where ``model(x, ...)`` applies the module; its result
      is not used. None: ``model(batch)``.
    weight_fn: from a batch to its number of examples. None: the length of the leaves' first axis.

  Returns:
    The variables with the new statistics. :class:`optax_boost.NoEffectWarning` names statistics
    that no batch has reached; they are kept.

  Raises:
    ValueError: `variables` has no params, there is no batch, or batches differ in structure.

  Examples:
    >>> from flax import linen as nn
    >>> import jax, jax.numpy as jnp, optax_boost.linen
    >>> module = nn.BatchNorm(use_running_average=True)
    >>> batches = [jnp.array([[0.0], [2.0]]), jnp.array([[3.0], [9.0]])]
    >>> variables = module.init(jax.random.key(0), batches[0])
    >>> variables = optax_boost.linen.estimate_batch_stats(module, variables, batches)
    >>> jax.tree.map(lambda x: x.tolist(), variables["batch_stats"])
    {'mean': [3.5], 'var': [5.0]}
  """
  _adapter.check_module(module)
  params, collections = _adapter.split_variables(variables)
  _base.check_callable("forward_fn", forward_fn, "forward_fn(model, batch)", optional=True)
  _base.check_callable("weight_fn", weight_fn, "weight_fn(batch)", optional=True)
  statistics = collections.get(_COLLECTION, {})
  of_batch = _OfBatch(module, forward_fn or operator.call)
  constants = {name: value for name, value in collections.items() if name != _COLLECTION}
  partial = jax.tree_util.Partial(of_batch, params, constants)
  estimated = _batch_stats.estimate(partial, statistics, batches, weight_fn)
  return {"params": params, **collections, **({_COLLECTION: estimated} if estimated else {})}


@dataclasses.dataclass(frozen=True, eq=False)
class _OfBatch:
  """Computes a batch's statistics; calls for one module share a compiled program."""

  module: nn.Module
  forward_fn: Any

  def __eq__(self, other: object) -> bool:
    if not isinstance(other, _OfBatch):
      return NotImplemented
    return self.module is other.module and bool(self.forward_fn == other.forward_fn)

  def __hash__(self) -> int:
    return hash((id(self.module), self.forward_fn))

  def __call__(
    self, params: _types.Tree, constants: Mapping[str, Any], statistics: Any, batch: _types.Tree
  ) -> dict[str, Any]:
    collections = {**constants, _COLLECTION: _zeros(statistics)}
    model = _adapter.BoundModel(self.module, params, collections, {})

    def intercept(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
      # A class of the user's may have a call of its own around this one.
      original = getattr(context.orig_method, "func", None) is _CALL
      # One that `less_bn` removed is still called, but has no statistics.
      if original and context.module.has_variable(_COLLECTION, "mean"):
        return _call_on_batch(context.module, next_fun, args, kwargs)
      return next_fun(*args, **kwargs)

    with nn.intercept_methods(intercept):
      self.forward_fn(model, batch)
    return _means(model.collections[_COLLECTION], statistics)


def _zeros(statistics: Mapping[str, Any]) -> dict[str, Any]:
  """Zeros for statistics, and for the number of uses of each BatchNorm."""
  zeros: dict[str, Any] = {
    name: _zeros(value) if isinstance(value, Mapping) else jnp.zeros_like(value)
    for name, value in statistics.items()
  }
  is_norm = isinstance(zeros.get("mean"), jax.Array)
  return {**zeros, _USES: zeros["mean"]} if is_norm else zeros


def _means(counted: Any, statistics: Mapping[str, Any]) -> dict[str, Any]:
  """The `counted` statistics without their numbers of uses, marked where these are zero."""
  reached = counted.get(_USES, jnp.zeros([])) > 0
  return {
    name: _means(counted[name], value)
    if isinstance(value, Mapping)
    else jnp.where(reached, counted[name], _batch_stats.UNREACHED)
    for name, value in statistics.items()
  }


def _call_on_batch(norm: nn.BatchNorm, call: Any, args: Any, kwargs: Any) -> Any:
  """Calls a BatchNorm that normalizes by the batch, and averages its statistics over the uses."""
  # Outside of the training's `shard_map` the batch is whole.
  axis_name = _base.bound_axis(norm.axis_name)
  settings = {"momentum": 0.0, "use_running_average": None, "axis_name": axis_name}
  saved_settings = {name: getattr(norm, name) for name in settings}
  before: dict[str, Any] = {n: norm.get_variable(_COLLECTION, n) for n in ("mean", "var", _USES)}
  # Linen's modules are frozen; this one is bound for this call.
  vars(norm).update(settings)
  try:
    out = call(*args[:1], **{**kwargs, "use_running_average": False})
  finally:
    vars(norm).update(saved_settings)
  for name in ("mean", "var"):
    new: Any = norm.get_variable(_COLLECTION, name)
    norm.put_variable(_COLLECTION, name, _batch_stats.add_use(before[name], new, before[_USES]))
  norm.put_variable(_COLLECTION, _USES, before[_USES] + 1)
  return out

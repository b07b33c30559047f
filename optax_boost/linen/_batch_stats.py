"""BatchNorm statistics of a Linen module, estimated anew for given params."""

from collections.abc import Callable
from collections.abc import Iterable
import dataclasses
import inspect
import operator
from typing import Any

from flax import linen as nn
from flax import traverse_util
import jax
import jax.numpy as jnp

from optax_boost import _base
from optax_boost import _full_gradient
from optax_boost import _tree
from optax_boost.linen import _adapter

_METHOD = "estimate_batch_stats"
_COLLECTION = "batch_stats"
_CALL = inspect.unwrap(nn.BatchNorm.__call__)
# After the name of a statistic.
_SUM, _USES = "_sum", "_uses"
# Stands for a statistic that no call has computed.
_UNREACHED = -jnp.inf


def estimate_batch_stats(
  module: nn.Module,
  variables: Any,
  batches: Iterable[Any],
  *,
  forward_fn: Callable[[Any, Any], Any] | None = None,
  weight_fn: Callable[[Any], Any] | None = None,
  progress: bool = False,
) -> dict[str, Any]:
  """Estimates BatchNorm statistics anew: :func:`optax_boost.nnx.estimate_batch_stats` for Linen.

  BatchNorms normalize by the batch whatever the call says. All other layers are as the call sets
  them: call the module in its evaluation mode, and there is no dropout.

  Args:
    module: the module.
    variables: its params, as averaged ones, and its other collections, ``batch_stats`` among them.
    batches: see :func:`optax_boost.nnx.estimate_batch_stats`, as for the rest.
    forward_fn: ``forward_fn(model, batch)``, where ``model(x, ...)`` applies the module; its result
      is not used. None: ``model(batch)``.
    weight_fn: from a batch to its weight in the means.
    progress: whether to show a progress bar.

  Returns:
    The variables with the new statistics; params and the other collections are those given.
    :class:`optax_boost.NoEffectWarning` names statistics that no batch has reached; they stay.

  Raises:
    TypeError: an argument is of the wrong kind.
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
  variables = {"params": params, **collections}
  _base.check_callable("forward_fn", forward_fn, "forward_fn(model, batch)", optional=True)
  _base.check_callable("weight_fn", weight_fn, "weight_fn(batch)", optional=True)
  given = collections.get(_COLLECTION)
  if not jax.tree.leaves(given):
    _tree.warn_no_effect(
      f"`{_METHOD}` found no collection '{_COLLECTION}' in the variables.",
      _tree.leaf_paths(variables),
    )
    return variables
  estimated = _full_gradient.mean_over_batches(
    jax.tree_util.Partial(_Statistics(module, forward_fn or operator.call), variables),
    given,
    batches,
    None,
    weight_fn,
    progress,
    _METHOD,
    "batch statistics",
  )
  paths = _tree.leaf_paths(given)
  idle = [
    path
    for path, leaf in zip(paths, jax.tree.leaves(estimated), strict=True)
    if jnp.all(leaf == _UNREACHED)
  ]
  if idle:
    _tree.warn_no_effect(
      f"`{_METHOD}` has reached no BatchNorm with the statistics {idle}: the call leaves it out.",
      paths,
    )
  triples = zip(paths, jax.tree.leaves(estimated), jax.tree.leaves(given), strict=True)
  kept = [old if path in idle else new.astype(old.dtype) for path, new, old in triples]
  return {**variables, _COLLECTION: jax.tree.unflatten(jax.tree.structure(given), kept)}


@dataclasses.dataclass(frozen=True, eq=False)
class _Statistics:
  """Computes a batch's statistics; equal ones share a compiled program."""

  module: nn.Module
  forward_fn: Any

  def __eq__(self, other: object) -> bool:
    if not isinstance(other, _Statistics):
      return NotImplemented
    try:
      return bool(self.module == other.module and self.forward_fn == other.forward_fn)
    except (TypeError, ValueError):
      # Arrays in fields of the modules have no single truth value.
      return self.module is other.module and self.forward_fn is other.forward_fn

  def __hash__(self) -> int:
    return hash(type(self.module))

  def __call__(self, variables: Any, unused: Any, batch: Any) -> Any:
    params, collections = _adapter.split_variables(variables)
    # In the same collection, so that scans handle them as they do the statistics.
    collections = {**collections, _COLLECTION: _with_sums(collections[_COLLECTION])}
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
    return _means(model.collections[_COLLECTION], variables[_COLLECTION])


def _with_sums(statistics: Any) -> Any:
  """Statistics, each with its sum over the uses in a forward pass and their number."""
  by_path = traverse_util.flatten_dict(statistics)
  for (*module, name), value in list(by_path.items()):
    by_path |= {(*module, name + total): jnp.zeros_like(value) for total in (_SUM, _USES)}
  return traverse_util.unflatten_dict(by_path)


def _means(extended: Any, statistics: Any) -> Any:
  """The mean of each statistic over the uses."""
  by_path = traverse_util.flatten_dict(extended)

  def mean(path: Any, unused: Any) -> jax.Array:
    *module, name = (entry.key for entry in path)
    uses = by_path[*module, name + _USES]
    return jnp.where(uses > 0, by_path[*module, name + _SUM] / jnp.maximum(uses, 1), _UNREACHED)

  return jax.tree.map_with_path(mean, statistics)


def _call_on_batch(norm: nn.BatchNorm, call: Any, args: Any, kwargs: Any) -> Any:
  """Calls a BatchNorm that normalizes by the batch, and adds up its statistics."""
  # Outside of the training's `shard_map` the batch is whole.
  axis_name = _base.bound_axis(norm.axis_name)
  settings = {"momentum": 0.0, "use_running_average": None, "axis_name": axis_name}
  own = {name: getattr(norm, name) for name in settings}
  old: dict[str, Any] = {name: norm.get_variable(_COLLECTION, name) for name in ("mean", "var")}
  # Times a momentum of zero, old statistics that are not finite would be NaN.
  for name, value in old.items():
    norm.put_variable(_COLLECTION, name, jnp.zeros_like(value))
  # Linen's modules are frozen; this one is bound for this call.
  vars(norm).update(settings)
  try:
    out = call(*args[:1], **{**kwargs, "use_running_average": False})
  finally:
    vars(norm).update(own)
  for name, value in old.items():
    for total, term in ((_SUM, norm.get_variable(_COLLECTION, name)), (_USES, 1)):
      earlier: Any = norm.get_variable(_COLLECTION, name + total)
      norm.put_variable(_COLLECTION, name + total, earlier + term)
    norm.put_variable(_COLLECTION, name, value)
  return out

"""Fewer BatchNorms for Flax NNX models, by surgery on a copy."""

import functools
from typing import Any

from flax import nnx

from optax_boost._foundation import _types
from optax_boost._methods import _less_bn
from optax_boost.nnx import _model, _normalized_dense


class RemovedBatchNorm(nnx.Module):
  """A former BatchNorm, which returns its input in the dtype that the BatchNorm had."""

  dtype: Any
  marked: str | None

  def __call__(self, x: Any, use_running_average: bool | None = None, *, mask: Any = None) -> Any:
    """Returns the input; the other arguments are a BatchNorm's and not used."""
    x = x if self.dtype is None else x.astype(self.dtype)
    return x if self.marked is None else _less_bn.mark_norm(x, self.marked)


def less_bn(
  model: nnx.Module,
  *args: Any,
  fn_flag: bool = False,
  predicate: _less_bn.Predicate | None = None,
  on_plan: _less_bn.PlanCallback | None = None,
  **kwargs: Any,
) -> Any:
  """Returns a copy of a model with fewer BatchNorms: of each bottleneck's branch the last stays.

  Which BatchNorm stands where is read from a trace of the model, not from names: a residual
  block is an addition whose two operands stem from one value; its branch is the side with more
  layers. The stem's and the shortcuts' BatchNorms stay, as do BatchNorms of basic blocks (two
  layers), as in MindSpore.

  The copy has the model's weights, in arrays of its own. Removing BatchNorms changes the function,
  so do it before training, or very early. A checkpoint of the copy is restored into a copy that the
  same call makes from a fresh model.

  Args:
    model: the model; it is not changed.
    *args: the model's inputs, as for a call, to trace it; ``jax.ShapeDtypeStruct`` will do.
    fn_flag: whether the last dense layer becomes a :class:`NormalizedDense`, which keeps its
      kernel and bias; its multiplier starts from 1.
    predicate: which BatchNorms go, as a function of a BatchNorm's place, which has a `path`, a
      `role` (``"inner"`` and ``"last"`` of a residual branch, ``"shortcut"``, ``"outside"`` of all
      blocks) and `layers`, the number of the branch's layers. None: those inside of a branch of at
      least three layers. With basic blocks: ``lambda place: place.role == "inner"``.
    on_plan: is called with the changes: the paths `removed` and `head` (or None) of BatchNorms and
      of the normalized layer, and `norms`, how many BatchNorms the model has. None: not called.
    **kwargs: the model's keyword arguments.

  Returns:
    A model of the same class.

  Raises:
    ValueError: there are no inputs.

  Examples:
    >>> from flax import nnx
    >>> import jax.numpy as jnp, optax_boost.nnx
    >>> class Head(nnx.Module):
    ...   def __init__(self, rngs):
    ...     self.norm = nnx.BatchNorm(4, rngs=rngs)
    ...     self.fc = nnx.Linear(4, 2, rngs=rngs)
    ...   def __call__(self, x):
    ...     return self.fc(self.norm(x))
    >>> head = optax_boost.nnx.less_bn(
    ...   Head(nnx.Rngs(0)), jnp.ones((3, 4)), fn_flag=True, predicate=lambda place: True
    ... )
    >>> type(head.norm).__name__, type(head.fc).__name__
    ('RemovedBatchNorm', 'NormalizedDense')
  """
  _model.check(model)
  trace = functools.partial(_trace_model, model)
  plan = _less_bn.make_plan(trace, args, kwargs, fn_flag, predicate, on_plan)
  copy = _model.copy(model)
  by_path = _model.modules(copy)
  for path in plan.removed:
    _remove(by_path[path])
  if plan.head is not None:
    _normalized_dense.normalize(by_path[plan.head])
  return copy


def _remove(norm: Any, marked: str | None = None) -> None:
  """Turns a BatchNorm into a removed one, wherever the model refers to it."""
  norm.__class__ = RemovedBatchNorm
  norm.marked = marked
  for name, value in list(vars(norm).items()):
    if isinstance(value, nnx.Variable):
      delattr(norm, name)


def _trace_model(
  model: nnx.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _less_bn.Trace:
  copy = nnx.clone(model)
  layers = _model.modules(copy, nnx.Linear)
  norms = _model.modules(copy, nnx.BatchNorm)
  for path, norm in norms.items():
    _remove(norm, path)
  graphdef, params, state = _model.split(nnx.Param, copy)

  def apply(params: _types.Tree, state: Any, *args: Any, **kwargs: Any) -> Any:
    return _model.merge(graphdef, params, state)[0](*args, **kwargs)

  return _less_bn.Trace(
    _less_bn.trace_data_graphs(apply, params, state, args, kwargs),
    list(norms),
    [p for p, layer in layers.items() if not isinstance(layer, _normalized_dense.NormalizedDense)],
  )

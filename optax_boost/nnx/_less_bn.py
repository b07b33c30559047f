"""``less_bn``: removes BatchNorms from a copy of an NNX model."""

import functools
from typing import Any

from flax import nnx
import jax

from optax_boost._foundation import _types
from optax_boost._methods import _less_bn
from optax_boost.nnx import _model, _normalized_dense


class RemovedBatchNorm(nnx.Module):
  """Replaces a removed BatchNorm; returns its input in the BatchNorm's dtype.

  `traced_path` is None, except in the copy of the model that :func:`less_bn` traces. There, the
  output is marked with `traced_path`, the path of the BatchNorm, so that the trace shows where the
  BatchNorm is.
  """

  dtype: _types.Dtype | None
  traced_path: str | None

  def __call__(
    self, x: jax.Array, use_running_average: bool | None = None, *, mask: jax.Array | None = None
  ) -> jax.Array:
    """Returns `x`; takes the other arguments of a BatchNorm, and ignores them."""
    x = x if self.dtype is None else x.astype(self.dtype)
    return x if self.traced_path is None else _less_bn.mark_norm(x, self.traced_path)


def less_bn(
  model: nnx.Module,
  *args: Any,
  fn_flag: bool = False,
  predicate: _less_bn.Predicate | None = None,
  on_plan: _less_bn.PlanCallback | None = None,
  **kwargs: Any,
) -> Any:
  """Copies a model without the BatchNorms inside bottleneck branches, except each branch's last.

  A trace of the model shows where a BatchNorm is; names have no effect. A residual block ends in an
  addition whose two operands are computed from one earlier value. The operand with more layers is
  the branch, the other the shortcut. As in MindSpore, the BatchNorms of the stem, of shortcuts and
  of basic blocks (two layers) stay.

  The copy has the model's weights, in new arrays. Removing BatchNorms changes the function, so do
  it before training, or very early. To restore a checkpoint of the copy, repeat the call with a new
  model, and restore into its result.

  Args:
    model: the model; it is not changed.
    *args: the inputs with which the model is traced; they may be abstract
      (``jax.ShapeDtypeStruct``).
    fn_flag: whether the last dense layer becomes a :class:`NormalizedDense` with the same kernel
      and bias, and with the multiplier 1.
    predicate: ``predicate(place)`` returns whether to remove a BatchNorm. ``place.path`` is its
      path, ``place.role`` is ``"inner"`` or ``"last"`` in a residual branch, ``"shortcut"``, or
      ``"outside"`` of all blocks, and ``place.layers`` is the number of layers in the branch. None:
      removes inner BatchNorms of branches with at least three layers. ``lambda place: place.role ==
      "inner"`` also removes inner BatchNorms of basic blocks.
    on_plan: a function that is called with the plan: ``plan.removed`` are the paths of the removed
      BatchNorms, ``plan.head`` is the path of the normalized layer or None, and ``plan.norms`` is
      the number of BatchNorms in the model.
    **kwargs: the keyword inputs with which the model is traced.

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


def _remove(norm: Any, traced_path: str | None = None) -> None:
  """Turns a BatchNorm into a :class:`RemovedBatchNorm` with this `traced_path`, in place."""
  norm.__class__ = RemovedBatchNorm
  norm.traced_path = traced_path
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
  structure, params, state = _model.split(nnx.Param, copy)

  def apply(params: _types.Params, state: _model.Collections, *args: Any, **kwargs: Any) -> Any:
    return _model.merge(structure, params, state)[0](*args, **kwargs)

  return _less_bn.Trace(
    _less_bn.trace_data_graphs(apply, params, state, args, kwargs),
    list(norms),
    [p for p, layer in layers.items() if not isinstance(layer, _normalized_dense.NormalizedDense)],
  )

"""Fewer BatchNorms for Flax NNX models, by surgery on a copy."""

from collections.abc import Mapping
import functools
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from optax_boost import _base
from optax_boost import _less_bn
from optax_boost import _tree
from optax_boost.nnx import _adapter
from optax_boost.nnx import _head

_KERNEL_LAYERS = (nnx.Conv, nnx.ConvTranspose, nnx.Linear)


class RemovedBatchNorm(nnx.Module):
  """Stands in a BatchNorm's place and returns its input, in the dtype that the BatchNorm had."""

  def __init__(self, dtype: Any = None, marked: str | None = None):
    self.dtype = dtype
    self.marked = marked

  def __call__(self, x: Any, use_running_average: bool | None = None, *, mask: Any = None) -> Any:
    """Returns the input; the other arguments are a BatchNorm's and not used."""
    x = x if self.dtype is None else x.astype(self.dtype)
    return x if self.marked is None else _less_bn.mark_norm(x, self.marked)


def plan_less_bn(
  model: nnx.Module,
  *args: Any,
  fn_flag: bool = False,
  bias: bool = False,
  predicate: _less_bn.Predicate | None = None,
  multiplier: float = 1.0,
  **kwargs: Any,
) -> _less_bn.LessBNPlan:
  """Plans the changes that :func:`less_bn` makes to a model, with its arguments; ``print`` it.

  Returns:
    A plan for ``less_bn(model, plan=plan)``, on this model or another of the same architecture.

  Raises:
    TypeError, ValueError: as :func:`less_bn`.

  Examples:
    >>> from flax import nnx
    >>> import jax, jax.numpy as jnp, optax_boost.nnx
    >>> class Bottleneck(nnx.Module):
    ...   def __init__(self, rngs):
    ...     conv = lambda size: nnx.Conv(4, 4, (size, size), use_bias=False, rngs=rngs)
    ...     self.a, self.b, self.c = conv(1), conv(3), conv(1)
    ...     self.x, self.y, self.z = [nnx.BatchNorm(4, rngs=rngs) for _ in range(3)]
    ...   def __call__(self, x):
    ...     y = nnx.relu(self.y(self.b(nnx.relu(self.x(self.a(x))))))
    ...     return x + self.z(self.c(y))
    >>> x = jax.ShapeDtypeStruct((1, 8, 8, 4), jnp.float32)
    >>> print(optax_boost.nnx.plan_less_bn(Bottleneck(nnx.Rngs(0)), x))
    removed 2 of 3 BatchNorms: x, y
    kept, last of its residual branch: z
  """
  _adapter.check_model(model)
  trace = functools.partial(_trace, model)
  return _less_bn.make_plan(trace, args, kwargs, fn_flag, bias, predicate, multiplier)


def less_bn(
  model: nnx.Module,
  *args: Any,
  fn_flag: bool = False,
  bias: bool = False,
  predicate: _less_bn.Predicate | None = None,
  multiplier: float = 1.0,
  plan: _less_bn.LessBNPlan | None = None,
  **kwargs: Any,
) -> Any:
  """Returns a copy of a model with fewer BatchNorms: of each bottleneck's branch the last stays.

  Which BatchNorm stands where is read from a trace of the model, not from names: a residual
  block is an addition whose two operands stem from one value; its branch is the side with more
  layers. The stem's and the shortcuts' BatchNorms stay, as do those of basic blocks (two layers),
  as in MindSpore.

  The copy has arrays of its own. Removing BatchNorms changes the function, so do it before
  training, or very early. For evaluation, apply the plan of the training to a fresh model, load the
  trained weights (:func:`load_original`) and call ``model.eval()``.

  Args:
    model: the model; it is not changed.
    *args: the model's inputs, as for a call, to trace it; ``jax.ShapeDtypeStruct`` will do.
    fn_flag: whether the last dense layer becomes a :class:`NormalizedDense`, which keeps its
      kernel and bias.
    bias: whether a convolution or dense layer without bias gets one, of zeros, where the
      BatchNorm after it goes.
    predicate: which BatchNorms go, as a function of its place (path, role,
      layers). None: those inside of a branch of at least three layers. To take in basic blocks:
      ``lambda place: place.role == "inner"``.
    multiplier: the initial value of the head's multiplier. Raising it sharpens the predictions from
      the start; MindSpore starts from 1.
    plan: a plan of :func:`plan_less_bn`, instead of all of these.
    **kwargs: the model's keyword arguments.

  Returns:
    A model of the same class.

  Raises:
    TypeError: `model` is no NNX module, or an option of the wrong kind.
    ValueError: the plan is for another architecture, `multiplier` is not positive, or there are
      neither inputs nor a plan.

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

  References:
    MindSpore Boost's ``LessBN``, which normalizes the last dense layer of every container and
    drops their biases.
  """
  _adapter.check_model(model)
  trace = functools.partial(_trace, model)
  plan = _less_bn.make_plan(trace, args, kwargs, fn_flag, bias, predicate, multiplier, plan)
  copy = copy_model(model)
  by_path = modules(copy)

  def layer(path: str, *kinds: type) -> Any:
    if not isinstance(by_path.get(path), kinds):
      raise ValueError(
        f"The plan is for another architecture: at '{path}' it expects a {kinds[0].__name__}, the"
        f" model has {type(by_path[path]).__name__ if path in by_path else 'nothing'}."
      )
    return by_path[path]

  norms = [layer(path, nnx.BatchNorm) for path in plan.removed]
  replacements: dict[int, Any] = {id(norm): RemovedBatchNorm(norm.dtype) for norm in norms}
  for path in plan.biases:
    bare = layer(path, *_KERNEL_LAYERS)
    bare.bias = nnx.Param(jnp.zeros(bare.kernel.shape[-1], bare.param_dtype))
    bare.use_bias = True
  if plan.head is not None:
    dense = layer(plan.head, nnx.Linear)
    replacements[id(dense)] = _normalized(dense, plan.multiplier)
  _replace(copy, replacements)
  return copy


def load_original(model: nnx.Module, checkpoint: Any) -> _less_bn.LoadReport:
  """Loads the checkpoint of an original model into that after :func:`less_bn`, in place.

  Args:
    model: the model after :func:`less_bn`.
    checkpoint: the original model, its ``nnx.state``, or a nested dict of its arrays, such as
      Orbax restores without a target. That of a model after :func:`less_bn` loads too, with nothing
      left over.

  Returns:
    A report that prints: the arrays loaded, left over, and missing in the checkpoint.

  Raises:
    TypeError: `model` is no NNX module, or `checkpoint` or a value of it of the wrong kind.
    ValueError: an array does not fit its place, or nothing fits.

  Examples:
    >>> from flax import nnx
    >>> import jax.numpy as jnp, optax_boost.nnx
    >>> model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    >>> print(optax_boost.nnx.load_original(model, {"kernel": jnp.eye(2), "scale": jnp.ones(2)}))
    loaded: 1 of 2 arrays
    left over in the checkpoint: scale
    not in the checkpoint, left as they were: bias
  """
  _adapter.check_model(model)
  if isinstance(checkpoint, nnx.Module):
    checkpoint = nnx.state(checkpoint)
  if isinstance(checkpoint, nnx.State):
    checkpoint = _adapter.as_pure(checkpoint)
  words = "a model, an nnx.State or a nested dict of arrays"
  _base.check_type("checkpoint", checkpoint, Mapping, words)
  state, rngs = (_adapter.as_pure(nnx.state(model, kind)) for kind in (..., nnx.RngState))
  new, report = _less_bn.load_tree(state, checkpoint, ignore=_tree.leaf_paths(rngs))
  nnx.update(model, new)
  return report


def copy_model(model: nnx.Module) -> Any:
  """Copies a model with its arrays, so that either can be donated."""
  graphdef, state = nnx.split(model)
  copied = jax.tree.map(lambda x: jnp.array(x) if isinstance(x, jax.Array) else x, state)
  return nnx.merge(graphdef, copied)


def _trace(model: nnx.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _less_bn.Trace:
  copy = nnx.clone(model)
  by_path = modules(copy)
  norms = {path: m for path, m in by_path.items() if isinstance(m, nnx.BatchNorm)}
  _replace(copy, {id(norm): RemovedBatchNorm(norm.dtype, path) for path, norm in norms.items()})
  graphdef, params, state = _adapter.split(nnx.Param, copy)

  def apply(params: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
    return _adapter.merge(graphdef, params, state)[0](*args, **kwargs)

  return (
    _less_bn.trace(apply, params, state, args, kwargs),
    list(norms),
    [p for p, m in by_path.items() if isinstance(m, _KERNEL_LAYERS) and m.bias is None],
    [p for p, m in by_path.items() if isinstance(m, nnx.Linear)],
  )


def _normalized(dense: nnx.Linear, multiplier: float) -> _head.NormalizedDense:
  head = _head.NormalizedDense(
    dense.in_features,
    dense.out_features,
    use_bias=dense.bias is not None,
    dtype=dense.dtype,
    param_dtype=dense.param_dtype,
    multiplier_init=nnx.initializers.constant(multiplier),
    rngs=nnx.Rngs(0),
  )
  # The variables themselves, with their metadata.
  head.kernel, head.bias = dense.kernel, dense.bias
  return head


def modules(model: nnx.Module, kind: type = nnx.Module) -> dict[str, Any]:
  """The modules of a kind in a model, by path."""
  graph = nnx.iter_graph(model)
  return {"/".join(map(str, path)): node for path, node in graph if isinstance(node, kind)}


def _replace(model: nnx.Module, replacements: dict[int, Any]) -> None:
  """Puts other modules in place of some, wherever they are referred to."""

  def is_node(value: Any) -> bool:
    return isinstance(value, nnx.Module | nnx.Variable)

  def swap(value: Any) -> Any:
    return replacements.get(id(value), value)

  for node in modules(model).values():
    for name, value in list(vars(node).items()):
      if any(id(leaf) in replacements for leaf in jax.tree.leaves(value, is_leaf=is_node)):
        new = jax.tree.map(swap, value, is_leaf=is_node)
        setattr(node, name, new if is_node(new) else nnx.data(new))

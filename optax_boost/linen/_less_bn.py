"""Fewer BatchNorms for Flax Linen modules, by intercepting their calls."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

from flax import linen as nn
import jax

from optax_boost import _less_bn
from optax_boost.linen import _adapter
from optax_boost.linen import _head

_KERNEL_LAYERS = (nn.Conv, nn.ConvTranspose, nn.Dense)
# The rng streams that a module may ask for fall back to this one.
_TRACE_SEED = 0


@dataclasses.dataclass(frozen=True)
class Unbound:
  """Keeps a module as it is: Linen would adopt one in a field, under the field's name."""

  module: nn.Module


class LessBN(nn.Module):
  """A module with fewer BatchNorms; made by :func:`less_bn`.

  Its variables have the paths of the module's own. Methods other than ``__call__`` are reached by
  name: ``apply(variables, x, method="features")``.

  Attributes:
    original: the original module.
    plan: the changes.
  """

  original: Unbound
  plan: _less_bn.LessBNPlan

  def setup(self) -> None:
    """Puts the original in this module's own scope, as ``apply`` would."""
    # Not by assignment, which would adopt it.
    object.__setattr__(self, "_bound", self.original.module.clone(parent=self.scope))

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    """Calls the module with its own arguments."""
    return self._run("__call__", args, kwargs)

  def __getattr__(self, name: str) -> Any:
    original = self.__dict__.get("original")
    method = None if original is None else getattr(type(original.module), name, None)
    if name.startswith("_") or not callable(method):
      return super().__getattr__(name)

    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
      return module._run(name, args, kwargs)

    return call if self.scope is None else functools.partial(call, self)

  def _run(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    met: set[str] = set()
    base = len(self.path)

    def intercept(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
      if context.method_name != "__call__":
        return next_fun(*args, **kwargs)
      path = "/".join(context.module.path[base:])
      met.add(path)
      return self._instead(path, context.module, next_fun)(*args, **kwargs)

    with nn.intercept_methods(intercept):
      output = getattr(self._bound, method)(*args, **kwargs)
    head = [] if self.plan.head is None else [self.plan.head]
    planned = {*self.plan.removed, *self.plan.biases, *head}
    missed = planned - met
    # Another call than the plan was made for may leave out a branch, such as an auxiliary head.
    if missed and method == "__call__" and (self.is_initializing() or missed == planned):
      raise ValueError(
        f"The plan is for another architecture or call: the module has no '{min(missed)}'. Make it"
        " with `plan_less_bn` from this module. If it has `nn.jit` inside, take that off: it keeps"
        " traces from before, whose calls can't be intercepted."
      )
    return output

  @nn.nowrap
  def _instead(self, path: str, module: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    if path in self.plan.removed and isinstance(module, nn.BatchNorm):
      return functools.partial(_input_of, module)
    if path in self.plan.biases and isinstance(module, _KERNEL_LAYERS) and not module.use_bias:
      return module.clone(parent=module.scope, use_bias=True)
    if path == self.plan.head and isinstance(module, nn.Dense):
      return _head.NormalizedDense(
        module.features,
        use_bias=module.use_bias,
        dtype=module.dtype,
        param_dtype=module.param_dtype,
        kernel_init=module.kernel_init,
        bias_init=module.bias_init,
        multiplier_init=nn.initializers.constant(self.plan.multiplier),
        parent=module.scope,  # type: ignore[arg-type]
      )
    return call


def _input_of(norm: nn.BatchNorm, x: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
  return x if norm.dtype is None else x.astype(norm.dtype)


def plan_less_bn(
  module: nn.Module,
  *args: Any,
  fn_flag: bool = False,
  bias: bool = False,
  predicate: _less_bn.Predicate | None = None,
  multiplier: float = 1.0,
  **kwargs: Any,
) -> _less_bn.LessBNPlan:
  """Plans :func:`less_bn`, with its arguments: :func:`optax_boost.nnx.plan_less_bn` for Linen.

  Examples:
    >>> from flax import linen as nn
    >>> import jax, jax.numpy as jnp, optax_boost.linen
    >>> class Bottleneck(nn.Module):
    ...   @nn.compact
    ...   def __call__(self, x):
    ...     y = x
    ...     for size in (1, 3, 1):
    ...       y = nn.Conv(4, (size, size), use_bias=False)(nn.relu(y))
    ...       y = nn.BatchNorm(use_running_average=False)(y)
    ...     return x + y
    >>> x = jax.ShapeDtypeStruct((1, 8, 8, 4), jnp.float32)
    >>> print(optax_boost.linen.plan_less_bn(Bottleneck(), x))
    removed 2 of 3 BatchNorms: BatchNorm_0, BatchNorm_1
    kept, last of its residual branch: BatchNorm_2
  """
  _adapter.check_module(module)
  variables, args = _variables_and_inputs(args)
  trace = functools.partial(_trace, module, variables)
  return _less_bn.make_plan(trace, args, kwargs, fn_flag, bias, predicate, multiplier)


def less_bn(
  module: nn.Module,
  *args: Any,
  fn_flag: bool = False,
  bias: bool = False,
  predicate: _less_bn.Predicate | None = None,
  multiplier: float = 1.0,
  plan: _less_bn.LessBNPlan | None = None,
  **kwargs: Any,
) -> LessBN:
  """Returns a module with fewer BatchNorms: :func:`optax_boost.nnx.less_bn` for Linen.

  The arguments are the same. The module's variables, as ``module.init`` returned them, may come
  before its inputs; without them ``module.init`` is traced.

  Initialize it anew, or load variables of the original module with :func:`load_original`: kernels
  and biases keep their paths. For evaluation use the same module, with ``train=False`` or whatever
  the module's own flag is. Calls are intercepted, so a module with ``nn.jit`` inside, which keeps
  traces from before, is refused.

  Returns:
    A module to call, ``init`` and ``apply`` like the original.

  Raises:
    TypeError: `module` is no Linen module, or an option of the wrong kind.
    ValueError: `multiplier` is not positive, or there are neither inputs nor a plan; when called:
      the plan is for another architecture.

  Examples:
    >>> from flax import linen as nn
    >>> import jax, jax.numpy as jnp, optax_boost.linen
    >>> x = jnp.ones((3, 4))
    >>> module = nn.Sequential([nn.BatchNorm(use_running_average=False), nn.Dense(2)])
    >>> less = optax_boost.linen.less_bn(module, x, fn_flag=True, predicate=lambda place: True)
    >>> variables = less.init(jax.random.key(0), x)
    >>> sorted(variables["params"]), sorted(variables["params"]["layers_1"])
    (['layers_1'], ['bias', 'kernel', 'multiplier'])
  """
  _adapter.check_module(module)
  variables, args = _variables_and_inputs(args)
  trace = functools.partial(_trace, module, variables)
  plan = _less_bn.make_plan(trace, args, kwargs, fn_flag, bias, predicate, multiplier, plan)
  return LessBN(Unbound(module), plan)


def _variables_and_inputs(args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
  return (args[0], args[1:]) if args and _adapter.are_variables(args[0]) else (None, args)


def _trace(
  module: nn.Module, variables: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _less_bn.Trace:
  norms: dict[str, None] = {}
  layers: dict[str, Any] = {}
  key = jax.random.key(_TRACE_SEED)

  def intercept(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
    path = "/".join(context.module.path)
    if context.method_name == "__call__" and isinstance(context.module, nn.BatchNorm):
      norms[path] = None
      return _less_bn.mark_norm(_input_of(context.module, *args, **kwargs), path)
    if isinstance(context.module, _KERNEL_LAYERS):
      layers[path] = context.module
    return next_fun(*args, **kwargs)

  def apply(params: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
    variables = {"params": params, **state}
    return module.apply(variables, *args, rngs=key, mutable=list(state), **kwargs)[0]

  with nn.intercept_methods(intercept):
    if variables is None:
      init, arrays = _less_bn.on_arrays(functools.partial(module.init, key), args, kwargs)
      variables = jax.eval_shape(init, (), *arrays)
    state = {name: value for name, value in variables.items() if name != "params"}
    flows = _less_bn.trace(apply, variables.get("params", {}), state, args, kwargs)
  return (
    flows,
    list(norms),
    [path for path, layer in layers.items() if not layer.use_bias],
    [path for path, layer in layers.items() if isinstance(layer, nn.Dense)],
  )


def load_original(variables: Any, checkpoint: Any) -> tuple[Any, _less_bn.LoadReport]:
  """Loads variables of an original module into those of the module after :func:`less_bn`.

  Args:
    variables: the output of ``init`` of the module after :func:`less_bn`.
    checkpoint: the original module's variables, with the same collections.

  Returns:
    The variables, and a report that prints: the arrays loaded, left over, and missing in the
    checkpoint.

  Raises:
    TypeError: `variables` or `checkpoint` is no dict, or a value of it no array.
    ValueError: an array does not fit its place, or nothing fits.

  Examples:
    >>> import jax.numpy as jnp, optax_boost.linen
    >>> variables = {"params": {"fc": {"kernel": jnp.ones((2, 2)), "multiplier": jnp.ones(1)}}}
    >>> checkpoint = {"params": {"fc": {"kernel": jnp.eye(2)}, "norm": {"scale": jnp.ones(2)}}}
    >>> variables, report = optax_boost.linen.load_original(variables, checkpoint)
    >>> print(report)
    loaded: 1 of 2 arrays
    left over in the checkpoint: params/norm/scale
    not in the checkpoint, left as they were: params/fc/multiplier
  """
  for name, tree in (("variables", variables), ("checkpoint", checkpoint)):
    _adapter.check_collections(name, tree)
  return _less_bn.load_tree(variables, checkpoint)

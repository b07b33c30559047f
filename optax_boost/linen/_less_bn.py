"""``less_bn``: removes BatchNorms from a Linen module by intercepting their calls."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

from flax import linen as nn
import jax

from optax_boost._foundation import _types
from optax_boost._methods import _less_bn
from optax_boost.linen import _module, _normalized_dense


@dataclasses.dataclass(frozen=True)
class Unbound:
  """Hides a module in a field from Linen, which would make it a submodule."""

  module: nn.Module


class LessBN(nn.Module):
  """A module with fewer BatchNorms; made by :func:`less_bn`.

  Its variables have the same paths as the variables of the original module. Call other methods than
  ``__call__`` by name: ``apply(variables, x, method="features")``.

  Attributes:
    plan: which BatchNorms are removed, and which dense layer is normalized.
  """

  original: Unbound
  plan: _less_bn.Plan

  def setup(self) -> None:
    """Binds the original module to this module's scope, so that the variables' paths stay."""
    # A plain assignment would make the original a submodule.
    object.__setattr__(self, "_bound", self.original.module.clone(parent=self.scope))

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
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
    reached: set[str] = set()
    base = len(self.path)

    def intercept(
      next_fun: Callable[..., Any],
      args: tuple[Any, ...],
      kwargs: dict[str, Any],
      context: nn.module.InterceptorContext,
    ) -> Any:
      module, path = context.module, "/".join(context.module.path[base:])
      if context.method_name != "__call__":
        return next_fun(*args, **kwargs)
      reached.add(path)
      if path in self.plan.removed and isinstance(module, nn.BatchNorm):
        return _input_of(module, *args, **kwargs)
      if path == self.plan.head and _is_dense(module):
        fields = {f.name: getattr(module, f.name) for f in dataclasses.fields(nn.Dense)}
        next_fun = _normalized_dense.NormalizedDense(**fields | {"parent": module.scope})
      return next_fun(*args, **kwargs)

    with nn.intercept_methods(intercept):
      output = getattr(self._bound, method)(*args, **kwargs)
    # A call may skip a branch, such as an auxiliary head in evaluation, but `init` must reach all
    # BatchNorms.
    if self.is_initializing() and (missed := {*self.plan.removed} - reached):
      raise ValueError(
        f"`less_bn` planned to remove '{min(missed)}', which this call doesn't reach. Call `init`"
        " with the inputs that `less_bn` got, and remove an `nn.jit` inside of the module, whose"
        " traces from before can't be intercepted."
      )
    return output


def _is_dense(layer: nn.Module) -> bool:
  return isinstance(layer, nn.Dense) and not isinstance(layer, _normalized_dense.NormalizedDense)


def _input_of(norm: nn.BatchNorm, x: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
  return x if norm.dtype is None else x.astype(norm.dtype)


def less_bn(
  module: nn.Module,
  *args: Any,
  fn_flag: bool = False,
  predicate: _less_bn.Predicate | None = None,
  on_plan: _less_bn.PlanCallback | None = None,
  **kwargs: Any,
) -> LessBN:
  """Returns a module with fewer BatchNorms and the original's methods (``init``, ``apply``, ...).

  The arguments are as in :func:`optax_boost.nnx.less_bn`; ``module.init`` and a call are traced
  with the inputs. Kernels and biases keep their paths, so variables of the original module with
  these paths fit. Use the returned module for evaluation, too, with ``train=False`` or the module's
  own flag. ``init`` refuses a module with ``nn.jit`` inside, since ``nn.jit`` keeps earlier traces,
  in which calls can't be intercepted.

  Raises:
    ValueError: there are no inputs. In ``init``: a BatchNorm to remove is not called.

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
  _module.check(module)
  trace = functools.partial(_trace_module, module)
  plan = _less_bn.make_plan(trace, args, kwargs, fn_flag, predicate, on_plan)
  return LessBN(Unbound(module), plan)


def _trace_module(
  module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _less_bn.Trace:
  norms: dict[str, None] = {}
  dense: dict[str, None] = {}
  key = jax.random.key(0)

  def intercept(
    next_fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    context: nn.module.InterceptorContext,
  ) -> Any:
    path = "/".join(context.module.path)
    if context.method_name == "__call__" and isinstance(context.module, nn.BatchNorm):
      norms[path] = None
      return _less_bn.mark_norm(_input_of(context.module, *args, **kwargs), path)
    if _is_dense(context.module):
      dense[path] = None
    return next_fun(*args, **kwargs)

  def apply(params: _types.Params, state: _types.ModelState, *args: Any, **kwargs: Any) -> Any:
    variables = {"params": params, **state}
    return module.apply(variables, *args, rngs=key, mutable=list(state), **kwargs)[0]

  with nn.intercept_methods(intercept):
    init, arrays = _less_bn.on_arrays(functools.partial(module.init, key), args, kwargs)
    state = dict(jax.eval_shape(init, (), *arrays))
    graphs = _less_bn.trace_data_graphs(apply, state.pop("params", {}), state, args, kwargs)
  return _less_bn.Trace(graphs, list(norms), list(dense))

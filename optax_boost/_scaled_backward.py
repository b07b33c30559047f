r"""A backward pass with a scale of its own in each group of layers.

Every value of the forward pass belongs to the last group whose params went into it. In the
backward pass its cotangent is to be

  s[group] * (derivative of the loss)

so where a value of group a meets one of group b > a, the cotangent that comes back to it is
multiplied by s[a] / s[b]. The loss itself is multiplied by the scale of its group. By the chain
rule the gradient of a leaf is then s[its group] times the true one, in any program: with residual
connections across groups, with tied weights, with penalties on the params.

Source: MindSpore Boost's ``GroupLossScaleManager``, whose layers must be wrapped by hand.
"""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import TypeAlias

import jax
from jax.extend import core as jax_core
import jax.numpy as jnp
import optax

from optax_boost import _base
from optax_boost import _groups
from optax_boost import _tree

# The group that a value belongs to; None for values made of no params.
_Group: TypeAlias = int | None


@jax.custom_vjp
def group_boundary(x: jax.Array, ratio: jax.Array) -> jax.Array:
  """The identity, whose derivative multiplies the cotangent by `ratio`, in at least float32."""
  del ratio
  return x


def _boundary_backward(ratio: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
  wide = g.astype(_tree.accumulator_dtype(g.dtype)) * ratio
  return wide.astype(g.dtype), jnp.zeros_like(ratio)


group_boundary.defvjp(lambda x, ratio: (x, ratio), _boundary_backward)


def scale_by_group(
  loss_fn: Callable[..., Any], groups: _groups.Groups, *, has_aux: bool = False
) -> Callable[..., Any]:
  """Makes a loss whose gradient is scaled by group, for :func:`group_loss_scale` in your own loop.

  Where the groups meet is read from a trace of the loss; the model need not be changed. Loops
  (``scan``, ``while_loop``) and conditionals count as one layer: inside them the scale is that of
  the last group that enters.

  Args:
    loss_fn: ``loss_fn(params, *args)``, the scalar loss, or with `has_aux` ``(loss, aux)``.
    groups: a :class:`LayerGroups`, or a sequence of regular expressions, one per group in the
      order of the forward pass.
    has_aux: whether `loss_fn` returns aux.

  Returns:
    ``scaled(params, group_loss_scale, *args)``: the loss in float32, times the scale of its last
    group, and aux as it is. Its gradient with respect to the params is, leaf by leaf, the scale of
    the leaf's group times that of `loss_fn`.

  Raises:
    TypeError: an argument is of the wrong kind.
    ValueError: when called: the groups are of other params, or there are not as many scales.

  Examples:
    >>> import jax, jax.numpy as jnp, optax_boost
    >>> def loss_fn(params, x):
    ...   return jnp.sum(jnp.tanh(x @ params["body"]) @ params["head"])
    >>> params = {"body": jnp.eye(2), "head": jnp.ones(2)}
    >>> scaled = optax_boost.scale_by_group(loss_fn, ["body", "head"])
    >>> grad = jax.grad(scaled)(params, jnp.array([8.0, 2.0]), jnp.ones((1, 2)))
    >>> true = jax.grad(loss_fn)(params, jnp.ones((1, 2)))
    >>> float(grad["body"][0, 0] / true["body"][0, 0]), float(grad["head"][0] / true["head"][0])
    (8.0, 2.0)
  """
  _base.check_callable("loss_fn", loss_fn, "loss_fn(params, *args)")
  _base.check_bool("has_aux", has_aux)
  num_groups = _groups.count_groups(groups)

  def scaled(params: optax.Params, group_loss_scale: jax.Array, *args: Any) -> Any:
    _base.check_array("group_loss_scale", group_loss_scale, (num_groups,))
    numbers = _groups.group_numbers(params, groups, "scale_by_group")

    def objective(params: optax.Params) -> tuple[jax.Array, Any]:
      return loss_fn(params, *args) if has_aux else (loss_fn(params, *args), None)

    value, aux = scaled_objective(objective, params, numbers, group_loss_scale)
    return (value, aux) if has_aux else value

  return scaled


def scaled_objective(
  objective: Callable[[optax.Params], tuple[jax.Array, Any]],
  params: optax.Params,
  numbers: Sequence[int],
  scales: jax.Array,
) -> tuple[jax.Array, Any]:
  """Evaluates ``objective(params) -> (value, aux)`` so that its derivative is scaled by group."""
  closed, shapes = jax.make_jaxpr(objective, return_shape=True)(params)
  arguments = zip(jax.tree.leaves(params), numbers, strict=True)
  constants: list[tuple[Any, _Group]] = [(value, None) for value in closed.consts]
  outputs = _evaluate(closed.jaxpr, [*constants, *arguments], scales)
  value, group = outputs[0]
  if group is not None:
    value = value.astype(jnp.float32) * scales[group]
  leaves = [value, *(rest for rest, _ in outputs[1:])]
  return jax.tree.unflatten(jax.tree.structure(shapes), leaves)


def _evaluate(
  jaxpr: Any, inputs: Sequence[tuple[Any, _Group]], scales: jax.Array
) -> list[tuple[Any, _Group]]:
  """Runs a program on values with their groups; its results have groups as well."""
  values = dict(zip([*jaxpr.constvars, *jaxpr.invars], inputs, strict=True))
  raised: dict[tuple[Any, int], Any] = {}

  def read(atom: Any) -> tuple[Any, _Group]:
    return (atom.val, None) if isinstance(atom, jax_core.Literal) else values[atom]

  def raise_to(atom: Any, top: _Group) -> Any:
    value, group = read(atom)
    if group is None or top is None or group == top:
      return value
    if (atom, top) not in raised:
      raised[atom, top] = group_boundary(value, scales[group] / scales[top])
    return raised[atom, top]

  for equation in jaxpr.eqns:
    groups = {read(atom)[1] for atom in equation.invars} - {None}
    inside = _program_of(equation) if len(groups) > 1 else None
    if inside is not None:
      outputs = _call(equation, inside, [read(atom) for atom in equation.invars], scales)
    else:
      top = max(groups, default=None)  # type: ignore[type-var]
      variables = [v for v in equation.invars if not isinstance(v, jax_core.Literal)]
      results = _run(jaxpr, equation, {v: raise_to(v, top) for v in variables})
      outputs = [
        (value, top if jnp.issubdtype(variable.aval.dtype, jnp.floating) else None)
        for value, variable in zip(results, equation.outvars, strict=True)
      ]
    values.update(zip(equation.outvars, outputs, strict=True))
  return [read(atom) for atom in jaxpr.outvars]


def _program_of(equation: Any) -> Any:
  """The program of a nested ``jit`` or ``checkpoint``, inside which groups may meet."""
  if equation.primitive.name in ("jit", "pjit", "checkpoint", "remat", "remat2"):
    return equation.params["jaxpr"]
  return None


def _call(
  equation: Any, program: Any, inputs: list[tuple[Any, _Group]], scales: jax.Array
) -> list[tuple[Any, _Group]]:
  closed = isinstance(program, jax_core.ClosedJaxpr)
  jaxpr = program.jaxpr if closed else program
  constants = [(value, None) for value in program.consts] if closed else []
  if "policy" not in equation.params:
    return _evaluate(jaxpr, [*constants, *inputs], scales)
  groups: list[_Group] = []

  def run(*values: Any) -> list[Any]:
    tagged = [(value, group) for value, (_, group) in zip(values, inputs, strict=True)]
    outputs = _evaluate(jaxpr, [*constants, *tagged], scales)
    groups[:] = [group for _, group in outputs]
    return [value for value, _ in outputs]

  again = jax.checkpoint(
    run, policy=equation.params["policy"], prevent_cse=equation.params["prevent_cse"]
  )
  values = again(*(value for value, _ in inputs))
  return list(zip(values, groups, strict=True))


def _run(jaxpr: Any, equation: Any, inputs: dict[Any, Any]) -> list[Any]:
  """Runs one equation of a program, as a program of its own."""
  debug_info = jaxpr.debug_info._replace(
    arg_names=("",) * len(inputs), result_paths=("",) * len(equation.outvars)
  )
  alone = jaxpr.replace(
    constvars=[],
    invars=list(inputs),
    outvars=equation.outvars,
    eqns=[equation],
    effects=equation.effects,
    debug_info=debug_info,
  )
  return jax_core.jaxpr_as_fun(jax_core.ClosedJaxpr(alone, []))(*inputs.values())

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
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_boost import _arrays
from optax_boost import _base
from optax_boost import _groups
from optax_boost import _jaxpr


@jax.custom_vjp
def group_boundary(x: jax.Array, ratio: jax.Array) -> jax.Array:
  """The identity, whose derivative multiplies the cotangent by `ratio`, in at least float32."""
  return x


def _boundary_backward(ratio: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
  return (_arrays.widen(g) * ratio).astype(g.dtype), jnp.zeros_like(ratio)


group_boundary.defvjp(lambda x, ratio: (x, ratio), _boundary_backward)


def scale_by_group(
  loss_fn: Callable[..., Any], groups: _groups.Groups, *, has_aux: bool = False
) -> Callable[..., Any]:
  """Makes a loss whose gradient is scaled by group, for :func:`group_loss_scale` in your own loop.

  Where the groups meet is read from a trace of the loss. Loops (``scan``, ``while_loop``) and
  conditionals count as one layer, of the last group that enters.

  Args:
    loss_fn: ``loss_fn(params, *args)``, the scalar loss, or with `has_aux` ``(loss, aux)``.
    groups: a :class:`LayerGroups`, or regular expressions, one per group in the order of the
      forward pass.
    has_aux: whether `loss_fn` returns aux.

  Returns:
    ``scaled(params, group_loss_scale, *args)``: the loss in float32, times the scale of its last
    group, and aux as it is. Its gradient is, leaf by leaf, the scale of the leaf's group times that
    of `loss_fn`.

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
  arguments = map(_Member, jax.tree.leaves(params), numbers)
  value, *rest = _ScaledByGroup(scales).run(closed, list(arguments))
  scaled = value.array
  if value.group is not None:
    scaled = scaled.astype(jnp.float32) * scales[value.group]
  return jax.tree.unflatten(jax.tree.structure(shapes), [scaled, *(m.array for m in rest)])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Member:
  """A value and its group; None for values made of no params."""

  array: Any
  group: int | None = dataclasses.field(default=None, metadata={"static": True})


class _ScaledByGroup(_jaxpr.Evaluator[_Member]):
  """Computes a program with a boundary wherever values of two groups meet."""

  def __init__(self, scales: jax.Array):
    self._scales = scales
    # By the identities of the values, which it keeps: a value that is used twice is raised once.
    self._raised: dict[tuple[int, int], tuple[Any, jax.Array]] = {}

  def constant(self, value: Any) -> _Member:
    return _Member(value)

  def visit(self, equation: Any, inputs: list[_Member]) -> Sequence[_Member]:
    groups = {member.group for member in inputs} - {None}
    # Nothing happens inside a program of one group.
    return super().visit(equation, inputs) if len(groups) > 1 else self.operation(equation, inputs)

  def operation(self, equation: Any, inputs: list[_Member]) -> list[_Member]:
    top = max((m.group for m in inputs if m.group is not None), default=None)
    results = self.bind(equation, [self._raise_to(member, top) for member in inputs])
    return [
      _Member(value, top if jnp.issubdtype(variable.aval.dtype, jnp.floating) else None)
      for value, variable in zip(results, equation.outvars, strict=True)
    ]

  def _raise_to(self, member: _Member, top: int | None) -> Any:
    value, group = member.array, member.group
    if group is None or top is None or group == top:
      return value
    key = (id(value), top)
    if key not in self._raised:
      self._raised[key] = value, group_boundary(value, self._scales[group] / self._scales[top])
    return self._raised[key][1]

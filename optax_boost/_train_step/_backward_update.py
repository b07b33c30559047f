"""Makes the optimizer's step inside of the backward pass, layer by layer.

A leaf that one scan slices is updated in the loop of this scan's derivative, with its moments,
masters and other arrays that are of each layer. So its gradients never exist at once. The other
arrays are updated after the backward pass, as in any step.
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_boost._foundation import _arrays, _extra_args, _types
from optax_boost._step import _apply_gradients, _slots
from optax_boost._trace import _jaxpr, _layer_results, _updating_scans
from optax_boost._train_step import _objective, _replaced_values, _traced_loss


class Made(NamedTuple):
  """A step that was made inside of the backward pass.

  Attributes:
    output: ``(loss, aux)``.
    params: the new params.
    opt_state: the new state.
    new_values: the values that the gradient replaces.
    squares: the sum of the squares of the gradient, if it is measured.
    scans: how many scans update their leaves.
  """

  output: tuple[_types.FloatScalar, Any]
  params: optax.Params
  opt_state: optax.OptState
  new_values: list[jax.Array]
  squares: _types.FloatScalar
  scans: int


@dataclasses.dataclass(frozen=True, eq=False)
class BackwardUpdate:
  """The step of a transformation inside of the backward pass of a loss.

  Attributes:
    tx: the transformation.
    traced: the loss as a jaxpr.
    values: the values that the gradient replaces.
    extra_args: the extra arguments of ``update`` that are no arrays.
    late_args: a function from aux to the extra arguments that the forward pass returns.
    measures: whether to sum up the squares of the gradient.
    must_depend: whether to raise an error if the loss does not depend on the params.
  """

  tx: optax.GradientTransformation
  traced: _traced_loss.TracedLoss
  values: list[jax.Array]
  extra_args: Mapping[str, Any]
  late_args: Callable[[Any], dict[str, Any]]
  measures: bool
  must_depend: bool

  def make(self, params: optax.Params, opt_state: optax.OptState) -> Made:
    """Computes the loss, and makes the step.

    Raises:
      ValueError: the optimizer needs the gradients of several layers at once.
    """
    leaves, structure = jax.tree.flatten(params)
    arrays, state_structure = jax.tree.flatten(opt_state)
    inputs = [*leaves, *arrays]
    count = len(leaves)
    scans = _updating_scans.find_scans(self.traced.program, count)
    results = self._find(params, opt_state, scans)
    updates = [self._update(results, group, inputs) for group in range(len(scans))]
    stacks = [[inputs[i] for i in update.axes] for update in updates]

    def loss(leaves: Any, values: Any, stacks: Any, scalars: Any) -> Any:
      (value, aux), scalars = self.traced.run_with_updates(leaves, values, updates, stacks, scalars)
      if self.must_depend:
        _objective.require_dependence(value, (leaves, stacks))
      return (value, scalars), (value, aux)

    # Forward, the scalars may have any values.
    scalars = jnp.zeros_like(self.traced.shapes()[0]), jnp.zeros([])
    primals = leaves, self.values, stacks, scalars
    (value, _), pull, output = jax.vjp(loss, *primals, has_aux=True)
    seeds = jnp.ones_like(value), (value, scalars[1])
    derivatives, new_values, new_stacks, (_, squares) = pull(seeds)
    updated = {i: derivatives[i] for leaves in scans for i in leaves}
    for update, new in zip(updates, new_stacks, strict=True):
      updated |= dict(zip(update.axes, new, strict=True))
    # A leaf that was updated has no gradient here; nothing reads what stands in its place.
    grads = [_objective.steepest_ascent(x) for x in derivatives]
    if self.measures:
      others = [x for i, x in enumerate(grads) if i not in updated]
      squares += _arrays.sum_squares_of_tree(others).astype(squares.dtype)
    late = jax.tree.leaves(self.late_args(output[1]))
    new = results.compute_others([*grads, *inputs, value, *late], updated)
    new = [x.astype(old.dtype) for x, old in zip(new, inputs, strict=True)]
    return Made(
      output,
      jax.tree.unflatten(structure, new[:count]),
      jax.tree.unflatten(state_structure, new[count:]),
      list(map(_replaced_values.keep_unused, self.values, new_values)),
      squares,
      len(scans),
    )

  def _update(
    self, results: _layer_results.LayerResults, group: int, inputs: list[jax.Array]
  ) -> _updating_scans.Update:
    """Returns the arithmetic for a layer of a scan's leaves; `inputs` are params, then state."""
    leaves, axes, count = results.groups[group], results.stacked[group], results.count
    operands, loss = results.operands(group), count + len(inputs)
    fixed = {i: inputs[i - count] for i, axis in operands.items() if axis is None and i < loss}

    def update(index: Any, grads: Any, slices: Any, fixed_values: Any, scalars: Any) -> Any:
      value, squares = scalars
      if self.measures:
        squares += _arrays.sum_squares_of_tree(grads).astype(squares.dtype)
      known = dict(zip(leaves, map(_objective.steepest_ascent, grads), strict=True))
      known |= {i + count: x for i, x in zip(axes, slices, strict=True)}
      known |= dict(zip(fixed, fixed_values, strict=True)) | {loss: value}
      new = results.compute(group, index, [known[i] for i in operands])
      return new, (value, squares)

    further = {i: axis for i, axis in axes.items() if i not in leaves}
    return _updating_scans.Update(leaves, further, list(fixed.values()), update)

  def _find(
    self, params: optax.Params, opt_state: optax.OptState, scans: list[dict[int, int]]
  ) -> _layer_results.LayerResults:
    """Returns which results of ``update`` are of each layer; raises ValueError if some are not."""
    transformation = _slots.step_of(self.tx)
    if transformation is not None and transformation.freezing is not None:
      raise ValueError(_refusal(self.tx, "`freeze_layers`"))
    loss, aux = self.traced.shapes()
    late = jax.eval_shape(self.late_args, aux)

    @_extra_args.accept_extra_args
    def refused(*args: Any) -> Any:
      raise _layer_results.NotOfEachLayer(
        "a call of the loss or its gradient, as by a line search,"
      )

    def step(grads: Any, params: Any, opt_state: Any, value: Any, late: Any) -> Any:
      extra = {**self.extra_args, **late, "value": value, "grad": grads}
      extra |= dict.fromkeys(("value_fn", "grad_fn", "obj_fn", "full_grad_fn"), refused)
      return _apply_gradients.step_in_place(self.tx, grads, opt_state, params, extra)

    try:
      program = jax.make_jaxpr(_jaxpr.uncached(step))(params, params, opt_state, loss, late)
      count = len(jax.tree.leaves(params))
      first_late = len(program.in_avals) - len(jax.tree.leaves(late))
      later = range(first_late, len(program.in_avals))
      return _layer_results.find(program, count, scans, later)
    except _layer_results.NotOfEachLayer as reason:
      raise ValueError(_refusal(self.tx, str(reason))) from None


def _refusal(tx: optax.GradientTransformation, reason: str) -> str:
  """Returns what to say of a transformation that is not of each layer."""
  step = _slots.step_of(tx)
  if not reason.startswith("`") and step is not None:
    reason = "a check or choice by " + " or ".join(f"`{x.method}`" for x in step.slots.values())
  return (
    f"`update_in_backward` updates each layer as soon as its gradient is known, but {reason} needs"
    " several layers, or all, at once. Clip each entry (`optax.clip`) instead of the global norm,"
    " let `master_weights` and `stochastic_rounding` check nothing (`check=None`), or use"
    ' `accumulate(..., not_finite="restart")`, whose window ends with any optimizer.'
  )

"""One step of an optimizer with its slots, from top to bottom: :func:`init` and :func:`run`.

:func:`run` reads as a list: take the arguments, judge the batch, add it to its window, make the
optimizer's step if it is due, then average and count. Each line is a function of this module, whose
formulas stand in the slots' modules.

A step either returns updates (``tx.update``), and ``lax.cond`` makes the optimizer's step, which
has a reverse-mode derivative; or it returns the new params (``apply_gradients``, the train step),
and a while loop of at most one iteration makes the optimizer's step in place (XLA 10), so that a
skipped step costs nothing. XLA materializes the inputs of a loop. So arithmetic on gradients that
only the optimizer's step needs stands in functions that :func:`_make` calls inside of the loop.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_boost._form import _finiteness, _protocol, _skipped_steps
from optax_boost._foundation import (
  _arrays,
  _conditionals,
  _extra_args,
  _mesh_axes,
  _types,
)
from optax_boost._step import _addition, _kept_leaves, _nesting, _slots, _state


class _Weights(NamedTuple):
  """The params, and their float32 masters if the step keeps masters."""

  params: optax.Params | None
  masters: optax.Params | None = None


class _Updates(NamedTuple):
  """The updates of the kept leaves, which the caller of ``tx.update`` applies."""

  updates: optax.Updates


def init(step: _slots.Step, params: optax.Params) -> _state.StepState:
  """Returns the initial state of a step."""
  kept = _kept_leaves.kept_by(step, params)
  kept_params = kept.take(params)
  wide = kept_params
  if step.scaling or step.precision:
    wide = _arrays.copy_arrays(kept_params, _arrays.accumulator_dtype)
  inner_state = step.inner.init(wide)
  _nesting.check_below(step, inner_state)
  # Each field has an array of its own, since a call can't donate one array twice.
  fields: dict[str, Any] = {"count": jnp.zeros([], jnp.int32), "made": jnp.array(False)}
  if step.leaves_out:
    fields["left_out"] = _state.LeftOutState(jnp.zeros([], jnp.int32))
  if step.accumulation:
    fields["accumulation"] = step.accumulation.init(kept_params, inner_state)
  if step.scaling:
    fields["scaling"] = step.scaling.init()
  if step.precision:
    fields["precision"] = step.precision.init(wide)
  if step.averaging:
    fields["averaging"] = step.averaging.init(params)
  if step.layer_rates:
    step.layer_rates.number_leaves(params)  # checks that the groups are of these params
  if step.spikes:
    fields["spikes"] = step.spikes.init(step.freezing.num_groups if step.freezing else 1)
  if step.freezing:
    fields["freezing"] = step.freezing.init(step.inner, inner_state, params, kept)
  return _state.StepState(inner_state, **fields)


def run(
  step: _slots.Step,
  grads: optax.Updates,
  state: _state.StepState,
  params: optax.Params | None,
  extra_args: _types.ExtraArgs,
  *,
  in_place: bool,
  added: _addition.Added | None = None,
) -> tuple[Any, _state.StepState]:
  """Makes a step; returns the new params if `in_place`, else the updates; and the new state.

  If the backward pass has `added` the gradient to its window, nothing of `grads` but the shapes and
  dtypes is read.
  """
  batch = _take(step, state, grads, params, extra_args, added)
  verdict = _judge(step, state, batch)
  compute_if = functools.partial(_compute_if, in_place)
  window = _add(step, state, batch, verdict.is_good)
  if step.accumulation:
    window = step.accumulation.reduce(window, compute_if)
  passes = _check_result(step, state, batch, window, in_place)
  is_due = _conditionals.both(window.is_due, passes)
  made, moved, inner_state = _make_if(step, state, batch, window, is_due, in_place)
  count = _arrays.increment_if(made, state.count)
  is_finite = jnp.asarray(_conditionals.both(verdict.all_finite, passes))
  fields: dict[str, Any] = {"made": made, "count": count}
  if step.leaves_out:
    counted = _arrays.increment_if(~is_finite, state.left_out.notfinite_count)
    fields["left_out"] = _state.LeftOutState(counted)
  if step.accumulation:
    fields["accumulation"] = step.accumulation.close(window, made, compute_if)
  if step.scaling:
    fields["scaling"] = step.scaling.next(state.scaling, verdict.all_finite)
  if step.precision and isinstance(moved, _Weights):
    fields["precision"] = step.precision.next(state.precision, moved.masters)
  if step.averaging:
    is_bad = ~is_finite | verdict.is_spike
    statistics = _good_statistics(batch, is_bad, state.inner_state, inner_state)
    new_params = _new_params(step, batch, moved)
    fields["averaging"] = step.averaging.averaged(
      state.averaging, count, made, statistics, *new_params
    )
  if step.spikes:
    fields["spikes"] = verdict.spikes
  if step.freezing:
    fields["freezing"] = batch.frozen.next(inner_state, made)
  result = _result(step, batch, moved, in_place)
  return result, state._replace(inner_state=inner_state, **fields)


class _Batch(NamedTuple):
  """The arguments of a step.

  Attributes:
    all_grads: the gradients of all leaves.
    params: the params, or None.
    kept: takes the leaves that some step trains from a tree like the params, and puts them back.
    grads: the gradients of the kept leaves, with zeros for frozen layers.
    extra_args: the extra arguments for the kept leaves, without the step's own.
    frozen: the functions of a step with frozen layers, or None.
    weight: the weight of the micro-batch in its window.
    statistics: the mutable statistics after the forward pass, if they are averaged, by path.
    addend: a tree that the micro-batch adds to its window, or None.
    added: the window's sum, if the backward pass has added the micro-batch, or None.
  """

  all_grads: optax.Updates
  params: optax.Params | None
  kept: _kept_leaves.KeptLeaves
  grads: optax.Updates
  extra_args: _types.ExtraArgs
  frozen: Any
  weight: _types.FloatScalar
  statistics: dict[str, jax.Array]
  addend: optax.Updates | None = None
  added: _addition.Added | None = None


def _take(
  step: _slots.Step,
  state: _state.StepState,
  grads: optax.Updates,
  params: optax.Params | None,
  extra_args: _types.ExtraArgs,
  added: _addition.Added | None,
) -> _Batch:
  """Takes the step's own extra arguments, and leaves out the leaves that no step trains."""
  extra_args = dict(extra_args)
  kept = _kept_leaves.kept_by(step, grads, state.inner_state)
  depth = extra_args.pop("frozen_groups", None)
  frozen, weight, statistics = None, jnp.ones([]), {}
  if step.freezing:
    frozen = step.freezing.at(step.inner, state, grads, kept, depth)
  if step.averaging:
    statistics = step.averaging.new_statistics(extra_args)
  if step.accumulation:
    weight = step.accumulation.take_weight(extra_args)
  used = kept.take(grads)
  if frozen:
    # The verdict and the window are of the layers that this step trains.
    used = frozen.zero(used)
  extra_args = kept.take_arguments(extra_args, params)
  batch = _Batch(grads, params, kept, used, extra_args, frozen, weight, statistics, added=added)
  if not step.accumulation:
    return batch
  if added:
    return batch._replace(addend=added.addend)
  if step.accumulation.device_sums:
    raise ValueError(
      "`accumulate(..., batch_sharding=...)` needs the gradient of each device, which only a train"
      " step computes; got gradients of the whole batch. Call it through"
      " `optax_boost.make_train_step(loss_fn, tx)`, with `accumulate` and the other wrappers around"
      " the whole optimizer, or leave `batch_sharding` out."
    )
  unscaled, _ = _unscaled(step, state, batch)
  accumulator = state.accumulation.accumulator
  return batch._replace(addend=step.accumulation.addend(weight, accumulator, unscaled))


def _unscaled(
  step: _slots.Step, state: _state.StepState, batch: _Batch
) -> tuple[optax.Updates, _types.ExtraArgs]:
  """Returns the gradients and extra arguments in float32, divided by the loss scale."""
  arguments = batch.grads, batch.extra_args
  if step.precision:
    arguments = step.precision.widened(*arguments, batch.kept.take(batch.params))
  if step.scaling:
    unscale = functools.partial(step.scaling.unscale, state.scaling.loss_scale)
    arguments = _extra_args.map_gradients(unscale, *arguments)
  return arguments


class _Verdict(NamedTuple):
  """What the step finds of a batch.

  Attributes:
    all_finite: whether its gradient, its weight, its norm and, if judged, its loss are finite.
    is_spike: whether its gradient's norm or its loss is a spike.
    is_good: whether the batch counts; Python's True if nothing was judged.
    spikes: the new state of :func:`skip_spikes`, or None.
  """

  all_finite: _types.BoolScalar
  is_spike: _types.BoolScalar
  is_good: _types.Condition
  spikes: Any = None


def _judge(step: _slots.Step, state: _state.StepState, batch: _Batch) -> _Verdict:
  """Judges a batch, once on all devices. A bad batch changes nothing but counters and the scale."""
  is_finite: _types.Condition = True
  if step.checks_gradients and jax.tree.leaves(batch.grads):
    is_finite = _gradients_are_finite(step, state, batch)
  if step.accumulation:
    valid = step.accumulation.weight_is_valid(state.accumulation, batch.weight)
    is_finite = _conditionals.both(is_finite, valid)
  if is_finite is not True:
    is_finite = _mesh_axes.on_all_devices(is_finite, step.axis_name, step.method)
  if not step.spikes:
    return _Verdict(jnp.asarray(is_finite), jnp.asarray(False), is_finite)
  squares = batch.added.squares if batch.added else _arrays.sum_squares_of_tree(batch.grads)
  squares = jnp.asarray(squares, jnp.float32)
  if step.scaling and not batch.added:
    squares = squares / state.scaling.loss_scale / state.scaling.loss_scale
  if step.axis_name is not None:
    _mesh_axes.require_axis("axis_name", step.axis_name, step.spikes.method)
    squares = jax.lax.pmean(squares, step.axis_name)
  loss = step.spikes.take_loss(batch.extra_args)
  if loss is not None and step.axis_name is not None:
    loss = jax.lax.pmean(loss, step.axis_name)
  depth = batch.frozen.depth if batch.frozen else 0
  is_spike, is_measured, spikes = step.spikes.judge(state.spikes, squares, loss, depth)
  is_good = _conditionals.both(is_finite, is_measured & ~is_spike)
  return _Verdict(is_finite & is_measured, is_spike, is_good, spikes)


def _gradients_are_finite(
  step: _slots.Step, state: _state.StepState, batch: _Batch
) -> _types.BoolScalar:
  """Returns whether the unscaled gradients, or the sum in the window, are finite on this device."""
  if batch.added and batch.added.accumulator is not None:
    return _finiteness.all_finite(batch.added.accumulator) & ~jnp.asarray(batch.added.overflows)
  if step.accumulation:
    return _finiteness.sum_is_finite(state.accumulation.accumulator, batch.addend)
  if not step.scaling:
    return _finiteness.all_finite(batch.grads)
  scale = state.scaling.loss_scale
  return _finiteness.all_finite(batch.grads, scale, functools.partial(step.scaling.unscale, scale))


def _add(
  step: _slots.Step, state: _state.StepState, batch: _Batch, is_good: _types.Condition
) -> _state.Window:
  """Adds a good micro-batch to its window; without windows, each good batch makes a step."""
  if not step.accumulation:
    return _state.Window(is_good)
  value = batch.extra_args.get("value")
  added = batch.added and batch.added.accumulator
  addends = batch.weight, batch.addend, value
  return step.accumulation.add(state.accumulation, *addends, is_good, step.axis_name, added)


def _arguments(
  step: _slots.Step, state: _state.StepState, batch: _Batch, window: _state.Window
) -> tuple[optax.Updates, _types.ExtraArgs]:
  """Returns what the optimizer gets: the mean of the window, with zeros for frozen layers."""
  arguments = _unscaled(step, state, batch)
  if step.accumulation:
    arguments = step.accumulation.mean(window, *arguments, batch.kept.take(batch.params))
    if _protocol.takes(state.inner_state, "weight"):
      arguments[1]["weight"] = window.weight_sum  # an `accumulate` further inside
  if batch.frozen:
    # The zeros are written again here, inside of the loop: it would read an array of zeros else.
    arguments = _extra_args.map_gradients(batch.frozen.zero, *arguments)
  return arguments


def _update(
  step: _slots.Step,
  state: _state.StepState,
  batch: _Batch,
  window: _state.Window,
  weights: _Weights,
  inner_state: optax.OptState,
) -> tuple[optax.Params | None, optax.Updates, optax.OptState]:
  """Calls the optimizer's ``update``; multiplies the updates by the rate of each layer.

  Also returns the params that the optimizer sees: masters, params in float32, or the params.
  """
  params = batch.kept.take(weights.params)
  if step.precision:
    params = step.precision.read(params, weights.masters)
  grads, extra_args = _arguments(step, state, batch, window)
  update = batch.frozen.update if batch.frozen else step.inner.update
  updates, inner_state = update(grads, inner_state, params, **extra_args)
  if step.layer_rates:
    groups = batch.kept.take(step.layer_rates.number_leaves(batch.all_grads))
    updates = step.layer_rates.scaled(updates, groups)
  if step.scaling and not step.precision:
    updates = step.scaling.cast(updates, batch.grads, batch.kept.take(batch.params))
  return params, updates, inner_state


def _make(
  step: _slots.Step,
  state: _state.StepState,
  batch: _Batch,
  window: _state.Window,
  weights: _Weights,
  inner_state: optax.OptState,
) -> tuple[_Updates, optax.OptState]:
  """Makes the optimizer's step; returns its updates."""
  _, updates, inner_state = _update(step, state, batch, window, weights, inner_state)
  return _Updates(updates), inner_state


def _make_and_apply(
  step: _slots.Step,
  state: _state.StepState,
  batch: _Batch,
  window: _state.Window,
  weights: _Weights,
  inner_state: optax.OptState,
) -> tuple[_Weights, optax.OptState]:
  """Makes the optimizer's step; returns the new params and masters."""
  params, updates, inner_state = _update(step, state, batch, window, weights, inner_state)
  new = _protocol.apply_updates(params, updates, inner_state)
  if not step.precision:
    return _Weights(batch.kept.put(weights.params, new)), inner_state
  kept = batch.kept.take(weights.params), weights.masters
  rounded, masters = step.precision.write(state.precision, kept, new, params, state.count)
  return _Weights(batch.kept.put(weights.params, rounded), masters), inner_state


def _weights(step: _slots.Step, state: _state.StepState, batch: _Batch) -> _Weights:
  """Returns the params, and the masters if the state has masters."""
  masters = step.precision.masters(state.precision) if step.precision else None
  return _Weights(batch.params, masters)


def _check_result(
  step: _slots.Step,
  state: _state.StepState,
  batch: _Batch,
  window: _state.Window,
  in_place: bool,
) -> _types.Condition:
  """Returns whether the params and the state after a due step would be finite, on all devices."""
  if not step.checks_updates:
    return True

  def check(_: jax.Array) -> tuple[jax.Array]:
    weights = _weights(step, state, batch)
    old, updates, inner_state = _update(step, state, batch, window, weights, state.inner_state)
    # The check sees the new state in the dtypes in which it is kept, since a number that is finite
    # in float32 may be infinite in float16.
    inner_state = _arrays.cast_like(inner_state, state.inner_state)
    before, after = jax.tree.map(jnp.zeros_like, updates), updates
    if old is not None:
      before, after = old, optax.apply_updates(old, updates)
    is_sound = _finiteness.none_lost(after, before, inner_state, state.inner_state)
    return (_mesh_axes.on_all_devices(is_sound, step.axis_name, step.method),)

  if window.is_due is True:
    return check(jnp.asarray(True))[0]
  return _compute_if(in_place, window.is_due, check, jnp.asarray(True))[1]


def _make_if(
  step: _slots.Step,
  state: _state.StepState,
  batch: _Batch,
  window: _state.Window,
  is_due: _types.Condition,
  in_place: bool,
) -> tuple[_types.BoolScalar, _Weights | _Updates, optax.OptState]:
  """Makes the optimizer's step if it is due; returns whether it was made, and its result.

  The result are new params and masters if the step is made in place, or if it rounds params.
  """
  arguments = step, state, batch, window
  weights = _weights(step, state, batch)
  made: _types.Condition = is_due
  moved: _Weights | _Updates
  if in_place or step.precision:
    make = functools.partial(_make_and_apply, *arguments)
    if is_due is True:
      moved, inner_state = make(weights, state.inner_state)
    else:
      made, moved, inner_state = _compute_if(in_place, is_due, make, weights, state.inner_state)
  elif is_due is True:
    moved, inner_state = _make(*arguments, weights, state.inner_state)
  else:
    make_state = functools.partial(_make, *arguments, weights)
    moved, inner_state = _conditionals.update_if(is_due, make_state, state.inner_state)
  # A wrapper of optax inside, such as `optax.MultiSteps`, may not have made its step.
  inner_made = _skipped_steps.made_step(state.inner_state, inner_state)
  made = _conditionals.both(made, inner_made if isinstance(inner_made, jax.Array) else True)
  return jnp.asarray(made), moved, inner_state


def _good_statistics(
  batch: _Batch, is_bad: _types.BoolScalar, before: optax.OptState, after: optax.OptState
) -> dict[str, jax.Array]:
  """Returns the statistics to average: NaN, which no average takes in, if a batch is left out."""
  if not batch.statistics:
    return {}
  # A wrapper of optax inside, such as `optax.apply_if_finite`, may have left the batch out.
  left_out = _skipped_steps.left_out(before, after)
  is_bad = is_bad if left_out is None else is_bad | left_out
  return _conditionals.nan_if(is_bad, batch.statistics)


def _result(
  step: _slots.Step, batch: _Batch, moved: _Weights | _Updates, in_place: bool
) -> optax.Params | optax.Updates:
  """Returns the new params if the step is made in place, else the updates."""
  if isinstance(moved, _Updates):
    return batch.kept.fill(batch.all_grads, moved.updates)
  if in_place or step.precision is None:
    return moved.params
  return step.precision.difference(moved.params, batch.params)


def _new_params(step: _slots.Step, batch: _Batch, moved: _Weights | _Updates) -> tuple[Any, ...]:
  """Returns ``function, *operands``: calling the function gives the new params, or the masters."""
  if isinstance(moved, _Updates):
    return optax.apply_updates, batch.params, batch.kept.fill(batch.all_grads, moved.updates)
  if step.precision is None:
    return (lambda params: params), moved.params
  precision = step.precision

  def widen(params: optax.Params, masters: optax.Params | None) -> optax.Params:
    wide = precision.wide(params)
    return wide if masters is None else batch.kept.put(wide, masters)

  return widen, *moved


def _compute_if(
  in_place: bool, condition: _types.Condition, function: Callable[..., Sequence[Any]], *carry: Any
) -> tuple[Any, ...]:
  """Returns ``(condition, *function(*carry))`` if `condition`, else ``(condition, *carry)``."""
  if in_place:
    return _conditionals.once_if(condition, function, *carry)

  def call(*carry: Any) -> tuple[Any, ...]:
    return tuple(_arrays.cast_like(tuple(function(*carry)), carry))

  if jax.sharding.get_abstract_mesh().manual_axes:
    carry = jax.tree.map(_mesh_axes.vary, carry, jax.eval_shape(call, *carry))
  return condition, *_conditionals.cond(condition, call, lambda *carry: carry, *carry)

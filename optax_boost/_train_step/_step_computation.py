"""The computation of a train step, which passes these extra arguments to ``tx.update``.

  value, grad        the loss at the current params, and its gradient
  value_fn(params)   the loss at other params, with the same batch, rng and mutable statistics
  grad_fn(params)    the gradient at other params, with the same batch, rng and statistics
  obj_fn             `value_fn` under the name that ``optax.contrib.sophia`` takes
  full_grad_fn(params)
                     the mean gradient over all of the data, if the user passed `full_grad_fn`
  layers             the roles of the params' axes, which are computed only if a method reads them
  weight             the weight of the batch, if the user passed `weight`
  model_state        the statistics after the forward pass, if the model has statistics

If a method scales the loss, `grad` and `grad_fn` are gradients of the scaled loss, while `value`
and `value_fn` are without the scale. A function that no transformation calls costs nothing. Aux and
statistics that a function computes are dropped. If ``optax.masked`` or ``optax.partition`` hides
leaves of the params that a function gets, the function uses the current values of these leaves.
"""

from collections.abc import Mapping
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_boost._form import _protocol, _skipped_steps, _state_check
from optax_boost._foundation import _checks, _types, _warnings
from optax_boost._step import _addition, _apply_gradients, _nesting, _slots
from optax_boost._trace import _layer_axes, _layer_groups, _losses
from optax_boost._train_step import (
  _backward_update,
  _device_gradients,
  _explanation,
  _frozen_layers,
  _frozen_statistics,
  _loss_output,
  _metrics,
  _objective,
  _rejected_batch,
  _replaced_values,
  _state_placement,
  _traced_loss,
  _train_state,
  _written_params,
)

_TRACED_DEPTH = (
  "`freeze_layers` saves no time in this step, though it updates no frozen layer: how many groups"
  " are frozen is a traced number, as inside your own `jit`, `scan` or `vmap`. Call the train step"
  " directly."
)

_WHOLE_GRADIENTS = (
  "`accumulate` adds whole gradients in this step, not layer by layer inside of the backward pass:"
  " how many groups are frozen is a traced number."
)

_NO_SCANS = (
  "`update_in_backward` saves no memory in this step: no leaf of the params is only sliced by one"
  " `jax.lax.scan` (`nn.scan`, `nnx.scan`) over layers. `step.explain` says what uses each leaf."
)

_WRITTEN = (
  "`update_in_backward` updates the params that the forward pass has read, but this model's forward"
  " pass writes some of its trained variables, as `nnx.WeightNorm` does, and an update is added to"
  " what it wrote. Leave `update_in_backward` out."
)

_UNUSED_WEIGHT = (
  "`weight` has no effect in this step: its optimizer accumulates no gradients, so each step uses"
  " the mean over its own batch. Put `optax_boost.accumulate(..., every=n)` around the optimizer,"
  " or leave `weight` out."
)

UNUSED_FULL_GRADIENT = (
  "`full_grad_fn` has no effect in this step: its optimizer never calls it. Put"
  " `optax_boost.svrg(refresh_every=n)` into the optimizer, or leave `full_grad_fn` out."
)


# `eq=False` compares and hashes objects by identity. `jax.jit` caches compiled programs by the
# bound method `step`, whose hash needs the object's hash, and some fields, such as `data`, can't be
# hashed.
@dataclasses.dataclass(frozen=True, eq=False)
class StepComputation:
  """The computation of a train step; its fields are the arguments of :func:`make_train_step`.

  Attributes:
    data: the arrays that the user's `full_grad_fn` binds, by name.
    warnings_given: the warnings given so far, so that no later trace of the step repeats them.
    explained: a dict that a trace fills with what :meth:`TrainStep.explain` returns, or None.
    losses_checked: the structures of the params for which a trace has checked that the loss depends
      on them. Later traces don't check this, since the loss may be a constant for some batches.
  """

  loss_fn: _types.LossFn
  tx: optax.GradientTransformation
  full_grad_fn: _types.Closure | None
  data: dict[str, _types.Tree]
  _: dataclasses.KW_ONLY
  has_aux: bool
  has_model_state: bool
  hold_frozen_statistics: bool
  weight: str | _types.WeightFn | None
  metrics: tuple[str, ...]
  update_in_backward: bool = False
  explained: dict[str, str] | None = None
  warnings_given: set[str] = dataclasses.field(default_factory=set)
  losses_checked: set[_types.TreeDef] = dataclasses.field(default_factory=set)

  def loss(
    self,
    params: optax.Params,
    model_state: _types.ModelState,
    batch: _types.Batch,
    *rngs: jax.Array,
  ) -> tuple[_types.FloatScalar, tuple[_types.ModelState, Any]]:
    """Returns ``loss, (model_state, aux)``, with the statistics after the forward pass."""
    statistics = (model_state,) if self.has_model_state else ()
    output = _losses.call(self.loss_fn, params, *statistics, batch, *rngs)
    if _losses.is_stateful(self.loss_fn):
      output, model_state = output
      loss, (_, aux) = _loss_output.split_output(output, self.has_aux, False)
      return loss, (model_state, aux)
    loss, (new_state, aux) = _loss_output.split_output(output, self.has_aux, self.has_model_state)
    if self.has_model_state:
      _loss_output.check_model_state(model_state, new_state, self.has_aux)
    return loss, (new_state, aux)

  def gradient(
    self,
    model_state: _types.ModelState,
    params: optax.Params,
    batch: _types.Batch,
    *rngs: jax.Array,
  ) -> optax.Updates:
    """Returns the gradient of the loss on a batch, with no loss scale and no frozen layers."""
    gradient = jax.grad(lambda params: self.loss(params, model_state, batch, *rngs)[0])(params)
    return _objective.steepest_ascent(gradient)

  def step(
    self,
    state: _train_state.TrainState,
    batch: _types.Batch,
    rng: jax.Array | None,
    data: dict[str, _types.Tree],
    depth: int | None = None,
    placement: tuple[jax.sharding.NamedSharding | None, ...] = (),
  ) -> tuple[_train_state.TrainState, _types.Metrics]:
    """Makes one step; returns the new state and the metrics.

    `depth` is the number of frozen groups, or None if it is traced. `placement` are the shardings
    that the arrays of the new state get.
    """
    _checks.check_key("rng", rng)
    _state_check.check(self.tx, state.opt_state, state.params)
    _nesting.check(state.opt_state, self.tx)
    rngs = () if rng is None else (jax.random.fold_in(rng, state.step),)
    arguments = (state.model_state, batch, *rngs)
    replaced = _replaced_values.find(state.model_state)
    paths, values = list(replaced), list(replaced.values())

    def run_loss(
      inputs: _traced_loss.Differentiated, model_state: _types.ModelState, *data: Any
    ) -> tuple[_types.FloatScalar, Any]:
      params, values = inputs
      return self.loss(params, _replaced_values.write(model_state, paths, values), *data)

    traced = _traced_loss.TracedLoss(run_loss, (state.params, values), arguments)
    step = _slots.step_of(self.tx)
    loss_scale = state.opt_state.scaling.loss_scale if step and step.scaling else None
    freezing = _frozen_layers.frozen_layers(step, state.opt_state, state.params, depth)
    if freezing is not None and not freezing.is_static:
      self._warn_once(_TRACED_DEPTH)
    # A method that reads `layers` needs the loss as a jaxpr. The step then computes the loss from
    # this jaxpr, so that the user's function is traced once.
    asks_for_layers = _protocol.takes(state.opt_state, "layers")
    loss = traced if asks_for_layers else traced.run
    value_groups: list[_layer_groups.GroupNumber] = [_frozen_statistics.NEVER_FROZEN] * len(values)
    if freezing is not None and self.hold_frozen_statistics:
      value_groups = _frozen_statistics.groups_of_values(
        state.model_state, replaced, state.params, freezing.groups, traced.value_axes
      )
    # A loss whose frozen layers have no gradient may depend on these only.
    skips = freezing is not None and freezing.is_static and int(freezing.depth) > 0
    structure: _types.TreeDef = jax.tree.structure(state.params)
    must_depend = not skips and structure not in self.losses_checked
    objective = _objective.Objective(
      loss, traced, values, value_groups, loss_scale, freezing, must_depend
    )
    addition = self._addition(step, state.opt_state, freezing)
    added = made = weight = None
    if self.explained is not None:
      frozen = objective.frozen(state.params)
      adds = addition if addition and addition.in_backward else None
      way = adds, self.update_in_backward
      self.explained.update(_explanation.explain(step, state.params, traced, frozen, *way))
    if self.update_in_backward:
      made = self._update(traced, values, batch, must_depend).make(state.params, state.opt_state)
      (value, (model_state, aux)), new_values = made.output, made.new_values
      grad = _unknown(state.params)
      if not made.scans:
        self._warn_once(_NO_SCANS)
    elif addition is None:
      (value, (model_state, aux)), grad, new_values = objective.value_and_grad(state.params)
    elif device_sums := addition.window.device_sums:
      leaves = jax.tree.leaves(state.params)
      for sharding in (*placement[: len(leaves)], *(jax.typeof(x).sharding for x in leaves)):
        device_sums.check_whole(sharding)
      (value, (model_state, aux)), added, new_values, weight = _device_gradients.value_and_added(
        device_sums, objective, addition, (state.params, values), arguments, self._weight
      )
      if isinstance(self.weight, str):
        aux = {**aux, self.weight: weight}
    else:
      (value, (model_state, aux)), added, new_values = objective.value_and_added(
        state.params, addition, lambda aux: self._weight(batch, aux[1])
      )
    if addition is not None:
      grad = _unknown(state.params)
    if must_depend:
      self.losses_checked.add(structure)
    # If the forward pass has changed params, the update is added to the changed params, as in Flax
    # NNX.
    start, model_state = _written_params.take_written_params(state.params, model_state, traced)
    if made is not None and start is not state.params:
      raise ValueError(_WRITTEN)
    if freezing is not None and self.hold_frozen_statistics:
      model_state = _frozen_statistics.hold_statistics(
        state.model_state,
        model_state,
        state.params,
        freezing.groups,
        freezing.depth,
        traced,
      )
    model_state = _replaced_values.write(model_state, paths, new_values)
    extra = {"value": value, "grad": grad, **objective.closures(start)}
    uses_full_gradient: set[bool] = set()
    if self.full_grad_fn is not None:
      gradient = functools.partial(self.gradient, state.model_state)
      rng_args = {"rng": rngs[0]} if rngs else {}
      full_grad_fn = functools.partial(self.full_grad_fn, gradient, **data, **rng_args)

      def mean_gradient(params: optax.Params) -> optax.Updates:
        uses_full_gradient.add(True)
        return full_grad_fn(params)

      extra["full_grad_fn"] = _objective.accept_masked(mean_gradient, start)
    extra["layers"] = _layer_axes.DeferredLayerAxes(traced.layers)
    extra |= self._weight(batch, aux) if weight is None else {"weight": weight}
    if self.weight is not None and not _protocol.takes(state.opt_state, "weight"):
      self._warn_once(_UNUSED_WEIGHT)
    if self.has_model_state or _losses.is_stateful(self.loss_fn):
      extra["model_state"] = model_state
    if freezing is not None:
      extra["frozen_groups"] = freezing.depth
    if made is None:
      params, opt_state = _apply_gradients.step_in_place(
        self.tx, grad, state.opt_state, start, extra, added
      )
    else:
      params, opt_state = made.params, made.opt_state
    if self.full_grad_fn is not None and not uses_full_gradient:
      self._warn_once(UNUSED_FULL_GRADIENT)
    rejected = _skipped_steps.left_out(state.opt_state, opt_state)
    measured = made or added
    squares = None if measured is None else measured.squares
    metrics = _metrics.step_metrics(
      self.metrics, value, grad, loss_scale, opt_state, rejected, squares
    )
    if freezing is not None:
      metrics["frozen_groups"] = freezing.num_frozen()
    if self.has_aux:
      metrics["aux"] = aux
    model_state = _rejected_batch.keep_if_rejected(rejected, state.model_state, model_state)
    if start is not state.params:
      params = _rejected_batch.keep_if_rejected(rejected, state.params, params)
    new_state = _train_state.TrainState(params, opt_state, model_state, state.step + 1)
    new_state = jax.tree.map(_train_state.drop_weak_type, new_state)
    return _state_placement.keep_placement(new_state, state, placement), metrics

  def _update(
    self,
    traced: _traced_loss.TracedLoss,
    values: list[jax.Array],
    batch: _types.Batch,
    must_depend: bool,
  ) -> _backward_update.BackwardUpdate:
    """Returns how the backward pass makes the optimizer's step."""
    arguments: dict[str, Any] = {"layers": _layer_axes.DeferredLayerAxes(traced.layers)}

    def late_args(aux: Any) -> dict[str, Any]:
      model_state, aux = aux
      late = self._weight(batch, aux)
      if self.has_model_state or _losses.is_stateful(self.loss_fn):
        late["model_state"] = model_state
      return late

    measures = "gradient_norm" in self.metrics
    return _backward_update.BackwardUpdate(
      self.tx, traced, values, arguments, late_args, measures, must_depend
    )

  def _addition(
    self,
    step: _slots.Step | None,
    opt_state: optax.OptState,
    freezing: _frozen_layers.FrozenLayers | None,
  ) -> _addition.Addition | None:
    """Returns how the backward pass adds gradients to a window, or None if it does not."""
    window = None if step is None else step.accumulation
    if step is None or window is None:
      return None
    in_backward = step.adds_first
    if in_backward and freezing is not None and not freezing.is_static:
      self._warn_once(_WHOLE_GRADIENTS)
      in_backward = False
    if not in_backward and window.device_sums is None:
      return None
    measures = step.spikes is not None or "gradient_norm" in self.metrics
    return _addition.Addition(step, window, opt_state, measures, in_backward)

  def _weight(self, batch: _types.Batch, aux: Any) -> _types.ExtraArgs:
    """Returns the extra argument `weight` of ``tx.update``, by name, if the user passed it."""
    if self.weight is None:
      return {}
    if callable(self.weight):
      return {"weight": self.weight(batch)}
    if not isinstance(aux, Mapping) or self.weight not in aux:
      raise ValueError(
        f"`weight` must be the name of an entry of the loss's aux, a dict; got {self.weight!r} for"
        f" {_checks.shorten(aux)}. Return it from the loss, with has_aux=True, or pass a function"
        " of the batch."
      )
    return {"weight": aux[self.weight]}

  def _warn_once(self, message: str) -> None:
    if message not in self.warnings_given:
      self.warnings_given.add(message)
      _warnings.warn(message, _warnings.NoEffectWarning)


def _unknown(params: optax.Params) -> optax.Updates:
  """Returns NaN in place of gradients that nothing reads; NaN would show it."""
  return jax.tree.map(lambda p: jnp.full_like(p, jnp.nan), params)

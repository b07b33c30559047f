""":func:`fill`: what each wrapper's function returns, an optimizer with one more slot filled."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import optax

from optax_boost._form import _form, _state_check, _transformation
from optax_boost._foundation import _checks, _mesh_axes, _types
from optax_boost._step import _run, _slots, _state


def fill(
  inner: optax.GradientTransformation,
  axis_name: _types.AxisName | None = None,
  **slots: Any,
) -> optax.GradientTransformationExtraArgs:
  """Returns `inner` with a slot filled; raises ValueError if the slot is filled already."""
  inner = _checks.check_transformation("inner", inner)
  _mesh_axes.check_axis_name("axis_name", axis_name)
  step = _slots.step_of(inner) or _slots.Step(inner)
  for name, slot in slots.items():
    present = getattr(step, name)
    if present is not None:
      raise ValueError(
        f"`{slot.method}` can't be put around an optimizer that has `{present.method}` already:"
        " an optimizer makes one step, in which each wrapper acts once. Leave one of the two out."
      )
  if None not in (axis_name, step.axis_name) and axis_name != step.axis_name:
    raise ValueError(
      "All wrappers around an optimizer must have the same `axis_name`; got"
      f" {axis_name!r} and {step.axis_name!r}."
    )
  return as_transformation(
    dataclasses.replace(step, axis_name=step.axis_name or axis_name, **slots)
  )


def replace_inner(
  tx: optax.GradientTransformation,
  function: Callable[[optax.GradientTransformation], optax.GradientTransformation],
) -> optax.GradientTransformationExtraArgs:
  """Returns `tx` with ``function(inner)`` in place of the optimizer in its step.

  If `tx` is not a step, returns ``function(tx)``.
  """
  step = _slots.step_of(tx)
  if step is None:
    return optax.with_extra_args_support(function(tx))
  inner = optax.with_extra_args_support(function(step.inner))
  return as_transformation(dataclasses.replace(step, inner=inner))


def as_transformation(step: _slots.Step) -> optax.GradientTransformationExtraArgs:
  """Returns the transformation whose ``update`` makes the step."""
  # The messages name the wrapper that asks for something.
  rounds, averages = step.precision, step.averaging
  form = _form.Form(
    rounds.method if rounds else step.method,
    _state.StepState,
    needs_params=bool(rounds or averages),
    allows_complex=rounds is None,
    # The params of `optax.lookahead` are a pair, the gradients are not.
    allows_pairs=set(step.slots) == {"averaging"},
    step=step,
  )
  for_params = form if rounds or not averages else dataclasses.replace(form, method=averages.method)
  stateful = step.slots.keys() & {*_state.SLOTS}

  def check(updates: optax.Updates, state: optax.OptState, params: optax.Params | None) -> None:
    (for_params if params is None else form).check(updates, state, params)
    filled = {name for name in _state.SLOTS if getattr(state, name) is not None}
    if filled != stateful:
      required, got = (", ".join(sorted(names)) or "no slot" for names in (stateful, filled))
      raise TypeError(
        f"`{step.method}` needs the state that its own `init` made, with the slots {required}; got"
        f" one with {got}. Pass what `tx.init(params)` returns, or a checkpoint that is restored"
        " into its structure."
      )

  def update(
    updates: optax.Updates,
    state: optax.OptState,
    params: optax.Params | None,
    extra_args: _types.ExtraArgs,
  ) -> tuple[optax.Updates, optax.OptState]:
    check(updates, state, params)
    _state_check.check(tx, state, updates if params is None else params)
    return _run.run(step, updates, state, params, extra_args, in_place=False)

  tx = _transformation.with_form(form, functools.partial(_run.init, step), update)
  tx.update.check = check  # type: ignore[attr-defined]
  return tx

"""Reads the averages in an optimizer's state, with which a race calls `evaluate`."""

from collections.abc import Callable

import optax

from optax_boost._foundation import _tree_checks, _trees, _types
from optax_boost._step import _average_params

_ReadAverage = Callable[[optax.OptState, optax.Params], optax.Params]


def find_average(opt_state: optax.OptState, params: optax.Params) -> _ReadAverage | None:
  """Returns a function ``read(opt_state, params)`` that returns the averaged params.

  Returns None if `opt_state` holds no average. All arrays may have a leading axis of seeds.
  """
  if _average_params.averaging_state(opt_state) is not None:
    return _average_params.averaged_params
  # For a schedule-free method, optax computes the params to evaluate from the trained params and
  # `z` in the state. Inside of `optax.masked`, `z` lacks leaves, and optax then can't compute them.
  states = _schedule_free(opt_state)
  if len(states) == 1 and _tree_checks.same_shapes(states[0].z, params):
    return _read_schedule_free
  return None


def averaged_statistics(
  opt_state: optax.OptState, model_state: _types.ModelState
) -> _types.ModelState:
  """Returns the averaged statistics, or `model_state` if the optimizer averages no statistics."""
  averages = _average_params.averaging_state(opt_state)
  if averages is not None and averages.statistics:
    return _average_params.averaged_model_state(opt_state, model_state)
  return model_state


def _schedule_free(opt_state: optax.OptState) -> list[optax.contrib.ScheduleFreeState]:
  return _trees.find_states(opt_state, optax.contrib.ScheduleFreeState)


def _read_schedule_free(opt_state: optax.OptState, params: optax.Params) -> optax.Params:
  return optax.contrib.schedule_free_eval_params(_schedule_free(opt_state)[0], params)

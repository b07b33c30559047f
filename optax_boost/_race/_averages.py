"""Reads the averages of params and statistics that an optimizer keeps in its state.

A race calls `evaluate` with these averages.
"""

from collections.abc import Callable

import optax

from optax_boost._foundation import _tree_checks, _trees, _types
from optax_boost._wrappers import _average_params

_ReadAverage = Callable[[optax.OptState, optax.Params], optax.Params]


def find_average(opt_state: optax.OptState, params: optax.Params) -> _ReadAverage | None:
  """Returns a function ``read(opt_state, params)`` that returns the averaged params.

  Returns None if `opt_state` keeps no average. All arrays may have a leading axis of seeds.
  """
  if _trees.find_states(opt_state, _average_params.AverageParamsState):
    return _average_params.averaged_params
  # A schedule-free method evaluates other params than it trains. optax computes the params for
  # evaluation from the trained params and `z` in the state. If `optax.masked` holds the method, `z`
  # lacks the hidden leaves, and optax has no function for that case.
  states = _schedule_free(opt_state)
  if len(states) == 1 and _tree_checks.same_shapes(states[0].z, params):
    return _read_schedule_free
  return None


def averaged_statistics(
  opt_state: optax.OptState, model_state: _types.ModelState
) -> _types.ModelState:
  """Returns the averaged statistics, or `model_state` if the optimizer averages no statistics."""
  if _average_params.averaging_statistics(opt_state):
    return _average_params.averaged_model_state(opt_state, model_state)
  return model_state


def _schedule_free(opt_state: optax.OptState) -> list[optax.contrib.ScheduleFreeState]:
  return _trees.find_states(opt_state, optax.contrib.ScheduleFreeState)


def _read_schedule_free(opt_state: optax.OptState, params: optax.Params) -> optax.Params:
  return optax.contrib.schedule_free_eval_params(_schedule_free(opt_state)[0], params)

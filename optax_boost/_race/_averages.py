"""Averages of params and statistics in an optimizer's state, at which a race evaluates."""

from collections.abc import Callable

import optax

from optax_boost._foundation import _tree_checks, _trees, _types
from optax_boost._wrappers import _average_params

_ReadAverage = Callable[[optax.OptState, optax.Params], optax.Params]


def find_average(opt_state: optax.OptState, params: optax.Params) -> _ReadAverage | None:
  """Returns the function that reads averaged params from a state; None if the state keeps none.

  The state may be that of several trainings, stacked for ``jax.vmap``.
  """
  if _trees.find_states(opt_state, _average_params.AverageParamsState):
    return _average_params.averaged_params
  # Schedule-free methods are evaluated at other params than those that train. optax has no function
  # that reads them from inside a mask, where `z` has other shapes than the params.
  states = _schedule_free(opt_state)
  if len(states) == 1 and _tree_checks.same_shapes(states[0].z, params):
    return _read_schedule_free
  return None


def averaged_statistics(
  opt_state: optax.OptState, model_state: _types.ModelState
) -> _types.ModelState:
  """Returns the averages of the statistics, or the statistics if the optimizer averages none."""
  if _average_params.averaging_statistics(opt_state):
    return _average_params.averaged_model_state(opt_state, model_state)
  return model_state


def _schedule_free(opt_state: optax.OptState) -> list[optax.contrib.ScheduleFreeState]:
  return _trees.find_states(opt_state, optax.contrib.ScheduleFreeState)


def _read_schedule_free(opt_state: optax.OptState, params: optax.Params) -> optax.Params:
  return optax.contrib.schedule_free_eval_params(_schedule_free(opt_state)[0], params)

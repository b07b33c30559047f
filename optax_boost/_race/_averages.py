"""What a method would be evaluated at: averages, if its optimizer keeps them."""

from collections.abc import Callable
from typing import Any

import optax

from optax_boost._foundation import _tree_checks, _trees
from optax_boost._wrappers import _average_params

_ReadAverage = Callable[[optax.OptState, optax.Params], optax.Params]


def find_average(opt_state: optax.OptState, params: optax.Params) -> _ReadAverage | None:
  """From the state and the params of a training to the average; None if the state keeps none.

  Several trainings with a leading axis each are mapped over by ``jax.vmap``.
  """
  if _trees.find_states(opt_state, _average_params.AverageParamsState):
    return _average_params.averaged_params
  # Schedule-free methods train at other params than they are evaluated at. In a mask, optax has
  # no function that reads them.
  states = _schedule_free(opt_state)
  if len(states) == 1 and _tree_checks.same_shapes(states[0].z, params):
    return _read_schedule_free
  return None


def averaged_statistics(opt_state: optax.OptState, model_state: Any) -> Any:
  """The averages of statistics, or the statistics if the optimizer keeps none of them."""
  if _average_params.averaging_statistics(opt_state):
    return _average_params.averaged_model_state(opt_state, model_state)
  return model_state


def _schedule_free(opt_state: optax.OptState) -> list[optax.contrib.ScheduleFreeState]:
  return _trees.find_states(opt_state, optax.contrib.ScheduleFreeState)


def _read_schedule_free(opt_state: optax.OptState, params: optax.Params) -> optax.Params:
  return optax.contrib.schedule_free_eval_params(_schedule_free(opt_state)[0], params)

"""The classes that users make, and the methods of all."""

from typing import Any

import optax_boost
from tests.bad_input import kinds
from tests.bad_input import problem
from tests.bad_input import shared
from tests.bad_input.kinds import Bad


def entries() -> dict[str, shared.Entry]:
  nothing: dict[str, Any] = {}
  boost = optax_boost.auto_boost("O1", total_steps=10)
  step = problem.train_step()

  def state() -> optax_boost.TrainState:
    return step.init(problem.PARAMS)

  other_state = optax_boost.make_train_step(problem.loss_fn, problem.SGD).init(problem.PARAMS)
  states = {
    "None": Bad(None, TypeError),
    "params": Bad(problem.PARAMS, TypeError),
    "number": Bad(3, TypeError),
    "tuple": Bad(tuple(other_state), TypeError),
    "optimizer state": Bad(other_state.opt_state, TypeError),
    "another optimizer's": Bad(other_state, TypeError),
  }
  stepping = {"state": states, "rng": shared.RNG}
  free_batch = {"batch": "whatever the loss takes"}
  svrg_step = optax_boost.make_train_step(problem.loss_fn, problem.make("svrg"))
  refresh = {
    "state": {k: v for k, v in states.items() if k != "another optimizer's"}
    | {"without svrg": Bad(other_state, ValueError)},
    "batches": shared.BATCHES,
    "rng": shared.RNG,
    "weight_fn": shared.OPTIONAL_FUNCTION,
    "progress": shared.FLAG,
  }
  boost_optimizer = {
    "tx": shared.TX,
    "params": {"None": Bad(None, shared.EITHER)},
    "loss_fn": kinds.without(shared.OPTIONAL_FUNCTION),
    "groups": kinds.groups(optional=True),
  }
  result = problem.race_result()
  names = {"name": shared.NAME, "quantity": shared.NAME, "of": shared.NAME}
  compare = {"name": "b", "quantity": "error"}
  schedule = optax_boost.continuous_freezing(2, 0.5)
  return {
    "AutoBoost.optimizer": shared.Entry(
      boost.optimizer,
      lambda: {
        "tx": problem.SGD,
        "loss_fn": problem.loss_fn,
        "params": problem.PARAMS,
        "args": (problem.X,),
      },
      boost_optimizer,
      positional=("tx", "loss_fn", "params", "args"),
      free={"args": "whatever the loss takes"},
    ),
    "AutoBoost.train_step": shared.Entry(
      boost.train_step,
      lambda: {"loss_fn": problem.loss_fn, "tx": problem.SGD},
      {"loss_fn": shared.FUNCTION, "tx": shared.TX},
      free={"options": "those of make_train_step, which see"},
    ),
    "FreezeSchedule": shared.Entry(
      optax_boost.FreezeSchedule,
      lambda: {"num_groups": 2, "frozen_groups": schedule.frozen_groups},
      {
        "num_groups": shared.COUNT,
        "frozen_groups": shared.FUNCTION,
        "learning_rate_scale": shared.OPTIONAL_FUNCTION,
      },
    ),
    "RaceResult.budget": shared.Entry(result.budget, lambda: {"of": "steps"}, {"of": shared.NAME}),
    "RaceResult.values": shared.Entry(result.values, lambda: compare, names),
    "RaceResult.difference": shared.Entry(result.difference, lambda: compare, names),
    "RaceResult.diverged": shared.Entry(
      result.diverged, lambda: {"name": "b"}, {"name": shared.NAME}
    ),
    "RaceResult.plot": shared.Entry(
      result.plot,
      lambda: nothing,
      {
        "quantities": {"unknown": Bad(["width"], ValueError)},
        "against": {"unknown": Bad(["epochs"], ValueError)},
      },
    ),
    "TrainStep.init": shared.Entry(
      step.init,
      lambda: {"params": problem.PARAMS},
      {
        "params": {
          "text leaves": Bad({"conv": "a"}, TypeError),
          "a number of text": Bad("a", TypeError),
          "function": Bad({"conv": len}, TypeError),
        },
        "model_state": {
          "text leaves": Bad({"conv": "a"}, TypeError),
          "function": Bad({"conv": len}, TypeError),
        },
      },
    ),
    "TrainStep.__call__": shared.Entry(
      step, lambda: {"state": state(), "batch": problem.X}, stepping, free=free_batch
    ),
    "TrainStep.lower": shared.Entry(
      step.lower, lambda: {"state": state(), "batch": problem.X}, stepping, free=free_batch
    ),
    "TrainStep.trace": shared.Entry(
      step.trace, lambda: {"state": state(), "batch": problem.X}, stepping, free=free_batch
    ),
    "TrainStep.refresh": shared.Entry(
      svrg_step.refresh,
      lambda: {"state": svrg_step.init(problem.PARAMS), "batches": [problem.X]},
      refresh,
    ),
  }

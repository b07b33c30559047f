"""The classes that users make, and the methods of all."""

import dataclasses
from typing import Any

import numpy as np

import optax_boost
from optax_boost.race import RaceCurves
from optax_boost.race import RaceResult
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
  curve = {
    "None": Bad(None, TypeError),
    "list": Bad([1.0, 2.0], TypeError),
    "text": Bad(np.array(["a", "b"]), shared.EITHER),
    "other rank": Bad(np.ones((2, 2, 2)), shared.EITHER),
    "empty": Bad(np.ones(0), shared.EITHER),
  }
  vector = curve | {"negative": Bad(np.array([-1.0, 1.0]), ValueError)}
  fields = {f.name: getattr(problem.race_curves(), f.name) for f in dataclasses.fields(RaceCurves)}
  result_fields = {f.name: getattr(result, f.name) for f in dataclasses.fields(RaceResult)}
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
    "RaceCurves": shared.Entry(
      RaceCurves,
      lambda: fields,
      {
        "steps": curve
        | {
          "falling": Bad(np.array([2, 1]), ValueError),
          "floats": Bad(np.array([1.0, 2.0]), shared.EITHER),
        },
        "loss": curve,
        "metrics": {
          "None": Bad(None, TypeError),
          "array": Bad(np.ones((2, 2)), TypeError),
          "rows of text": Bad({"error": np.array(["a"])}, shared.EITHER),
          "other shape": Bad({"error": np.ones((3, 2))}, ValueError),
          "number as name": Bad({3: np.ones((2, 2))}, shared.EITHER),
        },
        "gradient_evaluations": vector,
        "seconds": vector,
        "compile_seconds": kinds.without(kinds.number(), "nan"),
        "seeds_at_once": kinds.count(static=True),
      },
    ),
    "RaceResult": shared.Entry(
      RaceResult,
      lambda: result_fields,
      {
        "curves": {
          "None": Bad(None, TypeError),
          "list": Bad([problem.race_curves()], TypeError),
          "empty": Bad({}, ValueError),
          "dicts": Bad({"a": {}}, TypeError),
        },
        "seeds": {
          "number": Bad(2, TypeError),
          "too few": Bad((0,), ValueError, "seeds"),
          "twice": Bad((0, 0), ValueError),
          "fractions": Bad((0.5, 1), TypeError),
        },
        "baseline": shared.NAME,
        "complete": shared.FLAG,
        "device": kinds.kind({"None": None, "number": 3}, {}),
      },
    ),
    "RaceResult.budget": shared.Entry(result.budget, lambda: {"of": "steps"}, {"of": shared.NAME}),
    "RaceResult.values": shared.Entry(result.values, lambda: compare, names),
    "RaceResult.difference": shared.Entry(result.difference, lambda: compare, names),
    "RaceResult.rows": shared.Entry(
      result.rows, lambda: compare, {"name": shared.NAME, "quantity": shared.NAME}
    ),
    "RaceResult.verdict": shared.Entry(
      result.verdict,
      lambda: {"name": "b"},
      {"name": shared.NAME, "quantity": kinds.name(optional=True)},
    ),
    "RaceResult.plot": shared.Entry(
      result.plot,
      lambda: nothing,
      {
        "path": kinds.path(optional=True)
        | {"unknown suffix": Bad("curves.docx", ValueError, "path")},
        "quantities": {
          "text": Bad("error", TypeError),
          "number": Bad(3, TypeError),
          "empty": Bad([], ValueError),
          "unknown": Bad(["width"], ValueError),
        },
        "against": {
          "text": Bad("steps", TypeError),
          "None": Bad(None, TypeError),
          "unknown": Bad(["tokens"], ValueError),
        },
      },
    ),
    "RaceResult.save": shared.Entry(
      result.save,
      lambda: {"path": "/nowhere/at/all.json"},
      {
        "path": shared.PATH
        | {
          "missing folder": Bad("/nowhere/at/all.json", OSError, "/nowhere/at/all.json"),
          "folder": Bad("/", (OSError, ValueError), "/"),
        }
      },
    ),
    "RaceResult.load": shared.Entry(
      RaceResult.load,
      lambda: {"path": "nowhere.json"},
      {
        "path": shared.PATH
        | {
          "missing": Bad("nowhere.json", FileNotFoundError, "nowhere.json"),
          "folder": Bad("/", (OSError, ValueError), "/"),
        }
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

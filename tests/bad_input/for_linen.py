"""The functions, classes and methods for Flax Linen."""

from typing import Any

from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp

import optax_boost
import optax_boost.linen
import optax_boost.nnx
from tests.bad_input import functions
from tests.bad_input import kinds
from tests.bad_input import problem
from tests.bad_input import shared
from tests.bad_input.kinds import Bad


def entries() -> dict[str, shared.Entry]:
  ours = optax_boost.linen
  module = nn.Dense(2)
  variables = {"params": {"kernel": jnp.ones((3, 2)), "bias": jnp.ones(2)}}
  two = nn.Sequential([nn.Dense(3), nn.Dense(2)])
  boost = ours.auto_boost("O1", total_steps=10)

  def loss_fn(model: Any, batch: Any) -> Any:
    return jnp.mean(model(batch))

  step = ours.make_train_step(module, loss_fn, problem.SGD, donate=False)
  state = step.init(variables)
  modules = kinds.kind(
    {"None": None, "class": nn.Dense, "variables": variables, "NNX": nnx.Rngs(0)}, {}
  )
  trees = kinds.kind({"None": None, "number": 3, "text": "a"}, {"without params": {"kernel": 3}})
  rngs = kinds.kind(
    {"text": "dropout", "number": 3, "None": None, "numbers": (3,), "dict": {"dropout": 0}}, {}
  )
  states = kinds.kind({"None": None, "number": 3, "variables": variables}, {})
  stepping = {
    "module": modules,
    "loss_fn": shared.FUNCTION,
    "tx": shared.TX,
    "rngs": rngs,
    "has_aux": shared.FLAG,
    "full_grad_fn": shared.OPTIONAL_FUNCTION,
    "donate": shared.FLAG,
    "freezing": shared.NAME,
    "hold_frozen_statistics": shared.FLAG,
    "extra_metrics": shared.EXTRA_METRICS,
  }
  good_module = {"module": module, "args": (problem.X,)}
  star = ("module", "args")
  # The common form for Flax calls it `model`; it is passed by position.
  named = {label: bad._replace(mention="module") for label, bad in modules.items()}
  good_model, star_model = {"model": module, "args": (problem.X,)}, ("model", "args")
  free = {"args": shared.INPUTS, "kwargs": shared.INPUTS, "batch": "whatever the loss takes"}
  plan = shared.less_bn_arguments() | {"module": modules}
  race = shared.race_arguments() | {"init_fn": shared.FUNCTION, "module": modules, "rngs": rngs}
  checkpoint = kinds.kind({"number": 3, "None": None, "text": "a"}, {"other tree": shared.OTHER})
  head = ours.NormalizedDense(2)
  head_variables = head.init(jax.random.key(0), problem.X)
  bound = {
    "module": module,
    "params": variables["params"],
    "collections": {},
    "rngs": {},
  }
  dicts = kinds.kind({"None": None, "number": 3, "text": "a"}, {})
  return {
    "linen.AutoBoost.plan": shared.Entry(
      boost.plan, lambda: good_model, {"model": named}, positional=star_model, free=free
    ),
    "linen.AutoBoost.model": shared.Entry(
      boost.model, lambda: good_model, {"model": named}, positional=star_model, free=free
    ),
    "linen.AutoBoost.eval_model": shared.Entry(
      boost.eval_model, lambda: good_model, {"model": named}, positional=star_model, free=free
    ),
    "linen.AutoBoost.optimizer": shared.Entry(
      boost.optimizer,
      lambda: {
        "tx": problem.SGD,
        "module": two,
        "loss_fn": loss_fn,
        "variables": two.init(jax.random.key(0), problem.X),
        "batch": problem.X,
      },
      {
        "tx": shared.TX,
        "module": modules | {"None": Bad(None, shared.EITHER, "model")},
        "loss_fn": shared.OPTIONAL_FUNCTION,
        "variables": trees | {"None": Bad(None, shared.EITHER, "model")},
        "rng": shared.RNG,
        "groups": kinds.groups(optional=True),
        "decay": kinds.without(shared.TX, "None"),
      },
      free={"batch": "whatever the loss takes"},
    ),
    "linen.AutoBoost.train_step": shared.Entry(
      boost.train_step,
      lambda: {"module": module, "loss_fn": loss_fn, "tx": problem.SGD},
      {"module": modules, "loss_fn": shared.FUNCTION, "tx": shared.TX},
      free={"options": "those of make_train_step, which see"},
    ),
    "linen.BoundModel": shared.Entry(
      ours.BoundModel,
      lambda: bound,
      {"module": modules, "params": {}, "collections": dicts, "rngs": dicts},
    ),
    "linen.BoundModel.__call__": shared.Entry(
      ours.BoundModel(**bound),
      lambda: {"args": (problem.X,)},
      {},
      positional=("args",),
      free={"args": shared.INPUTS, "kwargs": shared.INPUTS},
    ),
    "linen.NormalizedDense": shared.Entry(
      ours.NormalizedDense,
      lambda: {"features": 2},
      {"features": kinds.count(static=True), **shared.head_arguments()},
    ),
    "linen.NormalizedDense.__call__": shared.Entry(
      lambda x: head.apply(head_variables, x),
      lambda: {"x": problem.X},
      # Linen refuses a kernel of another shape by itself.
      {"x": kinds.without(shared.inputs(), "other features")},
    ),
    "linen.TrainStep.init": shared.Entry(
      step.init, lambda: {"variables": variables}, {"variables": trees}
    ),
    "linen.auto_boost": shared.Entry(
      ours.auto_boost, lambda: {}, functions.entries()["auto_boost"].arguments
    ),
    "linen.layer_groups": shared.Entry(
      ours.layer_groups,
      lambda: {
        "module": module,
        "loss_fn": loss_fn,
        "variables": variables,
        "batch": problem.X,
        "num_groups": 1,
      },
      {
        "module": modules,
        "loss_fn": shared.FUNCTION,
        "variables": trees,
        "rng": shared.RNG,
        "rngs": rngs,
        "num_groups": kinds.count(static=True) | {"too many": Bad(9, ValueError)},
        "overrides": shared.OVERRIDES,
        "data": shared.DATA,
      },
      free=free,
    ),
    "linen.stacked_axes": shared.Entry(
      ours.stacked_axes,
      lambda: {
        "module": module,
        "loss_fn": loss_fn,
        "variables": variables,
        "batch": problem.X,
      },
      {
        "module": modules,
        "loss_fn": shared.FUNCTION,
        "variables": trees,
        "rng": shared.RNG,
        "rngs": rngs,
      },
      free=free,
    ),
    "linen.less_bn": shared.Entry(
      ours.less_bn,
      lambda: good_module,
      plan | {"plan": shared.PLAN},
      positional=star,
      free=free,
    ),
    "linen.plan_less_bn": shared.Entry(
      ours.plan_less_bn, lambda: good_module, plan, positional=star, free=free
    ),
    "linen.load_original": shared.Entry(
      ours.load_original,
      lambda: {"variables": variables, "checkpoint": variables},
      {"variables": kinds.kind({"None": None, "number": 3}, {}), "checkpoint": checkpoint},
    ),
    "linen.make_train_step": shared.Entry(
      ours.make_train_step,
      lambda: {"module": module, "loss_fn": loss_fn, "tx": problem.SGD},
      stepping,
    ),
    "linen.race": shared.Entry(
      ours.race,
      lambda: {
        "module": module,
        "loss_fn": loss_fn,
        "init_fn": lambda key: variables,
        "data": problem.X,
        "transformations": {"sgd": problem.SGD},
        "steps": 1,
        "seeds": 1,
        "progress": False,
      },
      race,
    ),
    "linen.variables": shared.Entry(ours.variables, lambda: {"state": state}, {"state": states}),
  }

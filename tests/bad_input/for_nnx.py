"""The functions, classes and methods for Flax NNX."""

from typing import Any

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
from tests.bad_input.kinds import Kind


def entries() -> dict[str, shared.Entry]:
  ours = optax_boost.nnx
  model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, problem.SGD, wrt=nnx.Param)
  svrg = nnx.Optimizer(model, problem.make("svrg"), wrt=nnx.Param)
  two = nnx.Sequential(nnx.Linear(3, 3, rngs=nnx.Rngs(0)), nnx.Linear(3, 2, rngs=nnx.Rngs(1)))
  boost = ours.auto_boost("O1", total_steps=10)

  def loss_fn(model: Any, batch: Any) -> Any:
    return jnp.mean(model(batch))

  step = ours.make_train_step(loss_fn)
  models = kinds.kind(
    {"None": None, "class": nnx.Linear, "params": problem.PARAMS, "text": "m"}, {}
  )
  optimizers = kinds.kind({"None": None, "transformation": problem.SGD, "number": 3}, {})
  wrt = kinds.kind({"number": 3, "list": [3], "dict": {}}, {})
  stepping = {
    "loss_fn": shared.FUNCTION,
    "has_aux": shared.FLAG,
    "full_grad_fn": shared.OPTIONAL_FUNCTION,
    "donate": shared.FLAG,
    "freezing": shared.NAME,
    "hold_frozen_statistics": shared.FLAG,
    "extra_metrics": shared.EXTRA_METRICS,
  }
  good_model = {"model": model, "args": (problem.X,)}
  free = {"args": shared.INPUTS, "kwargs": shared.INPUTS}
  plan = shared.less_bn_arguments() | {"model": models}
  star = ("model", "args")
  race = shared.race_arguments() | {"make_model": shared.FUNCTION, "wrt": wrt}
  checkpoint = kinds.kind({"number": 3, "None": None, "text": "a"}, {"other tree": shared.OTHER})
  return {
    "nnx.AutoBoost.plan": shared.Entry(
      boost.plan, lambda: good_model, {"model": models}, positional=star, free=free
    ),
    "nnx.AutoBoost.model": shared.Entry(
      boost.model, lambda: good_model, {"model": models}, positional=star, free=free
    ),
    "nnx.AutoBoost.eval_model": shared.Entry(
      boost.eval_model,
      lambda: {"model": model, "trained": model, "args": (problem.X,)},
      {
        "model": models,
        "trained": {k: bad._replace(mention="checkpoint") for k, bad in checkpoint.items()},
      },
      positional=("model", "trained", "args"),
      free=free,
    ),
    "nnx.AutoBoost.optimizer": shared.Entry(
      boost.optimizer,
      lambda: {"tx": problem.SGD, "model": two, "loss_fn": loss_fn, "args": (problem.X,)},
      {
        "tx": shared.TX,
        "model": models | {"None": Bad(None, shared.EITHER)},
        "loss_fn": shared.OPTIONAL_FUNCTION,
        "groups": kinds.groups(optional=True),
        "decay": kinds.without(shared.TX, "None"),
        "wrt": wrt,
      },
      positional=("tx", "model", "loss_fn", "args"),
      free={"args": shared.INPUTS},
    ),
    "nnx.AutoBoost.train_step": shared.Entry(
      boost.train_step,
      lambda: {"loss_fn": loss_fn},
      {"loss_fn": shared.FUNCTION},
      free={"options": "those of make_train_step, which see"},
    ),
    "nnx.NormalizedDense": shared.Entry(
      ours.NormalizedDense,
      lambda: {"in_features": 3, "out_features": 2, "rngs": nnx.Rngs(0)},
      {
        "in_features": kinds.count(static=True),
        "out_features": kinds.count(static=True),
        "rngs": kinds.kind({"None": None, "key": jax.random.key(0), "seed": 0}, {}),
        **shared.head_arguments(),
      },
    ),
    "nnx.NormalizedDense.__call__": shared.Entry(
      ours.NormalizedDense(3, 2, rngs=nnx.Rngs(0)), lambda: {"x": problem.X}, {"x": shared.inputs()}
    ),
    **{
      f"nnx.TrainStep.{method}": shared.Entry(
        getattr(step, method),
        lambda: {"model": model, "optimizer": optimizer, "batch": problem.X},
        {"model": models, "optimizer": optimizers, "rng": _rngs()},
        free={"batch": "whatever the loss takes"},
      )
      for method in ("__call__", "lower", "trace")
    },
    "nnx.TrainStep.refresh": shared.Entry(
      step.refresh,
      lambda: {"model": model, "optimizer": svrg, "batches": [problem.X]},
      {
        "model": models,
        "optimizer": optimizers | {"without svrg": Bad(optimizer, ValueError, "state")},
        "batches": shared.BATCHES,
        "rng": _rngs(),
        "weight_fn": shared.OPTIONAL_FUNCTION,
        "progress": shared.FLAG,
      },
    ),
    "nnx.auto_boost": shared.Entry(
      ours.auto_boost, lambda: {}, functions.entries()["auto_boost"].arguments
    ),
    "nnx.layer_groups": shared.Entry(
      ours.layer_groups,
      lambda: {"loss_fn": loss_fn, "model": model, "args": (problem.X,), "num_groups": 1},
      {
        "loss_fn": shared.FUNCTION,
        "model": models,
        "wrt": wrt,
        "num_groups": kinds.count(static=True) | {"too many": Bad(9, ValueError)},
        "overrides": shared.OVERRIDES,
        "data": shared.DATA,
      },
      positional=("loss_fn", "model", "args"),
      free=free,
    ),
    "nnx.stacked_axes": shared.Entry(
      ours.stacked_axes,
      lambda: {"loss_fn": loss_fn, "model": model, "args": (problem.X,)},
      {"loss_fn": shared.FUNCTION, "model": models, "wrt": wrt},
      positional=("loss_fn", "model", "args"),
      free=free,
    ),
    "nnx.less_bn": shared.Entry(
      ours.less_bn,
      lambda: good_model,
      plan | {"plan": shared.PLAN},
      positional=star,
      free=free,
    ),
    "nnx.plan_less_bn": shared.Entry(
      ours.plan_less_bn, lambda: good_model, plan, positional=star, free=free
    ),
    "nnx.load_original": shared.Entry(
      ours.load_original,
      lambda: {"model": model, "checkpoint": model},
      {"model": models, "checkpoint": checkpoint},
    ),
    "nnx.make_train_step": shared.Entry(
      ours.make_train_step, lambda: {"loss_fn": loss_fn}, stepping
    ),
    "nnx.race": shared.Entry(
      ours.race,
      lambda: {
        "loss_fn": loss_fn,
        "make_model": lambda seed: nnx.Linear(3, 2, rngs=nnx.Rngs(seed)),
        "data": problem.X,
        "transformations": {"sgd": problem.SGD},
        "steps": 1,
        "seeds": 1,
        "progress": False,
      },
      race,
    ),
  }


def _rngs() -> Kind:
  wrong_type = {"number": 3, "text": "0", "floats": jnp.ones(2), "dict": {"params": 0}}
  return kinds.kind(wrong_type | {"several": jax.random.split(jax.random.key(0))}, {})

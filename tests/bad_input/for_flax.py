"""The functions, classes and methods for Flax NNX and Linen."""

from typing import Any
from typing import NamedTuple

from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp

import optax_boost.linen
import optax_boost.nnx
from tests.bad_input import functions
from tests.bad_input import kinds
from tests.bad_input import problem
from tests.bad_input import shared
from tests.bad_input.kinds import Bad
from tests.bad_input.kinds import Kind

FREE = {"args": shared.INPUTS, "kwargs": shared.INPUTS, "batch": "whatever the loss takes"}
CHECKPOINT = kinds.kind({"number": 3, "None": None, "text": "a"}, {"other tree": shared.OTHER})
VARIABLES = {"params": {"kernel": jnp.ones((3, 2)), "bias": jnp.ones(2)}}

# By argument; in both APIs the same name is of the same kind.
KINDS = {
  "model": kinds.kind(
    {"None": None, "class": nnx.Linear, "params": problem.PARAMS, "text": "m"}, {}
  ),
  "wrt": kinds.kind({"number": 3, "list": [3], "dict": {}}, {}),
  "module": kinds.kind(
    {"None": None, "class": nn.Dense, "variables": VARIABLES, "NNX": nnx.Rngs(0)}, {}
  ),
  "variables": kinds.kind(
    {"None": None, "number": 3, "text": "a"}, {"without params": {"kernel": 3}}
  ),
  "rngs": kinds.kind(
    {"text": "dropout", "number": 3, "None": None, "numbers": (3,), "dict": {"dropout": 0}}, {}
  ),
  "rng": shared.RNG,
  "tx": shared.TX,
  "loss_fn": shared.FUNCTION,
  "init_fn": shared.FUNCTION,
  "make_model": shared.FUNCTION,
}
STEPPING = {
  "has_aux": shared.FLAG,
  "full_grad_fn": shared.OPTIONAL_FUNCTION,
  "donate": shared.FLAG,
  "hold_frozen_statistics": shared.FLAG,
}
GROUPING = {
  "num_groups": kinds.count(optional=True, static=True) | {"too many": Bad(9, ValueError)},
  "overrides": shared.OVERRIDES,
  "data": shared.DATA,
}


def loss_fn(model: Any, batch: Any) -> Any:
  return jnp.mean(model(batch))


def linear(seed: int = 0) -> nnx.Linear:
  return nnx.Linear(3, 2, rngs=nnx.Rngs(seed))


class Form(NamedTuple):
  """A Flax API: its name, its name for a model, and good arguments of functions of a loss."""

  name: str
  model_name: str
  traced: dict[str, Any]
  stepping: dict[str, Any]
  statistics: dict[str, Any]
  # Those of `traced` that are passed by position, and those that have a default.
  positional: tuple[str, ...]
  optional: tuple[str, ...]


NNX = Form(
  "nnx",
  "model",
  traced={"loss_fn": loss_fn, "model": linear(), "args": (problem.X,)},
  stepping={"loss_fn": loss_fn},
  statistics={"model": nnx.BatchNorm(3, rngs=nnx.Rngs(0)), "batches": [problem.X]},
  positional=("loss_fn", "model", "args"),
  optional=("wrt",),
)
LINEN = Form(
  "linen",
  "module",
  traced={"module": nn.Dense(2), "loss_fn": loss_fn, "variables": VARIABLES, "batch": problem.X},
  stepping={"module": nn.Dense(2), "loss_fn": loss_fn, "tx": problem.SGD},
  statistics={
    "module": nn.BatchNorm(True),
    "variables": {
      "params": {"bias": jnp.zeros(3), "scale": jnp.ones(3)},
      "batch_stats": {"mean": jnp.zeros(3), "var": jnp.ones(3)},
    },
    "batches": [problem.X],
  },
  positional=(),
  optional=("rngs", "rng"),
)


def entries() -> dict[str, shared.Entry]:
  common = {f"{form.name}.{name}": entry for form in (NNX, LINEN) for name, entry in _common(form)}
  return common | _of_nnx() | _of_linen()


def _kinds(*names: str) -> dict[str, Kind]:
  return {name: KINDS[name] for name in names if name in KINDS}


def _common(form: Form) -> list[tuple[str, shared.Entry]]:
  """The functions and methods that both APIs have."""
  ours = getattr(optax_boost, form.name)
  boost = ours.auto_boost("O1", total_steps=10)
  model, called = form.traced[form.model_name], (form.model_name, "args")
  tracing = _kinds(*form.traced, *form.optional)
  less_bn = shared.less_bn_arguments() | _kinds(form.model_name)
  # AutoBoost calls a module `model`, too; it is passed by position.
  models = {k: v._replace(mention=form.model_name) for k, v in KINDS[form.model_name].items()}
  only = [name for name in form.optional if name == "rngs"]

  def by_position(
    function: Any, good: dict[str, Any], arguments: dict[str, Kind], positional: tuple[str, ...]
  ) -> shared.Entry:
    return shared.Entry(function, lambda: good, arguments, positional=positional, free=FREE)

  inputs = {form.model_name: model, "args": (problem.X,)}
  of_boost = ({"model": model, "args": (problem.X,)}, {"model": models}, ("model", "args"))
  return [
    ("AutoBoost.model", by_position(boost.model, *of_boost)),
    (
      "AutoBoost.train_step",
      shared.Entry(
        boost.train_step,
        lambda: form.stepping,
        _kinds(*form.stepping),
        free={"options": "those of make_train_step, which see"},
      ),
    ),
    (
      "auto_boost",
      shared.Entry(ours.auto_boost, lambda: {}, functions.entries()["auto_boost"].arguments),
    ),
    (
      "layer_groups",
      by_position(
        ours.layer_groups, form.traced | {"num_groups": 1}, tracing | GROUPING, form.positional
      ),
    ),
    (
      "estimate_batch_stats",
      shared.Entry(
        ours.estimate_batch_stats,
        lambda: form.statistics,
        _kinds(*form.statistics)
        | {
          "batches": shared.BATCHES,
          "forward_fn": shared.OPTIONAL_FUNCTION,
          "weight_fn": shared.OPTIONAL_FUNCTION,
          "progress": shared.FLAG,
        },
      ),
    ),
    ("layer_axes", by_position(ours.layer_axes, form.traced, tracing, form.positional)),
    ("stacked_axes", by_position(ours.stacked_axes, form.traced, tracing, form.positional)),
    ("plan_less_bn", by_position(ours.plan_less_bn, inputs, less_bn, called)),
    ("less_bn", by_position(ours.less_bn, inputs, less_bn | {"plan": shared.PLAN}, called)),
    (
      "make_train_step",
      shared.Entry(
        ours.make_train_step, lambda: form.stepping, STEPPING | _kinds(*form.stepping, *only)
      ),
    ),
    (
      "split_loss",
      shared.Entry(
        ours.split_loss,
        lambda: {k: v for k, v in form.traced.items() if k not in ("args", "batch")},
        _kinds(*[k for k in form.traced if k != "args"], *(only or form.optional)),
      ),
    ),
  ]


def _of_nnx() -> dict[str, shared.Entry]:
  ours, model = optax_boost.nnx, linear()
  optimizer = nnx.Optimizer(model, problem.SGD, wrt=nnx.Param)
  averaging = nnx.Optimizer(model, problem.make("average_params"), wrt=nnx.Param)
  svrg = nnx.Optimizer(model, problem.make("svrg"), wrt=nnx.Param)
  two = nnx.Sequential(nnx.Linear(3, 3, rngs=nnx.Rngs(0)), nnx.Linear(3, 2, rngs=nnx.Rngs(1)))
  boost = ours.auto_boost("O1", total_steps=10)
  step = ours.make_train_step(loss_fn)
  stepping = {
    "model": KINDS["model"],
    "optimizer": kinds.kind({"None": None, "transformation": problem.SGD, "number": 3}, {}),
    "rng": kinds.kind(
      {
        "number": 3,
        "text": "0",
        "floats": jnp.ones(2),
        "dict": {"params": 0},
        "several": jax.random.split(jax.random.key(0)),
      },
      {},
    ),
  }
  return {
    "nnx.AutoBoost.eval_model": shared.Entry(
      boost.eval_model,
      lambda: {"model": model, "trained": model, "args": (problem.X,)},
      {
        "model": KINDS["model"],
        "trained": {k: bad._replace(mention="checkpoint") for k, bad in CHECKPOINT.items()},
      },
      positional=("model", "trained", "args"),
      free=FREE,
    ),
    "nnx.AutoBoost.optimizer": shared.Entry(
      boost.optimizer,
      lambda: {"tx": problem.SGD, "loss_fn": loss_fn, "model": two, "args": (problem.X,)},
      {
        "tx": shared.TX,
        "model": KINDS["model"] | {"None": Bad(None, shared.EITHER)},
        "loss_fn": shared.OPTIONAL_FUNCTION,
        "groups": kinds.groups(optional=True),
        "wrt": KINDS["wrt"],
      },
      positional=("tx", "loss_fn", "model", "args"),
      free={"args": shared.INPUTS},
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
        stepping,
        free=FREE,
      )
      for method in ("__call__", "lower", "trace")
    },
    "nnx.TrainStep.refresh": shared.Entry(
      step.refresh,
      lambda: {"model": model, "optimizer": svrg, "batches": [problem.X]},
      {
        **stepping,
        "optimizer": stepping["optimizer"] | {"without svrg": Bad(optimizer, ValueError, "state")},
        "batches": shared.BATCHES,
        "weight_fn": shared.OPTIONAL_FUNCTION,
        "progress": shared.FLAG,
      },
    ),
    "nnx.averaged_model": shared.Entry(
      ours.averaged_model,
      lambda: {"optimizer": averaging, "model": model},
      {
        "optimizer": stepping["optimizer"]
        | {"without averages": Bad(optimizer, ValueError, "state")},
        "model": KINDS["model"],
      },
    ),
    "nnx.load_original": shared.Entry(
      ours.load_original,
      lambda: {"model": model, "checkpoint": model},
      {"model": KINDS["model"], "checkpoint": CHECKPOINT},
    ),
  }


def _of_linen() -> dict[str, shared.Entry]:
  ours, module = optax_boost.linen, nn.Dense(2)
  two = nn.Sequential([nn.Dense(3), nn.Dense(2)])
  boost = ours.auto_boost("O1", total_steps=10)
  step = ours.make_train_step(module, loss_fn, problem.SGD, donate=False)
  head = ours.NormalizedDense(2)
  head_variables = head.init(jax.random.key(0), problem.X)
  bound = {"module": module, "params": VARIABLES["params"], "collections": {}, "rngs": {}}
  dicts = kinds.kind({"None": None, "number": 3, "text": "a"}, {})
  return {
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
        "module": KINDS["module"] | {"None": Bad(None, shared.EITHER, "model")},
        "loss_fn": shared.OPTIONAL_FUNCTION,
        "variables": KINDS["variables"] | {"None": Bad(None, shared.EITHER, "model")},
        "rng": shared.RNG,
        "rngs": KINDS["rngs"],
        "groups": kinds.groups(optional=True),
      },
      free=FREE,
    ),
    "linen.BoundModel": shared.Entry(
      ours.BoundModel,
      lambda: bound,
      {"module": KINDS["module"], "params": {}, "collections": dicts, "rngs": dicts},
    ),
    "linen.BoundModel.__call__": shared.Entry(
      ours.BoundModel(**bound),
      lambda: {"args": (problem.X,)},
      {},
      positional=("args",),
      free=FREE,
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
      step.init, lambda: {"variables": VARIABLES}, _kinds("variables")
    ),
    "linen.load_original": shared.Entry(
      ours.load_original,
      lambda: {"variables": VARIABLES, "checkpoint": VARIABLES},
      {"variables": kinds.kind({"None": None, "number": 3}, {}), "checkpoint": CHECKPOINT},
    ),
    "linen.variables": shared.Entry(
      ours.variables,
      lambda: {"state": step.init(VARIABLES)},
      {"state": kinds.kind({"None": None, "number": 3, "variables": VARIABLES}, {})},
    ),
  }

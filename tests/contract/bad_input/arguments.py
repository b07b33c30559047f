"""The kind of each argument of the public functions, and calls that are good but for one."""

from collections.abc import Callable, Iterator
import dataclasses
import inspect
import re
from typing import Any

from flax import linen as nn, nnx
import jax
import jax.numpy as jnp
import optax

import optax_boost
import optax_boost.linen
import optax_boost.nnx
from tests import meshes, problems
from tests.contract import registry
from tests.contract.bad_input import kinds
from tests.contract.bad_input.kinds import Kind

PARAMS = problems.params()
FIRST_ROWS = list({row.factory: row for row in reversed(registry.ROWS)}.values())[::-1]
GRADS = problems.grads(PARAMS)
SGD = optax.sgd(0.1)
X = jnp.ones((2, 3))
MODEL = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
VARIABLES = {"params": {"kernel": jnp.ones((3, 2)), "bias": jnp.ones(2)}}
_NORM, _NNX_NORM = nn.BatchNorm(False), nnx.BatchNorm(3, rngs=nnx.Rngs(0))
_NORM_VARIABLES = {
  "params": {"bias": jnp.zeros(3), "scale": jnp.ones(3)},
  "batch_stats": {"mean": jnp.zeros(3), "var": jnp.ones(3)},
}
_POSITIVE, _NOT_NEGATIVE = kinds.number(0, -1), kinds.number(-1)
_SHARE, _OPEN = kinds.number(-0.1, 1), kinds.number(0, 1, -1)
_WHOLE = jax.sharding.NamedSharding(meshes.mesh((1,), ("a",)), jax.sharding.PartitionSpec())
_HALF_OPEN = kinds.number(0, -1, 1.5)

# By name: an argument of one name means the same in all functions, but for those with a function.
KINDS: dict[str | tuple[str, str], Kind] = {
  "trust_coefficient": _POSITIVE,
  "weight_decay": _NOT_NEGATIVE,
  "eps": _NOT_NEGATIVE,
  "clip": _NOT_NEGATIVE,
  "clip_ratio": _NOT_NEGATIVE,
  ("lars", "clip_ratio"): kinds.FLAG,
  "learning_rate": _NOT_NEGATIVE,
  "momentum": _SHARE,
  "decay": _HALF_OPEN,
  ("average_params", "decay"): _OPEN,
  "rho": _OPEN,
  "sigma": _SHARE,
  "gamma": _SHARE,
  "alpha": _NOT_NEGATIVE,
  "initial_scale": kinds.number(0, -1, 1e39, 1e-50),
  "growth_factor": kinds.number(0.5, 0, -1),
  "backoff_factor": _OPEN,
  "minimum": kinds.number(0, -1, 2.0**30),
  "maximum": kinds.number(0, -1, 0.5, 1e39),
  "lamda": _HALF_OPEN,
  "lamda_max": _HALF_OPEN,
  "beta1": _HALF_OPEN,
  "beta2": _POSITIVE,
  "alpha_min": _NOT_NEGATIVE,
  "momentum_lr": _POSITIVE,
  "multiplier": _POSITIVE,
  "initial": _NOT_NEGATIVE,
  "frozen_fraction": _SHARE,
  "first": kinds.number(-0.1, 1.5),
  "power": _POSITIVE,
  **dict.fromkeys(("every", "growth_interval", "hysteresis", "sync_every"), kinds.count()),
  **dict.fromkeys(("step", "start"), kinds.count(0)),
  **dict.fromkeys(("capacity", "components"), kinds.count(static=True)),
  **dict.fromkeys(("partition_size_min", "num_groups"), kinds.count(static=True)),
  **dict.fromkeys(("steps", "total_steps", "points", "batch_size"), kinds.count(static=True)),
  **dict.fromkeys(("features", "in_features", "out_features"), kinds.count(static=True)),
  ("gradual_unfreezing", "every"): kinds.count(static=True),
  "max_depths": kinds.count(2, static=True),
  **dict.fromkeys(("sequence_length", "full_length", "first_length"), kinds.count(static=True)),
  "length": kinds.count(static=True),
  ("sequence_length_warmup", "factor"): kinds.count(2, static=True),
  "warmup_fraction": _OPEN,
  "axes": Kind(kinds.all_but("None", "dict")),
  "frozen_groups": kinds.count(0, static=True),
  "max_search": Kind(kinds.all_but("None", "text", "whole"), {"0": 0, "name": "fast"}),
  **dict.fromkeys(("inner", "tx", "second", ("switch_after", "first")), kinds.TX),
  **dict.fromkeys(("exclude", "weight_decay_mask"), kinds.SELECTOR),
  **dict.fromkeys(("only", ("estimate_batch_stats", "exclude")), kinds.PATTERNS),
  "axis_name": kinds.AXIS_NAME,
  "batch_sharding": Kind(kinds.all_but(spec=jax.sharding.PartitionSpec("a"), whole=_WHOLE)),
  "local_axis_name": kinds.AXIS_NAME,
  "shard_axis_name": kinds.AXIS_NAME,
  "layers": kinds.LAYERS,
  "groups": kinds.GROUPS,
  ("adasum", "groups"): kinds.PATTERNS,
  ("adasum_reduce", "groups"): kinds.PATTERNS,
  "blocks": kinds.BLOCKS,
  "key": kinds.KEY,
  "seed": kinds.count(0, static=True),
  "rng": kinds.RNG,
  ("full_gradient", "rng"): kinds.SEED,
  ("full_gradient", "stacked"): kinds.FLAG,
  **dict.fromkeys(
    (("auto_boost", "axis_name"), ("layer_axes", "axis_name")),
    kinds.AXIS_WORD,
  ),
  ("auto_boost", "local_axis_name"): kinds.AXIS_WORD,
  **dict.fromkeys(
    ("check", "counts", "layout", "method", "backend", "not_finite", "level", "growth"), kinds.NAME
  ),
  **dict.fromkeys(("dtype", "param_dtype", "accumulator_dtype"), kinds.FLOAT_DTYPE),
  **dict.fromkeys(("has_aux", "has_model_state", "donate", "hold_frozen_statistics"), kinds.FLAG),
  ("make_train_step", "update_in_backward"): kinds.FLAG,
  **dict.fromkeys(("nesterov", "anneal", "include_partition_remainder"), kinds.FLAG),
  **dict.fromkeys(("fn_flag", "bias", "use_bias", "vmap_seeds", "progress"), kinds.FLAG),
  **dict.fromkeys(
    ("loss_fn", "grad_fn", "init_fn", "full_grad_fn", "weight_fn", "opt_state_sharding"),
    kinds.FUNCTION,
  ),
  **dict.fromkeys(
    ("forward_fn", "predicate", "on_plan", "evaluate", "weight", "clock"), kinds.FUNCTION
  ),
  **dict.fromkeys(("kernel_init", "bias_init", "multiplier_init"), kinds.FUNCTION),
  ("FreezeSchedule", "steps"): kinds.TABLE,
  "depths": kinds.TABLE,
  "cycle": Kind({}, {}, kinds.all_but("None", late=(1, 0), long=(0, 2**31), three=(0, 1, 2))),
  "anneal_until": Kind({}, {}, kinds.all_but("None", "vector", "NumPy vector", zero=[0, 9])),
  ("average_params", "model_state"): Kind({"text": "text", "function": len, "leaf": {"a": b"b"}}),
  "length_prices": Kind(kinds.all_but("None", "dict")),
  "rounds": kinds.count(static=True),
  ("length_prices", "step"): kinds.FUNCTION,
  ("length_prices", "schedule"): Kind(kinds.all_but()),
  "subspace": Kind(kinds.all_but("function", params=PARAMS)),
  "schedule": Kind(
    kinds.all_but(), {"of other groups": optax_boost.continuous_freezing(5, frozen_fraction=0.5)}
  ),
  "batches": kinds.BATCHES,
  "opt_state": kinds.OPT_STATE,
  "model": kinds.MODEL,
  "module": kinds.MODULE,
  "optimizer": kinds.OPTIMIZER,
  "metrics": Kind(kinds.all_but("dict")),
  "plan": Kind(kinds.all_but()),
  "rngs": kinds.RNG_NAMES,
}
# Arrays, trees and settings that are no one's of these kinds; their methods' tests have them.
FREE = {
  *("args", "batch", "checkpoint", "config", "data", "extra_args", "full_gradient", "grads"),
  *("initial", "kwargs", "params", "patterns", "seeds", "snapshots"),
  *(
    "finite",
    "group_loss_scale",
    "growth_count",
    "loss_scale",
    "stacked",
    "state",
    "transformations",
    "updates",
    "variables",
    "wrt",
  ),
}


@dataclasses.dataclass(frozen=True)
class Call:
  """A function with good arguments; `star` is passed for ``*args``."""

  function: Callable[..., Any]
  good: dict[str, Any]
  star: tuple[Any, ...] = ()
  bad_values: dict[str, Kind] = dataclasses.field(default_factory=dict)
  then: Callable[[Any], Any] = lambda result: result

  def __call__(self, **changes: Any) -> Any:
    """Calls the function with some arguments replaced."""
    arguments = self.good | changes
    front = []
    if self.star:
      names = list(inspect.signature(self.function).parameters)
      front = [arguments.pop(name) for name in names[: names.index("args")]]
    return self.then(self.function(*front, *self.star, **arguments))


def _use(row: registry.Row) -> Callable[[Any], Any]:
  def use(tx: Any) -> Any:
    tx = row.feed(tx)
    return tx.update(GRADS, tx.init(PARAMS), PARAMS)

  return use


def loss_fn(params: Any, batch: Any) -> jax.Array:
  """A loss of params, a module or a model."""
  if callable(params):
    return jnp.mean(params(batch))
  return jnp.mean(batch @ params["kernel"] + params["bias"])


def _calls() -> Iterator[tuple[str, Call]]:
  for row in FIRST_ROWS:
    function = getattr(optax_boost, row.factory)
    yield row.factory, Call(function, row.kwargs, (), row.bad_values, _use(row))
  share = {"num_groups": 2, "frozen_fraction": 0.5}
  dense = VARIABLES["params"]
  gradient = {"grad_fn": jax.grad(loss_fn), "params": dense}
  lars = optax_boost.scale_by_lars_trust_ratio()
  sgperm = optax_boost.sgperm(key=0).init(dense)
  good: dict[str, dict[str, Any]] = {
    "FreezeSchedule": {"steps": [0], "depths": [0], "num_groups": 2},
    "adasum_reduce": {"stacked": jax.tree.map(lambda x: jnp.stack([x, x]), dense)},
    "auto_boost": {},
    "cut_sequences": {"batch": jnp.ones((2, 8)), "length": 4, "full_length": 8},
    "sequence_length_warmup": {"full_length": 16, "total_steps": 10},
    "length_prices": {
      "step": jnp.mean,
      "batch": jnp.ones((2, 16)),
      "schedule": optax_boost.sequence_length_warmup(16, 10),
    },
    "flatten_metrics": {"metrics": {"loss": X[0, 0]}},
    "averaged_params": {
      "opt_state": optax_boost.average_params(SGD, decay=0.9).init(dense),
      "params": dense,
    },
    "averaged_model_state": {
      "opt_state": optax_boost.average_params(SGD, decay=0.9, model_state=dense).init(dense),
      "model_state": dense,
    },
    "continuous_freezing": share,
    "interval_freezing": share,
    "fixed_freezing": {"num_groups": 2, "frozen_groups": 1},
    "gradual_unfreezing": {"num_groups": 2, "every": 10},
    "progressive_freezing": {"num_groups": 2, "total_steps": 10},
    "fit_subspace": {"snapshots": [dense, VARIABLES["params"]], "components": 1},
    "full_gradient": gradient | {"batches": [X]},
    "layer_groups": {"params": dense, "blocks": ["kernel", "bias"]},
    "make_train_step": {"loss_fn": loss_fn, "tx": SGD},
    "apply_gradients": {"tx": lars, "grads": dense, "opt_state": lars.init(dense), "params": dense},
    "permuted_params": {"opt_state": sgperm},
    "race": {
      "loss_fn": loss_fn,
      "init_fn": lambda key: dense,
      "data": X,
      "transformations": {"sgd": SGD},
      "steps": 1,
    },
  }
  for name, arguments in good.items():
    yield name, Call(getattr(optax_boost, name), arguments)
  yield "layer_axes", Call(optax_boost.layer_axes, {"loss_fn": loss_fn, "params": dense}, (X,))
  yield "nnx.make_train_step", Call(optax_boost.nnx.make_train_step, {"loss_fn": loss_fn})
  placed = {"model": MODEL, "tx": SGD, "opt_state_sharding": lambda x: MODEL.kernel[...].sharding}
  yield "nnx.make_optimizer", Call(optax_boost.nnx.make_optimizer, placed)
  for form in ("nnx", "linen"):
    module, linen = getattr(optax_boost, form), form == "linen"
    model = {"module": nn.Dense(2)} if linen else {"model": MODEL}
    whole = {"loss_fn": loss_fn, **model} | ({"variables": VARIABLES} if linen else {})
    yield f"{form}.split_loss", Call(module.split_loss, whole)
    yield f"{form}.less_bn", Call(module.less_bn, model, (X,))
    norm = {"module": _NORM, "variables": _NORM_VARIABLES} if linen else {"model": _NNX_NORM}
    statistics = norm | {"batches": [X]}
    yield f"{form}.estimate_batch_stats", Call(module.estimate_batch_stats, statistics)


CALLS = dict(_calls())


def bad_values(name: str) -> Iterator[tuple[str, str, Any, Any]]:
  """Arguments, labels, values and the errors that they must raise."""
  call = CALLS[name]
  function = name.rpartition(".")[2]
  for argument, parameter in parameters(call.function).items():
    kind = call.bad_values.get(argument, KINDS.get((function, argument), KINDS.get(argument)))
    if kind is None:
      continue
    annotation = str(parameter.annotation)
    allowed = set()
    if parameter.default is None or re.search("None|Optional", annotation):
      allowed.add("None")
    if "Callable" in annotation:
      allowed.add("function")
    either = (TypeError, ValueError)
    columns = (TypeError, kind.types), (ValueError, kind.values), (either, kind.either)
    for error, values in columns:
      for label in values.keys() - allowed:
        yield argument, label, values[label], error


def parameters(function: Any) -> dict[str, inspect.Parameter]:
  """The arguments that a user passes."""
  # The signature of an NNX module is its metaclass's.
  made = inspect.isclass(function) and issubclass(function, nnx.Module)
  found = dict(inspect.signature(function.__init__ if made else function).parameters)
  return {k: v for k, v in found.items() if k not in ("self", "name", "parent")}

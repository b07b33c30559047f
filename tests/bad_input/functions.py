"""The other functions."""

import functools

import jax
import jax.numpy as jnp
import optax

import optax_boost
from tests.bad_input import kinds
from tests.bad_input import problem
from tests.bad_input import shared
from tests.bad_input.kinds import Bad


@functools.cache
def entries() -> dict[str, shared.Entry]:
  share = {"num_groups": shared.COUNT, "frozen_fraction": shared.SHARE}
  trajectory = optax_boost.record_trajectory(1, 4)
  snapshot_state = trajectory.init(problem.PARAMS)
  for _ in range(2):
    snapshot_state = trajectory.update(problem.GRADS, snapshot_state, problem.PARAMS)[1]
  stacked = jax.tree.map(lambda p: jnp.stack([p, 2 * p, p - 1]), problem.PARAMS)
  sgperm_state = problem.make("sgperm").init(problem.PARAMS)
  snapshots = [jax.tree.map(lambda p, i=i: p + i * (-1) ** i, problem.PARAMS) for i in range(4)]
  snapshots_kind = {
    "None": Bad(None, shared.EITHER),
    "number": Bad(3, shared.EITHER, "snapshots|leaf"),
    "text": Bad("abc", shared.EITHER, "snapshots|leaf"),
    "empty": Bad([], ValueError),
    "one": Bad(snapshots[:1], ValueError),
    "of two trees": Bad([*snapshots, shared.OTHER], ValueError),
    "nan": Bad([*snapshots, jax.tree.map(lambda p: p * kinds.NAN, problem.PARAMS)], ValueError),
    "text leaves": Bad([{"a": "b"}, {"a": "c"}, {"a": "d"}], TypeError, "leaf"),
    "integers": Bad([{"a": jnp.arange(3)}] * 4, TypeError, "leaf"),
    "another optimizer's state": Bad(
      optax.adam(0.1).init(problem.PARAMS), shared.EITHER, "snapshots|leaf"
    ),
  }
  components = kinds.count(static=True) | {"more than snapshots": Bad(9, ValueError)}
  leaves = kinds.kind({"text leaves": {"conv": "a"}, "functions": {"conv": len}}, {})
  loss = {"loss_fn": shared.FUNCTION, "params": leaves}
  averaging = problem.make("average_params")
  loss_scale = optax_boost.dynamic_loss_scale(problem.SGD)
  other_tree = {
    "None": Bad(None, ValueError, "gradients and params"),
    "number": Bad(3.0, ValueError, "gradients and params"),
    "other tree": Bad(shared.OTHER, ValueError, "gradients and params"),
    "text leaves": Bad(
      jax.tree.map(lambda p: "a", problem.PARAMS), shared.EITHER, "gradients of the params' shapes"
    ),
  }
  auto = {
    "level": shared.NAME,
    "config": kinds.kind({"number": 3, "list": [], "bool": True, "function": len}, {})
    | {
      "missing file": Bad("nowhere.json", FileNotFoundError, "nowhere.json"),
      "folder": Bad("/", (OSError, ValueError), "/"),
      "unknown block": Bad({"bost": {}}, ValueError, "bost"),
      "unknown key": Bad({"boost": {"mod": "auto"}}, ValueError, "mod"),
      "block of wrong type": Bad({"boost": 3}, TypeError, "boost"),
      "nan": Bad({"grad_freeze": {"freeze_p": kinds.NAN}}, ValueError, "freeze_p"),
      "10**400": Bad({"dim_reduce": {"alpha": kinds.HUGE}}, ValueError, "alpha"),
      "number as block": Bad({3: {}}, shared.EITHER, "3"),
    },
    "axis_name": kinds.without(shared.AXIS_NAME, "unbound", "several unbound"),
    "local_axis_name": kinds.without(shared.AXIS_NAME, "unbound", "several unbound"),
    "key": shared.KEY,
    "total_steps": kinds.count(optional=True),
  }
  return {
    "adasum_reduce": shared.Entry(
      optax_boost.adasum_reduce,
      lambda: {"stacked": stacked},
      {
        "stacked": {
          "scalar leaf": Bad(jnp.ones([]), ValueError, "leaf|leaves"),
          "two lengths": Bad([jnp.ones(2), jnp.ones(3)], ValueError, "leaf|leaves"),
          "integers": Bad(jnp.ones(2, int), TypeError, "leaf|leaves"),
          "text": Bad("a", TypeError, "leaf|leaves"),
          "no replica": Bad(jnp.ones((0, 2)), ValueError, "leaf|leaves"),
        },
        "groups": kinds.patterns_or_none(),
      },
    ),
    "alpha_svrg_schedule": shared.Entry(
      optax_boost.alpha_svrg_schedule,
      lambda: {"steps": 10},
      {"steps": shared.COUNT, "initial": shared.NOT_NEGATIVE},
    ),
    "apply_gradients": shared.Entry(
      optax_boost.apply_gradients,
      lambda: {
        "tx": loss_scale,
        "grads": problem.GRADS,
        "opt_state": loss_scale.init(problem.PARAMS),
        "params": problem.PARAMS,
      },
      {
        "tx": shared.TX,
        "grads": other_tree,
        "opt_state": {
          "None": Bad(None, TypeError, "state"),
          "number": Bad(3, TypeError, "state"),
          "another optimizer's": Bad(optax.adam(0.1).init(problem.PARAMS), TypeError, "state"),
        },
        "params": other_tree,
      },
      free={"extra_args": "they are those of `update`"},
    ),
    "auto_boost": shared.Entry(optax_boost.auto_boost, lambda: {}, auto),
    "averaged_params": shared.Entry(
      optax_boost.averaged_params,
      lambda: {"opt_state": averaging.init(problem.PARAMS), "params": problem.PARAMS},
      {
        "opt_state": {
          "None": Bad(None, ValueError, "state"),
          "number": Bad(3, ValueError, "state"),
          "another optimizer's": Bad(problem.SGD.init(problem.PARAMS), ValueError, "state"),
          "two": Bad((averaging.init(problem.PARAMS),) * 2, ValueError, "two averages"),
          "population": Bad(
            jax.vmap(averaging.init)(jax.tree.map(lambda p: p[None], problem.PARAMS)),
            ValueError,
            "population",
          ),
        },
        "params": {
          "None": Bad(None, ValueError),
          "other tree": Bad(shared.OTHER, ValueError),
          "other shapes": Bad(jax.tree.map(jnp.ravel, problem.PARAMS), ValueError),
        },
      },
    ),
    "continuous_freezing": shared.Entry(
      optax_boost.continuous_freezing, lambda: {"num_groups": 2, "frozen_fraction": 0.5}, share
    ),
    "fixed_freezing": shared.Entry(
      optax_boost.fixed_freezing,
      lambda: {"num_groups": 2, "frozen_groups": 1},
      {"num_groups": shared.COUNT, "frozen_groups": kinds.count(0, static=True)},
    ),
    "gradual_unfreezing": shared.Entry(
      optax_boost.gradual_unfreezing,
      lambda: {"num_groups": 2, "every": 10},
      {"num_groups": shared.COUNT, "every": shared.COUNT},
    ),
    "interval_freezing": shared.Entry(
      optax_boost.interval_freezing, lambda: {"num_groups": 2, "frozen_fraction": 0.5}, share
    ),
    "progressive_freezing": shared.Entry(
      optax_boost.progressive_freezing,
      lambda: {"num_groups": 2, "total_steps": 10},
      {
        "num_groups": shared.COUNT,
        "total_steps": shared.COUNT,
        "first": kinds.number(-0.1, 1.5),
        "power": shared.POSITIVE,
        "anneal": shared.FLAG,
      },
    ),
    "fit_subspace": shared.Entry(
      optax_boost.fit_subspace,
      lambda: {"snapshots": snapshots, "components": 1},
      {
        "snapshots": snapshots_kind,
        "components": components,
        "method": shared.NAME,
        "key": kinds.key(optional=True),
        "oversample": kinds.count(0, static=True),
        "dtype": kinds.dtype(),
        "groups": kinds.without(kinds.groups(optional=True), "dict"),
      },
    ),
    "full_gradient": shared.Entry(
      optax_boost.full_gradient,
      lambda: {"grad_fn": problem.grad_fn, "params": problem.PARAMS, "batches": [problem.X]},
      {
        "grad_fn": shared.FUNCTION
        | {
          "to another tree": Bad(lambda params, batch: shared.OTHER, ValueError),
          "to a number": Bad(lambda params, batch: 3.0, ValueError),
        },
        "params": shared.PARAMS_KIND,
        "batches": shared.BATCHES
        | {
          "two trees": Bad([problem.X, {"x": problem.X}], ValueError),
          "scalars": Bad([1.0, 2.0], ValueError),
          "text": Bad(["a", "b"], shared.EITHER),
        },
        "rng": kinds.without(kinds.key(optional=True), "raw data"),
        "weight_fn": shared.OPTIONAL_FUNCTION
        | {
          "to text": Bad(lambda batch: "a", TypeError),
          "to a vector": Bad(lambda batch: jnp.ones(2), shared.EITHER),
          "to zero": Bad(lambda batch: 0, ValueError, "weight"),
          "to nan": Bad(lambda batch: kinds.NAN, ValueError, "weight"),
        },
        "progress": shared.FLAG,
      },
    ),
    "scan_full_gradient": shared.Entry(
      optax_boost.scan_full_gradient,
      lambda: {"grad_fn": problem.grad_fn, "params": problem.PARAMS, "batches": problem.X},
      {
        "grad_fn": shared.FUNCTION
        | {
          "to another tree": Bad(lambda params, batch: shared.OTHER, ValueError),
          "to a number": Bad(lambda params, batch: 3.0, ValueError),
        },
        "params": shared.PARAMS_KIND,
        "batches": {
          "None": Bad(None, shared.EITHER),
          "number": Bad(3, shared.EITHER),
          "empty": Bad([], ValueError),
          "no batch": Bad(jnp.ones((0, 2)), ValueError),
          "two lengths": Bad([jnp.ones(2), jnp.ones(3)], ValueError),
          "text": Bad("a", shared.EITHER),
        },
        "rng": kinds.without(kinds.key(optional=True), "raw data"),
        "weight_fn": shared.OPTIONAL_FUNCTION
        | {
          "to text": Bad(lambda batch: "a", TypeError),
          "to a vector": Bad(lambda batch: jnp.ones(2), shared.EITHER),
        },
      },
    ),
    "layer_groups": shared.Entry(
      optax_boost.layer_groups,
      lambda: {
        "loss_fn": problem.loss_fn,
        "params": problem.PARAMS,
        "args": (problem.X,),
        "num_groups": 2,
      },
      {
        **loss,
        "num_groups": kinds.count(optional=True, static=True) | {"too many": Bad(9, ValueError)},
        "overrides": shared.OVERRIDES,
        "data": shared.DATA,
      },
      positional=("loss_fn", "params", "args"),
      free={"args": "whatever the loss takes"},
    ),
    "layer_axes": shared.Entry(
      optax_boost.layer_axes,
      lambda: {"loss_fn": problem.loss_fn, "params": problem.PARAMS, "args": (problem.X,)},
      loss,
      positional=("loss_fn", "params", "args"),
      free={"args": "whatever the loss takes"},
    ),
    "stacked_axes": shared.Entry(
      optax_boost.stacked_axes,
      lambda: {"loss_fn": problem.loss_fn, "params": problem.PARAMS, "args": (problem.X,)},
      loss,
      positional=("loss_fn", "params", "args"),
      free={"args": "whatever the loss takes"},
    ),
    "make_train_step": shared.Entry(
      optax_boost.make_train_step,
      lambda: {"loss_fn": problem.loss_fn, "tx": problem.SGD},
      {
        "loss_fn": shared.FUNCTION,
        "tx": shared.TX,
        "has_aux": shared.FLAG,
        "has_model_state": shared.FLAG,
        "full_grad_fn": shared.OPTIONAL_FUNCTION,
        "donate": shared.FLAG,
        "hold_frozen_statistics": shared.FLAG,
      },
    ),
    "path_mask": shared.Entry(
      optax_boost.path_mask,
      lambda: {"patterns": ("conv",)},
      {
        "patterns": {
          label: bad._replace(value=("conv", bad.value)) for label, bad in kinds.pattern().items()
        }
      },
      positional=("patterns",),
    ),
    "permuted_params": shared.Entry(
      optax_boost.permuted_params,
      lambda: {"opt_state": sgperm_state},
      {
        "opt_state": shared.OPT_STATE,
        "params": {"other tree": Bad(shared.OTHER, ValueError), "number": Bad(3, ValueError)},
      },
    ),
    "race": shared.Entry(
      optax_boost.race,
      lambda: {
        "loss_fn": problem.loss_fn,
        "init_fn": lambda key: problem.PARAMS,
        "data": problem.X,
        "transformations": {"sgd": problem.SGD},
        "steps": 1,
        "seeds": 1,
        "progress": False,
      },
      {
        "loss_fn": shared.FUNCTION,
        "init_fn": shared.FUNCTION,
        "data": {
          "None": Bad(None, ValueError),
          "number": Bad(3, ValueError),
          "text": Bad("a", ValueError),
          "no example": Bad(jnp.ones((0, 3)), ValueError),
          "two lengths": Bad((jnp.ones((2, 3)), jnp.ones((3, 3))), ValueError),
          "no array": Bad({}, ValueError),
        },
        "transformations": {
          "None": Bad(None, TypeError),
          "one": Bad(problem.SGD, TypeError),
          "list": Bad([problem.SGD], TypeError),
          "empty": Bad({}, TypeError),
          "factory": Bad({"sgd": optax.sgd}, TypeError),
          "number as name": Bad({3: problem.SGD}, TypeError),
        },
        "steps": kinds.count(static=True),
        "batch_size": kinds.count(static=True, optional=True)
        | {"more than examples": Bad(9, ValueError)},
        "seeds": shared.SEEDS,
        "evaluate": shared.OPTIONAL_FUNCTION,
        "points": kinds.count(static=True),
        "has_model_state": shared.FLAG,
        "full_grad_fn": shared.OPTIONAL_FUNCTION,
        "vmap_seeds": shared.FLAG,
        "progress": shared.FLAG,
      },
    ),
    "refresh_subspace": shared.Entry(
      optax_boost.refresh_subspace,
      lambda: {
        "opt_state": problem.make("dim_reduce").init(problem.PARAMS),
        "subspace": problem.subspace(),
      },
      {
        "opt_state": shared.OPT_STATE,
        "subspace": shared.SUBSPACE,
        "groups": kinds.without(kinds.groups(optional=True), "dict"),
      },
    ),
    "refresh_svrg": shared.Entry(
      optax_boost.refresh_svrg,
      lambda: {
        "opt_state": problem.make("svrg").init(problem.PARAMS),
        "params": problem.PARAMS,
        "full_gradient": problem.GRADS,
      },
      {
        "opt_state": shared.OPT_STATE,
        "params": {
          "other tree": Bad(shared.OTHER, ValueError),
          "None": Bad(None, ValueError),
          "text leaves": Bad(jax.tree.map(lambda p: "a", problem.PARAMS), shared.EITHER),
        },
        "full_gradient": {
          "other tree": Bad(shared.OTHER, ValueError),
          "None": Bad(None, ValueError),
          "text leaves": Bad(jax.tree.map(lambda p: "a", problem.PARAMS), shared.EITHER, "leaf"),
        },
      },
    ),
    "snapshots": shared.Entry(
      optax_boost.snapshots,
      lambda: {"opt_state": snapshot_state},
      {
        "opt_state": shared.OPT_STATE
        | {"no snapshot yet": Bad(trajectory.init(problem.PARAMS), ValueError)}
      },
    ),
  }

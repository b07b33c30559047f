"""Good values: what every call of the table is made of, but for the one that is wrong."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_boost
from optax_boost.race import RaceResult
from tests import registry

PARAMS = {
  "conv": {"kernel": jnp.arange(1.0, 7.0).reshape(2, 3)},
  "dense": {"bias": jnp.ones(3), "kernel": jnp.arange(1.0, 7.0).reshape(3, 2)},
}
GRADS = jax.tree.map(lambda p: 0.5 * p, PARAMS)
GROUPS = ["conv", "dense"]
SGD = optax.sgd(0.1)
X = jnp.ones((2, 3))


def loss_fn(params: Any, batch: Any) -> jax.Array:
  """A loss in which `conv` comes before `dense`."""
  h = jnp.tanh(batch @ params["conv"]["kernel"].T) @ params["conv"]["kernel"]
  return jnp.mean((h + params["dense"]["bias"]) @ params["dense"]["kernel"])


def grad_fn(params: Any, *_: Any) -> Any:
  """Gradients at once, without a trace of the loss."""
  return jax.tree.map(lambda p: 0.5 * p, params)


def extra_args() -> dict[str, Any]:
  """All extra arguments that our methods read."""
  return {
    "value": jnp.ones([]),
    "value_fn": lambda params, **_: jnp.ones([]),
    "grad": GRADS,
    "grad_fn": grad_fn,
    "full_grad_fn": grad_fn,
  }


def subspace(params: Any = None) -> optax_boost.Subspace:
  """Two directions, orthonormal."""
  params = PARAMS if params is None else params
  leaves, structure = jax.tree.flatten(params)
  basis = np.zeros((2, sum(leaf.size for leaf in leaves)), np.float32)
  basis[0, 0] = basis[1, 1] = 1
  ends = np.cumsum([leaf.size for leaf in leaves])[:-1]
  parts = [
    jnp.asarray(part.reshape(2, *leaf.shape))
    for part, leaf in zip(np.split(basis, ends, axis=1), leaves, strict=True)
  ]
  variance = jnp.ones(2)
  return optax_boost.Subspace(params, jax.tree.unflatten(structure, parts), variance, variance / 2)


def use(tx: optax.GradientTransformationExtraArgs) -> Any:
  """Makes the first step, for arguments that are checked against the params."""
  state = tx.init(PARAMS)
  return tx.update(GRADS, state, PARAMS, **extra_args())


def use_on_replicas(tx: optax.GradientTransformationExtraArgs) -> Any:
  """The same, with the axis that the table's good values name."""
  return jax.vmap(lambda _: use(tx), axis_name="batch")(jnp.ones(2))


# By public factory, arguments with which it is a transformation.
FACTORIES: dict[str, dict[str, Any]] = {
  "accumulate": {"inner": SGD, "every": 2},
  "adasum": {"axis_name": "batch"},
  "average_params": {"inner": SGD, "decay": 0.9},
  "centralize": {},
  "dim_reduce": {"subspace": subspace()},
  "dynamic_loss_scale": {"inner": SGD},
  "freeze_layers": {
    "inner": SGD,
    "groups": GROUPS,
    "schedule": optax_boost.continuous_freezing(2, 0.5),
  },
  "laperm": {"inner": SGD, "sync_every": 2},
  "lars": {"learning_rate": 0.1},
  "layerwise_decay": {"groups": GROUPS},
  "master_weights": {"inner": SGD},
  "record_trajectory": {"every": 2, "capacity": 2},
  "scale_by_lars_trust_ratio": {},
  "sgperm": {"key": 0},
  "stochastic_rounding": {"inner": SGD, "key": 0},
  "switch_after": {"step": 2, "first": SGD, "second": SGD},
  **{row.factory: row.kwargs for row in registry.ROWS if row.bad_values is not None},
}


def make(factory: str) -> optax.GradientTransformationExtraArgs:
  """The transformation of a factory, with good arguments."""
  return getattr(optax_boost, factory)(**FACTORIES[factory])


def train_step() -> optax_boost.TrainStep:
  """A train step, and whatever it compiles."""
  return optax_boost.make_train_step(loss_fn, optax.adam(0.1), donate=False)


@functools.cache
def race_result() -> RaceResult:
  """A result of two methods, two seeds and two points."""
  line, rows = np.array([1.0, 2.0]), np.ones((2, 2))
  curves = {"error": rows, "training loss": rows}
  spent = {"steps": line, "gradient_evaluations": line, "seconds": line}
  return RaceResult((0, 1), {"a": curves, "b": curves}, {"a": spent, "b": spent})

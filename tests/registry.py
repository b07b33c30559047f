"""One row per public factory; the contract suite runs every row through every column.

To add a method: export its factory from ``optax_boost`` and add a row here. A factory without a
row fails ``test_registry.py``.
"""

from collections.abc import Callable
import dataclasses
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import optax

import optax_boost


@dataclasses.dataclass(frozen=True)
class Row:
  """A factory with arguments that let it act, and what the suite must know of it.

  Attributes:
    factory: the public name.
    kwargs: its arguments.
    baseline: what it is without acting; the suite checks that it differs from this.
    needs_params: whether ``update`` refuses to work without params.
    descends: what turns its output into steps that solve a problem (a learning rate for methods
      that only rewrite gradients).
    steps: how many steps it needs to get close.
    reachable: maps any target to one that the method can reach from zero.
    static: arguments that ``optax.inject_hyperparams`` must leave alone.
    acts: proves that the method acts, where comparing its first update with the baseline's does
      not: gets the transformation and the baseline.
    widens: whether updates are float32 where gradients have half precision.
    label: tells rows of the same factory apart.
  """

  factory: str
  kwargs: dict[str, Any]
  baseline: Callable[[], optax.GradientTransformation]
  needs_params: bool
  descends: Callable[[], optax.GradientTransformation] = optax.identity
  steps: int = 500
  reachable: Callable[[Any], Any] = lambda tree: tree
  static: tuple[str, ...] = ()
  acts: Callable[[Any, Any], bool] | None = None
  widens: bool = False
  label: str = ""

  def make(self) -> optax.GradientTransformationExtraArgs:
    """The transformation itself."""
    return getattr(optax_boost, self.factory)(**self.kwargs)

  def optimizer(self) -> optax.GradientTransformationExtraArgs:
    """The transformation, made into something that descends."""
    return optax.chain(self.make(), self.descends())

  def __str__(self) -> str:
    return f"{self.factory}-{self.label}" if self.label else self.factory


def _without_fan_in_mean(tree: Any) -> Any:
  def project(x: jax.Array) -> jax.Array:
    return x - jnp.mean(x, range(x.ndim - 1), keepdims=True) if x.ndim > 1 else x

  return jax.tree.map(project, tree)


def _small_steps_arrive(tx: Any, baseline: Any) -> bool:
  """Whether steps too small for bfloat16 move the params, as they don't in the baseline."""

  def train(tx: Any) -> jax.Array:
    params = jnp.ones(3, jnp.bfloat16)
    state = tx.init(params)
    for _ in range(30):
      updates, state = tx.update(jnp.full(3, -1e-2, params.dtype), state, params)
      params = optax.apply_updates(params, updates)
    return params

  return bool(jnp.all(train(tx) > 1) & jnp.all(train(baseline) == 1))


def _first_group_stands_still(tx: Any, baseline: Any) -> bool:
  """Whether a leaf of the first group makes fewer steps than in the baseline."""

  def steps(tx: Any) -> int:
    params = {"conv": jnp.ones(3), "dense": jnp.ones(3), "norm": jnp.ones(3)}
    state = tx.init(params)
    moved = 0
    for _ in range(8):
      updates, state = tx.update(params, state, params)
      moved += int(jnp.any(updates["conv"]))
    return moved

  return 0 < steps(tx) < steps(baseline)


ROWS = (
  Row(
    "accumulate",
    {"inner": optax.sgd(0.1), "every": 2},
    baseline=lambda: optax.sgd(0.1),
    needs_params=False,
  ),
  Row(
    "dynamic_loss_scale",
    {"inner": optax.sgd(0.1, momentum=0.5), "initial_scale": 2.0},
    baseline=lambda: optax.sgd(0.1, momentum=0.5),
    needs_params=False,
  ),
  Row(
    "master_weights",
    {"inner": optax.sgd(0.1)},
    baseline=lambda: optax.sgd(0.1),
    needs_params=True,
    acts=_small_steps_arrive,
    widens=True,
  ),
  Row(
    "freeze",
    {
      "inner": optax.sgd(0.1),
      "groups": ("conv", "dense|norm"),
      "schedule": optax_boost.interval_freezing(2, frozen_fraction=0.4),
    },
    baseline=lambda: optax.sgd(0.1),
    needs_params=False,
    acts=_first_group_stands_still,
  ),
  Row(
    "freeze",
    {
      "inner": optax.sgd(0.1),
      "groups": ("conv", "dense|norm"),
      "schedule": optax_boost.progressive_freezing(2, 1000, first=0.002),
      "key": 3,
    },
    baseline=lambda: optax.sgd(0.1),
    needs_params=False,
    acts=_first_group_stands_still,
    reachable=lambda tree: jax.tree.map_with_path(
      lambda path, x: 0 * x if "conv" in str(path) else x, tree
    ),
    label="progressive",
  ),
  Row(
    "scale_by_lars_trust_ratio",
    {"trust_coefficient": 0.02, "weight_decay": 1e-4},
    baseline=optax.identity,
    needs_params=True,
    descends=lambda: optax.scale_by_learning_rate(optax.linear_schedule(1.0, 0.0, 500)),
  ),
  Row(
    "lars",
    {
      "learning_rate": optax.linear_schedule(0.5, 0.0, 500),
      "trust_coefficient": 0.02,
      "weight_decay": 1e-4,
      "momentum": 0.5,
    },
    baseline=lambda: optax.sgd(0.5, 0.5),
    needs_params=True,
  ),
  Row(
    "lars",
    {
      "learning_rate": optax.linear_schedule(1.0, 0.0, 500),
      "trust_coefficient": 0.02,
      "momentum": None,
      "clip": 5.0,
    },
    baseline=lambda: optax.sgd(1.0),
    needs_params=True,
    label="plain",
  ),
  Row(
    "centralize",
    {},
    baseline=optax.identity,
    needs_params=False,
    descends=lambda: optax.sgd(0.1),
    reachable=_without_fan_in_mean,
  ),
)


def public_factories() -> set[str]:
  """The public functions that return a transformation."""
  found = set()
  for name in optax_boost.__all__:
    value = getattr(optax_boost, name)
    if inspect.isfunction(value):
      result = inspect.signature(value).return_annotation
      if inspect.isclass(result) and issubclass(result, optax.GradientTransformation):
        found.add(name)
  return found

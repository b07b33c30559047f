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
from tests import problems


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
    label: tells rows of the same factory apart.
    extra: makes the extra arguments that ``update`` needs from its updates and params.
  """

  factory: str
  kwargs: dict[str, Any]
  baseline: Callable[[], optax.GradientTransformation]
  needs_params: bool
  descends: Callable[[], optax.GradientTransformation] = optax.identity
  steps: int = 500
  reachable: Callable[[Any], Any] = lambda tree: tree
  static: tuple[str, ...] = ()
  label: str = ""
  extra: Callable[[Any, Any], dict[str, Any]] | None = None

  def make(self) -> optax.GradientTransformationExtraArgs:
    """The transformation itself, given what extra arguments it needs."""
    return self.feed(getattr(optax_boost, self.factory)(**self.kwargs))

  def feed(
    self, tx: optax.GradientTransformationExtraArgs
  ) -> optax.GradientTransformationExtraArgs:
    """Has `tx` receive the row's extra arguments at every update."""
    if self.extra is None:
      return tx

    def update(updates: Any, state: Any, params: Any = None, **more: Any) -> Any:
      return tx.update(updates, state, params, **self.extra(updates, params), **more)

    return optax.GradientTransformationExtraArgs(tx.init, update)

  def optimizer(self) -> optax.GradientTransformationExtraArgs:
    """The transformation, made into something that descends."""
    return optax.chain(self.make(), self.descends())

  def __str__(self) -> str:
    return f"{self.factory}-{self.label}" if self.label else self.factory


def _without_fan_in_mean(tree: Any) -> Any:
  def project(x: jax.Array) -> jax.Array:
    return x - jnp.mean(x, range(x.ndim - 1), keepdims=True) if x.ndim > 1 else x

  return jax.tree.map(project, tree)


def _gradients_elsewhere(updates: Any, params: Any) -> dict[str, Any]:
  """Closures of the contract's problem, whose gradients differ as the points do."""

  def grad_fn(point: Any) -> Any:
    return jax.tree.map(lambda g, p, q: g + (q - p), updates, params, point)

  def full_grad_fn(point: Any) -> Any:
    return jax.tree.map(jnp.subtract, point, problems.target(point))

  return {"grad_fn": grad_fn, "full_grad_fn": full_grad_fn}


ROWS = (
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
  Row(
    "svrg",
    {"refresh_every": 2, "coefficient": optax.linear_schedule(1.0, 0.5, 4)},
    baseline=optax.identity,
    needs_params=True,
    descends=lambda: optax.sgd(0.1),
    extra=_gradients_elsewhere,
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

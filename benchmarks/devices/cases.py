"""The optimizer steps to compile: methods as users write them, and their peers in optax.

A method whose kernels, collectives or temporaries are worth a bound gets a case here, and the bound
in bounds.py. That every method lowers for GPUs and TPUs is a column of its contract.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

import optax_boost

LEAVES = 20
SHAPE = (1024, 1024)
COMPONENTS = 32
GROUPS = ("body", "head")


@dataclasses.dataclass(frozen=True)
class Case:
  """A transformation and the arguments of its update.

  Attributes:
    factory: the public name, "" for optax's.
    make: makes the transformation.
    extra: makes extra arguments from the gradients and params.
    dtype: of params and gradients.
    replicas: whether gradients differ between the devices, in ``shard_map`` along "x".
    leaves: how many params there are.
    shape: of each of them.
    chips: those that it is compiled for.
  """

  factory: str
  make: Callable[[], optax.GradientTransformation]
  extra: Callable[[Any, Any], dict[str, Any]] = lambda grads, params: {}
  dtype: Any = jnp.float32
  replicas: bool = False
  leaves: int = LEAVES
  shape: tuple[int, ...] = SHAPE
  chips: tuple[str, ...] = ("h100", "v5e-8", "v5e-256")

  def is_for(self, chip: str, layout: str) -> bool:
    """Whether the case is compiled for a chip and a layout of the params."""
    if chip not in self.chips:
      return False
    if layout != "replicated":
      return not self.replicas
    # Whole params make the same program on a slice of any size.
    return self.replicas or chip in ("h100", "v5e-8")


def params(case: Case) -> dict[str, Any]:
  """Two groups of equal kernels."""
  leaf = jax.ShapeDtypeStruct(case.shape, case.dtype)
  half = case.leaves // 2
  return {group: {f"kernel_{i:03d}": leaf for i in range(half)} for group in GROUPS}


def _thousand(case: Case) -> Case:
  """The case with a thousand small leaves."""
  return dataclasses.replace(case, leaves=1000, shape=(10, 16), chips=("h100",))


def _subspace(params: Any) -> optax_boost.Subspace:
  basis = jax.tree.map(lambda x: jnp.zeros((COMPONENTS, *x.shape), x.dtype), params)
  variance = jnp.ones(COMPONENTS)
  return optax_boost.Subspace(jax.tree.map(jnp.zeros_like, params), basis, variance, variance)


def _quadratic(grads: Any, params: Any) -> dict[str, Any]:
  """Closures of a loss, cheap enough not to count."""
  del params

  def value_fn(point: Any) -> jax.Array:
    return optax.tree.vdot(grads, point)

  def grad_fn(point: Any) -> Any:
    return jax.tree.map(lambda g, p: 0.5 * g + p, grads, point)

  return {"value": jnp.zeros([]), "value_fn": value_fn, "grad_fn": grad_fn, "full_grad_fn": grad_fn}


def _sgd() -> optax.GradientTransformation:
  return optax.sgd(0.1, momentum=0.9)


def _adam() -> optax.GradientTransformation:
  return optax.adam(1e-3)


CASES = {
  "optax.sgd": Case("", _sgd),
  "optax.adam": Case("", _adam),
  "lars": Case("lars", lambda: optax_boost.lars(0.1, weight_decay=1e-4)),
  "optax.lars": Case("", lambda: optax.lars(0.1, weight_decay=1e-4)),
  "scale_by_lars_trust_ratio": Case(
    "scale_by_lars_trust_ratio",
    lambda: optax.chain(optax_boost.scale_by_lars_trust_ratio(), _sgd()),
  ),
  "centralize": Case("centralize", lambda: optax.chain(optax_boost.centralize(), _sgd())),
  "optax.centralize": Case("", lambda: optax.chain(optax.centralize(), _sgd())),
  "accumulate": Case("accumulate", lambda: optax_boost.accumulate(_adam(), 4)),
  "optax.MultiSteps": Case("", lambda: optax.MultiSteps(_adam(), 4).gradient_transformation()),
  "dynamic_loss_scale": Case("dynamic_loss_scale", lambda: optax_boost.dynamic_loss_scale(_adam())),
  "optax.apply_if_finite": Case("", lambda: optax.apply_if_finite(_adam(), 5)),
  "master_weights": Case(
    "master_weights", lambda: optax_boost.master_weights(_adam()), dtype=jnp.bfloat16
  ),
  "stochastic_rounding": Case(
    "stochastic_rounding",
    lambda: optax_boost.stochastic_rounding(_adam(), key=0),
    dtype=jnp.bfloat16,
  ),
  "freeze_layers": Case(
    "freeze_layers",
    lambda: optax_boost.freeze_layers(
      _adam(), GROUPS, optax_boost.interval_freezing(2, frozen_fraction=0.4)
    ),
  ),
  "average_params": Case(
    "average_params", lambda: optax_boost.average_params(_adam(), start=100, every=10)
  ),
  "layerwise_decay": Case("layerwise_decay", lambda: optax_boost.layerwise_decay(_adam(), GROUPS)),
  "switch_after": Case("switch_after", lambda: optax_boost.switch_after(100, _sgd(), _adam())),
  "svrg": Case(
    "svrg", lambda: optax.chain(optax_boost.svrg(refresh_every=100), _sgd()), extra=_quadratic
  ),
  "record_trajectory": Case(
    "record_trajectory",
    lambda: optax.chain(optax_boost.record_trajectory(every=10, capacity=4), _sgd()),
  ),
  "dim_reduce": Case("dim_reduce", lambda: optax_boost.dim_reduce(_subspace), extra=_quadratic),
  "adasum": Case(
    "adasum",
    lambda: optax.chain(optax_boost.adasum("x"), _sgd()),
    replicas=True,
    chips=("h100", "v5e-8", "v5e-64", "v5e-256"),
  ),
  "sgperm pairs": Case("sgperm", lambda: optax_boost.sgperm(method="pairs", key=0)),
  "sgperm rank": Case("sgperm", lambda: optax_boost.sgperm(method="rank")),
  "sgperm exact": Case("sgperm", lambda: optax_boost.sgperm(key=0, backend="device")),
  "laperm": Case("laperm", lambda: optax_boost.laperm(_adam(), 20)),
}
CASES |= {
  f"{name}, 1,000 leaves": _thousand(case)
  for name, case in {
    **{name: CASES[name] for name in ("optax.sgd", "lars", "centralize")},
    "accumulate": Case("accumulate", lambda: optax_boost.accumulate(_sgd(), 4)),
    "dynamic_loss_scale": Case(
      "dynamic_loss_scale", lambda: optax_boost.dynamic_loss_scale(_sgd())
    ),
  }.items()
}
CASES["dim_reduce, 10 leaves"] = dataclasses.replace(
  CASES["dim_reduce"], leaves=10, chips=("v5e-8", "v5e-256")
)


def step(case: Case, mesh: jax.sharding.Mesh) -> Callable[..., Any]:
  """One optimizer step, from params, state and gradients to params and state."""
  tx = optax.with_extra_args_support(case.make())

  def run(params: Any, state: Any, grads: Any) -> Any:
    return optax_boost.apply_gradients(tx, grads, state, params, **case.extra(grads, params))

  if not case.replicas:
    return run

  def on_replica(params: Any, state: Any, grads: Any) -> Any:
    return run(params, state, jax.tree.map(lambda g: g[0], grads))

  whole, split = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("x")
  specs = {"in_specs": (whole, whole, split), "out_specs": whole}
  return jax.shard_map(on_replica, mesh=mesh, **specs, check_vma=False)

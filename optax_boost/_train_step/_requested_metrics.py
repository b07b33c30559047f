"""The metrics that a train step reports only when asked for: gradient norm and learning rate."""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import optax

from optax_boost._foundation import _arrays, _checks, _trees, _types
from optax_boost._train_step import _state_requests

_GRADIENT_NORM, _LEARNING_RATE = "gradient_norm", "learning_rate"
# The second is the state of optimizers that optax's releases before 0.1.9 have saved.
_INJECTED = (optax.InjectStatefulHyperparamsState, optax.InjectHyperparamsState)


def check_names(names: _types.Unchecked) -> tuple[str, ...]:
  """Returns the names of the metrics; raises TypeError or ValueError if one is unknown."""
  if not isinstance(names, list | tuple):
    raise TypeError(
      '`metrics` must be a tuple of names, as in metrics=("gradient_norm", "learning_rate"); got'
      f" {_checks.shorten(names)}."
    )
  for i, name in enumerate(names):
    _checks.check_name(f"metrics[{i}]", name, (_GRADIENT_NORM, _LEARNING_RATE))
  return tuple(names)


def requested_metrics(
  names: Sequence[str],
  gradients: optax.Updates,
  scaling: _state_requests.ScaleRequest | None,
  opt_state: optax.OptState,
) -> _types.Metrics:
  """Returns the metrics in `names`; `opt_state` is the optimizer's state after the step."""
  metrics: _types.Metrics = {}
  if _GRADIENT_NORM in names:
    norm = jnp.sqrt(_arrays.sum_squares_of_tree(gradients)).astype(jnp.float32)
    metrics[_GRADIENT_NORM] = norm if scaling is None else norm / scaling.scale
  if _LEARNING_RATE in names:
    rates = _learning_rates(opt_state)
    metrics |= {f"{_LEARNING_RATE}_{i}" if i else _LEARNING_RATE: r for i, r in enumerate(rates)}
  return metrics


def _learning_rates(opt_state: optax.OptState) -> list[jax.Array]:
  """Returns the rates that ``optax.inject_hyperparams`` keeps; ValueError if it keeps none."""
  # By the states' types: a param, or the state of a schedule, may be called "learning_rate", too.
  injected: list[Mapping[str, jax.Array]] = [
    node.hyperparams for node in _trees.nodes(opt_state) if isinstance(node, _INJECTED)
  ]
  # Optax keeps a rate in the params' dtype, which may be complex.
  rates = [jnp.real(each[_LEARNING_RATE]) for each in injected if _LEARNING_RATE in each]
  if not rates:
    raise ValueError(
      'metrics=("learning_rate",) needs a learning rate in the optimizer\'s state, where only'
      " `optax.inject_hyperparams` keeps it; got"
      f" {_checks.shorten(jax.tree.structure(opt_state), 200)}. Make the optimizer with"
      " `optax.inject_hyperparams(optax.adamw)(learning_rate=...)`, which takes a number or a"
      " schedule."
    )
  return rates

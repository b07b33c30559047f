"""The metrics that a train step returns, and ``flatten_metrics``, which makes numbers of them."""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost._form import _finiteness, _protocol
from optax_boost._foundation import _arrays, _checks, _paths, _trees, _types

# The metrics that a step reports only when asked for.
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


def step_metrics(
  names: Sequence[str],
  loss: _types.FloatScalar,
  gradients: optax.Updates,
  loss_scale: _types.FloatScalar | None,
  opt_state: optax.OptState,
  left_out: _types.BoolScalar | None,
  squares: _types.FloatScalar | None = None,
) -> _types.Metrics:
  """Returns the loss, what the states declare as metrics, and the metrics in `names`.

  `opt_state` is the optimizer's state after the step. `left_out` says whether a wrapper left the
  batch out. If so, ``skipped/loss`` is 1 if the loss is not finite, else ``skipped/gradients``. If
  no wrapper can leave batches out, `left_out` is None, and there are no such metrics. `squares` is
  the sum of the squares of the gradient without the loss scale, if there are no `gradients`.
  """
  metrics = {"loss": loss, **_protocol.read_metrics(opt_state)}
  if left_out is not None:
    finite = _finiteness.finite_entries(loss)
    metrics["skipped/loss"] = (left_out & ~finite).astype(jnp.int32)
    metrics["skipped/gradients"] = (left_out & finite).astype(jnp.int32)
  if _GRADIENT_NORM in names:
    total = _arrays.sum_squares_of_tree(gradients) if squares is None else squares
    norm = jnp.sqrt(total).astype(jnp.float32)
    metrics[_GRADIENT_NORM] = (
      norm if loss_scale is None or squares is not None else norm / loss_scale
    )
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


def flatten_metrics(
  metrics: _types.Metrics, params: optax.Params | None = None
) -> dict[str, float | int | bool]:
  """Returns the metrics of a train step as Python numbers by name, for TensorBoard and the like.

  A name is a path in `metrics`, such as ``aux/accuracy`` for an entry of the loss's aux, or
  ``trust_ratio/0`` for the first entry of a vector. Arrays with two or more axes are left out. The
  function waits for the step and copies all metrics to the host at once, so call it outside of
  ``jit``, and not at every step.

  Args:
    metrics: the metrics that a train step returned.
    params: the params. If given, the paths of their leaves name the entries of a vector with one
      entry for each leaf, as in ``trust_ratio/dense/kernel``. Vectors in aux are always numbered.

  Returns:
    A flat dictionary of Python numbers.

  Raises:
    TypeError: `metrics` is not a dictionary, or is traced.
    ValueError: the two arguments are exchanged.

  Examples:
    >>> import jax.numpy as jnp, optax_boost
    >>> metrics = {"loss": jnp.ones([]), "trust_ratio": jnp.ones(2), "aux": {"right": jnp.int32(3)}}
    >>> optax_boost.flatten_metrics(metrics)
    {'aux/right': 3, 'loss': 1.0, 'trust_ratio/0': 1.0, 'trust_ratio/1': 1.0}
    >>> sorted(optax_boost.flatten_metrics(metrics, {"bias": 0, "kernel": 0}))
    ['aux/right', 'loss', 'trust_ratio/bias', 'trust_ratio/kernel']
  """
  if not isinstance(metrics, dict):
    raise TypeError(
      "`metrics` must be the dictionary of a train step (`state, metrics = step(state, batch)`);"
      f" got {_checks.shorten(metrics)}."
    )
  if isinstance(params, Mapping) and "loss" in params and "loss" not in metrics:
    raise ValueError(
      "`flatten_metrics(metrics, params)` takes the metrics first; got them as `params`, with a"
      " `loss`. Exchange the two."
    )
  if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(metrics)):
    raise TypeError(
      "`flatten_metrics` makes Python numbers, so it must be called outside of `jit`, `scan` and"
      " `vmap`; got traced metrics. Return the metrics, and flatten what comes back."
    )
  metrics = jax.device_get(metrics)
  leaves = [] if params is None else _paths.leaf_paths(params)
  flat: dict[str, float | int | bool] = {}
  for path, value in zip(_paths.leaf_paths(metrics), jax.tree.leaves(metrics), strict=True):
    value = np.asarray(value)
    if value.ndim < 2:
      by_leaf = value.shape == (len(leaves),) and path in metrics and path != "aux"
      names = leaves if by_leaf else [str(i) for i in range(value.size)]
      # If the params are a single leaf, its path is empty, so the slash is removed.
      names = [f"{path}/{name}".rstrip("/") for name in names] if value.ndim else [path]
      flat.update(zip(names, value.ravel().tolist(), strict=True))
  return flat

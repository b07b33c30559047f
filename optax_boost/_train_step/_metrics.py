"""``flatten_metrics``: the metrics of a train step as numbers by name, which loggers take."""

import jax
import numpy as np
import optax

from optax_boost._foundation import _checks, _paths, _types


def flatten_metrics(
  metrics: _types.Metrics, params: optax.Params | None = None
) -> dict[str, float | int | bool]:
  """Returns the metrics of a train step as Python numbers by name, for TensorBoard and the like.

  A name is the path in `metrics`: the first entry of a vector is called ``trust_ratio/0``, an entry
  of the loss's aux ``aux/accuracy``. Arrays with two or more axes are left out. The function waits
  for the step and copies all metrics to the host at once, so call it outside of ``jit``, and not at
  every step.

  Args:
    metrics: what a train step returned.
    params: the params. If they are given, the entries of a vector with one entry for each leaf are
      named by the leaves' paths, as in ``trust_ratio/dense/kernel``. Vectors in aux keep their
      numbers.

  Returns:
    A flat dictionary of Python numbers.

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
  metrics = jax.device_get(metrics)
  leaves = [] if params is None else _paths.leaf_paths(params)
  flat: dict[str, float | int | bool] = {}
  for path, value in zip(_paths.leaf_paths(metrics), jax.tree.leaves(metrics), strict=True):
    value = np.asarray(value)
    if value.ndim < 2:
      by_leaf = value.shape == (len(leaves),) and path in metrics and path != "aux"
      names = leaves if by_leaf else [str(i) for i in range(value.size)]
      # The name of a scalar is its path. So is the name of a vector of one entry if the params are
      # a single leaf, whose path is empty.
      names = [f"{path}/{name}".rstrip("/") for name in names] if value.ndim else [path]
      flat.update(zip(names, value.ravel().tolist(), strict=True))
  return flat

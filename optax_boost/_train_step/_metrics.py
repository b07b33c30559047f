"""``flatten_metrics``: turns the metrics of a train step into named numbers for loggers."""

import jax
import numpy as np
import optax

from optax_boost._foundation import _checks, _paths, _types


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
      # If the params are a single leaf, its path is empty, so the slash is removed.
      names = [f"{path}/{name}".rstrip("/") for name in names] if value.ndim else [path]
      flat.update(zip(names, value.ravel().tolist(), strict=True))
  return flat

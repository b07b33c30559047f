"""Estimates the statistics of BatchNorms in one pass over batches.

s_b   a BatchNorm's mean or variance in batch b, averaged over its uses in the forward pass
n_b   the batch's number of examples

s = sum_b n_b s_b / sum_b n_b     the estimate
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from optax_boost._form import _finiteness
from optax_boost._foundation import _checks, _full_gradient, _paths, _patterns, _types, _warnings

_METHOD = "estimate_batch_stats"
_PATTERNS = "a pattern, a sequence of patterns, at least one, or None"

# The arrays of a BatchNorm, by the names in `STATISTICS`.
Statistics: TypeAlias = Mapping[str, jax.Array]
STATISTICS = ("mean", "var")
# The names under which a BatchNorm stores the arguments of `summarize_uses` during the pass.
SUMS = ("batch_mean", "batch_var", "uses", "frozen_uses")


class Selection(NamedTuple):
  """The BatchNorms to estimate.

  Attributes:
    named: whether the user named these BatchNorms by `only`. If so, their statistics are estimated
      even if the forward pass would not update them.
  """

  paths: frozenset[str]
  named: bool


def select(
  paths: Sequence[str], only: str | Sequence[str] | None, exclude: str | Sequence[str] | None
) -> Selection:
  """Returns the BatchNorms whose path `only` matches (None: all) and `exclude` does not."""
  chosen = set(paths) if only is None else _matching("only", only, paths)
  if exclude is not None:
    chosen -= _matching("exclude", exclude, paths)
  return Selection(frozenset(chosen), only is not None)


def _matching(argument: str, value: _types.Unchecked, paths: Sequence[str]) -> set[str]:
  patterns: Any = [value] if isinstance(value, str) else value
  _patterns.check_patterns(argument, patterns, _PATTERNS)
  first = _patterns.first_match(argument, patterns, paths)
  return {path for path, index in zip(paths, first, strict=True) if index is not None}


def add_use(mean: jax.Array, new: jax.Array, uses: jax.Array) -> jax.Array:
  """Adds the value `new` to `mean`, the mean of `uses` values; returns the mean of all."""
  return jnp.where(uses > 0, mean + (new - mean) / (uses + 1), new)


def summarize_uses(
  mean: jax.Array, var: jax.Array, uses: jax.Array, frozen_uses: jax.Array
) -> Statistics:
  """Returns the mean and variance of a BatchNorm in a batch, and two flags: `missed` and `frozen`.

  `mean` and `var` are averages over the uses of the BatchNorm that normalized by the batch, and
  `uses` is the number of these uses. `frozen_uses` is the number of uses that normalized by the
  running statistics. `missed` is 1 if `uses` is 0, and `frozen` is 1 if `frozen_uses` is not 0. The
  flags are floats, since they are averaged over batches.
  """
  missed, frozen = (uses == 0).astype(mean.dtype), (frozen_uses > 0).astype(mean.dtype)
  return {"mean": mean, "var": var, "missed": missed, "frozen": frozen}


def call_model(model: Callable[[_types.Batch], Any], batch: _types.Batch) -> Any:
  """Returns ``model(batch)``; raises TypeError if the call fails and the batch is a tree."""
  try:
    return model(batch)
  except Exception as error:
    if isinstance(batch, dict | tuple | list):
      raise TypeError(
        "`forward_fn` must say what of a batch the model takes if the batch is not a single array;"
        f" got None and a {type(batch).__name__}, for which `model(batch)` raised"
        f" {_checks.shorten(error)}. Pass, for example,"
        ' `forward_fn=lambda model, batch: model(batch["x"])`, or `batch[0]` for a tuple.'
      ) from error
    raise


def estimate(
  summarize_batch: jax.tree_util.Partial,
  statistics: Mapping[str, Statistics],
  selection: Selection,
  batches: Iterable[_types.Tree],
  weight_fn: _types.WeightFn | None,
  forward_fn: Callable[..., Any],
) -> dict[str, Statistics]:
  """Returns the new statistics of the selected BatchNorms, by path.

  ``summarize_batch(chosen, batch)`` calls the model on a batch, and returns the result of
  :func:`summarize_uses` for each BatchNorm in `chosen`, by path. `statistics` are the present
  statistics of all BatchNorms. ``weight_fn(batch)`` returns a batch's number of examples; if it is
  None, the shapes of the batch tell the number. A BatchNorm that did not normalize by the batch in
  some batch is missing in the result. Compiled programs are freed with the user's `forward_fn`.
  """
  if not selection.paths:
    _warnings.warn(f"`{_METHOD}` found no BatchNorm to estimate.", _warnings.NoEffectWarning)
    return {}
  chosen = {
    path: summarize_uses(x["mean"], x["var"], x["mean"], x["mean"])
    for path, x in statistics.items()
    if path in selection.paths
  }
  finite: list[dict[str, jax.Array]] = []
  means = _full_gradient.mean_over_batches(
    summarize_batch,
    chosen,
    batches,
    None,
    weight_fn,
    False,
    _METHOD,
    "batch statistics",
    on_batch=lambda batch: finite.append(_finite_leaves(batch)),
    owner=forward_fn,
  )
  missed = [path for path, x in means.items() if np.any(x["missed"])]
  frozen = [path for path in missed if np.any(means[path]["frozen"])]
  if len(missed) == len(means) and frozen:
    raise ValueError(
      f"`{_METHOD}` needs BatchNorms that the forward pass updates; got only frozen ones, which"
      f" normalize by their running statistics: {_checks.shorten(frozen)}. Call the model in its"
      " training mode, or name the BatchNorms to estimate: `only='*'` names all."
    )
  if unreached := [path for path in missed if path not in frozen]:
    _warnings.warn_no_effect(
      f"`{_METHOD}` has reached no BatchNorm with the statistics {unreached}: the call leaves it"
      " out.",
      list(statistics),
    )
  new: dict[str, Statistics] = {
    path: {name: x[name].astype(statistics[path][name].dtype) for name in STATISTICS}
    for path, x in means.items()
    if path not in missed
  }
  if not all(jnp.all(_finiteness.finite_entries(leaf)) for leaf in jax.tree.leaves(new)):
    _refuse_bad_batch(finite)
  if new and not any(jnp.any(x["var"]) for x in new.values()):
    raise ValueError(
      f"`{_METHOD}` needs batches of several examples; got batches in which all values of each"
      f" channel are equal, so the variances of {_checks.shorten(list(new))} are 0. If `batches`"
      " yields single examples, stack them into batches as large as in training."
    )
  return new


@jax.jit
def _finite_leaves(batch: _types.Tree) -> dict[str, jax.Array]:
  """Returns for each floating-point leaf of a batch, by path, whether all entries are finite."""
  leaves = zip(_paths.leaf_paths(batch), jax.tree.leaves(batch), strict=True)
  return {
    path: jnp.all(_finiteness.finite_entries(leaf))
    for path, leaf in leaves
    if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
  }


def _refuse_bad_batch(finite: Sequence[dict[str, jax.Array]]) -> None:
  """Raises ValueError if a batch is not finite; otherwise returns None.

  Called if new statistics are not finite. If all batches are finite, the params may be the cause.
  `finite` has the result of `_finite_leaves` for each batch.
  """
  for index, leaves in enumerate(finite):
    for path, is_finite in leaves.items():
      if not is_finite:
        raise ValueError(
          f"`{_METHOD}` needs batches of finite numbers; the leaf '{path or 'batch'}' of batch"
          f" {index} has NaN or infinite entries. Leave the batch out."
        )

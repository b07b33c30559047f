"""The transformations that blocks of a configuration stand for."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_boost import _adasum
from optax_boost import _arrays
from optax_boost import _base
from optax_boost import _conditional
from optax_boost import _dim_reduce
from optax_boost import _freezing
from optax_boost.auto import _config

# Where adaptive summation runs: before the optimizer, or after it as in MindSpore and Horovod.
ADASUM_PLACES = ("gradients", "updates")


def freezing_schedule(block: _config.GradFreezeConfig) -> _freezing.FreezeSchedule:
  """The schedule of a block, whose `freeze_p` is the share of steps that freeze nothing."""
  if block.freeze_type == 1:
    return _freezing.interval_freezing(block.param_groups, 1 - block.freeze_p)
  if block.freeze_type == 0 or block.freeze_p == 1:
    return _freezing.continuous_freezing(block.param_groups, 1 - block.freeze_p)
  if block.total_steps is None:
    raise ValueError(
      f"`grad_freeze` freezes in the last {1 - block.freeze_p:.0%} of the training, so it must know"
      " how long that is: pass auto_boost(..., total_steps=...), in steps of the optimizer. Or"
      " freeze all along: `grad_freeze.freeze_type` 0 or 1."
    )
  return _freezing.progressive_freezing(
    block.param_groups, block.total_steps, block.freeze_p, anneal=False
  )


def average_options(block: _config.AverageConfig) -> dict[str, int]:
  """The arguments of :func:`average_params` for a block."""
  if block.total_steps is None:
    raise ValueError(
      f"`average` averages the params over the last {1 - block.start:.0%} of the training, so it"
      " must know how long that is: pass auto_boost(..., total_steps=...), in steps of the"
      " optimizer, or `average.total_steps`. Or leave `boost.average` out."
    )
  start = round(block.start * block.total_steps)
  return {"start": start, "every": max(1, round((block.total_steps - start) / block.snapshots))}


def with_adasum(
  tx: optax.GradientTransformation,
  adasum: optax.GradientTransformation,
  local_axis_name: Any,
  place: str,
  device_number: int | None,
) -> optax.GradientTransformationExtraArgs:
  """Puts adaptive summation before an optimizer, or after it; `device_number` None: any."""
  before = place == "gradients"
  if local_axis_name is None:
    return optax.chain(adasum, tx) if before else optax.chain(tx, adasum)

  def check_size(updates: Any, params: Any) -> Any:
    size = _base.require_axis("local_axis_name", local_axis_name, "auto_boost")
    if device_number is not None and size != device_number:
      raise ValueError(
        f"`common.device_number` is {device_number}, but the axis"
        f" local_axis_name={local_axis_name!r} has {size} devices. Set `common.device_number` to"
        f" {size}, or to null for any size."
      )
    return updates

  def average(updates: Any, params: Any) -> Any:
    if leaves := jax.tree.leaves(updates):
      _adasum.check_not_summed(leaves, tuple(jax.tree.leaves(local_axis_name)))
    wide = jax.tree.map(_arrays.widen, updates)
    return _conditional.cast_like(jax.lax.pmean(wide, local_axis_name), updates)

  # `adasum` shares its work among devices that hold the same updates, if they seem to vary. Under
  # `shard_map` and `vmap` alike: `jax.lax.pcast` is for the former, and new.
  def vary(updates: Any, params: Any) -> Any:
    never = jax.lax.axis_index(local_axis_name) < 0
    return jax.tree.map(lambda u: jnp.where(never, jnp.zeros_like(u), u), updates)

  check = optax.stateless(check_size)
  if before:
    return optax.chain(check, adasum, tx)
  # A server's devices take the same step, from their mean gradient.
  return optax.chain(check, optax.stateless(average), tx, optax.stateless(vary), adasum)


def subspace_optimizer(
  block: _config.DimReduceConfig,
  params: Any,
  tx: optax.GradientTransformation,
  *,
  reference: bool,
) -> optax.GradientTransformationExtraArgs:
  """Makes :func:`dim_reduce` of a block, around `tx` if `reference`; `params` may be abstract."""
  if not jax.tree.leaves(params):
    raise ValueError(
      "`dim_reduce` is on, so the optimizer must know the tree of the subspace: pass the"
      " params; for a Flax model, the model (NNX) or its variables (Linen)."
    )
  subspace = _load_or_fit(block, params)
  # MindSpore's two trials, and its steps go through the optimizer.
  options: dict[str, Any] = {"max_search": 2, "inner": tx} if reference else {}
  return _dim_reduce.dim_reduce(
    subspace, block.rho, block.sigma, block.gamma, block.alpha, **options
  )


def _load_or_fit(block: _config.DimReduceConfig, params: Any) -> _dim_reduce.Subspace:
  """Loads the subspace's file; else fits the subspace to the checkpoints, and writes the file."""
  path = None if block.pca_mat_path is None else pathlib.Path(block.pca_mat_path)
  if path is not None and path.exists():
    loaded = _dim_reduce.Subspace.load(path, like=params)
    if loaded.components != block.n_components:
      raise ValueError(
        f"`dim_reduce.n_components` is {block.n_components}, but the subspace in"
        f" `dim_reduce.pca_mat_path` ({path}) has {loaded.components} dimensions. Set"
        " `n_components` to that, or name another file."
      )
    return loaded
  missing = "None" if path is None else f"{str(path)!r}, which does not exist"
  raise ValueError(
    "`dim_reduce` is on, so `dim_reduce.pca_mat_path` must name a file of `Subspace.save`, or"
    f" MindSpore's `pca_mat`; got {missing}. Fit a subspace to snapshots of the params by"
    " `fit_subspace`, and save it there."
  )

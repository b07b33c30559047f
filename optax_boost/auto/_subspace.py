"""The optimizer that ``dim_reduce`` puts in place of the user's, from the configuration."""

import pathlib
from typing import Any

import jax
import optax

from optax_boost import _dim_reduce
from optax_boost.auto import _config


def subspace_optimizer(
  block: _config.DimReduceConfig, params: Any
) -> optax.GradientTransformationExtraArgs:
  """Makes :func:`dim_reduce` of a configuration; `params` may be abstract."""
  if not jax.tree.leaves(params):
    raise ValueError(
      "`dim_reduce` is on, so the optimizer must know the tree of the subspace: pass the"
      " params; for a Flax model, the model (NNX) or its variables (Linen)."
    )
  return _dim_reduce.dim_reduce(
    _subspace(block, params),
    rho=block.rho,
    sigma=block.sigma,
    gamma=block.gamma,
    alpha=block.alpha,
  )


def _subspace(block: _config.DimReduceConfig, params: Any) -> _dim_reduce.Subspace:
  """Loads the subspace's file; else fits the subspace to the checkpoints, and writes the file."""
  path = None if block.pca_mat_path is None else pathlib.Path(block.pca_mat_path)
  if path is not None and path.exists():
    loaded = _dim_reduce.load_subspace(path, like=params)
    if loaded.components != block.n_components:
      raise ValueError(
        f"`dim_reduce.n_components` is {block.n_components}, but the subspace in"
        f" `dim_reduce.pca_mat_path` ({path}) has {loaded.components} dimensions. Set"
        " `n_components` to that, or name another file."
      )
    return loaded
  if block.weight_load_dir is None:
    missing = "None" if path is None else f"{str(path)!r}, which does not exist"
    raise ValueError(
      "`dim_reduce` is on, so `dim_reduce.pca_mat_path` must name a file that `save_subspace`"
      " wrote, or `dim_reduce.weight_load_dir` a directory of checkpoints of the params; got"
      f" {missing}, and None."
    )
  snapshots = _dim_reduce.checkpoint_snapshots(block.weight_load_dir, like=params)
  # At most so many snapshots beside the basis: as much memory again.
  chunk = max(2, block.n_components)
  fitted = _dim_reduce.fit_subspace_streamed(
    snapshots, block.n_components, chunk=chunk, progress=True
  )
  if path is not None:
    _dim_reduce.save_subspace(path, fitted)
  return fitted

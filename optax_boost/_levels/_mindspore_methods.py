"""Makes the transformations that MindSpore's settings of single methods describe."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_boost._foundation import _arrays
from optax_boost._methods import _adasum, _dim_reduce
from optax_boost._step import _freezing


def schedule(
  param_groups: int, freeze_type: int = 1, freeze_p: float = 1.0, seed: int = 0, **ours: Any
) -> Any:
  """Makes the freezing schedule of our levels or of MindSpore.

  `ours` are the other arguments of :func:`progressive_freezing`, which our levels use. Without them
  the schedule is MindSpore's, and `freeze_p` is the share of steps in which nothing is frozen.
  """
  depths = {"max_depths": max(param_groups, 2)}  # MindSpore has a depth for each group
  if ours:
    return _freezing.progressive_freezing(param_groups, **ours, **depths, anneal=False)
  if freeze_type:
    return _freezing.interval_freezing(param_groups, 1 - freeze_p, **depths, seed=seed)
  return _freezing.continuous_freezing(param_groups, 1 - freeze_p, **depths)


def with_adasum(
  tx: optax.GradientTransformation, layers: Any, on: str, axis_name: Any, local_axis_name: Any
) -> optax.GradientTransformationExtraArgs:
  """Puts `adasum` before the optimizer if `on` is ``"gradients"``, else after it."""
  adasum = _adasum.adasum(axis_name, local_axis_name=local_axis_name, layers=layers)
  if on == "gradients":
    return optax.chain(adasum, tx)
  if local_axis_name is None:
    return optax.chain(tx, adasum)

  def mean(g: jax.Array, _: Any) -> jax.Array:
    _adasum.check_not_summed([g], tuple(jax.tree.leaves(local_axis_name)))
    return jax.lax.pmean(_arrays.widen(g), local_axis_name).astype(g.dtype)

  # All devices of a server apply `tx` to the server's mean gradient, so their updates are equal.
  # `adasum` shares its work among these devices only if the type of the updates varies along
  # `local_axis_name`. A selection by the axis index makes it vary; `jax.lax.pcast` fails in `vmap`.
  def vary(u: jax.Array, _: Any) -> jax.Array:
    return jnp.where(jax.lax.axis_index(local_axis_name) < 0, jnp.zeros_like(u), u)

  average = optax.stateless_with_tree_map(mean)
  mark_varying = optax.stateless_with_tree_map(vary)
  return optax.chain(average, tx, mark_varying, adasum)


def subspace_optimizer(
  params: Any, n_components: int, pca_mat_path: Any, weight_load_dir: Any, **numbers: Any
) -> optax.GradientTransformationExtraArgs:
  """Makes MindSpore's DimReduce: :func:`dim_reduce`, whose steps are added as by an SGD of rate 1.

  Each step tries at most two lengths. `params` may be abstract. The subspace is read from the file
  `pca_mat_path`; if there is no such file, it is fitted to the checkpoints in `weight_load_dir`.
  `numbers` are further arguments of :func:`dim_reduce`.
  """
  if not jax.tree.leaves(params):
    raise ValueError(
      "`dim_reduce` is on, so the optimizer needs the params: pass them, the NNX model or the Linen"
      " variables."
    )
  if pca_mat_path is not None and pathlib.Path(pca_mat_path).is_file():
    subspace = _dim_reduce.Subspace.load(pca_mat_path, like=params)
  elif weight_load_dir is not None and pathlib.Path(weight_load_dir).is_dir():
    subspace = _dim_reduce.fit_subspace(_checkpoints(weight_load_dir, params), n_components)
  else:
    raise ValueError(
      "`dim_reduce.pca_mat_path` must be the file of a subspace, or `dim_reduce.weight_load_dir` a"
      f" folder of checkpoints, and exist; got {pca_mat_path!r} and {weight_load_dir!r}."
    )
  if subspace.components != n_components:
    raise ValueError(
      f"`dim_reduce.n_components` must be the number of components in {pca_mat_path!r},"
      f" {subspace.components}; got {n_components}."
    )
  return _dim_reduce.dim_reduce(subspace, **numbers, max_search=2)


def _checkpoints(folder: str, params: Any) -> list[Any]:
  """Reads the params that an Orbax ``CheckpointManager`` saved, in the order of their steps."""
  import orbax.checkpoint as ocp

  with ocp.CheckpointManager(pathlib.Path(folder).absolute()) as manager:
    restore = ocp.args.StandardRestore(params)
    return [manager.restore(step, args=restore) for step in sorted(manager.all_steps())]

r"""Gradient centralization: arXiv:2004.01461.

G_ij <- G_ij - mean_i(G_ij)      for each output j; i runs over the weights that lead to output j
"""

import math
from typing import Literal

import jax
import jax.numpy as jnp
import optax

from optax_boost._form import _protocol, _transformation
from optax_boost._foundation import (
  _arrays,
  _checks,
  _leaf_names,
  _paths,
  _selectors,
  _trees,
  _types,
  _warnings,
)
from optax_boost._methods import _layer_arguments
from optax_boost._trace import _layer_axes


@_protocol.declares(takes=("layers",))
class CentralizeState(optax.EmptyState):
  """State of :func:`centralize`; its class tells that the method takes `layers`.

  A state of ``optax.centralize`` is taken, too.

  Attributes:
    None.
  """


def centralize(
  *,
  exclude: _types.LeafSelector = "auto",
  layout: Literal["flax", "torch"] = "flax",
  layers: _layer_axes.LayerAxes | None = None,
  axis_name: _types.AxisNames | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Subtracts from each kernel's gradient its mean over the fan-in.

  .. math::
    G_{\cdot j} \leftarrow G_{\cdot j} - \frac{1}{n} \sum_{i=1}^{n} G_{ij}

  for each output :math:`j`; :math:`i` runs over the :math:`n` weights that lead to output
  :math:`j`. Put `centralize` before the optimizer in a chain. After ``optax.add_decayed_weights``,
  as in MindSpore, `centralize` also centralizes the decay. An entry that is not finite affects only
  the gradients of its output. Kernels with one weight per output are left alone, since the mean is
  the gradient itself.

  :func:`make_train_step` reads the fan-in of every leaf from a trace of the loss. In your own loop,
  pass `layers`. Otherwise the leaves' names and `layout` decide, and kernels of einsums, stacked
  layers and experts are centralized over the wrong axes.

  Args:
    exclude: the leaves to leave alone: patterns (see :func:`path_mask`), a tree of bools, a
      callable from params to such a tree, or None. ``"auto"`` excludes biases, normalizations,
      embeddings, depthwise convolutions and a :class:`optax_boost.nnx.NormalizedDense`. Of the
      leaves that `layers` does not describe, it also excludes kernels of one input channel and
      leaves with at most one axis.
    layout: the output axis of kernels that `layers` does not describe: ``"flax"``, the last axis
      (Dense ``(in, out)``, Conv ``HWIO``); ``"torch"``, the first axis (``(out, in, ...)``).
    layers: which axes of each leaf are layers, fan-in and outputs, as :func:`layer_axes` returns
      it. None: the extra argument `layers` of ``update``, which the train step passes.
    axis_name: inside ``shard_map``, the mesh axes over which a fan-in axis of the params is
      sharded into equal parts; means are taken across these mesh axes. If only some leaves are
      sharded along their fan-in, pass a dict from patterns to mesh axes, as ``{"down": "model"}``;
      the first pattern that matches a leaf counts. Not needed under ``jit``.

  Returns:
    An :class:`optax.GradientTransformationExtraArgs` without state. Updates have the gradients'
    dtype; means are taken in float32 (float64 for float64).

  Examples:
    >>> import jax.numpy as jnp, optax, optax_boost
    >>> grads = {"kernel": jnp.array([[1.0, 10.0], [3.0, 30.0]]), "bias": jnp.ones(2)}
    >>> tx = optax_boost.centralize()
    >>> updates, _ = tx.update(grads, tx.init(grads))
    >>> updates["kernel"].tolist(), updates["bias"].tolist()
    ([[-1.0, -10.0], [1.0, 10.0]], [1.0, 1.0])

  References:
    Yong, Huang, Hua, Zhang, `Gradient Centralization
    <https://arxiv.org/abs/2004.01461>`_, 2020.

  .. note::
    ``optax.centralize`` averages over all axes but the first. This is the fan-in of kernels in
    torch, not in Flax.
  """
  _checks.check_name("layout", layout, ("flax", "torch"))
  kernels = _layer_arguments.Leaves(
    "centralize", exclude, lambda leaves: _left_alone(leaves, layout), layers, axis_name
  )

  def fan_in(kernel: _layer_axes.Leaf) -> tuple[int, ...]:
    return _layer_axes.fan_in(kernel, layout) if kernel.roles is None else kernel.roles.fan_in

  def centred(
    g: jax.Array, kernel: _layer_axes.Leaf, mesh_axes: _types.AxisName | None
  ) -> jax.Array:
    i = fan_in(kernel)
    # With one weight per output, the mean is the gradient itself, so the update would be zero.
    if not i or (mesh_axes is None and math.prod(g.shape[axis] for axis in i) == 1):
      return g
    wide = _arrays.widen(g)
    mean = jnp.mean(wide, i, keepdims=True)
    mean = mean if mesh_axes is None else jax.lax.pmean(mean, mesh_axes)
    return (wide - mean).astype(g.dtype)

  def is_idle(plan: _layer_arguments.Plan) -> bool:
    return bool(plan) and not any(fan_in(leaf) for leaf, skip in plan if not skip)

  def warn_if_idle(tree: _types.Tree, layers: _layer_axes.LayerAxes | None) -> None:
    if is_idle(plan := kernels.plan(tree, layers)):
      paths = [leaf.path for leaf, _ in plan]
      described = kernels.layer_axes(layers)
      reason = described.explain_unknown(paths) if described is not None else ""
      _warnings.warn_no_effect(
        f"`centralize` finds no kernel to centralize. {reason}".rstrip(), paths
      )

  warn_once_if_idle = _trees.once_per_tree(warn_if_idle)
  # `init` finds kernels by names and shapes only. If it finds none, a trace of the loss may still
  # show kernels. So `init` does not warn, but adds the leaves' paths to this set, and the first
  # update decides whether to warn.
  undecided: set[tuple[str, ...]] = set()

  def init(params: optax.Params) -> CentralizeState:
    plan = kernels.plan(params)
    by_rule = layers is None and _selectors.is_auto_selector(exclude)
    if is_idle(plan) and any(len(leaf.shape) > 1 and (by_rule or not skip) for leaf, skip in plan):
      undecided.add(tuple(_paths.leaf_paths(params)))
    else:
      warn_once_if_idle(params, None)
    return CentralizeState()

  def step(
    updates: optax.Updates,
    state: optax.EmptyState,
    params: optax.Params | None,
    *,
    layers: _types.Unchecked = None,
  ) -> tuple[optax.Updates, optax.EmptyState]:
    layers = _layer_arguments.check_layers(layers)
    if undecided and tuple(_paths.leaf_paths(updates)) in undecided:
      warn_once_if_idle(updates, layers)
    return kernels.map(centred, updates, layers), state

  return _transformation.transformation("centralize", optax.EmptyState, init, step)


def _left_alone(leaves: list[_layer_axes.Leaf], layout: str) -> list[bool]:
  """Returns for each leaf whether ``exclude="auto"`` excludes it."""
  # A module with a leaf `multiplier` is a NormalizedDense, which divides its kernel by its norm.
  modules = [leaf.path.rpartition("/") for leaf in leaves]
  heads = {module for module, _, name in modules if name == "multiplier"}
  input_axis = 1 if layout == "torch" else -2

  def is_kernel(leaf: _layer_axes.Leaf) -> bool:
    if leaf.roles is not None:
      return leaf.roles.mixes_inputs
    shape = leaf.shape_of_layer
    if (
      len(shape) <= 1
      or _leaf_names.is_bias_or_norm(leaf.path)
      or _leaf_names.is_embedding(leaf.path)
    ):
      return False
    return len(shape) == 2 or shape[input_axis] != 1

  pairs = zip(leaves, modules, strict=True)
  return [module in heads or not is_kernel(leaf) for leaf, (module, _, _) in pairs]

"""Gradient centralization: arXiv:2004.01461."""

import functools
import math
import re
from typing import Any
from typing import Literal

import jax
import jax.numpy as jnp
import optax

from optax_boost import _arrays
from optax_boost import _base
from optax_boost import _protocol
from optax_boost import _tree

_EMBEDDING = re.compile(r"(^|/)[a-z_]*embedding(/weight)?$")
_Layout = Literal["flax", "torch"]


def _left_alone(leaves: list[_tree.Leaf], layout: _Layout) -> list[bool]:
  """Whether ``exclude="auto"`` leaves each leaf alone."""
  # A normalized head divides its kernel by its norm and has a `multiplier` beside it.
  places = [leaf.path.rpartition("/") for leaf in leaves]
  heads = {module for module, _, name in places if name == "multiplier"}
  input_axis = 1 if layout == "torch" else -2

  def alone(leaf: _tree.Leaf, module: str) -> bool:
    shape = leaf.layer_shape
    if len(shape) <= 1 or _tree.is_bias_or_norm(leaf.path) or _EMBEDDING.search(leaf.path):
      return True
    depthwise = len(shape) >= 3 and shape[input_axis] == 1
    return depthwise or module in heads

  return [alone(leaf, module) for leaf, (module, _, _) in zip(leaves, places, strict=True)]


def centralize(
  *,
  exclude: _base.LeafSelector = "auto",
  layout: _Layout = "flax",
  fan_in_axes: _base.AxesByPattern | None = None,
  stacked_axes: _base.AxesByPattern | None = None,
  axis_name: _base.AxisNames | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Subtracts from each kernel's gradient its mean over the fan-in.

  .. math::
    G_{\cdot j} \leftarrow G_{\cdot j} - \frac{1}{n} \sum_{i=1}^{n} G_{ij}

  for each output :math:`j`, :math:`i` over the :math:`n` weights that lead to it: a projection onto
  the hyperplane orthogonal to the vector of ones. It goes before the optimizer in a chain; after
  ``optax.add_decayed_weights``, as in MindSpore, it centralizes the decay too. A gradient that is
  not finite stays so, within the output it belongs to.

  Kernels with one weight per output, as of a dense layer with one input, are left alone: their mean
  is all of them.

  Kernels of grouped convolutions are centralized over the inputs of their own group. MindSpore
  leaves them out; name them in `exclude` for that, since shapes don't tell them apart.

  Args:
    exclude: the leaves to leave alone: regular expressions searched in the leaf's path, a tree of
      bools, a callable from params to one, or None. ``"auto"``: biases, normalizations,
      embeddings, leaves with at most one axis, kernels of one input channel (depthwise
      convolutions; a first convolution on grey images looks the same) and a normalized head.
    layout: where a kernel has its output axis: ``"flax"``, last: Dense ``(in, out)``, Conv
      ``HWIO``; ``"torch"``, first: ``(out, in, ...)``.
    fan_in_axes: the axes to average over by regular expression, for kernels whose layout the shape
      does not tell (``DenseGeneral`` with several output axes). Flax's attention is known.
    stacked_axes: for leaves that hold many layers, the stacked axes by regular expression, as in
      ``{"layers/": 0}``; each layer is centralized on its own.
    axis_name: inside ``shard_map``, the mesh axes over which a fan-in axis of the params is
      sharded into equal parts: means are taken across them. Where an output axis or a stacked one
      is sharded, too, name them by regular expression, as in ``{"down/": "model"}``: means of
      leaves that no pattern matches are taken on each device. Not needed under ``jit``.

  Returns:
    An :class:`optax.GradientTransformationExtraArgs` without state. Updates have the gradients'
    dtype; means are taken in float32 (float64 for float64).

  Raises:
    ValueError: `layout` is unknown, or a pattern names axes that its leaf lacks.
    TypeError: an argument is of the wrong kind.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_boost
    >>> grads = {"kernel": jnp.array([[1.0, 10.0], [3.0, 30.0]]), "bias": jnp.ones(2)}
    >>> tx = optax_boost.centralize()
    >>> updates, _ = tx.update(grads, tx.init(grads))
    >>> updates["kernel"].tolist(), updates["bias"].tolist()
    ([[-1.0, -10.0], [1.0, 10.0]], [1.0, 1.0])
    >>> sgd = optax.chain(optax_boost.centralize(), optax.sgd(0.1))

  References:
    Yong, Huang, Hua, Zhang, `Gradient Centralization
    <https://arxiv.org/abs/2004.01461>`_, 2020.

  .. note::
    ``optax.centralize`` averages over all axes but the first, which is the fan-in of a torch
    kernel, not of a Flax one.
  """
  _base.check_name("layout", layout, ("flax", "torch"))
  _tree.check_selector("exclude", exclude)
  _tree.check_axes_by_pattern("fan_in_axes", fan_in_axes)
  _tree.check_axes_by_pattern("stacked_axes", stacked_axes)
  _tree.check_axis_names("axis_name", axis_name)

  @_tree.once_per_tree
  def plan(tree: optax.Updates) -> list[tuple[int, ...] | None]:
    """The axes to average over for each leaf, None where it is left alone."""
    leaves = _tree.describe(tree, stacked_axes)
    named = _tree.axes_by_pattern(leaves, fan_in_axes, "fan_in_axes", tree=tree)
    auto = functools.partial(_left_alone, layout=layout)
    skipped = _tree.select(tree, exclude, "exclude", auto, stacked_axes)
    # Axes named for a leaf take precedence over its exclusion.
    return [
      axes or (None if skip else _tree.fan_in_axes(leaf, layout) or None)
      for leaf, axes, skip in zip(leaves, named, skipped, strict=True)
    ]

  def init_fn(params: optax.Params) -> optax.EmptyState:
    _tree.check_floating(params, "centralize")
    paths = _tree.leaf_paths(params)
    if paths and not any(plan(params)):
      _tree.warn_no_effect("`centralize` finds no kernel to centralize.", paths)
    return optax.EmptyState()

  def update_fn(
    updates: optax.Updates,
    state: optax.EmptyState,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, optax.EmptyState]:
    _tree.check_floating(updates, "centralize")
    axes_of_leaves, paths = plan(updates), _tree.leaf_paths(updates)
    names = _tree.axis_names(paths, axis_name, "axis_name", "centralize")
    if stacked_axes is None:
      pairs = zip(paths, axes_of_leaves, strict=True)
      _protocol.announce_layers("centralize", [path for path, axes in pairs if axes])
    leaves, structure = jax.tree.flatten(updates)

    def centred(
      g: jax.Array, axes: tuple[int, ...] | None, of_leaf: str | tuple[str, ...] | None
    ) -> jax.Array:
      # A mean of one entry is that entry, and would stop the leaf.
      one = of_leaf is None and math.prod(g.shape[axis] for axis in axes or ()) == 1
      if one or not axes or not g.size:
        return g
      wide = _arrays.widen(g)
      mean = jnp.mean(wide, axes, keepdims=True)
      if of_leaf is not None:
        mean = jax.lax.pmean(mean, of_leaf)
      return (wide - mean).astype(g.dtype)

    return jax.tree.unflatten(structure, list(map(centred, leaves, axes_of_leaves, names))), state

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)

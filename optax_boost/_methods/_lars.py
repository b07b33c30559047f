r"""LARS: layer-wise adaptive rate scaling.

For each layer, with weights w, gradient g and Euclidean norms over the whole layer, in float32:

  ratio = eta |w| / (|g| + wd |w| + eps)      scalar; 1 where |w| or |g| is zero
  d     = ratio (clip(g) + wd w)
  m    <- momentum m - lr d
  w    <- w + m

Source: arXiv:1708.03888, in the form of MXNet 2's ``optimizer.LARS``.
"""

from collections.abc import Callable, Sequence
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost._form import _finiteness, _protocol, _state_check, _transformation
from optax_boost._foundation import (
  _arrays,
  _checks,
  _leaf_names,
  _placement,
  _selectors,
  _trees,
  _types,
  _warnings,
)
from optax_boost._methods import _layer_arguments
from optax_boost._trace import _layer_axes


@jax.jit
def _trust_ratio(
  w2: jax.Array,
  g2: jax.Array,
  eta: jax.typing.ArrayLike,
  wd: jax.typing.ArrayLike,
  eps: jax.typing.ArrayLike,
  rate: jax.typing.ArrayLike | None,
) -> jax.Array:
  """Returns the trust ratio of a layer, from the squared norms `w2` and `g2`.

  The ratio is 1 if a norm is zero, and NaN if a norm is not finite. If `rate`, the learning rate,
  is a number, returns min(ratio / rate, 1). The formula at the top of this file shows `eta`, `wd`
  and `eps`.
  """
  w, g = _root(w2), _root(g2)
  finite = jnp.isfinite(w + g)
  usable = finite & (jnp.minimum(w, g) > 0)
  numerator = jnp.where(usable, eta * w, jnp.where(finite, 1.0, jnp.nan))
  # XLA 3: the division comes last. If the last operation were cheaper, XLA would compute the ratio
  # again for each entry in the loop over a leaf.
  ratio = numerator / jnp.where(usable, g + wd * w + eps, 1.0)
  if rate is None:
    return ratio
  # A layer with a zero norm keeps ratio 1 for any rate, as in apex.
  clipped = (w2 != 0) & (g2 != 0) & ~(ratio >= rate)
  return jnp.where(clipped, ratio, 1.0) / jnp.where(clipped, rate, 1.0)


@jax.jit
def _direction(
  g: jax.Array,
  w: jax.Array,
  ratio: jax.Array | None,
  clip: jax.typing.ArrayLike | None,
  wd: jax.typing.ArrayLike,
) -> jax.Array:
  """Returns the direction ratio (clip(g) + wd w), in at least float32, or 0 if the ratio is NaN.

  If `ratio` is None, returns clip(g) + wd w, with 0 where `g` or `w` is not finite.
  """
  d = _arrays.widen(g)
  if clip is not None:
    d = jnp.clip(d, -jnp.asarray(clip), clip)
  d += wd * w.astype(d.dtype)
  if ratio is None:
    return jnp.where(_finiteness.finite_entries(g) & _finiteness.finite_entries(w), d, 0)
  return jnp.where(jnp.isnan(ratio), 0, ratio.astype(d.dtype) * d)


@_protocol.declares(metrics=("trust_ratio", "lars/notfinite_count"), takes=("layers",))
class ScaleByLarsTrustRatioState(NamedTuple):
  """State of :func:`scale_by_lars_trust_ratio`.

  Attributes:
    trust_ratio: float32 vector (float64 for float64 leaves), the last step's ratio of each leaf, in
      the order of the params' leaves; for a leaf that stacks layers, the mean of their ratios.
    notfinite_count: scalar int32, the number of steps in which a layer was not updated because the
      norm of its gradient or weights was not finite. Leaves that keep ratio 1 are not counted.
    count: scalar int32, the number of steps made, if `clip_ratio` is a schedule; otherwise None.
  """

  # XLA 23: one array holds the ratios of all leaves, since each array of a state adds some
  # microseconds to every step.
  trust_ratio: jax.Array
  notfinite_count: _types.IntScalar
  count: _types.IntScalar | None = None  # type: ignore[assignment]  # tuples have a method of this name


def scale_by_lars_trust_ratio(
  trust_coefficient: jax.typing.ArrayLike = 0.001,
  weight_decay: jax.typing.ArrayLike = 0.0,
  eps: jax.typing.ArrayLike = 1e-8,
  *,
  clip: jax.typing.ArrayLike | None = None,
  clip_ratio: optax.ScalarOrSchedule | None = None,
  exclude: _types.LeafSelector = "auto",
  weight_decay_mask: _types.LeafSelector | None = None,
  layers: _layer_axes.LayerAxes | None = None,
  axis_name: _types.AxisNames | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Adds weight decay and scales each layer by its LARS trust ratio.

  .. math::
    d = \frac{\eta |w|}{|g| + \lambda |w| + \epsilon} (\mathrm{clip}(g) + \lambda w)

  If the norm of a layer's gradient or weights is not finite, the layer's update is zero and
  `notfinite_count` grows, so one bad batch doesn't pollute the momentum. In a leaf that keeps ratio
  1 (see `exclude`), the update is zero only for entries that are not finite.

  Args:
    trust_coefficient: :math:`\eta`, the size of a step relative to the weights. Raising it makes
      every layer's steps longer. The default is the paper's, MXNet's and optax's, so that rates
      carry over; without such a rate start with 0.01.
    weight_decay: :math:`\lambda`; raising it shrinks weights faster and lowers the ratio.
    eps: :math:`\epsilon`; keeps the ratio bounded for tiny gradients.
    clip: bound on each gradient entry, applied before the decay is added. As in MXNet, the ratio
      is computed from the gradient before clipping. None: no clipping.
    clip_ratio: the learning rate :math:`\alpha` that follows in the chain, a number or a schedule:
      the ratio :math:`r` becomes :math:`\min(r / \alpha, 1)`. None: no change of the ratio.
    exclude: the leaves that keep ratio 1, selected as in :func:`centralize`; `weight_decay` acts on
      them, too. ``"auto"``: leaves named bias, scale, beta or gamma, and layers with at most one
      axis.
    weight_decay_mask: the leaves that are decayed, selected in the same ways as in `exclude`. None:
      all leaves, as in MXNet.
    layers: as in :func:`centralize`; each layer and expert gets its own ratio. Without `layers`, a
      leaf that stacks several layers has one ratio.
    axis_name: as in :func:`centralize`, the mesh axes over which squared norms are summed. If a
      mesh axis shards the stacked layers of a leaf, leave the axis out for this leaf.

  Returns:
    An :class:`optax.GradientTransformationExtraArgs` that needs `params`. Updates have the
    gradients' dtype, norms are taken in float32 (float64 for float64).

  Examples:
    >>> import jax.numpy as jnp, optax, optax_boost
    >>> params = {"kernel": jnp.full((2, 2), 3.0), "bias": jnp.zeros(2)}
    >>> grads = {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}
    >>> tx = optax_boost.scale_by_lars_trust_ratio(trust_coefficient=0.01)
    >>> updates, state = tx.update(grads, tx.init(params), params)
    >>> [round(float(r), 6) for r in optax.tree.get(state, "trust_ratio")]  # bias, kernel
    [1.0, 0.03]

  .. note::
    A callable for `exclude` or `weight_decay_mask` under ``optax.inject_hyperparams`` must be
    listed in its `static_args`.
  """
  method = "scale_by_lars_trust_ratio"
  leaves = _layer_arguments.Leaves(
    method, exclude, _bias_or_norm, layers, axis_name, layers_only=True
  )
  numbers = (trust_coefficient, weight_decay, eps, clip, clip_ratio)
  return _scale_by_trust_ratio(leaves, *numbers, weight_decay_mask)


def lars(
  learning_rate: optax.ScalarOrSchedule,
  weight_decay: jax.typing.ArrayLike = 0.0,
  momentum: jax.typing.ArrayLike | None = 0.9,
  trust_coefficient: jax.typing.ArrayLike = 0.001,
  eps: jax.typing.ArrayLike = 1e-8,
  *,
  nesterov: bool = False,
  clip: jax.typing.ArrayLike | None = None,
  clip_ratio: bool = False,
  exclude: _types.LeafSelector = "auto",
  weight_decay_mask: _types.LeafSelector | None = None,
  layers: _layer_axes.LayerAxes | None = None,
  axis_name: _types.AxisNames | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""LARS: momentum SGD in which a layer's step is proportional to the norm of its weights.

  .. math::
    m \leftarrow \mu m - \alpha d, \qquad w \leftarrow w + m

  for the direction :math:`d` of :func:`scale_by_lars_trust_ratio`. Use LARS for batches of
  thousands of examples, if training with one learning rate for all layers diverges before the rate
  is high enough. On small batches, plain momentum SGD is as good.

  Args:
    learning_rate: :math:`\alpha`, a number or a schedule. It scales the direction before it enters
      the momentum, so a change of the rate does not rescale past steps.
    weight_decay: :math:`\lambda`; raising it shrinks weights faster and lowers the ratio.
    momentum: :math:`\mu`; raising it averages over more steps. None: no momentum.
    trust_coefficient: :math:`\eta`. Kernels move at `learning_rate` times `trust_coefficient`,
      biases and normalizations at `learning_rate`. Start with 0.01 and a peak rate of 0.5; the
      default, 0.001, needs rates that are often too high for biases.
    eps: as in :func:`scale_by_lars_trust_ratio`.
    nesterov: whether to use Nesterov momentum.
    clip: as in :func:`scale_by_lars_trust_ratio`, a bound on each gradient entry.
    clip_ratio: whether the ratio :math:`r` becomes :math:`\min(r / \alpha, 1)`, so that no layer
      steps farther than with momentum SGD. This is apex's LARC, whose trust coefficient is 0.02,
      and MindSpore's `use_clip`.
    exclude: as in :func:`scale_by_lars_trust_ratio`, the leaves that keep ratio 1.
    weight_decay_mask: as in :func:`scale_by_lars_trust_ratio`, the leaves that are decayed.
    layers: as in :func:`centralize`; each layer and expert gets its own ratio.
    axis_name: as in :func:`scale_by_lars_trust_ratio`, the mesh axes over which norms are summed.

  Returns:
    An :class:`optax.GradientTransformationExtraArgs` that needs `params`. Updates and momentum
    have the params' dtype; each is computed in at least float32, and rounded once.

  Examples:
    >>> import jax, jax.numpy as jnp, optax, optax_boost
    >>> rate = optax.cosine_decay_schedule(0.5, decay_steps=100)
    >>> tx = optax_boost.lars(rate, trust_coefficient=0.01, weight_decay=1e-4)
    >>> params = {"kernel": jnp.ones((3, 2))}
    >>> loss = lambda p: jnp.sum((p["kernel"] - 2.0) ** 2)
    >>> state = tx.init(params)
    >>> for _ in range(100):
    ...   updates, state = tx.update(jax.grad(loss)(params), state, params)
    ...   params = optax.apply_updates(params, updates)
    >>> bool(loss(params) < 0.01)
    True

  References:
    You, Gitman, Ginsburg, `Large Batch Training of Convolutional Networks
    <https://arxiv.org/abs/1708.03888>`_, 2017.

  .. note::
    ``optax.lars`` also scales biases and normalizations by their ratios unless they are masked. To
    reuse a learning rate that was tuned with ``optax.lars``, pass ``exclude=None``. ``optax.lars``
    divides by :math:`|g + \lambda w|` instead of :math:`|g| + \lambda |w|`, and overflows in
    float16.
  """
  _checks.check_learning_rate(learning_rate)
  _checks.check_bool("nesterov", nesterov)
  _checks.check_bool("clip_ratio", clip_ratio)
  if momentum is not None:
    _checks.check_number("momentum", momentum, minimum=0.0, below=1.0)
  leaves = _layer_arguments.Leaves(
    "lars", exclude, _bias_or_norm, layers, axis_name, layers_only=True
  )
  numbers = (trust_coefficient, weight_decay, eps, clip, learning_rate if clip_ratio else None)
  ratio = _scale_by_trust_ratio(leaves, *numbers, weight_decay_mask, widen_updates=True)
  descent = optax.scale_by_learning_rate(learning_rate)
  trace = optax.identity() if momentum is None else optax.trace(momentum, nesterov)

  def step(
    updates: optax.Updates,
    state: optax.OptState,
    params: optax.Params,
    *,
    layers: _types.Unchecked = None,
  ) -> tuple[optax.Updates, optax.OptState]:
    kinds: list[type] = [ScaleByLarsTrustRatioState]
    kinds += [type(tx.init(())) for tx in (descent, trace)]
    _state_check.check_chain_types(state, kinds, "lars")
    ratio_state, descent_state, trace_state = state
    updates, ratio_state = ratio.update(updates, ratio_state, params, layers=layers)
    updates, descent_state = descent.update(updates, descent_state)
    updates, new_trace = trace.update(updates, jax.tree.map(_arrays.widen, trace_state))
    return _cast(updates, params), (ratio_state, descent_state, _cast(new_trace, trace_state))

  init = optax.chain(ratio, descent, trace).init
  return _transformation.transformation("lars", tuple, init, step, needs_params=True)


def _cast(tree: _types.SameTree, like: _types.Tree) -> _types.SameTree:
  return _trees.map_leaves(lambda x, y: x.astype(y.dtype), tree, like)


def _bias_or_norm(leaves: list[_layer_axes.Leaf]) -> list[bool]:
  """Returns True for leaves named as bias or normalization, and for layers of at most one axis."""
  return [_leaf_names.is_bias_or_norm(x.path) or len(x.shape_of_layer) <= 1 for x in leaves]


def _scale_by_trust_ratio(
  leaves: _layer_arguments.Leaves,
  eta: jax.typing.ArrayLike,
  weight_decay: jax.typing.ArrayLike,
  eps: jax.typing.ArrayLike,
  clip: jax.typing.ArrayLike | None,
  clip_ratio: optax.ScalarOrSchedule | None,
  weight_decay_mask: _types.LeafSelector,
  widen_updates: bool = False,
) -> optax.GradientTransformationExtraArgs:
  """Returns `scale_by_lars_trust_ratio`; with `widen_updates`, updates have at least float32.

  `leaves` holds the arguments `exclude`, `layers` and `axis_name`.
  """
  _checks.check_number("trust_coefficient", eta, above=0.0)
  _checks.check_number("weight_decay", weight_decay, minimum=0.0)
  _checks.check_number("eps", eps, minimum=0.0)
  if clip is not None:
    _checks.check_number("clip", clip, minimum=0.0)
  if clip_ratio is not None:
    _checks.check_learning_rate(clip_ratio, "clip_ratio")
  _selectors.check_selector("weight_decay_mask", weight_decay_mask)

  @_trees.once_per_tree
  def decayed(params: optax.Params) -> list[bool]:
    if weight_decay_mask is None:
      return [True] * len(jax.tree.leaves(params))
    return _selectors.select(params, weight_decay_mask, "weight_decay_mask")

  @_trees.once_per_tree
  def warn_if_idle(tree: _types.Tree, layers: _layer_axes.LayerAxes | None) -> None:
    plan = leaves.plan(tree, layers)
    if all(skip for _, skip in plan):
      _warnings.warn_no_effect(
        f"`{leaves.method}` scales no leaf: `exclude` matches all.", [leaf.path for leaf, _ in plan]
      )

  def init(params: optax.Params) -> ScaleByLarsTrustRatioState:
    decayed(params)
    return ScaleByLarsTrustRatioState(
      trust_ratio=jnp.ones(len(leaves.plan(params)), _arrays.widest_dtype(params)),
      notfinite_count=jnp.zeros([], jnp.int32),
      count=jnp.zeros([], jnp.int32) if callable(clip_ratio) else None,
    )

  def step(
    updates: optax.Updates,
    state: ScaleByLarsTrustRatioState,
    params: optax.Params,
    *,
    layers: _types.Unchecked = None,
  ) -> tuple[optax.Updates, ScaleByLarsTrustRatioState]:
    plan = leaves.plan(params, layers)
    if not plan:
      return updates, state
    # The axes, since `layers` holds arrays of the trace, which the cache would keep.
    warn_if_idle(updates, leaves.layer_axes(layers))
    rate = clip_ratio(state.count) if callable(clip_ratio) else clip_ratio
    dtype = state.trust_ratio.dtype

    def ratio_of(w2: jax.Array, g2: jax.Array, decays: np.ndarray | bool) -> jax.Array:
      wd = weight_decay if np.all(decays) else jnp.where(decays, weight_decay, 0.0)
      return _trust_ratio(w2, g2, eta, wd, eps, rate).astype(dtype)

    trees = (jax.tree.leaves(params), jax.tree.leaves(updates), decayed(params))
    inputs = [_Input(leaf, *arrays) for (leaf, _), *arrays in zip(plan, *trees, strict=True)]
    scaled = [None if skip else x for x, (_, skip) in zip(inputs, plan, strict=True)]
    ratios = _ratios(scaled, ratio_of, leaves.mesh_axes([x.leaf for x in inputs]))
    outputs = []
    for (leaf, w, g, decays), ratio in zip(inputs, ratios, strict=True):
      factor = None if ratio is None else jnp.expand_dims(ratio, leaf.axes_of_layer)
      d = _direction(g, w, factor, clip, weight_decay if decays else 0.0)
      outputs.append(d if widen_updates else d.astype(g.dtype))
    means = jnp.stack([_mean_of_layers(ratio, dtype) for ratio in ratios])
    bad = jnp.isnan(means)
    return jax.tree.unflatten(jax.tree.structure(updates), outputs), state._replace(
      trust_ratio=jnp.where(bad, 1, means),
      notfinite_count=_arrays.increment_if(jnp.any(bad), state.notfinite_count),
      count=None if state.count is None else optax.safe_increment(state.count),
    )

  return _transformation.transformation(
    leaves.method, ScaleByLarsTrustRatioState, init, step, needs_params=True
  )


def _mean_of_layers(ratio: jax.Array | None, dtype: _types.Dtype) -> _types.FloatScalar:
  if ratio is None or not ratio.size:
    return jnp.ones([], dtype)
  return jnp.mean(ratio) if ratio.ndim else ratio


class _Input(NamedTuple):
  """A leaf's description, weights `w` and gradient `g`, and whether weight decay applies to it."""

  leaf: _layer_axes.Leaf
  w: jax.Array
  g: jax.Array
  decays: bool


def _ratios(
  inputs: Sequence[_Input | None],
  ratio_of: Callable[..., jax.Array],
  mesh_axes: Sequence[_types.AxisName | None],
) -> list[jax.Array | None]:
  """Returns for each leaf an array of trust ratios, one per layer; None for a leaf without input.

  Squared norms are summed over the leaf's entry of `mesh_axes`. ``ratio_of(w2, g2, decays)``
  returns the trust ratios for squared norms of weights and gradients; `decays` says whether weight
  decay applies.
  """
  ratios: list[jax.Array | None] = [None] * len(inputs)
  # `dict.fromkeys` keeps the order of the leaves. A set could have another order in each process,
  # and the processes would compile different programs.
  for axes in dict.fromkeys(mesh_axes):
    members = {i: x for i, x in enumerate(inputs) if x is not None and mesh_axes[i] == axes}
    if members:
      member_ratios = _ratios_along(axes, list(members.values()), ratio_of)
      for i, ratio in zip(members, member_ratios, strict=True):
        ratios[i] = ratio
  return ratios


def _ratios_along(
  mesh_axes: _types.AxisName | None, inputs: list[_Input], ratio_of: Callable[..., jax.Array]
) -> list[jax.Array]:
  """Returns the trust ratios of leaves whose squared norms are summed over the same `mesh_axes`.

  `ratio_of` is the function that :func:`_ratios` gets.
  """
  leaves, weights, grads, decays = map(list, zip(*inputs, strict=True))

  def total(squares: _types.SameTree) -> _types.SameTree:
    return squares if mesh_axes is None else jax.lax.psum(squares, mesh_axes)

  def one_by_one(weights: list[jax.Array], grads: list[jax.Array]) -> list[jax.Array]:
    layers = zip([leaf.axes_of_layer for leaf in leaves], weights, grads, strict=True)
    squares = total([_sums_of_squares((w, g), axes) for axes, w, g in layers])
    return [ratio_of(w2, g2, decay) for (w2, g2), decay in zip(squares, decays, strict=True)]

  def at_once(weights: list[jax.Array], grads: list[jax.Array]) -> list[jax.Array]:
    groups = _arrays.group_small_leaves([leaf.stacked for leaf in leaves], weights, grads)
    sums = []
    for group in groups:
      # XLA 5: one reduction for weights and gradients, since two reductions would be two kernels.
      joined = jnp.stack([x[i] for x in (weights, grads) for i in group])
      if len(group) > 1:
        # XLA 6: the barrier keeps XLA from fusing the stack into the reduction, which would compile
        # for minutes with a thousand leaves.
        joined = jax.lax.optimization_barrier(joined)
      squares = _arrays.sum_squares(joined, tuple(i + 1 for i in leaves[group[0]].axes_of_layer))
      sums.append(_placement.gather_axes(squares, range(squares.ndim)).reshape(2, -1))
    places = [i for group in groups for i in group]
    layers = [leaves[i].num_layers for i in places]
    w2, g2 = total(jnp.concatenate(sums, axis=1))
    ratio = ratio_of(w2, g2, np.repeat([decays[i] for i in places], layers))
    split = jnp.split(jax.lax.optimization_barrier(ratio), np.cumsum(layers)[:-1])
    ratios = dict(zip(places, split, strict=True))
    return [ratios[i].reshape(leaf.stacked_shape) for i, leaf in enumerate(leaves)]

  # XLA 4: on CPUs, leaves of equal shapes share a compiled loop, but not if each reads its ratio
  # from a vector of all ratios. So ratios are computed one by one.
  # XLA 7: on GPUs, a kernel for each leaf takes longer than copying small leaves into one array.
  return jax.lax.platform_dependent(weights, grads, cuda=at_once, rocm=at_once, default=one_by_one)


@functools.partial(jax.jit, static_argnums=1)
def _sums_of_squares(pair: tuple[jax.Array, ...], axes: tuple[int, ...]) -> list[jax.Array]:
  sums = (_arrays.sum_squares(x, axes) for x in pair)
  return [_placement.gather_axes(squares, range(squares.ndim)) for squares in sums]


@jax.custom_jvp
def _root(square: jax.Array) -> jax.Array:
  """Returns the square root; its derivative at zero is zero instead of infinity."""
  return jnp.sqrt(square)


@_root.defjvp
def _root_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
  root, (tangent,) = _root(*primals), tangents
  return root, jnp.where(root > 0, tangent / jnp.where(root > 0, 2 * root, 1), 0)

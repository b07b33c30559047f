r"""LARS: layer-wise adaptive rate scaling.

For each layer, with weights w, gradient g and Euclidean norms over the whole layer, in float32:

  ratio = eta |w| / (|g| + wd |w| + eps)      scalar; 1 where |w| or |g| is zero
  d     = ratio (clip(g) + wd w)
  m    <- momentum m - lr d
  w    <- w + m

Source: You, Gitman, Ginsburg, "Large Batch Training of Convolutional Networks",
arXiv:1708.03888, in the form of MXNet 2's ``optimizer.LARS``.
"""

from collections.abc import Callable
import functools
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost import _arrays
from optax_boost import _base
from optax_boost import _layers
from optax_boost import _method
from optax_boost import _protocol
from optax_boost import _tree


def trust_ratio(w: jax.Array, g: jax.Array, eta: Any, weight_decay: Any, eps: Any) -> jax.Array:
  """The ratio of layers with these norms: 1 where one is zero, NaN where one is not finite."""
  finite = jnp.isfinite(w + g)
  usable = finite & (jnp.minimum(w, g) > 0)
  numerator = jnp.where(usable, eta * w, jnp.where(finite, 1.0, jnp.nan))
  # Division last: XLA on CPUs would fuse what is cheaper into the loop of each leaf.
  return numerator / jnp.where(usable, g + weight_decay * w + eps, 1.0)


@jax.jit
def _scale(w2: jax.Array, g2: jax.Array, eta: Any, weight_decay: Any, eps: Any, rate: Any) -> Any:
  """The trust ratio of layers with these squared norms, clipped to min(ratio / rate, 1)."""
  scale = trust_ratio(_root(w2), _root(g2), eta, weight_decay, eps)
  if rate is None:
    return scale
  # Layers whose norm is zero keep ratio 1, as in apex, whatever the rate.
  clipped = (w2 != 0) & (g2 != 0) & ~(scale >= rate)
  return jnp.where(clipped, scale, 1.0) / jnp.where(clipped, rate, 1.0)


@jax.jit
def _direction(g: jax.Array, w: jax.Array, scale: Any, clip: Any, weight_decay: Any) -> jax.Array:
  """The scale times clip(g) + wd w, in at least float32; 0 where it is NaN.

  Without a scale, 0 where an entry is not finite.
  """
  wide = _arrays.widen(g)
  if clip is not None:
    wide = jnp.clip(wide, -jnp.asarray(clip), clip)
  wide += weight_decay * w.astype(wide.dtype)
  if scale is None:
    return jnp.where(jnp.isfinite(g) & jnp.isfinite(w), wide, 0)
  return jnp.where(jnp.isnan(scale), 0, scale.astype(wide.dtype) * wide)


def _bias_or_norm(leaves: list[_layers.Leaf]) -> list[bool]:
  """Whether each leaf is a bias or a normalization by name, or has at most one axis."""
  return [_tree.is_bias_or_norm(x.path) or len(x.layer_shape) <= 1 for x in leaves]


@_protocol.declares(metrics=("trust_ratio", "lars/notfinite_count"))
class ScaleByLarsTrustRatioState(NamedTuple):
  """State of :func:`scale_by_lars_trust_ratio`.

  Attributes:
    trust_ratio: float32 vector (float64 for float64 leaves), the last step's ratios, one per leaf,
      in the order of the params' leaves; the mean over the layers of a leaf that holds many.
    notfinite_count: scalar int32, the steps in which a layer was not updated because the norm of
      its gradient or of its weights was not finite; leaves that keep ratio 1 are not counted.
    count: scalar int32, steps made, if `clip_ratio` is a schedule; otherwise None.
  """

  # One array: each further buffer in a state costs a step some microseconds.
  trust_ratio: jax.Array
  notfinite_count: jax.Array
  count: jax.Array | None = None  # type: ignore[assignment]  # tuples have a method of this name


def scale_by_lars_trust_ratio(
  trust_coefficient: jax.typing.ArrayLike = 0.01,
  weight_decay: jax.typing.ArrayLike = 0.0,
  eps: jax.typing.ArrayLike = 1e-8,
  *,
  clip: jax.typing.ArrayLike | None = None,
  clip_ratio: optax.ScalarOrSchedule | None = None,
  exclude: _base.LeafSelector = "auto",
  weight_decay_mask: _base.LeafSelector | None = None,
  layers: _layers.Layers | None = None,
  axis_name: _base.AxisNames | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Adds weight decay and scales each layer by its LARS trust ratio.

  .. math::
    d = \frac{\eta |w|}{|g| + \lambda |w| + \epsilon} (\mathrm{clip}(g) + \lambda w)

  A layer whose gradient or weights have no finite norm makes no step: its update is zero and
  `notfinite_count` grows, so one bad batch doesn't pollute the momentum. In a leaf that keeps ratio
  1, only the entries that are not finite make none.

  Args:
    trust_coefficient: :math:`\eta`; the size of a step relative to the weights. Raising it lets
      every layer move faster. The paper's, MXNet's and optax's default is 0.001.
    weight_decay: :math:`\lambda`; raising it shrinks weights faster and lowers the ratio.
    eps: :math:`\epsilon`; keeps the ratio bounded for tiny gradients.
    clip: bound on each gradient entry, before the decay is added; the ratio is of the gradient as
      it was, as in MXNet. None: no clipping.
    clip_ratio: the learning rate :math:`\alpha` that follows in the chain, a number or a schedule:
      the ratio :math:`r` becomes :math:`\min(r / \alpha, 1)`. None: the ratio is not clipped.
    exclude: the leaves that keep ratio 1: regular expressions searched in the leaf's path
      (``"block_1/conv/kernel"``), a tree of bools, a callable from params to one, or None.
      ``"auto"``: leaves named bias, scale, beta or gamma, and layers with at most one axis.
    weight_decay_mask: the leaves that are decayed, given in the same ways. None: all of them.
    layers: what :func:`layer_axes` returns, for leaves that hold many layers or experts: each of
      these gets a ratio of its own. None: the extra argument `layers` of ``update``, which the
      train step passes; without it, too, a leaf has one ratio.
    axis_name: inside ``shard_map``, the mesh axes over which the params are sharded: norms are
      summed over them. Where a stacked axis is sharded, whose layers have norms of their own, name
      them by regular expression, as in ``{"head/": "model"}``: norms of leaves that no pattern
      matches are taken on each device. Not needed under ``jit``.

  Returns:
    An :class:`optax.GradientTransformationExtraArgs` that needs `params`. Updates have the
    gradients' dtype, norms are taken in float32 (float64 for float64).

  Raises:
    ValueError: a number is out of range; in ``update``: no params, or a tree that does not fit.
    TypeError: an argument or a leaf is of the wrong kind.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_boost
    >>> params = {"kernel": jnp.full((2, 2), 3.0), "bias": jnp.zeros(2)}
    >>> grads = {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}
    >>> tx = optax_boost.scale_by_lars_trust_ratio(trust_coefficient=0.01)
    >>> updates, state = tx.update(grads, tx.init(params), params)
    >>> [round(float(r), 6) for r in optax.tree.get(state, "trust_ratio")]  # bias, kernel
    [1.0, 0.03]
    >>> [round(float(u), 6) for u in updates["kernel"].ravel()]
    [0.03, 0.03, 0.03, 0.03]

  References:
    You, Gitman, Ginsburg, `Large Batch Training of Convolutional Networks
    <https://arxiv.org/abs/1708.03888>`_, 2017.

  .. note::
    ``optax.scale_by_trust_ratio`` divides by :math:`|g + \lambda w|`, this by
    :math:`|g| + \lambda |w|`, as the paper does. A callable for `exclude` or `weight_decay_mask`
    under ``optax.inject_hyperparams`` belongs into its `static_args`.
  """
  method = "scale_by_lars_trust_ratio"
  leaves = _method.Leaves(method, exclude, _bias_or_norm, layers, axis_name)
  numbers = (trust_coefficient, weight_decay, eps, clip, clip_ratio)
  return _scale_by_trust_ratio(leaves, *numbers, weight_decay_mask)


def lars(
  learning_rate: optax.ScalarOrSchedule,
  weight_decay: jax.typing.ArrayLike = 0.0,
  momentum: jax.typing.ArrayLike | None = 0.9,
  trust_coefficient: jax.typing.ArrayLike = 0.01,
  eps: jax.typing.ArrayLike = 1e-8,
  *,
  nesterov: bool = False,
  clip: jax.typing.ArrayLike | None = None,
  clip_ratio: bool = False,
  exclude: _base.LeafSelector = "auto",
  weight_decay_mask: _base.LeafSelector | None = None,
  layers: _layers.Layers | None = None,
  axis_name: _base.AxisNames | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""LARS: momentum SGD whose every layer steps in proportion to its own weights.

  .. math::
    m \leftarrow \mu m - \alpha \frac{\eta |w|}{|g| + \lambda |w| + \epsilon}
      (\mathrm{clip}(g) + \lambda w), \qquad w \leftarrow w + m

  For batches of thousands, where one learning rate for all layers diverges before it is high
  enough. On small batches plain momentum SGD does as well.

  Args:
    learning_rate: :math:`\alpha`, a number or a schedule; inside the momentum, so a change of it
      does not rescale past steps.
    weight_decay: :math:`\lambda`; raising it shrinks weights faster and lowers the ratio.
    momentum: :math:`\mu`; raising it averages over more steps. None: no momentum, no buffer.
    trust_coefficient: :math:`\eta`. Kernels move at `learning_rate` times it, biases and
      normalizations at `learning_rate` itself. The paper's, MXNet's and optax's default is 0.001,
      for learning rates ten times as high.
    eps: :math:`\epsilon`; keeps the ratio bounded for tiny gradients.
    nesterov: whether the momentum looks one step ahead.
    clip: bound on each gradient entry, after the ratio was formed and before the decay is added.
      None: no clipping.
    clip_ratio: whether the ratio :math:`r` becomes :math:`\min(r / \alpha, 1)`, so that LARS only
      slows layers down: apex's LARC, MindSpore's `use_clip`.
    exclude: leaves that keep ratio 1; see :func:`scale_by_lars_trust_ratio`.
    weight_decay_mask: leaves that are decayed; None: all, as in MXNet 2.
    layers: what :func:`layer_axes` returns, for one ratio per layer; see
      :func:`scale_by_lars_trust_ratio`.
    axis_name: inside ``shard_map``, the axes over which the params are sharded; see
      :func:`scale_by_lars_trust_ratio`.

  Returns:
    An :class:`optax.GradientTransformationExtraArgs` that needs `params`. Updates and momentum
    have the params' dtype.

  Raises:
    ValueError: a number is out of range; in ``update``: no params, or a tree that does not fit.
    TypeError: an argument or a leaf is of the wrong kind.

  Examples:
    >>> import jax, jax.numpy as jnp, optax, optax_boost
    >>> rate = optax.cosine_decay_schedule(1.0, decay_steps=100)
    >>> tx = optax_boost.lars(rate, weight_decay=1e-4)
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
    ``optax.lars`` divides by :math:`|g + \lambda w|`, gives biases a ratio of their own unless
    masked, and overflows in float16.
  """
  _base.check_learning_rate(learning_rate)
  _base.check_bool("nesterov", nesterov)
  _base.check_bool("clip_ratio", clip_ratio)
  if momentum is not None:
    _base.check_number("momentum", momentum, minimum=0.0, below=1.0)
  leaves = _method.Leaves("lars", exclude, _bias_or_norm, layers, axis_name)
  numbers = (trust_coefficient, weight_decay, eps, clip, learning_rate if clip_ratio else None)
  parts = [
    _scale_by_trust_ratio(leaves, *numbers, weight_decay_mask, like_params=True),
    optax.scale_by_learning_rate(learning_rate),
  ]
  if momentum is not None:
    parts.append(optax.trace(momentum, nesterov))
  chain = optax.chain(*parts)

  @_method.wants_layers
  def update_fn(
    updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra_args: Any
  ) -> tuple[optax.Updates, Any]:
    if not (isinstance(state, tuple) and len(state) == len(parts)):
      raise TypeError(
        f"`lars` needs the state that its own `init` made, a tuple of {len(parts)}; got"
        f" {_base.shorten(state)}. Pass the state of this transformation."
      )
    return chain.update(updates, state, params, **extra_args)

  return optax.GradientTransformationExtraArgs(chain.init, update_fn)


def _scale_by_trust_ratio(
  leaves: _method.Leaves,
  trust_coefficient: Any,
  weight_decay: Any,
  eps: Any,
  clip: Any,
  clip_ratio: Any,
  weight_decay_mask: Any,
  like_params: bool = False,
) -> optax.GradientTransformationExtraArgs:
  """The transformation; with `like_params` updates have the dtype of the params and momentum."""
  _base.check_number("trust_coefficient", trust_coefficient, positive=True)
  _base.check_number("weight_decay", weight_decay, minimum=0.0)
  _base.check_number("eps", eps, minimum=0.0)
  if clip is not None:
    _base.check_number("clip", clip, minimum=0.0)
  if clip_ratio is not None:
    _base.check_learning_rate(clip_ratio, "clip_ratio")
  _tree.check_selector("weight_decay_mask", weight_decay_mask)

  @_tree.once_per_tree
  def decayed(params: optax.Params) -> list[bool]:
    if weight_decay_mask is None:
      return [True] * len(jax.tree.leaves(params))
    return _tree.select(params, weight_decay_mask, "weight_decay_mask")

  def init_fn(params: optax.Params) -> ScaleByLarsTrustRatioState:
    _tree.check_floating(params, leaves.method)
    decayed(params)
    return ScaleByLarsTrustRatioState(
      trust_ratio=jnp.ones(len(leaves.of(params)), _arrays.widest_dtype(params)),
      notfinite_count=jnp.zeros([], jnp.int32),
      count=jnp.zeros([], jnp.int32) if callable(clip_ratio) else None,
    )

  @_method.wants_layers
  def update_fn(
    updates: optax.Updates,
    state: ScaleByLarsTrustRatioState,
    params: optax.Params | None = None,
    *,
    layers: _layers.Layers | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, ScaleByLarsTrustRatioState]:
    del extra_args
    state_type = ScaleByLarsTrustRatioState
    _tree.check_update(leaves.method, updates, state, state_type, params, needs_params=True)
    plan = leaves.of(params, layers)
    mesh_axes = leaves.mesh_axes([leaf.path for leaf, _ in plan])
    if not plan:
      return updates, state
    rate = clip_ratio(state.count) if callable(clip_ratio) else clip_ratio
    dtype = state.trust_ratio.dtype

    def scale_of(w2: jax.Array, g2: jax.Array, decays: Any) -> jax.Array:
      decay = weight_decay if np.all(decays) else jnp.where(decays, weight_decay, 0.0)
      return _scale(w2, g2, trust_coefficient, decay, eps, rate).astype(dtype)

    columns = [
      _Column(leaf, w, g, decays)
      for (leaf, _), w, g, decays in zip(
        plan, jax.tree.leaves(params), jax.tree.leaves(updates), decayed(params), strict=True
      )
    ]
    scales: list[Any] = [None] * len(columns)
    # In the order of the leaves, so that all processes compile the same program.
    for axes in dict.fromkeys(mesh_axes):
      own = [i for i, (_, skip) in enumerate(plan) if mesh_axes[i] == axes and not skip]
      for i, scale in zip(own, _scales([columns[i] for i in own], scale_of, axes), strict=True):
        scales[i] = scale
    outputs, ratios = [], []
    for (leaf, w, g, decays), scale in zip(columns, scales, strict=True):
      factor = None if scale is None else jnp.expand_dims(scale, leaf.layer_axes)
      direction = _direction(g, w, factor, clip, weight_decay if decays else 0.0)
      outputs.append(direction.astype(w.dtype if like_params else g.dtype))
      ratios.append(_mean_of_layers(scale, dtype))
    means = jnp.stack(ratios)
    bad = jnp.isnan(means)
    return jax.tree.unflatten(jax.tree.structure(updates), outputs), state_type(
      trust_ratio=jnp.where(bad, 1, means),
      notfinite_count=_arrays.increment_if(jnp.any(bad), state.notfinite_count),
      count=None if state.count is None else optax.safe_increment(state.count),
    )

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _mean_of_layers(scale: jax.Array | None, dtype: Any) -> jax.Array:
  if scale is None or not scale.size:
    return jnp.ones([], dtype)
  return jnp.mean(scale) if scale.ndim else scale


class _Column(NamedTuple):
  """A leaf in the sums of squares."""

  leaf: _layers.Leaf
  w: jax.Array
  g: jax.Array
  decays: bool


def _scales(
  columns: list[_Column], scale_of: Callable[..., jax.Array], mesh_axes: Any
) -> list[jax.Array]:
  """`scale_of` the squared norms of weights and gradients, of each leaf's layers."""
  if not columns:
    return []
  leaves, weights, grads, decays = map(list, zip(*columns, strict=True))

  def total(squares: Any) -> Any:
    return squares if mesh_axes is None else jax.lax.psum(squares, mesh_axes)

  def one_by_one(weights: Any, grads: Any) -> Any:
    trios = zip(leaves, weights, grads, strict=True)
    squares = total([_sums_of_squares((w, g), leaf.layer_axes) for leaf, w, g in trios])
    return [scale_of(w2, g2, own) for (w2, g2), own in zip(squares, decays, strict=True)]

  def at_once(weights: Any, grads: Any) -> Any:
    groups = _arrays.alike([leaf.stacked for leaf in leaves], weights, grads)
    sums = []
    for group in groups:
      # Of both in one reduction: for a large one XLA makes two kernels.
      both = jnp.stack([x[i] for x in (weights, grads) for i in group])
      if len(group) > 1:
        # XLA would compile for minutes where a thousand leaves are fused into one loop.
        both = jax.lax.optimization_barrier(both)
      squares = _arrays.sum_squares(both, tuple(i + 1 for i in leaves[group[0]].layer_axes))
      sums.append(_arrays.gather_axes(squares, range(squares.ndim)).reshape(2, -1))
    places = [i for group in groups for i in group]
    layers = [leaves[i].layers for i in places]
    w2, g2 = total(jnp.concatenate(sums, axis=1))
    scale = scale_of(w2, g2, np.repeat([decays[i] for i in places], layers))
    parts = jnp.split(jax.lax.optimization_barrier(scale), np.cumsum(layers)[:-1])
    shaped = zip(places, parts, strict=True)
    scales = {i: part.reshape(leaves[i].stacked_shape) for i, part in shaped}
    return [scales[i] for i in range(len(leaves))]

  # A kernel costs a GPU more than a copy of a small leaf. A CPU's takes XLA longer to compile if it
  # reads a part of a vector: then no two leaves can share it.
  return jax.lax.platform_dependent(weights, grads, cuda=at_once, rocm=at_once, default=one_by_one)


@functools.partial(jax.jit, static_argnums=1)
def _sums_of_squares(pair: Any, axes: tuple[int, ...]) -> Any:
  sums = (_arrays.sum_squares(x, axes) for x in pair)
  return [_arrays.gather_axes(squares, range(squares.ndim)) for squares in sums]


@jax.custom_jvp
def _root(square: jax.Array) -> jax.Array:
  """The square root, whose derivative at zero is zero instead of infinite."""
  return jnp.sqrt(square)


@_root.defjvp
def _root_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
  root, (tangent,) = _root(*primals), tangents
  return root, jnp.where(root > 0, tangent / jnp.where(root > 0, 2 * root, 1), 0)

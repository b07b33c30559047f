r"""The mixed-precision stack: dynamic loss scaling and float32 master weights.

Small gradients vanish in float16. So the loss is multiplied by a scale s before it is
differentiated, and the gradients are divided by it afterwards. s follows the overflows:

  overflow             s <- max(s * backoff, minimum), no step is made
  n steps without one  s <- min(s * growth, maximum)

Small updates vanish too: 1 + 1e-4 is 1 in float16. So the weights that training moves are float32
masters, and the model's params are their rounding.

Source: Micikevicius et al., "Mixed Precision Training", arXiv:1710.03740; MindSpore's
``DynamicLossScaleUpdateCell``; MXNet's `multi_precision`.
"""

from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_boost import _base
from optax_boost import _tree


class DynamicLossScaleState(NamedTuple):
  """State of :func:`dynamic_loss_scale`.

  Attributes:
    loss_scale: scalar float32, what to multiply the next loss by.
    growth_count: scalar int32, steps since the scale last changed.
    notfinite_count: scalar int32, steps that were skipped.
    inner_state: the inner optimizer's state.
  """

  loss_scale: jax.Array
  growth_count: jax.Array
  notfinite_count: jax.Array
  inner_state: optax.OptState


def next_loss_scale(
  loss_scale: jax.Array,
  growth_count: jax.Array,
  finite: jax.Array,
  growth_interval: jax.typing.ArrayLike = 2000,
  growth_factor: jax.typing.ArrayLike = 2.0,
  backoff_factor: jax.typing.ArrayLike = 0.5,
  minimum: jax.typing.ArrayLike = 1.0,
  maximum: jax.typing.ArrayLike = 2.0**24,
) -> tuple[jax.Array, jax.Array]:
  """The loss scale after a step.

  Args:
    loss_scale: the scale that the step used, float32.
    growth_count: steps since it last changed, int32.
    finite: whether the step's gradients were.
    growth_interval: steps without an overflow before the scale grows.
    growth_factor: what it grows by.
    backoff_factor: what it is multiplied by after an overflow.
    minimum: its floor.
    maximum: its cap.

  Returns:
    The new scale and count. A step that overflows when growth is due only shrinks.

  Examples:
    >>> import jax.numpy as jnp, optax_boost
    >>> scale, count = jnp.float32(8.0), jnp.int32(0)
    >>> scale, count = optax_boost.next_loss_scale(scale, count, jnp.array(False))
    >>> float(scale), int(count)
    (4.0, 0)
  """
  due = growth_count + 1 >= growth_interval
  grown = jnp.minimum(loss_scale * jnp.float32(growth_factor), jnp.float32(maximum))
  shrunk = jnp.maximum(loss_scale * jnp.float32(backoff_factor), jnp.float32(minimum))
  scale = jnp.where(finite, jnp.where(due, grown, loss_scale), shrunk)
  return scale, jnp.where(finite & ~due, growth_count + 1, 0).astype(jnp.int32)


def dynamic_loss_scale(
  inner: optax.GradientTransformation,
  initial_scale: jax.typing.ArrayLike = 2.0**15,
  growth_interval: jax.typing.ArrayLike = 2000,
  *,
  growth_factor: jax.typing.ArrayLike = 2.0,
  backoff_factor: jax.typing.ArrayLike = 0.5,
  minimum: jax.typing.ArrayLike = 1.0,
  maximum: jax.typing.ArrayLike = 2.0**24,
  axis_name: str | tuple[str, ...] | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Unscales the gradients of a scaled loss, and skips the steps that overflowed.

  The loss must be multiplied by the state's `loss_scale` before it is differentiated;
  :func:`make_train_step` finds it there and does it. By hand:
  ``optax.tree.get(opt_state, "loss_scale")``.

  A step whose gradients have a NaN or an infinity changes nothing but the scale and the counters:
  its updates are zero, the inner state stays as it was.

  Args:
    inner: the optimizer that sees the unscaled gradients. For float16 params, put
      :func:`master_weights` around the whole: ``master_weights(dynamic_loss_scale(inner))``
      unscales in float32.
    initial_scale: the scale to start with.
    growth_interval: steps without an overflow before the scale grows; raising it risks fewer
      overflows and adapts more slowly.
    growth_factor: what the scale grows by; above 1.
    backoff_factor: what it is multiplied by after an overflow; below 1.
    minimum: its floor.
    maximum: its cap.
    axis_name: inside ``shard_map``, the mesh axes over which the gradients differ: one device's
      overflow then counts for all. Not needed under ``jit``.

  Returns:
    An :class:`optax.GradientTransformationExtraArgs`. The extra arguments `grad` and `grad_fn` are
    unscaled for `inner`; `value` and `value_fn` are of the loss itself.

  Raises:
    ValueError: a number is out of range, or `minimum` above `maximum`.
    TypeError: an argument or a leaf is of the wrong kind.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_boost
    >>> tx = optax_boost.dynamic_loss_scale(optax.sgd(1.0), initial_scale=4.0)
    >>> params = jnp.zeros(2)
    >>> updates, state = tx.update(jnp.array([4.0, 8.0]), tx.init(params), params)
    >>> updates.tolist()
    [-1.0, -2.0]
    >>> updates, state = tx.update(jnp.array([jnp.inf, 8.0]), state, params)
    >>> updates.tolist(), float(state.loss_scale), int(state.notfinite_count)
    ([0.0, 0.0], 2.0, 1)

  References:
    Micikevicius et al., `Mixed Precision Training <https://arxiv.org/abs/1710.03740>`_, 2018.
  """
  _base.check_number("initial_scale", initial_scale, positive=True)
  _base.check_number("growth_interval", growth_interval, minimum=1)
  _base.check_number("growth_factor", growth_factor, minimum=1.0)
  _base.check_number("backoff_factor", backoff_factor, positive=True, below=1.0)
  _base.check_number("minimum", minimum, positive=True)
  _base.check_number("maximum", maximum, positive=True)
  traced = any(isinstance(bound, jax.Array) for bound in (minimum, maximum))
  if not traced and float(minimum) > float(maximum):  # type: ignore[arg-type]
    raise ValueError(f"`minimum` must not be above `maximum`; got {minimum!r} and {maximum!r}.")
  inner = optax.with_extra_args_support(inner)

  def init_fn(params: optax.Params) -> DynamicLossScaleState:
    _tree.check_floating(params, "dynamic_loss_scale")
    return DynamicLossScaleState(
      loss_scale=jnp.asarray(initial_scale, jnp.float32),
      growth_count=jnp.zeros([], jnp.int32),
      notfinite_count=jnp.zeros([], jnp.int32),
      inner_state=inner.init(params),
    )

  def update_fn(
    updates: optax.Updates,
    state: DynamicLossScaleState,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, DynamicLossScaleState]:
    _tree.check_floating(updates, "dynamic_loss_scale")

    def unscale(grads: optax.Updates) -> optax.Updates:
      def divide(g: jax.Array) -> jax.Array:
        return (g.astype(_tree.accumulator_dtype(g.dtype)) / state.loss_scale).astype(g.dtype)

      return jax.tree.map(divide, grads)

    extra = dict(extra_args)
    if "grad" in extra:
      extra["grad"] = unscale(extra["grad"])
    if "grad_fn" in extra:
      scaled = extra["grad_fn"]
      extra["grad_fn"] = lambda p: unscale(scaled(p))

    finite = _tree.all_finite(updates)
    if axis_name is not None:
      finite = jax.lax.pmin(finite.astype(jnp.int32), axis_name) > 0

    def step(inner_state: optax.OptState) -> tuple[optax.Updates, optax.OptState]:
      return inner.update(unscale(updates), inner_state, params, **extra)

    def skip(inner_state: optax.OptState) -> tuple[optax.Updates, optax.OptState]:
      return jax.tree.map(jnp.zeros_like, updates), inner_state

    out, inner_state = jax.lax.cond(finite, step, skip, state.inner_state)
    scale, count = next_loss_scale(
      state.loss_scale,
      state.growth_count,
      finite,
      growth_interval,
      growth_factor,
      backoff_factor,
      minimum,
      maximum,
    )
    return out, DynamicLossScaleState(
      loss_scale=scale,
      growth_count=count,
      notfinite_count=state.notfinite_count + jnp.logical_not(finite),
      inner_state=inner_state,
    )

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


class MasterWeightsState(NamedTuple):
  """State of :func:`master_weights`.

  Attributes:
    master_params: tree of the params' structure, the weights in at least float32.
    count: scalar int32, steps made.
    notfinite_count: scalar int32, steps in which a master would not have been finite.
    key: raw key data of the generator for stochastic rounding, or None.
    inner_state: the inner optimizer's state, of the masters.
  """

  master_params: optax.Params
  count: jax.Array  # type: ignore[assignment]  # tuples have a method of this name
  notfinite_count: jax.Array
  key: jax.Array | None
  inner_state: optax.OptState


def round_stochastically(key: jax.Array, x: jax.Array, dtype: Any) -> jax.Array:
  """Rounds to one of the two neighbours in `dtype`, to the nearer one more often.

  Args:
    key: a key.
    x: a float32 array.
    dtype: a floating dtype of 16 bits.

  Returns:
    An array of `dtype` whose expectation is `x`, within the range of `dtype`.

  Examples:
    >>> import jax, jax.numpy as jnp
    >>> from optax_boost._precision import round_stochastically
    >>> x = jnp.full(10_000, 1 + 2**-9, jnp.float32)  # halfway between two bfloat16 numbers: /4
    >>> rounded = round_stochastically(jax.random.key(0), x, jnp.bfloat16)
    >>> bool(abs(jnp.mean(rounded.astype(jnp.float32)) - x[0]) < 1e-4)
    True
  """
  nearest = x.astype(dtype)
  error = x - nearest.astype(x.dtype)
  infinity = jnp.array(jnp.inf, dtype)
  other = jnp.where(error > 0, jnp.nextafter(nearest, infinity), jnp.nextafter(nearest, -infinity))
  gap = jnp.abs(other.astype(x.dtype) - nearest.astype(x.dtype))
  chance = jnp.where(gap > 0, jnp.abs(error) / gap, 0.0)
  move = jax.random.uniform(key, x.shape, x.dtype) < chance
  return jnp.where(move & jnp.isfinite(other), other, nearest)


def master_weights(
  inner: optax.GradientTransformation, *, key: jax.Array | None = None
) -> optax.GradientTransformationExtraArgs:
  r"""Trains float32 masters of half-precision params; the params are always their rounding.

  The inner optimizer sees the masters as its params, and the gradients in float32. Its updates
  move the masters; what comes out moves the params to the masters' rounding. A master that would
  not be finite stays where it is; one beyond the range of the params' dtype is rounded to its end.

  Args:
    inner: the optimizer of the masters.
    key: for stochastic rounding, whose error is zero on average; None: round to nearest. It only
      matters to the forward pass: the masters are exact either way.

  Returns:
    An :class:`optax.GradientTransformationExtraArgs` that needs `params`. Its updates are float32
    (float64 for float64 params), since the difference of two float16 numbers need not be one:
    ``optax.apply_updates`` adds them in float32 and rounds once. It lands on the masters' rounding
    exactly, unless a weight shrinks 4,096-fold in one step; then the next step corrects it.

  Raises:
    ValueError: in ``update``: no params, or gradients that do not fit.
    TypeError: a leaf is not floating-point, or `key` is no key.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_boost
    >>> tx = optax_boost.master_weights(optax.sgd(1.0))
    >>> params = jnp.ones(1, jnp.float16)
    >>> state = tx.init(params)
    >>> for _ in range(1000):  # each too small a step for float16
    ...   updates, state = tx.update(jnp.full(1, -1e-4, jnp.float16), state, params)
    ...   params = optax.apply_updates(params, updates)
    >>> round(float(params[0]), 2), params.dtype
    (1.1, dtype('float16'))

  References:
    Micikevicius et al., `Mixed Precision Training <https://arxiv.org/abs/1710.03740>`_, 2018.
  """
  if key is not None and not (
    isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
  ):
    raise TypeError(f"`key` must be a key of `jax.random.key`, or None; got {key!r}.")
  inner = optax.with_extra_args_support(inner)

  def widen(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.array(x, _tree.accumulator_dtype(x.dtype)), tree)

  def init_fn(params: optax.Params) -> MasterWeightsState:
    _tree.check_floating(params, "master_weights")
    masters = widen(params)
    return MasterWeightsState(
      # Copies: an inner state may hold its params, and all of it is donated together.
      master_params=jax.tree.map(jnp.array, masters),
      count=jnp.zeros([], jnp.int32),
      notfinite_count=jnp.zeros([], jnp.int32),
      key=None if key is None else jax.random.key_data(key),
      inner_state=inner.init(masters),
    )

  def update_fn(
    updates: optax.Updates,
    state: MasterWeightsState,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, MasterWeightsState]:
    _base.require_params(params, "master_weights")
    _tree.check_same_tree(updates, params, "master_weights")
    _tree.check_floating(updates, "master_weights")
    extra = dict(extra_args)
    if "grad" in extra:
      extra["grad"] = widen(extra["grad"])
    # The closures take the masters: the model computes in its params' dtype all the same.
    for name in ("value_fn", "grad_fn", "full_grad_fn"):
      if name in extra:
        extra[name] = _at_rounded(extra[name], params, None if name == "value_fn" else widen)
    moves, inner_state = inner.update(
      widen(updates), state.inner_state, state.master_params, **extra
    )
    wanted = optax.apply_updates(state.master_params, moves)
    masters = jax.tree.map(
      lambda new, old: jnp.where(jnp.isfinite(new), new, old), wanted, state.master_params
    )
    rounded = _round_like(masters, params, state.key, state.count)
    out = jax.tree.map(lambda r, p: widen(r) - widen(p), rounded, params)
    return out, MasterWeightsState(
      master_params=masters,
      count=state.count + 1,
      notfinite_count=state.notfinite_count + jnp.logical_not(_tree.all_finite(wanted)),
      key=state.key,
      inner_state=inner_state,
    )

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _at_rounded(function: Any, params: optax.Params, after: Any) -> Any:
  def call(masters: optax.Params, grad_fn: Any = None, full_grad_fn: Any = None) -> Any:
    del grad_fn, full_grad_fn  # named, so that optax's line searches let them pass
    result = function(jax.tree.map(lambda m, p: m.astype(p.dtype), masters, params))
    return result if after is None else after(result)

  return call


def _round_like(
  masters: optax.Params, params: optax.Params, key_data: jax.Array | None, count: jax.Array
) -> optax.Params:
  def saturate(m: jax.Array, p: jax.Array) -> jax.Array:
    limit = jnp.finfo(p.dtype).max.astype(m.dtype)
    return jnp.clip(m, -limit, limit)

  masters = jax.tree.map(saturate, masters, params)
  if key_data is None:
    return jax.tree.map(lambda m, p: m.astype(p.dtype), masters, params)
  key = jax.random.fold_in(jax.random.wrap_key_data(key_data), count)
  leaves, structure = jax.tree.flatten(masters)
  keys = jax.random.split(key, max(len(leaves), 1))
  rounded = [
    m.astype(p.dtype) if m.dtype == p.dtype else round_stochastically(k, m, p.dtype)
    for k, m, p in zip(keys, leaves, jax.tree.leaves(params), strict=False)
  ]
  return jax.tree.unflatten(structure, rounded)

"""Master weights: small updates vanish in half precision (1 + 1e-4 is 1 in float16).

So the weights that training moves are float32 masters, and the model's params are their rounding.

Source: Micikevicius et al., "Mixed Precision Training", arXiv:1710.03740; MXNet's
`multi_precision`.
"""

from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_boost import _base
from optax_boost import _protocol
from optax_boost import _tree


@_protocol.declares(metrics=("master_weights/notfinite_count",))
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
    >>> from optax_boost._precision._master_weights import round_stochastically
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
      # A copy: the state is donated, the caller's key is not.
      key=None if key is None else jnp.array(jax.random.key_data(key)),
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

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
from optax_boost import _conditional
from optax_boost import _in_place
from optax_boost import _protocol
from optax_boost import _tree

_METHOD = "master_weights"


@_protocol.declares(metrics=("master_weights/notfinite_count",), skips=("notfinite_count",))
class MasterWeightsState(NamedTuple):
  """State of :func:`master_weights`.

  Attributes:
    master_params: tree of the params' structure, the weights in at least float32.
    count: scalar int32, steps made.
    notfinite_count: scalar int32, steps in which an inner update, the inner state or a master would
      not have been finite.
    key: raw key data of the generator for stochastic rounding, or None.
    inner_state: the inner optimizer's state, of the masters.
  """

  master_params: optax.Params
  count: jax.Array  # type: ignore[assignment]  # tuples have a method of this name
  notfinite_count: jax.Array
  key: jax.Array | None
  inner_state: optax.OptState


def round_stochastically(key: jax.Array, x: jax.Array, dtype: Any) -> jax.Array:
  """Rounds float32 to one of two neighbours in a 16-bit dtype, such that the mean is `x`."""
  nearest = x.astype(dtype)
  error = x - nearest.astype(x.dtype)
  other = jnp.nextafter(nearest, jnp.where(error > 0, jnp.inf, -jnp.inf).astype(dtype))
  gap = jnp.abs(other.astype(x.dtype) - nearest.astype(x.dtype))
  chance = jnp.where(gap > 0, jnp.abs(error) / gap, 0.0)
  move = jax.random.uniform(key, x.shape, x.dtype) < chance
  return jnp.where(move & jnp.isfinite(other), other, nearest)


def master_weights(
  inner: optax.GradientTransformation, *, key: jax.Array | int | None = None
) -> optax.GradientTransformationExtraArgs:
  r"""Trains float32 masters of half-precision params; the params are always their rounding.

  The inner optimizer sees the masters as its params, and the gradients in float32. Its updates
  move the masters; the returned updates move the params to the masters' rounding.

  A step in which the inner optimizer's updates or its state would turn NaN or infinite changes
  nothing and is counted. A master that would leave float32's range stays where it is; one beyond
  the range of the params' dtype is rounded to its end. A param that something else has moved since
  the last step (``optax.lookahead``, a projection) takes its master along.

  Args:
    inner: the optimizer of the masters.
    key: a key of ``jax.random.key`` or a seed, for stochastic rounding, whose error is zero on
      average; None: round to nearest. The masters are exact either way.

  Returns:
    An :class:`optax.GradientTransformationExtraArgs` that needs `params`. Updates are float32
    (float64 for float64 params): ``optax.apply_updates`` adds them in float32 and rounds once,
    exactly to the masters' rounding unless a weight shrinks 4,096-fold in one step; then the master
    follows the param. Wrappers of optax that skip steps go inside, as in
    ``master_weights(optax.apply_if_finite(inner, 5))``.

  Raises:
    ValueError: in ``update``: no params, or gradients that do not fit.
    TypeError: a leaf is not floating-point, or `key` is no key.

  Examples:
    >>> import jax, jax.numpy as jnp, optax, optax_boost
    >>> tx = optax_boost.master_weights(optax.sgd(1.0))
    >>> update = jax.jit(tx.update)
    >>> params = jnp.ones(1, jnp.float16)
    >>> state = tx.init(params)
    >>> for _ in range(1000):  # each too small a step for float16
    ...   updates, state = update(jnp.full(1, -1e-4, jnp.float16), state, params)
    ...   params = optax.apply_updates(params, updates)
    >>> round(float(params[0]), 2), params.dtype
    (1.1, dtype('float16'))

  References:
    Micikevicius et al., `Mixed Precision Training <https://arxiv.org/abs/1710.03740>`_, 2018.
  """
  inner = _base.check_transformation("inner", inner)
  key = None if key is None else _base.as_key("key", key)

  method = _Masters(inner, key)
  return _in_place.InPlaceTransformation(method.init, method.update, method.apply)


class _Masters(NamedTuple):
  """The checked arguments of :func:`master_weights`."""

  inner: optax.GradientTransformationExtraArgs
  key: jax.Array | None

  def init(self, params: optax.Params) -> MasterWeightsState:
    _tree.check_floating(params, _METHOD)
    masters = _tree.copy_arrays(params, _tree.accumulator_dtype)
    return MasterWeightsState(
      # Copies: an inner state may hold its params, and all of it is donated together.
      master_params=_tree.copy_arrays(masters),
      count=jnp.zeros([], jnp.int32),
      notfinite_count=jnp.zeros([], jnp.int32),
      # A copy: the state is donated, the caller's key is not.
      key=None if self.key is None else jnp.array(jax.random.key_data(self.key)),
      inner_state=self.inner.init(masters),
    )

  def _keys(self, state: MasterWeightsState) -> tuple[jax.Array | None, jax.Array | None]:
    """The keys of the last step's rounding and of this one's."""
    if self.key is None or state.key is None:
      return None, None
    step_key = jax.random.wrap_key_data(state.key, impl=jax.random.key_impl(self.key))
    last, this = (jax.random.fold_in(step_key, state.count - i) for i in (1, 0))
    return last, this

  def update(
    self,
    updates: optax.Updates,
    state: MasterWeightsState,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, MasterWeightsState]:
    _tree.check_update(_METHOD, updates, state, MasterWeightsState, params, needs_params=True)
    last_key, this_key = self._keys(state)
    masters = _follow(params, state.master_params, last_key)
    gradients, extra = _for_masters(updates, extra_args, params)
    moves, moved = self.inner.update(gradients, state.inner_state, masters, **extra)
    moved = _conditional.cast_like(moved, state.inner_state)

    skipped = _spoilt(updates, moves, moved, state.inner_state)
    stepped = _conditional.select(skipped, masters, optax.apply_updates(masters, moves))
    kept = _in_place.keep_finite(stepped, masters)
    rounded = _round_like(kept, params, this_key)
    out = jax.tree.map(jnp.subtract, _widen(rounded), _widen(params))
    return out, _next_state(
      state,
      kept,
      skipped | ~_tree.all_finite(stepped),
      _conditional.select(skipped, state.inner_state, moved),
    )

  def apply(
    self,
    gradients: _in_place.Gradients,
    state: MasterWeightsState,
    params: optax.Params,
    guard: bool,
  ) -> tuple[optax.Params, MasterWeightsState]:
    del guard  # masters and their rounding are always finite
    updates, extra_args = gradients()
    _tree.check_update(_METHOD, updates, state, MasterWeightsState, params, needs_params=True)
    last_key, this_key = self._keys(state)

    def widened() -> tuple[optax.Updates, dict[str, Any]]:
      return _for_masters(*gradients(), params)

    def inner_step() -> tuple[optax.Params, optax.Updates, optax.OptState]:
      masters = _follow(params, state.master_params, last_key)
      updates, extra = widened()
      moves, moved = self.inner.update(updates, state.inner_state, masters, **extra)
      return masters, moves, _conditional.cast_like(moved, state.inner_state)

    def check() -> tuple[jax.Array, jax.Array]:
      """Whether a step is not made, and whether it is counted."""
      masters, moves, _ = inner_step()
      landed = _in_place.all_finite(optax.apply_updates(masters, moves))
      # One thing after the other, so that nothing is kept for the next.
      (sound,) = _in_place.checked_unless(
        landed, lambda: (_in_place.all_finite(inner_step()[1]),), landed
      )
      finite = jnp.isfinite(_in_place.largest(updates)) | nested
      (kept,) = _in_place.checked_unless(
        finite, lambda: (_in_place.none_lost(inner_step()[2], state.inner_state),), finite
      )
      skipped = ~(sound & kept)
      return skipped, skipped | ~landed

    def step(params: Any, masters: Any, inner_state: Any) -> Any:
      masters = _follow(params, masters, last_key)
      masters, inner_state = _in_place.apply(self.inner, widened, inner_state, masters, guard=True)
      return _round_like(masters, params, this_key), masters, inner_state

    def skip(params: Any, masters: Any) -> Any:
      masters = _follow(params, masters, last_key)
      return _round_like(masters, params, this_key), masters

    carry = params, state.master_params, state.inner_state
    nested = _conditional.scales_loss(state.inner_state)
    if nested and _in_place.is_in_place(self.inner):
      # It skips its own bad steps.
      params, masters, inner_state = step(*carry)
      return params, _next_state(state, masters, jnp.asarray(False), inner_state)
    usual = _in_place.ordinary(_in_place.sum_squares(updates), jnp.float32(1), extra_args)
    skipped, bad = _in_place.checked_unless(usual, check, ~usual, ~usual)
    made, params, masters, inner_state = _in_place.once_if(~skipped, step, *carry)
    _, params, masters = _in_place.once_if(~made, skip, params, masters)
    return params, _next_state(state, masters, bad, inner_state)


def _widen(tree: Any) -> Any:
  return jax.tree.map(_tree.widen, tree)


def _for_masters(
  updates: optax.Updates, extra_args: dict[str, Any], params: optax.Params
) -> tuple[optax.Updates, dict[str, Any]]:
  """The gradients and extra arguments of the inner optimizer."""

  def full_gradient(*args: Any, **kwargs: Any) -> Any:
    return _widen(_tree.mask_like(extra_args["full_grad_fn"](*args, **kwargs), updates))

  # The closures take the masters: the model computes in its params' dtype all the same.
  closures = {name: extra_args.get(name) for name in ("value_fn", "grad_fn", "full_grad_fn")}
  if closures["full_grad_fn"] is not None:
    closures["full_grad_fn"] = full_gradient
  extra = extra_args | {
    name: _at_rounded(function, params) for name, function in closures.items() if function
  }
  return _tree.map_gradients(_widen, updates, extra)


def _next_state(
  state: MasterWeightsState, masters: optax.Params, bad: jax.Array, inner_state: optax.OptState
) -> MasterWeightsState:
  return MasterWeightsState(
    master_params=masters,
    count=optax.safe_increment(state.count),
    notfinite_count=_tree.increment_if(bad, state.notfinite_count),
    key=state.key,
    inner_state=inner_state,
  )


def _spoilt(
  updates: optax.Updates, moves: optax.Updates, moved: optax.OptState, state: optax.OptState
) -> jax.Array:
  """Whether the inner optimizer could not cope with its gradients."""
  bad_moves = ~_tree.all_finite(moves)
  if _conditional.scales_loss(state):
    # It copes with overflows, and must keep its record of them: inside an accumulation they wait
    # in the sum for the end of the window.
    return bad_moves
  # The state is looked through only where something is wrong already.
  return _conditional.cond(
    bad_moves | ~_tree.all_finite(updates),
    lambda: bad_moves | ~_conditional.no_entry_lost(moved, state),
    lambda: bad_moves,
  )


def _at_rounded(function: Any, params: optax.Params) -> Any:
  """A function of the masters that hands their rounding to a function of the params."""

  def call(masters: optax.Params, *args: Any, grad_fn: Any = None, full_grad_fn: Any = None) -> Any:
    del grad_fn, full_grad_fn  # named, so that optax's line searches let them pass
    return function(jax.tree.map(lambda m, p: m.astype(p.dtype), masters, params), *args)

  return call


def _follow(
  params: optax.Params, masters: optax.Params, last_key: jax.Array | None
) -> optax.Params:
  """The masters, moved to where something else has moved their params since the last step."""
  # Rounding is repeated with the last step's key, so its own outcome is no such move. The initial
  # masters are numbers of the params' dtype, which every key rounds to themselves.

  def follow(m: jax.Array, p: jax.Array, expected: jax.Array) -> jax.Array:
    return jnp.where((p == expected) | ~jnp.isfinite(p), m, p.astype(m.dtype))

  return jax.tree.map(follow, masters, params, _round_like(masters, params, last_key))


def _round_like(masters: optax.Params, params: optax.Params, key: jax.Array | None) -> optax.Params:
  """The masters, rounded to the params' dtypes and to the ends of their ranges."""
  leaves, structure = jax.tree.flatten(masters)
  keys = [None] * len(leaves) if key is None else jax.random.split(key, max(len(leaves), 1))

  def round_like(m: jax.Array, p: jax.Array, key: jax.Array | None) -> jax.Array:
    limit = jnp.finfo(p.dtype).max.astype(m.dtype)
    m = jnp.clip(m, -limit, limit)
    if key is None or m.dtype == p.dtype:
      return m.astype(p.dtype)
    return round_stochastically(key, m, p.dtype)

  rounded = map(round_like, leaves, jax.tree.leaves(params), keys)
  return jax.tree.unflatten(structure, rounded)

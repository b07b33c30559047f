"""Master weights: small updates vanish in half precision (1 + 1e-4 is 1 in float16).

So the weights that training moves are float32 masters, and the model's params are their rounding.

Source: Micikevicius et al., "Mixed Precision Training", arXiv:1710.03740; MXNet's
`multi_precision`.
"""

import functools
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_boost import _arrays
from optax_boost import _base
from optax_boost import _conditional
from optax_boost import _in_place
from optax_boost import _protocol
from optax_boost import _tree
from optax_boost._precision import _widened

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


def master_weights(
  inner: optax.GradientTransformation,
  *,
  key: jax.Array | int | None = None,
  axis_name: str | tuple[str, ...] | None = None,
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
    axis_name: inside ``shard_map``, the mesh axes over which gradients or params differ, so that
      all devices make a step or none does. Without it, a bad gradient on one device stops a program
      whose inner optimizer has collectives. Not needed under ``jit``.

  Returns:
    An :class:`optax.GradientTransformationExtraArgs` that needs `params`. Updates are float32
    (float64 for float64 params): ``optax.apply_updates`` adds them in float32 and rounds once,
    exactly to the masters' rounding unless a weight shrinks 4,096-fold in one step; then the master
    follows the param. Wrappers of optax that skip steps go inside, as in
    ``master_weights(optax.apply_if_finite(inner, 5))``.

  Raises:
    ValueError: in ``update``: no params, gradients that do not fit, or an axis that is not bound.
    TypeError: a leaf is not floating-point, or an argument is of the wrong kind.

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

  _base.check_axis_name("axis_name", axis_name)
  agree = functools.partial(_conditional.agree, axis_name=axis_name, method=_METHOD)

  method = _Masters(inner, key, agree)
  return _in_place.InPlaceTransformation(method.init, method.update, method.apply)


class _Masters(NamedTuple):
  """The checked arguments of :func:`master_weights`."""

  inner: optax.GradientTransformationExtraArgs
  key: jax.Array | None
  agree: _widened.Agree

  def init(self, params: optax.Params) -> MasterWeightsState:
    _tree.check_floating(params, _METHOD)
    masters = _arrays.copy_arrays(params, _arrays.accumulator_dtype)
    return MasterWeightsState(
      # Copies: an inner state may hold its params, and all of it is donated together.
      master_params=_arrays.copy_arrays(masters),
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
    last, this = (_widened.step_key(self.key, state.key, state.count - i) for i in (1, 0))
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
    masters, bad, inner_state = _widened.step(
      self.inner, updates, extra_args, state.inner_state, masters, params, self.agree
    )
    rounded = _widened.round_like(masters, params, this_key)
    return _widened.difference(rounded, params), _next_state(state, masters, bad, inner_state)

  def apply(
    self,
    gradients: _in_place.Gradients,
    state: MasterWeightsState,
    params: optax.Params,
    guard: bool,
  ) -> tuple[optax.Params, MasterWeightsState]:
    del guard  # masters and their rounding are always finite
    _tree.check_update(
      _METHOD, gradients()[0], state, MasterWeightsState, params, needs_params=True
    )
    last_key, this_key = self._keys(state)

    def widened() -> tuple[optax.Updates, dict[str, Any]]:
      return _widened.arguments(*gradients(), params)

    def step(params: Any, masters: Any, inner_state: Any) -> Any:
      masters = _follow(params, masters, last_key)
      masters, inner_state = _in_place.apply(self.inner, widened, inner_state, masters, guard=True)
      return _widened.round_like(masters, params, this_key), masters, inner_state

    def skip(params: Any, masters: Any) -> Any:
      masters = _follow(params, masters, last_key)
      return _widened.round_like(masters, params, this_key), masters

    carry = params, state.master_params, state.inner_state
    if _widened.skips_by_itself(self.inner, state.inner_state):
      params, masters, inner_state = step(*carry)
      return params, _next_state(state, masters, jnp.asarray(False), inner_state)
    skipped, bad = _widened.skipped_in_place(
      self.inner,
      gradients,
      state.inner_state,
      lambda: _follow(params, state.master_params, last_key),
      params,
      self.agree,
    )
    made, params, masters, inner_state = _in_place.once_if(~skipped, step, *carry)
    _, params, masters = _in_place.once_if(~made, skip, params, masters)
    return params, _next_state(state, masters, bad, inner_state)


def _next_state(
  state: MasterWeightsState, masters: optax.Params, bad: jax.Array, inner_state: optax.OptState
) -> MasterWeightsState:
  return MasterWeightsState(
    master_params=masters,
    count=optax.safe_increment(state.count),
    notfinite_count=_arrays.increment_if(bad, state.notfinite_count),
    key=state.key,
    inner_state=inner_state,
  )


def _follow(
  params: optax.Params, masters: optax.Params, last_key: jax.Array | None
) -> optax.Params:
  """The masters, moved to where something else has moved their params since the last step."""
  # Rounding is repeated with the last step's key, so its own outcome is no such move. The initial
  # masters are numbers of the params' dtype, which every key rounds to themselves.

  def follow(m: jax.Array, p: jax.Array, expected: jax.Array) -> jax.Array:
    return jnp.where((p == expected) | ~jnp.isfinite(p), m, p.astype(m.dtype))

  return jax.tree.map(follow, masters, params, _widened.round_like(masters, params, last_key))

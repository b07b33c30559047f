r"""Computes quasi-Newton steps in a subspace of k dimensions: direction, line search, BFGS.

  B    approximation of the inverse Hessian in the subspace, k x k
  g_k  projected gradient, k
  d_k  direction, -B g_k
  s    the last accepted step, a multiple of an earlier direction
  y    the change of g_k since the last accepted step

BFGS, where a prime transposes a vector or matrix, and T = I - y s' / (y' s):

  B <- T' B T + s s' / (y' s)

The new B maps y to s, so along s it is the exact inverse of the curvature that y shows.

A worked example with k = 2. In the subspace the loss is f(w) = w_1^2 / 2 + 2 w_2^2, whose Hessian
is diag(1, 4). At w = (1, 1) the loss is 2.5 and the gradient (1, 4). B is the identity at first, so
the direction is steepest descent:

  >>> loss = lambda w: 0.5 * w[0] ** 2 + 2.0 * w[1] ** 2
  >>> w, gradient = jnp.array([1.0, 1.0]), jnp.array([1.0, 4.0])
  >>> direction = -gradient

The line search tries the lengths 1, 0.5 and 0.25, whose losses are 18, 2.1 and 0.28. The slope
along the direction is -17. With sigma = 0.4 the loss must fall by 0.4 * 17 times the length:

  >>> trial = lambda length: (loss(w + length * direction), length * jnp.vdot(gradient, direction))
  >>> search = backtrack(
  ...   trial, loss(w), jnp.float32(1.0), rho=0.5, sigma=0.4, max_search=30, possible=True
  ... )
  >>> float(search.accepted), int(search.tried)
  (0.25, 3)

Now w is (0.75, 0), and the gradient there (0.75, 0). The next step updates B with s = (-0.25, -1)
and y = (-0.25, -4). The update starts from B = 0.25 I, since 0.25 is the length that the search
found for steepest descent:

  >>> s, y = search.accepted * direction, jnp.array([-0.25, -4.0])
  >>> b, updated = bfgs_update(0.25 * jnp.eye(2), s, y, min_curvature=0.0)
  >>> [[round(x, 3) for x in row] for row in b.tolist()], bool(updated)
  ([[0.273, 0.045], [0.045, 0.247]], True)
  >>> [round(x, 3) for x in (b @ y).tolist()]
  [-0.25, -1.0]

Source: Li, Wu, Huang et al., "Low Dimensional Trajectory Hypothesis is True: DNNs can be Trained in
Tiny Subspaces", arXiv:2103.11154.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from optax_boost._form import _finiteness
from optax_boost._foundation import _arrays, _types
from optax_boost._methods._dim_reduce._linalg import identities, matmul
from optax_boost._methods._dim_reduce._state import DimReduceState


def bfgs_update(
  inverse_hessian: jax.Array,
  step: jax.Array,
  gradient_change: jax.Array,
  min_curvature: float,
) -> tuple[jax.Array, _types.BoolScalar]:
  """Updates the inverse Hessian B [k, k] by `step` s and `gradient_change` y.

  Returns the new B and True. If the inner product of s and y is at most `min_curvature`, which
  could make B indefinite, or if the new B is not finite, returns the old B and False.
  """
  curvature = matmul(gradient_change, step)
  enough = curvature > min_curvature
  # `where` in the divisor avoids a division by zero if B is not updated.
  p = 1 / jnp.where(enough, curvature, 1)
  t = jnp.eye(step.size, dtype=step.dtype) - p * jnp.outer(gradient_change, step)
  new = matmul(t.T, matmul(inverse_hessian, t)) + p * jnp.outer(step, step)
  updated = enough & jnp.all(_finiteness.finite_entries(new))
  return jnp.where(updated, new, inverse_hessian), updated


class Direction(NamedTuple):
  """The direction of a step in the subspaces of G groups, and what the line search needs."""

  gradient: jax.Array  # g_k, [G, k]
  inverse_hessian: jax.Array  # B, updated, [G, k, k]
  direction: jax.Array  # d_k, [G, k]; zeros unless `usable`
  first: _types.FloatScalar  # the first length that a search tries
  steepest: _types.BoolScalar  # whether the direction is steepest descent
  scale: _types.FloatScalar  # B learns from distances in the subspace times `scale`
  usable: _types.BoolScalar  # whether the gradient and the direction are finite


def find_direction(
  state: DimReduceState, gradient: jax.Array, adaptive: bool, rescales: bool
) -> Direction:
  """Updates B by the last accepted step; returns the direction -B g_k, and the new B.

  `gradient` is g_k. If `adaptive`, and -B g_k is not a direction of descent, returns the direction
  -g_k and the identity for B. If `rescales`, B learns from steps that are multiplied by the
  curvature of the first of them. So B stays about as large as the identity, and the direction is
  about as long as the gradient.
  """
  b, s, last_gradient = state.inverse_hessian, state.last_step, state.projected_gradient
  change, scale, length = gradient - last_gradient, state.inner_scale, state.accepted_rho
  identity = identities(b)
  is_fresh = jnp.all(b == identity)
  if rescales:
    stiffness = ratio(jnp.sum(change * s), jnp.sum(s**2))
    begins = is_fresh & (stiffness > 0) & jnp.isfinite(stiffness)
    scale = jnp.where(begins, stiffness, scale)
    s = jnp.where(begins, stiffness * s, s)
  elif adaptive:
    # If B is still the identity, the last step was one of steepest descent with the length
    # `length`. The first update of B starts from the identity times `length`, so that the length 1
    # also suits directions of which B has not seen the curvature yet.
    b = jnp.where(is_fresh & (length > 0), length, 1) * b
  least = 0.0 if adaptive else 1e-20  # as in MindSpore
  updated, _ = jax.vmap(bfgs_update, (0, 0, 0, None))(b, s, change, least)
  direction = -jax.vmap(matmul)(updated, gradient)
  first, steepest = jnp.ones_like(state.next_rho), jnp.asarray(False)
  if adaptive:
    unchanged = is_fresh & jnp.all(updated == b)
    finite = jnp.all(_finiteness.finite_entries(direction))
    descends = finite & (jnp.sum(gradient * direction) < 0)
    first = jnp.where(unchanged | (descends & ~is_fresh), state.next_rho, 1)
    steepest = unchanged | ~descends
    updated = jnp.where(steepest, identity, updated)
    direction = jnp.where(steepest, -gradient, direction)
    scale = jnp.where(steepest, 1, scale)
  usable = jnp.all(_finiteness.finite_entries(gradient)) & jnp.all(
    _finiteness.finite_entries(direction)
  )
  direction = jnp.where(usable, direction, 0)
  return Direction(gradient, updated, direction, first, steepest, scale, usable)


def ratio(numerator: jax.Array, denominator: jax.Array) -> jax.Array:
  """Returns numerator / denominator if the denominator is positive, else 0."""
  positive = denominator > 0
  return jnp.where(positive, numerator / jnp.where(positive, denominator, 1), 0)


class Search(NamedTuple):
  """The state of a line search after some trials; the last state is the result."""

  accepted: _types.FloatScalar  # the accepted length, 0 if there is none
  tried: _types.IntScalar  # the number of lengths tried
  notfinite: _types.IntScalar  # the number of trials whose loss was not finite
  step: _types.FloatScalar  # the next length to try
  hidden: _types.BoolScalar  # whether the loss's rounding error hid the change in the last trial
  # Whether a step longer than the last trial may be better. True if rounding errors hid the change.
  # Also True if a parabola has its minimum at the last length divided by rho, or beyond. This
  # parabola has the known slope at length 0, and fits the losses at length 0 and at the last
  # length.
  short: _types.BoolScalar

  @classmethod
  def begin(cls, first: jax.Array) -> "Search":
    """Returns the state of a search that has tried no length and will try `first`."""
    zero, no = jnp.zeros([], jnp.int32), jnp.zeros([], bool)
    return cls(jnp.zeros_like(first), zero, zero, first, no, no)


def backtrack(
  trial: Callable[[_types.FloatScalar], tuple[_types.FloatScalar, _types.FloatScalar]],
  value: _types.FloatScalar,
  first: _types.FloatScalar,
  rho: jax.typing.ArrayLike,
  sigma: jax.typing.ArrayLike,
  max_search: int,
  possible: _types.BoolScalar,
  resolution: float | None = None,
) -> Search:
  """Tries shorter and shorter lengths until the loss falls enough below `value`.

  The lengths are `first`, rho `first`, rho^2 `first`, ..., at most `max_search` of them. `value` is
  the loss at length 0. ``trial(length)`` returns the loss at a length, and the change from `value`
  that the slope predicts. The loss must fall by more than `sigma` times the predicted decrease.
  `resolution` is the relative rounding error of a loss; if it is None, rounding errors are ignored.
  If `possible` is False, no length is tried. Returns the last state of the search.
  """

  def more(search: Search) -> jax.Array:
    return possible & (search.tried < max_search) & (search.accepted == 0) & ~search.hidden

  def attempt(search: Search) -> Search:
    loss, change = trial(search.step)
    loss, change = loss.astype(value.dtype), change.astype(value.dtype)
    good = jnp.isfinite(loss)
    # If the slope predicts a rise, any decrease is enough.
    enough = good & (value + sigma * jnp.minimum(change, 0) > loss)
    hidden = jnp.zeros([], bool)
    if resolution is not None:
      # If rounding errors hide the change, the search ends, and accepts the length unless the loss
      # has grown.
      hidden = good & (jnp.abs(change) <= resolution * jnp.abs(value))
      enough |= hidden & (change < 0) & (loss <= value)
    # A parabola with its minimum at the length T falls by the predicted change times
    # (1 - 0.5 t / T) up to the length t. So `near_linear` says that t / T is at most rho.
    near_linear = value - loss >= (1 - 0.5 * rho) * jnp.abs(change)
    return Search(
      accepted=jnp.where(enough, search.step, 0),
      tried=search.tried + 1,
      notfinite=_arrays.increment_if(~good, search.notfinite),
      step=search.step * jnp.asarray(rho, value.dtype),
      hidden=hidden,
      short=jnp.asarray((change < 0) & (hidden | near_linear)),
    )

  return jax.lax.while_loop(more, attempt, Search.begin(first.astype(value.dtype)))


def next_step(
  search: Search,
  first: _types.FloatScalar,
  steepest: _types.BoolScalar,
  restart: _types.FloatScalar,
  rho: jax.typing.ArrayLike,
) -> _types.FloatScalar:
  """Returns the length that the line search of the next step tries first.

  `search` is the finished search of this step, and `first` is the length that it tried first. If
  `search` accepted a length, this length is returned. But if the accepted length was `first`, a
  longer length may be returned. If `search` tried no length, `first` is returned. If `search` tried
  some and accepted none, `restart` is returned. But if the direction was `steepest`
  descent, the result is usually the next shorter length.
  """
  # An accepted length grows above 1 only if `search.short` is True.
  longer = search.accepted / rho
  longer = jnp.where(search.short, longer, jnp.minimum(longer, 1))
  grows = (search.tried == 1) & (longer > search.accepted)
  accepted = jnp.where(grows, longer, search.accepted)
  # If steepest descent has failed, the next search begins with the next shorter length. But if no
  # loss was finite, the next search begins with `first` again, and if rounding errors hid the
  # change, with a longer length.
  failed = jnp.where(search.notfinite == search.tried, first, search.step)
  failed = jnp.where(search.hidden, first / rho, failed)
  failed = jnp.where(steepest, failed, restart)
  length = jnp.where(search.tried == 0, first, jnp.where(search.accepted > 0, accepted, failed))
  usable = jnp.isfinite(length) & (length > jnp.finfo(first.dtype).tiny)
  return jnp.where(usable, length, 1).astype(first.dtype)

r"""The k x k part of quasi-Newton steps in a subspace, and their line search.

  B    approximation of the inverse Hessian in the subspace, k x k
  g_k  projected gradient, k; y its change since the last step that was accepted
  d_k  direction, -B g_k; s the last accepted step, a multiple of an earlier direction

BFGS, with T = I - y s' / y's:

  B <- T' B T + s s' / y's

The new B maps y to s: along the last step it is the exact inverse of the curvature that the two
gradients show.

A worked example with k = 2. In the subspace the loss is f(w) = w_1^2 / 2 + 2 w_2^2, whose Hessian
is diag(1, 4). At w = (1, 1) the loss is 2.5 and the gradient (1, 4). B is the identity at first, so
the direction is that of steepest descent:

  >>> loss = lambda w: 0.5 * w[0] ** 2 + 2.0 * w[1] ** 2
  >>> w, gradient = jnp.array([1.0, 1.0]), jnp.array([1.0, 4.0])
  >>> direction = -gradient

The line search tries the lengths 1, 0.5 and 0.25, whose losses are 18, 2.1 and 0.28. The linear
change is -17 times the length, and with sigma = 0.4 the loss must fall by 0.4 times that:

  >>> trial = lambda length: (loss(w + length * direction), length * jnp.vdot(gradient, direction))
  >>> search = backtrack(
  ...   trial, loss(w), jnp.float32(1.0), rho=0.5, sigma=0.4, max_search=30, possible=True
  ... )
  >>> float(search.accepted), int(search.tried)
  (0.25, 3)

So w is (0.75, 0) and its gradient (0.75, 0). The next step updates B with s = (-0.25, -1) and
y = (-0.25, -4). It does so from B = 0.25 I, the length that suited steepest descent:

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
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_boost._form import _finiteness
from optax_boost._foundation import _arrays

_matmul = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


def bfgs_update(
  inverse_hessian: jax.Array,
  step: jax.Array,
  gradient_change: jax.Array,
  min_curvature: float,
) -> tuple[jax.Array, jax.Array]:
  """One BFGS update of B [k, k] by s and y, and whether it was made.

  It is skipped if ``y's`` is at most `min_curvature`, or if the result is not finite. So B stays
  positive definite.
  """
  curvature = _matmul(gradient_change, step)
  enough = curvature > min_curvature
  # The inner `where` keeps the untaken case from dividing by zero.
  p = 1 / jnp.where(enough, curvature, 1)
  t = jnp.eye(step.size, dtype=step.dtype) - p * jnp.outer(gradient_change, step)
  new = _matmul(t.T, _matmul(inverse_hessian, t)) + p * jnp.outer(step, step)
  updated = enough & jnp.all(_finiteness.finite_entries(new))
  return jnp.where(updated, new, inverse_hessian), updated


class Direction(NamedTuple):
  """A step in the subspace of G groups, before its length is positive."""

  gradient: jax.Array  # g_k, [G, k]
  inverse_hessian: jax.Array  # B, updated, [G, k, k]
  direction: jax.Array  # d_k, [G, k]; zeros unless `usable`
  first: jax.Array  # the first length that a search tries
  steepest: jax.Array  # whether it falls back to steepest descent
  scale: jax.Array  # from distances in the subspace to the units of `direction`
  usable: jax.Array  # whether the gradient and the direction are finite


def find_direction(state: Any, gradient: jax.Array, adaptive: bool, rescales: bool) -> Direction:
  """B after its update by the last accepted step, and -B g_k.

  An `adaptive` search gets steepest descent if -B g_k does not descend. If B `rescales`, it starts
  as the identity and keeps its magnitude: directions are as long as gradients, so an inner
  optimizer receives the units of gradients throughout.
  """
  b, s, last_gradient = state.inverse_hessian, state.last_step, state.projected_gradient
  change, scale, length = gradient - last_gradient, state.inner_scale, state.accepted_rho
  identity = identities(state)
  is_fresh = jnp.all(b == identity)
  if rescales:
    stiffness = ratio(jnp.sum(change * s), jnp.sum(s**2))
    begins = is_fresh & (stiffness > 0) & jnp.isfinite(stiffness)
    scale = jnp.where(begins, stiffness, scale)
    s = jnp.where(begins, stiffness * s, s)
  elif adaptive:
    # The first update starts from the identity times the length of the last step, a step of
    # steepest descent: so a length of 1 suits the directions that B has not seen, too.
    b = jnp.where(is_fresh & (length > 0), length, 1) * b
  least = 0.0 if adaptive else 1e-20  # as in MindSpore
  updated, _ = jax.vmap(bfgs_update, (0, 0, 0, None))(b, s, change, least)
  direction = -jax.vmap(_matmul)(updated, gradient)
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


def identities(state: Any) -> jax.Array:
  """The inverse Hessians ``[G, k, k]`` to start from."""
  k = state.inverse_hessian.shape[-1]
  identity = jnp.eye(k, dtype=state.inverse_hessian.dtype)
  return jnp.broadcast_to(identity, state.inverse_hessian.shape)


def ratio(numerator: jax.Array, denominator: jax.Array) -> jax.Array:
  """The ratio, or 0 if the denominator is 0."""
  positive = denominator > 0
  return jnp.where(positive, numerator / jnp.where(positive, denominator, 1), 0)


class Search(NamedTuple):
  """State of a line search, and its result."""

  accepted: jax.Array  # the accepted step, 0 if there was none
  tried: jax.Array  # the number of steps tried
  notfinite: jax.Array  # the number of losses among them that were not finite
  step: jax.Array  # the last step tried times rho
  hidden: jax.Array  # whether the last linear change was below the losses' rounding errors
  # Whether, by a parabola through the last loss, its minimum lies at `step / rho` or beyond.
  short: jax.Array

  @classmethod
  def begin(cls, first: jax.Array) -> "Search":
    """A search that has tried nothing."""
    zero, no = jnp.zeros([], jnp.int32), jnp.zeros([], bool)
    return cls(jnp.zeros_like(first), zero, zero, first, no, no)


def backtrack(
  trial: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
  value: jax.Array,
  first: jax.Array,
  rho: jax.typing.ArrayLike,
  sigma: jax.typing.ArrayLike,
  max_search: int,
  possible: jax.Array,
  resolution: float | None = None,
) -> Search:
  """Tries the steps first, first rho, first rho^2, ... until one lowers the loss enough.

  `trial` returns a step's loss and its linear change; a change above zero counts as zero. If the
  change is below `resolution`, the relative rounding error of a loss, the search ends, and the step
  is accepted unless the loss grows; None ignores rounding errors.
  """

  def more(search: Search) -> jax.Array:
    return possible & (search.tried < max_search) & (search.accepted == 0) & ~search.hidden

  def attempt(search: Search) -> Search:
    loss, change = trial(search.step)
    loss, change = loss.astype(value.dtype), change.astype(value.dtype)
    good = jnp.isfinite(loss)
    enough = good & (value + sigma * jnp.minimum(change, 0) > loss)
    hidden = jnp.zeros([], bool)
    if resolution is not None:
      hidden = good & (jnp.abs(change) <= resolution * jnp.abs(value))
      enough |= hidden & (change < 0) & (loss <= value)
    # A parabola's minimum is where it decreased by half of the linear change.
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
  first: jax.Array,
  steepest: jax.Array,
  restart: jax.Array,
  rho: jax.typing.ArrayLike,
) -> jax.Array:
  """The first step of the next search: where this one ended, or one trial before that.

  It grows if the first trial was accepted, beyond 1 only if that step was short. If no trial was
  accepted, steepest descent shrinks it further, grows it if rounding errors hid the change, and
  keeps it if no loss was finite; other directions restart at `restart`.
  """
  longer = search.accepted / rho
  longer = jnp.where(search.short, longer, jnp.minimum(longer, 1))
  grows = (search.tried == 1) & (longer > search.accepted)
  accepted = jnp.where(grows, longer, search.accepted)
  failed = jnp.where(search.notfinite == search.tried, first, search.step)
  failed = jnp.where(search.hidden, first / rho, failed)
  failed = jnp.where(steepest, failed, restart)
  length = jnp.where(search.tried == 0, first, jnp.where(search.accepted > 0, accepted, failed))
  usable = jnp.isfinite(length) & (length > jnp.finfo(first.dtype).tiny)
  return jnp.where(usable, length, 1).astype(first.dtype)

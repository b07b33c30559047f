r"""The k x k part of quasi-Newton steps in a subspace, and their line search.

  B    approximation of the inverse Hessian in the subspace, k x k
  g_k  projected gradient, k; y its change since the last step that was accepted
  d_k  direction, -B g_k; s the last accepted step, a multiple of an earlier direction

BFGS, with T = I - y s' / y's:

  B <- T' B T + s s' / y's

Source: Li, Wu, Huang et al., "Low Dimensional Trajectory Hypothesis is True: DNNs can be Trained in
Tiny Subspaces", arXiv:2103.11154.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

_EXACT = jax.lax.Precision.HIGHEST


def bfgs_update(
  inverse_hessian: jax.Array,
  step: jax.Array,
  gradient_change: jax.Array,
  min_curvature: jax.typing.ArrayLike,
) -> tuple[jax.Array, jax.Array]:
  """One BFGS update of an inverse Hessian, where the curvature allows it.

  Args:
    inverse_hessian: B, ``[k, k]``, symmetric.
    step: s, ``[k]``.
    gradient_change: y, ``[k]``.
    min_curvature: B stays as it was unless ``y's`` is above this.

  Returns:
    The new B, and whether it was updated: not where ``y's`` is too small or the result would not
    be finite. So B stays positive definite.
  """
  curvature = gradient_change @ step
  enough = curvature > min_curvature
  # The inner `where` keeps the untaken case from dividing by zero.
  p = 1 / jnp.where(enough, curvature, 1)
  identity = jnp.eye(step.size, dtype=step.dtype)
  t = identity - p * jnp.outer(gradient_change, step)
  inner = jnp.matmul(inverse_hessian, t, precision=_EXACT)
  new = jnp.matmul(t.T, inner, precision=_EXACT) + p * jnp.outer(step, step)
  updated = enough & jnp.all(jnp.isfinite(new))
  return jnp.where(updated, new, inverse_hessian), updated


@jax.jit
def directions(
  inverse_hessian: jax.Array,
  step: jax.Array,
  gradient: jax.Array,
  last_gradient: jax.Array,
  min_curvature: jax.typing.ArrayLike,
) -> tuple[jax.Array, jax.Array]:
  """Updated inverse Hessians, and the directions that they give, for G groups at once.

  Args:
    inverse_hessian: B, ``[G, k, k]``.
    step: s, ``[G, k]``.
    gradient: the projected gradient, ``[G, k]``.
    last_gradient: that of the last step that was accepted, ``[G, k]``.
    min_curvature: see :func:`bfgs_update`.

  Returns:
    The new B, and the directions ``[G, k]``.
  """

  def one(b: jax.Array, s: jax.Array, g: jax.Array, last: jax.Array) -> Any:
    b, _ = bfgs_update(b, s, g - last, min_curvature)
    return b, -jnp.matmul(b, g, precision=_EXACT)

  return jax.vmap(one)(inverse_hessian, step, gradient, last_gradient)


def backtrack(
  trial: Callable[[jax.Array], jax.Array],
  value: jax.Array,
  slope: jax.Array,
  rho: jax.typing.ArrayLike,
  sigma: jax.typing.ArrayLike,
  max_search: int,
  possible: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Tries the steps 1, rho, rho^2, ... until one lowers the loss enough.

  A step t is accepted if ``value + sigma t slope > trial(t)``, both losses finite.

  Args:
    trial: from a step to the loss there.
    value: the loss at step 0.
    slope: the directional derivative, below zero.
    rho: the factor from one step to the next.
    sigma: the share of the linear decrease that is asked for.
    max_search: how many steps to try at most.
    possible: whether to try at all.

  Returns:
    The accepted step, 0 if there was none; how many were tried; and how many of their losses were
    not finite.
  """
  dtype = slope.dtype

  def more(carry: Any) -> jax.Array:
    tried, _, accepted, _ = carry
    return possible & (tried < max_search) & (accepted == 0)

  def attempt(carry: Any) -> Any:
    tried, step, _, notfinite = carry
    loss = trial(step).astype(dtype)
    good = jnp.isfinite(loss)
    enough = good & (value + sigma * step * slope > loss)
    accepted = jnp.where(enough, step, 0)
    return tried + 1, step * jnp.asarray(rho, dtype), accepted, notfinite + ~good

  zero = jnp.zeros([], jnp.int32)
  start = (zero, jnp.ones([], dtype), jnp.zeros([], dtype), zero)
  tried, _, accepted, notfinite = jax.lax.while_loop(more, attempt, start)
  return accepted, tried, notfinite

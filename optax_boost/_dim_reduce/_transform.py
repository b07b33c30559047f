r"""Quasi-Newton steps with line search in a subspace, momentum outside of it.

For params w of n numbers, gradient g and basis P (k x n, its rows orthonormal or not):

  g_k = P g                              projected gradient, k
  B <- BFGS(B, s, y), y = g_k - g_k'     g_k' from the last accepted step
  d_k = -B g_k                           direction; t its step length by line search, 0 if none
  r <- gamma r + g - P' g_k              momentum of the residual, n
  w <- w + t P' d_k - alpha r
  s <- t d_k                             if t > 0

Where no t is accepted, MindSpore's search restores B and g_k'; ours sets B to the identity and s
to 0, so that the next step is one of steepest descent. With an inner optimizer I, a trial is
w + I(-t P' d_k), and the step I(alpha r - t P' d_k): I receives the sign of a gradient.

The recursion of r is linear, so r = M - P' q with M <- gamma M + g and q <- gamma q + g_k, n and k
numbers. The state keeps M and q, and the update is -alpha M + P' (t d_k + alpha q): the basis is
read twice in a step. A line search makes the second product one of two columns.

Source: Li, Wu, Huang et al., "Low Dimensional Trajectory Hypothesis is True: DNNs can be Trained in
Tiny Subspaces", arXiv:2103.11154; steps as in MindSpore's ``boost.dim_reduce``.
"""

from collections.abc import Callable
from typing import Any

import jax
import optax

from optax_boost._dim_reduce import _layers
from optax_boost._dim_reduce import _step
from optax_boost._dim_reduce._subspace import Subspace


def dim_reduce(
  subspace: Subspace | Callable[[Any], Subspace],
  rho: jax.typing.ArrayLike = 0.55,
  sigma: jax.typing.ArrayLike = 0.4,
  gamma: jax.typing.ArrayLike = 0.9,
  alpha: optax.ScalarOrSchedule = 1e-3,
  max_search: int | str | None = "auto",
  groups: _layers.Groups | None = None,
  *,
  inner: optax.GradientTransformation | None = None,
  min_curvature: jax.typing.ArrayLike | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Quasi-Newton steps with line search in a subspace, momentum outside of it.

  .. math::
    w \leftarrow w + t P^\top d - \alpha r, \qquad d = -B P g, \qquad
    r \leftarrow \gamma r + g - P^\top P g

  for the gradient :math:`g`, the basis :math:`P` of `subspace`, a BFGS approximation :math:`B` of
  the inverse Hessian in it, and a step length :math:`t` with

  .. math::
    f(w + t P^\top d) < f(w) + \sigma t \, g^\top P^\top d

  on the current batch. The search tries lengths that shrink by the factor :math:`\rho` until one
  is accepted, and the next search begins where it ended: at the accepted length, or at a longer
  one where the first trial was accepted. Where none is, `rejected_count` grows, and the next step
  is one of steepest descent. A decrease smaller than the rounding error of the loss is accepted
  unless the loss grows. It is a whole optimizer, to be used where ``optax.sgd`` would be; its
  steps in the subspace need no learning rate.

  A step takes the time of reading the basis twice, and one forward pass per trial. Memory: the
  basis (k copies of the params) and one copy of the params.

  ``update`` needs, unless `max_search` is None, the extra arguments `value`, the loss at the
  params, and ``value_fn(params)``, the loss elsewhere on the same batch, as ``make_train_step``
  passes them. Gradients must be of that loss, unscaled: with a loss scale, put
  :func:`dynamic_loss_scale` around. With a batch that is sharded over devices, both losses are
  the mean over all of it. A gradient that is not finite changes nothing but a counter, and leaves
  NaN in its own entries of the updates, for ``optax.apply_if_finite``. A loss that is not finite
  is never accepted.

  Sharded params keep the basis sharded as they are, and only the projected gradient, the
  gradient's norm and the losses cross devices in a step. For that, ``init`` must see the params
  as they are placed: outside of ``jit``, or on a mesh with Explicit axes. Inside ``shard_map``
  params must be whole: nothing is summed over devices there.

  Args:
    subspace: a :class:`Subspace` whose basis fits the params, or a callable from params to one.
      Under ``optax.inject_hyperparams`` a callable must be named in `static_args`.
    rho: the factor from one trial to the next, in (0, 1). Raising it tries longer steps.
    sigma: the share of the linear decrease that a step must reach, in [0, 1). Raising it rejects
      more steps.
    gamma: the decay of the residual momentum, in [0, 1). Raising it averages more gradients.
    alpha: the learning rate outside of the subspace, a number >= 0 or a schedule of the step count.
    max_search: the search for a step length; static. ``"auto"``: as above, at most 30 trials in a
      step. A number: MindSpore's search (there 2) of that many lengths, from the full step on; if
      none is accepted, the step in the subspace is left out and :math:`B` restored, so where the
      loss is steep, nothing moves in the subspace. None: the full step is taken untried, which
      needs no forward pass and no loss.
    groups: a plan of :func:`layer_groups`; what :func:`layer_axes` returns, with which layer i of
      all leaves is a group, and all leaves without layers are the last; or regular expressions,
      searched in the leaves' paths, one per group; the first that matches counts, and a leaf that
      none matches is in the last group. Each group has a subspace, and a :math:`B`, of its own: the
      rows of the basis hold a component of each, orthonormal within it (``fit_subspace(...,
      groups=groups)``). They share the step length. None: one group.
    inner: an optimizer that the steps go through, as in MindSpore's
      ``DimReduce(network, optimizer, ...)``; its learning rate scales the steps. It receives
      :math:`\alpha r - t P^\top d` in place of the gradient; a trial is its answer to
      :math:`-t P^\top d`, which leaves its state as it was. With ``max_search="auto"``, :math:`t`
      is at most 1; a trial is compared with the inner optimizer's answer to zeros, its momentum
      alone, at the cost of one more forward pass; and :math:`B` learns from the distance that the
      params went, in the units of gradients. None: as ``optax.sgd(1.0)`` in MindSpore's search.
    min_curvature: :math:`B` is updated only where the change of the projected gradient times the
      step exceeds this. Raising it keeps :math:`B` from growing. Default: 0; with a number as
      `max_search` 1e-20, as in MindSpore.

  Returns:
    An :class:`optax.GradientTransformationExtraArgs` that needs `params`. Updates have the
    params' dtype.

  Raises:
    ValueError: a number is out of range, or the subspace does not fit the params; in ``update``:
      params or an extra argument are missing, or a tree does not fit.
    TypeError: an argument or a leaf is of the wrong kind.

  Examples:
    >>> import jax.numpy as jnp, optax_boost
    >>> def loss_fn(w, batch):
    ...   return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)
    >>> batch = {"x": jnp.diag(jnp.array([1.0, 1.5, 2.0])), "y": jnp.array([1.0, 2.0, 3.0])}
    >>> plane = optax_boost.Subspace(jnp.zeros(3), jnp.eye(3)[:2], jnp.ones(2), jnp.ones(2) / 2)
    >>> tx = optax_boost.dim_reduce(plane, gamma=0.5, alpha=0.2)
    >>> step = optax_boost.make_train_step(loss_fn, tx)
    >>> state = step.init(jnp.zeros(3))
    >>> for _ in range(30):
    ...   state, metrics = step(state, batch)
    >>> bool(metrics["loss"] < 1e-6)
    True

  References:
    Li, Wu, Huang, Chen, Guo, `Low Dimensional Trajectory Hypothesis is True: DNNs can be Trained
    in Tiny Subspaces <https://arxiv.org/abs/2103.11154>`_, 2021.

  .. note::
    Inside ``optax.masked`` or ``optax.partition`` the basis is cut down to the unmasked leaves, and
    ``value_fn`` is called with the masked params. In a population under ``vmap`` each member gets a
    copy of the basis, unless the axes of the state say None for it. TPUs pad the last two axes of a
    leaf to 8 x 128, which wastes memory for the basis of kernels with fewer channels.
  """
  method = _step.Transform(
    subspace,
    rho,
    sigma,
    gamma,
    alpha,
    max_search,
    _layers.checked_groups(groups),
    inner,
    min_curvature,
  )
  return optax.GradientTransformationExtraArgs(method.init, method.update)

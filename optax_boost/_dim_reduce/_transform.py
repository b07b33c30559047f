r"""Quasi-Newton steps with line search in a subspace, momentum outside of it.

For params w of n numbers, gradient g and basis P (k x n, its rows orthonormal or not):

  g_k = P g                              projected gradient, k
  B <- BFGS(B, s, y), y = g_k - g_k'     g_k' that of the last step that was accepted
  d_k = -B g_k                           direction; t its step length by line search, 0 if none
  r <- gamma r + g - P' g_k              momentum of the residual, n
  w <- w + t P' d_k - alpha r
  s <- t d_k                             if t > 0; else B and g_k' are as before the step

The recursion of r is linear, so r = M - P' q with M <- gamma M + g and q <- gamma q + g_k, n and k
numbers. M and q are what the state keeps, and the update is -alpha M + P' (t d_k + alpha q): the
basis is read twice in a step. A line search needs P' d_k by itself, and makes the second product
one of two columns.

Source: Li, Wu, Huang et al., "Low Dimensional Trajectory Hypothesis is True: DNNs can be Trained in
Tiny Subspaces", arXiv:2103.11154; steps as in MindSpore's ``boost.dim_reduce``.
"""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple
from typing import Self

import jax
import jax.numpy as jnp
import optax

from optax_boost import _base
from optax_boost import _groups
from optax_boost import _tree
from optax_boost._dim_reduce import _basis
from optax_boost._dim_reduce import _quasi_newton
from optax_boost._dim_reduce import _refresh
from optax_boost._dim_reduce import _state
from optax_boost._dim_reduce._state import DimReduceState
from optax_boost._dim_reduce._subspace import Subspace

_METHOD = _state.METHOD


def dim_reduce(
  subspace: Subspace | Callable[[Any], Subspace],
  rho: jax.typing.ArrayLike = 0.55,
  sigma: jax.typing.ArrayLike = 0.4,
  gamma: jax.typing.ArrayLike = 0.9,
  alpha: optax.ScalarOrSchedule = 1e-3,
  max_search: int | None = 2,
  groups: _groups.Groups | None = None,
  *,
  refresh_every: int | None = None,
  refresh_snapshots: int | None = None,
  min_curvature: jax.typing.ArrayLike = 1e-20,
  basis_dtype: Any = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Quasi-Newton steps with line search in a subspace, momentum outside of it.

  .. math::
    w \leftarrow w + t P^\top d - \alpha r, \qquad d = -B P g, \qquad
    r \leftarrow \gamma r + g - P^\top P g

  for the gradient :math:`g`, the basis :math:`P` of `subspace`, a BFGS approximation :math:`B` of
  the inverse Hessian in it, and the first :math:`t` among :math:`1, \rho, \rho^2, \ldots` with

  .. math::
    f(w + t P^\top d) < f(w) + \sigma t \, g^\top P^\top d

  on the current batch. Where there is none, the step in the subspace is left out, and what it
  taught :math:`B` is forgotten; where the loss is so steep that this goes on, raise `max_search`.
  It is a whole optimizer, to be used where ``optax.sgd`` would be;
  its steps in the subspace need no learning rate.

  The time is that of reading the basis twice, as long as a trial's forward pass is cheap beside
  it. An accepted first trial costs one forward pass, each that fails one more. Memory: the basis
  (k copies of the params) and one copy of the params.

  A gradient that is not finite changes nothing but a counter, and leaves NaN in its own entries of
  the updates, for ``optax.apply_if_finite``. A loss that is not finite is never accepted.

  ``update`` needs, unless `max_search` is None, the extra arguments `value`, the loss at the
  params, and ``value_fn(params)``, the loss elsewhere on the same batch; ``make_train_step``
  supplies both. Gradients must be those of that loss, unscaled: with a loss scale, put
  :func:`dynamic_loss_scale` around. With a batch that is sharded over devices, both losses are
  the mean over all of it.

  Sharded params keep the basis sharded as they are, and what crosses devices in a step is the
  projected gradient, the gradient's norm and the losses. For that, ``init`` must see the params
  as they are placed: outside of ``jit``, or on a mesh with Explicit axes.

  Args:
    subspace: a :class:`Subspace` whose basis fits the params, or a callable from params to one.
      Under ``optax.inject_hyperparams`` a callable must be named in `static_args`.
    rho: the factor from one trial to the next, in (0, 1). Raising it tries longer steps.
    sigma: the share of the linear decrease that a step must reach, in [0, 1). Raising it rejects
      more steps.
    gamma: the decay of the residual momentum, in [0, 1).
    alpha: the learning rate outside of the subspace, a number >= 0 or a schedule of the step count.
    max_search: the most trials in a step; the first is the full step. The reference's 2 is little
      where the loss is steep: on digits, a dense network of three layers rejected 40 to 59 of 60
      steps with 2 and at most one with 8, and ended at a training loss of 0.023 to 0.028 instead of
      0.039 to 0.069. None: the full step is taken untried, which needs no forward pass and no loss.
    groups: what :func:`layer_groups` returned; or regular expressions, searched in the leaves'
      paths, one per group of leaves; the first that matches counts, and a leaf that none matches
      is in the last group. Each group has a
      subspace, and a :math:`B`, of its own; they share the step length. The rows of the basis then
      hold a component of each group, orthonormal within it. None: one group.
    refresh_every: the steps after which the subspace is fitted anew, inside the step, to the
      newest params; :math:`B` starts anew too. The compiled step then sets aside some three bases
      of scratch memory, touched by refreshes alone. None: never, or by :func:`refresh_subspace`.
    refresh_snapshots: how many params a refresh is fitted to, evenly spaced over the steps since
      the last one; static, above the number of components. The state holds them. Default: one
      more than components.
    min_curvature: :math:`B` is updated only where the change of the projected gradient times the
      step exceeds this. Raising it keeps :math:`B` from growing.
    basis_dtype: float32, bfloat16, or uint16 for bfloat16 numbers kept as bits; the products are
      in float32 all the same. For CPUs, where XLA would expand all of a bfloat16 basis before each
      use, it is uint16 that halves the memory; GPUs and TPUs have bfloat16 of their own. On the
      digits above, training came to the same with all three. Default: that of the basis if
      bfloat16, else float32 (float64 for float64 params).

  Returns:
    An :class:`optax.GradientTransformationExtraArgs` that needs `params`. Updates have the
    gradients' dtype; the state is a :class:`DimReduceState`.

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
    MindSpore's ``DimReduce`` compares losses that were divided by the number of ranks with a floor
    division, needs a number of components that the ranks divide, and divides the projected
    gradient by the loss scale but not the residual. Here the loss is the mean, any number of
    components will do, and gradients arrive unscaled. Inside ``optax.masked`` or
    ``optax.partition`` the basis is cut down to the leaves that are there, and ``value_fn`` is
    called with the masked params. In a population under ``vmap`` each member gets a copy of the
    basis, unless the axes of the state say None for it. Components come first in the basis
    because then each device reads it in order, whatever the leaf: right for GPUs and TPUs as for
    CPUs, by reasoning and not by measurement; TPUs pad the last two axes to 8 x 128, which wastes
    memory for kernels with fewer channels.
  """
  _check_arguments(subspace, rho, sigma, gamma, alpha, max_search, min_curvature)
  storage = _check_dtype(basis_dtype)
  groups = ("",) if groups is None else groups
  num_groups = _groups.count_groups(groups)
  if refresh_every is not None:
    _base.check_whole_number("refresh_every", refresh_every, static=True)
  if refresh_snapshots is not None:
    _base.check_whole_number("refresh_snapshots", refresh_snapshots, static=True)
    if refresh_every is None:
      raise ValueError("`refresh_snapshots` is for refreshes: give `refresh_every`, too.")

  def init_fn(params: optax.Params) -> DimReduceState:
    _tree.check_floating(params, _METHOD)
    given = subspace if isinstance(subspace, Subspace) else subspace(params)
    number, k = num_groups, given.components
    rows = _state.fitting_basis(given, params)
    dtype = _basis.inner_dtype(params)
    snapshots = None
    if refresh_every is not None:
      held = k + 1 if refresh_snapshots is None else refresh_snapshots
      if held <= k:
        raise ValueError(
          f"`refresh_snapshots` must exceed the number of components, {k}; got {held}. Of m"
          " snapshots, the deviations from their mean span m - 1 dimensions."
        )
      snapshots = jax.tree.map(
        lambda p: _state.placed(jnp.broadcast_to(p, (held, *p.shape)), p, p.dtype), params
      )
    return DimReduceState(
      basis=jax.tree.map(
        lambda p, r: _state.placed(r, p, _state.storage_dtype(storage, r, p)), params, rows
      ),
      momentum=jax.tree.map(
        lambda p: jnp.zeros_like(p, dtype=_tree.accumulator_dtype(p.dtype)), params
      ),
      projected_momentum=jnp.zeros((number, k), dtype),
      inverse_hessian=jnp.tile(jnp.eye(k, dtype=dtype), (number, 1, 1)),
      projected_gradient=jnp.zeros((number, k), dtype),
      last_step=jnp.zeros((number, k), dtype),
      snapshots=snapshots,
      count=jnp.zeros([], jnp.int32),
      line_search_steps=jnp.zeros([], jnp.int32),
      accepted_rho=jnp.zeros([], dtype),
      curvature=jnp.zeros([], dtype),
      explained_gradient=jnp.zeros([], dtype),
      rejected_count=jnp.zeros([], jnp.int32),
      refresh_count=jnp.zeros([], jnp.int32),
      notfinite_count=jnp.zeros([], jnp.int32),
    )

  def update_fn(
    updates: optax.Updates,
    state: DimReduceState,
    params: optax.Params | None = None,
    *,
    value: jax.typing.ArrayLike | None = None,
    value_fn: Callable[[Any], jax.Array] | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, DimReduceState]:
    del extra_args
    _base.require_params(params, _METHOD)
    _tree.check_same_tree(updates, params, _METHOD)
    _tree.check_floating(updates, _METHOD)
    if max_search is not None:
      _base.require_extra(value, "value", _METHOD, "the loss at the params, on the current batch")
      _base.require_extra(
        value_fn, "value_fn", _METHOD, "a function from params to the loss on the current batch"
      )
    group_of_leaf = _groups.group_numbers(params, groups, _METHOD)
    if refresh_every is not None:
      state = _refresh.refresh_if_due(state, params, refresh_every, group_of_leaf)
    rate = alpha(state.count) if callable(alpha) else alpha
    quasi = _QuasiNewton.of(updates, state, group_of_leaf, min_curvature)
    # Of the step in the subspace, and of what the residual momentum lacks.
    columns = (quasi.direction, rate * (gamma * state.projected_momentum + quasi.gradient))
    momentum = jax.tree.map(lambda m, g: gamma * m + g.astype(m.dtype), state.momentum, updates)

    def lift(columns: jax.Array) -> list[jax.Array]:
      leaves = zip(group_of_leaf, *map(jax.tree.leaves, (state.basis, momentum)), strict=True)
      return [_basis.combine(columns[group].astype(m.dtype), rows) for group, rows, m in leaves]

    if max_search is None:
      step, tried = quasi.usable.astype(quasi.gradient.dtype), jnp.zeros([], jnp.int32)
      notfinite = tried
      inside = lift(columns[0] + columns[1])
    else:
      assert value is not None
      assert value_fn is not None
      lifted = lift(jnp.stack(columns, axis=1))
      step, tried, notfinite = _search(
        value, value_fn, params, lifted, quasi, (rho, sigma, max_search)
      )
      # Not only times 0: what overflows may be in the direction.
      inside = [jnp.where(step > 0, step.astype(x.dtype) * x[0], 0) + x[1] for x in lifted]

    def change(g: jax.Array, x: jax.Array, m: jax.Array) -> jax.Array:
      moved = x - jnp.asarray(rate, m.dtype) * m
      # Shows what is not finite to `optax.apply_if_finite`; the rest stands still.
      still = jnp.where(jnp.isfinite(g), 0, jnp.nan)
      return jnp.where(quasi.finite, moved, still).astype(g.dtype)

    leaves, structure = jax.tree.flatten(updates)
    changes = map(change, leaves, inside, jax.tree.leaves(momentum))
    state = quasi.after(state, step)._replace(
      momentum=jax.tree.map(
        lambda new, old: jnp.where(quasi.finite, new, old), momentum, state.momentum
      ),
      projected_momentum=jnp.where(
        quasi.finite,
        gamma * state.projected_momentum + quasi.gradient,
        state.projected_momentum,
      ),
      count=optax.safe_increment(state.count),
      line_search_steps=tried,
      notfinite_count=state.notfinite_count + ~quasi.finite + notfinite,
    )
    return jax.tree.unflatten(structure, list(changes)), state

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


class _QuasiNewton(NamedTuple):
  """What a step finds out in the subspace, before its length is known.

  Attributes:
    gradient: the projected gradient, ``[G, k]``.
    norm: the squared norm of the whole gradient.
    inverse_hessian: updated, ``[G, k, k]``.
    direction: ``[G, k]``; zeros where it is not `usable`.
    finite: whether the projected gradient is.
    usable: whether the direction is finite, too.
  """

  gradient: jax.Array
  norm: jax.Array
  inverse_hessian: jax.Array
  direction: jax.Array
  finite: jax.Array
  usable: jax.Array

  @classmethod
  def of(
    cls,
    updates: Any,
    state: DimReduceState,
    group_of_leaf: Sequence[int],
    min_curvature: jax.typing.ArrayLike,
  ) -> Self:
    shape, dtype = state.projected_gradient.shape, state.projected_gradient.dtype
    gradient = _basis.project(state.basis, updates, group_of_leaf, shape).astype(dtype)
    squares = [_tree.sum_squares(g).astype(dtype) for g in jax.tree.leaves(updates)]
    hessian, direction = _quasi_newton.directions(
      state.inverse_hessian, state.last_step, gradient, state.projected_gradient, min_curvature
    )
    finite = jnp.all(jnp.isfinite(gradient))
    usable = finite & jnp.all(jnp.isfinite(direction))
    return cls(
      gradient=gradient,
      norm=sum(squares, start=jnp.zeros([], dtype)),
      inverse_hessian=hessian,
      direction=jnp.where(usable, direction, 0),
      finite=finite,
      usable=usable,
    )

  def after(self, state: DimReduceState, step: jax.Array) -> DimReduceState:
    """The state after a step of this length, but for the momentum and the counts."""
    found = step > 0
    # A matrix whose directions overflow is of no use: it starts anew.
    old = jnp.where(self.usable | ~self.finite, state.inverse_hessian, _state.identities(state))
    change = self.gradient - state.projected_gradient
    curvature = _ratio(jnp.sum(change * state.last_step), jnp.sum(state.last_step**2))
    explained = _ratio(jnp.sum(self.gradient**2), self.norm)
    return state._replace(
      inverse_hessian=jnp.where(found, self.inverse_hessian, old),
      projected_gradient=jnp.where(found, self.gradient, state.projected_gradient),
      last_step=jnp.where(found, step * self.direction, state.last_step),
      accepted_rho=step,
      curvature=jnp.where(self.finite, curvature, state.curvature),
      explained_gradient=jnp.where(self.finite, explained, state.explained_gradient),
      rejected_count=state.rejected_count + (self.finite & ~found),
    )


def _search(
  value: jax.typing.ArrayLike,
  value_fn: Callable[[Any], jax.Array],
  params: Any,
  lifted: Sequence[jax.Array],
  quasi: _QuasiNewton,
  rule: tuple[Any, Any, Any],
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The accepted step, how many were tried, how many losses were not finite."""
  leaves, structure = jax.tree.flatten(params)

  def trial(step: jax.Array) -> jax.Array:
    moved = [
      (w.astype(x.dtype) + step.astype(x.dtype) * x[0]).astype(w.dtype)
      for w, x in zip(leaves, lifted, strict=True)
    ]
    return value_fn(jax.tree.unflatten(structure, moved))

  dtype = quasi.gradient.dtype
  start = jnp.asarray(value, dtype)
  known = jnp.isfinite(start)
  slope = jnp.sum(quasi.gradient * quasi.direction)
  step, tried, notfinite = _quasi_newton.backtrack(
    trial, start, slope, *rule, possible=quasi.usable & known
  )
  return step, tried, notfinite + ~known


def _ratio(numerator: jax.Array, denominator: jax.Array) -> jax.Array:
  """The ratio, 0 where the denominator is."""
  known = denominator > 0
  return jnp.where(known, numerator / jnp.where(known, denominator, 1), 0)


def _check_arguments(
  subspace: Any, rho: Any, sigma: Any, gamma: Any, alpha: Any, max_search: Any, min_curvature: Any
) -> None:
  if not isinstance(subspace, Subspace) and not callable(subspace):
    raise TypeError(
      "`subspace` must be a Subspace or a callable from params to one; got an object of type"
      f" {type(subspace).__name__}."
    )
  _base.check_number("rho", rho, positive=True, below=1.0)
  _base.check_number("sigma", sigma, minimum=0.0, below=1.0)
  _base.check_number("gamma", gamma, minimum=0.0, below=1.0)
  if not callable(alpha):
    _base.check_number("alpha", alpha, minimum=0.0)
  _base.check_number("min_curvature", min_curvature, minimum=0.0)
  if max_search is not None:
    _base.check_whole_number("max_search", max_search, static=True)


def _check_dtype(basis_dtype: Any) -> Any:
  if basis_dtype is None:
    return None
  dtype = jnp.dtype(basis_dtype)
  allowed = ("float32", "float64", "bfloat16", "uint16")
  if dtype.name not in allowed:
    raise ValueError(f"`basis_dtype` must be one of {', '.join(allowed)}, or None; got {dtype}.")
  return dtype

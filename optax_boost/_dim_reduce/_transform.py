r"""Quasi-Newton steps with line search in a subspace, momentum outside of it.

For params w of n numbers, gradient g and basis P (k x n, its rows orthonormal or not):

  g_k = P g                              projected gradient, k
  B <- BFGS(B, s, y), y = g_k - g_k'     g_k' that of the last step that was accepted
  d_k = -B g_k                           direction; t its step length by line search, 0 if none
  r <- gamma r + g - P' g_k              momentum of the residual, n
  w <- w + t P' d_k - alpha r
  s <- t d_k                             if t > 0

Where no t is accepted, MindSpore's search restores B and g_k'; ours sets B to the identity and s
to 0, so that the next step is one of steepest descent. With an inner optimizer I, a trial is
w + I(-t P' d_k), and the step I(alpha r - t P' d_k): I receives the sign of a gradient.

The recursion of r is linear, so r = M - P' q with M <- gamma M + g and q <- gamma q + g_k, n and k
numbers. The state keeps M and q, and the update is -alpha M + P' (t d_k + alpha q): the
basis is read twice in a step. A line search needs P' d_k by itself, and makes the second product
one of two columns.

Source: Li, Wu, Huang et al., "Low Dimensional Trajectory Hypothesis is True: DNNs can be Trained in
Tiny Subspaces", arXiv:2103.11154; steps as in MindSpore's ``boost.dim_reduce``.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import numbers
from typing import Any
from typing import NamedTuple
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost import _base
from optax_boost import _groups
from optax_boost import _protocol
from optax_boost import _tree
from optax_boost._dim_reduce import _linalg
from optax_boost._dim_reduce import _quasi_newton
from optax_boost._dim_reduce import _refresh
from optax_boost._dim_reduce import _state
from optax_boost._dim_reduce._state import DimReduceState
from optax_boost._dim_reduce._subspace import Subspace
from optax_boost._dim_reduce._subspace import check_subspace

_METHOD = _state.METHOD
# Trials of a search that starts where the last one ended: a factor of 3e-8 at the default `rho`.
_LONGEST_SEARCH = 30


def dim_reduce(
  subspace: Subspace | Callable[[Any], Subspace],
  rho: jax.typing.ArrayLike = 0.55,
  sigma: jax.typing.ArrayLike = 0.4,
  gamma: jax.typing.ArrayLike = 0.9,
  alpha: optax.ScalarOrSchedule = 1e-3,
  max_search: int | str | None = "auto",
  groups: _groups.Groups | None = None,
  *,
  inner: optax.GradientTransformation | None = None,
  refresh_every: int | None = None,
  refresh_snapshots: int | None = None,
  min_curvature: jax.typing.ArrayLike | None = None,
  basis_dtype: jax.typing.DTypeLike | None = None,
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
  params, and ``value_fn(params)``, the loss elsewhere on the same batch; ``make_train_step``
  supplies both. Gradients must be those of that loss, unscaled: with a loss scale, put
  :func:`dynamic_loss_scale` around. With a batch that is sharded over devices, both losses are
  the mean over all of it. A gradient that is not finite changes nothing but a counter, and leaves
  NaN in its own entries of the updates, for ``optax.apply_if_finite``. A loss that is not finite
  is never accepted.

  Sharded params keep the basis sharded as they are, and only the projected gradient, the
  gradient's norm and the losses cross devices in a step. For that, ``init`` must see the params
  as they are placed: outside of ``jit``, or on a mesh with Explicit axes.

  Args:
    subspace: a :class:`Subspace` whose basis fits the params, or a callable from params to one.
      Under ``optax.inject_hyperparams`` a callable must be named in `static_args`.
    rho: the factor from one trial to the next, in (0, 1). Raising it tries longer steps.
    sigma: the share of the linear decrease that a step must reach, in [0, 1). Raising it rejects
      more steps.
    gamma: the decay of the residual momentum, in [0, 1). Raising it averages more gradients.
    alpha: the learning rate outside of the subspace, a number >= 0 or a schedule of the step count.
    max_search: the search for a step length; static. ``"auto"``: as above, at most 30 trials in a
      step. A number: MindSpore's search (there 2) of so many lengths, from the full step on; where
      none is accepted, the step in the subspace is left out and :math:`B` restored, so where the
      loss is steep, nothing moves in the subspace. None: the full step is taken untried, which
      needs no forward pass and no loss.
    groups: a plan of :func:`layer_groups`; or regular expressions, searched in the leaves'
      paths, one per group of leaves; the first that matches counts, and a leaf that none matches
      is in the last group. Each group has a subspace, and a :math:`B`, of its own; they share the
      step length. The rows of the basis then hold a component of each group, orthonormal within
      it. None: one group.
    inner: an optimizer that the steps go through, as in MindSpore's
      ``DimReduce(network, optimizer, ...)``; its learning rate scales the steps. It receives
      :math:`\alpha r - t P^\top d` in place of the gradient; a trial is its answer to
      :math:`-t P^\top d`, which leaves its state as it was. With ``max_search="auto"``, :math:`t`
      is at most 1; a trial is compared with the inner optimizer's answer to zeros, its momentum
      alone, at the cost of one more forward pass; and :math:`B` learns from the distance that the
      params went, in the units of gradients, for which learning rates and Adam's moments are made.
      None: as ``optax.sgd(1.0)`` in MindSpore's search.
    refresh_every: the steps after which the subspace is fitted anew, inside the step, to the
      newest params; :math:`B` starts anew too. The compiled step then sets aside some three bases
      of scratch memory, touched by refreshes alone. None: never, or by :func:`refresh_subspace`.
    refresh_snapshots: the number of params that a refresh is fitted to, evenly spaced over the
      steps since the last one; static, above the number of components. The state holds them.
      Default: one more than components.
    min_curvature: :math:`B` is updated only where the change of the projected gradient times the
      step exceeds this. Raising it keeps :math:`B` from growing. Default: 0; with a number as
      `max_search` 1e-20, as in MindSpore.
    basis_dtype: the dtype that the basis is kept in; products are in at least float32. bfloat16
      halves the memory; CPUs expand all of such a basis before each use. Default: bfloat16 for a
      basis in bfloat16, else float32 (float64 for float64 params).

  Returns:
    An :class:`optax.GradientTransformationExtraArgs` that needs `params`. Updates have the
    params' dtype; the state is a :class:`DimReduceState`.

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
  _check_arguments(subspace, rho, sigma, gamma, alpha, max_search, min_curvature)
  if basis_dtype is not None:
    _base.check_floating_dtype("basis_dtype", basis_dtype)
  groups = ("",) if groups is None else groups
  _groups.count_groups(groups)
  if refresh_every is not None:
    _base.check_whole_number("refresh_every", refresh_every, static=True)
  if refresh_snapshots is not None:
    _base.check_whole_number("refresh_snapshots", refresh_snapshots, static=True)
    if refresh_every is None:
      raise ValueError("`refresh_snapshots` is for refreshes: give `refresh_every`, too.")
  if min_curvature is None:
    min_curvature = 0.0 if max_search == "auto" else 1e-20
  method = _DimReduce(
    subspace=subspace,
    rho=rho,
    sigma=sigma,
    gamma=gamma,
    alpha=alpha,
    max_search=_LONGEST_SEARCH if isinstance(max_search, str) else max_search,
    adaptive=max_search == "auto",
    groups=groups,
    inner=None if inner is None else _base.check_transformation("inner", inner),
    refresh_every=refresh_every,
    refresh_snapshots=refresh_snapshots,
    min_curvature=min_curvature,
    basis_dtype=basis_dtype,
  )
  return optax.GradientTransformationExtraArgs(method.init, method.update)


@dataclasses.dataclass(frozen=True)
class _DimReduce:
  """The arguments of :func:`dim_reduce`, checked, with its ``init`` and ``update``.

  Attributes:
    max_search: the most trials in a step; None: the full step is taken untried.
    adaptive: whether a search starts where the last one ended, ``max_search="auto"``.
  """

  subspace: Subspace | Callable[[Any], Subspace]
  rho: jax.typing.ArrayLike
  sigma: jax.typing.ArrayLike
  gamma: jax.typing.ArrayLike
  alpha: optax.ScalarOrSchedule
  max_search: int | None
  adaptive: bool
  groups: _groups.Groups
  inner: optax.GradientTransformationExtraArgs | None
  refresh_every: int | None
  refresh_snapshots: int | None
  min_curvature: jax.typing.ArrayLike
  basis_dtype: jax.typing.DTypeLike | None

  @property
  def rescales(self) -> bool:
    """Whether B learns from distances in the units of the gradients that `inner` receives."""
    return self.inner is not None and self.adaptive

  def init(self, params: optax.Params) -> DimReduceState:
    _tree.check_floating(params, _METHOD)
    subspace = self.subspace
    if not isinstance(subspace, Subspace):
      subspace = subspace(params)
      check_subspace("subspace", subspace)
    number, k = _groups.count_groups(self.groups), subspace.components
    rows = _state.fitting_basis(subspace, params)
    dtype = _linalg.inner_dtype(params)

    def kept(p: Any, r: Any) -> jax.Array:
      dtype = _state.basis_dtype(r, p) if self.basis_dtype is None else self.basis_dtype
      return _state.placed(r, p, dtype)

    return DimReduceState(
      basis=jax.tree.map(kept, params, rows),
      momentum=jax.tree.map(
        lambda p: jnp.zeros_like(p, dtype=_tree.accumulator_dtype(p.dtype)), params
      ),
      projected_momentum=jnp.zeros((number, k), dtype),
      inverse_hessian=jnp.tile(jnp.eye(k, dtype=dtype), (number, 1, 1)),
      projected_gradient=jnp.zeros((number, k), dtype),
      last_step=jnp.zeros((number, k), dtype),
      inner_state=self._init_inner(params),
      snapshots=self._init_snapshots(params, k),
      count=jnp.zeros([], jnp.int32),
      line_search_steps=jnp.zeros([], jnp.int32),
      accepted_rho=jnp.zeros([], dtype),
      next_rho=jnp.ones([], dtype),
      inner_scale=jnp.ones([], dtype),
      curvature=jnp.zeros([], dtype),
      explained_gradient=jnp.zeros([], dtype),
      rejected_count=jnp.zeros([], jnp.int32),
      refresh_count=jnp.zeros([], jnp.int32),
      notfinite_count=jnp.zeros([], jnp.int32),
    )

  def _init_inner(self, params: optax.Params) -> optax.OptState:
    if self.inner is None:
      return None
    state = self.inner.init(params)
    for request in (_protocol.LOSS_SCALE, _protocol.GROUP_LOSS_SCALE):
      if _protocol.find_request(state, request) is not None:
        raise ValueError(
          f"`inner` must not scale the loss, of which `{_METHOD}` takes the gradient; got a state"
          f" with a `{request}`. Put the loss scale around `{_METHOD}` instead."
        )
    return state

  def _init_snapshots(self, params: optax.Params, k: int) -> Any:
    if self.refresh_every is None:
      return None
    held = k + 1 if self.refresh_snapshots is None else self.refresh_snapshots
    if held <= k:
      raise ValueError(
        f"`refresh_snapshots` must exceed the number of components, {k}; got {held}. Of m"
        " snapshots, the deviations from their mean span m - 1 dimensions."
      )
    return jax.tree.map(
      lambda p: _state.placed(jnp.broadcast_to(p, (held, *p.shape)), p, p.dtype), params
    )

  def update(
    self,
    updates: optax.Updates,
    state: DimReduceState,
    params: optax.Params | None = None,
    *,
    value: jax.typing.ArrayLike | None = None,
    value_fn: Callable[[Any], jax.Array] | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, DimReduceState]:
    _base.require_params(params, _METHOD)
    _base.require_state(state, DimReduceState, _METHOD)
    _tree.check_same_tree(updates, params, _METHOD)
    _tree.check_floating(updates, _METHOD)
    if self.max_search is not None:
      _base.require_extra(value, "value", _METHOD, "the loss at the params, on the current batch")
      _base.require_extra(
        value_fn, "value_fn", _METHOD, "a function from params to the loss on the current batch"
      )
      value = _scalar_loss(value)
      assert value_fn is not None
      value_fn = _base.scalar_value_fn(value_fn, _METHOD)
    group_of_leaf = _groups.group_numbers(params, self.groups, _METHOD)
    if self.refresh_every is not None:
      state = _refresh.refresh_if_due(state, params, self.refresh_every, group_of_leaf)
    rate = self.alpha(state.count) if callable(self.alpha) else self.alpha
    quasi = _QuasiNewton.of(self, updates, state, group_of_leaf)
    projected_momentum = self.gamma * state.projected_momentum + quasi.gradient
    momentum = jax.tree.map(
      lambda m, g: self.gamma * m + g.astype(m.dtype), state.momentum, updates
    )

    def lift(columns: jax.Array) -> list[jax.Array]:
      leaves = zip(group_of_leaf, *map(jax.tree.leaves, (state.basis, momentum)), strict=True)
      return [_linalg.combine_rows(columns[g].astype(m.dtype), rows) for g, rows, m in leaves]

    # Extra arguments are not masked where `updates` are.
    _, inner_extra = _tree.map_gradients(lambda g: g, updates, extra_args)
    inner_extra |= {"value": value, "value_fn": value_fn}
    inner_extra = {name: extra for name, extra in inner_extra.items() if extra is not None}

    def through_inner(changes: Sequence[jax.Array]) -> tuple[Any, Any]:
      """The updates that the inner optimizer makes of changes of the params, and its state."""
      narrow = jax.tree.map(lambda p, x: x.astype(p.dtype), params, _tree_like(params, changes))
      if self.inner is None:
        return narrow, None
      pseudo_gradient = jax.tree.map(jnp.negative, narrow)
      return self.inner.update(pseudo_gradient, state.inner_state, params, **inner_extra)

    # Of the step in the subspace, and of P' q, by which M exceeds the residual momentum.
    columns = quasi.direction, rate * projected_momentum
    if self.max_search is None:
      search = quasi.untried()
      inside = lift(columns[0] + columns[1])
    else:
      lifted = lift(jnp.stack(columns, axis=1))
      search = self._search(
        quasi, [x[0] for x in lifted], value, value_fn, updates, params, through_inner
      )
      t = search.accepted
      # Not only times 0: the direction may overflow.
      inside = [jnp.where(t > 0, t.astype(x.dtype) * x[0], 0) + x[1] for x in lifted]
    moves = [
      jnp.where(quasi.finite, x - jnp.asarray(rate, m.dtype) * m, 0)
      for x, m in zip(inside, jax.tree.leaves(momentum), strict=True)
    ]
    changes, inner_state = through_inner(moves)
    changes = _show_nonfinite(quasi.finite, changes, updates)

    def kept(new: Any, old: Any) -> Any:
      return jax.tree.map(lambda n, o: jnp.where(quasi.finite, n, o), new, old)

    step = search.accepted * quasi.direction
    if self.rescales:
      # Where the params went, of which the change of the gradient tells. MindSpore takes the above.
      step = _linalg.project(state.basis, changes, group_of_leaf, step.shape).astype(step.dtype)
      step = quasi.scale * step
    return changes, quasi.after(self, state, search, step)._replace(
      momentum=kept(momentum, state.momentum),
      projected_momentum=kept(projected_momentum, state.projected_momentum),
      inner_state=kept(inner_state, state.inner_state),
      count=optax.safe_increment(state.count),
      line_search_steps=search.tried,
      notfinite_count=state.notfinite_count + ~quasi.finite + search.notfinite,
    )

  def _search(
    self,
    quasi: "_QuasiNewton",
    direction: Sequence[jax.Array],
    value: Any,
    value_fn: Any,
    updates: Any,
    params: Any,
    through_inner: Callable[[Sequence[jax.Array]], tuple[Any, Any]],
  ) -> _quasi_newton.Search:
    """The line search along a direction, a list of leaves like the params'."""
    dtype = quasi.gradient.dtype
    slope = jnp.sum(quasi.gradient * quasi.direction)
    start, offset = jnp.asarray(value, dtype), jnp.zeros([], dtype)

    def trial(length: jax.Array) -> tuple[jax.Array, jax.Array]:
      """The loss after a step of this length, and its linear change."""
      steps = [length.astype(x.dtype) * x for x in direction]
      if self.inner is None:
        leaves = zip(jax.tree.leaves(params), steps, strict=True)
        moved = [(w.astype(x.dtype) + x).astype(w.dtype) for w, x in leaves]
        return value_fn(_tree_like(params, moved)), length * slope
      changes, _ = through_inner(steps)
      change = _inner_product(updates, changes) if self.adaptive else length * slope
      return value_fn(optax.apply_updates(params, changes)), change

    if self.rescales:
      # Its momentum moves the params whether or not a step is found.
      start, offset = (x.astype(dtype) for x in trial(jnp.zeros([], dtype)))

    def relative_trial(length: jax.Array) -> tuple[jax.Array, jax.Array]:
      loss, change = trial(length)
      return loss, change - offset

    search = _quasi_newton.backtrack(
      relative_trial,
      start,
      quasi.first,
      self.rho,
      self.sigma,
      self.max_search or 0,
      possible=quasi.usable & jnp.isfinite(start) & (slope < 0 if self.adaptive else True),
      resolution=float(jnp.finfo(jnp.result_type(value)).eps) if self.adaptive else None,
    )
    search = search._replace(notfinite=search.notfinite + ~jnp.isfinite(start))
    if self.inner is not None:
      # Its learning rate bounds the steps; Adam's do not grow with the gradient.
      search = search._replace(short=jnp.asarray(False))
    return search


class _QuasiNewton(NamedTuple):
  """Gradient, curvature and direction of a step in the subspace, before its length is known.

  Attributes:
    gradient: the projected gradient, ``[G, k]``.
    norm: the squared norm of the whole gradient.
    inverse_hessian: updated, ``[G, k, k]``.
    direction: ``[G, k]``; zeros where it is not `usable`.
    first: the first length that a search tries.
    steepest: whether the directions are those of steepest descent, for want of better ones.
    scale: from distances in the subspace to the units of `direction`; 1 without `inner`.
    finite: whether the projected gradient is.
    usable: whether the direction is finite, too.
  """

  gradient: jax.Array
  norm: jax.Array
  inverse_hessian: jax.Array
  direction: jax.Array
  first: jax.Array
  steepest: jax.Array
  scale: jax.Array
  finite: jax.Array
  usable: jax.Array

  @classmethod
  def of(
    cls, method: _DimReduce, updates: Any, state: DimReduceState, group_of_leaf: Sequence[int]
  ) -> Self:
    shape, dtype = state.projected_gradient.shape, state.projected_gradient.dtype
    gradient = _linalg.project(state.basis, updates, group_of_leaf, shape).astype(dtype)
    squares = [_tree.sum_squares(g).astype(dtype) for g in jax.tree.leaves(updates)]
    last_step, last_length, scale = state.last_step, state.accepted_rho, state.inner_scale
    if method.rescales:
      # B begins as the identity, and stays of its size: directions are as long as gradients, and
      # an inner optimizer receives one unit throughout.
      identity = jnp.all(state.inverse_hessian == _state.identities(state))
      change = jnp.sum((gradient - state.projected_gradient) * last_step)
      stiffness = _ratio(change, jnp.sum(last_step**2))
      begins = identity & (stiffness > 0) & jnp.isfinite(stiffness)
      scale = jnp.where(begins, stiffness, scale)
      last_step = jnp.where(begins, stiffness * last_step, last_step)
      last_length = jnp.ones([], dtype)
    curvature = (last_step, gradient, state.projected_gradient, method.min_curvature)
    if method.adaptive:
      hessian, direction, first, steepest = _quasi_newton.descent_directions(
        state.inverse_hessian, *curvature, state.next_rho, last_length
      )
    else:
      hessian, direction = _quasi_newton.directions(state.inverse_hessian, *curvature)
      first, steepest = jnp.ones([], dtype), jnp.asarray(False)
    finite = jnp.all(jnp.isfinite(gradient))
    usable = finite & jnp.all(jnp.isfinite(direction))
    return cls(
      gradient=gradient,
      norm=sum(squares, start=jnp.zeros([], dtype)),
      inverse_hessian=hessian,
      direction=jnp.where(usable, direction, 0),
      first=first,
      steepest=steepest,
      scale=jnp.where(steepest, 1, scale),
      finite=finite,
      usable=usable,
    )

  def untried(self) -> _quasi_newton.Search:
    """The full step, without a search."""
    zero = jnp.zeros([], jnp.int32)
    full = self.usable.astype(self.gradient.dtype)
    no = jnp.asarray(False)
    return _quasi_newton.Search(full, zero, zero, full, no, no)

  def after(
    self,
    method: _DimReduce,
    state: DimReduceState,
    search: _quasi_newton.Search,
    step: jax.Array,
  ) -> DimReduceState:
    """The state after a search, but for the momentum and the counts."""
    moved = search.accepted > 0
    failed = (search.tried > 0) & ~moved if method.adaptive else jnp.asarray(False)
    # A matrix whose directions overflow, or lead nowhere, is of no use: it starts anew.
    anew = (self.finite & ~self.usable) | failed
    old = jnp.where(anew, _state.identities(state), state.inverse_hessian)
    change = self.gradient - state.projected_gradient
    curvature = _ratio(jnp.sum(change * state.last_step), jnp.sum(state.last_step**2))
    explained = _ratio(jnp.sum(self.gradient**2), self.norm)
    rejected, next_rho = self.finite & ~moved, state.next_rho
    if method.adaptive:
      rejected &= jnp.any(self.gradient != 0)
      # As far as the last step that was accepted.
      length = jnp.sqrt(jnp.sum(state.last_step**2) / jnp.sum(self.gradient**2))
      length = _quasi_newton.next_step(search, self.first, self.steepest, length, method.rho)
      next_rho = jnp.where(self.finite, length, next_rho)
    return state._replace(
      inverse_hessian=jnp.where(moved, self.inverse_hessian, old),
      projected_gradient=jnp.where(moved, self.gradient, state.projected_gradient),
      last_step=jnp.where(moved, step, jnp.where(failed, 0, state.last_step)),
      accepted_rho=search.accepted,
      next_rho=next_rho,
      inner_scale=jnp.where(moved, self.scale, jnp.where(failed, 1, state.inner_scale)),
      curvature=jnp.where(self.finite, curvature, state.curvature),
      explained_gradient=jnp.where(self.finite, explained, state.explained_gradient),
      rejected_count=state.rejected_count + rejected,
    )


def _tree_like(tree: Any, leaves: Sequence[Any]) -> Any:
  return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def _show_nonfinite(finite: jax.Array, changes: Any, gradient: Any) -> Any:
  """Zeros where the gradient is not finite, but NaN in those entries.

  ``optax.apply_if_finite`` sees them; the rest stands still.
  """
  return jax.tree.map(
    lambda u, g: jnp.where(finite, u, jnp.where(jnp.isfinite(g), 0, jnp.nan)).astype(u.dtype),
    changes,
    gradient,
  )


def _inner_product(a: Any, b: Any) -> jax.Array:
  """The inner product of two trees, in at least float32."""
  dtype = jnp.result_type(_linalg.inner_dtype(a), _linalg.inner_dtype(b))
  leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
  parts = [jnp.sum(x.astype(dtype) * y.astype(dtype)) for x, y in leaves]
  return sum(parts, start=jnp.zeros([], dtype))


def _scalar_loss(value: Any) -> Any:
  """The loss as an array, whose dtype says how exact it is."""
  number = _base.is_array(value) or isinstance(value, np.ndarray | numbers.Real)
  if not number or jnp.shape(value) != () or not jnp.isrealobj(value):
    got = f"an array of shape {jnp.shape(value)}" if number else _base.shorten(value)
    raise TypeError(
      f"`{_METHOD}` needs the extra argument `value` to be the scalar loss; got {got}."
    )
  dtype = jnp.result_type(value)
  return jnp.asarray(value, dtype if jnp.issubdtype(dtype, jnp.floating) else jnp.float32)


def _ratio(numerator: jax.Array, denominator: jax.Array) -> jax.Array:
  """The ratio, 0 where the denominator is."""
  known = denominator > 0
  return jnp.where(known, numerator / jnp.where(known, denominator, 1), 0)


def _check_arguments(
  subspace: Any, rho: Any, sigma: Any, gamma: Any, alpha: Any, max_search: Any, min_curvature: Any
) -> None:
  if isinstance(subspace, Subspace):
    check_subspace("subspace", subspace)
  elif not callable(subspace):
    raise TypeError(
      "`subspace` must be a Subspace or a callable from params to one; got"
      f" {_base.shorten(subspace)}."
    )
  _base.check_number("rho", rho, positive=True, below=1.0)
  _base.check_number("sigma", sigma, minimum=0.0, below=1.0)
  _base.check_number("gamma", gamma, minimum=0.0, below=1.0)
  _base.check_learning_rate(alpha, "alpha")
  if min_curvature is not None:
    _base.check_number("min_curvature", min_curvature, minimum=0.0)
  if isinstance(max_search, str):
    _base.check_name("max_search", max_search, ("auto",))
  elif max_search is not None:
    _base.check_whole_number("max_search", max_search, static=True)

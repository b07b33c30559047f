r"""Quasi-Newton steps with line search in a subspace, momentum steps outside of the subspace.

For params w of n numbers, gradient g and basis P (k x n, its rows orthonormal or not; P' is the
transpose of P):

  g_k = P g                              projected gradient, k
  B <- BFGS(B, s, y), y = g_k - h_k      h_k is the g_k of the last accepted step
  d_k = -B g_k                           direction, k
  t                                      step length, found by line search; 0 if none is accepted
  r <- gamma r + g - P' g_k              momentum of the residual, n
  w <- w + t P' d_k - alpha r
  s <- t d_k                             if t > 0

If `max_search` is a number, as in MindSpore, and the line search accepts no t, then B, s and h_k
keep their old values. If `max_search` is "auto" and the search accepts no t, B becomes the identity
and s becomes 0, so that the next step is one of steepest descent. With an inner optimizer I, the
line search tries w + I(-t P' d_k), and the step is I(alpha r - t P' d_k). The signs are reversed
because I expects a gradient.

The recursion of r is linear, so r = M - P' q with M <- gamma M + g [n] and q <- gamma q + g_k [k].
The state keeps M and q instead of r, and the update is -alpha M + P' (t d_k + alpha q). So a step
reads the basis twice: for P g, and to multiply by P'. With a line search, d_k and alpha q are
multiplied by P' together.

Source: Li, Wu, Huang et al., "Low Dimensional Trajectory Hypothesis is True: DNNs can be Trained in
Tiny Subspaces", arXiv:2103.11154; steps as in MindSpore's ``boost.dim_reduce``.
"""

from collections.abc import Callable
import dataclasses
import functools
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_boost._form import _finiteness, _transformation
from optax_boost._foundation import _arrays, _checks, _extra_args, _types
from optax_boost._methods._dim_reduce import _groups, _linalg, _quasi_newton, _state
from optax_boost._methods._dim_reduce._state import DimReduceState
from optax_boost._methods._dim_reduce._subspace import Subspace, check_subspace
from optax_boost._step import _nesting

_METHOD = _state.METHOD
# The most trials of a search with `max_search="auto"`. At the default `rho` the last trial's length
# is 3e-8 times the first.
_LONGEST_SEARCH = 30


def dim_reduce(
  subspace: Subspace | Callable[[_types.Params], Subspace],
  rho: jax.typing.ArrayLike = 0.55,
  sigma: jax.typing.ArrayLike = 0.4,
  gamma: jax.typing.ArrayLike = 0.9,
  alpha: optax.ScalarOrSchedule = 1e-3,
  max_search: int | str | None = "auto",
  groups: _groups.Plan = None,
  *,
  inner: optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Makes quasi-Newton steps with line search in a subspace, and momentum steps outside of it.

  .. math::
    w \leftarrow w + t P^\top d - \alpha r, \qquad d = -B P g, \qquad
    r \leftarrow \gamma r + g - P^\top P g

  for the gradient :math:`g`, the basis :math:`P` of `subspace`, a BFGS approximation :math:`B` of
  the inverse Hessian in the subspace, and a step length :math:`t` with

  .. math::
    f(w + t P^\top d) < f(w) + \sigma t \, g^\top P^\top d

  on the current batch. The line search tries lengths that shrink by the factor :math:`\rho` until
  it accepts one. The next search begins at the accepted length, or at a longer one if the first
  trial was accepted. If no length is accepted, `rejected_count` grows, and the next step is one of
  steepest descent. The slope of the loss predicts a decrease of :math:`-t \, g^\top P^\top d`. If
  this decrease is smaller than the rounding error of the loss, a length is accepted unless the loss
  grows. `dim_reduce` is a whole optimizer, to be used in place of ``optax.sgd``; its steps in the
  subspace need no learning rate.

  A step reads the basis twice, three times with `inner`, and makes one forward pass per trial.
  Memory: the basis (k copies of the params) and one copy of the params.

  Unless `max_search` is None, ``update`` needs two extra arguments, which ``make_train_step``
  passes: `value`, the loss at the params, and ``value_fn(params)``, the loss at other params on the
  same batch. If the batch is sharded over devices, the loss is the mean over the whole batch.
  Gradients must not be scaled: put :func:`dynamic_loss_scale` around `dim_reduce`. If a gradient is
  not finite, only counters and the metrics of the search change in the state. The updates are NaN
  where the gradient is not finite, so that ``optax.apply_if_finite`` skips the step. A length at
  which the loss is not finite is never accepted.

  The basis is sharded as the params are. So ``init`` must see how the params are sharded: call
  ``init`` outside of ``jit``, or on a mesh with Explicit axes. Inside ``shard_map``, each device
  must hold the whole params.

  Args:
    subspace: a :class:`Subspace` whose basis fits the params, or a function that returns one for
      given params. Under ``optax.inject_hyperparams`` a function must be named in `static_args`.
    rho: the factor from one trial to the next, in (0, 1). Raising it tries longer steps.
    sigma: the share of the predicted decrease that a step must reach, in [0, 1). Raising it rejects
      more steps.
    gamma: the decay of the residual momentum, in [0, 1). Raising it averages more gradients.
    alpha: the learning rate outside of the subspace, a number >= 0 or a schedule of the step count.
    max_search: how the step length is searched; static. ``"auto"``: as above, with at most 30
      trials in a step. A number: tries at most this many lengths (2 in MindSpore), the length 1
      first. If no length is accepted, there is no step in the subspace, and :math:`B` is restored.
      None: always makes the step of length 1, which needs no loss.
    groups: which leaves share a subspace and a :math:`B`; all groups share the step length. Pass
      one of: the result of :func:`layer_groups`; patterns (see :func:`path_mask`), one per group;
      the result of :func:`layer_axes`; None, for one group. A leaf that two patterns match is an
      error; a leaf that no pattern matches is in the last group. With :func:`layer_axes`, layer i
      of all leaves is group i, and leaves that stack no layers are the last group. The rows of the
      basis must be orthonormal within each group, as ``fit_subspace(..., groups=groups)`` makes
      them.
    inner: an optimizer that turns the steps into updates, as in MindSpore's
      ``DimReduce(network, optimizer, ...)``; its learning rate scales the steps. In place of the
      gradient, `inner` gets :math:`\alpha r - t P^\top d`, and in a trial :math:`-t P^\top d`; its
      state after a trial is discarded. ``max_search="auto"`` differs in three ways with `inner`:
      an accepted :math:`t` does not grow above 1 in the next search; :math:`B` learns from the
      distance that the params moved; and a trial's loss is compared with the loss after the updates
      that `inner` returns for a zero gradient, which costs one more forward pass. None: adds the
      steps to the params, as ``optax.sgd(1.0)`` does in MindSpore's search.

  Returns:
    An :class:`optax.GradientTransformationExtraArgs` that needs `params`. Updates have the
    params' dtype.

  Raises:
    ValueError: in ``init``: the subspace does not fit the params; in ``update``: an extra argument
      is missing.

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
    Inside ``optax.masked`` or ``optax.partition`` only the unmasked leaves of the basis are used,
    and ``value_fn`` is called with the masked params. If ``vmap`` runs several trainings, each of
    them gets a copy of the basis, unless `out_axes` of the mapped ``init`` is None for the basis.
  """
  method = _DimReduce(subspace, rho, sigma, gamma, alpha, max_search, groups, inner)
  return _transformation.transformation(
    _METHOD, DimReduceState, method.init, method.step, needs_params=True
  )


@dataclasses.dataclass
class _DimReduce:
  """The functions `init` and `step` of :func:`dim_reduce`; the fields are its arguments."""

  subspace: Subspace | Callable[[_types.Params], Subspace]
  rho: jax.typing.ArrayLike
  sigma: jax.typing.ArrayLike
  gamma: jax.typing.ArrayLike
  alpha: optax.ScalarOrSchedule
  max_search: int | str | None
  groups: _groups.Plan
  inner: optax.GradientTransformation | None

  def __post_init__(self) -> None:
    if not callable(self.subspace):
      check_subspace(self.subspace)
    _groups.check_groups(self.groups)
    _checks.check_number("rho", self.rho, above=0.0, below=1.0)
    _checks.check_number("sigma", self.sigma, minimum=0.0, below=1.0)
    _checks.check_number("gamma", self.gamma, minimum=0.0, below=1.0)
    _checks.check_learning_rate(self.alpha, "alpha")
    if isinstance(self.max_search, str):
      _checks.check_name("max_search", self.max_search, ("auto",))
    elif self.max_search is not None:
      _checks.check_whole_number("max_search", self.max_search, static=True)
    if self.inner is not None:
      self.inner = _checks.check_transformation("inner", self.inner)

  @property
  def adaptive(self) -> bool:
    """Returns whether `max_search` is "auto", so that a search begins where the last one ended."""
    return isinstance(self.max_search, str)

  @property
  def rescales(self) -> bool:
    """Returns whether B is scaled so that the direction -B g_k is about as long as g_k.

    This is so if `max_search` is "auto" and there is an `inner` optimizer, which takes the
    direction for a gradient.
    """
    return self.inner is not None and self.adaptive

  def init(self, params: optax.Params) -> DimReduceState:
    subspace = self.subspace
    if not isinstance(subspace, Subspace):
      subspace = subspace(params)
      check_subspace(subspace)
    groups = _groups.find_groups(params, self.groups, _METHOD)
    basis = _state.basis_like(subspace, params)
    _state.warn_of_long_rows(basis, groups)
    k = subspace.components
    dtype = _arrays.widest_dtype(params)
    scalar, vectors = functools.partial(jnp.zeros, ()), (groups.number, k)
    return DimReduceState(
      basis=basis,
      momentum=_arrays.zeros_like_wide(params),
      projected_momentum=jnp.zeros(vectors, dtype),
      inverse_hessian=jnp.tile(jnp.eye(k, dtype=dtype), (groups.number, 1, 1)),
      projected_gradient=jnp.zeros(vectors, dtype),
      last_step=jnp.zeros(vectors, dtype),
      inner_state=self._init_inner(params),
      count=scalar(jnp.int32),
      line_search_steps=scalar(jnp.int32),
      accepted_rho=scalar(dtype),
      next_rho=jnp.ones([], dtype),
      inner_scale=jnp.ones([], dtype),
      curvature=scalar(dtype),
      explained_gradient=scalar(dtype),
      rejected_count=scalar(jnp.int32),
      refresh_count=scalar(jnp.int32),
      notfinite_count=scalar(jnp.int32),
    )

  def _init_inner(self, params: optax.Params) -> optax.OptState:
    if self.inner is None:
      return None
    state = self.inner.init(params)
    _nesting.refuse_steps(_METHOD, state)
    return state

  def step(
    self,
    updates: optax.Updates,
    state: DimReduceState,
    params: optax.Params,
    *,
    value: jax.typing.ArrayLike | None = None,
    value_fn: _types.Closure | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, DimReduceState]:
    if self.max_search is not None:
      value, value_fn = _checked_loss(value, value_fn)
    # `optax.masked` hides leaves of `updates`. `map_gradients` hides the same leaves of the
    # gradients among the extra arguments.
    _, extra = _extra_args.map_gradients(lambda g: g, updates, extra_args)
    extra |= {"value": value, "value_fn": value_fn}
    extra = {name: argument for name, argument in extra.items() if argument is not None}
    groups = _groups.find_groups(params, self.groups, _METHOD)

    def through_inner(changes: optax.Updates) -> tuple[optax.Updates, optax.OptState]:
      """Returns the updates and the new state of `inner` for the gradient -changes."""
      narrow = jax.tree.map(lambda p, x: x.astype(p.dtype), params, changes)
      if self.inner is None:
        return narrow, None
      pseudo_gradient = jax.tree.map(jnp.negative, narrow)
      return self.inner.update(pseudo_gradient, state.inner_state, params, **extra)

    def lift(columns: jax.Array) -> optax.Updates:
      lifted = jax.tree.leaves(_linalg.combine(columns, state.basis, groups))
      return jax.tree.unflatten(jax.tree.structure(state.momentum), lifted)

    alpha = self.alpha(state.count) if callable(self.alpha) else self.alpha
    g_k = _project(state, updates, groups)
    finite = jnp.all(_finiteness.finite_entries(g_k))
    quasi = _quasi_newton.find_direction(state, g_k, self.adaptive, self.rescales)
    q = self.gamma * state.projected_momentum + g_k
    # XLA 15: `where` selects the momentum before its use. Otherwise XLA for CPUs computes the new
    # momentum twice, from a copy of the old one.
    momentum = jax.tree.map(
      lambda m, g: jnp.where(finite, self.gamma * m + g.astype(m.dtype), m),
      *(state.momentum, updates),
    )
    # The momentum step is -alpha (M - P' q), but `moves` subtracts only alpha M. Therefore
    # alpha P' q is added to the step in the subspace: `inside` is P' (t d_k + alpha q).
    columns = quasi.direction, alpha * q
    if self.max_search is None:
      search = _quasi_newton.Search.begin(quasi.usable.astype(g_k.dtype))
      search = search._replace(accepted=search.step)
      inside = lift(columns[0] + columns[1])
    else:
      lifted = lift(jnp.stack(columns, axis=1))
      search = self._search(quasi, updates, params, lifted, extra, through_inner)
      t = search.accepted
      # `where`, since 0 times a direction that overflowed to infinity is NaN.
      inside = jax.tree.map(lambda x: jnp.where(t > 0, t.astype(x.dtype) * x[0], 0) + x[1], lifted)
    moves = jax.tree.map(
      lambda x, m: jnp.where(finite, x - jnp.asarray(alpha, m.dtype) * m, 0), inside, momentum
    )
    changes, inner_state = through_inner(moves)
    changes = _show_nonfinite(finite, changes, updates)

    step = search.accepted * quasi.direction
    if self.rescales:
      # B must learn from the distance that the params moved, which `inner` decides.
      step = quasi.scale * _project(state, changes, groups)
    learned: dict[str, _types.OptState] = self._learn(
      state, quasi, search, step, _arrays.sum_squares_of_tree(updates)
    )
    learned |= {"projected_momentum": q, "inner_state": inner_state}
    before = {name: getattr(state, name) for name in learned}
    learned = jax.tree.map(lambda new, old: jnp.where(finite, new, old), learned, before)
    return changes, state._replace(
      **learned,
      momentum=momentum,
      count=optax.safe_increment(state.count),
      line_search_steps=search.tried,
      accepted_rho=search.accepted,
      notfinite_count=_arrays.increment_if(~finite, state.notfinite_count) + search.notfinite,
    )

  def _search(
    self,
    quasi: _quasi_newton.Direction,
    updates: optax.Updates,
    params: optax.Params,
    lifted: optax.Updates,
    extra: _types.ExtraArgs,
    through_inner: Callable[[optax.Updates], tuple[optax.Updates, optax.OptState]],
  ) -> _quasi_newton.Search:
    """Runs the line search along P' d_k; returns its last state.

    `quasi` has the direction d_k, and the first row of the stacked tree `lifted` is P' d_k.
    `updates` is the gradient at `params`. `extra` has the loss `value` and the function `value_fn`.
    ``through_inner(step)`` returns the updates that `inner` makes from a step.
    """
    value, dtype, possible = extra["value"], quasi.gradient.dtype, quasi.usable
    start, offset = value.astype(dtype), jnp.zeros([], dtype)
    slope = jnp.sum(quasi.gradient * quasi.direction)

    def trial(length: jax.Array) -> tuple[jax.Array, jax.Array]:
      """Returns the loss after a step of this length, and the change that the slope predicts."""
      step = jax.tree.map(lambda x: length.astype(x.dtype) * x[0], lifted)
      changes, _ = through_inner(step)
      change = _inner_product(updates, changes) if self.rescales else length * slope
      return extra["value_fn"](optax.apply_updates(params, changes)), change - offset

    if self.rescales:
      # The momentum of `inner` moves the params even by a step of length 0. So trials are compared
      # with the loss after a step of length 0, which is `start`.
      start, offset = trial(offset)
      start, offset = start.astype(dtype), offset.astype(dtype)
    if self.adaptive:
      possible &= slope < 0
    search = _quasi_newton.backtrack(
      trial,
      start,
      quasi.first,
      self.rho,
      self.sigma,
      _LONGEST_SEARCH if isinstance(self.max_search, str) else self.max_search or 0,
      possible=possible & jnp.isfinite(start),
      resolution=float(jnp.finfo(value.dtype).eps) if self.adaptive else None,
    )
    search = search._replace(notfinite=_arrays.increment_if(~jnp.isfinite(start), search.notfinite))
    # If `short` is True, an accepted length may grow above 1 in the next search. With `inner` it
    # may not, since the learning rate of `inner` bounds the steps. A greater length need not give a
    # longer step: the steps of Adam, for example, don't grow with the gradient that Adam gets.
    return search if self.inner is None else search._replace(short=jnp.asarray(False))

  def _learn(
    self,
    state: DimReduceState,
    quasi: _quasi_newton.Direction,
    search: _quasi_newton.Search,
    step: jax.Array,
    squares: jax.Array,
  ) -> dict[str, jax.Array]:
    """Returns the new values of the state's fields that depend on the line search, by name.

    `quasi` is the direction of this step, and `search` the finished line search along it. `step` is
    the step s in the subspace, [G, k]. `squares` is the squared norm of the whole gradient.
    """
    moved = search.accepted > 0
    failed = (search.tried > 0) & ~moved if self.adaptive else jnp.asarray(False)
    # B becomes the identity if its direction overflowed, or if no step along it was accepted.
    restarts = ~quasi.usable | failed
    old_or_identity = jnp.where(
      restarts, _linalg.identities(state.inverse_hessian), state.inverse_hessian
    )
    squared_step, squared_gradient = jnp.sum(state.last_step**2), jnp.sum(quasi.gradient**2)
    change = quasi.gradient - state.projected_gradient
    rejected, next_rho = ~moved, state.next_rho
    if self.adaptive:
      rejected &= jnp.any(quasi.gradient != 0)
      # With this length, a step along the gradient is as long as the last accepted step.
      length = jnp.sqrt(squared_step / squared_gradient)
      next_rho = _quasi_newton.next_step(search, quasi.first, quasi.steepest, length, self.rho)
    return {
      "inverse_hessian": jnp.where(moved, quasi.inverse_hessian, old_or_identity),
      "projected_gradient": jnp.where(moved, quasi.gradient, state.projected_gradient),
      "last_step": jnp.where(moved, step, jnp.where(failed, 0, state.last_step)),
      "next_rho": next_rho,
      "inner_scale": jnp.where(moved, quasi.scale, jnp.where(failed, 1, state.inner_scale)),
      "curvature": _quasi_newton.ratio(jnp.sum(change * state.last_step), squared_step),
      "explained_gradient": _quasi_newton.ratio(squared_gradient, squares.astype(change.dtype)),
      "rejected_count": _arrays.increment_if(rejected, state.rejected_count),
    }


def _project(state: DimReduceState, g: optax.Updates, groups: _groups.SubspaceGroups) -> jax.Array:
  """Returns the projection P g of the gradient `g` in each of the G groups, [G, k]."""
  if not jax.tree.leaves(g):
    return jnp.zeros_like(state.projected_gradient)
  projected = _linalg.products(state.basis, g, groups)
  return projected.astype(state.projected_gradient.dtype)


def _checked_loss(
  value: jax.typing.ArrayLike | None, value_fn: _types.Closure | None
) -> tuple[_types.FloatScalar, _types.Closure]:
  """Returns the loss `value` as an array, and a `value_fn` that returns its loss as an array.

  Raises an error if an argument is missing or is not a loss.
  """
  purpose = "the loss at the params, on the current batch"
  loss: Any = _extra_args.require_extra(value, "value", _METHOD, purpose)
  purpose = "a function from params to the loss on the current batch"
  loss_fn = _extra_args.require_extra(value_fn, "value_fn", _METHOD, purpose)
  _checks.check_callable("value_fn", loss_fn, "value_fn(params)")
  needs_value = f"`{_METHOD}` needs the extra argument `value` to be the scalar loss; got"
  returned = f"`{_METHOD}` needs a `value_fn(params)` that returns the scalar loss; it returned"
  return _scalar(loss, needs_value), lambda params: _scalar(loss_fn(params), returned)


def _scalar(value: jax.typing.ArrayLike, requirement: str) -> _types.FloatScalar:
  """Returns a loss as a floating-point array; raises TypeError if it is not a real scalar.

  The error's message begins with `requirement`.
  """
  number = _checks.is_any_array(value) or isinstance(value, numbers.Real)
  if not number or jnp.shape(value) != () or not jnp.isrealobj(value):
    got = f"an array of shape {jnp.shape(value)}" if number else _checks.shorten(value)
    raise TypeError(f"{requirement} {got}.")
  dtype = jnp.result_type(value)
  return jnp.asarray(value, dtype if jnp.issubdtype(dtype, jnp.floating) else jnp.float32)


def _show_nonfinite(
  finite: _types.BoolScalar, changes: optax.Updates, gradient: optax.Updates
) -> optax.Updates:
  """Returns the updates `changes`; if `finite` is False, returns NaN and zeros instead of them.

  An entry is NaN if this entry of `gradient` is not finite, and zero otherwise.
  """

  def show(u: jax.Array, g: jax.Array) -> jax.Array:
    zero_or_nan = jnp.where(_finiteness.finite_entries(g), 0, jnp.nan)
    return jnp.where(finite, u, zero_or_nan).astype(u.dtype)

  return jax.tree.map(show, changes, gradient)


def _inner_product(a: optax.Updates, b: optax.Updates) -> _types.FloatScalar:
  """Returns the inner product of two trees, in at least float32."""
  dtype = _arrays.widest_dtype((a, b))
  # `optax.tree.vdot` is not used, since it flattens each leaf, even if the leaf is sharded.
  by_leaf = jax.tree.map(lambda x, y: jnp.sum(x.astype(dtype) * y.astype(dtype)), a, b)
  return jax.tree.reduce(jnp.add, by_leaf, jnp.zeros([], dtype))

"""The steps of dim_reduce: direction, line search, and what is left to the momentum."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_boost import _arrays
from optax_boost import _base
from optax_boost import _in_place
from optax_boost import _masking
from optax_boost import _protocol
from optax_boost import _tree
from optax_boost._dim_reduce import _layers
from optax_boost._dim_reduce import _linalg
from optax_boost._dim_reduce import _quasi_newton
from optax_boost._dim_reduce import _state
from optax_boost._dim_reduce._state import DimReduceState
from optax_boost._dim_reduce._subspace import Subspace
from optax_boost._dim_reduce._subspace import check_subspace

_METHOD = _state.METHOD
# Trials of a search that starts where the last one ended: a factor of 3e-8 at the default `rho`.
_LONGEST_SEARCH = 30


class _Direction(NamedTuple):
  """Gradient, curvature and direction of a step in the subspace, before its length is known."""

  gradient: jax.Array  # projected, [G, k]
  inverse_hessian: jax.Array  # updated, [G, k, k]
  direction: jax.Array  # [G, k]; zeros where it is not `usable`
  first: jax.Array  # the first length that a search tries
  steepest: jax.Array  # whether it falls back to steepest descent
  scale: jax.Array  # from distances in the subspace to the units of `direction`; 1 without `inner`
  finite: jax.Array  # whether the gradient is
  usable: jax.Array  # whether the direction is finite, too


@dataclasses.dataclass
class Transform:
  """The transformation; its fields are the arguments of :func:`dim_reduce`."""

  subspace: Subspace | Callable[[Any], Subspace]
  rho: jax.typing.ArrayLike
  sigma: jax.typing.ArrayLike
  gamma: jax.typing.ArrayLike
  alpha: optax.ScalarOrSchedule
  max_search: int | str | None
  groups: _layers.Groups
  inner: optax.GradientTransformation | None
  min_curvature: jax.typing.ArrayLike | None

  def __post_init__(self) -> None:
    if isinstance(self.subspace, Subspace):
      check_subspace(self.subspace)
    elif not callable(self.subspace):
      raise TypeError(
        "`subspace` must be a Subspace or a callable from params to one; got"
        f" {_base.shorten(self.subspace)}."
      )
    _base.check_number("rho", self.rho, positive=True, below=1.0)
    _base.check_number("sigma", self.sigma, minimum=0.0, below=1.0)
    _base.check_number("gamma", self.gamma, minimum=0.0, below=1.0)
    _base.check_learning_rate(self.alpha, "alpha")
    if isinstance(self.max_search, str):
      if self.max_search != "auto":
        raise ValueError(
          f"`max_search` must be 'auto', a whole number or None; got {self.max_search!r}."
        )
    elif self.max_search is not None:
      _base.check_whole_number("max_search", self.max_search, static=True)
    if self.inner is not None:
      self.inner = _base.check_transformation("inner", self.inner)
    if self.min_curvature is None:
      self.min_curvature = 0.0 if self.adaptive else 1e-20
    _base.check_number("min_curvature", self.min_curvature, minimum=0.0)

  @property
  def adaptive(self) -> bool:
    """Whether a search starts where the last one ended."""
    return isinstance(self.max_search, str)

  @property
  def rescales(self) -> bool:
    """Whether B learns from distances in the units of the gradients that `inner` receives."""
    return self.inner is not None and self.adaptive

  def init(self, params: optax.Params) -> DimReduceState:
    _tree.check_floating(params, _METHOD)
    subspace = self.subspace
    if not isinstance(subspace, Subspace):
      subspace = subspace(params)
      check_subspace(subspace)
    of_leaves, number = _layers.find_groups(params, self.groups, _METHOD)
    basis = _state.basis_like(subspace, params)
    _state.warn_of_long_rows(basis, of_leaves, number)
    k = subspace.components
    dtype = _arrays.widest_dtype(params)
    scalar, vectors = functools.partial(jnp.zeros, ()), (number, k)
    return DimReduceState(
      basis=basis,
      momentum=_arrays.zeros_like_wide(params),
      projected_momentum=jnp.zeros(vectors, dtype),
      inverse_hessian=jnp.tile(jnp.eye(k, dtype=dtype), (number, 1, 1)),
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
    if _protocol.requested(state, _protocol.LOSS_SCALE) is not None:
      raise ValueError(
        f"`inner` must not scale the loss, of which `{_METHOD}` takes the gradient; got a state"
        f" with a `{_protocol.LOSS_SCALE}`. Put the loss scale around `{_METHOD}` instead."
      )
    return state

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
    _tree.check_update(_METHOD, updates, state, DimReduceState, params, needs_params=True)
    if self.max_search is not None:
      value, value_fn = _checked_loss(value, value_fn)
    groups, _ = _layers.find_groups(params, self.groups, _METHOD)
    rate = self.alpha(state.count) if callable(self.alpha) else self.alpha
    quasi = self._direction(updates, state, groups)
    projected_momentum = self.gamma * state.projected_momentum + quasi.gradient
    # Selected before it is used: else XLA on CPUs computes it twice, from a copy of the old one.
    momentum = jax.tree.map(
      lambda m, g: jnp.where(quasi.finite, self.gamma * m + g.astype(m.dtype), m),
      *(state.momentum, updates),
    )

    # Extra arguments are not masked where `updates` are.
    _, extra = _masking.map_gradients(lambda g: g, updates, extra_args)
    extra |= {"value": value, "value_fn": value_fn}
    extra = {name: argument for name, argument in extra.items() if argument is not None}

    def through_inner(changes: Any) -> tuple[Any, Any]:
      """The updates that the inner optimizer makes of changes of the params, and its state."""
      narrow = jax.tree.map(lambda p, x: x.astype(p.dtype), params, changes)
      if self.inner is None:
        return narrow, None
      pseudo_gradient = jax.tree.map(jnp.negative, narrow)
      return self.inner.update(pseudo_gradient, state.inner_state, params, **extra)

    def lift(columns: jax.Array) -> Any:
      return _tree.map_leaves(
        lambda m, rows, of_leaf: _linalg.lift(columns.astype(m.dtype), rows, of_leaf),
        *(momentum, state.basis, groups),
      )

    # Of the step in the subspace, and of P' q, by which M exceeds the residual momentum.
    columns = quasi.direction, rate * projected_momentum
    if self.max_search is None:
      search = _quasi_newton.Search.begin(quasi.usable.astype(quasi.gradient.dtype))
      search = search._replace(accepted=search.step)
      inside = lift(columns[0] + columns[1])
    else:
      lifted = lift(jnp.stack(columns, axis=1))

      def trial(length: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The loss after a step of this length, and its linear change."""
        step = jax.tree.map(lambda x: length.astype(x.dtype) * x[0], lifted)
        changes, _ = through_inner(step)
        if self.rescales:
          change = _inner_product(updates, changes)
        else:
          change = length * jnp.sum(quasi.gradient * quasi.direction)
        return extra["value_fn"](optax.apply_updates(params, changes)), change

      search = self._search(quasi, value, trial)
      t = search.accepted
      # Not only times 0: the direction may overflow.
      inside = jax.tree.map(lambda x: jnp.where(t > 0, t.astype(x.dtype) * x[0], 0) + x[1], lifted)
    moves = jax.tree.map(
      lambda x, m: jnp.where(quasi.finite, x - jnp.asarray(rate, m.dtype) * m, 0), inside, momentum
    )
    changes, inner_state = through_inner(moves)
    changes = _show_nonfinite(quasi.finite, changes, updates)

    step = search.accepted * quasi.direction
    if self.rescales:
      # Where the params went, of which the change of the gradient tells. MindSpore takes the above.
      step = _linalg.project(state.basis, changes, groups, step.shape).astype(step.dtype)
      step = quasi.scale * step
    projected_momentum, inner_state = jax.tree.map(
      lambda new, old: jnp.where(quasi.finite, new, old),
      (projected_momentum, inner_state),
      (state.projected_momentum, state.inner_state),
    )
    return changes, self._after(state, quasi, updates, search, step)._replace(
      momentum=momentum,
      projected_momentum=projected_momentum,
      inner_state=inner_state,
      count=optax.safe_increment(state.count),
      line_search_steps=search.tried,
      notfinite_count=_arrays.increment_if(~quasi.finite, state.notfinite_count) + search.notfinite,
    )

  def _direction(
    self, updates: optax.Updates, state: DimReduceState, groups: tuple[_layers.LeafGroups, ...]
  ) -> _Direction:
    shape, dtype = state.projected_gradient.shape, state.projected_gradient.dtype
    gradient = _linalg.project(state.basis, updates, groups, shape).astype(dtype)
    last_step, last_length, scale = state.last_step, state.accepted_rho, state.inner_scale
    if self.rescales:
      # B begins as the identity, and stays of its size: directions are as long as gradients, and
      # an inner optimizer receives one unit throughout.
      identity = jnp.all(state.inverse_hessian == _state.identities(state))
      change = jnp.sum((gradient - state.projected_gradient) * last_step)
      stiffness = _ratio(change, jnp.sum(last_step**2))
      begins = identity & (stiffness > 0) & jnp.isfinite(stiffness)
      scale = jnp.where(begins, stiffness, scale)
      last_step = jnp.where(begins, stiffness * last_step, last_step)
      last_length = jnp.ones([], dtype)
    hessian, direction, first, steepest = _quasi_newton.directions(
      *(state.inverse_hessian, last_step, gradient, state.projected_gradient, self.min_curvature),
      *(state.next_rho, last_length),
      adaptive=self.adaptive,
    )
    finite = jnp.all(jnp.isfinite(gradient))
    usable = finite & jnp.all(jnp.isfinite(direction))
    direction, scale = jnp.where(usable, direction, 0), jnp.where(steepest, 1, scale)
    return _Direction(gradient, hessian, direction, first, steepest, scale, finite, usable)

  def _search(
    self, quasi: _Direction, value: Any, trial: Callable[[jax.Array], tuple[jax.Array, jax.Array]]
  ) -> _quasi_newton.Search:
    """The line search along the direction, from the loss `value`."""
    dtype, possible = quasi.gradient.dtype, quasi.usable
    start, offset = value.astype(dtype), jnp.zeros([], dtype)
    if self.rescales:
      # The inner momentum moves the params whether or not a step is found.
      start, offset = (x.astype(dtype) for x in trial(offset))
    if self.adaptive:
      possible &= jnp.sum(quasi.gradient * quasi.direction) < 0

    def relative_trial(length: jax.Array) -> tuple[jax.Array, jax.Array]:
      loss, change = trial(length)
      return loss, change - offset

    search = _quasi_newton.backtrack(
      relative_trial,
      start,
      quasi.first,
      self.rho,
      self.sigma,
      _LONGEST_SEARCH if isinstance(self.max_search, str) else self.max_search or 0,
      possible=possible & jnp.isfinite(start),
      resolution=float(jnp.finfo(value.dtype).eps) if self.adaptive else None,
    )
    search = search._replace(notfinite=_arrays.increment_if(~jnp.isfinite(start), search.notfinite))
    # The inner learning rate bounds the steps; Adam's do not grow with the gradient.
    return search if self.inner is None else search._replace(short=jnp.asarray(False))

  def _after(
    self,
    state: DimReduceState,
    quasi: _Direction,
    updates: optax.Updates,
    search: _quasi_newton.Search,
    step: jax.Array,
  ) -> DimReduceState:
    """The state after a search, but for the momentum and the counts."""
    moved = search.accepted > 0
    failed = (search.tried > 0) & ~moved if self.adaptive else jnp.asarray(False)
    # A matrix whose directions overflow, or lead nowhere, is useless: it starts over.
    restarts = (quasi.finite & ~quasi.usable) | failed
    old = jnp.where(restarts, _state.identities(state), state.inverse_hessian)
    squared_step, squared_gradient = jnp.sum(state.last_step**2), jnp.sum(quasi.gradient**2)
    change = quasi.gradient - state.projected_gradient
    curvature = _ratio(jnp.sum(change * state.last_step), squared_step)
    squares = _in_place.sum_squares(updates)
    explained = _ratio(squared_gradient, squares.astype(change.dtype))
    rejected, next_rho = quasi.finite & ~moved, state.next_rho
    if self.adaptive:
      rejected &= jnp.any(quasi.gradient != 0)
      # As far as the last step that was accepted.
      length = jnp.sqrt(squared_step / squared_gradient)
      length = _quasi_newton.next_step(search, quasi.first, quasi.steepest, length, self.rho)
      next_rho = jnp.where(quasi.finite, length, next_rho)
    return state._replace(
      inverse_hessian=jnp.where(moved, quasi.inverse_hessian, old),
      projected_gradient=jnp.where(moved, quasi.gradient, state.projected_gradient),
      last_step=jnp.where(moved, step, jnp.where(failed, 0, state.last_step)),
      accepted_rho=search.accepted,
      next_rho=next_rho,
      inner_scale=jnp.where(moved, quasi.scale, jnp.where(failed, 1, state.inner_scale)),
      curvature=jnp.where(quasi.finite, curvature, state.curvature),
      explained_gradient=jnp.where(quasi.finite, explained, state.explained_gradient),
      rejected_count=_arrays.increment_if(rejected, state.rejected_count),
    )


def _checked_loss(value: Any, value_fn: Any) -> tuple[jax.Array, Callable[..., jax.Array]]:
  """The loss at the params and elsewhere, which a line search needs."""
  _base.require_extra(value, "value", _METHOD, "the loss at the params, on the current batch")
  purpose = "a function from params to the loss on the current batch"
  _base.require_extra(value_fn, "value_fn", _METHOD, purpose)
  requirement = f"`{_METHOD}` needs the extra argument `value` to be the scalar loss; got"
  return _base.scalar_loss(value, requirement), _base.scalar_value_fn(value_fn, _METHOD)


def _show_nonfinite(finite: jax.Array, changes: Any, gradient: Any) -> Any:
  """Zeros if the gradient is not finite, but NaN in its bad entries.

  ``optax.apply_if_finite`` sees them; other params are not updated.
  """
  return jax.tree.map(
    lambda u, g: jnp.where(finite, u, jnp.where(jnp.isfinite(g), 0, jnp.nan)).astype(u.dtype),
    changes,
    gradient,
  )


def _inner_product(a: Any, b: Any) -> jax.Array:
  """The inner product of two trees, in at least float32."""
  dtype = _arrays.widest_dtype((a, b))
  parts = jax.tree.map(lambda x, y: jnp.sum(x.astype(dtype) * y.astype(dtype)), a, b)
  return jax.tree.reduce(jnp.add, parts, jnp.zeros([], dtype))


def _ratio(numerator: jax.Array, denominator: jax.Array) -> jax.Array:
  """The ratio, 0 where the denominator is."""
  known = denominator > 0
  return jnp.where(known, numerator / jnp.where(known, denominator, 1), 0)

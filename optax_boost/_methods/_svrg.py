r"""SVRG and alpha-SVRG: variance-reduced gradients from a snapshot and its full gradient.

For params w, a snapshot s of earlier params, and a batch B:

  v = g - a (h - mu)

  g    gradient of the loss on B at w
  h    gradient of the loss on B at s
  mu   full gradient at s: the mean of the gradients of all examples
  a    coefficient, scalar: 1 is SVRG, 0 leaves g unchanged
  v    corrected gradient; its mean over batches is equal to the mean of g

While s is near w, h varies with the batch as g does, so g - h varies less than g.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_boost._form import _finiteness, _protocol, _transformation
from optax_boost._foundation import (
  _arrays,
  _checks,
  _conditionals,
  _extra_args,
  _masks,
  _tree_checks,
  _trees,
  _types,
)

_METHOD = "svrg"


@_protocol.declares(metrics=("variance_ratio", "svrg/notfinite_count"), requests=("full_gradient",))
class SvrgState(NamedTuple):
  """State of :func:`svrg`.

  Attributes:
    snapshot: a copy of the params at the last refresh, or at ``init``, sharded like them.
    full_gradient: the full gradient at the snapshot, in float32 (float64 for float64); zeros before
      the first refresh.
    count: scalar int32, the number of steps made.
    refresh_count: scalar int32, the number of refreshes; while it is 0, gradients pass unchanged.
    squared_deviations: float vector of two: the sums of ``|v - mu|^2`` and of ``|g - mu|^2`` over
      the steps since the last refresh.
    variance_ratio: scalar float, the first sum of `squared_deviations` divided by the second, an
      estimate of the variance of the corrected gradient divided by the variance of the plain
      gradient. At 0 the correction is perfect, above 1 it does harm.
    notfinite_count: scalar int32, the number of refreshes that were not made, plus the number of
      steps that left entries uncorrected, because numbers were not finite.
  """

  snapshot: optax.Params
  full_gradient: optax.Updates
  count: _types.IntScalar  # type: ignore[assignment]  # hides the method of tuples
  refresh_count: _types.IntScalar
  squared_deviations: jax.Array
  variance_ratio: _types.FloatScalar
  notfinite_count: _types.IntScalar

  def with_full_gradient(self, params: optax.Params, full_gradient: optax.Updates) -> "SvrgState":
    """Returns the state after a refresh at `params`, where the full gradient is `full_gradient`."""
    # Inside `optax.masked` the state lacks the leaves that the mask hides.
    params = _masked_like(self.snapshot, params, "params")
    full_gradient = _masked_like(self.snapshot, full_gradient, "full_gradient")
    _check_state(self, params, "refresh_svrg")
    return _renew(self, params, full_gradient)


def _correct(
  g: optax.Updates, h: optax.Updates, a: _types.FloatScalar, state: SvrgState
) -> tuple[optax.Updates, SvrgState]:
  """Returns the corrected gradients v = g - a (h - mu), and the state after this step."""

  def corrected(g: jax.Array, h: jax.Array, mu: jax.Array) -> jax.Array:
    return g.astype(mu.dtype) - a.astype(mu.dtype) * (h.astype(mu.dtype) - mu)

  def squares(estimate: Callable[..., jax.Array]) -> _types.FloatScalar:
    """Returns the sum of ``|estimate(g, h, mu) - mu|^2`` over all leaves."""
    sums = [jnp.zeros([], state.squared_deviations.dtype)]
    for leaves in _arrays.chunk_small_leaves(g, h, state.full_gradient):
      deviations = [estimate(g, h, mu) - mu for g, h, mu in zip(*leaves, strict=True)]
      sums.append(_arrays.sum_squares_together(deviations).astype(sums[0].dtype))
    return jnp.sum(jnp.stack(sums))

  squared = jnp.stack([squares(corrected), squares(lambda g, h, mu: g.astype(mu.dtype))])
  finite = jnp.isfinite(squared)
  total = state.squared_deviations + jnp.where(jnp.all(finite), squared, 0)
  # `where` inside of the division avoids a division by zero.
  positive = total[1] > 0
  ratio = jnp.where(positive, total[0] / jnp.where(positive, total[1], 1), state.variance_ratio)

  def corrected_if_finite(g: jax.Array, h: jax.Array, mu: jax.Array) -> jax.Array:
    v = corrected(g, h, mu)
    return jnp.where(_finiteness.finite_entries(v), v, g.astype(v.dtype)).astype(g.dtype)

  return jax.tree.map(corrected_if_finite, g, h, state.full_gradient), state._replace(
    count=optax.safe_increment(state.count),
    squared_deviations=total,
    variance_ratio=ratio,
    notfinite_count=_arrays.increment_if(finite[1] & ~finite[0], state.notfinite_count),
  )


@jax.jit
def _renew(state: SvrgState, params: optax.Params, full_gradient: optax.Updates) -> SvrgState:
  """Returns the refreshed state; if an entry is not finite, only `notfinite_count` changes."""
  good = _finiteness.all_finite((params, full_gradient))

  def new_if_good(new: jax.Array, old: jax.Array) -> jax.Array:
    return jnp.where(good, new.astype(old.dtype), old)

  return state._replace(
    snapshot=jax.tree.map(new_if_good, params, state.snapshot),
    full_gradient=jax.tree.map(new_if_good, full_gradient, state.full_gradient),
    refresh_count=_arrays.increment_if(good, state.refresh_count),
    squared_deviations=jnp.where(good, 0, state.squared_deviations),
    notfinite_count=_arrays.increment_if(~good, state.notfinite_count),
  )


def svrg(
  refresh_every: int | None, coefficient: optax.ScalarOrSchedule = 1.0
) -> optax.GradientTransformationExtraArgs:
  r"""Reduces the variance of gradients with a snapshot and its full gradient.

  .. math::
    v = \nabla f_B(w) - \alpha \left( \nabla f_B(s) - \mu \right), \qquad
    \mu = \frac{1}{n} \sum_{i=1}^{n} \nabla f_i(s)

  for the batch :math:`B`, the params :math:`w` and their snapshot :math:`s`. Put `svrg` first in a
  chain, outside of ``optax.masked`` and ``optax.partition``, since it needs the plain gradient. On
  convex problems with a constant learning rate, the error of SVRG shrinks geometrically, while the
  error of SGD stalls. Deep networks gain little: compare with SGD for the same computing time.

  Each step costs a second gradient. The snapshot is renewed in one of two ways:

  - On the host: ``svrg(refresh_every=None)`` with ``step.refresh(state, batches)`` of a train step,
    or with :func:`full_gradient` and :func:`refresh_svrg`. Choose this for streamed data, and for
    convolutional networks on CPUs, where XLA is slow on convolutions inside control flow.
  - Inside the step: ``svrg(refresh_every=n)`` calls the extra argument
    ``full_grad_fn(params) -> grads`` on steps 0, n, 2n, ... under ``lax.cond``. Choose this for
    data on the device, with :func:`full_gradient` and its argument `stacked`.

  Until the first refresh, gradients pass unchanged. If an entry of the gradient at the snapshot is
  not finite, this entry passes uncorrected. If the params or the full gradient are not finite, the
  refresh is not made. `notfinite_count` counts these steps and refreshes. Entries of a batch
  gradient that are not finite pass unchanged, and such a step does not change
  `squared_deviations`.

  Args:
    refresh_every: the number of steps from one refresh inside ``update`` to the next, about one to
      five epochs. Raising it saves passes over the data, but the params move farther from the
      snapshot. None: refresh on the host only.
    coefficient: :math:`\alpha`, a number >= 0 or a schedule of the step count. Raising it trusts
      the snapshot more; 1 is SVRG. alpha-SVRG, for deep networks, lets it fall over the whole
      training: ``optax.linear_schedule(0.75, 0.0, steps)``.

  Returns:
    An :class:`optax.GradientTransformationExtraArgs` that needs `params` and the extra argument
    ``grad_fn(params) -> grads``, which ``make_train_step`` passes: the gradient on the batch of the
    updates, with the same dropout masks and statistics. Neither `grad_fn` nor `full_grad_fn` may
    update statistics. Updates have the gradients' dtype.

  Examples:
    >>> import functools, jax, jax.numpy as jnp, optax, optax_boost
    >>> x = jax.random.normal(jax.random.key(0), (8, 4, 3))  # 8 batches of 4 examples
    >>> data = {"x": x, "y": jnp.sin(5 * x[..., 0])}
    >>> def loss_fn(w, batch):
    ...   return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)
    >>> step = optax_boost.make_train_step(
    ...   loss_fn,
    ...   optax.chain(optax_boost.svrg(refresh_every=16), optax.sgd(0.1)),
    ...   full_grad_fn=functools.partial(optax_boost.full_gradient, stacked=True, batches=data),
    ... )
    >>> state = step.init(jnp.zeros(3))
    >>> for t in range(320):
    ...   state, metrics = step(state, jax.tree.map(lambda a: a[t % 8], data))
    >>> optimum = jnp.linalg.lstsq(x.reshape(-1, 3), data["y"].ravel())[0]
    >>> bool(jnp.abs(state.params - optimum).max() < 1e-5)
    True

  References:
    Johnson, Zhang, `Accelerating Stochastic Gradient Descent using Predictive Variance Reduction
    <https://papers.nips.cc/paper/4937>`_, 2013.
    Yin, Xu, Li, Darrell, Liu, `A Coefficient Makes SVRG Effective
    <https://arxiv.org/abs/2311.05589>`_, 2025.

  .. note::
    Inside ``optax.masked`` and ``optax.partition``, the correction is biased, since the snapshot
    has only some of the params. Your own `grad_fn` and `full_grad_fn` must fill in the hidden
    leaves. Inside ``optax.MultiSteps``, only the last batch is corrected.
  """
  if refresh_every is not None:
    _checks.check_whole_number("refresh_every", refresh_every)
  _checks.check_learning_rate(coefficient, "coefficient")

  def init(params: optax.Params) -> SvrgState:
    dtype = _arrays.widest_dtype(params)
    return SvrgState(
      snapshot=_arrays.copy_arrays(params),
      full_gradient=_arrays.zeros_like_wide(params),
      count=jnp.zeros([], jnp.int32),
      refresh_count=jnp.zeros([], jnp.int32),
      squared_deviations=jnp.zeros(2, dtype),
      variance_ratio=jnp.ones([], dtype),
      notfinite_count=jnp.zeros([], jnp.int32),
    )

  def step(
    g: optax.Updates,
    state: SvrgState,
    w: optax.Params,
    *,
    grad_fn: _types.Closure | None = None,
    full_grad_fn: _types.Closure | None = None,
  ) -> tuple[optax.Updates, SvrgState]:
    _check_state(state, w, _METHOD)
    purpose = "a function from params to the gradient on the current batch"
    grad_fn = _extra_args.require_extra(grad_fn, "grad_fn", _METHOD, purpose)
    if refresh_every is not None:
      state = _refresh_if_due(state, w, full_grad_fn, state.count % refresh_every == 0)
    a = coefficient(state.count) if callable(coefficient) else coefficient
    a = jnp.where(state.refresh_count > 0, a, 0.0)
    h = _gradients_at(state.snapshot, grad_fn, "grad_fn")
    return _correct(g, h, a, state)

  return _transformation.transformation(_METHOD, SvrgState, init, step, needs_params=True)


def _refresh_if_due(
  state: SvrgState,
  params: optax.Params,
  full_grad_fn: _types.Closure | None,
  due: _types.BoolScalar,
) -> SvrgState:
  if full_grad_fn is None:
    raise ValueError(
      "`svrg(refresh_every=...)` needs the extra argument `full_grad_fn` (a function from params"
      " to the mean gradient over all of the data); got none. Pass `full_grad_fn=...` to"
      " `optax_boost.make_train_step` or to `tx.update`."
    )

  def renewed() -> SvrgState:
    return _renew(state, params, _gradients_at(params, full_grad_fn, "full_grad_fn"))

  return _conditionals.cond(due, renewed, lambda: state)


def _gradients_at(params: optax.Params, function: _types.Closure, name: str) -> optax.Updates:
  """Returns ``function(params)``, the gradients, with the same leaves masked as in `params`.

  Raises an error, which names `name`, if the gradients have another structure or other
  shapes than `params`.
  """
  gradients = function(params)
  if any(map(_masks.is_masked, jax.tree.leaves(params, is_leaf=_masks.is_masked))):
    gradients = _masked_like(params, gradients, name)
  _tree_checks.check_gradients(gradients, params, name)
  return gradients


def _masked_like(masked: _types.Tree, tree: _types.Tree, name: str) -> _types.Tree:
  """Returns `tree` with a mask for each leaf that is masked in `masked`.

  Raises ValueError, which calls the tree `name`, if the structures of the trees don't match.
  """
  try:
    return _masks.mask_like(tree, masked)
  except (ValueError, TypeError) as error:
    raise ValueError(
      f"`{name}` must give a tree of the params' structure, with `optax.MaskedNode()` for hidden"
      f" leaves or without; got {jax.tree.structure(tree)} for params"
      f" {jax.tree.structure(masked)}."
    ) from error


def _check_state(state: SvrgState, params: optax.Params, method: str) -> None:
  if not _tree_checks.same_shapes(params, state.snapshot):
    got = _checks.shorten(jax.tree.map(jnp.shape, params))
    shapes = _checks.shorten(jax.tree.map(jnp.shape, state.snapshot))
    raise ValueError(
      f"`{method}` needs the params that its state was made for; got the shapes {got} for {shapes}."
      " Start from `tx.init(params)`."
    )


def refresh_svrg(
  opt_state: optax.OptState, params: optax.Params, full_gradient: optax.Updates
) -> optax.OptState:
  """Replaces the snapshot and the full gradient in an optimizer state, on the host or under jit.

  Args:
    opt_state: the state of a chain with :func:`svrg`. If the chain has several :func:`svrg`, all
      their snapshots are replaced.
    params: the params at which the full gradient was computed; they are copied.
    full_gradient: the result of :func:`full_gradient`. If `full_gradient` or `params` is not
      finite, the snapshot does not change, and `notfinite_count` grows.

  Returns:
    The new optimizer state, which shares all other arrays with the old one.

  Examples:
    >>> import jax, jax.numpy as jnp, optax, optax_boost
    >>> params = jnp.ones(2)
    >>> tx = optax.chain(optax_boost.svrg(refresh_every=None), optax.sgd(0.1))
    >>> state = optax_boost.refresh_svrg(tx.init(params), params, jnp.full(2, 0.5))
    >>> optax.tree.get(state, "full_gradient").tolist(), optax.tree.get(state, "refresh_count")
    ([0.5, 0.5], Array(1, dtype=int32))
  """
  _tree_checks.require_params(params, "refresh_svrg")
  _tree_checks.check_floating(params, "refresh_svrg", _tree_checks.CLOSE_OVER)
  _tree_checks.check_gradients(full_gradient, params, "full_gradient")
  if not _trees.find_states(opt_state, SvrgState):
    raise ValueError(
      "`refresh_svrg` needs an optimizer state with a SvrgState in it; got"
      f" {_checks.shorten(jax.tree.structure(opt_state), 400)}. Is `optax_boost.svrg` part of the"
      " chain?"
    )
  return _protocol.renew_full_gradients(opt_state, params, full_gradient)

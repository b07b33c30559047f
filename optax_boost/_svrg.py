r"""SVRG and alpha-SVRG: variance-reduced gradients from a snapshot and its full gradient.

For params w, a snapshot s of earlier ones, and a batch B:

  v = g - a (h - mu)

  g    gradient of the loss on B at w
  h    gradient of the loss on B at s
  mu   full gradient at s: the mean over all of the data, each example counting once
  a    coefficient, scalar: 1 is SVRG, 0 leaves g alone
  v    what the optimizer receives; its mean over B is that of g

g, h, mu and v have the structure and shapes of w; mu and the arithmetic are in at least float32.
Since h varies with the batch as g does while s is near w, the difference varies less than g. How
much less is told by ``variance_ratio``, the sums running over steps since the last refresh:

  sum |v - mu|^2 / sum |g - mu|^2

Sources: Johnson, Zhang, "Accelerating Stochastic Gradient Descent using Predictive Variance
Reduction", NeurIPS 2013; Yin, Xu, Li, Darrell, Liu, "A Coefficient Makes SVRG Effective",
arXiv:2311.05589.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
import functools
import math
import numbers
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost import _base
from optax_boost import _protocol
from optax_boost import _tree

_METHOD = "svrg"
# Params of at most so many entries have their variance ratio measured at every step, larger ones
# at every 16th.
_SMALL = 65_536
_MEASURE_EVERY = 16


@_protocol.declares(metrics=("variance_ratio", "svrg/notfinite_count"))
class SvrgState(NamedTuple):
  """State of :func:`svrg`.

  Attributes:
    snapshot: the params at the last refresh; a copy, like the params in structure, dtypes and
      sharding. Before the first refresh, the params that ``init`` was given.
    full_gradient: the full gradient there, in float32 (float64 for float64); zeros before the
      first refresh.
    count: scalar int32, the number of steps made.
    refresh_count: scalar int32, the number of refreshes; while it is 0, gradients pass unchanged.
    squared_deviations: vector of two, the sums over the steps since the last refresh of
      ``|v - mu|^2`` and ``|g - mu|^2``, for corrected gradients ``v``, plain ones ``g`` and the
      full gradient ``mu``. With more than 65,536 params, over every 16th step only.
    variance_ratio: scalar, the first of the sums over the second: about the variance of the
      corrected over that of the plain gradient. 0 is a perfect correction, above 1 it does harm.
      As the true gradient moves away from ``mu``, the ratio is drawn towards 1, but never across.
    notfinite_count: scalar int32, the refreshes that were not made, and those of the steps summed
      above in which a part of the correction was left out, for numbers that are not finite.
  """

  snapshot: optax.Params
  full_gradient: optax.Updates
  count: jax.Array  # type: ignore[assignment]  # hides the method of tuples
  refresh_count: jax.Array
  squared_deviations: jax.Array
  variance_ratio: jax.Array
  notfinite_count: jax.Array


def alpha_svrg_schedule(steps: int, initial: float = 0.75) -> optax.Schedule:
  """The coefficient of alpha-SVRG: falls linearly from `initial` to 0.

  Args:
    steps: the steps of the whole training, not of one refresh period; 0 is reached after them.
    initial: the coefficient of the first step. Raising it corrects more strongly; deep networks
      take less than 1.

  Returns:
    A schedule, for the `coefficient` of :func:`svrg`.

  Raises:
    ValueError: `steps` is below 1, or `initial` is below 0.
    TypeError: an argument is of the wrong kind.

  Examples:
    >>> import optax_boost
    >>> schedule = optax_boost.alpha_svrg_schedule(steps=100)
    >>> [float(schedule(step)) for step in (0, 50, 100, 1000)]
    [0.75, 0.375, 0.0, 0.0]

  References:
    Yin, Xu, Li, Darrell, Liu, `A Coefficient Makes SVRG Effective
    <https://arxiv.org/abs/2311.05589>`_, 2025.
  """
  _base.check_whole_number("steps", steps)
  _base.check_number("initial", initial, minimum=0.0)
  return optax.linear_schedule(initial, 0.0, steps)


def correction(
  snapshot_gradient: jax.Array, full_gradient: jax.Array, coefficient: jax.typing.ArrayLike
) -> jax.Array:
  """What is subtracted from a gradient, ``a (h - mu)``.

  Args:
    snapshot_gradient: the batch's gradient at the snapshot, any floating dtype.
    full_gradient: the full gradient there, in at least float32.
    coefficient: scalar.

  Returns:
    The correction in the dtype of `full_gradient`, not finite where an operand is not.
  """
  dtype = full_gradient.dtype
  return jnp.asarray(coefficient, dtype) * (snapshot_gradient.astype(dtype) - full_gradient)


def svrg(
  refresh_every: int | None,
  coefficient: optax.ScalarOrSchedule = 1.0,
) -> optax.GradientTransformationExtraArgs:
  r"""Reduces the variance of gradients with a snapshot and its full gradient.

  .. math::
    v = \nabla f_B(w) - \alpha \left( \nabla f_B(s) - \mu \right), \qquad
    \mu = \frac{1}{n} \sum_{i=1}^{n} \nabla f_i(s)

  for the batch :math:`B`, the params :math:`w` and their snapshot :math:`s`. It goes first in a
  chain, so that it sees the plain gradient, and before what treats leaves differently:
  ``optax.chain(svrg(...), optax.partition(...))``. On convex problems the error then shrinks
  geometrically at a constant learning rate: logistic regression on real data came within 1e-16 of
  the optimum where SGD, with as many gradients, stalled at 2e-5. Deep networks gain little. A
  small CNN on digits, with three times the gradients of SGD, ended at a training loss of 1.0e-3
  with :math:`\alpha = 1`, whose variance ratio rose to 2.5, and of 0.87e-3 with
  :func:`alpha_svrg_schedule`; SGD at 0.83e-3, and at 0.11e-3 when given the same work.

  Each step costs a second gradient. The snapshot is renewed in one of two ways:

  - On the host: ``svrg(refresh_every=None)`` with :func:`full_gradient` and :func:`refresh_svrg`,
    or ``step.refresh(state, batches)`` of a train step. For data that is streamed, and for
    convolutional networks on CPUs, where XLA runs the gradient of a convolution inside control
    flow some 20 times slower.
  - Inside the step: ``svrg(refresh_every=n)`` calls the extra argument
    ``full_grad_fn(params) -> grads`` on steps 0, n, 2n, ... under ``lax.cond``. For data on the
    device; see :func:`scan_full_gradient`.

  Until the first refresh gradients pass unchanged. Where a snapshot gradient is not finite, the
  correction's entry is left out; a full gradient (or snapshot) that is not finite is not taken,
  and the last one, still valid, serves on. Both are counted. A gradient that is not finite stays
  so and leaves no trace in the state.

  ``update`` needs the extra argument ``grad_fn(params) -> grads``: the gradient elsewhere on the
  batch that the updates came from, with the same dropout masks and statistics. Neither it nor
  `full_grad_fn` may update statistics. ``make_train_step`` supplies the first.

  Args:
    refresh_every: steps from one refresh inside ``update`` to the next; about the number of steps
      in one to five epochs. Raising it saves full passes and lets the snapshot grow stale. None:
      refreshed on the host only.
    coefficient: :math:`\alpha`, a number >= 0 or a schedule of the step count. Raising it trusts
      the snapshot more; 1 is SVRG.

  Returns:
    An :class:`optax.GradientTransformationExtraArgs` that needs `params` and `grad_fn`. Updates
    have the gradients' dtype. The state, a :class:`SvrgState`, holds two copies of the params.

  Raises:
    ValueError: a number is out of range; in ``update``: params or an extra argument are missing,
      or a tree does not fit.
    TypeError: an argument or a leaf is of the wrong kind.

  Examples:
    >>> import functools, jax, jax.numpy as jnp, optax, optax_boost
    >>> x = jax.random.normal(jax.random.key(0), (8, 4, 3))  # 8 batches of 4 examples
    >>> y = jnp.sin(5 * x[..., 0])
    >>> def loss_fn(w, batch):
    ...   return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)
    >>> data = {"x": x, "y": y}
    >>> step = optax_boost.make_train_step(
    ...   loss_fn,
    ...   optax.chain(optax_boost.svrg(refresh_every=16), optax.sgd(0.1)),
    ...   full_grad_fn=functools.partial(optax_boost.scan_full_gradient, batches=data),
    ... )
    >>> state = step.init(jnp.zeros(3))
    >>> for t in range(320):
    ...   state, metrics = step(state, jax.tree.map(lambda a: a[t % 8], data))
    >>> optimum = jnp.linalg.lstsq(x.reshape(-1, 3), y.ravel())[0]
    >>> bool(jnp.abs(state.params - optimum).max() < 1e-5)
    True

  References:
    Johnson, Zhang, `Accelerating Stochastic Gradient Descent using Predictive Variance Reduction
    <https://papers.nips.cc/paper/4937>`_, 2013.
    Yin, Xu, Li, Darrell, Liu, `A Coefficient Makes SVRG Effective
    <https://arxiv.org/abs/2311.05589>`_, 2025.

  .. note::
    MXNet's ``SVRGModule`` adds each full gradient to the last one divided by the number of
    batches, and counts the padding of the last batch in the sum but not in the divisor; here the
    full gradient is the mean. Inside ``optax.masked`` or ``optax.partition`` the two functions
    are called with the masked params: those of ``make_train_step`` fill in the hidden leaves, your
    own must, too. A snapshot of a part of the params while the rest moves is biased: better keep
    it outside. Inside ``optax.MultiSteps`` the correction is that
    of the last batch alone.
  """
  if refresh_every is not None:
    _base.check_whole_number("refresh_every", refresh_every)
  _base.check_learning_rate(coefficient, "coefficient")

  def init_fn(params: optax.Params) -> SvrgState:
    _tree.check_floating(params, _METHOD)
    dtypes = [_tree.accumulator_dtype(p.dtype) for p in jax.tree.leaves(params)]
    dtype = jnp.result_type(jnp.float32, *dtypes)
    return SvrgState(
      snapshot=_tree.copy_arrays(params),
      full_gradient=_zeros(params),
      count=jnp.zeros([], jnp.int32),
      refresh_count=jnp.zeros([], jnp.int32),
      squared_deviations=jnp.zeros(2, dtype),
      variance_ratio=jnp.ones([], dtype),
      notfinite_count=jnp.zeros([], jnp.int32),
    )

  def update_fn(
    updates: optax.Updates,
    state: SvrgState,
    params: optax.Params | None = None,
    *,
    grad_fn: Callable[[Any], Any] | None = None,
    full_grad_fn: Callable[[Any], Any] | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, SvrgState]:
    del extra_args
    _base.require_params(params, _METHOD)
    _base.require_state(state, SvrgState, _METHOD)
    _tree.check_same_tree(updates, params, _METHOD)
    _tree.check_floating(updates, _METHOD)
    _check_state(state, params, _METHOD)
    _base.require_extra(
      grad_fn,
      "grad_fn",
      _METHOD,
      "a function from params to the gradient on the current batch, with its rng and statistics",
    )
    assert grad_fn is not None
    _base.check_callable("grad_fn", grad_fn, "grad_fn(params)")
    if refresh_every is not None:
      state = _refresh_if_due(state, params, full_grad_fn, state.count % refresh_every == 0)
    alpha = coefficient(state.count) if callable(coefficient) else coefficient
    if jnp.ndim(alpha) != 0:
      raise ValueError(
        "`coefficient` must be a schedule that returns a scalar; it returned an array of shape"
        f" {jnp.shape(alpha)}."
      )
    alpha = jnp.where(state.refresh_count > 0, alpha, 0.0)
    elsewhere = _gradients_at(state.snapshot, grad_fn, "grad_fn")
    return _correct(updates, elsewhere, alpha, state)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _refresh_if_due(
  state: SvrgState, params: Any, full_grad_fn: Callable[[Any], Any] | None, due: jax.Array
) -> SvrgState:
  if full_grad_fn is None:
    raise ValueError(
      "`svrg(refresh_every=...)` needs the extra argument `full_grad_fn` (a function from params"
      " to the mean gradient over all of the data); got none. Pass `full_grad_fn=...` to"
      " `optax_boost.make_train_step` or to `tx.update`; or refresh on the host, with"
      " `refresh_every=None` and `step.refresh(state, batches)`."
    )
  _base.check_callable("full_grad_fn", full_grad_fn, "full_grad_fn(params)")

  def renewed() -> SvrgState:
    return _renew(state, params, _gradients_at(params, full_grad_fn, "full_grad_fn"))

  return jax.lax.cond(due, renewed, lambda: state)


def _gradients_at(params: Any, function: Callable[[Any], Any], name: str) -> Any:
  """Calls `grad_fn` or `full_grad_fn` with params of which ``optax.masked`` may hide leaves."""
  masked = any(map(_tree.is_masked, jax.tree.leaves(params, is_leaf=_tree.is_masked)))
  try:
    gradients = function(params)
  except Exception as error:
    if not masked:
      raise
    raise ValueError(
      f"`svrg` inside `optax.masked` or `optax.partition` calls `{name}` with params whose hidden"
      f" leaves are `optax.MaskedNode()`, and it raised {type(error).__name__}. Put `svrg` first in"
      " the chain, outside of them; or let the function fill in the hidden leaves from the whole"
      " params, as `optax_boost.make_train_step` does."
    ) from error
  if masked:
    gradients = _masked_like(params, gradients, name)
  _check_gradients(gradients, params, name)
  return gradients


def _masked_like(masked: Any, tree: Any, name: str) -> Any:
  try:
    return _tree.mask_like(tree, masked)
  except (ValueError, TypeError) as error:
    raise ValueError(
      f"`{name}` must give a tree of the params' structure, with `optax.MaskedNode()` for hidden"
      f" leaves or without; got {jax.tree.structure(tree)} for params"
      f" {jax.tree.structure(masked)}."
    ) from error


def _check_state(state: SvrgState, params: Any, method: str) -> None:
  """Refuses params that are not those of the state."""
  got, want = (jax.tree.map(jnp.shape, tree) for tree in (params, state.snapshot))
  if got != want:
    raise ValueError(
      f"`{method}` needs the params that its state was made for; got the shapes"
      f" {_base.shorten(got)} for {_base.shorten(want)}. Start from `tx.init(params)`."
    )


def _renew(state: SvrgState, params: Any, full: Any) -> SvrgState:
  """The state after a refresh, or as it was, with a count, where a number is not finite."""
  good = _tree.all_finite((params, full))

  def chosen(new: jax.Array, old: jax.Array) -> jax.Array:
    return jnp.where(good, new.astype(old.dtype), old)

  return state._replace(
    snapshot=jax.tree.map(chosen, params, state.snapshot),
    full_gradient=jax.tree.map(chosen, full, state.full_gradient),
    refresh_count=_plus(good, state.refresh_count),
    squared_deviations=jnp.where(good, 0, state.squared_deviations),
    notfinite_count=_plus(~good, state.notfinite_count),
  )


def _plus(condition: jax.Array, count: jax.Array) -> jax.Array:
  return jnp.where(condition, optax.safe_increment(count), count)


def _correct(
  updates: Any, elsewhere: Any, alpha: jax.Array, state: SvrgState
) -> tuple[Any, SvrgState]:
  """Corrected gradients and the state after them."""
  leaves, structure = jax.tree.flatten(updates)
  parts = list(
    zip(leaves, jax.tree.leaves(elsewhere), jax.tree.leaves(state.full_gradient), strict=True)
  )

  def raw(g: jax.Array, h: jax.Array, mu: jax.Array) -> jax.Array:
    return g.astype(mu.dtype) - correction(h, mu, alpha)

  def deviations() -> jax.Array:
    total = jnp.zeros_like(state.squared_deviations)
    for g, h, mu in parts:
      sums = (_tree.sum_squares(raw(g, h, mu) - mu), _tree.sum_squares(g.astype(mu.dtype) - mu))
      total += jnp.stack(sums).astype(total.dtype)
    return total

  # The sums read all gradients once more: a twentieth of the step of a large network.
  if sum(g.size for g in leaves) <= _SMALL:
    seen = deviations()
  else:
    measured = state.count % _MEASURE_EVERY == _MEASURE_EVERY // 2
    seen = jax.lax.cond(measured, deviations, lambda: jnp.zeros_like(state.squared_deviations))
  finite = jnp.isfinite(seen)
  total = state.squared_deviations + jnp.where(jnp.all(finite), seen, 0)
  # The inner `where` keeps the untaken branch from dividing by zero.
  known = total[1] > 0
  ratio = jnp.where(known, total[0] / jnp.where(known, total[1], 1), state.variance_ratio)
  left_out = finite[1] & ~finite[0]
  corrected = [
    jnp.where(jnp.isfinite(v := raw(g, h, mu)), v, g.astype(mu.dtype)).astype(g.dtype)
    for g, h, mu in parts
  ]
  return jax.tree.unflatten(structure, corrected), state._replace(
    count=optax.safe_increment(state.count),
    squared_deviations=total,
    variance_ratio=ratio,
    notfinite_count=_plus(left_out, state.notfinite_count),
  )


def refresh_svrg(
  opt_state: optax.OptState, params: optax.Params, full_gradient: optax.Updates
) -> optax.OptState:
  """Renews the snapshot and the full gradient in an optimizer state, on the host or under jit.

  Args:
    opt_state: the state of any chain that holds a :class:`SvrgState`; of several, all are renewed.
    params: the params at which the full gradient was taken; they are copied.
    full_gradient: their full gradient, as :func:`full_gradient` returns it. If it or `params` is
      not finite, the state stays as it was and its `notfinite_count` grows.

  Returns:
    The new optimizer state. Its other parts are those of `opt_state`, not copies.

  Raises:
    ValueError: `opt_state` holds no :class:`SvrgState`, or a tree does not fit.

  Examples:
    >>> import jax, jax.numpy as jnp, optax, optax_boost
    >>> params = jnp.ones(2)
    >>> tx = optax.chain(optax_boost.svrg(refresh_every=None), optax.sgd(0.1))
    >>> state = optax_boost.refresh_svrg(tx.init(params), params, jnp.full(2, 0.5))
    >>> optax.tree.get(state, "full_gradient").tolist(), optax.tree.get(state, "refresh_count")
    ([0.5, 0.5], Array(1, dtype=int32))
  """
  _base.require_params(params, "refresh_svrg")
  _tree.check_floating(params, "refresh_svrg")
  _tree.check_floating(full_gradient, "refresh_svrg")
  _check_gradients(full_gradient, params, "full_gradient")
  renewals = 0

  def renewed(node: Any) -> Any:
    nonlocal renewals
    if not isinstance(node, SvrgState):
      return node
    renewals += 1
    # Inside `optax.masked` the state lacks the leaves that are not its own.
    own_params = _masked_like(node.snapshot, params, "params")
    own_gradient = _masked_like(node.snapshot, full_gradient, "full_gradient")
    _check_state(node, own_params, "refresh_svrg")
    return _jitted_renew(node, own_params, own_gradient)

  renewed_state = jax.tree.map(renewed, opt_state, is_leaf=lambda node: isinstance(node, SvrgState))
  if not renewals:
    raise ValueError(
      "`refresh_svrg` needs an optimizer state with a SvrgState in it; got"
      f" {_base.shorten(jax.tree.structure(opt_state), 400)}. Is `optax_boost.svrg` part of the"
      " chain?"
    )
  return renewed_state


_jitted_renew = jax.jit(_renew)


def full_gradient(
  grad_fn: Callable[..., Any],
  params: optax.Params,
  batches: Iterable[Any],
  *,
  rng: jax.Array | None = None,
  weight_fn: Callable[[Any], Any] | None = None,
  progress: bool = False,
) -> optax.Updates:
  r"""The mean gradient over data that is streamed in batches.

  .. math::
    \mu = \sum_b n_b \, \nabla f_b(s) \Big/ \sum_b n_b

  for batches :math:`b` with :math:`n_b` examples each. A last batch that is smaller counts less. A
  last batch that is *padded* needs two things: a loss that is the mean over the real examples
  (a mask in the batch), and `weight_fn`, which says how many those are.

  Args:
    grad_fn: ``grad_fn(params, batch) -> grads``, the gradient of the mean loss over the batch, as
      ``jax.grad(loss_fn)``. It is jitted here, once for each batch shape; pass the same function
      every time, or it is compiled every time.
    params: where the gradient is taken.
    batches: any iterable of trees whose leaves are arrays or can be made into NumPy arrays (a
      PyTorch loader, Grain, a generator). Two of them are held at a time: the next one is loaded
      while the gradient of the last is computed.
    rng: a key, for losses with dropout: ``grad_fn(params, batch, key)`` is then called, with a key
      of its own for each batch.
    weight_fn: from a batch to the number of its real examples, as in
      ``lambda batch: batch["mask"].sum()``. A batch of weight 0 is left out. None: the length of
      the leaves' first axis.
    progress: whether to show a progress bar; needs ``tqdm``, and is nothing without it.

  Returns:
    A tree like `params`, in float32 (float64 for float64), for :func:`refresh_svrg`.

  Raises:
    ValueError: there is no batch, or none with weight; a batch's tree differs from the first's, or
      the gradients' from the params'; the number of examples can't be told from the shapes.
    TypeError: an argument is of the wrong kind.

  Examples:
    >>> import jax, jax.numpy as jnp, optax_boost
    >>> gradient = jax.grad(lambda w, batch: jnp.mean((w - batch) ** 2) / 2)
    >>> batches = [jnp.array([1.0, 2.0, 3.0]), jnp.array([6.0])]
    >>> float(optax_boost.full_gradient(gradient, jnp.zeros([]), batches))
    -3.0
    >>> padded = [{"x": jnp.array([1.0, 2.0]), "mask": jnp.array([1.0, 1.0])},
    ...           {"x": jnp.array([6.0, 0.0]), "mask": jnp.array([1.0, 0.0])}]
    >>> def loss_fn(w, batch):
    ...   return jnp.sum(batch["mask"] * (w - batch["x"]) ** 2) / jnp.sum(batch["mask"]) / 2
    >>> float(optax_boost.full_gradient(
    ...   jax.grad(loss_fn), jnp.zeros([]), padded, weight_fn=lambda batch: batch["mask"].sum()))
    -3.0
  """
  _check_pass(grad_fn, weight_fn, params, "full_gradient")
  _check_iterable(batches)
  _base.check_bool("progress", progress)
  rng = _as_rng(rng)
  if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(params)):
    raise ValueError(
      "`full_gradient` streams batches on the host and can't run inside `jit`. Call it between two"
      " steps, or `scan_full_gradient` inside."
    )
  # A Partial goes into jit as an argument: what it binds may change without a recompilation.
  bound = grad_fn if isinstance(grad_fn, jax.tree_util.Partial) else jax.tree_util.Partial(grad_fn)
  total, weights = _zeros(params), jnp.zeros([])
  structure = None
  shown = _base.with_progress(batches, progress, "full gradient", "batch")
  for index, batch in enumerate(shown):
    arrays = jax.tree_util.tree_map_with_path(functools.partial(_as_array, index), batch)
    if structure is None:
      structure = jax.tree.structure(arrays)
    elif jax.tree.structure(arrays) != structure:
      raise ValueError(
        f"`full_gradient` needs batches of one tree structure; batch {index} has"
        f" {jax.tree.structure(arrays)}, the first had {structure}."
      )
    key = () if rng is None else (jax.random.fold_in(rng, index),)
    # Dispatch runs ahead of the device; unchecked, a fast loader's batches would pile up.
    jax.block_until_ready(weights)
    weight = _host_weight(_weight(arrays, weight_fn, "full_gradient"), index)
    total, weights = _jitted_add((total, weights), bound, params, arrays, weight, *key)
  if structure is None:
    raise ValueError(
      "`full_gradient` needs at least one batch; got none. An iterator that was used up by a"
      " previous pass is empty: pass a new one each time."
    )
  if not weights > 0:
    raise ValueError(
      f"`full_gradient` needs batches with examples; the weights of all batches sum to {weights}."
    )
  return jax.tree.map(lambda t: t / weights.astype(t.dtype), total)


def scan_full_gradient(
  grad_fn: Callable[..., Any],
  params: optax.Params,
  batches: Any,
  *,
  rng: jax.Array | None = None,
  weight_fn: Callable[[Any], Any] | None = None,
  unroll: int | bool = 1,
) -> optax.Updates:
  """The mean gradient over data on the device, as one ``lax.scan``.

  Made for ``make_train_step(..., full_grad_fn=functools.partial(scan_full_gradient,
  batches=...))``; works under jit and sharding, with the examples' axis over the devices.

  Args:
    grad_fn: ``grad_fn(params, batch) -> grads``, the gradient of the mean loss over the batch.
    params: where the gradient is taken.
    batches: a tree of arrays whose first axis runs over the batches: shapes
      ``(batches, examples, ...)``.
    rng: a key, for losses with dropout: ``grad_fn(params, batch, key)`` is then called, with a key
      of its own for each batch.
    weight_fn: from a batch to the number of its real examples, for a padded last batch; see
      :func:`full_gradient`. None: all batches count the same.
    unroll: how many batches make one iteration, True for all: compiles longer. On CPUs the
      gradients of convolutions need True; inside the step, where the whole pass stands under
      ``lax.cond``, that does not help either: refresh on the host.

  Returns:
    A tree like `params`, in float32 (float64 for float64). Not finite if no batch has weight.

  Raises:
    ValueError: there is no batch, the leaves' first axes differ, or the gradients' tree differs
      from that of the params.
    TypeError: an argument is of the wrong kind.

  Examples:
    >>> import jax, jax.numpy as jnp, optax_boost
    >>> gradient = jax.grad(lambda w, batch: jnp.mean((w - batch) ** 2) / 2)
    >>> batches = jnp.array([[1.0, 2.0], [3.0, 6.0]])
    >>> float(optax_boost.scan_full_gradient(gradient, jnp.zeros([]), batches))
    -3.0
  """
  _check_pass(grad_fn, weight_fn, params, "scan_full_gradient")
  rng = _as_rng(rng)
  if not isinstance(unroll, bool):
    _base.check_whole_number("unroll", unroll, static=True)
  lengths = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(batches)}
  if len(lengths) != 1 or not all(n and n[0] for n in lengths):
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(batches)]
    raise ValueError(
      "`scan_full_gradient` needs at least one batch, and arrays whose first axis runs over the"
      f" batches; got shapes {shapes}."
    )
  ((length,),) = lengths

  def body(carry: Any, xs: Any) -> tuple[Any, None]:
    index, batch = xs
    weight = 1.0 if weight_fn is None else _check_weight(weight_fn(batch))
    key = () if rng is None else (jax.random.fold_in(rng, index),)
    return _add(carry, grad_fn, params, batch, weight, *key), None

  start = (_zeros(params), jnp.zeros([]))
  (total, weights), _ = jax.lax.scan(body, start, (jnp.arange(length), batches), unroll=unroll)
  return jax.tree.map(lambda t: t / weights.astype(t.dtype), total)


def _add(
  carry: tuple[Any, jax.Array],
  grad_fn: Callable[..., Any],
  params: Any,
  batch: Any,
  weight: Any,
  *key: jax.Array,
) -> tuple[Any, jax.Array]:
  total, weights = carry
  weight = jnp.asarray(weight, weights.dtype)
  # The full gradient is then not finite, and a refresh with it is counted and not made.
  weight = jnp.where(weight >= 0, weight, jnp.nan)
  gradients = grad_fn(params, batch, *key)
  _check_gradients(gradients, params, "grad_fn")

  def add(t: jax.Array, g: jax.Array) -> jax.Array:
    # The mean over no examples is nan: selected away, not multiplied by zero.
    return jnp.where(weight == 0, t, t + weight.astype(t.dtype) * g.astype(t.dtype))

  return jax.tree.map(add, total, gradients), weights + weight


_jitted_add = jax.jit(_add, donate_argnums=0)


def _weight(batch: Any, weight_fn: Callable[[Any], Any] | None, method: str) -> Any:
  if weight_fn is not None:
    return _check_weight(weight_fn(batch))
  lengths = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}
  if len(lengths) != 1 or () in lengths:
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(batch)]
    raise ValueError(
      f"`{method}` can't tell the number of examples from arrays of shapes {shapes}, whose first"
      " axes differ. Pass `weight_fn`, a function from a batch to that number."
    )
  ((length,),) = lengths
  return length


def _check_weight(weight: Any) -> Any:
  array = _base.is_array(weight) or isinstance(weight, np.ndarray)
  real = isinstance(weight, numbers.Real) or (array and jnp.isrealobj(weight))
  if not real or jnp.shape(weight) != ():
    got = f"an array of shape {jnp.shape(weight)}" if array else _base.shorten(weight)
    raise TypeError(
      f"`weight_fn` must return a number, how many real examples the batch has; it returned {got}."
    )
  return weight


def _host_weight(weight: Any, index: int) -> float:
  value = float(weight)
  if not 0 <= value < math.inf:
    raise ValueError(
      f"`weight_fn` must return a finite number >= 0; it returned {value:g} for batch {index}."
    )
  return value


def _check_pass(grad_fn: Any, weight_fn: Any, params: Any, method: str) -> None:
  _base.check_callable("grad_fn", grad_fn, "grad_fn(params, batch)")
  if weight_fn is not None:
    _base.check_callable("weight_fn", weight_fn, "weight_fn(batch)")
  _tree.check_floating(params, method)


def _as_rng(rng: Any) -> Any:
  """A key or a seed as a key; keys of ``jax.random.PRNGKey`` stay as they are."""
  raw = getattr(rng, "dtype", None) == jnp.uint32 and jnp.ndim(rng) == 1
  if rng is None or raw:
    return rng
  return _base.as_key("rng", rng)


def _check_iterable(batches: Any) -> None:
  iterable = hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")
  if not iterable or isinstance(batches, Mapping | str | bytes | type):
    raise TypeError(
      f"`batches` must be an iterable of batches; got {_base.shorten(batches)}. A single batch is"
      " passed as `[batch]`."
    )


def _as_array(index: int, path: Any, leaf: Any) -> Any:
  """Leaves JAX's and NumPy's arrays alone and makes NumPy arrays of others, such as PyTorch's."""
  if isinstance(leaf, jax.Array):
    return leaf
  array = leaf if isinstance(leaf, np.ndarray | np.generic | numbers.Number) else np.asarray(leaf)
  if np.asarray(array).dtype.kind in "OSUMm":
    raise TypeError(
      "`batches` must hold trees of numbers; the leaf"
      f" '{_tree.path_string(path) or 'batch'}' of batch {index} is {_base.shorten(leaf)} of dtype"
      f" {np.asarray(array).dtype}. Leave it out of the batches."
    )
  return array


def _zeros(params: Any) -> Any:
  return jax.tree.map(
    lambda p: jnp.zeros_like(p, dtype=_tree.accumulator_dtype(p.dtype)),
    params,
  )


def _check_gradients(gradients: Any, params: Any, source: str) -> None:
  got: Any = jax.tree.structure(gradients)
  want: Any = jax.tree.structure(params)
  if got == want:
    _tree.check_floating(gradients, source)
  shapes = [getattr(leaf, "shape", ()) for leaf in jax.tree.leaves(gradients)]
  if got != want or shapes != [jnp.shape(leaf) for leaf in jax.tree.leaves(params)]:
    raise ValueError(
      f"`{source}` must give gradients of the params' tree structure and shapes; got {got} with"
      f" shapes {shapes} for params {want}. Without aux: only the gradients."
    )

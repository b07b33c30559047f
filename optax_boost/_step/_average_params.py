"""Averages of the params along the training, with any optimizer.

A snapshot is the params after every n-th step. The k-th snapshot x_k changes the average a by one
of three formulas, which the arguments `start` and `decay` choose:

  start:      a <- a + (x_k - a) / k, which is the mean of all snapshots
  decay = d:  a <- a + (x_k - a) (1 - d) / (1 - d^k), whose weights are d^(k-i) divided by their sum
  decay(k):   a <- a + (x_k - a) (1 - decay(k)), where a begins as the initial params

Mutable statistics, such as BatchNorm's mean and variance, are averaged in the same way.
"""

from collections.abc import Callable
import dataclasses
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from optax_boost._form import _finiteness, _protocol
from optax_boost._foundation import (
  _arrays,
  _checks,
  _conditionals,
  _masks,
  _paths,
  _placement,
  _tree_checks,
  _trees,
  _types,
  _warnings,
)
from optax_boost._step import _nesting, _state, _wrapper

_METHOD = "average_params"
_Decay: TypeAlias = jax.typing.ArrayLike | Callable[[jax.Array], jax.typing.ArrayLike]
# The extra argument of `update` that holds the mutable statistics after the forward pass.
_MODEL_STATE = "model_state"
# The first key of the statistics' paths in variables of Linen, and in what `split_loss` returns.
_COLLECTION = "batch_stats/"


def _blend(a: jax.Array, x: jax.Array, k: _types.IntScalar, decay: _Decay | None) -> jax.Array:
  """Returns the average `a`, updated by the k-th snapshot `x`.

  An entry of `a` is kept if the entry of `x` or the updated entry is not finite. `decay` is the
  argument of :func:`average_params`; None gives the mean of all snapshots.
  """
  dtype = a.real.dtype
  if callable(decay):
    share = jnp.asarray(1 - _checks.call_schedule("decay(k)", decay, k), dtype)
  elif decay is not None:
    complement = jnp.asarray(1 - decay, dtype)
    share = complement / -jnp.expm1(k.astype(dtype) * jnp.log1p(-complement))
  else:
    share = 1 / k.astype(dtype)
  # If the share is 1, `x` is selected, since `a + (x - a)` may differ from `x` by rounding. Unless
  # `decay` is a function, the first snapshot has the share 1, which may be rounded, too.
  replaces_all = share == 1 if callable(decay) else k == 1
  new = jnp.where(replaces_all, x, a + share * (x - a))
  # `x - a` may overflow though `x` and `a` are finite.
  is_good = _finiteness.finite_entries(x) & _finiteness.finite_entries(new)
  return jnp.where(is_good, new, a)


@_protocol.declares(metrics=("average_params/snapshot_count",))
class AverageParamsState(NamedTuple):
  """State of :func:`average_params`; :func:`averaged_params` reads the average.

  Attributes:
    average: tree of the params' structure, their average in at least float32.
    statistics: dict from the path of each averaged statistic to its average in at least float32.
    snapshot_count: scalar int32, the number of snapshots taken.
  """

  average: optax.Params
  statistics: dict[str, jax.Array]
  snapshot_count: _types.IntScalar


def average_params(
  inner: optax.GradientTransformation,
  *,
  start: jax.typing.ArrayLike | None = None,
  decay: _Decay | None = None,
  every: jax.typing.ArrayLike = 1,
  model_state: _types.ModelState = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Keeps an average of the params along the training; returns the updates of `inner`.

  A snapshot of the params is taken after every `every`-th step. The average of the snapshots
  :math:`x_1, \ldots, x_k` is one of two:

  .. math::
    \frac{1}{k} \sum_{i=1}^k x_i, \qquad
    \frac{\sum_{i=1}^k d^{k-i} x_i}{\sum_{i=1}^k d^{k-i}}

  The first is the mean of all snapshots after step `start` (SWA). In the second, the weight of each
  snapshot is `decay` d times the weight of the next (EMA). Pass exactly one of `start` and `decay`.
  Evaluate the model at :func:`averaged_params`. A model with BatchNorm also needs statistics that
  fit these params: averages, by `model_state`, or new statistics, by
  ``optax_boost.nnx.estimate_batch_stats`` or ``optax_boost.linen.estimate_batch_stats``.

  Args:
    inner: the optimizer. A snapshot is `params` plus the updates of `inner`, so put the wrapper
      around everything that changes updates: ``average_params(optax.chain(...), ...)``. A step that
      a wrapper inside or around `average_params` skips is not counted. Around ``optax.lookahead``
      the average is a pair of fast and slow params.
    start: the number of steps after which snapshots begin: the first is taken after step `start`
      plus `every`. Lowering it takes in older, worse params.
    decay: the factor d, above 0 and below 1. The first snapshot is the first average. Raising it
      smooths more and lags more; about 1 / (1 - decay) snapshots count. Or a function from the
      snapshot's number (1 for the first) to the share of the old average in the new one; then the
      average begins as the initial params. timm's warm-up is ``lambda k: jnp.minimum(0.9999, (1 +
      k) / (10 + k))``, diffusers' ``lambda k: jnp.minimum(0.9999, 1 - (1 + k) ** (-2 / 3))``.
    every: the number of steps from one snapshot to the next. Raising it costs less time, and
      spreads the snapshots over more of the training.
    model_state: the initial mutable statistics, if they are averaged beside the params, as by a
      mean teacher: what ``split_loss`` returned, ``nnx.state(model, nnx.BatchStat)``, or any tree
      of arrays, whose floating-point leaves are averaged. ``update`` then needs the statistics
      after the forward pass as its extra argument `model_state`, a tree with the same paths (apart
      from a leading ``batch_stats``). The train steps pass this argument. Read the averages with
      :func:`averaged_model_state`. None: statistics are not averaged.

  Returns:
    An :class:`optax.GradientTransformationExtraArgs` that needs `params`. Averages are in float32
    (float64 for float64 params), sharded as the params are. Steps without a snapshot do not touch
    the averages. If an entry of a snapshot is not finite, that entry of the average stays.
    Statistics of a micro-batch that :func:`accumulate` drops are ignored.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_boost
    >>> tx = optax_boost.average_params(optax.sgd(1.0), start=2)
    >>> params = jnp.zeros(2)
    >>> state = tx.init(params)
    >>> for _ in range(4):
    ...   updates, state = tx.update(jnp.array([-1.0, -2.0]), state, params)
    ...   params = optax.apply_updates(params, updates)
    >>> params.tolist(), optax_boost.averaged_params(state, params).tolist()
    ([4.0, 8.0], [3.5, 7.0])

  References:
    Polyak, Juditsky, `Acceleration of Stochastic Approximation by Averaging
    <https://doi.org/10.1137/0330046>`_, 1992; Izmailov et al., `Averaging Weights Leads to Wider
    Optima and Better Generalization <https://arxiv.org/abs/1803.05407>`_, 2018.
  """
  if start is not None:
    _checks.check_whole_number("start", start, minimum=0)
  if decay is not None and not callable(decay):
    _checks.check_number("decay", decay, above=0.0, below=1)
  _checks.check_whole_number("every", every)
  if (start is None) == (decay is None):
    raise ValueError(
      "`average_params` needs exactly one of `start` (the mean of all snapshots after a step) and"
      f" `decay` (exponential weights); got {'none' if start is None else 'start and decay'}."
    )
  _tree_checks.check_traceable("model_state", model_state)
  # The statistics are copied, since a train step may donate `model_state`.
  statistics = jax.tree.map(_float32_copy, _statistics(model_state))
  if model_state is not None and not statistics:
    _warnings.warn(
      "`average_params` averages no statistics: `model_state` has no floating-point leaf.",
      _warnings.NoEffectWarning,
    )
  return _wrapper.fill(inner, averaging=AverageParams(start, decay, every, statistics))


def _float32_copy(x: jax.typing.ArrayLike | jax.ShapeDtypeStruct) -> Any:
  """Returns a copy of a leaf in at least float32; the copy of an abstract leaf is abstract."""
  dtype = _arrays.accumulator_dtype(jnp.result_type(x))
  if isinstance(x, jax.ShapeDtypeStruct):
    return jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding)
  return jnp.asarray(_placement.copy(x) if jnp.result_type(x) == dtype else x, dtype)


def _statistics(model_state: _types.ModelState) -> dict[str, jax.Array]:
  """Returns the floating-point leaves of a model state, as a dict from path to leaf.

  The paths don't begin with the name of the collection, ``batch_stats``.
  """
  paths = _statistic_paths(model_state)
  pairs = zip(paths, jax.tree.leaves(model_state), strict=True)
  return {path: x for path, x in pairs if jnp.issubdtype(jnp.result_type(x), jnp.inexact)}


def _statistic_paths(model_state: _types.ModelState) -> list[str]:
  return [path.removeprefix(_COLLECTION) for path in _paths.leaf_paths(model_state)]


def _check_statistics(
  averages: dict[str, jax.Array], model_state: _types.ModelState, function: str
) -> None:
  """Raises ValueError unless `model_state` has a leaf with the path and shape of each average.

  `averages` is a dict from path to average. The error message names `function`.
  """
  statistics = _statistics(model_state)
  for path, average in averages.items():
    shape = jnp.shape(average)
    got = jnp.shape(statistics[path]) if path in statistics else "none"
    if got != shape:
      raise ValueError(
        f"`{function}` needs a `model_state` with all statistics that are averaged; the leaf"
        f" '{path}' must have the shape {shape}, got {got} among the leaves"
        f" {_checks.shorten(sorted(statistics), 200)}. Make the optimizer with"
        " `average_params(..., model_state=model_state)` of this model's statistics."
      )


@dataclasses.dataclass(frozen=True, eq=False)
class AverageParams:
  """The slot of :func:`average_params`."""

  start: jax.typing.ArrayLike | None
  decay: _Decay | None
  every: jax.typing.ArrayLike
  statistics: dict[str, jax.Array]  # the initial statistics, in at least float32
  method = _METHOD

  def init(self, params: optax.Params) -> AverageParamsState:
    """Returns the state without any snapshot."""

    def copy(p: jax.Array) -> jax.Array:
      average = _float32_copy(p)
      # An abstract leaf has no values to copy, so its average begins as zeros.
      return jnp.zeros_like(average) if isinstance(average, jax.ShapeDtypeStruct) else average

    return AverageParamsState(
      average=jax.tree.map(copy, params),
      statistics=jax.tree.map(copy, self.statistics),
      snapshot_count=jnp.zeros([], jnp.int32),
    )

  def new_statistics(self, extra_args: _types.ExtraArgs) -> dict[str, jax.Array]:
    """Returns, by path, the statistics after the forward pass; none if none are averaged."""
    if not self.statistics:
      return {}
    model_state = extra_args.get(_MODEL_STATE)
    if model_state is None:
      raise ValueError(
        "`average_params` averages statistics, so its `update` needs those after the forward pass;"
        " got model_state=None. Call `tx.update(grads, state, params, model_state=model_state)`, or"
        " let `optax_boost.make_train_step` do it."
      )
    _check_statistics(self.statistics, model_state, _METHOD)
    new_statistics = _statistics(model_state)
    return {path: jnp.asarray(new_statistics[path]) for path in self.statistics}

  def averaged(
    self,
    state: AverageParamsState,
    count: _types.IntScalar,
    made: _types.BoolScalar,
    statistics: dict[str, jax.Array],
    new_params: Callable[..., optax.Params],
    *operands: Any,
  ) -> AverageParamsState:
    """Returns the state after a step; ``new_params(*operands)`` gives the new params.

    `count` is the number of steps made. The new params are computed only if a snapshot is due.
    """
    is_due = self._is_due(count, made)
    snapshot_count = _arrays.increment_if(is_due, state.snapshot_count)
    averages = state.average, state.statistics
    # `_snapshot_if` carries the averages through a loop, which needs at least one array.
    if jax.tree.leaves(averages):
      averages = self._snapshot_if(
        is_due,
        snapshot_count,
        averages,
        lambda statistics, *operands: (new_params(*operands), statistics),
        statistics,
        *operands,
      )
    return AverageParamsState(*averages, snapshot_count)

  def _is_due(self, count: _types.IntScalar, made: _types.Condition) -> _types.BoolScalar:
    """Returns whether a call takes a snapshot.

    `count` is the number of steps after the call; `made` tells whether the call made a step.
    """
    start = 0 if self.start is None else self.start
    if _checks.is_integer(self.every) and self.every == 1 and _checks.concrete_number(start) == 0:
      return jnp.asarray(made)
    after = count - start
    return made & (after > 0) & (after % self.every == 0)

  def _snapshot_if(
    self,
    is_due: _types.BoolScalar,
    snapshot_count: _types.IntScalar,
    averages: _types.SameTree,
    snapshot: Callable[..., _types.Tree],
    *operands: Any,
  ) -> _types.SameTree:
    """Returns the averages; if `is_due`, updates them in place by a snapshot.

    The snapshot is ``snapshot(*operands)``, a tree like `averages`, which is computed only if
    `is_due`. `snapshot_count` counts this snapshot, too.
    """

    def take(
      averages: _types.SameTree, k: _types.IntScalar, traced_decay: Any, *operands: Any
    ) -> _types.SameTree:
      # `decay` is passed through the loop only if it is an array. A Python number would become an
      # array there, and would be rounded before `1 - decay` is computed.
      decay = self.decay if traced_decay is None else traced_decay

      def blend(a: jax.Array, p: jax.Array) -> jax.Array:
        # `k` is 0 before the first snapshot, where 1 / k has no derivative.
        return _blend(a, _rounded(p).astype(a.dtype), jnp.maximum(k, 1), decay)

      return _trees.map_leaves(blend, averages, snapshot(*operands))

    traced_decay = self.decay if _checks.is_array(self.decay) else None
    return _conditionals.replace_if(is_due, take, averages, snapshot_count, traced_decay, *operands)


def _rounded(p: jax.Array) -> jax.Array:
  """Returns `p`; in half precision, makes XLA round `p` as the stored param is rounded."""
  # XLA 18: without the barrier, XLA may leave out the rounding and average unrounded params.
  return jax.lax.optimization_barrier(p) if jnp.dtype(p.dtype).itemsize < 4 else p


def averaged_params(
  opt_state: optax.OptState,
  params: optax.Params,
  *,
  dtype: jax.typing.DTypeLike | None = None,
) -> optax.Params:
  """Reads the averages that :func:`average_params` keeps, as params to evaluate the model with.

  Args:
    opt_state: the state of an optimizer with :func:`average_params` around it.
    params: the current params. The result has the dtypes of `params`, and the values of `params`
      before the first snapshot.
    dtype: the dtype of floating-point leaves, such as jnp.float32, in which the averages of
      half-precision params are kept. None: the dtype of each param.

  Returns:
    A tree of the structure of `params`. May be called under ``jit``.

  Raises:
    ValueError: `opt_state` holds no average, averages of other params, or the stacked averages of
      several runs, over which ``jax.vmap`` must map the call; or `average_params` is not around the
      whole optimizer.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_boost
    >>> tx = optax_boost.average_params(optax.sgd(1.0), decay=0.5)
    >>> params = jnp.array(8.0)
    >>> state = tx.init(params)
    >>> for _ in range(2):
    ...   updates, state = tx.update(params / 2, state, params)
    ...   params = optax.apply_updates(params, updates)
    >>> round(float(optax_boost.averaged_params(state, params)), 4)  # (0.5 * 4 + 2) / 1.5
    2.6667
  """
  _checks.check_floating_dtype("dtype", dtype, optional=True)
  _nesting.check(opt_state)
  state = averaging_state(opt_state)
  if state is None:
    raise ValueError(
      "`averaged_params` needs the state of an optimizer with `optax_boost.average_params` around"
      f" it; got {_checks.shorten(jax.tree.structure(opt_state), 200)}."
    )
  if dtype is not None:
    # `params` is cast, since it supplies the leaves that are not averaged.
    floating = lambda p: jnp.issubdtype(jnp.result_type(p), jnp.floating)  # noqa: E731
    params = jax.tree.map(lambda p: jnp.asarray(p, dtype) if floating(p) else p, params)
  return _trees.map_with(lambda p, a: p if a is None else a, params, _averages(state, params))


def averaged_model_state(
  opt_state: optax.OptState, model_state: _types.ModelState
) -> _types.ModelState:
  """Reads the averages of statistics that :func:`average_params` keeps beside the averaged params.

  Args:
    opt_state: the state of an optimizer with an ``average_params(..., model_state=model_state)``.
    model_state: the current statistics. The result has the dtypes of `model_state`, and the values
      of `model_state` in leaves that are not averaged, or in all leaves before the first snapshot.

  Returns:
    A tree of the structure of `model_state`. May be called under ``jit``.

  Raises:
    ValueError: `opt_state` does not hold averages of statistics exactly once, or holds averages of
      another model, or stacked averages of several runs, over which ``jax.vmap`` must map the call.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_boost
    >>> params, model_state = jnp.array(8.0), {"mean": jnp.array(0.0)}
    >>> tx = optax_boost.average_params(optax.sgd(1.0), start=0, model_state=model_state)
    >>> state = tx.init(params)
    >>> for mean in (1.0, 2.0):
    ...   model_state = {"mean": jnp.array(mean)}
    ...   updates, state = tx.update(params / 2, state, params, model_state=model_state)
    ...   params = optax.apply_updates(params, updates)
    >>> float(optax_boost.averaged_model_state(state, model_state)["mean"])
    1.5
  """
  function = "averaged_model_state"
  state = averaging_state(opt_state)
  if state is None or not state.statistics:
    raise ValueError(
      f"`{function}` needs the state of an optimizer with `optax_boost.average_params(...,"
      " model_state=model_state)` around it; got"
      f" {_checks.shorten(jax.tree.structure(opt_state), 200)}."
    )
  taken = _snapshots_taken(state, function, "opt_state, model_state")
  averages = dict(zip(sorted(state.statistics), jax.tree.leaves(state.statistics), strict=True))
  _check_statistics(averages, model_state, function)

  def read(x: jax.Array, path: str) -> jax.Array:
    if path not in averages:
      return x
    return jnp.where(taken > 0, averages[path].astype(jnp.result_type(x)), x)

  return _trees.map_with(read, model_state, _statistic_paths(model_state))


def averaging_state(opt_state: optax.OptState) -> AverageParamsState | None:
  """Returns the state of :func:`average_params` in the state of an optimizer, or None."""
  return opt_state.averaging if isinstance(opt_state, _state.StepState) else None


def _snapshots_taken(state: AverageParamsState, function: str, arguments: str) -> _types.IntScalar:
  """Returns the number of snapshots; raises ValueError if `state` stacks several runs.

  The error message tells how to map the public `function` over the runs. `arguments` is the text of
  the arguments of `function`.
  """
  advice = f"Map over its members: `jax.vmap(optax_boost.{function})({arguments})`."
  _tree_checks.require_one_run(state.snapshot_count, function, advice)
  # In the state of an NNX optimizer, a variable wraps the count.
  (taken,) = jax.tree.leaves(state.snapshot_count)
  return jnp.asarray(taken)


def _averages(state: AverageParamsState, params: optax.Params) -> list[jax.Array | None]:
  """Returns the average of each leaf of `params`, or None for a leaf that is not averaged."""
  taken = _snapshots_taken(state, "averaged_params", "opt_state, params")
  targets = jax.tree.leaves(params, is_leaf=_masks.is_masked)
  averages = _masks.leaves_like(state.average, params)
  pairs = list(zip(averages or [], targets, strict=False))
  fits = [_masks.is_masked(a) or jnp.shape(a) == jnp.shape(p) for a, p in pairs]
  if averages is None or not all(fits):
    raise ValueError(
      "`averaged_params` needs the params with which the state was made; got the shapes"
      f" {_checks.shorten(jax.tree.map(jnp.shape, params), 200)} for averages of the shapes"
      f" {_checks.shorten(jax.tree.map(jnp.shape, state.average), 200)}."
    )
  return [
    None if _masks.is_masked(a) else jnp.where(taken > 0, a.astype(jnp.result_type(p)), p)
    for a, p in pairs
    if not _masks.is_masked(p)
  ]

"""Averages of the params along the training, with any optimizer.

The snapshots x_1, ..., x_k are the params after the steps that are due. Their average is one of

  start:      a <- a + (x_k - a) / k, the mean of all snapshots
  decay = d:  a <- a + (x_k - a) (1 - d) / (1 - d^k), weights d^(k-i) divided by their sum
  decay(k):   a <- a + (x_k - a) (1 - decay(k)), from the initial params on

Mutable statistics, as BatchNorm's mean and variance, are averaged by the same formulas.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_boost._form import (
  _compositions,
  _driver,
  _finiteness,
  _protocol,
  _skipped_steps,
  _transformation,
)
from optax_boost._foundation import (
  _arrays,
  _checks,
  _conditionals,
  _masks,
  _paths,
  _tree_checks,
  _trees,
  _types,
  _warnings,
)

_METHOD = "average_params"
# The extra argument of `update` with the statistics after the forward pass.
_MODEL_STATE = "model_state"
# The name in front of the statistics in what Linen's modules have, and in what `split_loss` makes.
_COLLECTION = "batch_stats/"


def _blend(a: jax.Array, x: jax.Array, k: jax.Array, decay: Any) -> jax.Array:
  """The average after the k-th snapshot x; entries of x that are not finite are ignored."""
  dtype = a.real.dtype
  if callable(decay):
    share = jnp.asarray(1 - decay(k), dtype)
  elif decay is not None:
    fresh = jnp.asarray(1 - decay, dtype)
    share = fresh / -jnp.expm1(k.astype(dtype) * jnp.log1p(-fresh))
  else:
    share = 1 / k.astype(dtype)
  # The first snapshot has the share 1, up to rounding.
  is_whole = share == 1 if callable(decay) else k == 1
  mixed = jnp.where(is_whole, x, a + share * (x - a))
  # Finite snapshots that are far apart can carry the average beyond the range.
  good = _finiteness.finite_entries(x) & _finiteness.finite_entries(mixed)
  return jnp.where(good, mixed, a)


@_protocol.declares(
  metrics=("average_params/snapshot_count",),
  outcome=("made",),
)
class AverageParamsState(NamedTuple):
  """State of :func:`average_params`; :func:`averaged_params` reads the average.

  Attributes:
    average: tree of the params' structure, their average in at least float32.
    statistics: dict from the path of a statistic to its average in at least float32; empty if none
      are averaged.
    count: scalar int32, the steps made.
    snapshot_count: scalar int32, the snapshots taken.
    inner_state: the inner optimizer's state.
    made: scalar bool, whether the last call made a step.
  """

  average: optax.Params
  statistics: dict[str, jax.Array]
  count: jax.Array  # type: ignore[assignment]  # tuples have a method of this name
  snapshot_count: jax.Array
  inner_state: optax.OptState
  made: jax.Array


def average_params(
  inner: optax.GradientTransformation,
  *,
  start: jax.typing.ArrayLike | None = None,
  decay: jax.typing.ArrayLike | Callable[[jax.Array], jax.typing.ArrayLike] | None = None,
  every: jax.typing.ArrayLike = 1,
  model_state: Any = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Keeps an average of the params along the training; the updates are `inner`'s.

  A snapshot is taken of the params after every `every`-th step. The average is one of two:

  .. math::
    \frac{1}{k} \sum_{i=1}^k x_i, \qquad
    \frac{\sum_{i=1}^k d^{k-i} x_i}{\sum_{i=1}^k d^{k-i}}

  of snapshots :math:`x_1, \ldots, x_k`: of all after step `start` (SWA), or with weights that fall
  by `decay` d from each snapshot to the one before (EMA). Name exactly one of the two.
  Evaluate the model at :func:`averaged_params`. A model with BatchNorm needs statistics there:
  averages, with `model_state`, or new ones by ``optax_boost.nnx.estimate_batch_stats``,
  ``optax_boost.linen.estimate_batch_stats``.

  Args:
    inner: the optimizer. The params after a step are the given ones plus its updates, so put the
      wrapper around everything that changes updates: ``average_params(optax.chain(...), ...)``. A
      step that a wrapper inside or around it skips is not counted. Around ``optax.lookahead`` the
      average is a pair, too.
    start: the mean of all snapshots after this many steps. Lowering it takes in older, worse
      params.
    decay: exponential weights, above 0 and below 1, corrected for the start: after the first
      snapshot the average is that snapshot. Raising it smooths more and lags more; about
      1 / (1 - decay) snapshots count. Or a function of the number of the snapshot, 1 for the first,
      to the weight of the average before it, which begins as the initial params: timm's warm-up is
      ``lambda k: jnp.minimum(0.9999, (1 + k) / (10 + k))``, diffusers' ``lambda k:
      jnp.minimum(0.9999, 1 - (1 + k) ** (-2 / 3))``.
    every: the steps from one snapshot to the next. Raising it costs less time, and spaces the
      snapshots over a longer part of the training.
    model_state: the initial mutable statistics, to average them beside the params, as a mean
      teacher does: what ``split_loss`` returned, ``nnx.state(model, nnx.BatchStat)``, or any tree
      of arrays, of which the floating-point leaves are averaged. ``update`` then needs the
      statistics after the forward pass as its extra argument `model_state`: a tree in which each of
      these leaves has the same path (a leading ``batch_stats`` does not count). The train steps
      pass it. :func:`averaged_model_state` reads the averages. None: statistics are not averaged.

  Returns:
    An :class:`optax.GradientTransformationExtraArgs` that needs `params`. Averages are kept in
    float32 (float64 for float64 params), sharded as the params are. Steps without a snapshot do not
    touch them. An entry that is not finite is not taken: the average keeps its old value. Nor are
    the statistics of a micro-batch that :func:`accumulate` drops.

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
  inner = _checks.check_transformation("inner", inner)
  if start is not None:
    _checks.check_whole_number("start", start, minimum=0)
  if decay is not None and not callable(decay):
    _checks.check_number("decay", decay, positive=True, below=1)
  _checks.check_whole_number("every", every)
  if (start is None) == (decay is None):
    raise ValueError(
      "`average_params` needs exactly one of `start` (the mean of all snapshots after a step) and"
      f" `decay` (exponential weights); got {'none' if start is None else 'start and decay'}."
    )
  _tree_checks.check_traceable("model_state", model_state)
  # Copies: a train step may donate the arrays of the model that they are of.
  statistics = jax.tree.map(_widened_copy, _statistics(model_state))
  if model_state is not None and not statistics:
    _warnings.warn(
      "`average_params` averages no statistics: `model_state` has no floating-point leaf.",
      _warnings.NoEffectWarning,
    )
  method = _AverageParams(inner, start, decay, every, statistics)
  return _transformation.wrapper(
    _METHOD,
    AverageParamsState,
    method,
    needs_params=True,
    allows_complex=True,
    allows_pairs=True,
    keeps="average",
    extra_args=frozenset([_MODEL_STATE] if statistics else []),
  )


def _widened_copy(x: Any) -> Any:
  """A copy in at least float32; an abstract leaf stays abstract."""
  dtype = _arrays.accumulator_dtype(jnp.result_type(x))
  if isinstance(x, jax.ShapeDtypeStruct):
    return jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding)
  return jnp.array(x, dtype)


def _statistics(model_state: _types.Tree) -> dict[str, Any]:
  """The floating-point leaves of a model state by their paths, without the collection's name."""
  paths = _statistic_paths(model_state)
  pairs = zip(paths, jax.tree.leaves(model_state), strict=True)
  return {path: x for path, x in pairs if jnp.issubdtype(jnp.result_type(x), jnp.inexact)}


def _statistic_paths(model_state: _types.Tree) -> list[str]:
  return [path.removeprefix(_COLLECTION) for path in _paths.leaf_paths(model_state)]


def _check_statistics(averages: dict[str, Any], model_state: _types.Tree, function: str) -> None:
  """Raises ValueError unless a model state has all statistics that are averaged."""
  found = _statistics(model_state)
  for path, average in averages.items():
    shape, got = jnp.shape(average), jnp.shape(found[path]) if path in found else "none"
    if got != shape:
      raise ValueError(
        f"`{function}` needs a `model_state` with all statistics that are averaged; the leaf"
        f" '{path}' must have the shape {shape}, got {got} among the leaves"
        f" {_checks.shorten(sorted(found), 200)}. Make the optimizer with"
        " `average_params(..., model_state=model_state)` of this model's statistics."
      )


@dataclasses.dataclass(frozen=True, eq=False)
class _AverageParams:
  """The checked arguments of :func:`average_params`."""

  inner: optax.GradientTransformationExtraArgs
  start: Any
  decay: Any
  every: Any
  # The initial statistics in the dtypes of their averages.
  statistics: dict[str, Any]

  def init(self, params: optax.Params) -> AverageParamsState:
    def copy(p: Any) -> jax.Array:
      wide = _widened_copy(p)
      # An abstract leaf has no values to copy; zeros are kept until the first snapshot only.
      return jnp.zeros_like(wide) if isinstance(wide, jax.ShapeDtypeStruct) else wide

    return AverageParamsState(
      average=jax.tree.map(copy, params),
      statistics=jax.tree.map(copy, self.statistics),
      count=jnp.zeros([], jnp.int32),
      snapshot_count=jnp.zeros([], jnp.int32),
      inner_state=self.inner.init(params),
      made=jnp.zeros([], bool),
    )

  def before(
    self, call: _driver.Call, state: AverageParamsState
  ) -> tuple[_driver.Call, AverageParamsState, dict[str, Any]]:
    """The call of the inner optimizer, the state, and the statistics after the forward pass."""
    if not self.statistics:
      return call, state, {}
    model_state = call.gradients()[1].get(_MODEL_STATE)
    if model_state is None:
      raise ValueError(
        "`average_params` averages statistics, so its `update` needs those after the forward pass;"
        " got model_state=None. Call `tx.update(grads, state, params, model_state=model_state)`, or"
        " let `optax_boost.make_train_step` do it."
      )
    _check_statistics(self.statistics, model_state, _METHOD)
    found = _statistics(model_state)
    statistics = {path: jnp.asarray(found[path]) for path in self.statistics}
    # optax's line searches refuse arguments that their closures do not take.
    if not _compositions.names_extra_argument(self.inner, _MODEL_STATE):
      call = call._replace(gradients=functools.partial(_without_model_state, call))
    return call, state, statistics

  def after(
    self,
    call: _driver.Call,
    outcome: _driver.Outcome,
    state: AverageParamsState,
    statistics: dict[str, Any],
  ) -> tuple[Any, AverageParamsState]:
    count = _arrays.increment_if(outcome.made, state.count)
    due = self._is_due(count, outcome.made)
    number = _arrays.increment_if(due, state.snapshot_count)

    averages = state.average, state.statistics
    # The loop needs an array to carry.
    if jax.tree.leaves(averages):
      # The step may be made by the other micro-batches of a window.
      left_out = _skipped_steps.left_out(state.inner_state, outcome.state) if statistics else None
      statistics = _conditionals.nan_if(left_out, statistics)
      stepped, *operands = self._stepped(call, outcome.result)
      averages = self._snapshot_if(
        due,
        number,
        averages,
        lambda statistics, *operands: (stepped(*operands), statistics),
        statistics,
        *operands,
      )
    average, of_statistics = averages
    return outcome.result, state._replace(
      average=average, statistics=of_statistics, count=count, snapshot_count=number
    )

  def _is_due(self, count: jax.Array, made: jax.Array) -> jax.Array:
    """Whether a snapshot is taken after step `count`, if it was made."""
    start = 0 if self.start is None else self.start
    if _checks.is_integer(self.every) and self.every == 1 and _checks.concrete_number(start) == 0:
      return jnp.asarray(made)
    after = count - start
    return made & (after > 0) & (after % self.every == 0)

  def _stepped(self, call: _driver.Call, result: Any) -> tuple[Any, ...]:
    """A function that computes the params after the step, and its arguments."""
    if call.plan.applies_updates:
      return (lambda params: params), call.plan.access.read_new(result)
    return optax.apply_updates, call.params, result

  def _snapshot_if(
    self,
    due: jax.Array,
    number: jax.Array,
    averages: Any,
    snapshot: Callable[..., Any],
    *operands: Any,
  ) -> Any:
    """The averages with ``snapshot(*operands)`` if it is due, in place."""

    def take(averages: Any, number: jax.Array, decay: Any, *operands: Any) -> Any:
      # A Python number is not made an array here, so that it is rounded only once.
      decay = self.decay if decay is None else decay

      def blend(a: jax.Array, p: jax.Array) -> jax.Array:
        # Before the first snapshot, 1 / number has no derivative.
        return _blend(a, _rounded(p).astype(a.dtype), jnp.maximum(number, 1), decay)

      return _trees.map_leaves(blend, averages, snapshot(*operands))

    traced_decay = self.decay if _checks.is_array(self.decay) else None
    return _conditionals.replace_if(due, take, averages, number, traced_decay, *operands)


def _without_model_state(call: _driver.Call) -> tuple[optax.Updates, dict[str, Any]]:
  updates, extra_args = call.gradients()
  return updates, {name: x for name, x in extra_args.items() if name != _MODEL_STATE}


def _rounded(p: jax.Array) -> jax.Array:
  """A param in half precision as it is stored.

  Without the barrier the rounding between the step and the average may be left out (XLA 18).
  """
  return jax.lax.optimization_barrier(p) if jnp.dtype(p.dtype).itemsize < 4 else p


def averaged_params(
  opt_state: optax.OptState,
  params: optax.Params,
  *,
  dtype: jax.typing.DTypeLike | None = None,
) -> optax.Params:
  """The averages that :func:`average_params` keeps, as params to evaluate the model with.

  Args:
    opt_state: the state of any optimizer with :func:`average_params` in it: inside a chain, around
      or inside other wrappers, or for a part of the leaves.
    params: the current params: they give dtypes, the values of leaves that are not averaged
      (``optax.masked``, ``optax.partition``), and all values before the first snapshot.
    dtype: of floating-point leaves, as jnp.float32 for params in half precision, whose averages are
      kept in float32. None: the params' own.

  Returns:
    A tree like `params`, of its dtypes unless `dtype` is given. May be called under ``jit``.

  Raises:
    ValueError: `opt_state` holds no :func:`average_params`, several of the same leaf, one of other
      params, or a population's, which needs ``jax.vmap``.

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
  # Those inside others, too.
  states = [node for node in _trees.nodes(opt_state) if isinstance(node, AverageParamsState)]
  if not states:
    raise ValueError(
      "`averaged_params` needs the state of an optimizer with `optax_boost.average_params` in it;"
      f" got {_checks.shorten(jax.tree.structure(opt_state), 200)}."
    )
  if dtype is not None:
    # Leaves that are not averaged are widened, too.
    floating = lambda p: jnp.issubdtype(jnp.result_type(p), jnp.floating)  # noqa: E731
    params = jax.tree.map(lambda p: jnp.asarray(p, dtype) if floating(p) else p, params)
  leaves, structure = jax.tree.flatten(params)
  averaged: list[Any] = [None] * len(leaves)
  for state in states:
    for i, average in enumerate(_averages(state, params)):
      if average is not None and averaged[i] is not None:
        path = _paths.leaf_name(_paths.leaf_paths(params)[i])
        raise ValueError(
          f"`averaged_params` found two averages of the leaf '{path}'. Pass the part of the state"
          " with the one that you mean."
        )
      averaged[i] = averaged[i] if average is None else average
  return jax.tree.unflatten(
    structure, [p if a is None else a for a, p in zip(averaged, leaves, strict=True)]
  )


def averaged_model_state(opt_state: optax.OptState, model_state: Any) -> Any:
  """The averages of statistics that :func:`average_params` keeps, beside those of the params.

  Args:
    opt_state: the state of any optimizer with an ``average_params(..., model_state=model_state)``
      in it.
    model_state: the current statistics: they give dtypes, the values of leaves that are not
      averaged, and all values before the first snapshot.

  Returns:
    A tree like `model_state`, of its dtypes. May be called under ``jit``.

  Raises:
    ValueError: `opt_state` holds no averages of statistics, several of them, those of another
      model, or a population's, which needs ``jax.vmap``.

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
  states = averaging_statistics(opt_state)
  if len(states) != 1:
    raise ValueError(
      f"`{function}` needs the state of an optimizer with one `optax_boost.average_params(...,"
      f" model_state=model_state)` in it; got {len(states)} of these in"
      f" {_checks.shorten(jax.tree.structure(opt_state), 200)}."
    )
  (state,) = states
  taken = _snapshots_taken(state, function, "opt_state, model_state")
  averages = dict(zip(sorted(state.statistics), jax.tree.leaves(state.statistics), strict=True))
  _check_statistics(averages, model_state, function)

  def read(x: Any, path: str) -> Any:
    if path not in averages:
      return x
    return jnp.where(taken > 0, averages[path].astype(jnp.result_type(x)), x)

  return _trees.map_with(read, model_state, _statistic_paths(model_state))


def averaging_statistics(opt_state: optax.OptState) -> list[AverageParamsState]:
  """The states that hold averages of statistics."""
  states = [node for node in _trees.nodes(opt_state) if isinstance(node, AverageParamsState)]
  return [state for state in states if state.statistics]


def _snapshots_taken(state: AverageParamsState, function: str, arguments: str) -> jax.Array:
  """The number of snapshots; ValueError for the state of a population."""
  advice = f"Map over its members: `jax.vmap(optax_boost.{function})({arguments})`."
  _tree_checks.require_one_run(state.snapshot_count, function, advice)
  # An NNX optimizer holds each array in a variable.
  (taken,) = jax.tree.leaves(state.snapshot_count)
  return jnp.asarray(taken)


def _averages(state: AverageParamsState, params: optax.Params) -> list[jax.Array | None]:
  """The average of each leaf of the params, or None where it is not averaged."""
  taken = _snapshots_taken(state, "averaged_params", "opt_state, params")
  targets = jax.tree.leaves(params, is_leaf=_masks.is_masked)
  averages = _masks.leaves_like(state.average, params)
  pairs = list(zip(averages or [], targets, strict=False))
  fits = [_masks.is_masked(a) or jnp.shape(a) == jnp.shape(p) for a, p in pairs]
  if averages is None or not all(fits):
    raise ValueError(
      "`averaged_params` needs the params that the state is of; got the shapes"
      f" {_checks.shorten(jax.tree.map(jnp.shape, params), 200)} for averages of the shapes"
      f" {_checks.shorten(jax.tree.map(jnp.shape, state.average), 200)}."
    )
  return [
    None if _masks.is_masked(a) else jnp.where(taken > 0, a.astype(jnp.result_type(p)), p)
    for a, p in pairs
    if not _masks.is_masked(p)
  ]

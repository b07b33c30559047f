"""Averages of the params along the training, with any optimizer.

The snapshots x_1, ..., x_k are the params after the steps that are due. Their average is one of

  start:      a <- a + (x_k - a) / k, the mean of all snapshots
  decay = d:  a <- a + (x_k - a) (1 - d) / (1 - d^k), weights d^(k-i) divided by their sum
  decay(k):   a <- a + (x_k - a) (1 - decay(k)), from the initial params on
"""

from collections.abc import Callable
import dataclasses
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_boost._form import _driver
from optax_boost._form import _finiteness
from optax_boost._form import _protocol
from optax_boost._form import _transformation
from optax_boost._foundation import _arrays
from optax_boost._foundation import _base
from optax_boost._foundation import _conditional
from optax_boost._foundation import _masking
from optax_boost._foundation import _tree

_METHOD = "average_params"


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
    count: scalar int32, the steps made.
    snapshot_count: scalar int32, the snapshots taken.
    inner_state: the inner optimizer's state.
    made: scalar bool, whether the last call made a step.
  """

  average: optax.Params
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
) -> optax.GradientTransformationExtraArgs:
  r"""Keeps an average of the params along the training; the updates are `inner`'s.

  A snapshot is taken of the params after every `every`-th step. The average is one of two:

  .. math::
    \frac{1}{k} \sum_{i=1}^k x_i, \qquad
    \frac{\sum_{i=1}^k d^{k-i} x_i}{\sum_{i=1}^k d^{k-i}}

  of snapshots :math:`x_1, \ldots, x_k`: of all after step `start` (SWA), or with weights that fall
  by `decay` d from each snapshot to the one before (EMA). Name exactly one of the two.
  Evaluate the model at :func:`averaged_params`. A model with BatchNorm needs new statistics there:
  ``optax_boost.nnx.estimate_batch_stats``, ``optax_boost.linen.estimate_batch_stats``.

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

  Returns:
    An :class:`optax.GradientTransformationExtraArgs` that needs `params`. Averages are kept in
    float32 (float64 for float64 params), sharded as the params are. Steps without a snapshot do not
    touch them. An entry that is not finite is not taken: the average keeps its old value.

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
  inner = _base.check_transformation("inner", inner)
  if start is not None:
    _base.check_whole_number("start", start, minimum=0)
  if decay is not None and not callable(decay):
    _base.check_number("decay", decay, positive=True, below=1)
  _base.check_whole_number("every", every)
  if (start is None) == (decay is None):
    raise ValueError(
      "`average_params` needs exactly one of `start` (the mean of all snapshots after a step) and"
      f" `decay` (exponential weights); got {'none' if start is None else 'start and decay'}."
    )
  method = _AverageParams(inner, start, decay, every)
  return _transformation.wrapper(
    _METHOD,
    AverageParamsState,
    method,
    needs_params=True,
    allows_complex=True,
    allows_pairs=True,
    keeps="average",
  )


@dataclasses.dataclass(frozen=True, eq=False)
class _AverageParams:
  """The checked arguments of :func:`average_params`."""

  inner: optax.GradientTransformationExtraArgs
  start: Any
  decay: Any
  every: Any

  def init(self, params: optax.Params) -> AverageParamsState:
    def copy(p: Any) -> jax.Array:
      dtype = _arrays.accumulator_dtype(p.dtype)
      # An abstract leaf has no values to copy; zeros are kept until the first snapshot only.
      abstract = isinstance(p, jax.ShapeDtypeStruct)
      return jnp.zeros_like(p, dtype) if abstract else jnp.array(p, dtype)

    return AverageParamsState(
      average=jax.tree.map(copy, params),
      count=jnp.zeros([], jnp.int32),
      snapshot_count=jnp.zeros([], jnp.int32),
      inner_state=self.inner.init(params),
      made=jnp.zeros([], bool),
    )

  def before(
    self, call: _driver.Call, state: AverageParamsState
  ) -> tuple[_driver.Call, AverageParamsState, None]:
    return call, state, None

  def after(
    self,
    call: _driver.Call,
    outcome: _driver.Outcome,
    state: AverageParamsState,
    context: None,
  ) -> tuple[Any, AverageParamsState]:
    count = _arrays.increment_if(outcome.made, state.count)
    due = self._is_due(count, outcome.made)
    number = _arrays.increment_if(due, state.snapshot_count)

    average = state.average
    # The loop needs an array to carry.
    if jax.tree.leaves(average):
      average = self._snapshot_if(due, number, average, *self._stepped(call, outcome.result))
    return outcome.result, state._replace(average=average, count=count, snapshot_count=number)

  def _is_due(self, count: jax.Array, made: jax.Array) -> jax.Array:
    """Whether a snapshot is taken after step `count`, if it was made."""
    start = 0 if self.start is None else self.start
    if _base.is_integer(self.every) and self.every == 1 and _base.concrete_number(start) == 0:
      return jnp.asarray(made)
    after = count - start
    return made & (after > 0) & (after % self.every == 0)

  def _stepped(self, call: _driver.Call, result: Any) -> tuple[Any, ...]:
    """A function that computes the params after the step, and its arguments."""
    if call.landing.in_params:
      return (lambda params: params), call.landing.read(result)
    return optax.apply_updates, call.params, result

  def _snapshot_if(
    self,
    due: jax.Array,
    number: jax.Array,
    average: optax.Params,
    stepped: Callable[..., optax.Params],
    *operands: Any,
  ) -> optax.Params:
    """The average with the snapshot ``stepped(*operands)`` if it is due, in place."""

    def take(average: optax.Params, number: jax.Array, decay: Any, *operands: Any) -> optax.Params:
      # A Python number is not made an array here, so that it is rounded only once.
      decay = self.decay if decay is None else decay

      def blend(a: jax.Array, p: jax.Array) -> jax.Array:
        # Before the first snapshot, 1 / number has no derivative.
        return _blend(a, _rounded(p).astype(a.dtype), jnp.maximum(number, 1), decay)

      return _tree.map_leaves(blend, average, stepped(*operands))

    traced_decay = self.decay if _base.is_array(self.decay) else None
    return _conditional.replace_if(due, take, average, number, traced_decay, *operands)


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
  _base.check_floating_dtype("dtype", dtype, optional=True)
  # Those inside others, too.
  states = [node for node in _protocol.nodes(opt_state) if isinstance(node, AverageParamsState)]
  if not states:
    raise ValueError(
      "`averaged_params` needs the state of an optimizer with `optax_boost.average_params` in it;"
      f" got {_base.shorten(jax.tree.structure(opt_state), 200)}."
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
        path = _tree.leaf_name(_tree.leaf_paths(params)[i])
        raise ValueError(
          f"`averaged_params` found two averages of the leaf '{path}'. Pass the part of the state"
          " with the one that you mean."
        )
      averaged[i] = averaged[i] if average is None else average
  return jax.tree.unflatten(
    structure, [p if a is None else a for a, p in zip(averaged, leaves, strict=True)]
  )


def _averages(state: AverageParamsState, params: optax.Params) -> list[jax.Array | None]:
  """The average of each leaf of the params, or None where it is not averaged."""
  advice = "Map over its members: `jax.vmap(optax_boost.averaged_params)(opt_state, params)`."
  _base.require_one_run(state.snapshot_count, "averaged_params", advice)
  # An NNX optimizer holds each array in a variable.
  (taken,) = jax.tree.leaves(state.snapshot_count)
  targets = jax.tree.leaves(params, is_leaf=_tree.is_masked)
  averages = _masking.leaves_like(state.average, params)
  pairs = list(zip(averages or [], targets, strict=False))
  fits = [_tree.is_masked(a) or jnp.shape(a) == jnp.shape(p) for a, p in pairs]
  if averages is None or not all(fits):
    raise ValueError(
      "`averaged_params` needs the params that the state is of; got the shapes"
      f" {_base.shorten(jax.tree.map(jnp.shape, params), 200)} for averages of the shapes"
      f" {_base.shorten(jax.tree.map(jnp.shape, state.average), 200)}."
    )
  return [
    None if _tree.is_masked(a) else jnp.where(taken > 0, a.astype(jnp.result_type(p)), p)
    for a, p in pairs
    if not _tree.is_masked(p)
  ]

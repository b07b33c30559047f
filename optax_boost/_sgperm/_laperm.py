r"""LaPerm: free training, brought back to a permutation of the initial weights every k steps.

For each weight vector w (the n weights that lead into one output) with initial values v:

  w <- w + u                          u from the inner optimizer, at each step
  w_i <- v_(r),  r the rank of w_i    every k steps: the r-th smallest of v where the r-th smallest
                                      of w is

Of all permutations of v this is the nearest to w in the Euclidean norm: arXiv:2006.07541.
"""

from collections.abc import Callable
from collections.abc import Iterable
import functools
from typing import Any
from typing import Literal
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_boost import _arrays
from optax_boost import _base
from optax_boost import _conditional
from optax_boost import _layers
from optax_boost import _protocol
from optax_boost._sgperm import _execution
from optax_boost._sgperm import _fast
from optax_boost._sgperm import _layout
from optax_boost._sgperm._execution import Weights
from optax_boost._sgperm._states import LapermState

_METHOD = "laperm"


def laperm(
  inner: optax.GradientTransformation,
  sync_every: int | jax.Array | Callable[[jax.Array], jax.typing.ArrayLike],
  *,
  exclude: _base.LeafSelector = None,
  layout: Literal["flax", "torch"] = "flax",
  layers: _layers.Layers | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Trains freely and, every few steps, returns to a permutation of the initial weights.

  At a synchronization each weight vector gets its initial values back, in the order of the trained
  ones: of all their permutations the nearest. Between two synchronizations params are no
  permutation: evaluate and save :func:`permuted_params` of the state, those of the last
  synchronization. After a synchronization params are the permutation to
  the bit with :func:`make_train_step` and :func:`apply_gradients`, and within one rounding of it
  with ``optax.apply_updates``.

  A weight vector holds the weights into one output: for Flax all axes but the last, and a whole
  bias, of any rank. A vector whose initial weights are all equal, such as a zero bias, returns to
  them, which undoes its training: exclude such leaves, or start them at random. Inside
  ``shard_map`` leaves must be whole: a permutation counts their entries.

  Weights that become NaN count as the largest of their vector at the next synchronization. A step
  whose updates are all zero, as between two inner steps of ``accumulate`` and after an overflow
  under a loss scale, is not counted.

  Args:
    inner: an optimizer that descends, with its learning rate. Its state is not reset.
    sync_every: inner steps from one synchronization to the next, or a function of the number of
      inner steps made, with which it can grow: a synchronization follows the steps whose number is
      a multiple. Raising it trains more freely.
    exclude: the leaves that `inner` trains alone, as in :func:`lars`.
    layout: where a kernel has its output axis: ``"flax"``, last; ``"torch"``, first.
    layers: what :func:`layer_axes` returns, for the axes along a weight vector; see :func:`sgperm`.

  Returns:
    An :class:`optax.GradientTransformationExtraArgs` that needs `params` and hands its extra
    arguments to `inner`. Its updates have the wider of the dtypes of params and inner updates.

  Raises:
    ValueError: in ``init``: weights that are not finite, or an :func:`average_params` inside.

  Examples:
    >>> import jax, jax.numpy as jnp, optax, optax_boost
    >>> params = {"kernel": jax.random.normal(jax.random.key(0), (16, 4))}
    >>> x = jax.random.normal(jax.random.key(1), (64, 16))
    >>> y = x @ jax.random.permutation(jax.random.key(2), params["kernel"])
    >>> loss = lambda p: jnp.mean((x @ p["kernel"] - y) ** 2)
    >>> tx = optax_boost.laperm(optax.adam(0.1), sync_every=10)
    >>> @jax.jit
    ... def step(params, state):
    ...   return optax_boost.apply_gradients(tx, jax.grad(loss)(params), state, params)
    >>> trained, state = params, tx.init(params)
    >>> for _ in range(100):
    ...   trained, state = step(trained, state)
    >>> bool(loss(optax_boost.permuted_params(state).params) < 0.01 * loss(params))
    True

  References:
    Qiu, Suda, `Train-by-Reconnect: Decoupling Locations of Weights from Their Values
    <https://arxiv.org/abs/2006.07541>`_, 2020.
  """
  inner = _base.check_transformation("inner", inner)
  if not callable(sync_every):
    _base.check_whole_number("sync_every", sync_every)
  cutter = _layout.Cutter(_METHOD, layout, layers, exclude)
  method = _Laperm(inner, sync_every, cutter)
  return optax.GradientTransformationExtraArgs(method.init, method.update)


class _Laperm(NamedTuple):
  """The checked arguments of :func:`laperm`."""

  inner: optax.GradientTransformationExtraArgs
  sync_every: Any
  cutter: _layout.Cutter

  def init(self, params: optax.Params) -> LapermState:
    layouts = self.cutter.for_init(params)
    leaves, structure = jax.tree.flatten(params)

    def held(of_leaves: Iterable[Any]) -> Any:
      pairs = zip(layouts, of_leaves, strict=True)
      masked = [optax.MaskedNode() if lay.excluded else x for lay, x in pairs]
      return jax.tree.unflatten(structure, masked)

    inner_state = self.inner.init(params)
    _protocol.refuse_observers(_METHOD, inner_state)
    return LapermState(
      count=jnp.zeros([], jnp.int32),
      synced=jnp.ones([], bool),
      permuted_params=held(map(_arrays.copy_arrays, leaves)),
      permutation=held(map(_layout.identity, leaves)),
      ranks=held(map(_layout.ranks, layouts, leaves)),
      inner_state=inner_state,
    )

  def update(
    self,
    updates: optax.Updates,
    state: LapermState,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, LapermState]:
    layouts = self.cutter.for_update(updates, state, LapermState, params)
    updates, inner_state = self.inner.update(updates, state.inner_state, params, **extra_args)
    structure: Any = jax.tree.structure(params)
    steps = structure.flatten_up_to(updates)
    # An `accumulate` or a loss scale inside returns zeros where it made no step.
    stepped = functools.reduce(jnp.logical_or, [jnp.any(u != 0) for u in steps], jnp.array(False))
    count = jnp.where(stepped, optax.safe_increment(state.count), state.count)
    due = stepped & (count % self._period(state.count) == 0)

    held = [i for i, lay in enumerate(layouts) if not lay.excluded]
    ours = [layouts[i] for i in held]
    currents = [jax.tree.leaves(params)[i] for i in held]
    wide = [
      steps[i].astype(jnp.promote_types(steps[i].dtype, w.dtype))
      for i, w in zip(held, currents, strict=True)
    ]
    trees = (state.permuted_params, state.permutation, state.ranks)
    weights = list(map(Weights, *map(jax.tree.leaves, trees)))
    # Sharded as the params: a state restored without shardings has none.
    like = (wide, [Weights(w, w, w) for w in currents])
    synchronize = _execution.auto_sharded(functools.partial(_synchronize, ours), like)
    # Sorts run only when they are due.
    wide, weights = _conditional.cond(
      due, synchronize, lambda *lists: lists[:2], wide, weights, currents
    )

    def tree(of_leaves: Iterable[Any], others: Any) -> Any:
      return jax.tree.unflatten(structure, _replaced(others, held, of_leaves))

    masked = [optax.MaskedNode()] * len(layouts)
    exact, permutation, ranks = (tree([new[k] for new in weights], masked) for k in range(3))
    return tree(wide, steps), LapermState(
      count=count,
      synced=jnp.where(stepped, due, state.synced),
      permuted_params=exact,
      permutation=permutation,
      ranks=ranks,
      inner_state=inner_state,
    )

  def _period(self, count: jax.Array) -> jax.Array:
    """The steps between synchronizations, a scalar int32 of at least 1."""
    period = self.sync_every(count) if callable(self.sync_every) else self.sync_every
    if jnp.ndim(period) != 0:
      raise ValueError(
        "`sync_every` must return a scalar, the number of steps between two synchronizations; got"
        f" an array of shape {jnp.shape(period)}."
      )
    return jnp.maximum(jnp.asarray(period, jnp.int32), 1)


def _synchronize(
  layouts: list[_layout.Layout],
  steps: list[jax.Array],
  weights: list[Weights],
  params: list[jax.Array],
) -> tuple[list[jax.Array], list[Weights]]:
  """The updates that lead to the permutation nearest to free steps, and the weights there."""

  def vectors(k: int) -> tuple[_layout.Layout, Weights, list[jax.Array]]:
    trained = optax.apply_updates(params[k], steps[k])
    first = layouts[k].fan_in_first
    return layouts[k], jax.tree.map(first, weights[k]), [first(trained)]

  moving = [k for k, lay in enumerate(layouts) if lay.movable]
  moved = _execution.over_leaves(lambda layout: _nearest, list(map(vectors, moving)))
  whole = [_layout.whole(layouts[k], weights[k], new) for k, new in zip(moving, moved, strict=True)]
  weights = _replaced(weights, moving, whole)
  found = [
    _layout.difference(p, new.values, u.dtype)
    for p, new, u in zip(params, weights, steps, strict=True)
  ]
  return found, weights


def _nearest(values: Any, permutation: Any, ranks: jax.Array, trained: jax.Array) -> jax.Array:
  """For each position the weight that it receives, in the order of the trained; NaN the largest."""
  return _fast.by_rank(jnp.where(jnp.isnan(trained), jnp.inf, trained), ranks)


def _replaced(values: list[Any], places: list[int], new: Iterable[Any]) -> list[Any]:
  """A list with other values in some places."""
  others = dict(zip(places, new, strict=True))
  return [others.get(i, value) for i, value in enumerate(values)]

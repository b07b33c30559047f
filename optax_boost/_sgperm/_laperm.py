r"""LaPerm: free training, brought back to a permutation of the initial weights every k steps.

For each weight vector w (the n weights that lead into one output) with initial values v:

  w <- w + u                          u from the inner optimizer, at each step
  w_i <- v_(r),  r the rank of w_i    every k steps: the r-th smallest of v where the r-th smallest
                                      of w is

Of all permutations of v this is the nearest to w in the Euclidean norm: arXiv:2006.07541.
"""

from collections.abc import Callable
import functools
from typing import Any
from typing import Literal

import jax
import jax.numpy as jnp
import optax

from optax_boost import _arrays
from optax_boost import _base
from optax_boost import _conditional
from optax_boost import _protocol
from optax_boost._sgperm import _execution
from optax_boost._sgperm import _fast
from optax_boost._sgperm import _layout
from optax_boost._sgperm._execution import Weights
from optax_boost._sgperm._states import LapermState

_METHOD = "laperm"


def _synchronized(values: Any, permutation: Any, ranks: jax.Array, trained: jax.Array) -> jax.Array:
  """For each position the weight that it receives, in the order of the trained; NaN the largest."""
  return _fast.by_rank(jnp.where(jnp.isnan(trained), jnp.inf, trained), ranks)


def _period(sync_every: Any, count: jax.Array) -> jax.Array:
  """The steps between synchronizations, a scalar int32 of at least 1."""
  period = sync_every(count) if callable(sync_every) else sync_every
  if jnp.ndim(period) != 0:
    raise ValueError(
      "`sync_every` must return a scalar, the number of steps between two synchronizations; got an"
      f" array of shape {jnp.shape(period)}."
    )
  return jnp.maximum(jnp.asarray(period, jnp.int32), 1)


def laperm(
  inner: optax.GradientTransformation,
  sync_every: int | jax.Array | Callable[[jax.Array], jax.typing.ArrayLike],
  *,
  exclude: _base.LeafSelector = None,
  layout: Literal["flax", "torch"] = "flax",
  fan_in_axes: _base.AxesByPattern | None = None,
  stacked_axes: _base.AxesByPattern | None = None,
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

  A gradient that is not finite goes to the inner optimizer. Weights that become NaN count as the
  largest of their vector at the next synchronization. A step whose updates are all zero, as between
  two inner steps of ``accumulate`` and after an overflow under a loss scale, is not counted.

  Args:
    inner: an optimizer that descends, with its learning rate. Its state is not reset.
    sync_every: inner steps from one synchronization to the next, or a function of the number of
      inner steps made, with which it can grow: a synchronization follows the steps whose number is
      a multiple. Raising it trains more freely.
    exclude: the leaves that `inner` trains alone: regular expressions searched in the leaf's path,
      a tree of bools, a callable from params to one, or None: no leaf.
    layout: where a kernel has its output axis: ``"flax"``, last; ``"torch"``, first.
    fan_in_axes: by regular expression, the axes along a weight vector; see :func:`sgperm`.
    stacked_axes: for leaves that hold many layers, the stacked axes by regular expression.

  Returns:
    An :class:`optax.GradientTransformationExtraArgs` that needs `params` and hands its extra
    arguments to `inner`. Its updates have the wider of the dtypes of params and inner updates.

  Raises:
    ValueError: a number is out of range; in ``init``: weights that are not finite, or an
      :func:`average_params` inside; in ``update``: no params, or a tree that does not fit.
    TypeError: an argument or a leaf is of the wrong kind.

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
  cutter = _layout.Cutter(_METHOD, layout, fan_in_axes, stacked_axes, exclude)

  def init_fn(params: optax.Params) -> LapermState:
    layouts = cutter.for_init(params)
    leaves, structure = jax.tree.flatten(params)

    def held(tree: Any) -> Any:
      pairs = zip(layouts, jax.tree.leaves(tree), strict=True)
      masked = [optax.MaskedNode() if lay.excluded else x for lay, x in pairs]
      return jax.tree.unflatten(structure, masked)

    inner_state = inner.init(params)
    _protocol.refuse_observers(_METHOD, inner_state)
    return LapermState(
      count=jnp.zeros([], jnp.int32),
      synced=jnp.ones([], bool),
      permuted_params=held(_arrays.copy_arrays(params)),
      permutation=held(jax.tree.map(_layout.identity, params)),
      ranks=held(list(map(_layout.ranks, layouts, leaves))),
      inner_state=inner_state,
    )

  def update_fn(
    updates: optax.Updates,
    state: LapermState,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, LapermState]:
    layouts = cutter.for_update(updates, state, LapermState, params)
    steps, inner_state = inner.update(updates, state.inner_state, params, **extra_args)
    structure: Any = jax.tree.structure(params)
    steps = structure.flatten_up_to(steps)
    # An `accumulate` or a loss scale inside returns zeros where it made no step.
    stepped = functools.reduce(jnp.logical_or, [jnp.any(u != 0) for u in steps], jnp.array(False))
    count = jnp.where(stepped, optax.safe_increment(state.count), state.count)
    due = stepped & (count % _period(sync_every, state.count) == 0)
    held = [i for i, lay in enumerate(layouts) if not lay.excluded]
    ours = [layouts[i] for i in held]
    targets = [jax.tree.leaves(params)[i] for i in held]
    wide = [
      steps[i].astype(jnp.promote_types(steps[i].dtype, w.dtype))
      for i, w in zip(held, targets, strict=True)
    ]
    trees = (state.permuted_params, state.permutation, state.ranks)
    weights = list(map(Weights, *map(jax.tree.leaves, trees)))

    def synchronize(
      steps: list[jax.Array], weights: list[Weights], params: list[jax.Array]
    ) -> tuple[list[jax.Array], list[Weights]]:
      weights, moving = list(weights), [k for k, lay in enumerate(ours) if lay.movable]

      def vectors(k: int) -> tuple[_layout.Layout, Weights, list[jax.Array]]:
        trained = optax.apply_updates(params[k], steps[k])
        first = ours[k].fan_in_first
        return ours[k], jax.tree.map(first, weights[k]), [first(trained)]

      moved = _execution.over_leaves(lambda layout: _synchronized, list(map(vectors, moving)))
      for k, of_leaf in zip(moving, moved, strict=True):
        weights[k] = _layout.whole(ours[k], weights[k], of_leaf)
      found = [
        _layout.difference(p, new.values, u.dtype)
        for p, new, u in zip(params, weights, steps, strict=True)
      ]
      return found, weights

    # A permutation restored without a sharding tells none.
    like = [Weights(w, w, w) for w in targets]
    synchronize = _execution.auto_sharded(synchronize, (wide, like))
    # Sorts run only when they are due.
    wide, weights = _conditional.cond(
      due, synchronize, lambda *lists: lists[:2], wide, weights, targets
    )
    for i, step in zip(held, wide, strict=True):
      steps[i] = step

    def tree(leaves: Any) -> Any:
      masked: list[Any] = [optax.MaskedNode()] * len(layouts)
      for i, x in zip(held, leaves, strict=True):
        masked[i] = x
      return jax.tree.unflatten(structure, masked)

    return jax.tree.unflatten(structure, steps), LapermState(
      count=count,
      synced=jnp.where(stepped, due, state.synced),
      permuted_params=tree(new.values for new in weights),
      permutation=tree(new.permutation for new in weights),
      ranks=tree(new.ranks for new in weights),
      inner_state=inner_state,
    )

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)

r"""LaPerm: free training, brought back to a permutation of the initial weights every k steps.

For each weight vector w (the n weights that lead into one output) with initial values v:

  w <- w + u                          u from the inner optimizer, at each step
  w_i <- v_(r),  r the rank of w_i    every k steps: the r-th smallest of v where the r-th smallest
                                      of w is

Of all permutations of v this is the nearest to w in the Euclidean norm.

Source: Qiu, Suda, "Train-by-Reconnect: Decoupling Locations of Weights from Their Values",
arXiv:2006.07541.
"""

import functools
from typing import Any
from typing import Literal

import jax
import jax.numpy as jnp
import optax

from optax_boost import _base
from optax_boost import _protocol
from optax_boost import _tree
from optax_boost._sgperm import _execution
from optax_boost._sgperm import _fast
from optax_boost._sgperm import _layout
from optax_boost._sgperm import _permutation
from optax_boost._sgperm import _sorting
from optax_boost._sgperm._states import LapermState

_METHOD = "laperm"


def laperm(
  inner: optax.GradientTransformation,
  sync_every: int,
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
  synchronization, or its :func:`permutation`, with the initial params the whole model.

  A weight vector holds the weights into one output: for Flax all axes but the last, and a whole
  bias. A vector whose initial weights are all alike, such as a zero bias, returns to them, which
  undoes its training: exclude such leaves, or start them at random.

  With ``optax.apply_updates``, params after a synchronization are within one rounding of the exact
  permutation; with :func:`apply_permuted_params` in its place they are the permutation itself.

  A gradient that is not finite goes to the inner optimizer. Weights that become NaN count as the
  largest of their vector at the next synchronization. A step whose updates are all zero, as between
  two inner steps of ``accumulate`` and after an overflow under a loss scale, is not counted.

  Args:
    inner: an optimizer that descends, with its learning rate. Its state is not reset.
    sync_every: inner steps from one synchronization to the next; the state's permutation is as old.
      Raising it trains more freely. Static.
    exclude: the leaves that `inner` trains alone: regular expressions searched in the leaf's path,
      a tree of bools, a callable from params to one, or None: no leaf.
    layout: where a kernel has its output axis: ``"flax"``, last; ``"torch"``, first.
    fan_in_axes: by regular expression, the axes along a weight vector, for kernels whose layout the
      shape does not tell. Flax's attention projections are known.
    stacked_axes: for leaves that hold many layers, the stacked axes by regular expression.

  Returns:
    An :class:`optax.GradientTransformationExtraArgs` that needs `params` and hands its extra
    arguments to `inner`. Its updates have the wider of the dtypes of params and inner updates.

  Raises:
    ValueError: a number is out of range; in ``init``: weights that are not finite; in ``update``:
      no params, or a tree that does not fit.
    TypeError: an argument or a leaf is of the wrong kind.

  Examples:
    >>> import jax, jax.numpy as jnp, optax, optax_boost
    >>> params = {"kernel": jax.random.normal(jax.random.key(0), (16, 4))}
    >>> x = jax.random.normal(jax.random.key(1), (64, 16))
    >>> y = x @ jax.random.permutation(jax.random.key(2), params["kernel"])
    >>> loss = lambda p: jnp.mean((x @ p["kernel"] - y) ** 2)
    >>> tx = optax_boost.laperm(optax.adam(0.1), sync_every=10)
    >>> state = tx.init(params)
    >>> for _ in range(100):
    ...   updates, state = tx.update(jax.grad(loss)(params), state, params)
    ...   params = optax_boost.apply_permuted_params(params, updates, state)
    >>> bool(loss(optax_boost.permuted_params(state)) < 0.01 * loss(state.initial))
    True

  References:
    Qiu, Suda, `Train-by-Reconnect: Decoupling Locations of Weights from Their Values
    <https://arxiv.org/abs/2006.07541>`_, 2020.
  """
  inner = _base.check_transformation("inner", inner)
  _base.check_whole_number("sync_every", sync_every, static=True)
  _layout.check_arguments(layout, fan_in_axes, stacked_axes)

  @_tree.once_per_tree
  def plan(params: Any) -> list[_layout.Layout | None]:
    """The layouts, None for leaves that are excluded."""
    layouts = _layout.layouts(params, layout, fan_in_axes, stacked_axes)
    excluded = _tree.select(params, exclude, "exclude")
    return [None if skip else lay for lay, skip in zip(layouts, excluded, strict=True)]

  def init_fn(params: optax.Params) -> LapermState:
    _tree.check_floating(params, _METHOD)
    leaves, structure = jax.tree.flatten(params)
    layouts = plan(params)
    _layout.check_finite(layouts, leaves, _METHOD)

    def tree(values: list[Any]) -> Any:
      masked = [
        optax.MaskedNode() if lay is None else x for lay, x in zip(layouts, values, strict=True)
      ]
      return jax.tree.unflatten(structure, masked)

    pairs = list(zip(layouts, leaves, strict=True))
    return LapermState(
      count=jnp.zeros([], jnp.int32),
      synced=jnp.ones([], bool),
      initial=tree(jax.tree.leaves(_tree.copy_arrays(params))),
      permutation=tree(jax.tree.leaves(_permutation.identity(params))),
      ranks=tree([x if lay is None else _layout.ranks(lay, x) for lay, x in pairs]),
      inner_state=inner.init(params),
    )

  def update_fn(
    updates: optax.Updates,
    state: LapermState,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, LapermState]:
    _base.require_params(params, _METHOD)
    _base.require_state(state, LapermState, _METHOD)
    _tree.check_same_tree(updates, params, _METHOD)
    _tree.check_floating(updates, _METHOD)
    current, structure = jax.tree.flatten(params)
    chosen = {i: lay for i, lay in enumerate(plan(params)) if lay is not None}
    _layout.check_params(chosen.values(), state.initial, _METHOD)
    if stacked_axes is None and fan_in_axes is None:
      _protocol.announce_layers(_METHOD, [lay.path for lay in chosen.values() if lay.movable])
    steps, inner_state = inner.update(updates, state.inner_state, params, **extra_args)
    free = jax.tree.leaves(steps)
    for i in chosen:
      free[i] = free[i].astype(jnp.promote_types(free[i].dtype, current[i].dtype))
    # An `accumulate` or a loss scale inside returns zeros where it made no step.
    stepped = functools.reduce(jnp.logical_or, [jnp.any(u != 0) for u in free], jnp.array(False))
    count = jnp.where(stepped, optax.safe_increment(state.count), state.count)
    due = stepped & (count % sync_every == 0)

    def synchronized(current: Any, free: Any, trees: Any) -> tuple[list[Any], list[Any]]:
      new, permuted = list(free), []
      for (i, lay), initial, held, rank in zip(chosen.items(), *trees, strict=True):
        target, flat = initial, held
        if lay.movable:
          trained = lay.columns(optax.apply_updates(current[i], free[i]))
          trained = jnp.where(jnp.isnan(trained), jnp.inf, trained)
          ordered = _sorting.inverse(lay.columns(rank))
          target, moved = _layout.arranged(lay, initial, _fast.by_rank(trained, ordered))
          flat = _execution.sharded_like(held, moved, initial)
        new[i] = _layout.step(current[i], target, free[i].dtype)
        permuted.append(flat)
      return new, permuted

    trees = [jax.tree.leaves(tree) for tree in (state.initial, state.permutation, state.ranks)]
    synchronized = _execution.auto_sharded(synchronized, (free, trees[1]))
    # Sorts run only when they are due.
    free, held = jax.lax.cond(due, synchronized, lambda c, f, t: (f, t[1]), current, free, trees)
    return jax.tree.unflatten(structure, free), LapermState(
      count=count,
      synced=jnp.where(stepped, due, state.synced),
      initial=state.initial,
      permutation=jax.tree.unflatten(jax.tree.structure(state.permutation), held),
      ranks=state.ranks,
      inner_state=inner_state,
    )

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)

r"""LaPerm: free training that returns to a permutation of the initial weights every k steps.

For each weight vector w (the n weights that lead into one output) with initial values v:

  w <- w + u                          in each step, with the update u of the inner optimizer
  w_i <- v_(r),  r the rank of w_i    every k steps: the r-th smallest weight becomes the r-th
                                      smallest initial value

This is the permutation of v that is nearest to w in the Euclidean norm: arXiv:2006.07541.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_boost._form import _protocol, _skipped_steps, _transformation
from optax_boost._foundation import _arrays, _checks, _conditionals, _types
from optax_boost._methods._sgperm import (
  _exact_params,
  _execution,
  _pairs_and_ranks,
  _sorting,
  _weight_vectors,
)
from optax_boost._step import _nesting
from optax_boost._trace import _layer_axes

_METHOD = "laperm"


@_protocol.declares(exact=("permuted_params",), outcome=("made",), takes=("layers",))
class LapermState(NamedTuple):
  """State of :func:`laperm`: two copies of the params and the inner state.

  Excluded leaves are ``optax.MaskedNode()`` in `permuted_params` and `permutation`.

  Attributes:
    count: scalar int32, the number of steps that `inner` has made.
    synced: scalar bool, whether the last step of `inner` ended in a synchronization.
    permuted_params: the exact params of the last synchronization.
    permutation: the permutation of the last synchronization, as in the state of :func:`sgperm`.
    inner_state: the state of `inner`.
    made: scalar bool, whether the last call of ``update`` made a step.
  """

  count: _types.IntScalar  # type: ignore[assignment]  # hides the method of tuples
  synced: _types.BoolScalar
  permuted_params: optax.Params
  permutation: optax.Params
  inner_state: optax.OptState
  made: _types.BoolScalar

  def exact_params(
    self, new: optax.Params, params: optax.Params, updates: optax.Updates
  ) -> optax.Params:
    """Returns `new`, which is params plus updates, exactly as it is after a synchronization."""
    return _exact_params.exact_params(new, params, updates, self.permuted_params, self.synced)


def laperm(
  inner: optax.GradientTransformation,
  sync_every: int | jax.Array | Callable[[jax.Array], jax.typing.ArrayLike],
  *,
  exclude: _types.LeafSelector = None,
  layout: Literal["flax", "torch"] = "flax",
  layers: _layer_axes.LayerAxes | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Trains freely and, every few steps, returns to a permutation of the initial weights.

  A synchronization gives each weight vector (see :func:`sgperm`) its initial values back, in the
  order of the trained values. This is the permutation nearest to the trained weights. The params
  are exactly this permutation with :func:`make_train_step` and :func:`apply_gradients`, and within
  one rounding of this permutation with ``optax.apply_updates``. Between two synchronizations the
  params are not a permutation. So evaluate and save :func:`permuted_params` of the state, which are
  the params of the last synchronization.

  If the initial weights of a vector are all equal, as in a zero bias, a synchronization undoes the
  vector's training: exclude such leaves, or initialize them at random. Weights that become NaN
  count as the largest of their vector. Steps that `inner` skips don't count, such as the steps of
  ``accumulate`` that only add gradients, and steps whose gradients overflowed under a loss scale.
  Inside ``shard_map`` leaves must be whole, since a permutation has the indices of whole leaves.

  Args:
    inner: an optimizer that descends, with its learning rate. A synchronization doesn't reset the
      state of `inner`.
    sync_every: the number of steps from one synchronization to the next. Raising it trains more
      freely. To let the number grow, pass a function of the number of steps made. Then a
      synchronization follows each step whose number is a multiple of the function's result, an
      integer; a number below 1 that is computed on the device counts as 1.
    exclude: the leaves that only `inner` trains, selected as in :func:`centralize`. None: no leaf.
    layout: where a kernel has its output axis, as in :func:`centralize`.
    layers: the axes of layers, fan-in and outputs, as in :func:`centralize`.

  Returns:
    An :class:`optax.GradientTransformationExtraArgs` that needs `params` and passes its extra
    arguments to `inner`. Its updates have the wider of the dtypes of params and inner updates.

  Raises:
    ValueError: in ``init``: weights are not finite, or `inner` has an :func:`average_params`.

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
  inner = _checks.check_transformation("inner", inner)
  if not callable(sync_every):
    _checks.check_whole_number("sync_every", sync_every)
  layouts = _weight_vectors.Layouts(_METHOD, layout, layers, exclude)
  return _Laperm(inner, sync_every, layouts).transformation()


class _Laperm(NamedTuple):
  """The functions `init` and `step` of :func:`laperm`; the fields are its checked arguments."""

  inner: optax.GradientTransformationExtraArgs
  sync_every: int | jax.Array | Callable[[jax.Array], jax.typing.ArrayLike]
  layouts: _weight_vectors.Layouts

  def transformation(self) -> optax.GradientTransformationExtraArgs:
    return _transformation.transformation(
      _METHOD,
      LapermState,
      self.init,
      self.step,
      needs_params=True,
    )

  def init(self, params: optax.Params) -> LapermState:
    layouts = self.layouts.for_init(params)
    leaves, structure = jax.tree.flatten(params)
    pairs = list(zip(layouts, leaves, strict=True))
    masked = [optax.MaskedNode() if lay.excluded else x for lay, x in pairs]
    permuted = jax.tree.unflatten(structure, masked)
    inner_state = self.inner.init(params)
    _nesting.refuse_steps(_METHOD, inner_state)
    return LapermState(
      count=jnp.zeros([], jnp.int32),
      synced=jnp.ones([], bool),
      permuted_params=_arrays.copy_arrays(permuted),
      permutation=jax.tree.map(_weight_vectors.identity, permuted),
      inner_state=inner_state,
      made=jnp.zeros([], bool),
    )

  def step(
    self, updates: optax.Updates, state: LapermState, params: optax.Params, **extra_args: Any
  ) -> tuple[optax.Updates, LapermState]:
    layers = extra_args.get("layers")
    layouts = self.layouts.for_update(state.permuted_params, params, layers)
    updates, inner_state = self.inner.update(updates, state.inner_state, params, **extra_args)
    structure: _types.TreeDef = jax.tree.structure(params)
    steps = structure.flatten_up_to(updates)
    made = jnp.asarray(_skipped_steps.made_step(state.inner_state, inner_state))
    count = _arrays.increment_if(made, state.count)
    period = _checks.count_at("sync_every(count)", self.sync_every, state.count)
    due = made & (count % period == 0)

    permuted = [i for i, lay in enumerate(layouts) if not lay.excluded]
    currents = [jax.tree.leaves(params)[i] for i in permuted]
    permuted_steps = [
      steps[i].astype(jnp.promote_types(steps[i].dtype, w.dtype))
      for i, w in zip(permuted, currents, strict=True)
    ]
    weights = [state.permuted_params, state.permutation]
    synchronize = functools.partial(_synchronize, [layouts[i] for i in permuted])
    # `cond` runs the sorts of a synchronization only on steps on which it is due.
    permuted_steps, weights = _conditionals.cond(
      due, synchronize, lambda *lists: lists[:2], permuted_steps, weights, currents
    )
    for i, u in zip(permuted, permuted_steps, strict=True):
      steps[i] = u
    return jax.tree.unflatten(structure, steps), LapermState(
      count=count,
      synced=jnp.where(made, due, state.synced),
      permuted_params=weights[0],
      permutation=weights[1],
      inner_state=inner_state,
      made=made,
    )


def _synchronize(
  layouts: list[_weight_vectors.Layout],
  steps: list[jax.Array],
  weights: list[optax.Params],
  params: list[jax.Array],
) -> tuple[list[jax.Array], list[optax.Params]]:
  """Makes a synchronization; returns the updates of the leaves, and the new `weights`.

  The updates lead from `params` to the permutation nearest to ``params + steps``, where `steps` are
  the updates of the inner optimizer. `weights` are `permuted_params` and `permutation` of the
  state.
  """
  trained = optax.apply_updates(params, steps)
  moved = _execution.permute(_to_nearest, (), layouts, params, weights, [trained])
  return list(map(_weight_vectors.difference, steps, params, jax.tree.leaves(moved[0]))), moved


def _to_nearest(
  layouts: Sequence[_weight_vectors.Layout],
  args: tuple[()],
  weights: Sequence[Sequence[jax.Array]],
  trained: Sequence[Sequence[jax.Array]],
) -> list[Sequence[jax.Array]]:
  def kernel(values: jax.Array, entries: jax.Array, trained: jax.Array) -> list[jax.Array]:
    # NaN counts as the largest weight of its vector.
    ranks = _pairs_and_ranks.ranks(jnp.where(jnp.isnan(trained), jnp.inf, trained))
    source = _sorting.gather(_sorting.argsort(values), ranks)
    return _execution.gather([values, entries], source)

  return _execution.together(kernel, layouts, weights, trained)

"""Gradient freezing: on some steps the first layers are not updated.

The leaves fall into groups 0, ..., G-1 along the forward pass. A step with i frozen groups trains
the groups i, ..., G-1; i is a function of (t, key), how many groups are frozen in step t.
"""

import functools
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost import _arrays
from optax_boost import _base
from optax_boost import _masking
from optax_boost import _orders
from optax_boost import _protocol
from optax_boost import _transformation
from optax_boost import _tree
from optax_boost._freezing import _schedules
from optax_boost._freezing import _thawing
from optax_boost._trace import _layer_groups


@_protocol.declares(requests=("frozen_groups",), outcome=("made",), changes=("freeze_layers",))
class FreezeLayersState(NamedTuple):
  """State of :func:`freeze_layers`.

  Attributes:
    count: scalar int32, steps made; it stops at 2^31 - 1, and the schedule with it.
    frozen_groups: scalar int32, how many groups the next step freezes.
    key: raw key data of the schedule's generator.
    hidden: the paths of leaves that ``optax.masked`` hides from the method, without arrays.
    group_counts: for each step count in `inner_state` that belongs to moments, in the order of
      ``jax.tree.leaves``, a vector with an entry per group: the steps in which it was trained.
    inner_state: the inner optimizer's state. The step counts in it count all steps.
    made: scalar bool, whether the last call made a step.
  """

  count: jax.Array  # type: ignore[assignment]  # tuples have a method of this name
  frozen_groups: jax.Array
  key: jax.Array
  hidden: dict[str, optax.MaskedNode]
  group_counts: tuple[jax.Array, ...]
  inner_state: optax.OptState
  made: jax.Array


def freeze_layers(
  inner: optax.GradientTransformation,
  groups: _layer_groups.Groups,
  schedule: _schedules.FreezeSchedule,
  *,
  key: jax.Array | int = 0,
) -> optax.GradientTransformationExtraArgs:
  """Freezes the first groups of leaves on the steps that a schedule says.

  A frozen leaf gets no update and no weight decay, and its optimizer state is not updated. Frozen
  gradients are zeroed before `inner`, so norm clipping measures trained leaves only. Each group has
  a step count of its own, as each param has in PyTorch, for Adam and others that correct the bias
  of their moments by it: a thawed layer starts like one of a fresh optimizer. Learning rate
  schedules follow the steps of the run.

  :func:`make_train_step` reads the depth from the state before each step, compiles one program per
  depth and does not compute the backward pass of frozen groups. Inside your own ``jit``, ``scan``
  or ``vmap`` it can't know the depth and computes the whole backward pass, as does a loop without
  a train step. Leaves may be complex.

  Leaves that hold many layers (``nn.scan``, ``nnx.scan``) are frozen layer by layer, with their
  slices of the optimizer's state; a state without the axis of layers, as the norms of
  ``optax.novograd``, is frozen with the last of them. The train step cuts the scans of the loss,
  but not those inside a ``cond``, a ``shard_map`` or a function with a derivative of its own, nor
  the backward pass of frozen layers whose inputs depend on trained params: freeze these, too.

  Put it around the whole optimizer: ``freeze_layers(optax.chain(clip, adamw), ...)``. Around it go
  ``optax.MultiSteps``, :func:`accumulate` (a whole window then has one depth),
  ``optax.apply_if_finite`` and :func:`dynamic_loss_scale` (a skipped step repeats its depth).

  Args:
    inner: the optimizer. A leaf's entries in its state are recognized with
      ``optax.tree.map_params``. Scalars advance in every step; a `count` (or `count_m2`, `t`,
      `step`, `is_initial_step`) beside moments is kept for each group, too. If it may be the
      run's, as in ``optax.contrib.prodigy``, all groups share it, and a warning says so.
    groups: a :class:`LayerGroups`; or regular expressions, one per group in the order of freezing,
      that match whole segments of the leaves' paths. A leaf that two match is an error; one that
      none matches is in the last group.
    schedule: a :class:`FreezeSchedule` for this number of groups, as :func:`fixed_freezing` makes.
    key: of the schedule's generator, a key of ``jax.random.key`` or a seed.

  Returns:
    An :class:`optax.GradientTransformationExtraArgs`. Updates have the inner optimizer's dtype.
    Of the extra arguments, `inner` sees `grad` and `grad_fn` with zeros for frozen leaves.

  Raises:
    ValueError: `schedule` is for another number of groups; in ``init``: the groups are of other
      params, no leaf is in the last group, or `inner` holds an :func:`average_params`, which goes
      around the whole.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_boost
    >>> tx = optax_boost.freeze_layers(
    ...   optax.sgd(1.0), ["body", "head"], optax_boost.continuous_freezing(2, 0.5)
    ... )
    >>> params = {"body": jnp.zeros(2), "head": jnp.zeros(1)}
    >>> state = tx.init(params)
    >>> for _ in range(2):
    ...   updates, state = tx.update({"body": jnp.ones(2), "head": jnp.ones(1)}, state, params)
    ...   print(updates["body"].tolist(), updates["head"].tolist())
    [-1.0, -1.0] [-1.0]
    [0.0, 0.0] [-1.0]

  References:
    Brock, Lim, Ritchie, Weston, `FreezeOut <https://arxiv.org/abs/1706.04983>`_, 2017.
  """
  inner = _base.check_transformation("inner", inner)
  num_groups = _layer_groups.count_groups(groups)
  _base.check_type("schedule", schedule, _schedules.FreezeSchedule, "a FreezeSchedule")
  if schedule.num_groups != num_groups:
    raise ValueError(
      f"`schedule` must be for the same number of groups as `groups`; got {schedule.num_groups}"
      f" and {num_groups}."
    )
  key = _base.as_key("key", key)
  number = _layer_groups.numbering(groups, "freeze_layers")

  def depth_at(count: jax.Array, key_data: jax.Array) -> jax.Array:
    wrapped = jax.random.wrap_key_data(key_data, impl=jax.random.key_impl(key))
    depth = _schedules.scalar_depth(schedule.frozen_groups(count, wrapped))
    return jnp.clip(depth, 0, num_groups - 1).astype(jnp.int32)

  def init(params: optax.Params) -> FreezeLayersState:
    _tree.refuse_pair(params, "freeze_layers")
    numbers = number(params)
    _check_last_group(numbers, params, num_groups)
    # A copy: the state is donated, the key stays with this function.
    key_data = jnp.array(jax.random.key_data(key))
    count = jnp.zeros([], jnp.int32)
    state = FreezeLayersState(
      count=count,
      frozen_groups=depth_at(count, key_data),
      key=key_data,
      hidden=_protocol.hidden_leaves(params),
      group_counts=(),
      inner_state=inner.init(params),
      made=jnp.zeros([], bool),
    )
    # Checked before the inner state is read, which may warn of a wrapper that is refused here.
    _orders.check(state)
    counts = _thawing.initial_counts(inner, state.inner_state, numbers, params, num_groups)
    return state._replace(group_counts=counts)

  def step(
    updates: optax.Updates, state: FreezeLayersState, params: Any, **extra_args: Any
  ) -> tuple[optax.Updates, FreezeLayersState]:
    numbers = number(updates)
    frozen = functools.partial(_layer_groups.select_frozen, state.frozen_groups)

    def zero_frozen(grads: optax.Updates) -> optax.Updates:
      return jax.tree.map(lambda n, g: frozen(n, jnp.zeros_like(g), g), numbers, grads)

    grads, extra = _masking.map_gradients(zero_frozen, updates, extra_args)
    out, inner_state, group_counts = _thawing.update(
      inner,
      numbers,
      grads,
      state.inner_state,
      params,
      extra,
      counts=state.group_counts,
      depth=state.frozen_groups,
    )
    made = jnp.asarray(_protocol.made_step(state.inner_state, inner_state))
    if schedule.learning_rate_scale is not None:
      scale = _schedules.scale_per_group(schedule.learning_rate_scale(state.count), num_groups)
      out = jax.tree.map(lambda n, u: (_arrays.widen(u) * scale[n]).astype(u.dtype), numbers, out)
    count = _arrays.increment_if(made, state.count)
    return zero_frozen(out), state._replace(
      count=count,
      frozen_groups=depth_at(count, state.key),
      group_counts=group_counts,
      inner_state=inner_state,
      made=made,
    )

  return _transformation.transformation(
    "freeze_layers",
    FreezeLayersState,
    init,
    step,
    wraps=(inner,),
    allows_complex=True,
    frozen_groups=_protocol.GroupAssignment(number, num_groups),
  )


def _check_last_group(numbers: Any, params: optax.Params, num_groups: int) -> None:
  """Raises ValueError if no leaf is in the last group, the only one that is never frozen."""
  last = [int(np.max(number)) for number in jax.tree.leaves(numbers)]
  # Leaves that a mask hides may train elsewhere.
  if last and max(last) < num_groups - 1 and not _tree.masked_paths(params):
    raise ValueError(
      "`groups` must leave a leaf in the last group, which is never frozen; got none in group"
      f" {num_groups - 1} of {num_groups}: a step with {max(last) + 1} frozen groups trains"
      " nothing. Take the leaves that train out of the groups before; a leaf that no pattern"
      " matches is in the last group."
    )

"""``freeze_layers``: on some steps the first groups of layers are not updated.

A step of depth i freezes the first i of the groups 0, ..., G-1, which are in the order of the
forward pass. A schedule computes the depth from the step and a key.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost._form import _driver, _form, _protocol, _transformation
from optax_boost._foundation import (
  _arrays,
  _checks,
  _extra_args,
  _masks,
  _placement,
  _tree_checks,
  _types,
  _warnings,
)
from optax_boost._trace import _layer_groups
from optax_boost._wrappers._freezing import _group_counts, _schedules, _state_layout


@_protocol.declares(requests=("frozen_groups",), outcome=("made",))
class FreezeLayersState(NamedTuple):
  """State of :func:`freeze_layers`.

  Attributes:
    count: scalar int32, the number of steps made, at most 2^31 - 1; the schedule gets this count.
    frozen_groups: scalar int32, how many groups the next step freezes.
    frozen_for: scalar int32, a number of steps during which `frozen_groups` stays the same.
    key: raw key data of the schedule's generator.
    hidden: a dict without arrays; its keys point to the leaves that ``optax.masked`` hides.
    group_counts: a vector for each leaf of `inner_state` that counts the steps of moments, in the
      order of ``jax.tree.leaves``. Entry i counts only the steps that trained group i.
    inner_state: the inner optimizer's state. Its step counts count all steps.
    made: scalar bool, whether the last call made a step.
  """

  count: _types.IntScalar  # type: ignore[assignment]  # tuples have a method of this name
  frozen_groups: _types.IntScalar
  frozen_for: _types.IntScalar
  key: jax.Array
  hidden: dict[str, optax.MaskedNode]
  group_counts: tuple[jax.Array, ...]
  inner_state: optax.OptState
  made: _types.BoolScalar


def freeze_layers(
  inner: optax.GradientTransformation,
  groups: _layer_groups.Groups,
  schedule: _schedules.FreezeSchedule,
  *,
  key: jax.Array | int = 0,
  counts: Literal["group", "run"] | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Freezes the first groups of leaves, in each step as many as a schedule says.

  A frozen leaf gets no update and no weight decay, and its optimizer state is not updated. Frozen
  gradients are zeroed before `inner`, so norm clipping measures trained leaves only. Each group has
  a step count of its own, as each param has in PyTorch. So if `inner` corrects the bias of its
  moments by a step count, as Adam does, a layer that is thawed late starts as with a fresh
  optimizer. Learning rate schedules follow the steps of the run.

  :func:`make_train_step` compiles one program per depth (the number of frozen groups), and does not
  compute the backward pass of frozen groups. The step reads the depth from the state when the depth
  may have changed. Inside your own ``jit``, ``scan`` or ``vmap``, and in a loop without a train
  step, the whole backward pass is computed. Leaves may be complex.

  Leaves that hold many layers (``nn.scan``, ``nnx.scan``) are frozen layer by layer, with their
  slices of the optimizer's state. An array of the state without an axis of layers, such as a norm
  of ``optax.novograd``, is frozen when all layers of its leaf are frozen. The train step splits
  each scan of the loss into frozen and trained layers, except scans inside a ``cond``, a
  ``shard_map`` or a function with a custom derivative. If inputs of frozen layers depend on trained
  params, the train step computes the backward pass of these layers: freeze these params, too.

  Put `freeze_layers` around the whole optimizer: ``freeze_layers(optax.chain(clip, adamw), ...)``.
  If a wrapper inside or around `freeze_layers` skips a step, the next step has the same depth. All
  micro-batches of a window of :func:`accumulate` have the same depth.

  Args:
    inner: the optimizer. ``optax.tree.map_params`` must find each leaf's entries in its state.
      Scalars in the state advance in every step; a `count` (or `count_m2`, `t`, `step`,
      `is_initial_step`) beside moments is also kept for each group. If the state of your own
      ``update`` has such a count, your ``update`` is called once for each set of groups that were
      trained in the same steps. So don't clip there, nor compute anything else from all leaves; do
      this in another member of an ``optax.chain``.
    groups: a :class:`LayerGroups`; or regular expressions, one per group in the order of the
      forward pass, that match whole segments of the leaves' paths: ``"blocks/1"`` does not match
      ``blocks/10``. No leaf may match two; leaves that match none are in the last group.
    schedule: a :class:`FreezeSchedule` for this number of groups, as :func:`fixed_freezing` makes.
    key: the key of the schedule's random numbers, from ``jax.random.key``, or a seed.
    counts: what a step count beside moments in `inner`'s state counts. ``"group"``: the steps in
      which a group was trained, for a bias correction. ``"run"``: all steps, for a learning rate
      schedule. None: ``"group"``, with a warning if the state is not optax's own. But if the count
      may belong to estimates from all leaves, as in ``optax.contrib.prodigy``, or is inside a
      transformation whose parts can't be called one by one, None means ``"run"``, with a warning.

  Returns:
    An :class:`optax.GradientTransformationExtraArgs`. Updates have the inner optimizer's dtype. The
    extra arguments `grad` and `grad_fn` also give `inner` zeros for frozen leaves.

  Raises:
    ValueError: `schedule` is for another number of groups; in ``init``: the groups were made for
      other params, or no leaf is in the last group.

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
  inner = _checks.check_transformation("inner", inner)
  num_groups = _layer_groups.count_groups(groups)
  _checks.check_type("schedule", schedule, _schedules.FreezeSchedule, "a FreezeSchedule")
  if schedule.num_groups != num_groups:
    raise ValueError(
      f"`schedule` must be for the same number of groups as `groups`; got {schedule.num_groups}"
      f" and {num_groups}."
    )
  _checks.check_name("counts", counts, ("group", "run"), optional=True)
  method = _FreezeLayers(
    inner,
    schedule,
    _layer_groups.numbering(groups, "freeze_layers"),
    _checks.as_key("key", key),
    counts,
    tuple(_group_counts.group_classes(schedule.depths, num_groups)),
  )
  return _transformation.wrapper(
    "freeze_layers",
    FreezeLayersState,
    method,
    allows_complex=True,
    changes="always",
    frozen_groups=_protocol.GroupAssignment(method.number_leaves, num_groups),
  )


@dataclasses.dataclass(frozen=True, eq=False)
class _FreezeLayers:
  """The checked arguments of :func:`freeze_layers`.

  Attributes:
    number_leaves: takes a tree like the params; returns the tree of its leaves' group numbers.
    owner_of_counts: the argument `counts`: "group", "run" or None.
    classes: a number for each group, the same for groups that are always trained in the same steps.
  """

  inner: optax.GradientTransformationExtraArgs
  schedule: _schedules.FreezeSchedule
  number_leaves: Callable[[_types.Tree], _types.Tree]
  key: jax.Array
  owner_of_counts: str | None
  classes: tuple[int, ...]

  def init(self, params: optax.Params) -> FreezeLayersState:
    _tree_checks.refuse_pair(params, "freeze_layers")
    group_numbers = self.number_leaves(params)
    _check_last_group(group_numbers, params, self.schedule.num_groups)
    inner_state = self.inner.init(params)
    layout = self._layout(inner_state, _state_layout.leaf_groups(group_numbers, params))
    # A count beside moments may count all steps, or only those that trained its group. If all steps
    # have the same depth, a group that is trained is trained in all steps. Then both counts agree,
    # and no warning is needed.
    if self.schedule.depths is None or len(self.schedule.depths) > 1:
      _warn_of_uncertain_counts(layout)
    leaves = jax.tree.leaves(inner_state)
    count = jnp.zeros([], jnp.int32)
    # The key is copied, since the state may be donated, and the next `init` uses the key again.
    key_data = jnp.array(jax.random.key_data(self.key))
    return FreezeLayersState(
      count=count,
      **self._depth_at(count, key_data),
      key=key_data,
      hidden=_protocol.hidden_leaves(params),
      group_counts=tuple(
        jnp.full(self.schedule.num_groups, _placement.in_device_memory(leaves[index]))
        for index in layout.counts
      ),
      inner_state=inner_state,
      made=jnp.zeros([], bool),
    )

  def before(
    self, call: _driver.Call, state: FreezeLayersState
  ) -> tuple[_driver.Call, FreezeLayersState, _group_counts.GroupCounts]:
    depth, num_wrappers = state.frozen_groups, len(_form.wrappers_around(self.inner))
    select_frozen = functools.partial(_layer_groups.select_frozen, depth)
    grads, _ = call.gradients()
    group_numbers = self.number_leaves(grads)
    leaf_groups = _state_layout.leaf_groups(group_numbers, grads)
    layout = self._layout(state.inner_state, leaf_groups)
    counts = _group_counts.GroupCounts(
      layout, state.group_counts, self.classes, leaf_groups, self._first_trained(depth)
    )

    def zero_frozen(tree: _types.SameTree) -> _types.SameTree:
      return jax.tree.map(lambda n, g: select_frozen(n, jnp.zeros_like(g), g), group_numbers, tree)

    def gradients() -> tuple[optax.Updates, _types.ExtraArgs]:
      return _extra_args.map_gradients(zero_frozen, *call.gradients())

    def change(
      tx: optax.GradientTransformationExtraArgs,
    ) -> optax.GradientTransformationExtraArgs:
      state_groups, count_positions = (
        _state_layout.inside_wrappers(tree, num_wrappers)
        for tree in (layout.state_groups, layout.count_positions)
      )
      update_by_group = counts.update_by_group(tx.update, state_groups, count_positions)

      def update(
        grads: optax.Updates, old: optax.OptState, params: optax.Params | None = None, **extra: Any
      ) -> tuple[optax.Updates, optax.OptState]:
        updates, new = update_by_group(grads, old, params, **extra)
        updates = zero_frozen(self._scaled(state.count, group_numbers, updates))
        return updates, _state_layout.select(state_groups, select_frozen, old, new)

      return optax.GradientTransformationExtraArgs(tx.init, update)

    plan = call.plan.with_change(change)
    return call._replace(gradients=gradients, plan=plan), state, counts

  def after(
    self,
    call: _driver.Call,
    outcome: _driver.Outcome,
    state: FreezeLayersState,
    counts: _group_counts.GroupCounts,
  ) -> tuple[Any, FreezeLayersState]:
    count = _arrays.increment_if(outcome.made, state.count)
    return outcome.result, state._replace(
      count=count,
      **self._depth_at(count, state.key),
      group_counts=counts.advanced(
        state.inner_state, outcome.state, state.frozen_groups, outcome.made
      ),
    )

  def _layout(self, inner_state: optax.OptState, groups: _types.Tree) -> _state_layout.StateLayout:
    return _state_layout.find_layout(self.inner, inner_state, groups, self.owner_of_counts)

  def _depth_at(self, count: _types.IntScalar, key_data: jax.Array) -> dict[str, Any]:
    """Returns the fields `frozen_groups` and `frozen_for` of the state for step `count`."""
    key = jax.random.wrap_key_data(key_data, impl=jax.random.key_impl(self.key))
    depth = _schedules.scalar_depth(self.schedule.frozen_groups(count, key))
    lasts = 1 if self.schedule.lasts is None else self.schedule.lasts(count)
    return {
      "frozen_groups": jnp.clip(depth, 0, self.schedule.num_groups - 1).astype(jnp.int32),
      "frozen_for": _schedules.steps_with_depth(lasts),
    }

  def _first_trained(self, depth: _types.IntScalar) -> int:
    """Returns the first group that a step of this depth may train.

    This is `depth` if `depth` is the constant that a train step puts into the state. If `depth` is
    a JAX array, this is the lowest depth that the schedule may have.
    """
    if isinstance(depth, np.integer | np.ndarray):
      return int(depth)
    return min(self.schedule.depths or (0,))

  def _scaled(
    self, count: _types.IntScalar, group_numbers: _types.Tree, updates: optax.Updates
  ) -> optax.Updates:
    """Returns the updates, multiplied by the schedule's learning rate factor of each group."""
    if self.schedule.learning_rate_scale is None:
      return updates
    scale = _schedules.scale_per_group(
      self.schedule.learning_rate_scale(count), self.schedule.num_groups
    )
    return jax.tree.map(
      lambda n, u: (_arrays.widen(u) * scale[n]).astype(u.dtype), group_numbers, updates
    )


def _warn_of_uncertain_counts(layout: _state_layout.StateLayout) -> None:
  shared = [*layout.shared, *layout.hidden]
  if shared:
    _warnings.warn(
      f"`freeze_layers` keeps one step count for all groups in {', '.join(shared)}, since it can't"
      " tell whether the count belongs to moments or to the run; if to moments, the first steps of"
      ' a layer that is thawed late are too long. Pass `counts="group"` if the count belongs to'
      ' moments, else `counts="run"`.',
      UserWarning,
    )
  if layout.assumed:
    _warnings.warn(
      f"`freeze_layers` keeps a step count for each group in {', '.join(layout.assumed)}, for the"
      " moments beside it. If a learning rate schedule reads this count, pass"
      ' `counts="run"`; else pass `counts="group"`.',
      UserWarning,
    )


def _check_last_group(group_numbers: _types.Tree, params: optax.Params, num_groups: int) -> None:
  """Raises ValueError if no leaf is in the last group, the only one that is never frozen."""
  largest = [int(np.max(number)) for number in jax.tree.leaves(group_numbers)]
  # If ``optax.masked`` hides leaves, the last group may consist of these leaves, which another
  # optimizer trains.
  if largest and max(largest) < num_groups - 1 and not _masks.masked_paths(params):
    raise ValueError(
      "`groups` must leave a leaf in the last group, which is never frozen; got none in group"
      f" {num_groups - 1} of {num_groups}. Take the leaves that should train out of the other"
      " groups: a leaf that no pattern matches is in the last group."
    )

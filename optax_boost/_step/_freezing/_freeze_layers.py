"""``freeze_layers``: on some steps the first groups of layers are not updated.

A step of depth i freezes the first i of the groups 0, ..., G-1, which are in the order of the
forward pass. A schedule computes the depth from the step and a key.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import hashlib
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost._form import _protocol
from optax_boost._foundation import (
  _arrays,
  _checks,
  _placement,
  _tree_checks,
  _types,
  _warnings,
)
from optax_boost._step import _kept_leaves, _wrapper
from optax_boost._step._freezing import _dependence, _group_counts, _schedules, _state_layout
from optax_boost._trace import _layer_groups

# How the two keys of `FreezeLayersState.made_for` that are in words begin.
_GROUPS, _SCHEDULE = "groups: ", "schedule: "
# The number of steps whose depths a step computes ahead. The train step reads the depth from the
# device, and waits for it, at least once in this number of steps.
_LOOK_AHEAD = 100


@_protocol.declares(requests=(_protocol.FROZEN_GROUPS,))
class FreezeLayersState(NamedTuple):
  """State of :func:`freeze_layers`.

  Attributes:
    frozen_groups: scalar int32, how many groups the next step freezes.
    frozen_for: scalar int32, a number of steps during which `frozen_groups` stays the same; or
      -d - 1 if the schedule returned d, which is none of its depths.
    key: raw key data of the schedule's generator.
    made_for: a dict whose keys describe the groups and the schedule: the train step reads the
      groups, and a state with other keys is refused. The last key is a hash of the two others, with
      the value False: NNX and Orbax keep the keys of arrays only, some as the names of files.
    group_counts: a vector for each leaf of `inner_state` that counts the steps of moments, in the
      order of ``jax.tree.leaves``. Entry i counts only the steps that trained group i.
  """

  frozen_groups: _types.IntScalar
  frozen_for: _types.IntScalar
  key: jax.Array
  made_for: dict[str, jax.Array | optax.MaskedNode]
  group_counts: tuple[jax.Array, ...]

  @property
  def groups(self) -> _layer_groups.Groups:
    """Returns the groups of layers."""
    text = next(key for key in self.made_for if key.startswith(_GROUPS))
    return _layer_groups.from_text(text.removeprefix(_GROUPS))

  def check_declared(self, frozen_for: int) -> None:
    """Raises ValueError if the schedule returned for the next step a depth that it doesn't declare.

    `frozen_for` is the number in the state, on the host.
    """
    if frozen_for < 0:
      text = next(key for key in self.made_for if key.startswith(_SCHEDULE))
      raise ValueError(
        "A FreezeSchedule must return one of its depths, the numbers of groups that it freezes;"
        f" {text.removeprefix(_SCHEDULE)} returned {-frozen_for - 1} for the next step. Name all"
        " numbers that `frozen_groups(step, key)` returns in `depths`, from 0 to num_groups - 1."
      )


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

  Layers that no depth of the schedule trains are kept from `inner`, so no moments, masters or sums
  of windows exist for them. (If such layers of a stacked leaf are distributed over devices along
  the axis of the layers, each step moves the trained ones.)

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
    groups: a :class:`LayerGroups`; or patterns (see :func:`path_mask`), one per group in the order
      of the forward pass. No leaf may match two; leaves that match none are in the last group.
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
      other params, or no leaf is in the last group; in a step outside of ``jit``, and in each step
      of a train step: the schedule returned a number of groups that is not in its `depths`.

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
  num_groups = _layer_groups.count_groups(groups)
  _checks.check_type("schedule", schedule, _schedules.FreezeSchedule, "a FreezeSchedule")
  if schedule.num_groups != num_groups:
    raise ValueError(
      f"`schedule` must be for the same number of groups as `groups`; got {schedule.num_groups}"
      f" and {num_groups}."
    )
  _checks.check_name("counts", counts, ("group", "run"), optional=True)
  slot = _FreezeLayers(
    schedule,
    _layer_groups.numbering(groups, "freeze_layers"),
    (
      f"{_GROUPS}{_layer_groups.to_text(groups)}",
      f"{_SCHEDULE}{schedule.name or 'FreezeSchedule'} with the depths"
      f" {schedule.depths or f'0 to {num_groups - 1}'}",
    ),
    _checks.as_key("key", key),
    counts,
    tuple(_group_counts.group_classes(schedule.depths, num_groups)),
  )
  return _wrapper.fill(inner, freezing=slot)


@dataclasses.dataclass(frozen=True, eq=False)
class _FreezeLayers:
  """The slot of :func:`freeze_layers`.

  Attributes:
    number_leaves: takes a tree like the params; returns the tree of its leaves' group numbers.
    description: the groups and the schedule, in words.
    owner_of_counts: the argument `counts`: "group", "run" or None.
    classes: a number for each group, the same for groups that are always trained in the same steps.
  """

  schedule: _schedules.FreezeSchedule
  number_leaves: Callable[[_types.Tree], _types.Tree]
  description: tuple[str, str]
  key: jax.Array
  owner_of_counts: str | None
  classes: tuple[int, ...]
  method = "freeze_layers"

  @property
  def always_frozen(self) -> int:
    """How many of the first groups no step trains."""
    return int(min(self.schedule.depths)) if self.schedule.depths is not None else 0

  def init(
    self,
    inner: optax.GradientTransformationExtraArgs,
    inner_state: optax.OptState,
    params: optax.Params,
    kept: _kept_leaves.KeptLeaves,
  ) -> FreezeLayersState:
    """Returns the initial state; raises ValueError if the groups don't fit the params."""
    _tree_checks.refuse_pair(params, "freeze_layers")
    group_numbers = self.number_leaves(params)
    _check_last_group(group_numbers, self.schedule.num_groups)
    counts = self._find_counts(inner, inner_state, kept.take(group_numbers), kept.take(params))
    leaves = jax.tree.leaves(inner_state)
    # The key is copied, since the state may be donated, and the next `init` uses the key again.
    key_data = jnp.array(jax.random.key_data(self.key))
    return FreezeLayersState(
      **self._depth_at(jnp.zeros([], jnp.int32), key_data),
      key=key_data,
      made_for=self._made_for(),
      group_counts=tuple(
        jnp.full(self.schedule.num_groups, _placement.in_device_memory(leaves[index]))
        for index in counts
      ),
    )

  def _made_for(self) -> dict[str, jax.Array | optax.MaskedNode]:
    """Returns the field `made_for` of the state."""
    digest = hashlib.sha256("\n".join(self.description).encode()).hexdigest()[:16]
    words = dict.fromkeys(self.description, optax.MaskedNode())
    return words | {f"settings {digest}": jnp.zeros([], bool)}

  def _find_counts(
    self,
    inner: optax.GradientTransformationExtraArgs,
    inner_state: optax.OptState,
    group_numbers: _types.Tree,
    params: optax.Params,
  ) -> Sequence[int]:
    """Returns the indices of the leaves of the state that are counts to keep for each group.

    Warns if it is not sure what a count counts.
    """
    groups = _state_layout.leaf_groups(group_numbers, params)
    layout = _state_layout.find_layout(inner, inner_state, groups, self.owner_of_counts)
    # If all groups that are trained at all are trained in the same steps, all counts agree.
    if len(set(self.classes[self.always_frozen :])) == 1:
      return ()
    _warn_of_uncertain_counts(layout)
    if not layout.counts or self.owner_of_counts is not None:
      return layout.counts

    def class_of(number: _layer_groups.GroupNumber) -> int | None:
      classes = {self.classes[i] for i in np.ravel(number)}
      return classes.pop() if len(classes) == 1 else None

    classes = list(map(class_of, jax.tree.leaves(group_numbers)))
    moments = layout.moments(inner_state)
    if not _dependence.moments_meet(inner, inner_state, params, moments, layout.owners, classes):
      return layout.counts
    _warnings.warn(
      "`freeze_layers` keeps one step count for all groups, since the optimizer computes an update"
      " from the moments of several layers, as a clipping after Adam does: the first steps of a"
      ' layer that is thawed late are too long. Clip before Adam, or pass `counts="run"`.',
      UserWarning,
    )
    return ()

  def at(
    self,
    inner: optax.GradientTransformationExtraArgs,
    state: Any,
    grads: optax.Updates,
    kept: _kept_leaves.KeptLeaves,
  ) -> "_FrozenStep":
    """Returns the functions of a step with the depth in `state`."""
    frozen_for = _checks.concrete_number(state.freezing.frozen_for)
    if frozen_for is not None:
      state.freezing.check_declared(int(frozen_for))
    group_numbers = kept.take(self.number_leaves(grads))
    leaf_groups = _state_layout.leaf_groups(group_numbers, kept.take(grads))
    layout = _state_layout.find_layout(inner, state.inner_state, leaf_groups, self.owner_of_counts)
    depth, vectors = state.freezing.frozen_groups, state.freezing.group_counts
    if not vectors:
      layout = dataclasses.replace(layout, counts=())
    counts = _group_counts.GroupCounts(
      layout, vectors, self.classes, leaf_groups, self._first_trained(depth)
    )
    return _FrozenStep(self, state.count, depth, group_numbers, counts, inner)

  def _depth_at(self, count: _types.IntScalar, key_data: jax.Array) -> dict[str, Any]:
    """Returns the fields `frozen_groups` and `frozen_for` of the state for step `count`."""
    key = jax.random.wrap_key_data(key_data, impl=jax.random.key_impl(self.key))
    call, function = "frozen_groups(step, key)", self.schedule.frozen_groups
    depth = _schedules.scalar_depth(_checks.call_schedule(call, function, count, key))
    # The state has moments and step counts for the declared depths only, and a traced program can't
    # raise an error. So an undeclared depth becomes the next smaller declared depth.
    allowed = np.array(self.schedule.depths or range(self.schedule.num_groups), np.int32)
    declared = jnp.asarray(allowed)[jnp.maximum(jnp.sum(allowed <= depth) - 1, 0)]
    steps = self._steps_with(depth, count, key)
    return {
      "frozen_groups": declared,
      "frozen_for": jnp.where(depth == declared, steps, -depth - 1),
    }

  def _steps_with(
    self, depth: _types.IntScalar, count: _types.IntScalar, key: jax.Array
  ) -> _types.IntScalar:
    """Returns for how many steps from step `count` on the schedule returns `depth`."""
    following = np.arange(1, _LOOK_AHEAD, dtype=np.int32)
    steps = jnp.minimum(count, _checks.LARGEST_COUNT - _LOOK_AHEAD) + following
    frozen_groups = self.schedule.frozen_groups
    try:
      depths = jax.vmap(lambda step: _schedules.scalar_depth(frozen_groups(step, key)))(steps)
    except jax.errors.JAXTypeError:  # a schedule with Python's `if`, in a loop without `jit`
      return jnp.ones([], jnp.int32)
    return jnp.min(jnp.where(depths == depth, _LOOK_AHEAD, following))

  def _first_trained(self, depth: _types.IntScalar) -> int:
    """Returns the first group that a step of this depth may train.

    This is `depth` if `depth` is the constant that a train step puts into the state. If `depth` is
    a JAX array, this is the lowest depth that the schedule may have.
    """
    if isinstance(depth, np.integer | np.ndarray):
      return int(depth)
    return self.always_frozen

  def _scaled(
    self, count: _types.IntScalar, group_numbers: _types.Tree, updates: optax.Updates
  ) -> optax.Updates:
    """Returns the updates, multiplied by the schedule's learning rate factor of each group."""
    if self.schedule.learning_rate_scale is None:
      return updates
    scale = _checks.call_schedule(
      "learning_rate_scale(step)", self.schedule.learning_rate_scale, count
    )
    scale = _schedules.scale_per_group(scale, self.schedule.num_groups)
    return jax.tree.map(
      lambda n, u: (_arrays.widen(u) * scale[n]).astype(u.dtype), group_numbers, updates
    )


class _FrozenStep(NamedTuple):
  """A step with frozen layers; its trees have the leaves that some step trains."""

  slot: _FreezeLayers
  count: _types.IntScalar  # type: ignore[assignment]  # tuples have a method of this name
  depth: _types.IntScalar
  group_numbers: _types.Tree
  counts: _group_counts.GroupCounts
  inner: optax.GradientTransformationExtraArgs

  def zero(self, tree: _types.SameTree) -> _types.SameTree:
    """Returns a tree like the params, with zeros for frozen layers."""
    select = functools.partial(_layer_groups.select_frozen, self.depth)
    return jax.tree.map(lambda n, g: select(n, jnp.zeros_like(g), g), self.group_numbers, tree)

  def update(
    self, grads: optax.Updates, old: optax.OptState, params: optax.Params | None, **extra: Any
  ) -> tuple[optax.Updates, optax.OptState]:
    """Serves as the optimizer's ``update``; frozen layers and their state stay."""
    layout = self.counts.layout
    updates, new = self.counts.update_by_class(self.inner.update, grads, old, params, **extra)
    updates = self.zero(self.slot._scaled(self.count, self.group_numbers, updates))
    select = functools.partial(_layer_groups.select_frozen, self.depth)
    return updates, _state_layout.select(layout.state_groups, select, old, new)

  def next(
    self,
    state: Any,
    inner_state: optax.OptState,
    count: _types.IntScalar,
    made: _types.BoolScalar,
  ) -> FreezeLayersState:
    """Returns the state after the step."""
    return state.freezing._replace(
      **self.slot._depth_at(count, state.freezing.key),
      group_counts=self.counts.advanced(state.inner_state, inner_state, self.depth, made),
    )


def _warn_of_uncertain_counts(layout: _state_layout.StateLayout) -> None:
  if shared := ", ".join(layout.shared):
    _warnings.warn(
      f"`freeze_layers` keeps one step count for all groups in {shared}, since it can't"
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


def _check_last_group(group_numbers: _types.Tree, num_groups: int) -> None:
  """Raises ValueError if no leaf is in the last group, the only one that is never frozen."""
  largest = [int(np.max(number)) for number in jax.tree.leaves(group_numbers)]
  if largest and max(largest) < num_groups - 1:
    raise ValueError(
      "`groups` must leave a leaf in the last group, which is never frozen; got none in group"
      f" {num_groups - 1} of {num_groups}. Take the leaves that should train out of the other"
      " groups: a leaf that no pattern matches is in the last group."
    )

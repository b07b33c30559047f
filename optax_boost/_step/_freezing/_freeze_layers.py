"""``freeze_layers``: on some steps the first groups of layers are not updated.

A step of depth i freezes the first i of the groups 0, ..., G-1, which are in the order of the
forward pass. A schedule is a table of depths.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost._foundation import (
  _arrays,
  _checks,
  _placement,
  _tree_checks,
  _types,
)
from optax_boost._step import _kept_leaves, _wrapper
from optax_boost._step._freezing import _group_counts, _schedules, _state_layout
from optax_boost._trace import _layer_groups


class FreezeLayersState(NamedTuple):
  """State of :func:`freeze_layers`; the step is the field `count` of the :class:`StepState`.

  Attributes:
    group_counts: a vector for each leaf of `inner_state` that counts the steps of moments, in the
      order of ``jax.tree.leaves``. Entry i counts only the steps that trained group i.
  """

  group_counts: tuple[jax.Array, ...]


def freeze_layers(
  inner: optax.GradientTransformation,
  groups: _layer_groups.Groups,
  schedule: _schedules.FreezeSchedule,
  *,
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
  may have changed. Inside your own ``jit``, ``scan`` or ``vmap``, it skips the backward pass of the
  layers that all steps freeze if the schedule has one depth, else of none. Leaves may be complex.

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
    counts: what a step count beside moments in `inner`'s state counts. ``"group"``: the steps in
      which a group was trained, for a bias correction. ``"run"``: all steps, for a learning rate
      schedule. None: ``"group"`` in the states of optax that hold moments, a count and no other
      scalar, else ``"run"``. Clip before Adam, not after it.

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
  num_groups = _layer_groups.count_groups(groups)
  _checks.check_type("schedule", schedule, _schedules.FreezeSchedule, "a FreezeSchedule")
  if schedule.num_groups not in (None, num_groups) or max(schedule.depths) >= num_groups:
    wanted = schedule.num_groups or f"more than {max(schedule.depths)}"
    raise ValueError(
      f"`schedule` must be for the same number of groups as `groups`; got one for {wanted}, and"
      f" {num_groups} groups."
    )
  _checks.check_name("counts", counts, ("group", "run"), optional=True)
  number_leaves = _layer_groups.numbering(groups, "freeze_layers")
  return _wrapper.fill(inner, freezing=FreezeLayers(num_groups, schedule, number_leaves, counts))


@dataclasses.dataclass(frozen=True, eq=False)
class FreezeLayers:
  """The slot of :func:`freeze_layers`.

  Attributes:
    number_leaves: takes a tree like the params; returns the tree of its leaves' group numbers.
    owner_of_counts: the argument `counts`: "group", "run" or None.
  """

  num_groups: int
  schedule: _schedules.FreezeSchedule
  number_leaves: Callable[[_types.Tree], _types.Tree]
  owner_of_counts: str | None
  method = "freeze_layers"

  @functools.cached_property
  def classes(self) -> tuple[int, ...]:
    """A number for each group, the same for groups that are always trained in the same steps."""
    depths = np.unique(self.schedule.depths)
    return tuple(int(np.sum(depths <= group)) for group in range(self.num_groups))

  @property
  def always_frozen(self) -> int:
    """How many of the first groups no step trains."""
    return int(min(self.schedule.depths))

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
    _check_last_group(group_numbers, self.num_groups)
    counts = self._find_counts(inner, inner_state, kept.take(group_numbers), kept.take(params))
    leaves = jax.tree.leaves(inner_state)
    return FreezeLayersState(
      tuple(
        jnp.full(self.num_groups, _placement.in_device_memory(leaves[index])) for index in counts
      ),
    )

  def _find_counts(
    self,
    inner: optax.GradientTransformationExtraArgs,
    inner_state: optax.OptState,
    group_numbers: _types.Tree,
    params: optax.Params,
  ) -> Sequence[int]:
    """Returns the indices of the leaves of the state that are counts to keep for each group."""
    groups = _state_layout.leaf_groups(group_numbers, params)
    return _state_layout.find_layout(inner, inner_state, groups, self.owner_of_counts).counts

  def at(
    self,
    inner: optax.GradientTransformationExtraArgs,
    state: Any,
    grads: optax.Updates,
    kept: _kept_leaves.KeptLeaves,
    depth: _types.IntScalar | np.integer | None,
  ) -> "_FrozenStep":
    """Returns the functions of a step of a depth, by default the schedule's."""
    if depth is None:
      depth = self.schedule.frozen_groups(state.count)
    group_numbers = kept.take(self.number_leaves(grads))
    leaf_groups = _state_layout.leaf_groups(group_numbers, kept.take(grads))
    layout = _state_layout.find_layout(inner, state.inner_state, leaf_groups, self.owner_of_counts)
    vectors = [_group_counts.shared_counts(v, self.classes) for v in state.freezing.group_counts]
    counts = _group_counts.GroupCounts(
      layout, vectors, self.classes, leaf_groups, self._first_trained(depth)
    )
    return _FrozenStep(self, state.count, depth, group_numbers, counts, inner)

  def _first_trained(self, depth: _types.IntScalar | np.integer) -> int:
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
    scale = self.schedule.anneal(count)
    if scale is None:
      return updates
    return jax.tree.map(
      lambda n, u: (_arrays.widen(u) * scale[n]).astype(u.dtype), group_numbers, updates
    )


class _FrozenStep(NamedTuple):
  """A step with frozen layers; its trees have the leaves that some step trains."""

  slot: FreezeLayers
  count: _types.IntScalar  # type: ignore[assignment]  # tuples have a method of this name
  depth: _types.IntScalar | np.integer
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

  def next(self, inner_state: optax.OptState, made: _types.BoolScalar) -> FreezeLayersState:
    """Returns the state after the step."""
    return FreezeLayersState(self.counts.advanced(inner_state, self.depth, made))


def _check_last_group(group_numbers: _types.Tree, num_groups: int) -> None:
  """Raises ValueError if no leaf is in the last group, the only one that is never frozen."""
  largest = [int(np.max(number)) for number in jax.tree.leaves(group_numbers)]
  if largest and max(largest) < num_groups - 1:
    raise ValueError(
      "`groups` must leave a leaf in the last group, which is never frozen; got none in group"
      f" {num_groups - 1} of {num_groups}. Take the leaves that should train out of the other"
      " groups: a leaf that no pattern matches is in the last group."
    )

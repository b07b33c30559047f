r"""Loss scaling by group, for layers whose gradients differ by orders of magnitude.

  s[i]                  the scale of group i; its gradients arrive multiplied by it
  group i overflowed    s[i] <- max(s[i] * backoff, minimum)
  it did not            s[i] <- min(s[i] * growth, maximum)

Source: MindSpore Boost's ``GroupLossScaleManager`` and ``BoostTrainOneStepWithLossScaleCell``.
"""

from typing import Literal
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_boost import _arrays
from optax_boost import _base
from optax_boost import _conditional
from optax_boost import _groups
from optax_boost import _protocol
from optax_boost._precision import _unscaled

_METHOD = "group_loss_scale"


@_protocol.declares(
  metrics=("group_loss_scale", "group_loss_scale/notfinite_count"),
  requests=("group_loss_scale",),
  skips=("notfinite_count",),
)
class GroupLossScaleState(NamedTuple):
  """State of :func:`group_loss_scale`.

  Attributes:
    group_loss_scale: array [groups], float32, the scales of the next step.
    overflow_count: array [groups], int32, how often each group's gradients were not finite.
    notfinite_count: scalar int32, steps in which any group's were not.
    inner_state: the inner optimizer's state.
  """

  group_loss_scale: jax.Array
  overflow_count: jax.Array
  notfinite_count: jax.Array
  inner_state: optax.OptState


def next_group_loss_scale(
  group_loss_scale: jax.Array,
  finite: jax.Array,
  growth_factor: jax.typing.ArrayLike = 2.0**0.001,
  backoff_factor: jax.typing.ArrayLike = 2.0**-0.5,
  minimum: jax.typing.ArrayLike = 1.0,
  maximum: jax.typing.ArrayLike = 2.0**24,
) -> jax.Array:
  """The groups' scales after a step.

  Args:
    group_loss_scale: array [groups], float32, the scales that the step used.
    finite: array [groups], bool, whether the groups' gradients were finite.
    growth_factor: factor of a scale after a step without an overflow.
    backoff_factor: factor after an overflow.
    minimum: floor of the scales.
    maximum: cap of the scales.

  Returns:
    The new scales.

  Raises:
    TypeError: an argument is of the wrong kind.
    ValueError: a number is out of range, or the arrays differ in shape.

  Examples:
    >>> import jax.numpy as jnp, optax_boost
    >>> scales = optax_boost.next_group_loss_scale(
    ...   jnp.array([8.0, 8.0]), jnp.array([True, False]), growth_factor=2.0, backoff_factor=0.5
    ... )
    >>> scales.tolist()
    [16.0, 4.0]
  """
  _base.check_array("group_loss_scale", group_loss_scale)
  _base.check_array("finite", finite, jnp.shape(group_loss_scale), bools=True)
  grown, shrunk = _unscaled.next_scales(
    group_loss_scale, growth_factor, backoff_factor, minimum, maximum
  )
  return jnp.where(finite, grown, shrunk)


def group_loss_scale(
  inner: optax.GradientTransformation,
  groups: _groups.Groups,
  initial_scale: jax.typing.ArrayLike = 2.0**15,
  *,
  growth_factor: jax.typing.ArrayLike = 2.0**0.001,
  backoff_factor: jax.typing.ArrayLike = 2.0**-0.5,
  minimum: jax.typing.ArrayLike = 1.0,
  maximum: jax.typing.ArrayLike = 2.0**24,
  skip: Literal["all", "group"] = "all",
  axis_name: str | tuple[str, ...] | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Unscales gradients that arrive with a scale for each group of layers.

  :func:`make_train_step` scales the backward pass where it goes from group to group; in a loop of
  your own :func:`scale_by_group` does it. An overflow in one group spreads to the groups before it.

  Args:
    inner: the optimizer; gradients and its state are in at least float32. For float16 params put
      :func:`master_weights` around the whole.
    groups: a :class:`LayerGroups`; or regular expressions, one per group in the order of the
      forward pass, searched in the leaves' paths. The first that matches counts; a leaf that none
      matches is in the last group.
    initial_scale: the first scale of every group, between `minimum` and `maximum`.
    growth_factor: factor of a scale after a step without an overflow in its group; raising it
      adapts faster and overflows more often.
    backoff_factor: factor of a scale after an overflow, below 1.
    minimum: floor of the scales.
    maximum: cap of the scales.
    skip: ``"all"``: a step in which any group overflowed, or after which a param would not be
      finite, changes scales and counters only. ``"group"``: only those groups and their optimizer
      state stand still; `inner` sees zeros for gradients that overflowed.
    axis_name: inside ``shard_map``, the mesh axes over which the gradients differ.

  Returns:
    An :class:`optax.GradientTransformationExtraArgs`. The extra arguments `grad` and `grad_fn` are
    unscaled for `inner`. Updates have the dtype that `inner` gives without a scale around it.

  Raises:
    ValueError: a number is out of range, or the groups are of other params; in ``init``: another
      loss scale or an :func:`average_params` stands inside ``skip="group"``.
    TypeError: an argument or a leaf is of the wrong kind.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_boost
    >>> tx = optax_boost.group_loss_scale(optax.sgd(1.0), ["body", "head"], 4.0, skip="group")
    >>> params = {"body": jnp.zeros(1), "head": jnp.zeros(1)}
    >>> scaled = {"body": jnp.array([jnp.inf]), "head": jnp.array([8.0])}
    >>> updates, state = tx.update(scaled, tx.init(params), params)
    >>> updates["body"].tolist(), updates["head"].tolist()
    ([0.0], [-2.0])
    >>> [round(float(scale), 3) for scale in state.group_loss_scale]
    [2.828, 4.003]

  .. note::
    ``optax.inject_hyperparams`` casts to the params' dtype, and in bfloat16 the growth ``2**0.001``
    is 1 (optax issue 1414): pass ``hyperparam_dtype=jnp.float32``.
  """
  num_groups = _groups.count_groups(groups)
  number = _groups.numbering(groups, _METHOD)
  _unscaled.check_rule(initial_scale, growth_factor, backoff_factor, minimum, maximum)

  def make_state(params: optax.Params, inner_state: optax.OptState) -> GroupLossScaleState:
    numbers = jax.tree.leaves(number(params))
    _protocol.announce_groups(_protocol.GROUP_LOSS_SCALE, params, numbers, num_groups)
    if skip == "group" and _conditional.scales_loss(inner_state):
      raise ValueError(
        "`group_loss_scale` with skip='group' hides overflows from a loss scale inside it, which"
        " would never come down. Put that scale outside, as in"
        " `dynamic_loss_scale(group_loss_scale(inner, groups, skip='group'))`, or pass skip='all'."
      )
    if skip == "group":
      _protocol.refuse_observers(_METHOD, inner_state)
    return GroupLossScaleState(
      group_loss_scale=jnp.full(num_groups, initial_scale, jnp.float32),
      overflow_count=jnp.zeros(num_groups, jnp.int32),
      notfinite_count=jnp.zeros([], jnp.int32),
      inner_state=inner_state,
    )

  def next_state(
    state: GroupLossScaleState, inner_state: optax.OptState, finite: jax.Array, made: jax.Array
  ) -> GroupLossScaleState:
    return GroupLossScaleState(
      group_loss_scale=next_group_loss_scale(
        state.group_loss_scale, finite, growth_factor, backoff_factor, minimum, maximum
      ),
      overflow_count=_arrays.increment_if(~finite, state.overflow_count),
      notfinite_count=_arrays.increment_if(~jnp.all(made), state.notfinite_count),
      inner_state=inner_state,
    )

  return _unscaled.UnscalingOptimizer(
    _METHOD,
    GroupLossScaleState,
    inner,
    axis_name,
    maximum,
    make_state=make_state,
    scales_of=lambda state: state.group_loss_scale,
    number=number,
    next_state=next_state,
    skip=skip,
  ).transformation()

r"""Loss scaling by group, for layers whose gradients differ by orders of magnitude.

  s[i]                  the scale of group i; its gradients arrive multiplied by it
  group i overflowed    s[i] <- max(s[i] * backoff, minimum)
  it did not            s[i] <- min(s[i] * growth, maximum)

Source: MindSpore Boost's ``GroupLossScaleManager`` and ``BoostTrainOneStepWithLossScaleCell``.
"""

from typing import Any
from typing import Literal
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_boost import _base
from optax_boost import _groups
from optax_boost import _protocol
from optax_boost import _tree
from optax_boost._precision import _loss_scale

_METHOD = "group_loss_scale"


@_protocol.declares(
  metrics=("group_loss_scale", "group_loss_scale/notfinite_count"), requests=("group_loss_scale",)
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
    finite: array [groups], bool, whether the groups' gradients were.
    growth_factor: what a scale is multiplied by after every step without an overflow.
    backoff_factor: what it is multiplied by after one.
    minimum: its floor.
    maximum: its cap.

  Returns:
    The new scales.

  Examples:
    >>> import jax.numpy as jnp, optax_boost
    >>> scales = optax_boost.next_group_loss_scale(
    ...   jnp.array([8.0, 8.0]), jnp.array([True, False]), growth_factor=2.0, backoff_factor=0.5
    ... )
    >>> scales.tolist()
    [16.0, 4.0]
  """
  grown = jnp.minimum(group_loss_scale * jnp.float32(growth_factor), jnp.float32(maximum))
  shrunk = jnp.maximum(group_loss_scale * jnp.float32(backoff_factor), jnp.float32(minimum))
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

  :func:`make_train_step` finds the scales in the state and scales the backward pass where it goes
  from group to group; in a loop of your own :func:`scale_by_group` does it.

  An overflow travels: what is not finite in one group is not finite in those before it either.

  Args:
    inner: the optimizer that sees the unscaled gradients. For float16 params, put
      :func:`master_weights` around the whole.
    groups: what :func:`layer_groups` returned; or a sequence of regular expressions, one per
      group in the order of the forward pass, searched in the leaves' paths. The first that
      matches counts; a leaf that none matches is in the last group.
    initial_scale: the scale of every group to start with.
    growth_factor: what a group's scale is multiplied by after every step in which it did not
      overflow; above 1. Raising it adapts faster and overflows more often.
    backoff_factor: what it is multiplied by after a step in which it did; below 1.
    minimum: its floor.
    maximum: its cap.
    skip: ``"all"``: a step in which any group overflowed changes nothing but scales and counters.
      ``"group"``: only the groups that overflowed stand still, with all that `inner` keeps of
      them; `inner` sees zeros for their gradients.
    axis_name: inside ``shard_map``, the mesh axes over which the gradients differ. Not needed
      under ``jit``.

  Returns:
    An :class:`optax.GradientTransformationExtraArgs`. The extra arguments `grad` and `grad_fn` are
    unscaled for `inner`.

  Raises:
    ValueError: a number is out of range, or the groups are of other params.
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
  """
  if not isinstance(inner, optax.GradientTransformation):
    raise TypeError(
      f"`inner` must be an optax.GradientTransformation; got {inner!r}. Did you pass the factory"
      " instead of what it returns?"
    )
  num_groups = _groups.count_groups(groups)
  _base.check_number("initial_scale", initial_scale, positive=True)
  _base.check_number("growth_factor", growth_factor, minimum=1.0)
  _base.check_number("backoff_factor", backoff_factor, positive=True, below=1.0)
  _loss_scale.check_range(minimum, maximum)
  if skip not in ("all", "group"):
    raise ValueError(f"`skip` must be 'all' or 'group'; got {skip!r}.")
  inner = optax.with_extra_args_support(inner)

  def init_fn(params: optax.Params) -> GroupLossScaleState:
    _tree.check_floating(params, _METHOD)
    numbers = _groups.group_numbers(params, groups, _METHOD)
    _protocol.announce_groups(_protocol.GROUP_LOSS_SCALE, params, numbers, num_groups)
    return GroupLossScaleState(
      group_loss_scale=jnp.full(num_groups, initial_scale, jnp.float32),
      overflow_count=jnp.zeros(num_groups, jnp.int32),
      notfinite_count=jnp.zeros([], jnp.int32),
      inner_state=inner.init(params),
    )

  def update_fn(
    updates: optax.Updates,
    state: GroupLossScaleState,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, GroupLossScaleState]:
    _tree.check_floating(updates, _METHOD)
    numbers = _groups.number_tree(updates, groups, _METHOD)
    leaves = list(zip(jax.tree.leaves(numbers), jax.tree.leaves(updates), strict=True))
    members = [[g for number, g in leaves if number == group] for group in range(num_groups)]
    finite = jnp.stack([_tree.all_finite(group) for group in members])
    if axis_name is not None:
      finite = jax.lax.pmin(finite.astype(jnp.int32), axis_name) > 0

    def select(group: int, if_not_finite: Any, otherwise: Any) -> Any:
      return jnp.where(finite[group], otherwise, if_not_finite)

    def without(tree: optax.Updates) -> optax.Updates:
      return jax.tree.map(lambda n, g: select(n, jnp.zeros_like(g), g), numbers, tree)

    def unscale(grads: optax.Updates) -> optax.Updates:
      grads = jax.tree.map(
        lambda n, g: _loss_scale.divide(g, state.group_loss_scale[n]), numbers, grads
      )
      return without(grads) if skip == "group" else grads

    extra = _loss_scale.unscaled_arguments(extra_args, unscale)

    def step(inner_state: optax.OptState) -> tuple[optax.Updates, optax.OptState]:
      return inner.update(unscale(updates), inner_state, params, **extra)

    def stand_still(inner_state: optax.OptState) -> tuple[optax.Updates, optax.OptState]:
      return jax.tree.map(jnp.zeros_like, updates), inner_state

    if skip == "all":
      out, inner_state = jax.lax.cond(jnp.all(finite), step, stand_still, state.inner_state)
    else:
      out, moved = step(state.inner_state)
      out = without(out)
      inner_state = _groups.select_state(_METHOD, inner, select, numbers, state.inner_state, moved)
    return out, GroupLossScaleState(
      group_loss_scale=next_group_loss_scale(
        state.group_loss_scale, finite, growth_factor, backoff_factor, minimum, maximum
      ),
      overflow_count=state.overflow_count + jnp.logical_not(finite),
      notfinite_count=state.notfinite_count + jnp.logical_not(jnp.all(finite)),
      inner_state=inner_state,
    )

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)

"""Schedules, which compute from the step and a key how many groups of layers are frozen.

G is the number of groups, of which the last is never frozen. A depth is a number of groups that a
step may freeze, from 0 to G - 1; D is the number of depths.

Sources: MindSpore Boost's ``GradientFreeze``; Brock et al., "FreezeOut", arXiv:1706.04983; Howard &
Ruder, "Universal Language Model Fine-tuning", arXiv:1801.06146.
"""

from collections.abc import Callable, Sequence
import dataclasses
import fractions
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_boost._foundation import _checks, _types, _warnings

# The largest denominator of a fraction that stands for a share of steps.
_LONGEST_PERIOD = 10_000
# The rounding error that a share may have, such as 1 - 0.7 for 0.3.
_ROUNDING = 2.0**-52
# The largest number of groups. Schedules hold an array with an entry for each group.
_MOST_GROUPS = 10_000
# The default of `max_depths`, since a train step compiles a program for each depth.
_MOST_DEPTHS = 10


@dataclasses.dataclass(frozen=True)
class FreezeSchedule:
  """A schedule of how many groups are frozen in each step.

  Attributes:
    num_groups: the number of groups.
    frozen_groups: a pure function of the step (scalar int32) and a key. It returns how many groups
      the step freezes, a scalar integer; less than 0 counts as 0.
    learning_rate_scale: a function of the step that returns a factor for the updates of each group,
      an array of `num_groups` numbers; None: no factors.
    depths: all values that `frozen_groups` may return. Groups that each value freezes together or
      trains together share their step counts. None: 0, ..., num_groups - 1. Another value is an
      error in a train step, and outside of ``jit``; your own ``jit`` can't raise, and takes the
      next smaller value of `depths`.
    name: tells the schedule from others. A training can't go on with another schedule, so a state
      keeps the name, and :func:`freeze_layers` compares it.
  """

  num_groups: int
  frozen_groups: Callable[[jax.Array, jax.Array], jax.typing.ArrayLike]
  learning_rate_scale: Callable[[jax.Array], jax.Array] | None = None
  depths: Sequence[int] | np.ndarray | None = None
  name: str = ""

  def __post_init__(self) -> None:
    object.__setattr__(self, "num_groups", _check_num_groups(self.num_groups))
    if self.depths is not None:
      object.__setattr__(self, "depths", _check_depths(self.depths, self.num_groups))
    _checks.check_callable("frozen_groups", self.frozen_groups, "frozen_groups(step, key)", takes=2)
    scale = self.learning_rate_scale
    form = "learning_rate_scale(step)"
    _checks.check_callable("learning_rate_scale", scale, form, optional=True, takes=1)


def scalar_depth(depth: Any) -> _types.IntScalar:
  """Returns a schedule's depth, at least 0; raises TypeError unless it is a scalar integer."""
  if _checks.is_integer(depth):
    depth = np.int32(min(max(int(depth), 0), _checks.LARGEST_COUNT))
  words = "a scalar integer, how many groups are frozen"
  _check_returned("frozen_groups(step, key)", depth, (), jnp.integer, words)
  return jnp.maximum(jnp.asarray(depth).astype(jnp.int32), 0)


def scale_per_group(scale: Any, num_groups: int) -> jax.Array:
  """Returns a schedule's factors as an array; raises TypeError unless each group has a factor."""
  words = f"an array of {num_groups} numbers, one per group"
  _check_returned("learning_rate_scale(step)", scale, (num_groups,), jnp.number, words)
  return jnp.asarray(scale)


def _check_returned(
  call: str, value: Any, shape: tuple[int, ...], kind: _types.Dtype, words: str
) -> None:
  is_array = _checks.is_any_array(value) or isinstance(value, np.generic)
  fits = is_array and jnp.shape(value) == shape and jnp.isrealobj(value)
  if not (fits and jnp.issubdtype(jnp.result_type(value), kind)):
    got = f"{jnp.result_type(value)}{jnp.shape(value)}" if is_array else _checks.shorten(value)
    raise TypeError(f"`{call}` of a FreezeSchedule must return {words}; it returned {got}.")


def _check_num_groups(num_groups: int) -> int:
  _checks.check_whole_number("num_groups", num_groups, maximum=_MOST_GROUPS, static=True)
  return int(num_groups)


def _check_depths(depths: Sequence[int] | np.ndarray, num_groups: int) -> tuple[int, ...]:
  values = tuple(np.asarray(depths).tolist()) if np.ndim(depths) == 1 else ()
  fits = values and all(map(_checks.is_integer, values))
  if not (fits and min(values) >= 0 and max(values) < num_groups):
    raise ValueError(
      f"`depths` must be integers from 0 to {num_groups - 1}, how many groups a step may freeze;"
      f" got {_checks.shorten(depths)}."
    )
  return tuple(sorted(set(values)))


def _spread_depths(num_groups: int, max_depths: int) -> np.ndarray:
  """Returns up to `max_depths` evenly spread depths, ascending from 0 to ``num_groups - 1``."""
  num_groups = _check_num_groups(num_groups)
  _checks.check_whole_number("max_depths", max_depths, minimum=2, static=True)
  last = min(num_groups, int(max_depths)) - 1
  # i (G - 1) / last for i = 0, ..., last, rounded to the nearest integers.
  doubled = 2 * np.arange(last + 1) * (num_groups - 1) + last
  return (doubled // max(2 * last, 1)).astype(np.int32)


def _python_number(name: str, value: float | np.ndarray, **limits: Any) -> float:
  """Returns a number as a float; raises TypeError for a JAX array.

  Error messages call the number `name`. `limits` are further arguments of ``check_number``.
  """
  _checks.check_number(name, value, **limits)
  if _checks.is_array(value):
    raise TypeError(
      f"`{name}` must be a Python number, since the schedule is computed on the host; got an"
      f" array. Pass float({name})."
    )
  # A user who passes NumPy's float32 0.3 means the decimal 0.3, not 0.30000001192092896.
  return float(str(value)) if isinstance(value, np.ndarray | np.generic) else float(value)


def _check_share(num_groups: int, frozen_fraction: float) -> tuple[int, float]:
  """Checks and returns both arguments; `frozen_fraction` becomes 0 if no group can freeze."""
  num_groups = _check_num_groups(num_groups)
  share = _python_number("frozen_fraction", frozen_fraction, minimum=0.0, below=1.0)
  return num_groups, 0.0 if num_groups == 1 or share <= _ROUNDING else share


def continuous_freezing(
  num_groups: int, frozen_fraction: float, *, max_depths: int = _MOST_DEPTHS
) -> FreezeSchedule:
  r"""Repeats a cycle: steps with nothing frozen, then with 1, 2, ..., num_groups - 1 frozen groups.

  A cycle has :math:`\lfloor p (D - 1) / (1 - p) \rfloor` steps with nothing frozen, where p is one
  minus `frozen_fraction` and D the number of depths. So the share of frozen steps is
  `frozen_fraction` to within one step per cycle.

  Args:
    num_groups: the number of groups G.
    frozen_fraction: the share of steps in which something is frozen; raising it saves more time and
      trains the first layers less. (MindSpore's `freeze_p` is one minus this share.) The first
      group is never trained if the share is above (D - 1) / D, and a warning says so.
    max_depths: the largest number D of depths (numbers of frozen groups), 0 and G - 1 among them;
      static. If G is larger than D, several groups are frozen at once. Raising it freezes fewer
      groups at once; the train step compiles a program for each depth.

  Returns:
    A :class:`FreezeSchedule`. If `max_depths` is at least G, it freezes as MindSpore does.

  Examples:
    >>> import optax_boost
    >>> schedule = optax_boost.continuous_freezing(4, frozen_fraction=0.5)
    >>> [int(schedule.frozen_groups(step, None)) for step in range(8)]
    [0, 0, 0, 1, 2, 3, 0, 0]
  """
  num_groups, share = _check_share(num_groups, frozen_fraction)
  depths = _spread_depths(num_groups, max_depths)
  if not share:
    return fixed_freezing(num_groups, 0)
  # The number of steps with nothing frozen is computed with MindSpore's rounding errors, which may
  # change the number by one.
  nearest = fractions.Fraction(share).limit_denominator(_LONGEST_PERIOD)
  freeze_p = float(1 - nearest) if abs(nearest - share) <= _ROUNDING else 1 - share
  unfrozen = math.floor(freeze_p * (len(depths) - 1) / (1 - freeze_p))
  if unfrozen == 0:
    _warnings.warn(
      f"`continuous_freezing` of {num_groups} groups in {share:.4g} of the steps freezes"
      " something in every step: the first group is never trained. Lower `frozen_fraction` to"
      f" {(len(depths) - 1) / len(depths):.4g} or less, or use `interval_freezing`.",
      UserWarning,
    )
  # The length of a cycle must fit into an int32.
  unfrozen = min(unfrozen, _checks.LARGEST_COUNT - len(depths))
  cycle = unfrozen + len(depths) - 1

  def frozen_groups(count: _types.IntScalar, key: jax.Array) -> _types.IntScalar:
    return jnp.asarray(depths)[jnp.maximum(count % cycle - unfrozen + 1, 0)]

  return FreezeSchedule(
    num_groups,
    frozen_groups,
    depths=depths if unfrozen else depths[1:],
    name=f"continuous_freezing({num_groups}, {share}, max_depths={max_depths})",
  )


def interval_freezing(
  num_groups: int, frozen_fraction: float, *, max_depths: int = _MOST_DEPTHS
) -> FreezeSchedule:
  """Freezes at regular intervals; freezes i of G groups with a probability proportional to G - i.

  Args:
    num_groups: the number of groups G.
    frozen_fraction: as for :func:`continuous_freezing`.
    max_depths: as for :func:`continuous_freezing`. With more groups than depths, the i-th of D
      depths has a probability proportional to D - i.

  Returns:
    A :class:`FreezeSchedule` that freezes in the same steps as MindSpore. How many groups it
    freezes is drawn from the key of :func:`freeze_layers`, independently in each step.

  Examples:
    >>> import jax, optax_boost
    >>> schedule = optax_boost.interval_freezing(4, frozen_fraction=0.5)
    >>> depths = [int(schedule.frozen_groups(step, jax.random.key(0))) for step in range(8)]
    >>> [depth > 0 for depth in depths]
    [False, True, False, True, False, True, False, True]
  """
  num_groups, share = _check_share(num_groups, frozen_fraction)
  depths = _spread_depths(num_groups, max_depths)
  if not share:
    return fixed_freezing(num_groups, 0)

  pattern = _interval_pattern(share)

  def frozen_groups(count: _types.IntScalar, key: jax.Array) -> _types.IntScalar:
    uniform = jax.random.uniform(jax.random.fold_in(key, count), dtype=jnp.float32)
    freezes = jnp.where(count > 1, jnp.asarray(pattern)[(count - 2) % len(pattern)], count == 1)
    return jnp.where(freezes, jnp.asarray(depths)[interval_depth(uniform, len(depths))], 0)

  name = f"interval_freezing({num_groups}, {share}, max_depths={max_depths})"
  return FreezeSchedule(num_groups, frozen_groups, depths=depths, name=name)


def _interval_pattern(share: float) -> np.ndarray:
  """Returns for steps 2, 3, ... of one period whether MindSpore freezes groups in the step.

  Steps count from 0. MindSpore freezes nothing in step 0, and always freezes groups in step 1.
  """
  period = fractions.Fraction(share).limit_denominator(_LONGEST_PERIOD).denominator
  freezes: list[bool] = []
  frozen = 0
  for step in range(1, period + 2):
    # MindSpore computes the share as 1 - freeze_p. The share 1 - 0.7 is a little more than 0.3, so
    # a step freezes groups even if exactly 0.3 of the steps before did.
    freezes.append(frozen / step < share)
    frozen += freezes[-1]
  return np.array(freezes[1:])


def interval_depth(uniform: jax.typing.ArrayLike, num_groups: int) -> jax.Array:
  """Returns a depth i from 1 to G - 1, drawn with a probability proportional to G - i.

  `uniform` is a random number from [0, 1), and G is `num_groups`.
  """
  # As in MindSpore, `uniform` chooses among the depths G-1, G-2, ..., 1, whose weights are 1, 2,
  # ..., G-1 in this order.
  weights = np.cumsum(np.arange(1, num_groups))
  bounds = jnp.asarray(weights / weights[-1], jnp.float32)
  below = jnp.sum(bounds <= jnp.expand_dims(jnp.asarray(uniform), -1), axis=-1)
  return (num_groups - 1 - jnp.minimum(below, num_groups - 2)).astype(jnp.int32)


def progressive_freezing(
  num_groups: int,
  total_steps: int,
  first: float = 0.5,
  *,
  power: float = 1.0,
  anneal: bool = True,
  max_depths: int = _MOST_DEPTHS,
) -> FreezeSchedule:
  r"""Anneals the learning rate of each group to zero, at a time of its own, then freezes the group.

  Group i is frozen from step :math:`t_i` on, and before that its updates are multiplied by

  .. math::
    \frac{1}{2} (1 + \cos(\pi t / t_i)), \qquad
    t_i / T = t_0 + (1 - t_0) \left(\frac{i}{G - 1}\right)^p

  The last group is annealed over the whole run and never frozen. So the inner optimizer's learning
  rate should be constant; if it decays, pass ``anneal=False``.

  Args:
    num_groups: the number of groups G.
    total_steps: the length T of the run, in steps.
    first: when the first group is frozen, as a share of the run. Lowering it saves more time.
    power: the exponent p (the paper's cubic schedule: 3). Raising it freezes the middle groups
      earlier.
    anneal: whether updates are multiplied by the factors above.
    max_depths: as for :func:`continuous_freezing`. With more groups than depths, neighboring groups
      are frozen together, at the earliest of their times.

  Returns:
    A :class:`FreezeSchedule`.

  Examples:
    >>> import jax.numpy as jnp, optax_boost
    >>> schedule = optax_boost.progressive_freezing(3, total_steps=100, first=0.5)
    >>> [int(schedule.frozen_groups(jnp.int32(step), None)) for step in (0, 49, 50, 75, 200)]
    [0, 0, 1, 2, 2]
    >>> [round(float(s), 2) for s in schedule.learning_rate_scale(jnp.int32(25))]
    [0.5, 0.75, 0.85]
    >>> half = optax_boost.progressive_freezing(2, total_steps=100, first=0.7, anneal=False)
    >>> [int(half.frozen_groups(jnp.int32(step), None)) for step in (0, 69, 70, 99)]
    [0, 0, 1, 1]

  References:
    Brock, Lim, Ritchie, Weston, `FreezeOut <https://arxiv.org/abs/1706.04983>`_, 2017.
  """
  depths = _spread_depths(num_groups, max_depths)
  _checks.check_whole_number("total_steps", total_steps, static=True)
  start = float(_python_number("first", first, above=0.0, below=1.0))
  exponent = float(_python_number("power", power, above=0.0))
  _checks.check_bool("anneal", anneal)
  relative_depths = depths / (num_groups - 1) if num_groups > 1 else np.ones(1)
  ends = np.maximum(np.round(total_steps * (start + (1 - start) * relative_depths**exponent)), 1)
  # `ends` has for each depth the first step of the next depth. A group is frozen from the end of
  # the last depth that trains the group.
  times = ends[np.searchsorted(depths, np.arange(num_groups), side="right") - 1]
  # The last depth never ends.
  changes = ends[:-1].astype(np.int32)

  def frozen_groups(count: _types.IntScalar, key: jax.Array) -> _types.IntScalar:
    return jnp.asarray(depths)[jnp.sum(count >= changes, dtype=jnp.int32)]

  def learning_rate_scale(count: _types.IntScalar) -> jax.Array:
    progress = jnp.minimum(jnp.asarray(count, jnp.float32) / jnp.asarray(times, jnp.float32), 1.0)
    return 0.5 * (1 + jnp.cos(jnp.pi * progress))

  return FreezeSchedule(
    num_groups,
    frozen_groups,
    learning_rate_scale if anneal else None,
    depths,
    f"progressive_freezing({num_groups}, {total_steps}, {start}, {exponent}, anneal={anneal},"
    f" max_depths={max_depths})",
  )


def fixed_freezing(
  num_groups: int, frozen_groups: int, *, steps: int | None = None
) -> FreezeSchedule:
  """Freezes the same first groups in every step, as for fine-tuning the last layers.

  Args:
    num_groups: the number of groups G.
    frozen_groups: how many groups are frozen, at most G - 1. Raising it saves more time and trains
      fewer layers.
    steps: the number of steps with frozen groups, such as the first steps of a new head. After
      these steps nothing is frozen. None: all steps.

  Returns:
    A :class:`FreezeSchedule`.

  Examples:
    >>> import optax_boost
    >>> schedule = optax_boost.fixed_freezing(10, frozen_groups=8)
    >>> [int(schedule.frozen_groups(step, None)) for step in (0, 1, 1000)]
    [8, 8, 8]
    >>> schedule = optax_boost.fixed_freezing(10, frozen_groups=8, steps=1000)
    >>> [int(schedule.frozen_groups(step, None)) for step in (0, 999, 1000)]
    [8, 8, 0]
  """
  num_groups = _check_num_groups(num_groups)
  _checks.check_whole_number(
    "frozen_groups", frozen_groups, minimum=0, maximum=num_groups - 1, static=True
  )
  end = _checks.LARGEST_COUNT
  if steps is not None:
    _checks.check_whole_number("steps", steps, static=True)
    end = int(steps)
  return FreezeSchedule(
    num_groups,
    lambda count, key: jnp.where(jnp.asarray(count) < end, frozen_groups, 0),
    depths=(frozen_groups,) if steps is None else (0, frozen_groups),
    name=f"fixed_freezing({num_groups}, {frozen_groups}, steps={steps})",
  )


def gradual_unfreezing(
  num_groups: int,
  every: int,
  *,
  frozen_groups: int | None = None,
  max_depths: int = _MOST_DEPTHS,
) -> FreezeSchedule:
  r"""Trains the last groups first, and every n steps thaws the group before the trained groups.

  In step t the first :math:`\max(F - \lfloor t / n \rfloor, 0)` groups are frozen.

  Args:
    num_groups: the number of groups G.
    every: the steps n from one thaw to the next, an epoch in the paper. Raising it keeps the first
      layers unchanged for longer and saves more time.
    frozen_groups: how many groups F are frozen at first. None: all but the last, as in the paper.
    max_depths: as for :func:`continuous_freezing`. With more groups than depths, neighboring groups
      are thawed together, at the earliest of their times.

  Returns:
    A :class:`FreezeSchedule`.

  Examples:
    >>> import jax.numpy as jnp, optax_boost
    >>> schedule = optax_boost.gradual_unfreezing(3, every=10)
    >>> [int(schedule.frozen_groups(jnp.int32(step), None)) for step in (0, 9, 10, 20, 99)]
    [2, 2, 1, 0, 0]
    >>> half = optax_boost.gradual_unfreezing(8, every=10, frozen_groups=4)
    >>> [int(half.frozen_groups(jnp.int32(step), None)) for step in (0, 9, 10, 20, 99)]
    [4, 4, 3, 2, 0]

  References:
    Howard, Ruder, `Universal Language Model Fine-tuning <https://arxiv.org/abs/1801.06146>`_, 2018.
  """
  num_groups = _check_num_groups(num_groups)
  first = num_groups - 1 if frozen_groups is None else frozen_groups
  _checks.check_whole_number("frozen_groups", first, minimum=0, maximum=num_groups - 1, static=True)
  depths = _spread_depths(first + 1, max_depths)
  _checks.check_whole_number("every", every, static=True)
  # Not every number of groups is a depth. In a step that should freeze i groups, `allowed[i]`
  # groups are frozen: the largest depth that is at most i.
  allowed = depths[np.searchsorted(depths, np.arange(first + 1), side="right") - 1]

  def depth(count: _types.IntScalar, key: jax.Array) -> _types.IntScalar:
    return jnp.asarray(allowed)[jnp.maximum(first - count // every, 0)]

  name = f"gradual_unfreezing({num_groups}, {every}, {first}, max_depths={max_depths})"
  return FreezeSchedule(num_groups, depth, depths=depths, name=name)

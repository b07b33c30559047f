"""Schedules, tables of how many groups of layers each step freezes.

G is the number of groups, of which the last is never frozen. A depth is a number of groups that a
step may freeze, from 0 to G - 1; D is the number of depths.

Sources: MindSpore Boost's ``GradientFreeze``; Brock et al., "FreezeOut", arXiv:1706.04983; Howard &
Ruder, "Universal Language Model Fine-tuning", arXiv:1801.06146.
"""

from collections.abc import Sequence
import dataclasses
import fractions
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from optax_boost._foundation import _checks, _types, _warnings

# The largest denominator of a fraction that stands for a share of steps.
_LONGEST_PERIOD = 10_000
# The rounding error that a share may have, such as 1 - 0.7 for 0.3.
_ROUNDING = 2.0**-52
# The largest number of groups. Schedules hold an array with an entry for each group.
_MOST_GROUPS = 10_000
# How many draws a random schedule makes at least before they repeat.
_NUM_DRAWS = 10_000
# The default of `max_depths`, since a train step compiles a program for each depth.
_MOST_DEPTHS = 10


@dataclasses.dataclass(frozen=True, eq=False, init=False)
class FreezeSchedule:
  """A table of how many groups of layers each step freezes.

  For a function ``f(step)`` of your own, evaluate it for all steps of the run:
  ``FreezeSchedule(range(total), [f(step) for step in range(total)])``. A train step compiles a
  program for each depth (number of frozen groups).

  Args:
    steps: the steps at which the depth changes, ascending from 0. Steps at which it stays may be
      among them.
    depths: for each of `steps`, how many groups are frozen from this step on.
    cycle: two steps; the steps from the first to the one before the second repeat from the second
      on. None: the last depth stays.
    num_groups: the number of groups. None: the schedule fits any number above its largest depth.
    anneal_until: for each group, the step until which a cosine anneals the group's updates to zero.
      None: no annealing.

  Attributes:
    steps: the steps at which the depth changes, int32. Of an argument, only changes are kept.
    depths: the depth from each of these steps on, int32.
    cycle: as the argument.
    num_groups: as the argument; with `anneal_until` it is never None.
    anneal_until: as the argument, in NumPy.

  Raises:
    TypeError: a table has other entries than whole numbers, or traced ones.
    ValueError: `steps` don't ascend from 0; a depth is not below `num_groups`; or `cycle` does not
      end after the last of `steps`.

  Examples:
    >>> import optax_boost
    >>> schedule = optax_boost.FreezeSchedule([0, 100, 200], [2, 1, 0])
    >>> [int(schedule.frozen_groups(step)) for step in (0, 99, 100, 500)]
    [2, 2, 1, 0]
    >>> turns = optax_boost.FreezeSchedule(range(6), [t % 3 for t in range(6)], cycle=(0, 6))
    >>> [int(turns.frozen_groups(step)) for step in range(8)]
    [0, 1, 2, 0, 1, 2, 0, 1]
  """

  steps: np.ndarray
  depths: np.ndarray
  cycle: tuple[int, int] | None
  num_groups: int | None
  anneal_until: np.ndarray | None

  def __init__(
    self,
    steps: npt.ArrayLike,
    depths: npt.ArrayLike,
    *,
    cycle: tuple[int, int] | None = None,
    num_groups: int | None = None,
    anneal_until: npt.ArrayLike | None = None,
  ):
    at, values = _table("steps", steps), _table("depths", depths)
    if len(at) != len(values):
      raise ValueError(
        "`steps` and `depths` must be of the same length, with a depth for each step; got"
        f" {len(at)} and {len(values)}."
      )
    if at[0] != 0 or np.any(np.diff(at) < 0):
      raise ValueError(
        f"`steps` must ascend from 0, the first step of a run; got {_checks.shorten(steps)}."
      )
    if anneal_until is not None:
      anneal_until = _check_anneal_until(anneal_until, num_groups)
      num_groups = len(anneal_until)
    if num_groups is not None:
      num_groups = _check_num_groups(num_groups)
    largest = _MOST_GROUPS if num_groups is None else num_groups
    if not 0 <= values.min() <= values.max() < largest:
      raise ValueError(
        f"`depths` must be from 0 to {largest - 1}, since the last group is never frozen; got"
        f" {_checks.shorten(depths)}."
      )
    # Of several depths for one step the last counts; then only changes are kept.
    last = np.append(np.diff(at) > 0, True)
    at, values = at[last], values[last]
    changes = np.append(True, np.diff(values) != 0)
    object.__setattr__(self, "steps", at[changes])
    object.__setattr__(self, "depths", values[changes])
    object.__setattr__(self, "cycle", None if cycle is None else _check_cycle(cycle, int(at[-1])))
    object.__setattr__(self, "num_groups", num_groups)
    object.__setattr__(self, "anneal_until", anneal_until)

  def frozen_groups(self, step: npt.ArrayLike | jax.Array) -> Any:
    """Returns how many groups a step freezes: on the host, or, for a JAX array, on the device.

    A schedule with one depth returns it as a NumPy number for any scalar, so that traced steps know
    which layers are frozen.
    """
    if len(self.depths) == 1 and np.ndim(step) == 0:
      return self.depths[0]
    if _checks.is_array(step):
      position = self._in_table(jnp.asarray(step, jnp.int32), jnp)
      # Drawn tables have thousands of steps, in which a search takes fewer operations.
      method = "compare_all" if len(self.steps) < 64 else "scan"
      index = jnp.searchsorted(self.steps, position, side="right", method=method) - 1
      return jnp.asarray(self.depths)[index]
    return self.depths[self._index(self._in_table(np.asarray(step), np))]

  def frozen_for(self, step: int) -> int:
    """Returns for how many steps from `step` on the number of frozen groups stays as it is.

    If it stays for ever, the largest int32 is returned.
    """
    position = int(self._in_table(np.asarray(step), np))
    index = self._index(position)
    if index < len(self.steps) - 1:
      return int(self.steps[index + 1]) - position
    if self.cycle is None:
      return _checks.LARGEST_COUNT
    first, end = self.cycle
    again = self._index(first)
    if self.depths[again] != self.depths[index]:
      return end - position
    if again == index:
      return _checks.LARGEST_COUNT
    return end - position + int(self.steps[again + 1]) - first

  def _in_table(self, step: Any, numbers: Any) -> Any:
    """Returns the step of the table that a step repeats; `numbers` is NumPy or ``jax.numpy``."""
    if self.cycle is None:
      return step
    first, end = self.cycle
    return numbers.where(step < end, step, first + (step - first) % (end - first))

  def _index(self, position: int | np.ndarray) -> Any:
    return np.searchsorted(self.steps, position, side="right") - 1

  def anneal(self, step: _types.IntScalar) -> jax.Array | None:
    """Returns a factor for the updates of each group, or None."""
    if self.anneal_until is None:
      return None
    ends = jnp.asarray(self.anneal_until, jnp.float32)
    progress = jnp.minimum(jnp.asarray(step, jnp.float32) / ends, 1.0)
    return 0.5 * (1 + jnp.cos(jnp.pi * progress))


def _table(name: str, values: npt.ArrayLike) -> np.ndarray:
  """Returns a vector of int32 from an argument; raises for other numbers, and for traced ones."""
  try:
    array = np.asarray(values)
  except (ValueError, jax.errors.TracerArrayConversionError):
    array = np.empty(())
  if array.ndim != 1 or not (array.size and np.issubdtype(array.dtype, np.integer)):
    raise TypeError(
      f"`{name}` must be a list of whole numbers that are known before the training; got"
      f" {_checks.shorten(values)}. Evaluate a function for all steps of the run, outside of `jit`:"
      " `FreezeSchedule(range(total), [int(f(step)) for step in range(total)])`."
    )
  if not np.array_equal(array, array.astype(np.int32)):
    raise ValueError(f"`{name}` must fit an int32; got {_checks.shorten(values)}.")
  return array.astype(np.int32)


def _check_cycle(cycle: tuple[int, int], last_step: int) -> tuple[int, int]:
  is_pair = isinstance(cycle, Sequence) and len(cycle) == 2 and all(map(_checks.is_integer, cycle))
  if not (is_pair and 0 <= cycle[0] < cycle[1] and last_step < cycle[1] <= _checks.LARGEST_COUNT):
    raise ValueError(
      "`cycle` must be None or two steps, the first that repeats and the end, which comes after the"
      f" last of `steps`, {last_step}; got {_checks.shorten(cycle)}. For a table that repeats as a"
      f" whole and ends after step {last_step}, pass cycle=(0, {last_step + 1})."
    )
  return int(cycle[0]), int(cycle[1])


def _check_anneal_until(steps: npt.ArrayLike, num_groups: int | None) -> np.ndarray:
  try:
    ends = np.asarray(steps, np.float64)
  except (TypeError, ValueError, jax.errors.TracerArrayConversionError):
    ends = np.empty(())
  fits = ends.ndim == 1 and ends.size and bool(np.all((ends > 0) & np.isfinite(ends)))
  if not fits or num_groups not in (None, len(ends)):
    raise ValueError(
      "`anneal_until` must be None or a list of steps above 0, one for each group"
      f"{'' if num_groups is None else f' of {num_groups}'}; got {_checks.shorten(steps)}."
    )
  return ends


def _check_num_groups(num_groups: int) -> int:
  _checks.check_whole_number("num_groups", num_groups, maximum=_MOST_GROUPS, static=True)
  return int(num_groups)


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
    >>> [int(schedule.frozen_groups(step)) for step in range(8)]
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
  frozen = np.arange(len(depths) - 1) + unfrozen
  steps = np.append(0, frozen) if unfrozen else frozen
  cycle = (0, unfrozen + len(depths) - 1)
  depths = depths if unfrozen else depths[1:]
  return FreezeSchedule(steps, depths, cycle=cycle, num_groups=num_groups)


def interval_freezing(
  num_groups: int, frozen_fraction: float, *, max_depths: int = _MOST_DEPTHS, seed: int = 0
) -> FreezeSchedule:
  """Freezes at regular intervals; freezes i of G groups with a probability proportional to G - i.

  Args:
    num_groups: the number of groups G.
    frozen_fraction: as for :func:`continuous_freezing`.
    max_depths: as for :func:`continuous_freezing`. With more groups than depths, the i-th of D
      depths has a probability proportional to D - i.
    seed: the seed of NumPy's draws.

  Returns:
    A :class:`FreezeSchedule` that freezes in the same steps as MindSpore. How many groups it
    freezes in a step is drawn for the first steps, 10,000 or some more; then the draws repeat.

  Examples:
    >>> import optax_boost
    >>> schedule = optax_boost.interval_freezing(4, frozen_fraction=0.5)
    >>> depths = [int(schedule.frozen_groups(step)) for step in range(8)]
    >>> [depth > 0 for depth in depths]
    [False, True, False, True, False, True, False, True]
  """
  num_groups, share = _check_share(num_groups, frozen_fraction)
  depths = _spread_depths(num_groups, max_depths)
  _checks.check_whole_number("seed", seed, minimum=0, static=True)
  if not share:
    return fixed_freezing(num_groups, 0)
  pattern = _interval_pattern(share)
  periods = math.ceil(_NUM_DRAWS / len(pattern))
  freezes = np.concatenate([[False, True], np.tile(pattern, periods)])
  uniform = np.random.default_rng(seed).random(len(freezes), np.float32)
  drawn = np.where(freezes, depths[interval_depth(uniform, len(depths))], 0)
  total = len(drawn)
  return FreezeSchedule(range(total), drawn, cycle=(2, total), num_groups=num_groups)


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


def interval_depth(uniform: np.ndarray, num_groups: int) -> np.ndarray:
  """Returns a depth i from 1 to G - 1, drawn with a probability proportional to G - i.

  `uniform` is a random number from [0, 1), and G is `num_groups`.
  """
  # As in MindSpore, `uniform` chooses among the depths G-1, G-2, ..., 1, whose weights are 1, 2,
  # ..., G-1 in this order.
  weights = np.cumsum(np.arange(1, num_groups))
  below = np.searchsorted((weights / weights[-1]).astype(np.float32), uniform, side="right")
  return num_groups - 1 - np.minimum(below, num_groups - 2)


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
    >>> [int(schedule.frozen_groups(step)) for step in (0, 49, 50, 75, 200)]
    [0, 0, 1, 2, 2]
    >>> [round(float(s), 2) for s in schedule.anneal(25)]
    [0.5, 0.75, 0.85]
    >>> half = optax_boost.progressive_freezing(2, total_steps=100, first=0.7, anneal=False)
    >>> [int(half.frozen_groups(step)) for step in (0, 69, 70, 99)]
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
  steps = np.append(0, ends[:-1]).astype(np.int32)
  anneal_until = times if anneal else None
  return FreezeSchedule(steps, depths, num_groups=num_groups, anneal_until=anneal_until)


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
    >>> [int(schedule.frozen_groups(step)) for step in (0, 1, 1000)]
    [8, 8, 8]
    >>> schedule = optax_boost.fixed_freezing(10, frozen_groups=8, steps=1000)
    >>> [int(schedule.frozen_groups(step)) for step in (0, 999, 1000)]
    [8, 8, 0]
  """
  num_groups = _check_num_groups(num_groups)
  _checks.check_whole_number(
    "frozen_groups", frozen_groups, minimum=0, maximum=num_groups - 1, static=True
  )
  if steps is None:
    return FreezeSchedule([0], [frozen_groups], num_groups=num_groups)
  _checks.check_whole_number("steps", steps, static=True)
  return FreezeSchedule([0, steps], [frozen_groups, 0], num_groups=num_groups)


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
    >>> [int(schedule.frozen_groups(step)) for step in (0, 9, 10, 20, 99)]
    [2, 2, 1, 0, 0]
    >>> half = optax_boost.gradual_unfreezing(8, every=10, frozen_groups=4)
    >>> [int(half.frozen_groups(step)) for step in (0, 9, 10, 20, 99)]
    [4, 4, 3, 2, 0]

  References:
    Howard, Ruder, `Universal Language Model Fine-tuning <https://arxiv.org/abs/1801.06146>`_, 2018.
  """
  num_groups = _check_num_groups(num_groups)
  first = num_groups - 1 if frozen_groups is None else frozen_groups
  _checks.check_whole_number("frozen_groups", first, minimum=0, maximum=num_groups - 1, static=True)
  depths = _spread_depths(first + 1, max_depths)
  _checks.check_whole_number("every", every, static=True)
  # In a step that should freeze i groups, the largest depth that is at most i is frozen, so a depth
  # ends when the depth itself should thaw. Steps beyond the largest int32 never come.
  ends = int(every) * (first + 1 - depths[:0:-1].astype(np.int64))
  ends = ends[ends <= _checks.LARGEST_COUNT]
  return FreezeSchedule(np.append(0, ends), depths[::-1][: len(ends) + 1], num_groups=num_groups)

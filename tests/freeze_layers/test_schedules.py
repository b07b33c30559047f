"""Schedules of freezing are tables: against loops in Python, and MindSpore's recorded traces."""

import itertools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_boost
from optax_boost._step._freezing import _schedules

GOLDEN = np.load(pathlib.Path(__file__).parents[1] / "golden" / "freeze_sequences.npz")
# More than the longest cycle of the continuous schedules.
MANY_STEPS = np.arange(4_000)


def recorded(strategy):
  """MindSpore's sequences, such as seq_s0_g10_p070_n150: strategy 0, 10 groups, freeze_p 0.70."""
  for name in GOLDEN.files:
    kind, *fields = name.split("_")
    if kind == "seq" and fields[0] == f"s{strategy}":
      yield name, int(fields[1][1:]), 1 - int(fields[2][1:]) / 100


@pytest.mark.filterwarnings("ignore:.*the first group is never trained")
def test_continuous_freezing_equals_mindspores_recorded_depths():
  for name, groups, share in recorded(0):
    depths = optax_boost.continuous_freezing(groups, share).frozen_groups(MANY_STEPS)
    np.testing.assert_array_equal(depths[: len(GOLDEN[name])], GOLDEN[name], name)


def test_interval_freezing_equals_mindspores_recorded_depths_given_its_draws():
  for name, groups, share in recorded(1):
    sequence = GOLDEN[name]
    schedule = optax_boost.interval_freezing(groups, share)
    freezes = schedule.frozen_groups(np.arange(len(sequence))) > 0
    np.testing.assert_array_equal(freezes, sequence > 0, name)
    if groups > 1:
      draws = GOLDEN[name.replace("seq", "uniform")]
      drawn = _schedules.interval_depth(draws, groups)
      np.testing.assert_array_equal(drawn, sequence[freezes], name)


# Values of MindSpore's `freeze_p`, as Python reads the literals.
FREEZE_P = [float(f"0.{hundredths:02d}") for hundredths in range(1, 100)]


def mindspore_full(freeze_p, groups):
  """The number of steps of a cycle that freeze nothing, before MindSpore takes the floor."""
  return freeze_p * (groups - 1) / (1 - freeze_p)


def mindspore_continuous(freeze_p, groups, steps):
  """The depths of MindSpore's continuous strategy, with its rounding errors."""
  cycle = [0] * int(np.floor(mindspore_full(freeze_p, groups))) + list(range(1, groups))
  return np.resize(cycle, steps)


def rounding_decides(freeze_p, groups):
  """Whether the number is whole up to rounding, so that its floor may be one less."""
  full = mindspore_full(freeze_p, groups)
  return abs(full - round(full)) < 1e-9


def mindspore_interval(freeze_p, steps):
  """For each step and `freeze_p`, whether MindSpore's interval strategy freezes something."""
  freezes = np.zeros((steps, len(freeze_p)), bool)
  nonzero = np.zeros(len(freeze_p))
  for n in range(1, steps):
    freezes[n] = nonzero / n < 1 - freeze_p
    nonzero += freezes[n]
  return freezes


def mindspore_depth(uniform, groups):
  """NumPy's legacy `choice` among groups - 1, ..., 1 with the weights 1, 2, ..., groups - 1."""
  bounds = np.cumsum(np.arange(1, groups)) / np.sum(np.arange(1, groups))
  return groups - 1 - np.searchsorted(bounds, uniform, side="right")


@pytest.mark.filterwarnings("ignore:.*the first group is never trained")
def test_continuous_freezing_equals_mindspores_for_every_freeze_p():
  for freeze_p, groups in itertools.product(FREEZE_P, range(2, 41)):
    if groups not in (2, 5, 10, 40) and not rounding_decides(freeze_p, groups):
      continue
    share = 1 - freeze_p
    schedule = optax_boost.continuous_freezing(groups, share, max_depths=groups)
    depths = schedule.frozen_groups(MANY_STEPS)
    expected = mindspore_continuous(freeze_p, groups, len(MANY_STEPS))
    assert (depths == expected).all(), (freeze_p, groups)
    cycle = np.argmax(depths == groups - 1) + 1
    assert abs(np.sum(depths[:cycle] > 0) - share * cycle) <= 1, (freeze_p, groups)
    if groups in (2, 5, 10):
      # The share as a decimal number gives the same depths.
      named = optax_boost.continuous_freezing(groups, round(share, 2))
      assert (named.frozen_groups(MANY_STEPS) == expected).all()


def test_interval_freezing_freezes_when_mindspore_does_for_every_freeze_p():
  expected = mindspore_interval(np.array(FREEZE_P), len(MANY_STEPS))
  for i, freeze_p in enumerate(FREEZE_P):
    freezes = optax_boost.interval_freezing(2, 1 - freeze_p).frozen_groups(MANY_STEPS) > 0
    assert (freezes == expected[:, i]).all(), freeze_p
    frozen_before = np.cumsum(freezes) - freezes
    assert np.all(np.abs(frozen_before - (1 - freeze_p) * MANY_STEPS) <= 1)


def test_interval_freezing_draws_a_depth_for_each_step_from_its_seed():
  for (groups, freeze_p), seed in itertools.product([(3, 0.5), (10, 0.7), (40, 0.2)], (0, 7)):
    share = 1 - freeze_p
    schedule = optax_boost.interval_freezing(groups, share, max_depths=groups, seed=seed)
    uniform = np.random.default_rng(seed).random(4_000, np.float32)
    freezes = mindspore_interval(np.array([freeze_p]), 4_000)[:, 0]
    expected = np.where(freezes, mindspore_depth(uniform, groups), 0)
    np.testing.assert_array_equal(schedule.frozen_groups(MANY_STEPS), expected)
    # The draws repeat after some ten thousand steps, and the shares of the depths are right.
    start, end = schedule.cycle
    assert 10_000 <= end - start < 20_000
    depths = schedule.frozen_groups(np.arange(start, 2 * end - start))
    np.testing.assert_array_equal(depths[: end - start], depths[end - start :])
    shares = np.bincount(depths, minlength=groups)[1:] / np.sum(depths > 0)
    weights = np.arange(groups - 1, 0, -1)
    np.testing.assert_allclose(shares, weights / weights.sum(), atol=0.02)


def test_a_share_that_is_not_a_round_decimal_is_kept_over_a_long_training():
  share, steps = 0.6180339887498949, np.arange(300_000)
  depths = optax_boost.interval_freezing(2, share).frozen_groups(steps)
  assert abs(np.sum(depths > 0) - share * 300_000) <= 1
  rare = optax_boost.interval_freezing(2, 1e-4).frozen_groups(steps)
  assert np.flatnonzero(rare)[:3].tolist() == [1, 10_001, 20_001]
  (start,) = np.flatnonzero(optax_boost.continuous_freezing(4, 1e-5).frozen_groups(steps) == 1)
  assert abs(start - 3 * 99_999) <= 1


@pytest.mark.parametrize("share", [1e-300, 1e-12, 0.3, 0.123456789, 0.95])
def test_schedules_stay_exact_up_to_the_last_step(share):
  late = 2**31 - 1 - np.arange(20_000)
  for make in (optax_boost.continuous_freezing, optax_boost.interval_freezing):
    schedule = make(40, share, max_depths=40)
    depths = schedule.frozen_groups(late)
    assert depths.min() >= 0
    assert depths.max() < 40
    assert abs(np.mean(depths > 0) - share) < 0.01
    on_device = schedule.frozen_groups(jnp.asarray(late[:100]))
    np.testing.assert_array_equal(on_device, depths[:100])


def test_a_cycle_in_which_every_step_freezes_something_warns():
  with pytest.warns(UserWarning, match=r"first group is never trained. Lower .* to 0.5 or less"):
    optax_boost.continuous_freezing(2, 0.8)


def gradual(groups, every, first, step):
  return max(first - step // every, 0)


def progressive(groups, total, first, power, step):
  ends = [
    max(round(total * (first + (1 - first) * (i / (groups - 1)) ** power)), 1)
    for i in range(groups - 1)
  ]
  return sum(step >= end for end in ends)


def test_thawing_and_progressive_schedules_equal_their_formulas_in_each_step():
  for groups, every in itertools.product([1, 2, 8, 40], [1, 7]):
    for first in {0, groups // 2, groups - 1}:
      schedule = optax_boost.gradual_unfreezing(
        groups, every, frozen_groups=first, max_depths=max(groups, 2)
      )
      depths = [gradual(groups, every, first, t) for t in range(320)]
      assert schedule.frozen_groups(np.arange(320)).tolist() == depths
    for share, power in [(0.5, 1.0), (0.4, 3.0), (0.9, 0.5)]:
      for total in (300, 13):  # in 13 steps, several of 40 groups end at once
        schedule = optax_boost.progressive_freezing(
          groups, total, share, power=power, max_depths=max(groups, 2)
        )
        depths = [progressive(groups, total, share, power, t) for t in range(320)]
        assert schedule.frozen_groups(np.arange(320)).tolist() == depths
    fixed = optax_boost.fixed_freezing(groups, groups - 1)
    assert fixed.frozen_groups(np.arange(320)).tolist() == [groups - 1] * 320
    limited = optax_boost.fixed_freezing(groups, groups - 1, steps=7)
    assert limited.frozen_groups(np.arange(320)).tolist() == [groups - 1] * 7 + [0] * 313


# Each schedule has all of its depths within the steps of `depths_of`.
SCHEDULES = {
  "continuous": lambda groups, **depths: optax_boost.continuous_freezing(groups, 0.5, **depths),
  "interval": lambda groups, **depths: optax_boost.interval_freezing(groups, 0.5, **depths),
  "progressive": lambda groups, **depths: optax_boost.progressive_freezing(groups, 400, **depths),
  "gradual": lambda groups, **depths: optax_boost.gradual_unfreezing(groups, 10, **depths),
}


def depths_of(schedule):
  return schedule.frozen_groups(np.arange(20_000))


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_has_at_most_ten_depths_unless_more_are_asked_for(name):
  make = SCHEDULES[name]
  for groups in (2, 9, 10, 11, 14, 26, 40):
    depths, each = depths_of(make(groups)), depths_of(make(groups, max_depths=groups))
    assert np.array_equal(np.unique(each), np.arange(groups))
    assert len(np.unique(depths)) == min(groups, 10)
    assert (depths.min(), depths.max()) == (0, groups - 1)
    # Evenly spread: gaps differ by one at most.
    assert np.ptp(np.diff(np.unique(depths))) <= 1
    if groups <= 10:
      assert np.array_equal(depths, each)
    assert np.unique(depths_of(make(groups, max_depths=2))).tolist() == [0, groups - 1]


def test_groups_that_thaw_together_do_so_with_the_first_of_them():
  each = depths_of(optax_boost.gradual_unfreezing(14, 10, max_depths=14))
  together = depths_of(optax_boost.gradual_unfreezing(14, 10))
  allowed = np.unique(together)
  assert together.tolist() == [max(d for d in allowed if d <= depth) for depth in each]


def test_groups_that_are_frozen_together_are_annealed_together():
  schedule = optax_boost.progressive_freezing(14, 100, first=0.4)
  each = optax_boost.progressive_freezing(14, 100, first=0.4, max_depths=14)
  assert len(schedule.depths) == 10
  first_of = [max(d for d in schedule.depths if d <= group) for group in range(14)]
  for t in (0, 30, 50, 77, 99):
    scale = np.asarray(schedule.anneal(t))
    np.testing.assert_array_equal(scale, np.asarray(each.anneal(t))[first_of])
    # A group is annealed to zero when it is frozen.
    depth = schedule.frozen_groups(t)
    assert np.all(scale[:depth] == 0)
    assert np.all(scale[depth:] > 0)


def test_progressive_freezing_anneals_each_group():
  schedule = optax_boost.progressive_freezing(4, 100, first=0.4, power=3)
  ends = [*(round(100 * (0.4 + 0.6 * (i / 3) ** 3)) for i in range(3)), 100]
  for t in (0, 17, 39):
    expected = [0.5 * (1 + np.cos(np.pi * t / end)) for end in ends]
    np.testing.assert_allclose(schedule.anneal(t), expected, rtol=1e-4)
  plain = optax_boost.progressive_freezing(4, 100, first=0.4, power=3, anneal=False)
  assert plain.anneal(17) is None
  np.testing.assert_array_equal(depths_of(plain), depths_of(schedule))


# Tables of users, with a depth for each of the first steps, and the step that follows the last.
OWN = {
  "all steps": (range(6), [2, 2, 0, 0, 1, 2], None),
  "changes": ([0, 4, 9], [3, 0, 3], None),
  "a cycle": ([0, 4, 9], [3, 0, 3], (0, 12)),
  "a cycle after a start": ([0, 4, 9], [1, 2, 3], (4, 11)),
  "a cycle of the last depth": ([0, 4], [1, 2], (6, 9)),
  "a cycle from a step that keeps the depth": ([0, 3, 8], [0, 2, 0], (1, 10)),
  "two depths for one step": ([0, 5, 5, 5], [0, 1, 2, 3], None),
  "one depth": ([0], [2], None),
}
FROM_FACTORIES = {
  "continuous": optax_boost.continuous_freezing(5, 0.4),
  "interval": optax_boost.interval_freezing(5, 0.4),
  "progressive": optax_boost.progressive_freezing(5, 200, 0.3, power=2.0),
  "gradual": optax_boost.gradual_unfreezing(5, 30),
  "fixed": optax_boost.fixed_freezing(5, 2, steps=40),
}


def looked_up(steps, depths, cycle, step):
  """The depth of a step, found by going through a table."""
  while cycle is not None and step >= cycle[1]:
    step -= cycle[1] - cycle[0]
  depth = None
  for start, value in zip(steps, depths, strict=True):
    if start <= step:
      depth = value
  return depth


def test_a_table_of_ones_own_is_looked_up():
  for name, (steps, depths, cycle) in OWN.items():
    schedule = optax_boost.FreezeSchedule(steps, depths, cycle=cycle)
    expected = [looked_up(steps, depths, cycle, t) for t in range(100)]
    assert schedule.frozen_groups(np.arange(100)).tolist() == expected, name
    assert [int(schedule.frozen_groups(t)) for t in range(100)] == expected, name
    # Only changes are kept.
    assert np.all(np.diff(schedule.depths) != 0)
    assert np.all(np.diff(schedule.steps) > 0)


def test_a_function_of_ones_own_becomes_a_table():
  def function(t):
    return jnp.where(t % 3 == 0, 2, t // 40)

  schedule = optax_boost.FreezeSchedule(range(100), [function(t) for t in range(100)])
  assert schedule.num_groups is None
  expected = np.where(np.arange(100) % 3 == 0, 2, np.arange(100) // 40)
  np.testing.assert_array_equal(schedule.frozen_groups(np.arange(100)), expected)
  assert schedule.frozen_groups(10_000) == expected[-1]


TABLES = {name: optax_boost.FreezeSchedule(s, d, cycle=c) for name, (s, d, c) in OWN.items()}


def test_a_traced_step_has_the_depth_of_a_step_on_the_host():
  schedules, steps = [*TABLES.values(), *FROM_FACTORIES.values()], np.arange(300)
  traced = jax.jit(lambda t: [schedule.frozen_groups(t) for schedule in schedules])
  expected = [schedule.frozen_groups(steps) for schedule in schedules]
  for depths in (traced(jnp.asarray(steps)), jax.vmap(traced)(steps)):
    for of_schedule, on_host in zip(depths, expected, strict=True):
      assert of_schedule.dtype == jnp.int32
      np.testing.assert_array_equal(of_schedule, on_host)
  last = jnp.int32(2**31 - 1)
  for schedule in schedules:
    assert int(schedule.frozen_groups(last)) == schedule.frozen_groups(2**31 - 1)


def test_a_table_tells_for_how_many_steps_its_depth_stays():
  for name, schedule in (TABLES | FROM_FACTORIES).items():
    depths = depths_of(schedule)
    for step in [*range(300), *range(10_000, 10_100)]:
      changes = np.flatnonzero(depths[step:] != depths[step])
      stays = schedule.frozen_for(step)
      assert stays == (changes[0] if changes.size else 2**31 - 1), (name, step)


REFUSED = {
  "no table": (2, [0], {}, TypeError, r"`steps` must be a list of whole numbers.* got 2\. Eval"),
  "a function": ([0], lambda t: 1, {}, TypeError, r"FreezeSchedule\(range\(total\), \[int\(f\(s"),
  "shares": ([0, 1], [0.5, 0], {}, TypeError, r"`depths` must be a list of whole numbers"),
  "bools": ([0, 1], [True, False], {}, TypeError, r"`depths` must be a list of whole numbers"),
  "rows": ([[0], [1, 2]], [0, 1], {}, TypeError, r"`steps` must be a list of whole numbers"),
  "nothing": ([], [], {}, TypeError, r"`steps` must be a list of whole numbers"),
  "lengths": ([0, 5], [1], {}, ValueError, r"must be of the same length.* got 2 and 1"),
  "a late start": ([1, 5], [1, 0], {}, ValueError, r"`steps` must ascend from 0.*\[1, 5\]"),
  "backwards": ([0, 5, 4], [1, 0, 1], {}, ValueError, r"`steps` must ascend from 0"),
  "too late": ([0, 2**31], [1, 0], {}, ValueError, r"`steps` must fit an int32"),
  "below 0": ([0], [-1], {}, ValueError, r"`depths` must be from 0 to 9999"),
  "the last group": ([0], [3], {"num_groups": 3}, ValueError, r"from 0 to 2, since the last grou"),
  "groups": ([0], [0], {"num_groups": 0}, ValueError, r"`num_groups` must be >= 1"),
  "an early end": ([0, 5], [0, 1], {"cycle": (0, 5)}, ValueError, r"after the last of `steps`, 5"),
  "no cycle": ([0, 5], [0, 1], {"cycle": 6}, ValueError, r"`cycle` must be .*pass cycle=\(0, 6\)"),
  "empty": ([0, 5], [0, 1], {"cycle": (7, 7)}, ValueError, r"got \(7, 7\)"),
  "annealed from 0": ([0], [0], {"anneal_until": [0, 9]}, ValueError, "steps above 0, one for"),
  "other groups": (
    [0], [0], {"anneal_until": [9, 9], "num_groups": 3}, ValueError, "one for each group of 3"
  ),
}  # fmt: skip


@pytest.mark.parametrize(("steps", "depths", "options", "error", "text"), REFUSED.values())
def test_refuses_tables_that_make_no_sense(steps, depths, options, error, text):
  with pytest.raises(error, match=text):
    optax_boost.FreezeSchedule(steps, depths, **options)


def test_refuses_traced_tables_and_senseless_arguments_of_factories():
  text = r"whole numbers that are known before the training; got .*Tracer.*outside of `jit`"
  for make in (
    lambda t: optax_boost.FreezeSchedule([0, t], [1, 0]),
    lambda t: optax_boost.FreezeSchedule(jnp.arange(2) + t, [1, 0]),
  ):
    with pytest.raises(TypeError, match=text):
      jax.jit(make)(3)
  with pytest.raises(ValueError, match=r"`num_groups` .*<= 10000"):
    optax_boost.interval_freezing(10**9, 0.1)
  with pytest.raises(TypeError, match=r"`seed` must be a whole number"):
    optax_boost.interval_freezing(3, 0.1, seed=jax.random.key(0))

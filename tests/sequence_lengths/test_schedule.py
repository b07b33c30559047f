"""The schedule of sequence lengths: a function of the step, computed here by its formula again."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_boost
from optax_boost import sequence_length_warmup


@pytest.mark.parametrize("growth", ["linear", "doubling"])
@pytest.mark.parametrize(("full", "first"), [(128, 16), (128, 8), (96, 12), (100, 20), (90, 15)])
@pytest.mark.parametrize("fraction", [0.3, 0.75])
def test_a_length_begins_when_the_growing_length_reaches_it(full, first, growth, fraction):
  steps = 1000
  schedule = sequence_length_warmup(
    full, steps, first_length=first, warmup_fraction=fraction, growth=growth
  )
  for step in range(0, steps, 7):
    share = min(1.0, step / (fraction * steps))
    if growth == "linear":
      reached = first + (full - first) * share
    else:
      reached = first * (full / first) ** share
    # One step of rounding at each change.
    near = {max(n for n in schedule.lengths if n <= max(first, reached * x)) for x in (0.98, 1.02)}
    assert schedule(step) in near, step
  assert schedule(round(fraction * steps)) == full == schedule(10**9)


@pytest.mark.parametrize("full", [8, 20, 90, 100, 128, 256, 1000, 4096, 4320])
@pytest.mark.parametrize("factor", [2, 3, 4, 7])
def test_a_length_is_the_least_divisor_that_has_grown_by_the_factor(full, factor):
  for first in [None, *(n for n in range(1, full) if full % n == 0 and factor**4 * n >= full)]:
    lengths = sequence_length_warmup(full, 10_000, first_length=first, factor=factor).lengths
    assert lengths[0] == first or first is None
    assert lengths[-1] == full
    assert 2 <= len(lengths) <= 5
    for last, length in itertools.pairwise(lengths):
      assert full % length == 0
      assert not [n for n in range(factor * last, length) if full % n == 0]
      assert length >= factor * last or length == full


def test_long_sequences_quadruple_from_a_sixteenth_and_short_ones_double_from_an_eighth():
  lengths = {
    100: (20, 50, 100), 128: (16, 32, 64, 128), 255: (51, 255), 256: (16, 64, 256),
    300: (20, 100, 300), 512: (32, 128, 512), 1024: (64, 256, 1024), 4096: (256, 1024, 4096),
  }  # fmt: skip
  assert {full: sequence_length_warmup(full, 1000).lengths for full in lengths} == lengths
  assert sequence_length_warmup(512, 1000, factor=2).lengths == (64, 128, 256, 512)
  assert sequence_length_warmup(128, 1000, factor=4).lengths == (8, 32, 128)


def test_the_first_length_is_the_least_divisor_from_an_eighth_or_a_sixteenth_on():
  for full, share in {128: 8, 100: 8, 90: 8, 12: 8, 1000: 16, 270: 16}.items():
    expected = next(n for n in range(math.ceil(full / share), full) if full % n == 0)
    assert sequence_length_warmup(full, 1000).lengths[0] == expected


def test_a_short_training_leaves_out_lengths_without_a_step():
  schedule = sequence_length_warmup(128, 4, warmup_fraction=0.75)
  assert schedule.starts == tuple(sorted(set(schedule.starts)))
  assert [schedule(step) for step in range(4)] == [32, 64, 64, 128]
  assert sequence_length_warmup(128, 1)(0) == 128


@pytest.mark.parametrize("form", [int, np.int32, np.asarray, jnp.asarray])
def test_a_step_may_be_any_integer(form):
  schedule = optax_boost.LengthSchedule((2, 4, 8), (0, 10, 20))
  assert [schedule(form(step)) for step in (0, 9, 10, 19, 20, 99)] == [2, 2, 4, 4, 8, 8]
  assert isinstance(schedule(form(3)), int)


def test_an_error_for_a_traced_step_names_a_remedy():
  schedule = sequence_length_warmup(128, 10)
  with pytest.raises(TypeError, match=r"`step` must be known outside `jit`.*Cut the batch before"):
    jax.jit(schedule)(3)


BAD = [
  (dict(full_length=127), ValueError, r"`full_length` must have a divisor from 16 to 63.*got 127"),
  (dict(full_length=0), ValueError, "`full_length`"),
  (dict(full_length=128.0), TypeError, "`full_length`"),
  (dict(total_steps=0), ValueError, "`total_steps`"),
  (dict(first_length=24), ValueError, "`first_length` must divide the full length 128.*got 24"),
  (dict(full_length=257), ValueError, r"divisor from 17 to 128.*got 257.*multiple of 16"),
  (dict(first_length=4), ValueError, "at least 8 for at most 5 lengths; got 4"),
  (dict(factor=1), ValueError, "`factor`"),
  (dict(factor=2.0), TypeError, "`factor`"),
  (dict(first_length=128), ValueError, "`first_length` must be below `full_length` 128"),
  (dict(warmup_fraction=0.0), ValueError, "`warmup_fraction`"),
  (dict(warmup_fraction=1.0), ValueError, "`warmup_fraction`"),
  (dict(growth="cubic"), ValueError, "`growth` must be .*'linear'.*got 'cubic'"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), BAD)
def test_bad_arguments_are_refused(arguments, error, message):
  with pytest.raises(error, match=message):
    sequence_length_warmup(**({"full_length": 128, "total_steps": 100} | arguments))


BAD_SCHEDULES = [
  (((16, 32), (0,)), ValueError, "`starts` must be the first step of each length"),
  (((16, 32), (5, 9)), ValueError, "beginning with 0"),
  (((32, 16), (0, 9)), ValueError, "`lengths` must ascend"),
  (((16, 32), (0, 0)), ValueError, "`starts` must ascend"),
  (((16, 24), (0, 9)), ValueError, "`lengths` must divide the full length 24.*got 16"),
  (((1, 2, 4, 8, 16, 32), (0, 1, 2, 3, 4, 5)), ValueError, "at most 5"),
  (((), ()), TypeError, "`lengths` must be a tuple of integers"),
  ((16, (0,)), TypeError, "`lengths` must be a tuple of integers; got 16"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), BAD_SCHEDULES)
def test_a_schedule_that_can_not_be_kept_is_refused(arguments, error, message):
  with pytest.raises(error, match=message):
    optax_boost.LengthSchedule(*arguments)

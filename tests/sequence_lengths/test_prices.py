"""The price of a length: measured by a clock that is passed in, and what schedules make of it."""

import json

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
import optax_boost.nnx
from tests import compilations
from tests.sequence_lengths import models

(BATCH,) = models.batches(1)
SCHEDULE = optax_boost.sequence_length_warmup(16, 40)


class Device:
  """Steps whose time depends on the length alone, and a clock that shows it."""

  def __init__(self, seconds):
    self.seconds, self.lengths, self.now = seconds, [], 100.0

  def step(self, batch):
    length = batch["tokens"].shape[1] - 1
    self.lengths.append(length)
    self.now += self.seconds[length]
    return jnp.zeros(())

  def clock(self):
    return self.now


def test_a_price_is_the_time_of_a_step_over_that_of_a_full_one():
  device = Device({2: 0.25, 4: 0.5, 8: 0.75, 16: 2.0})
  prices = optax_boost.length_prices(device.step, BATCH, SCHEDULE, clock=device.clock, rounds=3)
  assert prices == {2: 0.125, 4: 0.25, 8: 0.375, 16: 1.0}
  # Compiled first, then by turns.
  assert device.lengths == [2, 4, 8, 16] + 3 * [2, 2, 4, 4, 8, 8, 16, 16]


def test_other_work_on_the_machine_changes_no_price():
  device = Device({2: 0.25, 4: 0.5, 8: 1.0, 16: 2.0})
  speeds = [1, 7, 3, 1, 2, 1]  # while programs are compiled, and in each round

  def step(batch):
    number, before = len(device.lengths), device.now
    result = device.step(batch)
    device.now = before + speeds[(number + 4) // 8] * (device.now - before)
    device.now += 60.0 * (number == 15)  # the machine stands still
    return result

  prices = optax_boost.length_prices(step, BATCH, SCHEDULE, clock=device.clock)
  assert prices == {2: 0.125, 4: 0.25, 8: 0.5, 16: 1.0}


@pytest.mark.parametrize("through", [dict, lambda prices: json.loads(json.dumps(prices))])
@pytest.mark.parametrize(
  ("prices", "kept"),
  [
    ({2: 0.68, 4: 0.71, 8: 0.79}, (2, 4, 8, 16)),  # two CPU cores, width 64, 128 tokens
    ({2: 0.1, 4: 0.85, 8: 0.86, 16: 1.0}, (2, 4, 16)),
    ({2: 0.9, 4: 0.5, 8: 0.7}, (4, 8, 16)),  # windows that are too short for the device
    ({2: 0.97, 4: 0.96, 8: 1.02}, (16,)),  # an H100 with cuDNN's attention, width 512
  ],
)
def test_a_schedule_keeps_lengths_that_take_at_most_085_of_a_full_step(prices, kept, through):
  schedule = optax_boost.sequence_length_warmup(16, 1000, length_prices=through(prices))
  assert schedule.lengths == kept
  # A linear growth from the first length that is kept reaches the others when it always did.
  span = max(16 - kept[0], 1)
  assert schedule.starts == tuple(500 * (n - kept[0]) // span for n in kept)
  assert {schedule(step) for step in range(1000)} == set(kept)


@pytest.mark.parametrize("steps", [1, 4, 8, 12])
@pytest.mark.parametrize("dear", [None, 8, 32])
def test_the_prices_of_the_lengths_of_a_short_training_are_enough(steps, dear):
  lengths = optax_boost.sequence_length_warmup(64, steps).lengths
  prices = {n: 1.0 if n == dear else n / 65 for n in lengths}
  schedule = optax_boost.sequence_length_warmup(64, steps, length_prices=prices)
  assert schedule.lengths == tuple(n for n in lengths if n != dear)


@pytest.mark.parametrize(
  ("prices", "error", "message"),
  [
    ({2: 0.5}, ValueError, r"price for each length below the full one, \[2, 4, 8\]; got \{2: 0.5"),
    ([0.5, 0.6, 0.7], TypeError, "must be a dict from lengths to prices"),
    ({"a": 0.5}, TypeError, "got the key 'a'"),
    ({2: 0.5, 4: -0.5, 8: 0.5}, ValueError, "`length_prices` must be"),
    ({2: 0.5, 4: np.nan, 8: 0.5}, ValueError, "`length_prices` must be"),
  ],
)
def test_prices_that_say_nothing_are_refused(prices, error, message):
  with pytest.raises(error, match=message):
    optax_boost.sequence_length_warmup(16, 40, length_prices=prices)


def test_a_train_step_in_the_place_of_a_function_of_a_batch_is_refused():
  step = optax_boost.make_train_step(models.loss, optax.adam(1e-3))
  with pytest.raises(TypeError, match=r"Pass `step.on_copy\(state\)`"):
    optax_boost.length_prices(step, BATCH, SCHEDULE)


def flat_jax():
  step = optax_boost.make_train_step(models.loss, optax.adam(1e-3))
  state = [step.init(models.init())]

  def train(batch):
    state[0], metrics = step(state[0], batch)
    return float(metrics["loss"])

  return step.on_copy(state[0]), train


def flat_nnx():
  model = models.NnxModel(nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
  step = optax_boost.nnx.make_train_step(models.nnx_loss)
  return step.on_copy(model, optimizer), lambda b: float(step(model, optimizer, b)["loss"])


@pytest.mark.parametrize("make", [flat_jax, flat_nnx])
def test_measuring_leaves_the_training_alone_and_its_programs_behind(make):
  cut = [optax_boost.cut_sequences(BATCH, n, 16) for n in SCHEDULE.lengths]
  _, train = make()
  expected = [train(batch) for batch in cut + cut]
  on_copy, train = make()
  prices = optax_boost.length_prices(on_copy, BATCH, SCHEDULE, rounds=1)
  assert list(prices) == [2, 4, 8, 16]
  losses, compiled = compilations.counted(lambda: [train(batch) for batch in cut + cut])
  assert losses == expected
  assert compiled == 0


def test_steps_on_a_copy_train_the_copy():
  step = optax_boost.make_train_step(lambda w, x: jnp.sum((w - x) ** 2), optax.sgd(0.25))
  state = step.init(jnp.zeros(()))
  on_copy = step.on_copy(state)
  for expected in (0.5, 0.75):
    copy, metrics = on_copy(jnp.ones(()))
    assert float(copy.params) == expected
    jax.block_until_ready(metrics)
  assert float(state.params) == 0
  assert float(step(state, jnp.ones(()))[0].params) == 0.5

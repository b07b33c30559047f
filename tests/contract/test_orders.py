"""Compositions of wrappers, ours and optax's, agree with an interpreter in NumPy or are refused.

`orders/interpreter.py` says what a composition means, `orders/expectations.py` which orders must be
refused. Params, averages, states and counters are compared after each of twelve micro-steps, with
a NaN and an infinity among them, behind each of three doors. `make test` runs a sample, most pairs
of it behind one door; `make orders` all pairs of wrappers, and triples, around each optimizer.
"""

import itertools
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
from tests.contract.orders import (
  comparison,
  expectations,
  interpreter as eager,
  known_wrong,
  programs,
)

# "all": every pair and triple, each door and each optimizer once; "full": all doors around all.
ORDERS = os.environ.get("ORDERS")
ALL = ORDERS in ("all", "full")
SINGLES = tuple((name,) for names in programs.KINDS.values() for name in names)
# What neither pairs nor the advised order hold: a window of one, windows of windows, an answer
# whether a step was made that must travel through a wrapper of optax, and refusals deeper inside.
EXTRAS = (
  ("freeze_continuous", "accumulate_one"),
  ("accumulate", "accumulate_varying"),
  ("average_params", "partition", "accumulate"),
  ("average_params_every", "switch_after", "accumulate"),
  ("average_params", "inject_hyperparams", "stochastic_rounding"),
  ("average_params_decay", "apply_if_finite", "accumulate"),
  ("average_params_decay", "multi_steps", "apply_if_finite"),
  ("average_params", "multi_steps", "stochastic_rounding"),
  ("average_params_every", "layerwise_decay", "accumulate"),
  ("average_params", "accumulate", "accumulate_varying"),
  ("freeze_continuous", "switch_after", "apply_if_finite"),
  ("freeze_gradual", "switch_after", "accumulate"),
  ("freeze_fixed", "apply_if_finite", "multi_steps"),
  ("freeze_interval", "inject_hyperparams", "master_weights"),
  ("switch_after", "apply_if_finite", "dynamic_loss_scale"),
  ("inject_hyperparams", "clip", "dynamic_loss_scale"),
  ("masked", "layerwise_decay", "average_params_decay"),
  ("multi_steps", "clip_after", "master_weights"),
  ("layerwise_decay", "partition", "stochastic_rounding"),
  ("laperm", "average_params"),
  ("layerwise_decay", "accumulate", "average_params"),
  ("layerwise_decay", "freeze_gradual", "master_weights_key"),
  ("freeze_gradual", "masked", "clip"),
  ("freeze_continuous", "partition", "clip"),
  ("freeze_gradual", "inject_hyperparams", "clip"),
  ("freeze_gradual", "apply_if_finite", "clip"),
  ("freeze_continuous", "multi_steps", "clip"),
  ("freeze_gradual", "laperm", "clip"),
  ("freeze_gradual", "switch_after", "clip"),
)


def sample():
  """Every way to use a wrapper outside and inside another one, and orders that were once wrong."""
  kinds = tuple(programs.KINDS)
  chosen = {pair for i in (1, 5) for pair in zip(kinds, kinds[i:] + kinds[:i], strict=True)}
  chosen |= set(programs.ONCE_WRONG)
  return tuple(order for order in programs.pairs() if programs.kinds(order) in chosen)


def in_three_doors(order, number):
  """Each optimizer and each door once, or all of both."""
  doors = comparison.doors(order)
  if ORDERS == "full" or order in known_wrong.IN_FLOAT32:
    return tuple(itertools.product(programs.BASES, doors))
  return tuple((programs.BASES[(number + i) % 3], door) for i, door in enumerate(doors))


def marked(orders, wrong):
  """The orders as parameters of a test, those that are known to be wrong expected to fail."""
  known = [pytest.mark.xfail(reason="a composition known to be wrong", raises=AssertionError)]
  return [
    pytest.param(order, number, marks=known if order in wrong else [], id="-".join(order))
    for number, order in enumerate(orders)
  ]


def check(order, runs, known=()):
  failures = []
  for base, door, dtype in runs:
    outcome, detail = comparison.outcome(order, base, door, dtype)
    verdict = expectations.verdict(order, outcome, detail, dtype)
    if verdict not in ("right", "refused"):
      failures.append(f"{base}, {door}: {verdict}")
      # One is enough of a composition that is known to be wrong.
      if order in known:
        break
  assert not failures, "\n".join(failures)


def in_sampled_doors(order, number):
  """In the sample, one of the three doors and optimizers for an order that was never wrong."""
  runs = in_three_doors(order, number)
  once_wrong = set(itertools.combinations(programs.kinds(order), 2)) & set(programs.ONCE_WRONG)
  if ALL or once_wrong or order in (*SINGLES, *known_wrong.IN_FLOAT32):
    return runs
  # By turns another optimizer behind each door.
  turn = (number // 3 - number) % len(runs)
  return runs[turn : turn + 1]


def in_float32(order, number):
  runs = [(base, door, "float32") for base, door in in_sampled_doors(order, number)]
  check(order, runs, known_wrong.IN_FLOAT32)


@pytest.mark.parametrize(("order", "number"), marked(SINGLES, known_wrong.IN_FLOAT32))
def test_one_wrapper_behaves_as_its_card_says(order, number):
  in_float32(order, number)


PAIRS = (programs.pairs() if ALL else sample()) + EXTRAS


@pytest.mark.parametrize(("order", "number"), marked(PAIRS, known_wrong.IN_FLOAT32))
def test_two_wrappers_behave_as_both_cards_say_or_are_refused(order, number):
  in_float32(order, number)


TRIPLES = programs.triples() if ALL else programs.triples()[::24]


@pytest.mark.parametrize(("order", "number"), marked(TRIPLES, known_wrong.IN_FLOAT32))
def test_three_wrappers_behave_as_their_cards_say_or_are_refused(order, number):
  in_float32(order, number)


def test_the_sample_holds_every_kind_of_wrapper_in_every_role():
  outer, inner = zip(*map(programs.kinds, sample()), strict=True)
  assert set(outer) == set(inner) == set(programs.KINDS)


def test_the_pairs_go_through_every_door_around_every_optimizer():
  runs = [in_sampled_doors(order, number) for number, order in enumerate(PAIRS)]
  alone = {run[0] for run in runs if len(run) == 1}
  assert ALL or alone == set(itertools.product(programs.BASES, comparison.DOORS))


def test_the_table_of_schedules_has_the_depths_and_factors_of_each_schedule():
  for name, freezing in programs.freezings().items():
    for t in programs.STEPS:
      depth = freezing.schedule.frozen_groups(jnp.int32(t), jax.random.key(0))
      assert int(depth) == freezing.depths[t], (name, t)
      if freezing.schedule.learning_rate_scale is not None:
        factors = freezing.schedule.learning_rate_scale(jnp.int32(t))
        np.testing.assert_allclose(factors, freezing.factors[t], atol=1e-6)
  drawn = programs.freezings()["interval"].depths
  assert [depth > 0 for depth in drawn] == [t % 2 == 1 for t in programs.STEPS]


# Params in bfloat16: rounded to nearest, or to one of the two neighbours, and only by steps made.
BFLOAT16 = programs.in_bfloat16() if ALL else programs.ONCE_WRONG_IN_BFLOAT16


@pytest.mark.parametrize(("order", "number"), marked(BFLOAT16, known_wrong.IN_BFLOAT16))
def test_params_in_bfloat16_are_the_rounding_of_the_interpreters(order, number):
  doors, bases = comparison.DOORS, programs.exact_bases(order)
  if not (ORDERS == "full" or order in known_wrong.IN_BFLOAT16):
    doors = (doors[number % len(doors)],)
    # By turns; another one for each door, since there are two optimizers and three doors.
    bases = bases if ALL else (bases[number % len(bases)],)
  runs = [(base, door, "bfloat16") for door, base in itertools.product(doors, bases)]
  check(order, runs, known_wrong.IN_BFLOAT16)


ROUNDING = ("master_weights_key", "stochastic_rounding")


@pytest.mark.optimized
@pytest.mark.parametrize("door", comparison.DOORS)
@pytest.mark.parametrize("around", [(), ("accumulate_one",)], ids=["alone", "accumulate"])
def test_averages_in_bfloat16_average_rounded_params(around, door):
  # Optimized programs may leave out a rounding to 16 bits and back.
  rng = np.random.default_rng(0)
  size, dtype = 1000, jnp.bfloat16
  grads = rng.normal(size=(6, size)).astype(dtype)
  params = rng.normal(size=size).astype(dtype)
  tx = programs.build(("average_params_decay", *around), "sgd")
  if door == "train_step":
    step = optax_boost.make_train_step(lambda p, g: jnp.sum(p * g), tx, donate=False)
    state = step.init(jnp.asarray(params))
  else:
    state = jnp.asarray(params), tx.init(jnp.asarray(params))

    @jax.jit
    def by_hand(p, s, g):
      if door == "apply_gradients":
        return optax_boost.apply_gradients(tx, g, s, p)
      updates, s = tx.update(g, s, p)
      return optax.apply_updates(p, updates), s

  average = params.astype(np.float64)
  decay = programs.AVERAGES["average_params_decay"]["decay"]
  for k, g in enumerate(grads, 1):
    if door == "train_step":
      state, _ = step(state, jnp.asarray(g))
      found_params, found_state = state.params, state.opt_state
    else:
      state = found_params, found_state = by_hand(*state, jnp.asarray(g))
    # A power of two times a number of 8 bits, added exactly and rounded once.
    exact = params.astype(np.float64) - programs.RATE * g.astype(np.float64)
    params = exact.astype(np.float32).astype(dtype)
    np.testing.assert_array_equal(found_params, params)
    share = (1 - decay) / (1 - decay**k)
    average += (params.astype(np.float64) - average) * share
    np.testing.assert_allclose(found_state.average, average, rtol=0, atol=2e-6)


@pytest.mark.parametrize("inner", programs.MOVING)
@pytest.mark.parametrize("rounds", ["master_weights_key", "stochastic_rounding"])
def test_random_rounding_has_the_right_mean(rounds, inner):
  # Entries of a leaf are rounded independently: many entries stand for many keys.
  entries, steps, move = 4096, 4, 2.0**-12
  tx = programs.build((rounds, inner), "sgd")
  params = {name: jnp.ones(entries, jnp.bfloat16) for name in programs.SHAPES}
  state = tx.init(params)
  step = jax.jit(lambda g, s, p: optax_boost.apply_gradients(tx, g, s, p))
  for _ in range(2 * steps if inner == "accumulate" else steps):
    scale = optax.tree.get(state, "loss_scale", 1)
    grads = {name: jnp.full_like(p, -move / programs.RATE * scale) for name, p in params.items()}
    params, state = step(grads, state, params)
  # A step is 1/32 of the distance between the neighbours above one.
  deviation = np.sqrt(steps * (1 / 32) * (31 / 32) / entries) * 2.0**-7
  for p in params.values():
    assert abs(np.asarray(p, np.float64).mean() - (1 + steps * move)) < 5 * deviation


# An inner optimizer that makes NaN of ordinary gradients.


@pytest.mark.parametrize(("order", "number"), marked(programs.POISONED, known_wrong.POISONED))
def test_a_step_that_an_optimizer_makes_bad_is_undone_and_counted(order, number):
  bases = [programs.Poisoned(base) for base in ("sgd", "adam")]
  pairs = list(itertools.product(bases, comparison.DOORS))
  if not (ALL or order in known_wrong.POISONED):
    pairs = pairs[number % 6 :: 6]
  check(order, [(base, door, "float32") for base, door in pairs], known_wrong.POISONED)


# Gradients that were changed before a loss scale has seen them.


@pytest.mark.parametrize("door", ["apply_gradients", "train_step"])
def test_svrg_before_a_loss_scale_is_refused(door):
  tx = optax.chain(optax_boost.svrg(None), optax_boost.dynamic_loss_scale(optax.sgd(0.1)))
  params = {name: jnp.asarray(p) for name, p in programs.initial_params().items()}
  grads = {name: jnp.ones_like(p) for name, p in params.items()}

  def first_step():
    if door == "train_step":
      step = optax_boost.make_train_step(comparison.loss_fn, tx)
      step(step.init(params), {"gradients": grads})
    else:
      state = tx.init(params)
      optax_boost.apply_gradients(tx, grads, state, params, grad_fn=lambda params: grads)

  with pytest.raises(ValueError, match=r"dynamic_loss_scale\((optax\.)?chain\("):
    first_step()


def test_every_refusal_has_a_message():
  for order in programs.pairs() + programs.triples():
    wanted = expectations.expected(order)
    assert wanted.words or not wanted.refused
    assert all(re.compile(words) for words in wanted.words)


def test_the_interpreter_rounds_to_the_neighbours():
  x = np.array([1.0, 1 + 2.0**-9, 1 + 3 * 2.0**-9, -1 - 2.0**-9, 0.0])
  low, high = eager.neighbours(x)
  np.testing.assert_array_equal(low, [1, 1, 1, -1 - 2.0**-7, 0])
  np.testing.assert_array_equal(high, [1, 1 + 2.0**-7, 1 + 2.0**-7, -1, 0])

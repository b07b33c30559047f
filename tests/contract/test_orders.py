"""All nestings of the same wrappers are one step, which an interpreter in NumPy makes, too.

`orders/interpreter.py` says what a step does. Params, averages, states and counters are compared
after each of twelve micro-steps, with a NaN, an infinity and a spike among them. `make test` runs a
seeded sample; `make orders` all subsets of the wrappers, and every wrapper around and inside of
what optax puts around an optimizer; `make orders ORDERS=full` these through every door around every
optimizer.
"""

import concurrent.futures
import functools
import itertools
import os
import random

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
from tests.contract.orders import comparison, interpreter as eager, programs

ORDERS = os.environ.get("ORDERS")  # "all" or "full"
DTYPES = ("float32", "bfloat16")


def sampled(things, number):
  """A seeded sample; all of them for `make orders`."""
  things = list(things)
  return things if ORDERS else random.Random(6).sample(things, number)


def ids(value):
  return "-".join(value) if isinstance(value, tuple) else str(value)


def check(order, number, dtype="float32", bases=None):
  """Compares a composition with the interpreter; doors and optimizers take turns with `number`."""
  doors = [door for door in comparison.DOORS if "lookahead" not in order or door != "train_step"]
  bases = programs.bases(order, dtype) if bases is None else bases
  runs = [(bases[number % len(bases)], doors[number // 3 % len(doors)])]
  if ORDERS == "full":
    runs = itertools.product(bases, doors)
  wrong = {run: comparison.differences(order, *run, dtype) for run in runs}
  assert not any(wrong.values()), wrong


# Subsets of the wrappers.

# Of large subsets there are more than of small ones, and a wrapper has the more ways to be wrong
# the more others there are.
SUBSETS = sampled(itertools.product(programs.SUBSETS, DTYPES), 30)


@pytest.mark.parametrize("number", range(len(SUBSETS)))
def test_wrappers_in_any_nesting_make_the_interpreters_step(number):
  subset, dtype = SUBSETS[number]
  check(programs.nesting(subset, number, dtype), number, dtype)


def test_the_sample_has_every_pair_of_wrappers_and_every_way_to_use_one():
  orders = [programs.nesting(subset, i, dtype) for i, (subset, dtype) in enumerate(SUBSETS)]
  pairs = {pair for subset, _ in SUBSETS for pair in itertools.combinations(subset, 2)}
  assert pairs == set(itertools.combinations(programs.SLOTS, 2))
  assert {name for order in orders for name in order} == set(programs.WAYS)


@pytest.mark.parametrize("subset", sampled(programs.SUBSETS[7:], 5), ids=ids)
def test_all_nestings_of_a_subset_have_one_state_and_one_program(subset):
  order = programs.nesting(subset, 0)
  params = {name: jnp.asarray(p) for name, p in programs.initial_params().items()}
  nestings = [order, order[::-1], random.Random(1).sample(order, len(order))]
  structures, compiled = set(), set()
  for nesting in nestings:
    tx = programs.build(nesting, "adam")
    state = tx.init(params)
    structures.add(jax.tree.structure(state))
    for step in (tx.update, functools.partial(optax_boost.apply_gradients, tx)):
      lowered = jax.jit(step).lower(params, state, params, value=jnp.zeros([]))
      compiled.add((step is tx.update, lowered.as_text()))
  assert len(structures) == 1
  assert len(compiled) == 2


def test_two_wrappers_of_a_kind_are_an_error_when_written():
  for names in programs.SLOTS.values():
    for outer, inner in itertools.product(names, repeat=2):
      held = programs.build((inner,), "sgd")
      with pytest.raises(ValueError, match=f"`{programs.factory(inner)}` already"):
        programs.WAYS[outer].wrap(held)


def test_the_table_of_schedules_has_the_depths_and_factors_of_each_schedule():
  for name, freezing in programs.FREEZINGS.items():
    for t in programs.STEPS:
      depths = freezing.schedule.frozen_groups(t), freezing.schedule.frozen_groups(jnp.int32(t))
      assert [*map(int, depths)] == 2 * [freezing.depths[t]], (name, t)
      if freezing.schedule.anneal_until is not None:
        factors = freezing.schedule.anneal(jnp.int32(t))
        np.testing.assert_allclose(factors, freezing.factors[t], atol=1e-6)
  drawn = programs.FREEZINGS["interval"].depths
  assert [depth > 0 for depth in drawn] == [t % 2 == 1 for t in programs.STEPS]


# Beside what optax, or a user, puts around an optimizer.

ANYWHERE = ("accumulate", "skip_spikes", "layerwise_decay")


def refusal(holder, way):
  """The words with which a wrapper inside of a holder is refused; None if it is right there."""
  name = programs.factory(way)
  if holder == "multi_steps" and way == "skip_spikes_loss":
    return "`skip_spikes` needs the extra argument `value`"
  if holder in ("switch_after", "laperm"):
    return f"`{holder}` can't hold `{name}`.*`{name}\\({holder}\\("
  if name not in ANYWHERE:
    return f"`{name}` must be around the whole optimizer; got it inside of .*Write `{name}\\("
  if holder.endswith("_after") and name != "layerwise_decay":
    return f"`{name}` must be the last member of a chain.*Write `{name}\\(optax.chain"
  return None


def refused(order, words, doors=("apply_gradients", "train_step")):
  """Asserts that a composition is refused, by its state, before a step is made."""
  gradients = [{name: np.ones(shape) for name, shape in programs.SHAPES.items()}]
  for door in doors:
    with pytest.raises(ValueError, match=words):
      next(comparison.Program(order, "momentum", door).run(gradients, (1,)))


AROUND = list(itertools.product(programs.HOLDERS, programs.WAYS))
IN_PLACE = [(pair, refusal(*pair)) for pair in AROUND]
RIGHT = [pair for pair, words in IN_PLACE if words is None]
WRONG = [(pair, words) for pair, words in IN_PLACE if words]
# Of two ways to use a wrapper, a refusal is the same.
WRONG = list({(pair[0], words): (pair, words) for pair, words in WRONG}.values())


@pytest.mark.parametrize(("order", "words"), WRONG, ids=ids)
def test_a_step_where_it_would_be_wrong_is_refused_by_its_state(order, words):
  refused(order, words, ("apply_gradients",) if "lookahead" in order else ("train_step",))


@pytest.mark.parametrize("order", sampled(RIGHT, 22), ids=ids)
def test_a_step_inside_of_optaxs_wrappers_is_right(order):
  check(order, AROUND.index(order))


# Ways, as most take part in no decision of a holder inside.
INSIDE = [
  (way, holder)
  for way, holder in itertools.product(programs.WAYS, programs.HOLDERS)
  if (holder != "lookahead" or programs.factory(way) == "average_params")
  and (way, holder) != ("layerwise_decay", "laperm")
]


@pytest.mark.parametrize("order", sampled(INSIDE, 22), ids=ids)
def test_a_step_around_optaxs_wrappers_is_right(order):
  number = INSIDE.index(order)
  # Adam's counts are each group's own only in an optimizer that `freeze_layers` can take apart.
  check(order, number, bases=("momentum", "sgd") if order[0].startswith("freeze") else None)


def test_a_pair_of_params_is_refused_by_all_wrappers_but_averages():
  for way in programs.WAYS:
    name = programs.factory(way)
    if name != "average_params":
      refused((way, "lookahead"), f"`{name}` needs .*`optax.lookahead`", ("apply_gradients",))


def test_layer_rates_around_a_permutation_are_refused():
  refused(("layerwise_decay", "laperm"), "can't scale the updates of an optimizer that permutes")


# A step inside of a step, with something between the two.
@pytest.mark.parametrize("between", ["chain_of_one", "clip", "logged", "partition"])
@pytest.mark.parametrize("outer", ["accumulate", "layerwise_decay", "master_weights"])
def test_a_step_that_must_be_the_root_is_refused_below_another_step(outer, between):
  for kept in ("average_params", "dynamic_loss_scale", "freeze_gradual", "master_weights"):
    words = f"`{programs.factory(kept)}` must be around the whole optimizer; got it inside of"
    refused((outer, between, kept), words, ("train_step",))


# Steps inside of steps that are right.
NESTED = (
  ("average_params", "partition", "accumulate"),
  ("average_params", "inject_hyperparams", "accumulate_varying"),
  ("dynamic_loss_scale", "master_weights", "partition", "layerwise_decay"),
  ("average_params_decay", "apply_if_finite", "accumulate"),
  ("average_params_decay", "multi_steps", "apply_if_finite"),
  ("freeze_gradual", "clip", "accumulate"),
  ("dynamic_loss_scale", "clip", "accumulate", "skip_spikes"),
  ("master_weights", "average_params", "chain_of_one", "accumulate_keep", "layerwise_decay"),
  ("accumulate", "partition", "accumulate_keep"),
  ("freeze_progressive", "master_weights", "logged", "skip_spikes", "accumulate"),
)


@pytest.mark.parametrize("order", sampled(NESTED, 5), ids=ids)
def test_a_step_inside_of_another_one_is_right(order):
  check(order, NESTED.index(order), bases=("momentum", "sgd"))


# The place of a step is seen in its state, not in the calls that led to it.
AFTER = "must be the last member of a chain"


def test_a_step_before_another_member_has_one_verdict_however_it_is_built():
  params = jnp.zeros(2)
  step = optax_boost.accumulate(optax.sgd(1.0), 2)
  jitted = optax.GradientTransformationExtraArgs(jax.jit(step.init), step.update)
  logged = optax.GradientTransformationExtraArgs(lambda params: step.init(params), step.update)
  decay = optax.add_decayed_weights(0.1)

  def by_hand(first, second):
    def init(params):
      return first.init(params), second.init(params)

    def update(updates, state, params=None, **extra):
      updates, before = first.update(updates, state[0], params, **extra)
      updates, after = second.update(updates, state[1], params)
      return updates, (before, after)

    return optax.GradientTransformationExtraArgs(init, update)

  def verdict(tx):
    with pytest.raises(ValueError, match=AFTER):
      optax_boost.apply_gradients(tx, params, tx.init(params), params)

  jitted.init(params)  # a warm cache
  for tx in (step, jitted, logged):
    verdict(optax.chain(tx, decay))
    verdict(by_hand(tx, decay))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
      pool.submit(verdict, optax.chain(tx, decay)).result()


def test_a_training_inside_the_init_of_a_chain_may_have_wrappers():
  def loss_fn(w):
    return jnp.mean((jnp.asarray(np.random.default_rng(0).normal(size=(8, 4))) @ w - 1) ** 2)

  def first_phase(params):
    recorded = optax.chain(optax_boost.record_trajectory(every=1, capacity=4), optax.sgd(0.1))
    tx = optax_boost.accumulate(recorded, every=2)
    state = tx.init(params)
    for _ in range(8):
      updates, state = tx.update(jax.grad(loss_fn)(params), state, params)
      params = optax.apply_updates(params, updates)
    return optax_boost.fit_subspace(optax_boost.snapshots(state), 2)

  params = jnp.zeros(4)
  inside, outside = (
    optax.chain(optax.clip_by_global_norm(1.0), optax_boost.dim_reduce(subspace)).init(params)
    for subspace in (first_phase, first_phase(params))
  )
  jax.tree.map(np.testing.assert_array_equal, inside, outside)


# An inner optimizer that makes NaN of ordinary gradients.
CHECKED = [name for name in programs.WAYS if name.endswith("_checked")]
POISONED = [
  (*others, name)
  for others in ((), ("accumulate",), ("average_params", "freeze_gradual"))
  for name in CHECKED
]


@pytest.mark.parametrize("order", sampled(POISONED, 5), ids=ids)
def test_a_step_that_an_optimizer_makes_bad_is_undone_and_counted(order):
  bases = tuple(programs.Poisoned(base) for base in ("sgd", "momentum"))
  check(order, POISONED.index(order), bases=bases)


@pytest.mark.optimized
@pytest.mark.parametrize("door", comparison.DOORS)
@pytest.mark.parametrize("around", [(), ("accumulate_one",)], ids=["alone", "accumulate"])
def test_averages_in_bfloat16_average_rounded_params(around, door):
  # Optimized programs may leave out a rounding to 16 bits and back.
  rng = np.random.default_rng(0)
  size, dtype = 1000, jnp.bfloat16
  grads = rng.normal(size=(6, size)).astype(dtype)
  params = rng.normal(size=size).astype(dtype)
  order, start = ("average_params_decay", *around), {"head": jnp.asarray(params)}
  program = comparison.Program(order, "sgd", door, "bfloat16", start)
  after = program.run([{"head": g} for g in grads], [1] * len(grads))
  average, decay = params.astype(np.float64), 0.75
  for k, (g, (found_params, state)) in enumerate(zip(grads, after, strict=True), 1):
    # A power of two times a number of 8 bits, added exactly and rounded once.
    exact = params.astype(np.float64) - programs.RATE * g.astype(np.float64)
    params = exact.astype(np.float32).astype(dtype)
    np.testing.assert_array_equal(found_params["head"], params)
    average += (params.astype(np.float64) - average) * (1 - decay) / (1 - decay**k)
    np.testing.assert_allclose(state.averaging.average["head"], average, rtol=0, atol=2e-6)


@pytest.mark.parametrize("inner", ["accumulate", "dynamic_loss_scale", "average_params"])
@pytest.mark.parametrize("rounds", ["master_weights_key", "stochastic_rounding"])
def test_random_rounding_has_the_right_mean(rounds, inner):
  # Entries of a leaf are rounded independently: many entries stand for many keys.
  entries, steps, move = 4096, 4, 2.0**-12
  tx = programs.build((inner, rounds), "sgd")
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


def test_the_interpreter_rounds_to_the_neighbours():
  x = np.array([1.0, 1 + 2.0**-9, 1 + 3 * 2.0**-9, -1 - 2.0**-9, 0.0])
  low, high = eager.neighbours(x)
  np.testing.assert_array_equal(low, [1, 1, 1, -1 - 2.0**-7, 0])
  np.testing.assert_array_equal(high, [1, 1 + 2.0**-7, 1 + 2.0**-7, -1, 0])

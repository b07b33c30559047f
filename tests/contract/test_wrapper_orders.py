"""Every order of two wrappers around Adam, and useful ones of three, in three dtypes.

Each trains a small network as well as Adam alone does in float32, in as many real steps, or is
refused with a message that names the order that works.
"""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost

# These train in scans, where the depth of freezing is traced.
pytestmark = pytest.mark.filterwarnings("ignore:`freeze_layers` saves no time")

STEPS = 40
# The first scales overflow in float16; so many steps more are made, in which they come down.
EXTRA_STEPS = 6
# Every micro-batch of a window is the whole batch, so their mean gradient is the batch's.
EVERY = 2
GROUPS = ("body", "head")
# Times the loss of Adam alone in float32. Frozen steps and skipped ones cost some training; laperm
# is a method of its own, which returns to a permutation of the initial weights every ten steps.
FACTOR, LAPERM_FACTOR = 3, 20


def laperm(tx, micro_steps):
  # It counts steps as they come, where it stands around an accumulation.
  return optax_boost.laperm(tx, sync_every=10 * micro_steps)


def switch_after(tx, micro_steps):
  return optax_boost.switch_after(STEPS // 2 * micro_steps, tx, tx)


WRAPPERS = {
  "accumulate": lambda tx, _: optax_boost.accumulate(tx, EVERY),
  "dynamic_loss_scale": lambda tx, _: optax_boost.dynamic_loss_scale(tx, 2.0**18),
  "master_weights": lambda tx, _: optax_boost.master_weights(tx),
  "freeze_layers": lambda tx, _: optax_boost.freeze_layers(
    tx, GROUPS, optax_boost.interval_freezing(2, frozen_fraction=0.25)
  ),
  "switch_after": switch_after,
  "laperm": laperm,
}
# What acts on the loss of every step can't stand on one side of a switch.
REFUSED = {("switch_after", name) for name in ("dynamic_loss_scale", "freeze_layers")}
PAIRS = list(itertools.permutations(WRAPPERS, 2))
WIDER = tuple(WRAPPERS)
ROUNDING = "stochastic_rounding"
WRAPPERS[ROUNDING] = lambda tx, _: optax_boost.stochastic_rounding(tx, key=0)
ROUNDED = [
  order
  for name in ("accumulate", "dynamic_loss_scale", "freeze_layers")
  for order in ((ROUNDING, name), (name, ROUNDING))
]
TRIPLES = [
  order
  for names in (
    ("accumulate", "dynamic_loss_scale", "master_weights"),
    ("accumulate", "dynamic_loss_scale", "freeze_layers"),
  )
  # Each wrapper once outermost, and once innermost.
  for order in (names, names[1:] + names[:1], names[2:] + names[:2])
]


def network(dtype):
  rng = np.random.default_rng(0)
  params = {"body": rng.normal(size=(4, 8)), "head": 0.5 * rng.normal(size=(8, 2))}
  x = rng.normal(size=(16, 4))
  y = np.tanh(x @ rng.normal(size=(4, 2)))
  return jax.tree.map(lambda a: jnp.asarray(a, dtype), (params, (x, y)))


def loss_fn(params, batch):
  x, y = batch
  residual = jnp.tanh(x @ params["body"]) @ params["head"] - y
  return jnp.mean(residual.astype(jnp.float32) ** 2)


def wrapped(order, dtype):
  keeps_float32 = {"dynamic_loss_scale", "master_weights"} & set(order)
  # Adam's eps is zero in float16 and its second moment vanishes: alone it is NaN after one step.
  # Without a wrapper that keeps its state in float32 it needs another eps.
  tx = optax.adam(0.05, eps=1e-3 if dtype == "float16" and not keeps_float32 else 1e-8)
  micro_steps = 1
  for name in reversed(order):
    tx = WRAPPERS[name](tx, micro_steps)
    micro_steps *= EVERY if name == "accumulate" else 1
  return tx, micro_steps


def loss_after_training(tx, dtype, steps):
  """The loss in float32 of what the train step makes of the network."""
  params, batch = network(dtype)
  step = optax_boost.make_train_step(loss_fn, tx, donate=False)

  def train(state):
    return jax.lax.scan(lambda state, _: (step(state, batch)[0], None), state, length=steps)[0]

  state = step.init(params)
  trained = jax.jit(train)(state).params
  wide = jax.tree.map(lambda a: a.astype(jnp.float32), trained)
  return float(loss_fn(wide, network("float32")[1]))


@functools.cache
def loss_of_adam_alone():
  return loss_after_training(optax.adam(0.05), "float32", STEPS)


def check(order, dtype):
  tx, micro_steps = wrapped(order, dtype)
  if order in REFUSED:
    works = re.escape(f"`{order[1]}({order[0]}(...))`")
    with pytest.raises(ValueError, match=f"Put its wrapper around the whole: {works}"):
      tx.init(network(dtype)[0])
    return
  loss = loss_after_training(tx, dtype, (STEPS + EXTRA_STEPS) * micro_steps)
  factor = LAPERM_FACTOR if "laperm" in order else FACTOR
  assert loss < factor * loss_of_adam_alone()


def test_the_network_is_far_from_trained_at_the_start():
  params, batch = network("float32")
  assert loss_fn(params, batch) > 2 * LAPERM_FACTOR * loss_of_adam_alone()


# Float16, which asks for most, in both orders; one of the others for some, each wrapper among them.
OF_PAIRS = [(order, "float16") for order in PAIRS] + [
  (order, "bfloat16" if number % 2 else "float32")
  for number, order in enumerate(zip(WIDER, WIDER[1:] + WIDER[:1], strict=True))
]


@pytest.mark.parametrize(
  ("order", "dtype"),
  OF_PAIRS,
  ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_two_wrappers_train_in_either_order_or_say_which_works(order, dtype):
  check(order, dtype)


@pytest.mark.parametrize("order", ROUNDED, ids="-".join)
def test_bfloat16_is_rounded_stochastically_inside_and_around_other_wrappers(order):
  check(order, "bfloat16")


@pytest.mark.parametrize("order", TRIPLES, ids="-".join)
def test_three_wrappers_train_together(order):
  check(order, "float16")

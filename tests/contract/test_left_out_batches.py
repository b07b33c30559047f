"""A step that is skipped, and a micro-batch that is dropped, leave everything as it was.

Params, the inner optimizer's state, statistics, variables of any type, counts of random numbers,
and params that the forward pass writes: behind every door, for each wrapper of ours that leaves
batches out, and for two of optax's.
"""

import functools

from flax import linen as nn, nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
import optax_boost.linen as ob_linen
import optax_boost.nnx as ob_nnx
from tests.contract import registry

INNER = optax.sgd(0.125, momentum=0.5)
SKIPPING = {
  name: row.around(INNER) for name, row in registry.wrappers().items() if row.form.step.leaves_out
} | {
  "apply_if_finite": optax.apply_if_finite(INNER, 100),
  "MultiSteps": optax.MultiSteps(
    INNER, 2, should_skip_update_fn=optax.skip_not_finite
  ).gradient_transformation(),
  "in a part": optax.partition({"x": optax_boost.accumulate(INNER, 1)}, "x"),
  "accumulate around a loss scale": optax_boost.accumulate(
    optax_boost.dynamic_loss_scale(INNER, 2.0), 1
  ),
}
GOOD = np.ones((4, 2), np.float32)
NAN = np.where(np.eye(4, 2) > 0, np.nan, GOOD).astype(np.float32)
# Its loss is zero and its gradient is not finite.
ZERO = np.zeros((4, 2), np.float32)
BAD = {"NaN": NAN, "zero": ZERO}
every_wrapper = pytest.mark.parametrize("name", SKIPPING)
every_batch = pytest.mark.parametrize("bad", BAD)


def test_the_wrappers_that_leave_batches_out_are_known():
  assert {"accumulate", "dynamic_loss_scale", "master_weights", "skip_spikes"} <= set(SKIPPING)


def root_loss(outputs):
  return jnp.mean(jnp.sqrt(jnp.sum(outputs**2, -1)))


def plain_loss(params, model_state, batch):
  statistics = {
    "mean": 0.75 * model_state["mean"] + 0.25 * batch.mean(0),
    "batches": model_state["batches"] + 1,
  }
  return root_loss(batch @ params), statistics


# Cached, so that both kinds of bad batches run in the programs of one step.
@functools.cache
def plain_step(name):
  return optax_boost.make_train_step(plain_loss, SKIPPING[name], has_model_state=True)


@functools.cache
def plain_scan(name):
  step = optax_boost.make_train_step(plain_loss, SKIPPING[name], has_model_state=True, donate=False)
  return jax.jit(functools.partial(jax.lax.scan, step))


def plain_run(name, batches, scanned=False):
  step = plain_step(name)
  state = step.init(jnp.ones((2, 3)), {"mean": jnp.zeros(2), "batches": jnp.int32(0)})
  if scanned:
    return plain_scan(name)(state, np.stack(batches))
  history = []
  for batch in batches:
    state, metrics = step(state, batch)
    history.append(metrics)
  return state, jax.tree.map(lambda *x: jnp.stack(x), *history)


@every_batch
@every_wrapper
@pytest.mark.parametrize("scanned", [False, True], ids=["loop", "scan"])
def test_statistics_come_from_the_batches_that_are_used(name, bad, scanned):
  state, metrics = plain_run(name, [GOOD, BAD[bad], GOOD, GOOD], scanned)
  np.testing.assert_array_equal(state.model_state["mean"], np.full(2, 1 - 0.75**3, np.float32))
  assert state.model_state["batches"] == 3
  expected, _ = plain_run(name, [GOOD, GOOD, GOOD], scanned)
  np.testing.assert_array_equal(state.params, expected.params)
  # Whether the loss was not finite, or its gradient alone.
  loss, gradients = (metrics[f"skipped/{reason}"].tolist() for reason in ("loss", "gradients"))
  assert loss == [0, int(bad == "NaN"), 0, 0]
  assert gradients == [0, int(bad == "zero"), 0, 0]


def test_an_optimizer_that_leaves_no_batch_out_has_no_such_metrics():
  step = optax_boost.make_train_step(lambda p, x: root_loss(x @ p), INNER)
  _, metrics = step(step.init(jnp.ones((2, 3))), GOOD)
  assert set(metrics) == {"loss"}


class Counted(nnx.Variable):
  """A variable of a type of the user's own."""


class Model(nnx.Module):
  def __init__(self):
    rngs = nnx.Rngs(0)
    self.norm = nnx.BatchNorm(2, rngs=rngs)
    self.dropout = nnx.Dropout(0.5, rngs=rngs)
    self.linear = nnx.Linear(2, 3, rngs=rngs)
    self.calls = Counted(jnp.int32(0))

  def __call__(self, x):
    self.calls[...] += 1
    # As `nnx.WeightNorm` does, the forward pass writes a param.
    self.linear.bias[...] = jnp.clip(self.linear.bias[...], -1, 1) + 0.5
    return self.linear(self.dropout(self.norm(x) + x))


def copied(tree):
  keys = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x  # noqa: E731
  return jax.tree.map(lambda x: np.array(keys(x)), tree)


nnx_step = ob_nnx.make_train_step(lambda model, x: root_loss(model(x) * jnp.max(jnp.abs(x))))


@every_batch
@every_wrapper
def test_all_variables_of_an_nnx_model_are_kept(name, bad):
  model = Model()
  optimizer = nnx.Optimizer(model, SKIPPING[name], wrt=nnx.Param)
  nnx_step(model, optimizer, GOOD)
  before = copied(nnx.state(model))
  metrics = nnx_step(model, optimizer, BAD[bad])
  assert int(metrics["skipped/loss"]) + int(metrics["skipped/gradients"]) == 1
  after = copied(nnx.state(model))
  jax.tree.map(np.testing.assert_array_equal, after, before)
  nnx_step(model, optimizer, GOOD)
  moved = copied(nnx.state(model))
  assert moved["calls"][...] == 2
  assert np.any(moved["norm"]["mean"][...] != before["norm"]["mean"][...])


class Module(nn.Module):
  @nn.compact
  def __call__(self, x):
    size = jnp.max(jnp.abs(x))
    x = nn.BatchNorm(use_running_average=False, momentum=0.75)(x) + x
    return nn.Dense(3)(x) * size


@functools.cache
def linen_start(name):
  module = Module()
  loss, params, model_state = ob_linen.split_loss(
    lambda model, x: root_loss(model(x)), module, module.init(jax.random.key(0), GOOD)
  )
  step = optax_boost.make_train_step(loss, SKIPPING[name], donate=False)
  return step, step.init(params, model_state)


@every_batch
@every_wrapper
def test_all_collections_of_a_linen_module_are_kept(name, bad):
  step, start = linen_start(name)
  first, _ = step(start, GOOD)
  second, _ = step(first, BAD[bad])
  jax.tree.map(np.testing.assert_array_equal, second.model_state, first.model_state)
  if name != "accumulate":
    jax.tree.map(np.testing.assert_array_equal, second.params, first.params)
  third, _ = step(second, 2 * GOOD)
  for new, old in zip(
    jax.tree.leaves(third.model_state), jax.tree.leaves(second.model_state), strict=True
  ):
    assert np.all(np.isfinite(new))
    assert np.any(new != old)


def test_a_good_step_holds_no_second_copy_of_the_statistics():
  """They are blended after the verdict, into the old ones' memory."""
  size = 2**20

  def loss(params, statistics, batch):
    return jnp.mean((batch @ params) ** 2), 0.9 * statistics + 0.1 * batch.mean()

  def temporaries(tx):
    step = optax_boost.make_train_step(loss, tx, has_model_state=True)
    state = step.init(jnp.ones((2, 3)), jnp.zeros(size))
    return step.lower(state, jnp.ones((4, 2))).compile().memory_analysis().temp_size_in_bytes

  skipping = temporaries(optax_boost.dynamic_loss_scale(optax.sgd(0.1)))
  assert skipping < temporaries(optax.sgd(0.1)) + size


def test_a_batch_of_an_optimizer_that_is_not_called_is_not_left_out():
  inner = optax.MultiSteps(
    optax.sgd(0.1), 2, should_skip_update_fn=optax.skip_not_finite
  ).gradient_transformation()
  plain = optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation()
  for tx in (
    optax_boost.accumulate(inner, 2), optax_boost.accumulate(plain, 2),
    optax_boost.switch_after(2, plain, plain),
  ):  # fmt: skip
    step = optax_boost.make_train_step(
      lambda p, s, x: (jnp.sum(p * x), s + 1), tx, has_model_state=True
    )
    state = step.init(jnp.ones(2), jnp.int32(0))
    for _ in range(5):
      state, _ = step(state, jnp.ones(2))
    assert state.model_state == 5


def test_statistics_of_equal_paths_and_numbers_are_kept():
  def loss(params, statistics, batch):
    mean = 0.5 * statistics["mean"] + 0.5 * batch.mean().astype(jnp.bfloat16)
    return jnp.sum(params * batch), {
      "mean": mean, "a/b": statistics["a/b"] + 1, "a": {"b": statistics["a"]["b"] + 1}, "kind": 3,
    }  # fmt: skip

  step = optax_boost.make_train_step(
    loss, optax_boost.dynamic_loss_scale(optax.sgd(0.1)), has_model_state=True, donate=False
  )
  statistics = {
    "mean": jnp.ones(2, jnp.bfloat16), "a/b": jnp.int32(100), "a": {"b": jnp.int32(0)}, "kind": 3,
  }  # fmt: skip
  state, _ = step(step.init(jnp.ones(2), statistics), jnp.array([jnp.nan, 1.0]))
  assert state.model_state["mean"].tolist() == [1.0, 1.0]
  assert (state.model_state["a/b"], state.model_state["a"]["b"]) == (100, 0)
  state, _ = step(state, jnp.ones(2))
  assert (state.model_state["a/b"], state.model_state["a"]["b"]) == (101, 1)


PARTIAL = {
  "master_weights": lambda tx: optax_boost.master_weights(tx),
  "accumulate": lambda tx: optax_boost.accumulate(tx, 1),
  "skip_spikes": lambda tx: optax_boost.skip_spikes(tx),
}

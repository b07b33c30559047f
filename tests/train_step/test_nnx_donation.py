"""Which arrays an NNX step donates: only what it made itself, and nobody else holds."""

import functools

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost.nnx as ob_nnx
from tests.train_step import test_nnx
from tests.train_step.test_nnx import BATCH, loss_fn


def arrays_of(*nodes):
  """The arrays of models and optimizers by their places in memory."""
  return {x.unsafe_buffer_pointer(): x for x in jax.tree.leaves(nnx.state(nodes)) if x.size > 1}


def pure(model):
  return jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(model, (nnx.Param, nnx.BatchStat))))


@nnx.jit
def flax_step(model, optimizer, batch):
  """The step of Flax's guides, which donates nothing."""
  (loss, _), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, batch)
  optimizer.update(model, grads)
  return loss


def test_steps_reuse_all_memory_also_the_first_and_the_first_after_a_restore():
  probe = jnp.ones(100)
  address = probe.unsafe_buffer_pointer()
  if jax.jit(lambda x: x + 1, donate_argnums=0)(probe).unsafe_buffer_pointer() != address:
    pytest.skip("this JAX puts results elsewhere even if they could take a donated place")
  model, optimizer = test_nnx.make(optax.adam(1e-2))
  step = ob_nnx.make_train_step(loss_fn, has_aux=True)
  for t in range(4):
    if t == 2:
      nnx.update((model, optimizer), jax.tree.map(jnp.copy, nnx.state((model, optimizer))))
    before = set(arrays_of(model, optimizer))
    metrics = step(model, optimizer, BATCH)
    assert set(arrays_of(model, optimizer)) == before
    del metrics


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_weights_that_start_several_runs_are_kept(name):
  tx = {"adam": optax.adam(1e-2), "sgd": optax.sgd(0.1)}[name]
  step = ob_nnx.make_train_step(loss_fn, has_aux=True)
  start = nnx.state(test_nnx.Network(nnx.Rngs(0)))
  losses = []
  for _ in range(2):
    model = test_nnx.Network(nnx.Rngs(1))
    nnx.update(model, start)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    losses.append([float(step(model, optimizer, BATCH)["loss"]) for _ in range(3)])
  assert losses[0] == losses[1]
  assert not any(x.is_deleted() for x in jax.tree.leaves(start))


def _clone(model, optimizer):
  return nnx.state(nnx.clone((model, optimizer)))


def _state_of_new_variables(model, optimizer):
  return jax.tree.map(lambda x: x, (nnx.state(model), nnx.state(optimizer)))


def _second_model(model, optimizer):
  second = test_nnx.Network(nnx.Rngs(3))
  nnx.update(second, nnx.state(model))
  return second, None


def _pure_arrays(model, optimizer):
  return jax.tree.leaves(nnx.state(model)), jax.tree.leaves(nnx.state(optimizer.opt_state))


HOLDERS = {
  "a clone": _clone,
  "a state": _state_of_new_variables,
  "a second model": _second_model,
  "arrays": _pure_arrays,
}


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("holder", HOLDERS)
def test_arrays_held_elsewhere_are_never_deleted(holder, steps_before):
  """As a target network, the best weights so far, or the start of an average are held."""
  tx = optax.sgd(0.1, momentum=0.9)
  (model, optimizer), (twin, twin_optimizer) = test_nnx.make(tx), test_nnx.make(tx)
  step = ob_nnx.make_train_step(loss_fn, has_aux=True)
  for _ in range(steps_before):
    step(model, optimizer, BATCH)
    flax_step(twin, twin_optimizer, BATCH)
  held = HOLDERS[holder](model, optimizer)
  expected = [x for x in jax.tree.leaves(held) if x.dtype == jnp.float32]
  expected = jax.tree.map(np.array, expected)
  for _ in range(3):
    step(model, optimizer, BATCH)
    flax_step(twin, twin_optimizer, BATCH)
    found = [x for x in jax.tree.leaves(held) if x.dtype == jnp.float32]
    jax.tree.map(np.testing.assert_array_equal, found, expected)
  close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
  jax.tree.map(close, pure(model), pure(twin))


def test_the_first_step_keeps_arrays_in_whose_memory_the_model_lies():
  """`device_put` copies nothing if an array is where it shall be, but returns another array."""
  first, model = test_nnx.Network(nnx.Rngs(0)), test_nnx.Network(nnx.Rngs(1))
  expected = pure(first)
  nnx.update(model, jax.device_put(nnx.state(first), jax.devices()[0]))
  optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
  ob_nnx.make_train_step(loss_fn, has_aux=True)(model, optimizer, BATCH)
  jax.tree.map(np.testing.assert_array_equal, pure(first), expected)


def test_the_best_weights_so_far_can_be_put_back():
  model, optimizer = test_nnx.make(optax.adam(0.1))
  step = ob_nnx.make_train_step(loss_fn, has_aux=True)
  for t in range(4):
    step(model, optimizer, BATCH)
    if t == 1:
      best, expected = _state_of_new_variables(model, optimizer)[0], pure(model)
  nnx.update(model, best)
  jax.tree.map(np.testing.assert_array_equal, pure(model), expected)
  step(model, optimizer, BATCH)
  assert not any(x.is_deleted() for x in jax.tree.leaves(best))


def test_models_that_share_arrays_or_variables_train_side_by_side():
  def both(step):
    models = [test_nnx.Network(nnx.Rngs(seed)) for seed in range(3)]
    nnx.update(models[1], nnx.state(models[0]))
    models[2].hidden = models[0].hidden
    optimizers = [nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param) for model in models]
    for _ in range(3):
      for model, optimizer in zip(models, optimizers, strict=True):
        step(model, optimizer, BATCH)
    return [pure(model) for model in models]

  ours = both(ob_nnx.make_train_step(loss_fn, has_aux=True))
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), ours, both(flax_step)
  )


def test_a_batch_that_the_loss_stores_in_the_model_is_kept():
  def loss(model, batch):
    model.seen[...] = batch["x"]
    return loss_fn(model, batch)[0]

  model = test_nnx.Network(nnx.Rngs(0))
  model.seen = nnx.Cache(jnp.zeros_like(BATCH["x"]))
  optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
  step = ob_nnx.make_train_step(loss)
  for _ in range(3):
    step(model, optimizer, BATCH)
  assert not BATCH["x"].is_deleted()
  # As the step's own array, and in the next batch.
  stored = {"x": jax.tree.leaves(nnx.state(model, nnx.Cache))[0], "y": BATCH["y"]}
  for _ in range(2):
    step(model, optimizer, stored)
  np.testing.assert_array_equal(stored["x"], BATCH["x"])


def test_nothing_is_donated_without_donation():
  model, optimizer = test_nnx.make(optax.adam(1e-2))
  step = ob_nnx.make_train_step(loss_fn, has_aux=True, donate=False)
  for _ in range(2):
    old = arrays_of(model, optimizer)
    step(model, optimizer, BATCH)
    assert not any(x.is_deleted() for x in old.values())
    assert not {*old} & {*arrays_of(model, optimizer)}


def test_rngs_that_others_hold_are_kept():
  def noisy(model, batch, rngs):
    return jnp.mean((model(batch["x"]) + jax.random.normal(rngs(), (16,))) ** 2)

  model, optimizer = test_nnx.make(optax.sgd(0.1))
  rngs = nnx.Rngs(0)
  step = ob_nnx.make_train_step(noisy)
  batch = {"x": jnp.ones((16, 8))}
  step(model, optimizer, batch, rngs)
  fork, again = nnx.clone(rngs), jax.tree.map(lambda x: x, nnx.state(rngs))
  for _ in range(2):
    step(model, optimizer, batch, rngs)
  nnx.update(rngs, again)
  assert fork.default.count[...] == rngs.default.count[...] == 1
  np.testing.assert_array_equal(jax.random.key_data(fork()), jax.random.key_data(rngs()))

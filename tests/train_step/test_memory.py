"""Nothing of a dropped training stays alive, and no array of the user is donated."""

import functools
import weakref

from flax import linen as nn, nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
import optax_boost.linen
import optax_boost.nnx

X = jnp.ones(3)
GROUPS = ["body", "head"]


def loss_fn(params, x):
  return sum(jnp.mean((leaf - x) ** 2) for leaf in jax.tree.leaves(params))


def anchored(anchor):
  """An optimizer that pulls towards an anchor, which its state holds."""

  def update(grads, state, params=None):
    return jax.tree.map(lambda g, p, a: -0.1 * (g + p - a), grads, params, state), state

  return optax.GradientTransformation(lambda params: anchor, update)


def by_train_step(tx, params):
  step = optax_boost.make_train_step(loss_fn, tx)
  state = step.init(params)
  for _ in range(2):
    state, _ = step(state, X)


def by_apply_gradients(tx, params):
  state = tx.init(params)
  for _ in range(2):
    params, state = optax_boost.apply_gradients(tx, params, state, params)


@pytest.mark.parametrize("train", [by_train_step, by_apply_gradients])
@pytest.mark.parametrize("wrapper", ["none", "accumulate"])
def test_arrays_that_an_optimizer_closes_over_are_freed_with_it(train, wrapper, collect_garbage):
  anchor = jnp.arange(3.0)
  tx = anchored(anchor)
  if wrapper == "accumulate":
    tx = optax_boost.accumulate(tx, 2)
  train(tx, jnp.ones(3))
  kept = weakref.ref(anchor)
  del anchor, tx
  collect_garbage()
  assert kept() is None


def test_the_moments_of_dropped_states_are_freed(collect_garbage):
  inner = {
    "chain": optax.adam(0.1),
    "named_chain": optax.named_chain(("adam", optax.adam(0.1))),
  }
  for name, optimizer in inner.items():
    size = 777
    tx = optax_boost.freeze_layers(optimizer, GROUPS, optax_boost.fixed_freezing(2, 1))
    step = optax_boost.make_train_step(loss_fn, tx)
    for _ in range(3):
      state = step.init({group: jnp.ones(size) for group in GROUPS})
      for _ in range(2):
        state, _ = step(state, jnp.ones(size))
      del state
    collect_garbage()
    assert not [a for a in jax.live_arrays() if a.shape == (size,)], name


@pytest.mark.parametrize(
  "make",
  [
    lambda array: anchored(array),
    lambda array: optax.chain(optax.clip(1.0), anchored(array)),
    lambda array: optax_boost.accumulate(anchored(array), 2),
  ],
)
def test_a_train_step_donates_no_array_that_the_optimizer_closes_over(make):
  array = jnp.arange(3.0)
  step = optax_boost.make_train_step(loss_fn, make(array))
  runs = []
  for _ in range(2):
    state = step.init(jnp.ones(3))
    for _ in range(4):
      state, _ = step(state, X)
    runs.append(state.params)
  assert not array.is_deleted()
  np.testing.assert_array_equal(*runs)


def test_the_key_of_add_noise_serves_two_runs():
  key = jax.random.key(0)
  step = optax_boost.make_train_step(
    loss_fn, optax.chain(optax.add_noise(0.1, 0.5, key), optax.sgd(0.1))
  )
  states = [functools.reduce(lambda s, _: step(s, X)[0], range(2), step.init(X)) for _ in range(2)]
  np.testing.assert_array_equal(*(state.params for state in states))


def refresh_a_step(array):
  tx = optax.chain(optax_boost.svrg(refresh_every=None), optax.sgd(0.1))
  step = optax_boost.make_train_step(lambda p, x: loss_fn(p, x + array), tx)
  step.refresh(step.init(jnp.ones(3)), [X])


def average_gradients(array):
  gradient = jax.grad(lambda p, x: loss_fn(p, x + array))
  for function in (gradient, functools.partial(gradient), jax.tree_util.Partial(gradient)):
    mean = optax_boost.full_gradient(function, jnp.ones(3), [X, X])
    np.testing.assert_allclose(mean, gradient(jnp.ones(3), X), rtol=1e-6)


def estimate_statistics(array):
  model, batches = nnx.BatchNorm(3, rngs=nnx.Rngs(0)), [jnp.eye(3)]
  optax_boost.nnx.estimate_batch_stats(model, batches, forward_fn=lambda model, x: model(x + array))


def estimate_statistics_of_linen(array):
  module, x = nn.BatchNorm(use_running_average=False), jnp.eye(3)
  optax_boost.linen.estimate_batch_stats(
    module,
    module.init(jax.random.key(0), x),
    [x],
    forward_fn=lambda model, x: model(x + array),
  )


@pytest.mark.parametrize(
  "run_pass",
  [refresh_a_step, average_gradients, estimate_statistics, estimate_statistics_of_linen],
)
def test_the_arrays_that_a_function_of_a_pass_closes_over_are_freed_with_it(
  run_pass, collect_garbage
):
  array = jnp.arange(3.0)
  run_pass(array)
  kept = weakref.ref(array)
  del array
  collect_garbage()
  assert kept() is None

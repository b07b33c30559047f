"""LaPerm against its two lines of NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost


def params():
  rng = np.random.default_rng(0)
  tree = {"kernel": rng.normal(size=(3, 4, 5)), "bias": rng.normal(size=6)}
  return jax.tree.map(np.float32, tree)


def grads(t):
  return {
    name: np.sin(np.arange(p.size) + t, dtype=np.float32).reshape(p.shape)
    for name, p in params().items()
  }


def synchronized(initial, trained):
  """Each column's initial values in the order of the trained ones."""
  shape = initial.shape
  initial, trained = (
    np.reshape(x, (-1, shape[-1] if len(shape) > 1 else 1)) for x in (initial, trained)
  )
  ranks = np.argsort(np.argsort(trained, 0, kind="stable"), 0, kind="stable")
  return np.take_along_axis(np.sort(initial, 0), ranks, 0).reshape(shape)


@pytest.mark.optimized
def test_weights_that_differ_only_in_their_last_bits_are_ordered():
  rng = np.random.default_rng(6)
  normal = rng.normal(size=(300, 3))
  narrow = 1 + np.finfo(np.float32).eps * rng.integers(0, 512, (300, 3))
  pairs = np.repeat(normal[:150], 2, 0) * (1 - 6e-8 * (np.arange(300) % 2))[:, None]
  tx = optax_boost.laperm(optax.scale(1.0), sync_every=1)
  step = jax.jit(functools.partial(optax_boost.apply_gradients, tx))
  start = normal.astype(np.float32)
  for keys in (narrow, pairs, rng.integers(-2, 3, (300, 3)) * -0.5):
    wanted = keys.astype(np.float32)
    for first, trained in ((start, wanted), (wanted, start)):
      steps = trained - first
      found, _ = step(steps, tx.init(jnp.asarray(first)), jnp.asarray(first))
      np.testing.assert_array_equal(found, synchronized(first, first + steps))


def test_a_checkpoint_of_integers_is_the_last_synchronization():
  start = params()
  tx = optax_boost.laperm(optax.sgd(1.0), sync_every=2)
  update = jax.jit(tx.update)
  now, state = start, tx.init(start)
  for t in range(2):
    updates, state = update(grads(t), state, now)
    now = jax.tree.map(np.add, now, updates)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
    now,
    optax_boost.permuted_params(state).params,
  )
  saved = optax_boost.permuted_params(state).permutation
  _, state = update(grads(2), state, now)
  jax.tree.map(np.testing.assert_array_equal, optax_boost.permuted_params(state).permutation, saved)
  restored = optax_boost.PermutedParams.from_initial(start, saved).params
  jax.tree.map(np.testing.assert_array_equal, restored, optax_boost.permuted_params(state).params)


def test_a_weight_that_became_nan_receives_the_largest_of_its_vector():
  start = params()
  tx = optax_boost.laperm(optax.sgd(0.0), sync_every=1)
  bad = jax.tree.map(np.zeros_like, start)
  bad["bias"][2] = -np.nan
  step = jax.jit(functools.partial(optax_boost.apply_gradients, tx))
  now, _ = jax.device_get(step(bad, tx.init(start), start))
  assert now["bias"][2] == np.max(start["bias"])
  np.testing.assert_array_equal(np.sort(now["bias"]), np.sort(start["bias"]))


def test_a_leaf_that_is_frozen_during_a_synchronization_is_not_updated():
  start = params()
  tx = optax_boost.freeze_layers(
    optax_boost.laperm(optax.sgd(0.5), sync_every=2),
    ["kernel", "bias"],
    optax_boost.continuous_freezing(2, 0.5),
  )
  step = jax.jit(functools.partial(optax_boost.apply_gradients, tx))
  history, state = [start], tx.init(start)
  for t in range(2):
    now, state = step(grads(t), state, history[-1])
    history.append(jax.device_get(now))
  _, free, now = history
  assert np.any(free["kernel"] != start["kernel"])
  np.testing.assert_array_equal(now["kernel"], free["kernel"])
  np.testing.assert_array_equal(now["bias"], optax_boost.permuted_params(state).params["bias"])
  assert np.any(now["bias"] != start["bias"])


def run(tx, dtype, steps, gradient=grads):
  """Trains from the params in a dtype; gives the flags of synchronization, params and state."""
  now = jax.tree.map(lambda x: x.astype(dtype), params())
  state, flags = tx.init(now), []
  step = jax.jit(functools.partial(optax_boost.apply_gradients, tx))
  for t in range(steps):
    gradients = jax.tree.map(lambda g: g.astype(dtype), gradient(t))
    now, state = step(gradients, state, now)
    flags.append(bool(optax.tree.get(state, "synced")))
  return flags, now, state


def test_the_period_can_be_a_function_of_the_steps_made():
  # Periods 1, 1, 2, 2, 3, 3, 3 at the steps 1 to 7.
  tx = optax_boost.laperm(optax.sgd(1.0), lambda count: jnp.minimum(1 + count // 2, 3))
  flags, _, state = run(tx, "float32", 7)
  assert flags == [True, True, False, True, False, True, False]
  assert state.count == 7
  flags, _, _ = run(optax_boost.laperm(optax.sgd(1.0), jnp.int32(3)), "float32", 7)
  assert flags == [False, False, True, False, False, True, False]
  with pytest.raises(
    ValueError, match=r"`sync_every\(count\)` must return a scalar.*of shape \(2,\)"
  ):
    run(optax_boost.laperm(optax.sgd(1.0), lambda count: jnp.ones(2)), "float32", 1)


def test_micro_steps_inside_do_not_count_as_steps():
  windows = optax.MultiSteps(optax.sgd(1.0), 3).gradient_transformation()
  flags, now, state = run(optax_boost.laperm(windows, sync_every=2), "float32", 8)
  # After a synchronization params stay a permutation until the next inner step.
  assert flags == [True, True, False, False, False, True, True, True]
  assert state.count == 2
  outside = optax_boost.accumulate(optax_boost.laperm(optax.sgd(1.0), sync_every=2), every=3)
  _, other, _ = run(outside, "float32", 8)
  jax.tree.map(np.testing.assert_array_equal, now, other)
  assert np.any(np.asarray(now["kernel"]) != params()["kernel"])


def overflowing(t):
  return jax.tree.map(lambda g: np.full_like(g, np.inf) if t == 1 else g, grads(t))


def test_steps_that_are_skipped_inside_do_not_count():
  finite = optax.apply_if_finite(optax.sgd(1.0), 5)
  flags, _, state = run(optax_boost.laperm(finite, sync_every=2), "float32", 3, overflowing)
  assert flags == [False, False, True]
  assert state.count == 2


def test_refuses_a_wrapper_which_acts_on_every_step():
  tx = optax_boost.laperm(optax_boost.dynamic_loss_scale(optax.sgd(1.0)), sync_every=2)
  with pytest.raises(ValueError, match=r"`laperm` can't hold `dynamic_loss_scale`"):
    tx.init(params())

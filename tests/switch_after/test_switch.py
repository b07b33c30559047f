"""Switching from one transformation to another whose moments are warm."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost

PARAMS = {"w": jnp.array([1.0, -2.0]), "b": jnp.array(0.5)}


def gradient(params, t):
  return jax.tree.map(lambda p: p + 0.1 * t, params)


def run(tx, steps, params=PARAMS):
  state, update = tx.init(params), jax.jit(tx.update)
  for t in range(steps):
    updates, state = update(gradient(params, t), state, params)
    params = optax.apply_updates(params, updates)
  return params, state


def test_only_the_first_transformation_acts_until_the_switch():
  switched, _ = run(optax_boost.switch_after(3, optax.adam(0.1), optax.sgd(0.1, 0.9)), 3)
  expected, _ = run(optax.adam(0.1), 3)
  jax.tree.map(np.testing.assert_array_equal, switched, expected)


def test_the_second_transformation_starts_with_moments_of_all_steps():
  first, second = optax.sgd(0.1), optax.adam(0.1)
  switched, state = run(optax_boost.switch_after(2, first, second), 5)
  params, warm = PARAMS, second.init(PARAMS)
  first_state = first.init(PARAMS)
  for t in range(5):
    grads = gradient(params, t)
    updates, warm = second.update(grads, warm, params)
    if t < 2:
      updates, first_state = first.update(grads, first_state, params)
    params = optax.apply_updates(params, updates)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), switched, params)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), state.second_state, warm)


def test_the_first_transformation_is_not_computed_after_the_switch():
  calls = []

  def update(updates, state, params=None):
    jax.debug.callback(lambda: calls.append(1))
    return updates, state

  first = optax.GradientTransformation(lambda _: optax.EmptyState(), update)
  run(optax_boost.switch_after(2, first, optax.sgd(0.1)), 6)
  jax.effects_barrier()
  assert len(calls) == 2


@pytest.mark.parametrize("order", [1, -1])
def test_updates_have_the_wider_dtype_before_and_after(order):
  params = jnp.ones(2, jnp.float16)
  wide = optax.stateless(lambda updates, _: jax.tree.map(lambda g: g.astype(jnp.float32), updates))
  tx = optax_boost.switch_after(1, *[optax.sgd(0.1), wide][::order])
  state = tx.init(params)
  for _ in range(2):
    updates, state = tx.update(params, state, params)
    assert updates.dtype == jnp.float32


def test_the_step_may_be_traced():
  def last(step):
    return run(optax_boost.switch_after(step, optax.sgd(0.1), optax.sgd(0.0)), 4)[0]["b"]

  # One step each of 0.9 * p - 0.01 * t until the switch, none after.
  np.testing.assert_allclose(jax.vmap(last)(jnp.arange(3)), [0.5, 0.45, 0.395], rtol=1e-6)


@pytest.mark.parametrize("side", ["first", "second"])
@pytest.mark.parametrize(
  ("wrapper", "name"),
  [
    (optax_boost.dynamic_loss_scale, "dynamic_loss_scale"),
    (
      lambda tx: optax_boost.freeze_layers(tx, ["w", "b"], optax_boost.continuous_freezing(2, 0.5)),
      "freeze_layers",
    ),
    (lambda tx: optax_boost.accumulate(tx, 2), "accumulate"),
    (lambda tx: optax.chain(optax_boost.average_params(tx, start=0)), "average_params"),
  ],
)
def test_refuses_a_wrapper_which_acts_on_every_step(wrapper, name, side):
  pair = {"first": optax.sgd(0.1), "second": optax.sgd(0.1)}
  pair[side] = wrapper(pair[side])
  with pytest.raises(ValueError, match=rf"can't hold `{name}`.*`{name}\(switch_after\(...\), "):
    optax_boost.switch_after(2, **pair).init(PARAMS)


def test_one_of_the_two_may_be_svrg():
  """SVRG requests the full gradient, which does not change the loss of a step."""

  def loss_fn(params, batch):
    return jnp.mean((batch - params) ** 2)

  svrg = optax.chain(optax_boost.svrg(refresh_every=None), optax.sgd(0.1))
  batches = jnp.arange(6.0).reshape(3, 2)
  states = []
  for tx in (svrg, optax_boost.switch_after(2, svrg, optax.sgd(0.1))):
    step = optax_boost.make_train_step(loss_fn, tx)
    state = step.refresh(step.init(jnp.zeros([])), list(batches))
    for batch in batches[:2]:
      state, _ = step(state, batch)
    states.append(state.params)
  np.testing.assert_allclose(*states)

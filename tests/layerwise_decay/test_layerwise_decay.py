"""Layer-wise decay of the learning rate."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
from tests.freeze_layers import test_stacked_freezing as stacked

GROUPS = ["embed", "blocks/0", "blocks/1", "head"]


def make_params(dtype=jnp.float32):
  return {
    "embed": jnp.ones(2, dtype),
    "blocks": [jnp.ones(2, dtype), jnp.ones(2, dtype)],
    "head": jnp.ones(2, dtype),
  }


def rates(params, decay):
  tx = optax_boost.layerwise_decay(optax.identity(), GROUPS, decay)
  updates, _ = tx.update(params, tx.init(params), params)
  return [updates["embed"][0], *(block[0] for block in updates["blocks"]), updates["head"][0]]


def test_each_group_has_the_rate_of_the_next_one_times_the_decay():
  np.testing.assert_allclose(rates(make_params(), 0.5), [0.125, 0.25, 0.5, 1.0], rtol=1e-6)
  np.testing.assert_array_equal(rates(make_params(), 1.0), [1.0] * 4)


def test_the_decay_may_be_traced():
  factors = jax.jit(lambda decay: jnp.stack(rates(make_params(), decay)))(0.5)
  np.testing.assert_allclose(factors, [0.125, 0.25, 0.5, 1.0], rtol=1e-6)


def test_factors_of_half_precision_updates_are_computed_in_float32():
  factors = rates(make_params(jnp.bfloat16), 0.75)
  assert {factor.dtype for factor in factors} == {jnp.dtype(jnp.bfloat16)}
  np.testing.assert_array_equal(factors[0], jnp.float32(0.75**3).astype(jnp.bfloat16))


def test_the_rates_of_stacked_layers_equal_the_rates_of_unrolled_layers():
  params = stacked.make_params()
  decay = optax_boost.layerwise_decay(optax.identity(), stacked.groups_of(), 0.75)
  updates, _ = decay.update(params, decay.init(params))
  # The recipe of timm and BEiT: the embedding is layer 0, the head the last.
  np.testing.assert_allclose(
    updates["embed"], 0.75 ** (stacked.LAYERS + 1) * params["embed"], rtol=1e-6
  )
  np.testing.assert_array_equal(updates["head"], params["head"])
  names = ["embed", *(f"blocks/{i}/" for i in range(stacked.LAYERS)), "head"]
  decay = optax_boost.layerwise_decay(optax.identity(), names, 0.75)
  unrolled, _ = decay.update(stacked.unstack(params), decay.init(stacked.unstack(params)))
  chex.assert_trees_all_close(stacked.unstack(updates), unrolled, rtol=1e-6)


@pytest.mark.parametrize(
  "make",
  [
    *(optax.adamw, optax.lion, optax.rmsprop, optax.adabelief, optax.sign_sgd, optax.fromage),
    *(optax.contrib.ademamix, optax.contrib.schedule_free_adamw, optax_boost.lars, optax.sgd),
  ],
  ids=lambda factory: factory.__name__,
)
def test_the_steps_of_every_optimizer_are_multiplied(make):
  params = {"a": jnp.full((2, 2), 0.5), "b": jnp.full((2, 2), 2.0)}
  alone, tx = make(0.1), optax_boost.layerwise_decay(make(0.1), ["a", "b"], 0.25)
  alone_state, decayed_state = alone.init(params), tx.init(params)
  for _ in range(3):
    expected, alone_state = alone.update(params, alone_state, params)
    updates, decayed_state = tx.update(params, decayed_state, params)
    assert np.any(expected["a"])
    np.testing.assert_array_equal(updates["a"], 0.25 * expected["a"])
    np.testing.assert_array_equal(updates["b"], expected["b"])


@pytest.mark.parametrize(
  "inner", [optax_boost.sgperm(method="rank"), optax_boost.laperm(optax.sgd(0.1), 2)]
)
def test_an_optimizer_that_permutes_the_params_is_refused(inner):
  params = {"a": jnp.arange(16.0).reshape(4, 4), "b": jnp.arange(16.0).reshape(4, 4)}
  with pytest.raises(ValueError, match=r"of an optimizer that permutes params.*Leave"):
    optax_boost.layerwise_decay(inner, ["a", "b"]).init(params)


@pytest.mark.parametrize("half", [False, True])
def test_transformations_inside_that_follow_the_params_see_decayed_params(half):
  """Computes in NumPy the float32 masters of params whose rates are 0.125, 0.25, 0.5 and 1."""
  dtype = jnp.bfloat16 if half else jnp.float32
  inner = optax_boost.average_params(optax_boost.master_weights(optax.sgd(2.0**-6)), start=0)
  tx = optax_boost.layerwise_decay(inner, GROUPS, 0.5)
  params = make_params(dtype)
  state = tx.init(params)
  # In float32 steps are exact; bfloat16 would round the first groups' steps to zero.
  expected = {"embed": 1.0, "head": 1.0}
  rounded, sums = dict(expected), {"embed": 0.0, "head": 0.0}
  for _ in range(6):
    params, state = optax_boost.apply_gradients(tx, make_params(dtype), state, params)
    for name, rate in (("embed", 2.0**-9), ("head", 2.0**-6)):
      expected[name] -= rate
      rounded[name] = float(jnp.asarray(expected[name], dtype))
      sums[name] += rounded[name]
  average = optax_boost.averaged_params(state, params)
  for name, value in expected.items():
    masters = optax.tree.get(state, "master_params")[name]
    np.testing.assert_array_equal(masters, np.full(2, value, np.float32))
    np.testing.assert_array_equal(np.asarray(params[name], np.float32), rounded[name])
    np.testing.assert_allclose(np.asarray(average[name], np.float32), sums[name] / 6, rtol=2e-3)

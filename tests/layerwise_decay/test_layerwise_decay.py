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
  tx = optax_boost.layerwise_decay(GROUPS, decay)
  updates, _ = tx.update(params, tx.init(params), params)
  return [updates["embed"][0], *(block[0] for block in updates["blocks"]), updates["head"][0]]


def test_each_group_has_the_rate_of_the_next_one_times_the_decay():
  np.testing.assert_allclose(rates(make_params(), 0.5), [0.125, 0.25, 0.5, 1.0], rtol=1e-6)
  np.testing.assert_array_equal(rates(make_params(), 1.0), [1.0] * 4)


def test_the_decay_may_be_traced():
  found = jax.jit(lambda decay: jnp.stack(rates(make_params(), decay)))(0.5)
  np.testing.assert_allclose(found, [0.125, 0.25, 0.5, 1.0], rtol=1e-6)


def test_factors_of_half_precision_updates_are_computed_in_float32():
  found = rates(make_params(jnp.bfloat16), 0.75)
  assert {rate.dtype for rate in found} == {jnp.dtype(jnp.bfloat16)}
  np.testing.assert_array_equal(found[0], jnp.float32(0.75**3).astype(jnp.bfloat16))


def test_the_rates_of_stacked_layers_equal_the_rates_of_unrolled_layers():
  params = stacked.make_params()
  decay = optax_boost.layerwise_decay(stacked.groups_of(), 0.75)
  updates, _ = decay.update(params, decay.init(params))
  # The recipe of timm and BEiT: the embedding is layer 0, the head the last.
  np.testing.assert_allclose(
    updates["embed"], 0.75 ** (stacked.LAYERS + 1) * params["embed"], rtol=1e-6
  )
  np.testing.assert_array_equal(updates["head"], params["head"])
  names = ["embed", *(f"blocks/{i}/" for i in range(stacked.LAYERS)), "head"]
  decay = optax_boost.layerwise_decay(names, 0.75)
  unrolled, _ = decay.update(stacked.unstack(params), decay.init(stacked.unstack(params)))
  chex.assert_trees_all_close(stacked.unstack(updates), unrolled, rtol=1e-6)


@pytest.mark.parametrize(
  "optimizer",
  [optax.adamw, optax.lion, optax.rmsprop, optax.adabelief, optax_boost.lars],
  ids=lambda factory: factory.__name__,
)
def test_layerwise_decay_before_a_normalizing_optimizer_is_refused(optimizer):
  params = {"a": jnp.ones(2), "b": jnp.ones(2)}
  decay = optax_boost.layerwise_decay(["a", "b"])
  for first in (decay, optax.chain(optax.clip(1.0), decay)):
    tx = optax.chain(first, optimizer(0.1))
    with pytest.raises(ValueError, match=r"`layerwise_decay` must come after .* `optax.chain\(opt"):
      optax_boost.apply_gradients(tx, params, tx.init(params), params)
  for tx in (optax.chain(optimizer(0.1), decay), optax.chain(decay, optax.sgd(0.1, 0.9))):
    optax_boost.apply_gradients(tx, params, tx.init(params), params)


def test_layerwise_decay_before_sgperm_is_refused():
  params = {"a": jnp.ones((4, 4)), "b": jnp.ones((4, 4))}
  tx = optax.chain(optax_boost.layerwise_decay(["a", "b"]), optax_boost.sgperm(method="rank"))
  with pytest.raises(ValueError, match=r"with a SgpermState, .* the factors away. Leave it out"):
    optax_boost.apply_gradients(tx, params, tx.init(params), params)

"""Masks by regular expressions over the paths of leaves."""

import jax.numpy as jnp
import optax
import pytest

import optax_boost

PARAMS = {"block": [{"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}, {"scale": jnp.ones(3)}]}


def test_path_mask_selects_by_regular_expression_inside_optax_masked():
  tx = optax.masked(optax.scale(0.0), optax_boost.path_mask("kernel$", "scale$"))
  updates, _ = tx.update(PARAMS, tx.init(PARAMS))
  assert not jnp.any(updates["block"][0]["kernel"])
  assert not jnp.any(updates["block"][1]["scale"])
  assert jnp.all(updates["block"][0]["bias"] == 1)


def test_path_mask_warns_of_a_pattern_that_matches_nothing():
  with pytest.warns(optax_boost.NoEffectWarning, match=r"\['gamma'\]. The leaves are: block/0/b"):
    optax_boost.path_mask("kernel", "gamma")(PARAMS)


def test_path_mask_accepts_only_patterns():
  with pytest.raises(TypeError, match=r"must hold regular expressions.*; got 3"):
    optax_boost.path_mask(3)

"""The state of other params is named as the cause of a failure, and of no other failure."""

from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import optax
import pytest

import optax_boost
import optax_boost.nnx

PARAMS = {"a": jnp.ones(3), "b": jnp.ones(2)}
OTHERS = {"a": jnp.ones(3)}


def test_without_params_the_gradients_tell_what_the_state_must_be_of():
  tx = optax_boost.accumulate(optax.sgd(0.1), 2)
  message = (
    r"`accumulate` needs the state that `tx.init` made of params of the gradients' shapes; got"
    r" another one: it has a leaf 'accumulator/b' too many. Make it with"
  )
  with pytest.raises(ValueError, match=message):
    tx.update(OTHERS, tx.init(PARAMS))


def test_gradients_of_others_are_blamed_even_if_the_state_is_of_others_too():
  tx = optax_boost.accumulate(optax.sgd(0.1), 2)
  with pytest.raises(ValueError, match=r"got gradients that lack \['b'\]. Pass the params that"):
    tx.update(OTHERS, tx.init(OTHERS), PARAMS)


def test_a_state_of_another_optimizer_is_named_by_what_it_lacks():
  grads = jax.tree.map(jnp.ones_like, PARAMS)
  state = optax.sgd(0.1, momentum=0.9).init(PARAMS)
  message = r"`apply_gradients` needs the state .* got another one: it lacks the leaf '0/count'"
  with pytest.raises(ValueError, match=message):
    optax_boost.apply_gradients(optax.adam(0.1), grads, state, PARAMS)


@pytest.mark.parametrize("around", [optax_boost.accumulate, optax_boost.average_params])
def test_an_error_of_a_step_with_its_own_state_arrives_unchanged(around):
  def update(updates: Any, state: Any, params: Any = None) -> Any:
    raise ValueError("out of luck")

  inner = optax.GradientTransformation(optax.sgd(0.1).init, update)
  tx = around(inner, **({"every": 1} if around is optax_boost.accumulate else {"start": 0}))
  with pytest.raises(ValueError, match=r"^out of luck"):
    optax_boost.apply_gradients(tx, PARAMS, tx.init(PARAMS), PARAMS)


def test_a_state_whose_arrays_grow_of_scalars_is_not_refused():
  def update(updates: Any, state: Any, params: Any = None) -> Any:
    return updates, jnp.ones(3)

  inner = optax.GradientTransformation(lambda params: jnp.zeros([]), update)
  grads, state = PARAMS, inner.init(PARAMS)
  for _ in range(2):
    params, state = optax_boost.apply_gradients(inner, grads, state, PARAMS)
  assert params["a"][0] == 2


def test_the_optimizer_of_another_nnx_model_is_refused_in_a_loop_of_ones_own():
  model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
  other = nnx.Linear(2, 5, rngs=nnx.Rngs(0))
  tx = optax_boost.dynamic_loss_scale(optax.adam(0.1))
  optimizer = nnx.Optimizer(other, tx, wrt=nnx.Param)
  message = r"`dynamic_loss_scale` needs the state .* its leaf 'inner_state/0/mu/bias' must have"
  with pytest.raises(ValueError, match=message):
    optimizer.update(model, nnx.state(model, nnx.Param))

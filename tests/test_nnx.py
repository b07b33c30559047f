"""The train step on a Flax NNX model with BatchNorm, dropout and aux."""

import itertools

import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
import optax_boost.nnx as ob_nnx
from tests.test_train_step import BATCH
from tests.test_train_step import CLOSURE_USERS


class Network(nnx.Module):
  def __init__(self, rngs):
    self.hidden = nnx.Linear(8, 16, rngs=rngs)
    self.norm = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
    self.dropout = nnx.Dropout(0.1, rngs=rngs)
    self.out = nnx.Linear(16, 1, rngs=rngs)

  def __call__(self, x):
    return self.out(self.dropout(nnx.relu(self.norm(self.hidden(x)))))[:, 0]


def loss_fn(model, batch):
  prediction = model(batch["x"])
  return jnp.mean((prediction - batch["y"]) ** 2), {"prediction": prediction}


def make(tx):
  model = Network(nnx.Rngs(0))
  return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def pure(model):
  return jax.tree.map(jnp.array, nnx.to_pure_dict(nnx.state(model, (nnx.Param, nnx.BatchStat))))


@pytest.mark.parametrize("name", CLOSURE_USERS)
def test_trains_with_methods_that_need_closures(name):
  traces = itertools.count()

  def counted(model, batch):
    next(traces)
    return loss_fn(model, batch)

  model, optimizer = make(CLOSURE_USERS[name]())
  step = ob_nnx.make_train_step(counted, has_aux=True)
  losses = []
  for t in range(5):
    twin = Network(nnx.Rngs(0))
    nnx.update(twin, jax.tree.map(jnp.array, nnx.state(model)))
    loss, aux = loss_fn(twin, BATCH)
    metrics = step(model, optimizer, BATCH)
    losses.append(metrics["loss"])
    if t == 0:
      seen = next(traces)
    # The twin's forward pass at the same params, statistics and rng counts is the only one that
    # may have left a mark.
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(
      metrics["aux"]["prediction"], aux["prediction"], rtol=1e-4, atol=1e-5
    )
    chex.assert_trees_all_close(
      nnx.to_pure_dict(nnx.state(model, nnx.BatchStat)),
      nnx.to_pure_dict(nnx.state(twin, nnx.BatchStat)),
      rtol=1e-5,
      atol=1e-6,
    )
    assert model.dropout.rngs.count[...] == t + 1
  assert losses[-1] < losses[0]
  assert optimizer.step[...] == 5
  assert next(traces) == seen + 1, "the loss was traced again after the first step"


def test_equals_the_loop_that_flax_documents():
  model, optimizer = make(optax.sgd(0.1, momentum=0.9))
  twin, twin_optimizer = make(optax.sgd(0.1, momentum=0.9))
  step = ob_nnx.make_train_step(loss_fn, has_aux=True)
  for _ in range(3):
    step(model, optimizer, BATCH)
    grads = nnx.grad(loss_fn, has_aux=True)(twin, BATCH)[0]
    twin_optimizer.update(twin, grads)
  chex.assert_trees_all_close(pure(model), pure(twin), rtol=1e-4, atol=1e-5)


def test_old_arrays_are_donated():
  model, optimizer = make(optax.adam(1e-2))
  old = jax.tree.leaves(nnx.state(model, nnx.Param)) + jax.tree.leaves(
    nnx.state(optimizer, nnx.optimizer.OptState)
  )
  ob_nnx.make_train_step(loss_fn, has_aux=True)(model, optimizer, BATCH)
  assert all(x.is_deleted() for x in old)


def test_a_state_that_holds_the_params_can_be_donated():
  model, optimizer = make(optax.contrib.schedule_free_sgd(0.1))
  step = ob_nnx.make_train_step(loss_fn, has_aux=True)
  first = step(model, optimizer, BATCH)["loss"]
  for _ in range(5):
    last = step(model, optimizer, BATCH)["loss"]
  assert last < first


def test_switching_to_evaluation_and_back_is_seen():
  model, optimizer = make(optax.sgd(0.0))
  step = ob_nnx.make_train_step(loss_fn, has_aux=True)
  model.eval()
  still = [step(model, optimizer, BATCH)["loss"] for _ in range(2)]
  assert still[0] == still[1]
  assert not jnp.any(model.norm.mean[...])
  model.train()
  step(model, optimizer, BATCH)
  assert jnp.any(model.norm.mean[...])


def test_paths_of_an_nnx_model_read_like_its_attributes():
  model, optimizer = make(
    optax.chain(optax_boost.centralize(exclude="^out/"), optax_boost.lars(0.1, 1e-4))
  )
  step = ob_nnx.make_train_step(loss_fn, has_aux=True)
  metrics = step(model, optimizer, BATCH)
  ratios = optax_boost.trust_ratio_tree(optimizer.opt_state, nnx.state(model, nnx.Param))
  np.testing.assert_array_equal(metrics["trust_ratio"], jax.tree.leaves(ratios))
  ratios = nnx.to_pure_dict(ratios)
  assert ratios["norm"]["scale"] == ratios["hidden"]["bias"] == 1
  assert ratios["hidden"]["kernel"] < 0.1


def test_only_what_the_optimizer_is_told_is_trained():
  class Head(nnx.Param):
    pass

  model = Network(nnx.Rngs(0))
  model.out.kernel = Head(model.out.kernel[...])
  optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=Head)
  before = pure(model)
  head = jnp.array(model.out.kernel[...])
  ob_nnx.make_train_step(loss_fn, has_aux=True)(model, optimizer, BATCH)
  np.testing.assert_array_equal(pure(model)["hidden"]["kernel"], before["hidden"]["kernel"])
  assert not np.array_equal(model.out.kernel[...], head)


def test_refuses_a_loss_without_the_aux_it_promised():
  model, optimizer = make(optax.sgd(0.1))
  step = ob_nnx.make_train_step(lambda m, b: loss_fn(m, b)[0], has_aux=True)
  with pytest.raises(TypeError, match=r"must return \(loss, aux\)"):
    step(model, optimizer, BATCH)
  with pytest.raises(TypeError, match=r"pass has_aux=True"):
    ob_nnx.make_train_step(loss_fn)(model, optimizer, BATCH)
  with pytest.raises(TypeError, match=r"`loss_fn` must be callable; got 3"):
    ob_nnx.make_train_step(3)


def test_scales_gradients_by_group_through_dropout_and_statistics():
  plain, scaled = optax.sgd(0.1), optax_boost.group_loss_scale(optax.sgd(0.1), ["hidden", "out"], 8)
  step = ob_nnx.make_train_step(loss_fn, has_aux=True)
  models = []
  for tx in (plain, scaled):
    model, optimizer = make(tx)
    for _ in range(3):
      metrics = step(model, optimizer, BATCH)
    models.append(pure(model))
  chex.assert_trees_all_close(*models, rtol=1e-5, atol=1e-6)
  assert metrics["group_loss_scale"].shape == (2,)

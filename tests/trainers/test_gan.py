"""Two NNX models that train each other, against the loop that Flax documents."""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
import optax_boost.nnx
from tests import compilations

STEPS = 5


class Generator(nnx.Module):
  def __init__(self, rngs):
    self.hidden = nnx.Linear(3, 8, use_bias=False, rngs=rngs)
    self.norm = nnx.BatchNorm(8, rngs=rngs)
    self.out = nnx.Linear(8, 2, rngs=rngs)

  def __call__(self, z):
    return self.out(jnp.tanh(self.norm(self.hidden(z))))


class Critic(nnx.Module):
  def __init__(self, rngs):
    self.hidden = nnx.Linear(2, 8, rngs=rngs)
    self.out = nnx.Linear(8, 1, rngs=rngs)

  def __call__(self, x):
    return self.out(jnp.tanh(self.hidden(x)))[:, 0]


def critic_loss(critic, batch):
  fake = batch["generator"](batch["z"])
  return jnp.mean(nnx.softplus(-critic(batch["x"]))) + jnp.mean(nnx.softplus(critic(fake)))


def generator_loss(generator, batch):
  return jnp.mean(nnx.softplus(-batch["critic"](generator(batch["z"]))))


def batches():
  rng = np.random.default_rng(7)
  for _ in range(STEPS):
    yield np.float32(rng.normal(2, 1, (16, 2))), np.float32(rng.normal(size=(16, 3)))


@nnx.jit
def new_models():
  return Generator(nnx.Rngs(0)), Critic(nnx.Rngs(1))


def train(make_step, tx):
  """Alternates the two steps: the losses, the params, and the programs compiled late."""
  generator, critic = new_models()
  optimizers = [nnx.Optimizer(model, tx, wrt=nnx.Param) for model in (generator, critic)]
  steps = [compilations.Watched(make_step(loss)) for loss in (generator_loss, critic_loss)]
  losses = []
  for x, z in batches():
    generator.eval()
    losses.append(steps[1](critic, optimizers[1], {"x": x, "z": z, "generator": generator}))
    generator.train()
    losses.append(steps[0](generator, optimizers[0], {"z": z, "critic": critic}))
  states = [nnx.to_pure_dict(nnx.state(m, (nnx.Param, nnx.BatchStat))) for m in (generator, critic)]
  return [float(x) for x in losses], states, sum(sum(step.counts[1:]) for step in steps)


def ours(loss):
  step = optax_boost.nnx.make_train_step(loss)
  return lambda *args: step(*args)["loss"]


def by_hand(loss):
  @nnx.jit
  def step(model, optimizer, batch):
    value, grads = nnx.value_and_grad(loss)(model, batch)
    optimizer.update(model, grads)
    return value

  return step


PAIRS = {
  "sgd": (optax.sgd(0.1, momentum=0.9),) * 2,
  "accumulate": (
    optax_boost.accumulate(optax.adam(1e-2, eps=1e-3), 2),
    optax.MultiSteps(optax.adam(1e-2, eps=1e-3), 2).gradient_transformation(),
  ),
  "average_params": (
    optax_boost.average_params(optax.sgd(0.1), decay=0.5),
    optax.sgd(0.1),
  ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_two_models_train_each_other_as_in_flaxs_documented_loop(name):
  boosted, plain = PAIRS[name]
  losses, states, late = train(ours, boosted)
  expected, expected_states, _ = train(by_hand, plain)
  assert late == 0
  np.testing.assert_allclose(losses, expected, rtol=1e-4)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), states, expected_states
  )

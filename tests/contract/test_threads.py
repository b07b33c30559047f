"""One train step serves several trajectories, in turns or in two threads, as if each were alone."""

import concurrent.futures
import functools
import time

import chex
from flax import nnx
import jax
import jax.numpy as jnp
import optax
import pytest

import optax_boost
import optax_boost.nnx as ob_nnx

X = jax.random.normal(jax.random.key(0), (4, 3))
STEPS = 8
LAYERS = ("a", "b", "c")


@jax.tree_util.register_pytree_node_class
class SlowBatch:
  """A batch that lets the other thread run while the train step is called with it."""

  def __init__(self, x):
    self.x = x

  def tree_flatten(self):
    time.sleep(1e-3)
    return (self.x,), None

  @classmethod
  def tree_unflatten(cls, _, leaves):
    return cls(*leaves)


class NnxNet(nnx.Module):
  def __init__(self, rngs):
    self.a, self.b, self.c = (nnx.Linear(3, 3, rngs=rngs) for _ in LAYERS)
    self.dropout = nnx.Dropout(0.2, rngs=rngs)

  def __call__(self, x):
    return self.c(jnp.tanh(self.b(self.dropout(jnp.tanh(self.a(x))))))


def model_loss(model, batch):
  return jnp.mean((model(batch.x) - batch.x) ** 2)


def plain_loss(params, batch):
  x = batch.x
  for name in LAYERS:
    x = jnp.tanh(x @ params[name])
  return jnp.mean((x - batch.x) ** 2)


class Plain:
  """A trajectory of the plain train step."""

  @staticmethod
  def make_step(tx):
    return optax_boost.make_train_step(plain_loss, tx)

  def __init__(self, step, seed):
    keys = jax.random.split(jax.random.key(seed), len(LAYERS))
    params = {n: jax.random.normal(k, (3, 3)) for n, k in zip(LAYERS, keys, strict=True)}
    self.step, self.state = step, step.init(params)

  def advance(self):
    self.state, metrics = self.step(self.state, SlowBatch(X))
    return metrics

  def result(self):
    return self.state


class Nnx:
  """A trajectory of the NNX train step."""

  @staticmethod
  def make_step(tx):
    step = ob_nnx.make_train_step(model_loss)
    step.tx = tx
    return step

  def __init__(self, step, seed):
    self.step, self.model = step, NnxNet(nnx.Rngs(seed))
    self.optimizer = nnx.Optimizer(self.model, step.tx, wrt=nnx.Param)

  def advance(self):
    return self.step(self.model, self.optimizer, SlowBatch(X))

  def result(self):
    states = nnx.state(self.model, nnx.Not(nnx.RngKey)), nnx.state(self.optimizer)
    return [nnx.to_pure_dict(state) for state in states]


FORMS = {"plain": Plain, "nnx": Nnx}


@functools.cache
def make_step(form, frozen):
  tx = optax.adam(1e-2)
  if frozen:
    tx = optax_boost.freeze_layers(tx, LAYERS, optax_boost.continuous_freezing(len(LAYERS), 0.6))
  return FORMS[form].make_step(tx)


def begin(form, frozen):
  """Two trajectories of one step, each with its initial values and its place in the schedule."""
  trajectories = [FORMS[form](make_step(form, frozen), seed) for seed in (0, 1)]
  trajectories[1].advance()
  return trajectories


def train(trajectory):
  history = [trajectory.advance() for _ in range(STEPS)]
  return jax.device_get((history, trajectory.result()))


def in_turns(trajectories):
  histories = zip(*[[t.advance() for t in trajectories] for _ in range(STEPS)], strict=True)
  results = [t.result() for t in trajectories]
  return jax.device_get(list(zip(map(list, histories), results, strict=True)))


def in_threads(trajectories):
  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    return list(pool.map(train, trajectories))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "all trained"])
def test_two_interleaved_runs_of_one_step_equal_separate_runs(form, frozen):
  alone = [train(trajectory) for trajectory in begin(form, frozen)]
  for together in (in_turns, in_threads):
    chex.assert_trees_all_equal(together(begin(form, frozen)), alone)

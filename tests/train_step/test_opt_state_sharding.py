"""The optimizer's state is spread over devices that hold the whole params (ZeRO-1)."""

import functools
import re

from flax import linen as nn, nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
import optax_boost.linen
import optax_boost.nnx
from tests import compilations, meshes

X = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)


def everything(tx):
  """Masters, accumulators and averages, which the state has, too."""
  scaled = optax_boost.dynamic_loss_scale(optax_boost.accumulate(tx, 2))
  return optax_boost.average_params(optax_boost.master_weights(scaled), decay=0.9)


OPTIMIZERS = {
  "adamw": optax.adamw(1e-2),
  "everything": everything(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))),
}


class Linen(nn.Module):
  dtype: jnp.dtype

  @nn.compact
  def __call__(self, x):
    x = nn.Dense(32, use_bias=False, param_dtype=self.dtype)(x)
    x = nn.BatchNorm(use_running_average=False, use_scale=False, use_bias=False)(x)
    return nn.Dense(1, param_dtype=self.dtype)(nn.relu(x))


class Nnx(nnx.Module):
  def __init__(self, dtype):
    make = functools.partial(nnx.Linear, param_dtype=dtype, rngs=nnx.Rngs(0))
    self.hidden, self.head = make(16, 32, use_bias=False), make(32, 1)
    self.norm = nnx.BatchNorm(32, use_scale=False, use_bias=False, rngs=nnx.Rngs(0))

  def __call__(self, x):
    return self.head(nnx.relu(self.norm(self.hidden(x))))


def loss_fn(model, batch):
  return jnp.mean((model(batch) - 1) ** 2)


def by_init(tx, dtype, shard):
  """A Linen training: its step, as a function of a batch, its program, and its state."""
  module = Linen(dtype)
  variables = module.init(jax.random.key(0), X)
  loss, params, model_state = optax_boost.linen.split_loss(loss_fn, module, variables)
  step = optax_boost.make_train_step(loss, tx)
  state = step.init(params, model_state, opt_state_sharding=shard)

  def call(batch):
    nonlocal state
    state, _ = step(state, batch)

  return call, lambda batch: step.lower(state, batch), lambda: (state.params, state.opt_state)


def by_optimizer(tx, dtype, shard):
  """The same with NNX."""
  model = Nnx(dtype)
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  if shard:
    optimizer = optax_boost.nnx.make_optimizer(model, tx, opt_state_sharding=shard)
  step = optax_boost.nnx.make_train_step(loss_fn)
  return (
    lambda batch: step(model, optimizer, batch),
    lambda batch: step.lower(model, optimizer, batch),
    lambda: (nnx.state(model, nnx.Param), nnx.state(optimizer.opt_state)),
  )


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("door", [by_init, by_optimizer])
def test_params_are_gathered_once_and_trained_as_on_one_device(door, name):
  mesh = meshes.mesh((8,), ("data",))
  sharding = functools.partial(jax.sharding.NamedSharding, mesh)

  def shard(x):
    """Spreads the first axis that the devices divide."""
    specs = (jax.P(*i * [None], "data") for i, n in enumerate(x.shape) if n % mesh.size == 0)
    return sharding(next(specs, jax.P()))

  dtype = jnp.bfloat16 if name == "everything" else jnp.float32
  batch = jax.device_put(X, sharding(jax.P("data")))
  train, lower, trees = door(OPTIMIZERS[name], dtype, shard)
  train_alone, _, trees_alone = door(OPTIMIZERS[name], dtype, None)
  train = compilations.Watched(train)
  for _ in range(4):
    train(batch)
    train_alone(X)
  assert train.compiled_once()
  program = lower(batch).compile().as_text()
  gathered = re.findall(r"= \w+\[([\d,]*)\]\S* all-gather(?:-start)?\(", program)
  kernels = [x.shape for x in jax.tree.leaves(trees()[0]) if x.ndim == 2]
  assert sorted(gathered) == sorted(",".join(map(str, shape)) for shape in kernels)
  assert re.search(r" (all-reduce|reduce-scatter)(-start)?\(", program)
  params, opt_state = map(jax.tree.leaves, trees())
  assert all(x.is_fully_replicated for x in params)
  assert all(x.sharding.is_equivalent_to(shard(x), x.ndim) for x in opt_state)
  on_one = sum(x.addressable_shards[0].data.nbytes for x in opt_state)
  assert on_one < sum(x.nbytes for x in opt_state) / mesh.size + 100
  for x, y in zip(params, jax.tree.leaves(trees_alone()[0]), strict=True):
    np.testing.assert_allclose(
      x.astype(jnp.float32), y.astype(jnp.float32), atol=2e-2 if x.dtype == jnp.bfloat16 else 1e-5
    )


def test_params_stay_whole_on_explicit_axes():
  """There the type of an update, which is spread as the moments are, would become the params'."""
  mesh = meshes.mesh((8,), ("data",), "Explicit")
  sharding = functools.partial(jax.sharding.NamedSharding, mesh)
  tx = optax_boost.average_params(optax.adam(0.1), decay=0.9)
  step = optax_boost.make_train_step(lambda w, x: jnp.mean((x @ w - 1) ** 2), tx)
  state = step.init(
    jax.device_put(jnp.ones((16, 1)), sharding(jax.P())),
    opt_state_sharding=lambda x: sharding(jax.P("data") if x.ndim else jax.P()),
  )
  step = compilations.Watched(step)
  for _ in range(2):
    state, _ = step(state, jax.device_put(X, sharding(jax.P("data"))))
    assert state.params.is_fully_replicated
    assert not any(x.is_fully_replicated for x in jax.tree.leaves(state.opt_state) if x.ndim)
  assert step.compiled_once()

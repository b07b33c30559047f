"""Loops in the form of Flax's published examples, small."""

import functools
from typing import Any

from flax import linen as nn, nnx
from flax.training import train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
from optax_boost.nnx import _model
from tests import meshes
from tests.trainers import methods

KEY = jax.random.key(0)
List = getattr(nnx, "List", list)  # flax before 0.12 takes plain containers
RNG = np.random.default_rng(0)
IMAGES = RNG.normal(size=(16, 8, 8, 1)).astype(np.float32)
LABELS = np.arange(16, dtype=np.int32) % 4
TOKENS = RNG.integers(1, 11, (4, 9), np.int32)


def cross_entropy(logits, labels):
  return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@functools.partial(nnx.jit, static_argnums=0)
def new_model(kind):
  return kind(nnx.Rngs(0))


class CNN(nnx.Module):
  def __init__(self, rngs):
    self.conv = nnx.Conv(1, 4, (3, 3), rngs=rngs)
    self.norm = nnx.BatchNorm(4, rngs=rngs)
    self.dropout = nnx.Dropout(0.1)
    self.linear = nnx.Linear(64, 4, rngs=rngs)

  def __call__(self, x, rngs):
    x = nnx.avg_pool(nnx.relu(self.norm(self.conv(x))), (2, 2), (2, 2))
    return self.linear(self.dropout(x.reshape(len(x), -1), rngs=rngs))


def mnist_nnx(tx):
  model, rngs = new_model(CNN), nnx.Rngs(1)
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
  initial = methods.host(nnx.to_pure_dict(nnx.state(model, nnx.Param)))

  @nnx.jit
  def step(model, optimizer, metrics, rngs):
    def loss_fn(model, rngs):
      logits = model(IMAGES, rngs)
      return cross_entropy(logits, LABELS), logits

    (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, rngs)
    metrics.update(loss=loss, logits=logits, labels=LABELS)
    optimizer.update(model, grads)
    return loss

  model.train()

  def run(_):
    return (None, step(model, optimizer, metrics, rngs))

  _, losses, late = methods.loop(run, None)
  final = nnx.to_pure_dict(nnx.state(model, nnx.Param))
  return methods.Trained(initial, final, _model.as_pure(optimizer.opt_state), losses, late)


class LinenCNN(nn.Module):
  @nn.compact
  def __call__(self, x):
    x = nn.avg_pool(nn.relu(nn.Conv(4, (3, 3))(x)), (2, 2), (2, 2))
    return nn.Dense(4)(x.reshape(len(x), -1))


def mnist_linen(tx):
  module = LinenCNN()
  params = methods.init(module, KEY, IMAGES)["params"]
  state = train_state.TrainState.create(apply_fn=module.apply, params=params, tx=tx)

  @jax.jit
  def apply_model(state, images, labels):
    def loss_fn(params):
      return cross_entropy(state.apply_fn({"params": params}, images), labels)

    return jax.value_and_grad(loss_fn)(state.params)

  @jax.jit
  def update_model(state, grads):
    return state.apply_gradients(grads=grads)

  def step(state):
    loss, grads = apply_model(state, IMAGES, LABELS)
    return update_model(state, grads), loss

  state, losses, late = methods.loop(step, state)
  return methods.Trained(params, state.params, state.opt_state, losses, late)


class ResNet(nn.Module):
  @nn.compact
  def __call__(self, x):
    norm = functools.partial(nn.BatchNorm, use_running_average=False, axis_name="batch")
    x = nn.relu(norm(name="norm_init")(nn.Conv(4, (3, 3), use_bias=False, name="conv_init")(x)))
    y = nn.relu(norm()(nn.Conv(4, (3, 3), use_bias=False)(x)))
    return nn.Dense(4)(jnp.mean(x + y, (1, 2)))


class StatefulTrainState(train_state.TrainState):
  batch_stats: Any


def imagenet(tx):
  module, devices = ResNet(), meshes.devices(2)
  init = functools.partial(methods.init, module)
  init = jax.vmap(init, (None, 0), axis_name="batch", out_axes=None)
  variables = init(KEY, IMAGES[None])
  params = variables["params"]
  state = StatefulTrainState.create(
    apply_fn=module.apply, params=params, tx=tx, batch_stats=variables["batch_stats"]
  )

  def step(state, images, labels):
    def loss_fn(params):
      variables = {"params": params, "batch_stats": state.batch_stats}
      logits, moved = state.apply_fn(variables, images, mutable=["batch_stats"])
      decay = sum(jnp.sum(x**2) for x in jax.tree.leaves(params) if x.ndim > 1)
      return cross_entropy(logits, labels) + 5e-5 * decay, moved

    (loss, moved), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    grads, stats = jax.lax.pmean((grads, moved["batch_stats"]), "batch")
    return state.apply_gradients(grads=grads, batch_stats=stats), jax.lax.pmean(loss, "batch")

  p_step = jax.pmap(step, "batch", in_axes=(None, 0, 0), out_axes=(None, 0), devices=devices)
  shards = IMAGES.reshape(2, 8, 8, 8, 1), LABELS.reshape(2, 8)
  state, losses, late = methods.loop(lambda state: p_step(state, *shards), state)
  return methods.Trained(params, state.params, state.opt_state, losses, late)


class TransformerLM(nn.Module):
  dropout: float = 0.1

  @nn.compact
  def __call__(self, tokens):
    boxed = nn.with_logical_partitioning(nn.initializers.xavier_uniform(), ("embed", "mlp"))
    x = nn.Embed(11, 8, name="embedding")(tokens)
    y = nn.LayerNorm(use_bias=False)(x)
    x = x + nn.MultiHeadAttention(2, use_bias=False)(y, mask=nn.make_causal_mask(tokens))
    x = x + nn.Dense(8, kernel_init=boxed)(nn.relu(nn.Dense(16, kernel_init=boxed)(x)))
    x = nn.Dropout(self.dropout, deterministic=False)(x)
    return nn.Dense(11, name="logits")(nn.LayerNorm()(x))


def lm1b(tx):
  """The state is made in jit, from params in boxes of logical axes, and unboxed for training."""
  module, mesh = TransformerLM(), methods.mesh()

  def init(key):
    variables = module.init({"params": key, "dropout": key}, TOKENS)
    return train_state.TrainState.create(apply_fn=module.apply, params=variables["params"], tx=tx)

  specs = nn.get_partition_spec(jax.eval_shape(init, KEY))
  places = nn.logical_to_mesh_sharding(specs, mesh, (("embed", "fsdp"), ("mlp", None)))
  state = jax.jit(init, out_shardings=places)(KEY)

  def is_box(x):
    return isinstance(x, nn.spmd.LogicallyPartitioned)

  state = jax.tree.map(lambda x: x.unbox() if is_box(x) else x, state, is_leaf=is_box)
  initial = methods.host(state.params)

  @functools.partial(jax.jit, donate_argnums=0, out_shardings=(places, None))
  def step(state, batch):
    key = jax.random.fold_in(KEY, state.step)

    def loss_fn(params):
      logits = state.apply_fn({"params": params}, batch[:, :-1], rngs={"dropout": key})
      return cross_entropy(logits, batch[:, 1:])

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss

  batch = jax.device_put(TOKENS, jax.NamedSharding(mesh, jax.P("data")))
  state, losses, late = methods.loop(lambda state: step(state, batch), state)
  return methods.Trained(initial, state.params, state.opt_state, losses, late)


class Block(nnx.Module):
  def __init__(self, rngs):
    self.norm = nnx.RMSNorm(8, rngs=rngs)
    self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
    self.gate = nnx.Linear(8, 16, use_bias=False, rngs=rngs)
    self.up = nnx.Linear(8, 16, use_bias=False, rngs=rngs)
    self.down = nnx.Linear(16, 8, use_bias=False, rngs=rngs)

  def __call__(self, x):
    x = x + self.attention(self.norm(x), mask=nnx.make_causal_mask(x[..., 0]))
    return x + self.down(nnx.gelu(self.gate(x)) * self.up(x))


class Gemma(nnx.Module):
  def __init__(self, rngs):
    self.embedder = nnx.Embed(11, 8, rngs=rngs)
    self.layers = List([Block(rngs) for _ in range(2)])
    self.final_norm = nnx.RMSNorm(8, rngs=rngs)

  def __call__(self, tokens):
    x = self.embedder(tokens)
    for layer in self.layers:
      x = layer(x)
    return self.embedder.attend(self.final_norm(x))


def gemma(tx):
  """The model is taken apart for the gradient, and put together inside the loss."""
  model = new_model(Gemma)
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  initial = methods.host(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
  structure, state = nnx.split((model, optimizer))

  @functools.partial(jax.jit, donate_argnums=0)
  def step(state):
    model, optimizer = nnx.merge(structure, state)
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss_fn(params):
      return cross_entropy(nnx.merge(graph, params, rest)(TOKENS[:, :-1]), TOKENS[:, 1:])

    loss, grads = jax.value_and_grad(loss_fn)(params)
    optimizer.update(model, grads)
    return nnx.state((model, optimizer)), loss

  state, losses, late = methods.loop(step, state)
  nnx.update((model, optimizer), state)
  final = nnx.to_pure_dict(nnx.state(model, nnx.Param))
  return methods.Trained(initial, final, _model.as_pure(optimizer.opt_state), losses, late)


class VAE(nn.Module):
  def setup(self):
    self.encoder = nn.Sequential([nn.Dense(16), nn.relu, nn.Dense(4)])
    self.decoder = nn.Sequential([nn.Dense(16), nn.relu, nn.Dense(64)])

  def __call__(self, x, key):
    mean, log_variance = jnp.split(self.encoder(x), 2, -1)
    noise = jax.random.normal(key, mean.shape)
    return self.decoder(mean + noise * jnp.exp(0.5 * log_variance)), mean, log_variance


def vae(tx):
  """An epoch is a scan over keys."""
  module, x = VAE(), (IMAGES.reshape(16, 64) > 0).astype(np.float32)
  params = methods.init(module, KEY, x, KEY)["params"]
  state = train_state.TrainState.create(apply_fn=module.apply, params=params, tx=tx)

  def step(state, key):
    def loss_fn(params):
      logits, mean, log_variance = state.apply_fn({"params": params}, x, key)
      divergence = -0.5 * jnp.sum(1 + log_variance - mean**2 - jnp.exp(log_variance), -1)
      bits = optax.sigmoid_binary_cross_entropy(logits, x).sum(-1)
      return jnp.mean(bits + divergence)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss

  keys = jax.random.split(KEY, methods.STEPS)
  state, losses = jax.jit(lambda state: jax.lax.scan(step, state, keys))(state)
  return methods.Trained(params, state.params, state.opt_state, losses.tolist())


PROGRAMS = {
  "mnist_nnx": methods.Program(mnist_nnx, "conv|norm", "linear/kernel"),
  "mnist_linen": methods.Program(mnist_linen, "Conv_*", "Dense_0/kernel"),
  "imagenet": methods.Program(imagenet, "*_init", "Dense_0/kernel", axis="batch"),
  "lm1b": methods.Program(lm1b, "embedding", "logits/kernel"),
  "gemma": methods.Program(gemma, "layers/0", "layers/1/up/kernel"),
  "vae": methods.Program(vae, "encoder", "decoder/layers_2/kernel"),
}


@methods.quick_and_slow(
  PROGRAMS,
  "accumulate",
  "freeze_layers",
  "centralize",
  "average_params",
  "master_weights",
  "sgperm",
)
def test_a_flax_example_trains_with_a_method_as_its_optimizer(program, method):
  methods.check(program, method)


def test_a_trainer_that_passes_only_gradients_gets_an_error_that_names_the_argument_of_svrg():
  with pytest.raises(ValueError, match="`svrg` needs the extra argument `grad_fn`"):
    mnist_linen(optax.chain(optax_boost.svrg(refresh_every=2), methods.INNER))

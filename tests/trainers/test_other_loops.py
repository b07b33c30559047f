"""Loops of large Linen trainers, of pure functions, and around optax's own wrappers."""

import functools
import itertools
from typing import Any, NamedTuple

from flax import linen as nn, traverse_util
from flax.training import train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost._step import _wrapper
from tests import meshes
from tests.trainers import methods

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 6)).astype(np.float32)
Y = np.sin(X[:, :2])
TOKENS = RNG.integers(0, 11, (8, 9), np.int32)


def cross_entropy(logits, labels):
  return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


class Layer(nn.Module):
  @nn.compact
  def __call__(self, x, _):
    y = nn.RMSNorm(name="norm")(x)
    y = nn.Dense(16, use_bias=False, name="wi")(y)
    return x + nn.Dense(8, use_bias=False, name="wo")(nn.relu(y)), None


class Decoder(nn.Module):
  @nn.compact
  def __call__(self, tokens):
    x = nn.Embed(11, 8, name="token_embedder")(tokens)
    layers = nn.scan(
      nn.remat(Layer), variable_axes={"params": 1}, split_rngs={"params": True}, length=3
    )
    x, _ = layers(name="layers")(x, None)
    return nn.Dense(11, use_bias=False, name="logits_dense")(x)


def maxtext(tx):
  """Layers in a scan along axis 1; state and batch sharded, given to jit as shardings, donated."""
  module, mesh = Decoder(), methods.mesh()

  def init(key):
    params = module.init(key, TOKENS)["params"]
    return train_state.TrainState.create(apply_fn=module.apply, params=params, tx=tx)

  def place(x):
    even = x.ndim > 0 and x.shape[-1] % 2 == 0
    return jax.NamedSharding(mesh, jax.P(*[None] * (x.ndim - 1), "fsdp") if even else jax.P())

  shardings = jax.tree.map(place, jax.eval_shape(init, KEY))
  data = jax.NamedSharding(mesh, jax.P("data"))

  def step(state, batch):
    def loss_fn(params):
      return cross_entropy(state.apply_fn({"params": params}, batch[:, :-1]), batch[:, 1:])

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    norm = optax.tree.norm(grads)
    grads = jax.tree.map(lambda g: g / jnp.maximum(1.0, norm / 1e3), grads)
    return state.apply_gradients(grads=grads), loss

  p_step = jax.jit(
    step, in_shardings=(shardings, data), out_shardings=(shardings, None), donate_argnums=0
  )
  state = jax.jit(init, out_shardings=shardings)(KEY)
  initial, batch = methods.host(state.params), jax.device_put(TOKENS, data)
  state, losses, late = methods.loop(lambda state: p_step(state, batch), state)
  return methods.Trained(initial, state.params, state.opt_state, losses, late)


class Bert(nn.Module):
  @nn.compact
  def __call__(self, tokens, deterministic=True):
    x = nn.LayerNorm(name="layer_norm")(nn.Embed(11, 8, name="embeddings")(tokens))
    x = x + nn.MultiHeadAttention(2, name="attention")(x)
    x = nn.Dropout(0.1, deterministic=deterministic)(x)
    return nn.Dense(11, name="decoder")(x)


class KeyedTrainState(train_state.TrainState):
  dropout_rng: Any


def hugging_face(tx):
  """Replicas in pmap; decay for kernels alone; every two micro-batches a step."""
  module, devices = Bert(), meshes.devices(2)
  params = methods.init(module, KEY, TOKENS)["params"]

  def decayed(params):
    flat = traverse_util.flatten_dict(params)
    return traverse_util.unflatten_dict({path: path[-1] == "kernel" for path in flat})

  # A weight so small that it changes nothing that is compared.
  # Wrappers go around the chain that the loop makes.
  chain = _wrapper.replace_inner(
    optax.with_extra_args_support(tx),
    lambda inner: optax.chain(inner, optax.add_decayed_weights(0.0, decayed)),
  )
  state = KeyedTrainState.create(apply_fn=module.apply, params=params, tx=chain, dropout_rng=KEY)

  @jax.jit
  def replicate(tree):
    return jax.tree.map(lambda x: jnp.stack([x] * 2), tree)

  state = replicate(state).replace(dropout_rng=jax.random.split(KEY))

  def step(state, batch):
    use, keep = jax.random.split(state.dropout_rng)

    def loss_fn(params, tokens):
      logits = state.apply_fn({"params": params}, tokens, False, rngs={"dropout": use})
      return cross_entropy(logits, tokens)

    def micro_batch(total, tokens):
      both = jax.value_and_grad(loss_fn)(state.params, tokens)
      return jax.tree.map(lambda a, b: a + 0.5 * b, total, both), None

    start = (jnp.zeros([]), jax.tree.map(jnp.zeros_like, state.params))
    (loss, grads), _ = jax.lax.scan(micro_batch, start, batch)
    grads = jax.lax.pmean(grads, "batch")
    return state.apply_gradients(grads=grads, dropout_rng=keep), jax.lax.pmean(loss, "batch")

  p_step = jax.pmap(step, "batch", donate_argnums=0, devices=devices)
  shards = TOKENS.reshape(2, 2, 2, 9)
  state, losses, late = methods.loop(lambda state: p_step(state, shards), state)
  one = methods.entry((state.params, state.opt_state), 0)
  return methods.Trained(params, *one, losses, late)


class TrainingState(NamedTuple):
  params: Any
  avg_params: Any
  opt_state: Any


def dense_layers(seed, *sizes):
  rng = np.random.default_rng(seed)
  layers = {}
  for i, (m, n) in enumerate(itertools.pairwise(sizes)):
    kernel = jnp.asarray(rng.normal(size=(m, n)) / m**0.5, jnp.float32)
    layers[f"mlp/~/linear_{i}"] = {"w": kernel, "b": jnp.zeros(n)}
  return layers


def mlp(params, x):
  first, last = params["mlp/~/linear_0"], params["mlp/~/linear_1"]
  return jnp.tanh(x @ first["w"] + first["b"]) @ last["w"] + last["b"]


def squared_error(params, x=X, y=Y):
  return jnp.mean((mlp(params, x) - y) ** 2)


def update(tx, loss_fn, state, *batch):
  params, opt_state = state
  loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
  updates, opt_state = tx.update(grads, opt_state, params)
  return (optax.apply_updates(params, updates), opt_state), loss


def haiku(tx):
  """Params by module names with slashes and tildes, and an average of the trainer's own."""
  params = dense_layers(0, 6, 8, 2)

  @jax.jit
  def step(state):
    (params, opt_state), loss = update(tx, squared_error, (state.params, state.opt_state))
    average = optax.incremental_update(params, state.avg_params, step_size=0.001)
    return TrainingState(params, average, opt_state), loss

  state = TrainingState(params, params, tx.init(params))
  state, losses, late = methods.loop(step, state)
  return methods.Trained(params, state.params, state.opt_state, losses, late)


def lookahead(tx):
  """Inside `optax.lookahead`, whose params are pairs; it synchronizes after the last step."""
  params = dense_layers(0, 6, 8, 2)
  ahead = optax.lookahead(tx, sync_period=methods.STEPS + 1, slow_step_size=0.5)
  pair = optax.LookaheadParams.init_synced(params)

  @jax.jit
  def step(state):
    pair, opt_state = state
    loss, grads = jax.value_and_grad(squared_error)(pair.fast)
    updates, opt_state = ahead.update(grads, opt_state, pair)
    return (optax.apply_updates(pair, updates), opt_state), loss

  (pair, opt_state), losses, late = methods.loop(step, (pair, ahead.init(pair)))
  return methods.Trained(params, pair.fast, opt_state, losses, late)


def multi_steps(tx):
  """A mini-batch is split for `optax.MultiSteps`, whose inner optimizer runs in a conditional."""
  params, multi = dense_layers(0, 6, 8, 2), optax.MultiSteps(tx, every_k_schedule=2)

  @jax.jit
  def step(state):
    micro_step = functools.partial(update, multi, squared_error)
    halves = (X.reshape(2, 4, 6), Y.reshape(2, 4, 2))
    state, losses = jax.lax.scan(lambda state, half: micro_step(state, *half), state, halves)
    return state, jnp.mean(losses)

  (final, opt_state), losses, late = methods.loop(step, (params, multi.init(params)))
  return methods.Trained(params, final, opt_state, losses, late)


def ensemble(tx):
  """Three models in `vmap`, whole trainings in one scan; one of them is returned."""
  models = [dense_layers(seed, 6, 8, 2) for seed in range(3)]
  params = jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *models)

  @jax.jit
  @jax.vmap
  def whole_training(params):
    def step(state, _):
      return update(tx, squared_error, state)

    return jax.lax.scan(step, (params, tx.init(params)), length=methods.STEPS)

  trainings = (params, *whole_training(params))
  initial, (final, opt_state), losses = methods.entry(trainings, 1)
  return methods.Trained(initial, final, opt_state, losses.tolist())


def flow(tx):
  """Affine couplings fitted by maximum likelihood; params in a list."""
  params = [dense_layers(seed, 3, 8, 6) for seed in range(2)]

  def negative_log_likelihood(params):
    x, log_det = X, 0.0
    for coupling in params:
      left, right = jnp.split(x, 2, -1)
      shift, log_scale = jnp.split(mlp(coupling, left), 2, -1)
      log_scale = jnp.tanh(log_scale)
      x = jnp.concatenate([right * jnp.exp(log_scale) + shift, left], -1)
      log_det += log_scale.sum(-1)
    return jnp.mean(0.5 * (x**2).sum(-1) - log_det)

  step = jax.jit(functools.partial(update, tx, negative_log_likelihood))
  (final, opt_state), losses, late = methods.loop(step, (params, tx.init(params)))
  return methods.Trained(params, final, opt_state, losses, late)


pure = functools.partial(methods.Program, first="linear_0", kernel="mlp/~/linear_1/w")
PROGRAMS = {
  "maxtext": methods.Program(maxtext, "token_embedder", "logits_dense/kernel", "bias|scale"),
  "hugging_face": methods.Program(hugging_face, "embeddings", "decoder/kernel", axis="batch"),
  "haiku": pure(haiku, vectors="b"),
  "lookahead": pure(lookahead, vectors="b", wraps=True),
  "multi_steps": pure(multi_steps, vectors="b", wraps=True),
  "ensemble": pure(ensemble, vectors="b"),
  "flow": methods.Program(flow, "/0", "1/mlp/~/linear_1/w", "b"),
}


@methods.quick_and_slow(
  PROGRAMS,
  "freeze_layers",
  "dynamic_loss_scale",
  "master_weights",
  "layerwise_decay",
  "record_trajectory",
  "switch_after",
  "lars",
)
def test_a_loop_trains_with_a_method_as_its_optimizer(program, method):
  methods.check(program, method)

"""Loops of Equinox's users: `filter_jit`, and a large trainer's with stacked blocks."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost._step import _wrapper
from tests.trainers import methods

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 6)).astype(np.float32)
Y = np.sin(X[:, :2])
TOKENS = RNG.integers(0, 11, (4, 9), np.int32)


def filter_jit(tx):
  model = eqx.filter_jit(lambda key: eqx.nn.MLP(6, 2, 8, 2, key=key))(KEY)
  initial = methods.host(eqx.filter(model, eqx.is_inexact_array))

  @eqx.filter_jit
  def step(state):
    model, opt_state = state

    def loss_fn(model):
      return jnp.mean((jax.vmap(model)(X) - Y) ** 2)

    loss, grads = eqx.filter_value_and_grad(loss_fn)(model)
    params = eqx.filter(model, eqx.is_inexact_array)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (eqx.apply_updates(model, updates), opt_state), loss

  state = (model, tx.init(eqx.filter(model, eqx.is_inexact_array)))
  (model, opt_state), losses, late = methods.loop(step, state)
  final = eqx.filter(model, eqx.is_inexact_array)
  return methods.Trained(initial, final, opt_state, losses, late)


class Block(eqx.Module):
  norm: eqx.nn.RMSNorm
  up: eqx.nn.Linear
  down: eqx.nn.Linear

  def __init__(self, key):
    keys = jax.random.split(key)
    self.norm = eqx.nn.RMSNorm(8)
    self.up = eqx.nn.Linear(8, 16, key=keys[0])
    self.down = eqx.nn.Linear(16, 8, key=keys[1])

  def __call__(self, x):
    return x + self.down(jax.nn.gelu(self.up(self.norm(x))))


class Stacked(eqx.Module):
  """A language model whose blocks lie in leaves with an axis of layers; the table of positions is
  not trained."""

  embedding: jax.Array
  positions: jax.Array
  blocks: Block
  head: eqx.nn.Linear

  def __init__(self, key):
    keys = jax.random.split(key, 6)
    self.embedding = 0.3 * jax.random.normal(keys[0], (11, 8))
    self.positions = 0.3 * jax.random.normal(keys[1], (8, 8))
    self.blocks = eqx.filter_vmap(Block)(keys[2:5])
    self.head = eqx.nn.Linear(8, 11, key=keys[5])

  def __call__(self, tokens):
    arrays, static = eqx.partition(self.blocks, eqx.is_array)
    x = self.embedding[tokens] + self.positions

    def layer(x, arrays):
      return (jax.vmap(eqx.combine(arrays, static))(x), None)

    return jax.vmap(self.head)(jax.lax.scan(jax.checkpoint(layer), x, arrays)[0])


def levanter(tx):
  """Replaces hidden leaves by None, injects the rate, and sums micro-batches in a scan."""
  model = eqx.filter_jit(Stacked)(KEY)
  trained = jax.tree.map(eqx.is_inexact_array, model)
  trained = eqx.tree_at(lambda tree: tree.positions, trained, replace=False)
  initial = methods.host(eqx.filter(model, trained))

  def injected(inner):
    def scaled(scale):
      return optax.chain(optax.clip_by_global_norm(1e3), inner, optax.scale(scale))

    return optax.inject_hyperparams(scaled)(scale=optax.constant_schedule(1.0))

  # Our wrappers go around what the loop makes.
  tx_of_trainer = _wrapper.replace_inner(optax.with_extra_args_support(tx), injected)

  @eqx.filter_jit(donate="all")
  def step(state):
    model, opt_state = state
    params, rest = eqx.partition(model, trained)

    def loss_fn(params, tokens):
      logits = jax.vmap(eqx.combine(params, rest))(tokens[:, :-1])
      return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def micro_batch(total, tokens):
      both = jax.value_and_grad(loss_fn)(params, tokens)
      return jax.tree.map(lambda a, b: a + 0.5 * b, total, both), None

    start = (jnp.zeros([]), jax.tree.map(jnp.zeros_like, params))
    (loss, grads), _ = jax.lax.scan(micro_batch, start, TOKENS.reshape(2, 2, 9))
    updates, opt_state = tx_of_trainer.update(grads, opt_state, params)
    return (eqx.apply_updates(model, updates), opt_state), loss

  opt_state = eqx.filter_jit(tx_of_trainer.init)(eqx.filter(model, trained))
  (model, opt_state), losses, late = methods.loop(step, (model, opt_state))
  return methods.Trained(initial, eqx.filter(model, trained), opt_state, losses, late)


PROGRAMS = {
  "filter_jit": methods.Program(filter_jit, "layers/0", "layers/1/weight", layout="torch"),
  "levanter": methods.Program(levanter, "embedding", "head/weight", "bias", layout="torch"),
}


@methods.quick_and_slow(PROGRAMS, "laperm", "stochastic_rounding")
def test_an_equinox_loop_trains_with_a_method_as_its_optimizer(program, method):
  methods.check(program, method)

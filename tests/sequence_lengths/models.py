"""Three forms of one small transformer of tokens, causal, with a mask of padding."""

from flax import linen as nn, nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax

VOCABULARY, WIDTH, LENGTH = 11, 8, 16


def batches(count, sequences=4, seed=0):
  rng = np.random.default_rng(seed)
  for _ in range(count):
    tokens = rng.integers(1, VOCABULARY, (sequences, LENGTH + 1)).astype(np.int32)
    yield {"tokens": tokens, "real": (rng.random((sequences, LENGTH)) < 0.9).astype(np.float32)}


def mean_loss(logits, batch):
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:])
  return jnp.average(losses, weights=batch["real"])


class NnxModel(nnx.Module):
  def __init__(self, rngs):
    self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
    self.attention = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs)
    self.out = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

  def __call__(self, tokens):
    x = self.embed(tokens)
    return self.out(x + self.attention(x, mask=nnx.make_causal_mask(tokens)))


def nnx_loss(model, batch):
  return mean_loss(model(batch["tokens"][:, :-1]), batch)


class LinenModel(nn.Module):
  @nn.compact
  def __call__(self, tokens):
    x = nn.Embed(VOCABULARY, WIDTH)(tokens)
    x = x + nn.MultiHeadDotProductAttention(2)(x, mask=nn.make_causal_mask(tokens))
    return nn.Dense(VOCABULARY)(x)


def linen_loss(model, batch):
  return mean_loss(model(batch["tokens"][:, :-1]), batch)


def init(key=0, layers=2):
  keys = jax.random.split(jax.random.key(key), 3)
  return {
    "table": jax.random.normal(keys[0], (VOCABULARY, WIDTH)),
    "blocks": 0.3 * jax.random.normal(keys[1], (layers, WIDTH, 3 * WIDTH)),
    "out": 0.3 * jax.random.normal(keys[2], (WIDTH, VOCABULARY)),
  }


def logits(params, tokens, mask=None):
  """Blocks in a scan; `mask` [batch, 1, length, length] besides the causal one."""

  def block(x, kernel):
    q, k, v = jnp.split((x @ kernel).reshape(*x.shape[:2], 6, -1), 3, axis=2)
    return x + jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True).reshape(
      x.shape
    ), None

  x, _ = jax.lax.scan(block, params["table"][tokens], params["blocks"])
  return x @ params["out"]


def loss(params, batch):
  return mean_loss(logits(params, batch["tokens"][:, :-1]), batch)

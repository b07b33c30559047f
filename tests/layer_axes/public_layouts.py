"""The layouts of public language models at tiny sizes: Flax's lm1b in Linen, and gemma in NNX.

Names, shapes and the order of modules are theirs: a shared embedding, pre- and post-normalization,
attention with grouped heads, a gated MLP, dropout. `form` is how the layers are written.
"""

import functools
from typing import Any

from flax import linen as nn, nnx
import jax
import jax.numpy as jnp
import numpy as np

LAYERS, VOCAB, WIDTH, HEADS, KV_HEADS, HIDDEN = 4, 11, 8, 4, 2, 12
HEAD = WIDTH // HEADS
DROPOUT = 0.1
TOKENS = jax.random.randint(jax.random.key(7), (2, 6), 1, VOCAB)
_LIST = getattr(nnx, "List", list)  # flax before 0.12 takes plain containers


def next_token_loss(logits, tokens):
  scores = jax.nn.log_softmax(logits[:, :-1])
  return -jnp.mean(jnp.take_along_axis(scores, tokens[:, 1:, None], -1))


def positions(length):
  angle = np.arange(length)[:, None] / 100 ** (np.arange(WIDTH // 2) / (WIDTH // 2))
  return jnp.asarray(np.concatenate([np.sin(angle), np.cos(angle)], axis=1), jnp.float32)


def rotate(x, base=100.0):
  """Rotary positions, of [batch, length, heads, HEAD]."""
  angle = jnp.arange(x.shape[1])[:, None, None] / base ** (jnp.arange(HEAD // 2) / (HEAD // 2))
  first, second = jnp.split(x, 2, axis=-1)
  sin, cos = jnp.sin(angle), jnp.cos(angle)
  return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def grouped_attention(query, key, value, mask, drop):
  """Attention with HEADS queries over KV_HEADS keys, and a soft cap."""
  batch, length = query.shape[:2]
  grouped = query.reshape(batch, length, KV_HEADS, HEADS // KV_HEADS, HEAD)
  logits = jnp.tanh(jnp.einsum("BTKGH,BSKH->BKGTS", grouped, key) / 5.0) * 5.0
  probs = drop(jax.nn.softmax(jnp.where(mask, logits, -1e9)))
  return jnp.einsum("BKGTS,BSKH->BTKGH", probs, value).reshape(batch, length, HEADS, HEAD)


def causal(length, window=None):
  mask = jnp.tril(jnp.ones((length, length), bool))
  return mask if window is None else mask & jnp.triu(jnp.ones_like(mask), 1 - window)


def with_axes(boxed, init, *axes):
  return nn.with_logical_partitioning(init, axes) if boxed else init


class MlpBlock(nn.Module):
  boxed: bool

  @nn.compact
  def __call__(self, x):
    drop = nn.Dropout(DROPOUT, deterministic=not self.has_rng("dropout"))
    init = nn.initializers.xavier_uniform()
    x = nn.Dense(HIDDEN, kernel_init=with_axes(self.boxed, init, "embed", "mlp"))(x)
    x = drop(nn.relu(x))
    return drop(nn.Dense(WIDTH, kernel_init=with_axes(self.boxed, init, "mlp", "embed"))(x))


class EncoderDecoder1DBlock(nn.Module):
  boxed: bool = True

  @nn.compact
  def __call__(self, inputs, mask):
    deterministic = not self.has_rng("dropout")
    scale_init = with_axes(self.boxed, nn.initializers.ones, "embed")
    x = nn.MultiHeadDotProductAttention(
      num_heads=HEADS,
      kernel_init=with_axes(self.boxed, nn.initializers.xavier_uniform(), "embed", "kv"),
      use_bias=False,
      dropout_rate=DROPOUT,
      deterministic=deterministic,
    )(nn.LayerNorm(scale_init=scale_init)(inputs), mask=mask)
    x = inputs + nn.Dropout(DROPOUT, deterministic=deterministic)(x)
    return x + MlpBlock(self.boxed)(nn.LayerNorm(scale_init=scale_init)(x))


class ScannedBlock(nn.Module):
  """A block as ``nn.scan`` wants it, with an output per layer."""

  @nn.compact
  def __call__(self, x, mask):
    return EncoderDecoder1DBlock(name="block")(x, mask), None


class CausalBlock(nn.Module):
  """A block as ``nn.remat_scan`` wants it: of one argument, params without names of axes."""

  @nn.compact
  def __call__(self, x):
    return EncoderDecoder1DBlock(boxed=False, name="block")(x, causal(x.shape[1]))


class Decoder(nn.Module):
  form: str
  shared_embedding: Any

  @nn.compact
  def __call__(self, inputs, mask):
    y = self.shared_embedding(jnp.pad(inputs, ((0, 0), (1, 0)))[:, :-1])
    y = y + positions(y.shape[1])
    y = nn.Dropout(DROPOUT, deterministic=not self.has_rng("dropout"))(y)
    scan = {"split_rngs": {"params": True, "dropout": True}, "in_axes": nn.broadcast}
    names = {"metadata_params": {nn.PARTITION_NAME: "layers"}}
    if self.form == "layers":
      for layer in range(LAYERS):
        y = EncoderDecoder1DBlock(name=f"encoderdecoderblock_{layer}")(y, mask)
    elif self.form == "scan":
      layers = nn.scan(
        nn.remat(ScannedBlock), {"params": 1}, length=LAYERS, unroll=2, **scan, **names
      )
      y, _ = layers(name="encoderdecoder")(y, mask)
    elif self.form == "remat_scan":
      lengths, split_rngs = (LAYERS // 2, 2), scan["split_rngs"]
      layers = nn.remat_scan(
        CausalBlock, lengths, variable_axes={"params": 0}, split_rngs=split_rngs
      )
      y = layers(name="encoderdecoder")(y)
    y = nn.LayerNorm(name="encoderdecoder_norm")(y)
    return self.shared_embedding.attend(y) / jnp.sqrt(WIDTH)


class TransformerLM(nn.Module):
  form: str

  @nn.compact
  def __call__(self, inputs):
    mask = nn.combine_masks(
      nn.make_attention_mask(inputs > 0, inputs > 0), nn.make_causal_mask(inputs)
    )
    init = nn.with_logical_partitioning(nn.initializers.normal(1.0), ("vocab", "embed"))
    embedding = nn.Embed(VOCAB, WIDTH, embedding_init=init, name="shared")
    return Decoder(self.form, embedding, name="decoder")(inputs, mask)


def filled(tree):
  """Abstract params with numbers."""
  rng = np.random.default_rng(0)
  return jax.tree.map(lambda x: jnp.asarray((0.3 * rng.normal(size=x.shape)).astype(x.dtype)), tree)


class RMSNorm(nnx.Module):
  def __init__(self, size, rngs):
    self.scale = nnx.Param(nnx.initializers.zeros_init()(rngs.params(), size))

  def __call__(self, x):
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * (1 + self.scale)


class Attention(nnx.Module):
  def __init__(self, local, rngs):
    self.local = local
    self.attn_vec_einsum = nnx.Einsum("BTNH,NHD->BTD", (HEADS, HEAD, WIDTH), rngs=rngs)
    self.q_einsum = nnx.Einsum("BTD,NDH->BTNH", (HEADS, WIDTH, HEAD), rngs=rngs)
    self.kv_einsum = nnx.Einsum("BTD,CKDH->CBTKH", (2, KV_HEADS, WIDTH, HEAD), rngs=rngs)
    self._query_norm, self._key_norm = RMSNorm(HEAD, rngs), RMSNorm(HEAD, rngs)
    self.dropout = nnx.Dropout(DROPOUT)

  def __call__(self, x, rngs):
    key, value = self.kv_einsum(x)
    base = 100.0 if self.local else 1000.0
    query = rotate(self._query_norm(self.q_einsum(x)), base)
    mask = causal(x.shape[1], 3 if self.local else None)
    drop = lambda x: self.dropout(x, deterministic=rngs is None, rngs=rngs)  # noqa: E731
    key = rotate(self._key_norm(key), base)
    return self.attn_vec_einsum(grouped_attention(query, key, value, mask, drop))


class FeedForward(nnx.Module):
  def __init__(self, rngs):
    self.gate_proj = nnx.Linear(WIDTH, HIDDEN, use_bias=False, rngs=rngs)
    self.up_proj = nnx.Linear(WIDTH, HIDDEN, use_bias=False, rngs=rngs)
    self.down_proj = nnx.Linear(HIDDEN, WIDTH, use_bias=False, rngs=rngs)
    self.dropout = nnx.Dropout(DROPOUT)

  def __call__(self, x, rngs):
    activations = nnx.gelu(self.gate_proj(x)) * self.up_proj(x)
    return self.down_proj(self.dropout(activations, deterministic=rngs is None, rngs=rngs))


class Block(nnx.Module):
  def __init__(self, local, rngs):
    self.pre_attention_norm = RMSNorm(WIDTH, rngs)
    self.attn = Attention(local, rngs)
    self.post_attention_norm = RMSNorm(WIDTH, rngs)
    self.pre_ffw_norm = RMSNorm(WIDTH, rngs)
    self.mlp = FeedForward(rngs)
    self.post_ffw_norm = RMSNorm(WIDTH, rngs)

  def __call__(self, x, rngs=None):
    x = x + self.post_attention_norm(self.attn(self.pre_attention_norm(x), rngs))
    return x + self.post_ffw_norm(self.mlp(self.pre_ffw_norm(x), rngs))


class Pair(nnx.Module):
  """A layer with local attention and one with global attention, the unit that repeats."""

  def __init__(self, rngs):
    self.layers = _LIST([Block(True, rngs), Block(False, rngs)])

  def __call__(self, x, rngs=None):
    for layer in self.layers:
      x = layer(x, rngs)
    return x


class Transformer(nnx.Module):
  """Gemma in NNX: a list of layers, or layers or pairs of layers in one scan."""

  def __init__(self, form, rngs):
    self.form = form
    self.embedder = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
    if form == "layers":
      self.layers = _LIST([Block(layer % 2 == 0, rngs) for layer in range(LAYERS)])
    else:
      unit = Pair if form == "pairs" else functools.partial(Block, True)
      make = nnx.vmap(lambda key: unit(nnx.Rngs(key)))
      self.layers = make(jax.random.split(rngs.params(), LAYERS))
    self.final_norm = RMSNorm(WIDTH, rngs)
    self.final_dropout = nnx.Dropout(DROPOUT)

  def __call__(self, tokens, rngs=None):
    x = self.embedder(tokens) * jnp.sqrt(WIDTH)
    if self.form == "layers":
      for layer in self.layers:
        x = layer(x, rngs)
    else:
      keys = jax.random.split(jax.random.key(0) if rngs is None else rngs.dropout(), LAYERS)
      body = nnx.remat(lambda x, layer, key: layer(x, None if rngs is None else nnx.Rngs(key)))
      x = nnx.scan(body, in_axes=(nnx.Carry, 0, 0), out_axes=nnx.Carry)(x, self.layers, keys)
    x = self.final_dropout(self.final_norm(x), deterministic=rngs is None, rngs=rngs)
    logits = self.embedder.attend(x)
    return jnp.tanh(logits / 30.0) * 30.0

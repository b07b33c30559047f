"""A small transformer of characters that scans over its layers, in plain JAX."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

VOCABULARY = 128
LAYERS, WIDTH, HEADS, LENGTH = 6, 64, 4, 64
# The names of the layers in the order of the forward pass.
NAMES = ["tokens|positions", "blocks[*]", "head"]


def init(key: jax.Array, layers: int | None = None, *, rotary: bool = False) -> dict[str, Any]:
  """Makes the params; the blocks' params are stacked along the first axis.

  Args:
    key: of the initial values.
    layers: how many; None: `LAYERS`.
    rotary: whether positions rotate queries and keys, at any length. If not, there is a learned
      vector for each of `LENGTH` positions.
  """
  layers = LAYERS if layers is None else layers
  shapes = {
    "attention_in": (WIDTH, 3 * WIDTH),
    "attention_out": (WIDTH, WIDTH),
    "mlp_in": (WIDTH, 4 * WIDTH),
    "mlp_out": (4 * WIDTH, WIDTH),
  }
  keys = iter(jax.random.split(key, len(shapes) + 3))
  blocks = {
    name: jax.random.normal(next(keys), (layers, *shape)) * shape[0] ** -0.5
    for name, shape in shapes.items()
  }
  tokens = 0.1 * jax.random.normal(next(keys), (VOCABULARY, WIDTH))
  positions = 0.1 * jax.random.normal(next(keys), (LENGTH, WIDTH))
  return {
    "tokens": tokens,
    **({} if rotary else {"positions": positions}),
    "blocks": {**blocks, "scale": jnp.ones((layers, 2, WIDTH))},
    "head": {
      "scale": jnp.ones(WIDTH),
      "kernel": jax.random.normal(next(keys), (WIDTH, VOCABULARY)) * WIDTH**-0.5,
    },
  }


def loss_fn(params: dict[str, Any], text: jax.Array) -> jax.Array:
  """Mean cross-entropy of the next character, of ``text`` integers ``(batch, length + 1)``."""
  inputs, targets = text[:, :-1], text[:, 1:]
  x, rotary = params["tokens"][inputs], "positions" not in params
  if not rotary:
    x = x + params["positions"][: inputs.shape[1]]
  x, _ = jax.lax.scan(lambda x, block: (_block(x, block, rotary), None), x, params["blocks"])
  logits = _normalize(x, params["head"]["scale"]) @ params["head"]["kernel"]
  return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def _block(x: jax.Array, block: dict[str, jax.Array], rotary: bool) -> jax.Array:
  h = _normalize(x, block["scale"][0]) @ block["attention_in"]
  q, k, v = jnp.split(h.reshape(*x.shape[:2], 3 * HEADS, -1), 3, axis=2)
  if rotary:
    q, k = _rotate(q), _rotate(k)
  h = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
  x = x + h @ block["attention_out"]
  return x + jax.nn.gelu(_normalize(x, block["scale"][1]) @ block["mlp_in"]) @ block["mlp_out"]


def _normalize(x: jax.Array, scale: jax.Array) -> jax.Array:
  return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def _rotate(x: jax.Array) -> jax.Array:
  """Rotary positions (Su et al., arXiv:2104.09864) of queries or keys (batch, length, heads, size).

  Entry i of the first half and of the second are a point of a plane, which turns by an angle in
  proportion to the position.
  """
  half = x.shape[-1] // 2
  angles = jnp.arange(x.shape[1])[:, None, None] * 1e4 ** (-jnp.arange(half) / half)
  sine, cosine = jnp.sin(angles), jnp.cos(angles)
  first, second = jnp.split(x, 2, axis=-1)
  return jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], -1)

"""A small transformer of characters that scans over its layers, in plain JAX."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

VOCABULARY = 128
LAYERS, WIDTH, HEADS, LENGTH = 6, 64, 4, 64


def init(key: jax.Array) -> dict[str, Any]:
  """Makes the params; the blocks' params are stacked along the first axis."""
  shapes = {
    "attention_in": (WIDTH, 3 * WIDTH),
    "attention_out": (WIDTH, WIDTH),
    "mlp_in": (WIDTH, 4 * WIDTH),
    "mlp_out": (4 * WIDTH, WIDTH),
  }
  keys = iter(jax.random.split(key, len(shapes) + 3))
  blocks = {
    name: jax.random.normal(next(keys), (LAYERS, *shape)) * shape[0] ** -0.5
    for name, shape in shapes.items()
  }
  return {
    "tokens": 0.1 * jax.random.normal(next(keys), (VOCABULARY, WIDTH)),
    "positions": 0.1 * jax.random.normal(next(keys), (LENGTH, WIDTH)),
    "blocks": {**blocks, "scale": jnp.ones((LAYERS, 2, WIDTH))},
    "head": {
      "scale": jnp.ones(WIDTH),
      "kernel": jax.random.normal(next(keys), (WIDTH, VOCABULARY)) * WIDTH**-0.5,
    },
  }


def loss_fn(params: dict[str, Any], text: jax.Array) -> jax.Array:
  """Mean cross-entropy of the next character, of ``text`` integers ``(batch, length + 1)``."""
  inputs, targets = text[:, :-1], text[:, 1:]
  x = params["tokens"][inputs] + params["positions"][: inputs.shape[1]]
  x, _ = jax.lax.scan(lambda x, block: (_block(x, block), None), x, params["blocks"])
  logits = _normalize(x, params["head"]["scale"]) @ params["head"]["kernel"]
  return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def _block(x: jax.Array, block: dict[str, jax.Array]) -> jax.Array:
  h = _normalize(x, block["scale"][0]) @ block["attention_in"]
  q, k, v = jnp.split(h.reshape(*x.shape[:2], 3 * HEADS, -1), 3, axis=2)
  h = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
  x = x + h @ block["attention_out"]
  return x + jax.nn.gelu(_normalize(x, block["scale"][1]) @ block["mlp_in"]) @ block["mlp_out"]


def _normalize(x: jax.Array, scale: jax.Array) -> jax.Array:
  return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale

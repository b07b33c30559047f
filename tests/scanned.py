"""Losses that scan over layers, whose params are one leaf each."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

LAYERS, WIDTH = 4, 8


def params_of(layers=LAYERS, width=WIDTH):
  rng = np.random.default_rng(0)
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[-1]), "f4")  # noqa: E731
  blocks = {"kernel": normal(layers, width, width), "bias": jnp.zeros((layers, width))}
  return {"blocks": blocks, "embed": normal(5, width), "head": normal(width)}


def layer(h, block):
  return h + jnp.tanh(h @ block["kernel"] + block["bias"]), None


def run_layers(params, h, body=layer, **settings):
  return jax.lax.scan(body, h, params["blocks"], **settings)[0]


def loss_of(run):
  def loss(params, tokens):
    return jnp.mean((run(params, params["embed"][tokens]) @ params["head"] - 1) ** 2)

  return loss


def in_bfloat16(params, h):
  low = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
  return run_layers(low, h.astype(jnp.bfloat16)).astype(jnp.float32)


def used_elsewhere(params, h):
  return run_layers(params, h) * (1 + jnp.mean(params["blocks"]["kernel"] ** 2))


LOSSES = {
  "a scan": run_layers,
  "remat inside of jit": jax.jit(
    functools.partial(run_layers, body=jax.checkpoint(layer), reverse=True)
  ),
  "cast before the scan": in_bfloat16,
  "used elsewhere, too": used_elsewhere,
}

"""A chain of dense layers."""

import jax
import jax.numpy as jnp
import numpy as np

LAYERS = 4


# Named so that the order of names is the reverse of the forward pass.
def chain_params(layers=LAYERS, width=8):
  rng = np.random.default_rng(0)
  return {
    chr(ord("a") + layers - 1 - i): {
      "bias": jnp.asarray(np.full(width, 0.1), jnp.float32),
      "kernel": jnp.asarray(rng.normal(0, width**-0.5, (width, width)), jnp.float32),
    }
    for i in range(layers)
  }


def layer(params, x):
  return jnp.tanh(x @ params["kernel"] + params["bias"])


def chain_outputs(params, batch, wrap=lambda f: f):
  h = batch
  for name in sorted(params, reverse=True):
    h = wrap(layer)(params[name], h)
  return h


def chain_loss(params, batch, wrap=lambda f: f):
  return jnp.mean(chain_outputs(params, batch, wrap) ** 2)


def with_custom_vjp(function):
  """A function of params and data under ``jax.custom_vjp``; its derivative is JAX's own."""
  wrapped = jax.custom_vjp(function)
  wrapped.defvjp(
    lambda params, x: (function(params, x), (params, x)),
    lambda saved, g: jax.vjp(function, *saved)[1](g),
  )
  return wrapped


BATCH = jax.random.normal(jax.random.key(9), (16, 8))

"""A chain of dense layers and a convolutional network, whose layers form groups."""

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import optax_boost
import optax_boost.linen as ob_linen

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


class Convolutional(nn.Module):
  """Convolutions with BatchNorm, and a dense layer."""

  layers: int = 3
  width: int = 4

  @nn.compact
  def __call__(self, x, train=True):
    for _ in range(self.layers):
      x = nn.Conv(self.width, (3, 3))(x)
      x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
    return nn.Dense(2)(jnp.mean(x, (1, 2)))


IMAGES = jax.random.normal(jax.random.key(4), (4, 6, 6, 3))


def image_loss(model, batch):
  return jnp.mean(model(batch) ** 2)


def image_plan(variables, num_groups=4):
  split = ob_linen.split_loss(image_loss, Convolutional(), variables)
  return optax_boost.layer_groups(*split, IMAGES, num_groups=num_groups)

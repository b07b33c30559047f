"""Descriptions of layers for params that belong to no model."""

import jax
import jax.numpy as jnp

import optax_boost


def described(params, stacked=None, fan_in=None):
  """What a loss tells that maps over some axes of leaves, and sums over others; by leaf's name."""
  stacked, fan_in = stacked or {}, fan_in or {}
  flat = jax.tree_util.tree_leaves_with_path(params)
  leaves = [(path[-1].key if path else "", leaf) for path, leaf in flat]
  axes = [(stacked.get(name, ()), fan_in.get(name, ())) for name, _ in leaves]

  def mapped(x, depth, data, summed):
    if depth:
      return jnp.sum(jax.lax.map(lambda layer: mapped(layer, depth - 1, data, summed), x))
    return jnp.sum(jnp.tensordot(data, x, summed) if summed else x[..., None] * data)

  def loss_fn(params, batch):
    total = 0.0
    columns = zip(jax.tree.leaves(params), axes, batch, strict=True)
    for leaf, (layers, summed), data in columns:
      own = (*layers, *summed)
      front = jnp.moveaxis(leaf, own, range(len(own)))
      total += mapped(front, len(layers), data, len(summed))
    return total

  data = [
    jnp.ones((2, *(leaf.shape[axis] for axis in summed)))
    for (_, leaf), (_, summed) in zip(leaves, axes, strict=True)
  ]
  return optax_boost.layer_axes(loss_fn, params, data)

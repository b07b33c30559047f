"""Per-layer methods on kernels that meet params or constants before they meet data."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
from optax_boost._foundation import _paths
from tests.layer_axes import learned_queries

NAMES = list(learned_queries.STRUCTURES)


@functools.cache
def structure_of(name):
  return learned_queries.STRUCTURES[name]()


@functools.cache
def layers_of(name):
  structure = structure_of(name)
  return optax_boost.layer_axes(structure.loss, structure.params, *structure.args)


def random_like(tree, seed):
  rng = np.random.default_rng(seed)
  return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), tree)


def by_path(tree):
  return dict(zip(_paths.leaf_paths(tree), jax.tree.leaves(tree), strict=True))


def assert_close(actual, expected):
  # A handful of roundings of entries and sums near one.
  chex.assert_trees_all_close(actual, expected, rtol=0, atol=32 * np.finfo(np.float32).eps)


@pytest.mark.parametrize("name", NAMES)
def test_each_leaf_has_the_axes_written_by_hand(name):
  structure, layers = structure_of(name), layers_of(name)
  assert structure.fan_in.keys() | structure.stacked.keys() <= set(layers.paths)
  found = {
    path: axes and (axes.fan_in, axes.stacked)
    for path, axes in zip(layers.paths, layers.axes, strict=True)
  }
  assert found == {
    path: (structure.fan_in.get(path, ()), structure.stacked.get(path, ())) for path in found
  }


@pytest.mark.parametrize("name", NAMES)
def test_gradients_lose_their_mean_over_the_inputs_of_kernels_and_nothing_else(name):
  structure = structure_of(name)
  grads = random_like(structure.params, seed=0)
  tx = optax_boost.centralize(layers=layers_of(name))
  updates, _ = tx.update(grads, tx.init(grads))
  expected = by_path(grads)
  for path, axes in structure.fan_in.items():
    expected[path] = expected[path] - expected[path].mean(axes, keepdims=True, dtype=np.float64)
  assert_close(by_path(updates), expected)


@pytest.mark.parametrize(
  "name",
  [
    "MAP head",
    "rows of stacked leaves",
    "DETR scanned",
    "layers of queries",
    "pooling in each layer of a scan",
    "pooling in each layer of vmap",
  ],
)
def test_each_layer_has_one_trust_ratio_whatever_its_heads(name):
  structure = structure_of(name)
  params, grads = (random_like(structure.params, seed) for seed in (1, 2))
  tx = optax_boost.lars(1.0, momentum=None, trust_coefficient=1.0, eps=0, layers=layers_of(name))
  updates, _ = tx.update(grads, tx.init(params), params)
  expected = {}
  for path, g in by_path(grads).items():
    w, stacked = by_path(params)[path], structure.stacked.get(path, ())
    axes = tuple(axis for axis in range(g.ndim) if axis not in stacked)
    is_bias = path.endswith(("bias", "scale")) or len(axes) <= 1
    norms = [np.sqrt(np.sum(x.astype(float) ** 2, axes, keepdims=True)) for x in (w, g)]
    expected[path] = -g if is_bias else -norms[0] / norms[1] * g
  assert_close(by_path(updates), expected)


def test_a_train_step_centralizes_the_kernel_of_a_learned_query_and_no_bias():
  structure = structure_of("MAP head of several probes")
  params, (x,) = (
    random_like(tree, seed) for seed, tree in enumerate((structure.params, structure.args))
  )
  tx = optax.chain(optax_boost.centralize(), optax.sgd(1.0))
  step = optax_boost.make_train_step(structure.loss, tx, donate=False)
  state, _ = step(step.init(params), x)
  moved = by_path(jax.tree.map(lambda before, after: before - after, params, state.params))
  grads = by_path(jax.jit(jax.grad(structure.loss))(params, jnp.asarray(x)))
  query = grads["head/attn/query/kernel"]
  expected = {
    "head/attn/query/kernel": query - query.mean(0, keepdims=True),
    "head/attn/query/bias": grads["head/attn/query/bias"],
    "head/probe": grads["head/probe"],
  }
  assert all(np.abs(g).max() > 1e-4 for g in expected.values())
  assert_close({path: moved[path] for path in expected}, expected)


def test_a_bias_has_no_fan_in_whatever_the_trace_says():
  params = {"dense": {"kernel": jnp.ones((6, 4)), "bias": jnp.ones((6, 4))}}

  def loss(p, x):
    return jnp.sum(jnp.tanh(x @ p["dense"]["kernel"])) + jnp.sum(x @ p["dense"]["bias"])

  layers = optax_boost.layer_axes(loss, params, jnp.ones((2, 6)))
  assert str(layers) == "dense/bias: outputs (0, 1)\ndense/kernel: fan-in (0,), outputs (1,)"

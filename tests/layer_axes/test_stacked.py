"""Stacked layers are read from a trace of the loss."""

import functools
import warnings

import chex
from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp
import optax
import pytest

import optax_boost
import optax_boost.linen
import optax_boost.nnx

X = jnp.ones((2, 8))


def layer(x, w):
  return jnp.tanh(x @ w["kernel"] + w["bias"]), None


def plain(params, x, body=layer, move=lambda w: w):
  x, _ = jax.lax.scan(body, x, move(params["blocks"]))
  return jnp.mean(x @ params["head"])


def params(layers=3):
  blocks = {"kernel": jnp.ones((layers, 8, 8)), "bias": jnp.ones((layers, 8))}
  return {"blocks": blocks, "head": jnp.ones((8, 1))}


BOTH = {"blocks/bias": (0,), "blocks/kernel": (0,)}


def layers_of(described):
  """The axes of layers of the leaves that hold some."""
  pairs = zip(described.paths, described.axes, strict=True)
  return {path: axes.layers for path, axes in pairs if axes is not None and axes.layers}


def stacked_axes(*args):
  return layers_of(optax_boost.layer_axes(*args))


@pytest.mark.parametrize(
  "loss_fn",
  [
    plain,
    jax.jit(plain),
    functools.partial(plain, body=jax.checkpoint(layer)),
    functools.partial(plain, move=lambda w: jax.tree.map(lambda a: 0.5 * a.astype("bfloat16"), w)),
    functools.partial(plain, move=lambda w: jax.tree.map(lambda a: jnp.tanh(a) ** 2, w)),
    functools.partial(plain, move=jax.lax.optimization_barrier),
    lambda p, x: jax.checkpoint(plain)(p, x),
    lambda p, x: jax.lax.cond(x[0, 0] > 0, plain, plain, p, x),
    lambda p, x: jax.lax.fori_loop(0, 2, lambda _, total: total + plain(p, x), 0.0),
  ],
  ids=["plain", "jit", "remat body", "cast", "functions", "barrier", "remat", "cond", "while"],
)
def test_scans_are_found_wherever_they_stand(loss_fn):
  assert stacked_axes(loss_fn, params(), X) == BOTH


def test_a_loss_is_traced_as_it_is_now():
  """As in a notebook, where the model is defined anew and the loss that calls it is not."""
  models = [lambda p, x: jnp.sum(p["blocks"]["kernel"]), plain]

  def loss_fn(p, x):
    return models[0](p, x)

  assert not stacked_axes(loss_fn, params(), X)
  models.pop(0)
  assert stacked_axes(loss_fn, params(), X) == BOTH


def test_a_transposed_leaf_is_stacked_along_its_own_axis():
  def loss_fn(p, x):
    x, _ = jax.lax.scan(lambda x, w: (x @ w, None), x, jnp.moveaxis(p["blocks"], 1, 0))
    return jnp.sum(x)

  found = stacked_axes(loss_fn, {"blocks": jnp.ones((8, 3, 8))}, X)
  assert found == {"blocks": (1,)}


def test_a_reshaped_leaf_is_stacked_where_its_layers_stay_together():
  def loss_fn(p, x):
    kernels = p["blocks"].reshape(-1, 8, 8)
    return jnp.sum(jax.lax.scan(lambda x, w: (x @ w, None), x, kernels)[0])

  heads = {"blocks": jnp.ones((3, 8, 2, 4))}
  assert stacked_axes(loss_fn, heads, X) == {"blocks": (0,)}
  joined = {"blocks": jnp.ones((3, 2, 8, 8))}
  assert stacked_axes(loss_fn, joined, X) == {"blocks": (0, 1)}


def test_a_barrier_around_all_params_stacks_the_scanned_ones_alone():
  def loss_fn(p, x):
    p = jax.lax.optimization_barrier(p)
    x, _ = jax.lax.scan(lambda x, w: (x @ w, None), x, p["blocks"])
    return jnp.sum(jnp.einsum("bi,ijk->bjk", x, p["head"]))

  cubes = {"blocks": jnp.ones((3, 8, 8)), "head": jnp.ones((8, 2, 2))}
  assert stacked_axes(loss_fn, cubes, X) == {"blocks": (0,)}


def test_scans_in_scans_stack_along_both_axes():
  def outer(x, w):
    return jax.lax.scan(lambda x, w: (x @ w, None), x, w)

  def loss_fn(p, x):
    return jnp.sum(jax.lax.scan(outer, x, p["blocks"])[0])

  params = {"blocks": jnp.ones((2, 3, 8, 8))}
  assert stacked_axes(loss_fn, params, X) == {"blocks": (0, 1)}

  def inner_axis_first(p, x):
    return loss_fn({"blocks": p["blocks"].swapaxes(0, 1)}, x)

  assert stacked_axes(inner_axis_first, params, X) == {"blocks": (0, 1)}


def test_a_scan_over_data_alone_stacks_nothing():
  def recurrent(p, x):
    return jnp.sum(jax.lax.scan(lambda h, row: (jnp.tanh(row @ p["w"] + h), None), X[0], x)[0])

  assert stacked_axes(recurrent, {"w": jnp.ones((8, 8))}, X) == {}


class Block(nn.Module):
  @nn.compact
  def __call__(self, x, _):
    x = nn.Dropout(0.5, deterministic=not self.has_rng("dropout"))(nn.Dense(8)(x))
    return nn.BatchNorm(use_running_average=False)(x), None


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("rng", [None, jax.random.key(1)], ids=["no rng", "rng"])
def test_linen_scans(axis, rng):
  scanned = nn.scan(
    Block,
    variable_axes={"params": axis, "batch_stats": 0},
    split_rngs={"params": True, "dropout": True},
    length=3,
  )()
  variables = scanned.init(jax.random.key(0), X, None)

  def loss_fn(model, x):
    return jnp.sum(model(x, None)[0])

  found = layers_of(optax_boost.linen.layer_axes(loss_fn, scanned, variables, X, rng))
  names = ("BatchNorm_0/bias", "BatchNorm_0/scale", "Dense_0/bias", "Dense_0/kernel")
  assert found == {name: (axis,) for name in names}


class Scanned(nnx.Module):
  def __init__(self):
    @nnx.vmap(in_axes=0)
    def make(key):
      return nnx.Linear(8, 8, rngs=nnx.Rngs(key))

    self.blocks = make(jax.random.split(jax.random.key(0), 3))
    self.norm = nnx.BatchNorm(8, rngs=nnx.Rngs(0))
    self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(1))

  def __call__(self, x):
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def run(x, block):
      return jnp.tanh(block(x))

    return self.dropout(self.norm(run(x, self.blocks)))


def test_nnx_scans():
  model = Scanned()
  before = nnx.state(model)

  def loss_fn(model, x, scale):
    return scale * jnp.sum(model(x))

  found = layers_of(optax_boost.nnx.layer_axes(loss_fn, model, X, 2.0))
  assert found == BOTH
  assert all(a is b for a, b in zip(*map(jax.tree.leaves, (before, nnx.state(model))), strict=True))
  # Only what is trained has a place among the params.
  biases = nnx.All(nnx.Param, nnx.PathContains("bias"))
  of_biases = layers_of(optax_boost.nnx.layer_axes(loss_fn, model, X, 2.0, wrt=biases))
  assert of_biases == {"blocks/bias": (0,)}


METHODS = {
  "lars": optax_boost.lars,
  "centralize": lambda rate, **kwargs: optax.chain(
    optax_boost.centralize(**kwargs), optax.sgd(rate)
  ),
}


@pytest.mark.parametrize("name", METHODS)
def test_the_train_step_tells_methods_the_layers(name):
  told = METHODS[name](0.1, layers=optax_boost.layer_axes(plain, params(), X))
  results = []
  for tx in (METHODS[name](0.1), told):
    step = optax_boost.make_train_step(plain, tx)
    results.append(step(step.init(params()), X)[0].params)
  chex.assert_trees_all_equal(*results)


@pytest.mark.parametrize(
  "make",
  [
    lambda rate, **kwargs: optax_boost.sgperm(method="pairs", key=0, **kwargs),
    lambda rate, **kwargs: optax_boost.laperm(optax.sgd(rate), 2, **kwargs),
  ],
  ids=["sgperm", "laperm"],
)
def test_the_train_step_warns_once_of_stacked_layers_taken_as_one(make):
  step = optax_boost.make_train_step(plain, make(0.1))
  state = step.init(params())
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    step.lower(state, X)
    step.lower(state, jnp.ones((4, 8)))
  assert [w.category for w in caught] == [optax_boost.StackedLayersWarning]
  assert r"'^blocks/kernel$': (0,)" in str(caught[0].message)
  told = make(0.1, layers=optax_boost.layer_axes(plain, params(), X))
  step = optax_boost.make_train_step(plain, told)
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    step.lower(step.init(params()), X)

"""Stacked layers are read from a trace of the loss."""

import functools

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


def scanned(kernels, x):
  return jax.lax.scan(lambda x, w: (x @ w, None), x, kernels)


def scans_in_a_scan(kernels, x):
  return jax.lax.scan(lambda x, inner: scanned(inner, x), x, kernels)


@pytest.mark.parametrize(
  ("shape", "loss_fn", "expected"),
  [
    ((8, 3, 8), lambda w, x: scanned(jnp.moveaxis(w, 1, 0), x), (1,)),
    ((3, 8, 2, 4), lambda w, x: scanned(w.reshape(-1, 8, 8), x), (0,)),
    ((3, 2, 8, 8), lambda w, x: scanned(w.reshape(-1, 8, 8), x), (0, 1)),
    ((2, 3, 8, 8), scans_in_a_scan, (0, 1)),
    ((3, 2, 8, 8), lambda w, x: scans_in_a_scan(w.swapaxes(0, 1), x), (0, 1)),
    ((8, 8), lambda w, x: jax.lax.scan(lambda h, x: (jnp.tanh(x @ w + h), None), x[0], x), None),
  ],
  ids=["transposed", "heads", "joined", "in a scan", "inner axis first", "data alone"],
)
def test_a_leaf_is_stacked_along_its_own_axes(shape, loss_fn, expected):
  found = stacked_axes(lambda p, x: jnp.sum(loss_fn(p["w"], x)[0]), {"w": jnp.ones(shape)}, X)
  assert found == ({} if expected is None else {"w": expected})


def test_a_barrier_around_all_params_stacks_the_scanned_ones_alone():
  def loss_fn(p, x):
    p = jax.lax.optimization_barrier(p)
    x, _ = jax.lax.scan(lambda x, w: (x @ w, None), x, p["blocks"])
    return jnp.sum(jnp.einsum("bi,ijk->bjk", x, p["head"]))

  cubes = {"blocks": jnp.ones((3, 8, 8)), "head": jnp.ones((8, 2, 2))}
  assert stacked_axes(loss_fn, cubes, X) == {"blocks": (0,)}


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

  split = optax_boost.linen.split_loss(loss_fn, scanned, variables)
  found = layers_of(optax_boost.layer_axes(*split, X, rng))
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

  def loss_fn(model, batch):
    x, scale = batch
    return scale * jnp.sum(model(x))

  batch = (X, 2.0)
  found = layers_of(optax_boost.layer_axes(*optax_boost.nnx.split_loss(loss_fn, model), batch))
  assert found == BOTH
  assert all(a is b for a, b in zip(*map(jax.tree.leaves, (before, nnx.state(model))), strict=True))
  # Only what is trained has a place among the params.
  biases = nnx.All(nnx.Param, nnx.PathContains("bias"))
  split = optax_boost.nnx.split_loss(loss_fn, model, wrt=biases)
  assert layers_of(optax_boost.layer_axes(*split, batch)) == {"blocks/bias": (0,)}


METHODS = {
  "lars": lambda **kwargs: optax_boost.lars(0.1, **kwargs),
  "centralize": lambda **kwargs: optax.chain(optax_boost.centralize(**kwargs), optax.sgd(0.1)),
  "laperm": lambda **kwargs: optax_boost.laperm(optax.sgd(3.0), 1, **kwargs),
  "exact": lambda **kwargs: optax_boost.sgperm(alpha_min=0.2, lamda=0.5, key=0, **kwargs),
  "pairs": lambda **kwargs: optax_boost.sgperm(alpha_min=0.2, method="pairs", key=0, **kwargs),
  "rank": lambda **kwargs: optax_boost.sgperm(alpha_min=0.2, method="rank", **kwargs),
}
each_method = pytest.mark.parametrize("make", METHODS.values(), ids=METHODS)


def drawn_params():
  leaves, structure = jax.tree.flatten(params())
  keys = jax.random.split(jax.random.key(0), len(leaves))
  drawn = [jax.random.normal(key, x.shape) for key, x in zip(keys, leaves, strict=True)]
  return jax.tree.unflatten(structure, drawn)


def unrolled(params, x):
  for i in range(3):
    x, _ = layer(x, params[f"block_{i}"])
  return jnp.mean(x @ params["head"])


def unroll(params):
  blocks = {f"block_{i}": jax.tree.map(lambda x, i=i: x[i], params["blocks"]) for i in range(3)}
  return blocks | {"head": params["head"]}


@each_method
def test_a_train_step_treats_layers_of_a_scan_as_unrolled_ones(make):
  x = jax.random.normal(jax.random.key(9), (16, 8))
  trained = []
  for loss_fn, start in ((plain, drawn_params()), (unrolled, unroll(drawn_params()))):
    step = optax_boost.make_train_step(loss_fn, make())
    state = step.init(start)
    for _ in range(3):
      state, _ = step(state, x)
    trained.append(state.params)
  chex.assert_trees_all_close(unroll(trained[0]), trained[1], rtol=1e-5, atol=1e-6)
  moved = jax.tree.map(lambda x, y: bool(jnp.any(x != y)), trained[0], drawn_params())
  assert all(jax.tree.leaves(moved["blocks"]))


def test_ranks_are_sorted_again_where_a_later_step_knows_the_layers():
  tx, start = METHODS["rank"](), drawn_params()
  state = tx.init(start)
  updates, state = tx.update(start, state, start)
  layers = optax_boost.layer_axes(plain, start, X)
  _, state = tx.update(start, state, optax.apply_updates(start, updates), layers=layers)
  for moved, first in zip(
    jax.tree.leaves(optax_boost.permuted_params(state).params), jax.tree.leaves(start), strict=True
  ):
    chex.assert_trees_all_equal(jnp.sort(moved, None), jnp.sort(first, None))

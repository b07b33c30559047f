"""Freezing: the optimizer keeps no state of layers that no step trains."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import optax_boost
from optax_boost import LayerSlice
from tests import meshes
from tests.freeze_layers.test_stacked_freezing import LAYERS, X, loss_fn, make_params

# The first three of five layers are never trained, nor is the embedding.
CUT = 3
BLOCKS = ("up", "bias", "down")
STACKED = optax_boost.LayerGroups(
  (
    ("embed", *(LayerSlice(f"blocks/{name}", 0, 0, CUT) for name in BLOCKS)),
    (*(LayerSlice(f"blocks/{name}", 0, CUT, LAYERS) for name in BLOCKS), "head"),
  ),
  (472, 296),
)
WRITTEN_OUT = ["embed|blocks/[0-2]", "blocks/[34]|head"]
FIXED = optax_boost.fixed_freezing(2, 1)
ADAMW = functools.partial(optax.adamw, 1e-2, weight_decay=0.1)


def split(params):
  """Params in which the frozen and the trained layers are separate leaves."""
  blocks = params["blocks"]
  frozen = {"embed": params["embed"], "blocks": {n: w[:CUT] for n, w in blocks.items()}}
  trained = {"blocks": {n: w[CUT:] for n, w in blocks.items()}, "head": params["head"]}
  return frozen, trained


def join(frozen, trained):
  blocks = {n: jnp.concatenate([w, trained["blocks"][n]]) for n, w in frozen["blocks"].items()}
  return {"embed": frozen["embed"], "blocks": blocks, "head": trained["head"]}


def number_of_bytes(tree):
  return sum(leaf.nbytes for leaf in jax.tree.leaves(tree) if leaf.ndim > 0)


def partitioned(inner, params):
  """The bytes of arrays in the state of `optax.partition`, which trains the trained leaves."""
  frozen, trained = split(params)
  labels = {
    "frozen": jax.tree.map(lambda _: "frozen", frozen),
    "trained": jax.tree.map(lambda _: "trained", trained),
  }
  tx = optax.partition({"frozen": optax.set_to_zero(), "trained": inner}, labels)
  return number_of_bytes(tx.init({"frozen": frozen, "trained": trained}))


def own_bytes(tx, params):
  """The bytes of the key and of other arrays that do not grow with the params."""
  return number_of_bytes(tx.init(params).freezing)


AROUND = {
  "nothing": lambda tx: tx,
  "accumulate": lambda tx: optax_boost.accumulate(tx, 4),
  "master_weights": optax_boost.master_weights,
  "both": lambda tx: optax_boost.accumulate(optax_boost.master_weights(tx), 4),
}


@pytest.mark.parametrize("form", ["stacked", "written out"])
@pytest.mark.parametrize("around", AROUND)
def test_the_state_has_the_bytes_of_a_partition(around, form):
  params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), make_params())
  expected = partitioned(AROUND[around](ADAMW()), params)
  groups = STACKED
  if form == "written out":
    layers = [{n: w[i] for n, w in params["blocks"].items()} for i in range(LAYERS)]
    params, groups = params | {"blocks": layers}, WRITTEN_OUT
  for tx in (
    optax_boost.freeze_layers(AROUND[around](ADAMW()), groups, FIXED),
    AROUND[around](optax_boost.freeze_layers(ADAMW(), groups, FIXED)),
  ):
    assert number_of_bytes(tx.init(params)) - own_bytes(tx, params) == expected
  # A schedule that trains these layers at last keeps state for all of them.
  thawing = optax_boost.gradual_unfreezing(2, every=10)
  tx = AROUND[around](optax_boost.freeze_layers(ADAMW(), groups, thawing))
  assert number_of_bytes(tx.init(params)) - own_bytes(tx, params) > 2 * expected


def alone(inner, params, steps):
  """Trains the trained layers alone with plain optax; returns all params."""
  frozen, trained = split(params)
  gradient = jax.grad(lambda trained: loss_fn(join(frozen, trained), X))
  state = inner.init(trained)

  @jax.jit
  def step(trained, state):
    updates, state = inner.update(gradient(trained), state, trained)
    return optax.apply_updates(trained, updates), state

  for _ in range(steps):
    trained, state = step(trained, state)
  return join(frozen, trained), state


def by_update(tx, params, state, steps):
  @jax.jit
  def step(params, state):
    updates, state = tx.update(jax.grad(loss_fn)(params, X), state, params)
    return optax.apply_updates(params, updates), state

  for _ in range(steps):
    params, state = step(params, state)
  return params, state


def by_apply_gradients(tx, params, state, steps):
  @jax.jit
  def step(params, state):
    return optax_boost.apply_gradients(tx, jax.grad(loss_fn)(params, X), state, params)

  for _ in range(steps):
    params, state = step(params, state)
  return params, state


def by_train_step(tx, params, state, steps):
  step = optax_boost.make_train_step(loss_fn, tx, donate=False)
  train_state = step.init(params)._replace(opt_state=state)
  for _ in range(steps):
    train_state, _ = step(train_state, X)
  return train_state.params, train_state.opt_state


DOORS = {"update": by_update, "apply_gradients": by_apply_gradients, "train step": by_train_step}
INNERS = {
  "adamw": ADAMW,
  "clip": lambda: optax.chain(optax.clip_by_global_norm(1e-2), ADAMW()),
  "clip after": lambda: optax.chain(optax.scale_by_adam(), optax.clip_by_global_norm(1e-2)),
  "adafactor": lambda: optax.adafactor(1e-2),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("inner", INNERS)
def test_the_trained_layers_are_trained_as_alone(inner, door):
  params = make_params()
  tx = optax_boost.freeze_layers(INNERS[inner](), STACKED, FIXED)
  ours, state = DOORS[door](tx, params, tx.init(params), 4)
  expected, expected_state = alone(INNERS[inner](), params, 4)
  frozen, _ = split(ours)
  chex.assert_trees_all_equal(frozen, split(params)[0])
  # The programs differ in how XLA fuses a gradient, so the last bits may.
  chex.assert_trees_all_close(ours, expected, rtol=2e-5, atol=1e-7)
  leaves, expected_leaves = map(jax.tree.leaves, (state.inner_state, expected_state))
  for leaf, expected_leaf in zip(leaves, expected_leaves, strict=True):
    np.testing.assert_allclose(leaf, expected_leaf, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("door", ["update", "apply_gradients"])
def test_equal_gradients_give_equal_bits(door):
  """With gradients that do not come from a loss, the trained layers are equal to the bit."""
  params, rng = make_params(), np.random.default_rng(3)
  tx, inner = optax_boost.freeze_layers(ADAMW(), STACKED, FIXED), ADAMW()
  state, (_, trained) = tx.init(params), split(params)
  inner_state = inner.init(trained)
  for _ in range(3):
    grads = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), p.dtype), params)
    updates, inner_state = inner.update(split(grads)[1], inner_state, trained)
    trained = optax.apply_updates(trained, updates)
    if door == "update":
      updates, state = tx.update(grads, state, params)
      params = optax.apply_updates(params, updates)
    else:
      params, state = optax_boost.apply_gradients(tx, grads, state, params)
  chex.assert_trees_all_equal(split(params)[1], trained)


def test_masters_and_windows_around_train_as_alone_in_bfloat16():
  params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), make_params())
  tx = AROUND["both"](optax_boost.freeze_layers(ADAMW(), STACKED, FIXED))
  inner = AROUND["both"](ADAMW())
  state, (frozen, trained) = tx.init(params), split(params)
  inner_state, rng = inner.init(trained), np.random.default_rng(4)
  for _ in range(8):
    grads = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), p.dtype), params)
    trained, inner_state = optax_boost.apply_gradients(inner, split(grads)[1], inner_state, trained)
    params, state = optax_boost.apply_gradients(tx, grads, state, params)
  chex.assert_trees_all_equal(split(params), (frozen, trained))


def test_a_training_resumes_from_a_checkpoint(tmp_path):
  tx = AROUND["accumulate"](optax_boost.freeze_layers(ADAMW(), STACKED, FIXED))
  step = optax_boost.make_train_step(loss_fn, tx, donate=False)
  state = step.init(make_params())
  for _ in range(6):
    state, _ = step(state, X)
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / "state", state)
    checkpointer.wait_until_finished()
    restored = checkpointer.restore(tmp_path / "state", jax.eval_shape(lambda: state))
  for _ in range(6):
    state, _ = step(state, X)
    restored, _ = step(restored, X)
  chex.assert_trees_all_equal(restored, state)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_sharded_layers_are_cut_without_a_gather(kind):
  mesh = meshes.mesh((8,), ("x",), kind)
  params = make_params()
  spec = lambda w: jax.sharding.PartitionSpec(*[None] * (w.ndim - 1), "x")  # noqa: E731
  place = lambda w: jax.device_put(  # noqa: E731
    w,
    jax.sharding.NamedSharding(mesh, spec(w) if w.shape[-1] == 8 else jax.sharding.PartitionSpec()),
  )
  tx = optax_boost.freeze_layers(ADAMW(), STACKED, FIXED)
  grads = jax.grad(loss_fn)(params, X)
  with jax.set_mesh(mesh):
    sharded = jax.tree.map(place, params)
    state = jax.jit(tx.init)(sharded)
    step = jax.jit(functools.partial(optax_boost.apply_gradients, tx))
    compiled = step.lower(jax.tree.map(place, grads), state, sharded).compile()
    assert not re.findall(r"= (\S+) all-(?:gather|to-all)", compiled.as_text())
    after, _ = step(jax.tree.map(place, grads), state, sharded)
  once, _ = optax_boost.apply_gradients(tx, grads, tx.init(params), params)
  chex.assert_trees_all_close(jax.device_get(after), jax.device_get(once), rtol=1e-5, atol=1e-7)
  assert jax.tree.map(lambda w: w.sharding.spec, after["blocks"]) == jax.tree.map(
    lambda w: w.sharding.spec, sharded["blocks"]
  )


PER_LAYER = {
  "lars": lambda axes: optax_boost.lars(1.0, layers=axes),
  "centralize": lambda axes: optax.chain(optax_boost.centralize(layers=axes), optax.sgd(0.1, 0.9)),
}


@pytest.mark.parametrize("method", PER_LAYER)
def test_methods_that_work_layer_by_layer_get_the_trained_slices(method):
  params = make_params()
  make = PER_LAYER[method]
  axes = optax_boost.layer_axes(loss_fn, params, X)
  tx = optax_boost.freeze_layers(make(axes), STACKED, FIXED)
  ours, _ = by_apply_gradients(tx, params, tx.init(params), 3)
  frozen, trained = split(params)
  axes = optax_boost.layer_axes(lambda t, x: loss_fn(join(frozen, t), x), trained, X)
  expected, _ = alone(make(axes), params, 3)
  chex.assert_trees_all_equal(split(ours)[0], frozen)
  chex.assert_trees_all_close(ours, expected, rtol=2e-5, atol=1e-7)

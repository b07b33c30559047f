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
  return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree) if leaf.ndim > 0)


def partitioned(inner, params):
  """The bytes of arrays in the state of `optax.partition`, which trains the trained leaves."""
  frozen, trained = split(params)
  labels = {
    "frozen": jax.tree.map(lambda _: "frozen", frozen),
    "trained": jax.tree.map(lambda _: "trained", trained),
  }
  tx = optax.partition({"frozen": optax.set_to_zero(), "trained": inner}, labels)
  return number_of_bytes(jax.eval_shape(tx.init, {"frozen": frozen, "trained": trained}))


def bytes_of_state(tx, params):
  """The bytes of arrays in the state, but for the counts of the groups."""
  state = jax.eval_shape(tx.init, params)
  return number_of_bytes(state) - number_of_bytes(state.freezing)


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
    assert bytes_of_state(tx, params) == expected
  # A schedule that trains these layers at last keeps state for all of them.
  thawing = optax_boost.gradual_unfreezing(2, every=10)
  tx = AROUND[around](optax_boost.freeze_layers(ADAMW(), groups, thawing))
  assert bytes_of_state(tx, params) > 2 * expected


def alone(inner, params, steps):
  """Trains the trained layers alone with plain optax; returns all params, and the state."""
  frozen, trained = split(params)
  gradient = jax.grad(lambda trained: loss_fn(join(frozen, trained), X))

  def step(carry, _):
    trained, state = carry
    updates, state = inner.update(gradient(trained), state, trained)
    return (optax.apply_updates(trained, updates), state), None

  (trained, state), _ = jax.lax.scan(step, (trained, inner.init(trained)), length=steps)
  return join(frozen, trained), state


def by_update(tx, params, grads, state):
  updates, state = tx.update(grads, state, params)
  return optax.apply_updates(params, updates), state


def by_apply_gradients(tx, params, grads, state):
  return optax_boost.apply_gradients(tx, grads, state, params)


def train(tx, params, steps, door=by_apply_gradients):
  def step(carry, _):
    params, state = carry
    return door(tx, params, jax.grad(loss_fn)(params, X), state), None

  return jax.lax.scan(step, (params, tx.init(params)), length=steps)[0]


def inners(params):
  axes = optax_boost.layer_axes(loss_fn, params, X)
  frozen, trained = split(params)
  kept_axes = optax_boost.layer_axes(lambda t, x: loss_fn(join(frozen, t), x), trained, X)
  same = {
    "adamw": ADAMW(),
    "clip": optax.chain(optax.clip_by_global_norm(1e-2), ADAMW()),
    "clip after": optax.chain(optax.scale_by_adam(), optax.clip_by_global_norm(1e-2)),
    "adafactor": optax.adafactor(1e-2),
  }
  # Methods that work layer by layer get the trained slices.
  of_layers = {
    "lars": lambda axes: optax_boost.lars(1.0, layers=axes),
    "centralize": lambda axes: optax.chain(
      optax_boost.centralize(layers=axes), optax.sgd(0.1, momentum=0.9)
    ),
  }
  pairs = {name: (inner, inner) for name, inner in same.items()}
  return pairs | {name: (make(axes), make(kept_axes)) for name, make in of_layers.items()}


def assert_trained_as_alone(trained, expected, params):
  (ours, state), (others, expected_state) = jax.device_get((trained, expected))
  chex.assert_trees_all_equal(split(ours)[0], jax.device_get(split(params)[0]))
  # The programs differ in how XLA fuses a gradient, so the last bits may.
  chex.assert_trees_all_close(ours, others, rtol=2e-5, atol=1e-7)
  leaves, expected_leaves = map(jax.tree.leaves, (state.inner_state, expected_state))
  for leaf, expected_leaf in zip(leaves, expected_leaves, strict=True):
    np.testing.assert_allclose(leaf, expected_leaf, rtol=2e-5, atol=1e-7)


def test_the_trained_layers_are_trained_as_alone():
  params = make_params()
  pairs = inners(params)
  txs = {n: optax_boost.freeze_layers(inner, STACKED, FIXED) for n, (inner, _) in pairs.items()}

  @jax.jit
  def programs(params):
    expected = {name: alone(inner, params, 4) for name, (_, inner) in pairs.items()}
    applied = {name: train(tx, params, 4) for name, tx in txs.items()}
    return expected, applied, train(txs["clip"], params, 4, by_update)

  expected, applied, updated = programs(params)
  for name, trained in applied.items():
    assert_trained_as_alone(trained, expected[name], params)
  assert_trained_as_alone(updated, expected["clip"], params)
  step = optax_boost.make_train_step(loss_fn, txs["clip"])
  state = step.init(params)
  for _ in range(4):
    state, _ = step(state, X)
  assert_trained_as_alone((state.params, state.opt_state), expected["clip"], params)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equal_gradients_give_equal_bits(dtype):
  """With gradients that do not come from a loss, also with masters and windows around."""
  params = jax.tree.map(lambda p: p.astype(dtype), make_params())
  around = AROUND["nothing" if dtype == "float32" else "both"]
  tx, inner = around(optax_boost.freeze_layers(ADAMW(), STACKED, FIXED)), around(ADAMW())
  step, step_alone = (jax.jit(functools.partial(by_apply_gradients, t)) for t in (tx, inner))
  frozen, trained = split(params)
  state, inner_state, rng = tx.init(params), inner.init(trained), np.random.default_rng(3)
  for _ in range(8):
    grads = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), p.dtype), params)
    trained, inner_state = step_alone(trained, split(grads)[1], inner_state)
    params, state = step(params, grads, state)
  chex.assert_trees_all_equal(split(params), (frozen, trained))


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
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


def test_a_state_without_the_moments_of_a_layer_does_not_serve_a_schedule_that_trains_it():
  thawing = optax_boost.gradual_unfreezing(2, every=3)
  fixed, thaws = (optax_boost.freeze_layers(ADAMW(), STACKED, s) for s in (FIXED, thawing))
  params = make_params()
  with pytest.raises(ValueError, match="lacks the leaf 'inner_state/0/mu/embed'"):
    optax_boost.apply_gradients(thaws, params, fixed.init(params), params)
  with pytest.raises(ValueError, match="has a leaf 'inner_state/0/mu/embed' too many"):
    optax_boost.apply_gradients(fixed, params, thaws.init(params), params)

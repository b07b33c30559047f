"""Freezing: the gradient of a layer that is frozen now leaves no batch out."""

import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
import optax_boost.nnx as ob_nnx

PARAMS = {"body": jnp.full((3, 4), 0.5), "head": jnp.full((4,), 0.5)}
# The body is frozen in every second step.
TURNS = optax_boost.FreezeSchedule([0, 1], [0, 1], cycle=(0, 2))


def freeze(tx, schedule=TURNS):
  return optax_boost.freeze_layers(tx, ["body", "head"], schedule)


WRAPPERS = {
  "accumulate": lambda tx: optax_boost.accumulate(tx, 1),
  "dynamic_loss_scale": lambda tx: optax_boost.dynamic_loss_scale(tx, 4.0),
  "master_weights": optax_boost.master_weights,
  "stochastic_rounding": lambda tx: optax_boost.stochastic_rounding(tx, 0),
  "skip_spikes": lambda tx: optax_boost.skip_spikes(tx, start=1),
}
SGD = optax.sgd(0.1, momentum=0.9)
TXS = {f"{name} around": wrap(freeze(SGD)) for name, wrap in WRAPPERS.items()}
TXS |= {f"{name} inside": freeze(WRAPPERS[name](SGD)) for name in ("accumulate", "skip_spikes")}


def nested(tx):
  for name in ("master_weights", "dynamic_loss_scale", "skip_spikes"):
    tx = WRAPPERS[name](tx)
  return tx


TXS["nested"] = nested(freeze(SGD))


def loss_fn(params, x):
  """The gradient of the body is NaN if its input is zero; the loss is finite."""
  of_body = jnp.sum(jnp.sqrt(params["body"] * x["body"]))
  return of_body + jnp.sum(params["head"] * x["head"])


def inputs(body=1.0, head=1.0):
  return {"body": jnp.full((3, 4), body), "head": jnp.full((4,), head)}


GOOD, OTHER = inputs(), inputs(body=4.0)
BAD = {"NaN": inputs(body=0.0), "spike": inputs(body=1e12)}
LEFT_OUT = {name: {"NaN"} for name in TXS} | {
  name: {"NaN", "spike"} for name in ("skip_spikes around", "skip_spikes inside", "nested")
}


def by_update(tx, params, grads, state):
  updates, state = tx.update(grads, state, params)
  return optax.apply_updates(params, updates), state


def by_apply_gradients(tx, params, grads, state):
  return optax_boost.apply_gradients(tx, grads, state, params)


def is_same(before, after):
  return all(map(np.array_equal, *map(jax.tree.leaves, (before, after))))


@pytest.mark.parametrize(
  ("door", "names"),
  [(by_update, ["accumulate around", "skip_spikes inside", "nested"]), (by_apply_gradients, TXS)],
  ids=["update", "apply_gradients"],
)
def test_a_bad_gradient_of_a_layer_that_is_frozen_now_leaves_no_batch_out(door, names):
  runs = {}
  for name in names:
    tx = TXS[name]
    scale = 4.0 if tx.init(PARAMS).scaling is not None else 1.0
    runs[name] = PARAMS, tx.init(PARAMS), scale

  @jax.jit
  def step(runs, x):
    moved = {}
    for name, (params, state, scale) in runs.items():
      scale = state.scaling.loss_scale if state.scaling is not None else scale
      grads = jax.grad(lambda p, scale=scale: scale * loss_fn(p, x))(params)
      moved[name] = *door(TXS[name], params, grads, state), scale
    return moved

  runs = step(step(runs, GOOD), GOOD)
  for kind, bad in BAD.items():
    after = step(runs, bad)
    for name, (params, state, _) in runs.items():
      moved, new, _ = after[name]
      is_left_out = kind in LEFT_OUT[name]
      assert is_same(params, moved) == is_left_out, (name, kind)
      assert int(new.count) == int(state.count) + (not is_left_out), (name, kind)
  # The body is frozen.
  runs = step(runs, GOOD)
  expected = step(runs, OTHER)
  for bad in BAD.values():
    after = step(runs, bad)
    chex.assert_trees_all_equal(after, expected)
  for params, state, _ in expected.values():
    assert int(state.count) == 4
    assert not is_same(PARAMS["head"], params["head"])


def test_a_window_keeps_a_micro_batch_whose_bad_gradient_is_frozen():
  orders = {
    "around": optax_boost.accumulate(freeze(SGD), 2),
    "inside": freeze(optax_boost.accumulate(SGD, 2)),
    "with masters": optax_boost.accumulate(nested(freeze(SGD)), 2),
  }

  @jax.jit
  def run(x):
    results = {}
    for name, tx in orders.items():

      def micro_step(carry, x, tx=tx):
        params, state = carry
        scale = state.scaling.loss_scale if state.scaling is not None else 1.0
        grads = jax.grad(lambda p: scale * loss_fn(p, x))(params)
        carry = optax_boost.apply_gradients(tx, grads, state, params)
        return carry, carry[1].count

      results[name] = jax.lax.scan(micro_step, (PARAMS, tx.init(PARAMS)), x)
    return results

  def batches(*xs):
    return jax.tree.map(lambda *x: jnp.stack(x), *xs)

  for bad in BAD.values():
    # In the second window, the body is frozen.
    ours, expected = (run(batches(GOOD, GOOD, x, GOOD, GOOD)) for x in (bad, OTHER))
    chex.assert_trees_all_equal(ours, expected)
    for _, counts in ours.values():
      assert counts.tolist() == [0, 1, 1, 2, 2]
  # While it is trained, the micro-batch with a NaN is left out.
  for _, counts in run(batches(BAD["NaN"], GOOD, GOOD, GOOD, BAD["NaN"])).values():
    assert counts.tolist() == [0, 0, 1, 1, 2]


@pytest.mark.filterwarnings("ignore:`freeze_layers` saves no time in this step")
@pytest.mark.parametrize("door", ["calls", "a scan"])
def test_a_train_step_leaves_out_no_batch_whose_bad_gradient_is_frozen(door):
  """Also inside of a user's scan, where the whole backward pass is computed."""
  step = optax_boost.make_train_step(loss_fn, TXS["nested"], donate=False)
  state = step.init(PARAMS)
  batches = [GOOD, GOOD, BAD["NaN"], BAD["spike"], GOOD, BAD["NaN"], GOOD, BAD["spike"], GOOD]
  if door == "calls":
    states = []
    for batch in batches:
      state, _ = step(state, batch)
      states.append(state.opt_state)
    states = jax.tree.map(lambda *x: jnp.stack(x), *states)
  else:
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *batches)
    states = jax.jit(lambda s, x: jax.lax.scan(lambda s, x: (step(s, x)[0],) * 2, s, x))(
      state, stacked
    )[1].opt_state
  # Two bad batches of the trained body are left out; then it is frozen in each bad batch.
  assert states.count.tolist() == [1, 2, 2, 2, 3, 4, 5, 6, 7]
  assert states.left_out.notfinite_count.tolist() == [0, 0, 1, 1, 1, 1, 1, 1, 1]
  assert states.spikes.spike_count.tolist() == [0, 0, 0, 1, 1, 1, 1, 1, 1]
  assert states.scaling.loss_scale.tolist() == [4.0, 4.0] + [2.0] * 7


class Model(nnx.Module):
  def __init__(self):
    self.body, self.head = (nnx.Param(x + 0) for x in PARAMS.values())


def test_an_nnx_step_leaves_out_no_batch_whose_bad_gradient_is_frozen():
  model = Model()
  tx = optax_boost.skip_spikes(freeze(SGD), start=1)
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  step = ob_nnx.make_train_step(
    lambda model, x: loss_fn({"body": model.body[...], "head": model.head[...]}, x)
  )
  counts = []
  for x in (GOOD, GOOD, BAD["NaN"], GOOD, BAD["NaN"], GOOD, BAD["spike"], BAD["spike"]):
    step(model, optimizer, x)
    counts.append(int(optimizer.opt_state.count[...]))
  assert counts == [1, 2, 2, 3, 4, 5, 6, 6]


def test_a_mean_norm_for_each_depth_makes_no_thaw_a_spike():
  # The body's gradient is 100 times as large as the head's, and is frozen in steps 0 to 3.
  schedule = optax_boost.FreezeSchedule([0, 4, 8], [1, 0, 1])
  good = {"body": jnp.full((3, 4), 100.0), "head": jnp.ones(4)}
  of_head = good | {"head": jnp.full(4, 20.0)}  # less than the body's, and a spike of the head's
  of_body = good | {"body": jnp.full((3, 4), 1000.0)}
  grads = [good, good, good, of_head, good, good, good, of_body, good, good, of_head, good]
  stacked = jax.tree.map(lambda *x: jnp.stack(x), *grads)
  for tx in (
    optax_boost.skip_spikes(freeze(SGD, schedule), start=2),
    freeze(optax_boost.skip_spikes(SGD, start=2), schedule),
  ):

    def step(carry, grads, tx=tx):
      params, state = optax_boost.apply_gradients(tx, grads, carry[1], carry[0])
      return (params, state), (state.count, state.spikes.spike_count)

    counts, spikes = jax.jit(lambda tx=tx, step=step: jax.lax.scan(
      step, (PARAMS, tx.init(PARAMS)), stacked
    ))()[1]  # fmt: skip
    assert spikes.tolist() == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 3, 3]
    assert counts.tolist() == [1, 2, 3, 3, 4, 5, 6, 6, 7, 8, 8, 9]

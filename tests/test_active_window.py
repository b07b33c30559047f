"""`active_window`: which layers train when, with moments for these alone."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost

L = 5


def stacked():
  rng = np.random.default_rng(0)
  return {
    "blocks": {
      "bias": jnp.asarray(rng.normal(size=(L, 3)), jnp.float32),
      "kernel": jnp.asarray(rng.normal(size=(2, L, 3)), jnp.float32),
    },
    "head": jnp.asarray(rng.normal(size=3), jnp.float32),
  }


AXES = {"^blocks/bias": 0, "^blocks/kernel": 1}
NAMES = tuple(f"^block_{i}/" for i in range(L))


def unrolled(tree):
  blocks = {
    f"block_{i}": {"bias": tree["blocks"]["bias"][i], "kernel": tree["blocks"]["kernel"][:, i]}
    for i in range(L)
  }
  return {**blocks, "head": tree["head"]}


def gradients(params, step):
  return jax.tree.map(lambda p: jnp.sin(3 * p + step), params)


def run(tx, params, steps, to_tree=lambda tree: tree):
  """Params and the trained layers after each step."""
  update = jax.jit(tx.update)
  state, seen = tx.init(to_tree(params)), []
  params = to_tree(params)
  for step in range(steps):
    updates, state = update(gradients(params, step), state, params)
    params = optax.apply_updates(params, updates)
    seen.append((params, np.asarray(state.layers).tolist()))
  return seen, state


def by_hand(params, windows, every, inner):
  """The same with one optimizer a layer, made anew when its window begins."""
  params = unrolled(params)
  head_state = inner.init(params["head"])
  states, seen = {}, []
  for step in range(len(windows) * every):
    window = windows[step // every]
    if step % every == 0:
      states = {i: inner.init(params[f"block_{i}"]) for i in window}
    grads = gradients(params, step)
    updates, head_state = inner.update(grads["head"], head_state, params["head"])
    after = {**params, "head": params["head"] + updates}
    for i in window:
      name = f"block_{i}"
      updates, states[i] = inner.update(grads[name], states[i], params[name])
      after[name] = optax.apply_updates(params[name], updates)
    params = after
    seen.append((params, list(window)))
  return seen


@pytest.mark.parametrize("form", ["stacked", "unrolled"])
@pytest.mark.parametrize(
  ("order", "windows"),
  [
    ("forward", [(0, 1), (2, 3), (3, 4), (0, 1)]),
    ("backward", [(3, 4), (2, 3), (0, 1), (3, 4)]),
  ],
)
def test_each_window_trains_as_by_hand(form, order, windows):
  inner = optax.adamw(0.1, weight_decay=0.1)
  layers, to_tree = (AXES, lambda t: t) if form == "stacked" else (NAMES, unrolled)
  tx = optax_boost.active_window(inner, layers, 2, every=3, order=order)
  seen, _ = run(tx, stacked(), 12, to_tree)
  for (ours, layers), (theirs, window) in zip(
    seen, by_hand(stacked(), windows, 3, inner), strict=True
  ):
    assert layers == window
    ours = unrolled(ours) if form == "stacked" else ours
    chex.assert_trees_all_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
  "inner",
  [
    optax.contrib.muon(0.1),
    optax.adamw(0.1, weight_decay=0.1, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
    optax_boost.lars(0.1),
    optax.chain(optax_boost.centralize(), optax.clip_by_block_rms(0.5), optax.sgd(0.1)),
  ],
  ids=["muon", "decay of kernels", "lars", "centralize, clip"],
)
def test_an_optimizer_sees_layers_in_leaves_of_their_own_as_they_are(inner):
  params = unrolled(stacked())
  for i in range(L):
    params[f"block_{i}"]["kernel"] = params[f"block_{i}"]["kernel"].T
  tx = optax_boost.active_window(inner, NAMES, L, every=3)
  updates, _ = tx.update(gradients(params, 0), tx.init(params), params)
  expected, _ = inner.update(gradients(params, 0), inner.init(params), params)
  chex.assert_trees_all_close(updates, expected, rtol=1e-5, atol=1e-6)


def test_random_windows_are_distinct_layers_and_all_come():
  tx = optax_boost.active_window(optax.sgd(0.1), AXES, 2, every=1, order="random", key=3)
  seen, _ = run(tx, stacked(), 20)
  assert all(a < b for _, (a, b) in seen)
  assert {layer for _, layers in seen for layer in layers} == set(range(L))
  assert len({tuple(layers) for _, layers in seen}) > 3
  other = optax_boost.active_window(optax.sgd(0.1), AXES, 2, every=1, order="random", key=4)
  assert [layers for _, layers in run(other, stacked(), 20)[0]] != [layers for _, layers in seen]


def test_inactive_layers_keep_their_bits():
  tx = optax_boost.active_window(optax.adamw(0.1, weight_decay=0.1), AXES, 2, every=3)
  params = stacked()
  after = run(tx, params, 3)[0][-1][0]
  np.testing.assert_array_equal(after["blocks"]["bias"][2:], params["blocks"]["bias"][2:])
  np.testing.assert_array_equal(after["blocks"]["kernel"][:, 2:], params["blocks"]["kernel"][:, 2:])
  assert not np.any(after["blocks"]["bias"][:2] == params["blocks"]["bias"][:2])


@pytest.mark.parametrize("form", ["stacked", "unrolled"])
def test_layers_may_lie_on_other_devices_of_an_explicit_mesh(form):
  mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
  kernels = jnp.sin(jnp.arange(32.0)).reshape(2, 4, 4)
  params = {"a": kernels, "b": kernels} if form == "unrolled" else {"a": kernels}
  layers = ("a", "b") if form == "unrolled" else {"a": 1}
  tx = optax_boost.active_window(optax.adam(0.1), layers, 1, every=1)

  def two_steps(params):
    update, state, seen = jax.jit(tx.update), tx.init(params), []
    for _ in range(2):
      updates, state = update(params, state, params)
      seen.append(updates)
    return seen

  expected = two_steps(params)
  with jax.set_mesh(mesh):
    sharded = jax.device_put(params, jax.sharding.PartitionSpec(None, "x", "y"))
    ours = two_steps(sharded)
  chex.assert_trees_all_close(jax.device_get(ours), jax.device_get(expected), rtol=1e-5)
  assert all(x.sharding == sharded["a"].sharding for x in jax.tree.leaves(ours))


@pytest.mark.parametrize("form", ["stacked", "unrolled"])
def test_moments_exist_for_the_window_alone(form):
  layers, to_tree = (AXES, lambda t: t) if form == "stacked" else (NAMES, unrolled)
  tx = optax_boost.active_window(optax.adam(0.1), layers, 2, every=1)
  params = to_tree(stacked())
  state = jax.eval_shape(tx.init, params)
  sizes = [x.size for x in jax.tree.leaves(state) if x.ndim > 0]
  assert sum(sizes) == 2 + 2 * (2 * (3 + 6) + 3)  # numbers of layers, two moments of each


def test_resuming_anywhere_changes_nothing():
  tx = optax_boost.active_window(optax.adam(0.1), AXES, 2, every=2, order="random", key=1)
  update = jax.jit(tx.update)
  params, state = stacked(), tx.init(stacked())
  for step in range(7):
    if step == 3:  # in the middle of a window
      state = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), state)
    updates, state = update(gradients(params, step), state, params)
    params = optax.apply_updates(params, updates)
  chex.assert_trees_all_equal(params, run(tx, stacked(), 7)[0][-1][0])
  assert update._cache_size() == 1


def test_works_inside_a_loss_scale_accumulation_and_masters():
  def loss(params, batch):
    x = batch
    for i in range(L):
      x = jnp.tanh(x @ params["blocks"][i])
    return jnp.mean((x - 0.5) ** 2)

  params = {"blocks": 0.5 * jnp.asarray(np.random.default_rng(0).normal(size=(L, 3, 3)))}
  params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
  tx = optax_boost.active_window(optax.adam(0.02), {"blocks": 0}, 2, every=5)
  tx = optax_boost.master_weights(optax_boost.accumulate(optax_boost.dynamic_loss_scale(tx), 2))
  step = optax_boost.make_train_step(loss, tx)
  state = step.init(params)
  losses, first = [], []
  for _ in range(60):
    state, metrics = step(state, jnp.ones((4, 3), jnp.bfloat16))
    losses.append(float(metrics["loss"]))
    first.append(int(metrics["active_window/first_layer"]))
  assert losses[-1] < 0.3 * losses[0]
  assert first[1::10] == [0, 2, 3, 0, 2, 3]
  assert step.cache_size() == 1


def test_of_several_axes_the_first_counts():
  params = {"b": jnp.zeros((2, 3, 4))}
  tx = optax_boost.active_window(optax.sgd(1.0), {"b": (1, 0)}, window=1, every=1)
  updates, _ = tx.update(jax.tree.map(jnp.ones_like, params), tx.init(params), params)
  np.testing.assert_array_equal(updates["b"][..., 0], [[-1, 0, 0]] * 2)


def test_stacks_of_different_numbers_of_layers_are_refused():
  params = {"encoder": jnp.ones((4, 2)), "decoder": jnp.ones((3, 2))}
  tx = optax_boost.active_window(optax.sgd(0.1), {"coder": 0}, 1, every=1)
  with pytest.raises(
    ValueError, match=r"same number of layers; got 3 in 'decoder', 4 in 'encoder'"
  ):
    tx.init(params)


def test_a_window_larger_than_the_model_is_refused():
  tx = optax_boost.active_window(optax.sgd(0.1), AXES, 6, every=1)
  with pytest.raises(
    ValueError, match=r"window of 6 layers, but the params have 5\. Pass window=5"
  ):
    tx.init(stacked())


@pytest.mark.parametrize("layers", [{}, {"blocks": ()}])
def test_no_layers_are_refused_with_advice(layers):
  with pytest.raises(
    ValueError, match=r"at least one axis .*scans over no layers: name the layers"
  ):
    optax_boost.active_window(optax.sgd(0.1), layers, 1, every=1)


def test_layers_of_different_shapes_are_refused():
  params = {"a": jnp.ones(3), "b": jnp.ones(4)}
  tx = optax_boost.active_window(optax.sgd(0.1), ("a", "b"), 1, every=1)
  with pytest.raises(ValueError, match=r"layers of equal shapes; got \[\(3,\)\] for 'a' and"):
    tx.init(params)


def test_a_pattern_is_idle_where_it_matches_neither_the_layers_nor_the_rest(recwarn):
  stacks = {"^blocks/bias": 0, "^blocks/kernel": 1}
  tx = optax_boost.active_window(optax_boost.lars(0.1, stacked_axes=stacks), AXES, 2, every=2)
  run(tx, stacked(), 1)
  assert not [w for w in recwarn if w.category is optax_boost.NoEffectWarning]
  idle = optax_boost.lars(0.1, stacked_axes={**stacks, "^mlp/": 0})
  with pytest.warns(optax_boost.NoEffectWarning, match=r"match no leaf: \['\^mlp/'\]"):
    optax_boost.active_window(idle, AXES, 2, every=2).init(stacked())


def test_windows_of_local_training_move_as_those_of_a_run_alone():
  tx = optax_boost.active_window(optax.adam(0.1), AXES, 2, every=2)
  mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
  members = [jax.tree.map(lambda x, s=scale: s * x, stacked()) for scale in (1.0, 0.5)]

  def steps(params, state):
    params, state = jax.tree.map(lambda x: x[0], (params, state))
    for step in range(3):
      updates, state = tx.update(gradients(params, step), state, params)
      params = optax.apply_updates(params, updates)
    return jax.tree.map(lambda x: x[None], params)

  split = jax.sharding.PartitionSpec("x")
  local = jax.jit(jax.shard_map(steps, mesh=mesh, in_specs=split, out_specs=split))
  trained = local(*jax.tree.map(lambda *xs: jnp.stack(xs), *((m, tx.init(m)) for m in members)))
  for i, member in enumerate(members):
    expected = run(tx, member, 3)[0][-1][0]
    chex.assert_trees_all_close(jax.tree.map(lambda x, i=i: x[i], trained), expected, rtol=1e-5)

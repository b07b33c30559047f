"""Freezing: the first steps of a thawed layer are those of a fresh optimizer."""

import functools
import itertools
import re
from typing import NamedTuple
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
from optax_boost import LayerSlice
from tests import meshes

RATE, THAW, AFTER = 1e-3, 500, 40
OPTIMIZERS = {
  "adam": optax.adam,
  "adamw": functools.partial(optax.adamw, weight_decay=1e-2),
  "nadam": optax.nadam,
  "radam": optax.radam,
  "amsgrad": optax.amsgrad,
  "lamb": optax.lamb,
  "adafactor": optax.adafactor,
  "adafactor, unclipped": functools.partial(optax.adafactor, clipping_threshold=None),
  "adabelief": optax.adabelief,
  # These correct a bias as well, or make a special first step.
  "adan": optax.adan,
  "ademamix": optax.contrib.ademamix,
  "adopt": optax.contrib.adopt,
  "muon": optax.contrib.muon,
  "rmsprop": functools.partial(optax.rmsprop, bias_correction=True),
}
if hasattr(optax, "optimistic_adam_v2"):  # the oldest optax has another function
  OPTIMIZERS["optimistic adam"] = optax.optimistic_adam_v2
TWO = optax_boost.gradual_unfreezing(2, every=THAW)


def written_out():
  # LAMB does not scale the first step of params that are zero.
  return {"body": jnp.zeros((3, 4)), "head": jnp.full((4,), 0.5)}


def stacked():
  return {"layers": jnp.full((5, 3, 4), 0.5), "head": jnp.full((4,), 0.5)}


# Layers 0 to 2 of five are in the first group, layers 3 and 4 in the last.
HALF = optax_boost.LayerGroups(
  ((LayerSlice("layers", 0, 0, 3),), (LayerSlice("layers", 0, 3, 5), "head")), (36, 28)
)


def scan_steps(tx, params, gradients, steps):
  """Returns the updates, with a first axis of steps, and the last params and state."""

  def step(carry, t):
    params, state = carry
    updates, state = tx.update(gradients(t, params), state, params)
    return (optax.apply_updates(params, updates), state), updates

  (params, state), updates = jax.lax.scan(step, (params, tx.init(params)), jnp.arange(steps))
  return updates, params, state


def train(tx, params, gradients, steps):
  """As `scan_steps`, compiled, with updates in NumPy."""
  updates, params, state = jax.jit(lambda p: scan_steps(tx, p, gradients, steps))(params)
  return jax.device_get(updates), params, state


def at(tree, index):
  return jax.tree.map(lambda x: x[index], tree)


def ones(t, params):
  return jax.tree.map(jnp.ones_like, params)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_thawed_layer_starts_as_with_a_fresh_optimizer(name):
  inner = OPTIMIZERS[name](RATE)
  tx = optax_boost.freeze_layers(inner, ["body", "head"], TWO)
  updates, _, _ = train(tx, written_out(), ones, THAW + AFTER)
  alone, _, _ = train(inner, written_out(), ones, THAW + AFTER)
  assert not np.any(updates["body"][:THAW])
  fresh = alone["body"][:AFTER]
  np.testing.assert_allclose(updates["body"][THAW:] / RATE, fresh / RATE, rtol=1e-4)
  # The thaw does not change the updates of the head.
  np.testing.assert_allclose(updates["head"] / RATE, alone["head"] / RATE, rtol=1e-4)


# Optimizers whose updates do not depend on the size of the whole leaf.
WITHOUT = ("lamb", "muon", "adafactor", "adafactor, unclipped")
STACKED = {name: make for name, make in OPTIMIZERS.items() if name not in WITHOUT} | {
  "adafactor": functools.partial(
    optax.adafactor, multiply_by_parameter_scale=False, clipping_threshold=None
  )
}


@pytest.mark.parametrize("name", STACKED)
def test_a_thawed_layer_of_a_stacked_leaf_starts_as_with_a_fresh_optimizer(name):
  inner = STACKED[name](RATE)
  tx = optax_boost.freeze_layers(inner, HALF, TWO)
  updates, _, _ = train(tx, stacked(), ones, THAW + AFTER)
  alone, _, _ = train(inner, stacked(), ones, THAW + AFTER)
  assert not np.any(updates["layers"][:THAW, :3])
  ours, alone = updates["layers"][THAW:] / RATE, alone["layers"] / RATE
  # The decay of AdamW follows the params, which start at 0.5.
  np.testing.assert_allclose(ours[:, 3:], alone[THAW:, 3:], rtol=0.05)
  # The thawed layers start as with a fresh optimizer.
  np.testing.assert_allclose(ours[:, :3], alone[:AFTER, :3], rtol=0.05)


def test_factored_moments_of_a_thawed_layer_start_as_with_a_fresh_optimizer():
  inner = STACKED["adafactor"](RATE)
  plan = optax_boost.LayerGroups(((LayerSlice("w", 0, 0, 2),), (LayerSlice("w", 0, 2, 3),)), (2, 1))
  tx = optax_boost.freeze_layers(inner, plan, optax_boost.gradual_unfreezing(2, every=100))
  params = {"w": jnp.ones((3, 128, 130))}
  updates, _, state = train(tx, params, ones, 110)
  assert optax.tree.get(state, "v_row")["w"].shape == (3, 128)
  assert not np.any(updates["w"][:100, :2])
  np.testing.assert_allclose(updates["w"][:, 2, 0, 0], -RATE, rtol=1e-4)
  np.testing.assert_allclose(updates["w"][100:, :, 0, 0], -RATE, rtol=1e-4)


def random_gradients(params):
  """Gradients of each step, from a NumPy generator."""
  steps = np.random.default_rng(0).normal(size=(60, 100)).astype(np.float32)
  leaves, structure = jax.tree.flatten(params)
  ends = np.cumsum([leaf.size for leaf in leaves])[:-1]

  def gradients(t, params):
    columns = np.split(steps, ends, axis=1)
    flat = [
      jnp.asarray(column[:, : leaf.size].reshape(-1, *leaf.shape))[t]
      for column, leaf in zip(columns, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, flat)

  return gradients


def adam_of_a_param(gradients, is_trained, b1=0.9, b2=0.999, eps=1e-8):
  """Adam's updates in PyTorch, where a param whose `grad` is None keeps its state and its step."""
  m = v = np.zeros(gradients.shape[1:])
  n, updates = 0, []
  for g, trained in zip(np.asarray(gradients, np.float64), is_trained, strict=True):
    if not trained:
      updates.append(np.zeros(m.shape))
      continue
    n += 1
    m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
    updates.append(-RATE * (m / (1 - b1**n)) / (np.sqrt(v / (1 - b2**n)) + eps))
  return np.stack(updates)


SCHEDULES = {
  "in turns": optax_boost.continuous_freezing(3, 0.4),
  "at intervals": optax_boost.interval_freezing(3, 0.5),
  "two thaws": optax_boost.gradual_unfreezing(3, every=20),
  "for good": optax_boost.progressive_freezing(3, 60, anneal=False),
  "again": optax_boost.FreezeSchedule(3, lambda t, key: jnp.array([2, 0, 1, 2, 0])[t // 12]),
}


def depths(schedule, steps):
  key = jax.random.key(0)
  return np.array([int(schedule.frozen_groups(jnp.int32(t), key)) for t in range(steps)])


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_steps_equal_pytorchs_with_a_count_per_param(schedule):
  params = {"a": jnp.zeros((2, 3)), "b": jnp.zeros(4), "c": jnp.zeros(())}
  gradients = random_gradients(params)
  tx = optax_boost.freeze_layers(optax.adam(RATE), ["a", "b", "c"], schedule)
  updates, _, state = train(tx, params, gradients, 60)
  frozen = depths(schedule, 60)
  all_gradients = jax.vmap(lambda t: gradients(t, params))(jnp.arange(60))
  for group, name in enumerate("abc"):
    expected = adam_of_a_param(all_gradients[name], frozen <= group)
    np.testing.assert_allclose(updates[name], expected, rtol=1e-3, atol=1e-7)
  (counts,) = state.group_counts
  assert counts.tolist() == [np.sum(frozen <= group) for group in range(3)]


# The axis of layers and the schedule are independent, so few pairs are enough.
@pytest.mark.parametrize(
  ("name", "axis"), [*((name, 0) for name in SCHEDULES), ("again", 1), ("at intervals", 1)]
)
def test_steps_of_stacked_layers_equal_the_steps_of_unrolled_layers(name, axis):
  schedule = SCHEDULES[name]
  layers = {"w": jnp.zeros((4, 2, 3) if axis == 0 else (2, 4, 3)), "head": jnp.zeros(2)}
  first, second, third = (LayerSlice("w", axis, *run) for run in ((0, 1), (1, 3), (3, 4)))
  plan = optax_boost.LayerGroups(((first,), (second,), (third, "head")), (6, 12, 8))
  gradients = random_gradients(layers)
  updates, _, _ = train(
    optax_boost.freeze_layers(optax.adam(RATE), plan, schedule), layers, gradients, 60
  )
  all_gradients = jax.vmap(lambda t: gradients(t, layers))(jnp.arange(60))
  frozen = depths(schedule, 60)
  for layer, group in enumerate((0, 1, 1, 2)):
    layer_gradients = np.take(np.asarray(all_gradients["w"]), layer, axis + 1)
    expected = adam_of_a_param(layer_gradients, frozen <= group)
    ours = np.take(np.asarray(updates["w"]), layer, axis + 1)
    np.testing.assert_allclose(ours, expected, rtol=1e-3, atol=1e-7)


SCHEDULED = {
  "schedule": optax.adam(optax.linear_schedule(1.0, 0.0, 100)),
  "injected": optax.inject_hyperparams(optax.adam)(optax.linear_schedule(1.0, 0.0, 100)),
  "in a chain": optax.chain(
    optax.scale_by_adam(), optax.scale_by_schedule(lambda t: -(1 - t / 100))
  ),
}


@pytest.mark.parametrize("inner", SCHEDULED.values(), ids=SCHEDULED)
def test_a_learning_rate_schedule_goes_on_after_a_thaw(inner):
  schedule = optax_boost.gradual_unfreezing(2, every=50)
  tx = optax_boost.freeze_layers(inner, ["body", "head"], schedule)
  updates, _, _ = train(tx, written_out(), ones, 80)
  t = np.arange(80)
  np.testing.assert_allclose(updates["head"][:, 0], -(1 - t / 100), rtol=1e-4)
  expected = np.where(t < 50, 0, -(1 - t / 100))
  np.testing.assert_allclose(updates["body"][:, 0, 0], expected, rtol=1e-4)


CLIP = optax.clip_by_global_norm(1.0)
CLIPPED = {
  "before": optax.chain(CLIP, optax.ema(0.9), optax.scale(-1.0)),
  "after": optax.chain(optax.scale_by_adam(), CLIP, optax.scale(-1.0)),
  "twice": optax.chain(CLIP, optax.scale_by_adam(), CLIP, optax.scale(-1.0)),
}


NOT_SHARED = "keeps one step count for all groups, since the optimizer computes an update from the"


def zeros_before(start, group):
  """Gradients of ones, but zeros for the entries of a group in the steps before `start`."""

  def gradients(t, params):
    updates = ones(t, params)
    masked = jax.tree.map(lambda u, of: jnp.where((t < start) & of, 0.0, u), updates, group)
    return masked

  return gradients


@pytest.mark.parametrize("clipped", CLIPPED)
@pytest.mark.parametrize("stack", [False, True], ids=["written out", "stacked"])
def test_clipping_takes_the_norm_of_all_trained_layers(clipped, stack):
  schedule = optax_boost.gradual_unfreezing(2, every=200)
  params, groups = (stacked(), HALF) if stack else (written_out(), ["body", "head"])
  first = {"head": False}
  first |= {"layers": np.arange(5).reshape(5, 1, 1) < 3} if stack else {"body": True}
  tx = optax_boost.freeze_layers(CLIPPED[clipped], groups, schedule)
  if clipped == "before":
    state = tx.init(params)
    assert len(state.group_counts) == 1
  else:
    with pytest.warns(UserWarning, match=NOT_SHARED):
      state = tx.init(params)
    assert state.group_counts == ()
  with warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)
    updates, _, _ = train(tx, params, ones, 203)
  trained = 28 if stack else 4
  head = updates["head"]
  np.testing.assert_allclose(head[100:200], -1 / np.sqrt(trained), rtol=1e-4)
  squares = sum(np.sum(u.reshape(203, -1) ** 2, 1) for u in jax.tree.leaves(updates))
  if clipped != "before":
    np.testing.assert_allclose(squares, 1.0, rtol=1e-4)
    # With the run's count, a step equals a step of the optimizer on gradients with zeros.
    plain, _, _ = train(CLIPPED[clipped], params, zeros_before(200, first), 203)
    chex.assert_trees_all_close(updates, plain, rtol=1e-5, atol=1e-7)


def test_counts_of_each_group_that_are_asked_for_are_kept_after_a_clipping():
  schedule = optax_boost.gradual_unfreezing(2, every=200)
  tx = optax_boost.freeze_layers(CLIPPED["after"], ["body", "head"], schedule, counts="group")
  updates, _, state = train(tx, written_out(), ones, 203)
  (counts,) = state.group_counts
  assert counts.tolist() == [3, 203]
  np.testing.assert_allclose(updates["body"][:200], 0)


SCHEDULES_OF_TWO = optax_boost.FreezeSchedule(2, lambda t, key: (t // 5 + 1) % 2)


def test_training_goes_on_exactly_from_saved_arrays():
  tx = optax_boost.freeze_layers(optax.adam(RATE), ["body", "head"], SCHEDULES_OF_TWO)
  gradients = random_gradients(written_out())

  @functools.partial(jax.jit, donate_argnums=(1, 2))
  def step(t, params, state):
    updates, state = tx.update(gradients(t, params), state, params)
    return optax.apply_updates(params, updates), state

  def run(save_and_load):
    params, state = written_out(), tx.init(written_out())
    for t in range(30):
      params, state = step(t, params, save_and_load(state))
    return params, state

  def through_arrays(state):
    leaves = [np.array(leaf) for leaf in jax.tree.leaves(state)]
    return jax.tree.unflatten(jax.tree.structure(tx.init(written_out())), leaves)

  chex.assert_trees_all_equal(run(through_arrays), run(lambda state: state))


def test_momentum_without_a_count_is_unchanged_by_thawing():
  inner = optax.sgd(RATE, momentum=0.9)
  tx = optax_boost.freeze_layers(inner, ["body", "head"], SCHEDULES_OF_TWO)
  state = tx.init(written_out())
  assert state.group_counts == ()
  params = written_out()
  gradients = random_gradients(params)
  updates, _, _ = train(tx, params, gradients, 30)
  velocity = np.zeros((3, 4))
  for t in range(30):
    if t // 5 % 2:
      velocity = 0.9 * velocity + np.asarray(gradients(t, params)["body"])
      np.testing.assert_allclose(updates["body"][t], -RATE * velocity, rtol=1e-4, atol=1e-9)
    else:
      assert not np.any(updates["body"][t])


INSIDE = {
  "masked": optax.masked(optax.adam(RATE), optax_boost.path_mask("*")),
  "partition": optax.partition(
    {"x": optax.adam(RATE), "y": optax.adam(RATE)},
    lambda p: jax.tree.map_with_path(lambda path, _: "x" if "head" in str(path) else "y", p),
  ),
  "finite": optax.apply_if_finite(optax.adam(RATE), 3),
  "jit": optax.GradientTransformation(
    optax.adam(RATE).init, jax.jit(lambda g, s, p=None: optax.adam(RATE).update(g, s, p))
  ),
  "loss scale": optax_boost.dynamic_loss_scale(optax.adam(RATE), 1.0),
}


@pytest.mark.parametrize("name", INSIDE)
@pytest.mark.parametrize("groups", [["body", "head"], HALF], ids=["written out", "stacked"])
def test_counts_are_found_inside_wrappers(name, groups):
  params = written_out() if isinstance(groups, list) else stacked()
  schedule = optax_boost.gradual_unfreezing(2, every=100)
  tx = optax_boost.freeze_layers(INSIDE[name], groups, schedule)
  updates, _, _ = train(tx, params, ones, 110)
  for leaf in jax.tree.leaves(updates):
    np.testing.assert_allclose(leaf[100:], -RATE, rtol=1e-4)


def test_a_step_that_is_skipped_inside_counts_for_no_group():
  tx = optax_boost.freeze_layers(INSIDE["finite"], ["body", "head"], TWO)
  params = written_out()
  bad = lambda t, p: jax.tree.map(lambda x: jnp.where(t < 3, jnp.nan, 1.0) + x * 0, p)  # noqa: E731
  _, _, state = train(tx, params, bad, 10)
  (counts,) = state.group_counts
  assert counts.tolist() == [0, 7]


def count_updates(tx, calls):
  def update(*args, **kwargs):
    next(calls)
    return tx.update(*args, **kwargs)

  return optax.GradientTransformationExtraArgs(tx.init, update)


def roots(program):
  """The square roots of arrays in a compiled program."""
  return len(re.findall(r"= f32\[\d[\d,]*\]\S* sqrt\(", program.as_text()))


def test_a_leaf_is_computed_for_its_own_group_alone():
  """The inner optimizer is traced once, and the program has one square root for each leaf."""
  groups = [str(i) for i in range(10)]
  params = {str(i): jnp.ones((3, 4 + i)) for i in range(10)}
  calls = itertools.count()
  inner = count_updates(optax.adam(RATE), calls)
  tx = optax_boost.freeze_layers(inner, groups, optax_boost.gradual_unfreezing(10, every=3))
  state = tx.init(params)
  traced_in_init = next(calls)
  program = jax.jit(tx.update).lower(params, state, params).compile()
  assert next(calls) == traced_in_init + 2
  assert roots(program) == len(params)


@pytest.mark.parametrize(
  ("schedule", "expected"),
  [
    (optax_boost.fixed_freezing(10, 4), 1),
    # Groups 0 to 4 never train; 5 and 6 train together, and so do 7 to 9.
    (optax_boost.FreezeSchedule(10, lambda t, key: jnp.where(t < 3, 7, 5), depths=(5, 7)), 2),
    (optax_boost.gradual_unfreezing(10, every=3), 10),
    (optax_boost.gradual_unfreezing(10, every=3, max_depths=3), 3),
  ],
  ids=["fixed", "two depths", "gradual", "gradual, three depths"],
)
def test_an_optimizer_is_computed_once_for_groups_that_are_trained_together(schedule, expected):
  params = {"w": jnp.ones((10, 3, 4))}
  plan = optax_boost.LayerGroups(
    tuple((LayerSlice("w", 0, i, i + 1),) for i in range(10)), (12,) * 10
  )
  tx = optax_boost.freeze_layers(optax.adam(RATE), plan, schedule)
  program = jax.jit(tx.update).lower(params, tx.init(params), params).compile()
  assert roots(program) == expected


@functools.cache
def expected_steps():
  tx = optax_boost.freeze_layers(optax.adam(RATE), ["body", "head"], SCHEDULES_OF_TWO)
  params = written_out()
  gradients = random_gradients(params)
  return tx, params, gradients, train(tx, params, gradients, 20)[0]


def test_steps_are_the_same_outside_of_jit():
  tx, params, gradients, expected = expected_steps()
  state = tx.init(params)
  for t in range(20):
    updates, state = tx.update(gradients(t, params), state, params)
    chex.assert_trees_all_close(updates, at(expected, t), rtol=1e-4, atol=1e-8)


def test_a_population_at_several_steps_has_counts_of_its_own():
  tx, params, gradients, expected = expected_steps()
  starts = [0, 4, 9, 15]
  update, states = jax.jit(tx.update), [tx.init(params)]
  for t in range(max(starts)):
    states.append(update(gradients(t, params), states[-1], params)[1])
  together = jax.tree.map(lambda *x: jnp.stack(x), *(states[t] for t in starts))
  batch = [gradients(t, params) for t in starts]
  gradients_together = jax.tree.map(lambda *x: jnp.stack(x), *batch)
  update_all = jax.jit(jax.vmap(lambda g, s: tx.update(g, s, params)))
  updates = jax.device_get(update_all(gradients_together, together)[0])
  for i, t in enumerate(starts):
    ours = at(updates, i)
    chex.assert_trees_all_close(ours, at(expected, t), rtol=1e-4, atol=1e-8)


def test_a_step_can_be_differentiated():
  tx, params, gradients, _ = expected_steps()
  _, _, state = train(tx, params, gradients, 7)

  @jax.jit
  def moved(scale):
    updates, after = tx.update(optax.tree.scale(scale, gradients(7, params)), state, params)
    return optax.tree.sum(updates) + optax.tree.sum(after.inner_state[0].nu)

  slope = jax.grad(moved)(1.0)
  np.testing.assert_allclose(slope, (moved(1.01) - moved(0.99)) / 0.02, rtol=0.05)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_sharded_layers_and_devices_by_hand_take_the_same_steps(kind):
  mesh = meshes.mesh((4,), ("x",), kind)
  params = {"layers": jnp.ones((4, 2, 8)), "head": jnp.ones(8)}
  plan = optax_boost.LayerGroups(
    ((LayerSlice("layers", 0, 0, 2),), (LayerSlice("layers", 0, 2, 4), "head")), (32, 40)
  )
  tx = optax_boost.freeze_layers(optax.adam(RATE), plan, optax_boost.gradual_unfreezing(2, 20))
  expected, _, _ = train(tx, params, ones, 30)
  specs = {"layers": jax.sharding.PartitionSpec("x"), "head": jax.sharding.PartitionSpec("x")}
  with jax.set_mesh(mesh):
    placed = jax.tree.map(
      lambda p, s: jax.device_put(p, jax.sharding.NamedSharding(mesh, s)), params, specs
    )
    ours, _, _ = train(tx, placed, ones, 30)
  chex.assert_trees_all_close(ours, expected, rtol=1e-5)
  if kind == "Auto":
    run = lambda p: scan_steps(tx, p, ones, 30)[0]  # noqa: E731
    whole = jax.sharding.PartitionSpec()
    by_hand = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=whole, out_specs=whole))(params)
    chex.assert_trees_all_close(by_hand, expected, rtol=1e-5)


def loss_fn(params, batch):
  return jnp.sum(params["body"] * batch) + jnp.sum(params["head"])


def test_the_train_step_compiled_per_depth_thaws_with_fresh_counts():
  tx = optax_boost.freeze_layers(
    optax.adam(RATE), ["body", "head"], optax_boost.gradual_unfreezing(2, every=60)
  )
  step = optax_boost.make_train_step(loss_fn, tx)
  state = step.init(written_out())
  for t in range(70):
    before = np.array(state.params["body"])
    state, _ = step(state, jnp.ones((3, 4)))
    moved = before - np.asarray(state.params["body"])
    np.testing.assert_allclose(moved, 0 if t < 60 else RATE, rtol=1e-3)


@pytest.mark.parametrize(
  ("inner", "name"),
  [
    (optax.contrib.prodigy(), "ProdigyState"),
    (optax.contrib.mechanize(optax.sgd(RATE)), "MechanicState"),
    (optax.contrib.dog(RATE), "DoGState"),
  ],
)
def test_a_count_that_may_belong_to_the_run_is_shared_and_warns(inner, name):
  tx = optax_boost.freeze_layers(inner, ["body", "head"], TWO)
  with pytest.warns(UserWarning, match=rf"one step count for all groups in {name}, .*thawed late"):
    state = tx.init(written_out())
  assert state.group_counts == ()


def custom(state_of):
  """A user's optimizer: a mean of gradients whose bias is corrected."""

  def init(params):
    return state_of(jnp.zeros([], jnp.int32), jax.tree.map(jnp.zeros_like, params))

  def update(updates, state, params=None):
    count, mean = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, dict) and "body" in x)
    count = count + 1
    mean = jax.tree.map(lambda m, u: 0.9 * m + 0.1 * u, mean, updates)
    return jax.tree.map(lambda m: -m / (1 - 0.9**count), mean), state_of(count, mean)

  return optax.GradientTransformation(init, update)


def in_a_dict(count, mean):
  return {"count": count, "mean": mean}


def test_a_count_in_another_authors_state_counts_the_groups_steps_and_warns():
  inner = custom(in_a_dict)
  with pytest.warns(UserWarning, match=r'for each group in dict.*`counts="run"`; else'):
    optax_boost.freeze_layers(inner, ["body", "head"], TWO).init(written_out())
  tx = optax_boost.freeze_layers(inner, ["body", "head"], TWO, counts="group")
  updates, _, _ = train(tx, written_out(), ones, THAW + 3)
  np.testing.assert_allclose(updates["body"][THAW:], -1, rtol=1e-5)
  # If no group is thawed, it makes no difference, and there is no warning.
  fixed = optax_boost.fixed_freezing(2, 1)
  optax_boost.freeze_layers(inner, ["body", "head"], fixed).init(written_out())


def test_a_count_without_a_clear_owner_counts_the_run_unless_declared():
  inner = custom(lambda count, mean: (count, mean))
  with pytest.warns(UserWarning, match="one step count for all groups in tuple"):
    optax_boost.freeze_layers(inner, ["body", "head"], TWO).init(written_out())
  tx = optax_boost.freeze_layers(inner, ["body", "head"], TWO, counts="group")
  updates, _, _ = train(tx, written_out(), ones, THAW + 3)
  np.testing.assert_allclose(updates["body"][THAW:], -1, rtol=1e-5)
  tx = optax_boost.freeze_layers(inner, ["body", "head"], TWO, counts="run")
  assert tx.init(written_out()).group_counts == ()


class Scheduled(NamedTuple):
  count: jax.Array
  mean: dict


def test_a_schedule_in_one_state_with_the_moments_follows_the_run_if_declared():
  def update(updates, state, params=None):
    mean = jax.tree.map(lambda m, u: 0.9 * m + u, state.mean, updates)
    rate = state.count / 100.0
    return jax.tree.map(lambda m: -rate * m, mean), Scheduled(state.count + 1, mean)

  def init(params):
    return Scheduled(jnp.zeros([], jnp.int32), jax.tree.map(jnp.zeros_like, params))

  inner = optax.GradientTransformation(init, update)
  schedule = optax_boost.gradual_unfreezing(2, 100)
  tx = optax_boost.freeze_layers(inner, ["body", "head"], schedule, counts="run")
  updates, _, _ = train(tx, written_out(), ones, 102)
  np.testing.assert_allclose(updates["body"][100:, 0, 0], [-1.0, -1.01 * 1.9], rtol=1e-5)


# Compositions around Adam and a clipping before it, in which no moments meet.
COMPOSED = {
  "chain": lambda tx: tx,
  "named_chain": lambda tx: optax.named_chain(("only", tx)),
  "masked": lambda tx: optax.masked(tx, True),
  "partition": lambda tx: optax.partition({"x": tx, "y": optax.sgd(RATE)}, "x"),
  "inject_hyperparams": lambda tx: optax.inject_hyperparams(lambda rate: tx)(RATE),
  "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
  "conditionally_mask": lambda tx: optax.transforms.conditionally_mask(tx, lambda step: True),
  "jit": lambda tx: optax.GradientTransformationExtraArgs(tx.init, jax.jit(tx.update)),
  "a user's": lambda tx: optax.GradientTransformation(
    tx.init, lambda g, s, p=None: tx.update(g, s, p)
  ),
  "MultiSteps": lambda tx: optax.MultiSteps(tx, 1).gradient_transformation(),
  "switch_after": lambda tx: optax_boost.switch_after(10**6, tx, optax.sgd(RATE)),
  "dynamic_loss_scale": lambda tx: optax_boost.dynamic_loss_scale(tx, 1.0),
  "layerwise_decay": lambda tx: optax_boost.layerwise_decay(tx, ["body", "head"], 1.0),
  "an average of a decay": lambda tx: optax_boost.average_params(
    optax_boost.layerwise_decay(tx, ["body", "head"], 1.0), start=0
  ),
  "accumulate in a part": lambda tx: optax.partition({"x": optax_boost.accumulate(tx, 1)}, "x"),
}


@pytest.mark.parametrize("composed", COMPOSED)
def test_a_clipping_after_moments_is_found_in_every_composition(composed):
  schedule = optax_boost.gradual_unfreezing(2, every=200)

  def frozen(inner):
    return optax_boost.freeze_layers(COMPOSED[composed](inner), ["body", "head"], schedule)

  adam = optax.scale_by_adam()
  after = frozen(optax.chain(adam, CLIP))
  with pytest.warns(UserWarning, match=NOT_SHARED) as caught:
    state = after.init(written_out())
  assert len(caught) == 1
  assert state.group_counts == ()
  before = frozen(optax.chain(CLIP, adam, optax.add_decayed_weights(0.1), optax.scale(-RATE)))
  assert len(before.init(written_out()).group_counts) == 1


@pytest.mark.parametrize("name", ["schedule", "reduce_on_plateau"])
def test_a_factor_of_all_updates_leaves_each_group_its_count(name):
  last = {
    "schedule": optax.scale_by_schedule(optax.cosine_decay_schedule(1.0, 100)),
    "reduce_on_plateau": optax.contrib.reduce_on_plateau(),
  }[name]
  tx = optax_boost.freeze_layers(optax.chain(optax.adamw(RATE), last), ["body", "head"], TWO)
  assert len(tx.init(written_out()).group_counts) == 1


# Transformations of a moment of five layers, whose results for a layer may depend on others.
MIXING = {
  "a cumulative sum": (lambda m: jnp.cumsum(m, 0), True),
  "a reversal": (lambda m: m[::-1], True),
  "a sort": (lambda m: jnp.sort(m, 0), True),
  "a mean of all": (lambda m: m / jnp.mean(m), True),
  "a product of matrices": (lambda m: jnp.tensordot(jnp.ones((5, 5)), m, 1), True),
  "a transposition": (lambda m: m + jnp.swapaxes(m[:, :, :3], 1, 2) + m, False),
  "a mean of each": (lambda m: m / jnp.mean(m, (1, 2), keepdims=True), False),
  "a maximum of each": (lambda m: m / jnp.max(m.reshape(5, -1), 1)[:, None, None], False),
  "a condition": (lambda m: jax.lax.cond(jnp.all(m > 0), lambda m: m, lambda m: -m, m), True),
  "a loop": (lambda m: jax.lax.fori_loop(0, 3, lambda i, m: m + i, m), True),
  "a custom derivative": (jax.nn.silu, False),
}


@pytest.mark.parametrize("name", MIXING)
def test_layers_of_a_stacked_moment_meet_only_in_operations_along_their_axis(name):
  function, meet = MIXING[name]
  apply = optax.stateless(lambda updates, _: updates | {"layers": function(updates["layers"])})
  tx = optax_boost.freeze_layers(optax.chain(optax.scale_by_adam(), apply), HALF, TWO)
  params = {"layers": jnp.full((5, 3, 3), 0.5), "head": jnp.full((4,), 0.5)}
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    state = tx.init(params)
  assert [NOT_SHARED in str(w.message) for w in caught] == [True] * meet
  assert len(state.group_counts) == (not meet)


def test_a_count_apart_from_moments_counts_the_run():
  adam = optax.scale_by_adam()

  class Clock(NamedTuple):
    count: jax.Array

  def init(params):
    state = adam.init(params)
    return state._replace(count=None), Clock(state.count)

  def update(updates, state, params=None):
    moments, clock = state
    updates, new = adam.update(updates, moments._replace(count=clock.count), params)
    return updates, (new._replace(count=None), Clock(new.count))

  inner = optax.GradientTransformation(init, update)
  tx = optax_boost.freeze_layers(inner, ["body", "head"], TWO)
  updates, _, state = train(tx, written_out(), ones, THAW + AFTER)
  assert state.group_counts == ()
  # Without a count for each group, the first steps are too long.
  assert 4 < jnp.max(updates["body"]) < 5


def test_a_negative_depth_freezes_nothing():
  schedule = optax_boost.FreezeSchedule(2, lambda t, key: jnp.int32(-3))
  for inner in (optax.sgd(RATE), optax.adam(RATE)):
    tx = optax_boost.freeze_layers(inner, ["body", "head"], schedule)
    state = tx.init(written_out())
    for _ in range(2):
      assert int(state.frozen_groups) == 0
      updates, state = tx.update(ones(0, written_out()), state, written_out())
      assert all(np.any(updates[name]) for name in ("body", "head"))


UNDECLARED = {
  "between": ((0, 2), 1, r"must return one of its depths.* \(0, 2\) returned 1 for"),
  "below": ((1, 2), -3, r"FreezeSchedule with the depths \(1, 2\) returned 0 for"),
  "above": ((0, 1), 2, r"FreezeSchedule with the depths \(0, 1\) returned 2 for"),
  "more than the groups": (None, 7, r"FreezeSchedule with the depths 0 to 2 returned 7 for"),
}
THREE = {name: jnp.ones(2) for name in "abc"}


def undeclared(name, first=2):
  """An optimizer whose schedule declares the depth of the first two steps, but not the third's."""
  depths, depth, _ = UNDECLARED[name]
  declared = max(depths or (2,))
  schedule = optax_boost.FreezeSchedule(
    3, lambda t, key: jnp.where(t < first, declared, depth), depths=depths
  )
  return optax_boost.freeze_layers(optax.adam(RATE), ["a", "b", "c"], schedule)


@pytest.mark.parametrize("first", [2, 0])
@pytest.mark.parametrize("name", UNDECLARED)
def test_a_depth_that_the_schedule_does_not_declare_is_refused(name, first):
  text = (
    UNDECLARED[name][2]
    + r" the next step\. Name all numbers that .* returns in `depths`, from 0 to"
  )
  tx = undeclared(name, first)
  state = tx.init(THREE)
  step = optax_boost.make_train_step(
    lambda p, x: sum(jnp.sum(leaf * x) for leaf in p.values()), tx, donate=False
  )
  run = step.init(THREE)
  for _ in range(first):
    _, state = tx.update(THREE, state, THREE)
    run, _ = step(run, 1.0)
  with pytest.raises(ValueError, match=text):
    tx.update(THREE, state, THREE)
  with pytest.raises(ValueError, match=text):
    step(run, 1.0)


@pytest.mark.parametrize("name", UNDECLARED)
def test_a_program_of_ones_own_takes_the_next_smaller_declared_depth(name):
  depths, depth, _ = UNDECLARED[name]
  taken = max((d for d in depths or range(3) if d <= depth), default=min(depths or (0,)))
  state = undeclared(name).init(THREE)
  for t in range(4):
    updates, state = jax.jit(undeclared(name).update)(THREE, state, THREE)
    frozen = max(depths or (2,)) if t < 2 else taken
    # Adam's steps from constant gradients have the length of the learning rate.
    expected = [0.0 if i < frozen else -RATE for i in range(3)]
    got = [float(updates[leaf][0]) for leaf in "abc"]
    # In float32, 1 - 0.999 has an error of 2**-24, a relative 6e-5.
    np.testing.assert_allclose(got, expected, rtol=1e-4)


def test_freezing_costs_the_same_around_a_loss_scale_and_in_one():
  groups = [str(i) for i in range(6)]
  params = {str(i): jnp.ones((8, 16 + i)) for i in range(6)}
  schedule = optax_boost.gradual_unfreezing(6, every=3)

  def flops(order):
    tx = optax.adam(RATE)
    for wrap in order:
      tx = wrap(tx)
    step = functools.partial(optax_boost.apply_gradients, tx)
    program = jax.jit(step).lower(params, tx.init(params), params).compile()
    return program.cost_analysis()["flops"]

  frozen = lambda tx: optax_boost.freeze_layers(tx, groups, schedule)  # noqa: E731
  around, inside = (
    flops([optax_boost.dynamic_loss_scale, frozen]),
    flops([frozen, optax_boost.dynamic_loss_scale]),
  )
  assert around < 1.2 * inside

"""Freezing: the first steps of a thawed layer are those of a fresh optimizer."""

import functools
import itertools
import re
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
from optax_boost import LayerSlice
from tests import meshes

RATE, THAW, AFTER = 1e-3, 100, 20
TWO = optax_boost.gradual_unfreezing(2, every=THAW)
TURNS = optax_boost.FreezeSchedule([0, 5], [1, 0], cycle=(0, 10))


def written_out():
  return {"body": jnp.full((3, 4), 0.5), "head": jnp.full((4,), 0.5)}


# Written-out and stacked layers: layers 0 to 2 of five are in the first group.
GROUPS = optax_boost.LayerGroups(
  (
    ("body", LayerSlice("layers", 0, 0, 3)),
    (LayerSlice("layers", 0, 3, 5), "head"),
  ),
  (48, 28),
)


def all_forms():
  return written_out() | {"layers": jnp.full((5, 3, 4), 0.5)}


def ones(t, params):
  return jax.tree.map(jnp.ones_like, params)


def scan_steps(txs, params, gradients, steps):
  """Returns for each optimizer the updates, with a first axis of steps, and the last state."""

  def step(carry, t):
    moved, history = {}, {}
    for name, (params, state) in carry.items():
      updates, state = txs[name].update(gradients(t, params), state, params)
      moved[name], history[name] = (optax.apply_updates(params, updates), state), updates
    return moved, history

  start = {name: (params, tx.init(params)) for name, tx in txs.items()}
  end, history = jax.lax.scan(step, start, jnp.arange(steps))
  return history, {name: state for name, (_, state) in end.items()}


def train(txs, params, gradients, steps):
  """As `scan_steps`, in one program for all optimizers, with results in NumPy."""
  return jax.device_get(jax.jit(lambda p: scan_steps(txs, p, gradients, steps))(params))


OPTIMIZERS = {
  "adamw": functools.partial(optax.adamw, weight_decay=1e-2),
  "amsgrad": optax.amsgrad,
  "adafactor": functools.partial(
    optax.adafactor, multiply_by_parameter_scale=False, clipping_threshold=None
  ),
  "adabelief": optax.adabelief,
  # These correct a bias as well, or make a special first step.
  "adan": optax.adan,
  "ademamix": optax.contrib.ademamix,
  "adopt": optax.contrib.adopt,
  "muon": optax.contrib.muon,
  "lamb": optax.lamb,
  "rmsprop": functools.partial(optax.rmsprop, bias_correction=True),
}
if hasattr(optax, "optimistic_adam_v2"):  # the oldest optax has another function
  OPTIMIZERS["optimistic adam"] = optax.optimistic_adam_v2
# Optimizers whose updates depend on the size of the whole leaf.
OF_WHOLE_LEAVES = ("lamb", "muon")


def test_a_thawed_layer_starts_as_with_a_fresh_optimizer():
  inners = {name: make(RATE) for name, make in OPTIMIZERS.items()}
  frozen = {name: optax_boost.freeze_layers(tx, GROUPS, TWO) for name, tx in inners.items()}
  together = frozen | {f"{name} alone": tx for name, tx in inners.items()}
  updates, _ = train(together, all_forms(), ones, THAW + AFTER)
  for name in inners:
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, err_msg=name)
    thawed, alone = (jax.tree.map(lambda u: u / RATE, updates[n]) for n in (name, f"{name} alone"))
    assert not np.any(thawed["body"][:THAW])
    close(thawed["body"][THAW:], alone["body"][:AFTER])
    # The thaw does not change the updates of the head.
    close(thawed["head"], alone["head"])
    if name not in OF_WHOLE_LEAVES:
      assert not np.any(thawed["layers"][:THAW, :3])
      close(thawed["layers"][THAW:, :3], alone["layers"][:AFTER, :3])
      close(thawed["layers"][:, 3:], alone["layers"][:, 3:])


# Wrappers around and inside of Adam, in which its count is found.
WRAPPED = {
  "masked": lambda adam: optax.masked(adam, optax_boost.path_mask("*")),
  "partition": lambda adam: optax.partition(
    {"x": adam, "y": optax.adam(RATE)},
    lambda p: jax.tree.map_with_path(lambda path, _: "x" if "head" in str(path) else "y", p),
  ),
  "finite": lambda adam: optax.apply_if_finite(adam, 3),
  "jit": lambda adam: optax.GradientTransformation(
    adam.init, jax.jit(lambda g, s, p=None: adam.update(g, s, p))
  ),
  "loss scale": lambda adam: optax_boost.dynamic_loss_scale(adam, 1.0),
  "accumulate": lambda adam: optax_boost.accumulate(adam, 1),
  "switch_after": lambda adam: optax_boost.switch_after(10**6, adam, optax.sgd(RATE)),
  "inject_hyperparams": lambda adam: optax.inject_hyperparams(optax.adam)(RATE),
  "decay": lambda adam: optax_boost.layerwise_decay(adam, ["body|layers", "head"], 1.0),
}


def test_counts_are_found_inside_wrappers():
  txs = {
    name: optax_boost.freeze_layers(wrap(optax.adam(RATE)), GROUPS, TWO)
    for name, wrap in WRAPPED.items()
  }
  updates, states = train(txs, all_forms(), ones, THAW + 5)
  for name in txs:
    for leaf in jax.tree.leaves(updates[name]):
      np.testing.assert_allclose(leaf[THAW:], -RATE, rtol=1e-4, err_msg=name)
    for counts in states[name].freezing.group_counts:
      assert counts.tolist() == [5, THAW + 5]


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
  "again": optax_boost.FreezeSchedule(range(0, 60, 12), [2, 0, 1, 2, 0]),
}


def test_steps_equal_pytorchs_with_a_count_per_param():
  """Also the steps of layers that are stacked along the first axis, or along the second."""
  params = {
    "a": jnp.zeros((2, 3)),
    "b": jnp.zeros(4),
    "c": jnp.zeros(()),
    "v": jnp.zeros((4, 2, 3)),
    "w": jnp.zeros((2, 4, 3)),
  }
  runs = [(0, 1), (1, 3), (3, 4)]
  slices = [[LayerSlice(n, axis, *run) for n, axis in (("v", 0), ("w", 1))] for run in runs]
  plan = optax_boost.LayerGroups(
    tuple((name, *layers) for name, layers in zip("abc", slices, strict=True)), (0, 0, 0)
  )
  gradients = random_gradients(params)
  of_steps = jax.device_get(jax.vmap(lambda t: gradients(t, params))(jnp.arange(60)))
  txs = {n: optax_boost.freeze_layers(optax.adam(RATE), plan, s) for n, s in SCHEDULES.items()}
  updates, states = train(txs, params, gradients, 60)
  for name, schedule in SCHEDULES.items():
    frozen = schedule.frozen_groups(np.arange(60))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-7, err_msg=name)
    for group, leaf in enumerate("abc"):
      close(updates[name][leaf], adam_of_a_param(of_steps[leaf], frozen <= group))
    for leaf, axis in (("v", 1), ("w", 2)):
      for layer, group in enumerate((0, 1, 1, 2)):
        of_layer = np.take(of_steps[leaf], layer, axis)
        expected = adam_of_a_param(of_layer, frozen <= group)
        close(np.take(updates[name][leaf], layer, axis), expected)
    (counts,) = states[name].freezing.group_counts
    assert counts.tolist() == [np.sum(frozen <= group) for group in range(3)]


def test_learning_rate_schedules_go_on_after_a_thaw():
  rate = optax.linear_schedule(1.0, 0.0, 200)
  inners = {
    "schedule": optax.adam(rate),
    "injected": optax.inject_hyperparams(optax.adam)(rate),
    "in a chain": optax.chain(optax.scale_by_adam(), optax.scale_by_schedule(lambda t: -rate(t))),
    "momentum": optax.sgd(rate, momentum=0.0),
  }
  txs = {n: optax_boost.freeze_layers(tx, ["body", "head"], TWO) for n, tx in inners.items()}
  updates, _ = train(txs, written_out(), ones, 130)
  t = np.arange(130)
  for name in inners:
    np.testing.assert_allclose(updates[name]["head"][:, 0], -(1 - t / 200), rtol=1e-4)
    expected = np.where(t < THAW, 0, -(1 - t / 200))
    np.testing.assert_allclose(updates[name]["body"][:, 0, 0], expected, rtol=1e-4)


CLIP = optax.clip_by_global_norm(1.0)


def test_clipping_takes_the_norm_of_all_trained_layers():
  params = {name: x for name, x in all_forms().items() if name != "body"}
  plan = optax_boost.LayerGroups((GROUPS.groups[0][1:], GROUPS.groups[1]), (36, 28))
  before = optax.chain(CLIP, optax.ema(0.9), optax.scale(-1.0))
  after = optax.chain(optax.scale_by_adam(), CLIP, optax.scale(-1.0))

  def gradients(t, params):
    updates = ones(t, params)
    is_frozen = (t < THAW) & (np.arange(5) < 3).reshape(5, 1, 1)
    return updates | {"layers": jnp.where(is_frozen, 0.0, updates["layers"])}

  txs = {
    "before": optax_boost.freeze_layers(before, plan, TWO),
    "after": optax_boost.freeze_layers(after, plan, TWO, counts="run"),
    "on zeros": after,
  }
  updates, states = train(txs, params, gradients, THAW + 3)
  assert len(states["before"].freezing.group_counts) == 1
  assert states["after"].freezing.group_counts == ()
  # Two layers of 12 numbers and the head's four are trained.
  np.testing.assert_allclose(updates["before"]["head"][50:THAW], -1 / np.sqrt(28), rtol=1e-4)
  # With the run's count, a step equals a step of the optimizer on gradients with zeros.
  chex.assert_trees_all_close(updates["after"], updates["on zeros"], rtol=1e-5, atol=1e-7)


def test_a_step_that_is_skipped_inside_counts_for_no_group():
  inner = optax.apply_if_finite(optax.adam(RATE), 3)
  tx = optax_boost.freeze_layers(inner, ["body", "head"], TWO)
  bad = lambda t, p: jax.tree.map(lambda x: jnp.where(t < 3, jnp.nan, 1.0) + x * 0, p)  # noqa: E731
  _, states = train({"adam": tx}, written_out(), bad, 10)
  (counts,) = states["adam"].freezing.group_counts
  assert counts.tolist() == [0, 7]


def roots(tx, params):
  """The square roots of arrays in the compiled program of an update."""
  program = jax.jit(tx.update).lower(params, tx.init(params), params).compile()
  return len(re.findall(r"= f32\[\d[\d,]*\]\S* sqrt\(", program.as_text()))


def test_a_leaf_is_computed_for_its_own_group_alone():
  """The inner optimizer is traced once, and the program has one square root for each leaf."""
  params = {str(i): jnp.ones((3, 4 + i)) for i in range(10)}
  calls, adam = itertools.count(), optax.adam(RATE)

  def update(*args, **kwargs):
    next(calls)
    return adam.update(*args, **kwargs)

  tx = optax_boost.freeze_layers(
    optax.GradientTransformationExtraArgs(adam.init, update),
    list(params),
    optax_boost.gradual_unfreezing(10, every=3),
  )
  assert roots(tx, params) == len(params)
  assert next(calls) == 1


def test_an_optimizer_is_computed_once_for_groups_that_are_trained_together():
  params = {"w": jnp.ones((10, 3, 4))}
  plan = optax_boost.LayerGroups(
    tuple((LayerSlice("w", 0, i, i + 1),) for i in range(10)), (12,) * 10
  )
  for schedule, expected in (
    (optax_boost.fixed_freezing(10, 4), 1),
    # Groups 0 to 4 never train; 5 and 6 train together, and so do 7 to 9.
    (optax_boost.FreezeSchedule([0, 3], [7, 5]), 2),
    (optax_boost.gradual_unfreezing(10, every=3), 10),
    (optax_boost.gradual_unfreezing(10, every=3, max_depths=3), 3),
  ):
    assert roots(optax_boost.freeze_layers(optax.adam(RATE), plan, schedule), params) == expected


@functools.cache
def expected_steps():
  tx = optax_boost.freeze_layers(optax.adam(RATE), ["body", "head"], TURNS)
  params = written_out()
  gradients = random_gradients(params)
  return tx, params, gradients, train({"adam": tx}, params, gradients, 20)[0]["adam"]


def test_steps_are_the_same_outside_of_jit():
  tx, params, gradients, expected = expected_steps()
  state = tx.init(params)
  for t in range(8):
    updates, state = tx.update(gradients(t, params), state, params)
    expected_updates = jax.tree.map(lambda x, t=t: x[t], expected)
    chex.assert_trees_all_close(updates, expected_updates, rtol=1e-4, atol=1e-8)


def test_a_population_at_several_steps_has_counts_of_its_own():
  tx, params, gradients, expected = expected_steps()
  starts = [0, 4, 9, 15]
  update, states = jax.jit(tx.update), [tx.init(params)]
  for t in range(max(starts)):
    states.append(update(gradients(t, params), states[-1], params)[1])
  together = jax.tree.map(lambda *x: jnp.stack(x), *(states[t] for t in starts))
  of_steps = jax.tree.map(lambda *x: jnp.stack(x), *(gradients(t, params) for t in starts))
  update_all = jax.jit(jax.vmap(lambda g, s: tx.update(g, s, params)))
  updates, _ = update_all(of_steps, together)
  expected = jax.tree.map(lambda x: x[np.array(starts)], expected)
  chex.assert_trees_all_close(updates, expected, rtol=1e-4, atol=1e-8)
  # A step can be differentiated.
  state = states[7]

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
  expected, _ = train({"adam": tx}, params, ones, 30)
  sharded, whole = jax.sharding.PartitionSpec("x"), jax.sharding.PartitionSpec()
  with jax.set_mesh(mesh):
    placed = jax.device_put(params, jax.sharding.NamedSharding(mesh, sharded))
    updates, _ = train({"adam": tx}, placed, ones, 30)
  chex.assert_trees_all_close(updates, expected, rtol=1e-5)
  if kind == "Auto":
    run = lambda p: scan_steps({"adam": tx}, p, ones, 30)[0]  # noqa: E731
    by_hand = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=whole, out_specs=whole))(params)
    chex.assert_trees_all_close(by_hand, expected, rtol=1e-5)


def test_the_train_step_compiled_per_depth_thaws_with_fresh_counts():
  tx = optax_boost.freeze_layers(
    optax.adam(RATE), ["body", "head"], optax_boost.gradual_unfreezing(2, every=20)
  )
  step = optax_boost.make_train_step(lambda p, x: jnp.sum(p["body"] * x) + jnp.sum(p["head"]), tx)
  state = step.init(written_out())
  for t in range(25):
    before = np.array(state.params["body"])
    state, _ = step(state, jnp.ones((3, 4)))
    moved = before - np.asarray(state.params["body"])
    np.testing.assert_allclose(moved, 0 if t < 20 else RATE, rtol=1e-3)


@pytest.mark.parametrize(
  ("inner", "number"),
  [
    (optax.contrib.prodigy(), 0),
    (optax.contrib.mechanize(optax.sgd(RATE)), 0),
    (optax.contrib.dog(RATE), 0),
    (optax.chain(optax.adamw(RATE), optax.scale_by_schedule(lambda t: 1.0)), 1),
    (optax.chain(optax.adamw(RATE), optax.contrib.reduce_on_plateau()), 1),
    (optax.chain(optax.adamw(RATE), optax.ema(0.9)), 2),
  ],
  ids=["prodigy", "mechanize", "dog", "schedule", "reduce_on_plateau", "two"],
)
def test_counts_of_optax_are_of_a_group_only_beside_moments_alone(inner, number):
  tx = optax_boost.freeze_layers(inner, ["body", "head"], TWO)
  assert len(tx.init(written_out()).freezing.group_counts) == number


class Mean(NamedTuple):
  """The state of a user's optimizer."""

  count: jax.Array
  mean: dict


def mean_of_gradients(state_of):
  """A user's optimizer whose steps are a mean of gradients, with the bias corrected."""

  def init(params):
    return state_of(jnp.zeros([], jnp.int32), jax.tree.map(jnp.zeros_like, params))

  def update(updates, state, params=None):
    count, mean = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, dict) and "body" in x)
    count = count + 1
    mean = jax.tree.map(lambda m, u: 0.9 * m + 0.1 * u, mean, updates)
    return jax.tree.map(lambda m: -m / (1 - 0.9**count), mean), state_of(count, mean)

  return optax.GradientTransformation(init, update)


def test_a_count_in_a_state_of_another_author_is_of_the_run_unless_declared():
  make = lambda inner, **counts: optax_boost.freeze_layers(inner, ["body", "head"], TWO, **counts)  # noqa: E731
  inners = {
    "named": mean_of_gradients(Mean),
    "dict": mean_of_gradients(lambda count, mean: {"count": count, "mean": mean}),
    "tuple": mean_of_gradients(lambda count, mean: (count, mean)),
  }
  txs = {name: make(inner) for name, inner in inners.items()}
  txs |= {f"{name} run": make(inner, counts="run") for name, inner in inners.items()}
  txs |= {f"{name} group": make(inner, counts="group") for name, inner in inners.items()}
  updates, states = train(txs, written_out(), ones, THAW + 3)
  # Without a correction, the first steps would be 0.1, 0.19 and 0.271 long.
  of_run = -(1 - 0.9 ** np.arange(1, 4))
  for name in txs:
    of_group = name.endswith("group")
    expected = -np.ones(3) if of_group else of_run
    np.testing.assert_allclose(updates[name]["body"][THAW:, 0, 0], expected, rtol=1e-4)
    assert len(states[name].freezing.group_counts) == of_group

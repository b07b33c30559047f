"""Freezing: schedules, the transformation and the cut step."""

import functools
import itertools
import pathlib
import re
import warnings
import weakref

import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
from optax_boost._step._freezing import _schedules
from optax_boost._train_step import _frozen_depth
import optax_boost.linen as ob_linen
import optax_boost.nnx as ob_nnx
from tests import compilations
from tests.layer_groups.models import (
  BATCH,
  IMAGES,
  LAYERS,
  Convolutional,
  chain_loss,
  chain_params,
  image_loss,
  image_plan,
)

# More than the longest cycle. One length for all tests, since JAX compiles for each length.
MANY_STEPS = np.arange(4_000)
GOLDEN = np.load(pathlib.Path(__file__).parents[1] / "golden" / "freeze_sequences.npz")


# MindSpore's sequences; seq_s0_g10_p070_n150: strategy 0, 10 groups, freeze_p 0.70.
def recorded(strategy):
  for name in GOLDEN.files:
    kind, *fields = name.split("_")
    if kind == "seq" and fields[0] == f"s{strategy}":
      yield pytest.param(name, int(fields[1][1:]), 1 - int(fields[2][1:]) / 100, id=name)


@pytest.mark.filterwarnings("ignore:.*the first group is never trained")
@pytest.mark.parametrize(("name", "groups", "share"), list(recorded(0)))
def test_continuous_freezing_equals_mindspores_recorded_depths(name, groups, share):
  schedule = optax_boost.continuous_freezing(groups, share)
  depths = np.asarray(schedule.frozen_groups(MANY_STEPS, None))
  np.testing.assert_array_equal(depths[: len(GOLDEN[name])], GOLDEN[name])


def interval_freezes(share, steps):
  """For each step, whether the interval schedule freezes anything."""
  schedule = optax_boost.interval_freezing(2, share)
  return np.asarray(jax.vmap(lambda t: schedule.frozen_groups(t, jax.random.key(0)))(steps)) > 0


@pytest.mark.parametrize(("name", "groups", "share"), list(recorded(1)))
def test_interval_freezing_equals_mindspores_given_its_draws(name, groups, share):
  sequence = GOLDEN[name]
  if groups == 1:
    assert not sequence.any()
    return
  freezes = interval_freezes(share, MANY_STEPS)[: len(sequence)]
  np.testing.assert_array_equal(freezes, sequence > 0)
  draws = GOLDEN[name.replace("seq", "uniform")]
  depths = np.asarray(_schedules.interval_depth(np.resize(draws, 200), groups))
  np.testing.assert_array_equal(depths[: len(draws)], sequence[freezes])


# Values of MindSpore's `freeze_p`, as Python reads the literals.
FREEZE_P = [float(f"0.{hundredths:02d}") for hundredths in range(1, 100)]


def mindspore_full(freeze_p, groups):
  """The number of steps of a cycle that freeze nothing, before MindSpore takes the floor."""
  return freeze_p * (groups - 1) / (1 - freeze_p)


def mindspore_continuous(freeze_p, groups, steps):
  """The depths of MindSpore's continuous strategy, with its rounding errors."""
  turn = [0] * int(np.floor(mindspore_full(freeze_p, groups))) + list(range(1, groups))
  return np.resize(turn, steps)


def rounding_decides(freeze_p, groups):
  """Whether the number is whole up to rounding, so that its floor may be one less."""
  full = mindspore_full(freeze_p, groups)
  return abs(full - round(full)) < 1e-9


def mindspore_interval(freeze_p, steps):
  """For each step and `freeze_p`, whether MindSpore's interval strategy freezes something."""
  freezes = np.zeros((steps, len(freeze_p)), bool)
  nonzero = np.zeros(len(freeze_p))
  for n in range(1, steps):
    freezes[n] = nonzero / n < 1 - freeze_p
    nonzero += freezes[n]
  return freezes


@pytest.mark.filterwarnings("ignore:.*the first group is never trained")
def test_continuous_freezing_equals_mindspores_for_every_freeze_p():
  for freeze_p, groups in itertools.product(FREEZE_P, range(2, 41)):
    if groups not in (2, 5, 10, 40) and not rounding_decides(freeze_p, groups):
      continue
    share = 1 - freeze_p
    schedule = optax_boost.continuous_freezing(groups, share, max_depths=groups)
    depths = np.asarray(schedule.frozen_groups(MANY_STEPS, None))
    expected = mindspore_continuous(freeze_p, groups, len(MANY_STEPS))
    assert (depths == expected).all(), (freeze_p, groups)
    turn = np.argmax(depths == groups - 1) + 1
    assert abs(np.sum(depths[:turn] > 0) - share * turn) <= 1, (freeze_p, groups)
    if groups in (2, 5, 10):
      # The share as a decimal number gives the same depths.
      named = optax_boost.continuous_freezing(groups, round(share, 2))
      assert (np.asarray(named.frozen_groups(MANY_STEPS, None)) == expected).all()


def test_interval_freezing_freezes_when_mindspore_does_for_every_freeze_p():
  expected = mindspore_interval(np.array(FREEZE_P), len(MANY_STEPS))
  for i, freeze_p in enumerate(FREEZE_P):
    freezes = interval_freezes(1 - freeze_p, MANY_STEPS)
    assert (freezes == expected[:, i]).all(), freeze_p
    frozen_before = np.cumsum(freezes) - freezes
    assert np.all(np.abs(frozen_before - (1 - freeze_p) * MANY_STEPS) <= 1)


def mindspore_depth(uniform, groups):
  """NumPy's legacy `choice` among groups - 1, ..., 1 with the weights 1, 2, ..., groups - 1."""
  bounds = np.cumsum(np.arange(1, groups)) / np.sum(np.arange(1, groups))
  return groups - 1 - np.searchsorted(bounds, uniform, side="right")


@pytest.mark.parametrize(("groups", "freeze_p"), [(2, 0.6), (3, 0.5), (10, 0.7), (40, 0.2)])
def test_interval_freezing_equals_mindspores_with_the_uniform_draws_of_its_key(groups, freeze_p):
  steps, key = MANY_STEPS[:300], jax.random.key(3)
  schedule = optax_boost.interval_freezing(groups, 1 - freeze_p, max_depths=groups)
  uniform = jax.vmap(lambda t: jax.random.uniform(jax.random.fold_in(key, t)))(steps)
  freezes = mindspore_interval(np.array([freeze_p]), len(steps))[:, 0]
  np.testing.assert_array_equal(
    jax.jit(jax.vmap(lambda t: schedule.frozen_groups(t, key)))(steps),
    np.where(freezes, mindspore_depth(np.asarray(uniform), groups), 0),
  )


def test_a_share_that_is_not_a_round_decimal_is_kept_over_a_long_training():
  share, steps = 0.6180339887498949, jnp.arange(300_000)
  assert abs(int(np.sum(interval_freezes(share, steps))) - share * 300_000) <= 1
  rare = interval_freezes(1e-4, steps)
  assert np.flatnonzero(rare)[:3].tolist() == [1, 10_001, 20_001]
  schedule = optax_boost.continuous_freezing(4, 1e-5)
  (start,) = np.flatnonzero(schedule.frozen_groups(steps, None) == 1)
  assert abs(start - 3 * 99_999) <= 1


@pytest.mark.parametrize(
  "make",
  [optax_boost.continuous_freezing, optax_boost.interval_freezing],
  ids=["turns", "interval"],
)
@pytest.mark.parametrize("share", [1e-300, 1e-12, 0.3, 0.123456789, 0.95])
def test_schedules_stay_exact_up_to_the_last_step(make, share):
  schedule = make(40, share, max_depths=40)
  key = jax.random.key(0)
  depth = jax.jit(jax.vmap(lambda t: schedule.frozen_groups(t, key)))
  late = 2**31 - 2 - np.arange(20_000, dtype=np.int32)
  depths = np.asarray(depth(late))
  assert depths.min() >= 0
  assert depths.max() < 40
  assert abs(np.mean(depths > 0) - share) < 0.01


def test_a_cycle_in_which_every_step_freezes_something_warns():
  with pytest.warns(UserWarning, match=r"first group is never trained. Lower .* to 0.5 or less"):
    optax_boost.continuous_freezing(2, 0.8)


# Each schedule has all of its depths within the steps of `depths_of`.
SCHEDULES = {
  "continuous": lambda groups, **depths: optax_boost.continuous_freezing(groups, 0.5, **depths),
  "interval": lambda groups, **depths: optax_boost.interval_freezing(groups, 0.5, **depths),
  "progressive": lambda groups, **depths: optax_boost.progressive_freezing(groups, 400, **depths),
  "gradual": lambda groups, **depths: optax_boost.gradual_unfreezing(groups, 10, **depths),
}


def depths_of(schedule):
  """The depths of many steps, without jit, so that JAX compiles each operation only once."""
  depth = jax.vmap(lambda t: schedule.frozen_groups(t, jax.random.key(0)))
  return np.asarray(depth(np.arange(20_000)))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("groups", [2, 9, 10, 11, 14, 26, 40])
def test_a_schedule_has_at_most_ten_depths_unless_more_are_asked_for(name, groups):
  make = SCHEDULES[name]
  depths, each = depths_of(make(groups)), depths_of(make(groups, max_depths=groups))
  assert np.array_equal(np.unique(each), np.arange(groups))
  assert len(np.unique(depths)) == min(groups, 10)
  assert (depths.min(), depths.max()) == (0, groups - 1)
  # Evenly spread: gaps differ by one at most.
  assert np.ptp(np.diff(np.unique(depths))) <= 1
  if groups <= 10:
    assert np.array_equal(depths, each)
  assert np.unique(depths_of(make(groups, max_depths=2))).tolist() == [0, groups - 1]


def test_groups_that_thaw_together_do_so_with_the_first_of_them():
  each = depths_of(optax_boost.gradual_unfreezing(14, 10, max_depths=14))
  ours = depths_of(optax_boost.gradual_unfreezing(14, 10))
  allowed = np.unique(ours)
  assert ours.tolist() == [max(d for d in allowed if d <= depth) for depth in each]


@pytest.mark.parametrize("groups", [2, 8, 40])
def test_the_first_half_of_the_groups_may_thaw_upward(groups):
  half, every = groups // 2, 7
  steps = np.arange(20_000)
  each = optax_boost.gradual_unfreezing(groups, every, frozen_groups=half, max_depths=groups)
  assert np.array_equal(depths_of(each), np.maximum(half - steps // every, 0))
  schedule = optax_boost.gradual_unfreezing(groups, every, frozen_groups=half)
  depths = depths_of(schedule)
  assert (depths[0], depths[-1]) == (half, 0)
  assert sorted(set(depths.tolist())) == list(schedule.depths)


def test_groups_that_are_frozen_together_are_annealed_together():
  schedule = optax_boost.progressive_freezing(14, 100, first=0.4)
  each = optax_boost.progressive_freezing(14, 100, first=0.4, max_depths=14)
  allowed = np.unique(depths_of(schedule))
  assert len(allowed) == 10
  first_of = [max(d for d in allowed if d <= group) for group in range(14)]
  for t in (0, 30, 50, 77, 99):
    scale = np.asarray(schedule.learning_rate_scale(jnp.int32(t)))
    each_scale = np.asarray(each.learning_rate_scale(jnp.int32(t)))
    np.testing.assert_array_equal(scale, each_scale[first_of])
    # A group is annealed to zero when it is frozen.
    depth = int(schedule.frozen_groups(jnp.int32(t), None))
    assert np.all(scale[:depth] == 0)
    assert np.all(scale[depth:] > 0)


def test_progressive_freezing_anneals_each_group_and_never_thaws_it():
  schedule = optax_boost.progressive_freezing(4, 100, first=0.4, power=3)
  depths = depths_of(schedule)[:110].tolist()
  assert depths == sorted(depths)
  ends = [round(100 * (0.4 + 0.6 * (i / 3) ** 3)) for i in range(3)]
  assert [depths.index(i) for i in (1, 2, 3)] == ends
  for t in (0, 17, 39):
    expected = [0.5 * (1 + np.cos(np.pi * t / end)) for end in [*ends, 100]]
    np.testing.assert_allclose(schedule.learning_rate_scale(jnp.int32(t)), expected, rtol=1e-4)
  plain = optax_boost.progressive_freezing(4, 100, first=0.4, power=3, anneal=False)
  assert plain.learning_rate_scale is None
  assert depths_of(plain)[:110].tolist() == depths


@pytest.fixture(scope="module")
def variables():
  return Convolutional().init(jax.random.key(0), IMAGES)


# Each depth once in eight steps, out of order.
DEPTHS = np.array([0, 2, 1, 3, 0, 1, 3, 2])


def fixed_schedule(depths=DEPTHS, num_groups=LAYERS):
  table = jnp.asarray(depths)
  return optax_boost.FreezeSchedule(num_groups, lambda t, key: table[t % len(depths)])


@functools.cache
def plan_of_chain():
  return optax_boost.layer_groups(chain_loss, chain_params(), BATCH, num_groups=LAYERS)


def frozen(opt_state):
  return int(optax.tree.get(opt_state, "frozen_groups"))


INNERS = {
  "momentum": lambda: optax.sgd(0.1, momentum=0.9),
  "adamw": lambda: optax.adamw(1e-2, weight_decay=0.1),
  "clip": lambda: optax.chain(optax.clip_by_global_norm(1e-3), optax.adamw(1e-2)),
  "masked decay": lambda: optax.chain(
    optax.masked(optax.trace(0.9), optax_boost.path_mask("kernel")), optax.scale(-0.1)
  ),
  "partition": lambda: optax.partition(
    {"x": optax.adam(1e-2), "y": optax.sgd(0.1, 0.9)},
    lambda p: jax.tree.map_with_path(lambda path, _: "x" if "'b'" in str(path) else "y", p),
  ),
  "lars": lambda: optax_boost.lars(1.0, weight_decay=0.1),
  "loss scale": lambda: optax_boost.dynamic_loss_scale(optax.adam(1e-2), 8.0),
}


def leaves_of_group(tree, name):
  """The leaves of one layer of the chain in a tree, params or state."""
  return [
    leaf
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    if f"['{name}']" in jax.tree_util.keystr(path)
  ]


@pytest.mark.parametrize("make", INNERS.values(), ids=INNERS)
def test_frozen_leaves_and_their_state_stay_bit_for_bit(make):
  params = chain_params()
  tx = optax_boost.freeze_layers(make(), plan_of_chain(), fixed_schedule())
  state = tx.init(params)

  @jax.jit
  def step(params, state):
    updates, state = tx.update(jax.grad(chain_loss)(params, BATCH), state, params)
    return optax.apply_updates(params, updates), state

  for depth in DEPTHS:
    assert frozen(state) == depth
    moved, after = step(params, state)
    for group, name in enumerate("dcba"):
      same = [
        np.array_equal(a, b)
        for a, b in zip(
          leaves_of_group((params, state.inner_state), name),
          leaves_of_group((moved, after.inner_state), name),
          strict=True,
        )
      ]
      assert all(same) if group < depth else not any(same)
    params, state = moved, after


def test_a_pattern_of_masked_leaves_does_not_warn(recwarn):
  params = {"a": jnp.ones(2), "b": jnp.ones(2)}
  tx = optax_boost.layerwise_decay(optax.adam(0.1), ["a", "b"])
  tx = optax.partition({"x": tx, "y": optax.sgd(0.1)}, {"a": "x", "b": "y"})
  tx = optax_boost.freeze_layers(tx, ["a", "b"], optax_boost.fixed_freezing(2, 1))
  updates, _ = tx.update(params, tx.init(params), params)
  assert not np.any(updates["a"])
  assert np.any(updates["b"])
  assert not recwarn.list


def test_clipping_takes_the_norm_of_trained_leaves():
  tx = optax_boost.freeze_layers(
    optax.chain(optax.clip_by_global_norm(1.0), optax.scale(-1.0)),
    ("d", "c|b|a"),
    fixed_schedule([1], 2),
  )
  params = chain_params()
  grads = jax.tree.map(lambda x: 100 * jnp.ones_like(x), params)
  updates, _ = tx.update(grads, tx.init(params), params)
  np.testing.assert_allclose(optax.tree.norm(updates), 1.0, rtol=1e-5)


def test_a_nan_in_a_frozen_gradient_does_not_spoil_the_step():
  tx = optax_boost.freeze_layers(optax.adamw(1e-2), plan_of_chain(), fixed_schedule([1]))
  params = chain_params()
  grads = jax.tree.map(jnp.ones_like, params)
  grads["d"] = jax.tree.map(lambda x: jnp.nan * x, grads["d"])
  updates, state = tx.update(grads, tx.init(params), params)
  chex.assert_tree_all_finite((updates, state))
  assert not any(jnp.any(u) for u in jax.tree.leaves(updates["d"]))


def test_progressive_freezing_scales_the_updates_of_each_group():
  schedule = optax_boost.progressive_freezing(LAYERS, 8, first=0.5)
  tx = optax_boost.freeze_layers(optax.sgd(1.0), plan_of_chain(), schedule)
  params = chain_params()
  state = tx.init(params)
  ones, update = jax.tree.map(jnp.ones_like, params), jax.jit(tx.update)
  for t in range(8):
    updates, state = update(ones, state, params)
    scale = np.asarray(schedule.learning_rate_scale(jnp.int32(t)))
    depth = int(schedule.frozen_groups(jnp.int32(t), None))
    for group, name in enumerate("dcba"):
      expected = 0 if group < depth else -scale[group]
      np.testing.assert_allclose(updates[name]["kernel"], expected, atol=1e-6)


WITHIN = {
  "masked": lambda tx: optax.masked(tx, lambda p: mask_of(p, "[ad]")),
  "partition": lambda tx: optax.partition(
    {"x": tx, "y": optax.adam(1e-2)},
    lambda p: jax.tree.map(lambda m: "x" if m else "y", mask_of(p, "[ad]")),
  ),
}


def mask_of(params, pattern):
  return jax.tree.map_with_path(
    lambda path, _: re.search(f"'{pattern}'", str(path)) is not None, params
  )


@pytest.mark.parametrize("within", WITHIN)
def test_freezing_inside_masked_or_partition_is_refused_since_it_must_see_all_params(within):
  tx = optax_boost.freeze_layers(optax.sgd(0.1), plan_of_chain(), fixed_schedule())
  message = r"`freeze_layers` must see all params.*hides .*Put it around the whole: `freeze_layers"
  with pytest.raises(ValueError, match=message):
    WITHIN[within](tx).init(chain_params())
  # Around the whole, it freezes the leaves of each part.
  parts = WITHIN[within](optax.sgd(0.1, momentum=0.9))
  tx = optax_boost.freeze_layers(parts, plan_of_chain(), fixed_schedule([0, 1]))
  step = optax_boost.make_train_step(chain_loss, tx, donate=False)
  state = step.init(chain_params())
  for depth in (0, 1, 0):
    after, metrics = step(state, BATCH)
    assert metrics["frozen_groups"] == depth
    moved = jax.tree.map(lambda a, b: not np.array_equal(a, b), after.params, state.params)
    for name in "ad":
      assert jax.tree.leaves(moved[name]) == [name != "d" or depth == 0] * 2
    state = after


@pytest.mark.parametrize(
  "chain",
  [
    lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx),
    lambda tx: optax.chain(optax.chain(optax.trace(0.9), optax.identity()), tx),
    lambda tx: optax.named_chain(("clip", optax.clip(1.0)), ("adam", tx)),
  ],
  ids=["chain", "chain in a chain", "named chain"],
)
def test_freezing_as_a_member_of_a_chain_is_refused(chain):
  tx = optax_boost.freeze_layers(optax.sgd(0.1), plan_of_chain(), fixed_schedule())
  message = (
    r"`freeze_layers` can't be inside of `optax.(named_)?chain`.*`freeze_layers\(optax.*chain"
  )
  step = optax_boost.make_train_step(chain_loss, chain(tx))
  with pytest.raises(ValueError, match=message):
    step(step.init(chain_params()), BATCH)
  state = chain(tx).init(chain_params())
  with pytest.raises(ValueError, match=message):
    optax_boost.apply_gradients(chain(tx), chain_params(), state, chain_params())


@pytest.mark.parametrize(
  "wrap",
  [lambda tx: optax.MultiSteps(tx, 2), lambda tx: optax_boost.accumulate(tx, 2)],
  ids=["MultiSteps", "accumulate"],
)
def test_a_window_of_accumulation_has_one_depth(wrap):
  tx = wrap(optax_boost.freeze_layers(optax.sgd(0.1), plan_of_chain(), fixed_schedule()))
  params = chain_params()
  state = tx.init(params)
  update = jax.jit(tx.update)
  seen = []
  for _ in range(8):
    seen.append(frozen(state))
    _, state = update(params, state, params)
  assert seen == [d for d in DEPTHS[:4] for _ in range(2)]


GOOD = {"inner": optax.sgd(0.1), "groups": ("a", "b"), "schedule": fixed_schedule([0], 2)}


@pytest.mark.parametrize(
  "inner",
  [
    optax.partition({"x": optax.adam(0.1)}, lambda p: dict.fromkeys(p.keys(), "x")),
    optax.scale_by_zoom_linesearch(3),
    optax.lbfgs(),
  ],
  ids=["partition", "line search", "lbfgs"],
)
def test_refuses_an_inner_optimizer_whose_state_it_cannot_read(inner):
  tx = optax_boost.freeze_layers(inner, ("a", "b"), fixed_schedule([0], 2))
  params = {"a": jnp.ones(()), "b": jnp.ones(())}
  with pytest.raises(
    TypeError, match=r"map_params` can map.*`optax.lbfgs`.*as trees.*as functions of"
  ):
    tx.update(
      params, tx.init(params), params, value=0.0, grad=params, value_fn=lambda p: p["a"] + p["b"]
    )


BAD_RETURNS = [
  *[(lambda t, key, d=d: d, None) for d in (None, 0.5, True, jnp.ones(2, int), jnp.float32(1))],
  *[(lambda t, key: 0, lambda t, s=s: s) for s in (None, 1.0, jnp.ones(3), 1j * jnp.ones(2))],
]


@pytest.mark.parametrize("functions", BAD_RETURNS)
def test_refuses_a_schedule_that_returns_no_depth_or_no_rates(functions):
  params = {"a": jnp.ones(2), "b": jnp.ones(2)}
  tx = optax_boost.freeze_layers(**(GOOD | {"schedule": optax_boost.FreezeSchedule(2, *functions)}))
  with pytest.raises(
    TypeError, match=r"must return (a scalar integer|an array of 2 num).*returned"
  ):
    tx.update(params, tx.init(params), params)


def test_refuses_groups_of_other_params():
  tx = optax_boost.freeze_layers(optax.sgd(0.1), plan_of_chain(), fixed_schedule())
  with pytest.raises(ValueError, match=r"no group with the leaf 'x' .* with `layer_groups`"):
    tx.init({"x": jnp.ones(2)})
  with pytest.warns(optax_boost.NoEffectWarning, match=r"`groups` has patterns .*\['a'\]"):
    optax_boost.freeze_layers(**GOOD).init({"b": jnp.ones(2)})


@pytest.mark.filterwarnings("ignore::optax_boost.NoEffectWarning")
@pytest.mark.parametrize("patterns", [["*", "nothing"], ["a", "b", "hed"]])
def test_refuses_groups_without_a_leaf_that_is_never_frozen(patterns):
  schedule = optax_boost.fixed_freezing(len(patterns), len(patterns) - 1)
  tx = optax_boost.freeze_layers(optax.sgd(0.1), patterns, schedule)
  params = {"a": jnp.ones(2), "b": jnp.ones(2)}
  last = len(patterns) - 1
  match = rf"got none in group {last} of {last + 1}\. Take"
  with pytest.raises(ValueError, match=match):
    tx.init(params)
  assert tx.init({}).frozen_groups == last


STACKED = {"embed": jnp.ones(2), "blocks": {"k": jnp.ones((6, 2))}, "head": jnp.ones(2)}


@pytest.mark.parametrize(
  "pattern", ["blocks/k[0:4]", "blocks/k[:, 0:4]", "blocks/[0-3]", "blocks/0", "blocks/0/k"]
)
def test_a_pattern_for_layers_of_a_stacked_leaf_is_answered_by_layer_groups(pattern):
  tx = optax_boost.freeze_layers(optax.sgd(0.1), ["embed", pattern, "head"], fixed_schedule([0], 3))
  text = r"Patterns select whole leaves: if 'blocks/k' holds .* pass `groups=layer_groups\(loss_fn"
  with pytest.warns(optax_boost.NoEffectWarning, match=text):
    tx.init(STACKED)


def test_other_idle_patterns_get_no_advice_on_layers():
  tx = optax_boost.freeze_layers(optax.sgd(0.1), ["body/0", "head"], fixed_schedule([0], 2))
  with pytest.warns(optax_boost.NoEffectWarning, match=r"match no leaf: \['body/0'\]\. The leaves"):
    tx.init(STACKED)


def chain_groups(params=None, loss=chain_loss, batch=BATCH, **options):
  return optax_boost.layer_groups(loss, params or chain_params(), batch, **options)


SENSELESS = [
  (lambda: optax_boost.freeze_layers(**(GOOD | {"schedule": fixed_schedule([0], 3)})), "3 and 2"),
  (lambda: optax_boost.interval_freezing(10**9, 0.1), r"`num_groups` .*<= 10000"),
  (lambda: chain_groups(batch="text"), r"the leaf '0' is 'text' of type str"),
  (lambda: chain_groups({"w": 10**400}), r"`params` must hold arrays.* the leaf 'w' is"),
  (lambda: chain_groups(loss=lambda p, x: 0.0), r"found no leaf among the 8 of `params` that the"),
  (lambda: chain_groups(num_groups=2, overrides={"(": 1}), r"`overrides` has '\(', a regular"),
  (lambda: chain_groups(num_groups=10), r"10 groups of 4 blocks .* Pass num_groups=4 or fewer"),
  (
    lambda: chain_groups(num_groups=2, overrides={"a": 2}),
    r"must name groups 0 to 1; got 2 for 'a'",
  ),
  (
    lambda: chain_groups(num_groups=2, overrides=["a"]),
    r"`overrides` must be a dict from pat",
  ),
]


@pytest.mark.parametrize(("call", "message"), SENSELESS)
def test_refuses_schedules_and_plans_that_make_no_sense(call, message):
  with pytest.raises((TypeError, ValueError), match=message):
    call()


def spied(tx):
  """A user's wrapper that keeps the gradient that it gets, in a tuple as a chain's state."""

  def init(params):
    return optax.tree.zeros_like(params), tx.init(params)

  def update(updates, state, params=None, **extra_args):
    out, inner_state = tx.update(updates, state[1], params, **extra_args)
    return out, (updates, inner_state)

  return optax.GradientTransformationExtraArgs(init, update)


def train(step, state, steps=8):
  history = []
  for _ in range(steps):
    state, metrics = step(state, BATCH)
    history.append(metrics)
  return state, history


def chain_step(inner=None, schedule=None, wrap=lambda tx: tx, **options):
  tx = optax_boost.freeze_layers(
    inner or optax.adamw(1e-2, weight_decay=0.1), plan_of_chain(), schedule or fixed_schedule()
  )
  return optax_boost.make_train_step(chain_loss, wrap(tx), **options)


@functools.cache
def kept_step():
  """A step that donates nothing: several tests share its programs."""
  return chain_step(donate=False)


def masked_by_hand(tx, params):
  """Trains with whole gradients in a loop without a train step, which saves no time."""
  state = tx.init(params)

  @jax.jit
  def step(params, state):
    updates, state = tx.update(jax.grad(chain_loss)(params, BATCH), state, params)
    return optax.apply_updates(params, updates), state

  for _ in DEPTHS:
    params, state = step(params, state)
  return params, state


@pytest.mark.parametrize("name", ["momentum", "clip", "masked decay"])
def test_a_step_equals_a_step_with_the_masked_whole_gradient(name):
  tx = optax_boost.freeze_layers(INNERS[name](), plan_of_chain(), fixed_schedule())
  expected = masked_by_hand(tx, chain_params())
  step = optax_boost.make_train_step(chain_loss, tx)
  state, history = train(step, step.init(chain_params()))
  assert [int(m["frozen_groups"]) for m in history] == list(DEPTHS)
  chex.assert_trees_all_close((state.params, state.opt_state), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("wrap", [lambda tx: tx, spied], ids=["alone", "spied"])
def test_inside_a_users_scan_frozen_layers_are_not_updated_and_save_nothing(wrap):
  step = chain_step(wrap=wrap)
  expected, _ = train(step, step.init(chain_params()))

  def scan(state):
    return jax.lax.scan(lambda state, _: step(state, BATCH), state, length=len(DEPTHS))

  with pytest.warns(optax_boost.NoEffectWarning, match="`freeze_layers` saves no time") as caught:
    carry, metrics = scan(step.init(chain_params()))
  scan(step.init(chain_params()))
  assert len(caught) == 1
  np.testing.assert_array_equal(metrics["frozen_groups"], DEPTHS)
  chex.assert_trees_all_close(carry, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.filterwarnings("ignore:`freeze_layers` saves no time")
def test_a_population_at_several_depths_takes_the_depth_of_each():
  step = kept_step()
  states = [train(step, step.init(chain_params()), t)[0] for t in range(3)]
  stacked = jax.tree.map(lambda *x: jnp.stack(x), *states)
  together, metrics = jax.vmap(lambda state: step(state, BATCH))(stacked)
  np.testing.assert_array_equal(metrics["frozen_groups"], DEPTHS[:3])
  expected = jax.tree.map(lambda *x: jnp.stack(x), *[step(state, BATCH)[0] for state in states])
  chex.assert_trees_all_close(together, expected, rtol=1e-5, atol=1e-6)


def test_a_key_that_is_put_into_the_state_counts_from_the_next_step_on():
  schedule = optax_boost.interval_freezing(LAYERS, 0.9)
  step = chain_step(schedule=schedule, donate=False)
  state, _ = train(step, step.init(chain_params()), 3)
  other = jax.random.key(5)
  # The same arrays as the host knows them, but for the key.
  state = optax.tree.set(state, key=jax.random.key_data(other))
  # The next depth is in the state; later depths are drawn from the key.
  _, history = train(step, state, 12)
  expected = [int(schedule.frozen_groups(jnp.int32(t), other)) for t in range(4, 15)]
  assert [int(m["frozen_groups"]) for m in history[1:]] == expected


READS = {
  # The first state comes from the user, the second from the train step.
  "fixed": (optax_boost.fixed_freezing(LAYERS, 2), [0, 1]),
  "fixed, then free": (optax_boost.fixed_freezing(LAYERS, 2, steps=7), [0, 1, 7]),
  "gradual": (optax_boost.gradual_unfreezing(LAYERS, every=5), [0, 1, 5, 10, 15]),
  "progressive": (optax_boost.progressive_freezing(LAYERS, 16, 0.5), [0, 1, 8, 11, 13]),
  # Nothing is frozen for three steps in six; each other depth lasts one step.
  "continuous": (
    optax_boost.continuous_freezing(LAYERS, 0.5),
    [0, 1, *range(3, 7), *range(9, 13), *range(15, 19)],
  ),
  "a user's": (fixed_schedule(), list(range(20))),
}


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("door", ["plain", "nnx"])
def test_the_depth_is_read_from_the_device_only_when_it_may_have_changed(name, door, monkeypatch):
  schedule, expected = READS[name]
  reads, read = [], _frozen_depth.read_scalars
  monkeypatch.setattr(_frozen_depth, "read_scalars", lambda x: reads.append(len(depths)) or read(x))
  depths = []
  if door == "plain":
    step = chain_step(optax.sgd(0.1), schedule)
    state = step.init(chain_params())
  else:
    model = nnx.Sequential(*(nnx.Linear(3, 3, rngs=nnx.Rngs(i)) for i in range(LAYERS)))
    groups = [f"layers/{i}/" for i in range(LAYERS)]
    tx = optax_boost.freeze_layers(optax.sgd(0.1), groups, schedule)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    step = ob_nnx.make_train_step(lambda model, x: jnp.mean(model(x) ** 2))
  for _ in range(20):
    if door == "plain":
      state, metrics = step(state, BATCH)
    else:
      metrics = step(model, optimizer, jnp.ones((2, 3)))
    depths.append(metrics["frozen_groups"])
  assert reads == expected
  key = jax.random.key(0)
  assert [int(d) for d in depths] == [
    int(schedule.frozen_groups(jnp.int32(t), key)) for t in range(20)
  ]


@pytest.mark.parametrize(
  ("function", "expected"),
  [
    (lambda t, key: jnp.where(t < 7, 1, 0), 7),
    (lambda t, key: t % 2, 1),
    (lambda t, key: jnp.where(t < 1000, 1, 0), 100),
    (lambda t, key: np.int64(1), 100),
    (lambda t, key: 1 if t < 7 else 0, 1),  # without `jit`
  ],
)
def test_a_state_tells_for_how_many_steps_its_depth_stays_at_most_a_hundred(function, expected):
  schedule = optax_boost.FreezeSchedule(2, function)
  state = optax_boost.freeze_layers(optax.sgd(0.1), ["a", "b"], schedule).init(
    {"a": jnp.ones(1), "b": jnp.ones(1)}
  )
  assert int(state.frozen_for) == expected


def test_a_depth_put_into_the_state_lasts_one_step():
  step = chain_step(optax.sgd(0.1), optax_boost.fixed_freezing(LAYERS, 1), donate=False)
  state, _ = train(step, step.init(chain_params()), 3)
  _, history = train(step, optax.tree.set(state, frozen_groups=jnp.int32(2)), 3)
  assert [int(m["frozen_groups"]) for m in history] == [2, 1, 1]
  # One train step makes the steps of two trainings in turns.
  other = chain_step(optax.sgd(0.1), optax_boost.gradual_unfreezing(LAYERS, every=2), donate=False)
  states = [train(other, other.init(chain_params()), t)[0] for t in (0, 3)]
  depths = []
  for _ in range(3):
    for i, state in enumerate(states):
      states[i], metrics = other(state, BATCH)
      depths.append(int(metrics["frozen_groups"]))
  assert depths == [3, 2, 3, 1, 2, 1]


def test_the_depth_is_read_from_the_state():
  step = kept_step()
  start = step.init(chain_params())
  state, _ = train(step, start, 5)
  restored = jax.tree.map(np.asarray, state)
  with pytest.raises(TypeError):
    step(start, BATCH[:, :3])
  # Old and new states in any order, and a state whose depth was replaced.
  states = [start, state, start, restored, optax.tree.set(start, frozen_groups=jnp.int32(2))]
  depths = [int(step(s, BATCH)[1]["frozen_groups"]) for s in states]
  assert depths == [DEPTHS[0], DEPTHS[5], DEPTHS[0], DEPTHS[5], 2]


@pytest.mark.filterwarnings("ignore:`freeze_layers` saves no time")
def test_a_program_compiled_ahead_of_time_serves_all_depths():
  step = kept_step()
  state = step.init(chain_params())
  compiled = jax.jit(step).lower(state, BATCH).compile()
  depths = []
  for _ in range(len(DEPTHS)):
    state, metrics = compiled(state, BATCH)
    depths.append(int(metrics["frozen_groups"]))
  assert depths == list(DEPTHS)


def test_steps_without_jit_take_the_depths_of_jitted_ones():
  step = kept_step()
  state, _ = train(step, step.init(chain_params()), 3)
  # A state with known values inside a trace has a known depth, too.
  depth = jax.jit(lambda batch: step(state, batch)[1]["frozen_groups"])(BATCH)
  assert int(depth) == DEPTHS[3]
  with jax.disable_jit():
    _, history = train(step, state, 2)
  assert [int(m["frozen_groups"]) for m in history] == list(DEPTHS[3:5])


def test_the_step_keeps_no_optimizer_state(collect_garbage):
  step = chain_step()
  state, _ = train(step, step.init(chain_params()), 3)
  moments = [weakref.ref(leaf) for leaf in jax.tree.leaves(state.opt_state.inner_state)]
  del state
  collect_garbage()
  assert not any(ref() is not None for ref in moments)


def skipping(tx):
  """A user's wrapper without state that skips a step whose loss is not finite."""

  def update(grads, state, params, **extra):
    updates, moved = tx.update(grads, state, params, **extra)
    skip = ~jnp.isfinite(extra["value"])
    new_state = jax.tree.map(lambda a, b: jnp.where(skip, a, b), state, moved)
    return jax.tree.map(lambda u: jnp.where(skip, 0, u), updates), new_state

  return optax.GradientTransformationExtraArgs(tx.init, update)


@pytest.mark.parametrize(
  "wrap",
  [
    skipping,
    lambda tx: optax.apply_if_finite(tx, 10),
    lambda tx: skipping(optax.inject_hyperparams(lambda rate: tx)(rate=0.1)),
  ],
  ids=["a user's", "apply_if_finite", "inject_hyperparams"],
)
def test_a_step_that_a_wrapper_skips_repeats_its_depth(wrap):
  step = chain_step(wrap=wrap)
  state = step.init(chain_params())
  depths = []
  for t in range(6):
    assert DEPTHS[len(set(range(t)) - {1, 2})] == frozen(state.opt_state)
    state, metrics = step(state, BATCH * jnp.nan if t in (1, 2) else BATCH)
    depths.append(int(metrics["frozen_groups"]))
  assert depths == [DEPTHS[t] for t in (0, 1, 1, 1, 2, 3)]


def flops(step, state, batch, depth):
  state = state._replace(opt_state=optax.tree.set(state.opt_state, frozen_groups=jnp.int32(depth)))
  return step.lower(state, batch).compile().cost_analysis()["flops"]


def test_the_compiled_program_of_each_depth_lacks_the_backward_pass_of_its_prefix():
  width, batch = 128, jnp.ones((256, 128))
  params = chain_params(width=width)
  plan = optax_boost.layer_groups(chain_loss, params, batch, num_groups=LAYERS)
  tx = optax_boost.freeze_layers(optax.sgd(0.1, 0.9), plan, fixed_schedule())
  step = optax_boost.make_train_step(chain_loss, tx)
  state = step.init(params)
  counts = [flops(step, state, batch, depth) for depth in range(LAYERS)]
  assert all(a > b for a, b in itertools.pairwise(counts))
  matmul = 2 * 256 * width * width
  # Forward pass, gradients by the weights, and by the inputs of all but the first trained layer.
  expected = [matmul * (LAYERS + 2 * (LAYERS - d) - 1) for d in range(LAYERS)]
  np.testing.assert_allclose(counts, expected, rtol=0.05)
  plain = optax_boost.make_train_step(chain_loss, optax.sgd(0.1, 0.9))
  none = plain.lower(plain.init(params), batch).compile().cost_analysis()["flops"]
  assert counts[0] < 1.01 * none


def test_transformations_around_freezing_see_no_gradient_of_frozen_layers():
  step = chain_step(optax.sgd(1.0), fixed_schedule([3]), spied)
  state, _ = step(step.init(chain_params()), BATCH)
  for group, name in enumerate("dcba"):
    assert [bool(np.any(g)) for g in leaves_of_group(state.opt_state[0], name)] == [group >= 3] * 2


def test_a_depth_that_recurs_compiles_nothing():
  traces = itertools.count()

  def counted(params, batch):
    next(traces)
    return chain_loss(params, batch)

  tx = optax_boost.freeze_layers(optax.sgd(0.1), plan_of_chain(), fixed_schedule())
  step = optax_boost.make_train_step(counted, tx)
  state, _ = train(step, step.init(chain_params()))
  seen = next(traces)
  train(step, state)
  assert next(traces) == seen + 1


def test_a_depth_that_was_lowered_and_compiled_beforehand_is_not_compiled_again():
  tx = optax_boost.freeze_layers(
    optax.adam(0.1), ["encoder", "head"], optax_boost.gradual_unfreezing(2, every=2)
  )
  params = {"encoder": jnp.eye(4, 3), "head": jnp.ones((3, 1))}
  step = optax_boost.make_train_step(lambda p, x: jnp.mean((x @ p["encoder"] @ p["head"]) ** 2), tx)
  state = step.init(params)
  unfrozen = optax.tree.set(state.opt_state, frozen_groups=jnp.int32(0))
  step.lower(state._replace(opt_state=unfrozen), jnp.eye(4)).compile()
  watched = compilations.Watched(step)
  depths = []
  for _ in range(4):
    state, metrics = watched(state, jnp.eye(4))
    depths.append(int(metrics["frozen_groups"]))
  assert depths == [1, 1, 0, 0]
  assert watched.compiled_once()


def test_nnx_steps_at_a_depth_that_was_compiled_beforehand_do_not_compile_again():
  rngs = nnx.Rngs(0)
  model = nnx.Sequential(nnx.Linear(4, 3, rngs=rngs), nnx.tanh, nnx.Linear(3, 1, rngs=rngs))
  tx = optax_boost.freeze_layers(
    optax.adam(0.1), ["layers/0", "layers/2"], optax_boost.gradual_unfreezing(2, every=2)
  )
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  step = ob_nnx.make_train_step(lambda model, x: jnp.mean((model(x) - 1) ** 2))
  frozen_groups = optax.tree.get(optimizer.opt_state, "frozen_groups")
  depth = frozen_groups[...]
  frozen_groups[...] = jnp.int32(0)
  lowered = step.lower(model, optimizer, jnp.eye(4))
  frozen_groups[...] = depth
  lowered.compile()
  watched = compilations.Watched(step)
  depths = [int(watched(model, optimizer, jnp.eye(4))["frozen_groups"]) for _ in range(4)]
  assert depths == [1, 1, 0, 0]
  assert watched.compiled_once()


def image_step(variables, depths, **options):
  tx = optax_boost.freeze_layers(optax.sgd(0.1, 0.9), image_plan(variables), fixed_schedule(depths))
  loss, *arrays = ob_linen.split_loss(image_loss, Convolutional(), variables)
  step = optax_boost.make_train_step(loss, tx, **options)
  return step, step.init(*arrays)


@pytest.mark.parametrize("hold", [True, False])
def test_statistics_of_frozen_layers_are_frozen_by_an_option(variables, hold):
  step, state = image_step(variables, [2], hold_frozen_statistics=hold)
  state, metrics = step(state, IMAGES)
  assert metrics["frozen_groups"] == 2
  for i in range(3):
    before = variables["batch_stats"][f"BatchNorm_{i}"]["mean"]
    after = state.model_state["batch_stats"][f"BatchNorm_{i}"]["mean"]
    assert bool(jnp.all(before == after)) == (hold and i < 2)


class Network(nnx.Module):
  def __init__(self, rngs):
    self.last = nnx.Linear(8, 1, rngs=rngs)
    self.norm = nnx.BatchNorm(8, rngs=rngs)
    self.dropout = nnx.Dropout(0.1, rngs=rngs)
    self.first = nnx.Linear(8, 8, rngs=rngs)

  def __call__(self, x):
    return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))


def test_an_nnx_model_freezes_its_first_layer():
  model = Network(nnx.Rngs(0))
  plan = optax_boost.layer_groups(*ob_nnx.split_loss(image_loss, model), BATCH, num_groups=2)
  assert plan.groups[0] == ("first/kernel", "first/bias", "norm/scale", "norm/bias")
  optimizer = nnx.Optimizer(
    model,
    optax_boost.freeze_layers(optax.adamw(0.1), plan, fixed_schedule([0, 1], 2)),
    wrt=nnx.Param,
  )
  step = ob_nnx.make_train_step(image_loss)

  def pure():
    variables = nnx.state(model, (nnx.Param, nnx.BatchStat))
    return jax.tree.map(np.array, nnx.to_pure_dict(variables))

  history = [pure()]
  for depth in (0, 1, 0):
    assert step(model, optimizer, BATCH)["frozen_groups"] == depth
    history.append(pure())
  assert model.dropout.rngs.count[...] == 3
  for name, frozen_in in (("first", {1}), ("norm", {1}), ("last", set())):
    for t, (before, after) in enumerate(itertools.pairwise(history)):
      same = jax.tree.map(np.array_equal, before[name], after[name])
      assert set(jax.tree.leaves(same)) == {t in frozen_in}


class WithAdapters(nnx.Module):
  def __init__(self, rngs):
    base = lambda: nnx.Linear(4, 4, rngs=rngs)  # noqa: E731
    self.layers = nnx.List([nnx.LoRA(4, 2, 4, base_module=base(), rngs=rngs) for _ in range(3)])

  def __call__(self, x):
    for layer in self.layers:
      x = jnp.tanh(layer(x))
    return x


def test_base_weights_beside_adapters_do_not_count_as_statistics(recwarn):
  model, loss = WithAdapters(nnx.Rngs(0)), lambda model, x: jnp.mean((model(x) - 1.0) ** 2)
  x = jnp.ones((2, 4))
  groups = optax_boost.layer_groups(*ob_nnx.split_loss(loss, model, wrt=nnx.LoRAParam), x)
  schedule = optax_boost.fixed_freezing(3, frozen_groups=2)
  tx = optax_boost.freeze_layers(optax.sgd(0.1), groups, schedule)
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.LoRAParam)
  ob_nnx.make_train_step(loss)(model, optimizer, x)
  assert not [w for w in recwarn if issubclass(w.category, optax_boost.NoEffectWarning)]


def test_freezing_twice_is_refused_when_it_is_written():
  freezing = GOOD | {"groups": ("c|d", "a|b")}
  tx = optax_boost.freeze_layers(**freezing)
  for wrap in (lambda tx: tx, optax_boost.dynamic_loss_scale):
    with pytest.raises(ValueError, match=r"has `freeze_layers` already.*Leave one of the two out"):
      optax_boost.freeze_layers(**freezing | {"inner": wrap(tx)})


@pytest.mark.parametrize(("pattern", "expected"), [("enc", 1), ("encodr", 0)])
def test_the_metric_counts_the_groups_in_which_something_is_frozen(pattern, expected):
  tx = optax_boost.freeze_layers(
    optax.sgd(0.1), [pattern, "head"], optax_boost.fixed_freezing(2, 1)
  )
  step = optax_boost.make_train_step(lambda p, x: jnp.sum(p["enc"] * p["head"] * x), tx)
  with warnings.catch_warnings():
    warnings.simplefilter("ignore", optax_boost.NoEffectWarning)
    state, metrics = step(step.init({"enc": jnp.ones(2), "head": jnp.ones(2)}), 1.0)
  assert int(metrics["frozen_groups"]) == expected
  assert bool(np.all(np.asarray(state.params["enc"]) == 1)) == bool(expected)


def test_the_names_of_the_arrays_in_a_state_fit_the_names_of_files():
  """Orbax without OCDBT makes a file for each array, and no name may have more than 255 bytes."""
  params = {f"a_layer_with_a_long_name_{i}": jnp.ones(1) for i in range(20)}
  schedule = optax_boost.gradual_unfreezing(20, every=3, max_depths=20)
  state = optax_boost.freeze_layers(optax.adam(0.1), list(params), schedule).init(params)
  paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]]
  assert max(len(jax.tree_util.keystr(path)) for path in paths) < 100

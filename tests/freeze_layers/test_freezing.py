"""Freezing: the transformation, and the train step with a program for each depth."""

import functools
import itertools
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
from optax_boost._train_step import _frozen_depth
import optax_boost.nnx as ob_nnx
from tests import compilations
from tests.layer_groups.models import BATCH, LAYERS, chain_loss, chain_params

# The groups: the layers of the chain, in the order of the forward pass.
NAMES = ["d", "c", "b", "a"]
# Each depth once in eight steps, out of order.
DEPTHS = [0, 2, 1, 3, 0, 1, 3, 2]


def repeated(depths):
  """A schedule of a depth for each step, which begins anew after the last."""
  return optax_boost.FreezeSchedule(range(len(depths)), depths, cycle=(0, len(depths)))


SCHEDULE = repeated(DEPTHS)
# Two leaves, of which the first is frozen in every second step.
TWO = {"body": jnp.full((2, 3), 0.5), "head": jnp.ones(3)}
TURNS = repeated([0, 1])


def loss_of_two(params, x):
  return jnp.mean((x @ params["body"] @ params["head"] - 1) ** 2)


def label_biases(params):
  return jax.tree.map_with_path(lambda path, _: "x" if "bias" in str(path) else "y", params)


PARTS = {"x": optax.adam(1e-2), "y": optax.sgd(0.1, 0.9)}
INNERS = {
  "momentum": optax.sgd(0.1, momentum=0.9),
  "clip": optax.chain(optax.clip_by_global_norm(1e-3), optax.adamw(1e-2, weight_decay=0.1)),
  "masked decay": optax.chain(
    optax.masked(optax.trace(0.9), optax_boost.path_mask("kernel")), optax.scale(-0.1)
  ),
  "partition": optax.partition(PARTS, label_biases),
  "lars": optax_boost.lars(1.0, weight_decay=0.1),
  "loss scale": optax_boost.dynamic_loss_scale(optax.adam(1e-2), 8.0),
}


def leaves_of_group(tree, name):
  """The leaves of one layer of the chain in a tree, params or state."""
  return [
    leaf
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    if f"['{name}']" in jax.tree_util.keystr(path)
  ]


def assert_only_frozen_stay(before, after, depth):
  for group, name in enumerate(NAMES):
    pairs = zip(leaves_of_group(before, name), leaves_of_group(after, name), strict=True)
    same = [np.array_equal(a, b) for a, b in pairs]
    assert all(same) if group < depth else not any(same)


def test_frozen_leaves_and_their_state_stay_bit_for_bit():
  txs = {n: optax_boost.freeze_layers(inner, NAMES, SCHEDULE) for n, inner in INNERS.items()}

  @jax.jit
  def step(runs):
    moved = {}
    for name, (params, state) in runs.items():
      updates, state = txs[name].update(jax.grad(chain_loss)(params, BATCH), state, params)
      moved[name] = optax.apply_updates(params, updates), state
    return moved

  runs = {name: (chain_params(), tx.init(chain_params())) for name, tx in txs.items()}
  for depth in DEPTHS:
    moved = step(runs)
    for name, (params, state) in runs.items():
      after, state_after = moved[name]
      assert_only_frozen_stay((params, state.inner_state), (after, state_after.inner_state), depth)
    runs = moved


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
    optax.chain(optax.clip_by_global_norm(1.0), optax.scale(-1.0)), ("d", "c|b|a"), repeated([1])
  )
  params = chain_params()
  grads = jax.tree.map(lambda x: 100 * jnp.ones_like(x), params)
  updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
  np.testing.assert_allclose(optax.tree.norm(updates), 1.0, rtol=1e-5)
  assert not any(np.any(u) for u in leaves_of_group(updates, "d"))


def test_progressive_freezing_scales_the_updates_of_each_group():
  schedule = optax_boost.progressive_freezing(LAYERS, 8, first=0.5)
  tx = optax_boost.freeze_layers(optax.sgd(1.0), NAMES, schedule)
  params = chain_params()
  state = tx.init(params)
  ones, update = jax.tree.map(jnp.ones_like, params), jax.jit(tx.update)
  for t in range(8):
    updates, state = update(ones, state, params)
    scale, depth = np.asarray(schedule.anneal(t)), schedule.frozen_groups(t)
    for group, name in enumerate(NAMES):
      expected = 0 if group < depth else -scale[group]
      np.testing.assert_allclose(updates[name]["kernel"], expected, atol=1e-6)


def spied(tx):
  """A user's wrapper that keeps the gradient that it gets, in a tuple as a chain's state."""

  def init(params):
    return optax.tree.zeros_like(params), tx.init(params)

  def update(updates, state, params=None, **extra_args):
    out, inner_state = tx.update(updates, state[1], params, **extra_args)
    return out, (updates, inner_state)

  return optax.GradientTransformationExtraArgs(init, update)


def hidden(tx):
  """A user's wrapper that keeps the step's state as its own."""
  return optax.GradientTransformationExtraArgs(tx.init, lambda *args, **extra: tx.update(*args))


AROUND = {
  "chain": lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx),
  "chain in a chain": lambda tx: optax.chain(optax.chain(optax.trace(0.9)), tx),
  "named chain": lambda tx: optax.named_chain(("clip", optax.clip(1.0)), ("adam", tx)),
  "inject_hyperparams": lambda tx: optax.inject_hyperparams(lambda rate: tx)(0.1),
  "MultiSteps": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
  "a user's": spied,
  "a user's without state": hidden,
}


@pytest.mark.parametrize("around", AROUND)
def test_freezing_inside_of_another_transformation_is_refused(around):
  tx = AROUND[around](optax_boost.freeze_layers(optax.sgd(0.1), ["body", "head"], TURNS))
  text = r"`freeze_layers` must be around the whole optimizer; got it inside of `.*Write `freeze_l"
  step = optax_boost.make_train_step(loss_of_two, tx)
  with pytest.raises(ValueError, match=text):
    step(step.init(TWO), jnp.eye(2))
  with pytest.raises(ValueError, match=text):
    optax_boost.apply_gradients(tx, TWO, tx.init(TWO), TWO)


WINDOWS = {
  "MultiSteps": lambda tx, freeze: freeze(optax.MultiSteps(tx, 2).gradient_transformation()),
  "accumulate inside": lambda tx, freeze: freeze(optax_boost.accumulate(tx, 2)),
  "accumulate around": lambda tx, freeze: optax_boost.accumulate(freeze(tx), 2),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_a_window_of_accumulation_has_one_depth(name):
  freeze = lambda tx: optax_boost.freeze_layers(tx, ["body", "head"], TURNS)  # noqa: E731
  tx = WINDOWS[name](optax.sgd(0.1), freeze)
  state, update, moved = tx.init(TWO), jax.jit(tx.update), []
  for t in range(8):
    assert int(state.count) == t // 2
    updates, state = update(TWO, state, TWO)
    moved.append([bool(np.any(updates[name])) for name in TWO])
  assert moved == [[False, False], [True, True], [False, False], [False, True]] * 2


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
  tx = optax_boost.freeze_layers(inner, ("a", "b"), TURNS)
  params = {"a": jnp.ones(()), "b": jnp.ones(())}
  with pytest.raises(
    TypeError, match=r"map_params` can map.*`optax.lbfgs`.*as trees.*as functions of"
  ):
    tx.update(
      params, tx.init(params), params, value=0.0, grad=params, value_fn=lambda p: p["a"] + p["b"]
    )


def test_refuses_a_schedule_for_other_groups():
  freeze = functools.partial(optax_boost.freeze_layers, optax.sgd(0.1), ["a", "b"])
  text = r"`schedule` must be for the same number of groups as `groups`; got one for .*3.* and 2"
  with pytest.raises(ValueError, match=text):
    freeze(optax_boost.gradual_unfreezing(3, 10))
  with pytest.raises(ValueError, match=r"got one for more than 2, and 2 groups"):
    freeze(optax_boost.FreezeSchedule([0, 5], [0, 2]))
  with pytest.raises(TypeError, match=r"`schedule` must be a FreezeSchedule; got <function"):
    freeze(lambda step: 1)


def test_refuses_groups_of_other_params():
  plan = optax_boost.layer_groups(chain_params(), NAMES)
  tx = optax_boost.freeze_layers(optax.sgd(0.1), plan, SCHEDULE)
  with pytest.raises(ValueError, match=r"no group with the leaf 'x' .* with `layer_groups`"):
    tx.init({"x": jnp.ones(2)})
  tx = optax_boost.freeze_layers(optax.sgd(0.1), ["a", "b"], TURNS)
  with pytest.warns(optax_boost.NoEffectWarning, match=r"`groups` has patterns .*\['a'\]"):
    tx.init({"b": jnp.ones(2)})


@pytest.mark.filterwarnings("ignore::optax_boost.NoEffectWarning")
@pytest.mark.parametrize("patterns", [["*", "nothing"], ["a", "b", "hed"]])
def test_refuses_groups_without_a_leaf_that_is_never_frozen(patterns):
  tx = optax_boost.freeze_layers(optax.sgd(0.1), patterns, repeated([0, 1]))
  last = len(patterns) - 1
  with pytest.raises(ValueError, match=rf"got none in group {last} of {last + 1}\. Take"):
    tx.init({"a": jnp.ones(2), "b": jnp.ones(2)})
  tx.init({})


def test_freezing_twice_is_refused_when_it_is_written():
  freeze = lambda tx: optax_boost.freeze_layers(tx, ["c|d", "a|b"], TURNS)  # noqa: E731
  for wrap in (lambda tx: tx, optax_boost.dynamic_loss_scale):
    with pytest.raises(ValueError, match=r"has `freeze_layers` already.*Leave one of the two out"):
      freeze(wrap(freeze(optax.sgd(0.1))))


def train(step, state, steps=8, batch=BATCH):
  depths = []
  for _ in range(steps):
    state, metrics = step(state, batch)
    depths.append(int(metrics["frozen_groups"]))
  return state, depths


@functools.cache
def chain_step():
  """A step that donates nothing, and its transformation: several tests share its programs."""
  inner = optax.chain(optax.clip_by_global_norm(0.05), optax.partition(PARTS, label_biases))
  tx = optax_boost.freeze_layers(inner, NAMES, SCHEDULE)
  return optax_boost.make_train_step(chain_loss, tx, donate=False), tx


def test_a_step_equals_a_step_with_the_masked_whole_gradient():
  step, tx = chain_step()
  params, opt_state = chain_params(), tx.init(chain_params())

  @jax.jit
  def masked(params, state):
    updates, state = tx.update(jax.grad(chain_loss)(params, BATCH), state, params)
    return optax.apply_updates(params, updates), state

  for _ in DEPTHS:
    params, opt_state = masked(params, opt_state)
  state, depths = train(step, step.init(chain_params()))
  assert depths == DEPTHS
  chex.assert_trees_all_close(
    (state.params, state.opt_state), (params, opt_state), rtol=1e-5, atol=1e-7
  )
  # A depth that recurs compiles nothing.
  assert compilations.count(lambda: train(step, state)) == 0


def test_inside_a_users_scan_frozen_layers_are_not_updated_and_save_nothing():
  expected, _ = train(chain_step()[0], chain_step()[0].init(chain_params()))
  step = optax_boost.make_train_step(chain_loss, chain_step()[1], donate=False)

  @jax.jit
  def scan(state):
    return jax.lax.scan(lambda state, _: step(state, BATCH), state, length=len(DEPTHS))

  with pytest.warns(optax_boost.NoEffectWarning, match="`freeze_layers` saves no time") as caught:
    state, metrics = scan(step.init(chain_params()))
  jax.eval_shape(lambda state: step(state, BATCH), state)
  assert len(caught) == 1
  np.testing.assert_array_equal(metrics["frozen_groups"], DEPTHS)
  chex.assert_trees_all_close(state, expected, rtol=1e-5, atol=1e-7)


def test_inside_a_users_jit_a_schedule_of_one_depth_skips_the_backward_pass():
  """Two products forward, then one of each trained layer and one between the two layers."""

  def products(schedule):
    def loss(params, x):
      return jnp.mean(jnp.tanh(x @ params["body"]) @ params["head"])

    tx = optax_boost.freeze_layers(optax.sgd(0.1), ["body", "head"], schedule)
    step = optax_boost.make_train_step(loss, tx)
    state = step.init({"body": jnp.ones((4, 4)), "head": jnp.ones((4, 2))})
    return str(jax.make_jaxpr(step)(state, jnp.ones((3, 4)))).count("dot_general[")

  assert products(optax_boost.fixed_freezing(2, 0)) == 5
  assert products(optax_boost.fixed_freezing(2, 1)) == 3


@pytest.mark.filterwarnings("ignore:`freeze_layers` saves no time")
def test_a_population_at_several_depths_takes_the_depth_of_each():
  step, _ = chain_step()
  states = [train(step, step.init(chain_params()), t)[0] for t in range(3)]
  stacked = jax.tree.map(lambda *x: jnp.stack(x), *states)
  together, metrics = jax.jit(jax.vmap(lambda state: step(state, BATCH)))(stacked)
  np.testing.assert_array_equal(metrics["frozen_groups"], DEPTHS[:3])
  expected = jax.tree.map(lambda *x: jnp.stack(x), *[step(state, BATCH)[0] for state in states])
  chex.assert_trees_all_close(together, expected, rtol=1e-5, atol=1e-6)
  # A program compiled ahead of time serves all depths.
  compiled = jax.jit(step).lower(states[0], BATCH).compile()
  assert train(compiled, states[0])[1] == DEPTHS


def test_the_depth_is_read_from_the_state():
  step, _ = chain_step()
  start = step.init(chain_params())
  state, _ = train(step, start, 5)
  restored = jax.tree.map(np.asarray, state)
  with pytest.raises(TypeError):
    step(start, BATCH[:, :3])
  # Old and new states in any order.
  depths = [int(step(s, BATCH)[1]["frozen_groups"]) for s in (start, state, start, restored)]
  assert depths == [DEPTHS[0], DEPTHS[5], DEPTHS[0], DEPTHS[5]]
  # A state with known values inside a trace has a known depth, too.
  depth = jax.jit(lambda batch: step(state, batch)[1]["frozen_groups"])(BATCH)
  assert int(depth) == DEPTHS[5]


def test_the_step_keeps_no_optimizer_state(collect_garbage):
  step, _ = chain_step()
  state, _ = train(step, step.init(chain_params()), 3)
  moments = [weakref.ref(leaf) for leaf in jax.tree.leaves(state.opt_state.inner_state)]
  del state
  collect_garbage()
  assert not any(ref() is not None for ref in moments)


class Count:
  """A count on the device, which says when it is read."""

  def __init__(self, step, reads):
    self.step, self.reads = step, reads

  def __int__(self):
    self.reads.append(self.step)
    return self.step


READ = {
  "fixed": optax_boost.fixed_freezing(LAYERS, 2),
  "fixed, then free": optax_boost.fixed_freezing(LAYERS, 2, steps=7),
  "gradual": optax_boost.gradual_unfreezing(LAYERS, every=5),
  "progressive": optax_boost.progressive_freezing(LAYERS, 16, 0.5),
  "continuous": optax_boost.continuous_freezing(LAYERS, 0.5),
  "interval": optax_boost.interval_freezing(LAYERS, 0.3),
  "a user's": SCHEDULE,
}


def test_the_depth_is_read_from_the_device_only_when_it_changes():
  for name, schedule in READ.items():
    tx = optax_boost.freeze_layers(optax.sgd(0.1), NAMES, schedule)
    reader, reads, depths = _frozen_depth.DepthReader(tx), [], []
    state = tx.init(chain_params())._replace(count=Count(0, reads))
    for t in range(40):
      depth, steps = reader.read(state)
      state = state._replace(count=Count(t + 1, reads))
      reader.remember(state, depth, steps)
      depths.append(depth)
    assert depths == schedule.frozen_groups(np.arange(40)).tolist(), name
    assert reads == [0, *(t for t in range(1, 40) if depths[t] != depths[t - 1])], name


def two_linears():
  rngs = nnx.Rngs(0)
  model = nnx.Sequential(nnx.Linear(4, 3, rngs=rngs), nnx.tanh, nnx.Linear(3, 1, rngs=rngs))
  return model, lambda model, x: jnp.mean((model(x) - 1) ** 2)


@pytest.mark.parametrize("door", ["plain", "nnx"])
def test_a_depth_that_was_compiled_beforehand_is_not_compiled_again(door, monkeypatch):
  """And the doors read the depth only when it changes."""
  schedule = optax_boost.gradual_unfreezing(2, every=3)
  reads = []

  def read(x):
    if isinstance(x, jax.Array):
      reads.append(len(depths))
    return int(x)

  monkeypatch.setattr(_frozen_depth, "int", read, raising=False)
  x, depths = jnp.eye(4), []
  if door == "plain":
    tx = optax_boost.freeze_layers(optax.adam(0.1), ["body", "head"], schedule)
    step = optax_boost.make_train_step(loss_of_two, tx)
    state = step.init({"body": jnp.eye(4, 3), "head": jnp.ones(3)})
    thawed = state.opt_state._replace(count=jnp.int32(3))
    step.lower(state._replace(opt_state=thawed), x).compile()
  else:
    model, loss = two_linears()
    tx = optax_boost.freeze_layers(optax.adam(0.1), ["layers/0", "layers/2"], schedule)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    step = ob_nnx.make_train_step(loss)
    count = optimizer.opt_state.count[...]
    optimizer.opt_state.count[...] = jnp.int32(3)
    lowered = step.lower(model, optimizer, x)
    optimizer.opt_state.count[...] = count
    lowered.compile()
  reads.clear()
  watched = compilations.Watched(step)
  for _ in range(8):
    if door == "plain":
      state, metrics = watched(state, x)
    else:
      metrics = watched(model, optimizer, x)
    depths.append(metrics["frozen_groups"])
  assert [int(d) for d in depths] == [1, 1, 1, 0, 0, 0, 0, 0]
  assert watched.compiled_once()
  assert reads == [0, 3]


@pytest.mark.parametrize(
  ("inside", "around"),
  [
    (lambda tx: optax.apply_if_finite(tx, 10), lambda tx: tx),
    (lambda tx: tx, optax_boost.dynamic_loss_scale),
  ],
  ids=["apply_if_finite", "dynamic_loss_scale"],
)
def test_a_step_that_a_wrapper_skips_repeats_its_depth(inside, around):
  tx = around(optax_boost.freeze_layers(inside(optax.sgd(0.1)), ["body", "head"], TURNS))
  step = optax_boost.make_train_step(loss_of_two, tx)
  state, depths = step.init(TWO), []
  for t in range(6):
    state, metrics = step(state, jnp.eye(2) * (jnp.nan if t in (1, 2) else 1.0))
    depths.append(int(metrics["frozen_groups"]))
  assert depths == [0, 1, 1, 1, 0, 1]
  with jax.disable_jit():
    assert train(step, state, 1, jnp.eye(2))[1] == [0]


def test_a_training_is_resumed_to_the_bit_from_arrays_also_with_another_schedule():
  rng = np.random.default_rng(0)
  grads = [jax.tree.map(lambda p: rng.normal(size=p.shape).astype("f4"), TWO) for _ in range(10)]

  def start(schedule):
    tx = optax_boost.freeze_layers(optax.adamw(0.1), ["body", "head"], schedule)
    return jax.jit(functools.partial(optax_boost.apply_gradients, tx)), (TWO, tx.init(TWO))

  def run(step, carry, steps):
    for t in steps:
      params, state = carry
      carry = step(grads[t], state, params)
    return carry

  step, first = start(TURNS)
  arrays = [np.array(leaf) for leaf in jax.tree.leaves(run(step, first, range(4)))]
  thawing = optax_boost.gradual_unfreezing(2, every=6)
  for schedule in (TURNS, optax_boost.FreezeSchedule([0, 7, 9], [1, 0, 1]), thawing):
    step, new = start(schedule)
    resumed = run(step, jax.tree.unflatten(jax.tree.structure(new), arrays), range(4, 10))
    depths = [*TURNS.frozen_groups(np.arange(4)), *schedule.frozen_groups(np.arange(4, 10))]
    expected = run(*start(optax_boost.FreezeSchedule(range(10), depths)), range(10))
    chex.assert_trees_all_equal(resumed, expected)
    (counts,) = resumed[1].freezing.group_counts
    assert counts.tolist() == [depths.count(0), 10]


def flops(step, state, batch, count):
  state = state._replace(opt_state=state.opt_state._replace(count=jnp.int32(count)))
  return step.lower(state, batch).compile().cost_analysis()["flops"]


def test_the_compiled_program_of_each_depth_lacks_the_backward_pass_of_its_prefix():
  width, batch = 128, jnp.ones((256, 128))
  params = chain_params(width=width)
  tx = optax_boost.freeze_layers(optax.sgd(0.1, 0.9), NAMES, repeated(range(LAYERS)))
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

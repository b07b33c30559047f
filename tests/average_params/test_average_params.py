"""`average_params`, and BatchNorm statistics of averaged weights."""

import functools

import chex
from flax import core, linen as nn, nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
import optax_boost.linen
import optax_boost.nnx
from tests import compilations

TARGET = jnp.arange(6.0).reshape(2, 3)
MODES = {
  "start": ({"start": 4, "every": 2}, lambda n: np.r_[np.zeros(2), np.ones(n - 2)]),
  "decay": ({"decay": 0.7, "every": 2}, lambda n: 0.7 ** np.arange(n)[::-1]),
}


def grads_at(params):
  return jax.tree.map(lambda p: p - TARGET.astype(p.dtype), params)


def trajectory(tx, params, steps, step=optax_boost.apply_gradients):
  """Returns the last state and the params after each step."""
  state, after = tx.init(params), []
  jitted = jax.jit(functools.partial(step, tx))
  for _ in range(steps):
    params, state = jitted(grads_at(params), state, params)
    after.append(params)
  return state, after


def two_calls(tx, grads, state, params):
  updates, state = tx.update(grads, state, params)
  return optax.apply_updates(params, updates), state


@pytest.mark.parametrize("step", [optax_boost.apply_gradients, two_calls])
@pytest.mark.parametrize("mode", MODES)
def test_the_average_equals_numpys_average_of_the_params_after_the_steps(mode, step):
  kwargs, weights = MODES[mode]
  tx = optax_boost.average_params(optax.sgd(0.2, momentum=0.5), **kwargs)
  state, after = trajectory(tx, {"w": jnp.ones((2, 3))}, 13, step)
  snapshots = np.stack([np.asarray(p["w"], np.float64) for p in after[1::2]])
  weights = weights(len(snapshots))
  expected = np.tensordot(weights, snapshots, 1) / weights.sum()
  averaged = optax_boost.averaged_params(state, after[-1])
  np.testing.assert_allclose(averaged["w"], expected, rtol=1e-6)
  assert state.count == 13


def test_the_average_equals_the_params_before_the_first_snapshot_and_has_their_dtype_later():
  tx = optax_boost.average_params(optax.sgd(0.1), start=2)
  state, after = trajectory(tx, jnp.ones((2, 3), jnp.bfloat16), 3)
  assert state.average.dtype == jnp.float32
  averaged = jax.jit(optax_boost.averaged_params)(state, after[-1])
  assert averaged.dtype == jnp.bfloat16
  np.testing.assert_array_equal(averaged, after[-1])
  early, after = trajectory(tx, jnp.ones((2, 3)), 2)
  np.testing.assert_array_equal(optax_boost.averaged_params(early, after[-1]), after[-1])


def test_exponential_weights_stay_exact_over_thousands_of_snapshots():
  tx = optax_boost.average_params(optax.sgd(1.0), decay=0.999)

  def step(carry, x):
    params, state = carry
    updates, state = tx.update(params - x, state, params)
    params = optax.apply_updates(params, updates)
    return (params, state), params

  noise = np.random.default_rng(0).normal(size=4000).astype(np.float32)
  (params, state), seen = jax.lax.scan(step, (jnp.zeros([]), tx.init(jnp.zeros([]))), noise)
  weights = 0.999 ** np.arange(4000)[::-1]
  expected = weights @ np.asarray(seen, np.float64) / weights.sum()
  np.testing.assert_allclose(optax_boost.averaged_params(state, params), expected, atol=1e-6)


SKIPPING = {
  "accumulate": lambda tx: optax_boost.accumulate(tx, 2),
  "MultiSteps": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
  "dynamic_loss_scale": lambda tx: optax_boost.dynamic_loss_scale(tx, 1.0),
  "master_weights": optax_boost.master_weights,
  "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 9),
}


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("name", SKIPPING)
@pytest.mark.parametrize("step", [optax_boost.apply_gradients, two_calls])
def test_skipped_steps_do_not_count_as_snapshots(name, outside, step):
  if outside and name in ("MultiSteps", "apply_if_finite"):
    return  # an average is around every transformation of optax
  wrap = SKIPPING[name]
  average = functools.partial(optax_boost.average_params, start=0)
  tx = wrap(average(optax.sgd(0.25))) if outside else average(wrap(optax.sgd(0.25)))
  params = jnp.ones((2, 3))
  state, seen = tx.init(params), []
  jitted = jax.jit(functools.partial(step, tx))
  for t in range(6):
    grads = grads_at(params)
    if t in (1, 4) and name not in ("accumulate", "MultiSteps"):
      grads = grads.at[0, 0].set(jnp.nan)
    old = params
    params, state = jitted(grads, state, params)
    if jnp.any(params != old):
      seen.append(params)
  assert (
    optax.tree.get(state, "snapshot_count")
    == len(seen)
    == (3 if "Multi" in name or name == "accumulate" else 4)
  )
  np.testing.assert_allclose(
    optax_boost.averaged_params(state, params), np.mean(seen, 0), rtol=1e-6
  )


WINDOWS = optax.MultiSteps(optax.sgd(0.25), 2).gradient_transformation()
SIDES = {"a": optax_boost.accumulate(optax.sgd(0.25), 2), "b": optax.sgd(0.25)}


@pytest.mark.parametrize(
  ("inner", "made"),
  [
    (optax_boost.switch_after(4, WINDOWS, optax.sgd(0.25)), (1, 3, 4, 5, 6, 7)),
    (optax_boost.switch_after(4, optax.sgd(0.25), WINDOWS), (0, 1, 2, 3, 5, 7)),
    (
      optax.partition(
        {"a": SIDES["a"], "b": optax_boost.accumulate(optax.sgd(0.25), 3)}, {"a": "a", "b": "b"}
      ),
      (1, 2, 3, 5, 7),
    ),
    (
      optax.partition(
        {"a": optax.set_to_zero(), "b": optax_boost.accumulate(optax.sgd(0.25), 3)},
        {"a": "a", "b": "b"},
      ),
      (2, 5),
    ),
  ],
  ids=["switch", "switch back", "partition", "frozen part"],
)
def test_a_step_that_one_of_several_parts_makes_is_a_snapshot(inner, made):
  tx = optax_boost.average_params(inner, start=0)
  state, after = trajectory(tx, {"a": jnp.zeros((2, 3)), "b": jnp.ones((2, 3))}, 8)
  assert state.snapshot_count == len(made)
  expected = jax.tree.map(lambda *x: np.mean([x[t] for t in made], 0), *after)
  chex.assert_trees_all_close(optax_boost.averaged_params(state, after[-1]), expected, rtol=1e-6)


@pytest.mark.parametrize(
  "wrap",
  [
    lambda tx: optax_boost.laperm(tx, 3),
    lambda tx: optax_boost.switch_after(3, tx, tx),
  ],
)
def test_a_wrapper_that_replaces_the_updates_goes_inside(wrap):
  params = {"a": jnp.ones((2, 2)), "b": jnp.ones((2, 2))}
  average = functools.partial(optax_boost.average_params, start=0)
  with pytest.raises(ValueError, match=r"Put it around: `average_params\("):
    wrap(average(optax.sgd(0.1))).init(params)
  tx = average(wrap(optax.sgd(0.1)))
  updates, state = tx.update(params, tx.init(params), params)
  expected = optax.apply_updates(params, updates)
  chex.assert_trees_all_close(optax_boost.averaged_params(state, params), expected)


def test_around_lookahead_the_pair_is_averaged():
  tx = optax_boost.average_params(optax.lookahead(optax.sgd(0.1), 2, 0.5), start=2)
  params = optax.LookaheadParams.init_synced(jnp.ones(2))
  state, path = tx.init(params), []
  for _ in range(5):
    updates, state = tx.update(params.fast, state, params)
    params = optax.apply_updates(params, updates)
    path.append(params)
  mean = jax.tree.map(lambda *xs: sum(xs) / 3, *path[-3:])
  chex.assert_trees_all_close(optax_boost.averaged_params(state, params), mean, rtol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_steps_without_a_snapshot_touch_no_average(mode):
  """Only the loop of at most one turn reads and writes the average."""
  tx = optax_boost.average_params(optax.sgd(0.1), **MODES[mode][0])
  params = jnp.ones(1000)
  jaxpr = jax.make_jaxpr(tx.update)(params, tx.init(params), params)
  # A function with a custom derivative is a call.
  calls = [e.params.get("call_jaxpr") for e in jaxpr.eqns]
  equations = [i for e, c in zip(jaxpr.eqns, calls, strict=True) for i in (c.eqns if c else [e])]
  work = [e.primitive.name for e in equations if any(v.aval.size >= 1000 for v in e.outvars)]
  assert work == ["mul", "while"]  # of SGD and of the average


@pytest.mark.parametrize("mode", MODES)
def test_a_donated_snapshot_is_written_in_place(mode):
  tx = optax_boost.average_params(optax.sgd(0.1), **MODES[mode][0])
  params = {f"w{i}": jnp.ones((64, 128)) for i in range(3)}
  step = jax.jit(
    lambda params, state, grads: optax_boost.apply_gradients(tx, grads, state, params),
    donate_argnums=(0, 1),
  )
  compiled = step.lower(params, tx.init(params), params).compile()
  assert compiled.memory_analysis().temp_size_in_bytes < params["w0"].nbytes


def test_entries_that_are_not_finite_are_ignored():
  tx = optax_boost.average_params(optax.sgd(1.0), start=0)
  state = tx.init(jnp.zeros(2))
  for g in (1.0, 2.0, np.nan):
    _, state = tx.update(jnp.array([-1.0, -g]), state, jnp.zeros(2))
  np.testing.assert_allclose(optax_boost.averaged_params(state, jnp.zeros(2)), [1.0, 1.5])


class Nnx(nnx.Module):
  def __init__(self, rngs):
    self.dense = nnx.Linear(3, 4, rngs=rngs)
    self.norm = nnx.BatchNorm(4, rngs=rngs)
    self.dropout = nnx.Dropout(0.5, rngs=rngs)
    self.out = nnx.BatchNorm(4, momentum=0.5, rngs=rngs)

  def __call__(self, x):
    return self.out(self.dropout(nnx.relu(self.norm(self.dense(x)))))


class Linen(nn.Module):
  @nn.compact
  def __call__(self, x, train=False):
    x = nn.relu(nn.BatchNorm(not train, name="norm")(nn.Dense(4, name="dense")(x)))
    x = nn.Dropout(0.5, deterministic=not train)(x)
    return nn.BatchNorm(name="out", momentum=0.5)(x, use_running_average=not train)


def in_training(model, x):
  return model(x, train=True)


def batches_of(sizes):
  rng = np.random.default_rng(0)
  return [rng.normal(size=(n, 3)).astype(np.float32) for n in sizes]


def expected_statistics(kernel, bias, batches):
  """The statistics of both BatchNorms, weighted by the batches' sizes, computed in NumPy."""
  rows = []
  for x in batches:
    h = x.astype(np.float64) @ np.asarray(kernel, np.float64) + np.asarray(bias)
    z = np.maximum((h - h.mean(0)) / np.sqrt(h.var(0) + 1e-5), 0)
    rows.append([h.mean(0), h.var(0), z.mean(0), z.var(0)])
  return np.average(rows, axis=0, weights=list(map(len, batches)))


@pytest.mark.parametrize("api", ["nnx", "linen"])
def test_batch_statistics_equal_numpys_means_over_all_batches(api):
  batches = batches_of([8, 8, 8, 4])
  if api == "nnx":
    model = Nnx(nnx.Rngs(0))
    model.norm.mean[...] = jnp.full(4, jnp.nan)
    new = optax_boost.nnx.estimate_batch_stats(model, iter(batches))
    assert not new.dropout.deterministic
    assert not new.norm.use_running_average
    assert new.out.momentum == 0.5
    assert jnp.isnan(model.norm.mean[0])
    kernel, bias = new.dense.kernel[...], new.dense.bias[...]
    estimated = [s[...] for norm in (new.norm, new.out) for s in (norm.mean, norm.var)]
    for kind in (nnx.Param, nnx.RngCount):
      chex.assert_trees_all_equal(nnx.state(new, kind), nnx.state(model, kind))
  else:
    module = Linen()
    variables = module.init(jax.random.key(0), batches[0])
    estimate = functools.partial(
      optax_boost.linen.estimate_batch_stats, module, forward_fn=in_training
    )
    new = estimate(variables, iter(batches))
    chex.assert_trees_all_equal(new["params"], variables["params"])
    frozen_estimate = estimate(core.freeze(variables), batches)
    chex.assert_trees_all_equal(frozen_estimate["batch_stats"], new["batch_stats"])
    kernel, bias = new["params"]["dense"]["kernel"], new["params"]["dense"]["bias"]
    estimated = [new["batch_stats"][n][s] for n in ("norm", "out") for s in ("mean", "var")]
  np.testing.assert_allclose(estimated, expected_statistics(kernel, bias, batches), atol=2e-6)


class OwnNnxNorm(nnx.BatchNorm):
  def __call__(self, x):
    return super().__call__(x.astype(jnp.float32))


class NnxShared(nnx.Module):
  def __init__(self):
    self.norm = OwnNnxNorm(3, rngs=nnx.Rngs(0))

  def __call__(self, x):
    def body(_, carry):
      norm, x = carry
      return norm, norm(x) * 3 + 10

    return nnx.fori_loop(0, 2, body, (self.norm, self.norm(x)))[1]


class OwnLinenNorm(nn.BatchNorm):
  def __call__(self, x):
    return super().__call__(x.astype(jnp.float32), use_running_average=False)


class LinenShared(nn.Module):
  @nn.compact
  def __call__(self, x):
    def body(norm, x, _):
      return norm(x) * 3 + 10, None

    norm = OwnLinenNorm(name="norm")
    x = norm(x)
    scan = nn.scan(
      body, variable_carry="batch_stats", variable_broadcast="params", length=2, split_rngs={}
    )
    return scan(norm, x, None)[0]


@pytest.mark.parametrize("api", ["nnx", "linen"])
def test_all_uses_of_a_shared_batch_norm_have_equal_weight(api):
  batch = batches_of([8])[0]
  once = (batch - batch.mean(0)) / np.sqrt(batch.var(0) + 1e-5)
  twice = 3 * once / np.sqrt(once.var(0) + 1e-5) + 10
  uses = [batch, once, twice]
  if api == "nnx":
    new = optax_boost.nnx.estimate_batch_stats(NnxShared(), [batch])
    estimated = [new.norm.mean[...], new.norm.var[...]]
  else:
    module = LinenShared()
    variables = module.init(jax.random.key(0), batch)
    new = optax_boost.linen.estimate_batch_stats(module, variables, [batch])
    estimated = [new["batch_stats"]["norm"][name] for name in ("mean", "var")]
  expected = [np.mean([x.mean(0) for x in uses], 0), np.mean([x.var(0) for x in uses], 0)]
  np.testing.assert_allclose(estimated, expected, atol=1e-5)


class Around(nn.Module):
  """Two layers of a module, checkpointed and scanned over."""

  inner: nn.Module

  @nn.compact
  def __call__(self, x, train=False):
    def body(inner, x, _):
      return nn.remat(lambda inner, x: x + inner(x, train)[:, :3])(inner, x), None

    axes = {"params": 0, "batch_stats": 0}
    return nn.scan(body, variable_axes=axes, split_rngs={"params": True}, length=2)(
      self.inner, x, None
    )[0]


@pytest.mark.parametrize("inside", [False, True])
def test_batch_norms_that_less_bn_removed_have_no_statistics(inside):
  (batch,) = batches_of([8])
  less = optax_boost.linen.less_bn(Linen(), batch, predicate=lambda place: place.path == "norm")
  assert less.plan.removed == ("norm",)
  module = Around(less) if inside else less
  variables = module.init(jax.random.key(0), batch)
  new = optax_boost.linen.estimate_batch_stats(module, variables, [batch], forward_fn=in_training)
  chex.assert_trees_all_equal_structs(new, variables)
  params, statistics = new["params"], new["batch_stats"]
  if inside:
    params, statistics = jax.tree.map(lambda leaf: leaf[0], (params["inner"], statistics["inner"]))
  out = np.maximum(batch @ params["dense"]["kernel"] + params["dense"]["bias"], 0)
  np.testing.assert_allclose(statistics["out"]["mean"], out.mean(0), atol=1e-6)
  np.testing.assert_allclose(statistics["out"]["var"], out.var(0), atol=1e-6)


class LinenSynchronized(nn.Module):
  @nn.compact
  def __call__(self, x):
    return nn.BatchNorm(axis_name="devices", use_running_average=False)(x)


@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("api", ["nnx", "linen"])
def test_synchronized_norms_take_the_batch_and_a_bound_axis(api, bound):
  (batch,) = batches_of([8])
  inputs = batch.reshape(2, 4, 3) if bound else batch
  if api == "nnx":
    each = nnx.vmap(lambda model, x: model(x), in_axes=(None, 0), axis_name="devices")
    model = nnx.BatchNorm(3, axis_name="devices", rngs=nnx.Rngs(0))
    new = optax_boost.nnx.estimate_batch_stats(model, [inputs], forward_fn=each if bound else None)
    assert new.axis_name == "devices"
    estimated = [new.mean[...], new.var[...]]
  else:
    axes, split = {"params": None, "batch_stats": 0}, {"params": False}
    each = nn.vmap(LinenSynchronized, variable_axes=axes, split_rngs=split, axis_name="devices")
    module = each() if bound else LinenSynchronized()
    variables = module.init(jax.random.key(0), inputs)
    new = optax_boost.linen.estimate_batch_stats(module, variables, [inputs])
    estimated = [leaf.reshape(-1, 3)[-1] for leaf in jax.tree.leaves(new["batch_stats"])]
  np.testing.assert_allclose(estimated, [batch.mean(0), batch.var(0)], atol=1e-6)


class Scaled(nn.Module):
  factor: np.ndarray

  @nn.compact
  def __call__(self, x):
    return nn.BatchNorm(use_running_average=False)(self.factor * x)


def test_modules_that_hold_other_arrays_share_no_program():
  batches = batches_of([8])
  for factor in (np.full(3, 2.0), np.full(3, 3.0), np.ones(1)):
    module = Scaled(factor)
    variables = module.init(jax.random.key(0), batches[0])
    for _ in range(2):
      new = optax_boost.linen.estimate_batch_stats(module, variables, batches)
      mean = new["batch_stats"]["BatchNorm_0"]["mean"]
      np.testing.assert_allclose(mean, factor * batches[0].mean(0), atol=1e-6)


def test_a_second_estimate_compiles_nothing():
  batches = batches_of([8, 8])
  module, model = Linen(), Nnx(nnx.Rngs(0))
  variables = module.init(jax.random.key(0), batches[0])
  for estimate in (
    lambda: optax_boost.linen.estimate_batch_stats(
      module, variables, batches, forward_fn=in_training
    ),
    lambda: optax_boost.nnx.estimate_batch_stats(model, batches),
  ):
    estimate()
    assert compilations.count(estimate) == 0


def test_models_without_batch_norm_and_layers_out_of_reach_are_named():
  batches = batches_of([8])
  with pytest.warns(optax_boost.NoEffectWarning, match=r"found no BatchNorm to estimate"):
    optax_boost.nnx.estimate_batch_stats(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), batches)
  module = nn.Dense(4)
  with pytest.warns(optax_boost.NoEffectWarning, match=r"found no BatchNorm to estimate"):
    optax_boost.linen.estimate_batch_stats(
      module, module.init(jax.random.key(0), batches[0]), batches
    )
  model = Nnx(nnx.Rngs(0))
  with pytest.warns(optax_boost.NoEffectWarning, match=r"\['out'\]"):
    new = optax_boost.nnx.estimate_batch_stats(
      model, batches, forward_fn=lambda model, x: model.norm(model.dense(x))
    )
  np.testing.assert_array_equal(new.out.var, model.out.var)
  module = Linen()
  variables = module.init(jax.random.key(0), batches[0])
  variables["batch_stats"]["other"] = {"mean": jnp.ones(2), "var": jnp.ones(2)}
  with pytest.warns(optax_boost.NoEffectWarning, match=r"\['other'\]"):
    new = optax_boost.linen.estimate_batch_stats(module, variables, batches, forward_fn=in_training)
  np.testing.assert_array_equal(new["batch_stats"]["other"]["mean"], 1)


class OwnFrozenNnxNorm(nnx.BatchNorm):
  def __call__(self, x):
    return super().__call__(x, use_running_average=True)


class NnxPair(nnx.Module):
  """Two BatchNorms; the first has the running mean 2 and may be frozen in one of three ways."""

  def __init__(self, frozen):
    kind = OwnFrozenNnxNorm if frozen == "class" else nnx.BatchNorm
    self.first = kind(3, use_running_average=frozen == "layer", rngs=nnx.Rngs(0))
    self.first.mean[...] = jnp.full(3, 2.0)
    self.second = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    self.kwargs = {"use_running_average": True} if frozen == "call" else {}

  def __call__(self, x):
    return self.second(self.first(x, **self.kwargs))


class OwnFrozenLinenNorm(nn.BatchNorm):
  def __call__(self, x):
    return super().__call__(x, use_running_average=True)


class LinenPair(nn.Module):
  frozen: str

  @nn.compact
  def __call__(self, x, train=True):
    flag = {"use_running_average": self.frozen != "" or not train}
    if self.frozen == "class":
      x = OwnFrozenLinenNorm(name="first")(x)
    elif self.frozen == "call":
      x = nn.BatchNorm(name="first")(x, *flag.values())
    else:
      x = nn.BatchNorm(name="first", **flag)(x)
    return nn.BatchNorm(name="second", use_running_average=not train)(x)


def estimated_pair(api, frozen, batches, evaluation=False, **kwargs):
  """The statistics of both BatchNorms before and after the estimate, as means and variances."""
  if api == "nnx":
    model = NnxPair(frozen)
    if evaluation:
      model.eval()
    new = optax_boost.nnx.estimate_batch_stats(model, batches, **kwargs)
    return [[(n.mean[...], n.var[...]) for n in (m.first, m.second)] for m in (model, new)]
  module = LinenPair(frozen)
  variables = module.init(jax.random.key(0), batches[0])
  variables["batch_stats"]["first"]["mean"] = jnp.full(3, 2.0)
  if evaluation:
    kwargs["forward_fn"] = lambda model, x: model(x, train=False)
  new = optax_boost.linen.estimate_batch_stats(module, variables, batches, **kwargs)
  trees = (tree["batch_stats"] for tree in (variables, new))
  return [[(t[n]["mean"], t[n]["var"]) for n in ("first", "second")] for t in trees]


def assert_kept_and_seen_by_the_next(statistics, batches):
  """The first BatchNorm keeps its running statistics; the second gets its outputs."""
  before, (first, second) = statistics
  chex.assert_trees_all_equal(first, before[0])
  mean, var = np.full(3, 2.0), np.ones(3)
  seen = [(x - mean) / np.sqrt(var + 1e-5) for x in batches]
  expected = np.mean([(h.mean(0), h.var(0)) for h in seen], 0)
  np.testing.assert_allclose(second, expected, atol=1e-5)


@pytest.mark.parametrize("frozen", ["layer", "call", "class"])
@pytest.mark.parametrize("api", ["nnx", "linen"])
def test_frozen_batch_norms_keep_their_statistics(api, frozen):
  batches = batches_of([8, 8])
  assert_kept_and_seen_by_the_next(estimated_pair(api, frozen, batches), batches)


@pytest.mark.parametrize("patterns", [{"exclude": "first"}, {"only": ["sec*", "second"]}], ids=str)
@pytest.mark.parametrize("evaluation", [False, True])
@pytest.mark.parametrize("api", ["nnx", "linen"])
def test_patterns_choose_the_batch_norms_to_estimate(api, evaluation, patterns):
  batches = batches_of([8, 8])
  if evaluation:
    patterns = {"only": "*"} | patterns
  statistics = estimated_pair(api, "", batches, evaluation, **patterns)
  assert_kept_and_seen_by_the_next(statistics, batches)


@pytest.mark.parametrize("api", ["nnx", "linen"])
def test_a_pattern_estimates_a_frozen_batch_norm(api):
  batches = batches_of([8, 8])
  before, (first, second) = estimated_pair(api, "layer", batches, only="first")
  expected = np.mean([(x.mean(0), x.var(0)) for x in batches], 0)
  np.testing.assert_allclose(first, expected, atol=1e-6)
  chex.assert_trees_all_equal(second, before[1])
  with pytest.warns(optax_boost.NoEffectWarning, match=r"`exclude` .* match no leaf: \['firs'\]"):
    estimated_pair(api, "layer", batches, exclude="firs")
  with pytest.warns(optax_boost.NoEffectWarning, match="found no BatchNorm to estimate"):
    estimated_pair(api, "layer", batches, exclude="*")


@pytest.mark.parametrize("api", ["nnx", "linen"])
def test_a_forward_pass_that_updates_no_batch_norm_is_refused(api):
  """In evaluation mode a BatchNorm that training freezes looks like any other."""
  with pytest.raises(ValueError, match=r"frozen .*\['first', 'second'\].*in its training mode"):
    estimated_pair(api, "layer", batches_of([8]), evaluation=True)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("api", ["nnx", "linen"])
def test_a_batch_that_is_not_finite_is_named(api, bad):
  batches = batches_of([8, 8, 8])
  batches[1][3, 2] = bad
  with pytest.raises(ValueError, match="the leaf 'batch' of batch 1 has NaN or infinite entries"):
    estimated_pair(api, "layer", batches)
  named = [{"image": x, "label": np.zeros(8, int)} for x in batches]
  if api == "nnx":
    estimate = functools.partial(optax_boost.nnx.estimate_batch_stats, NnxPair(""))
  else:
    module = LinenPair("")
    variables = module.init(jax.random.key(0), batches[0])
    estimate = functools.partial(optax_boost.linen.estimate_batch_stats, module, variables)
  with pytest.raises(ValueError, match="the leaf 'image' of batch 1 has NaN or infinite entries"):
    estimate(named, forward_fn=lambda model, batch: model(batch["image"]))
  # An entry that reaches no BatchNorm may be NaN.
  unused = [{"image": x, "target": y} for x, y in zip(batches_of([8, 8, 8]), batches, strict=True)]
  estimate(unused, forward_fn=lambda model, batch: model(batch["image"]))


def test_params_that_are_not_finite_make_statistics_that_are_not_finite():
  model = Nnx(nnx.Rngs(0))
  model.dense.bias[...] = jnp.full(4, jnp.nan)
  new = optax_boost.nnx.estimate_batch_stats(model, batches_of([8]))
  assert jnp.isnan(new.norm.mean[...]).all()


def test_an_averaged_nnx_model_has_the_mean_of_its_params_and_new_statistics():
  model = Nnx(nnx.Rngs(0))
  model.eval()
  batches = batches_of([16, 16])
  tx = optax_boost.average_params(optax.sgd(0.3), start=0)
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  step = optax_boost.nnx.make_train_step(lambda model, x: jnp.mean((model(x) - 1) ** 2))
  kernels = []
  for t in range(4):
    metrics = step(model, optimizer, batches[t % 2])
    kernels.append(np.asarray(model.dense.kernel[...]))
  assert metrics["average_params/snapshot_count"] == 4
  averaged = optax_boost.nnx.averaged_model(optimizer, model)
  np.testing.assert_allclose(averaged.dense.kernel[...], np.mean(kernels, 0), rtol=1e-5)
  params = optax_boost.averaged_params(optimizer.opt_state, nnx.state(model, nnx.Param))
  np.testing.assert_array_equal(params["dense"]["kernel"][...], averaged.dense.kernel[...])
  # Further steps, which donate the arrays of the model, do not change the averaged model.
  step(model, optimizer, batches[0])
  averaged.train()
  new = optax_boost.nnx.estimate_batch_stats(averaged, batches)
  kernel, bias = averaged.dense.kernel[...], averaged.dense.bias[...]
  estimated = new.norm.mean[...], new.norm.var[...]
  np.testing.assert_allclose(estimated, expected_statistics(kernel, bias, batches)[:2], atol=1e-5)


def test_a_decay_that_half_precision_rounds_to_one_is_refused():
  factory = optax.inject_hyperparams(optax_boost.average_params, static_args=("inner",))
  params = jnp.ones(2, jnp.bfloat16)
  with pytest.raises(ValueError, match=r"`decay` must be .* < 1; .*hyperparam_dtype=jnp.float32"):
    factory(optax.sgd(0.1), decay=0.999).init(params)


@pytest.mark.parametrize("form", ["jitted", "eager"])
@pytest.mark.parametrize(
  "kwargs", [{"decay": 0.9}, {"start": 1}, {"decay": 0.9, "every": 2}], ids=str
)
def test_averages_have_the_derivatives_of_their_formula(kwargs, form):
  """The loss of the averaged params has derivatives by the learning rate and by the decay."""

  def loss(params):
    return jnp.sum((params - 1) ** 2)

  def averaged_loss(rate, decay):
    changed = kwargs | ({"decay": decay} if "decay" in kwargs else {})
    tx = optax_boost.average_params(optax.sgd(rate), **changed)
    params = jnp.zeros(2)
    state = tx.init(params)
    for _ in range(4):
      updates, state = tx.update(jax.grad(loss)(params), state, params)
      params = optax.apply_updates(params, updates)
    return loss(optax_boost.averaged_params(state, params))

  point = np.array([0.1, kwargs.get("decay", 0.5)], np.float32)
  slope = jax.grad(averaged_loss, argnums=(0, 1))
  slopes = (jax.jit(slope) if form == "jitted" else slope)(*map(jnp.float32, point))
  value = jax.jit(averaged_loss)
  for number, nudge in zip(slopes, 5e-3 * np.eye(2, dtype=np.float32), strict=True):
    expected = (value(*(point + nudge)) - value(*(point - nudge))) / 1e-2
    np.testing.assert_allclose(number, expected, rtol=5e-3, atol=1e-3)
  # A decay that is a Python number gives the same value.
  same = {name: value for name, value in kwargs.items() if name != "decay"}
  if same != kwargs:
    np.testing.assert_allclose(jax.jit(lambda rate: averaged_loss(rate, 0.9))(0.1), value(*point))


def test_the_first_step_of_an_average_may_be_traced():
  def run(start):
    tx, params = optax_boost.average_params(optax.sgd(1.0), start=start), jnp.zeros(1)
    state = tx.init(params)
    for _ in range(3):
      updates, state = tx.update(-jnp.ones(1), state, params)
      params = optax.apply_updates(params, updates)
    return state.average, state.snapshot_count

  for start, average in ((0, 2.0), (1, 2.5)):
    averaged, count = jax.jit(run)(jnp.int32(start))
    np.testing.assert_allclose(averaged, average, rtol=1e-6)
    assert count == 3 - start


@pytest.mark.parametrize("door", ["update", "apply_gradients"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_average_takes_half_precision_params_after_rounding(dtype, door):
  """Under jit, XLA may leave out the rounding of the params before they are averaged."""
  tx = optax_boost.average_params(optax.chain(optax.scale(-0.1)), start=0)
  rng = np.random.default_rng(0)
  params, grads = (jnp.asarray(rng.normal(size=1000), dtype) for _ in range(2))

  @jax.jit
  def step(grads, state, params):
    if door == "apply_gradients":
      return optax_boost.apply_gradients(tx, grads, state, params)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  after, state = step(grads, tx.init(params), params)
  np.testing.assert_array_equal(state.average, after.astype(jnp.float32))


def test_averages_of_other_params_than_a_pair_are_refused():
  params = {"w": jnp.ones(2)}
  state = optax_boost.average_params(optax.sgd(0.1), start=0).init(params)
  pair = optax.LookaheadParams.init_synced(params)
  with pytest.raises(
    ValueError, match="`averaged_params` needs the params with which the state was made"
  ):
    optax_boost.averaged_params(state, pair)


WARM_UPS = {
  "timm": lambda k: np.minimum(0.9, (1 + k) / (10 + k)),
  "diffusers": lambda k: np.minimum(0.9, 1 - (1 + k) ** (-2 / 3)),
  "copies at first": lambda k: np.where(k < 3, 0.0, 0.5),
}


@pytest.mark.parametrize("name", WARM_UPS)
def test_the_decay_may_be_a_function_of_the_number_of_snapshots(name):
  decay = WARM_UPS[name]
  tx = optax_boost.average_params(
    optax.sgd(0.1), decay=lambda k: jnp.asarray(decay(np.arange(9)), jnp.float32)[k]
  )
  params = jnp.array([1.0, -2.0])
  state, expected = tx.init(params), np.array([1.0, -2.0])
  step = jax.jit(lambda p, s: optax_boost.apply_gradients(tx, p, s, p))
  for k in range(1, 8):
    params, state = step(params, state)
    expected = decay(k) * expected + (1 - decay(k)) * np.asarray(params, np.float64)
  averaged = optax_boost.averaged_params(state, params)
  np.testing.assert_allclose(averaged, expected, rtol=8 * np.finfo(np.float32).eps)


def test_averages_of_half_precision_params_may_be_read_in_float32():
  tx = optax_boost.average_params(optax.sgd(2.0**-9), start=0)
  params = {"a": jnp.ones(2, jnp.bfloat16), "n": jnp.ones(1, jnp.bfloat16)}
  state = tx.init(params)
  masters = []
  for g in (1.0, -3.0, 5.0):
    updates, state = tx.update(jax.tree.map(lambda p, g=g: g * p, params), state, params)
    params = optax.apply_updates(params, updates)
    masters.append(np.asarray(params["a"], np.float64))
  in_float32 = optax_boost.averaged_params(state, params, dtype=jnp.float32)
  assert in_float32["a"].dtype == jnp.float32
  np.testing.assert_allclose(
    in_float32["a"], np.mean(masters, 0), rtol=4 * np.finfo(np.float32).eps
  )
  in_bfloat16 = optax_boost.averaged_params(state, params)
  assert in_bfloat16["a"].dtype == jnp.bfloat16
  with pytest.raises(TypeError, match="`dtype` must be a floating dtype"):
    optax_boost.averaged_params(state, params, dtype=jnp.int32)


def test_two_averages_of_a_step_are_an_error():
  inner = optax_boost.average_params(optax.sgd(0.1), start=0)
  with pytest.raises(ValueError, match="has `average_params` already"):
    optax_boost.average_params(inner, decay=0.5)

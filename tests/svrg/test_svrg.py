"""SVRG against the recorded runs of MXNet, and against NumPy."""

import functools
import itertools
import json
import pathlib
import re

import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
import optax_boost.linen
import optax_boost.nnx
from tests import closeness, compilations, meshes
from tests.train_step import test_nnx, test_train_step

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
TRACES = ("sgd", "momentum", "wd", "partial")
# With every operation rounded up or down at random: 1.2 ulps at most.
ULPS = 2
KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
# Six batches of five examples, of a linear regression that no params fit.
X = RNG.normal(size=(6, 5, 4)).astype(np.float32)
DATA = {"x": X, "y": np.sin(3 * X[..., 0]) + X[..., 1]}
START = {"w": jnp.asarray(RNG.normal(size=4), jnp.float32), "b": jnp.zeros([])}


def loss_fn(params, batch):
  return jnp.mean((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2)


def masked_loss(params, batch):
  errors = (batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2
  return jnp.sum(batch["mask"] * errors) / jnp.sum(batch["mask"])


GRADIENT = jax.jit(jax.grad(loss_fn))


def batch_at(step):
  return jax.tree.map(lambda x: x[step % len(X)], DATA)


def batches():
  return (batch_at(i) for i in range(len(X)))


def everything():
  """All examples as one batch."""
  return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), DATA)


def host_step(rate=0.1, coefficient=1.0, **kwargs):
  tx = optax.chain(optax_boost.svrg(None, coefficient), optax.sgd(rate))
  return optax_boost.make_train_step(loss_fn, tx, **kwargs)


def jit_step(refresh_every, rate=0.1, **kwargs):
  return optax_boost.make_train_step(
    loss_fn,
    optax.chain(optax_boost.svrg(refresh_every), optax.sgd(rate)),
    full_grad_fn=functools.partial(optax_boost.full_gradient, stacked=True, batches=DATA),
    **kwargs,
  )


def svrg_state(state):
  """The part of an optimizer state that is `svrg`'s."""

  def is_svrg(node):
    return hasattr(node, "variance_ratio")

  (found,) = filter(is_svrg, jax.tree.leaves(state, is_leaf=is_svrg))
  return found


# The recorded runs.


class Trace:
  """A recorded run of MXNet; its gradients are sums over a batch, ours means."""

  def __init__(self, name):
    with np.load(GOLDEN / f"svrg_{name}.npz") as file:
      self.arrays = {key: file[key] for key in file.files}
    self.hyper = json.loads(str(self.arrays["meta_json"]))["hyper"]
    self.size = self.hyper["batch"]

  @property
  def first_period(self):
    return int(np.sum(self.arrays["step_epoch"] < self.hyper["freq"]))

  def tree(self, prefix, index, scale=1.0):
    def get(leaf):
      return jnp.asarray(self.arrays[prefix + leaf][index] * scale, jnp.float32)

    return {"weight": get("weight"), "bias": get("bias")}

  def batch(self, step):
    rows = self.arrays["step_rows"][step]
    return {"x": self.arrays["X"][rows], "y": self.arrays["Y"][rows]}

  def real_batches(self):
    rows = range(self.hyper["n"])
    for some in _chunks(rows, self.size):
      yield {"x": self.arrays["X"][some], "y": self.arrays["Y"][some]}

  def transformation(self):
    return optax.chain(
      optax_boost.svrg(refresh_every=None),
      optax.add_decayed_weights(self.hyper["wd"], {"weight": True, "bias": False}),
      optax.sgd(self.hyper["lr"], self.hyper["momentum"] or None),
    )

  def refresh_of(self, step):
    return (
      np.searchsorted(self.arrays["refresh_epoch"], self.arrays["step_epoch"][step], "right") - 1
    )


def _chunks(rows, size):
  rows = list(rows)
  return [rows[i : i + size] for i in range(0, len(rows), size)]


def mxnet_loss(params, batch):
  return 0.5 * jnp.mean((batch["x"] @ params["weight"].T + params["bias"] - batch["y"]) ** 2)


MXNET_GRADIENT = jax.jit(jax.grad(mxnet_loss))


def gradient_terms(trace, params, rows):
  """The summed magnitudes of the terms of a gradient of `mxnet_loss`."""
  x, y = (np.abs(np.float64(trace.arrays[key][rows])) for key in "XY")
  weight, bias = np.abs(params["weight"]), np.abs(params["bias"])
  errors = x @ weight.T + bias + y
  return {"weight": errors.T @ x / len(x), "bias": errors.mean(axis=0)}


def step_terms(trace, t, velocity):
  """The summed magnitudes of the terms of a step's velocity, given the ones of the last."""
  h, period = trace.hyper, trace.refresh_of(t)
  params = trace.tree("", t - 1) if t else trace.tree("init_", ...)
  plain, at_snapshot = (
    gradient_terms(trace, at, trace.arrays["step_rows"][t])
    for at in (params, trace.tree("anchor_", period))
  )
  full = trace.tree("full_grad_", period, 1 / trace.size)

  def terms(leaf):
    decay = h["wd"] * np.abs(params[leaf]) if leaf == "weight" else 0
    gradient = plain[leaf] + at_snapshot[leaf] + np.abs(full[leaf]) + decay
    return h["momentum"] * velocity[leaf] + gradient

  return {leaf: terms(leaf) for leaf in ("weight", "bias")}


def assert_close(found, expected, terms, ulps=ULPS):
  for leaf, bound in terms.items():
    closeness.assert_within_ulps(found[leaf], expected[leaf], bound, ulps)


@functools.cache
def trace_of(name):
  return Trace(name)


def replay(trace, steps, resync):
  """Yields what our chain does on a recorded run, given the recorded full gradients."""
  tx = trace.transformation()
  params = trace.tree("init_", ...)
  state = tx.init(params)

  @jax.jit
  def step(params, state, batch):
    gradient = functools.partial(jax.grad(mxnet_loss), batch=batch)
    updates, state = tx.update(gradient(params), state, params, grad_fn=gradient)
    return optax.apply_updates(params, updates), state

  period = -1
  for t in range(steps):
    if trace.refresh_of(t) != period:
      period = trace.refresh_of(t)
      full = trace.tree("full_grad_", period, 1 / trace.size)
      state = optax_boost.refresh_svrg(state, trace.tree("anchor_", period), full)
    params, state = step(params, state, trace.batch(t))
    yield t, params
    if resync:
      params = trace.tree("", t)


@pytest.mark.parametrize("name", TRACES)
def test_every_step_agrees_with_mxnet(name):
  trace = trace_of(name)
  before, velocity = trace.tree("init_", ...), {"weight": 0.0, "bias": 0.0}
  for t, params in replay(trace, len(trace.arrays["step_epoch"]), resync=True):
    velocity = step_terms(trace, t, velocity)
    terms = {leaf: np.abs(w) + trace.hyper["lr"] * velocity[leaf] for leaf, w in before.items()}
    before = trace.tree("", t)
    assert_close(params, before, terms)


def assert_agrees(trace, found):
  """Compares stacked weights with the recorded ones, as many steps as there are."""
  start = trace.tree("init_", ...)
  sums, velocity = jax.tree.map(np.abs, start), {"weight": 0.0, "bias": 0.0}
  for t in range(len(found["weight"])):
    velocity = step_terms(trace, t, velocity)
    sums = {leaf: w + trace.hyper["lr"] * velocity[leaf] for leaf, w in sums.items()}
    assert_close(jax.tree.map(lambda x, t=t: x[t], found), trace.tree("", t), sums)


@pytest.mark.parametrize("name", ["sgd", "momentum"])
def test_the_program_of_the_migration_page_takes_the_steps_of_mxnet(name):
  trace = trace_of(name)
  text = (GOLDEN.parents[1] / "docs" / "migrating" / "mxnet.md").read_text(encoding="utf-8")
  program = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[-1]
  assert program.count("\n") <= 40
  exec(compile(program, "mxnet.md", "exec"), page := {})
  h, arrays = trace.hyper, trace.arrays
  numbers = h["batch"], h["freq"], h["epochs"], h["lr"], h["momentum"]
  start = trace.tree("init_", ...)
  history = page["fit"](start, arrays["X"], arrays["Y"], *numbers, carry_over=True)
  assert_agrees(trace, jax.tree.map(lambda *steps: np.stack(steps), *(p for _, p in history)))


# The mathematics.


def test_the_correction_equals_numpy():
  g, h, mu = (np.array(x) for x in ([3.0, 1.0, 4.0], [1.0, 2.0, -3.0], [0.5, 1.0, 1.0]))
  tx = optax_boost.svrg(None, 0.25)
  state = optax_boost.refresh_svrg(tx.init(jnp.zeros(3)), jnp.zeros(3), jnp.asarray(mu))
  found, _ = tx.update(jnp.asarray(g), state, jnp.zeros(3), grad_fn=lambda _: jnp.asarray(h))
  np.testing.assert_allclose(found, g - 0.25 * (h - mu), rtol=1e-6)


def corrected(params, snapshot, coefficient=1.0):
  """The corrected gradient of every batch, and the state after all of them."""
  tx = optax_boost.svrg(None, coefficient)
  full = optax_boost.full_gradient(GRADIENT, snapshot, batches())
  state = optax_boost.refresh_svrg(tx.init(params), snapshot, full)
  found = []
  for batch in batches():
    gradient = functools.partial(GRADIENT, batch=batch)
    updates, state = tx.update(gradient(params), state, params, grad_fn=gradient)
    found.append(updates)
  return found, state


SNAPSHOT = jax.tree.map(lambda p: p + 0.1, START)


@pytest.mark.parametrize("coefficient", [0.0, 0.5, 1.0, 2.0])
def test_corrected_gradients_have_the_mean_of_the_plain_ones(coefficient):
  found, _ = corrected(START, SNAPSHOT, coefficient)
  mean = jax.tree.map(lambda *v: np.mean(v, 0), *found)
  chex.assert_trees_all_close(mean, GRADIENT(START, everything()), rtol=1e-5, atol=1e-6)


def deviations(gradients, centre):
  flat = [jax.flatten_util.ravel_pytree(g)[0] for g in gradients]
  return float(np.mean([np.sum((g - centre) ** 2) for g in np.asarray(flat, np.float64)]))


@pytest.mark.parametrize("coefficient", [0.0, 0.5, 1.0, 2.0])
def test_the_variance_ratio_equals_its_definition(coefficient):
  found, state = corrected(START, SNAPSHOT, coefficient)
  plain = [GRADIENT(START, batch) for batch in batches()]
  mu = jax.flatten_util.ravel_pytree(state.full_gradient)[0]
  mean = jax.flatten_util.ravel_pytree(GRADIENT(START, everything()))[0]
  ratio = deviations(found, mu) / deviations(plain, mu)
  np.testing.assert_allclose(state.variance_ratio, ratio, rtol=1e-4)
  variances = deviations(found, mean) / deviations(plain, mean)
  moved = float(jnp.sum((mean - mu) ** 2))
  expected = (deviations(found, mean) + moved) / (deviations(plain, mean) + moved)
  np.testing.assert_allclose(state.variance_ratio, expected, rtol=1e-4)
  assert (state.variance_ratio < 0.999) == (variances < 0.999)
  assert (state.variance_ratio > 1.001) == (variances > 1.001)


def test_the_coefficient_follows_its_schedule():
  schedule = optax.linear_schedule(0.75, 0.0, 6)
  found, _ = corrected(START, SNAPSHOT, schedule)
  for t, (v, batch) in enumerate(zip(found, batches(), strict=True)):
    alpha = 0.75 * (1 - t / 6)
    full = GRADIENT(SNAPSHOT, everything())
    expected = jax.tree.map(
      lambda g, h, mu, a=alpha: g - a * (h - mu),
      GRADIENT(START, batch),
      GRADIENT(SNAPSHOT, batch),
      full,
    )
    chex.assert_trees_all_close(v, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_every_step_of_many_sharded_params_is_measured_and_every_bad_one_counted(kind):
  mesh = meshes.mesh((8,), ("d",), kind)
  rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
  tx = optax_boost.svrg(None)
  with jax.set_mesh(mesh):
    params = {"w": jax.device_put(jnp.ones((16, 8192)), rows)}
    ones = jax.tree.map(jnp.ones_like, params)
    state = optax_boost.refresh_svrg(tx.init(params), params, ones)
    grads = jax.tree.map(lambda w: 3 * w, ones)
    step = jax.jit(lambda s, p, h: tx.update(grads, s, p, grad_fn=lambda _: h))
    twos = jax.tree.map(jnp.add, params, params)
    for count in range(1, 4):
      updates, state = step(state, params, twos)
      np.testing.assert_allclose(state.squared_deviations[1], 4 * count * ones["w"].size, rtol=1e-6)
    assert "all-gather" not in step.lower(state, params, twos).compile().as_text()
    # g = 3, h = 2, mu = 1, so that v = 2.
    np.testing.assert_array_equal(updates["w"], 2 * ones["w"])
    np.testing.assert_allclose(state.variance_ratio, 0.25, rtol=1e-6)
    bad = {"w": jax.device_put(np.diag([np.nan] + 8191 * [2.0])[:16], rows)}
    for count in range(1, 9):
      _, state = step(state, params, bad)
      assert state.notfinite_count == count


def test_loops_over_small_leaves_do_not_grow_with_their_number():
  def longest(leaves):
    tx, params = optax_boost.svrg(refresh_every=None), [jnp.ones(100)] * leaves
    step = jax.jit(lambda p, s: tx.update(p, s, p, grad_fn=lambda at: at))
    return max(compilations.loops(step.lower(params, tx.init(params)).compile()))

  assert longest(64) < 1.2 * longest(32)


# Refreshing.


def test_refreshes_inside_the_step_come_every_n_steps_and_equal_those_on_the_host():
  inside, outside = jit_step(refresh_every=3), host_step()
  one, other = inside.init(START), outside.init(START)
  for t in range(7):
    if t % 3 == 0:
      other = outside.refresh(other, batches())
      at_refresh = jax.device_get(one.params)
    one, _ = inside(one, batch_at(t))
    other, _ = outside(other, batch_at(t))
    chex.assert_trees_all_equal(svrg_state(one).snapshot, at_refresh)
    assert svrg_state(one).refresh_count == t // 3 + 1
    chex.assert_trees_all_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_refresh_does_not_recompile_the_step_and_nothing_is_shared_with_the_params():
  step = host_step()
  state = step.init(START)
  for t in range(4):
    state = step.refresh(state, batches())
    pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state)]
    assert len(set(pointers)) == len(pointers)
    batch = batch_at(t)
    (state, _), compiled = compilations.counted(lambda: step(state, batch))  # noqa: B023
    assert t == 0 or compiled == 0


def test_the_data_of_a_scan_is_an_argument_of_the_compiled_step():
  big = jax.tree.map(lambda x: np.tile(x, (1000,) + (1,) * (x.ndim - 1)), DATA)
  full = functools.partial(optax_boost.full_gradient, stacked=True, batches=big)
  step = optax_boost.make_train_step(loss_fn, optax_boost.svrg(10), full_grad_fn=full)
  text = step.lower(step.init(START), batch_at(0)).as_text()
  assert len(text) < big["x"].size


def test_a_refresh_reaches_into_chains_masks_and_partitions():
  mask = {"w": True, "b": False}
  parts = optax.partition(
    {"ours": optax.chain(optax.clip(1.0), optax_boost.svrg(None)), "rest": optax.sgd(0.1)},
    {"w": "ours", "b": "rest"},
  )
  full = jax.tree.map(jnp.ones_like, START)
  for tx in (parts, optax.masked(optax_boost.svrg(None), mask)):
    state = svrg_state(optax_boost.refresh_svrg(tx.init(START), SNAPSHOT, full))
    np.testing.assert_array_equal(state.snapshot["w"], SNAPSHOT["w"])
    assert state.snapshot["b"] == optax.MaskedNode()
    assert state.refresh_count == 1


LABELS = {"w": "ours", "b": "rest"}


def hidden(kind, refresh_every):
  """SVRG of `w` alone."""
  if kind == "masked":
    return optax.chain(
      optax.masked(optax_boost.svrg(refresh_every), {"w": True, "b": False}), optax.sgd(0.1)
    )
  ours = optax.chain(optax_boost.svrg(refresh_every), optax.sgd(0.1))
  return optax.partition({"ours": ours, "rest": optax.sgd(0.1)}, LABELS)


@pytest.mark.parametrize("name", ["grad_fn", "full_grad_fn"])
def test_inside_masked_a_closure_must_return_the_structure_of_the_params(name):
  tx = hidden("masked", 2)
  extra = {"grad_fn": lambda p: p, "full_grad_fn": lambda p: p}
  extra[name] = lambda p: {"w": p["w"]}
  with pytest.raises(ValueError, match=rf"`{name}` must give a tree of the params' structure"):
    tx.update(START, tx.init(START), START, **extra)


def test_a_line_search_after_svrg_accepts_the_full_gradient():
  step = optax_boost.make_train_step(
    loss_fn,
    optax.chain(optax_boost.svrg(4), optax.lbfgs()),
    full_grad_fn=functools.partial(optax_boost.full_gradient, stacked=True, batches=DATA),
  )
  state, metrics = step(step.init(START), batch_at(0))
  assert loss_fn(state.params, batch_at(0)) < metrics["loss"]


def test_over_eight_devices_state_and_full_pass_stay_sharded_and_equal_one_device():
  mesh = meshes.mesh((8,), ("d",))

  def place(x, *axes):
    return jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes)))

  rng = np.random.default_rng(1)
  data = {"x": rng.normal(size=(3, 16, 8)).astype(np.float32), "y": np.ones((3, 16), np.float32)}
  params = {"w": jnp.asarray(rng.normal(size=8), jnp.float32), "b": jnp.zeros([])}
  results = []
  for sharded in (False, True):
    stacked = {k: place(v, None, "d") for k, v in data.items()} if sharded else data
    start = {"w": place(params["w"], "d"), "b": place(params["b"])} if sharded else params
    step = optax_boost.make_train_step(
      loss_fn,
      optax.chain(optax_boost.svrg(2), optax.sgd(0.1)),
      full_grad_fn=functools.partial(optax_boost.full_gradient, stacked=True, batches=stacked),
    )
    state = step.init(start)
    for t in range(3):
      state, _ = step(state, {k: v[t] for k, v in stacked.items()})
    one_by_one = [{k: v[i] for k, v in stacked.items()} for i in range(3)]
    state = step.refresh(state, one_by_one)
    (state, _), compiled = compilations.counted(lambda: step(state, one_by_one[0]))  # noqa: B023
    assert compiled == 0
    results.append(state)
  found = svrg_state(results[1])
  for leaf in (found.snapshot["w"], found.full_gradient["w"], results[1].params["w"]):
    assert leaf.sharding.spec == jax.sharding.PartitionSpec("d")
  chex.assert_trees_all_close(*map(jax.device_get, results), rtol=1e-4, atol=1e-5)


# Dropout and BatchNorm.


def test_dropout_masks_are_shared_and_statistics_untouched():
  params, stats = test_train_step.initial()
  step = test_train_step.normed_step(optax.chain(optax_boost.svrg(None), optax.sgd(1.0)))
  batch = test_train_step.BATCH
  state = step.refresh(step.init(params, stats), [batch, batch], KEY)
  chex.assert_trees_all_equal(state.model_state, stats)
  base = jax.random.fold_in(KEY, 0)

  def gradient(rng):
    return jax.grad(lambda p: test_train_step.normed_loss(p, stats, batch, rng)[0])(params)

  keys = [jax.random.fold_in(base, i) for i in range(2)]
  mean = jax.tree.map(lambda a, b: (a + b) / 2, *map(gradient, keys))
  full = svrg_state(state).full_gradient
  chex.assert_trees_all_close(full, mean, rtol=1e-5, atol=1e-6)
  _, (expected, _) = test_train_step.normed_loss(params, stats, batch, base)
  state, _ = step(state, batch, KEY)
  # With masks of its own, the snapshot gradient would not cancel the plain one.
  moved = jax.tree.map(jnp.subtract, params, state.params)
  chex.assert_trees_all_close(moved, mean, rtol=1e-4, atol=1e-6)
  assert state.model_state["calls"] == 1
  chex.assert_trees_all_close(state.model_state, expected, rtol=1e-5, atol=1e-6)


def inside_and_outside():
  halves = jax.tree.map(lambda x: x.reshape(2, 16, *x.shape[1:]), test_train_step.BATCH)
  full = functools.partial(optax_boost.full_gradient, stacked=True, batches=halves)
  parts = [jax.tree.map(lambda x, i=i: x[i], halves) for i in range(2)]
  return {"inside": (100, full, None), "outside": (None, None, parts)}


@pytest.mark.parametrize("kind", ["inside", "outside"])
def test_nnx_shares_masks_and_leaves_statistics_and_rng_counts_alone(kind):
  refresh_every, full_grad_fn, parts = inside_and_outside()[kind]
  tx = optax.chain(optax_boost.svrg(refresh_every), optax.sgd(1.0))
  model, optimizer = test_nnx.make(tx)
  twin, _ = test_nnx.make(tx)
  step = optax_boost.nnx.make_train_step(test_nnx.loss_fn, has_aux=True, full_grad_fn=full_grad_fn)
  before = test_nnx.pure(model)
  if parts:
    step.refresh(model, optimizer, parts)
    chex.assert_trees_all_equal(test_nnx.pure(model), before)
    assert model.dropout.rngs.count[...] == 0
  metrics = step(model, optimizer, test_train_step.BATCH)
  test_nnx.loss_fn(twin, test_train_step.BATCH)
  assert model.dropout.rngs.count[...] == twin.dropout.rngs.count[...] == 1
  chex.assert_trees_all_close(
    nnx.to_pure_dict(nnx.state(model, nnx.BatchStat)),
    nnx.to_pure_dict(nnx.state(twin, nnx.BatchStat)),
    rtol=1e-5,
    atol=1e-6,
  )
  # At the snapshot the step is the full gradient, if the masks are the same.
  full = optax.tree.get(nnx.to_pure_dict(nnx.state(optimizer.opt_state)), "full_gradient")
  after = test_nnx.pure(model)
  np.testing.assert_allclose(
    before["hidden"]["kernel"] - after["hidden"]["kernel"],
    full["hidden"]["kernel"],
    rtol=1e-4,
    atol=1e-6,
  )
  assert metrics["variance_ratio"] < 1e-6


def test_nnx_draws_new_masks_for_each_batch_of_a_full_pass():
  class Masks(nnx.Module):
    def __init__(self):
      self.w = nnx.Param(jnp.ones(64))
      self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

  def loss(model, batch):
    return jnp.mean(model.dropout(model.w[...]) * batch)

  model = Masks()
  optimizer = nnx.Optimizer(model, optax_boost.svrg(None), wrt=nnx.Param)
  step = optax_boost.nnx.make_train_step(loss)
  step.refresh(model, optimizer, [jnp.ones(64)] * 2)
  full = optax.tree.get(nnx.to_pure_dict(nnx.state(optimizer.opt_state)), "full_gradient")["w"]
  # One mask for both batches would give twos and zeros only.
  assert {round(float(x), 6) for x in 64 * full} == {0.0, 1.0, 2.0}


# Streaming.


def test_a_refresh_of_the_train_step_compiles_once():
  traces = itertools.count()

  def counted(params, batch):
    next(traces)
    return loss_fn(params, batch)

  step = optax_boost.make_train_step(counted, optax_boost.svrg(None))
  state = step.init(START)
  for _ in range(3):
    state = step.refresh(state, batches())
  assert next(traces) == 1


# Numbers that are not finite.


def test_a_snapshot_gradient_that_is_not_finite_is_left_out_and_counted():
  _, state = corrected(START, SNAPSHOT)
  gradient = GRADIENT(START, batch_at(0))
  tx = optax_boost.svrg(None)

  def bad(params):
    return jax.tree.map(lambda g: jnp.full_like(g, jnp.nan), params)

  updates, after = tx.update(gradient, state, START, grad_fn=bad)
  chex.assert_trees_all_close(updates, gradient)
  assert after.notfinite_count == 1
  chex.assert_tree_all_finite(after)


def test_a_gradient_that_is_not_finite_stays_so_and_leaves_no_trace():
  _, state = corrected(START, SNAPSHOT)
  gradient = GRADIENT(START, batch_at(0)) | {"b": jnp.array(jnp.inf)}
  updates, after = optax_boost.svrg(None).update(
    gradient, state, START, grad_fn=lambda p: GRADIENT(p, batch_at(0))
  )
  assert jnp.isinf(updates["b"])
  assert jnp.all(jnp.isfinite(updates["w"]))
  chex.assert_trees_all_equal(after, state._replace(count=state.count + 1))


@pytest.mark.parametrize("where", ["full gradient", "params"])
def test_a_refresh_that_is_not_finite_is_skipped_and_counted(where):
  _, state = corrected(START, SNAPSHOT)
  params, full = START, GRADIENT(START, everything())
  if where == "params":
    params = params | {"b": jnp.array(jnp.nan)}
  else:
    full = full | {"w": full["w"].at[2].set(jnp.inf)}
  after = optax_boost.refresh_svrg(state, params, full)
  chex.assert_trees_all_equal(after, state._replace(notfinite_count=jnp.array(1)))


# What is refused.


def test_a_missing_grad_fn_is_named():
  tx = optax_boost.svrg(None)
  with pytest.raises(ValueError, match=r"`svrg` needs the extra argument `grad_fn` .*got none.*"):
    tx.update(START, tx.init(START), START)


def test_an_error_names_a_missing_full_grad_fn():
  step = optax_boost.make_train_step(loss_fn, optax_boost.svrg(3))
  message = r"needs the extra argument `full_grad_fn` .* got none. .*make_train_step"
  with pytest.raises(ValueError, match=message):
    step(step.init(START), batch_at(0))


def test_a_refresh_refuses_a_state_without_svrg_and_trees_that_do_not_fit():
  state = optax_boost.svrg(None).init(START)
  with pytest.raises(ValueError, match=r"with a SvrgState in it; got .* part of the chain\?"):
    optax_boost.refresh_svrg(optax.sgd(0.1).init(START), START, START)
  with pytest.raises(ValueError, match=r"`full_gradient` must give gradients of the params'"):
    optax_boost.refresh_svrg(state, START, {"w": START["w"]})
  other = {"w": jnp.ones(3), "b": jnp.zeros([])}
  with pytest.raises(ValueError, match=r"`refresh_svrg` needs the params that its state was made"):
    optax_boost.refresh_svrg(state, other, other)


def test_svrg_before_a_loss_scale_in_a_chain_is_refused():
  """The full gradient is not scaled, the gradients of a batch would be."""
  scaled = optax_boost.dynamic_loss_scale

  def trained(tx):
    step = optax_boost.make_train_step(
      lambda w, batch: jnp.sum((w - batch) ** 2),
      tx,
      full_grad_fn=lambda grad_fn, params: grad_fn(params, jnp.ones(3)),
    )
    return step(step.init(jnp.zeros(3)), jnp.arange(3.0))[0].params

  svrg = optax_boost.svrg(refresh_every=1)
  with pytest.raises(
    ValueError, match=r"`dynamic_loss_scale` must be around the whole .* `optax.chain`"
  ):
    trained(optax.chain(svrg, optax.chain(scaled(optax.sgd(0.1)))))
  alone, around = optax.chain(svrg, optax.sgd(0.1)), scaled(optax.chain(svrg, optax.sgd(0.1)))
  np.testing.assert_allclose(trained(around), trained(alone), rtol=1e-6)

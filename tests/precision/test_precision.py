"""Loss scaling against MindSpore's recorded scales, and master weights against MXNet's."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
from tests import compilations, meshes
from tests.lars import test_lars

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"


@pytest.fixture(scope="module")
def recorded():
  with np.load(GOLDEN / "loss_scale.npz") as file:
    arrays = {key: file[key] for key in file.files}
  return arrays, json.loads(str(arrays["meta_json"]))["hyper"]


@pytest.mark.optimized
@pytest.mark.parametrize("case", ["basic", "floor", "factor3", "window1", "to_infinity"])
def test_scales_agree_with_mindspore_exactly(recorded, case):
  arrays, hyper = recorded[0], recorded[1][case]
  factor = np.float32(hyper["scale_factor"])
  tx = optax_boost.dynamic_loss_scale(
    optax.sgd(0.1),
    hyper["loss_scale_value"],
    hyper["scale_window"],
    growth_factor=factor,
    backoff_factor=np.float32(1) / factor,
    maximum=float(np.finfo(np.float32).max),
  )
  params = jnp.zeros(2)
  state, update = tx.init(params), jax.jit(tx.update)
  for overflow, expected in zip(arrays[f"{case}_overflow"], arrays[f"{case}_scale"], strict=True):
    grad = jnp.full(2, jnp.inf if overflow else 1.0)
    _, state = update(grad, state, params)
    # MindSpore has no cap: its scale ends at infinity, this package's at the largest float32.
    assert state.loss_scale == min(expected, np.finfo(np.float32).max)
  assert state.notfinite_count == np.sum(arrays[f"{case}_overflow"])


def test_the_scale_stays_between_floor_and_cap():
  tx = optax_boost.dynamic_loss_scale(optax.sgd(0.1), 4.0, 1, minimum=2.0, maximum=8.0)
  state = tx.init(jnp.zeros(1))
  for grad, expected in ((1.0, 8.0), (1.0, 8.0), (jnp.inf, 4.0), (jnp.inf, 2.0), (jnp.inf, 2.0)):
    _, state = tx.update(jnp.full(1, grad), state)
    assert state.loss_scale == expected


def test_float32s_largest_number_as_numpy_prints_it_may_be_the_cap():
  """NumPy prints it as 3.4028235e38, which is a larger number in float64."""
  tx = optax_boost.dynamic_loss_scale(optax.sgd(0.1), 2.0**127, 1, maximum=3.4028235e38)
  _, state = tx.update(jnp.ones(1), tx.init(jnp.zeros(1)))
  assert state.loss_scale == np.finfo(np.float32).max


def test_an_overflow_restarts_the_growth_count_even_if_hysteresis_keeps_the_scale():
  tx = optax_boost.dynamic_loss_scale(optax.sgd(0.1), 4.0, 2, hysteresis=3)
  state, seen = tx.init(jnp.zeros(1)), []
  for grad in (1.0, jnp.inf, 1.0, 1.0):
    _, state = tx.update(jnp.full(1, grad), state)
    seen.append((float(state.loss_scale), int(state.growth_count)))
  assert seen == [(4, 1), (4, 0), (4, 1), (8, 0)]


def test_train_step_scales_the_loss_it_differentiates_and_reports_the_plain_one():
  def loss(params, batch):
    return jnp.sum(params * batch)

  seen = {}

  def spy(updates, state, params=None, *, value, grad, value_fn, grad_fn, **extra):
    del extra
    seen.update(value=value, grad=grad, at_zero=value_fn(0 * params), grad_fn=grad_fn(params))
    return updates, {k: seen[k] for k in state}

  def init(p):
    scalar, vector = jnp.zeros([]), jnp.zeros_like(p)
    return {"value": scalar, "grad": vector, "at_zero": scalar, "grad_fn": vector}

  inner = optax.GradientTransformationExtraArgs(init, spy)
  step = optax_boost.make_train_step(loss, optax_boost.dynamic_loss_scale(inner, 1024.0))
  batch = jnp.array([1.0, 2.0])
  state, metrics = step(step.init(jnp.ones(2)), batch)
  inner_state = state.opt_state.inner_state
  assert metrics["loss"] == inner_state["value"] == 3.0
  assert inner_state["at_zero"] == 0.0
  np.testing.assert_array_equal(inner_state["grad"], batch)
  np.testing.assert_array_equal(inner_state["grad_fn"], batch)
  assert metrics["loss_scale"] == 1024.0
  text = str(jax.make_jaxpr(lambda s, b: step(s, b))(step.init(jnp.ones(2)), batch))
  assert "1024" not in text, "the scale must come from the state, not be compiled in"


def test_accumulation_inside_the_loss_scale_drops_overflowing_micro_batches():
  tx = optax_boost.dynamic_loss_scale(optax_boost.accumulate(optax.sgd(1.0), 2), 4.0)
  state = tx.init(jnp.zeros(1))
  for grad in (4.0, jnp.inf, 6.0):
    updates, state = tx.update(jnp.full(1, grad), state)
  # 4 / 4, then no step, then 6 / 2, as the overflow halved the scale.
  np.testing.assert_array_equal(updates, [-2.0])


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("wrapper", ["master_weights", "stochastic_rounding"])
def test_all_devices_skip_a_step_that_is_bad_on_one(wrapper, in_place):
  """The inner optimizer has collectives, so either all devices call it or none does."""
  mesh = meshes.mesh((8,), ("x",))

  def by_largest(updates, _):
    return jax.tree.map(lambda u: -u / jax.lax.pmax(jnp.nanmax(jnp.abs(u)), "x"), updates)

  inner = optax.chain(optax.scale_by_adam(), optax.stateless(by_largest))
  key = () if wrapper == "master_weights" else (0,)
  tx = getattr(optax_boost, wrapper)(inner, *key, axis_name="x")
  params = {"kernel": jnp.full((16, 4), 0.5, jnp.bfloat16)}
  state = tx.init(params)
  rows, whole = jax.sharding.PartitionSpec("x"), jax.sharding.PartitionSpec()
  specs = rows, jax.tree.map(lambda x: rows if x.ndim == 2 else whole, state)

  def step(params, state, grads):
    if in_place:
      return optax_boost.apply_gradients(tx, grads, state, params)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  step = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(*specs, rows), out_specs=specs))
  good = {"kernel": jnp.ones((16, 4), jnp.bfloat16)}
  bad = {"kernel": good["kernel"].at[6, 1].set(jnp.nan)}
  stood, state = step(params, state, bad)
  np.testing.assert_array_equal(stood["kernel"], params["kernel"])
  assert state.notfinite_count == 1
  assert state.inner_state[0].count == 0
  moved, state = step(stood, state, good)
  assert jnp.all(moved["kernel"] != params["kernel"])
  assert state.notfinite_count == 1


def test_agrees_with_mxnets_float16_lars_with_masters():
  arrays, cases, lars = test_lars.trace_of("lars_mxnet200beta1_fp16mp")
  case, tree = cases[14], functools.partial(test_lars.unflatten, arrays)
  tx = optax_boost.master_weights(optax.chain(optax.scale(case["rescale_grad"]), lars(case)))
  params = tree(arrays["init"])
  state = tx.init(params)

  @jax.jit
  def step(grads, state, params):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  grads = arrays["grads_r1" if case["rescale_grad"] == 1 else "grads_r128"]
  masters = []
  for grad in grads:
    params, state = jax.device_get(step(tree(grad), state, params))
    masters.append(test_lars.flatten(arrays, state.master_params))
    for name, param in params.items():
      assert param.dtype == jnp.float16
      np.testing.assert_array_equal(param, state.master_params[name].astype(jnp.float16))
  test_lars.assert_weights_agree(np.stack(masters), arrays["init"], arrays["unfused_c14_w"])


def test_masters_beyond_the_range_of_the_params_saturate_and_come_back():
  params = jnp.full(1, 60_000.0, jnp.float16)
  tx = optax_boost.master_weights(optax.sgd(1.0))
  state = tx.init(params)
  for grad, expected in ((-20_000.0, 65504.0), (jnp.nan, 65504.0), (30_000.0, 49_984.0)):
    updates, state = tx.update(jnp.full(1, grad, jnp.float16), state, params)
    params = optax.apply_updates(params, updates)
    assert params == expected
  assert state.notfinite_count == 1


@pytest.mark.parametrize("key", [None, 0], ids=["nearest", "stochastic"])
def test_infinite_params_are_unchanged_and_not_counted(key):
  """An infinite bias may be a mask."""
  params = jnp.array([-jnp.inf, 1.0], jnp.float16)
  tx = optax_boost.master_weights(optax.sgd(1.0), key=key)
  state = tx.init(params)
  updates, state = jax.jit(tx.update)(jnp.array([0.0, 0.5], jnp.float16), state, params)
  np.testing.assert_array_equal(optax.apply_updates(params, updates), [-jnp.inf, 0.5])
  assert state.notfinite_count == 0


def test_masters_round_stochastically_with_a_key_and_differently_at_every_step():
  params = jnp.ones(1000, jnp.bfloat16)
  tx = optax_boost.master_weights(optax.sgd(1.0), key=jax.random.key(0))
  state, seen, update = tx.init(params), [], jax.jit(tx.update)
  for grad in (-2e-3, -1e-6):
    updates, state = update(jnp.full_like(params, grad), state, params)
    params = optax.apply_updates(params, updates)
    seen.append(np.asarray(params, np.float32))
  assert abs(seen[0].mean() - 1.002) < 5e-4
  assert not np.array_equal(*seen)


def test_a_donated_state_leaves_the_key_for_the_next_one():
  tx = optax_boost.master_weights(optax.sgd(0.1), key=jax.random.key(0))
  step = jax.jit(lambda state, params: tx.update(params, state, params)[1], donate_argnums=0)
  params = jnp.ones(2, jnp.bfloat16)
  for _ in range(2):
    assert int(step(tx.init(params), params).count) == 1


@pytest.mark.parametrize("scale", [2.0**20, 2.0**-4])
def test_float16_gradients_are_unscaled_in_float32(scale):
  tx = optax_boost.dynamic_loss_scale(optax.adam(0.25, eps=1e-20), scale, minimum=2.0**-4)
  params = jnp.ones(2, jnp.float16)
  grads = jnp.array([60_000.0, -1e-3], jnp.float16)
  updates, state = tx.update(grads, tx.init(params), params)
  np.testing.assert_allclose(updates, [-0.25, 0.25], rtol=1e-2)
  assert updates.dtype == jnp.float16
  assert state.notfinite_count == 0
  np.testing.assert_allclose(
    optax.tree.get(state, "mu"), 0.1 * grads.astype(jnp.float32) / scale, rtol=1e-6
  )


def test_a_static_scale_is_constant_and_skips_steps_that_overflow():
  tx = optax_boost.dynamic_loss_scale(optax.sgd(1.0), 4.0, growth_interval=None)
  state = tx.init(jnp.zeros(1))
  moved = []
  for value in (4.0, jnp.inf, 4.0):
    updates, state = jax.jit(tx.update)(jnp.full(1, value), state)
    moved.append(float(updates[0]))
  assert moved == [-1.0, 0.0, -1.0]
  assert (state.loss_scale, state.notfinite_count) == (4.0, 1)


def test_hysteresis_lets_overflows_pass_as_megatron_does():
  tx = optax_boost.dynamic_loss_scale(optax.sgd(1.0), 16.0, 2, hysteresis=2)
  state, scales = tx.init(jnp.zeros(1)), []
  # Megatron-LM's DynamicGradScaler(16, 1, 2, 0.5, growth_interval=2, hysteresis=2).
  for overflow in (1, 1, 1, 0, 1, 0, 0, 1, 1):
    _, state = tx.update(jnp.full(1, jnp.inf if overflow else 1.0), state)
    scales.append(float(state.loss_scale))
  assert scales == [16, 8, 4, 4, 2, 2, 4, 4, 2]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_loss_scale_may_wrap_master_weights(dtype):
  params = jnp.ones(2, dtype)
  one = optax_boost.dynamic_loss_scale(optax_boost.master_weights(optax.adam(1e-3)), 4.0)
  other = optax_boost.master_weights(optax_boost.dynamic_loss_scale(optax.adam(1e-3), 4.0))
  masters = []
  for tx in (one, other):
    state, p = tx.init(params), params
    for value in (1.0, jnp.inf, 2.0):
      updates, state = jax.jit(tx.update)(jnp.full_like(params, value), state, p)
      p = optax.apply_updates(p, updates)
    assert optax.tree.get(state, "loss_scale") == 2.0
    masters.append(optax.tree.get(state, "master_params"))
  np.testing.assert_allclose(*masters, rtol=1e-6)
  assert masters[0][0] < 0.9985


@pytest.mark.parametrize(
  "inner", [optax.adam(0.1), optax_boost.accumulate(optax.sgd(0.1), 1)], ids=["adam", "accumulate"]
)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_gradient_changes_neither_masters_nor_the_inner_state(inner, bad):
  tx = optax_boost.master_weights(inner)
  params = jnp.ones(2, jnp.bfloat16)
  _, state = tx.update(params, tx.init(params), params)
  params = state.master_params.astype(params.dtype)
  updates, after = jax.jit(tx.update)(jnp.array([bad, 1.0], params.dtype), state, params)
  assert not jnp.any(updates)
  np.testing.assert_array_equal(after.master_params, state.master_params)
  if not hasattr(state.inner_state, "accumulator"):
    jax.tree.map(np.testing.assert_array_equal, after.inner_state, state.inner_state)
    assert after.notfinite_count == 1
  updates, _ = tx.update(params, after, params)
  assert jnp.all(updates < 0)


def test_gradients_that_the_inner_optimizer_can_handle_do_not_count_as_bad():
  inner = optax.chain(optax.zero_nans(), optax.sgd(1.0))
  tx = optax_boost.master_weights(inner, check="updates")
  params = jnp.ones(2)
  updates, state = tx.update(jnp.array([jnp.nan, 0.5]), tx.init(params), params)
  np.testing.assert_array_equal(updates, [0.0, -0.5])
  assert state.notfinite_count == 0


@pytest.mark.parametrize("key", [None, 3])
def test_masters_follow_params_that_were_changed_between_steps(key):
  tx = optax_boost.master_weights(optax.sgd(2.0**-9), key=key)
  params = jnp.ones(100, jnp.bfloat16)
  state, grads, update = tx.init(params), jnp.full_like(params, -1.0), jax.jit(tx.update)
  for _ in range(3):
    updates, state = update(grads, state, params)
    params = optax.apply_updates(params, updates)
  np.testing.assert_array_equal(state.master_params, 1 + 3 * 2.0**-9)
  params = params.at[:50].set(0.5)
  _, state = update(grads, state, params)
  np.testing.assert_array_equal(state.master_params[:50], 0.5 + 2.0**-9)
  np.testing.assert_array_equal(state.master_params[50:], 1 + 4 * 2.0**-9)


def test_masters_wrap_all_closures():
  seen = {}

  def update(updates, state, params, **closures):
    seen.update({name: closure(params).dtype.name for name, closure in closures.items()})
    return updates, state

  inner = optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)
  tx = optax_boost.master_weights(inner)
  params = jnp.ones(2, jnp.float16)
  closures = {"value_fn": jnp.sum, "obj_fn": jnp.sum, "grad_fn": abs, "full_grad_fn": abs}
  tx.update(params, tx.init(params), params, **closures)
  losses, gradients = dict.fromkeys(("value_fn", "obj_fn"), "float16"), ("grad_fn", "full_grad_fn")
  assert seen == losses | dict.fromkeys(gradients, "float32")


@pytest.mark.parametrize(
  "wrap",
  [
    optax_boost.dynamic_loss_scale,
    optax_boost.master_weights,
    lambda tx: optax_boost.accumulate(tx, 2),
  ],
  ids=["loss scale", "master weights", "accumulate"],
)
def test_eager_steps_compile_no_conditional(wrap):
  tx, params = wrap(optax.adam(0.1)), {"w": jnp.ones(2, jnp.bfloat16)}
  state = tx.init(params)
  for value in (1.0, jnp.inf, 1.0, jnp.inf):
    update = functools.partial(tx.update, {"w": jnp.full(2, value, jnp.bfloat16)}, state, params)
    compiled = compilations.count(update)
    _, state = update()
  assert compiled == 0


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_a_scale_that_half_precision_makes_infinite_is_refused():
  static = ("inner", "axis_name", "check")
  factory = optax.inject_hyperparams(optax_boost.dynamic_loss_scale, static_args=static)
  tx = factory(optax.sgd(0.1), initial_scale=2.0**16)
  with pytest.raises(ValueError, match=r"finite .*Array\(inf.*hyperparam_dtype=jnp.float32"):
    tx.init(jnp.ones(2, jnp.float16))


@pytest.mark.parametrize("kwargs", [{"initial_scale": 0.5}, {"maximum": 2.0}, {"minimum": 2.0**16}])
def test_scales_out_of_order_are_refused(kwargs):
  with pytest.raises(ValueError, match=r"must be in this order, from .*; got .*\d"):
    optax_boost.dynamic_loss_scale(optax.sgd(0.1), **kwargs)


@pytest.mark.parametrize(
  "wrap",
  [
    lambda: optax_boost.dynamic_loss_scale(optax.sgd(0.3), 8.0, check="updates"),
    lambda: optax_boost.master_weights(optax.sgd(0.3), check="updates"),
    lambda: optax_boost.dynamic_loss_scale(
      optax_boost.master_weights(optax.sgd(0.3), check="updates"), 8.0, check="updates"
    ),
  ],
  ids=["loss scale", "masters", "both"],
)
def test_updates_are_checked_under_the_leak_checker(wrap):
  """The loss's gradient is 2 (x - 1) / 3, so a step shortens x - 1 = -1 to 0.8 of it."""
  with jax.checking_leaks():
    step = optax_boost.make_train_step(lambda p, x: jnp.mean((x @ p - 1) ** 2), wrap())
    state = step.init(jnp.zeros(3))
    for _ in range(2):
      state, _ = step(state, jnp.eye(3))
  np.testing.assert_allclose(state.params, np.full(3, 1 - 0.8**2), rtol=1e-6)

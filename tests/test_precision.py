"""Loss scaling against MindSpore's recorded scales, and master weights against MXNet's."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
from optax_boost._precision import _master_weights

GOLDEN = pathlib.Path(__file__).parent / "golden"


@pytest.fixture(scope="module")
def recorded():
  with np.load(GOLDEN / "loss_scale.npz") as file:
    arrays = {key: file[key] for key in file.files}
  return arrays, json.loads(str(arrays["meta_json"]))["hyper"]


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
    # The reference has no cap: its scale ends at infinity, ours at the largest float32.
    assert state.loss_scale == min(expected, np.finfo(np.float32).max)
  assert state.notfinite_count == np.sum(arrays[f"{case}_overflow"])


def test_a_step_that_overflows_changes_nothing_but_scale_and_counters():
  tx = optax_boost.dynamic_loss_scale(optax.adam(0.1), 8.0)
  params = jnp.ones(2)
  _, state = tx.update(jnp.ones(2), tx.init(params), params)
  updates, after = jax.jit(tx.update)(jnp.array([1.0, jnp.nan]), state, params)
  assert not jnp.any(updates)
  jax.tree.map(np.testing.assert_array_equal, after.inner_state, state.inner_state)
  assert (after.loss_scale, after.notfinite_count) == (4.0, 1)


def test_the_scale_stays_between_floor_and_cap():
  tx = optax_boost.dynamic_loss_scale(optax.sgd(0.1), 4.0, 1, minimum=2.0, maximum=8.0)
  state = tx.init(jnp.zeros(1))
  for grad, expected in ((1.0, 8.0), (1.0, 8.0), (jnp.inf, 4.0), (jnp.inf, 2.0), (jnp.inf, 2.0)):
    _, state = tx.update(jnp.full(1, grad), state)
    assert state.loss_scale == expected


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


def test_line_searches_work_under_a_loss_scale():
  def loss(params, batch):
    return jnp.mean((batch @ params - 1.0) ** 2)

  batch = jnp.asarray(np.random.default_rng(0).normal(size=(8, 3)), jnp.float32)
  plain = optax_boost.make_train_step(loss, optax.lbfgs())
  scaled = optax_boost.make_train_step(loss, optax_boost.dynamic_loss_scale(optax.lbfgs(), 1024.0))
  expected, found = plain.init(jnp.zeros(3)), scaled.init(jnp.zeros(3))
  for _ in range(3):
    expected, _ = plain(expected, batch)
    found, _ = scaled(found, batch)
  np.testing.assert_allclose(found.params, expected.params, rtol=1e-3, atol=1e-5)


def half_precision_loss(params, batch):
  """A loss whose float16 gradients vanish without a scale."""
  return jnp.sum((batch["x"] @ params).astype(jnp.float32) * 2e-8)


def test_gradients_that_vanish_in_float16_arrive_with_the_stack():
  batch = {"x": jnp.ones((1, 2), jnp.float16)}
  params = jnp.ones(2, jnp.float16)
  assert not jnp.any(jax.grad(half_precision_loss)(params, batch))
  tx = optax_boost.master_weights(optax_boost.dynamic_loss_scale(optax.sgd(1e6), 2.0**15))
  step = optax_boost.make_train_step(half_precision_loss, tx)
  state, _ = step(step.init(params), batch)
  masters = optax.tree.get(state.opt_state, "master_params")
  np.testing.assert_allclose(masters, 1 - 0.02, rtol=1e-3)


def test_two_scales_in_one_state_are_refused():
  tx = optax_boost.dynamic_loss_scale(optax_boost.dynamic_loss_scale(optax.sgd(0.1)))
  step = optax_boost.make_train_step(lambda p, b: jnp.sum(p), tx)
  with pytest.raises(ValueError, match=r"one state with a `loss_scale`; the optimizer .* 2"):
    step(step.init(jnp.ones(2)), None)


def test_accumulation_inside_the_loss_scale_drops_what_overflows():
  tx = optax_boost.dynamic_loss_scale(optax_boost.accumulate(optax.sgd(1.0), 2), 4.0)
  state = tx.init(jnp.zeros(1))
  for grad in (4.0, jnp.inf, 6.0):
    updates, state = tx.update(jnp.full(1, grad), state)
  # 4 / 4 and, the scale having been halved, 6 / 2; the step in between was none.
  np.testing.assert_array_equal(updates, [-2.0])


@pytest.mark.parametrize("kind", ["jit", "shard_map"])
def test_all_devices_agree_on_an_overflow_of_one(kind):
  mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
  spec = jax.sharding.PartitionSpec("x")
  tx = optax_boost.dynamic_loss_scale(
    optax.sgd(1.0), 8.0, axis_name="x" if kind == "shard_map" else None
  )
  grad = jnp.ones(8).at[3].set(jnp.inf)
  state = tx.init(jnp.zeros(8))
  if kind == "jit":
    placed = jax.device_put(grad, jax.sharding.NamedSharding(mesh, spec))
    updates, after = jax.jit(tx.update)(placed, state)
  else:
    whole = jax.sharding.PartitionSpec()
    step = jax.shard_map(
      tx.update, mesh=mesh, in_specs=(spec, whole), out_specs=(spec, whole), check_vma=False
    )
    updates, after = jax.jit(step)(grad, state)
  assert not jnp.any(updates)
  assert after.loss_scale == 4.0


def test_a_thousand_steps_too_small_for_half_precision_arrive():
  for dtype in ("float16", "bfloat16"):
    params = jnp.ones(1, dtype)
    tx = optax_boost.master_weights(optax.sgd(1.0))
    state = tx.init(params)

    def body(carry, _, tx=tx):
      params, state = carry
      updates, state = tx.update(jnp.full_like(params, -1e-3), state, params)
      params = optax.apply_updates(params, updates)
      masters = state.master_params
      return (params, state), jnp.all(params == masters.astype(params.dtype))

    (params, state), exact = jax.lax.scan(body, (params, state), length=1000)
    assert jnp.all(exact), "params must always be the rounding of the masters"
    np.testing.assert_allclose(state.master_params, 2.0, rtol=2e-2 if dtype == "bfloat16" else 1e-3)
    assert params.dtype == dtype


def test_agrees_with_mxnets_float16_lars_with_masters():
  with np.load(GOLDEN / "lars_mxnet200beta1_fp16mp.npz") as file:
    arrays = {key: file[key] for key in file.files}
  case = json.loads(str(arrays["meta_json"]))["hyper"]["cases"][14]
  rates = jnp.asarray(arrays["learning_rates"], jnp.float32)
  lars = optax_boost.lars(
    lambda count: rates[count],
    weight_decay=case["wd"],
    momentum=case["momentum"],
    trust_coefficient=case["eta"],
    eps=case["eps"],
    clip=case["clip_gradient"],
    exclude="(gamma|beta|bias)$",
  )
  tx = optax_boost.master_weights(optax.chain(optax.scale(case["rescale_grad"]), lars))

  def tree(vector):
    out, start = {}, 0
    for name, text in zip(arrays["param_names"], arrays["param_shapes"], strict=True):
      shape = tuple(int(n) for n in text.split(","))
      out[str(name)] = jnp.asarray(vector[start : start + np.prod(shape)].reshape(shape))
      start += int(np.prod(shape))
    return out

  params = tree(arrays["init"])
  state, update = tx.init(params), jax.jit(tx.update)
  grads = arrays["grads_r1" if case["rescale_grad"] == 1 else "grads_r128"]
  for t in range(10):
    updates, state = update(tree(grads[t]), state, params)
    params = optax.apply_updates(params, updates)
    expected = tree(arrays["unfused_c14_w"][t])
    for name, weight in expected.items():
      np.testing.assert_allclose(state.master_params[name], weight, rtol=0, atol=2e-6)
      assert params[name].dtype == jnp.float16
      np.testing.assert_array_equal(params[name], state.master_params[name].astype(jnp.float16))


def test_masters_beyond_the_range_of_the_params_saturate_and_come_back():
  params = jnp.full(1, 60_000.0, jnp.float16)
  tx = optax_boost.master_weights(optax.sgd(1.0))
  state = tx.init(params)
  for grad, expected in ((-20_000.0, 65504.0), (jnp.nan, 65504.0), (30_000.0, 49_984.0)):
    updates, state = tx.update(jnp.full(1, grad, jnp.float16), state, params)
    params = optax.apply_updates(params, updates)
    assert params == expected
  assert state.notfinite_count == 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("x", [1.001, -1.001, 1e-3, 0.0, 300.7])
def test_stochastic_rounding_is_right_on_average_and_lands_on_neighbours(dtype, x):
  values = jnp.full(40_000, x, jnp.float32)
  rounded = _master_weights.round_stochastically(jax.random.key(0), values, jnp.dtype(dtype))
  assert rounded.dtype == dtype
  wide = np.asarray(rounded, np.float64)
  gap = float(jnp.finfo(dtype).eps) * max(abs(x), 1e-30)
  assert np.max(np.abs(wide - float(values[0]))) <= 2 * gap
  assert abs(wide.mean() - float(values[0])) <= 0.02 * gap


def test_stochastic_rounding_leaves_what_is_not_finite_alone():
  values = jnp.array([jnp.nan, jnp.inf, -jnp.inf, 65504.0])
  rounded = _master_weights.round_stochastically(jax.random.key(0), values, jnp.dtype("float16"))
  np.testing.assert_array_equal(np.asarray(rounded, np.float32), values)


def test_masters_round_stochastically_with_a_key_and_differently_at_every_step():
  params = jnp.ones(1000, jnp.bfloat16)
  tx = optax_boost.master_weights(optax.sgd(1.0), key=jax.random.key(0))
  state, seen = tx.init(params), []
  for grad in (-2e-3, 0.0):
    updates, state = tx.update(jnp.full_like(params, grad), state, params)
    params = optax.apply_updates(params, updates)
    seen.append(np.asarray(params, np.float32))
  assert abs(seen[0].mean() - 1.002) < 5e-4
  assert not np.array_equal(*seen)


@pytest.mark.parametrize(
  ("kwargs", "error", "message"),
  [
    ({"initial_scale": 0.0}, ValueError, r"`initial_scale` must be finite and > 0"),
    ({"growth_interval": 0}, ValueError, r"`growth_interval` must be finite and >= 1"),
    ({"growth_factor": 0.5}, ValueError, r"`growth_factor` must be finite and >= 1"),
    ({"backoff_factor": 1.0}, ValueError, r"`backoff_factor` must be finite and > 0 and < 1"),
    ({"minimum": 2.0, "maximum": 1.0}, ValueError, r"`minimum` must not be above `maximum`"),
  ],
)
def test_refuses_loss_scales_out_of_range(kwargs, error, message):
  with pytest.raises(error, match=message):
    optax_boost.dynamic_loss_scale(optax.sgd(0.1), **kwargs)


def test_a_donated_state_leaves_the_key_for_the_next_one():
  tx = optax_boost.master_weights(optax.sgd(0.1), key=jax.random.key(0))
  step = jax.jit(lambda state, params: tx.update(params, state, params)[1], donate_argnums=0)
  params = jnp.ones(2, jnp.bfloat16)
  for _ in range(2):
    assert int(step(tx.init(params), params).count) == 1


@pytest.mark.parametrize("key", [0, jnp.zeros(2, jnp.uint32)], ids=["int", "raw"])
def test_refuses_what_is_no_key(key):
  with pytest.raises(TypeError, match=r"`key` must be a key of `jax.random.key`, or None; got"):
    optax_boost.master_weights(optax.sgd(0.1), key=key)

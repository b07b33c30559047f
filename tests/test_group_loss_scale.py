"""Loss scaling by group: MindSpore's recorded scales, and gradients scaled where groups meet."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost

GOLDEN = pathlib.Path(__file__).parent / "golden"
GROUPS = ("a", "b", "c")
SCALES = jnp.array([64.0, 0.5, 8.0])


def network(seed=0, width=4):
  rng = np.random.default_rng(seed)
  params = {n: jnp.asarray(rng.normal(size=(width, width)), jnp.float32) for n in GROUPS}
  return params, jnp.asarray(rng.normal(size=(3, width)), jnp.float32)


def chain(params, x):
  for name in GROUPS:
    x = jnp.tanh(x @ params[name])
  return jnp.mean(x**2)


def residual_over_groups(params, x):
  x = jnp.tanh(x @ params["a"])
  return jnp.mean((x + jnp.tanh(x @ params["b"]) @ params["c"]) ** 2)


def tied(params, x):
  x = jnp.tanh(x @ params["a"]) @ params["b"]
  return jnp.mean((x @ params["c"] @ params["a"].T) ** 2)


def penalized(params, x):
  return chain(params, x) + 0.1 * optax.tree.norm(params, squared=True)


def all_in_one_jit(params, x):
  return jax.jit(chain)(params, x)


def rematerialized(params, x):
  return jax.checkpoint(chain)(params, x)


def scanned(params, x):
  stacked = jnp.stack([params["a"], params["a"]])
  x, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, stacked)
  x, _ = jax.lax.scan(lambda h, _: (jnp.tanh(h @ params["b"]), None), x, length=2)
  return jnp.mean((x @ params["c"]) ** 2)


def branched(params, x):
  both = [lambda x: x @ params["a"] @ params["b"], lambda x: x @ params["b"]]
  return jnp.mean((jax.lax.switch(0, both, x) @ params["c"]) ** 2)


@jax.custom_vjp
def _doubled(x, w):
  return x @ w


_doubled.defvjp(
  lambda x, w: (x @ w, (x, w)), lambda rest, g: (2 * g @ rest[1].T, 2 * rest[0].T @ g)
)


def with_a_derivative_of_its_own(params, x):
  x = _doubled(jax.nn.relu(x @ params["a"]), params["b"])
  return jnp.mean(jax.nn.softmax(x @ params["c"])[:, jnp.argmax(x[0])])


LOSSES = (
  chain,
  residual_over_groups,
  tied,
  penalized,
  all_in_one_jit,
  rematerialized,
  scanned,
  branched,
  with_a_derivative_of_its_own,
)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_each_leafs_gradient_is_its_groups_scale_times_the_true_one(loss):
  params, x = network()
  scaled = optax_boost.scale_by_group(loss, GROUPS)
  value, grads = jax.jit(jax.value_and_grad(scaled))(params, SCALES, x)
  true = jax.grad(loss)(params, x)
  for name, scale in zip(GROUPS, SCALES, strict=True):
    # Powers of two: nothing but the order of sums can differ.
    np.testing.assert_allclose(grads[name], scale * true[name], rtol=2e-6, atol=1e-6 * scale)
  np.testing.assert_allclose(value, SCALES[-1] * loss(params, x), rtol=1e-6)


def test_a_rematerialized_part_is_computed_again_with_scales_too():
  params, x = network()
  scaled = optax_boost.scale_by_group(rematerialized, GROUPS)
  text = str(jax.make_jaxpr(jax.grad(scaled))(params, SCALES, x))
  plain = str(
    jax.make_jaxpr(jax.grad(optax_boost.scale_by_group(chain, GROUPS)))(params, SCALES, x)
  )
  assert text.count("tanh") == 2 * plain.count("tanh")


def test_what_flows_between_groups_is_scaled_also_inside_a_nested_jit():
  """The head's gradients overflow with the scale that the body's need, and the other way round."""

  @jax.jit
  def forward(params, x):
    h = (x @ params["body"]).astype(jnp.float16)
    return jnp.sum((h * jnp.float16(2e-4)) * jnp.float16(2e-4) + params["head"] * 1000)

  def loss(params, x):
    return forward(params, x)

  params = {"body": jnp.ones((2, 2), jnp.float16), "head": jnp.ones(2, jnp.float16)}
  x = jnp.ones((1, 2), jnp.float16) * jnp.float16(0.25)
  assert not jnp.any(jax.grad(loss)(params, x)["body"])
  common = jax.grad(lambda p: 4096 * loss(p, x).astype(jnp.float32))(params)
  assert not jnp.all(jnp.isfinite(common["head"]))
  scaled = optax_boost.scale_by_group(loss, ["body", "head"])
  grads = jax.grad(scaled)(params, jnp.array([4096.0, 1.0]), x)
  np.testing.assert_allclose(grads["body"].astype(jnp.float32) / 4096, 1e-8, rtol=0.1)
  np.testing.assert_array_equal(grads["head"], 1000)


def test_integers_and_aux_pass_through():
  params, x = network()

  def loss(params, x):
    return chain(params, x), {"best": jnp.argmax(x @ params["b"]), "rows": x.shape[0]}

  scaled = optax_boost.scale_by_group(loss, GROUPS, has_aux=True)
  grads, aux = jax.grad(scaled, has_aux=True)(params, SCALES, x)
  assert aux["best"] == loss(params, x)[1]["best"]
  assert aux["rows"] == 3
  assert grads["a"].dtype == jnp.float32


@pytest.mark.optimized
def test_scales_agree_with_mindspore_exactly():
  with np.load(GOLDEN / "loss_scale.npz") as file:
    arrays = {key: file[key] for key in file.files}
  backoff, growth = arrays["group_ratios"]
  tx = optax_boost.group_loss_scale(
    optax.sgd(0.1), GROUPS, 4096.0, growth_factor=growth, backoff_factor=backoff
  )
  params = {name: jnp.zeros(1) for name in GROUPS}
  state, update = tx.init(params), jax.jit(tx.update)
  skipped = 0
  for overflow, expected in zip(arrays["group_overflow"], arrays["group_scale"], strict=True):
    grads = {n: jnp.full(1, jnp.inf if o else 1.0) for n, o in zip(GROUPS, overflow, strict=True)}
    updates, state = update(grads, state)
    np.testing.assert_array_equal(state.group_loss_scale, expected)
    skipped += not any(bool(jnp.any(u)) for u in updates.values())
  assert skipped == np.sum(arrays["group_step_skipped"]) == state.notfinite_count
  np.testing.assert_array_equal(state.overflow_count, np.sum(arrays["group_overflow"], 0))


def test_scales_stay_between_floor_and_cap():
  tx = optax_boost.group_loss_scale(
    optax.sgd(0.1), ["a", "b"], 4.0, growth_factor=2.0, backoff_factor=0.5, minimum=2.0, maximum=8.0
  )
  state = tx.init({"a": jnp.zeros(1), "b": jnp.zeros(1)})
  for expected in ([8.0, 2.0], [8.0, 2.0]):
    _, state = tx.update({"a": jnp.ones(1), "b": jnp.full(1, jnp.nan)}, state)
    np.testing.assert_array_equal(state.group_loss_scale, expected)


@pytest.mark.parametrize("skip", ["all", "group"])
def test_an_overflow_skips_the_step_or_only_its_group(skip):
  tx = optax_boost.group_loss_scale(optax.adam(0.1), ["a", "b"], 2.0, skip=skip)
  params = {"a": jnp.ones(2), "b": jnp.ones(2)}
  _, state = tx.update(params, tx.init(params), params)
  grads = {"a": jnp.array([1.0, jnp.inf]), "b": jnp.ones(2)}
  updates, after = jax.jit(tx.update)(grads, state, params)
  moments, before = after.inner_state[0], state.inner_state[0]
  assert not jnp.any(updates["a"])
  for moment in ("mu", "nu"):
    np.testing.assert_array_equal(getattr(moments, moment)["a"], getattr(before, moment)["a"])
  moved = skip == "group"
  assert jnp.all(updates["b"] != 0) == moved
  assert jnp.all(moments.mu["b"] != before.mu["b"]) == moved
  assert jnp.all(jnp.isfinite(moments.nu["b"]))
  np.testing.assert_array_equal(after.overflow_count, [1, 0])


def test_the_train_step_trains_as_without_scales_and_reports_the_plain_loss():
  params, x = network()
  tx = optax_boost.group_loss_scale(
    optax.sgd(0.1, 0.9), GROUPS, 2.0**10, growth_factor=2.0, maximum=2.0**20
  )
  plain = optax_boost.make_train_step(chain, optax.sgd(0.1, 0.9))
  step = optax_boost.make_train_step(chain, tx)
  expected, found = plain.init(params), step.init(params)
  for _ in range(3):
    expected, wanted = plain(expected, x)
    found, metrics = step(found, x)
    np.testing.assert_allclose(metrics["loss"], wanted["loss"], rtol=1e-6)
  for name in GROUPS:
    np.testing.assert_allclose(found.params[name], expected.params[name], rtol=1e-5, atol=1e-6)
  np.testing.assert_array_equal(metrics["group_loss_scale"], [2.0**13] * 3)
  assert step._step._cache_size() == 1


def test_the_step_recovers_from_what_overflows_from_the_first_step_on():
  """Each group comes down to where it fits, on its own; the loss falls."""
  params, x = network()
  params = jax.tree.map(lambda p: p.astype(jnp.float16), params)
  tx = optax_boost.master_weights(
    optax_boost.group_loss_scale(optax.sgd(0.02), GROUPS, 2.0**20, backoff_factor=0.5)
  )
  step = optax_boost.make_train_step(lambda p, b: 10 * chain(p, b), tx)
  state, losses = step.init(params), []
  for _ in range(25):
    state, metrics = step(state, x.astype(jnp.float16))
    losses.append(float(metrics["loss"]))
  assert losses[-1] < 0.8 * losses[0]
  overflows = optax.tree.get(state.opt_state, "overflow_count")
  assert jnp.all((overflows > 0) & (overflows < 20))


def test_composes_with_freezing_accumulation_and_a_whole_loss_scale():
  params, x = network()

  def train(tx):
    step = optax_boost.make_train_step(chain, tx)
    state = step.init(params)
    for _ in range(6):
      state, _ = step(state, x)
    return state.params

  schedule = optax_boost.continuous_freezing(3, 0.5)
  freeze = functools.partial(optax_boost.freeze_layers, groups=GROUPS, schedule=schedule)
  expected = train(freeze(optax_boost.accumulate(optax.sgd(0.2, 0.9), 2)))
  scales = functools.partial(optax_boost.group_loss_scale, groups=GROUPS)
  inner = optax_boost.accumulate(optax.sgd(0.2, 0.9), 2)
  for tx in (
    scales(freeze(inner)),
    freeze(scales(inner)),
    optax_boost.dynamic_loss_scale(scales(freeze(inner)), 4.0),
  ):
    for name, found in train(tx).items():
      np.testing.assert_allclose(found, expected[name], rtol=1e-4, atol=1e-5)


def test_devices_agree_on_an_overflow_of_one():
  mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
  part, whole = jax.sharding.PartitionSpec("x"), jax.sharding.PartitionSpec()
  tx = optax_boost.group_loss_scale(optax.sgd(1.0), ["a", "b"], 8.0, axis_name="x", skip="group")
  grads = {"a": jnp.ones(8).at[3].set(jnp.inf), "b": jnp.ones(8)}
  step = jax.shard_map(tx.update, mesh=mesh, in_specs=(part, whole), out_specs=(part, whole))
  updates, after = jax.jit(step)(grads, tx.init(grads))
  assert not jnp.any(updates["a"])
  assert jnp.all(updates["b"])
  np.testing.assert_array_equal(after.overflow_count, [1, 0])


@pytest.mark.parametrize("skip", ["all", "group"])
def test_an_overflow_of_one_replica_stops_its_group_on_all_under_adasum(skip):
  inner = optax.chain(optax_boost.adasum("x"), optax.sgd(1.0, momentum=0.9))
  tx = optax_boost.group_loss_scale(inner, ["a", "b"], 8.0, axis_name="x", skip=skip)
  grads = {"a": jnp.ones((4, 3)).at[2, 1].set(jnp.inf), "b": jnp.ones((4, 3))}
  state = tx.init({"a": jnp.zeros(3), "b": jnp.zeros(3)})
  # Replicas as a mapped axis: on devices that disagree, a collective would wait for ever.
  update = jax.vmap(tx.update, in_axes=(0, None), axis_name="x")
  updates, after = jax.jit(update)(grads, state)
  assert not jnp.any(updates["a"])
  expected = 0.0 if skip == "all" else -1 / 8  # identical gradients, unscaled
  np.testing.assert_allclose(updates["b"], np.full((4, 3), expected))
  np.testing.assert_array_equal(after.overflow_count, np.tile([1, 0], (4, 1)))
  assert not jnp.any(optax.tree.get(after, "trace")["a"])
  for leaf in jax.tree.leaves(after):
    np.testing.assert_array_equal(leaf, np.broadcast_to(leaf[:1], leaf.shape))


@pytest.mark.parametrize(
  ("kwargs", "error", "message"),
  [
    ({"inner": optax.sgd}, TypeError, r"`inner` must be an optax.GradientTransformation"),
    ({"groups": "a"}, TypeError, r"`groups` must be what `layer_groups` returned, or a sequence"),
    ({"initial_scale": 0.0}, ValueError, r"`initial_scale` must be finite and > 0"),
    ({"growth_factor": 0.5}, ValueError, r"`growth_factor` must be finite and >= 1"),
    ({"backoff_factor": 1.0}, ValueError, r"`backoff_factor` must be finite and > 0 and < 1"),
    ({"minimum": 2.0, "maximum": 1.0}, ValueError, r"`minimum` must not be above `maximum`"),
    ({"skip": "none"}, ValueError, r"`skip` must be one of 'all', 'group'; got 'none'"),
  ],
)
def test_refuses_bad_arguments(kwargs, error, message):
  with pytest.raises(error, match=message):
    optax_boost.group_loss_scale(**{"inner": optax.sgd(0.1), "groups": ["a"], **kwargs})


def test_says_how_many_scales_are_needed_and_what_is_no_loss():
  params, x = network()
  with pytest.raises(ValueError, match=r"an array of shape \(3,\); got the shape \(2,\)"):
    optax_boost.scale_by_group(chain, GROUPS)(params, jnp.ones(2), x)
  with pytest.raises(TypeError, match=r"`loss_fn` must be callable.*; got 3"):
    optax_boost.scale_by_group(3, GROUPS)


def test_groups_of_other_params_are_refused():
  params, x = network()
  groups = optax_boost.layer_groups(chain, params, x, num_groups=3)
  tx = optax_boost.group_loss_scale(optax.sgd(0.1), groups)
  with pytest.raises(ValueError, match=r"`group_loss_scale` was given groups for other params"):
    tx.init({"z": jnp.ones(2)})


def test_a_norm_clip_inside_does_not_see_the_group_that_overflowed():
  inner = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
  tx = optax_boost.group_loss_scale(inner, ["a", "b"], 2.0, skip="group")
  grads = {"a": jnp.array([jnp.inf, 1.0]), "b": jnp.array([6.0, 8.0])}
  updates, _ = tx.update(grads, tx.init(grads), grads, grad=grads)
  np.testing.assert_allclose(updates["b"], [-0.6, -0.8], rtol=1e-6)
  assert not jnp.any(updates["a"])


@pytest.mark.parametrize("skip", ["all", "group"])
def test_what_overflows_only_once_unscaled_is_skipped_in_its_group(skip):
  tx = optax_boost.group_loss_scale(optax.sgd(1.0, 0.9), ["a", "b"], 0.125, minimum=0.01, skip=skip)
  params = {"a": jnp.zeros(1, jnp.float16), "b": jnp.zeros(1, jnp.float16)}
  grads = {"a": jnp.full(1, 60_000.0, jnp.float16), "b": jnp.ones(1, jnp.float16)}
  updates, state = tx.update(grads, tx.init(params), params)
  assert not jnp.any(updates["a"])
  assert updates["b"] == (-8.0 if skip == "group" else 0.0)
  assert state.notfinite_count == 1
  momentum = optax.tree.get(state, "trace")
  assert not jnp.any(momentum["a"])
  assert updates["b"].dtype == jnp.float16


@pytest.mark.parametrize("order", ["whole outside", "groups outside"])
def test_nested_scales_come_down_together(order):
  def whole(tx):
    return optax_boost.dynamic_loss_scale(tx, 2.0)

  def groups(tx):
    return optax_boost.group_loss_scale(tx, [""], 2.0**10, backoff_factor=0.5)

  tx = whole(groups(optax.sgd(0.1))) if order == "whole outside" else groups(whole(optax.sgd(0.1)))
  state = tx.init(jnp.ones(1))
  updates, state = tx.update(jnp.full(1, jnp.inf), state)
  assert not jnp.any(updates)
  np.testing.assert_array_equal(optax.tree.get(state, "group_loss_scale"), [2.0**9])
  assert optax.tree.get(state, "loss_scale") == 1.0


def test_refuses_a_scale_from_which_it_would_hide_overflows():
  inner = optax_boost.dynamic_loss_scale(optax.sgd(0.1))
  tx = optax_boost.group_loss_scale(inner, [""], skip="group")
  with pytest.raises(ValueError, match=r"`dynamic_loss_scale\(group_loss_scale\(inner, groups"):
    tx.init(jnp.ones(1))


def test_injected_growth_needs_a_dtype_of_its_own_for_bfloat16_params():
  """https://github.com/google-deepmind/optax/issues/1414"""
  params = jnp.ones(1, jnp.bfloat16)

  def scale_after_a_step(**options):
    factory = optax.inject_hyperparams(optax_boost.group_loss_scale, **options)
    tx = factory(optax.sgd(0.1), groups=("",))
    _, state = tx.update(params, tx.init(params), params)
    return optax.tree.get(state, "group_loss_scale")[0]

  options = {"static_args": ("inner", "groups", "skip", "axis_name")}
  assert scale_after_a_step(**options) == 2.0**15
  assert scale_after_a_step(**options, hyperparam_dtype=jnp.float32) > 2.0**15

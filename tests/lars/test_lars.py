"""LARS against the recorded runs of MXNet and MindSpore, and against NumPy."""

import functools
import inspect
import json
import operator
import pathlib
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
from tests import closeness, layer_losses, meshes

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
# With every operation rounded up or down at random, weights and momenta err by up to 7 ulps of
# their terms after ten steps: two norms, a ratio, and some 8 products and sums a step.
ULPS = 8


def load(name):
  with np.load(GOLDEN / f"{name}.npz") as file:
    arrays = {key: file[key] for key in file.files}
  return arrays, json.loads(str(arrays["meta_json"]))["hyper"]


def unflatten(arrays, vector):
  """Cuts a trace's concatenated vectors, along their last axis, into its named tensors."""
  tree, start = {}, 0
  for name, text in zip(arrays["param_names"], arrays["param_shapes"], strict=True):
    shape = tuple(int(n) for n in text.split(","))
    part = vector[..., start : start + np.prod(shape)]
    tree[str(name)] = part.reshape(*vector.shape[:-1], *shape)
    start += int(np.prod(shape))
  return tree


def flatten(arrays, tree):
  return np.concatenate([np.ravel(tree[str(name)]) for name in arrays["param_names"]])


# As in docs/migrating/mindspore.md.
NOT_DECAYED = optax_boost.path_mask("*LayerNorm*|*bias*|*beta*|*gamma*")


def mxnet_lars(arrays, case, weight_decay_mask=None):
  rates = jnp.asarray(arrays["learning_rates"], jnp.float32)
  return optax_boost.lars(
    lambda count: rates[count],
    weight_decay=case["wd"],
    momentum=case["momentum"],
    trust_coefficient=case["eta"],
    eps=case["eps"],
    clip=case["clip_gradient"],
    exclude="*gamma|*beta|*bias",
    weight_decay_mask=weight_decay_mask,
  )


@functools.partial(jax.jit, static_argnames="tx_of")
def run(tx_of, case, params, grads):
  """Params and states after each step; cases whose numbers differ share one program."""
  tx = tx_of(case)

  def step(carry, g):
    params, state = carry
    updates, state = tx.update(g, state, params)
    carry = optax.apply_updates(params, updates), state
    return carry, carry

  return jax.lax.scan(step, (params, tx.init(params)), grads)[1]


@functools.cache
def trace_of(name, weight_decay_mask=None):
  """A trace, its cases, and its LARS for a case."""
  arrays, hyper = load(name)
  lars = functools.partial(mxnet_lars, arrays, weight_decay_mask=weight_decay_mask)
  return arrays, hyper["cases"], lars


def replay(arrays, case, lars):
  """Weights and momenta after every step of a trace."""
  grads = arrays["grads_r1" if case["rescale_grad"] == 1 else "grads_r128"]
  grads = unflatten(arrays, grads.astype(np.float32) * np.float32(case["rescale_grad"]))
  # A bound that is infinite clips nothing.
  numbers = {key: np.float32(np.inf if x is None else x) for key, x in case.items()}
  found, state = run(lars, numbers, unflatten(arrays, arrays["init"].astype(np.float32)), grads)
  trees = jax.device_get((found, optax.tree.get(state, "trace")))
  return [
    np.stack([flatten(arrays, {n: x[t] for n, x in tree.items()}) for t in range(10)])
    for tree in trees
  ]


def assert_weights_agree(found, start, expected):
  """Weights after each step; their terms are the initial weight and the updates."""
  closeness.assert_within_ulps(found, expected, closeness.path_lengths(start, expected), ULPS)


def assert_momenta_agree(found, expected, decay):
  """Momenta after each step; their terms are the decayed gradients times the rates."""
  last = np.concatenate([np.zeros_like(expected[:1]), expected[:-1]])
  terms = closeness.decayed_sums(expected - decay * last, decay)
  closeness.assert_within_ulps(found, expected, terms, ULPS)


def assert_close(found, expected, rtol):
  """Relative to the largest entry; of runs that differ by more than roundings."""
  np.testing.assert_allclose(found, expected, rtol=0, atol=rtol * np.abs(expected).max())


@pytest.mark.parametrize("number", range(26))
def test_agrees_with_mxnet_2(number):
  arrays, cases, lars = trace_of("lars_mxnet200beta1_fp32")
  case = cases[number]
  weights, momenta = replay(arrays, case, lars)
  assert_weights_agree(weights, arrays["init"], arrays[f"c{number:02}_w"])
  if case["momentum"]:
    assert_momenta_agree(momenta, arrays[f"c{number:02}_m"], case["momentum"])


def test_agrees_with_mxnet_2_on_float16_gradients_and_float32_masters():
  arrays, cases, lars = trace_of("lars_mxnet200beta1_fp16mp")
  weights, _ = replay(arrays, cases[14], lars)
  assert_weights_agree(weights, arrays["init"], arrays["unfused_c14_w"])
  for number, case in enumerate(cases):
    # The fused path takes the norm of the float16 copy of the weights, we that of the master.
    weights, _ = replay(arrays, case, lars)
    assert_close(weights, arrays[f"c{number:02}_w"], 5e-5)


# Without momentum it has none to correct; of case 22 there is a run without the correction.
@pytest.mark.parametrize("number", [*range(12), 22])
def test_agrees_with_mxnet_1_9_without_its_correction_of_the_momentum(number):
  arrays, cases, lars = trace_of("lars_mxnet191_fp32", "*_weight")
  weights, _ = replay(arrays, cases[number], lars)
  expected = arrays["nocorrection_c22_w" if number == 22 else f"c{number:02}_w"]
  assert_weights_agree(weights, arrays["init"], expected)


@pytest.mark.parametrize("number", [*range(8), 14])
def test_agrees_with_mxnet_1_9_in_float16_up_to_its_float16_squares(number):
  arrays, cases, lars = trace_of("lars_mxnet191_fp16mp", "*_weight")
  weights, _ = replay(arrays, cases[number], lars)
  expected = arrays["nocorrection_c14_w" if number == 14 else f"c{number:02}_w"]
  assert_close(weights, expected, 5e-4)


@functools.cache
def mindspore_lars(use_clip, rate):
  """MindSpore's LARS for a case, at a constant rate or, if that is None, at the case's rates."""
  _, hyper = load("lars_mindspore")

  def lars(case):
    rate_of_step = (lambda count: case["rates"][count]) if rate is None else rate
    return optax.chain(
      optax.scale(1 / case["loss_scale"]),
      optax_boost.scale_by_lars_trust_ratio(
        hyper["coefficient"],
        case["weight_decay"],
        hyper["epsilon"],
        clip_ratio=rate_of_step if use_clip else None,
        exclude=("LayerNorm", "bias"),
        weight_decay_mask=lambda params: jax.tree.map(operator.not_, NOT_DECAYED(params)),
      ),
      optax.trace(case["momentum"]),  # MindSpore's SGD keeps the rate outside of the momentum.
      optax.scale_by_learning_rate(rate_of_step),
    )

  return lars


@pytest.mark.parametrize("number", range(10))
def test_agrees_with_mindspore_if_norms_are_not_zero(number):
  arrays, hyper = load("lars_mindspore")
  case, rates = hyper["cases"][number], arrays["learning_rates"].astype(np.float32)
  lars = mindspore_lars(case["use_clip"], None if case["schedule"] else float(rates[0]))
  numbers = {key: np.float32(case[key]) for key in ("loss_scale", "momentum", "weight_decay")}
  params = unflatten(arrays, arrays["init"])
  grads = unflatten(arrays, arrays["grads"] * np.float32(case["loss_scale"]))
  found, _ = run(lars, numbers | {"rates": rates}, params, grads)
  expected = [unflatten(arrays, weights) for weights in arrays[f"c{number:02}_w"]]
  for name in ("fc1.weight", "conv.weight", "bn.gamma", "bn.beta", "fc1.bias"):
    weights = np.stack([tree[name] for tree in expected])
    assert_weights_agree(found[name], params[name], weights)


def small_model():
  """A hidden layer and a head, whose biases start at zero, and ten steps' gradients."""
  rng = np.random.default_rng(0)
  shapes = {
    "hidden": {"kernel": (8, 6), "bias": (6,)},
    "norm": {"scale": (6,)},
    "head": {"kernel": (6, 3), "bias": (3,)},
  }

  def normal(*leading):
    return {
      layer: {name: rng.normal(size=(*leading, *shape)) for name, shape in leaves.items()}
      for layer, leaves in shapes.items()
    }

  params, grads = normal(), normal(10)
  params["norm"]["scale"] = np.ones(6)
  for layer in ("hidden", "head"):
    params[layer]["bias"] *= 0
  return params, grads


def after_ten_steps(tx, params, grads):
  """Params after each of ten steps in float32."""
  params, grads = (jax.tree.map(np.float32, tree) for tree in (params, grads))
  return run(lambda _: tx, 0, params, grads)[0]


def test_the_default_coefficient_equals_the_papers_mxnets_and_optaxs():
  for factory in (optax.lars, optax_boost.lars, optax_boost.scale_by_lars_trust_ratio):
    assert inspect.signature(factory).parameters["trust_coefficient"].default == 0.001


@pytest.mark.parametrize(("momentum", "nesterov"), [(None, False), (0.9, False), (0.9, True)])
def test_a_rate_of_optax_lars_carries_over_if_no_leaf_is_excluded(momentum, nesterov):
  """Without decay both divide by the gradient's norm."""
  params, grads = small_model()
  theirs = optax.lars(10.0, momentum=momentum or 0.0, nesterov=nesterov)
  ours = optax_boost.lars(10.0, momentum=momentum, nesterov=nesterov, exclude=None)
  found, expected = (after_ten_steps(tx, params, grads) for tx in (ours, theirs))
  chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_lars_with_its_defaults_follows_its_formula(weight_decay):
  """In NumPy and float64; biases and the normalization step at the rate itself."""
  params, grads = small_model()
  rate = 2.0
  expected = {}
  for layer, leaves in params.items():
    expected[layer] = {}
    for name, start in leaves.items():
      w, momentum, after = start, np.zeros_like(start), []
      for g in grads[layer][name]:
        ratio = 1.0
        if name == "kernel":
          norm_w, norm_g = np.sqrt(np.sum(w**2)), np.sqrt(np.sum(g**2))
          ratio = 0.001 * norm_w / (norm_g + weight_decay * norm_w + 1e-8)
        momentum = 0.9 * momentum - rate * ratio * (g + weight_decay * w)
        w = w + momentum
        after.append(w)
      expected[layer][name] = np.stack(after)
  found = after_ten_steps(optax_boost.lars(rate, weight_decay), params, grads)
  chex.assert_trees_all_close(found, jax.tree.map(np.float32, expected), rtol=1e-5, atol=1e-4)
  moved = np.linalg.norm(expected["hidden"]["kernel"][-1] - params["hidden"]["kernel"])
  assert moved > 0.005 * np.linalg.norm(params["hidden"]["kernel"])


@pytest.mark.parametrize("of", ["params", "gradients"])
def test_the_trust_ratio_is_one_if_a_norm_is_zero(of):
  trees = {"params": {"kernel": jnp.ones((2, 2))}, "gradients": {"kernel": jnp.ones((2, 2))}}
  trees[of]["kernel"] *= 0
  tx = optax_boost.scale_by_lars_trust_ratio()
  _, state = tx.update(trees["gradients"], tx.init(trees["params"]), trees["params"])
  assert optax.tree.get(state, "trust_ratio") == 1
  assert optax.tree.get(state, "notfinite_count") == 0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_norms_of_half_precision_kernels_do_not_overflow(dtype):
  kernel = {"kernel": jnp.full((1024, 1024), 0.5, dtype)}
  tx = optax_boost.scale_by_lars_trust_ratio(trust_coefficient=0.01, eps=0.0)
  updates, state = tx.update(kernel, tx.init(kernel), kernel)
  np.testing.assert_allclose(state.trust_ratio, [0.01], rtol=1e-6)
  assert state.trust_ratio.dtype == jnp.float32
  np.testing.assert_allclose(updates["kernel"].astype(jnp.float32), 0.005, rtol=1e-2)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("of", ["params", "gradients"])
def test_a_layer_with_a_bad_number_is_not_updated_and_is_counted(of, bad):
  good = {"good": jnp.ones((2, 2)), "bad": jnp.ones((2, 2)), "bias": jnp.ones(3)}
  spoilt = good | {"bad": good["bad"].at[0, 1].set(bad), "bias": good["bias"].at[1].set(bad)}
  params, grads = (spoilt, good) if of == "params" else (good, spoilt)
  tx = optax_boost.lars(1.0, weight_decay=0.1)
  updates, state = jax.jit(tx.update)(grads, tx.init(params), params)
  assert not jnp.any(updates["bad"])
  assert jnp.all(updates["good"] < 0)
  # In a leaf of ratio 1, single entries are not updated.
  np.testing.assert_allclose(updates["bias"], [-1.1, 0.0, -1.1], rtol=1e-6)
  assert optax.tree.get(state, "notfinite_count") == 1
  assert optax.tree.get(state, "trust_ratio")[0] == 1
  updates, state = tx.update(good, state, good)
  assert optax.tree.get(state, "notfinite_count") == 1
  chex.assert_tree_all_finite((updates, state))


@pytest.mark.parametrize(
  ("path", "shape", "expected"),
  [
    ("dense/kernel", (3, 4), False),
    ("dense/bias", (4,), True),
    ("attention/query/bias", (2, 4), True),
    ("norm/scale", (4,), True),
    ("batch_norm/gamma", (4,), True),
    ("batch_norm/beta", (1, 1, 1, 4), True),
    ("rescale_net/kernel", (3, 3), False),
    ("vector", (4,), True),
    ("scalar", (), True),
    ("embedding", (10, 4), False),
  ],
)
def test_biases_and_normalizations_are_excluded_by_name_and_rank(path, shape, expected):
  keys = path.split("/")
  tree = jnp.ones(shape)
  for key in reversed(keys):
    tree = {key: tree}
  tree = {"first": tree, "second": {"kernel": jnp.ones((2, 2))}}
  tx = optax_boost.scale_by_lars_trust_ratio(trust_coefficient=0.5)
  _, state = tx.update(tree, tx.init(tree), tree)
  assert (state.trust_ratio[0] == 1) == expected


def test_a_warning_says_that_no_leaf_is_scaled():
  params = {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}
  tx = optax.flatten(optax_boost.lars(0.1))  # hands over one vector, which no layer can be seen in
  with pytest.warns(optax_boost.NoEffectWarning, match="`lars` scales no leaf: `exclude` matches"):
    updates, _ = tx.update(params, tx.init(params), params)
  np.testing.assert_allclose(updates["kernel"], -0.1)  # the step of SGD


def test_the_ratio_of_stacked_layers_is_the_mean_of_their_own_ratios():
  rng = np.random.default_rng(0)
  w, g = (jnp.asarray(rng.normal(size=(4, 3, 3)), jnp.float32) for _ in range(2))
  w *= jnp.array([0.1, 1, 10])[:, None]

  def ratio(w, g, **layers):
    tx = optax_boost.lars(0.1, 1e-2)
    return optax.tree.get(tx.update(g, tx.init(w), w, **layers)[1], "trust_ratio")[0]

  stacked = ratio(w, g, layers=layer_losses.described(w, {"": (1,)}))
  alone = [ratio(w[:, i], g[:, i]) for i in range(3)]
  np.testing.assert_allclose(stacked, np.mean(alone), rtol=1e-5)


def test_the_train_step_passes_layers_to_lars_inside_inject_hyperparams():
  def loss_fn(params, x):
    return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params)[0])

  params = jnp.stack([jnp.eye(3), 4 * jnp.eye(3)])
  after = []
  for factory in (optax_boost.lars, optax.inject_hyperparams(optax_boost.lars)):
    step = optax_boost.make_train_step(loss_fn, factory(learning_rate=1.0), donate=False)
    state, _ = step(step.init(params), jnp.ones((2, 3)))
    after.append(state.params)
  chex.assert_trees_all_close(*after, rtol=1e-6)


def test_nesterov_looks_one_step_ahead():
  params = {"kernel": jnp.ones((2, 2))}
  plain = optax_boost.lars(1.0, momentum=0.9)
  ahead = optax_boost.lars(1.0, momentum=0.9, nesterov=True)
  first, _ = plain.update(params, plain.init(params), params)
  second, _ = ahead.update(params, ahead.init(params), params)
  np.testing.assert_allclose(second["kernel"], 1.9 * first["kernel"], rtol=1e-6)


@pytest.mark.parametrize("axis", ["rows", ("rows",)])
def test_inside_shard_map_norms_run_over_all_shards(axis):
  mesh = meshes.mesh((8,), ("rows",))
  rng = np.random.default_rng(0)
  params = {"kernel": rng.normal(size=(16, 4)).astype(np.float32)}
  grads = {"kernel": rng.normal(size=(16, 4)).astype(np.float32)}
  whole = optax_boost.lars(0.1, 1e-2)
  expected, state = whole.update(grads, whole.init(params), params)
  tx = optax_boost.lars(0.1, 1e-2, axis_name=axis)

  def step(grads, params):
    updates, state = tx.update(grads, tx.init(params), params)
    return updates, optax.tree.get(state, "trust_ratio")

  spec = jax.sharding.PartitionSpec("rows")
  sharded = jax.shard_map(
    step, mesh=mesh, in_specs=(spec, spec), out_specs=(spec, jax.sharding.PartitionSpec())
  )
  updates, ratio = jax.jit(sharded)(grads, params)
  np.testing.assert_allclose(updates["kernel"], expected["kernel"], rtol=1e-5)
  np.testing.assert_allclose(ratio, optax.tree.get(state, "trust_ratio"), rtol=1e-6)
  text = jax.jit(sharded).lower(grads, params).compile().as_text()
  assert "all-gather" not in text


@pytest.mark.parametrize("platform", ["CPU", "GPU"])
def test_mesh_axes_by_pattern_keep_the_norms_of_sharded_layers_separate(monkeypatch, platform):
  if platform == "GPU":
    monkeypatch.setattr(jax.lax, "platform_dependent", as_on_gpus)
  mesh = meshes.mesh((4,), ("x",))
  rng = np.random.default_rng(0)
  shapes = {"layers": (4, 3, 2), "head": (8, 3), "tail": (8, 3)}
  params, grads = (
    {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    for _ in range(2)
  )
  options = {"weight_decay": 0.01, "layers": layer_losses.described(params, {"layers": (0,)})}
  whole = optax_boost.lars(0.1, **options)
  expected, _ = whole.update(grads, whole.init(params), params)
  tx = optax_boost.lars(0.1, axis_name={"head|tail": "x", "layers": ()}, **options)
  spec = jax.sharding.PartitionSpec("x")
  step = jax.shard_map(
    lambda g, p: tx.update(g, tx.init(p), p)[0], mesh=mesh, in_specs=(spec, spec), out_specs=spec
  )
  chex.assert_trees_all_close(jax.jit(step)(grads, params), expected, rtol=1e-5)


def test_the_step_needs_memory_for_the_norms_only():
  shapes = [(256, 256), (512, 128), (3, 3, 64, 64)]
  params = {str(i): jnp.ones(shape) for i, shape in enumerate(shapes)}
  tx = optax_boost.lars(0.1, 1e-4)

  def step(params, state, grads):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  # Not donated: up to jax 0.8.1, XLA copies the donated arrays first on CPUs.
  lowered = jax.jit(step).lower(params, tx.init(params), params)
  assert lowered.compile().memory_analysis().temp_size_in_bytes < 4096


def test_a_callable_mask_under_inject_hyperparams_works_as_a_static_argument():
  params = {"kernel": jnp.ones((2, 2))}
  factory = optax.inject_hyperparams(
    optax_boost.scale_by_lars_trust_ratio, static_args=("exclude",)
  )
  tx = factory(exclude=lambda tree: jax.tree.map(lambda _: True, tree))
  with pytest.warns(optax_boost.NoEffectWarning, match=r"scales no leaf.* The leaves are: kernel"):
    updates, _ = tx.update(params, tx.init(params), params)
  np.testing.assert_array_equal(updates["kernel"], params["kernel"])


def test_a_callable_mask_under_inject_hyperparams_is_never_ignored_silently():
  params = {"kernel": jnp.ones((2, 2))}
  factory = optax.inject_hyperparams(optax_boost.scale_by_lars_trust_ratio)
  for mask in (lambda tree: jax.tree.map(lambda _: True, tree), optax_boost.path_mask("kernel")):
    with (
      pytest.raises(TypeError, match=r"static_args"),
      warnings.catch_warnings(action="ignore"),
    ):
      factory(exclude=mask).init(params)


@pytest.mark.parametrize(
  "rate", [0.02, optax.linear_schedule(0.0, 0.05, 4)], ids=["constant", "warm-up"]
)
def test_a_clipped_ratio_lets_no_layer_step_further_than_the_rate(rate):
  params = {"slow": jnp.ones((2, 2)), "fast": jnp.full((2, 2), 100.0), "zero": jnp.zeros((2, 2))}
  grads = jax.tree.map(jnp.ones_like, params)
  tx = optax_boost.lars(rate, momentum=None, trust_coefficient=0.01, eps=0.0, clip_ratio=True)
  state = tx.init(params)
  for t in range(5):
    updates, state = jax.jit(tx.update)(grads, state, params)
    bound = rate(t) if callable(rate) else rate
    np.testing.assert_allclose(updates["fast"], -min(1.0, bound), rtol=1e-6)
    np.testing.assert_allclose(updates["slow"], -min(0.01, bound), rtol=1e-6)
    np.testing.assert_allclose(updates["zero"], -bound, rtol=1e-6)


def test_a_pattern_without_effect_warns_once():
  params = {"kernel": jnp.ones((2, 2))}
  tx = optax_boost.lars(0.1, exclude="bias")
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    state = tx.init(params)
    for _ in range(3):
      _, state = tx.update(params, state, params)
    jax.jit(tx.update)(params, state, params)
  assert sorted(str(w.message).split("`")[1] for w in caught) == ["exclude"]


def test_small_steps_of_float16_gradients_reach_float32_params():
  params = {"kernel": jnp.full((2, 2), 1e-3)}
  grads = {"kernel": jnp.full((2, 2), 1.0, jnp.float16)}
  tx = optax_boost.lars(1.0, trust_coefficient=1e-5, eps=0.0)
  updates, _ = tx.update(grads, tx.init(params), params)
  # In float16 it is 0. On an H100 it is off by 4e-5, though all of its program is in float32.
  np.testing.assert_allclose(updates["kernel"], -1e-8, rtol=1e-4)


@pytest.mark.parametrize("form", ["numbers", "arrays", "injected"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_momentum_of_half_precision_is_computed_in_float32_and_rounded_once(dtype, form):
  """In bfloat16 a momentum of 0.999 is 1."""
  numbers = {"learning_rate": 0.3, "momentum": 0.999, "weight_decay": 1e-3}
  given = numbers if form == "numbers" else {k: jnp.float32(v) for k, v in numbers.items()}
  factory = optax_boost.lars
  if form == "injected":
    factory = optax.inject_hyperparams(factory, hyperparam_dtype=jnp.float32)
  tx = factory(**given, trust_coefficient=0.02)
  rng = np.random.default_rng(0)
  params = {"kernel": jnp.asarray(rng.normal(size=(16, 8)), dtype)}
  grads = jnp.asarray(rng.normal(size=(4, 16, 8)), dtype)

  @jax.jit
  def train(params):
    def body(state, g):
      updates, state = tx.update({"kernel": g}, state, params)
      return state, (updates["kernel"], optax.tree.get(state, "trace")["kernel"])

    return jax.lax.scan(body, tx.init(params), grads)[1]

  updates, momenta = train(params)
  assert updates.dtype == momenta.dtype == dtype
  np.testing.assert_array_equal(updates, momenta)
  w, m = np.asarray(params["kernel"], np.float64), np.zeros((16, 8))
  limits = jnp.finfo(dtype)
  for g, found in zip(np.asarray(grads, np.float64), np.asarray(updates, np.float64), strict=True):
    norms = [np.linalg.norm(x) for x in (w, g)]
    ratio = 0.02 * norms[0] / (norms[1] + 1e-3 * norms[0])
    summands = np.stack([0.999 * m, -0.3 * ratio * (g + 1e-3 * w)])
    rounding = limits.eps / 2 * abs(summands.sum(0)) + limits.smallest_subnormal / 2
    in_float32 = 16 * np.finfo(np.float32).eps * abs(summands).sum(0)
    assert (abs(found - summands.sum(0)) <= rounding + in_float32).all()
    m = found


def as_on_gpus(*arguments, cuda, **others):
  """``jax.lax.platform_dependent`` with the program for NVIDIA's chips."""
  del others
  return cuda(*arguments)


def small_and_large_leaves():
  shapes = {f"small_{i}/kernel": (16, 8) for i in range(5)}
  shapes |= {
    "w0/kernel": (3, 8),
    "w1/kernel": (3, 8),
    "large/kernel": (128, 64),
    "layers/kernel": (3, 16, 8),
    "z/bias": (8,),
    "a/bias": (8,),
  }
  rng = np.random.default_rng(0)
  params = {k: rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}
  grads = {k: rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}
  params["w0/kernel"] = np.zeros((3, 8), np.float32)
  grads["small_2/kernel"][0, 0] = np.inf
  return params, grads


@pytest.mark.parametrize("clip_ratio", [False, True])
def test_small_leaves_worked_on_together_take_the_same_steps(monkeypatch, clip_ratio):
  params, grads = small_and_large_leaves()
  tx = optax_boost.lars(
    0.1,
    0.1,
    clip_ratio=clip_ratio,
    weight_decay_mask=["small_[01]", "w1"],
    layers=layer_losses.described(params, {"layers/kernel": (0,)}),
  )
  state = tx.init(params)
  apart = tx.update(grads, state, params)
  monkeypatch.setattr(jax.lax, "platform_dependent", as_on_gpus)
  together = tx.update(grads, state, params)
  chex.assert_trees_all_close(together, apart, rtol=1e-6)
  assert optax.tree.get(apart, "notfinite_count") == 1


def test_on_gpus_a_thousand_small_leaves_need_one_reduction(monkeypatch):
  params = {f"{i:03d}": jax.ShapeDtypeStruct((10, 16), jnp.float32) for i in range(30)}
  tx = optax_boost.lars(0.1)
  monkeypatch.setattr(jax.lax, "platform_dependent", as_on_gpus)
  program = jax.make_jaxpr(tx.update)(params, jax.eval_shape(tx.init, params), params)
  text = str(program)
  assert text.count("reduce_sum[") == 1


# JAX knows `pcast` for about as long as XLA for CPUs joins all-reduces.
@pytest.mark.skipif(not hasattr(jax.lax, "pcast"), reason="older XLA keeps all-reduces apart")
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_on_gpus_small_sharded_leaves_are_not_gathered(monkeypatch, kind):
  monkeypatch.setattr(jax.lax, "platform_dependent", as_on_gpus)
  mesh = meshes.mesh((8,), ("x",), kind)
  trees = small_and_large_leaves()
  tx = optax_boost.lars(0.1, 0.1)
  expected, _ = tx.update(trees[1], tx.init(trees[0]), trees[0])

  def place(x):
    spec = jax.sharding.PartitionSpec(*[None] * (x.ndim - 1), "x")
    return jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))

  with jax.set_mesh(mesh):
    params, grads = jax.tree.map(place, trees)
    compiled = jax.jit(tx.update).lower(grads, tx.init(params), params).compile()
    updates, _ = compiled(grads, tx.init(params), params)
  chex.assert_trees_all_close(jax.device_get(updates), expected, rtol=1e-5)
  text = compiled.as_text()
  assert "all-gather" not in text
  assert text.count(" all-reduce(") == 1


@pytest.mark.parametrize("platform", ["CPU", "GPU"])
def test_stacked_layers_may_be_sharded_on_an_explicit_mesh(monkeypatch, platform):
  if platform == "GPU":
    monkeypatch.setattr(jax.lax, "platform_dependent", as_on_gpus)
  mesh = meshes.mesh((2, 2), ("x", "y"), "Explicit")
  kernels = jnp.sin(jnp.arange(4.0 * 2 * 3 * 4)).reshape(4, 2, 3, 4)
  params, grads = {"a": kernels, "b": kernels + 1}, {"a": kernels - 1, "b": kernels}
  tx = optax_boost.lars(0.1, layers=layer_losses.described(params, {"a": (0, 1), "b": (0, 1)}))
  expected, state = tx.update(grads, tx.init(params), params)
  with jax.set_mesh(mesh):
    spec = jax.sharding.PartitionSpec("x", "y")
    params, grads = jax.device_put(params, spec), jax.device_put(grads, spec)
    updates, after = jax.jit(tx.update)(grads, tx.init(params), params)
  chex.assert_trees_all_close(
    jax.device_get((updates, after)), jax.device_get((expected, state)), rtol=1e-5
  )
  assert updates["a"].sharding.is_equivalent_to(params["a"].sharding, 4)


def test_derivatives_of_a_step_equal_the_derivatives_of_its_formula():
  """With respect to the initial params, as in meta-learning; a layer of zeros has ratio 1."""
  rng = np.random.default_rng(0)
  kernels = {"hidden": rng.normal(size=(3, 4)), "zeros": np.zeros((4, 2))}
  gradients = {name: rng.normal(size=x.shape) for name, x in kernels.items()}
  params, grads = (jax.tree.map(jnp.float32, tree) for tree in (kernels, gradients))
  tx = optax_boost.lars(0.1, trust_coefficient=0.5, weight_decay=0.01, momentum=0.0)

  def total(params):
    updates, _ = tx.update(grads, tx.init(params), params)
    return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(optax.apply_updates(params, updates)))

  def formula(hidden):
    w, g = np.linalg.norm(hidden), np.linalg.norm(gradients["hidden"])
    ratio = 0.5 * w / (g + 0.01 * w + 1e-8)
    return np.sum(np.sin(hidden - 0.1 * ratio * (gradients["hidden"] + 0.01 * hidden)))

  nudges = 1e-6 * np.eye(12).reshape(12, 3, 4)
  slopes = [formula(kernels["hidden"] + d) - formula(kernels["hidden"] - d) for d in nudges]
  found = jax.jit(jax.grad(total))(params)
  np.testing.assert_allclose(np.ravel(found["hidden"]), np.divide(slopes, 2e-6), rtol=1e-4)
  moved = 0.1 * gradients["zeros"]
  np.testing.assert_allclose(found["zeros"], np.cos(moved) * (1 - 0.1 * 0.01), rtol=1e-5)
  chex.assert_tree_all_finite(jax.jit(jax.hessian(total))(params))


def test_no_cache_keeps_arrays_of_the_trace_of_a_loss():
  step = optax_boost.make_train_step(
    lambda params, x: jnp.mean((x @ params["kernel"]) ** 2), optax_boost.lars(0.1)
  )
  with jax.checking_leaks():
    step(step.init({"kernel": jnp.eye(3)}), jnp.ones((2, 3)))

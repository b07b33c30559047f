"""Gradient centralization against MindSpore's recorded run, and against NumPy."""

import functools
import json
import pathlib
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
from tests import closeness, meshes

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
# With every operation rounded up or down at random: 2.3 ulps at most.
ULPS = 4
RNG = np.random.default_rng(0)


def gradient(*shape):
  return RNG.normal(size=shape).astype(np.float32)


def centralized(grads, **kwargs):
  tx = optax_boost.centralize(**kwargs)
  return tx.update(grads, tx.init(grads))[0]


def recorded():
  with np.load(GOLDEN / "centralization.npz") as file:
    arrays = {key: file[key] for key in file.files}
  names = [key.removeprefix("init_") for key in arrays if key.startswith("init_")]
  return arrays, names


def terms_of(grad):
  """The summed magnitudes of the terms of a centralized gradient."""
  sizes = np.abs(np.float64(grad))
  return sizes + sizes.mean(axis=tuple(range(1, grad.ndim)), keepdims=True)


def test_agrees_with_mindspore_for_the_leaves_that_mindspore_centralizes():
  arrays, names = recorded()
  for name in names:
    grad = arrays[f"grad_{name}"][0]
    if grad.ndim >= 2 and grad.shape[1] % 16 == 0:
      found = centralized({name: jnp.asarray(grad)}, layout="torch")[name]
      closeness.assert_within_ulps(found, arrays[f"gc_{name}"], terms_of(grad), ULPS)


def test_centralizes_the_leaves_that_mindspore_leaves_out_silently():
  arrays, _ = recorded()
  for name in ("conv_first_weight", "dense_odd_weight"):
    grad = arrays[f"grad_{name}"][0]
    np.testing.assert_array_equal(arrays[f"gc_{name}"], grad)
    found = centralized({name: jnp.asarray(grad)}, layout="torch")[name]
    mean = grad.mean(axis=tuple(range(1, grad.ndim)), dtype=np.float64, keepdims=True)
    closeness.assert_within_ulps(found, grad - mean, terms_of(grad), ULPS)


def test_decay_after_centralization_is_not_centralized():
  params = {"kernel": jnp.full((4, 2), 3.0)}
  before = optax.chain(optax.add_decayed_weights(0.1), optax_boost.centralize())
  after = optax.chain(optax_boost.centralize(), optax.add_decayed_weights(0.1))
  zero = jax.tree.map(jnp.zeros_like, params)
  first, _ = before.update(zero, before.init(params), params)
  second, _ = after.update(zero, after.init(params), params)
  np.testing.assert_allclose(first["kernel"], 0.0, atol=1e-7)
  np.testing.assert_allclose(second["kernel"], 0.3, rtol=1e-6)


def test_selects_the_same_leaves_as_mindspore():
  with open(GOLDEN / "centralization_groups.json", encoding="utf-8") as file:
    groups = json.load(file)["output_groups"]
  # The reference's names and its torch-like layout; its 16 input features as in the file. The
  # dense layer `gamma_like` is excluded there for its name alone, and centralized here.
  shapes = {
    "conv1": {"weight": (8, 3, 3, 3)},
    "bn1": {"gamma": (8,), "beta": (8,)},
    "dw": {"weight": (8, 1, 3, 3)},
    "conv2": {"weight": (8, 16, 3, 3), "bias": (8,)},
    "fc1": {"weight": (16, 32), "bias": (16,)},
    "gamma_like": {"weight": (16, 16), "bias": (16,)},
    "head": {"weight": (4, 16), "multiplier": (), "bias": (4,)},
  }
  grads = jax.tree.map(lambda s: gradient(*s), shapes, is_leaf=lambda s: isinstance(s, tuple))
  updates = centralized(grads, layout="torch")
  changed = {
    f"{layer}.{name}"
    for layer, leaves in grads.items()
    for name, leaf in leaves.items()
    if not np.array_equal(leaf, updates[layer][name])
  }
  assert changed == set(groups[0]["params"]) | {"gamma_like.weight"}


@pytest.mark.parametrize(
  ("path", "shape", "axes"),
  [
    ("dense/kernel", (6, 4), (0,)),
    ("conv/kernel", (3, 3, 5, 4), (0, 1, 2)),
    ("conv1d/kernel", (3, 5, 4), (0, 1)),
    ("attention/query/kernel", (6, 2, 3), (0,)),
    ("attention/value/kernel", (6, 2, 3), (0,)),
    ("attention/out/kernel", (2, 3, 6), (0, 1)),
    ("general/kernel", (2, 3, 6), (0, 1)),
    ("depthwise/kernel", (3, 3, 1, 4), None),
    ("depthwise/kernel", (3, 1, 4), None),
    ("embed/embedding", (10, 4), None),
    ("position_embedding", (10, 4), None),
    ("embedding/weight", (10, 4), None),
    ("batch_norm/beta", (1, 1, 1, 4), None),
    ("dense/bias", (4,), None),
    ("attention/query/bias", (2, 3), None),
    ("norm/scale", (4,), None),
    ("temperature", (), None),
    ("one_input/kernel", (1, 4), None),
    ("one_entry/kernel", (1, 1), None),
    ("pointwise/kernel", (1, 1, 5, 4), (0, 1, 2)),
  ],
)
def test_averages_over_the_fan_in_of_flax_layers(path, shape, axes):
  grad = gradient(*shape)
  tree = grad
  for key in reversed(path.split("/")):
    tree = {key: tree}
  tx = optax_boost.centralize()
  (found,) = jax.tree.leaves(tx.update(tree, optax.EmptyState())[0])
  expected = grad if axes is None else grad - np.mean(grad, axes, keepdims=True)
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_a_normalized_head_is_left_alone():
  grads = {"head": {"kernel": gradient(6, 4), "multiplier": gradient()}, "kernel": gradient(6, 4)}
  updates = centralized(grads)
  np.testing.assert_array_equal(updates["head"]["kernel"], grads["head"]["kernel"])
  assert not np.array_equal(updates["kernel"], grads["kernel"])


def einsums(params, x):
  """Projections as in Flax's gemma, and experts with two kernels each."""
  queries = jnp.einsum("td,ndh->tnh", x, params["attention"]["q_einsum"])
  keys, values = jnp.einsum("td,sndh->stnh", x, params["attention"]["kv_einsum"])
  mixed = jax.nn.softmax(jnp.einsum("tnh,snh->nts", queries, keys)) @ values.swapaxes(0, 1)
  y = jnp.einsum("nth,nhd->td", mixed, params["attention"]["o_einsum"])
  hidden = jnp.tanh(jnp.einsum("etd,edf->etf", jnp.stack([y, y]), params["experts"]["up"]))
  out = jnp.einsum(
    "etf,efd->etd", hidden + params["experts"]["b"][:, None], params["experts"]["down"]
  )
  return jnp.sum(out * params["experts"]["gate"])


einsums_gradient = jax.jit(jax.grad(einsums))

EINSUMS = {
  "attention": {"q_einsum": (2, 6, 3), "kv_einsum": (2, 2, 6, 3), "o_einsum": (2, 3, 6)},
  "experts": {"up": (2, 6, 4), "b": (2, 4), "gate": (2, 5, 6), "down": (2, 4, 6)},
}
FAN_INS = {"q_einsum": 1, "kv_einsum": 2, "o_einsum": (0, 1), "up": 1, "down": 1}


@pytest.mark.parametrize("passed_to", ["factory", "update"])
def test_the_fan_in_is_the_axes_that_the_loss_sums_over(passed_to):
  grads = jax.tree.map(lambda s: gradient(*s), EINSUMS, is_leaf=lambda s: isinstance(s, tuple))
  layers = optax_boost.layer_axes(einsums, grads, gradient(5, 6))
  tx = optax_boost.centralize(**({"layers": layers} if passed_to == "factory" else {}))
  extra = {"layers": layers} if passed_to == "update" else {}
  updates, _ = tx.update(grads, tx.init(grads), **extra)
  for module, gradients in grads.items():
    for name, g in gradients.items():
      mean = np.mean(g, FAN_INS[name], keepdims=True) if name in FAN_INS else 0
      np.testing.assert_allclose(updates[module][name], g - mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("inside", ["chain", "loss scale", "accumulation"])
def test_in_the_train_step_the_fan_in_needs_no_argument(inside):
  """Einsum kernels and stacked experts of any name."""
  params = jax.tree.map(lambda s: gradient(*s), EINSUMS, is_leaf=lambda s: isinstance(s, tuple))
  x = gradient(5, 6)
  tx = optax.chain(optax_boost.centralize(), optax.sgd(1.0))
  tx = {
    "chain": tx,
    "loss scale": optax_boost.dynamic_loss_scale(tx, 8.0),
    "accumulation": optax_boost.accumulate(tx, 1),
  }[inside]
  step = optax_boost.make_train_step(einsums, tx, donate=False)
  state, _ = step(step.init(params), x)
  for module, gradients in jax.device_get(einsums_gradient(params, x)).items():
    for name, g in gradients.items():
      mean = np.mean(g, FAN_INS[name], keepdims=True) if name in FAN_INS else 0
      moved = params[module][name] - np.asarray(state.params[module][name])
      closeness.assert_within_ulps(
        moved, g - mean, np.abs(g).max() + np.abs(params[module][name]), 32
      )


def test_convolutions_are_distinguished_by_their_groups():
  shapes = {"gray": (3, 3, 1, 4), "depthwise": (3, 3, 1, 4), "grouped": (3, 3, 2, 4)}
  grads = {name: gradient(*shape) for name, shape in shapes.items()}

  def loss_fn(params, x):
    for name, groups in (("gray", 1), ("depthwise", 4), ("grouped", 2)):
      numbers = ("NHWC", "HWIO", "NHWC")
      x = jax.lax.conv_general_dilated(
        x, params[name], (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=groups
      )
    return jnp.sum(x)

  layers = optax_boost.layer_axes(loss_fn, grads, jnp.ones((2, 6, 6, 1)))
  updates = centralized(grads, layers=layers)
  np.testing.assert_array_equal(updates.pop("depthwise"), grads["depthwise"])
  for update in updates.values():
    np.testing.assert_allclose(np.mean(update, (0, 1, 2)), 0, atol=1e-6)
  grouped = centralized(grads, layers=layers, exclude="grouped")["grouped"]
  np.testing.assert_array_equal(grouped, grads["grouped"])


def test_masked_trees_select_leaves_by_their_paths():
  grads = {"a": gradient(6, 2, 3), "b": gradient(2, 6, 3)}

  def loss_fn(params, x):
    return jnp.einsum("td,dnh->", x, params["a"]) + jnp.einsum("td,ndh->", x, params["b"])

  layers = optax_boost.layer_axes(loss_fn, grads, gradient(5, 6))
  tx = optax.masked(optax_boost.centralize(), {"a": False, "b": True})
  updates, _ = tx.update(grads, tx.init(grads), grads, layers=layers)
  np.testing.assert_array_equal(updates["a"], grads["a"])
  np.testing.assert_allclose(np.mean(updates["b"], 1), 0, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_means_of_half_precision_gradients_are_taken_in_float32(dtype):
  grad = np.full((4096, 2), 60, jnp.dtype(dtype))
  grad[0] = 0
  found = centralized({"kernel": grad})["kernel"]
  assert found.dtype == grad.dtype
  wide = np.asarray(grad, np.float64)
  # Rounding of the result alone: a float16 sum of these would be infinite.
  np.testing.assert_allclose(
    found.astype(jnp.float32), wide - wide.mean(0), rtol=2 * jnp.finfo(dtype).eps, atol=1e-3
  )


def test_inside_shard_map_the_mean_runs_over_all_shards_of_the_fan_in():
  mesh = meshes.mesh((8,), ("rows",))
  grads = {"kernel": gradient(16, 4)}
  tx = optax_boost.centralize(axis_name="rows")
  spec = jax.sharding.PartitionSpec("rows")
  step = jax.shard_map(
    lambda g: tx.update(g, optax.EmptyState())[0], mesh=mesh, in_specs=spec, out_specs=spec
  )
  found = jax.jit(step)(grads)
  np.testing.assert_allclose(found["kernel"], centralized(grads)["kernel"], rtol=1e-5, atol=1e-6)


def test_mesh_axes_by_pattern_keep_the_means_of_sharded_outputs_separate():
  mesh = meshes.mesh((2,), ("x",))
  grads = {"up": {"kernel": gradient(3, 4)}, "down": {"kernel": gradient(4, 3)}}
  columns, rows = jax.sharding.PartitionSpec(None, "x"), jax.sharding.PartitionSpec("x")
  specs = {"up": {"kernel": columns}, "down": {"kernel": rows}}
  tx = optax_boost.centralize(axis_name={"down": ("x",)})
  step = jax.shard_map(
    lambda g: tx.update(g, optax.EmptyState())[0], mesh=mesh, in_specs=(specs,), out_specs=specs
  )
  chex.assert_trees_all_close(jax.jit(step)(grads), centralized(grads), rtol=1e-5, atol=1e-6)
  with pytest.raises(ValueError, match=r"given axis_name=.*'x'.*, but no such axis is bound"):
    tx.update(grads, optax.EmptyState())


def test_a_tree_without_kernels_warns():
  with pytest.warns(optax_boost.NoEffectWarning, match="finds no kernel .* leaves are: bias"):
    optax_boost.centralize().init({"bias": jnp.ones(3)})
  params = {"kernel": jnp.ones((3, 2))}
  with pytest.warns(optax_boost.NoEffectWarning, match="finds no kernel .* leaves are: kernel"):
    optax_boost.centralize(exclude="kernel").init(params)


def convolution(params, batch, groups=1):
  """A convolution on grey images, or a depthwise one, by a kernel of (3, 3, 1, 4)."""
  images = jnp.broadcast_to(batch, (2, 6, 6, groups))
  numbers = ("NHWC", "HWIO", "NHWC")
  return jnp.sum(
    jax.lax.conv_general_dilated(
      images,
      params["conv"]["kernel"],
      (1, 1),
      "SAME",
      dimension_numbers=numbers,
      feature_group_count=groups,
    )
    ** 2
  )


def lookup(params, batch):
  rows = params["conv"]["kernel"].reshape(9, 4)[jnp.int32(batch[:, 0, 0, 0])]
  return jnp.sum(rows * batch[:, 0, 0])


@pytest.mark.parametrize("loss", ["grey", "depthwise", "lookup"])
def test_the_traced_loss_decides_whether_there_is_a_kernel(loss):
  """A kernel on grey images looks like a depthwise one; only of that a warning is true."""
  loss_fn = lookup if loss == "lookup" else functools.partial(convolution, groups=1)
  loss_fn = functools.partial(convolution, groups=4) if loss == "depthwise" else loss_fn
  params = {"conv": {"kernel": gradient(3, 3, 1, 4)}}
  batch = jnp.asarray(gradient(2, 6, 6, 1))
  step = optax_boost.make_train_step(
    loss_fn, optax.chain(optax_boost.centralize(), optax.sgd(1.0)), donate=False
  )
  state = step.init(params)
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    after, _ = step(state, batch)
    # Once is enough.
    step(after, batch[:1])
  assert [w.category for w in caught] == [optax_boost.NoEffectWarning] * (loss != "grey")
  moved = after.params["conv"]["kernel"] - params["conv"]["kernel"]
  is_centred = np.allclose(np.mean(moved, (0, 1, 2)), 0, atol=1e-6 * np.abs(moved).max())
  assert is_centred == (loss == "grey")


def test_in_a_loop_without_a_train_step_the_first_update_warns_once():
  params = {"conv": {"kernel": gradient(3, 3, 1, 4)}}
  tx = optax_boost.centralize()
  state = tx.init(params)
  with pytest.warns(optax_boost.NoEffectWarning, match=r"no kernel .* are: conv/kernel\."):
    tx.update(params, state)
  tx.update(params, state)


@pytest.mark.parametrize("source", ["noise", "table"])
def test_a_kernel_whose_input_is_made_without_data_is_centralized(source):
  """Diffusion times that the loss draws, and a table that it closes over."""
  times = gradient(16, 6)
  shapes = {"trunk": (5, 8), "time": (6, 8), "head": (8, 3)}
  params = {name: gradient(*shape) for name, shape in shapes.items()}
  x = gradient(16, 5)

  def loss_fn(params, x, key):
    rows = jax.random.uniform(key, (16, 6)) if source == "noise" else times
    hidden = jnp.tanh(x @ params["trunk"] + jnp.tanh(rows @ params["time"]))
    return jnp.mean((hidden @ params["head"]) ** 2)

  tx = optax.chain(optax_boost.centralize(), optax.sgd(1.0))
  step = optax_boost.make_train_step(loss_fn, tx, donate=False)
  state, _ = step(step.init(params), x, jax.random.key(0))
  for name, before in params.items():
    moved = state.params[name] - before
    assert np.abs(moved).max() > 1e-3
    np.testing.assert_allclose(np.mean(moved, 0), 0, atol=1e-6)


def test_a_bad_gradient_spoils_one_output_only():
  grad = gradient(6, 3)
  grad[2, 1] = np.nan
  found = np.asarray(centralized({"kernel": grad})["kernel"])
  assert np.all(np.isnan(found[:, 1]))
  assert np.all(np.isfinite(found[:, [0, 2]]))

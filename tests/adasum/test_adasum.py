"""AdaSum: the Horovod traces, any number of replicas, its collectives, and what it refuses."""

import functools
import math
import pathlib
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_boost
from optax_boost._methods._adasum import _pairs
from tests import closeness, meshes

# The traces are met within 0.9 ulps of the summed magnitudes of their terms.
ULPS = 4
GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
P = jax.sharding.PartitionSpec
SHAPES = {"bias": (5,), "conv": (3, 2, 4), "dense": (33, 7), "scalar": ()}
# Entries of a leaf in the tests of the rule itself, which thus share a program for each number of
# replicas.
LENGTH = 147


def pair(a, b):
  """The rule of the paper in float64."""
  dot = np.sum(a * b)
  parts = []
  for x in (a, b):
    square = np.sum(x * x)
    parts.append(x * (1 - dot / (2 * square) if square > 0 else 1))
  return parts[0] + parts[1]


def tree_of_pairs(rows):
  """The binary tree, neighbours first, walked with vectors in float64."""
  nodes = [np.asarray(row, np.float64) for row in rows]
  while len(nodes) > 1:
    odd = nodes[len(nodes) // 2 * 2 :]
    nodes = [pair(a, b) for a, b in zip(nodes[::2], nodes[1::2], strict=False)] + odd
  return nodes[0]


def gradients(replicas, shapes=SHAPES, seed=0, dtype=np.float32):
  """Gradients that have something in common, with the replicas along a first axis."""
  rng = np.random.default_rng(seed)

  def leaf(shape):
    return (rng.normal(size=shape) + 0.7 * rng.normal(size=(replicas, *shape))).astype(dtype)

  return {name: leaf(shape) for name, shape in shapes.items()}


def norm(*xs):
  return math.sqrt(sum(np.sum(np.square(np.float64(x))) for x in xs))


def mesh_of(*sizes, names=("replicas", "near")):
  return meshes.mesh(sizes, names[: len(sizes)])


TX = optax_boost.adasum("replicas")


@functools.cache
def compiled_update(tx, mesh, axes, in_specs, out_specs):
  """One update, compiled once for all tests that make it."""

  def one(grads):
    grads = jax.tree.map(lambda g: g[0], grads)
    updates, state = tx.update(grads, tx.init(grads))
    return jax.tree.map(lambda u: u[None], updates), state

  specs = {"in_specs": in_specs or P(axes), "out_specs": out_specs or (P(axes), P())}
  return jax.jit(jax.shard_map(one, mesh=mesh, check_vma=False, **specs))


def on_devices(tx, stacked, mesh=None, axes="replicas", in_specs=None, out_specs=None):
  """Runs one update; returns what each replica got, stacked, and the state, as NumPy arrays."""
  mesh = mesh or mesh_of(len(jax.tree.leaves(stacked)[0]))
  return jax.device_get(compiled_update(tx, mesh, axes, in_specs, out_specs)(stacked))


def replica(tree, index=0):
  return jax.tree.map(lambda x: np.asarray(x)[index], tree)


def reduced(rows):
  """The adaptive sum of rows on one device, as a NumPy array."""
  return np.asarray(optax_boost.adasum_reduce(rows))


def terms_of(stacked):
  """The summed magnitudes of the replicas' values, which are the terms of AdaSum's result."""
  return np.abs(np.asarray(stacked, np.float64)).sum(0)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_agrees_with_horovod_leaf_by_leaf(ranks):
  with np.load(GOLDEN / f"adasum_{ranks}ranks.npz") as trace:
    stacked, expected = {}, {}
    for dtype in ("float16", "float32"):
      stacked[dtype] = [trace[f"in{i}"].astype(dtype) for i in range(5)]
      expected[dtype] = [trace[f"{dtype}_out{i}"] for i in range(5)]
    for case in ("orthogonal", "identical", "parallel", "some_zero", "all_zero", "opposite"):
      stacked["float32"].append(np.float32(trace[f"{case}_in"]))
      expected["float32"].append(trace[f"float32_{case}_out"])
  updates, _ = on_devices(TX, stacked)
  for dtype, leaves in replica(updates).items():
    for found, want, one in zip(leaves, expected[dtype], stacked[dtype], strict=True):
      assert found.dtype == dtype
      closeness.assert_within_ulps(found, want, terms_of(one), ULPS)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_agrees_with_horovod_in_float64_and_as_one_vector(ranks):
  with np.load(GOLDEN / f"adasum_{ranks}ranks.npz") as trace, jax.enable_x64(True):
    stacked = [trace[f"in{i}"] for i in range(5)]
    twice = {"alone": stacked, "together": stacked}
    found = optax_boost.adasum_reduce(twice, groups="together")
    for i, leaf in enumerate(found["alone"]):
      closeness.assert_within_ulps(leaf, trace[f"float64_out{i}"], terms_of(stacked[i]), ULPS)
    joined, terms = (
      np.concatenate([np.ravel(leaf) for leaf in leaves])
      for leaves in (found["together"], map(terms_of, stacked))
    )
    closeness.assert_within_ulps(joined, trace["float64_flat_out"], terms, ULPS)


@pytest.mark.parametrize("replicas", [1, 3, 5, 8])
def test_any_number_of_replicas_is_the_tree_of_pairs_and_all_get_the_same_bits(replicas):
  stacked = gradients(replicas)
  stacked["same"] = np.repeat(gradients(1)["dense"], replicas, axis=0)
  orthogonal = np.linalg.qr(np.random.default_rng(0).normal(size=(40, replicas)))[0].T
  stacked["orthogonal"] = np.float32(orthogonal * np.arange(1, replicas + 1)[:, None])
  updates, state = on_devices(TX, stacked)
  for name, rows in stacked.items():
    expected = tree_of_pairs(rows)
    scale = np.abs(rows).max()
    np.testing.assert_allclose(updates[name][0], expected, rtol=1e-5, atol=1e-5 * scale)
    for r in range(1, replicas):
      np.testing.assert_array_equal(updates[name][r], updates[name][0])
  np.testing.assert_allclose(updates["same"][0], stacked["same"][0], rtol=1e-6)
  np.testing.assert_allclose(updates["orthogonal"][0], stacked["orthogonal"].sum(0), atol=2e-6)
  if replicas == 1:
    chex.assert_trees_all_equal(updates, stacked)
  before = sum(np.sum(np.square(rows, dtype=np.float64)) for rows in stacked.values())
  after = sum(np.sum(np.square(tree_of_pairs(rows))) for rows in stacked.values())
  np.testing.assert_allclose(state.orthogonality, after / before, rtol=1e-5)
  assert state.notfinite_count == 0


def test_one_device_and_vmap_agree_with_many_devices():
  stacked = gradients(3)
  expected = replica(on_devices(TX, stacked)[0])
  close = functools.partial(chex.assert_trees_all_close, rtol=1e-5, atol=1e-5)
  close(optax_boost.adasum_reduce(stacked), expected)
  mapped, _ = jax.jit(jax.vmap(lambda g: TX.update(g, TX.init(g)), axis_name="replicas"))(stacked)
  close(replica(mapped, 2), expected)


def test_a_pair_is_the_rule_of_the_paper_and_zero_is_neutral():
  a, b = gradients(2, {"w": (LENGTH,)})["w"]
  zero = np.zeros_like(a)
  found = reduced(np.stack([a, b]))
  np.testing.assert_allclose(found, pair(*np.float64([a, b])), rtol=0, atol=1e-6 * norm(a, b))
  for rows, expected in (([a, zero], a), ([zero, a], a), ([zero, zero], zero)):
    np.testing.assert_array_equal(reduced(np.stack(rows)), expected)
  rows = jax.ShapeDtypeStruct((2, 3), jnp.bfloat16)
  half = jax.eval_shape(optax_boost.adasum_reduce, rows)
  assert half.dtype == jnp.bfloat16


@pytest.mark.parametrize("replicas", [2, 3, 4, 8])
def test_the_error_is_below_1e_4_if_gradients_cancel_tenfold(replicas):
  rng = np.random.default_rng(replicas)
  for size in (3, LENGTH) * 20:
    magnitude = 10.0 ** rng.uniform(-28, 28)
    common, *own = rng.normal(size=(replicas + 1, LENGTH)) * (np.arange(LENGTH) < size)
    # Parallel parts that cancel to a tenth of their norms, beside parts that stay.
    signs = np.array([1.0, -0.9, *rng.choice([0.05, -0.05], size=replicas - 2)])
    rows = (magnitude * (signs[:, None] * common + 0.05 * np.array(own))).astype(np.float32)
    want = tree_of_pairs(rows / magnitude)
    found = np.float64(reduced(rows)) / magnitude
    tenth = sum(map(np.linalg.norm, rows / magnitude)) / 10
    assert norm(found - want) <= 1e-4 * max(norm(want), tenth)


@pytest.mark.parametrize(
  ("replicas", "dtype"),
  [(2, jnp.float32), (3, jnp.float32), (8, jnp.float32), (3, jnp.bfloat16)],
)
def test_identical_gradients_come_back_from_1e_minus_30_to_1e30(replicas, dtype):
  row = np.random.default_rng(0).uniform(1, 2, size=LENGTH)
  for exponent in range(-30, 31, 6):
    rows = np.tile(row * 10.0**exponent, (replicas, 1)).astype(dtype)
    found, want = np.float64(reduced(rows)), np.float64(rows[0])
    np.testing.assert_allclose(found, want, rtol=8 * float(jnp.finfo(dtype).eps))


def test_half_precision_gradients_are_rounded_after_the_last_level_only():
  rows = gradients(3, {"w": (LENGTH,)})["w"].astype(jnp.bfloat16)
  found, want = reduced(rows), reduced(rows.astype(np.float32)).astype(jnp.bfloat16)
  # Sums in another order may tip a rounding.
  assert np.mean(found == want) > 0.98


@pytest.mark.parametrize(
  "factors", [[1e-9, 3e8, -1e7, 1e-9], [1.0, -2.0, 0.5, 4.0], [1.0, -0.9, 0.5, -0.4]]
)
def test_parallel_gradients_are_averaged_whatever_their_norms(factors):
  direction = np.random.default_rng(0).normal(size=LENGTH).astype(np.float32)
  rows = np.float32(factors)[:, None] * direction
  error = np.abs(reduced(rows) - np.mean(factors) * np.float64(direction)).max()
  assert error <= 1e-4 * np.abs(rows).sum(axis=0).max() / len(factors)


@pytest.mark.parametrize("where", ["stacked", "on devices"])
def test_parallel_gradients_that_cancel_at_most_tenfold_are_averaged(where):
  """The draws of Horovod's `test_parallel`, whose tree may cancel far more on its way."""
  draws = []
  for seed in range(40):
    factors = np.random.RandomState(seed).normal(0, 1, (8, 1))
    if np.abs(factors.sum()) >= np.abs(factors).sum() / 10:
      draws.append((factors @ np.ones((1, 147))).astype(np.float32))
  # As leaves of one tree they have coefficients each.
  stacked = dict(enumerate(draws))
  if where == "stacked":
    found = optax_boost.adasum_reduce(stacked)
  else:
    found = replica(on_devices(TX, stacked)[0])
  assert len(draws) > 30
  for i, rows in stacked.items():
    mean = rows.mean(axis=0, dtype=np.float64)
    np.testing.assert_allclose(found[i], mean, rtol=2e-5, atol=0)


@pytest.mark.parametrize(
  "magnitudes",
  [
    [1, 1e-19, 1, 1],
    [1e-19, 1],
    [1e-30, 1e30],
    [1e30, 1e-30, 1e30],
    [1, 1e-35, 1e-33, 1e-36],
    # Not smaller: jaxlib 0.12 takes subnormal numbers, which occur in sums of replicas of 1e-36,
    # as zero.
    [1e-34] * 3,
    [3e36, 1e-36, 3e36],
  ],
)
@pytest.mark.parametrize("kind", ["parallel", "of their own"])
def test_replicas_of_any_magnitude_have_the_inner_products_of_float64(magnitudes, kind):
  """A gradient 1e-19 of the largest is not zero, nor are its coefficients those of zero."""
  rng = np.random.default_rng(0)
  common = rng.uniform(0.5, 1, size=LENGTH)
  own = rng.normal(size=(len(magnitudes), LENGTH)) if kind == "of their own" else 0
  rows = (np.array(magnitudes)[:, None] * (common + 0.3 * own)).astype(np.float32)
  want = tree_of_pairs(rows)
  for found in (reduced(rows), on_devices(TX, rows)[0][0]):
    np.testing.assert_allclose(np.float64(found), want, rtol=1e-5, atol=1e-6 * np.abs(want).max())


def test_a_node_that_cancels_exactly_counts_as_zero_and_no_other():
  a, b = np.random.default_rng(0).normal(size=(2, LENGTH)).astype(np.float32)
  np.testing.assert_array_equal(reduced(np.stack([a, -a])), 0 * a)
  exact = reduced(np.stack([a, -a, b, b]))
  np.testing.assert_allclose(exact, b, rtol=1e-6)
  # What is left of the large entries' sum is small, and has a direction all the same.
  large, small = np.eye(2, LENGTH, dtype=np.float32) * np.array([[1], [1e-20]], np.float32)
  rows = np.stack([large + small, small - large, small, small])
  np.testing.assert_allclose(reduced(rows), tree_of_pairs(rows), rtol=1e-5)
  # A node that cancels to a part c of its summands costs 1 / c of the rounding errors.
  for part in (2.0**-6, 2.0**-12):
    rows = np.stack([a, -a * np.float32(1 - part), a + b, a + b])
    error = norm(reduced(rows) - tree_of_pairs(rows))
    assert error <= 2.0**-22 / part * norm(a)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_numbers_are_scaled_by_powers_of_two_to_the_last_bit(dtype, x64):
  lowest, highest = np.finfo(dtype).minexp, np.finfo(dtype).maxexp - 1
  before = np.array([lowest, lowest, -1, 0, highest, highest])
  after = np.array([lowest, highest, 5, -3, lowest + 1, highest])
  x = np.ldexp(np.array([-1.75], dtype), before)
  np.testing.assert_array_equal(_pairs.scale(x, after - before), np.ldexp(x, after - before))
  assert not np.any(_pairs.scale(np.zeros(2, dtype), np.array([-3 * highest, 3 * highest])))
  np.testing.assert_array_equal(_pairs.exponent(-x), np.frexp(x)[1])


def test_large_and_small_leaves_keep_their_range_on_devices_in_groups_and_nodes():
  same = {"big": np.full((4, 9), 1e30), "small": np.full((4, 5), 1e-30), "zero": np.zeros((4, 3))}
  same = jax.tree.map(np.float32, same)
  same["bfloat16"] = np.full((4, 4), 1e30, jnp.bfloat16)
  same["float16"] = np.full((4, 4), 3e4, np.float16)
  for kwargs, mesh, axes in (
    ({}, mesh_of(4), "replicas"),
    (
      {"groups": "big|bfloat16|zero", "local_axis_name": "near"},
      mesh_of(2, 2),
      ("replicas", "near"),
    ),
  ):
    tx = optax_boost.adasum("replicas", **kwargs)
    found, state = on_devices(tx, same, mesh, axes)
    for path, want in replica(same).items():
      rtol = 8 * float(jnp.finfo(want.dtype).eps)
      np.testing.assert_allclose(np.float64(found[path][3]), np.float64(want), rtol=rtol)
    np.testing.assert_allclose(state.orthogonality, 1 / mesh.shape["replicas"], rtol=1e-5)


def test_the_mean_of_a_node_does_not_overflow_and_keeps_small_float16_numbers():
  """Sums of two would overflow in float32 and bfloat16; the least float16 has no half."""
  same = {
    "bfloat16": np.full((4, 3), 3e38, jnp.bfloat16),
    "float16": np.full((4, 3), 2.0**-24, np.float16),
    "float32": np.full((4, 3), 3e38, np.float32),
  }
  tx = optax_boost.adasum("replicas", local_axis_name="near")
  found, _ = on_devices(tx, same, mesh_of(2, 2), ("replicas", "near"))
  for path, leaf in same.items():
    np.testing.assert_array_equal(np.float64(found[path]), np.float64(leaf), err_msg=path)


def test_sharded_leaves_have_one_scale_and_the_inner_products_of_the_whole():
  extreme = np.tile(np.float32([1e30, 1e30, 1e-20, 3e-20]), (2, 1))
  stacked = {"extreme": extreme, "w": gradients(2, {"w": (16, 6)})["w"]}
  tx = optax_boost.adasum("replicas", shard_axis_name="near")
  specs = {"in_specs": P("replicas", "near"), "out_specs": (P("replicas", "near"), P())}
  found, _ = on_devices(tx, stacked, mesh_of(2, 4), **specs)
  np.testing.assert_array_equal(found["extreme"], extreme)
  np.testing.assert_allclose(found["w"][0], tree_of_pairs(stacked["w"]), rtol=1e-4, atol=1e-5)


def test_leaves_of_several_dtypes_keep_them_in_one_tree():
  with jax.enable_x64(True):
    stacked = gradients(3, dtype=np.float64)
    mixed = {
      name: rows.astype(jnp.dtype(dtype))
      for (name, rows), dtype in zip(
        stacked.items(), ("float64", "bfloat16", "float32", "bfloat16"), strict=True
      )
    }
    found, _ = on_devices(TX, mixed)
    for name, rows in mixed.items():
      assert found[name].dtype == rows.dtype
      expected = tree_of_pairs(np.asarray(rows, np.float64))
      rtol = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 1e-2}[rows.dtype.name]
      np.testing.assert_allclose(np.float64(found[name][0]), expected, rtol=rtol, atol=rtol)


def test_long_leaves_are_cut_into_blocks_that_add_up():
  stacked = gradients(3, {"long": (100_003,), "short": (11,), "next": (20_000,)})
  found, _ = on_devices(TX, stacked)
  for name, rows in stacked.items():
    np.testing.assert_allclose(found[name][0], tree_of_pairs(rows), rtol=1e-4, atol=1e-5)


def test_groups_share_coefficients():
  stacked = {"a": gradients(4), "b": gradients(4, seed=1)}
  found = optax_boost.adasum_reduce(stacked, groups=("a/bias|a/dense", "b"))

  def joined(tree, names):
    return np.concatenate([np.reshape(tree[name], (4, -1)) for name in names], axis=1)

  expected = tree_of_pairs(joined(stacked["a"], ["bias", "dense"]))
  np.testing.assert_allclose(found["a"]["bias"], expected[:5], rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(np.ravel(found["a"]["dense"]), expected[5:], rtol=1e-4, atol=1e-5)
  expected = tree_of_pairs(stacked["a"]["conv"])
  np.testing.assert_allclose(found["a"]["conv"], expected, rtol=1e-4, atol=1e-5)
  names = sorted(SHAPES)
  expected = tree_of_pairs(joined(stacked["b"], names))
  whole = np.concatenate([np.ravel(found["b"][name]) for name in names])
  np.testing.assert_allclose(whole, expected, rtol=1e-4, atol=1e-5)
  many, _ = on_devices(optax_boost.adasum("replicas", groups=("a/bias|a/dense", "b")), stacked)
  chex.assert_trees_all_close(replica(many), found, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sizes", [(2, 4), (3, 2), (1, 3), (3, 1)])
def test_hierarchy_is_a_mean_inside_a_node_and_the_tree_across(sizes):
  stacked = gradients(sizes[0] * sizes[1])
  tx = optax_boost.adasum("replicas", local_axis_name="near")
  axes = (("replicas", "near"),)
  found, _ = on_devices(tx, stacked, mesh_of(*sizes), *axes)
  for name, rows in stacked.items():
    nodes = rows.reshape(*sizes, *rows.shape[1:]).mean(axis=1)
    scale = np.abs(rows).max()
    expected = tree_of_pairs(nodes)
    np.testing.assert_allclose(found[name][0], expected, rtol=1e-5, atol=1e-5 * scale)
    for row in found[name][1:]:
      np.testing.assert_array_equal(row, found[name][0])


def test_two_axes_together_count_as_one():
  stacked = gradients(6)
  tx = optax_boost.adasum(("replicas", "near"))
  found, _ = on_devices(tx, stacked, mesh_of(3, 2), ("replicas", "near"))
  expected = jax.tree.map(tree_of_pairs, stacked)
  chex.assert_trees_all_close(replica(found), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_leaf_that_is_not_finite_somewhere_is_nan_everywhere_and_the_others_are_good(bad):
  stacked = gradients(3)
  good = optax_boost.adasum_reduce(stacked)
  stacked["dense"][1, 3, 1] = bad
  found, state = on_devices(TX, stacked)
  assert np.all(np.isnan(found.pop("dense")))
  good.pop("dense")
  chex.assert_trees_all_close(replica(found), good, rtol=1e-5, atol=1e-5)
  assert state.notfinite_count == 1
  assert np.all(np.isnan(optax_boost.adasum_reduce(stacked)["dense"]))


def compiled(shapes, replicas, tx=None, **kwargs):
  tx = tx or optax_boost.adasum("replicas")
  mesh = kwargs.pop("mesh", None) or mesh_of(replicas)

  def one(grads):
    return tx.update(grads, tx.init(grads))[0]

  step = jax.shard_map(one, mesh=mesh, in_specs=P(mesh.axis_names), out_specs=P(), **kwargs)
  abstract = [jax.ShapeDtypeStruct((mesh.size * s[0], *s[1:]), jnp.float32) for s in shapes]
  return jax.jit(step).lower(abstract).compile()


def collectives(program):
  kinds = r"all-to-all|all-reduce|all-gather|reduce-scatter|collective-permute"
  return sorted(re.findall(rf" ({kinds})(?:-start)?\(", program.as_text()))


@pytest.mark.parametrize(
  ("replicas", "shapes"),
  [(2, [(31, 7)]), (7, [(100, 100)] * 30), (8, [(1_000_000,)]), (8, [(1000, 50)] * 20)],
  ids=["one small leaf", "30 leaves", "one large leaf", "20 large leaves"],
)
def test_a_small_all_reduce_per_level_and_two_copies_for_any_number_of_leaves(replicas, shapes):
  program = compiled(shapes, replicas)
  levels = math.ceil(math.log2(replicas))
  small = ["all-reduce"] * (1 + levels)
  assert collectives(program) == ["all-gather", *small, "all-to-all"]
  size = 4 * sum(map(math.prod, shapes))
  # The tables of blocks and the sums take some kilobytes.
  assert program.memory_analysis().temp_size_in_bytes <= 2.02 * size + 2**14


def test_hierarchy_adds_one_collective():
  tx = optax_boost.adasum("replicas", local_axis_name="near")
  program = compiled([(31, 7)] * 3, 8, tx, mesh=mesh_of(4, 2))
  # A scatter, besides those of four replicas.
  assert len(collectives(program)) == 1 + 5


def test_gradients_that_shard_map_has_summed_already_are_refused():
  tx = optax_boost.adasum("replicas")

  def one(params, x):
    grads = jax.grad(lambda p: jnp.sum(p["w"] * x))(params)
    return tx.update(grads, tx.init(params))[0]

  step = jax.shard_map(one, mesh=mesh_of(2), in_specs=(P(), P("replicas")), out_specs=P())
  message = r"differ along the axis 'replicas'; .* to='varying'\).*pass `check_vma=False`"
  with pytest.raises(ValueError, match=message):
    step({"w": jnp.ones(3)}, jnp.ones((2, 3)))


def test_a_sum_replaces_a_gather_whose_result_cannot_be_declared_equal_on_all_devices(monkeypatch):
  stacked = gradients(3)
  expected, _ = on_devices(TX, stacked)
  gather = jax.lax.all_gather

  def all_gather_before_jax_0_10(x, axis_name, *, tiled):
    return gather(x, axis_name, tiled=tiled)

  def one(grads):
    return TX.update(jax.tree.map(lambda g: g[0], grads), TX.init(grads))[0]

  monkeypatch.setattr(jax.lax, "all_gather", all_gather_before_jax_0_10)
  # The check is on, and takes `P()` only of what it knows to be the same.
  step = jax.shard_map(one, mesh=mesh_of(3), in_specs=P("replicas"), out_specs=P())
  chex.assert_trees_all_equal(jax.jit(step)(stacked), replica(expected))


def test_a_replicated_leaf_may_be_in_the_tree():
  tx = optax_boost.adasum("replicas")

  def one(x):
    grads = {"alike": jnp.ones(3), "own": x[0]}
    return tx.update(grads, tx.init(grads))[0]

  step = jax.shard_map(one, mesh=mesh_of(2), in_specs=P("replicas"), out_specs=P())
  found = jax.jit(step)(jnp.eye(2))
  np.testing.assert_array_equal(found["alike"], jnp.ones(3))
  np.testing.assert_array_equal(found["own"], jnp.ones(2))


def test_an_axis_that_is_not_bound_is_named():
  tx = optax_boost.adasum("replicas")
  grads = {"w": jnp.ones(3)}
  with pytest.raises(ValueError, match=r"axis_name='replicas', but .* leave `adasum` out"):
    tx.update(grads, tx.init(grads))
  for argument in ("local_axis_name", "shard_axis_name"):
    more = optax_boost.adasum("replicas", **{argument: "other"})
    with pytest.raises(
      ValueError, match=rf"given {argument}='other', but .* leave `{argument}` out"
    ):
      on_devices(more, gradients(2))


def test_leaves_without_an_axis_of_replicas_are_refused():
  message = r"of one length; got shape \(3, 2\) for the leaf 'b' and \(2, 2\) for 'a'"
  with pytest.raises(ValueError, match=message):
    optax_boost.adasum_reduce({"a": jnp.ones((2, 2)), "b": jnp.ones((3, 2))})
  with pytest.raises(ValueError, match=r"got shape \(\) for the leaf 'params'"):
    optax_boost.adasum_reduce(jnp.ones(()))


def test_a_repeated_or_missing_axis_is_refused():
  with pytest.raises(ValueError, match=r"different axes for its three arguments; got .*'near'"):
    optax_boost.adasum("near", local_axis_name="near")
  with pytest.raises(TypeError, match=r"`axis_name` must be the name of a mesh axis, .* got \(\)"):
    optax_boost.adasum(())


def test_groups_without_effect_warn():
  params = {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}
  with pytest.warns(optax_boost.NoEffectWarning, match=r"`groups` has patterns .* \['gain'"):
    optax_boost.adasum("r", groups=("gain",)).init(params)


def test_gradients_that_vmap_does_not_map_are_averaged_as_identical_ones():
  grads = {"w": np.arange(3, dtype=np.float32), "half": np.ones(4, np.float16)}
  for tree in (grads, {"half": grads["half"]}):

    def update(x, tree=tree):
      updates, state = TX.update(tree, TX.init(tree))
      return updates, state, x

    updates, state, _ = jax.jit(jax.vmap(update, axis_name="replicas"))(np.zeros(2, np.float32))
    for r in range(2):
      chex.assert_trees_all_equal(replica(updates, r), tree)
    np.testing.assert_allclose(state.orthogonality, 0.5)


def test_it_runs_on_a_mesh_with_explicit_axes_eager_and_jitted():
  mesh = meshes.mesh((2,), ("replicas",), "Explicit")
  stacked = {"w": gradients(2)["dense"]}
  expected = tree_of_pairs(stacked["w"])
  tx = optax_boost.adasum("replicas")
  with jax.set_mesh(mesh):
    placed = jax.device_put(stacked, jax.NamedSharding(mesh, P("replicas")))
    step = jax.shard_map(
      lambda g: tx.update(jax.tree.map(lambda x: x[0], g), tx.init(g))[0],
      in_specs=P("replicas"),
      out_specs=P(),
    )
    for run in (step, jax.jit(step)):
      np.testing.assert_allclose(run(placed)["w"], expected, rtol=1e-5, atol=1e-5)

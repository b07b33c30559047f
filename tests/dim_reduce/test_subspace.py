"""The fitted subspace against MindSpore's recorded PCA and NumPy's SVD."""

import collections
import functools
import pathlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
from optax_boost._methods._dim_reduce import _groups, _pca
from tests import closeness, meshes, products
from tests.dim_reduce.test_dim_reduce import exchanged

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "pca.npz"
SHAPES = {"conv": (3, 2, 8), "dense": (4, 8), "bias": (8,), "scale": ()}
ENTRIES = sum(int(np.prod(shape)) for shape in SHAPES.values())


def tree(matrix, dtype=np.float32):
  """Cuts the columns of a matrix into leaves, one snapshot to each first index."""
  leaves, start = {}, 0
  for name, shape in SHAPES.items():
    size = int(np.prod(shape))
    leaves[name] = matrix[:, start : start + size].reshape(-1, *shape).astype(dtype)
    start += size
  return leaves


def flat(rows):
  """The inverse of `tree`, in float64."""
  parts = [np.asarray(rows[name], np.float64) for name in SHAPES]
  return np.concatenate([x.reshape(len(x), -1) for x in parts], axis=1)


def listed(rows):
  return [jax.tree.map(lambda x, i=i: x[i], rows) for i in range(len(jax.tree.leaves(rows)[0]))]


def walk(count=14, seed=0):
  """Snapshots of a random walk with a drift, far from the origin: like weights while training."""
  rng = np.random.default_rng(seed)
  drift = rng.normal(size=(3, ENTRIES)) * np.array([1.0, 0.3, 0.1])[:, None]
  t = np.linspace(0, 1, count)[:, None]
  way = t * drift[0] + t**2 * drift[1] + np.sin(5 * t) * drift[2]
  noise = 0.01 * rng.normal(size=(count, ENTRIES)).cumsum(axis=0)
  return tree(rng.normal(size=ENTRIES) * 5 + way + noise)


def reference(rows, k):
  """Mean, components, explained variance and its ratio, by NumPy in float64."""
  data = flat(rows)
  centred = data - data.mean(axis=0)
  _, singular, right = np.linalg.svd(centred, full_matrices=False)
  variance = singular**2 / (len(data) - 1)
  return (
    data.mean(axis=0),
    (right * np.sign(right.sum(axis=1, keepdims=True)))[:k],
    variance[:k],
    variance / variance.sum(),
  )


def assert_fits(subspace, rows, rtol=1e-4):
  k = subspace.components
  mean, components, variance, ratio = reference(rows, k)
  np.testing.assert_allclose(
    flat(jax.tree.map(lambda x: x[None], subspace.mean))[0], mean, rtol=1e-5, atol=1e-6
  )
  np.testing.assert_allclose(flat(subspace.basis), components, atol=rtol)
  np.testing.assert_allclose(subspace.explained_variance, variance, rtol=rtol)
  np.testing.assert_allclose(subspace.explained_variance_ratio, ratio[:k], rtol=rtol)


@pytest.mark.parametrize("case", ["wide", "tall", "wide32"])
def test_exact_components_agree_with_mindspore(x64, case):
  with np.load(GOLDEN) as golden:
    data, expected = golden[f"{case}_data"], golden[f"{case}_components_full"]
    singular = golden[f"{case}_singular_values"]
  k = len(expected)
  subspace = optax_boost.fit_subspace(
    {"w": data.reshape(len(data), 2, -1)}, components=k, dtype=data.dtype
  )
  found = np.asarray(subspace.basis["w"]).reshape(k, -1)
  assert found.dtype == data.dtype
  # A component is as exact as the rows' rounding errors are against its distance from the others in
  # singular values; sums over m snapshots err by sqrt(m). The largest differences are 2.6 and 1.3.
  near = np.abs(singular[:k, None] - np.append(singular, 0))
  gaps = np.sort(near, axis=1)[:, 1:2]
  size = np.sqrt(len(data)) * np.abs(expected).max(axis=1, keepdims=True)
  terms = np.broadcast_to(singular[0] / gaps * size, expected.shape)
  closeness.assert_within_ulps(aligned(found, expected), expected, terms, 6)
  variance = singular[:k] ** 2 / (len(data) - 1)
  terms = np.sqrt(len(data)) * singular[0] * singular[:k] / (len(data) - 1)
  closeness.assert_within_ulps(subspace.explained_variance, variance, terms, 6)


def test_randomized_components_agree_with_mindspore_for_its_random_numbers(x64):
  with np.load(GOLDEN) as golden:
    data, expected = golden["wide_data"], golden["wide_components_randomized"]
    omega = golden["wide_omega"]
  centred = jnp.asarray(data - data.mean(axis=0))
  one = _groups.SubspaceGroups((_groups.LeafGroups((), (0,)),), 1)
  found = _pca.principal_components([centred], len(expected), jnp.asarray(omega), one).rows
  found = np.asarray(found)
  np.testing.assert_allclose(aligned(found, expected), expected, atol=1e-10)


def aligned(rows, expected):
  """Components with the signs of MindSpore's, of which one is as good as the other."""
  return rows * np.sign(np.sum(rows * expected, axis=1, keepdims=True))


@pytest.mark.parametrize("components", [3, 13])
def test_exact_components_agree_with_a_dense_svd(components):
  for seed in range(4):
    rows = walk(seed=seed)
    assert_fits(optax_boost.fit_subspace(rows, components), rows)


def with_spectrum(singular, rows=15, seed=0):
  """Rows that sum to zero with given singular values, and the right singular vectors."""
  rng = np.random.default_rng(seed)
  left = rng.normal(size=(rows, len(singular)))
  left = np.linalg.qr(left - left.mean(axis=0))[0]
  right = np.linalg.qr(rng.normal(size=(ENTRIES, len(singular))))[0].T
  return left * singular @ right, right


@pytest.mark.parametrize(
  ("singular", "components"),
  [
    ([1.0, 1e-1, 1e-2, 1e-3, 3e-4, 1e-4], 6),
    # Variances that differ by less than the Gram matrix's rounding errors, so it mixes directions
    # that are asked for with others. More are computed than are asked for.
    ([1.0, 1e-2, 1e-4, 7e-5, 5e-5], 3),
    ([1.0, 1e-2, 1e-4, 7e-5, 5e-5], 4),
  ],
)
def test_small_components_are_as_exact_as_a_float32_svd_of_the_rows(singular, components):
  """Variances from 1 to 1e-8: the Gram matrix alone can't tell the last from rounding errors."""
  rows, right = with_spectrum(np.array(singular))
  found = optax_boost.fit_subspace(tree(rows), components)
  basis = flat(found.basis)
  np.testing.assert_allclose(basis @ basis.T, np.eye(components), atol=2e-6)
  deviations = np.sqrt(14 * found.explained_variance)
  np.testing.assert_allclose(deviations, singular[:components], rtol=2e-3)
  np.testing.assert_allclose(np.abs(np.sum(basis * right[:components], axis=1)), 1, atol=1e-4)


@pytest.mark.parametrize("key", [None, 0], ids=["exact", "randomized"])
def test_no_product_of_a_fit_has_the_default_precision(key):
  fit = functools.partial(optax_boost.fit_subspace, components=3, key=key)
  assert set(products.precisions(fit, walk())) == {products.HIGHEST}


def test_snapshots_keep_their_digits_around_a_large_mean():
  small, _ = with_spectrum(0.01 * 0.5 ** np.arange(8))
  rows = tree(small + 100.0)
  assert_fits(optax_boost.fit_subspace(rows, 3), rows)


def test_randomized_components_hold_the_variance_that_decays():
  rows, key = walk(count=40), jax.random.key(0)
  found = optax_boost.fit_subspace(rows, 3, key=key)
  _, components, variance, _ = reference(rows, 3)
  cosines = np.linalg.svd(flat(found.basis) @ components.T)[1]
  assert cosines.min() > 0.9999
  np.testing.assert_allclose(found.explained_variance, variance, rtol=1e-3)
  again = optax_boost.fit_subspace(rows, 3, key=key)
  chex.assert_trees_all_equal(again, found)


def on_device(snapshots):
  return jax.tree.map(jnp.asarray, snapshots)


@pytest.mark.parametrize("make", [list, tuple, iter, on_device])
def test_any_iterable_of_trees_is_fitted_as_one_stacked_tree(make):
  found = optax_boost.fit_subspace(make(listed(walk())), 3)
  chex.assert_trees_all_equal(found, optax_boost.fit_subspace(walk(), 3))


@pytest.mark.parametrize(("recorded", "jit"), [(6, True), (20, False)])
def test_the_state_of_a_trajectory_is_fitted_as_its_snapshots_are(recorded, jit):
  tx = optax.chain(optax.sgd(0.1), optax_boost.record_trajectory(every=1, capacity=14))
  points = listed(walk(count=20))[:recorded]
  state, update = tx.init(points[0]), jax.jit(tx.update)
  for params in points:
    _, state = update(params, state, params)

  def fit(state):
    return optax_boost.fit_subspace(state, 3)

  assert_fits((jax.jit(fit) if jit else fit)(state), optax_boost.snapshots(state))


@jax.jit
def jitted(rows):
  return optax_boost.fit_subspace(rows, 3)


def test_inside_jit_snapshots_that_are_not_finite_are_left_out():
  rows = walk()
  bad = rows | {"bias": rows["bias"].copy()}
  bad["bias"][0], bad["bias"][5, 2] = np.nan, np.inf
  keep = np.array([i for i in range(14) if i not in (0, 5)])
  assert_fits(jitted(bad), jax.tree.map(lambda x: x[keep], rows))


def repeated(*kept):
  """Fourteen snapshots of which only some are different."""
  return jax.tree.map(lambda x: x[np.resize(kept, 14)], walk())


def test_inside_jit_directions_that_are_not_there_are_zero():
  found = jitted(repeated(0, 4, 9))
  assert (np.asarray(found.explained_variance) > 0).tolist() == [True, True, False]
  assert flat(found.basis).any(axis=1).tolist() == [True, True, False]
  still = jitted(repeated(3))
  chex.assert_tree_all_finite(still)
  assert not flat(still.basis).any()


def test_a_population_is_fitted_under_vmap():
  members = [walk(seed=seed) for seed in range(2)]
  population = jax.tree.map(lambda *x: np.stack(x), *members)
  found = jax.vmap(lambda rows: optax_boost.fit_subspace(rows, 3))(population)
  assert found.components == 3
  for i, rows in enumerate(members):
    assert_fits(jax.tree.map(lambda x, i=i: x[i], found), rows)


def test_half_precision_is_for_storage_only():
  rows = jax.tree.map(lambda x: x.astype(jnp.bfloat16), walk())
  found = optax_boost.fit_subspace(rows, 3, dtype=jnp.bfloat16)
  assert {x.dtype for x in jax.tree.leaves(found.basis)} == {jnp.dtype(jnp.bfloat16)}
  assert {x.dtype for x in jax.tree.leaves(found._replace(basis=None))} == {jnp.dtype(jnp.float32)}
  assert_fits(found._replace(basis=tree(reference(rows, 3)[1])), rows)
  np.testing.assert_allclose(flat(found.basis), reference(rows, 3)[1], atol=2e-3)


def test_none_and_masked_leaves_are_unchanged():
  rows = walk() | {"none": None, "masked": optax.MaskedNode()}
  found = jax.eval_shape(lambda rows: optax_boost.fit_subspace(rows, 2), rows)
  for part in (found.mean, found.basis):
    assert part["none"] is None
    assert part["masked"] == optax.MaskedNode()
    assert len(jax.tree.leaves(part)) == len(SHAPES)


def place(tree, mesh):
  """Shards the last axes whose lengths eight devices can share."""

  def sharding(x):
    axes = [None] * (x.ndim - 1) + ["x"] if x.ndim and x.shape[-1] % 8 == 0 else []
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))

  return jax.tree.map(lambda x: jax.device_put(x, sharding(x)), tree)


def mesh_of(kind):
  return meshes.mesh((8,), ("x",), kind)


@pytest.mark.parametrize(
  ("kind", "method"), [("Auto", "exact"), ("Explicit", "exact"), ("Explicit", "randomized")]
)
def test_fitting_sharded_snapshots_moves_small_matrices_only(kind, method):
  rng = np.random.default_rng(0)
  m, k, shapes = 6, 2, {"conv": (3, 3, 8, 64), "dense": (64, 128), "bias": (64,)}
  rows = {name: np.float32(rng.normal(size=(m, *shape))) for name, shape in shapes.items()}
  mesh = mesh_of(kind)
  key = jax.random.key(0) if method == "randomized" else None

  def fit(rows):
    return optax_boost.fit_subspace(rows, k, key=key)

  with jax.set_mesh(mesh):
    sharded = place(rows, mesh)
    compiled = jax.jit(fit).lower(sharded).compile()
    found = compiled(sharded)
  seen = exchanged(compiled)
  assert {name for name, _ in seen} == {"all-reduce"}
  # Several sums may share one, but all of them together are less than a leaf.
  assert sum(size for _, size in seen) < min(4608, 8192) / 4
  assert found.basis["dense"].sharding.spec == jax.sharding.PartitionSpec(None, None, "x")
  assert found.mean["dense"].sharding.spec == jax.sharding.PartitionSpec(None, "x")
  data = np.concatenate([x.reshape(m, -1) for x in rows.values()], axis=1)
  _, singular, right = np.linalg.svd(data - data.mean(axis=0), full_matrices=False)
  basis = np.concatenate([np.asarray(found.basis[x]).reshape(k, -1) for x in rows], axis=1)
  np.testing.assert_allclose(found.explained_variance, singular[:k] ** 2 / (m - 1), rtol=1e-4)
  np.testing.assert_allclose(np.abs(np.sum(basis * right[:k], axis=1)), 1, atol=1e-4)


@pytest.mark.parametrize(("kind", "streamed"), [("Auto", False), ("Explicit", True)])
def test_sharded_snapshots_are_fitted_outside_of_jit(kind, streamed):
  rows = walk()
  snapshots = [place(snapshot, mesh_of(kind)) for snapshot in listed(rows)]
  # JAX takes this class of sequences for a leaf.
  found = optax_boost.fit_subspace(collections.UserList(snapshots) if streamed else snapshots, 3)
  assert not found.basis["conv"].sharding.is_fully_replicated
  assert_fits(jax.device_get(found), rows)


class Disk:
  """Snapshots that are made when they are asked for, and what is held meanwhile."""

  def __init__(self, rows):
    self.rows = jax.tree.map(np.asarray, rows)
    self.reads = 0
    self.most = 0

  def __len__(self):
    return len(jax.tree.leaves(self.rows)[0])

  def __getitem__(self, index):
    self.reads += 1
    held = sum(x.nbytes for x in jax.live_arrays() if not x.is_deleted())
    self.most = max(self.most, held)
    return jax.tree.map(lambda x: x[index], self.rows)


@pytest.mark.parametrize("count", [12, 30])
def test_snapshots_that_are_read_again_are_streamed_to_the_exact_fit(count):
  rows = walk(count)
  disk = Disk(rows)
  assert_fits(optax_boost.fit_subspace(disk, 3), rows)
  assert (disk.reads > count) == (count > 11)


def test_the_streamed_fit_holds_few_snapshots_and_reads_them_few_times():
  rng = np.random.default_rng(0)
  count, k = 40, 2
  disk = Disk({"bias": np.float32(rng.normal(size=(count, 50_000)))})
  before = sum(x.nbytes for x in jax.live_arrays())
  found = optax_boost.fit_subspace(disk, k)
  # Three blocks, and the origin and sums of the mean.
  held = (disk.most - before) / (4 * 50_000)
  assert held <= 3 * (k + 8) + 4
  assert disk.reads <= count * (count / (k + 8) + 6)
  mean = disk.rows["bias"].mean(axis=0)
  np.testing.assert_allclose(found.mean["bias"], mean, atol=1e-5)
  singular = np.linalg.svd(disk.rows["bias"] - mean, compute_uv=False)
  np.testing.assert_allclose(found.explained_variance, singular[:k] ** 2 / (count - 1), rtol=1e-4)


def stream(rows, components, **kwargs):
  return optax_boost.fit_subspace(Disk(rows), components, **kwargs)


both = pytest.mark.parametrize("fit", [optax_boost.fit_subspace, stream])


@both
def test_fewer_snapshots_than_components_are_refused(fit):
  rows = jax.tree.map(lambda x: x[:6], walk())
  with pytest.raises(ValueError, match=r"6 components need at least 7 snapshots.* got 6. Record"):
    fit(rows, 6)


def test_a_trajectory_with_too_few_snapshots_is_refused():
  tx = optax_boost.record_trajectory(every=1, capacity=9)
  state = tx.init(jnp.ones(3))
  _, state = tx.update(jnp.ones(3), state, jnp.ones(3))
  with pytest.raises(ValueError, match=r"2 components need at least 3 snapshots, .* got 1"):
    optax_boost.fit_subspace(state, 2)
  with pytest.raises(ValueError, match=r"got 1. Record more snapshots or fit fewer components\.$"):
    optax_boost.fit_subspace(state, 2)
  with pytest.raises(ValueError, match=r"9 components need at least 10 snapshots, .* got 9"):
    jax.jit(lambda state: optax_boost.fit_subspace(state, 9))(state)


@both
def test_more_components_than_entries_are_refused(fit):
  with pytest.raises(ValueError, match=r"3 components need snapshots that differ .* differ in 1"):
    fit({"w": jnp.arange(12.0).reshape(6, 2)}, 3)


@both
@pytest.mark.parametrize(("bad", "shown"), [([0], "0"), ([3], "3"), ([2, 7], "2, 7")])
def test_snapshots_that_are_not_finite_are_refused(fit, bad, shown):
  rows = walk()
  rows["bias"][bad, 1] = np.nan
  with pytest.raises(ValueError, match=rf"at the indices \[{shown}\]. Leave them out"):
    fit(rows, 3)


@both
def test_snapshots_that_differ_in_too_few_directions_are_refused(fit):
  with pytest.raises(ValueError, match=r"3 components .* differ in 2 by more .* fit fewer"):
    fit(repeated(0, 4, 9), 3)
  with pytest.raises(ValueError, match=r"differ in 0 by more .* Take snapshots further apart"):
    fit(repeated(0), 3)


def test_snapshots_of_different_trees_are_refused():
  snapshots = listed(walk())
  fewer = {name: x for name, x in snapshots[3].items() if name != "bias"}
  shorter = snapshots[3] | {"bias": jnp.ones(4)}
  with pytest.raises(ValueError, match=r"one tree .* number 3 has .*'dense': \(4, 8\), .* one"):
    optax_boost.fit_subspace([*snapshots[:3], fewer], 3)
  with pytest.raises(ValueError, match=r"number 3 has {'bias': \(4,\), .* one {'bias': \(8,\)"):
    optax_boost.fit_subspace([*snapshots[:3], shorter], 3)


@pytest.mark.parametrize(
  ("snapshots", "text"),
  [
    ({"a": jnp.ones((2, 3)), "b": jnp.ones((4, 3))}, r"along their first axis; got shapes \[\(2,"),
    ({"a": jnp.ones(())}, r"got shapes \[\(\)\]"),
    (jnp.array([[1e30, 0.0], [-1e30, 1.0], [0.0, 0.0]]), r"finite variance; .* in float32"),
    ([], r"got an empty sequence"),
    ({}, r"at least one leaf; got an empty tree"),
  ],
)
def test_only_snapshots_are_accepted(snapshots, text):
  with pytest.raises(ValueError, match=text):
    optax_boost.fit_subspace(snapshots, 1)


@pytest.mark.parametrize("tx", [optax.sgd(0.1), optax.sgd(0.1, momentum=0.9), optax.adam(0.1)])
def test_an_optimizer_state_without_a_trajectory_is_refused_as_snapshots(tx):
  step = optax_boost.make_train_step(lambda p, b: jnp.sum(p), tx)
  state = step.init(jnp.ones((3, 2)))
  for source in (state, state.opt_state):
    with pytest.raises(ValueError, match=r"`snapshots` must be .* Add `optax_boost.record_traj"):
      optax_boost.fit_subspace(source, 1)


def test_a_leaf_that_is_left_out_of_the_snapshots_is_masked_in_the_optimizer():
  rows = {"w": walk()["bias"], "n": jnp.zeros((14, 3), jnp.int32)}
  with pytest.raises(TypeError, match=r"'n' is int32. Leave it out of the snapshots, and put"):
    optax_boost.fit_subspace(rows, 2)
  subspace = optax_boost.fit_subspace({"w": rows["w"]}, 2)
  tx = optax.masked(optax_boost.dim_reduce(subspace), {"w": True, "n": False})
  tx.init(jax.tree.map(lambda x: x[0], rows))


@pytest.mark.parametrize("snapshots", ["ab", [1.0, 2.0], 3, {"w": "x"}])
def test_snapshots_of_the_wrong_kind_are_refused(snapshots):
  with pytest.raises(TypeError, match=r"`fit_subspace` needs arrays as leaves"):
    optax_boost.fit_subspace(snapshots, 1)


def test_a_loaded_subspace_is_sharded_like_the_params(tmp_path):
  saved = optax_boost.fit_subspace(walk(), 4)
  path = tmp_path / "a"
  saved.save(path)
  assert [entry.name for entry in tmp_path.iterdir()] == ["a"]
  like = place(jax.device_get(saved.mean), mesh_of("Auto"))
  loaded = optax_boost.Subspace.load(path, like)
  chex.assert_trees_all_equal(jax.device_get(loaded), jax.device_get(saved))
  for name, leaf in like.items():
    assert loaded.mean[name].sharding.is_equivalent_to(leaf.sharding, leaf.ndim)
  abstract = jax.eval_shape(lambda: saved.mean)
  chex.assert_trees_all_equal(optax_boost.Subspace.load(path, abstract), saved)


def test_half_precision_is_widened_in_a_file(tmp_path):
  saved = optax_boost.fit_subspace(walk(), 2, dtype=jnp.bfloat16)
  saved.save(tmp_path / "a")
  loaded = optax_boost.Subspace.load(tmp_path / "a", saved.mean)
  wide = jax.tree.map(lambda x: x.astype(jnp.float32), saved.basis)
  chex.assert_trees_all_equal(loaded.basis, wide)


def test_mindspores_matrix_is_read_in_the_order_of_the_leaves(tmp_path):
  rows = np.linalg.qr(np.random.default_rng(0).normal(size=(ENTRIES, 2)))[0].T
  np.save(tmp_path / "pca_mat.npy", rows)
  like = jax.tree.map(lambda x: x[0], walk())
  loaded = optax_boost.Subspace.load(tmp_path / "pca_mat.npy", like)
  columns = [np.asarray(x).reshape(2, -1) for x in jax.tree.leaves(loaded.basis)]
  np.testing.assert_array_equal(np.concatenate(columns, axis=1), np.float32(rows))
  assert np.all(np.isnan(loaded.explained_variance))
  optax_boost.dim_reduce(loaded).init(like)
  with pytest.raises(ValueError, match=rf"each of the {ENTRIES - 1} params; it has shape \(2, "):
    optax_boost.Subspace.load(tmp_path / "pca_mat.npy", like | {"scale": None})


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04 truncated"])
def test_a_file_that_is_damaged_or_of_another_kind_is_refused(tmp_path, content):
  path = tmp_path / "a.npz"
  path.write_bytes(content)
  with pytest.raises(ValueError, match=r"can't read '.*a\.npz': .* Pass its model's params"):
    optax_boost.Subspace.load(path, jnp.zeros(3))
  with pytest.raises(FileNotFoundError):
    optax_boost.Subspace.load(tmp_path / "none", jnp.zeros(3))


def test_params_of_another_model_are_refused(tmp_path):
  saved = optax_boost.fit_subspace(walk(), 2)
  saved.save(tmp_path / "a")
  other = saved.mean | {"bias": jnp.zeros(9)}
  with pytest.raises(ValueError, match=r"has \(2, 8\) at 'basis/bias', and `like` needs \(2, 9\)"):
    optax_boost.Subspace.load(tmp_path / "a", other)

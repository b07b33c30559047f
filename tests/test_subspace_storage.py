"""Subspaces in files: what is read is what was written, or an error."""

import pathlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost


def subspace(dtype=jnp.float32):
  rng = np.random.default_rng(0)

  def tree(*rows, dtype=jnp.float32):
    arrays = {"kernel": rng.normal(size=(*rows, 8, 3)), "bias": rng.normal(size=(*rows, 3))}
    arrays = {name: jnp.asarray(x, dtype) for name, x in arrays.items()}
    return arrays | {"none": None, "masked": optax.MaskedNode()}

  variances = jnp.array([4.0, 3.0, 2.0, 1.0])
  return optax_boost.Subspace(tree(), tree(4, dtype=dtype), variances, variances / 12)


def params():
  return {"kernel": jnp.zeros((8, 3)), "bias": jnp.zeros(3), "none": None} | {
    "masked": optax.MaskedNode()
  }


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_what_is_loaded_is_what_was_saved(tmp_path, dtype):
  saved = subspace(dtype)
  optax_boost.save_subspace(tmp_path / "a.npz", saved)
  loaded = optax_boost.load_subspace(tmp_path / "a.npz", like=params())
  chex.assert_trees_all_equal(loaded, saved)
  chex.assert_trees_all_equal_dtypes(loaded, saved)
  assert loaded.components == 4
  assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]


def test_params_that_are_a_single_leaf(tmp_path):
  saved = optax_boost.Subspace(jnp.ones(5), jnp.eye(2, 5), jnp.ones(2), jnp.full(2, 0.5))
  optax_boost.save_subspace(str(tmp_path / "a"), saved)
  loaded = optax_boost.load_subspace(
    str(tmp_path / "a"), like=jax.ShapeDtypeStruct((5,), jnp.float32)
  )
  chex.assert_trees_all_equal(loaded, saved)


def test_the_loaded_subspace_is_sharded_as_the_params_are(tmp_path):
  saved = subspace()
  optax_boost.save_subspace(tmp_path / "a.npz", saved)
  mesh = jax.make_mesh((8,), ("x",))
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
  like = params() | {"kernel": jax.device_put(jnp.zeros((8, 3)), sharding)}
  loaded = optax_boost.load_subspace(tmp_path / "a.npz", like)
  assert loaded.mean["kernel"].sharding.is_equivalent_to(sharding, 2)
  assert loaded.basis["kernel"].sharding.spec == jax.sharding.PartitionSpec(None, "x")
  chex.assert_trees_all_equal(jax.device_get(loaded), jax.device_get(saved))


REFUSED = r"needs a whole file that `save_subspace` wrote .* truncated, damaged or of another kind"


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_refused(tmp_path, share):
  path = tmp_path / "a.npz"
  optax_boost.save_subspace(path, subspace())
  content = path.read_bytes()
  path.write_bytes(content[: int(share * len(content))])
  with pytest.raises(ValueError, match=REFUSED):
    optax_boost.load_subspace(path, params())


def test_a_file_with_a_changed_number_is_refused(tmp_path):
  optax_boost.save_subspace(tmp_path / "a.npz", subspace())
  with np.load(tmp_path / "a.npz") as file:
    arrays = dict(file)
  arrays["basis/kernel"][0, 0, 0] += 1
  np.savez(tmp_path / "a.npz", **arrays)
  with pytest.raises(ValueError, match=REFUSED + r": its content does not match its checksum"):
    optax_boost.load_subspace(tmp_path / "a.npz", params())


def write_text(path):
  path.write_text("no subspace")


def write_array(path):
  with open(path, "wb") as file:
    np.save(file, np.ones(3))


def write_other_arrays(path):
  np.savez(path, a=np.ones(3))


def write_pickle(path):
  np.savez(path, meta_json=np.array({"format": 1}, dtype=object))


def write_other_version(path):
  np.savez(path, meta_json=np.array('{"format": "optax_boost.subspace", "version": 99}'))


@pytest.mark.parametrize(
  "write", [write_text, write_array, write_other_arrays, write_pickle, write_other_version]
)
def test_a_foreign_file_is_refused(tmp_path, write):
  write(tmp_path / "a.npz")
  with pytest.raises(ValueError, match=REFUSED):
    optax_boost.load_subspace(tmp_path / "a.npz", params())


def test_a_file_that_is_not_there_is_just_not_there(tmp_path):
  with pytest.raises(FileNotFoundError):
    optax_boost.load_subspace(tmp_path / "a.npz", params())


def test_params_of_another_model_are_refused(tmp_path):
  optax_boost.save_subspace(tmp_path / "a.npz", subspace())
  with pytest.raises(ValueError, match=r"at 'kernel' .* has \(8, 3\) and `like` has \(3, 8\)"):
    optax_boost.load_subspace(tmp_path / "a.npz", params() | {"kernel": jnp.zeros((3, 8))})
  with pytest.raises(ValueError, match=r"at 'more' .* has nothing and `like` has \(2,\). Pass the"):
    optax_boost.load_subspace(tmp_path / "a.npz", params() | {"more": jnp.zeros(2)})


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
  path = tmp_path / "a.npz"
  optax_boost.save_subspace(path, subspace())
  before = path.read_bytes()

  def fail(file, **arrays):
    pathlib.Path(file.name).write_bytes(b"half of it")
    raise OSError("disk full")

  monkeypatch.setattr(np, "savez", fail)
  with pytest.raises(OSError, match="disk full"):
    optax_boost.save_subspace(path, subspace(jnp.bfloat16))
  assert path.read_bytes() == before
  assert list(tmp_path.iterdir()) == [path]


def test_saves_nothing_but_subspaces(tmp_path):
  with pytest.raises(TypeError, match=r"needs a Subspace, as `fit_subspace` returns it; got dict"):
    optax_boost.save_subspace(tmp_path / "a.npz", {})

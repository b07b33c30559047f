"""Subspaces in files: what is read is what was written, or an error."""

import errno
import io
import json
import zipfile

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


def test_float64_that_is_rounded_to_float32_warns(tmp_path):
  saved = optax_boost.Subspace(np.ones(5), np.eye(2, 5), np.ones(2), np.full(2, 0.5))
  optax_boost.save_subspace(tmp_path / "a.npz", saved)
  with pytest.warns(
    UserWarning, match=r"rounds the float64 arrays in .*a\.npz to float32: `jax_en"
  ):
    loaded = optax_boost.load_subspace(tmp_path / "a.npz", like=jnp.ones(5))
  assert loaded.mean.dtype == jnp.float32
  jax.config.update("jax_enable_x64", True)
  try:
    loaded = optax_boost.load_subspace(tmp_path / "a.npz", like=jnp.ones(5))
  finally:
    jax.config.update("jax_enable_x64", False)
  assert loaded.mean.dtype == jnp.float64


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
  path, saved = tmp_path / "a.npz", subspace()
  optax_boost.save_subspace(path, saved)
  content = bytearray(path.read_bytes())
  content[content.index(np.asarray(saved.basis["kernel"]).tobytes())] ^= 1
  path.write_bytes(content)
  with pytest.raises(ValueError, match=REFUSED + r": Bad CRC-32 for file 'basis/kernel.npy'"):
    optax_boost.load_subspace(path, params())


def write_text(path):
  path.write_text("no subspace")


def write_array(path):
  with open(path, "wb") as file:
    np.save(file, np.ones(3))


def write_other_arrays(path):
  np.savez(path, a=np.ones(3))


def write_pickle(path):
  np.savez(path, meta_json=np.array({"format": 1}, dtype=object))


def forge(path, change, **meta):
  """A file that is whole, whose arrays and dtypes were changed."""
  optax_boost.save_subspace(path, subspace())
  with np.load(path) as file:
    arrays = dict(file)
  header = json.loads(str(arrays.pop("meta_json")))
  change(arrays, header["dtypes"])
  header |= meta
  np.savez(path, meta_json=np.array(json.dumps(header)), **arrays)


def set_array(name, array, dtype=None):
  def change(arrays, dtypes):
    arrays[name] = np.asarray(array)
    dtypes[name] = dtype or arrays[name].dtype.name

  return change


def drop(name):
  def change(arrays, dtypes):
    del arrays[name], dtypes[name]

  return change


def rewrite(path, change):
  """The same zip file with other bytes or flags for the basis of the kernel."""
  optax_boost.save_subspace(path, subspace())
  with zipfile.ZipFile(path) as old:
    contents = {info.filename: old.read(info) for info in old.infolist()}
  contents["basis/kernel.npy"] = change(contents["basis/kernel.npy"])
  with zipfile.ZipFile(path, "w") as new:
    for name, data in contents.items():
      new.writestr(name, data)


def encrypt(path):
  optax_boost.save_subspace(path, subspace())
  data = bytearray(path.read_bytes())
  for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
    start = data.find(signature)
    while start >= 0:
      data[start + offset] |= 1
      start = data.find(signature, start + 4)
  path.write_bytes(data)


def compress(path):
  np.savez_compressed(path, meta_json=np.zeros(10**6))


def claim(shape, dtype="<f4"):
  """A header that claims a shape, with the bytes of another."""

  def change(data):
    file = io.BytesIO()
    header = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue() + data[-4 * 96 :]

  return change


KERNEL = np.ones((4, 8, 3), np.float32)
FOREIGN = {
  "text": (write_text, ""),
  "array": (write_array, ""),
  "other arrays": (write_other_arrays, "it has no 'meta_json'"),
  "pickle": (write_pickle, "holds Python objects"),
  "version": (lambda p: forge(p, lambda *_: None, version=99), "not that of this format"),
  "deep json": (
    lambda p: np.savez(p, meta_json=np.array("[" * 10**5 + "]" * 10**5)),
    "nested too deeply",
  ),
  "long number": (lambda p: np.savez(p, meta_json=np.array("9" * 5000)), "number of 5000 digits"),
  "json list": (lambda p: np.savez(p, meta_json=np.array("[1]")), "not that of this format"),
  "encrypted": (encrypt, "is encrypted"),
  "compressed": (compress, "is compressed"),
  "1e15 entries": (
    lambda p: rewrite(p, claim((10**15, 8, 3))),
    r"claims shape \(1000000000000000, 8, 3\) of float32, and has 384 bytes",
  ),
  "negative size": (lambda p: rewrite(p, claim((-4, -8, 3))), r"claims shape \(-4, -8, 3\)"),
  "objects": (lambda p: rewrite(p, claim((96,), "|O")), "holds Python objects"),
  "no header": (lambda p: rewrite(p, lambda data: b"PK"), ""),
  "nan": (
    lambda p: forge(p, set_array("basis/kernel", KERNEL * np.nan)),
    "'basis/kernel' holds numbers that are not finite",
  ),
  "integers": (
    lambda p: forge(p, set_array("basis/kernel", KERNEL.astype(np.int32))),
    "'basis/kernel' is of dtype 'int32', which is no floating dtype",
  ),
  "false dtype": (
    lambda p: forge(p, set_array("basis/kernel", KERNEL.astype(np.int32), "float32")),
    "'basis/kernel' is stored as int32, not as float32",
  ),
  "basis shape": (
    lambda p: forge(p, set_array("basis/kernel", KERNEL[:, :7])),
    r"'basis/kernel' has shape \(4, 7, 3\), and 'mean/kernel' \(8, 3\) with 4 components",
  ),
  "variance shape": (
    lambda p: forge(p, set_array("explained_variance/", np.float32(1))),
    r"its variances have shapes \[\(\), \(4,\)\]",
  ),
  "missing": (lambda p: forge(p, drop("basis/bias")), "its arrays are"),
  "dtypes": (lambda p: forge(p, lambda *_: None, dtypes=[1]), "its 'dtypes' are not those of"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_or_forged_file_is_refused_by_name(tmp_path, name):
  write, reason = FOREIGN[name]
  write(tmp_path / "a.npz")
  with pytest.raises(ValueError, match=rf"{REFUSED}.*{reason}") as error:
    optax_boost.load_subspace(tmp_path / "a.npz", params())
  assert str(tmp_path / "a.npz") in str(error.value)


def test_a_directory_is_no_file(tmp_path):
  with pytest.raises(ValueError, match=rf"needs a file; {tmp_path} is a directory"):
    optax_boost.load_subspace(tmp_path, params())


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
    file.write(b"half of it")
    file.flush()
    # A reader, or a kill, at this point.
    assert path.read_bytes() == before
    raise OSError(errno.ENOSPC, "No space left on device")

  monkeypatch.setattr(np, "savez", fail)
  with pytest.raises(OSError, match=rf"No space left on device: '{path}'"):
    optax_boost.save_subspace(path, subspace(jnp.bfloat16))
  assert path.read_bytes() == before
  assert list(tmp_path.iterdir()) == [path]


def test_the_target_of_a_symbolic_link_is_replaced_not_the_link(tmp_path):
  (tmp_path / "data").mkdir()
  link = tmp_path / "link.npz"
  link.symlink_to(tmp_path / "data" / "a.npz")
  optax_boost.save_subspace(link, subspace())
  assert link.is_symlink()
  loaded = optax_boost.load_subspace(tmp_path / "data" / "a.npz", params())
  chex.assert_trees_all_equal(loaded, subspace())


def test_arrays_in_fortran_order_and_of_other_byte_order_come_back(tmp_path):
  saved = subspace()
  kernel = np.asfortranarray(np.asarray(saved.mean["kernel"]).astype(">f4"))
  other = saved._replace(mean=saved.mean | {"kernel": kernel})
  optax_boost.save_subspace(tmp_path / "a.npz", other)
  chex.assert_trees_all_equal(optax_boost.load_subspace(tmp_path / "a.npz", params()), saved)


@pytest.mark.parametrize(
  ("change", "error", "text"),
  [
    (
      lambda s: {},
      TypeError,
      r"`subspace` must be a Subspace, as `fit_subspace` returns it; got {}",
    ),
    (
      lambda s: s._replace(mean=s.mean | {"bias": np.array([1, None, 2])}),
      TypeError,
      r"real floating-point arrays; got object at 'mean/bias'",
    ),
    (
      lambda s: s._replace(basis=s.basis | {"bias": jnp.ones((4, 3), jnp.int32)}),
      TypeError,
      r"real floating-point arrays; got int32 at 'basis/bias'",
    ),
    (
      lambda s: s._replace(basis=s.basis | {"bias": jnp.full((4, 3), jnp.nan)}),
      ValueError,
      r"'basis/bias' holds numbers that are not finite",
    ),
    (
      lambda s: s._replace(basis=s.basis | {"bias": jnp.ones((4, 2))}),
      ValueError,
      r"'basis/bias' has shape \(4, 2\), and 'mean/bias' \(3,\) with 4 components",
    ),
    (
      lambda s: s._replace(mean={"a": {"b": jnp.ones(2)}, "a/b": jnp.ones(2)}),
      ValueError,
      r"leaves of different paths without null characters; got 'mean/a/b'",
    ),
  ],
)
def test_saves_nothing_that_it_would_refuse_to_load(tmp_path, change, error, text):
  with pytest.raises(error, match=text):
    optax_boost.save_subspace(tmp_path / "a.npz", change(subspace()))
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", [3, None, b"a", "", "a\0b"])
def test_refuses_paths_that_are_none(path):
  with pytest.raises((TypeError, ValueError), match=r"`path` must be a path"):
    optax_boost.save_subspace(path, subspace())
  with pytest.raises((TypeError, ValueError), match=r"`path` must be a path"):
    optax_boost.load_subspace(path, params())
  with pytest.raises(TypeError, match=r"`like` must be a tree of arrays or abstract values; got a"):
    optax_boost.load_subspace("a.npz", {"w": "x"})

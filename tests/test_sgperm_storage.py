"""Models in files of a seed and integers, loaded again to the last bit."""

import functools
import json
import pathlib
import subprocess
import sys

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost


def initial(seed):
  """Random weights, sparse ones with zeros of both signs, random signs, a bias, and others."""
  rng = np.random.default_rng(seed)
  params = {
    "bias": rng.normal(size=9),
    "dense": rng.normal(size=(4, 5, 7)),
    "half": rng.normal(size=(600, 2)).astype(jnp.bfloat16),
    "none": np.zeros((0, 3)),
    "scalar": np.float32(0.5),
    "signs": rng.choice([-0.3, 0.3], (64, 32)),
    "sparse": rng.normal(size=(40, 30)) * (rng.random((40, 30)) < 0.2),
  }
  return {
    name: jnp.asarray(x, jnp.bfloat16 if name == "half" else jnp.float32)
    for name, x in params.items()
  }


def small(seed):
  """Two of them, whose steps compile soon."""
  return {name: initial(seed)[name] for name in ("bias", "dense")}


def trained(tx, steps=3, init=small):
  """Params after some steps, and the state."""
  params = init(7)
  state = tx.init(params)

  @jax.jit
  def step(grads, state, params):
    updates, state = tx.update(grads, state, params)
    return optax_boost.apply_permuted_params(params, updates, state), state

  for t in range(steps):
    grads = {
      name: jnp.asarray(np.sin(3.0 * np.arange(p.size) + t).reshape(p.shape), p.dtype)
      for name, p in params.items()
    }
    params, state = step(grads, state, params)
  return params, state


def assert_same_bits(ours, theirs):
  for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@functools.cache
def one_model():
  return trained(optax_boost.laperm(optax.adam(0.3), sync_every=1), init=initial)


def test_a_model_is_loaded_to_the_last_bit(tmp_path):
  params, state = one_model()
  assert all(np.any(params[name] != initial(7)[name]) for name in ("half", "signs", "sparse"))
  optax_boost.save_permuted_params(tmp_path / "model.npz", (state, optax.EmptyState()), seed=7)
  assert [path.name for path in tmp_path.iterdir()] == ["model.npz"]
  assert_same_bits(optax_boost.load_permuted_params(tmp_path / "model.npz", initial), params)


@pytest.mark.parametrize(
  "tx",
  [
    optax_boost.laperm(optax.adam(0.3), sync_every=1, layout="torch"),
    optax_boost.sgperm(alpha=1.0, method="rank", key=0),
  ],
)
def test_so_is_one_of_another_layout_or_method(tx, tmp_path):
  params, state = trained(tx)
  assert np.any(params["dense"] != small(7)["dense"])
  optax_boost.save_permuted_params(tmp_path / "model.npz", state, seed=7)
  assert_same_bits(optax_boost.load_permuted_params(tmp_path / "model.npz", small), params)


def test_a_fresh_process_loads_the_same_bits_and_leaves_that_trained_freely(tmp_path):
  tx = optax_boost.laperm(optax.adam(0.3), sync_every=2, exclude="bias$")
  params, state = trained(tx)
  path = tmp_path / "model.npz"
  optax_boost.save_permuted_params(str(path), state, 7, params)
  code = """
import sys
import numpy as np
import optax_boost
from tests import test_sgperm_storage
loaded = optax_boost.load_permuted_params(sys.argv[1], test_sgperm_storage.small)
sys.stdout.write("".join(np.asarray(leaf).tobytes().hex() for leaf in loaded.values()))
"""
  result = subprocess.run(
    [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
  )
  saved = optax_boost.permuted_params(state, params)
  assert result.stdout == "".join(np.asarray(saved[k]).tobytes().hex() for k in sorted(saved))
  # The last of three steps was free: only what is excluded keeps it.
  assert np.any(saved["dense"] != params["dense"])
  np.testing.assert_array_equal(saved["bias"], params["bias"])


def records(path):
  with np.load(path) as file:
    meta = json.loads(file["meta_json"].tobytes())
  return {record["path"]: record for record in meta["leaves"]}


def test_integers_take_no_more_bits_than_the_distinct_values_of_a_vector_need(tmp_path):
  _, state = one_model()
  path = tmp_path / "model.npz"
  optax_boost.save_permuted_params(path, state, seed=7)
  leaves = records(path)
  bits = {name: leaves[name]["bits"] for name in leaves}
  assert bits["dense"] == 5  # 20 weights of a vector
  assert bits["signs"] == 1
  assert bits["half"] <= 10  # bfloat16 repeats values
  assert bits["none"] == bits["scalar"] == 0
  assert leaves["signs"]["bytes"] == 64 * 32 // 8
  assert leaves["dense"]["bytes"] <= -(-5 * 140 // 8)
  # A fifth of 1,200 weights is not zero: the others cost less than their place.
  assert leaves["sparse"]["bits"] >= 4
  assert leaves["sparse"]["bytes"] < 1200 * 3.5 / 8
  assert path.stat().st_size < sum(leaf.nbytes for leaf in jax.tree.leaves(initial(7)))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  path = tmp_path_factory.mktemp("saved") / "model.npz"
  optax_boost.save_permuted_params(path, one_model()[1], seed=7)
  return path


@pytest.mark.parametrize(
  ("init_fn", "message"),
  [
    (lambda seed: initial(seed + 1), r"from the seed 7 it gave other values of the leaf 'bias'"),
    (lambda seed: {**initial(seed), "more": jnp.ones(2)}, r"with the leaves \['bias'.*'more'"),
    (
      lambda seed: {**initial(seed), "signs": jnp.ones((32, 64))},
      r"float32 of shape \(64, 32\) in the leaf 'signs'; got float32 of shape \(32, 64\)\.",
    ),
    (
      lambda seed: {**initial(seed), "signs": initial(seed)["signs"].astype(jnp.bfloat16)},
      r"float32 of shape \(64, 32\) in the leaf 'signs'; got bfloat16 of shape \(64, 32\)\.",
    ),
    (
      lambda seed: {**initial(seed), "signs": jax.random.normal(jax.random.key(0), (64, 32))},
      r"other values of the leaf 'signs'",
    ),
  ],
)
def test_other_initial_params_are_refused(saved, init_fn, message):
  with pytest.raises(ValueError, match=rf"`init_fn` must return the params that .*{message}"):
    optax_boost.load_permuted_params(saved, init_fn)


def changed_meta(path, source, change):
  with np.load(source) as file:
    meta, data = json.loads(file["meta_json"].tobytes()), file["data"]
  change(meta)
  np.savez(path, meta_json=np.frombuffer(json.dumps(meta).encode(), np.uint8), data=data)


DAMAGES = {
  "other format": lambda meta: meta.update(format="other"),
  "no leaves": lambda meta: meta.update(leaves=[]),
  "text as bits": lambda meta: meta["leaves"][1].update(bits="5"),
  "400 bits": lambda meta: meta["leaves"][1].update(bits=400),
  "axis 9": lambda meta: meta["leaves"][1].update(moving_axes=[0, 9]),
  "no checksum": lambda meta: meta["leaves"][1].pop("checksum"),
  "fewer bits": lambda meta: next(
    leaf for leaf in meta["leaves"] if leaf["coding"] == "deflated"
  ).update(bits=2),
  "other coding": lambda meta: meta["leaves"][1].update(coding="other"),
  "fewer bytes": lambda meta: meta["leaves"][1].update(bytes=3),
}


@pytest.mark.parametrize("label", ["half", "text", "other archive", *DAMAGES])
def test_files_that_are_damaged_or_of_another_kind_are_refused(saved, label, tmp_path):
  path = tmp_path / "damaged.npz"
  if label == "half":
    path.write_bytes(saved.read_bytes()[:500])
  elif label == "text":
    path.write_text("no model")
  elif label == "other archive":
    np.savez(path, weights=np.ones(3))
  else:
    changed_meta(path, saved, DAMAGES[label])
  with pytest.raises(ValueError, match=r"needs a whole file .*damaged\.npz is truncated, damaged"):
    optax_boost.load_permuted_params(path, initial)


def test_leaves_that_are_not_permuted_must_be_given(tmp_path):
  tx = optax_boost.laperm(optax.sgd(0.1), sync_every=1, exclude="bias$")
  params, state = trained(tx, 1)
  save = functools.partial(optax_boost.save_permuted_params, tmp_path / "model.npz", state)
  with pytest.raises(ValueError, match=r"not permuted; got none for the leaf 'bias'.*as `params`"):
    save(seed=7)
  with pytest.raises(ValueError, match=r"needs `params` of the tree that the state was made for"):
    save(7, {"bias": params["bias"]})
  assert not list(pathlib.Path(tmp_path).iterdir())


def test_leaves_that_a_prefix_of_the_tree_masks_out_are_stored(tmp_path):
  def init(seed):
    return {"conv": small(seed), "dense": small(seed + 1)}

  tx = optax.masked(optax_boost.sgperm(method="rank"), {"conv": True, "dense": False})
  params = init(7)
  _, state = tx.update(jax.tree.map(lambda p: jnp.cos(9 * p), params), tx.init(params), params)
  exact = optax_boost.permuted_params(state, params)
  path = tmp_path / "model.npz"
  optax_boost.save_permuted_params(path, state, 7, params)
  assert_same_bits(optax_boost.load_permuted_params(path, init), exact)
  assert np.any(exact["conv"]["bias"] != params["conv"]["bias"])


@pytest.mark.skipif(not hasattr(nnx, "as_pure"), reason="older optimizers refuse hidden leaves")
def test_an_nnx_optimizers_state_is_saved_with_the_params_of_its_model(tmp_path):
  def init(seed):
    return nnx.state(nnx.Linear(6, 4, rngs=nnx.Rngs(seed)), nnx.Param)

  model = nnx.Linear(6, 4, rngs=nnx.Rngs(7))
  tx = optax_boost.laperm(optax.sgd(0.1), sync_every=1, exclude="bias")
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  path, params = tmp_path / "model.npz", nnx.state(model, nnx.Param)
  optax_boost.save_permuted_params(path, optimizer.opt_state, 7, params)
  loaded = optax_boost.load_permuted_params(path, init)
  assert jax.tree.structure(loaded) == jax.tree.structure(params)
  assert_same_bits(loaded, params)


def test_half_precision_trained_in_master_weights_is_loaded_in_half_precision(tmp_path):
  def init(seed):
    return {"dense": small(seed)["dense"].astype(jnp.bfloat16)}

  tx = optax_boost.master_weights(optax_boost.laperm(optax.sgd(3.0), sync_every=1))
  _, state = trained(tx, init=init)
  optax_boost.save_permuted_params(tmp_path / "model.npz", state, seed=7)
  loaded = optax_boost.load_permuted_params(tmp_path / "model.npz", init)["dense"]
  assert loaded.dtype == jnp.bfloat16
  np.testing.assert_array_equal(loaded, optax_boost.permuted_params(state)["dense"])
  assert np.any(loaded != init(7)["dense"])

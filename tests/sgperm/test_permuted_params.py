"""Models of exact params and integers, and their files, loaded again to the last bit."""

import subprocess
import sys

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost

PermutedParams = optax_boost.PermutedParams


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


def trained(tx, params, steps=3):
  """Params after some steps, and the state."""
  state = jax.jit(tx.init)(params)
  step = jax.jit(lambda *args: optax_boost.apply_gradients(tx, *args))
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


@pytest.fixture(scope="module")
def one_run():
  return trained(optax_boost.laperm(optax.adam(0.3), sync_every=1), initial(7))


def test_a_train_state_is_loaded_from_its_integers_to_the_last_bit(one_run, tmp_path):
  params, state = one_run
  assert all(np.any(params[name] != initial(7)[name]) for name in ("half", "signs", "sparse"))
  model = optax_boost.permuted_params((state, optax.EmptyState()))
  assert_same_bits(model.params, params)
  model.save(tmp_path / "model.npz")
  assert [path.name for path in tmp_path.iterdir()] == ["model.npz"]
  assert_same_bits(PermutedParams.load(tmp_path / "model.npz", initial(7)).params, params)
  assert_same_bits(PermutedParams.from_initial(initial(7), model.permutation).params, params)


@pytest.mark.parametrize(
  "tx",
  [
    optax_boost.laperm(optax.adam(0.3), sync_every=1, layout="torch"),
    optax_boost.sgperm(alpha=1.0, method="rank"),
    optax_boost.sgperm(alpha=1.0, method="pairs", key=0),
  ],
)
def test_a_train_state_of_another_layout_or_method_is_loaded_to_the_last_bit(tx, tmp_path):
  start = {name: initial(7)[name] for name in ("bias", "dense")}
  params, state = trained(tx, start)
  assert np.any(params["dense"] != start["dense"])
  optax_boost.permuted_params(state).save(str(tmp_path / "model.npz"))
  again = PermutedParams.load(tmp_path / "model.npz", start)
  assert_same_bits(again.params, params)
  # Without equal weights there is one permutation.
  assert_same_bits(again.permutation, optax_boost.permuted_params(state).permutation)


def test_a_fresh_process_loads_the_same_bits_and_leaves_that_trained_freely(tmp_path):
  start = initial(7)
  tx = optax_boost.laperm(optax.adam(0.3), sync_every=2, exclude=["bias", "half"])
  params, state = trained(tx, start)
  path = tmp_path / "model.npz"
  with pytest.raises(ValueError, match=r"needs the values of leaves .* the leaf 'bias'"):
    optax_boost.permuted_params(state).save(path)
  model = optax_boost.permuted_params(state, params)
  model.save(path)
  code = """
import sys
import numpy as np
import optax_boost
from tests.sgperm import test_permuted_params
model = optax_boost.PermutedParams.load(sys.argv[1], test_permuted_params.initial(7))
sys.stdout.write("".join(np.asarray(leaf).tobytes().hex() for leaf in model.params.values()))
"""
  result = subprocess.run(
    [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
  )
  assert result.stdout == "".join(np.asarray(x).tobytes().hex() for x in model.params.values())
  # The last of three steps was free: only leaves that are excluded keep it.
  assert np.any(model.params["dense"] != params["dense"])
  assert_same_bits(
    [model.params[name] for name in ("bias", "half")], [params["bias"], params["half"]]
  )


def test_masters_are_saved_and_loaded_in_the_params_dtype(tmp_path):
  start = {"half": initial(7)["half"]}
  params, state = trained(optax_boost.master_weights(optax_boost.sgperm(method="rank")), start)
  optax_boost.permuted_params(state).save(tmp_path / "model.npz")
  assert_same_bits(PermutedParams.load(tmp_path / "model.npz", start).params, params)


def test_weights_take_few_bits(tmp_path):
  rng = np.random.default_rng(0)
  shape = (784, 64)
  kinds = {
    "dense": rng.normal(size=shape),
    "sparse": np.where(rng.random(shape) < 0.1, rng.normal(size=shape), 0),
    "signs": rng.choice([-0.3, 0.3], shape),
  }
  bits = {}
  for name, x in kinds.items():
    order = jnp.asarray(rng.permuted(np.arange(x.size).reshape(shape), axis=0), jnp.int32)
    path = tmp_path / f"{name}.npz"
    PermutedParams.from_initial({"x": jnp.asarray(x, jnp.float32)}, {"x": order}).save(path)
    bits[name] = 8 * path.stat().st_size / x.size
  assert bits["dense"] < 13
  assert bits["sparse"] < 2
  assert bits["signs"] < 1.5


@pytest.mark.skipif(not hasattr(nnx, "as_pure"), reason="older optimizers refuse hidden leaves")
def test_the_params_of_an_nnx_model_equal_the_params_in_its_optimizers_state(tmp_path):
  model = nnx.Linear(6, 4, rngs=nnx.Rngs(0))
  tx = optax_boost.laperm(optax.sgd(0.1), sync_every=1, exclude="bias")
  state = nnx.Optimizer(model, tx, wrt=nnx.Param).opt_state
  start = nnx.state(model, nnx.Param)
  permuted = optax_boost.permuted_params(state, start)
  permuted.save(tmp_path / "model.npz")
  for found in (
    permuted.params,
    PermutedParams.from_initial(start, permuted.permutation).params,
    PermutedParams.load(tmp_path / "model.npz", start).params,
  ):
    assert jax.tree.structure(found) == jax.tree.structure(start)
    assert_same_bits(found, start)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (
      lambda p: initial(8),
      r"`initial` must be the params .* other values for the leaf 'bias' of shape \(9,\)",
    ),
    (
      lambda p: p | {"dense": p["dense"][:2]},
      r"other values for the leaf 'dense' of shape \(2, 5, 7\)",
    ),
    (lambda p: {"bias": p["bias"]}, r"has the leaves .*'dense'.*, and `initial` \['bias'\]"),
  ],
)
def test_other_initial_params_are_refused(one_run, change, message, tmp_path):
  optax_boost.permuted_params(one_run[1]).save(tmp_path / "model.npz")
  with pytest.raises(ValueError, match=message):
    PermutedParams.load(tmp_path / "model.npz", change(initial(7)))


def test_files_that_are_damaged_or_missing_are_refused(one_run, tmp_path):
  path = tmp_path / "model.npz"
  with pytest.raises(FileNotFoundError):
    PermutedParams.load(path, initial(7))
  optax_boost.permuted_params(one_run[1]).save(path)
  good = path.read_bytes()
  np.save(tmp_path / "array.npy", np.ones(3))
  for bad in (b"", b"no archive", good[: len(good) // 2], (tmp_path / "array.npy").read_bytes()):
    path.write_bytes(bad)
    with pytest.raises(
      ValueError, match=r"needs a file of `PermutedParams.save`; got '.*model\.npz'"
    ):
      PermutedParams.load(path, initial(7))


@pytest.mark.parametrize(
  ("params", "index", "message"),
  [
    (
      {"a": np.arange(3.0)},
      {"a": [0, 1, 1]},
      r"index from 0 to 2 of the leaf 'a' once; got 1",
    ),
    ({"a": np.arange(3.0)}, {"a": [0, 1, 3]}, r"got 3 out of range or more than once"),
    (np.arange(3.0), [0, 1, -1], r"the leaf 'params' once; got -1 out of range"),
    ({"a": np.arange(3.0)}, {"a": [0.0, 1, 2]}, r"integers of the params' shapes; the leaf 'a' is"),
    ({"a": np.arange(3.0)}, {"a": [0, 1]}, r"int\d+ of shape \(2,\) for params of shape \(3,\)"),
    (
      {"a": np.arange(3.0)},
      {"b": [0, 1, 2]},
      r"must have the structure that was permuted",
    ),
  ],
)
def test_integers_that_are_not_a_permutation_are_refused(params, index, message):
  index = (
    {k: np.asarray(x) for k, x in index.items()} if isinstance(index, dict) else np.array(index)
  )
  with pytest.raises(ValueError, match=message):
    PermutedParams.from_initial(jax.tree.map(jnp.asarray, params), index)


def test_a_state_with_no_permutation_or_with_two_is_refused():
  params = {"a": jnp.arange(3.0)}
  rank = optax_boost.sgperm(method="rank")
  for tx, number in ((optax.sgd(0.1), 0), (optax.chain(rank, rank), 2)):
    with pytest.raises(
      ValueError, match=rf"exactly one of `sgperm` and `laperm` in it; got {number}."
    ):
      optax_boost.permuted_params(tx.init(params))

"""SGPerm against the recorded runs, and against the published search in plain Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_boost
from optax_boost._sgperm import _host
from tests import sgperm_oracle as oracle

every_trace = pytest.mark.parametrize("name", oracle.NAMES)
FLOAT64 = ("sgperm_all_f64", "sgperm_slots_f64")


@pytest.fixture
def x64():
  """64-bit types, for the traces that have them."""
  jax.config.update("jax_enable_x64", True)
  yield
  jax.config.update("jax_enable_x64", False)


def same_bits(found, expected):
  found, expected = np.ascontiguousarray(found), np.ascontiguousarray(expected)
  assert found.dtype == expected.dtype
  np.testing.assert_array_equal(found.view(np.uint8), expected.view(np.uint8))


def brackets(alpha, n, dtype):
  return (alpha + 1 / np.maximum(np.arange(n + 1), 1)).astype(dtype)


def trace_steps(name):
  """Each step of each variable: weights, recommendations, partition, and weights after."""
  arrays, meta = oracle.load(name)
  hyper = meta["hyper"]
  for t in range(meta["steps"]):
    for v in range(meta["variables"]):
      w = arrays[f"w{v}"]
      weights, n = oracle.vectors(w[t]), oracle.vectors(w[t]).shape[1]
      size = oracle.subset_size(arrays["lamda"][t], n, hyper["partition_size_min"])
      order = oracle.recorded_order(arrays, t, v, w[t].shape)
      wishes = oracle.vectors(arrays[f"m{v}"][t])
      ranges, after = arrays[f"range{v}"], oracle.vectors(w[t + 1])
      remainder = hyper["include_partition_remainder"]
      yield weights, wishes, order, size, ranges, arrays["alpha"][t], remainder, after


@every_trace
def test_the_oracle_is_the_published_algorithm(name):
  for *given, after in trace_steps(name):
    same_bits(np.take_along_axis(given[0], oracle.permute(*given), 1), after)


@pytest.mark.parametrize("compiled", [False, True], ids=["python", "numba"])
@every_trace
def test_host_kernel_repeats_every_trace(name, compiled):
  if compiled:
    pytest.importorskip("numba")
  for weights, wishes, order, size, ranges, alpha, remainder, after in trace_steps(name):
    subsets = _host.Subsets(order, size, brackets(alpha, weights.shape[1], weights.dtype))
    source = _host.permute(
      weights, wishes, subsets, ranges, remainder=remainder, compile_search=compiled
    )
    same_bits(np.take_along_axis(weights, source, 1), after)


def random_case(seed, tied):
  """Small weight vectors, with many ties if wanted, and all that a step needs."""
  rng = np.random.default_rng(seed)
  rows, n = 4, int(rng.integers(2, 33))
  if tied:
    weights = rng.integers(-6, 7, (rows, n)) / 16
    wishes = rng.integers(-4, 5, (rows, n))
  else:
    weights, wishes = rng.normal(size=(2, rows, n))
  weights, wishes = weights.astype(np.float32), wishes.astype(np.float32)
  size = int(rng.integers(2, n + 2))
  order = np.stack([rng.permutation(n) for _ in range(rows)]).astype(np.int32)
  alpha = float(rng.choice([0.0, 0.03, 0.125, 0.25, 1.0]))
  return weights, wishes, order, size, np.ptp(weights, axis=1), alpha, bool(rng.integers(2))


@pytest.mark.parametrize("compiled", [False, True], ids=["python", "numba"])
@pytest.mark.parametrize("tied", [False, True])
def test_host_kernel_equals_the_published_search_on_random_vectors(tied, compiled):
  if compiled:
    pytest.importorskip("numba")
  for seed in range(200):
    weights, wishes, order, size, ranges, alpha, remainder = random_case(seed, tied)
    expected = oracle.permute(weights, wishes, order, size, ranges, alpha, remainder)
    subsets = _host.Subsets(order, size, brackets(alpha, weights.shape[1], np.float32))
    found = _host.permute(
      weights, wishes, subsets, ranges, remainder=remainder, compile_search=compiled
    )
    np.testing.assert_array_equal(found, expected)


def hyperparams(hyper):
  names = {"alpha0": "alpha", "lamda0": "lamda"}
  return {names.get(name, name): value for name, value in hyper.items()}


def replayed(name, **changes):
  """Runs the transformation over a trace's gradients; its weights after each step."""
  arrays, meta = oracle.load(name)
  tx = optax_boost.sgperm(**hyperparams(meta["hyper"]) | {"key": 0} | changes)
  variables = range(meta["variables"])
  feed = "m" if changes.get("momentum") == 0.0 else "g"
  params = [jnp.asarray(arrays[f"w{v}"][0]) for v in variables]
  state, update = tx.init(params), jax.jit(tx.update)
  for t in range(meta["steps"]):
    shapes = [p.shape for p in params]
    orders = [
      oracle.recorded_order(arrays, t, v, s).T for v, s in zip(variables, shapes, strict=True)
    ]
    grads = [jnp.asarray(arrays[f"{feed}{v}"][t]) for v in variables]
    updates, state = update(grads, state, params, partitions=orders)
    params = optax_boost.apply_permuted_params(params, updates, state)
    for v in variables:
      same_bits(params[v], arrays[f"w{v}"][t + 1])
    assert update._cache_size() == 1
    np.testing.assert_allclose(state.alpha, arrays["alpha"][t], rtol=1e-6)
    np.testing.assert_allclose(state.lamda, arrays["lamda"][t], rtol=1e-6)
  return state


# The transformation, given recorded recommendations: with these numbers its momentum is they.
RECOMMENDED = {"momentum": 0.0, "momentum_lr": 1.0}


@pytest.mark.parametrize("name", [name for name in oracle.NAMES if name not in FLOAT64])
def test_transformation_on_the_host_repeats_every_float32_trace(name):
  replayed(name, backend="host", **RECOMMENDED)


@pytest.mark.parametrize("name", FLOAT64)
def test_transformation_on_the_host_repeats_the_float64_traces(name, x64):
  replayed(name, backend="host", accumulator_dtype=jnp.float64, **RECOMMENDED)


def test_whole_optimizer_repeats_the_run_without_roundings():
  replayed("sgperm_dyadic", backend="host")

"""Stochastic rounding: equal to a table of all numbers, exact on average, and smaller in memory."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import optax_boost
from optax_boost._step._precision import _rounding
from tests import meshes

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
both_dtypes = pytest.mark.parametrize("dtype", DTYPES)


@functools.partial(jax.jit, static_argnames="dtype")
def rounded(key, x, dtype):
  return _rounding.round_stochastically(jax.random.uniform(key, x.shape), x, jnp.dtype(dtype))


def all_numbers(dtype):
  """Every number of a dtype that is not subnormal in float32; XLA on CPUs flushes these to zero."""
  numbers = np.arange(2**16, dtype=np.uint16).view(DTYPES[dtype])
  magnitudes = np.abs(numbers.astype(np.float32))
  return numbers[~(magnitudes < np.finfo(np.float32).smallest_normal) | (magnitudes == 0)]


def by_table(x, noise, dtype):
  """Rounds by a sorted table of all numbers, in float64."""
  numbers = all_numbers(dtype).astype(np.float32)
  numbers = np.unique(np.abs(numbers[np.isfinite(numbers)])).astype(np.float64)
  magnitude = np.minimum(np.abs(x.astype(np.float64)), numbers[-1])
  place = np.searchsorted(numbers, magnitude, side="right") - 1
  below, above = numbers[place], numbers[np.minimum(place + 1, len(numbers) - 1)]
  chance = (magnitude - below) / np.where(above > below, above - below, 1)
  return np.copysign(np.where(noise < chance, above, below), x).astype(DTYPES[dtype])


@both_dtypes
@pytest.mark.parametrize("exponents", [(-126, 128), (-30, 17), (-2, 2)], ids=str)
def test_agrees_to_the_bit_with_a_table_of_all_numbers(dtype, exponents):
  rng, key = np.random.default_rng(0), jax.random.key(1)
  x = rng.choice([-1, 1], 50_000) * np.exp2(rng.uniform(*exponents, 50_000))
  x = x.astype(np.float32)
  noise = np.asarray(jax.random.uniform(key, x.shape))
  ours = np.asarray(rounded(key, x, dtype))
  np.testing.assert_array_equal(ours.view(np.uint16), by_table(x, noise, dtype).view(np.uint16))


@both_dtypes
def test_numbers_that_the_dtype_represents_are_unchanged(dtype):
  numbers = all_numbers(dtype)
  ours = np.asarray(rounded(jax.random.key(0), numbers.astype(np.float32), dtype))
  nan = np.isnan(numbers.astype(np.float32))
  assert 0 < nan.sum() < 2500
  assert np.isnan(ours[nan].astype(np.float32)).all()
  np.testing.assert_array_equal(ours[~nan].view(np.uint16), numbers[~nan].view(np.uint16))


@both_dtypes
def test_numbers_beyond_the_range_become_its_end(dtype):
  end = float(jnp.finfo(dtype).max)
  x = np.repeat(np.array([1.0005 * end, np.finfo(np.float32).max, -1.0005 * end], np.float32), 99)
  ours = np.asarray(rounded(jax.random.key(0), x, dtype), np.float32)
  np.testing.assert_array_equal(ours, np.copysign(end, x))


@both_dtypes
@pytest.mark.parametrize("scale", [1.0, 1e-6])
def test_the_mean_error_is_zero(dtype, scale):
  """1e-6 is subnormal in float16. In units of the distance the error's variance is f (1 - f)."""
  size = 400_000
  x = scale * jax.random.uniform(jax.random.key(0), (size,), minval=1.0, maxval=1.9)
  error = np.asarray(rounded(jax.random.key(1), x, dtype), np.float64) - np.asarray(x, np.float64)
  info = jnp.finfo(dtype)
  power = 2.0 ** np.floor(np.log2(np.asarray(x, np.float64)))
  error /= np.maximum(power, float(info.smallest_normal)) * float(info.eps)
  assert np.abs(error).max() < 1
  deviation = np.sqrt(np.mean(error**2) / size)
  assert 0.3 < np.sqrt(np.mean(error**2)) < 0.5, "sqrt(1/6) for fractions of all sizes"
  assert abs(error.mean()) < 4 * deviation


def train(tx, params, gradients, steps, state=None):
  """Returns params and state after some steps of `update` under jit."""

  @jax.jit
  def step(params, state):
    updates, state = tx.update(gradients(params), state, params)
    return optax.apply_updates(params, updates), state

  state = tx.init(params) if state is None else state
  for _ in range(steps):
    params, state = step(params, state)
  return params, state


def test_trains_although_rounding_to_nearest_stalls():
  target = jnp.linspace(-2, 2, 500)
  start = jnp.full(500, 1.0, jnp.bfloat16)

  def distance(tx):
    params, _ = train(tx, start, lambda p: p.astype(jnp.float32) - target, 300)
    return float(jnp.sqrt(jnp.mean((params - target) ** 2)))

  sgd = optax.sgd(0.02)
  masters = distance(optax_boost.master_weights(sgd))
  assert distance(optax_boost.stochastic_rounding(sgd, 0)) < masters + 0.02
  assert distance(sgd) > masters + 0.1


def test_takes_four_bytes_a_param_less_than_masters():
  params = {"w": jnp.ones((64, 64), jnp.bfloat16), "b": jnp.ones(64, jnp.bfloat16)}

  def size(tx):
    return sum(x.nbytes for x in jax.tree.leaves(tx.init(params)))

  adam = optax.adam(1e-3)
  saved = size(optax_boost.master_weights(adam, key=0)) - size(
    optax_boost.stochastic_rounding(adam, key=0)
  )
  assert saved == 4 * (64 * 64 + 64)


@both_dtypes
def test_applied_updates_are_exactly_the_rounded_params(dtype):
  """Weights may shrink by the documented factor in one step; infinite weights stay."""
  rng = np.random.default_rng(0)
  farthest = {"bfloat16": 15, "float16": 12}[dtype]
  params = (rng.choice([-1, 1], 20_000) * rng.uniform(1, 2, 20_000)).astype(DTYPES[dtype])
  target = params.astype(np.float32) * np.exp2(rng.uniform(1 - farthest, 3, 20_000))
  target *= rng.choice([-1, 1], 20_000)
  grads = params.astype(np.float32) - target
  params[:2], grads[:2] = (np.inf, -np.inf), 0
  tx = optax_boost.stochastic_rounding(optax.sgd(1.0), 0)
  params, grads = jnp.asarray(params), jnp.asarray(grads, jnp.float32)
  state = tx.init(params)
  updates, after = jax.jit(tx.update)(grads, state, params)
  applied = optax.apply_updates(params, updates)
  written, _ = jax.jit(functools.partial(optax_boost.apply_gradients, tx))(grads, state, params)
  np.testing.assert_array_equal(applied, written)
  np.testing.assert_array_equal(applied[:2], [np.inf, -np.inf])
  assert updates.dtype == jnp.float32
  assert after.notfinite_count == 0
  assert jnp.mean(applied != params) > 0.9


def test_noise_differs_from_step_to_step_leaf_to_leaf_and_key_to_key():
  params = {"a": jnp.ones(200, jnp.bfloat16), "b": jnp.ones(200, jnp.bfloat16)}
  grads = jax.tree.map(lambda p: jnp.full_like(p, -4e-3, jnp.float32), params)
  rows = []
  for key in (0, jax.random.key(1)):
    tx = optax_boost.stochastic_rounding(optax.sgd(1.0), key)
    state = tx.init(params)
    for _ in range(2):
      updates, state = tx.update(grads, state, params)
      rows += [np.asarray(u) for u in jax.tree.leaves(updates)]
  assert len({row.tobytes() for row in rows}) == 8


def test_a_run_resumes_exactly_with_the_key_in_its_state():
  start = jnp.linspace(-1, 1, 300, dtype=jnp.bfloat16)

  def gradients(p):
    return 0.1 * (p.astype(jnp.float32) - 0.3)

  tx = optax_boost.stochastic_rounding(optax.adam(1e-3), key=7)
  whole = train(tx, start, gradients, 6)
  params, state = jax.tree.map(np.asarray, train(tx, start, gradients, 3))
  other = optax_boost.stochastic_rounding(optax.adam(1e-3), key=8)
  resumed = train(other, jnp.asarray(params), gradients, 3, jax.tree.map(jnp.asarray, state))
  jax.tree.map(np.testing.assert_array_equal, resumed, whole)
  different, _ = train(other, start, gradients, 6)
  assert np.any(np.asarray(different) != np.asarray(whole[0]))


def test_sharded_params_are_rounded_as_on_one_device_and_not_gathered():
  mesh = meshes.mesh((8,), ("x",))
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "x"))
  params = jnp.ones((16, 64), jnp.bfloat16)
  tx = optax_boost.stochastic_rounding(optax.sgd(1.0), key=0)
  step = jax.jit(functools.partial(optax_boost.apply_gradients, tx))
  grads = jax.random.normal(jax.random.key(1), params.shape)
  alone, _ = step(grads, tx.init(params), params)
  sharded_grads, sharded_params = jax.device_put((grads, params), sharding)
  state = tx.init(sharded_params)
  program = step.lower(sharded_grads, state, sharded_params).compile()
  sharded, _ = program(sharded_grads, state, sharded_params)
  assert sharded.sharding.is_equivalent_to(sharding, 2)
  np.testing.assert_array_equal(alone, sharded)
  for collective in ("all-gather", "all-to-all", "collective-permute"):
    assert collective not in program.as_text()


def test_params_in_float32_are_not_rounded():
  params = {"norm": jnp.ones(3), "w": jnp.ones(3, jnp.bfloat16)}
  tx = optax_boost.stochastic_rounding(optax.sgd(1.0), key=0)
  after, _ = train(tx, params, lambda p: jax.tree.map(lambda x: jnp.full(3, 1e-4), p), 1)
  np.testing.assert_array_equal(after["norm"], jnp.full(3, np.float32(1) - np.float32(1e-4)))
  assert after["w"].dtype == jnp.bfloat16

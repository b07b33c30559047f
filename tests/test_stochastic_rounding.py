"""Stochastic rounding: against a table of all numbers, and right on average."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from optax_boost._precision import _widened

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
both_dtypes = pytest.mark.parametrize("dtype", DTYPES)


@functools.partial(jax.jit, static_argnames="dtype")
def rounded(key, x, dtype):
  return _widened.round_stochastically(key, x, jnp.dtype(dtype))


def all_numbers(dtype):
  """Every number of a dtype, but float32's subnormal ones, which XLA takes for zero on CPUs."""
  numbers = np.arange(2**16, dtype=np.uint16).view(DTYPES[dtype])
  wide = np.abs(numbers.astype(np.float32))
  return numbers[~(wide < np.finfo(np.float32).smallest_normal) | (wide == 0)]


def by_table(x, noise, dtype):
  """The neighbours from a sorted table, chosen in float64."""
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
def test_numbers_of_the_dtype_stay_as_they_are(dtype):
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

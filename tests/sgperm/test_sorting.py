"""The packed sort against NumPy's stable sort."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_boost._methods._sgperm import _sorting

argsort = jax.jit(_sorting.argsort, static_argnums=2)


def keys(kind, shape):
  rng = np.random.default_rng(0)
  x = rng.normal(size=shape).astype(np.float32)
  if kind == "equal ones":
    return np.round(4 * x) / 4 * rng.choice(np.float32([1, -1]), shape)  # with zeros of both signs
  if kind == "equal in the first digits":
    return (1 + 1e-6 * x).astype(np.float32)
  return rng.integers(0, 2**32, shape, np.uint32) if kind == "integers" else x


@pytest.mark.parametrize("shape", [(5, 4), (300, 5)], ids=["few", "many"])
@pytest.mark.parametrize("kind", ["normal", "equal ones", "equal in the first digits", "integers"])
def test_argsort_is_stable(kind, shape):
  x = keys(kind, shape)
  np.testing.assert_array_equal(argsort(x, None, 0), np.argsort(x, axis=0, kind="stable"))


@pytest.mark.parametrize("shape", [(5, 4), (300, 5)], ids=["few", "many"])
@pytest.mark.parametrize("kind", ["normal", "equal ones", "equal in the first digits"])
def test_high_bits_come_before_the_keys(kind, shape):
  x, high = keys(kind, shape), np.random.default_rng(1).integers(0, 32, shape, np.uint32)
  expected = [np.lexsort((x[:, j], high[:, j])) for j in range(shape[1])]
  np.testing.assert_array_equal(argsort(x, jnp.asarray(high), 5), np.stack(expected, axis=1))


def test_high_bits_that_are_longer_than_a_digit_are_compared_whole():
  # 2^18 entries leave 14 bits for a digit, so the first digit doesn't hold all of 15 bits.
  high = np.random.default_rng(0).integers(0, 2**15, (2**18, 1), np.uint32)
  x = np.zeros((2**18, 1), np.float32)
  expected = np.argsort(high, axis=0, kind="stable")
  np.testing.assert_array_equal(argsort(x, jnp.asarray(high), 15), expected)

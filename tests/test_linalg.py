"""The small linear algebra against dense NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_boost._dim_reduce import _linalg

SHAPES = {"conv": (3, 2, 4), "dense": (5, 8), "bias": (7,), "scale": (), "empty": (0, 3)}
ENTRIES = sum(int(np.prod(shape)) for shape in SHAPES.values())


def tree(matrix):
  """Cuts the columns of a matrix into leaves, one row to each first index."""
  leaves, start = {}, 0
  for name, shape in SHAPES.items():
    size = int(np.prod(shape))
    leaves[name] = jnp.asarray(
      matrix[:, start : start + size].reshape(len(matrix), *shape), jnp.float32
    )
    start += size
  return leaves


def flat(rows):
  """The inverse of `tree`, in float64."""
  parts = [np.asarray(rows[name], np.float64) for name in SHAPES]
  return np.concatenate([x.reshape(len(x), int(np.prod(x.shape[1:]))) for x in parts], axis=1)


def with_spectrum(singular, rows, seed=0):
  """Rows that sum to zero with given singular values, and the right singular vectors."""
  rng = np.random.default_rng(seed)
  left = rng.normal(size=(rows, len(singular)))
  left = np.linalg.qr(left - left.mean(axis=0))[0]
  right = np.linalg.qr(rng.normal(size=(ENTRIES, len(singular))))[0].T
  return left * singular @ right, right


def test_inner_products_are_those_of_the_flat_rows():
  rng = np.random.default_rng(1)
  a, b = rng.normal(size=(4, ENTRIES)), rng.normal(size=(3, ENTRIES))
  found = _linalg.inner_products(tree(a), tree(b))
  np.testing.assert_allclose(found, a @ b.T, rtol=1e-5, atol=1e-5)


def test_combinations_are_those_of_the_flat_rows():
  rng = np.random.default_rng(2)
  rows, coefficients = rng.normal(size=(4, ENTRIES)), rng.normal(size=(6, 4))
  found = _linalg.combine(jnp.asarray(coefficients, jnp.float32), tree(rows))
  np.testing.assert_allclose(flat(found), coefficients @ rows, rtol=1e-5, atol=1e-5)


def test_rows_that_are_not_used_do_not_matter_to_the_mean():
  rows = np.random.default_rng(3).normal(size=(5, ENTRIES))
  used = np.array([False, True, True, False, True])
  poisoned = np.where(used[:, None], rows, np.nan)
  mean, centred = jax.jit(_linalg.centre)(tree(poisoned), jnp.asarray(used))
  expected = rows[used].mean(axis=0)
  np.testing.assert_allclose(
    flat({k: v[None] for k, v in mean.items()})[0], expected, rtol=1e-5, atol=1e-6
  )
  np.testing.assert_allclose(flat(centred)[used], rows[used] - expected, rtol=1e-5, atol=1e-6)
  assert not flat(centred)[~used].any()


def test_centred_rows_keep_their_digits_beside_a_large_mean():
  small = 1e-3 * np.random.default_rng(4).normal(size=(30, ENTRIES))
  rows = np.float32(small + 100.0)
  _, centred = jax.jit(_linalg.centre)(tree(rows), jnp.ones(30, bool))
  exact = np.float64(rows) - np.float64(rows).mean(axis=0)
  # To float32's rounding of the small numbers, not of the large ones.
  assert np.abs(flat(centred) - exact).max() < 1e-6 * np.abs(exact).max()


def test_finite_rows_are_found_in_every_leaf():
  rows = tree(np.ones((3, ENTRIES)))
  rows["scale"] = rows["scale"].at[0].set(jnp.nan)
  rows["conv"] = rows["conv"].at[2, 1, 1, 1].set(-jnp.inf)
  assert _linalg.finite_rows(rows).tolist() == [False, True, False]


def test_orthonormal_rows_span_what_the_first_of_the_given_ones_do():
  rng = np.random.default_rng(5)
  rows = rng.normal(size=(4, ENTRIES)) * np.array([1e4, 1.0, 1e-4, 1e-8])[:, None]
  rows[3] += 1e-12 * rows[0]
  found = flat(jax.jit(_linalg.orthonormalize)(tree(rows)))
  np.testing.assert_allclose(found @ found.T, np.eye(4), atol=5e-6)
  q = np.linalg.qr(rows.T)[0].T
  for j in range(1, 5):
    np.testing.assert_allclose(found[:j].T @ found[:j], q[:j].T @ q[:j], atol=1e-5)


def test_rows_that_depend_on_those_before_become_zero():
  first, last = np.random.default_rng(6).normal(size=(2, ENTRIES))
  found = flat(jax.jit(_linalg.orthonormalize)(tree(np.stack([first, 0 * first, 2 * first, last]))))
  assert found.any(axis=1).tolist() == [True, False, False, True]
  np.testing.assert_allclose(found @ found.T, np.diag([1, 0, 0, 1]), atol=1e-6)
  np.testing.assert_allclose(found[0], first / np.linalg.norm(first), atol=1e-6)


def test_signs_make_the_entry_of_largest_magnitude_positive():
  rows = np.random.default_rng(7).normal(size=(20, ENTRIES))
  found = flat(jax.jit(_linalg.fix_signs)(tree(rows)))
  np.testing.assert_array_equal(np.abs(found), np.abs(np.float32(rows)))
  largest = np.abs(found).argmax(axis=1)
  assert (found[np.arange(20), largest] > 0).all()


pca = jax.jit(_linalg.gram_pca, static_argnums=1)


@pytest.mark.parametrize("decay", [0.9, 0.5, 0.25])
@pytest.mark.parametrize("seed", range(3))
def test_components_of_a_prescribed_spectrum(decay, seed):
  singular = 3.0 * decay ** np.arange(14)
  rows, right = with_spectrum(singular, rows=15, seed=seed)
  found = pca(tree(rows), 6)
  components = flat(found.components)
  np.testing.assert_allclose(components @ components.T, np.eye(6), atol=2e-6)
  np.testing.assert_allclose(np.abs(np.sum(components * right[:6], axis=1)), 1, atol=1e-5)
  np.testing.assert_allclose(np.sqrt(found.variances), singular[:6], rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(found.total, np.sum(singular**2), rtol=1e-5)


def test_small_components_are_as_good_as_a_single_precision_svd_of_the_rows_makes_them():
  # Variances from 1 to 1e-8: the Gram matrix alone can't tell the last from its rounding errors.
  singular = np.array([1.0, 1e-1, 1e-2, 1e-3, 3e-4, 1e-4])
  rows, right = with_spectrum(singular, rows=15)
  found = pca(tree(rows), 6)
  components = flat(found.components)
  np.testing.assert_allclose(components @ components.T, np.eye(6), atol=2e-6)
  np.testing.assert_allclose(np.sqrt(found.variances), singular, rtol=2e-3)
  np.testing.assert_allclose(np.abs(np.sum(components * right, axis=1)), 1, atol=1e-4)


def test_what_is_rounding_error_is_zero():
  rows, _ = with_spectrum(np.array([2.0, 1.0]), rows=15)
  found = pca(tree(rows), 6)
  assert (np.asarray(found.variances) > 0).tolist() == [True, True, False, False, False, False]
  assert not flat(found.components)[2:].any()


def test_a_sketch_as_wide_as_the_rows_are_many_is_exact():
  rows, right = with_spectrum(0.8 ** np.arange(9), rows=10)
  sketch = jnp.asarray(np.random.default_rng(0).normal(size=(10, 10)), jnp.float32)
  found = flat(jax.jit(_linalg.randomized_pca, static_argnums=1)(tree(rows), 4, sketch).components)
  np.testing.assert_allclose(np.abs(np.sum(found * right[:4], axis=1)), 1, atol=1e-5)

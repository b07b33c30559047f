"""The contract's column *leaves of all kinds*: params that are NumPy arrays, or complex.

Warnings are errors in all tests: JAX's warning that float64 is not available, too, which optax does
not give for such params.
"""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
from tests import problems
from tests.contract import registry, test_contract, test_hostile

# These train in scans and loops of their own, where the depth of freezing is traced.
pytestmark = pytest.mark.filterwarnings("ignore:`freeze_layers` saves no time")


def with_zeros(tree: Any) -> Any:
  """A tree with some entries of zero, which neither gradients nor decay move."""
  return jax.tree.map(lambda x: x.at[..., 1].set(0), tree)


def in_numpy(tree: Any) -> Any:
  return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


@functools.cache
def on_device(row: registry.Row) -> tuple[Any, list[Any], list[Any]]:
  """Params and the gradients of three steps as JAX's arrays; what jitted updates make of them."""
  tx, params = test_contract.transformation(row), with_zeros(row.params())
  update, state = test_contract.jitted_update(row), tx.init(params)
  grads = [with_zeros(problems.grads(params, t)) for t in range(3)]
  steps = []
  for g in grads:
    steps.append(update(g, state, params))
    _, state = steps[-1]
  return params, grads, steps


def assert_same(found: Any, expected: Any) -> None:
  """The same values and the same dtypes, those of NumPy's arrays as JAX reads them."""
  # An update that does nothing may hand the caller's array back.
  kinds = [jax.tree.map(jnp.result_type, tree) for tree in (found, expected)]
  assert kinds[0] == kinds[1]
  chex.assert_trees_all_close(jax.tree.map(jnp.asarray, found), expected, rtol=1e-5, atol=1e-6)


# Eagerly: `jax.jit` hands on NumPy's arrays as float32, so a jitted update never sees them.
@test_contract.factories_first
def test_eager_steps_equal_jitted_steps_on_float64_arrays_of_numpy_too(row):
  tx = test_contract.transformation(row)
  params, grads, steps = on_device(row)
  state = tx.init(in_numpy(params))
  assert_same(state, tx.init(params))
  # The loss and its gradient are NumPy's, too, unless the row makes its own.
  more = {"value": np.float64(0), "grad": in_numpy(grads[0])}
  after = tx.update(in_numpy(grads[0]), state, in_numpy(params), **more)
  assert_same(after, steps[0])
  after = tx.update(grads[1], after[1], params)
  assert_same(after, steps[1])
  # A state as restored from a file, with gradients that are JAX's.
  after = tx.update(grads[2], jax.tree.map(np.asarray, after[1]), in_numpy(params))
  assert_same(after, steps[2])


# Steps in place and the train step make JAX's arrays of NumPy's before any method sees them.
one_method_and_one_wrapper = pytest.mark.parametrize(
  "row", [row for row in registry.ROWS if str(row) in ("accumulate", "lars")], ids=str
)


@one_method_and_one_wrapper
def test_steps_in_place_take_float64_params_of_numpy(row):
  tx = row.feed(getattr(optax_boost, row.factory)(**row.kwargs))
  params, (grads, *_), _ = on_device(row)
  step = functools.partial(optax_boost.apply_gradients, tx)
  expected = jax.jit(step)(grads, tx.init(params), params)
  assert_same(step(in_numpy(grads), tx.init(in_numpy(params)), in_numpy(params)), expected)


@one_method_and_one_wrapper
def test_the_train_step_takes_float64_params_of_numpy(row):
  step = test_hostile.train_step(row.optimizer())
  params = on_device(row)[0]
  expected, _ = test_hostile.train(step, params)
  assert_same(test_hostile.train(step, in_numpy(params))[0], expected)


# What the tests put around a step of the root hides it from the train step.
@pytest.mark.parametrize(
  "row", [row for row in registry.ROWS if not (row.is_root and row.extra)], ids=str
)
@pytest.mark.filterwarnings("ignore::optax_boost.NoEffectWarning")
def test_the_train_step_goes_downhill_on_complex_params_or_refuses_them_by_name(row):
  params = jax.tree.map(lambda x: x * (1 + 2j), problems.params())
  tx = row.optimizer()

  def loss_fn(params: Any, batch: Any) -> jax.Array:
    return sum(jnp.sum(jnp.abs(x - batch) ** 2) for x in jax.tree.leaves(params))

  step = optax_boost.make_train_step(loss_fn, tx)
  if not row.allows_complex:
    with pytest.raises(TypeError, match=r"the leaf 'conv/kernel' is complex64.*optax.masked"):
      step.init(params)
    return
  state = step.init(params)
  for _ in range(20):
    state, metrics = step(state, 3 + 4j)
  assert metrics["loss"] < 0.6 * loss_fn(params, 3 + 4j)
  assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype("complex64")}


@pytest.mark.parametrize("wrapper", ["stochastic_rounding", "master_weights"])
def test_an_entry_that_is_zero_stays_so_with_a_key(wrapper):
  tx = getattr(optax_boost, wrapper)(optax.sgd(0.1), key=0)
  params = {"bias": np.array([0.0, 1.0, 0.5])}
  state = tx.init(params)
  for grads in ({"bias": jnp.array([0.0, 10.0, 0.0])}, {"bias": np.zeros(3)}):
    updates, state = tx.update(grads, state, params)
    params = jax.tree.map(lambda p, u: np.asarray(p + u, np.float64), params, updates)
  np.testing.assert_array_equal(params["bias"], [0, 0, 0.5])


FUNCTIONS = {
  "averaged_params": lambda params: _averaged(params),
  "full_gradient": lambda params: optax_boost.full_gradient(
    jax.grad(problems.distance), params, [problems.params()], weight_fn=lambda _: 1
  ),
  "refresh_svrg": lambda params: optax_boost.refresh_svrg(
    optax_boost.svrg(None).init(params), params, params
  ),
  "adasum_reduce": lambda params: optax_boost.adasum_reduce(
    jax.tree.map(lambda x: np.stack([np.asarray(x), 2 * np.asarray(x)]), params)
  ),
  "fit_subspace": lambda params: (
    optax_boost.fit_subspace(
      [jax.tree.map(lambda x, n=n: x + x * n * n, params) for n in range(4)], 1
    ).basis
  ),
}


def _averaged(params: Any) -> Any:
  tx = optax_boost.average_params(optax.sgd(0.1), decay=0.5)
  return optax_boost.averaged_params(tx.update(params, tx.init(params), params)[1], params)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_params_take_float64_params_of_numpy(name):
  params = problems.params()
  assert_same(FUNCTIONS[name](in_numpy(params)), FUNCTIONS[name](params))

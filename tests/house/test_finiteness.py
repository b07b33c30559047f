"""One rule of finiteness: where `jnp.isfinite` may stand, and that all methods follow the rule."""

import ast
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
from optax_boost._form import _finiteness

PACKAGE = pathlib.Path(optax_boost.__file__).parent
# The functions in which `jnp.isfinite` decides about something else than entries of gradients,
# params or states, which are `_finiteness.finite_entries`'s.
ALLOWED = {
  "_step/_accumulation.py": {"weight_is_valid": "a sum of weights, a scalar"},
  "_methods/_adasum/_pairs.py": {"bounds_of": "a guard of `frexp`"},
  "_methods/_adasum/_reduction.py": {"_walk": "sums of squares"},
  "_methods/_dim_reduce/_fit.py": {"_check_fit": "a variance, a scalar"},
  "_methods/_dim_reduce/_quasi_newton.py": {
    "find_direction": "a ratio, a scalar",
    "attempt": "a loss",
    "next_step": "a length, a scalar",
  },
  "_methods/_dim_reduce/_dim_reduce.py": {"_search": "a loss"},
  "_form/_finiteness.py": {
    "_sums": "sums of zeros and NaN",
    "_sums_in_links": "sums of zeros and NaN",
    "all_finite": "a sum of squares",
    "finite_entries": "the definition",
    "sum_is_finite": "a sum of squares",
  },
  "_methods/_lars.py": {"_trust_ratio": "norms"},
  "_step/_precision/_rounding.py": {
    "round_to_nearest": "a guard of the rounding, which keeps infinities",
    "round_stochastically": "a guard of the rounding, which keeps infinities",
  },
  "_methods/_svrg.py": {"_correct": "sums of squares"},
}


def functions_with_isfinite(path):
  """The functions in which JAX's `isfinite` stands."""
  found = set()

  def visit(node, function):
    if isinstance(node, ast.FunctionDef):
      function = node.name
    named = isinstance(node, ast.Attribute) and node.attr in ("isfinite", "is_finite")
    if named and ast.unparse(node.value) not in ("np", "math"):
      found.add(function)
    for child in ast.iter_child_nodes(node):
      visit(child, function)

  visit(ast.parse(path.read_text(encoding="utf-8")), None)
  return found


def test_entries_are_judged_by_the_one_definition():
  found = {}
  for path in sorted(PACKAGE.rglob("*.py")):
    if functions := functions_with_isfinite(path):
      found[str(path.relative_to(PACKAGE))] = functions
  assert found == {name: set(functions) for name, functions in ALLOWED.items()}


@pytest.fixture(scope="module")
def stricter():
  """Replaces the definition of finite entries by a stricter one: entries above 1e30 are bad.

  For the whole module, since jitted functions keep the traces of the other definition, and clearing
  these makes all that comes after trace again.
  """
  jax.clear_caches()
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(_finiteness, "finite_entries", lambda x: jnp.abs(x) <= 1e30)
    yield
  jax.clear_caches()


LARGE = np.array([0.5, 1e31, -0.25, 0.125], np.float32)
PARAMS = np.array([1.0, -2.0, 3.0, -4.0], np.float32)


def test_the_loss_scale_follows_the_definition(stricter):
  tx = optax_boost.dynamic_loss_scale(optax.sgd(0.1), initial_scale=4.0)
  state = tx.init(PARAMS)
  updates, state = jax.jit(tx.update)(LARGE, state, PARAMS)
  assert not updates.any()
  assert state.loss_scale == 2


def test_accumulation_follows_the_definition(stricter):
  tx = optax_boost.accumulate(optax.sgd(1.0), 2)
  _, state = jax.jit(tx.update)(LARGE, tx.init(PARAMS), PARAMS)
  assert state.notfinite_count == 1
  assert not state.accumulator.any()


def test_the_refresh_of_svrg_follows_the_definition(stricter):
  state = optax_boost.svrg(None).init(PARAMS)
  refreshed = state.with_full_gradient(PARAMS, LARGE)
  assert refreshed.notfinite_count == 1
  assert refreshed.refresh_count == 0
  assert state.with_full_gradient(PARAMS, PARAMS).refresh_count == 1


@pytest.mark.parametrize("momentum_lr", [1.0, 1e-3], ids=["large", "scaled_down"])
def test_the_momentum_of_sgperm_leaves_out_what_is_counted(stricter, momentum_lr):
  tx = optax_boost.sgperm(momentum_lr=momentum_lr, partition_size_min=2, layout="torch", key=0)
  params, gradient = np.outer(PARAMS, PARAMS), np.tile(LARGE, (4, 1))
  _, state = jax.jit(tx.update)(gradient, tx.init(params), params)
  assert state.notfinite_count == 1
  counted = np.where(gradient > 1e30, np.float32(0), np.float32(momentum_lr) * gradient)
  np.testing.assert_array_equal(state.momentum, counted)

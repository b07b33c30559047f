"""dim_reduce against NumPy, and what it promises."""

import functools
import re

import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
from optax_boost._methods._dim_reduce import _quasi_newton
import optax_boost.nnx
from optax_boost.nnx import _model
from tests import compilations, meshes


def subspace_of(rows, like):
  """A subspace whose basis is a matrix of concatenated rows."""
  leaves, structure = jax.tree.flatten(like)
  parts = np.split(rows, np.cumsum([leaf.size for leaf in leaves])[:-1], axis=1)
  k = len(rows)
  basis = [part.reshape(k, *leaf.shape) for part, leaf in zip(parts, leaves, strict=True)]
  ones = np.ones(k, np.float32)
  return optax_boost.Subspace(like, jax.tree.unflatten(structure, basis), ones, ones / k)


K = 3
RNG = np.random.default_rng(0)
PARAMS = {
  "conv": RNG.normal(size=(3, 2, 8)).astype(np.float32),
  "dense": {"kernel": RNG.normal(size=(8, 16)).astype(np.float32)},
  "head": RNG.normal(size=8).astype(np.float32),
}
SIZE = 48 + 128 + 8
ROWS = np.linalg.qr(RNG.normal(size=(SIZE, K)))[0].T
CURVATURES = RNG.uniform(0.5, 1.5, SIZE)
SUBSPACE = subspace_of(ROWS, PARAMS)


def flat(tree):
  return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)]).astype(np.float64)


def tree_of(vector, like=PARAMS):
  leaves, structure = jax.tree.flatten(like)
  parts = np.split(vector, np.cumsum([leaf.size for leaf in leaves])[:-1])
  parts = [p.reshape(x.shape).astype(x.dtype) for p, x in zip(parts, leaves, strict=True)]
  return jax.tree.unflatten(structure, parts)


WEIGHTS = tree_of(CURVATURES)


def loss_fn(params, batch=1.0):
  terms = jax.tree.map(lambda p, c: jnp.sum(c * p**2), params, WEIGHTS)
  return 0.5 * batch * sum(jax.tree.leaves(terms))


loss_gradient = jax.jit(jax.grad(loss_fn))


def gradient(w):
  return CURVATURES * w


def residual(state):
  """The residual momentum, out of its two parts."""
  (q,) = state.projected_momentum
  q, momentum, basis = jax.device_get((q, state.momentum, state.basis))
  return jax.tree.map(lambda m, rows: m - np.tensordot(q, rows, 1), momentum, basis)


def run(tx, steps, params=PARAMS, batch=1.0):
  step = optax_boost.make_train_step(loss_fn, tx)
  state = step.init(params)
  for _ in range(steps):
    state, metrics = step(state, batch)
  return state, metrics


def numpy_run(bases, steps, gamma, alpha):
  """Full quasi-Newton steps without search, in float64, one matrix of rows per group."""
  w, r = flat(PARAMS), np.zeros(SIZE)
  b = [np.eye(K) for _ in bases]
  s, last = [np.zeros(K) for _ in bases], [np.zeros(K) for _ in bases]
  for _ in range(steps):
    g = gradient(w)
    r = gamma * r + g
    move = np.zeros(SIZE)
    for i, rows in enumerate(bases):
      gk = rows @ g
      y = gk - last[i]
      if y @ s[i] > 1e-20:
        t = np.eye(K) - np.outer(y, s[i]) / (y @ s[i])
        b[i] = t.T @ b[i] @ t + np.outer(s[i], s[i]) / (y @ s[i])
      s[i], last[i] = -b[i] @ gk, gk
      move += rows.T @ s[i]
      r -= rows.T @ gk
    w = w + move - alpha * r
  return w


def test_without_a_search_the_full_step_is_taken_and_no_loss_is_needed():
  tx = optax_boost.dim_reduce(SUBSPACE, gamma=0.5, alpha=0.1, max_search=None)
  update = jax.jit(tx.update)
  params, state = PARAMS, tx.init(PARAMS)
  for _ in range(6):
    updates, state = update(loss_gradient(params), state, params)
    params = jax.tree.map(np.add, params, updates)
  np.testing.assert_allclose(flat(params), numpy_run([ROWS], 6, 0.5, 0.1), rtol=0, atol=5e-6)
  assert int(state.line_search_steps) == 0
  assert float(state.accepted_rho) == 1


def test_each_group_has_its_own_subspace():
  groups = ("conv", "dense|head")
  mask = np.arange(SIZE) < 48
  tx = optax_boost.dim_reduce(SUBSPACE, gamma=0.5, alpha=0.1, max_search=None, groups=groups)
  state, _ = run(tx, 6)
  expected = numpy_run([ROWS * mask, ROWS * ~mask], 6, 0.5, 0.1)
  np.testing.assert_allclose(flat(state.params), expected, rtol=0, atol=2e-5)
  assert state.opt_state.inverse_hessian.shape == (2, K, K)


def test_rows_that_are_longer_than_1_within_a_group_get_a_warning():
  groups = ("conv", "dense|head")
  parts = [np.where((np.arange(SIZE) < 48) == (group == 0), ROWS, 0) for group in range(2)]
  joined = sum(part / np.linalg.norm(part, axis=1, keepdims=True) for part in parts)
  subspace = subspace_of(np.float32(joined), PARAMS)
  state = optax_boost.dim_reduce(subspace, groups=groups).init(PARAMS)
  with pytest.warns(
    UserWarning, match=r"rows of length 1\.41, .* Pass the `groups` of `fit_subspace`"
  ) as caught:
    alone = optax_boost.dim_reduce(subspace).init(PARAMS)
  assert caught[0].filename == __file__
  with pytest.warns(UserWarning, match=r"rows of length 1\.41"):
    optax_boost.refresh_subspace(alone, subspace)
  optax_boost.refresh_subspace(state, subspace, groups=groups)


def test_the_residual_momentum_in_two_parts_does_not_drift():
  tx = optax_boost.dim_reduce(SUBSPACE, gamma=0.99, alpha=1e-3, max_search=None)
  state, inputs = tx.init(PARAMS), RNG.normal(size=(50, SIZE))
  gradients = jnp.asarray(inputs, jnp.float32)

  @jax.jit
  def many(state):
    def body(state, t):
      vector = gradients[t % 50] + 10.0  # an offset builds up in the momentum
      parts = jnp.split(vector, [48, 176])
      leaves = [p.reshape(x.shape) for p, x in zip(parts, jax.tree.leaves(PARAMS), strict=True)]
      grads = jax.tree.unflatten(jax.tree.structure(PARAMS), leaves)
      return tx.update(grads, state, PARAMS)[1], None

    return jax.lax.scan(body, state, jnp.arange(5000))[0]

  state = many(state)
  r = np.zeros(SIZE)
  for t in range(5000):
    g = np.float64(np.float32(inputs[t % 50])) + 10.0
    r = 0.99 * r + g - ROWS.T @ (ROWS @ g)
  found = flat(residual(state))
  assert np.abs(found - r).max() < 1e-5 * np.abs(r).max()


def test_the_first_trial_costs_one_forward_pass_and_each_that_fails_one_more():
  calls = []

  def value_fn(params):
    jax.debug.callback(lambda: calls.append(1))
    return loss_fn(params)

  tx = optax_boost.dim_reduce(SUBSPACE, max_search=4, rho=0.5, sigma=0.01)

  @jax.jit
  def step(steepness):
    grads = jax.tree.map(lambda g: steepness * g, jax.grad(loss_fn)(PARAMS))
    return tx.update(grads, tx.init(PARAMS), PARAMS, value=loss_fn(PARAMS), value_fn=value_fn)[1]

  for steepness, trials, length in ((1, 1, 1), (3, 2, 0.5), (6, 3, 0.25), (1e6, 4, 0)):
    calls.clear()
    state = step(steepness)
    jax.effects_barrier()
    assert len(calls) == trials == int(state.line_search_steps)
    assert float(state.accepted_rho) == length


def test_the_share_of_the_gradient_and_the_curvature_agree_with_the_loss():
  tx = optax_boost.dim_reduce(SUBSPACE, alpha=0.0)
  train = optax_boost.make_train_step(loss_fn, tx)
  state, _ = train(train.init(PARAMS), 1.0)
  first = flat(state.params)
  _, metrics = train(state, 1.0)
  g, step = gradient(first), first - flat(PARAMS)
  share = np.sum((ROWS @ g) ** 2) / np.sum(g**2)
  np.testing.assert_allclose(metrics["explained_gradient"], share, rtol=1e-4)
  curvature = step @ (CURVATURES * step) / (step @ step)
  np.testing.assert_allclose(metrics["curvature"], curvature, rtol=1e-4)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("max_search", "trials"), [(2, 2), ("auto", 30)])
def test_a_loss_that_is_not_finite_is_never_accepted(max_search, trials, bad):
  tx = optax_boost.dim_reduce(SUBSPACE, max_search=max_search)
  grads, value = loss_gradient(PARAMS), float(loss_fn(PARAMS))

  @jax.jit
  def step(state, value, batch):
    value_fn = functools.partial(loss_fn, batch=batch)
    return tx.update(grads, state, PARAMS, value=value, value_fn=value_fn)

  state = tx.init(PARAMS)
  _, after = step(state, value, bad)
  assert float(after.accepted_rho) == 0
  assert int(after.line_search_steps) == int(after.notfinite_count) == trials
  assert int(after.rejected_count) == 1
  chex.assert_trees_all_equal(after.inverse_hessian, state.inverse_hessian)
  updates, after = step(after, bad, 1.0)
  assert int(after.line_search_steps) == 0
  assert int(after.notfinite_count) == trials + 1
  chex.assert_tree_all_finite((updates, after))
  _, after = step(after, value, 1.0)
  assert float(after.accepted_rho) > 0


def test_the_quasi_newton_matrix_restarts_if_directions_overflow():
  grads = jax.tree.map(lambda g: 10 * np.asarray(g), loss_gradient(PARAMS))
  for max_search in (2, "auto"):
    tx = optax_boost.dim_reduce(SUBSPACE, max_search=max_search)
    state = tx.init(PARAMS)
    state = state._replace(inverse_hessian=np.full((1, K, K), 3e38, np.float32))
    step = jax.jit(functools.partial(tx.update, value_fn=loss_fn))
    updates, state = step(grads, state, PARAMS, value=loss_fn(PARAMS))
    chex.assert_tree_all_finite((updates, state))
    np.testing.assert_array_equal(state.inverse_hessian[0], np.eye(K))
    # The default goes on by steepest descent in the same step.
    assert (int(state.rejected_count), float(state.accepted_rho) > 0) == (
      (1, False) if max_search == 2 else (0, True)
    )


def test_a_gradient_that_is_not_finite_changes_a_counter_only():
  tx = optax_boost.dim_reduce(SUBSPACE)
  step = jax.jit(lambda g, s: tx.update(g, s, PARAMS, value=1.0, value_fn=loss_fn))
  grads = loss_gradient(PARAMS)
  _, state = step(grads, tx.init(PARAMS))
  bad = grads | {"head": grads["head"].at[2].set(jnp.nan)}
  updates, after = step(bad, state)
  assert int(after.notfinite_count) == 1
  assert np.isnan(flat(updates)).sum() == 1
  assert np.nansum(np.abs(flat(updates))) == 0
  same = ("momentum", "projected_momentum", "inverse_hessian", "projected_gradient", "last_step")
  for name in same:
    chex.assert_trees_all_equal(getattr(after, name), getattr(state, name))


def sharded(tree, mesh):
  """The last axis over "x", the one before it over "y" where there is one."""

  def place(leaf):
    axes = [None] * max(leaf.ndim - 2, 0) + ["y", "x"][-min(leaf.ndim, 2) :]
    spec = jax.sharding.PartitionSpec(*axes)
    return jax.device_put(leaf, jax.sharding.NamedSharding(mesh, spec))

  return jax.tree.map(place, tree)


def exchanged(program):
  """Kind of each collective in a compiled program, and the sizes of what it sends."""
  found = []
  kinds = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute"
  for line in program.as_text().splitlines():
    match = re.search(rf"= (.*?) ({kinds})(?:-start)?\(", line)
    if match:
      shapes = re.findall(r"\w+\[([\d,]*)\]", match[1])
      found += [(match[2], int(np.prod([int(n) for n in s.split(",") if n]))) for s in shapes]
  return found


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_only_k_numbers_and_losses_cross_devices(kind):
  mesh = meshes.mesh((4, 2), ("x", "y"), kind)
  tx = optax_boost.dim_reduce(SUBSPACE, alpha=0.1)

  def step(params, state, grads):
    updates, state = tx.update(grads, state, params, value=loss_fn(PARAMS), value_fn=loss_nearby)
    return optax.apply_updates(params, updates), state

  def loss_nearby(params):
    return 0.5 * sum(jnp.sum(x**2) for x in jax.tree.leaves(params))

  def go(params, grads):
    state = tx.init(params)
    program = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, grads).compile()
    for _ in range(2):
      params, state = program(params, state, grads)
    return params, state, program

  grads = loss_gradient(PARAMS)
  expected = go(jax.tree.map(jnp.array, PARAMS), grads)
  with jax.set_mesh(mesh):
    found = go(sharded(PARAMS, mesh), sharded(grads, mesh))
  assert {name for name, _ in exchanged(found[2])} == {"all-reduce"}
  assert max(size for _, size in exchanged(found[2])) <= K
  for rows, leaf in zip(*map(jax.tree.leaves, (found[1].basis, found[0])), strict=True):
    assert rows.sharding.spec == jax.sharding.PartitionSpec(None, *leaf.sharding.spec)
  np.testing.assert_allclose(flat(found[0]), flat(expected[0]), rtol=0, atol=1e-5)


def test_the_basis_is_sharded_by_init_under_jit_on_an_explicit_mesh():
  mesh = meshes.mesh((4, 2), ("x", "y"), "Explicit")
  tx = optax_boost.dim_reduce(SUBSPACE)
  with jax.set_mesh(mesh):
    state = jax.jit(tx.init)(sharded(PARAMS, mesh))
  kernel = state.basis["dense"]["kernel"]
  assert kernel.sharding.spec == jax.sharding.PartitionSpec(None, "y", "x")


def test_a_population_can_share_one_basis():
  tx = optax_boost.dim_reduce(SUBSPACE, alpha=0.1, max_search=3)
  scales = np.float32([0.5, 1.0, 3.0])
  population = jax.tree.map(lambda x: np.multiply.outer(scales, x), PARAMS)
  first = population
  axes = jax.tree.map(lambda _: 0, tx.init(PARAMS))
  axes = axes._replace(basis=None)

  def step(params, state, batch):
    value_fn = functools.partial(loss_fn, batch=batch)
    value, grads = jax.value_and_grad(value_fn)(params)
    updates, state = tx.update(grads, state, params, value=value, value_fn=value_fn)
    return optax.apply_updates(params, updates), state

  state = jax.jit(jax.vmap(tx.init, out_axes=axes))(population)
  steps = jax.jit(jax.vmap(step, in_axes=(0, axes, 0), out_axes=(0, axes)))
  # What is too steep for one trial takes more of them than its neighbours.
  batches = np.float32([1.0, 2.5, 4.0])
  single = jax.jit(step)
  different = []
  for _ in range(4):
    population, state = steps(population, state, batches)
    different.append(len(set(state.line_search_steps.tolist())) > 1)
  assert any(different)
  assert state.basis["head"].shape == (K, 8)
  for i in range(3):
    one = jax.tree.map(lambda x, i=i: x[i], first)
    alone, alone_state = one, tx.init(one)
    for _ in range(4):
      alone, alone_state = single(alone, alone_state, batches[i])
    member = jax.tree.map(lambda x, i=i: np.asarray(x)[i], population)
    np.testing.assert_allclose(flat(member), flat(alone), rtol=0, atol=1e-5)
    assert int(state.rejected_count[i]) == int(alone_state.rejected_count)


@pytest.mark.parametrize("max_search", [None, 2])
def test_a_step_needs_a_few_copies_of_the_params_and_its_donated_state(max_search):
  like = {"a": jnp.zeros((64, 128)), "b": jnp.zeros((3, 3, 16, 64)), "c": jnp.zeros(512)}
  size, k = sum(x.size for x in like.values()), 8
  subspace = subspace_of(np.full((k, size), size**-0.5, np.float32), like)
  tx = optax_boost.dim_reduce(subspace, max_search=max_search)

  def value_fn(params):
    return sum(jnp.sum(x**2) for x in jax.tree.leaves(params))

  def step(params, state, grads):
    value = value_fn(params)
    updates, state = tx.update(grads, state, params, value=value, value_fn=value_fn)
    return optax.apply_updates(params, updates), state

  state = tx.init(like)
  compiled = jax.jit(step, donate_argnums=(0, 1)).lower(like, state, like).compile()
  memory = compiled.memory_analysis()
  # Products of less than 32 MB are one product to XLA for GPUs, which it cuts apart again. With JAX
  # 0.11.2 this is 4.6 copies on an H100, and 2.0 of a hundred times as many params.
  copies = 4 if jax.default_backend() == "cpu" else 5
  assert memory.temp_size_in_bytes < copies * 4 * size + 2**14
  # Params, momentum and basis are all written where they were.
  assert memory.alias_size_in_bytes >= 4 * (k + 2) * size


def test_small_leaves_of_one_shape_share_a_product():
  def products(number):
    like = {i: jnp.ones(16) for i in range(number)}
    tx = optax_boost.dim_reduce(subspace_of(np.eye(3, 16 * number), like))

    def step(params):
      state = tx.init(params)
      return tx.update(params, state, params, value=1.0, value_fn=lambda p: jnp.sum(p[0]))

    lifted = number  # of each leaf
    return str(jax.make_jaxpr(step)(like)).count("dot_general") - lifted

  assert products(20) == products(2)


def test_refresh_subspace_replaces_the_basis_anywhere_in_a_chain():
  other = subspace_of(np.linalg.qr(RNG.normal(size=(SIZE, K)))[0].T, PARAMS)
  chain = optax.chain(optax.clip(1e9), optax_boost.dim_reduce(SUBSPACE, alpha=0.1))
  state, _ = run(chain, 3)
  before = residual(state.opt_state[1])
  renewed = optax_boost.refresh_subspace(state.opt_state, other)[1]
  np.testing.assert_allclose(flat(residual(renewed)), flat(before), rtol=0, atol=1e-5)
  chex.assert_trees_all_close(renewed.basis, other.basis, rtol=1e-6)
  assert int(renewed.refresh_count) == 1
  bad = other._replace(basis=jax.tree.map(lambda x: x * np.nan, other.basis))
  kept = optax_boost.refresh_subspace(renewed, bad)
  assert int(kept.notfinite_count) == 1
  chex.assert_trees_all_equal(kept.basis, renewed.basis)
  chex.assert_trees_all_equal(kept.momentum, renewed.momentum)


def test_a_bfloat16_subspace_is_kept_as_it_is():
  half = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), SUBSPACE.basis)
  state = optax_boost.dim_reduce(SUBSPACE._replace(basis=half)).init(PARAMS)
  assert state.basis["head"].dtype == jnp.bfloat16


def whole_space(size):
  return subspace_of(np.eye(size, dtype=np.float32), jnp.zeros(size))


def losses_of(tx, value_fn, start, steps):
  """The losses of a run, one more than steps, and its last metrics."""
  step = optax_boost.make_train_step(lambda params, batch: value_fn(params), tx)
  state = step.init(jnp.asarray(start, jnp.float32))
  losses, counts = [], []
  for t in range(steps + 1):
    (state, metrics), compiled = compilations.counted(lambda: step(state, None))  # noqa: B023
    assert t == 0 or compiled == 0
    losses.append(float(metrics["loss"]))
    counts.append(int(metrics["line_search_steps"]))
  return losses, metrics | {"trials": sum(counts), "most": max(counts)}


def rosenbrock(x):
  return jnp.sum(100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2)


def test_the_default_minimizes_rosenbrocks_function_although_two_trials_do_not_suffice():
  losses, metrics = losses_of(
    optax_boost.dim_reduce(whole_space(4)), rosenbrock, [-1.2, 1.0, -1.2, 1.0], 100
  )
  assert min(losses) < 1e-8
  assert int(metrics["rejected_count"]) <= 5
  assert metrics["most"] <= 30
  # MindSpore's search rejects every step, and counts that.
  tx = optax_boost.dim_reduce(whole_space(4), max_search=2)
  losses, metrics = losses_of(tx, rosenbrock, [-1.2, 1.0, -1.2, 1.0], 100)
  assert losses[-1] > 0.99 * losses[0]
  assert int(metrics["rejected_count"]) == 101


@pytest.mark.optimized
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_the_default_minimizes_a_quadratic_of_any_scale(scale):
  curvatures = jnp.logspace(0, 4, 12) * scale
  losses, metrics = losses_of(
    optax_boost.dim_reduce(whole_space(12), alpha=0.0),
    lambda x: 0.5 * jnp.sum(curvatures * x**2),
    np.ones(12),
    60,
  )
  assert losses[-1] < 1e-3 * losses[0]
  # Not a search from the full step each time.
  assert metrics["trials"] < 2.5 * 60


def test_the_default_continues_although_rounding_errors_hide_the_decrease():
  losses, _ = losses_of(
    optax_boost.dim_reduce(whole_space(3), alpha=0.0),
    lambda x: 1e4 + jnp.sum(jnp.array([1e-4, 1e-3, 1e-2]) * x**2),
    10 * np.ones(3),
    60,
  )
  assert losses[-1] - 1e4 < 0.1 * (losses[0] - 1e4)


def test_a_trial_is_judged_by_the_change_that_the_inner_optimizer_makes_of_it():
  """SGD makes a hundredth of each trial, so the loss has a hundredth of the slope to fall by."""
  tx = optax_boost.dim_reduce(whole_space(2), sigma=0.5, alpha=0.0, inner=optax.sgd(0.01))
  start = np.float32([3.0, -2.0])
  step = optax_boost.make_train_step(lambda params, batch: 0.5 * jnp.sum(params**2), tx)
  state, metrics = step(step.init(jnp.asarray(start)), None)
  # On a parabola 0.995 of the linear change is reached, which is more than half of it.
  assert int(metrics["line_search_steps"]) == 1
  np.testing.assert_allclose(state.params, 0.99 * start, rtol=1e-6)


@pytest.mark.parametrize(
  ("accepted", "tried", "short", "expected"),
  [
    (0.5, 1, False, 1.0),
    (0.5, 2, False, 0.5),
    (0.5, 2, True, 0.5),
    (1.0, 1, False, 1.0),
    (1.0, 1, True, 2.0),
    (2.0, 1, False, 2.0),
    (2.0, 1, True, 4.0),
    (4.0, 3, True, 4.0),
  ],
)
def test_a_search_starts_from_a_longer_step_only_if_the_last_search_accepted_its_first_trial(
  accepted, tried, short, expected
):
  """Beyond 1 only if that step ended before the minimum; and never shorter than it was."""
  search = _quasi_newton.Search(
    accepted=jnp.float32(accepted),
    tried=jnp.int32(tried),
    notfinite=jnp.int32(0),
    step=jnp.float32(accepted / 2),
    hidden=jnp.bool_(False),
    short=jnp.bool_(short),
  )
  first, no = jnp.float32(accepted * 2 ** (tried - 1)), jnp.bool_(False)
  assert _quasi_newton.next_step(search, first, no, jnp.float32(1), 0.5) == expected


def test_a_gradient_of_zero_does_not_count_as_a_rejected_step():
  losses, metrics = losses_of(
    optax_boost.dim_reduce(whole_space(2)), lambda x: jnp.sum(x**2), np.zeros(2), 3
  )
  assert losses == [0, 0, 0, 0]
  assert int(metrics["rejected_count"]) == metrics["trials"] == 0


def numpy_through_sgd(steps, rate, momentum, rho, sigma, gamma, alpha, steepness):
  """MindSpore's DimReduce with its SGD, whose velocity trials leave as it was; in float64."""

  def loss(w):
    return 0.5 * steepness * np.sum(CURVATURES * w**2)

  w, r, velocity = flat(PARAMS), np.zeros(SIZE), np.zeros(SIZE)
  b, s, last, found = np.eye(K), np.zeros(K), np.zeros(K), []

  def sgd(pseudo_gradient):
    new = momentum * velocity + pseudo_gradient
    return -rate * new, new

  for t in range(steps):
    g = steepness * gradient(w)
    gk, before, last_before = ROWS @ g, b, last
    y = gk - last
    if t and y @ s > 1e-20:
      transform = np.eye(K) - np.outer(y, s) / (y @ s)
      b = transform.T @ b @ transform + np.outer(s, s) / (y @ s)
    last, d = gk, -b @ gk
    length = 0.0
    for trial in (1.0, rho):
      change, _ = sgd(-trial * (ROWS.T @ d))
      if loss(w) + sigma * trial * (gk @ d) > loss(w + change):
        length, s = trial, trial * d
        break
    if not length:
      b, last = before, last_before
    found.append(length)
    r = gamma * r + g - ROWS.T @ gk
    change, velocity = sgd(alpha * r - length * (ROWS.T @ d))
    w = w + change
  return w, velocity, found


@pytest.mark.parametrize(("rate", "momentum", "steepness"), [(0.7, 0.3, 1.8), (1.0, 0.5, 1.0)])
def test_trials_and_steps_go_through_the_inner_optimizer_as_in_mindspore(rate, momentum, steepness):
  arguments = {"rho": 0.55, "sigma": 0.2, "gamma": 0.5, "alpha": 0.1}
  w, velocity, lengths = numpy_through_sgd(8, rate, momentum, steepness=steepness, **arguments)
  inner = optax.sgd(rate, momentum)
  tx = optax_boost.dim_reduce(SUBSPACE, **arguments, max_search=2, inner=inner)
  step = optax_boost.make_train_step(loss_fn, tx)
  state, found = step.init(PARAMS), []
  for _ in range(8):
    state, metrics = step(state, steepness)
    found.append(float(metrics["accepted_rho"]))
  np.testing.assert_allclose(found, lengths, rtol=1e-6)
  assert {0.0, 0.55, 1.0} >= set(lengths)
  assert len(set(lengths)) > 1
  np.testing.assert_allclose(flat(state.params), w, rtol=0, atol=1e-5)
  trace = optax.tree.get(state.opt_state.inner_state, "trace")
  np.testing.assert_allclose(flat(trace), velocity, rtol=0, atol=1e-4)


def test_trials_do_not_change_the_state_of_the_inner_optimizer():
  tx = optax_boost.dim_reduce(SUBSPACE, alpha=0.1, inner=optax.adam(0.01), max_search=7)
  grads = loss_gradient(PARAMS)

  def rejecting(params):
    return 10 + loss_fn(params)

  update = jax.jit(functools.partial(tx.update, value_fn=rejecting))
  state = tx.init(PARAMS)
  _, after = update(grads, state, PARAMS, value=loss_fn(PARAMS))
  assert int(after.line_search_steps) == 7
  # One step with the residual alone.
  g = flat(grads)
  expected = tree_of(0.1 * (g - ROWS.T @ (ROWS @ g)))
  _, adam = jax.jit(optax.adam(0.01).update)(expected, state.inner_state, PARAMS)
  chex.assert_trees_all_close(after.inner_state, adam, rtol=1e-3, atol=1e-6)
  # A gradient that is not finite makes none.
  bad = grads | {"head": grads["head"].at[2].set(jnp.nan)}
  updates, again = update(bad, after, PARAMS, value=1.0)
  chex.assert_trees_all_equal(again.inner_state, after.inner_state)
  assert np.isnan(flat(updates)).sum() == 1
  assert np.nansum(np.abs(flat(updates))) == 0


def test_refuses_an_inner_optimizer_that_scales_the_loss():
  inner = optax_boost.dynamic_loss_scale(optax.sgd(0.1))
  with pytest.raises(ValueError, match=r"`dim_reduce` can't hold `dynamic_loss_scale`"):
    optax_boost.dim_reduce(SUBSPACE, inner=inner).init(PARAMS)


@pytest.mark.parametrize("kind", ["masked", "partition"])
def test_inside_masked_and_partition_it_accepts_every_argument_of_the_train_step(kind):
  inner = optax.chain(optax.trace(0.5), takes_grad(), optax.sgd(1.0))
  tx = optax_boost.dim_reduce(SUBSPACE, alpha=0.05, inner=inner)
  mask = optax_boost.path_mask("conv|head")
  if kind == "masked":
    tx = optax.masked(tx, mask)
    tx = optax.chain(tx, optax.masked(optax.sgd(0.5), optax_boost.path_mask("dense")))
  else:
    labels = jax.tree.map(lambda ours: "ours" if ours else "sgd", mask(PARAMS))
    tx = optax.partition({"ours": tx, "sgd": optax.sgd(0.5)}, labels)
  _, metrics = run(tx, 40)
  assert metrics["loss"] < 0.1 * loss_fn(PARAMS)


def takes_grad():
  """Refuses a `grad` of another tree than its updates."""

  def update(updates, state, params=None, *, grad, value_fn, **extra):
    assert jax.tree.structure(grad) == jax.tree.structure(updates)
    return updates, state

  return optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)


@pytest.mark.parametrize("value", [jnp.ones(2), "low", None, 1j])
def test_a_loss_must_be_a_scalar(value):
  tx = optax_boost.dim_reduce(SUBSPACE)

  def step(**loss):
    def update(params):
      return tx.update(params, tx.init(params), params, **loss)

    jax.eval_shape(update, PARAMS)

  if value is not None:
    with pytest.raises(TypeError, match=r"extra argument `value` to be the scalar loss; got"):
      step(value=value, value_fn=loss_fn)
  with pytest.raises(TypeError, match=r"`value_fn\(params\)` that returns the scalar loss; it ret"):
    step(value=1.0, value_fn=lambda params: value)
  with pytest.raises(TypeError, match=r"`value_fn` must be callable"):
    step(value=1.0, value_fn=3)


def nnx_model():
  rngs = nnx.Rngs(0)
  return nnx.Sequential(nnx.Linear(6, 4, rngs=rngs), nnx.tanh, nnx.Linear(4, 1, rngs=rngs))


def test_a_subspace_fits_whatever_the_arrays_of_the_params_are_wrapped_in():
  state = nnx.state(nnx_model(), nnx.Param)
  pure = _model.as_pure(state)
  values = jax.tree.map(np.asarray, pure)
  rows = [jax.tree.map(lambda p, t=t: p + np.sin(7 * t + p), values) for t in range(4)]
  tx = optax_boost.dim_reduce(optax_boost.fit_subspace(rows, 2))
  found = tx.init(state).basis
  # Variables tell of the params' shapes.
  chex.assert_trees_all_equal(found, tx.init(pure).basis)
  part = optax.masked(tx, optax_boost.path_mask("layers/0/kernel")).init(state).inner_state.basis
  assert [leaf.shape for leaf in jax.tree.leaves(part)] == [(2, 6, 4)]
  # Neither less nor more than the params have.
  for params in (pure | {"more": jnp.ones(3)}, {"layers": {0: pure["layers"][0]}}):
    with pytest.raises(ValueError, match=r"needs a subspace of its params; got a basis of the st"):
      tx.init(params)


@pytest.mark.parametrize(
  ("kwargs", "error", "text"),
  [
    (
      {"subspace": SUBSPACE._replace(explained_variance=np.arange(3))},
      TypeError,
      r"`subspace` must be a Subspace of real floating-point arrays; got int64 at 'explained_v",
    ),
    (
      {"subspace": SUBSPACE._replace(basis=PARAMS)},
      ValueError,
      r"one row of the basis per component; got \(3,\) variances and shape .* at 'basis/dense",
    ),
    ({"max_search": "all"}, ValueError, r"`max_search` must be one of 'auto'; got 'all'"),
  ],
)
def test_refuses_bad_subspaces_and_bad_settings_of_the_search(kwargs, error, text):
  with pytest.raises(error, match=text):
    optax_boost.dim_reduce(**{"subspace": SUBSPACE} | kwargs)


def test_refuses_a_subspace_of_other_params():
  with pytest.raises(
    ValueError, match=r"needs a subspace of its params; got a basis of the struct"
  ):
    optax_boost.dim_reduce(SUBSPACE).init({"dense": PARAMS["dense"]})
  other = PARAMS | {"head": jnp.ones(9)}
  with pytest.raises(ValueError, match=r"got \(3, 8\) for the leaf 'head' of shape \(9,\). Fit"):
    optax_boost.dim_reduce(SUBSPACE).init(other)


def test_refresh_subspace_refuses_a_subspace_that_does_not_fit():
  state = optax_boost.dim_reduce(SUBSPACE).init(PARAMS)
  with pytest.raises(ValueError, match=r"needs an optimizer state with a DimReduceState in it"):
    optax_boost.refresh_subspace(optax.sgd(0.1).init(PARAMS), SUBSPACE)
  with pytest.raises(ValueError, match=r"of the state's subspace, \(1, 3\); got \(1, 2\)"):
    optax_boost.refresh_subspace(state, subspace_of(ROWS[:2], PARAMS))
  with pytest.raises(ValueError, match=r"\(1, 3\); got \(2, 3\). Pass the `groups` of"):
    optax_boost.refresh_subspace(state, SUBSPACE, groups=["conv", "dense"])
  with pytest.raises(TypeError, match=r"`subspace` must be a Subspace, as `fit_subspace` returns"):
    optax_boost.refresh_subspace(state, ROWS)


@pytest.mark.parametrize("missing", ["value", "value_fn"])
def test_says_that_a_search_needs_the_loss(missing):
  tx = optax_boost.dim_reduce(SUBSPACE)
  extra = {"value": loss_fn(PARAMS), "value_fn": loss_fn}
  extra.pop(missing)
  with pytest.raises(ValueError, match=rf"needs the extra argument `{missing}` \(.*make_train_st"):
    tx.update(PARAMS, tx.init(PARAMS), PARAMS, **extra)

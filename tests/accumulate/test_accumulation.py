"""Gradient accumulation, in cases in which a naive implementation goes wrong."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
from tests import problems


def counting():
  """An inner optimizer that reports every run of its update."""
  runs = []

  def update(updates, state, params=None, **extra):
    del params, extra
    jax.debug.callback(lambda: runs.append(1))
    return updates, state + 1

  return optax.GradientTransformationExtraArgs(
    lambda params: jnp.zeros([], jnp.int32), update
  ), runs


def test_the_inner_optimizer_runs_once_per_window():
  inner, runs = counting()
  tx = optax_boost.accumulate(inner, every=3)
  state, update = tx.init(jnp.zeros(2)), jax.jit(tx.update)
  for _ in range(7):
    _, state = update(jnp.ones(2), state)
  jax.effects_barrier()
  assert len(runs) == state.count == state.inner_count == state.inner_state == 2
  assert state.accumulation.count == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_micro_batch_is_as_if_it_had_never_come(bad):
  tx = optax_boost.accumulate(optax.sgd(1.0), every=2)
  state = tx.init(jnp.zeros(2))
  for grad in ([2.0, 0.0], [bad, 1.0], [4.0, 0.0]):
    updates, state = jax.jit(tx.update)(jnp.array(grad), state)
  np.testing.assert_array_equal(updates, [-3.0, 0.0])
  assert state.notfinite_count == 1


def test_bad_micro_batches_alone_never_end_a_window():
  tx = optax_boost.accumulate(optax.adam(1.0), every=2)
  state = tx.init(jnp.zeros(2))
  for _ in range(5):
    updates, state = tx.update(jnp.full(2, jnp.nan), state)
  assert not jnp.any(updates)
  assert state.inner_count == state.accumulation.count == state.count == 0
  for _ in range(2):
    updates, state = tx.update(jnp.ones(2), state)
  np.testing.assert_allclose(updates, -1.0, rtol=1e-5)


def test_a_kept_bad_micro_batch_spoils_one_window_only():
  inner = optax.apply_if_finite(optax.sgd(1.0), 5)
  tx = optax_boost.accumulate(inner, every=2, not_finite="keep")
  state = tx.init(jnp.zeros(2))
  seen = []
  for value in (1.0, np.nan, 1.0, 3.0):
    updates, state = tx.update(jnp.full(2, value), state)
    seen.append(updates.tolist())
  assert seen == [[0, 0], [0, 0], [0, 0], [-2, -2]]
  assert optax.tree.get(state, "total_notfinite") == 1


def test_half_precision_gradients_are_summed_in_float32():
  tx = optax_boost.accumulate(optax.sgd(1.0), every=2)
  big, small = jnp.array([2048.0], jnp.float16), jnp.array([1.0], jnp.float16)
  state = tx.init(small)
  _, state = tx.update(big, state)
  assert state.accumulator.dtype == jnp.float32
  window = state.accumulation._replace(count=jnp.int32(-1))
  total = tx.update(small, state._replace(accumulation=window))[1].accumulator
  assert total[0] == 2049


def test_the_length_of_a_window_may_follow_the_inner_steps():
  tx = optax_boost.accumulate(optax.sgd(1.0), every=lambda inner_count: 1 + inner_count)
  state = tx.init(jnp.zeros(1))
  moved = []
  for _ in range(6):
    updates, state = jax.jit(tx.update)(jnp.ones(1), state)
    moved.append(bool(jnp.any(updates)))
  assert moved == [True, False, True, False, False, True]


@pytest.mark.parametrize("in_place", [False, True])
def test_the_inner_optimizer_sees_the_mean_gradient_and_the_mean_loss(in_place):
  def update(updates, state, params=None, *, grad, value, **extra):
    del params, extra
    return updates, {"grad": grad, "value": jnp.asarray(value)}

  inner = optax.GradientTransformationExtraArgs(
    lambda p: {"grad": p, "value": jnp.zeros([])}, update
  )
  tx = optax_boost.accumulate(inner, every=2)
  params = jnp.zeros(1)
  state = tx.init(params)
  step = functools.partial(optax_boost.apply_gradients, tx) if in_place else tx.update
  for g, weight, value in ((1.0, 1.0, 10.0), (np.nan, 5.0, 100.0), (3.0, 3.0, 20.0)):
    grad = jnp.full(1, g)
    _, state = step(grad, state, params, grad=grad, value=value, weight=weight)
  assert state.inner_state == {"grad": 2.5, "value": 17.5}
  assert state.value_sum == 0


def descend(tx, loss_of, batches, params):
  """Trains in plain optax; returns the params."""
  state = tx.init(params)
  for batch in batches:
    value, grad = jax.value_and_grad(loss_of)(params, batch)
    updates, state = tx.update(grad, state, params, value=value, grad=grad)
    params = optax.apply_updates(params, updates)
  return params


@pytest.mark.parametrize(
  "inner", [lambda: optax.polyak_sgd(f_min=0.0), lambda: optax.contrib.momo(0.5)]
)
def test_an_optimizer_that_reads_the_loss_makes_the_large_batchs_step(inner):
  rng = np.random.default_rng(0)
  batches, params = jnp.asarray(rng.normal(size=(8, 3)), jnp.float32), jnp.ones(3)

  def loss_of(params, batch):
    return jnp.mean(jnp.sum((params - jnp.atleast_2d(batch)) ** 2, -1))

  small = descend(optax_boost.accumulate(inner(), 2), loss_of, batches, params)
  large = descend(inner(), loss_of, batches.reshape(4, 2, 3), params)
  np.testing.assert_allclose(small, large, rtol=1e-5)


@pytest.mark.parametrize("name", ["value_fn", "grad_fn"])
def test_an_optimizer_that_calls_the_loss_is_refused_in_a_window(name):
  def update(updates, state, params=None, **extra):
    extra[name](params)
    return updates, state

  inner = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
  params = jnp.ones(1)
  arguments = {name: jax.grad(jnp.sum) if name == "grad_fn" else jnp.sum}
  tx = optax_boost.accumulate(inner, 2)
  with pytest.raises(ValueError, match=r"`accumulate` can't hold .* as line searches do"):
    tx.update(params, tx.init(params), params, **arguments)
  tx = optax_boost.accumulate(inner, 1)
  tx.update(params, tx.init(params), params, **arguments)


def test_a_line_search_of_optax_is_refused_in_a_window_of_a_train_step():
  tx = optax_boost.accumulate(optax.lbfgs(), 2)
  step = optax_boost.make_train_step(lambda params, x: jnp.sum(params * x), tx)
  with pytest.raises(ValueError, match=r"`accumulate` can't hold .* as line searches do"):
    step(step.init(jnp.ones(1)), 1.0)


def test_refuses_a_weight_per_example():
  tx = optax_boost.accumulate(optax.sgd(0.1), 2)
  with pytest.raises(ValueError, match=r"`weight` must be a scalar; got an array of shape \(4,\)"):
    tx.update(jnp.ones(1), tx.init(jnp.ones(1)), weight=jnp.ones(4))


def test_the_compiled_program_grows_in_proportion_to_the_leaves():
  def size(leaves):
    tx = optax_boost.accumulate(optax.sgd(0.1), every=2)
    grads = [jnp.ones((4, 4))] * leaves
    return len(jax.jit(tx.update).lower(grads, tx.init(grads)).compile().as_text())

  # A check of all leaves that XLA fuses into each leaf's loop makes it grow quadratically.
  assert size(48) < 5 * size(12)


@pytest.mark.parametrize("kind", ["whole", "inside masters"])
def test_a_loss_scale_inside_sees_every_overflow_and_shrinks(kind):
  scaled = {
    "whole": optax_boost.dynamic_loss_scale(optax.sgd(0.1), 2.0**24),
    "inside masters": optax_boost.master_weights(
      optax_boost.dynamic_loss_scale(optax.sgd(0.1), 2.0**24)
    ),
  }[kind]
  tx = optax_boost.accumulate(scaled, every=2)
  params = jnp.ones(2)

  def body(state, overflow):
    _, state = tx.update(jnp.full(2, jnp.where(overflow, jnp.inf, 1.0)), state, params)
    return state, None

  # One overflow in a window is enough.
  state, _ = jax.lax.scan(body, tx.init(params), jnp.arange(20) % 2 == 0)
  np.testing.assert_array_equal(optax.tree.get(state, "loss_scale"), 2.0**14)
  assert state.notfinite_count == 10


def test_finite_gradients_are_dropped_and_counted_if_their_sum_overflows():
  tx = optax_boost.accumulate(optax.sgd(0.1, 0.9), every=2)
  params = jnp.zeros(2)
  state = tx.init(params)
  for value in (3e38, 3e38, 1e38, 1e37):
    updates, state = tx.update(jnp.full(2, value), state, params)
  assert state.notfinite_count == 2
  assert state.inner_count == 1
  chex.assert_tree_all_finite((updates, state))


@pytest.mark.parametrize("weight", [np.nan, -1.0, np.inf, 10**400, jnp.float32(-1)])
def test_refuses_a_weight_that_cannot_be_a_number_of_examples(weight):
  tx = optax_boost.accumulate(optax.sgd(0.1), 2)
  with pytest.raises(ValueError, match=r"`weight` must be finite and >= 0"):
    tx.update(jnp.ones(1), tx.init(jnp.ones(1)), weight=weight)


@pytest.mark.parametrize("weight", [np.nan, -1.0, np.inf])
@pytest.mark.parametrize("not_finite", ["drop", "keep"])
def test_a_traced_weight_that_cannot_be_a_number_of_examples_is_left_out_and_counted(
  weight, not_finite
):
  tx = optax_boost.accumulate(optax.sgd(1.0), every=2, not_finite=not_finite)
  state = tx.init(jnp.zeros(1))
  update = jax.jit(lambda g, state, weight: tx.update(g, state, weight=weight))
  _, state = update(jnp.ones(1), state, weight)
  _, state = update(jnp.full(1, 3.0), state, 2.0)
  updates, state = update(jnp.full(1, 3.0), state, 2.0)
  np.testing.assert_array_equal(updates, [-3.0])
  assert state.notfinite_count == 1


def test_the_mean_over_the_devices_is_the_mean_over_all_tokens():
  """The devices' micro-batches have different numbers of tokens."""
  rng = np.random.default_rng(0)
  grads = rng.normal(size=(3, 8, 5)).astype(np.float32)
  tokens = rng.integers(0, 9, size=(3, 8)).astype(np.float32)
  tokens[:, 2] = 0  # A device without tokens.
  inner = optax.chain(optax.stateless(lambda g, _: jax.lax.pmean(g, "x")), optax.sgd(1.0))
  tx = optax_boost.accumulate(inner, every=3, axis_name="x")

  def run(grads, tokens):
    params = jnp.zeros(5)
    state = tx.init(params)
    for t in range(3):
      updates, state = tx.update(grads[t, 0], state, params, weight=tokens[t, 0])
    return updates[None]

  spec = jax.sharding.PartitionSpec(None, "x")
  mapped = jax.shard_map(
    run,
    mesh=problems.mesh("Auto"),
    in_specs=(spec, spec),
    out_specs=jax.sharding.PartitionSpec("x"),
    check_vma=False,
  )
  means = jax.jit(mapped)(grads, tokens)
  expected = -np.einsum("tdk,td->k", grads, tokens) / tokens.sum()
  np.testing.assert_allclose(means, np.tile(expected, (8, 1)), rtol=1e-5, atol=1e-6)


def test_an_error_for_an_unknown_treatment_lists_the_known_ones():
  with pytest.raises(
    ValueError, match=r"`not_finite` must be one of 'drop', 'keep', 'restart', None; got 'n"
  ):
    optax_boost.accumulate(optax.sgd(0.1), 2, not_finite="none")


ROUNDED = {
  "masters": optax_boost.master_weights,
  "an average": lambda tx: optax_boost.average_params(optax_boost.master_weights(tx), start=0),
  "a loss scale": lambda tx: optax_boost.dynamic_loss_scale(optax_boost.master_weights(tx), 1.0),
}


@pytest.mark.parametrize("inside", ROUNDED)
@pytest.mark.parametrize(
  ("dtype", "values"), [("bfloat16", (1.0, 1.0078125)), ("float16", (6e-8, 0.0))]
)
def test_masters_inside_take_the_mean_of_a_window_unrounded(inside, dtype, values):
  grads = np.array(values).astype(jnp.dtype(dtype))
  tx = optax_boost.accumulate(ROUNDED[inside](optax.sgd(1.0)), 2)
  params = jnp.zeros(1, dtype)
  state = tx.init(params)
  for g in grads:
    params, state = optax_boost.apply_gradients(tx, jnp.asarray([g]), state, params)
  (masters,) = optax.tree.get(state, "master_params")
  assert masters == -np.mean(grads.astype(np.float32))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_mean_of_bfloat16_gradients_has_the_params_precision(dtype):
  seen = []
  inner = optax.stateless(lambda updates, params: seen.append(updates.dtype) or updates)
  tx, params = optax_boost.accumulate(inner, 2), jnp.zeros(1, dtype)
  state = tx.init(params)
  for g in (1.0, 1.0078125):  # the mean is between two numbers of bfloat16
    updates, state = tx.update(jnp.full(1, g, jnp.bfloat16), state, params)
  assert {*seen, updates.dtype} == {jnp.dtype(dtype)}
  np.testing.assert_array_equal(updates, jnp.float32(1.00390625).astype(dtype))


def test_a_method_that_takes_gradients_at_other_params_is_refused_in_a_window():
  inner = optax.chain(optax_boost.svrg(None), optax.sgd(0.1))
  with pytest.raises(ValueError, match=r"as `svrg` does: .* window's last micro-batch"):
    optax_boost.accumulate(inner, 2).init(jnp.ones(2))
  optax_boost.accumulate(inner, 1).init(jnp.ones(2))
  injected = optax.inject_hyperparams(
    lambda rate: optax.chain(optax_boost.svrg(None), optax.sgd(rate))
  )(0.1)
  with pytest.raises(ValueError, match="as `svrg` does"):
    optax_boost.accumulate(injected, 2).init(jnp.ones(2))


def test_weights_are_summed_in_float64_under_x64(x64):
  tx, params = optax_boost.accumulate(optax.sgd(1.0), 3), jnp.zeros(1)
  state = tx.init(params)
  for weight in (2.0**24, 1.0):
    _, state = tx.update(jnp.ones(1), state, params, weight=weight)
  assert state.weight_sum == 2.0**24 + 1

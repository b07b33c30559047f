"""Gradient norm and learning rate among the metrics, against NumPy, in all train steps."""

import functools
import re

from flax import linen as nn, nnx
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
import numpy as np
import optax
import pytest

import optax_boost
import optax_boost.linen
import optax_boost.nnx
from tests import compilations, meshes

BOTH = ("gradient_norm", "learning_rate")
RATES = (0.2, 0.0, 8)  # a linear schedule: from, to, steps
RNG = np.random.default_rng(0)
KERNEL, BIAS = RNG.normal(size=(3, 2)), RNG.normal(size=2)
BATCHES = [(RNG.normal(size=(6, 3)) * 3, RNG.normal(size=(6, 2))) for _ in range(6)]


def as_float32(tree):
  return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)


def plain_loss(params, batch):
  x, y = batch
  return jnp.mean((x @ params["kernel"] + params["bias"] - y) ** 2)


def model_loss(model, batch):
  x, y = batch
  return jnp.mean((model(x) - y) ** 2)


def injected(optimizer=optax.sgd):
  schedule = optax.linear_schedule(*RATES)
  make = optax.inject_hyperparams(optimizer, hyperparam_dtype=jnp.float32)
  return make(learning_rate=schedule)


def plain_step(tx, metrics=BOTH, dtype=jnp.float32, **options):
  """A function of a batch, which makes a step of plain JAX and returns its metrics."""
  step = optax_boost.make_train_step(plain_loss, tx, metrics=metrics, **options)
  params = jax.tree.map(lambda x: x.astype(dtype), as_float32({"kernel": KERNEL, "bias": BIAS}))
  return _stateful(step, step.init(params))


def linen_step(tx, metrics=BOTH, **options):
  module = nn.Dense(2)
  variables = {"params": as_float32({"kernel": KERNEL, "bias": BIAS})}
  loss, *start = optax_boost.linen.split_loss(model_loss, module, variables)
  step = optax_boost.make_train_step(loss, tx, metrics=metrics, **options)
  return _stateful(step, step.init(*start))


def nnx_step(tx, metrics=BOTH, **options):
  model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
  model.kernel[...], model.bias[...] = as_float32((KERNEL, BIAS))
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  step = optax_boost.nnx.make_train_step(model_loss, metrics=metrics, **options)
  take = functools.partial(step, model, optimizer)
  take.compile_ahead = functools.partial(step.compile_ahead, model, optimizer)
  return take


def _stateful(step, state):
  def take(batch):
    nonlocal state
    state, metrics = step(state, batch)
    return metrics

  take.compile_ahead = lambda batches: step.compile_ahead(state, batches)
  return take


DOORS = {"plain": plain_step, "linen": linen_step, "nnx": nnx_step}


def gradient(kernel, bias, batch):
  """The gradient of the loss in NumPy."""
  x, y = batch
  error = 2 * (x @ kernel + bias - y) / y.size
  return x.T @ error, error.sum(axis=0)


def norm(leaves):
  return np.sqrt(sum(np.sum(leaf**2) for leaf in leaves))


def rate(step):
  start, end, steps = RATES
  return start + (end - start) * min(step, steps) / steps


def numpy_metrics(optimizer, batches):
  """The norm and the rate of each step of a training in NumPy."""
  params, first, second, reported = [KERNEL, BIAS], [0.0, 0.0], [0.0, 0.0], []
  for t, batch in enumerate(batches):
    grads = gradient(*params, batch)
    reported.append((norm(grads), rate(t)))
    if optimizer is optax.sgd:
      params = [w - rate(t) * g for w, g in zip(params, grads, strict=True)]
      continue
    first = [0.9 * m + 0.1 * g for m, g in zip(first, grads, strict=True)]
    second = [0.999 * v + 0.001 * g**2 for v, g in zip(second, grads, strict=True)]
    unbiased = [
      (m / (1 - 0.9 ** (t + 1)), np.sqrt(v / (1 - 0.999 ** (t + 1))))
      for m, v in zip(first, second, strict=True)
    ]
    params = [w - rate(t) * m / (v + 1e-8) for w, (m, v) in zip(params, unbiased, strict=True)]
  return reported


def assert_reports(metrics, expected_norm, expected_rate):
  # The schedule in float32 subtracts from its first value; norms of six steps add up roundings.
  np.testing.assert_allclose(metrics["learning_rate"], expected_rate, rtol=1e-6)
  np.testing.assert_allclose(metrics["gradient_norm"], expected_norm, rtol=2e-5)
  assert metrics["gradient_norm"].dtype == metrics["learning_rate"].dtype == jnp.float32


@pytest.mark.parametrize("optimizer", [optax.sgd, optax.adam])
@pytest.mark.parametrize("door", DOORS)
def test_each_step_reports_its_gradients_norm_and_its_rate(door, optimizer):
  # A clipped gradient has another norm.
  step = DOORS[door](optax.chain(optax.clip(1e6), injected(optimizer)))
  reported = [step(as_float32(batch)) for batch in BATCHES]  # read after later steps have donated
  for metrics, expected in zip(reported, numpy_metrics(optimizer, BATCHES), strict=True):
    assert metrics.keys() == {"loss", *BOTH}
    assert_reports(metrics, *expected)


@pytest.mark.parametrize("door", DOORS)
def test_a_program_compiled_ahead_reports_the_same(door):
  # The first step of any training copies arrays, each by a small program.
  DOORS[door](injected())(as_float32(BATCHES[0]))
  step = DOORS[door](injected())
  step.compile_ahead([as_float32(BATCHES[0])]).result()
  metrics, compiled = compilations.counted(lambda: step(as_float32(BATCHES[0])))
  assert compiled == 0
  assert_reports(metrics, norm(gradient(KERNEL, BIAS, BATCHES[0])), rate(0))


def test_the_norm_is_taken_before_clipping():
  step = plain_step(optax.chain(optax.clip_by_global_norm(1e-3), optax.sgd(0.1)), BOTH[:1])
  expected = norm(gradient(KERNEL, BIAS, BATCHES[0]))
  np.testing.assert_allclose(step(as_float32(BATCHES[0]))["gradient_norm"], expected, rtol=1e-6)


@pytest.mark.parametrize("door", DOORS)
def test_a_window_reports_the_norm_of_each_micro_batch_and_the_rate_of_its_last_step(door):
  step = DOORS[door](optax_boost.accumulate(injected(), every=2))
  params = [KERNEL, BIAS]
  for t in range(3):
    both = [gradient(*params, batch) for batch in BATCHES[2 * t : 2 * t + 2]]
    # The first micro-batch of a window makes no step; before any step, the rate is the first one's.
    for grads, batch, made in zip(both, BATCHES[2 * t :], (max(t - 1, 0), t), strict=False):
      assert_reports(step(as_float32(batch)), norm(grads), rate(made))
    mean = [sum(leaves) / 2 for leaves in zip(*both, strict=True)]
    params = [w - rate(t) * g for w, g in zip(params, mean, strict=True)]


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
def test_the_norm_has_no_loss_scale(dtype):
  tx = optax_boost.dynamic_loss_scale(injected(), 2.0**10)
  step = plain_step(tx, dtype=dtype)
  batch = jax.tree.map(lambda x: x.astype(dtype), as_float32(BATCHES[0]))
  metrics = step(batch)
  expected = norm(gradient(KERNEL, BIAS, BATCHES[0]))
  assert metrics["loss_scale"] == 2**10
  tolerance = 20 * float(jnp.finfo(dtype).eps)
  np.testing.assert_allclose(metrics["gradient_norm"], expected, rtol=tolerance)
  # An overflow: no step is made, and the norm is reported as it is.
  metrics = step((batch[0] * jnp.inf, batch[1]))
  assert metrics["skipped/loss"] == 1
  assert not np.isfinite(metrics["gradient_norm"])
  np.testing.assert_allclose(metrics["learning_rate"], rate(0), rtol=1e-6)
  np.testing.assert_allclose(step(batch)["learning_rate"], rate(1), rtol=1e-6)


def test_a_step_whose_result_is_not_finite_has_its_norm_and_the_rate_of_the_last_step():
  huge = optax.GradientTransformation(
    lambda params: jnp.zeros([], jnp.int32),
    lambda g, n, params=None: (jax.tree.map(lambda g: jnp.where(n > 1, jnp.inf, g), g), n + 1),
  )
  # The count grows only in steps that are made, so all steps after two are skipped.
  tx = optax_boost.dynamic_loss_scale(optax.chain(huge, injected()), 2.0, check="updates")
  step = plain_step(tx)
  reported = [step(as_float32(batch)) for batch in BATCHES[:4]]
  assert reported[-1]["notfinite_count"] == 2
  assert_reports(reported[1], *numpy_metrics(optax.sgd, BATCHES)[1])
  assert all(np.isfinite(metrics["gradient_norm"]) for metrics in reported)
  np.testing.assert_allclose(reported[3]["learning_rate"], rate(1), rtol=1e-6)


def test_skip_spikes_and_the_step_report_one_norm():
  alone, asked = (
    plain_step(optax_boost.skip_spikes(injected(), start=1), metrics) for metrics in ((), BOTH)
  )
  for batch in [*BATCHES[:2], (BATCHES[2][0] * 1e3, BATCHES[2][1])]:
    expected, metrics = alone(as_float32(batch)), asked(as_float32(batch))
    assert metrics.keys() == {*expected, "learning_rate"}
    np.testing.assert_allclose(metrics["gradient_norm"], expected["gradient_norm"], rtol=1e-6)
  assert metrics["skip_spikes/spike_count"] == 1


def test_frozen_layers_do_not_count_in_the_norm():
  schedule = optax_boost.fixed_freezing(2, 1)
  step = plain_step(optax_boost.freeze_layers(injected(), ["kernel", "bias"], schedule))
  _, of_bias = gradient(KERNEL, BIAS, BATCHES[0])
  metrics = step(as_float32(BATCHES[0]))
  assert metrics["frozen_groups"] == 1
  assert_reports(metrics, norm([of_bias]), rate(0))


def test_sharded_params_and_batches_have_the_norm_of_the_whole():
  mesh = meshes.mesh((2, 2), ("data", "model"))
  step = optax_boost.make_train_step(plain_loss, injected(), metrics=BOTH)

  def place(x, *spec):
    return jax.device_put(jnp.asarray(x, jnp.float32), NamedSharding(mesh, P(*spec)))

  state = step.init({"kernel": place(KERNEL, None, "model"), "bias": place(BIAS, "model")})
  for batch, expected in zip(BATCHES, numpy_metrics(optax.sgd, BATCHES), strict=True):
    state, metrics = step(state, tuple(place(x, "data") for x in batch))
    assert_reports(metrics, *expected)
  assert metrics["gradient_norm"].sharding.is_fully_replicated


def test_complex_gradients_count_with_their_magnitudes():
  step = optax_boost.make_train_step(
    lambda w, batch: jnp.sum(jnp.abs(w - batch) ** 2),
    optax.inject_hyperparams(optax.sgd)(learning_rate=0.1),
    metrics=BOTH,
  )
  _, metrics = step(step.init(jnp.array([3j, 4.0 + 0j])), jnp.zeros(2))
  np.testing.assert_allclose(metrics["gradient_norm"], 10.0, rtol=1e-6)
  np.testing.assert_allclose(float(metrics["learning_rate"]), 0.1, rtol=1e-6)


def test_a_resumed_training_reports_the_rates_of_its_steps():
  step = optax_boost.make_train_step(plain_loss, injected(), metrics=BOTH)
  state = step.init(as_float32({"kernel": KERNEL, "bias": BIAS}))
  for batch in BATCHES[:3]:
    state, _ = step(state, as_float32(batch))
  saved = jax.device_get(state)
  resumed = optax_boost.make_train_step(plain_loss, injected(), metrics=BOTH)
  for t, expected in list(enumerate(numpy_metrics(optax.sgd, BATCHES)))[3:]:
    saved, metrics = resumed(saved, as_float32(BATCHES[t]))
    assert_reports(metrics, *expected)


def test_a_rate_that_the_user_sets_between_steps_is_reported():
  step = optax_boost.make_train_step(
    plain_loss, optax.inject_hyperparams(optax.sgd)(0.5), metrics=BOTH, donate=False
  )
  state = step.init(as_float32({"kernel": KERNEL, "bias": BIAS}))
  state.opt_state.hyperparams["learning_rate"] = jnp.asarray(0.125)
  assert step(state, as_float32(BATCHES[0]))[1]["learning_rate"] == 0.125


def test_several_rates_are_numbered_and_params_of_that_name_are_no_rates():
  optimizers = {"of_w": injected(optax.adam), "of_b": optax.inject_hyperparams(optax.sgd)(0.5)}
  tx = optax.partition(optimizers, {"w": "of_w", "learning_rate": "of_b"})
  step = optax_boost.make_train_step(
    lambda params, x: jnp.sum(params["w"] * x) + params["learning_rate"], tx, metrics=BOTH[1:]
  )
  state = step.init({"w": jnp.ones(3), "learning_rate": jnp.asarray(7.0)})
  _, metrics = step(state, jnp.ones(3))
  assert metrics.keys() == {"loss", "learning_rate", "learning_rate_1"}
  rates = [float(metrics[name]) for name in ("learning_rate", "learning_rate_1")]
  np.testing.assert_allclose(sorted(rates), [rate(0), 0.5], rtol=1e-6)


def test_a_step_that_is_not_asked_computes_neither():
  def equations(**options):
    step = optax_boost.make_train_step(plain_loss, injected(), **options)
    state = step.init(as_float32({"kernel": KERNEL, "bias": BIAS}))
    jaxpr = jax.make_jaxpr(step.computation.step)(state, as_float32(BATCHES[0]), None, {})
    return len(jaxpr.out_avals), re.sub(r"\w+:", ":", str(jaxpr))

  (outputs, unasked), (more, asked) = equations(), equations(metrics=BOTH)
  assert more == outputs + 2
  assert "sqrt" in asked
  assert "sqrt" not in unasked
  assert equations(metrics=()) == (outputs, unasked)
  assert equations(metrics=BOTH[1:])[1].count("\n") == unasked.count("\n")  # only one more output


def test_an_optimizer_that_keeps_no_rate_is_refused_with_what_to_do():
  for make in DOORS.values():
    step = make(optax.adam(0.1))
    with pytest.raises(ValueError, match=r"optax.inject_hyperparams\(optax.adamw\)\(learning_rate"):
      step(as_float32(BATCHES[0]))


@pytest.mark.parametrize(
  ("metrics", "error", "message"),
  [
    ("gradient_norm", TypeError, r"must be a tuple of names, .*got 'gradient_norm'"),
    ({"gradient_norm"}, TypeError, r"must be a tuple of names"),
    (["loss", "grad_norm"], ValueError, r"`metrics\[0\]` must be one of 'gradient_norm', 'learn"),
    ((optax.tree.norm,), TypeError, r"`metrics\[0\]` must be one of 'gradient_norm', 'learning_"),
  ],
)
def test_other_metrics_are_refused(metrics, error, message):
  for make in (
    lambda **options: optax_boost.make_train_step(plain_loss, optax.sgd(0.1), **options),
    lambda **options: optax_boost.nnx.make_train_step(model_loss, **options),
  ):
    with pytest.raises(error, match=message):
      make(metrics=metrics)

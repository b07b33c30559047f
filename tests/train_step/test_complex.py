"""Complex params: every gradient that the train step makes is the direction of steepest ascent."""

import contextlib
import functools

from flax import linen as nn, nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
import optax_boost.linen
import optax_boost.nnx

_RNG = np.random.default_rng(0)
MATRIX = (_RNG.normal(size=(4, 3)) + 1j * _RNG.normal(size=(4, 3))).astype(np.complex64)
BATCH = (_RNG.normal(size=4) + 1j * _RNG.normal(size=4)).astype(np.complex64)
START = {
  "complex": (_RNG.normal(size=3) + 1j * _RNG.normal(size=3)).astype(np.complex64),
  "real": _RNG.normal(size=3).astype(np.float32),
}


def loss_fn(params, batch):
  residual = jnp.asarray(MATRIX) @ (params["complex"] * params["real"]) - batch
  return jnp.sum(jnp.real(residual) ** 2 + jnp.imag(residual) ** 2)


def numpy_gradient(params, batch):
  """Derivatives by the real parts, plus i times those by the imaginary parts."""
  z, r = (np.asarray(params[name], np.complex128) for name in ("complex", "real"))
  residual = MATRIX.astype(np.complex128) @ (z * r) - batch
  back = 2 * MATRIX.astype(np.complex128).conj().T @ residual
  return {"complex": r * back, "real": np.real(np.conj(z) * back)}


def numpy_sgd(params, rate, steps):
  for _ in range(steps):
    gradient = numpy_gradient(params, BATCH)
    params = {name: params[name] - rate * gradient[name] for name in params}
  return params


def numpy_adam(params, rate, steps):
  """Adam whose second moment is of magnitudes, as optax has it."""
  first = {name: 0 * x for name, x in params.items()}
  second = {name: 0 * np.abs(x) for name, x in params.items()}
  for t in range(1, steps + 1):
    gradient = numpy_gradient(params, BATCH)
    for name, g in gradient.items():
      first[name] = 0.9 * first[name] + 0.1 * g
      second[name] = 0.999 * second[name] + 0.001 * np.abs(g) ** 2
      size = np.sqrt(second[name] / (1 - 0.999**t)) + 1e-8
      params = params | {name: params[name] - rate * first[name] / (1 - 0.9**t) / size}
  return params


def assert_close(params, expected):
  for name, x in expected.items():
    np.testing.assert_allclose(params[name], x, rtol=1e-4, atol=1e-5)


def train(tx, steps=3, loss_fn=loss_fn, **options):
  step = optax_boost.make_train_step(loss_fn, tx, **options)
  state = step.init(START)
  for _ in range(steps):
    state, metrics = step(state, BATCH)
  return state, metrics


OPTIMIZERS = {
  "sgd": lambda: (optax.sgd(0.01), numpy_sgd),
  "adam": lambda: (optax.adam(0.01), numpy_adam),
  "accumulation": lambda: (optax_boost.accumulate(optax.adam(0.01), 1), numpy_adam),
  "average": lambda: (optax_boost.average_params(optax.sgd(0.01), decay=0.5), numpy_sgd),
  "loss scale": lambda: (optax_boost.dynamic_loss_scale(optax.sgd(0.01)), numpy_sgd),
  "switch": lambda: (optax_boost.switch_after(1, optax.sgd(0.01), optax.sgd(0.01)), numpy_sgd),
}


@pytest.mark.parametrize("rate", ["sgd", "adam"])
def test_a_complex_number_reaches_its_target_from_zero(rate):
  tx = {"sgd": optax.sgd(0.1), "adam": optax.adam(0.3)}[rate]
  step = optax_boost.make_train_step(lambda z, b: jnp.sum(jnp.abs(z - b) ** 2), tx)
  state = step.init(jnp.zeros(2, jnp.complex64))
  for _ in range(300):
    state, metrics = step(state, jnp.complex64(3 + 4j))
  assert metrics["loss"] < 1e-4
  np.testing.assert_allclose(state.params, 3 + 4j, rtol=1e-3)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_on_real_and_complex_leaves_equal_numpys(name):
  tx, expected = OPTIMIZERS[name]()
  assert_close(train(tx)[0].params, expected(START, 0.01, 3))


@pytest.mark.parametrize("depth", ["known", "traced"])
def test_complex_leaves_train_beside_frozen_layers(depth):
  tx = optax_boost.freeze_layers(
    optax.sgd(0.01), ("real", "complex"), optax_boost.fixed_freezing(2, 1, steps=9)
  )
  step = optax_boost.make_train_step(loss_fn, tx)
  state = step.init(START)
  with pytest.warns(optax_boost.NoEffectWarning) if depth == "traced" else contextlib.nullcontext():
    state, _ = (jax.jit(step) if depth == "traced" else step)(state, BATCH)
  step_of_complex = START["complex"] - 0.01 * numpy_gradient(START, BATCH)["complex"]
  assert_close(state.params, {"complex": step_of_complex, "real": START["real"]})


def test_a_line_search_descends():
  losses = []
  step = optax_boost.make_train_step(loss_fn, optax.lbfgs())
  state = step.init(START)
  for _ in range(20):
    state, metrics = step(state, BATCH)
    losses.append(float(metrics["loss"]))
  assert losses[-1] < 0.5 * losses[0]


def test_grad_and_the_functions_of_params_are_the_same_gradient():
  """`grad`, `grad_fn` and `full_grad_fn`, as an optimizer sees them."""
  seen = {}

  def update(updates, state, params, *, grad, grad_fn, full_grad_fn, **_):
    seen.update(
      updates=updates, grad=grad, grad_fn=grad_fn(params), full_grad_fn=full_grad_fn(params)
    )
    return seen["full_grad_fn"], seen

  def init(params):
    return dict.fromkeys(("updates", "grad", "grad_fn", "full_grad_fn"), params)

  def full_grad_fn(grad_fn, params):
    return grad_fn(params, jnp.asarray(BATCH))

  tx = optax.GradientTransformationExtraArgs(init, update)
  state, _ = train(tx, steps=1, full_grad_fn=full_grad_fn)
  for gradient in state.opt_state.values():
    assert_close(gradient, numpy_gradient(START, BATCH))


@pytest.mark.parametrize("where", ["inside the step", "on the host"])
def test_variance_reduction_of_real_leaves_beside_complex_ones(where):
  """The full gradient passes over complex leaves, which a mask hides from `svrg`."""
  batches = np.stack([BATCH, 2 * BATCH])[:, None]

  def loss(params, batch):
    return jnp.mean(jax.vmap(functools.partial(loss_fn, params))(batch))

  every = 1 if where == "inside the step" else None
  mask = {"complex": False, "real": True}
  tx = optax.chain(optax.masked(optax_boost.svrg(every), mask), optax.sgd(0.01))
  full = functools.partial(optax_boost.full_gradient, stacked=True, batches=jnp.asarray(batches))
  step = optax_boost.make_train_step(loss, tx, full_grad_fn=full if every else None)
  state = step.init(START)
  if every is None:
    state = step.refresh(state, list(batches))
  state, _ = step(state, batches[0])
  # At the snapshot the corrected gradient is the full one.
  full = (numpy_gradient(START, BATCH)["real"] + numpy_gradient(START, 2 * BATCH)["real"]) / 2
  gradient = {"complex": numpy_gradient(START, BATCH)["complex"], "real": full}
  assert_close(state.params, {name: START[name] - 0.01 * gradient[name] for name in START})


def test_a_race_trains_complex_params():
  result = optax_boost.race(
    lambda z, b: jnp.mean(jnp.abs(z - b) ** 2),
    lambda key: jnp.zeros(2, jnp.complex64),
    np.full(4, 3 + 4j, np.complex64),
    {"sgd": optax.sgd(0.1)},
    steps=50,
    batch_size=2,
    seeds=1,
    progress=False,
  )
  assert result.curves["sgd"]["training loss"][0, -1] < 1e-3


def test_an_nnx_model_with_complex_params_trains():
  class Model(nnx.Module):
    def __init__(self):
      self.complex, self.real = nnx.Param(START["complex"]), nnx.Param(START["real"])

  def loss(model, batch):
    return loss_fn({"complex": model.complex[...], "real": model.real[...]}, batch)

  model = Model()
  optimizer = nnx.Optimizer(model, optax.sgd(0.01), wrt=nnx.Param)
  step = optax_boost.nnx.make_train_step(loss)
  for _ in range(3):
    step(model, optimizer, BATCH)
  trained = {"complex": model.complex[...], "real": model.real[...]}
  assert_close(trained, numpy_sgd(START, 0.01, 3))


def test_a_linen_module_with_complex_params_trains():
  class Model(nn.Module):
    @nn.compact
    def __call__(self, batch):
      params = {name: self.param(name, lambda _, x=x: jnp.asarray(x)) for name, x in START.items()}
      return loss_fn(params, batch)

  module = Model()
  variables = module.init(jax.random.key(0), BATCH)
  loss, params, model_state = optax_boost.linen.split_loss(
    lambda model, batch: model(batch), module, variables
  )
  step = optax_boost.make_train_step(loss, optax.sgd(0.01))
  state = step.init(params, model_state)
  for _ in range(3):
    state, _ = step(state, BATCH)
  assert_close(state.params, numpy_sgd(START, 0.01, 3))


def test_a_full_gradient_is_the_mean_of_its_functions_results_and_real_for_real_params():
  conjugated = jax.tree.map(jnp.conj, jax.grad(loss_fn)(START, BATCH))

  def gradient(params, batch):
    return jax.tree.map(jnp.conj, jax.grad(loss_fn)(params, batch))

  found = optax_boost.full_gradient(gradient, START, [BATCH])
  assert_close(found, numpy_gradient(START, BATCH))
  with pytest.raises(TypeError, match=r"the leaf 'real' is complex64\. Give gradients as"):
    optax_boost.full_gradient(
      lambda *_: conjugated | {"real": conjugated["complex"]}, START, [BATCH]
    )

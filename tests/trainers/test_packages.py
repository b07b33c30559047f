"""Trainers from the package index, unchanged but for the optimizer (extra `trainers`)."""

import importlib
import os

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optax_boost.nnx import _model
from tests.trainers import methods

X = np.asarray(jax.random.normal(jax.random.key(0), (32, 4)))
Y = X @ np.array([1.0, -2.0, 0.5, 0.0], np.float32)
TOKENS = np.asarray(jax.random.randint(jax.random.key(0), (4, 8), 1, 11))
# Packages warn of others' deprecations, at import and later.
pytestmark = pytest.mark.filterwarnings("ignore")


def package(name):
  try:
    return importlib.import_module(name)
  except ImportError as error:
    pytest.skip(str(error))


def numpyro_svi(tx):
  numpyro = package("numpyro")
  infer = importlib.import_module("numpyro.infer")
  optim = importlib.import_module("numpyro.optim")
  guides = importlib.import_module("numpyro.infer.autoguide")

  def model(x, y=None):
    weights = numpyro.sample("weights", numpyro.distributions.Normal(jnp.zeros(4), 1).to_event(1))
    bias = numpyro.param("bias", 0.1)
    numpyro.sample("y", numpyro.distributions.Normal(x @ weights + bias, 0.5), obs=y)

  guide = guides.AutoMultivariateNormal(model)
  svi = infer.SVI(model, guide, optim.optax_to_numpyro(tx), infer.Trace_ELBO(2))
  initial, _ = svi.init(jax.random.key(1), X, Y).optim_state[1]
  result = svi.run(jax.random.key(1), methods.STEPS, X, Y, progress_bar=False)
  final, opt_state = result.state.optim_state[1]  # before constraints
  return methods.Trained(initial, final, opt_state, result.losses.tolist())


class LanguageModel(nnx.Module):
  def __init__(self, rngs):
    self.embedder = nnx.Embed(11, 8, rngs=rngs)
    self.up = nnx.Linear(8, 16, rngs=rngs)
    self.head = nnx.Linear(16, 11, rngs=rngs)

  def __call__(self, input_tokens, positions, cache, attention_mask):
    return self.head(nnx.gelu(self.up(self.embedder(input_tokens)))), None


def tunix_sft(tx):
  package("tunix.sft.peft_trainer")
  peft_trainer = importlib.import_module("tunix.sft.peft_trainer")
  model = LanguageModel(nnx.Rngs(0))
  initial = methods.host(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
  config = peft_trainer.TrainingConfig(
    eval_every_n_steps=1000, max_steps=methods.STEPS, pbar_description=None
  )
  trainer = peft_trainer.PeftTrainer(model, tx, config)
  losses = []

  def model_input(batch):
    mask = jnp.ones((len(batch.input_tokens), 8, 8), bool)
    positions = jnp.arange(8)[None]
    return {
      "input_tokens": batch.input_tokens,
      "input_mask": batch.input_mask,
      "positions": positions,
      "attention_mask": mask,
    }

  trainer = trainer.with_gen_model_input_fn(model_input)
  log = trainer.metrics_logger.log

  def keep(prefix, name, value, *rest):
    if name == "loss":
      losses.append(float(value))
    return log(prefix, name, value, *rest)

  trainer.metrics_logger.log = keep
  batch = peft_trainer.TrainingInput(input_tokens=TOKENS, input_mask=np.ones_like(TOKENS, bool))
  # Its logger, when closed, drops all of JAX's listeners: those that count compilations, too.
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(jax.monitoring, "clear_event_listeners", lambda: None)
    trainer.train([batch] * methods.STEPS)
  final = nnx.to_pure_dict(nnx.state(model, nnx.Param))
  return methods.Trained(initial, final, _model.as_pure(trainer.optimizer.opt_state), losses)


def keras_stateless(tx):
  """Keras's `fit` takes its own optimizers only; its documented loop for JAX takes any."""
  os.environ.setdefault("KERAS_BACKEND", "jax")
  keras = package("keras")
  if keras.backend.backend() != "jax":
    pytest.skip("Keras runs on another backend here")
  keras.utils.set_random_seed(0)
  first = keras.layers.Dense(8, "relu", name="first")
  norm, last = keras.layers.BatchNormalization(name="norm"), keras.layers.Dense(1, name="last")
  model = keras.Sequential([keras.Input((4,)), first, norm, last], name="model")
  paths = [variable.path for variable in model.trainable_variables]

  def as_dict(values):
    return dict(zip(paths, values, strict=True))

  params = as_dict([variable.value for variable in model.trainable_variables])
  statistics = [variable.value for variable in model.non_trainable_variables]

  @jax.jit
  def step(state):
    params, statistics, opt_state = state

    def loss_fn(params):
      values = [params[path] for path in paths]
      predictions, moved = model.stateless_call(values, statistics, X, training=True)
      return jnp.mean((predictions[:, 0] - Y) ** 2), moved

    (loss, moved), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), moved, opt_state), loss

  (final, _, opt_state), losses, late = methods.loop(step, (params, statistics, tx.init(params)))
  return methods.Trained(methods.host(params), final, opt_state, losses, late)


PROGRAMS = {
  "numpyro": methods.Program(numpyro_svi, "auto_loc", None, "bias", falls=False),
  "tunix": methods.Program(tunix_sft, "embedder", "head/kernel"),
  "keras": methods.Program(keras_stateless, "first", "model/last/kernel", "bias|gamma|beta"),
}


@methods.quick_and_slow(PROGRAMS, "average_params", "accumulate", "lars")
def test_a_package_s_trainer_trains_with_a_method_as_its_optimizer(program, method):
  methods.check(program, method)

"""The train step on a Flax Linen module with BatchNorm, dropout and aux."""

import itertools

import chex
from flax import core, errors, linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
from optax_boost import linen
from tests import compilations
from tests.train_step.test_train_step import BATCH, CLOSURE_USERS, OF_EACH_KIND

KEY = jax.random.key(0)


class Network(nn.Module):
  @nn.compact
  def __call__(self, x, train=True):
    h = nn.Dense(16)(x)
    h = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(h))
    return nn.Dense(1)(nn.Dropout(0.1, deterministic=not train)(h))[:, 0]


def loss_fn(model, batch):
  prediction = model(batch["x"], train=True)
  return jnp.mean((prediction - batch["y"]) ** 2), {"prediction": prediction}


VARIABLES = Network().init(jax.random.key(1), BATCH["x"], train=False)


def start(tx, loss_fn=loss_fn, module=Network(), variables=VARIABLES, **options):  # noqa: B008
  """A train step and its first state."""
  loss, params, model_state = linen.split_loss(loss_fn, module, variables)
  step = optax_boost.make_train_step(loss, tx, **options)
  return step, step.init(params, model_state)


def variables_of(state):
  return {"params": state.params, **state.model_state}


@jax.jit
def by_hand(variables, step, key):
  """The forward pass as a user of Linen writes it."""
  key = jax.random.split(jax.random.fold_in(key, step), 1)[0]
  prediction, changed = Network().apply(
    variables,
    BATCH["x"],
    train=True,
    mutable=["batch_stats"],
    rngs={"dropout": jax.random.fold_in(key, 0)},
  )
  return jnp.mean((prediction - BATCH["y"]) ** 2), prediction, changed


@pytest.mark.parametrize("name", OF_EACH_KIND)
def test_trains_with_methods_that_need_closures(name):
  traces = itertools.count()

  def counted(model, batch):
    next(traces)
    return loss_fn(model, batch)

  step, state = start(CLOSURE_USERS[name](), counted, has_aux=True)
  losses = []
  for t in range(5):
    loss, prediction, changed = by_hand(variables_of(state), state.step, KEY)
    state, metrics = step(state, BATCH, KEY)
    losses.append(metrics["loss"])
    if t == 0:
      seen = next(traces)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(metrics["aux"]["prediction"], prediction, rtol=1e-4, atol=1e-5)
    chex.assert_trees_all_close(state.model_state, changed, rtol=1e-5, atol=1e-6)
  assert losses[-1] < losses[0]
  assert next(traces) == seen + 1, "the loss was traced again after the first step"


def test_two_calls_in_one_loss_draw_different_masks_and_chain_their_statistics():
  seen = {}

  def twice(model, batch):
    first, second = model(batch["x"]), model(batch["x"])
    seen["collections"] = len(model.collections)
    return jnp.mean((first - second) ** 2), None

  step, state = start(optax.sgd(0.0), twice, has_aux=True)
  after, metrics = step(state, BATCH, KEY)
  assert metrics["loss"] > 0
  assert seen["collections"] == 1
  one, state = start(optax.sgd(0.0), has_aux=True)
  once, _ = one(state, BATCH, KEY)
  mean = after.model_state["batch_stats"]["BatchNorm_0"]["mean"]
  np.testing.assert_allclose(
    mean, 1.9 * once.model_state["batch_stats"]["BatchNorm_0"]["mean"], rtol=1e-4, atol=1e-6
  )


class Inner(nn.Module):
  """Holds the values that the scan sows."""


class Sowing(nn.Module):
  """Sows into a tuple and into an array, in a scan, and keeps a tuple of its own."""

  @nn.compact
  def __call__(self, x):
    def body(module, x, _):
      module.sow("losses", "mean", x.mean())
      return x + 1, None

    last = self.variable("carry", "last", lambda: (x[0], x[1]))
    last.value = last.value[1], x[0]
    self.sow("calls", "count", 1, init_fn=lambda: 0, reduce_fn=jnp.add)
    x = nn.Dense(1)(x)
    return nn.scan(body, variable_axes={"losses": 0}, length=2)(Inner(), x, None)[0]


@pytest.mark.parametrize("calls", [1, 2])
def test_a_step_sees_the_values_sown_by_its_own_calls(calls):
  module, x = Sowing(), BATCH["x"]

  def loss_fn(model, batch):
    for _ in range(calls):
      model(batch)
    (sown,) = model.collections["losses"].values()
    assert len(sown["mean"]) == calls
    return sum(map(jnp.mean, sown["mean"]))

  variables = module.init(KEY, x)
  step, state = start(optax.sgd(0.0), loss_fn, module, variables)
  step = compilations.Watched(step)
  structure = jax.tree.structure(state)
  mean = module.apply(variables, x, mutable=True)[0].mean() - 1.5
  for t in range(3):
    state, metrics = step(state, x)
    np.testing.assert_allclose(metrics["loss"], calls * mean, rtol=1e-6)
    assert state.model_state["calls"]["count"] == 1 + calls * (t + 1)
    assert len(state.model_state["carry"]["last"]) == 2
  if calls == 1:
    assert step.compiled_once()
    assert jax.tree.structure(state) == structure
    jax.eval_shape(lambda s: jax.lax.scan(lambda s, _: step(s, x), s, None, length=2), state)


def test_frozen_dicts_train_as_plain_ones():
  loss = linen.split_loss(lambda *args: loss_fn(*args)[0], Network(), core.freeze(VARIABLES))
  groups = optax_boost.layer_groups(loss[1], ["Dense_0|BatchNorm_0", "Dense_1"])
  assert "BatchNorm_0/scale" in groups.groups[0]
  tx = optax_boost.freeze_layers(optax.sgd(0.1), groups, optax_boost.fixed_freezing(2, 1))
  ends = []
  for wrap in (dict, core.freeze, core.FrozenDict):
    step, state = start(tx, variables=wrap(VARIABLES), has_aux=True)
    step = compilations.Watched(step)
    structure = jax.tree.structure(state)
    for _ in range(2):
      state, _ = step(state, BATCH, KEY)
    assert step.compiled_once()
    assert jax.tree.structure(state) == structure
    ends.append(core.unfreeze(variables_of(state)))
    chex.assert_trees_all_equal(ends[-1], ends[0])
  chex.assert_trees_all_equal(ends[0]["batch_stats"], VARIABLES["batch_stats"])


class Noisy(nn.Module):
  @nn.compact
  def __call__(self, x):
    x = nn.Dense(4)(x)
    return nn.Dense(1)(x + jax.random.normal(self.make_rng("noise"), x.shape))


def test_a_loss_takes_the_names_of_rng_streams():
  x = BATCH["x"]
  variables = Noisy().init({"params": KEY, "noise": KEY}, x)
  loss, params, model_state = linen.split_loss(
    lambda model, x: jnp.mean(model(x) ** 2), Noisy(), variables, rngs=("noise",)
  )
  boost = optax_boost.auto_boost("O1", config={"grad_freeze": {"param_groups": 2}})
  groups = ["Dense_0", "Dense_1"]
  tx = boost.optimizer(optax.sgd(0.1), loss, params, model_state, x, KEY, groups=groups)
  step = optax_boost.make_train_step(loss, tx)
  _, metrics = step(step.init(params, model_state), x, KEY)
  assert metrics["frozen_groups"] == 0


PLAIN = optax_boost.make_train_step(lambda p, b: p, optax.sgd(0.1)).init(jnp.ones(1))
INTEGER = {"params": {"n": jnp.arange(3)}}


@pytest.mark.parametrize(
  ("call", "message"),
  [
    (lambda: linen.split_loss(loss_fn, nn.Dense(1), 3), r"`variables` must be a dict of .* got 3"),
    (
      lambda: start(optax.sgd(0.1), variables=INTEGER),
      r"'n' is int32. .* another collection",
    ),
    (
      lambda: start(optax.sgd(0.1))[0](PLAIN, BATCH),
      r"`model_state` must be a dict of the module's collections; got None. Pass the one that",
    ),
    (lambda: start(optax.sgd(0.1))[0].refresh(PLAIN, None), r"`batches` must be"),
    (
      lambda: optax_boost.layer_axes(*linen.split_loss(len, nn.Dense(1), VARIABLES), BATCH, 3),
      r"`rng` must be one key",
    ),
  ],
)
def test_refuses_to_step_with_arguments_of_the_wrong_kind(call, message):
  with pytest.raises(TypeError, match=message):
    call()


def test_the_step_can_be_inspected_without_making_one():
  step, state = start(optax.sgd(0.1), has_aux=True)
  assert "stablehlo" in step.lower(state, BATCH, KEY).as_text()
  assert "dot_general" in step.lower(jax.eval_shape(lambda: state), BATCH, KEY).as_text()


def test_refuses_variables_without_params():
  with pytest.raises(ValueError, match=r"with a collection 'params'; got the keys \['kernel'\]"):
    linen.split_loss(loss_fn, Network(), {"kernel": jnp.ones(3)})


class Encoder(nn.Module):
  width: int = 3

  def setup(self):
    self.dense = nn.Dense(self.width)
    self.dropout = nn.Dropout(0.5, deterministic=False)

  def encode(self, x):
    return jnp.tanh(self.dense(x))

  def __call__(self, x):
    return self.dropout(self.encode(x)).sum()


X = jnp.eye(2)
ENCODED = Encoder().init({"params": KEY, "dropout": KEY}, X)


def test_a_loss_calls_the_methods_of_a_module_and_reads_its_fields():
  loss, params, state = linen.split_loss(
    lambda model, x: (model.encode(x) ** 2).sum() / model.width, Encoder(), ENCODED
  )
  kernel, bias = params["dense"]["kernel"], params["dense"]["bias"]
  value, _ = loss(params, state, X)
  np.testing.assert_allclose(value, (np.tanh(X @ kernel + bias) ** 2).sum() / 3, rtol=1e-6)


@pytest.mark.parametrize("name", ["apply", "variables", "dense", "missing"])
def test_a_loss_that_reads_what_its_model_lacks_is_told_what_it_has(name):
  loss, *arguments = linen.split_loss(lambda model, x: getattr(model, name), Encoder(), ENCODED)
  with pytest.raises(
    AttributeError, match=rf"no `{name}`.*`model\.encode\(x\)`; `model.collections`"
  ):
    loss(*arguments, X)


def test_a_dropout_without_a_key_is_told_to_pass_one():
  step, state = start(optax.sgd(0.1), lambda model, x: model(x), Encoder(), ENCODED)
  with pytest.raises(errors.InvalidRngError) as raised:
    step(state, X)
  assert any("`step(state, batch, key)`" in note for note in raised.value.__notes__)

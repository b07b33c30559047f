"""Changes of an NNX model and its optimizer between two steps."""

import weakref

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost.nnx as ob_nnx

if not hasattr(nnx, "List"):
  pytest.skip("this flax has no nnx.List", allow_module_level=True)

X = jax.random.normal(jax.random.key(0), (8, 2))


class Net(nnx.Module):
  def __init__(self, rngs):
    self.layers = nnx.List([nnx.Linear(2, 2, rngs=rngs) for _ in range(2)])
    self.extra = nnx.data({"bias": nnx.Param(jnp.ones(2)), "many": [nnx.Param(jnp.ones(2))]})
    self.norm = nnx.BatchNorm(2, rngs=rngs)
    self.scale = 1.0

  def __call__(self, x):
    for layer in self.layers:
      x = jnp.tanh(layer(x))
    x = x * self.extra["bias"][...] * sum(p[...] for p in self.extra["many"])
    return self.scale * self.norm(x) * self.layers[0].kernel.get_metadata().get("times", 1.0)


class Doubled(Net):
  def __call__(self, x):
    return 2 * super().__call__(x)


def loss_fn(model, x):
  return jnp.mean((model(x) - jnp.tanh(x)) ** 2)


def make(tx=None):
  model = Net(nnx.Rngs(0))
  return model, nnx.Optimizer(model, tx or optax.sgd(0.01), wrt=nnx.Param)


def expect_right_steps(step, model, optimizer):
  """Two steps on what the model is now, the second on what the first has written."""
  losses = []
  for _ in range(2):
    expected = loss_fn(nnx.clone(model), X)
    losses.append(float(step(model, optimizer, X)["loss"]))
    np.testing.assert_allclose(losses[-1], expected, rtol=1e-4)
  assert losses[0] != losses[1]


def test_a_variable_that_held_nothing_is_seen_when_it_holds_an_array():
  class Shifted(Net):
    def __init__(self, rngs):
      super().__init__(rngs)
      self.shift = nnx.BatchStat(None)

    def __call__(self, x):
      shift = self.shift.get_value()
      return super().__call__(x) + (0 if shift is None else shift)

  model = Shifted(nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, optax.sgd(0.01), wrt=nnx.Param)
  step = ob_nnx.make_train_step(loss_fn)
  expect_right_steps(step, model, optimizer)
  model.shift.set_value(jnp.ones(2))
  expect_right_steps(step, model, optimizer)


def _replace_layer(model):
  model.layers[1] = nnx.Linear(2, 2, rngs=nnx.Rngs(7))


def _add_layer(model):
  model.layers.append(nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(7)))


def _swap_layers(model):
  model.layers[0], model.layers[1] = model.layers[1], model.layers[0]


def _tie_layers(model):
  model.layers[1] = model.layers[0]


def _replace_variable(model):
  model.layers[0].kernel = nnx.Param(jnp.full((2, 2), 0.7))


def _change_nested_dict(model):
  model.extra["bias"] = nnx.Param(jnp.full(2, 0.5))


def _grow_nested_list(model):
  model.extra["many"].append(nnx.Param(jnp.full(2, 0.5)))


def _change_class(model):
  model.__class__ = Doubled


CHANGES = {
  "a layer is replaced": _replace_layer,
  "a layer is added": _add_layer,
  "layers are swapped": _swap_layers,
  "layers are tied": _tie_layers,
  "a variable is replaced": _replace_variable,
  "a nested dict changes": _change_nested_dict,
  "a nested list grows": _grow_nested_list,
  "an attribute is set": lambda model: setattr(model, "scale", 3.0),
  "the class changes": _change_class,
  "metadata is set": lambda model: model.layers[0].kernel.set_metadata(times=3.0),
  "evaluation mode": lambda model: model.eval(),
  "values are set": lambda model: nnx.update(
    model, jax.tree.map(lambda x: 2 * x, nnx.state(model))
  ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_steps_is_seen(change):
  model, optimizer = make()
  step = ob_nnx.make_train_step(loss_fn)
  for _ in range(2):
    step(model, optimizer, X)
  old = float(loss_fn(nnx.clone(model), X))
  CHANGES[change](model)
  assert not np.isclose(old, loss_fn(nnx.clone(model), X)), "the change makes no difference"
  # Plain SGD has no state that would have to follow the params.
  expect_right_steps(step, model, optimizer)


def test_another_optimizer_transformation_or_state_is_seen():
  model, optimizer = make(optax.sgd(0.1, momentum=0.9))
  step = ob_nnx.make_train_step(loss_fn)
  for _ in range(2):
    step(model, optimizer, X)

  def moved():
    before = jnp.array(model.extra["bias"][...])
    step(model, optimizer, X)
    return float(jnp.abs(model.extra["bias"][...] - before).max())

  optimizer.tx = optax.sgd(0.0, momentum=0.9)
  assert moved() == 0
  optimizer.tx = optax.sgd(0.1, momentum=0.9)
  assert moved() > 0
  fresh = nnx.Optimizer(model, optimizer.tx, wrt=nnx.Param)
  optimizer.opt_state = fresh.opt_state
  moved()
  trace = jax.tree.leaves(nnx.as_pure(nnx.state(optimizer.opt_state)))
  assert any(jnp.any(leaf) for leaf in trace), "the new state was not written"
  other = nnx.Optimizer(model, optax.sgd(0.0), wrt=nnx.Param)
  optimizer = other
  assert moved() == 0
  assert other.step[...] == 1


def test_models_that_alternate_do_not_mix():
  step = ob_nnx.make_train_step(loss_fn)
  pairs = [make(), make()]
  nnx.update(pairs[1][0], jax.tree.map(lambda x: 2 * x, nnx.state(pairs[1][0])))
  for _ in range(2):
    for model, optimizer in pairs:
      expect_right_steps(step, model, optimizer)
  assert [int(optimizer.step[...]) for _, optimizer in pairs] == [4, 4]


def test_values_may_be_set_from_anywhere():
  model, optimizer = make()
  step = ob_nnx.make_train_step(loss_fn)
  step(model, optimizer, X)
  model.layers[0].bias.set_value(jnp.full(2, 0.1))
  model.layers[1].bias.set_value(jnp.full(2, 0.2))
  model.extra["bias"].set_value(np.full(2, 0.3, np.float32))
  expect_right_steps(step, model, optimizer)


def test_a_model_is_freed_while_the_step_lives(collect_garbage):
  model, optimizer = make()
  step = ob_nnx.make_train_step(loss_fn)
  step(model, optimizer, X)
  step(model, optimizer, X)
  kernel = weakref.ref(model.layers[0])
  del model
  collect_garbage()
  assert kernel() is None
  model, _ = make()
  optimizer = nnx.Optimizer(model, optax.sgd(0.01), wrt=nnx.Param)
  expect_right_steps(step, model, optimizer)


def noisy_loss(model, x, rngs):
  return jnp.mean((model(x) - jax.random.normal(rngs(), x.shape)) ** 2)


def test_rngs_continue_and_replaced_rngs_are_seen():
  step = ob_nnx.make_train_step(noisy_loss)
  (model, optimizer), (twin, twin_optimizer) = make(), make()
  rngs = nnx.Rngs(0)
  for draw in range(3):
    loss = step(model, optimizer, X, rngs)["loss"]
    # The same draw from rngs of each call's own.
    fresh = nnx.Rngs(0)
    fresh.default.count[...] += draw
    assert ob_nnx.make_train_step(noisy_loss)(twin, twin_optimizer, X, fresh)["loss"] == loss
    assert fresh.default.count[...] == rngs.default.count[...] == draw + 1
  # A seed set by hand, and other rngs.
  rngs.default.key[...] = jax.random.key(1)
  other = nnx.Rngs(1)
  other.default.count[...] += 3
  loss = step(model, optimizer, X, rngs)["loss"]
  assert step(twin, twin_optimizer, X, other)["loss"] == loss


class Holder(nnx.Module):
  """Holds something beside a param."""

  def __init__(self, thing):
    self.w = nnx.Param(jnp.ones(2))
    self.thing = thing

  def __call__(self, x):
    thing = self.thing if isinstance(self.thing, jax.Array) else 1.0
    return x * self.w[...] * thing


UNBOUND = {
  "a raw array": lambda: Holder(nnx.data(jnp.full(2, 0.5))),
  "a mapping of a kind of its own": lambda: Holder(
    nnx.data(nnx.State({"a": nnx.Param(jnp.ones(2))}))
  ),
  "itself": lambda: _with_itself(Holder(None)),
}


def _with_itself(model):
  model.thing = nnx.data(model)
  return model


@pytest.mark.parametrize("held", UNBOUND)
def test_a_model_that_holds_unusual_things_trains(held):
  model = UNBOUND[held]()
  optimizer = nnx.Optimizer(model, optax.sgd(0.01), wrt=nnx.Param)
  step = ob_nnx.make_train_step(loss_fn)
  expect_right_steps(step, model, optimizer)
  if held == "a raw array":
    model.thing = nnx.data(jnp.full(2, 2.0))
    expect_right_steps(step, model, optimizer)


@pytest.mark.skipif(not hasattr(nnx, "cached_partial"), reason="this flax has no cached_partial")
def test_a_step_that_is_bound_by_cached_partial_trains_the_model():
  models = [make(optax.adam(0.1)) for _ in range(2)]
  step = ob_nnx.make_train_step(loss_fn)
  bound = nnx.cached_partial(step, *models[0])
  for _ in range(2):
    np.testing.assert_array_equal(bound(X)["loss"], step(*models[1], X)["loss"])
  got, expected = (jax.tree.leaves(nnx.state(pair)) for pair in models)
  for array, other in zip(got, expected, strict=True):
    np.testing.assert_array_equal(array, other)
  assert models[0][1].step[...] == 2


def test_works_inside_another_trace():
  step = ob_nnx.make_train_step(loss_fn)
  model, optimizer = make()
  twin, twin_optimizer = make()

  @nnx.jit
  def both(model, optimizer):
    step(model, optimizer, X)
    step(model, optimizer, X)

  both(model, optimizer)
  for _ in range(2):
    step(twin, twin_optimizer, X)
  np.testing.assert_allclose(
    model.layers[0].kernel[...], twin.layers[0].kernel[...], rtol=1e-5, atol=1e-6
  )

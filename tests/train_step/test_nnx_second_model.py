"""A second NNX model in the batch: read, never changed, never donated."""

import functools

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
import optax_boost.nnx as ob_nnx
from optax_boost.nnx import _model
from tests import compilations
from tests.train_step.test_train_step import backtracking

X = jax.random.normal(jax.random.key(0), (16, 4))


class Critic(nnx.Module):
  def __init__(self, rngs):
    self.hidden = nnx.Linear(4, 8, rngs=rngs)
    self.norm = nnx.BatchNorm(8, rngs=rngs)
    self.dropout = nnx.Dropout(0.5, rngs=rngs)
    self.out = nnx.Linear(8, 1, rngs=rngs)

  def __call__(self, x):
    return self.out(self.dropout(jnp.tanh(self.norm(self.hidden(x)))))[:, 0]


def make_critic(seed=1):
  critic = Critic(nnx.Rngs(seed))
  critic.eval()
  return critic


def make(tx=None):
  model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
  return model, nnx.Optimizer(model, tx or optax.sgd(0.1), wrt=nnx.Param)


def loss_fn(model, batch):
  return -jnp.mean(batch["critic"](model(batch["x"]) + batch["x"]))


def _module(critic):
  return critic, loss_fn


def _state(critic):
  graphdef, state = nnx.split(critic)
  return state, lambda model, batch: loss_fn(
    model, {**batch, "critic": nnx.merge(graphdef, batch["critic"])}
  )


def _split(critic):
  return nnx.split(critic), lambda model, batch: loss_fn(
    model, {**batch, "critic": nnx.merge(*batch["critic"])}
  )


def _pure_state(critic):
  graphdef, state = nnx.split(critic)

  def loss(model, batch):
    state = nnx.state(make_critic())
    nnx.replace_by_pure_dict(state, batch["critic"])
    return loss_fn(model, {**batch, "critic": nnx.merge(graphdef, state)})

  return nnx.to_pure_dict(state), loss


def _variables(critic):
  return (
    (critic.hidden.kernel, critic.out.kernel),
    lambda model, batch: (
      -jnp.mean(
        jnp.tanh((model(batch["x"]) + batch["x"]) @ batch["critic"][0]) @ batch["critic"][1]
      )
    ),
  )


def _copied(transform):
  """The second model's call in a transformation, which writes all variables: of a copy."""

  def form(critic):
    def loss(model, batch):
      copy = nnx.clone(batch["critic"])
      call = functools.partial(transform(Critic.__call__), copy)
      return loss_fn(model, {**batch, "critic": call})

    return critic, loss

  return form


FORMS = {
  "a module": _module,
  "a state": _state,
  "a graphdef and a state": _split,
  "a dict of arrays": _pure_state,
  "variables": _variables,
  "a copy in nnx.jit": _copied(nnx.jit),
  "a copy in nnx.remat": _copied(nnx.remat),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_present_values_of_a_second_model_are_read_without_another_compilation(form):
  critic = make_critic()
  held, loss = FORMS[form](critic)
  model, optimizer = make(backtracking())  # trial points read the second model, too
  step = compilations.Watched(ob_nnx.make_train_step(loss))
  for t in range(4):
    expected = loss(nnx.clone(model), {"x": X, "critic": held})
    batch = {"x": X, "critic": held}
    np.testing.assert_allclose(step(model, optimizer, batch)["loss"], expected, rtol=1e-5)
    assert not any(x.is_deleted() for x in jax.tree.leaves(nnx.state(critic)))
    if t == 1:
      # As its own training changes it.
      nnx.update(critic, jax.tree.map(lambda x: 2 * x, nnx.state(critic, nnx.Param)))
      held, _ = FORMS[form](critic)
  assert not any(step.counts[2:])


def test_the_gradient_equals_the_gradient_of_flaxs_documented_loop():
  critic, (model, optimizer), (twin, twin_optimizer) = make_critic(), make(), make()
  step = ob_nnx.make_train_step(loss_fn)
  for _ in range(3):
    step(model, optimizer, {"x": X, "critic": critic})
    grads = nnx.grad(loss_fn)(twin, {"x": X, "critic": critic})
    twin_optimizer.update(twin, grads)
  np.testing.assert_allclose(model.kernel[...], twin.kernel[...], rtol=1e-5, atol=1e-6)


def test_a_copy_of_the_model_itself_and_the_model_may_be_in_the_batch():
  """As a teacher: the model's own present values are constants there."""

  def loss(model, batch):
    return jnp.mean((model(batch["x"]) - jax.lax.stop_gradient(batch["critic"](batch["x"]))) ** 2)

  model, optimizer = make()
  step = ob_nnx.make_train_step(loss)
  for teacher in (model, nnx.clone(model), nnx.state(model)):
    if not isinstance(teacher, nnx.Module):
      teacher = nnx.merge(nnx.graphdef(model), teacher)
    for _ in range(2):
      expected = loss(nnx.clone(model), {"x": X, "critic": teacher})
      metrics = step(model, optimizer, {"x": X, "critic": teacher})
      np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5, atol=1e-9)
      assert not any(x.is_deleted() for x in jax.tree.leaves(nnx.state(teacher)))


def _trains_norm(critic):
  critic.norm.use_running_average = False


def _draws(critic):
  critic.dropout.deterministic = False


def _writes(critic):
  critic.out.__class__ = Writing


def _creates(critic):
  critic.out.__class__ = Creating


class Writing(nnx.Linear):
  def __call__(self, x):
    self.bias[...] = self.bias[...] + 1
    return super().__call__(x)


class Creating(nnx.Linear):
  def __call__(self, x):
    self.seen = nnx.Intermediate(x)
    return super().__call__(x)


# With the name of what changes, as Flax says it.
CHANGES = {
  "statistics": (_trains_norm, "BatchStat"),
  "counts": (_draws, "RngCount|RngStream"),
  "params": (_writes, "Param"),
  "a new one": (_creates, "Creating"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_a_second_model_are_refused_before_the_step(change):
  critic = make_critic()
  apply_change, named = CHANGES[change]
  apply_change(critic)
  model, optimizer = make()
  kinds = nnx.Param, nnx.BatchStat, nnx.RngCount, nnx.Intermediate
  before = jax.tree.map(np.array, nnx.to_pure_dict(nnx.state((model, critic), kinds)))
  words = rf"must change no NNX object but its model.*({named}).*teacher\.eval\(\)"
  with pytest.raises(ValueError, match=words):
    ob_nnx.make_train_step(loss_fn)(model, optimizer, {"x": X, "critic": critic})
  after = nnx.to_pure_dict(nnx.state((model, critic), kinds))
  jax.tree.map(np.testing.assert_array_equal, after, before)


def test_a_second_model_that_the_loss_closes_over_is_not_changed_either():
  critic, (model, optimizer) = make_critic(), make()
  critic.train()
  step = ob_nnx.make_train_step(lambda model, x: loss_fn(model, {"x": x, "critic": critic}))
  with pytest.raises(ValueError, match=r"in the batch or of an outer scope"):
    step(model, optimizer, X)


def test_rngs_in_the_batch_are_refused_with_the_argument_for_them():
  def loss(model, batch):
    return jnp.mean(model(batch["x"] + jax.random.normal(batch["rngs"](), (16, 4))) ** 2)

  model, optimizer = make()
  with pytest.raises(ValueError, match=r"`nnx.Rngs` as the step's argument `rng`"):
    ob_nnx.make_train_step(loss)(model, optimizer, {"x": X, "rngs": nnx.Rngs(0)})


def test_trial_points_and_full_passes_see_the_second_model():
  critic, (model, optimizer) = make_critic(), make(optax_boost.svrg(refresh_every=None))
  step = ob_nnx.make_train_step(loss_fn)
  batches = [{"x": X[:10], "critic": critic}, {"x": X[10:], "critic": critic}]
  step.refresh(model, optimizer, batches, weight_fn=lambda batch: len(batch["x"]))
  graphdef, params = nnx.split(model)
  expected = jax.grad(lambda p: loss_fn(nnx.merge(graphdef, p), {"x": X, "critic": critic}))(params)
  found = optax.tree.get(_model.as_pure(optimizer.opt_state), "full_gradient")
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6),
    jax.tree.leaves(found),
    jax.tree.leaves(expected),
  )


def test_the_weight_of_a_batch_is_a_function_of_the_whole_batch():
  seen = []

  def weight(batch):
    seen.append(batch["critic"])
    return len(batch["x"])

  model, optimizer = make(optax_boost.accumulate(optax.sgd(0.1), 2))
  step = ob_nnx.make_train_step(loss_fn, weight=weight)
  for _ in range(2):
    step(model, optimizer, {"x": X, "critic": make_critic()}, None)
  assert isinstance(seen[0], Critic)


def test_the_axes_of_layers_do_not_depend_on_the_second_model():
  def loss(model, batch):
    teacher = batch["critic"]
    distance = jnp.sum((model.kernel[...] - teacher.kernel[...]) ** 2)
    return distance + jnp.mean((model(batch["x"]) - teacher(batch["x"])) ** 2)

  model, optimizer = make(optax.chain(optax_boost.centralize(), optax.sgd(0.1)))
  teacher = nnx.Linear(4, 4, rngs=nnx.Rngs(5))
  split, params, model_state = ob_nnx.split_loss(loss, model)
  axes = optax_boost.layer_axes(split, params, model_state, {"x": X, "critic": teacher})
  assert dict(zip(axes.paths, axes.axes, strict=True))["kernel"].fan_in == (0,)
  before = np.array(model.kernel[...])
  ob_nnx.make_train_step(loss)(model, optimizer, {"x": X, "critic": teacher})
  np.testing.assert_allclose((model.kernel[...] - before).mean(0), 0, atol=1e-6)


def test_a_split_loss_takes_a_second_model_in_the_batch():
  critic, (model, _) = make_critic(), make()
  loss, params, model_state = ob_nnx.split_loss(loss_fn, model)
  step = optax_boost.make_train_step(loss, optax.sgd(0.1))
  state = step.init(params, model_state)
  for _ in range(2):
    nnx.update(model, state.params)
    expected = loss_fn(model, {"x": X, "critic": critic})
    state, metrics = step(state, {"x": X, "critic": critic})
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)
  critic.train()
  with pytest.raises(ValueError, match=r"must change no NNX object but its model"):
    step(state, {"x": X, "critic": critic})


def test_statistics_are_estimated_with_a_second_model_in_the_batches():
  class Normed(nnx.Module):
    def __init__(self, rngs):
      self.norm = nnx.BatchNorm(8, rngs=rngs)

    def __call__(self, x):
      return self.norm(x)

  encoder = nnx.Linear(4, 8, rngs=nnx.Rngs(2))
  batches = [{"x": X[:8], "encoder": encoder}, {"x": X[8:], "encoder": encoder}]
  model = ob_nnx.estimate_batch_stats(
    Normed(nnx.Rngs(0)),
    batches,
    forward_fn=lambda model, b: model(b["encoder"](b["x"])),
    weight_fn=lambda batch: len(batch["x"]),
  )
  np.testing.assert_allclose(model.norm.mean[...], encoder(X).mean(0), rtol=1e-5, atol=1e-6)

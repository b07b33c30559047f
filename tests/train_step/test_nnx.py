"""The train step on a Flax NNX model with BatchNorm, dropout and aux."""

import itertools

import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
import optax_boost.nnx as ob_nnx
from optax_boost.nnx import _model
from tests import compilations, meshes
from tests.train_step.test_train_step import BATCH, CLOSURE_USERS, OF_EACH_KIND


class Network(nnx.Module):
  def __init__(self, rngs):
    self.hidden = nnx.Linear(8, 16, rngs=rngs)
    self.norm = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
    self.dropout = nnx.Dropout(0.1, rngs=rngs)
    self.out = nnx.Linear(16, 1, rngs=rngs)

  def __call__(self, x):
    return self.out(self.dropout(nnx.relu(self.norm(self.hidden(x)))))[:, 0]


def loss_fn(model, batch):
  prediction = model(batch["x"])
  return jnp.mean((prediction - batch["y"]) ** 2), {"prediction": prediction}


by_hand = nnx.jit(loss_fn)


def make(tx):
  model = Network(nnx.Rngs(0))
  return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def pure(model):
  return jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(model, (nnx.Param, nnx.BatchStat))))


@pytest.mark.parametrize("name", OF_EACH_KIND)
def test_trains_with_methods_that_need_closures(name):
  traces = itertools.count()

  def counted(model, batch):
    next(traces)
    return loss_fn(model, batch)

  model, optimizer = make(CLOSURE_USERS[name]())
  step = ob_nnx.make_train_step(counted, has_aux=True)
  losses = []
  for t in range(5):
    twin = nnx.clone(model)
    nnx.update(twin, jax.tree.map(jnp.array, nnx.state(model)))
    loss, aux = by_hand(twin, BATCH)
    metrics = step(model, optimizer, BATCH)
    losses.append(metrics["loss"])
    if t == 0:
      seen = next(traces)
    # The twin's forward pass at the same params, statistics and rng counts is the only one that
    # may have left a mark.
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(
      metrics["aux"]["prediction"], aux["prediction"], rtol=1e-4, atol=1e-5
    )
    chex.assert_trees_all_close(
      nnx.to_pure_dict(nnx.state(model, nnx.BatchStat)),
      nnx.to_pure_dict(nnx.state(twin, nnx.BatchStat)),
      rtol=1e-5,
      atol=1e-6,
    )
    assert model.dropout.rngs.count[...] == t + 1
  assert losses[-1] < losses[0]
  assert optimizer.step[...] == 5
  assert next(traces) == seen + 1, "the loss was traced again after the first step"


class Writer(nnx.Module):
  """Writes something but statistics in its forward pass."""

  def __init__(self, rngs):
    self.linear = nnx.Linear(8, 1, rngs=rngs)


class Lazy(Writer):
  def __call__(self, x):
    if hasattr(self, "mean"):
      self.mean[...] = 0.9 * self.mean[...] + 0.1 * jnp.mean(x, 0)
    else:
      self.mean = nnx.BatchStat(jnp.mean(x, 0), note="of the inputs")
    return self.linear(x - self.mean[...])[:, 0]


class Sowing(Writer):
  def __call__(self, x):
    self.inner = nnx.Intermediate((jnp.mean(x, 0), jnp.max(x)))
    return self.linear(x)[:, 0]


class Flagging(Writer):
  def __call__(self, x):
    x = x if hasattr(self, "seen") else 2 * x
    self.seen = True
    return self.linear(x)[:, 0]


class Tying(Writer):
  def __init__(self, rngs):
    super().__init__(rngs)
    self.cache = nnx.Cache(jnp.ones(8))

  def __call__(self, x):
    if not hasattr(self, "again"):
      self.again = self.cache
    self.again[...] *= 0.9
    return self.linear(x * self.cache[...])[:, 0]


class Clipping(Writer):
  def __call__(self, x):
    self.linear.kernel[...] = jnp.clip(self.linear.kernel[...], -0.1, 0.1)
    return self.linear(x)[:, 0]


class ClippingInRemat(Writer):
  def __call__(self, x):
    return nnx.remat(lambda model, x: Clipping.__call__(model, x))(self, x)


WRITERS = {
  "a variable is created": (Lazy, 2),
  "a variable is created and popped": (Sowing, 2),
  "attributes are set": (Flagging, 2),
  "a variable is shared": (Tying, 2),
  "params are written": (Clipping, 1),
  "params are written in remat": (ClippingInRemat, 1),
}


@pytest.mark.parametrize(("kind", "programs"), WRITERS.values(), ids=WRITERS)
def test_the_forward_pass_writes_the_variables_that_flaxs_documented_loop_writes(kind, programs):
  traced = []

  def loss(model, batch):
    traced.append(model)
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

  @nnx.jit
  def by_hand(model, optimizer, batch):
    value, grads = nnx.value_and_grad(loss)(model, batch)
    optimizer.update(model, grads)
    return value

  model, twin = (kind(nnx.Rngs(0)) for _ in range(2))
  tx = optax.adam(0.1)
  optimizer, twin_optimizer = (nnx.Optimizer(m, tx, wrt=nnx.Param) for m in (model, twin))
  kernel, step = model.linear.kernel, ob_nnx.make_train_step(loss)
  for _ in range(4):
    expected = by_hand(twin, twin_optimizer, BATCH)
    np.testing.assert_allclose(step(model, optimizer, BATCH)["loss"], expected, rtol=1e-5)
    graphdef, state = nnx.split(model)
    twin_graphdef, twin_state = nnx.split(twin)
    assert graphdef == twin_graphdef
    chex.assert_trees_all_close(
      _model.as_pure(state), _model.as_pure(twin_state), rtol=1e-5, atol=1e-6
    )
    if kind is Sowing:
      nnx.pop((model, twin), nnx.Intermediate)
  # As many as with Flax's loop, and one more to see which params the loss really changes.
  writes_params = kind in (Clipping, ClippingInRemat)
  assert len(traced) <= 2 * programs + writes_params
  assert model.linear.kernel is kernel, "a variable that the user may hold was replaced"


def test_params_that_pass_through_transforms_do_not_count_as_written():
  class Block(nnx.Module):
    def __init__(self, rngs):
      self.linear = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
      return nnx.jit(lambda linear, x: jnp.tanh(linear(x)))(self.linear, x)

  @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
  @nnx.remat
  def run(x, block):
    return block(x)

  blocks = nnx.vmap(lambda key: Block(nnx.Rngs(key)))(jax.random.split(jax.random.key(0), 2))
  optimizer = nnx.Optimizer(blocks, optax.sgd(0.0), wrt=nnx.Param)

  def loss(model, batch):
    output = run(batch["x"], model)
    if "write" in batch:
      model.linear.bias[...] += 1
    return jnp.mean(output**2)

  for batch in (BATCH, BATCH | {"write": jnp.ones(())}):
    kernel = jnp.array(blocks.linear.kernel[...])
    ob_nnx.make_train_step(loss)(blocks, optimizer, batch)
    assert jnp.all(blocks.linear.bias[...] == ("write" in batch))
    np.testing.assert_array_equal(blocks.linear.kernel[...], kernel)


def test_trained_variables_that_appear_in_the_forward_pass_are_refused_before_the_donation():
  def loss(model, batch):
    model.scale = nnx.Param(jnp.ones(()))
    return jnp.mean(model.scale[...] * model(batch["x"]))

  model = nnx.Linear(8, 1, rngs=nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
  with pytest.raises(ValueError, match=r"creates, removes or reshapes \['scale'\]. Create trained"):
    ob_nnx.make_train_step(loss)(model, optimizer, BATCH)
  assert jnp.all(jnp.isfinite(model.kernel[...]))


def test_a_state_that_holds_the_params_can_be_donated():
  model, optimizer = make(optax.contrib.schedule_free_sgd(0.1))
  step = ob_nnx.make_train_step(loss_fn, has_aux=True)
  first = step(model, optimizer, BATCH)["loss"]
  for _ in range(5):
    last = step(model, optimizer, BATCH)["loss"]
  assert last < first


def test_switching_to_evaluation_and_back_is_seen():
  model, optimizer = make(optax.sgd(0.0))
  step = ob_nnx.make_train_step(loss_fn, has_aux=True)
  model.eval()
  still = [step(model, optimizer, BATCH)["loss"] for _ in range(2)]
  assert still[0] == still[1]
  assert not jnp.any(model.norm.mean[...])
  model.train()
  step(model, optimizer, BATCH)
  assert jnp.any(model.norm.mean[...])


def test_paths_of_an_nnx_model_read_like_its_attributes():
  model, optimizer = make(
    optax.chain(optax_boost.centralize(exclude="out"), optax_boost.lars(1.0, 1e-4))
  )
  step = ob_nnx.make_train_step(loss_fn, has_aux=True)
  metrics = step(model, optimizer, BATCH)
  np.testing.assert_array_equal(
    metrics["trust_ratio"], optax.tree.get(optimizer.opt_state, "trust_ratio")
  )
  structure = jax.tree.structure(nnx.state(model, nnx.Param))
  ratios = nnx.to_pure_dict(jax.tree.unflatten(structure, metrics["trust_ratio"]))
  assert ratios["norm"]["scale"] == ratios["hidden"]["bias"] == 1
  assert ratios["hidden"]["kernel"] < 0.1


@pytest.mark.parametrize("several", [False, True])
def test_only_variables_selected_for_the_optimizer_are_trained(several):
  class Head(nnx.Param):
    pass

  model = Network(nnx.Rngs(0))
  model.out.kernel = Head(model.out.kernel[...])
  optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=[Head, nnx.Cache] if several else Head)
  before = pure(model)
  head = jnp.array(model.out.kernel[...])
  ob_nnx.make_train_step(loss_fn, has_aux=True)(model, optimizer, BATCH)
  np.testing.assert_array_equal(pure(model)["hidden"]["kernel"], before["hidden"]["kernel"])
  assert not np.array_equal(model.out.kernel[...], head)


class NoisyLinear(nnx.Module):
  """Draws from rngs of its own, and from those that it is called with."""

  def __init__(self, rngs):
    self.linear = nnx.Linear(8, 1, rngs=rngs)
    self.rngs = rngs
    self.dropout = nnx.Dropout(0.2, rngs=rngs)

  def __call__(self, x, rngs):
    x = self.dropout(x) + 0.1 * jax.random.normal(self.rngs.noise(), x.shape)
    return self.linear(nnx.Dropout(0.2)(x, rngs=rngs))[:, 0]


def noisy_loss(model, batch, rngs=None):
  return jnp.mean((model(batch["x"], rngs or model.rngs) - batch["y"]) ** 2)


def make_noisy(tx):
  own = nnx.Rngs(0, noise=1)
  model = NoisyLinear(own)
  return model, nnx.Optimizer(model, tx, wrt=nnx.Param), own


def counts(*nodes):
  return [nnx.to_pure_dict(nnx.state(node, nnx.RngCount)) for node in nodes]


RNGS = {
  "rngs of the call": lambda own: nnx.Rngs(5, dropout=6),
  "a stream": lambda own: nnx.Rngs(5).default,
  "the model's rngs": lambda own: own,
}


@pytest.mark.parametrize("rngs_of", RNGS.values(), ids=RNGS)
def test_rngs_of_a_call_continue_as_in_flaxs_documented_loop(rngs_of):
  model, optimizer, own = make_noisy(optax.sgd(0.1, momentum=0.9))
  twin, twin_optimizer, twin_own = make_noisy(optax.sgd(0.1, momentum=0.9))
  rngs, twin_rngs = rngs_of(own), rngs_of(twin_own)
  step = ob_nnx.make_train_step(noisy_loss)
  for _ in range(3):
    metrics = step(model, optimizer, BATCH, rngs)
    # Flax does not take the model's rngs a second time.
    again = {} if twin_rngs is twin_own else {"rngs": twin_rngs}
    loss, grads = nnx.value_and_grad(noisy_loss)(twin, BATCH, **again)
    twin_optimizer.update(twin, grads)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
  assert counts(model, rngs) == counts(twin, twin_rngs)
  assert max(jax.tree.leaves(counts(rngs))) >= 3
  chex.assert_trees_all_close(pure(model), pure(twin), rtol=1e-5, atol=1e-6)


def test_trial_points_of_a_line_search_draw_nothing_from_the_rngs_of_a_call():
  model, optimizer, _ = make_noisy(optax.lbfgs())
  rngs = nnx.Rngs(5)
  step = ob_nnx.make_train_step(noisy_loss)
  losses = [float(step(model, optimizer, BATCH, rngs)["loss"]) for _ in range(5)]
  assert losses[-1] < losses[0]
  assert rngs.default.count[...] == model.dropout.rngs.count[...] == 5


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
def test_a_key_is_folded_with_the_step_and_handed_to_the_loss(make_key):
  def loss(model, batch, rng):
    return loss_fn(model, batch)[0], jax.random.uniform(rng)

  model, optimizer = make(optax.sgd(0.1))
  twin, twin_optimizer = make(optax.sgd(0.1))
  step = ob_nnx.make_train_step(loss, has_aux=True)
  without = ob_nnx.make_train_step(loss_fn, has_aux=True)
  for t in range(3):
    metrics = step(model, optimizer, BATCH, make_key(7))
    expected = jax.random.uniform(jax.random.fold_in(make_key(7), t))
    np.testing.assert_array_equal(metrics["aux"], expected)
    assert metrics["loss"] == without(twin, twin_optimizer, BATCH)["loss"]
  # The model's own streams go on as if there were no key.
  assert model.dropout.rngs.count[...] == 3
  chex.assert_trees_all_equal(pure(model), pure(twin))


@pytest.mark.parametrize("rng", [jax.random.key(7), nnx.Rngs(7)], ids=["key", "rngs"])
def test_a_full_pass_draws_for_each_batch_and_leaves_the_rngs_alone(rng):
  batches = jax.tree.map(lambda x: jnp.stack([x, x]), BATCH)
  drawn = []

  def loss(model, batch, rng):
    key = rng() if isinstance(rng, nnx.Rngs) else rng
    jax.debug.callback(lambda *bits: drawn.append(tuple(map(int, bits))), jax.random.bits(key))
    return noisy_loss(model, batch, rng if key is not rng else nnx.Rngs(rng))

  def full(grad_fn, params, *, rng):
    return optax_boost.full_gradient(grad_fn, params, batches, rng=rng, stacked=True)

  model, optimizer, _ = make_noisy(optax_boost.svrg(refresh_every=1))
  step = ob_nnx.make_train_step(loss, full_grad_fn=full)
  step(model, optimizer, BATCH, rng)
  jax.effects_barrier()
  # The forward pass at the params, that at the snapshot with the same draws, and two batches.
  assert len(set(drawn)) == 3
  drawn.clear()
  before = counts(model, *([rng] if isinstance(rng, nnx.Rngs) else []))
  step.refresh(model, optimizer, [BATCH, BATCH], rng)
  jax.effects_barrier()
  assert len(set(drawn)) == 2
  assert counts(model, *([rng] if isinstance(rng, nnx.Rngs) else [])) == before


def test_statistics_of_frozen_layers_do_not_change_with_rngs_or_with_a_new_variable():
  def loss(model, batch, rngs):
    model.hidden.sown = nnx.Intermediate(batch["x"][0])
    return loss_fn(model, batch)[0]

  model = Network(nnx.Rngs(0))
  schedule = optax_boost.fixed_freezing(2, 1)
  tx = optax_boost.freeze_layers(optax.sgd(0.1), ["hidden|norm", "out"], schedule)
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  metrics = ob_nnx.make_train_step(loss)(model, optimizer, BATCH, nnx.Rngs(0))
  assert metrics["frozen_groups"] == 1
  assert not jnp.any(model.norm.mean[...])
  np.testing.assert_array_equal(model.hidden.sown[...], BATCH["x"][0])


def test_the_step_can_be_inspected_without_making_one():
  model, optimizer, _ = make_noisy(optax.sgd(0.1))
  rngs = nnx.Rngs(5)
  step = ob_nnx.make_train_step(noisy_loss)
  before = pure(model)
  assert "stablehlo" in step.lower(model, optimizer, BATCH, rngs).as_text()
  chex.assert_trees_all_equal(pure(model), before)
  assert rngs.default.count[...] == optimizer.step[...] == 0
  step(model, optimizer, BATCH, rngs)
  assert optimizer.step[...] == 1


def _optimizer_of_another_model():
  other = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
  return nnx.Optimizer(other, optax.adam(0.1), wrt=nnx.Param)


def _optimizer_of_other_shapes():
  other = nnx.Linear(8, 2, rngs=nnx.Rngs(0))
  return nnx.Optimizer(other, optax.adam(0.1), wrt=nnx.Param)


def _optimizer_of_a_factory():
  optimizer = _optimizer()
  optimizer.tx = optax.adam
  return optimizer


def _model_with_integer():
  model = linear_model()
  model.n = nnx.Param(jnp.arange(3))
  return model


def _optimizer_with_integer():
  return nnx.Optimizer(_model_with_integer(), optax.sgd(0.1), wrt=nnx.Param)


def _optimizer_of_nothing():
  return nnx.Optimizer(linear_model(), optax.adam(0.1), wrt=nnx.Cache)


def linear_model():
  return nnx.Linear(8, 1, rngs=nnx.Rngs(0))


def _optimizer():
  return nnx.Optimizer(linear_model(), optax.adam(0.1), wrt=nnx.Param)


REFUSED = {
  "no model": ({"model": None}, TypeError, r"`model` must be an NNX module.*got None"),
  "a class": ({"model": nnx.Linear}, TypeError, r"`model` must be an NNX module"),
  "arrays": ({"model": {"w": jnp.ones(2)}}, TypeError, r"`model` must be an NNX module"),
  "no optimizer": ({"optimizer": optax.sgd(0.1)}, TypeError, r"`optimizer` must be what `nnx.Opt"),
  "a factory": ({"optimizer": _optimizer_of_a_factory}, TypeError, r"`optimizer.tx` must be .*fac"),
  "another model's optimizer": (
    {"model": lambda: Network(nnx.Rngs(0)), "optimizer": _optimizer_of_another_model},
    ValueError,
    r"The optimizer state must be the one that this transformation's `init` made",
  ),
  "an optimizer of other shapes": (
    {"optimizer": _optimizer_of_other_shapes},
    ValueError,
    r"must be the one that this transformation's `init` made.*`nnx.Optimizer\(model, tx, wrt=",
  ),
  "an optimizer of nothing": ({"optimizer": _optimizer_of_nothing}, ValueError, r"selects none"),
  "an integer that is trained": (
    {"model": _model_with_integer, "optimizer": _optimizer_with_integer},
    TypeError,
    r"the leaf 'n' is int32. Keep it out of the params: .* type of variable",
  ),
  "text": (
    {"batch": {"x": "text"}},
    TypeError,
    r"`batch` must hold arrays.* 'x' is 'text' of type",
  ),
  "a seed": ({"rng": 3}, TypeError, r"`rng` must be a key, an `nnx.Rngs`.*got 3"),
  "numbers": ({"rng": jnp.ones(3)}, TypeError, r"`rng` must be one key of `jax.random.key`; got"),
  "keys": ({"rng": jax.random.split(jax.random.key(0))}, TypeError, r"`rng` must be one key"),
}


@pytest.mark.parametrize(("wrong", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_refuses_to_step_with_arguments_of_the_wrong_kind(wrong, error, message):
  arguments = {"model": linear_model, "optimizer": _optimizer, "batch": BATCH} | wrong
  made = {
    name: value() if callable(value) and not isinstance(value, type) else value
    for name, value in arguments.items()
    if name != "rng"
  }
  step = ob_nnx.make_train_step(lambda model, batch, *_: jnp.mean(model(batch["x"]) ** 2))
  with pytest.raises(error, match=message):
    step(**made, rng=arguments.get("rng"))


@pytest.mark.parametrize("passed", [(optax.sgd(0.1),), {"tx": optax.sgd(0.1)}], ids=type)
def test_a_transformation_is_referred_to_the_optimizer(passed):
  positional, named = ((), passed) if isinstance(passed, dict) else (passed, {})
  message = r"takes the loss, .*; got also .*nnx.Optimizer\(model, tx, wrt=nnx.Param\)"
  with pytest.raises(TypeError, match=message):
    optax_boost.nnx.make_train_step(lambda model, batch: 0.0, *positional, **named)


def test_refresh_refuses_none_instead_of_batches():
  with pytest.raises(TypeError, match=r"`batches` must be"):
    ob_nnx.make_train_step(loss_fn).refresh(linear_model(), _optimizer(), None)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize(
  ("tx", "number"),
  [
    (optax_boost.sgperm(method="rank"), 0),
    (optax_boost.average_params(optax.sgd(0.1), decay=0.5), 0),
    (optax_boost.record_trajectory(1, 3), 1),
  ],
  ids=["sgperm", "average_params", "record_trajectory"],
)
def test_models_with_named_axes_train_on_a_mesh(tx, number, kind):
  """The state's arrays of other shapes lie as the params do, not as the names of their axes say."""
  mesh = meshes.mesh((2, 4), ("data", "model"), kind)
  init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("data", "model"))
  with jax.set_mesh(mesh):
    model = nnx.Linear(8, 16, kernel_init=init, use_bias=False, rngs=nnx.Rngs(0))
    # As Flax itself does from 0.12 on.
    placed = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data", "model"))
    nnx.update(model, jax.tree.map(lambda x: jax.device_put(x, placed), nnx.state(model)))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    rings = [x for x in jax.tree.leaves(nnx.state(optimizer)) if x.ndim == 3]
    expected = jax.sharding.PartitionSpec(None, "data", "model")
    assert [x.sharding.spec for x in rings] == [expected] * number
    grads = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
    nnx.jit(lambda model, optimizer, grads: optimizer.update(model, grads))(model, optimizer, grads)
  assert model.kernel[...].sharding.spec == jax.sharding.PartitionSpec("data", "model")


@pytest.mark.parametrize("tx", [optax.adam(0.1), optax.sgd(0.1, momentum=0.9)])
def test_layers_cut_in_both_ways_keep_their_sharding_in_one_program(tx):
  """Left to itself, XLA lets each device keep the part of the bias that it computes."""
  spec = jax.sharding.PartitionSpec
  mesh = meshes.mesh((4, 2), ("data", "model"))

  def put(x, *axes):
    return jax.device_put(x, jax.sharding.NamedSharding(mesh, spec(*axes)))

  class Cut(nnx.Module):
    def __init__(self, rngs):
      self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
      return self.down(jnp.tanh(self.up(x)))

  model = Cut(nnx.Rngs(0))
  model.up.kernel[...] = put(model.up.kernel[...], None, "model")
  model.down.kernel[...] = put(model.down.kernel[...], "model", None)
  for layer in (model.up, model.down):
    layer.bias[...] = put(layer.bias[...])
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  before = {path: x.sharding for path, x in jax.tree.leaves_with_path(nnx.state(model))}
  step = compilations.Watched(ob_nnx.make_train_step(lambda model, x: jnp.mean(model(x) ** 2)))
  for _ in range(3):
    step(model, optimizer, put(jnp.eye(8), "data"))
    # A loop would hold an array until the next step, which would copy it.
    moved = [
      path
      for path, x in jax.tree.leaves_with_path(nnx.state(model))
      if not x.sharding.is_equivalent_to(before[path], x.ndim)
    ]
    assert not moved
  assert step.compiled_once()
  # A variable more than when the places were looked up: the step compiles again and goes on.
  model.seen = nnx.BatchStat(put(jnp.ones(8)))
  step(model, optimizer, put(jnp.eye(8), "data"))


@pytest.mark.parametrize("rng", [None, jax.random.key(0)], ids=["no key", "key"])
def test_micro_batches_weigh_as_the_large_batch(rng):
  def loss(model, batch, *_):
    return jnp.mean(model.linear(batch["x"]) ** 2), {"size": jnp.float32(len(batch["x"]))}

  def train(tx, batches, **options):
    model = Writer(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    step = ob_nnx.make_train_step(loss, has_aux=True, **options)
    for batch in batches:
      step(model, optimizer, {"x": batch}, rng)
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))

  expected = train(optax.sgd(0.1), [BATCH["x"][:8]])
  tx, batches = optax_boost.accumulate(optax.sgd(0.1), every=2), [BATCH["x"][:2], BATCH["x"][2:8]]
  for weight in ("size", lambda batch: len(batch["x"])):
    params = train(tx, batches, weight=weight)
    chex.assert_trees_all_close(params, expected, rtol=1e-5, atol=1e-6)


def test_an_optimizer_with_an_update_of_its_own_is_refused_and_one_without_is_taken():
  class Clipping(nnx.Optimizer):
    def update(self, model, grads, **kwargs):
      super().update(model, grads, **kwargs)
      nnx.update(model, jax.tree.map(lambda p: jnp.clip(p, -0.01, 0.01), nnx.state(model)))

  class Named(nnx.Optimizer):
    name = "named"

  model = Network(nnx.Rngs(0))
  step = ob_nnx.make_train_step(loss_fn, has_aux=True)
  own = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
  own.update = lambda *args: None
  for optimizer in (Clipping(model, optax.sgd(0.1), wrt=nnx.Param), own):
    with pytest.raises(TypeError, match=r"`update` of its own, which would never.*chain"):
      step(model, optimizer, BATCH)
  step(model, Named(model, optax.sgd(0.1), wrt=nnx.Param), BATCH)


def test_an_optimizer_that_holds_a_model_trains_no_other_model():
  optimizer = nnx.ModelAndOptimizer(Network(nnx.Rngs(0)), optax.sgd(0.1), wrt=nnx.Param)
  step = ob_nnx.make_train_step(loss_fn, has_aux=True)
  before = pure(optimizer.model)
  with pytest.raises(ValueError, match=r"another model than `optimizer.model`.*optimizer.model, "):
    step(nnx.clone(optimizer.model), optimizer, BATCH)
  step(optimizer.model, optimizer, BATCH)
  changed = jax.tree.map(lambda a, b: np.any(a != b), before, pure(optimizer.model))
  assert any(jax.tree.leaves(changed))


VALUES = {
  "flat": ({"w": 2.0, "b": 3.0}, lambda v: v["w"] * v["b"]),
  "nested": ({"w": 2.0, "deep": {"b": 3.0, "none": {}}}, lambda v: v["w"] * v["deep"]["b"]),
  "list inside": ({"w": 2.0, "many": [3.0]}, lambda v: v["w"] * v["many"][0]),
  "empty": ({}, lambda v: 1.0),
}


@pytest.mark.parametrize("kind", [nnx.Param, nnx.BatchStat])
@pytest.mark.parametrize("value", VALUES)
def test_variables_whose_values_are_dictionaries_train_as_separate_variables(value, kind):
  tree, product = VALUES[value]

  class Tree(nnx.Module):
    def __init__(self):
      self.tree = kind(jax.tree.map(jnp.float32, tree))
      self.scale = nnx.Param(jnp.float32(1.5))

    def __call__(self, x):
      if kind is nnx.BatchStat:
        self.tree.set_value(jax.tree.map(lambda leaf: leaf / 2, self.tree.get_value()))
      return product(self.tree.get_value()) * self.scale[...] * x

  def loss(values, x):
    leaves, scale = values
    if kind is nnx.BatchStat:
      leaves = jax.tree.map(lambda leaf: leaf / 2, leaves)
    return jnp.mean(product(leaves) * scale * x), leaves

  x, tx = jnp.arange(3.0), optax_boost.average_params(optax.adam(0.1), start=0)
  values = jax.tree.map(jnp.float32, (tree, 1.5))
  state = optax.adam(0.1).init(values)
  for _ in range(3):
    grads, leaves = jax.grad(loss, has_aux=True)(values, x)
    updates, state = optax.adam(0.1).update(grads, state)
    values = optax.apply_updates(values, updates)
    if kind is nnx.BatchStat:
      values = leaves, values[1]

  model = Tree()
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  step = ob_nnx.make_train_step(lambda model, x: jnp.mean(model(x)))
  for _ in range(3):
    step(model, optimizer, x)
  chex.assert_trees_all_close((model.tree.get_value(), model.scale[...]), values, rtol=1e-5)
  assert type(ob_nnx.averaged_model(optimizer, model).tree.get_value()) is dict

  pure, params, model_state = ob_nnx.split_loss(lambda model, x: jnp.mean(model(x)), Tree())
  pure_step = optax_boost.make_train_step(pure, optax.adam(0.1))
  pure_state = pure_step.init(params, model_state)
  for _ in range(3):
    pure_state, _ = pure_step(pure_state, x)
  np.testing.assert_allclose(pure_state.params["scale"], values[1], rtol=1e-5)


def test_leaves_of_a_dictionary_in_a_variable_are_frozen_by_their_path():
  class Net(nnx.Module):
    def __init__(self):
      self.body = nnx.Param({"w": jnp.ones((4, 3)), "b": jnp.ones(3)})
      self.head = nnx.Param(jnp.ones((3, 2)))

    def __call__(self, x):
      body = self.body.get_value()
      return (x @ body["w"] + body["b"]) @ self.head[...]

  def loss(model, x):
    return jnp.mean(model(x) ** 2)

  x = jnp.eye(4)
  for groups, bias in ((["body", "head"], 1.0), (["body/w", "body/b|head"], 0.9)):
    model = Net()
    tx = optax_boost.freeze_layers(optax.adam(0.1), groups, optax_boost.fixed_freezing(2, 1))
    ob_nnx.make_train_step(loss)(model, nnx.Optimizer(model, tx, wrt=nnx.Param), x)
    np.testing.assert_array_equal(model.body.get_value()["w"], 1)
    np.testing.assert_allclose(model.body.get_value()["b"], bias, rtol=1e-5)
    np.testing.assert_allclose(model.head[...], 0.9, rtol=1e-5)

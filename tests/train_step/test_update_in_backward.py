"""With ``update_in_backward=True`` the optimizer's step is made in the backward pass, by layer."""

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
from tests import meshes, scanned
from tests.scanned import LAYERS, WIDTH, loss_of, params_of, run_layers


def along_axis_1(params, h):
  blocks = jax.tree.map(lambda x: x.swapaxes(0, 1), params["blocks"])
  turned = {"blocks": jax.tree.map(lambda x: x.swapaxes(0, 1), blocks)}
  return run_layers(turned, h)


def with_data(params, h):
  """Each layer reads data of its own, shared data that is trained, and returns a result."""

  def body(h, inputs):
    block, rate, number = inputs
    h = h + rate * jnp.tanh(h @ block["kernel"] + block["bias"]) * params["head"] + number
    return h, (h.mean(), number)

  rates = jnp.linspace(0.5, 1.0, LAYERS) * params["head"].sum()
  h, (means, _) = jax.lax.scan(body, h, (params["blocks"], rates, jnp.arange(LAYERS)))
  return h * means.sum()


def two_scans(params, h):
  blocks = params["blocks"]
  h = jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), h, blocks["kernel"])[0]
  return jax.lax.scan(lambda h, b: (h * (1 + b), None), h, blocks["bias"])[0]


LOSSES = scanned.LOSSES | {
  "remat around": jax.checkpoint(run_layers),
  "transposed": along_axis_1,
  "with data": with_data,
  "two scans": two_scans,
  "no gradient": lambda params, h: jax.lax.stop_gradient(run_layers(params, h)),
}


def by_rank(params):
  return jax.tree.map(lambda p: p.ndim > 1, params)


GROUPS = optax_boost.layer_groups(params_of(), ["embed", "blocks[*]", "head"])
OPTIMIZERS = {
  "adamw": optax.adamw(1e-2, mask=by_rank),
  "sgd": optax.sgd(0.1),
  "nesterov": optax.sgd(optax.cosine_decay_schedule(0.1, 10), 0.9, nesterov=True),
  "clipped lion": optax.chain(optax.clip(0.01), optax.lion(1e-2)),
  "factored": optax.scale_by_factored_rms(min_dim_size_to_factor=WIDTH),
  "injected": optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
  "parts": optax.partition(
    {"a": optax.adam(1e-2), "b": optax.sgd(0.1)}, {"blocks": "a", "embed": "b", "head": "a"}
  ),
  "plateau": optax.chain(optax.adam(1e-2), optax.contrib.reduce_on_plateau(patience=1)),
  "rates": optax_boost.layerwise_decay(optax.adam(1e-2), GROUPS, 0.5),
  "averaged": optax_boost.average_params(optax.adam(1e-2), decay=0.9),
  "centralized": optax.chain(optax_boost.centralize(), optax.adam(1e-2)),
}
BATCHES = jax.random.randint(jax.random.key(0), (4, 3), 0, 5)


def train(loss, tx, params, batches=BATCHES, **kwargs):
  step = optax_boost.make_train_step(loss, tx, **kwargs)
  state = step.init(params)
  for batch in batches:
    state, metrics = step(state, batch)
  return state, metrics


@pytest.mark.parametrize(
  ("name", "optimizer"),
  [*((name, "adamw") for name in LOSSES), *(("a scan", name) for name in [*OPTIMIZERS][1:])],
)
def test_a_step_inside_of_the_backward_pass_is_the_step_after_it(name, optimizer):
  """Params, state, loss and gradient norm, with the state of the same structure."""
  tx, loss = OPTIMIZERS[optimizer], loss_of(LOSSES[name])
  run = functools.partial(train, loss, tx, params_of(), metrics=("gradient_norm",))
  after, inside = run(), run(update_in_backward=True)
  assert jax.tree.structure(after) == jax.tree.structure(inside)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-6, atol=1e-7), after, inside)


@pytest.mark.parametrize("wrapper", ["masters", "rounding"])
def test_half_precision_params_are_updated_with_what_they_round_from(wrapper):
  """Masters are equal; of stochastic rounding, the mean is, since a layer draws its own numbers."""
  low = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params_of(width=64))
  inner = optax.sgd(1.0)
  if wrapper == "masters":
    tx = optax_boost.master_weights(inner, check=None)
  else:
    tx = optax_boost.stochastic_rounding(inner, key=0, check=None)

  def loss(params, batch):  # the gradient of a kernel is far below the distance of its numbers
    def body(h, block):
      return h + jnp.sum(block["kernel"].astype("f4")), None

    return 1e-4 * jax.lax.scan(body, 0.0, params["blocks"])[0] * batch

  after = train(loss, tx, low, jnp.ones(4))[0]
  inside = train(loss, tx, low, jnp.ones(4), update_in_backward=True)[0]
  x, y = (np.asarray(s.params["blocks"]["kernel"], "f4") for s in (after, inside))
  if wrapper == "masters":
    jax.tree.map(np.testing.assert_array_equal, after, inside)
    return
  start = np.asarray(low["blocks"]["kernel"], "f4")
  assert len({layer.tobytes() for layer in y - start}) == LAYERS  # no two layers draw the same
  np.testing.assert_allclose([(x - start).mean(), (y - start).mean()], -4e-4, rtol=0.2)


def refused(tx, match, **kwargs):
  with pytest.raises(ValueError, match=match):
    train(
      loss_of(run_layers),
      tx,
      params_of(),
      update_in_backward=True,
      **kwargs,
    )


@pytest.mark.parametrize(
  ("tx", "name"),
  [
    (optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)), "clip_by_global_norm"),
    (optax.lars(0.1), "scale_by_trust_ratio"),
    (optax.lamb(0.1), "scale_by_trust_ratio"),
    (optax.adafactor(0.1), "scale_by_param_block_rms"),
    (optax.apply_if_finite(optax.adam(0.1), 5), "apply_if_finite"),
    (optax.contrib.prodigy(), "prodigy"),
    (optax_boost.lars(0.1), "lars"),
    (optax_boost.dynamic_loss_scale(optax.adam(0.1)), "dynamic_loss_scale"),
    (optax_boost.master_weights(optax.adam(0.1)), "master_weights"),
    (optax_boost.skip_spikes(optax.adam(0.1), factor=4.0), "skip_spikes"),
    (optax_boost.accumulate(optax.adam(0.1), 2), "accumulate"),
    (
      optax_boost.freeze_layers(optax.adam(0.1), GROUPS, optax_boost.fixed_freezing(6, 3)),
      "freeze_layers",
    ),
    (optax.lbfgs(), "line search"),
    (optax_boost.svrg(refresh_every=2), "gradient"),
  ],
  ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_needs_all_gradients_is_refused_by_name(tx, name):
  refused(tx, name)


def test_a_loss_without_a_scan_over_layers_is_told():
  loss = lambda params, x: jnp.mean((x @ params) ** 2)  # noqa: E731
  step = optax_boost.make_train_step(loss, optax.adam(0.1), update_in_backward=True)
  state = step.init(jnp.ones(3))
  with pytest.warns(UserWarning, match="`update_in_backward` saves no memory"):
    state, _ = step(state, jnp.eye(3))
  np.testing.assert_allclose(state.params, np.full(3, 0.9), rtol=1e-6)


def test_no_gradients_of_a_scan_exist_at_once():
  """The temporaries shrink by the gradients of the stack, with Adam and with plain SGD."""
  params = params_of(16, 64)
  stack = params["blocks"]["kernel"].nbytes
  for tx in (optax.adamw(1e-3), optax.sgd(0.1)):
    sizes = []
    for inside in (False, True):
      step = optax_boost.make_train_step(loss_of(run_layers), tx, update_in_backward=inside)
      program = step.lower(jax.eval_shape(step.init, params), BATCHES[0]).compile()
      sizes.append(program.memory_analysis().temp_size_in_bytes)
    assert sizes[1] < sizes[0] - 0.8 * stack, (tx, sizes, stack)


def test_the_way_can_change_between_two_steps():
  """States are the same on both ways, so a checkpoint of one resumes on the other."""
  tx, loss = OPTIMIZERS["adamw"], loss_of(run_layers)
  steps = [optax_boost.make_train_step(loss, tx, update_in_backward=x) for x in (True, False)]
  mixed, whole = (steps[0].init(params_of()) for _ in range(2))
  for i, batch in enumerate(BATCHES):
    mixed, _ = steps[i % 2](mixed, batch)
    whole, _ = steps[1](whole, batch)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-6, atol=1e-7), mixed, whole)


def test_a_gradient_that_is_not_finite_is_applied_as_in_any_step():
  batches = jnp.array([1.0, np.nan])
  loss = lambda p, x: x * loss_of(run_layers)(p, BATCHES[0])  # noqa: E731
  for inside in (False, True):
    state, _ = train(loss, optax.sgd(0.1), params_of(), batches, update_in_backward=inside)
    assert all(np.isnan(x).any() for x in jax.tree.leaves(state.params))


class Block(nn.Module):
  @nn.compact
  def __call__(self, x, _):
    x = x + nn.BatchNorm(use_running_average=False)(jnp.tanh(nn.Dense(WIDTH)(x)))
    return x, x.mean()


class Stack(nn.Module):
  @nn.compact
  def __call__(self, x):
    scan = nn.scan(
      Block,
      variable_axes={"params": 1, "batch_stats": 0},
      split_rngs={"params": True},
      length=LAYERS,
    )
    return nn.Dense(1)(scan()(x, None)[0])


def linen_run(inside):
  x = jax.random.normal(jax.random.key(0), (6, WIDTH))
  module = Stack()
  variables = module.init(jax.random.key(1), x)
  loss_fn = lambda model, x: (jnp.mean((model(x) - 1) ** 2), {"aux": x[0]})  # noqa: E731
  loss, params, model_state = optax_boost.linen.split_loss(loss_fn, module, variables)
  tx = optax_boost.average_params(optax.adam(1e-2), decay=0.5, model_state=model_state)
  step = optax_boost.make_train_step(loss, tx, has_aux=True, update_in_backward=inside)
  state = step.init(params, model_state)
  texts = step.explain(state, x)
  for _ in range(3):
    state, metrics = step(state, x)
  return texts, (state, metrics)


def nnx_run(inside):
  @nnx.split_rngs(splits=LAYERS)
  @nnx.vmap(in_axes=(0,), out_axes=0)
  def make(rngs):
    return nnx.Linear(WIDTH, WIDTH, rngs=rngs)

  class Model(nnx.Module):
    def __init__(self):
      self.blocks = make(nnx.Rngs(0))
      self.head = nnx.Linear(WIDTH, 1, rngs=nnx.Rngs(1))
      self.norm = nnx.BatchNorm(WIDTH, rngs=nnx.Rngs(2))
      self.dropout = nnx.Dropout(0.2, rngs=nnx.Rngs(dropout=3))

    def __call__(self, x):
      @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
      def run(x, block):
        return x + jnp.tanh(block(x))

      return self.head(self.dropout(self.norm(run(x, self.blocks))))

  model = Model()
  optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
  step = optax_boost.nnx.make_train_step(
    lambda model, x: jnp.mean((model(x) - 1) ** 2), update_in_backward=inside
  )
  x = jax.random.normal(jax.random.key(0), (6, WIDTH))
  texts = step.explain(model, optimizer, x)
  for _ in range(3):
    metrics = step(model, optimizer, x)
  return texts, (nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngKey))), metrics)


@pytest.mark.parametrize("run", [linen_run, nnx_run])
def test_flax_models_are_trained_as_without(run):
  """With statistics, their average, aux, dropout, and layers stacked along axis 1."""
  texts, inside = run(True)
  assert sum("in the backward pass" in text for text in texts.values()) >= 2, texts
  _, after = run(False)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-6), after, inside)


@pytest.mark.filterwarnings("ignore:`update_in_backward` saves no memory")
def test_a_forward_pass_that_writes_trained_variables_is_refused():
  class Clipped(nnx.Linear):
    def __call__(self, x):
      self.kernel[...] = jnp.clip(self.kernel[...], -0.1, 0.1)
      return super().__call__(x)

  model = Clipped(WIDTH, 1, rngs=nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
  step = optax_boost.nnx.make_train_step(
    lambda model, x: jnp.mean((model(x) - 1) ** 2), update_in_backward=True
  )
  with pytest.raises(ValueError, match="forward pass writes some of its trained variables"):
    step(model, optimizer, jnp.eye(WIDTH))


def test_steps_are_scanned_mapped_and_compiled_ahead():
  loss, tx = loss_of(run_layers), optax.adam(1e-2)
  ways = []
  for inside in (False, True):
    step = optax_boost.make_train_step(loss, tx, update_in_backward=inside)
    scanned, _ = jax.lax.scan(step, step.init(params_of()), BATCHES)
    both = jax.tree.map(lambda x: jnp.stack([x, x]), step.init(params_of()))
    mapped, _ = jax.jit(jax.vmap(step, (0, None)))(both, BATCHES[0])
    state = step.init(params_of())
    step.compile_ahead(state, [BATCHES[0]]).result()
    ways.append((scanned, mapped, step(state, BATCHES[0])))
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-6, atol=1e-7), *ways)


@pytest.mark.parametrize("spec", [(), (None, "x"), (None, None, "x")], ids=["data", "in", "out"])
def test_sharded_layers_are_updated_where_they_are(spec):
  """Data parallel and FSDP: the same values, places, and no collective of a layer more."""
  mesh = meshes.mesh((8,), ("x",))
  place = lambda x, *s: jax.device_put(x, jax.NamedSharding(mesh, jax.P(*s)))  # noqa: E731
  params = jax.tree.map(place, params_of(width=16))
  params["blocks"]["kernel"] = place(params["blocks"]["kernel"], *spec)
  batch = place(jax.random.randint(jax.random.key(0), (16,), 0, 5), "x")
  found = []
  for inside in (False, True):
    step = optax_boost.make_train_step(
      loss_of(run_layers), optax.adamw(1e-2), update_in_backward=inside
    )
    state = step.init(params)
    program = step.lower(state, batch).compile()
    new, _ = step(state, batch)
    found.append(
      (new, meshes.collectives(program, 16 * 16), jax.tree.map(lambda x: x.sharding.spec, new))
    )
  (after, sent, places), (inside, sent_inside, places_inside) = found
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-6, atol=1e-7), after, inside)
  assert places == places_inside
  assert sent == sent_inside  # of layers; XLA may gather a bias once more
  assert sum(sent.values()) == (3 if spec else 1)


def test_a_spread_optimizer_state_stays_where_it_is():
  """ZeRO-1: params whole on each device, moments along their last axis."""
  mesh = meshes.mesh((8,), ("x",))
  whole = jax.NamedSharding(mesh, jax.P())

  def spread(x):
    divides = x.ndim and x.shape[-1] % 8 == 0
    return jax.NamedSharding(mesh, jax.P(*[None] * (x.ndim - 1), "x")) if divides else whole

  found = []
  for inside in (False, True):
    step = optax_boost.make_train_step(
      loss_of(run_layers), optax.adamw(1e-2), update_in_backward=inside
    )
    state = step.init(jax.device_put(params_of(), whole), opt_state_sharding=spread)
    for batch in BATCHES[:2]:
      state, _ = step(state, jax.device_put(batch, whole))
    assert state.opt_state[0].mu["blocks"]["kernel"].sharding.spec == jax.P(None, None, "x")
    assert state.params["blocks"]["kernel"].sharding.is_fully_replicated
    found.append(state)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-6, atol=1e-7), *found)

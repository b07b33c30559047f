"""The train step on plain JAX functions."""

import itertools
from typing import Any, NamedTuple
import warnings

import chex
from flax import core, nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import optax_boost
from optax_boost import LayerSlice
import optax_boost.nnx
from tests import compilations, meshes

KEY = jax.random.key(0)
BATCH = {
  "x": jax.random.normal(jax.random.key(1), (32, 8)),
  "y": jax.random.normal(jax.random.key(2), (32,)),
}


def initial():
  keys = jax.random.split(jax.random.key(3))
  params = {
    "hidden": {"kernel": jax.random.normal(keys[0], (8, 16)) / 3, "scale": jnp.ones(16)},
    "out": {"kernel": jax.random.normal(keys[1], (16, 1)) / 4},
  }
  return params, {"mean": jnp.zeros(16), "calls": jnp.zeros([], jnp.int32)}


def normed_loss(params, stats, batch, rng):
  """A network with normalization, running statistics, dropout and aux."""
  h = batch["x"] @ params["hidden"]["kernel"]
  mean = jnp.mean(h, 0)
  h = jax.nn.relu((h - mean) * params["hidden"]["scale"])
  h = jnp.where(jax.random.bernoulli(rng, 0.9, h.shape), h / 0.9, 0.0)
  prediction = (h @ params["out"]["kernel"])[:, 0]
  stats = {"mean": 0.9 * stats["mean"] + 0.1 * mean, "calls": stats["calls"] + 1}
  return jnp.mean((prediction - batch["y"]) ** 2), (stats, {"prediction": prediction})


def quadratic(params, batch):
  return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)


def normed_step(tx, **kwargs):
  return optax_boost.make_train_step(normed_loss, tx, has_aux=True, has_model_state=True, **kwargs)


def backtracking() -> optax.GradientTransformationExtraArgs:
  """A line search whose program is small."""
  search = optax.scale_by_backtracking_linesearch(max_backtracking_steps=10)
  return optax.chain(optax.sgd(1.0), search)


CLOSURE_USERS = {
  "lbfgs": lambda: optax.lbfgs(),
  "backtracking": backtracking,
  "plateau": lambda: optax.chain(optax.adam(1e-2), optax.contrib.reduce_on_plateau(patience=2)),
  "ours in front": lambda: optax.chain(optax_boost.centralize(), backtracking()),
  "polyak": lambda: optax.polyak_sgd(max_learning_rate=0.1),
}
# One that takes functions, and one that takes numbers. All run in the step of a plain loss, which
# takes what the steps of models make of theirs.
OF_EACH_KIND = ("lbfgs", "plateau")


@pytest.fixture(scope="module", params=CLOSURE_USERS)
def trained(request):
  """Five steps of a method that needs closures: states, metrics and traces of the loss."""
  traces = itertools.count()

  def counted(*args):
    next(traces)
    return normed_loss(*args)

  step = optax_boost.make_train_step(
    counted, CLOSURE_USERS[request.param](), has_aux=True, has_model_state=True
  )
  state = step.init(*initial())
  history = []
  for _ in range(5):
    before = jax.tree.map(jnp.array, state)
    state, metrics = step(state, BATCH, KEY)
    history.append((before, metrics, next(traces)))
  return history, state


def test_methods_that_need_closures_train(trained):
  history, _ = trained
  assert history[-1][1]["loss"] < history[0][1]["loss"]


def test_the_loss_is_traced_in_the_first_step_only(trained):
  counts = [traces for _, _, traces in trained[0]]
  # Reading the counter moves it by one.
  assert [b - a for a, b in itertools.pairwise(counts)] == [1, 1, 1, 1]


def test_statistics_and_aux_come_from_the_one_pass_at_the_current_params(trained):
  history, last = trained
  states = [before for before, _, _ in history] + [last]
  for (before, metrics, _), after in zip(history, states[1:], strict=True):
    rng = jax.random.fold_in(KEY, before.step)
    loss, (stats, aux) = normed_loss(before.params, before.model_state, BATCH, rng)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    chex.assert_trees_all_close(after.model_state, stats, rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_close(metrics["aux"], aux, rtol=1e-4, atol=1e-5)
  assert last.model_state["calls"] == 5


def probe():
  """A transformation that keeps what it was given."""

  def init(params):
    zero = jnp.zeros([])
    return {"value": zero, "again": zero, "elsewhere": zero, "grad": params, "grad_at": params}

  def update(updates, state, params, *, value, grad, value_fn, grad_fn, **extra):
    del state, extra
    half = jax.tree.map(lambda p: p / 2, params)
    return updates, {
      "value": value,
      "again": value_fn(params),
      "elsewhere": value_fn(half),
      "grad": grad,
      "grad_at": grad_fn(half),
    }

  return optax.GradientTransformationExtraArgs(init, update)


def test_closures_share_batch_rng_and_statistics_with_the_forward_pass():
  params, stats = initial()
  step = normed_step(probe())
  state, _ = step(step.init(params, stats), BATCH, KEY)
  seen = state.opt_state
  rng = jax.random.fold_in(KEY, 0)

  def loss(p):
    return normed_loss(p, stats, BATCH, rng)[0]

  half = jax.tree.map(lambda p: p / 2, params)
  assert seen["value"] == seen["again"]
  np.testing.assert_allclose(seen["value"], loss(params), rtol=1e-6)
  np.testing.assert_allclose(seen["elsewhere"], loss(half), rtol=1e-6)
  chex.assert_trees_all_close(seen["grad"], jax.grad(loss)(params), rtol=1e-5, atol=1e-6)
  chex.assert_trees_all_close(seen["grad_at"], jax.grad(loss)(half), rtol=1e-5, atol=1e-6)


def test_closures_cost_nothing_unless_called():
  params, stats = initial()
  ignoring = normed_step(optax.sgd(0.1))
  lowered = ignoring.lower(ignoring.init(params, stats), BATCH, KEY)
  flops = lowered.compile().cost_analysis()["flops"]

  def plain(params, stats, rng):
    (_, rest), grads = jax.value_and_grad(normed_loss, has_aux=True)(params, stats, BATCH, rng)
    return optax.apply_updates(params, jax.tree.map(lambda g: -0.1 * g, grads)), rest

  by_hand = jax.jit(plain).lower(params, stats, KEY).compile().cost_analysis()["flops"]
  # What remains is the step counter and folding it into the key.
  assert flops < by_hand + 1000


def scanned(params, x):
  x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["blocks"])
  return jnp.mean((x @ params["head"]) ** 2)


def reading_layers():
  def update(updates, state, params=None, *, layers, **extra_args):
    assert layers.describe().axes[0].stacked == (0,)
    return updates, state

  return optax.GradientTransformationExtraArgs(lambda params: ReadingState(None), update)


class ReadingState(NamedTuple):
  unused: Any
  takes = ("layers",)


FREEZING = (["blocks", "head"], optax_boost.fixed_freezing(2, frozen_groups=0))
# How often a step calls the loss: for the gradient, and for each closure that the method calls.
CALLS_OF_THE_LOSS = {
  "adam": (1, lambda: optax.adam(0.1)),
  "lars": (1, lambda: optax_boost.lars(0.1)),
  "centralize": (1, lambda: optax.chain(optax_boost.centralize(), optax.sgd(0.1))),
  "line search": (3, optax.lbfgs),
  "svrg": (2, lambda: optax.chain(optax_boost.svrg(refresh_every=None), optax.sgd(0.1))),
  "three wrappers": (
    1,
    lambda: optax_boost.dynamic_loss_scale(
      optax_boost.accumulate(optax_boost.freeze_layers(optax.adamw(0.1), *FREEZING), 2)
    ),
  ),
  "a user's own that takes the layers": (1, lambda: optax.chain(reading_layers(), optax.sgd(0.1))),
  "frozen layers of a scan": (
    1,
    lambda: optax_boost.freeze_layers(
      optax.adamw(0.1),
      optax_boost.LayerGroups(
        ((LayerSlice("blocks", 0, 0, 2),), (LayerSlice("blocks", 0, 2, 3), "head")), (128, 72)
      ),
      optax_boost.fixed_freezing(2, frozen_groups=1),
    ),
  ),
}


@pytest.mark.parametrize(("calls", "make"), CALLS_OF_THE_LOSS.values(), ids=CALLS_OF_THE_LOSS)
def test_a_step_calls_the_loss_for_its_gradient_and_for_each_closure(calls, make):
  traces = itertools.count()

  def counted(params, x):
    next(traces)
    return scanned(params, x)

  step = optax_boost.make_train_step(counted, make())
  state = step.init({"blocks": jnp.stack([jnp.eye(8)] * 3), "head": jnp.ones((8, 1))})
  for _ in range(2):
    state, _ = step(state, jnp.ones((4, 8)))
  assert next(traces) == calls


AS_WRITTEN = {
  "sgd": lambda: optax.sgd(0.1),
  "nothing frozen": lambda: optax_boost.freeze_layers(optax.sgd(0.1), *FREEZING),
  "a frozen leaf": lambda: optax_boost.freeze_layers(
    optax.sgd(0.1), ["blocks", "head"], optax_boost.fixed_freezing(2, frozen_groups=1)
  ),
}


@pytest.mark.parametrize("name", AS_WRITTEN)
def test_the_loss_is_differentiated_as_it_is_written_and_not_replayed(name):
  params, x = {"blocks": jnp.stack([jnp.eye(8)] * 3), "head": jnp.ones((8, 1))}, jnp.ones((4, 8))
  tracers = []

  def loss(params, x):
    tracers.append(type(params["head"]))
    return scanned(params, x)

  jax.jit(jax.value_and_grad(loss))(params, x)
  jax.make_jaxpr(loss)(params, x)
  step = optax_boost.make_train_step(loss, AS_WRITTEN[name]())
  step(step.init(params), x)
  by_hand, in_a_program, in_the_step = tracers
  assert by_hand != in_a_program
  assert in_the_step == by_hand


def test_a_loss_keeps_its_custom_derivatives_and_its_checkpointing():
  @jax.custom_vjp
  def doubled(x):
    return x

  doubled.defvjp(lambda x: (x, None), lambda _, g: (2 * g,))

  def loss(params, batch):
    return jax.checkpoint(lambda w: jnp.sum(doubled(jnp.sin(w)) * batch))(params)

  step = optax_boost.make_train_step(loss, optax.sgd(1.0), donate=False)
  state = step.init(jnp.zeros(3))
  after, _ = step(state, jnp.arange(3.0))
  np.testing.assert_allclose(after.params, -2 * jnp.arange(3.0), rtol=1e-6)
  assert "remat" in str(jax.make_jaxpr(lambda batch: step(state, batch))(jnp.ones(3)))


def test_a_method_that_takes_layers_gets_the_traced_layers():
  seen = []

  def update(updates, state, params=None, *, layers, **extra_args):
    seen.append(layers.describe())
    return updates, state

  wanting = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
  params, x = {"blocks": jnp.stack([jnp.eye(8)] * 3), "head": jnp.ones((8, 1))}, jnp.ones((4, 8))
  step = optax_boost.make_train_step(scanned, optax.chain(wanting, optax.lbfgs()))
  step(step.init(params), x)
  assert seen == [optax_boost.layer_axes(scanned, params, x)]


PADDED = {
  "ids": jnp.array([[1, 2, 0, 0], [3, 1, 2, 1], [2, 0, 0, 0], [1, 3, 2, 0]]),
  "mask": jnp.array([[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 0]], jnp.float32),
}


def token_loss(params, batch):
  """The mean over the tokens that are not padding."""
  logits = params["embedding"][batch["ids"]] @ params["head"]
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["ids"])
  tokens = jnp.sum(batch["mask"])
  return jnp.sum(losses * batch["mask"]) / tokens, {"tokens": tokens}


@pytest.mark.parametrize("weight", ["tokens", lambda batch: jnp.sum(batch["mask"])])
@pytest.mark.parametrize("wrap", [lambda tx: tx, optax_boost.dynamic_loss_scale])
def test_micro_batches_of_padded_tokens_weigh_as_the_large_batch(weight, wrap):
  keys = jax.random.split(jax.random.key(0))
  params = {
    "embedding": jax.random.normal(keys[0], (4, 8)),
    "head": jax.random.normal(keys[1], (8, 4)),
  }
  large = optax_boost.make_train_step(token_loss, optax.sgd(0.5), has_aux=True)
  expected, _ = large(large.init(params), PADDED)
  tx = wrap(optax_boost.accumulate(optax.sgd(0.5), every=4))
  step = optax_boost.make_train_step(token_loss, tx, has_aux=True, weight=weight)
  state = step.init(params)
  for row in range(4):
    state, _ = step(state, jax.tree.map(lambda x, row=row: x[row : row + 1], PADDED))
  # Four gradients of terms of about one, each rounded once.
  chex.assert_trees_all_close(state.params, expected.params, rtol=0, atol=8 * 2.0**-24)
  alike = optax_boost.make_train_step(token_loss, tx, has_aux=True)
  state = alike.init(params)
  for row in range(4):
    state, _ = alike(state, jax.tree.map(lambda x, row=row: x[row : row + 1], PADDED))
  assert jnp.max(jnp.abs(state.params["head"] - expected.params["head"])) > 1e-3


def test_refuses_a_weight_that_the_loss_does_not_return():
  with pytest.raises(TypeError, match=r"`weight` must be a function .* has_aux=True; got 'tokens'"):
    optax_boost.make_train_step(token_loss, optax.sgd(0.1), weight="tokens")
  step = optax_boost.make_train_step(token_loss, optax.sgd(0.1), has_aux=True, weight="words")
  state = step.init({"embedding": jnp.ones((4, 8)), "head": jnp.ones((8, 4))})
  with pytest.raises(ValueError, match=r"name of an entry of the loss's aux.*got 'words' for"):
    step(state, PADDED)


class WeighedState(NamedTuple):
  inner_state: Any
  takes = ("weight",)


def weighed(tx, updates, state):
  updates, inner_state = tx.update(updates, state.inner_state)
  return updates, WeighedState(inner_state)


WEIGHTED = {
  "nothing": (lambda tx: tx, True),
  "MultiSteps": (lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(), True),
  "accumulate": (lambda tx: optax_boost.accumulate(tx, 2), False),
  "accumulate inside": (
    lambda tx: optax_boost.average_params(
      optax.masked(optax_boost.accumulate(tx, 2), {"head": True}), decay=0.9
    ),
    False,
  ),
  "masked": (lambda tx: optax.masked(optax_boost.accumulate(tx, 2), {"head": True}), False),
  "a transformation of one's own": (
    lambda tx: optax.GradientTransformationExtraArgs(
      lambda params: WeighedState(tx.init(params)),
      lambda updates, state, params=None, *, weight, **_: weighed(tx, updates, state),
    ),
    False,
  ),
}


@pytest.mark.parametrize("name", WEIGHTED)
def test_a_weight_without_accumulation_warns_once(name):
  wrap, warns = WEIGHTED[name]
  tx = wrap(optax.sgd(0.1))
  step = optax_boost.make_train_step(
    lambda params, x: jnp.sum(params["head"] * x), tx, weight=lambda batch: len(batch)
  )
  state = step.init({"head": jnp.ones(2)})
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    state, _ = step(state, jnp.ones((3, 2)))
    step(state, jnp.ones((4, 2)))
  texts = [str(w.message) for w in caught if w.category is optax_boost.NoEffectWarning]
  assert len(texts) == warns
  assert all("`weight` has no effect in this step" in text for text in texts)


def test_one_key_draws_other_numbers_at_every_step_and_the_same_after_a_restart(tmp_path):
  step = normed_step(optax.sgd(0.0), donate=False)
  state = step.init(*initial())
  losses = []
  for _ in range(3):
    state, metrics = step(state, BATCH, KEY)
    losses.append(float(metrics["loss"]))
    if len(losses) == 2:
      with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
  assert len(set(losses)) == 3
  with ocp.StandardCheckpointer() as checkpointer:
    restored = checkpointer.restore(tmp_path / "state", step.init(*initial()))
  assert float(step(restored, BATCH, KEY)[1]["loss"]) == losses[2]


def test_the_old_state_is_donated_and_the_callers_arrays_are_not():
  params, stats = initial()
  step = normed_step(optax.adam(1e-3))
  state = step.init(params, stats)
  step(state, BATCH, KEY)
  assert all(x.is_deleted() for x in jax.tree.leaves((state.params, state.opt_state)))
  assert not any(x.is_deleted() for x in jax.tree.leaves((params, stats)))


def test_a_donated_state_is_named_if_it_is_used_again():
  step = normed_step(optax.adam(1e-3))
  state = step.init(*initial())
  step(state, BATCH, KEY)
  message = r"`state` must hold .*; the leaf 'params/.*' was donated or deleted. .*`donate=False`"
  for use in (step, lambda state, batch, rng: step.refresh(state, [batch], rng)):
    with pytest.raises(ValueError, match=message):
      use(state, BATCH, KEY)
  batch = jax.tree.map(jnp.array, BATCH)
  jax.tree.leaves(batch)[0].delete()
  with pytest.raises(
    ValueError, match=r"`batch` must hold .*; the leaf '.+' was donated or deleted"
  ):
    step(step.init(*initial()), batch, KEY)


def test_a_donated_state_with_a_number_that_is_read_before_the_program_is_named():
  tx = optax_boost.freeze_layers(optax.sgd(0.1), ["a", "b"], optax_boost.fixed_freezing(2, 1))
  step = optax_boost.make_train_step(lambda params, batch: optax.tree.norm(params), tx)
  state = step.init({"a": jnp.ones(2), "b": jnp.ones(2)})
  step(state, None)
  with pytest.raises(ValueError, match=r"`state` must hold .* was donated or deleted. .*`donate"):
    step(state, None)


@pytest.mark.parametrize(
  "tx",
  [optax.contrib.schedule_free_sgd(0.1), optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1))],
  ids=["state holds the params", "refuses extra arguments"],
)
def test_runs_methods_with_unusual_requirements(tx):
  step = optax_boost.make_train_step(quadratic, tx)
  state = step.init({"w": jnp.zeros(8)})
  losses = []
  for _ in range(6):
    state, metrics = step(state, BATCH)
    losses.append(metrics["loss"])
  assert losses[-1] < losses[0]


def test_tied_weights_can_be_donated():
  tied = jnp.zeros(8)
  step = optax_boost.make_train_step(
    lambda p, b: jnp.mean((b["x"] @ (p["a"] + p["b"]) - b["y"]) ** 2), optax.sgd(0.1)
  )
  state, _ = step(step.init({"a": tied, "b": tied}), BATCH)
  np.testing.assert_array_equal(state.params["a"], state.params["b"])


def test_a_transformation_without_extra_arguments_works():
  plain = optax.GradientTransformation(
    lambda params: optax.EmptyState(),
    lambda updates, state, params=None: (jax.tree.map(lambda g: -0.1 * g, updates), state),
  )
  step = optax_boost.make_train_step(quadratic, plain)
  state, metrics = step(step.init({"w": jnp.zeros(8)}), BATCH)
  assert quadratic(state.params, BATCH) < metrics["loss"]


def test_a_metric_that_occurs_twice_is_numbered():
  # The only leaf is a vector.
  tx = optax.chain(*[optax_boost.scale_by_lars_trust_ratio(exclude=None)] * 2)
  step = optax_boost.make_train_step(quadratic, tx)
  _, metrics = step(step.init({"w": jnp.ones(8)}), BATCH)
  assert {"trust_ratio", "trust_ratio_1"} <= metrics.keys()


@pytest.mark.parametrize(
  "tx", [optax.adam(1e-2), optax_boost.lars(0.1, exclude=None)], ids=["adam", "lars"]
)
def test_sharded_params_stay_sharded_and_the_second_step_does_not_recompile(tx):
  mesh = meshes.mesh((8,), ("x",))
  rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
  traces = itertools.count()

  def loss(params, batch):
    next(traces)
    return quadratic(params, batch)

  step = compilations.Watched(optax_boost.make_train_step(loss, tx))
  params = {"w": jax.device_put(jnp.ones(8), rows)}
  batch = jax.device_put(BATCH, rows)
  state = step.init(params)
  state, _ = step(state, batch)
  after_one = next(traces)
  for _ in range(2):
    state, metrics = step(state, batch)
  assert next(traces) == after_one + 1
  assert step.compiled_once()
  assert state.params["w"].sharding == rows
  alone = optax_boost.make_train_step(quadratic, tx)
  single = alone.init({"w": jnp.ones(8)})
  for _ in range(3):
    single, expected = alone(single, BATCH)
  np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-5)
  np.testing.assert_allclose(state.params["w"], single.params["w"], rtol=1e-4)


@pytest.mark.parametrize("tx", [optax.adam(0.1), optax_boost.lars(1.0)], ids=["adam", "lars"])
def test_layers_cut_in_both_ways_keep_their_sharding_in_one_program(tx):
  """Left to itself, XLA lets each device keep the part of the bias that it computes."""
  spec = jax.sharding.PartitionSpec
  mesh = meshes.mesh((4, 2), ("data", "model"))
  specs = {"up": spec(None, "model"), "bias": spec(), "down": spec("model", None)}
  params = {"up": jnp.ones((8, 16)) / 8, "bias": jnp.zeros(16), "down": jnp.ones((16, 4)) / 4}
  params = {
    name: jax.device_put(p, jax.sharding.NamedSharding(mesh, specs[name]))
    for name, p in params.items()
  }

  def loss(params, x):
    return jnp.mean((jnp.tanh(x @ params["up"] + params["bias"]) @ params["down"] - 1) ** 2)

  step = compilations.Watched(optax_boost.make_train_step(loss, tx))
  state = step.init(params)
  batch = jax.device_put(jnp.eye(8), jax.sharding.NamedSharding(mesh, spec("data")))
  for _ in range(2):
    state, _ = step(state, batch)
  assert step.compiled_once()
  for name, p in state.params.items():
    assert p.sharding.is_equivalent_to(params[name].sharding, p.ndim)


def test_a_fresh_state_on_a_mesh_has_its_own_buffers():
  """L-BFGS begins with one array in two places; donated twice, it would end the process."""
  mesh = meshes.mesh((8,), ("x",))
  replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  step = optax_boost.make_train_step(quadratic, optax.lbfgs())
  leaves = jax.tree.leaves(step.init({"w": jax.device_put(jnp.ones(8), replicated)}))
  pointers = [leaf.addressable_shards[0].data.unsafe_buffer_pointer() for leaf in leaves]
  assert len(set(pointers)) == len(pointers)


def test_a_batch_on_a_mesh_moves_the_state_and_compiles_one_program():
  mesh = meshes.mesh((8,), ("x",))
  batch = jax.device_put(BATCH, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x")))
  step = compilations.Watched(optax_boost.make_train_step(quadratic, optax.adam(0.1)))
  state = step.init({"w": jnp.ones(8)})
  for _ in range(3):
    state, _ = step(state, batch)
  assert step.compiled_once()
  assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(state))
  assert len(state.params["w"].sharding.device_set) == 8


@pytest.mark.parametrize("committed", ["params", "one of the params", "batch"])
def test_arrays_that_are_committed_to_a_device_compile_one_program(committed):
  def put(x):
    return jax.device_put(x, jax.devices()[0])

  params, batch = {"b": jnp.zeros(1), "w": jnp.ones(8)}, BATCH
  if committed == "batch":
    batch = put(batch)
  else:
    params["w"] = put(params["w"])
    params["b"] = put(params["b"]) if committed == "params" else params["b"]
  step = compilations.Watched(
    optax_boost.make_train_step(
      lambda p, b: quadratic(p, b) + jnp.sum(p["b"] ** 2), optax.adam(0.1)
    )
  )
  state = step.init(params)
  for _ in range(2):
    state, _ = step(state, batch)
  assert step.compiled_once()


@pytest.mark.parametrize(
  ("loss", "flags", "message"),
  [
    (lambda p, b: b["y"], {}, r"scalar loss; got an array of shape \(32,\) .* mean"),
    *((lambda p, b, bad=bad: bad, {}, "`loss_fn`") for bad in (None, "loss", 1.0)),
    *((lambda p, b, dtype=dtype: jnp.ones([], dtype), {}, "`loss_fn`") for dtype in (int, complex)),
    (lambda p, b: (jnp.sum(p["w"]), 1), {}, r"a tuple of length 2 as the loss.*has_aux=True"),
    (lambda p, b: jnp.sum(p["w"]), {"has_aux": True}, r"return \(loss, aux\); got an array"),
    (
      lambda p, s, b: jnp.sum(p["w"]),
      {"has_model_state": True},
      r"return \(loss, model_state\); got an array",
    ),
    (
      lambda p, s, b: (jnp.sum(p["w"]), 1),
      {"has_model_state": True, "has_aux": True},
      r"return \(loss, \(model_state, aux\)\); got \(loss, a int\)",
    ),
  ],
)
def test_refuses_a_loss_that_returns_something_else(loss, flags, message):
  step = optax_boost.make_train_step(loss, optax.sgd(0.1), **flags)
  with pytest.raises(TypeError, match=message):
    step(step.init({"w": jnp.ones(8)}, {}), BATCH)


WITH_COUNT = {"w": jnp.ones(8), "n": jnp.arange(3)}


@pytest.mark.parametrize(
  "tx",
  [optax.sgd(0.1), optax_boost.lars(0.1), optax.masked(optax.sgd(0.1), {"w": True, "n": False})],
)
def test_an_integer_among_the_params_is_named_before_the_step(tx):
  step = optax_boost.make_train_step(quadratic, tx)
  message = r"the leaf 'n' is int32. Keep it out of the params: close over it, or .*`model_state`"
  with pytest.raises(TypeError, match=message):
    step.init(WITH_COUNT)


@pytest.mark.parametrize(
  "call",
  [
    lambda: optax_boost.race(
      quadratic, lambda key: WITH_COUNT, jnp.ones((4, 8)), {"sgd": optax.sgd(0.1)}, steps=1
    ),
    lambda: optax_boost.auto_boost("O0").optimizer(optax.sgd(0.1), quadratic, WITH_COUNT, BATCH),
    lambda: optax_boost.full_gradient(jax.grad(quadratic), WITH_COUNT, [BATCH]),
    lambda: optax_boost.full_gradient(
      jax.grad(quadratic), WITH_COUNT, jnp.ones((1, 8)), stacked=True
    ),
    lambda: optax_boost.refresh_svrg(optax_boost.svrg(None).init(BATCH), WITH_COUNT, WITH_COUNT),
  ],
  ids=["race", "auto_boost", "full_gradient", "scan", "refresh_svrg"],
)
def test_errors_do_not_advise_a_mask_that_would_not_help(call):
  with pytest.raises(TypeError, match=r"'n' is int32. Keep it out of the params: close over it"):
    call()


@pytest.mark.parametrize(
  ("batch", "rng", "message"),
  [
    (1.0, 3, r"`rng` must be one key of `jax.random.key`; got 3"),
    (1.0, "text", r"`rng` must be one key of `jax.random.key`; got 'text'"),
    (1.0, jnp.ones(3), r"`rng` must be one key .*; got an array of shape \(3,\) and dtype float32"),
    (1.0, np.ones(3), r"arrays of a batch are one tree, such as the tuple `\(x, y\)`"),
    ("text", None, "`batch` must hold arrays.* the leaf 'batch' is 'text'"),
    (1.0, jax.random.split(jax.random.key(0)), r"`rng` must be one key .* shape \(2,\)"),
  ],
)
def test_refuses_a_batch_or_key_of_the_wrong_kind(batch, rng, message):
  step = optax_boost.make_train_step(lambda p, b, *_: jnp.sum(p * b), optax.sgd(0.1))
  state = step.init(jnp.ones(3))
  for call in (step, step.lower):
    with pytest.raises(TypeError, match=message):
      call(state, batch, rng)


def test_a_loss_that_does_not_depend_on_the_params_is_refused():
  outer = {"w": jnp.ones(3)}
  losses = {
    "an outer model": lambda params, batch: jnp.sum(outer["w"] * batch),
    "stopped": lambda params, batch: jnp.sum(jax.lax.stop_gradient(params["w"]) * batch),
  }
  for loss in losses.values():
    for tx in (optax.sgd(0.1), optax_boost.dynamic_loss_scale(optax.sgd(0.1))):
      step = optax_boost.make_train_step(loss, tx)
      with pytest.raises(ValueError, match="no gradient of it reaches them"):
        step(step.init(outer), jnp.ones(3))


def test_an_optimizer_of_variables_that_an_nnx_loss_does_not_use_is_refused():
  class Unused(nnx.Param):
    pass

  class Model(nnx.Module):
    def __init__(self):
      self.used, self.unused = nnx.Param(jnp.ones(3)), Unused(jnp.ones(3))

  step = optax_boost.nnx.make_train_step(lambda model, x: jnp.mean((model.used[...] * x) ** 2))
  # Also after a step with another optimizer, and if layers may freeze later.
  model = Model()
  step(model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param), jnp.ones(3))
  freezing = optax_boost.freeze_layers(optax.sgd(0.1), ["unused"], optax_boost.fixed_freezing(1, 0))
  for tx in (optax.sgd(0.1), freezing):
    model = Model()
    with pytest.raises(
      ValueError, match=r"does `wrt` of the optimizer select variables that the l"
    ):
      step(model, nnx.Optimizer(model, tx, wrt=Unused), jnp.ones(3))


LOSS_OF_STATE = {
  "aux first": (lambda s: ({"accuracy": jnp.ones([])}, s), "lacks the leaf 'mean' and has 'acc"),
  "another name": (
    lambda s: ({"average": s["mean"]}, 0),
    "lacks the leaf 'mean' and has 'average'",
  ),
  "one too many": (lambda s: (s | {"n": jnp.ones([])}, 0), "has a leaf 'n' too many"),
  "nothing": (lambda s: (None, 0), "lacks the leaf 'mean'"),
  "another dtype": (
    lambda s: ({"mean": s["mean"].astype(jnp.bfloat16)}, 0),
    r"has bfloat16\[\] as the leaf 'mean', which was float32\[\]",
  ),
  "another shape": (
    lambda s: ({"mean": s["mean"][None]}, 0),
    r"has float32\[1\] as the leaf 'mean'",
  ),
}


@pytest.mark.parametrize("name", LOSS_OF_STATE)
def test_a_model_state_of_other_arrays_than_init_got_is_refused_with_the_leaf(name):
  returned, words = LOSS_OF_STATE[name]
  step = optax_boost.make_train_step(
    lambda p, s, x: (jnp.sum(p * x), returned(s)),
    optax.sgd(0.1),
    has_model_state=True,
    has_aux=True,
  )
  state = step.init(jnp.ones(3), {"mean": jnp.zeros([])})
  calls = [
    lambda: step.lower(state, jnp.ones(3)),
    lambda: jax.eval_shape(lambda s, xs: jax.lax.scan(step, s, xs), state, jnp.ones((2, 3))),
  ]
  for call in calls:
    with pytest.raises(TypeError, match=rf"must return \(loss, \(model_state, aux\)\) .*{words}"):
      call()


def test_a_model_state_may_come_back_in_other_containers_and_as_python_numbers():
  step = optax_boost.make_train_step(
    lambda p, s, x: (jnp.sum(p * x), {"mean": 1.0, "key": s["key"]}),
    optax.sgd(0.1),
    has_model_state=True,
  )
  start = core.freeze({"mean": jnp.zeros([]), "key": jax.random.key(0)})
  assert step(step.init(jnp.ones(3), start), jnp.ones(3))[0].model_state["mean"] == 1


@pytest.mark.parametrize("name", ["nothing", "svrg", "svrg that is refreshed by hand", "a race"])
def test_a_full_gradient_that_nothing_asks_for_warns_once(name):
  full = lambda gradient, params: gradient(params, jnp.ones(3))  # noqa: E731
  svrg = optax_boost.svrg(refresh_every=None if "hand" in name else 2)
  tx = optax.chain(svrg if "svrg" in name else optax.identity(), optax.sgd(0.1))
  loss = lambda params, x: jnp.sum((params - x) ** 2)  # noqa: E731
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    if name == "a race":
      init_fn = lambda key: jax.random.normal(key, (3,))  # noqa: E731
      optax_boost.race(
        loss, init_fn, jnp.ones((1, 3)), {"a": tx}, steps=1, seeds=1, full_grad_fn=full,
        progress=False,
      )  # fmt: skip
    else:
      step = optax_boost.make_train_step(loss, tx, full_grad_fn=full)
      state = step.init(jnp.ones(3))
      step.lower(state, jnp.ones(3))
      step.lower(state, jnp.ones((1, 3)))
  texts = [str(w.message) for w in caught if w.category is optax_boost.NoEffectWarning]
  assert len(texts) == (name in ("nothing", "svrg that is refreshed by hand"))
  assert all("`full_grad_fn` has no effect" in text for text in texts)


@pytest.mark.parametrize("argument", ["params", "batch"])
def test_a_step_that_donates_has_the_gradient_of_its_loss(argument):
  loss = lambda params, x: jnp.mean(jnp.tanh(x @ params) ** 2)  # noqa: E731
  step = optax_boost.make_train_step(loss, optax.sgd(0.1))
  arguments = {"params": jnp.arange(6.0).reshape(3, 2) / 6, "batch": jnp.ones((2, 3))}

  def metric(value):
    changed = arguments | {argument: value}
    return step(step.init(changed["params"]), changed["batch"])[1]["loss"]

  index = list(arguments).index(argument)
  np.testing.assert_allclose(
    jax.grad(metric)(arguments[argument]), jax.grad(loss, index)(*arguments.values()), rtol=1e-6
  )


def test_statistics_that_the_loss_does_not_take_are_refused():
  step = optax_boost.make_train_step(lambda params, batch: jnp.sum(params * batch), optax.sgd(0.1))
  with pytest.raises(
    TypeError, match=r"this loss takes none, got .*step\.init.*has_model_state=True"
  ):
    step.init(jnp.ones(3), jnp.ones(3))
  assert step.init(jnp.ones(3), {}).model_state == {}


def test_a_whole_nnx_model_and_missing_statistics_are_refused():
  class Model(nnx.Module):
    def __init__(self):
      self.linear = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
      self.norm = nnx.BatchNorm(2, rngs=nnx.Rngs(0))

  def loss(model, x):
    return jnp.mean(model.norm(model.linear(x)))

  step = optax_boost.make_train_step(loss, optax.sgd(0.1))
  boost = optax_boost.auto_boost("O1", 10)
  for function in (
    step.init,
    lambda model: optax_boost.layer_axes(loss, model, jnp.ones((3, 2))),
    lambda model: boost.optimizer(optax.sgd(0.1), loss, model, jnp.ones((3, 2))),
  ):
    with pytest.raises(TypeError, match=r"NNX model with a (BatchStat|Rng\w+), .*nnx.split_loss"):
      function(Model())
  step = optax_boost.make_train_step(
    lambda p, s, x: (jnp.sum(p * x), s), optax.sgd(0.1), has_model_state=True
  )
  with pytest.raises(TypeError, match=r"`step.init\(params, model_state\)`"):
    step.init(jnp.ones(2))


def test_a_loss_may_be_a_constant_for_a_batch_and_depend_on_frozen_layers_alone():
  def loss(params, batch):
    return jnp.sum(params["w"] * batch) if batch.size else jnp.zeros([])

  step = optax_boost.make_train_step(loss, optax.sgd(0.1))
  state, _ = step(step.init({"w": jnp.ones(())}), jnp.ones(2))
  step(state, jnp.ones(0))
  tx = optax_boost.freeze_layers(optax.sgd(0.1), ["w", "v"], optax_boost.fixed_freezing(2, 1))
  step = optax_boost.make_train_step(loss, tx)
  state, _ = step(step.init({"w": jnp.ones(()), "v": jnp.ones(())}), jnp.ones(2))
  assert state.params["w"] == 1

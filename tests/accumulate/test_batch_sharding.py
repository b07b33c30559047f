"""With `batch_sharding` each device sums up its own gradients, and a window reduces them once."""

import functools
import re

from flax import linen as nn, nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
import optax_boost.linen
import optax_boost.nnx
from tests import meshes

P = jax.sharding.PartitionSpec
LAYERS, WIDTH, ROWS = 3, 8, 16
NOT_FINITE = ("drop", "restart", "keep", None)
rng = np.random.default_rng(0)
BATCHES = rng.normal(size=(8, ROWS, WIDTH)).astype(np.float32)
PARAMS = {
  "blocks": rng.normal(size=(LAYERS, WIDTH, WIDTH)).astype(np.float32) / 3,
  "embed": rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 3,
  "head": rng.normal(size=WIDTH).astype(np.float32),
}
SIZE = sum(x.size for x in PARAMS.values())


def by_rows(*sizes, axes=("data",), kind="Auto"):
  names = ("data", "model")[: len(sizes or (8,))]
  return jax.sharding.NamedSharding(meshes.mesh(sizes or (8,), names, kind), P(axes))


def errors(params, x):
  h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x @ params["embed"], params["blocks"])
  return (h @ params["head"] - 1) ** 2


def loss_fn(params, x):
  return jnp.mean(errors(params, x))


def written_out(params, x):
  x = x @ params["embed"]
  for i in range(LAYERS):
    x = jnp.tanh(x @ params["blocks"][i])
  return jnp.mean((x @ params["head"] - 1) ** 2)


def train(tx, batches=BATCHES, loss=loss_fn, place=lambda x: x, params=PARAMS, **options):
  step = optax_boost.make_train_step(loss, tx, **options)
  state = step.init(jax.tree.map(jnp.asarray, params))
  for batch in batches:
    state, metrics = step(state, jax.tree.map(place, batch))
  return jax.device_get((state.params, state.opt_state.notfinite_count, metrics))


def assert_close(found, expected, atol=3e-7):
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=3e-6, atol=atol), found, expected)


def assert_like_one_device(make, sharding, atol=3e-7, **kwargs):
  """`make` takes the keyword arguments of `accumulate`, and returns the transformation.

  The norm of a micro-batch's gradient is the root mean square of the devices' norms.
  """
  place = lambda x: jax.device_put(x, sharding if np.ndim(x) else None)  # noqa: E731
  found = train(make(batch_sharding=sharding), place=place, **kwargs)
  expected = train(make(), **kwargs)
  assert found[2].pop("gradient_norm", 1.0) > expected[2].pop("gradient_norm", 0.0)
  assert_close(found, expected, atol)
  return found


@pytest.mark.parametrize("inner", ["sgd", "adam"])
@pytest.mark.parametrize("not_finite", NOT_FINITE)
def test_params_are_those_of_one_device(inner, not_finite):
  """Adam divides small gradients by their size: its eps keeps the difference small."""
  inner = {"sgd": optax.sgd(0.1, momentum=0.9), "adam": optax.adam(1e-2, eps=1e-3)}[inner]
  make = functools.partial(optax_boost.accumulate, inner, 3, not_finite=not_finite)
  assert_like_one_device(make, by_rows())


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("not_finite", NOT_FINITE)
def test_all_devices_judge_what_the_rows_of_one_make_of_a_micro_batch(not_finite, bad):
  batches = BATCHES.copy()
  batches[4, 5] = bad  # the second micro-batch of a window, on the third of eight devices
  make = functools.partial(optax_boost.accumulate, optax.sgd(0.1), 3, not_finite=not_finite)
  params, count, _ = assert_like_one_device(make, by_rows(), batches=batches)
  leaves_out = not_finite in ("drop", "restart")
  assert count == leaves_out
  assert np.all(np.isfinite(params["head"])) == leaves_out


@pytest.mark.parametrize("not_finite", NOT_FINITE)
def test_a_mean_over_tokens_is_over_the_tokens_of_all_devices(not_finite):
  """Devices have between no tokens, whose mean is NaN, and two."""
  masks = (np.arange(ROWS) < rng.integers(3, ROWS, size=(8, 1))).astype(np.float32)
  batches = [{"x": x, "mask": mask} for x, mask in zip(BATCHES, masks, strict=True)]

  def loss(params, batch):
    tokens = batch["mask"].sum()
    rows = errors(params, batch["x"])
    mean = jnp.sum(batch["mask"] * rows) / tokens
    integer = tokens.astype(jnp.int32)
    aux = {"tokens": integer, "float_tokens": tokens, "mean": mean, "rows": rows}
    return mean, aux

  make = functools.partial(optax_boost.accumulate, optax.sgd(0.1), 3, not_finite=not_finite)
  for weight in ("tokens", "float_tokens"):
    clean = lambda params, batch, weight=weight: (  # noqa: E731
      loss(params, batch)[0],
      {k: v for k, v in loss(params, batch)[1].items() if k in (weight, "mean", "rows")},
    )
    run = functools.partial(assert_like_one_device, make, by_rows(), batches=batches)
    *_, metrics = run(loss=clean, has_aux=True, weight=weight)
    assert metrics["aux"][weight] == masks[-1].sum()


@pytest.mark.parametrize("bad", [-3.0, np.nan])
@pytest.mark.parametrize("not_finite", NOT_FINITE)
def test_a_weight_that_is_not_valid_on_one_device_leaves_the_micro_batch_out(not_finite, bad):
  batches = [{"x": x, "weight": np.ones(ROWS, np.float32)} for x in BATCHES]
  loss = lambda params, batch: loss_fn(params, batch["x"])  # noqa: E731
  tx = optax_boost.accumulate(optax.sgd(0.1), 3, not_finite=not_finite, batch_sharding=by_rows())
  run = functools.partial(train, tx, loss=loss, weight=lambda batch: batch["weight"].sum())
  # The fourth one is left out: at the beginning of a window, which "restart" begins again.
  without, *_ = run(batches[:3] + batches[4:])
  batches[3]["weight"][5] = bad
  params, count, _ = run(batches)
  assert_close(params, without)
  assert count == 1


@pytest.mark.parametrize("not_finite", ["drop", "restart"])
@pytest.mark.parametrize(
  "around",
  {
    "masters": lambda tx: optax_boost.dynamic_loss_scale(
      optax_boost.master_weights(tx), initial_scale=8.0
    ),
    "spikes": lambda tx: optax_boost.skip_spikes(optax_boost.average_params(tx, decay=0.9)),
    "half frozen, then thawed": lambda tx: optax_boost.freeze_layers(
      tx,
      optax_boost.layer_groups(PARAMS, ["embed", "blocks[*]", "head"]),
      optax_boost.fixed_freezing(5, 3, steps=2),
    ),
    "frozen for ever": lambda tx: optax_boost.freeze_layers(
      tx,
      optax_boost.layer_groups(PARAMS, ["embed", "blocks[*]", "head"]),
      optax_boost.fixed_freezing(5, 3),
    ),
    "clipped": lambda tx: tx,
  }.items(),
  ids=lambda pair: pair[0] if isinstance(pair, tuple) else pair,
)
def test_wrappers_see_the_gradient_of_all_devices(around, not_finite):
  def make(**kwargs):
    inner = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1))
    return around[1](optax_boost.accumulate(inner, 2, not_finite=not_finite, **kwargs))

  assert_like_one_device(make, by_rows())


@pytest.mark.parametrize("not_finite", ["drop", "restart"])
@pytest.mark.parametrize(
  ("sharding", "spec"),
  [
    (lambda: by_rows(4, 2), P(None, "model")),
    (lambda: by_rows(4, 2, axes=("data", "model")), P()),
    (lambda: by_rows(kind="Explicit"), P()),
  ],
  ids=["tensor parallel", "two axes", "Explicit"],
)
def test_sums_lie_on_the_devices_of_the_batch_on_every_mesh(sharding, spec, not_finite):
  sharding = sharding()
  tx = optax_boost.accumulate(optax.sgd(0.1), 2, not_finite=not_finite, batch_sharding=sharding)
  step = optax_boost.make_train_step(loss_fn, tx)

  def place(x):
    whole_or_part = jax.sharding.NamedSharding(sharding.mesh, P(*spec[: x.ndim - 1]))
    return jax.device_put(x, whole_or_part)

  state = step.init(jax.tree.map(place, PARAMS))
  for batch in BATCHES:
    state, _ = step(state, jax.device_put(batch, sharding))
    for total, param in zip(
      *map(jax.tree.leaves, (state.opt_state.accumulator, state.params)), strict=True
    ):
      assert total.addressable_shards[0].data.nbytes == param.addressable_shards[0].data.nbytes
  alone, *_ = train(optax_boost.accumulate(optax.sgd(0.1), 2, not_finite=not_finite))
  assert_close(jax.device_get(state.params), alone)


def collectives(compiled):
  """For each collective of a program: whether it is in a loop, its name, and its elements.

  Single numbers don't count as elements.
  """
  text = compiled.as_text()
  bodies = set(re.findall(r"body=%?([\w.-]+)", text))
  found, computation = [], None
  for line in text.splitlines():
    if match := re.match(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$", line):
      computation = match[1]
    names = "all-reduce|reduce-scatter|all-gather|all-to-all|collective-permute"
    if match := re.search(rf"= (\(.*?\)|\S+) ({names})(?:-start)?\(", line):
      shapes = re.findall(r"\w+\[([\d,]+)\]", match[1])
      sizes = [np.prod(list(map(int, shape.split(",")))) for shape in shapes]
      found.append((computation in bodies, match[2], sum(sizes)))
  return found


@pytest.mark.parametrize("inner", [optax.sgd(0.1), optax.adam(1e-2)])
@pytest.mark.parametrize("not_finite", NOT_FINITE)
def test_a_micro_step_sends_only_single_numbers(not_finite, inner):
  """The sums of the devices are reduced in the loop that makes the inner optimizer's step."""
  sharding = by_rows()
  on_all = jax.sharding.NamedSharding(sharding.mesh, P())
  shape = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)  # noqa: E731
  params = jax.tree.map(lambda x: shape(x, on_all), PARAMS)
  batch = shape(BATCHES[0], sharding)

  def lowered(loss, **kwargs):
    tx = optax_boost.accumulate(inner, 4, not_finite=not_finite, **kwargs)
    step = optax_boost.make_train_step(loss, tx)
    return collectives(step.lower(step.init(params), batch).compile())

  for loss in (loss_fn, written_out):
    found = lowered(loss, batch_sharding=sharding)
    assert {name for _, name, size in found if size} == {"all-reduce"}
    assert sum(size for in_loop, _, size in found if in_loop) == SIZE
    assert not any(size for in_loop, _, size in found if not in_loop)
  assert sum(size for in_loop, _, size in lowered(written_out) if not in_loop) >= SIZE
  multi = optax.MultiSteps(inner, 4).gradient_transformation()

  def by_hand(params, state, batch):
    updates, state = multi.update(jax.grad(written_out)(params, batch), state, params)
    return optax.apply_updates(params, updates), state

  state = jax.tree.map(lambda x: shape(x, on_all), jax.eval_shape(multi.init, params))
  found = collectives(jax.jit(by_hand).lower(params, state, batch).compile())
  assert sum(size for in_loop, _, size in found if not in_loop) >= SIZE


def test_the_state_is_spread_while_params_are_whole():
  """ZeRO-1: the function that spreads moments does not move the sums."""
  sharding = by_rows()

  def spread(x):
    spec = (*[None] * (x.ndim - 1), "data") if x.ndim and x.shape[-1] % 8 == 0 else ()
    return jax.sharding.NamedSharding(sharding.mesh, P(*spec))

  tx = optax_boost.accumulate(optax.adam(1e-2, eps=1e-3), 2, batch_sharding=sharding)
  step = optax_boost.make_train_step(loss_fn, tx)
  params = jax.tree.map(jnp.asarray, PARAMS)
  state = step.init(params, opt_state_sharding=spread)
  for batch in BATCHES:
    state, _ = step(state, jax.device_put(batch, sharding))
  assert_close(
    jax.device_get(state.params), train(optax_boost.accumulate(optax.adam(1e-2, eps=1e-3), 2))[0]
  )
  window = state.opt_state.accumulator["embed"]
  assert window.sharding.spec == P("data")
  assert state.opt_state.inner_state[0].mu["embed"].addressable_shards[0].data.shape == (8, 1)


def test_steps_may_be_scanned():
  sharding = by_rows()
  step = optax_boost.make_train_step(
    loss_fn, optax_boost.accumulate(optax.sgd(0.1), 3, batch_sharding=sharding)
  )
  state = step.init(jax.tree.map(jnp.asarray, PARAMS))
  batches = jax.sharding.NamedSharding(sharding.mesh, P(None, "data"))
  state, _ = jax.jit(lambda *args: jax.lax.scan(step, *args))(
    state, jax.device_put(BATCHES, batches)
  )
  assert_close(jax.device_get(state.params), train(optax_boost.accumulate(optax.sgd(0.1), 3))[0])


def test_a_checkpoint_resumes_in_the_middle_of_a_window_to_the_bit():
  sharding = by_rows()
  tx = optax_boost.accumulate(optax.adam(1e-2), 3, batch_sharding=sharding)
  step = optax_boost.make_train_step(loss_fn, tx)
  params = jax.tree.map(jnp.asarray, PARAMS)
  state = step.init(params)
  on_all = jax.sharding.NamedSharding(sharding.mesh, P())
  for i, batch in enumerate(BATCHES):
    if i == 4:
      saved = jax.tree.map(np.asarray, state)
    state, _ = step(state, jax.device_put(batch, sharding))
  for of_params in (None, on_all):
    shape = functools.partial(jax.ShapeDtypeStruct, sharding=of_params)
    abstract = jax.tree.map(lambda x, shape=shape: shape(x.shape, x.dtype), params)
    places = jax.tree.map(lambda x: x.sharding, step.init(abstract))
    assert {s.spec for s in jax.tree.leaves(places.opt_state.accumulator)} == {P(("data",))}
    resumed = jax.device_put(saved, places)
    for batch in BATCHES[4:]:
      resumed, _ = step(resumed, jax.device_put(batch, sharding))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(resumed), jax.device_get(state))
  other = optax_boost.make_train_step(
    loss_fn, optax_boost.accumulate(optax.adam(1e-2), 3, batch_sharding=by_rows(4))
  )
  with pytest.raises(ValueError, match=r"accumulator.*must have the shape \(4, .* got \(8, "):
    other(saved, BATCHES[0])


class Nnx(nnx.Module):
  def __init__(self):
    rngs = nnx.Rngs(0)
    self.hidden, self.head = nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.Linear(WIDTH, 1, rngs=rngs)
    self.norm = nnx.BatchNorm(WIDTH, momentum=0.5, rngs=rngs)
    self.dropout = nnx.Dropout(0.5, rngs=rngs)

  def __call__(self, x):
    return self.head(self.dropout(self.norm(self.hidden(x))))


@pytest.mark.parametrize("not_finite", ["drop", "restart"])
def test_statistics_are_the_mean_over_devices_and_each_device_draws_its_own_masks(not_finite):
  """The model's rng streams and their counts go on as on one device."""
  sharding = by_rows()
  model = Nnx()
  tx = optax_boost.accumulate(optax.sgd(0.1), 2, not_finite=not_finite, batch_sharding=sharding)
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  alone = nnx.clone(model)

  def loss(model, x):
    hidden = model.dropout(model.norm(model.hidden(x)))
    return jnp.mean(model.head(hidden) ** 2), hidden == 0

  step = optax_boost.nnx.make_train_step(loss, has_aux=True)
  before = jax.random.key_data(model.dropout.rngs.key[...])
  # All devices have the same rows.
  metrics = step(model, optimizer, jax.device_put(np.tile(BATCHES[0, :2], (8, 1)), sharding))
  dropped = np.asarray(metrics["aux"]).reshape(8, -1)
  assert len(np.unique(dropped, axis=0)) == 8
  np.testing.assert_array_equal(jax.random.key_data(model.dropout.rngs.key[...]), before)
  assert model.dropout.rngs.count[...] == 1
  loss(alone, BATCHES[0, :2])
  for found, expected in zip(
    (model.norm.mean[...], model.norm.var[...]), (alone.norm.mean, alone.norm.var), strict=True
  ):
    np.testing.assert_allclose(found, expected[...], rtol=1e-5, atol=1e-6)
  for x in BATCHES[1:4]:
    step(model, optimizer, jax.device_put(x, sharding))
  assert int(optax.tree.get(optimizer.opt_state, "inner_count")[...]) == 2
  for leaf in jax.tree.leaves(nnx.state(model, nnx.Not(nnx.RngKey))):
    parts = [np.asarray(shard.data) for shard in leaf.addressable_shards]
    assert all(np.array_equal(part, parts[0]) for part in parts)


def test_a_key_draws_other_numbers_on_each_device():
  sharding = by_rows()
  tx = optax_boost.accumulate(optax.sgd(0.1), 2, batch_sharding=sharding)

  def loss(params, x, key):
    noise = jax.random.normal(key, x.shape)
    return loss_fn(params, x + noise), noise

  step = optax_boost.make_train_step(loss, tx, has_aux=True)
  state = step.init(jax.tree.map(jnp.asarray, PARAMS))
  _, metrics = step(state, jax.device_put(BATCHES[0], sharding), jax.random.key(0))
  assert len(np.unique(metrics["aux"])) == BATCHES[0].size


@pytest.mark.parametrize("door", ["linen", "nnx"])
def test_flax_models_train_as_on_one_device(door):
  """Without BatchNorm and dropout, which act on each device."""
  sharding = by_rows()
  trained = []
  loss = lambda model, x: jnp.mean((model(x) - 1) ** 2)  # noqa: E731
  for settings in ({}, {"batch_sharding": sharding}):
    place = (lambda x: jax.device_put(x, sharding)) if settings else (lambda x: x)
    tx = optax_boost.accumulate(optax.sgd(0.1), 2, **settings)
    if door == "nnx":
      model = nnx.Linear(WIDTH, 1, rngs=nnx.Rngs(0))
      optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
      step = optax_boost.nnx.make_train_step(lambda model, x, key: loss(model, x))
      for x in BATCHES:
        step(model, optimizer, place(x), jax.random.key(0))
      trained.append(jax.device_get(nnx.to_pure_dict(nnx.state(model))))
    else:
      module = nn.Dense(1)
      variables = module.init(jax.random.key(0), BATCHES[0])
      pure, params, model_state = optax_boost.linen.split_loss(loss, module, variables)
      step = optax_boost.make_train_step(pure, tx)
      state = step.init(params, model_state)
      for x in BATCHES:
        state, _ = step(state, place(x))
      trained.append(jax.device_get(state.params))
  assert_close(*trained)


def test_gradients_of_the_whole_batch_are_refused():
  tx = optax_boost.accumulate(optax.sgd(0.1), 2, batch_sharding=by_rows())
  grads = jax.tree.map(jnp.asarray, PARAMS)
  state = tx.init(grads)
  with pytest.raises(ValueError, match="needs the gradient of each device"):
    tx.update(grads, state, grads)
  with pytest.raises(ValueError, match="needs the gradient of each device"):
    optax_boost.apply_gradients(tx, grads, state, grads)
  step = optax_boost.make_train_step(loss_fn, optax.chain(optax.clip(1.0), tx))
  with pytest.raises(ValueError, match="around the whole optimizer"):
    step(step.init(grads), BATCHES[0])


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_params_that_the_devices_of_the_batch_divide_are_refused(kind):
  sharding = by_rows(kind=kind)
  tx = optax_boost.accumulate(optax.sgd(0.1), 2, batch_sharding=sharding)
  loss = lambda params, x: jnp.mean(x) * jnp.sum(params["w"])  # noqa: E731
  step = optax_boost.make_train_step(loss, tx)
  state = step.init({"w": jax.device_put(jnp.ones((8, 8)), sharding)})
  with pytest.raises(ValueError, match="as in FSDP"):
    step(state, jax.device_put(BATCHES[0], sharding))

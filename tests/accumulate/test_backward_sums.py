"""Unless a micro-batch is judged first, its gradients are added inside of the backward pass."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
from optax_boost._train_step import _step_computation
from tests import meshes, scanned
from tests.scanned import LAYERS, layer, loss_of, params_of, run_layers


def nested(params, h):
  def twice(h, block):
    return jax.lax.scan(lambda h, _: (layer(h, block)[0], None), h, length=2)[0], None

  return run_layers(params, h, twice)


def written_out(params, h):
  for i in range(LAYERS):
    h, _ = layer(h, jax.tree.map(lambda leaf, i=i: leaf[i], params["blocks"]))
  return h


LOSSES = scanned.LOSSES | {"nested scans": nested, "written out": written_out}
AROUND = {
  "alone": lambda tx: tx,
  "scaled masters": lambda tx: optax_boost.dynamic_loss_scale(
    optax_boost.master_weights(tx), initial_scale=8.0
  ),
  "half frozen, then thawed": lambda tx: optax_boost.freeze_layers(
    tx,
    optax_boost.layer_groups(params_of(), ["embed", "blocks[*]", "head"]),
    optax_boost.fixed_freezing(6, 3, steps=2),
  ),
}


def train(loss, tx, batches, params=None, **kwargs):
  step = optax_boost.make_train_step(loss, tx, **kwargs)
  state = step.init(params_of() if params is None else params)
  for batch in batches:
    state, metrics = step(state, batch)
  return state, metrics


@pytest.mark.parametrize(
  ("name", "around", "not_finite"),
  [
    *((name, "alone", "restart") for name in LOSSES),
    *(("a scan", around, "restart") for around in [*AROUND][1:]),
    *(("a scan", "alone", not_finite) for not_finite in (None, "keep")),
  ],
)
def test_sums_of_the_backward_pass_are_those_of_whole_gradients(
  name, around, not_finite, monkeypatch
):
  """To the bit, with a window of two and clipping and Adam at its end; weights come from aux."""
  batches = jax.random.randint(jax.random.key(0), (6, 3), 0, 5)

  def loss(params, tokens):
    return loss_of(LOSSES[name])(params, tokens), {"tokens": 1.0 + tokens[0]}

  inner = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))
  tx = AROUND[around](optax_boost.accumulate(inner, 2, not_finite=not_finite))
  run = functools.partial(train, loss, tx, batches, has_aux=True, weight="tokens")
  found = run()
  monkeypatch.setattr(_step_computation.StepComputation, "_addition", lambda *_: None)
  whole = run()
  # The weight is known before the sum or after it, which may cost the last bit.
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-6, atol=1e-7), found, whole)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("door", ["update", "apply_gradients", "train_step"])
def test_a_micro_batch_that_is_not_finite_begins_the_window_again(door, bad):
  """In windows of three, with a bad micro-batch at the first, second and third place."""
  values = [1.0, 2.0, bad, 4.0, bad, 6.0, 7.0, 8.0, bad, 10.0, 11.0, 12.0, 13.0]
  tx = optax_boost.accumulate(optax.sgd(1.0), 3, not_finite="restart")
  params = {"w": jnp.zeros((2, 3))}

  def loss(params, x):
    return jax.lax.scan(lambda h, w: (h + jnp.sum(w * x), None), 0.0, params["w"])[0]

  step = optax_boost.make_train_step(loss, tx)
  train_state, state = step.init(params), tx.init(params)
  for value in values:
    grads = {"w": jnp.full((2, 3), value)}
    if door == "train_step":
      train_state, _ = step(train_state, jnp.full(3, value))
      params, state = train_state.params, train_state.opt_state
    elif door == "update":
      updates, state = tx.update(grads, state, params)
      params = optax.apply_updates(params, updates)
    else:
      params, state = optax_boost.apply_gradients(tx, grads, state, params)
  moved, window = 0.0, []
  for value in values:
    window = [*window, value] if np.isfinite(value) else []
    if len(window) == 3:
      moved, window = moved - np.mean(window), []
  np.testing.assert_allclose(params["w"], np.full((2, 3), moved), rtol=1e-6)
  assert int(state.notfinite_count) == 3
  assert int(state.accumulation.count) == len(window)


@pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="older XLA copies the sums once")
def test_the_gradients_of_a_scan_never_exist_at_once():
  """The temporaries of a micro-step of 12 blocks of width 256, of 25 MB of params."""
  shapes = {"up": (12, 256, 1024), "down": (12, 1024, 256)}
  params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}

  def block(h, p):
    return h + jax.nn.gelu(h @ p["up"]) @ p["down"], None

  def loss(params, x):
    return jnp.mean(jax.lax.scan(block, x, params)[0] ** 2)

  def temporaries(not_finite):
    tx = optax_boost.accumulate(optax.adam(1e-3), 4, not_finite=not_finite)
    step = optax_boost.make_train_step(loss, tx)
    compiled = step.lower(step.init(params), jax.ShapeDtypeStruct((16, 256), jnp.float32)).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  assert temporaries("restart") < 0.45 * temporaries("drop")


def test_a_step_that_cannot_add_in_the_backward_pass_says_why():
  schedule = optax_boost.FreezeSchedule([0, 2], [1, 0])
  tx = optax_boost.freeze_layers(
    optax_boost.accumulate(optax.sgd(0.1), 2, not_finite="restart"), ["embed", "head"], schedule
  )
  step = optax_boost.make_train_step(loss_of(run_layers), tx)
  with pytest.warns(optax_boost.NoEffectWarning) as caught:
    jax.eval_shape(step, step.init(params_of()), jnp.zeros(3, jnp.int32))
  assert any("how many groups are frozen is a traced number" in str(w.message) for w in caught)


def test_aux_may_have_params():
  def loss(params, x):
    return loss_of(run_layers)(params, x), params["blocks"]

  batches = [jax.random.randint(jax.random.key(i), (4,), 0, 5) for i in range(2)]
  metrics = []
  for way in ("drop", "restart"):
    tx = optax_boost.accumulate(optax.sgd(0.1), 2, not_finite=way)
    step = optax_boost.make_train_step(loss, tx, has_aux=True)
    state = step.init(params_of())
    for batch in batches:
      state, found = step(state, batch)
    metrics.append(found["aux"])
  jax.tree.map(np.testing.assert_array_equal, metrics[1], metrics[0])


@pytest.mark.parametrize(
  ("not_finite", "around", "by_layer"),
  [
    ("restart", lambda tx: tx, True),
    ("restart", optax_boost.dynamic_loss_scale, True),
    ("keep", lambda tx: tx, True),
    (None, functools.partial(optax_boost.master_weights, check=None), True),
    ("drop", lambda tx: tx, False),
    ("keep", optax_boost.dynamic_loss_scale, False),
    (None, functools.partial(optax_boost.skip_spikes, factor=4.0), False),
  ],
)
def test_a_step_says_which_gradients_are_added_layer_by_layer(not_finite, around, by_layer):
  tx = around(optax_boost.accumulate(optax.adam(1e-2), 2, not_finite=not_finite))
  step = optax_boost.make_train_step(loss_of(run_layers), tx)
  state = jax.eval_shape(step.init, params_of())
  texts = step.explain(state, jnp.zeros(3, int))
  assert [*texts] == ["blocks/bias", "blocks/kernel", "embed", "head"]
  assert all(("layer by layer" in texts[leaf]) == by_layer for leaf in [*texts][:2]), texts
  assert ("`dot_general`" if by_layer else "exists as a whole") in texts["head"], texts


@pytest.mark.parametrize("not_finite", [None, "keep"])
def test_a_micro_batch_that_is_not_finite_spoils_its_own_window(not_finite):
  """The optimizer sees NaN, and `apply_if_finite` skips the step; the next window is whole."""
  tx = optax_boost.accumulate(optax.apply_if_finite(optax.sgd(1.0), 5), 2, not_finite=not_finite)
  loss = lambda w, x: jax.lax.scan(lambda h, w: (h + jnp.sum(w) * x, None), 0.0, w)[0]  # noqa: E731
  state, _ = train(loss, tx, jnp.array([1.0, np.nan, 3.0, 5.0]), jnp.zeros((2, 3)))
  np.testing.assert_array_equal(state.params, np.full((2, 3), -4.0))
  assert state.opt_state.inner_state.total_notfinite == 1


@pytest.mark.parametrize("spec", [(), (None, "x"), (None, None, "x")], ids=["data", "in", "out"])
def test_sharded_sums_have_the_collectives_of_whole_gradients(spec, monkeypatch):
  """Data parallel and FSDP, in windows of two: the same values, places, and bytes sent."""
  mesh = meshes.mesh((8,), ("x",))
  place = lambda x, *s: jax.device_put(x, jax.NamedSharding(mesh, jax.P(*s)))  # noqa: E731
  params = jax.tree.map(place, params_of(width=16))
  params["blocks"]["kernel"] = place(params["blocks"]["kernel"], *spec)
  batches = place(jax.random.randint(jax.random.key(0), (2, 16), 0, 5), None, "x")
  tx = optax_boost.accumulate(optax.adam(1e-2), 2, not_finite="restart")
  found = []
  for _ in range(2):
    step = optax_boost.make_train_step(loss_of(run_layers), tx)
    program = step.lower(step.init(params), batches[0]).compile()
    new, _ = train(loss_of(run_layers), tx, batches, params)
    places = jax.tree.map(lambda x: x.sharding.spec, new)
    found.append((new, places, meshes.collectives(program, 16 * 16)))
    monkeypatch.setattr(_step_computation.StepComputation, "_addition", lambda *_: None)
  (inside, places, sent), (whole, places_of_whole, sent_of_whole) = found
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-6, atol=1e-7), inside, whole)
  assert (places, sent) == (places_of_whole, sent_of_whole)
  assert sum(sent.values()) == (3 if spec else 1)

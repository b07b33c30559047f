"""Steps whose gradient norm or loss is far above those before it are skipped."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
from tests import meshes

FACTOR, DECAY, START = 3.0, 0.5, 2


def spikes(norms):
  """For each norm, whether its step is skipped, computed in NumPy."""
  total = weight = 0.0
  count, skipped = 0, []
  for norm in norms:
    limit = FACTOR * total / weight if weight else np.inf
    is_spike = bool(count >= START and np.isfinite(norm) and norm > limit)
    skipped.append(is_spike or not np.isfinite(norm))
    if np.isfinite(norm) and norm > 0:
      total, weight = DECAY * total + min(norm, limit), DECAY * weight + 1
      count += 1
  return skipped


def run(norms, tx=None, dtype="float32", scale=1.0):
  """Returns for gradients of these norms whether each step is skipped, and the last state."""
  if tx is None:
    tx = optax_boost.skip_spikes(optax.sgd(1.0), FACTOR, DECAY, start=START)
  params = {"a": jnp.zeros(2, dtype), "b": jnp.zeros(2, dtype)}
  state, skipped = tx.init(params), []
  update = jax.jit(tx.update)
  for norm in norms:
    grads = {"a": jnp.array([norm * scale, 0.0], dtype), "b": jnp.zeros(2, dtype)}
    counts = lambda state: int(state.spike_count) + int(state.notfinite_count)  # noqa: E731
    before = counts(state)
    updates, state = update(grads, state, params)
    skipped.append(counts(state) > before)
    assert not (skipped[-1] and any(np.any(u) for u in jax.tree.leaves(updates)))
  return skipped, state


NORMS = {
  "single": [1, 2, 1, 50, 1, 2, 40, 1],
  "NaN first": [np.nan, 1, 1, 1, 9, 1],
  "not finite": [1, 1, np.inf, 1, np.nan, 7, 1],
  "a lasting rise": [1, 1, 1, *[100] * 12],
  "in the first steps": [1, 1000, 1, 1, 30, 1],
  "zeros first": [*[0] * 30, *[1] * 8],
  "masked losses": [0, 1, 0, 1, 0, 0, 8, 0, 1],
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_wrapper_skips_the_steps_that_the_formula_says(name, dtype):
  skipped, state = run(NORMS[name], dtype=dtype)
  assert skipped == spikes(NORMS[name])
  assert int(state.spike_count) == sum(skipped) - sum(~np.isfinite(NORMS[name]))
  assert np.isfinite(state.norm_sums).all()


def test_after_a_lasting_rise_steps_are_made_again():
  skipped, _ = run(NORMS["a lasting rise"])
  assert skipped[3]
  assert not any(skipped[-5:])


def test_norms_of_zero_do_not_count_as_usual_norms():
  skipped, _ = run(NORMS["zeros first"])
  assert not any(skipped)


@pytest.mark.parametrize("around", [True, False])
def test_with_a_loss_scale_the_norm_is_taken_of_the_unscaled_gradient(around):
  inner = optax.sgd(1.0)
  spiking = lambda tx: optax_boost.skip_spikes(tx, FACTOR, DECAY, start=START)  # noqa: E731
  scaled = lambda tx: optax_boost.dynamic_loss_scale(tx, 8.0)  # noqa: E731
  tx = spiking(scaled(inner)) if around else scaled(spiking(inner))
  params = jnp.zeros(2)
  state = tx.init(params)
  counts = []
  for norm in (1, 1, 1, 50, 1, np.inf, 1):
    scale = optax.tree.get(state, "loss_scale")
    _, state = tx.update(jnp.array([norm, 0.0]) * scale, state, params)
    counts.append(int(optax.tree.get(state, "spike_count")))
  assert counts == [0, 0, 0, 1, 1, 1, 1]
  # The loss scale, not `skip_spikes`, counts the overflow.
  assert optax.tree.get(state, "loss_scale") == 4.0
  assert optax.tree.get(state, "notfinite_count") == 1


def test_a_spike_is_left_out_of_its_window():
  tx = optax_boost.accumulate(optax_boost.skip_spikes(optax.sgd(1.0), start=2), 2)
  params = jnp.zeros(1)
  state = tx.init(params)
  for norm in (1.0, 2.0, 3.0, 400.0, 5.0):
    params, state = optax_boost.apply_gradients(tx, jnp.full(1, norm), state, params)
  np.testing.assert_allclose(params, [-(1.5 + 4.0)], rtol=1e-6)
  assert int(state.spike_count) == 1


def test_inside_shard_map_all_devices_skip_the_same_steps():
  mesh = meshes.mesh((2,), ("x",))
  tx = optax_boost.skip_spikes(optax.sgd(1.0), FACTOR, DECAY, start=1, axis_name="x")
  params = jnp.zeros(2)

  def step(grads, state):
    return tx.update(grads[0], state, params)

  whole, split = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("x")
  run_step = jax.jit(
    jax.shard_map(
      step, mesh=mesh, in_specs=(split, whole), out_specs=(split, whole), check_vma=False
    )
  )
  state = tx.init(params)
  # Only the second device has a long gradient.
  for grads in ([[3.0, 4.0], [3.0, 4.0]], [[3.0, 4.0], [300.0, 400.0]]):
    updates, state = run_step(jnp.array(grads), state)
  assert not np.any(updates)
  np.testing.assert_allclose(state.gradient_norm, np.sqrt((25 + 250000) / 2), rtol=1e-6)


@pytest.mark.parametrize("around", [True, False])
@pytest.mark.parametrize("door", ["update", "apply_gradients", "train_step"])
def test_each_number_of_frozen_layers_has_a_mean_of_its_own(door, around):
  """The layers have the same gradient in each step, whose norm is 10 times as long after a thaw."""
  spiking = lambda tx: optax_boost.skip_spikes(tx, 3.0, start=2)  # noqa: E731
  schedule = optax_boost.FreezeSchedule(range(30), [1] * 12 + [0, 0, 0, 1, 1, 0] * 3)
  freezing = lambda tx: optax_boost.freeze_layers(tx, ["body", "head"], schedule)  # noqa: E731
  sgd = optax.sgd(1.0)
  tx = spiking(freezing(sgd)) if around else freezing(spiking(sgd))
  params = {"body": jnp.zeros(1), "head": jnp.zeros(1)}
  factors = np.ones(30)
  factors[[8, 20]] = (
    100,
    np.nan,
  )  # a spike of the head, and a bad gradient of a frozen or free layer

  def grads(t):
    return {"body": jnp.full(1, 10 * (1e3 if t == 5 else 1.0)), "head": jnp.full(1, factors[t])}

  if door == "train_step":
    loss = lambda p, g: sum(jnp.sum(p[name] * g[name]) for name in p)  # noqa: E731
    step = optax_boost.make_train_step(loss, tx)
    state = step.init(params)
    for t in range(30):
      state, _ = step(state, grads(t))
    params, state = state.params, state.opt_state
  else:
    state = tx.init(params)
    for t in range(30):
      if door == "update":
        updates, state = jax.jit(tx.update)(grads(t), state, params)
        params = optax.apply_updates(params, updates)
      else:
        params, state = optax_boost.apply_gradients(tx, grads(t), state, params)
  # Two batches are left out, so 28 steps are made, of which 12 + 2 + 2 + 1 freeze the body.
  assert (int(state.spike_count), int(state.notfinite_count)) == (1, 1)
  depths = np.array([1] * 12 + [0, 0, 0, 1, 1, 0] * 3)[:28]
  np.testing.assert_allclose(params["head"], [-28.0])
  np.testing.assert_allclose(params["body"], [-10.0 * np.sum(depths == 0)])


LOSS_FACTOR = 4.0


def loss_spikes(losses):
  """For each loss, whether its step is skipped, from weighted means over all losses before."""
  entries, distances, skipped = [], [], []
  for loss in losses:
    weights = DECAY ** np.arange(len(entries))[::-1]
    mean, deviation = (
      np.sum(weights * past) / max(np.sum(weights), 1) for past in (entries, distances)
    )
    is_judged = len(entries) >= START and deviation > 0
    limit = mean + LOSS_FACTOR * deviation if is_judged else np.inf
    skipped.append(bool(not np.isfinite(loss) or loss > limit))
    if np.isfinite(loss):
      distances.append(abs(min(loss, limit) - mean) if entries else 0)
      entries.append(min(loss, limit))
  return skipped


NOISE = np.random.default_rng(0).normal(size=60)
LOSSES = {
  "single": [3, 2.9, 3.1, 3, 9, 3, 2.9, 9, 3],
  "negative": [-3, -2.9, -3.1, -3, 3, -3, -2.9, 3, -3],
  "not finite": [3, np.nan, 2.9, np.inf, 3.1, -np.inf, 3, 9],
  "constant at first": [1, 1, 1, 1, 2, 1, 1.5, 9, 1],
  "a fall and a slow rise": [*np.linspace(8, 1, 30), *np.linspace(1, 8, 90)],
  "a lasting rise": [3, 2.9, 3.1, *[9] * 25],
  "noise": 3 + 0.1 * NOISE,
}


@pytest.mark.parametrize("factor", [None, FACTOR])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_far_above_the_losses_before_it_is_left_out(name, factor):
  options = {"decay": DECAY, "loss_factor": LOSS_FACTOR, "start": START}
  tx = optax_boost.skip_spikes(optax.sgd(1.0), factor, **options)

  def step(state, loss):
    updates, state = tx.update(jnp.ones(1), state, jnp.zeros(1), value=loss)
    return state, (updates[0] == 0, state.spike_count)

  losses = np.asarray(LOSSES[name], np.float32)
  state, (skipped, counts) = jax.jit(functools.partial(jax.lax.scan, step))(
    tx.init(jnp.zeros(1)), losses
  )
  expected = loss_spikes(losses.astype(float))
  np.testing.assert_array_equal(skipped, expected)
  assert counts[-1] == sum(expected) - np.sum(~np.isfinite(losses))
  assert state.notfinite_count == np.sum(~np.isfinite(losses))


def test_a_slow_rise_of_the_loss_is_no_spike_and_after_a_jump_steps_are_made_again():
  assert not any(loss_spikes(LOSSES["a fall and a slow rise"]))
  jump = loss_spikes(LOSSES["a lasting rise"])
  assert jump[3]
  assert not any(jump[-5:])


@pytest.mark.parametrize("make", [lambda tx: tx, lambda tx: optax_boost.accumulate(tx, 1)])
def test_the_train_step_judges_its_loss_and_a_thaw_does_not_change_the_losses_before(make):
  freezing = optax_boost.freeze_layers(
    optax.sgd(0.0), ["body", "head"], optax_boost.fixed_freezing(2, 1, steps=6)
  )
  tx = make(optax_boost.skip_spikes(freezing, None, loss_factor=5.0, start=5))
  loss = lambda p, x: x + 0 * (p["body"] + p["head"])  # noqa: E731
  step = optax_boost.make_train_step(loss, tx)
  state = step.init({"body": jnp.zeros([]), "head": jnp.zeros([])})
  counts = []
  for x in (3.0, 2.9, 3.1, 3.0, 2.9, 3.1, 3.0, 9.0, 3.0):
    state, metrics = step(state, jnp.float32(x))
    counts.append(int(metrics["skip_spikes/spike_count"]))
  assert counts == [0] * 7 + [1, 1]


def test_a_loop_of_ones_own_is_asked_for_the_loss_and_devices_judge_its_mean():
  tx = optax_boost.skip_spikes(optax.sgd(1.0), None, loss_factor=3.0, start=2, axis_name="x")
  params = jnp.zeros(2)
  state = tx.init(params)
  for value, words in ((None, r"needs the extra argument `value` \(the loss"), (params, "scalar")):
    with pytest.raises(ValueError, match=words):
      jax.vmap(lambda g, v: tx.update(g, state, params, value=v), (0, None), axis_name="x")(
        jnp.ones((2, 2)), value
      )
  step = jax.vmap(
    lambda g, state, loss: tx.update(g, state, params, value=loss),
    (0, None, 0),
    (0, None),
    axis_name="x",
  )
  for losses in ((3.0, 3.0), (2.0, 4.2), (3.0, 3.0), (3.0, 30.0)):  # the last one on one device
    updates, state = step(jnp.ones((2, 2)), state, jnp.array(losses))
  assert not np.any(updates)
  assert state.spike_count == 1


@pytest.mark.parametrize(
  ("kwargs", "words"),
  [
    ({"loss_factor": 1.0}, r"`loss_factor` must be finite and > 1; got 1\.0"),
    ({"factor": None}, "`skip_spikes` needs `factor` or `loss_factor`; got None for both"),
    ({"factor": 1.0}, r"`factor` must be finite and > 1; got 1\.0"),
    ({"decay": 1.0}, "`decay` must be"),
    ({"start": 0}, "`start` must be"),
  ],
)
def test_bad_arguments_are_refused(kwargs, words):
  with pytest.raises(ValueError, match=words):
    optax_boost.skip_spikes(optax.sgd(0.1), **kwargs)

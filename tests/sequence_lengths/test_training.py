"""Training on sequences that grow: the loss of windows, programs, accumulation, every form."""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
import optax_boost.linen
import optax_boost.nnx
from tests import compilations
from tests.sequence_lengths import models

LENGTHS = optax_boost.LengthSchedule((4, 8, 16), (0, 2, 4))


def cut(batch, step):
  return optax_boost.cut_sequences(batch, LENGTHS(step), LENGTHS.full_length)


def test_the_loss_of_a_cut_batch_is_the_mean_over_its_windows():
  (batch,) = models.batches(1)
  params, loss_of = models.init(), jax.jit(models.loss)
  sums, weights = 0.0, 0.0
  for tokens, real in zip(batch["tokens"], batch["real"], strict=True):
    for i in range(0, 16, 4):
      window = {"tokens": tokens[None, i : i + 5], "real": real[None, i : i + 4]}
      weight = window["real"].sum()
      sums += float(loss_of(params, window)) * weight if weight else 0.0
      weights += weight
  loss = loss_of(params, optax_boost.cut_sequences(batch, 4, 16))
  np.testing.assert_allclose(loss, sums / weights, rtol=1e-5)


def test_blocks_of_a_mask_of_pairs_keep_attention_within_the_windows():
  (batch,) = models.batches(1)
  params, tokens = models.init(), batch["tokens"][:, :-1]
  near = np.abs(np.subtract.outer(np.arange(16), np.arange(16))) < 3
  mask = np.broadcast_to(near, (4, 1, 16, 16))
  windows = optax_boost.cut_sequences(
    {"tokens": tokens, "mask": mask}, 4, 16, axes={"mask": (2, 3)}
  )
  # A whole sequence whose attention stays within windows has the same logits.
  within = np.arange(16)[:, None] // 4 == np.arange(16) // 4
  whole = models.logits(params, tokens, mask & within)
  short = models.logits(params, windows["tokens"], windows["mask"])
  np.testing.assert_allclose(short.reshape(whole.shape), whole, rtol=1e-5, atol=1e-6)


def functional(loss, *arrays):
  step = optax_boost.make_train_step(loss, optax.adam(1e-2))
  state = step.init(*arrays)

  def advance(batch):
    nonlocal state
    state, metrics = step(state, batch)
    return metrics["loss"]

  return advance


def plain_jax():
  return functional(models.loss, models.init())


def linen():
  module = models.LinenModel()
  variables = jax.jit(module.init)(jax.random.key(0), jnp.ones((1, 16), jnp.int32))
  return functional(*optax_boost.linen.split_loss(models.linen_loss, module, variables))


def flax_nnx():
  model = models.NnxModel(nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
  step = optax_boost.nnx.make_train_step(models.nnx_loss)
  return lambda batch: step(model, optimizer, batch)["loss"]


@pytest.mark.parametrize("make", [plain_jax, linen, flax_nnx])
def test_every_form_compiles_one_program_for_each_length(make):
  advance = make()
  counts = []
  losses = []
  for step, batch in enumerate(models.batches(7)):
    short = cut(batch, step)
    loss, compiled = compilations.counted(lambda short=short: advance(short))
    counts.append(bool(compiled))
    losses.append(float(loss))
  assert counts == [True, False, True, False, True, False, False]
  assert np.isfinite(losses).all()


def test_windows_of_micro_batches_count_as_their_tokens():
  weight = lambda batch: batch["real"].sum()  # noqa: E731
  parts = list(models.batches(2, sequences=2))
  whole = jax.tree.map(lambda *x: np.concatenate(x), *parts)
  for length in (4, 16):
    cut = lambda batch, n=length: optax_boost.cut_sequences(batch, n, 16)  # noqa: E731
    by_parts = optax_boost.make_train_step(
      models.loss, optax_boost.accumulate(optax.sgd(0.1), 2), weight=weight
    )
    at_once = optax_boost.make_train_step(models.loss, optax.sgd(0.1))
    state = by_parts.init(models.init())
    for part in parts:
      state, _ = by_parts(state, cut(part))
    expected, _ = at_once(at_once.init(models.init()), cut(whole))
    jax.tree.map(
      lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6),
      state.params,
      expected.params,
    )


def scaled_loss(params, batch):
  return models.loss(params, batch) * batch["scale"]


scaled_gradient = jax.jit(jax.grad(scaled_loss))


@pytest.mark.parametrize("by", ["micro-batch", "window"])
def test_a_window_that_a_skipped_micro_batch_lengthens_averages_over_its_tokens(by):
  batches = [
    batch | {"real": np.ones((4, 16), np.float32), "scale": np.float32(np.inf if i == 1 else 1)}
    for i, batch in enumerate(models.batches(9))
  ]
  lengths = optax_boost.LengthSchedule((4, 16), (0, 2))
  tx = optax_boost.dynamic_loss_scale(optax_boost.accumulate(optax.sgd(0.1), 2))
  step = optax_boost.make_train_step(scaled_loss, tx, donate=False)
  state = step.init(models.init())
  start, parts, windows = state.params, [], []
  for i, batch in enumerate(batches):
    made = int(optax.tree.get(state.opt_state, "inner_count"))
    length = lengths(i // 2 if by == "micro-batch" else made)
    short = optax_boost.cut_sequences(batch, length, 16)
    state, _ = step(state, short)
    parts.append((length, short))
    if int(optax.tree.get(state.opt_state, "inner_count")) > made:
      # The mean over the window's tokens without the tokens of the skipped micro-batch.
      finite = [part for _, part in parts if np.isfinite(part["scale"])]
      start, *gradients = jax.device_get(
        [start, *(scaled_gradient(start, part) for part in finite)]
      )
      expected = jax.tree.map(lambda p, *g: p - 0.1 * sum(g) / len(g), start, *gradients)
      jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), state.params, expected
      )
      windows.append([n for n, _ in parts])
      start, parts = state.params, []
  mixed = {"micro-batch": [4, 16], "window": [4, 4]}[by]
  assert windows == [[4, 4, 4], mixed, [16, 16], [16, 16]]


def test_a_resumed_training_goes_on_at_the_length_of_its_step():
  made = optax_boost.make_train_step(models.loss, optax.adam(1e-2), donate=False)

  def train(state, steps):
    for step, batch in list(enumerate(models.batches(6)))[steps]:
      state, _ = made(state, cut(batch, step))
    return state

  start = made.init(models.init())
  whole = train(start, slice(None))
  resumed = train(train(start, slice(0, 3)), slice(3, None))
  jax.tree.map(np.testing.assert_array_equal, whole.params, resumed.params)

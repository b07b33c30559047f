"""Levels for tokens: the batches that they cut, what they leave off, and what they refuse."""

import functools
import json
import math
import pickle
import re

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
import optax_boost.linen
import optax_boost.nnx
from tests.auto_boost.table import rows_of
from tests.sequence_lengths import models

STEPS = 40
(BATCH,) = models.batches(1)


@functools.cache
def forms():
  module = models.LinenModel()
  variables = jax.jit(module.init)(jax.random.key(0), jnp.ones((1, 16), jnp.int32))
  return {
    "jax": (models.loss, models.init()),
    "linen": optax_boost.linen.split_loss(models.linen_loss, module, variables),
    "nnx": optax_boost.nnx.split_loss(models.nnx_loss, models.NnxModel(nnx.Rngs(0))),
  }


def declared(level="O1", **options):
  return optax_boost.auto_boost(level, STEPS, sequence_length=16, **options)


@pytest.mark.parametrize("form", ["jax", "linen", "nnx"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_level_for_tokens_cuts_batches_and_leaves_the_optimizer_alone(level, form):
  boost = declared(level)
  tx = boost.optimizer(optax.adamw(1e-3), *forms()[form], BATCH)
  lengths = [boost.batch(BATCH, step)["tokens"].shape for step in range(STEPS)]
  expected = optax_boost.sequence_length_warmup(
    16, STEPS, warmup_fraction=boost.on["sequence_length_warmup"]["warmup_fraction"]
  )
  assert lengths == [(64 // expected(step), expected(step) + 1) for step in range(STEPS)]
  assert lengths[0] == (32, 3)
  assert lengths[-1] == (4, 17)
  # Nothing else acts on a transformer: the optimizer is the user's.
  params = forms()[form][1]
  assert jax.tree.structure(tx.init(params)) == jax.tree.structure(optax.adamw(1e-3).init(params))
  assert boost.model(None, models) is models


def test_sequences_are_full_from_the_middle_on():
  boosts = [optax_boost.auto_boost(level, 1000, sequence_length=128) for level in ("O1", "O2")]
  for boost in boosts:
    assert boost.length_schedule == optax_boost.sequence_length_warmup(128, 1000)


def embedded(params, tokens):
  return params["table"][tokens]


def sliced_positions(params, tokens):
  return embedded(params, tokens) + params["places"][: tokens.shape[1]]


def looked_up_positions(params, tokens):
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  return embedded(params, tokens) + jnp.take(params["places"], positions, axis=0)


def positions_in_a_loop(params, tokens):
  def add(x, block):
    return x + jax.lax.dynamic_slice_in_dim(block, 0, x.shape[1]), None

  return jax.lax.scan(add, embedded(params, tokens), params["places"][None])[0]


def learned_distances(params, tokens):
  places = jnp.arange(tokens.shape[1])
  bias = jax.jit(lambda table: table[jnp.abs(places[:, None] - places)])(params["places"])
  return jnp.einsum("qkd,bkd->bqd", bias, embedded(params, tokens))


def layers_in_a_python_loop(params, tokens):
  x = embedded(params, tokens)
  for layer in range(len(params["places"])):
    x = x + params["places"][layer] + params["places"][-1, ::2].repeat(2)
  return x


def kinds_of_tokens(params, tokens):
  return embedded(params, tokens) + params["places"][jnp.zeros_like(tokens)]


def positions_of_the_batch(params, batch):
  return embedded(params, batch["tokens"]) + params["places"][batch["place"]]


def loss_of(embed):
  def loss(params, batch):
    tokens = batch["tokens"]
    if embed is positions_of_the_batch:
      x = embed(params, {**batch, "tokens": tokens[:, :-1]})
    else:
      x = embed(params, tokens[:, :-1])
    return models.mean_loss(x @ params["table"].T, batch)

  return loss


@pytest.mark.parametrize(
  ("embed", "learned"),
  [
    (embedded, False),
    (layers_in_a_python_loop, False),
    (kinds_of_tokens, False),
    (sliced_positions, True),
    (looked_up_positions, True),
    (positions_in_a_loop, True),
    (learned_distances, True),
    (positions_of_the_batch, True),
  ],
)
def test_o2_is_full_from_three_quarters_on_where_no_positions_are_learned(embed, learned):
  params = {name: jnp.ones((n, 8)) for name, n in (("table", models.VOCABULARY), ("places", 16))}
  place = np.broadcast_to(np.arange(16, dtype=np.int32), (4, 16))
  axes = {"place": "positions"}
  for level in ("O1", "O2"):
    boost = declared(level, axes=axes)
    boost.optimizer(optax.adamw(1e-3), loss_of(embed), params, {**BATCH, "place": place})
    share = 0.75 if level == "O2" and not learned else 0.5
    expected = optax_boost.sequence_length_warmup(16, STEPS, warmup_fraction=share)
    assert boost.length_schedule == expected
  reason = "as at O1: 'places' is of learned positions" if learned else "no positions are learned"
  assert reason in rows_of(boost)["sequence_length_warmup"]


def test_o2_follows_the_loss_that_the_optimizer_got_last():
  params = {name: jnp.ones((n, 8)) for name, n in (("table", models.VOCABULARY), ("places", 16))}
  boost = declared("O2")
  for embed, share in ((embedded, 0.75), (sliced_positions, 0.5), (embedded, 0.75)):
    boost.optimizer(optax.adamw(1e-3), loss_of(embed), params, BATCH)
    expected = optax_boost.sequence_length_warmup(16, STEPS, warmup_fraction=share)
    assert boost.length_schedule == expected


def test_o2_is_o1_without_a_loss():
  boost = declared("O2")
  boost.optimizer(optax.adamw(1e-3))
  assert boost.length_schedule == optax_boost.sequence_length_warmup(16, STEPS)
  assert "as at O1: the optimizer got no loss" in rows_of(boost)["sequence_length_warmup"]


def test_coming_batches_are_those_of_the_next_step_and_of_the_lengths_to_come():
  boost = declared()
  for step in (0, boost.length_schedule.starts[2], STEPS):
    shapes = [batch["tokens"].shape for batch in boost.coming_batches(BATCH, step)]
    coming = [n for n in boost.length_schedule.lengths if n >= boost.length_schedule(step)]
    assert shapes == [(64 // n, n + 1) for n in coming]
  assert [batch is BATCH for batch in declared("O0").coming_batches(BATCH)] == [True]
  assert boost.batches == 0  # they are not counted as trained on


class Device:
  """Steps that take a time by their length, and a clock that shows it."""

  def __init__(self, seconds):
    self.seconds, self.now = seconds, 0.0

  def step(self, batch):
    self.now += self.seconds[batch["tokens"].shape[1] - 1]
    return jnp.zeros(())

  def clock(self):
    return self.now


def measured(level, *seconds):
  """A level on a device where steps at the lengths 2, 4, 8 and 16 take these seconds."""
  boost, device = declared(level), Device(dict(zip((2, 4, 8, 16), seconds, strict=True)))
  boost.optimizer(optax.adamw(1e-3), models.loss, models.init(), BATCH)
  return boost, boost.measure(device.step, BATCH, clock=device.clock)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_level_is_o0_on_a_device_where_a_step_takes_the_same_time_at_each_length(level):
  boost, prices = measured(level, 0.033, 0.032, 0.032, 0.033)
  assert min(prices.values()) > 0.95
  assert all(boost.batch(BATCH, step) is BATCH for step in range(STEPS))
  assert [batch is BATCH for batch in boost.coming_batches(BATCH)] == [True]
  row = rows_of(boost)["sequence_length_warmup"]
  assert row.startswith("off")
  assert "a step takes 1.00 at 2, 0.97 at 4, 0.97 at 8 of the time of one at 16: none" in row


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_level_keeps_all_lengths_where_steps_cost_what_they_did_on_two_cores(level):
  boost, _ = measured(level, 0.68, 0.71, 0.79, 1.0)  # docs/cards/sequence_lengths.md
  unmeasured = declared(level)
  unmeasured.optimizer(optax.adamw(1e-3), models.loss, models.init(), BATCH)
  assert boost.length_schedule == unmeasured.length_schedule
  assert "of the time of one at 16: all are kept" in rows_of(boost)["sequence_length_warmup"]
  assert "is not known" in rows_of(unmeasured)["sequence_length_warmup"]


def test_a_resumed_run_decides_by_the_prices_that_were_saved():
  for seconds in ((0.2, 0.3, 0.9, 1.0), (1.0, 1.0, 1.0, 1.0), (0.9, 0.3, 0.5, 1.0)):
    boost, prices = measured("O2", *seconds)
    resumed = declared("O2", length_prices=json.loads(json.dumps(prices)))
    assert resumed.on["sequence_length_warmup"]["length_prices"] == prices
    resumed.optimizer(optax.adamw(1e-3), models.loss, models.init(), BATCH)
    assert resumed.length_schedule == boost.length_schedule
    assert boost.explain().count("measured, a step takes") == 1
    if len(boost.length_schedule.lengths) > 1:
      assert rows_of(resumed) == rows_of(boost)
  assert boost.length_schedule.lengths == (4, 8, 16)
  assert "2 left out, above 0.85" in rows_of(boost)["sequence_length_warmup"]


def test_prices_are_measured_of_all_lengths_again_and_the_last_decide():
  boost, _ = measured("O1", 1.0, 1.0, 1.0, 1.0)
  device = Device({2: 0.1, 4: 0.2, 8: 0.5, 16: 1.0})
  assert list(boost.measure(device.step, BATCH, clock=device.clock)) == [2, 4, 8, 16]
  assert boost.length_schedule == declared().length_schedule


@pytest.mark.parametrize("steps", [1, 4, 8, 12])
def test_a_short_training_decides_by_the_prices_that_it_measured(steps):
  device = Device({2: 0.1, 4: 0.2, 8: 0.5, 16: 1.0})
  params = {"table": jnp.ones((models.VOCABULARY, 8))}
  for first in ("measure", "optimizer"):
    boost = optax_boost.auto_boost("O2", steps, sequence_length=16)
    if first == "measure":
      boost.measure(device.step, BATCH, clock=device.clock)
    boost.optimizer(optax.sgd(0.1), loss_of(embedded), params, BATCH)
    boost.measure(device.step, BATCH, clock=device.clock)
    share = boost.on["sequence_length_warmup"]["warmup_fraction"]
    expected = optax_boost.sequence_length_warmup(16, steps, warmup_fraction=share)
    assert boost.length_schedule == expected


@pytest.mark.parametrize("boost", [declared("O0"), optax_boost.auto_boost("O1", STEPS)])
def test_a_level_that_cuts_no_sequences_measures_nothing(boost):
  assert boost.measure(None, BATCH) == {}
  assert boost.batch(BATCH, 0) is BATCH


def test_plain_training_takes_prices_and_ignores_them():
  boost = declared("O0", length_prices={2: 0.1, 4: 0.2, 8: 0.5})
  assert boost.batch(BATCH, 0) is BATCH
  with pytest.raises(ValueError, match="`length_prices` must be None without `sequence_length`"):
    optax_boost.auto_boost("O1", STEPS, length_prices={2: 0.1})


@pytest.mark.parametrize("form", ["jax", "nnx"])
def test_a_level_measures_the_steps_of_a_training_and_leaves_the_training_alone(form):
  boost, adam = declared(), optax.adamw(1e-3)
  if form == "jax":
    step = optax_boost.make_train_step(models.loss, adam)
    state = step.init(models.init())
    prices = boost.measure(step.on_copy(state), BATCH, rounds=1)
    assert int(step(state, boost.batch(BATCH, 0))[0].step) == 1
  else:
    model = models.NnxModel(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, adam, wrt=nnx.Param)
    before = jax.tree.map(np.array, nnx.state(model))
    step = optax_boost.nnx.make_train_step(models.nnx_loss)
    prices = boost.measure(step.on_copy(model, optimizer), BATCH, rounds=1)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), before)
    assert int(optimizer.step[...]) == 0
  assert list(prices) == [2, 4, 8, 16]
  assert set(boost.length_schedule.lengths) <= set(prices)


def test_a_model_that_is_not_declared_gets_a_level_for_images_whatever_its_loss_looks_up():
  for level in ("O0", "O1", "O2"):
    boost = optax_boost.auto_boost(level, total_steps=STEPS)
    tx = boost.optimizer(optax.sgd(0.1), models.loss, models.init(), BATCH)
    title = f"level {level} for images; for tokens pass `sequence_length`"
    if level == "O0":
      title = "level O0, which changes nothing"
    assert boost.explain().splitlines()[0] == title
    assert boost.batch(BATCH, 0) is BATCH
    assert "sequence" not in "".join(rows_of(boost))
    if level != "O0":
      optax_boost.averaged_params(tx.init(models.init()), models.init())


def test_explain_speaks_of_tokens():
  boost = declared()
  boost.optimizer(optax.adamw(1e-3), models.loss, models.init(), BATCH)
  rows = rows_of(boost)
  assert boost.explain().splitlines()[0] == "level O1 for tokens, sequences of 16"
  starts = optax_boost.sequence_length_warmup(16, STEPS).starts
  begins = ", ".join(f"{n} from step {step}" for n, step in zip((2, 4, 8, 16), starts, strict=True))
  assert f"| sequences of {begins} |" in rows["sequence_length_warmup"]
  assert (
    "| a loss that shifts sequences of 16 tokens itself loses the last target of each window;"
    " sequences of 17 lose none" in rows["sequence_length_warmup"]
  )
  for name in ("less_bn", "centralize", "freeze_layers", "average_params"):
    assert rows[name] == "off a model of tokens gains nothing by it"
  for word in ("fn_flag", "param_groups", "BatchNorm", "boost.model", "convol", "image"):
    assert word not in boost.explain()


def test_explain_counts_cut_batches_and_calls_the_schedule_off_before_the_first():
  boost = declared()
  row = rows_of(boost)["sequence_length_warmup"]
  assert row.startswith("off")
  assert "| no batch was cut: call `boost.batch(batch, step)` for each |" in row
  for step in (STEPS - 1, STEPS):  # a training that goes on at full length
    assert boost.batch(BATCH, step) is BATCH
  row = rows_of(boost)["sequence_length_warmup"]
  assert row.startswith("off")
  assert "| 0 of 2 batches were cut |" in row
  boost = declared()
  for step in range(STEPS):
    boost.batch(BATCH, step)
  row = rows_of(boost)["sequence_length_warmup"]
  assert row.startswith("on in level O1")
  assert f"| {boost.length_schedule.starts[-1]} of {STEPS} batches were cut |" in row
  assert boost.length_schedule.starts[-1] == STEPS // 2


def test_a_level_for_tokens_goes_to_the_processes_of_a_loader():
  boost = pickle.loads(pickle.dumps(declared(axes={"real": 1})))
  assert boost.batch(BATCH, 0)["tokens"].shape == (32, 3)


def test_a_loss_is_not_required_and_explain_says_that_windows_were_not_tried():
  boost = declared()
  abstract = jax.eval_shape(models.init)
  for args in ((), (models.loss, models.init()), (models.loss, abstract, BATCH)):
    tx = boost.optimizer(optax.sgd(0.1), *args)
    assert jax.tree.leaves(tx.init(models.init())) == []
    assert "| the loss of windows was not tried: " in rows_of(boost)["sequence_length_warmup"]
  boost.optimizer(optax.sgd(0.1), models.loss, models.init(), BATCH)
  assert "not tried" not in boost.explain()


def test_plain_training_keeps_its_batches_and_takes_the_same_arguments():
  o0 = declared("O0", axes={"mask": (2, 3)})
  assert o0.explain() == "level O0, which changes nothing"
  tx = o0.optimizer(optax.sgd(0.1), masked, models.init(), BATCH | {"mask": PAIRS})
  assert jax.tree.leaves(tx.init(models.init())) == []
  assert o0.batch(BATCH, 0) is BATCH


def masked(params, batch):
  mask = batch["mask"]
  mask = mask[:, None] if mask.ndim == 3 else mask
  return models.mean_loss(models.logits(params, batch["tokens"][:, :-1], mask), batch)


def by_document(params, batch):
  losses = models.logits(params, batch["tokens"][:, :-1]).sum((1, 2))
  return jnp.mean(jnp.sin(losses + batch["document"].reshape(-1)))


def code_loss(params, batch):
  x = params["table"][batch["codes"]].sum(2)
  return jnp.mean((x @ params["out"]) ** 2)


def class_loss(params, batch):
  x = params["table"][batch["tokens"]].mean(1)
  classes = jax.nn.log_softmax(x @ jnp.ones((models.WIDTH, 16)))
  return -jnp.mean(jnp.sum(classes * batch["label"], -1))


PAIRS = np.random.default_rng(0).random((4, 1, 16, 16)) < 0.7
# A batch, its loss, the leaf that must be named.
UNNAMED = {
  "a mask of pairs": (masked, BATCH | {"mask": PAIRS}, "mask"),
  "an id": (by_document, BATCH | {"document": np.arange(4)}, "document"),
  "an id in a column": (by_document, BATCH | {"document": np.arange(4)[:, None]}, "document"),
  "a label of 16 classes": (
    class_loss,
    {"tokens": BATCH["tokens"], "label": np.eye(16, dtype=np.float32)[[0, 5, 9, 14]]},
    "label",
  ),
}


@pytest.mark.parametrize("name", UNNAMED)
def test_a_leaf_that_must_be_named_is_named_by_the_line_of_the_error(name):
  loss, batch, leaf = UNNAMED[name]
  boost = declared()
  with pytest.raises(ValueError, match=f"must say how to cut the leaf '{leaf}'") as error:
    boost.optimizer(optax.sgd(0.1), loss, models.init(), batch)
  with pytest.raises(ValueError, match=f"must say how to cut the leaf '{leaf}'"):
    boost.batch(batch, 0)
  axes = eval(re.search(r"axes=(\{.*?\})", str(error.value))[1])
  boost = declared(axes=axes)
  tx = boost.optimizer(optax.sgd(0.1), loss, models.init(), batch)
  step = optax_boost.make_train_step(loss, tx)
  state = step.init(models.init())
  for i in (0, STEPS - 1):
    short = boost.batch(batch, i)
    length = 2 if i == 0 else 16
    expected = optax_boost.cut_sequences(batch, length, 16, axes)
    jax.tree.map(np.testing.assert_array_equal, short, expected)
    assert {leaf.shape[0] for leaf in jax.tree.leaves(short)} == {64 // length}
    state, metrics = step(state, short)
    assert np.isfinite(metrics["loss"])
  assert rows_of(boost)["sequence_length_warmup"].startswith("on")


def test_codes_of_each_token_need_no_name():
  boost, batch = declared(), {"codes": np.ones((4, 16, 3), np.int32)}
  boost.optimizer(optax.sgd(0.1), code_loss, models.init(), batch)
  assert boost.batch(batch, 0)["codes"].shape == (32, 2, 3)


def test_a_mask_that_looks_like_classes_by_chance_stops_no_training():
  boost, batch = declared(), {"tokens": BATCH["tokens"], "masked": np.ones((4, 16))}
  boost.batch(batch, 0)
  batch["masked"] = np.eye(16)[:4]
  assert boost.batch(batch, 1)["masked"].sum() == 4
  with pytest.raises(ValueError, match=r"'masked' .* each row of which sums to 1"):
    declared().batch(batch, 0)


def sines(length):
  angles = jnp.arange(length)[:, None] / jnp.arange(1, models.WIDTH + 1)
  return jnp.sin(angles)


# How models look positions of the batch up in a table of the length of their input.
LOOKUPS = {
  "NaN past the table": lambda table, i: jnp.take(table, i, axis=0),
  "the last entry past the table": lambda table, i: table[i],
  "clipped": lambda table, i: jnp.take(table, i, axis=0, mode="clip"),
  "in a scan": lambda table, i: jax.lax.scan(lambda c, i: (c, table[i]), 0, i)[1],
  "a slice for each": jax.vmap(
    jax.vmap(lambda table, i: jax.lax.dynamic_slice_in_dim(table, i, 1)[0], (None, 0)), (None, 0)
  ),
  "rematerialized": jax.checkpoint(lambda table, i: jnp.take(table, i, axis=0)),
}
COUNTED = np.broadcast_to(np.arange(16), (4, 16))
PACKED = np.broadcast_to(np.r_[:10, :6], (4, 16))


def with_table(look_up, leaf="positions"):
  def loss(params, batch):
    tokens = batch["tokens"][:, :-1]
    x = params["table"][tokens] + look_up(sines(tokens.shape[1]), batch[leaf])
    return models.mean_loss(x @ params["out"], batch)

  return loss


@pytest.mark.parametrize("positions", [COUNTED, PACKED], ids=["counted", "packed"])
@pytest.mark.parametrize("name", LOOKUPS)
def test_positions_that_run_past_a_table_of_the_models_input_must_be_named(name, positions):
  loss, params = with_table(LOOKUPS[name]), models.init()
  batch = BATCH | {"positions": positions, "segments": np.ones((4, 16), np.int32)}
  with pytest.raises(ValueError, match="of 2 tokens must be finite, with indices in") as error:
    declared().optimizer(optax.sgd(0.1), loss, params, batch)
  assert f", and {loss(params, batch):.3}" in str(error.value)
  assert ". ." not in str(error.value)
  axes = eval(re.search(r"pass `auto_boost` axes=(\{.*?\})", str(error.value))[1])
  assert axes == {"positions": "positions"}
  boost = declared(axes=axes)
  boost.optimizer(optax.sgd(0.1), loss, params, batch)
  for step in (0, 4, 11, STEPS - 1):
    windows = boost.batch(batch, step)
    assert windows["positions"].max() < windows["tokens"].shape[1] - 1
    assert np.isfinite(loss(params, windows))


def test_the_line_names_all_leaves_of_positions_and_only_these():
  def loss(params, batch):
    first = with_table(LOOKUPS["clipped"], "inputs_position")
    second = with_table(LOOKUPS["NaN past the table"], "targets_position")
    return first(params, batch) + second(params, batch)

  batch = BATCH | {"inputs_position": COUNTED, "targets_position": PACKED, "mask": PAIRS}
  with pytest.raises(ValueError, match="with indices in bounds; got out-of-bounds") as error:
    declared(axes={"mask": (2, 3)}).optimizer(optax.sgd(0.1), loss, models.init(), batch)
  axes = eval(re.search(r"pass `auto_boost` axes=(\{.*?\})", str(error.value))[1])
  positions = {"inputs_position": "positions", "targets_position": "positions"}
  assert axes == {"mask": (2, 3)} | positions


def test_positions_within_the_table_keep_their_values():
  def loss(params, batch):
    x = params["table"][batch["tokens"][:, :-1]] + jnp.take(sines(16), batch["positions"], axis=0)
    return models.mean_loss(x @ params["out"], batch)

  boost, batch = declared(), BATCH | {"positions": COUNTED}
  boost.optimizer(optax.sgd(0.1), loss, models.init(), batch)
  windows = boost.batch(batch, 0)
  np.testing.assert_array_equal(windows["positions"][:3], [[0, 1], [2, 3], [4, 5]])
  # Its tokens don't interact, so windows have the loss of whole sequences.
  np.testing.assert_allclose(
    loss(models.init(), windows), loss(models.init(), batch), rtol=16 * np.finfo(np.float32).eps
  )


def test_an_intended_index_out_of_bounds_is_not_an_error():
  def loss(params, batch):
    tokens = batch["tokens"]
    x = params["table"].at[tokens + 7].get(mode="fill", fill_value=0.0)
    return jnp.mean((x @ params["out"]) ** 2)

  declared().optimizer(optax.sgd(0.1), loss, models.init(), {"tokens": BATCH["tokens"]})

  def drops_the_fifth_token(params, batch):
    kept = jnp.zeros(batch["tokens"].shape).at[:, jnp.array(4)].set(1.0, mode="drop")
    return models.mean_loss(models.logits(params, batch["tokens"][:, :-1]), batch) + kept.mean()

  declared().optimizer(optax.sgd(0.1), drops_the_fifth_token, models.init(), BATCH)


def test_a_mean_over_each_sequence_is_refused_if_a_window_is_all_padding():
  def loss(params, batch):
    logits = models.logits(params, batch["tokens"][:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:])
    return jnp.mean((losses * batch["real"]).sum(1) / batch["real"].sum(1))

  batch = BATCH | {"real": (np.arange(16) < 13).astype(np.float32) * np.ones((4, 1), np.float32)}
  with pytest.raises(
    ValueError, match=r"got nan, .* of whole sequences\. Divide a sum over tokens"
  ):
    declared().optimizer(optax.sgd(0.1), loss, models.init(), batch)
  assert math.isfinite(loss(models.init(), batch))


def test_the_first_windows_of_a_flax_model_are_cut_from_the_batch_after_its_state():
  def loss(model, batch):
    return (
      models.nnx_loss(model, batch) + jnp.take(jnp.ones(batch["real"].shape[1]), batch["p"])[0, 1]
    )

  model = models.NnxModel(nnx.Rngs(0))
  split = optax_boost.nnx.split_loss(loss, model)
  declared().optimizer(optax.sgd(0.1), *split, BATCH | {"p": COUNTED % 2})
  with pytest.raises(ValueError, match=r"pass `auto_boost` axes=\{'p': 'positions'\}"):
    declared().optimizer(optax.sgd(0.1), *split, BATCH | {"p": COUNTED + 1})


def fixed_positions(params, batch):
  x = params["table"][batch["tokens"][:, :-1]] + jnp.ones((16, models.WIDTH))
  return jnp.mean((x @ params["out"]) ** 2)


def separate(params, tokens, targets):
  losses = optax.softmax_cross_entropy_with_integer_labels(models.logits(params, tokens), targets)
  return losses.mean()


TOKENS = BATCH["tokens"]


@pytest.mark.parametrize(
  ("loss", "args"),
  [(fixed_positions, (BATCH,)), (separate, (TOKENS[:, :-1], TOKENS[:, 1:]))],
)
def test_a_loss_that_fails_on_windows_fails_with_a_note(loss, args):
  with pytest.raises((ValueError, TypeError)) as error:
    declared().optimizer(optax.sgd(0.1), loss, models.init(), *args)
  note = error.value.__notes__[-1]
  assert "windows of 2 tokens, cut from argument number 1 after the params" in note


def test_leaves_of_tokens_in_one_argument_are_cut_together():
  boost, pair = declared(), (TOKENS[:, :-1], TOKENS[:, 1:])
  boost.optimizer(optax.sgd(0.1), lambda p, pair: separate(p, *pair), models.init(), pair)
  assert [leaf.shape for leaf in boost.batch(pair, 0)] == [(32, 2)] * 2


def test_other_arguments_of_the_loss_stay_whole():
  def loss(params, batch, noise, key):
    return models.loss(params, batch) + noise.sum() * jax.random.normal(key)

  boost = declared()
  boost.optimizer(optax.sgd(0.1), loss, models.init(), BATCH, np.ones((4, 16)), jax.random.key(0))


BAD = [
  (
    {"axes": {"maks": (2, 3)}},
    ValueError,
    r"match no leaf: \['maks'\].* leaves are: mask, real, t",
  ),
  ({"axes": {"mask": 0}}, ValueError, "must name axes of 16 or 17 entries.* got 0 for the leaf"),
  ({"axes": {"mask": "both"}}, TypeError, "got 'both' for 'mask'"),
  ({"axes": [("mask", 2)]}, TypeError, "`axes` must be a dict"),
  (
    {"axes": {"mask": 2}, "sequence_length": None},
    ValueError,
    "None without `sequence_length`; got",
  ),
  ({"config": {}}, ValueError, "`sequence_length` must be None with a `config`.*; got 16"),
  (
    {"sequence_length": 17},
    ValueError,
    "must have a divisor from 3 to 8.* one token more if the l",
  ),
  ({"sequence_length": 16.0}, TypeError, "`sequence_length` must be a whole number; got 16.0"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD)
def test_a_declaration_that_can_not_be_honoured_is_refused(options, error, message):
  def declare(sequence_length=16, **options):
    boost = optax_boost.auto_boost("O1", STEPS, sequence_length=sequence_length, **options)
    boost.optimizer(optax.sgd(0.1), masked, models.init(), BATCH | {"mask": PAIRS})

  with pytest.raises(error, match=message):
    declare(**options)


def test_groups_are_refused_if_nothing_freezes():
  with pytest.raises(
    ValueError, match=r"`groups` must be None at a level for tokens.*freeze_layers\("
  ):
    declared().optimizer(optax.sgd(0.1), params=models.init(), groups=["table", "blocks", "out"])


def test_windows_do_not_depend_on_the_batch_size():
  def shifted(params, tokens):
    losses = optax.softmax_cross_entropy_with_integer_labels(
      models.logits(params, tokens)[:, :-1], tokens[:, 1:]
    )
    return losses.mean()

  for sequences in (7, 8, 15, 16, 17):
    tokens = np.tile(TOKENS[:1, :16], (sequences, 1))
    boost = declared()
    boost.optimizer(optax.sgd(0.1), shifted, models.init(), tokens)
    assert boost.batch(tokens, 0).shape == (8 * sequences, 2)
    assert boost.batch(tokens, 0).size == tokens.size


def test_an_image_model_that_looks_values_up_keeps_its_levels():
  """Categories in a table, or the nearest entry of a codebook, turn no level off."""
  images = np.random.default_rng(0).integers(0, 9, (4, 6, 3)).astype(np.float32)

  def codebook(params, batch):
    x = batch["x"].reshape(4, -1) @ params["body"]
    nearest = jnp.argmin(((x[:, None] - params["table"]) ** 2).sum(-1), 1)
    return jnp.mean((params["table"][nearest] @ params["head"]) ** 2)

  def categories(params, batch):
    x = batch["x"].reshape(4, -1) @ params["body"] + params["table"][batch["class"]].sum(1)
    return jnp.mean((x @ params["head"]) ** 2)

  params = {"body": jnp.ones((18, 5)), "table": jnp.ones((7, 5)), "head": jnp.ones((5, 2))}
  for loss in (codebook, categories):
    boost = optax_boost.auto_boost("O1", total_steps=STEPS)
    batch = {"x": images, "class": np.arange(28).reshape(4, 7) % 7}
    tx = boost.optimizer(optax.sgd(0.1), loss, params, batch)
    assert rows_of(boost)["centralize"].startswith("on")
    assert boost.batch(batch, 0) is batch
    optax_boost.averaged_params(tx.init(params), params)

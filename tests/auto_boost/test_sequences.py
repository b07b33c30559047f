"""Levels on models of tokens: which batches they cut, and what they leave off."""

import functools
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


@pytest.mark.parametrize("form", ["jax", "linen", "nnx"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_level_finds_the_tokens_that_the_loss_looks_up(level, form):
  boost = optax_boost.auto_boost(level, total_steps=STEPS)
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


def test_sequences_are_full_from_the_middle_on_at_o1_and_later_at_o2():
  boosts = [
    optax_boost.auto_boost(level, total_steps=1000, sequence_length=128) for level in ("O1", "O2")
  ]
  assert [boost.length_schedule.starts[-1] for boost in boosts] == [500, 750]
  assert boosts[0].length_schedule == optax_boost.sequence_length_warmup(128, 1000)


def test_it_explains_lengths_steps_and_why():
  boost = optax_boost.auto_boost("O1", total_steps=STEPS)
  boost.optimizer(optax.adamw(1e-3), models.loss, models.init(), BATCH)
  rows = rows_of(boost)
  starts = optax_boost.sequence_length_warmup(
    16, STEPS, warmup_fraction=boost.on["sequence_length_warmup"]["warmup_fraction"]
  ).starts
  begins = ", ".join(f"{n} from step {step}" for n, step in zip((2, 4, 8, 16), starts, strict=True))
  row = rows["sequence_length_warmup"]
  assert row.startswith("on in level O1, where the loss looks tokens up")
  assert row.endswith(f"| the loss looks 'tokens' up; sequences of {begins}")
  for name in ("centralize", "freeze_layers", "average_params"):
    assert rows[name].startswith("off")
    assert rows[name].endswith("| a model of tokens gains nothing by it")
  assert "BatchNorm" not in boost.explain()
  assert "`boost.model`" not in rows["less_bn"]


def test_a_given_length_decides_without_a_trace():
  boost = optax_boost.auto_boost("O1", total_steps=STEPS, sequence_length=16)
  assert boost.batch(BATCH, 0)["tokens"].shape == (32, 3)
  tx = boost.optimizer(optax.sgd(0.1))
  assert jax.tree.leaves(tx.init(models.init())) == []
  row = rows_of(boost)["sequence_length_warmup"]
  assert row.startswith("on in level O1, for `sequence_length` is given")
  with pytest.raises(ValueError, match="has no axis of 16 or 17 tokens"):
    boost.batch({"x": np.ones((4, 9))}, 0)


def test_plain_training_and_other_models_keep_their_batches():
  o0 = optax_boost.auto_boost("O0")
  o0.optimizer(optax.sgd(0.1), models.loss, models.init(), BATCH)
  assert o0.batch(BATCH, 0) is BATCH
  image = {"x": np.ones((4, 6)), "y": np.zeros((4, 16), np.int32)}
  boost = optax_boost.auto_boost("O1", total_steps=STEPS)
  params = {"body": jnp.ones((6, 5)), "head": jnp.ones((5, 16))}
  loss = lambda p, b: jnp.mean((b["x"] @ p["body"] @ p["head"] - b["y"]) ** 2)  # noqa: E731
  tx = boost.optimizer(optax.sgd(0.1), loss, params, image)
  assert boost.batch(image, 0) is image
  row = rows_of(boost)["sequence_length_warmup"]
  assert row.startswith("off")
  assert "whole batches: the loss looks no tokens of a batch up in its params" in row
  optax_boost.averaged_params(tx.init(params), params)  # an average is kept


def classify(params, batch):
  x = params["table"][batch["tokens"]].mean(1)
  logits = x @ params["out"]
  return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def two_tables(params, batch):
  x = params["table"][batch["source"]] + params["table"][batch["target"]]
  return jnp.mean((x @ params["out"]) ** 2)


def fixed_positions(params, batch):
  x = params["table"][batch["tokens"][:, :-1]] + jnp.ones((16, models.WIDTH))
  return jnp.mean((x @ params["out"]) ** 2)


TOKENS = BATCH["tokens"]
WHOLE = {
  "a label of each sequence": (
    classify,
    {"tokens": TOKENS[:, :16], "label": np.zeros(4, np.int32)},
    "'label' of shape (4,) has no axis of 16 or 17 tokens",
  ),
  "two sequences": (
    two_tables,
    {"source": TOKENS[:, 1:], "target": TOKENS[:, :-1]},
    "the loss looks 'source' and 'target' up; pass `sequence_length=16` to `auto_boost` if they",
  ),
  "positions of one length": (fixed_positions, {"tokens": TOKENS}, "of 17 tokens: "),
  "a prime length": (
    models.loss,
    {"tokens": TOKENS[:, :14], "real": np.ones((4, 13), np.float32)},
    "`full_length` must have a divisor from 2 to 6",
  ),
}


def has_only_the_users_optimizer(boost, tx):
  """Whether all methods are off, the optimizer's state is the user's, and `explain` says so."""
  rows = rows_of(boost)
  return (
    jax.tree.leaves(tx.init(models.init())) == []
    and all(row.startswith("off") for row in rows.values())
    and rows["centralize"].endswith("| a model of tokens gains nothing by it")
  )


@pytest.mark.parametrize("name", WHOLE)
def test_batches_that_windows_would_change_stay_whole_with_a_reason(name):
  loss, batch, reason = WHOLE[name]
  boost = optax_boost.auto_boost("O1", total_steps=STEPS)
  with pytest.warns(optax_boost.NoEffectWarning, match="O1 turns nothing on for this model of tok"):
    tx = boost.optimizer(optax.sgd(0.1), loss, models.init(), batch)
  assert boost.batch(batch, 0) is batch
  assert reason in rows_of(boost)["sequence_length_warmup"]
  assert has_only_the_users_optimizer(boost, tx)
  with pytest.raises(ValueError, match=r"`axes` must be of batches that are cut; got whole batc"):
    boost.batch(batch, 0, axes={".*": 1})


def masked(params, batch):
  mask = batch["mask"]
  mask = mask[:, None] if mask.ndim == 3 else mask
  return models.mean_loss(models.logits(params, batch["tokens"][:, :-1], mask), batch)


def by_document(params, batch):
  losses = models.logits(params, batch["tokens"][:, :-1]).sum((1, 2))
  return jnp.mean(jnp.sin(losses + batch["document"].reshape(-1)))


def with_positions(params, batch):
  x = params["table"][batch["tokens"][:, :-1]] + params["table"][batch["positions"] % 7]
  return models.mean_loss(x @ params["out"], batch)


def of_codes(params, batch):
  x = params["table"][batch["codes"]].sum(2)
  return jnp.mean((x @ params["out"]) ** 2)


PAIRS = np.random.default_rng(0).random((4, 1, 16, 16)) < 0.7
SEGMENTS = np.broadcast_to(np.arange(16), (4, 16))
# A batch, its loss, the leaf that `explain` names.
SETTLED = {
  "a mask of pairs": (masked, BATCH | {"mask": PAIRS}, "mask"),
  "a mask that all share": (masked, BATCH | {"mask": PAIRS[0, 0]}, "mask"),
  "positions that all share": (with_positions, BATCH | {"positions": np.arange(16)}, "positions"),
  "an id": (by_document, BATCH | {"document": np.arange(4)}, "document"),
  "an id in a column": (by_document, BATCH | {"document": np.arange(4)[:, None]}, "document"),
  "two leaves": (with_positions, BATCH | {"positions": SEGMENTS}, "positions"),
  "codes": (of_codes, {"codes": np.ones((4, 16, 3), np.int32)}, "codes"),
}


@pytest.mark.parametrize("name", SETTLED)
def test_the_advice_of_explain_is_a_call_that_works(name):
  loss, batch, leaf = SETTLED[name]
  boost = optax_boost.auto_boost("O1", total_steps=STEPS)
  with pytest.warns(optax_boost.NoEffectWarning):
    tx = boost.optimizer(optax.sgd(0.1), loss, models.init(), batch)
  assert has_only_the_users_optimizer(boost, tx)
  row = rows_of(boost)["sequence_length_warmup"]
  assert f"'{leaf}'" in row

  options, axes = {}, None
  if shared := re.search(r"own by (np\.broadcast_to\(leaf, \(.*?\)\))", row):
    batch = batch | {leaf: eval(shared[1], {"np": np, "leaf": batch[leaf]})}
  if found := re.search(r"axes=(\{.*?\})", row):
    assert row.endswith("Pass `axes` to `boost.optimizer`.")
    axes = eval(found[1])
  if "`sequence_length" in row:
    options["sequence_length"] = int(next(iter(re.findall(r"`sequence_length=(\d+)`", row)), 16))
  if shared and axes is None:  # then both leaves are looked up
    options["sequence_length"] = 16
  boost = optax_boost.auto_boost("O1", total_steps=STEPS, **options)
  tx = boost.optimizer(optax.sgd(0.1), loss, models.init(), batch, axes=axes)
  step = optax_boost.make_train_step(loss, tx)
  state = step.init(models.init())
  for i in (0, STEPS - 1):
    short = boost.batch(batch, i)
    length = 2 if i == 0 else 16
    expected = optax_boost.cut_sequences(batch, length, 16, axes=axes)
    jax.tree.map(np.testing.assert_array_equal, short, expected)
    assert {leaf.shape[0] for leaf in jax.tree.leaves(short)} == {64 // length}
    state, metrics = step(state, short)
    assert np.isfinite(metrics["loss"])
  assert rows_of(boost)["sequence_length_warmup"].startswith("on")


def test_a_loss_whose_tokens_are_several_arguments_is_told_to_take_one():
  def separate(params, tokens, targets):
    losses = optax.softmax_cross_entropy_with_integer_labels(models.logits(params, tokens), targets)
    return losses.mean()

  boost = optax_boost.auto_boost("O1", total_steps=STEPS)
  with pytest.warns(optax_boost.NoEffectWarning, match="so put all leaves of tokens into it"):
    boost.optimizer(optax.sgd(0.1), separate, models.init(), TOKENS[:, 1:], TOKENS[:, :-1])
  boost = optax_boost.auto_boost("O1", total_steps=STEPS)
  pair = (TOKENS[:, 1:], TOKENS[:, :-1])
  boost.optimizer(optax.sgd(0.1), lambda p, pair: separate(p, *pair), models.init(), pair)
  assert boost.batch(pair, 0)[1].shape == (32, 2)


BAD_AXES = [
  ({"maks": (2, 3)}, ValueError, r"match no leaf: \['maks'\].* leaves are: mask, real, tokens"),
  ({"mask": 0}, ValueError, r"must be of batches that are cut; got whole .* `axes` must name axes"),
  ({"mask": (2, 3), "tokens": "keep"}, ValueError, "got 'keep' for the leaf 'tokens'"),
  ({"mask": "both"}, TypeError, "got 'both' for 'mask'"),
  ([("mask", 2)], TypeError, "`axes` must be a dict"),
]


@pytest.mark.parametrize(("axes", "error", "message"), BAD_AXES)
def test_axes_that_cut_no_batch_are_an_error(axes, error, message):
  boost = optax_boost.auto_boost("O1", total_steps=STEPS)
  with pytest.raises(error, match=message):
    boost.optimizer(optax.sgd(0.1), masked, models.init(), BATCH | {"mask": PAIRS}, axes=axes)


def test_plain_training_takes_axes_without_effect():
  batch = BATCH | {"mask": PAIRS}
  o0 = optax_boost.auto_boost("O0")
  o0.optimizer(optax.sgd(0.1), masked, models.init(), batch, axes={"mask": (2, 3)})
  assert o0.batch(batch, 0, axes={"mask": (2, 3)}) is batch


def test_an_image_model_that_looks_values_up_keeps_its_levels():
  """A class of each image, or the nearest entry of a codebook, isn't a token."""
  images = np.random.default_rng(0).integers(0, 9, (4, 3, 3, 2)).astype(np.uint8)

  def conditional(params, batch):
    x = batch["x"].reshape(4, -1) @ params["body"] + params["table"][batch["class"]].reshape(4, -1)
    return jnp.mean((x @ params["head"]) ** 2)

  def codebook(params, batch):
    x = batch["x"].reshape(4, -1) @ params["body"]
    nearest = jnp.argmin(((x[:, None] - params["table"]) ** 2).sum(-1), 1)
    return jnp.mean((params["table"][nearest] @ params["head"]) ** 2)

  params = {"body": jnp.ones((18, 5)), "table": jnp.ones((7, 5)), "head": jnp.ones((5, 2))}
  for loss, classes in (
    (conditional, np.arange(4)),
    (conditional, np.ones((4, 1), int)),
    (codebook, np.arange(4)),
  ):
    boost = optax_boost.auto_boost("O1", total_steps=STEPS)
    tx = boost.optimizer(optax.sgd(0.1), loss, params, {"x": images, "class": classes})
    assert rows_of(boost)["centralize"].startswith("on")
    optax_boost.averaged_params(tx.init(params), params)


def test_a_loss_that_reads_all_tokens_has_windows_without_overlap():
  def shifted(params, tokens):
    losses = optax.softmax_cross_entropy_with_integer_labels(
      models.logits(params, tokens)[:, :-1], tokens[:, 1:]
    )
    return losses.mean()

  boost = optax_boost.auto_boost("O1", total_steps=STEPS)
  boost.optimizer(optax.sgd(0.1), shifted, models.init(), TOKENS[:, 1:])
  assert boost.batch(TOKENS[:, 1:], 0).shape == (32, 2)


def test_a_batch_before_the_optimizer_is_an_error_with_the_way_out():
  boost = optax_boost.auto_boost("O1", total_steps=STEPS)
  with pytest.raises(ValueError, match=r"call `boost.optimizer\(tx, loss_fn.* or pass `sequence_"):
    boost.batch(BATCH, 0)


def test_given_groups_still_freeze():
  boost = optax_boost.auto_boost("O1", total_steps=STEPS)
  tx = boost.optimizer(
    optax.sgd(0.1), models.loss, models.init(), BATCH, groups=["table", "blocks|out"]
  )
  assert rows_of(boost)["freeze_layers"].startswith("on")
  step = optax_boost.make_train_step(models.loss, tx)
  state, depths = step.init(models.init()), []
  for batch in models.batches(STEPS):
    # All of the last length, so that only depths need programs.
    state, metrics = step(state, boost.batch(batch, STEPS - 1))
    depths.append(int(metrics["frozen_groups"]))
  assert set(depths) == {0, 1}

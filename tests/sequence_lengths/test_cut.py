"""Cutting a batch into windows, beside loops over sequences and windows in NumPy."""

import itertools
import re

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
import numpy as np
import pytest

from optax_boost import cut_sequences
from tests import meshes

B, FULL = 3, 12
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 99, (B, FULL + 1)).astype(np.int32)
BATCHES = {
  "tokens of L + 1": TOKENS,
  "inputs and targets": {"inputs": TOKENS[:, :-1], "targets": TOKENS[:, 1:]},
  "a tuple": (TOKENS[:, :-1], TOKENS[:, 1:], RNG.random((B, FULL)) < 0.8),
  "packed": {
    "tokens": TOKENS,
    "segment_ids": np.repeat([[1, 2]], FULL // 2, 1).repeat(B, 0),
    "positions": np.broadcast_to(np.arange(FULL), (B, FULL)),
    "weights": RNG.random((B, FULL)).astype(np.float32),
  },
  "features": {"x": RNG.random((B, FULL, 2, 5)), "y": RNG.integers(0, 9, (B, FULL))},
  "with scalars": {"tokens": TOKENS, "weight": 0.5, "temperature": np.float32(1), "name": "train"},
}


def by_loops(x, length):
  """Each sequence's windows after one another; a leaf of L + 1 tokens overlaps by one."""
  if np.ndim(x) < 2:
    return x
  extra = x.shape[1] - FULL
  rows = [row[i : i + length + extra] for row in x for i in range(0, FULL, length)]
  return np.stack(rows)


def assert_equal_trees(left, right):
  assert jax.tree.structure(left) == jax.tree.structure(right)
  for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
    assert np.asarray(a).dtype == np.asarray(b).dtype
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("length", [1, 3, 4, 6, 12])
@pytest.mark.parametrize("name", BATCHES)
def test_windows_equal_the_windows_of_a_loop_over_sequences(name, length):
  batch = BATCHES[name]
  expected = jax.tree.map(lambda x: by_loops(x, length), batch)
  cut = cut_sequences(batch, length, FULL)
  assert_equal_trees(cut, expected)
  for leaf, whole in zip(jax.tree.leaves(cut), jax.tree.leaves(batch), strict=True):
    assert isinstance(leaf, type(whole))  # NumPy in, NumPy out


@pytest.mark.parametrize("length", [3, 12])
@pytest.mark.parametrize("name", ["tokens of L + 1", "a tuple", "packed"])
def test_jax_arrays_are_cut_alike_eager_and_under_jit(name, length):
  batch = jax.tree.map(jnp.asarray, BATCHES[name])
  expected = jax.tree.map(lambda x: by_loops(np.asarray(x), length), batch)
  assert_equal_trees(cut_sequences(batch, length, FULL), expected)
  jitted = jax.jit(lambda batch: cut_sequences(batch, length, FULL))
  assert_equal_trees(jitted(batch), expected)


def test_each_token_is_predicted_once_and_with_its_own_target():
  tokens = np.arange(B * (FULL + 1)).reshape(B, FULL + 1)
  pairs = {(int(a), int(b)) for row in tokens for a, b in itertools.pairwise(row)}
  for length in (2, 3, 6):
    windows = cut_sequences(tokens, length, FULL)
    found = [(int(a), int(b)) for row in windows for a, b in itertools.pairwise(row)]
    assert len(found) == B * FULL
    assert set(found) == pairs


def test_masks_of_pairs_keep_the_blocks_of_the_windows():
  mask = RNG.random((B, 1, FULL, FULL)) < 0.5
  batch = {"tokens": TOKENS, "mask": mask}
  cut = cut_sequences(batch, 4, FULL, axes={"mask": (2, 3)})
  blocks = [m[:, i : i + 4, i : i + 4] for m in mask for i in range(0, FULL, 4)]
  np.testing.assert_array_equal(cut["mask"], np.stack(blocks))


def test_values_of_a_sequence_are_repeated_and_others_kept():
  batch = {"tokens": TOKENS, "language": np.arange(B), "prior": np.ones(99)}
  cut = cut_sequences(batch, 4, FULL, axes={"language": "repeat", "prior": "keep"})
  np.testing.assert_array_equal(cut["language"], np.repeat(np.arange(B), 3))
  assert cut["prior"] is batch["prior"]


def test_a_leaf_may_be_cut_along_another_axis_and_micro_batches_by_vmap():
  heads = RNG.random((B, 2, FULL))
  cut = cut_sequences({"x": heads, "tokens": TOKENS}, 4, FULL, {"x": -1})
  expected = by_loops(np.moveaxis(heads, 2, 1), 4)
  np.testing.assert_array_equal(np.moveaxis(cut["x"], 2, 1), expected)
  micro = np.stack([TOKENS, TOKENS + 1])  # [micro-batches, B, L + 1]
  cut = jax.vmap(lambda batch: cut_sequences(batch, 4, FULL))(micro)
  np.testing.assert_array_equal(cut[1], by_loops(TOKENS + 1, 4))


def test_batches_as_long_as_the_sequences_are_not_ambiguous():
  square = np.arange(144).reshape(12, 12)
  assert cut_sequences(square, 4, 12).shape == (36, 4)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("jitted", [False, True])
def test_a_batch_sharded_over_its_sequences_stays_so_without_communication(kind, jitted):
  mesh = meshes.mesh((8,), ("data",), kind)
  batch = {"tokens": np.arange(16 * 13).reshape(16, 13), "mask": np.ones((16, 12, 3))}
  sharded = jax.device_put(batch, NamedSharding(mesh, P("data")))

  def cut(batch):
    return cut_sequences(batch, 4, 12)

  with jax.set_mesh(mesh):
    result = (jax.jit(cut) if jitted else cut)(sharded)
    text = jax.jit(cut).lower(sharded).compile().as_text()
  assert_equal_trees(jax.device_get(result), cut(jax.device_get(sharded)))
  for leaf in jax.tree.leaves(result):
    assert {shard.data.shape[0] for shard in leaf.addressable_shards} == {6}
  assert not any(
    word in text for word in ("all-gather", "all-to-all", "all-reduce", "collective-permute")
  )


REFUSED = [
  ((TOKENS, 5, FULL), {}, "`length` must divide the full length 12.*got 5"),
  (
    ({"t": np.ones((B, 2 * FULL)), "y": np.ones(B)}, 4, FULL),
    {},
    r"must have a leaf that is cut, with 12 or 13 .* got \{'t': \(3, 24\), 'y': \(3,\)\}",
  ),
  (
    ({"t": TOKENS, "p": np.ones((1, FULL))}, 4, FULL),
    {},
    r"equally many sequences .* got \{'p': 1, 't': 3\}.* np.broadcast_to",
  ),
  (
    ({"t": TOKENS, "y": np.ones(2)}, 4, FULL),
    {"axes": {"y": "repeat"}},
    r"equally many sequences .* got \{'t': 3, 'y': 2\}",
  ),
  (({"t": TOKENS}, 4, FULL), {"axes": {"t": "repeat"}}, "must have a leaf that is cut"),
  (({"t": TOKENS}, 4, FULL), {"axes": {"t": 0}}, r"axis 0 not among them.*; got 0 for the leaf"),
  (({"t": TOKENS}, 4, FULL), {"axes": {"t": 7}}, r"must name axes of 12 or 13 entries.* got 7"),
  (({"t": TOKENS}, 4, FULL), {"axes": {"t": (1, 1)}}, r"got \(1, 1\) for the leaf 't'"),
  (
    ({"t": TOKENS, "p": np.ones((B, 2, FULL))}, 4, FULL),
    {"axes": {"p": "positions"}},
    r"'positions' needs them along axis 1; got 'positions' for the leaf 'p' of shape \(3, 2, 12\)",
  ),
]
CLASSES = np.eye(FULL, dtype=np.float32)[[3, 0, 7]]
# A leaf without a default beside tokens, the words that name it, the line to paste, its windows.
UNNAMED = {
  "a value of each sequence": (np.arange(B), "shape (3,)", "repeat", np.repeat(np.arange(B), 3)),
  "a value in a column": (
    np.arange(B)[:, None],
    "shape (3, 1)",
    "repeat",
    np.repeat(np.arange(B), 3)[:, None],
  ),
  "an array that isn't of sequences": (np.arange(99), "shape (99,)", "keep", np.arange(99)),
  "features first": (
    np.arange(2 * B * FULL).reshape(B, 2, FULL),
    "shape (3, 2, 12)",
    2,
    np.stack([x[:, i : i + 4] for x in np.arange(72).reshape(B, 2, FULL) for i in (0, 4, 8)]),
  ),
  "a mask of pairs": (
    np.tri(FULL)[None, None].repeat(B, 0),
    "shape (3, 1, 12, 12)",
    (2, 3),
    np.tri(4)[None, None].repeat(3 * B, 0),
  ),
  "one-hot labels of L classes": (
    CLASSES,
    "shape (3, 12), each row of which sums to 1",
    "repeat",
    CLASSES.repeat(3, 0),
  ),
  "probabilities of L classes": (
    np.full((B, FULL), 1 / FULL, np.float32),
    "shape (3, 12), each row of which sums to 1",
    "repeat",
    np.full((3 * B, FULL), 1 / FULL, np.float32),
  ),
}


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("name", UNNAMED)
def test_a_leaf_without_a_default_is_named_with_a_line_that_works(name, array):
  leaf, words, how, expected = UNNAMED[name]
  batch = {"tokens": TOKENS, "a/b.c": array(leaf)}
  with pytest.raises(ValueError, match=r"must say how to cut the leaf 'a/b\.c' of") as error:
    cut_sequences(batch, 4, FULL)
  with pytest.raises(ValueError, match="must say how to cut"):  # before the first short step
    cut_sequences(batch, FULL, FULL)
  assert words in str(error.value)
  axes = eval(re.search(r"axes=(\{.*?\})", str(error.value))[1])
  assert list(axes.values()) == [how]
  cut = cut_sequences(batch, 4, FULL, axes)
  np.testing.assert_array_equal(cut["a/b.c"], expected)
  np.testing.assert_array_equal(cut["tokens"], by_loops(TOKENS, 4))


def test_one_line_names_all_leaves_and_what_was_named_before():
  mask = np.ones((B, 1, FULL, FULL))
  batch = {"label": np.arange(B), "mask": mask, "x": {"label": TOKENS, "mask": mask[:, 0]}}
  with pytest.raises(ValueError, match=r"leaf 'label' .*; the leaf 'mask' .*: by") as error:
    cut_sequences(batch, 4, FULL, {"x/mask": (1, 2)})
  axes = eval(re.search(r"axes=(\{.*?\})", str(error.value))[1])
  assert axes == {"/label": "repeat", "/mask": (2, 3), "x/mask": (1, 2)}
  cut = cut_sequences(batch, 4, FULL, axes)
  shapes = {"label": (9,), "mask": (9, 1, 4, 4), "x": {"label": (9, 5), "mask": (9, 4, 4)}}
  assert jax.tree.map(np.shape, cut) == shapes


def test_labels_of_each_token_of_L_classes_are_named():
  labels = np.eye(FULL)[TOKENS[:, 1:] % FULL]
  with pytest.raises(ValueError, match=r"leaf 'labels' of shape \(3, 12, 12\): by default axis 1"):
    cut_sequences({"tokens": TOKENS, "labels": labels}, 4, FULL)
  cut = cut_sequences({"tokens": TOKENS, "labels": labels}, 4, FULL, {"labels": 1})
  np.testing.assert_array_equal(cut["labels"].argmax(-1), by_loops(TOKENS[:, 1:] % FULL, 4))


@pytest.mark.parametrize("sequences", [1, 2, 11, 12, 13, 14])
def test_windows_do_not_depend_on_the_number_of_sequences(sequences):
  tokens = RNG.integers(0, 99, (sequences, FULL))
  cut = cut_sequences({"tokens": tokens, "id": np.arange(sequences)}, 4, FULL, {"id": "repeat"})
  np.testing.assert_array_equal(cut["tokens"], by_loops(tokens, 4))
  np.testing.assert_array_equal(cut["id"], np.arange(sequences).repeat(3))


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.float32])
@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
def test_positions_that_are_named_begin_at_zero_in_each_window(array, dtype):
  positions = np.array(
    [
      [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11],
      [0, 1, 2, 3, 4, 5, 0, 1, 2, 0, 1, 2],  # three packed sequences
      [0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6],  # padding at the left
    ],
    dtype,
  )
  batch = {"tokens": TOKENS, "positions": array(positions)}
  cut = cut_sequences(batch, 4, FULL, {"positions": "positions"})["positions"]
  assert cut.dtype == dtype
  assert isinstance(cut, type(batch["positions"]))
  np.testing.assert_array_equal(
    cut,
    [
      *([0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3]),
      *([0, 1, 2, 3], [0, 1, 0, 1], [0, 0, 1, 2]),
      *([0, 0, 0, 0], [0, 0, 1, 2], [0, 1, 2, 3]),
    ],
  )
  np.testing.assert_array_equal(cut_sequences(batch, 4, FULL)["positions"], by_loops(positions, 4))


TEXT = np.array([[5, 8, 2, 9, 4, 7, 1, 3], [6, 2, 8, 1, 9, 3, 0, 0]])
EIGHT = np.broadcast_to(np.arange(8), (2, 8))
# Batches of others, length 8, in windows of 4: `axes`, and the windows.
OTHERS = {
  "MaxText's, packed": (
    {
      "inputs": TEXT,
      "targets": np.roll(TEXT, -1, 1),
      "inputs_position": np.array([[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 0, 0]]),
      "inputs_segmentation": np.array([[1, 1, 1, 2, 2, 2, 2, 2], [1, 1, 1, 1, 1, 1, 0, 0]]),
    },
    {"inputs_position": "positions"},
    {
      "inputs": [[5, 8, 2, 9], [4, 7, 1, 3], [6, 2, 8, 1], [9, 3, 0, 0]],
      "targets": [[8, 2, 9, 4], [7, 1, 3, 5], [2, 8, 1, 9], [3, 0, 0, 6]],
      "inputs_position": [[0, 1, 2, 0], [0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 0, 0]],
      "inputs_segmentation": [[1, 1, 1, 2], [2, 2, 2, 2], [1, 1, 1, 1], [1, 1, 0, 0]],
    },
  ),
  "T5X's, of two lengths": (
    {
      "encoder_input_tokens": TEXT[:, :3],
      "decoder_input_tokens": np.pad(TEXT[:, :-1], ((0, 0), (1, 0))),
      "decoder_target_tokens": TEXT,
      "decoder_loss_weights": (TEXT > 0).astype(np.float32),
    },
    {"encoder_input_tokens": "repeat"},
    {
      "encoder_input_tokens": [[5, 8, 2], [5, 8, 2], [6, 2, 8], [6, 2, 8]],
      "decoder_input_tokens": [[0, 5, 8, 2], [9, 4, 7, 1], [0, 6, 2, 8], [1, 9, 3, 0]],
      "decoder_target_tokens": [[5, 8, 2, 9], [4, 7, 1, 3], [6, 2, 8, 1], [9, 3, 0, 0]],
      "decoder_loss_weights": [[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0]],
    },
  ),
  "Hugging Face's": (
    {
      "input_ids": TEXT,
      "attention_mask": (TEXT > 0).astype(np.int64),
      "labels": np.where(TEXT > 0, TEXT, -100),
      "position_ids": EIGHT,
      "index": np.array([70, 71]),
    },
    {"position_ids": "positions", "index": "repeat"},
    {
      "input_ids": [[5, 8, 2, 9], [4, 7, 1, 3], [6, 2, 8, 1], [9, 3, 0, 0]],
      "attention_mask": [[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0]],
      "labels": [[5, 8, 2, 9], [4, 7, 1, 3], [6, 2, 8, 1], [9, 3, -100, -100]],
      "position_ids": [[0, 1, 2, 3]] * 4,
      "index": [70, 70, 71, 71],
    },
  ),
  "tokens with a mask of padding in pairs": (
    {"tokens": TEXT, "mask": (TEXT > 0)[:, None, None, :] & np.tri(8, dtype=bool)},
    {"mask": (2, 3)},
    {
      "tokens": [[5, 8, 2, 9], [4, 7, 1, 3], [6, 2, 8, 1], [9, 3, 0, 0]],
      "mask": [
        *[[[[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]]] * 3,
        [[[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0]]],
      ],
    },
  ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_batches_of_other_libraries_are_cut_as_by_hand(name):
  batch, axes, expected = OTHERS[name]
  cut = cut_sequences(batch, 4, 8, axes)
  assert cut.keys() == batch.keys()
  for leaf, windows in expected.items():
    np.testing.assert_array_equal(cut[leaf], windows, err_msg=leaf)
  jitted = jax.jit(lambda batch: cut_sequences(batch, 4, 8, axes))(batch)
  jax.tree.map(np.testing.assert_array_equal, jitted, cut)


def test_leaves_of_other_lengths_and_leaves_of_pairs_must_be_named():
  unnamed = {
    "MaxText's, packed": set(),
    "T5X's, of two lengths": {"encoder_input_tokens"},
    "Hugging Face's": {"index"},
    "tokens with a mask of padding in pairs": {"mask"},
  }
  for name, (batch, axes, _) in OTHERS.items():
    positions = {leaf: how for leaf, how in axes.items() if how == "positions"}
    asked = set()
    try:
      cut_sequences(batch, 4, 8, positions)
    except ValueError as error:
      asked = set(re.findall(r"the leaf '(\w+)'", str(error)))
    assert asked == unnamed[name]


@pytest.mark.parametrize(
  ("pattern", "hint"), [("mask", "leaves are: tokens, weights"), ("token", "Write '*token*'")]
)
def test_a_pattern_that_matches_no_leaf_is_an_error_that_says_what_to_write(pattern, hint):
  with pytest.raises(ValueError, match=f"{pattern}.*{re.escape(hint)}"):
    cut_sequences({"tokens": TOKENS, "weights": TOKENS}, 4, FULL, axes={pattern: 1})


@pytest.mark.parametrize(("arguments", "keywords", "message"), REFUSED)
def test_a_batch_that_can_not_be_cut_is_refused(arguments, keywords, message):
  with pytest.raises(ValueError, match=message):
    cut_sequences(*arguments, **keywords)
  # At full length, too: a training must not fail at its first short step only.
  whole = (arguments[0], FULL, FULL)
  if arguments[1] == 4:  # a divisor
    with pytest.raises(ValueError, match=message):
      cut_sequences(*whole, **keywords)


def test_arguments_of_other_kinds_are_refused():
  class Foreign:
    shape = (B, FULL)

  with pytest.raises(
    TypeError, match="must hold NumPy or JAX arrays; got the leaf 'x' of type For"
  ):
    cut_sequences({"x": Foreign()}, 4, FULL)
  for axes in ({"t": "both"}, {"t": (1, 2, 3)}, {"t": 1.0}, {"t": None}, {"t": True}):
    with pytest.raises(TypeError, match=r"`axes` must give each pattern an axis.*got .* for 't'"):
      cut_sequences({"t": TOKENS}, 4, FULL, axes=axes)
  with pytest.raises(
    TypeError, match=r"'positions' must be of numbers; got the leaf 't' of dtype b"
  ):
    cut_sequences({"t": TOKENS > 3}, 4, FULL, axes={"t": "positions"})
  with pytest.raises(TypeError, match="length"):
    jax.jit(lambda n: cut_sequences(TOKENS, n, FULL))(4)

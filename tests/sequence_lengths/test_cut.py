"""Cutting a batch into windows, beside loops over sequences and windows in NumPy."""

import itertools
import re

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from optax_boost import cut_sequences

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
def test_windows_are_those_of_a_loop_over_sequences(name, length):
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


def test_sequences_may_lie_along_another_axis():
  across = np.moveaxis(TOKENS[None], 1, 2)  # [1, L + 1, B]
  cut = cut_sequences({"x": across}, 4, FULL, batch_axis=2)
  np.testing.assert_array_equal(np.moveaxis(cut["x"], 2, 1)[0], by_loops(TOKENS, 4))
  micro = np.stack([TOKENS, TOKENS + 1])  # [micro-batches, B, L + 1]
  cut = cut_sequences(micro, 4, FULL, batch_axis=1)
  np.testing.assert_array_equal(cut[1], by_loops(TOKENS + 1, 4))


def test_batches_as_long_as_the_sequences_are_no_ambiguity():
  square = np.arange(144).reshape(12, 12)
  assert cut_sequences(square, 4, 12).shape == (36, 4)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("jitted", [False, True])
def test_a_batch_sharded_over_its_sequences_stays_so_without_communication(axis_type, jitted):
  mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
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
  (({"t": TOKENS, "y": np.ones((B, 7))}, 4, FULL), {}, r"leaf 'y' of shape \(3, 7\) has no axis"),
  (
    ({"t": TOKENS, "label": np.ones(B)}, 4, FULL),
    {},
    r"'label' of shape \(3,\) has no axis of 12 or 13 tokens. Say axes=\{'label': 'repeat'\} for",
  ),
  (
    ({"t": TOKENS, "m": np.ones((B, FULL, FULL))}, 4, FULL),
    {},
    r"has the axes 1, 2, which could all be .*axes=\{'m': \(1, 2\)\} if it is a mask of pairs",
  ),
  (
    ({"t": TOKENS, "p": np.ones((1, FULL))}, 4, FULL),
    {},
    r"3 sequences in each leaf; the leaf 'p' .* has one, .* np.broadcast_to\(leaf, \(3, 12\)\)",
  ),
  (
    ({"t": TOKENS, "u": TOKENS[:2]}, 4, FULL),
    {},
    "equally many sequences in all leaves, along axis 0; got 3 in 't', 2 in 'u'",
  ),
  (
    ({"t": np.ones((B, 2 * FULL)), "u": TOKENS}, 4, FULL),
    {},
    "the leaf 't' .* has no axis of 12 or 13 .* `full_length` must be their number",
  ),
  (({"y": np.ones(3)}, 4, FULL), {"axes": {"y": "keep"}}, "must have a leaf with an axis of 12"),
  (({"t": TOKENS, "u": TOKENS}, 4, FULL), {"axes": {"t": "keep"}}, "got 'keep' for the leaf 't'"),
  (({"t": TOKENS}, 4, FULL), {"axes": {"t": 0}}, r"other than `batch_axis` 0; got 0"),
  (({"t": TOKENS}, 4, FULL), {"axes": {"t": 7}}, r"`axes` must name axes of 12 or 13"),
  (({"t": TOKENS}, 4, FULL), {"axes": {"t": (1, 1)}}, r"got \(1, 1\) for the leaf 't'"),
]


# A leaf that all sequences share, beside tokens of `B` sequences; what `axes` may say of it.
SHARED = {
  "positions": (np.arange(FULL), (None, 0, "repeat")),
  "positions of L + 1": (np.arange(FULL + 1), (None, 0, "repeat")),
  "a causal mask": (np.tri(FULL), (None, 1, (0, 1), "repeat")),
  "a mask that differs along the diagonal": (RNG.random((FULL, FULL)) < 0.5, (None, 1, (0, 1))),
}


@pytest.mark.parametrize("batch_axis", [0, 1])
@pytest.mark.parametrize("name", SHARED)
def test_a_leaf_that_all_sequences_share_is_named_with_advice_that_works(name, batch_axis):
  shared, treatments = SHARED[name]
  other = np.moveaxis(TOKENS, 0, batch_axis)
  # Whichever leaf comes first, the shared one is named.
  for batch in ({"a": shared, "tokens": other}, {"z": shared, "tokens": other}):
    leaf = min(batch, key=lambda name: name == "tokens")
    for how in treatments if batch_axis == 0 else (None,):
      axes = None if how is None else {leaf: how}
      with pytest.raises(ValueError, match=f"the leaf '{leaf}' .* all sequences share it") as error:
        cut_sequences(batch, 4, FULL, axes=axes, batch_axis=batch_axis)
    advice = re.search(r"own by (np\.broadcast_to.*\))(?: with axes=(\{.*\}))?,", str(error.value))
    followed = batch | {leaf: eval(advice[1], {"np": np, "leaf": shared})}
    axes = eval(advice[2] or "None")
    cut = cut_sequences(followed, 4, FULL, axes=axes, batch_axis=batch_axis)
    extra = len(shared) - FULL
    starts = range(0, FULL, 4)
    blocks = [shared[(slice(i, i + 4 + extra),) * shared.ndim] for i in starts] * B
    np.testing.assert_array_equal(np.moveaxis(cut[leaf], batch_axis, 0), np.stack(blocks))
    np.testing.assert_array_equal(np.moveaxis(cut["tokens"], batch_axis, 0), by_loops(TOKENS, 4))


def test_no_leaf_of_tokens_stays_whole_beside_windows():
  """Whatever `axes` says, of batches in which leaves have tokens in all places."""
  tokens = RNG.integers(0, 99, (B, FULL))
  others = [
    tokens,
    tokens[:1],
    np.ones((FULL, FULL)),
    np.ones((2, FULL, FULL)),
    np.ones((1, 1, FULL, FULL)),
    np.ones((B, 1, FULL, FULL)),
  ]
  treatments = [0, 1, 2, (0, 1), (1, 2), (2, 3), "keep", "repeat"]
  accepted = 0
  for other, first, second in itertools.product(others, treatments, [None, *treatments]):
    axes = {"other": first} | ({} if second is None else {"tokens": second})
    batch = {"other": other, "tokens": tokens}
    try:
      cut = cut_sequences(batch, 4, FULL, axes=axes)
    except ValueError:
      continue
    accepted += 1
    np.testing.assert_array_equal(cut["tokens"], by_loops(tokens, 4))
    assert cut["other"].shape[0] == 3 * B
  assert accepted


def test_a_value_of_each_sequence_is_repeated_as_the_error_says():
  for values in (np.arange(B), np.arange(B)[:, None]):
    batch = {"tokens": TOKENS, "document": values}
    with pytest.raises(ValueError, match="A length doesn't: pass a mask of tokens") as error:
      cut_sequences(batch, 4, FULL)
    axes = eval(re.search(r"axes=(\{.*?\})", str(error.value))[1])
    cut = cut_sequences(batch, 4, FULL, axes=axes)
    np.testing.assert_array_equal(cut["document"], np.repeat(values, 3, 0))


def test_the_only_leaf_of_an_array_is_cut_as_the_error_says():
  pairs = RNG.random((B, FULL, FULL))
  with pytest.raises(ValueError, match=r"the array of shape \(3, 12, 12\) has the axes") as error:
    cut_sequences(pairs, 4, FULL)
  axes = eval(re.search(r"axes=(\{.*?\})", str(error.value))[1])
  blocks = [x[i : i + 4, i : i + 4] for x in pairs for i in range(0, FULL, 4)]
  np.testing.assert_array_equal(cut_sequences(pairs, 4, FULL, axes=axes), np.stack(blocks))


@pytest.mark.parametrize(("pattern", "hint"), [("mask", ""), ("token", "write 'token.*'")])
def test_a_pattern_that_matches_no_leaf_is_an_error_that_lists_the_leaves(pattern, hint):
  with pytest.raises(ValueError, match=f"{pattern}.*{hint}.* leaves are: tokens, weights"):
    cut_sequences({"tokens": TOKENS, "weights": TOKENS}, 4, FULL, axes={pattern: 1})


@pytest.mark.parametrize(("arguments", "keywords", "message"), REFUSED)
def test_a_batch_that_can_not_be_cut_is_refused(arguments, keywords, message):
  with pytest.raises(ValueError, match=message):
    cut_sequences(*arguments, **keywords)
  # At full length, too: a training must not fail at its first short step only.
  whole = (arguments[0], FULL, FULL)
  if arguments[1] == 4:
    with pytest.raises(ValueError, match=message):
      cut_sequences(*whole, **keywords)


def test_arguments_of_other_kinds_are_refused():
  class Foreign:
    shape = (B, FULL)

  with pytest.raises(
    TypeError, match="must hold NumPy or JAX arrays; got the leaf 'x' of type For"
  ):
    cut_sequences({"x": Foreign()}, 4, FULL)
  with pytest.raises(TypeError, match=r"`axes` must give each pattern an axis.*got 'both' for 't'"):
    cut_sequences({"t": TOKENS}, 4, FULL, axes={"t": "both"})
  with pytest.raises(TypeError, match="length"):
    jax.jit(lambda n: cut_sequences(TOKENS, n, FULL))(4)

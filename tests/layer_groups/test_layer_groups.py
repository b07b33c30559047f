"""Groups of layers from the names that a user gives, for params of many kinds."""

import ast
import functools
import re

from flax import linen as nn, nnx
import jax
import jax.numpy as jnp
import optax
import pytest

import optax_boost
from optax_boost import LayerSlice
from optax_boost._foundation import _paths
from tests.layer_axes import public_layouts
from tests.layer_groups import layouts

LM_LAYERS = range(public_layouts.LAYERS)


def array(*shape):
  return jax.ShapeDtypeStruct(shape, jnp.float32)


def tree(*paths, shape=(4, 4)):
  """Nested dicts with a leaf of this shape at each path."""
  params = {}
  for path in paths:
    *modules, name = path.split("/")
    functools.reduce(lambda node, key: node.setdefault(key, {}), modules, params)[name] = array(
      *shape
    )
  return params


def dense(*paths):
  return tree(*(f"{path}/{name}" for path in paths for name in ("kernel", "bias")))


def linen_mlp():
  class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
      for _ in range(12):
        x = nn.Dense(4)(x)
      return x

  return jax.eval_shape(Mlp().init, jax.random.key(0), array(2, 4))


def linen_lm(form):
  init = public_layouts.TransformerLM(form).init
  return jax.eval_shape(init, jax.random.key(0), public_layouts.TOKENS)["params"]


def nnx_lm(form):
  return nnx.state(nnx.eval_shape(lambda: public_layouts.Transformer(form, nnx.Rngs(0))), nnx.Param)


def equinox_mlp():
  equinox = pytest.importorskip("equinox")
  make = functools.partial(equinox.nn.MLP, 4, 4, 4, 11)
  model = equinox.filter_eval_shape(make, key=jax.random.key(0))
  return equinox.filter(model, lambda x: isinstance(x, jax.ShapeDtypeStruct))


def torch_names():
  layers = [f"layers.{i}.{name}.weight" for i in range(11) for name in ("attn", "mlp")]
  return {name: array(4, 4) for name in ("embed.weight", *layers, "norm.weight", "head.weight")}


DENOISER = ["conv_in", "down_0", "down_1", "mid", "up_0", "up_1", "conv_out"]
INCEPTION = ["Conv2d_1a_3x3", "Conv2d_2a_3x3", "Conv2d_2b_3x3", "Conv2d_10a_1x1"]
MIXED = ["Mixed_5b", "Mixed_5c", "Mixed_5d", "Mixed_6a", "Mixed_10a"]
# By name: the params; the names that a user writes; and for each group the beginnings of its paths,
# or of layer i of stacked leaves as "blocks/[i]".
MODELS = {
  **{
    name: lambda make=make: (lambda layout: (layout.params, layout.names, layout.groups))(make())
    for name, make in layouts.LAYOUTS.items()
  },
  "linen, more than ten layers": lambda: (
    linen_mlp()["params"],
    ["Dense_*"],
    [f"Dense_{i}" for i in range(12)],
  ),
  "linen, with the collection": lambda: (
    linen_mlp(),
    ["params/Dense_[0-3]", "params/Dense_[4-9]", "params/Dense_1[01]"],
    [tuple(f"params/Dense_{i}" for i in r) for r in (range(4), range(4, 10), (10, 11))],
  ),
  "linen, written out": lambda: (
    linen_lm("layers"),
    ["shared", "decoder/encoderdecoderblock_*", "decoder/encoderdecoder_norm"],
    [
      "shared",
      *(f"decoder/encoderdecoderblock_{i}" for i in LM_LAYERS),
      "decoder/encoderdecoder_norm",
    ],
  ),
  "linen, stacked along axis 1": lambda: (
    linen_lm("scan"),
    ["shared", "decoder/encoderdecoder[:,*]", "decoder/encoderdecoder_norm"],
    [
      "shared",
      *(f"decoder/encoderdecoder/[:, {i}]" for i in LM_LAYERS),
      "decoder/encoderdecoder_norm",
    ],
  ),
  "linen, stacks in stacks": lambda: (
    linen_lm("remat_scan"),
    ["shared", "decoder/encoderdecoder[*]", "decoder/encoderdecoder_norm"],
    ["shared", *(f"decoder/encoderdecoder/[{i}]" for i in (0, 1)), "decoder/encoderdecoder_norm"],
  ),
  "nnx, a list": lambda: (
    nnx_lm("layers"),
    ["embedder", "layers/*", "final_norm"],
    ["embedder", *(f"layers/{i}" for i in LM_LAYERS), "final_norm"],
  ),
  "nnx, stacked pairs": lambda: (
    nnx_lm("pairs"),
    ["embedder", "layers[*]", "final_norm"],
    ["embedder", *(f"layers/[{i}]" for i in LM_LAYERS), "final_norm"],
  ),
  "equinox": lambda: (equinox_mlp(), ["layers/*"], [f"layers/{i}" for i in range(12)]),
  "haiku": lambda: (
    {f"mlp/~/linear{end}": dict(tree("w", "b")) for end in ("", *(f"_{i}" for i in range(1, 12)))},
    ["mlp/~/linear*"],
    ["mlp/~/linear", *(f"mlp/~/linear_{i}" for i in range(1, 12))],
  ),
  "torch": lambda: (
    torch_names(),
    ["embed", "layers.*", "norm|head"],
    ["embed", *(f"layers.{i}" for i in range(11)), ("norm", "head")],
  ),
  "interleaved": lambda: (
    dense("head", *(f"{kind}_{i}" for kind in ("conv", "norm") for i in range(12))),
    ["conv_*|norm_*", "head"],
    [*((f"conv_{i}", f"norm_{i}") for i in range(12)), "head"],
  ),
  "interleaved in numbered modules": lambda: (
    dense(*(f"stage_{s}/{kind}_{i}" for s in range(2) for kind in ("a", "b") for i in range(11))),
    ["a_*|b_*"],
    [(f"stage_{s}/a_{i}", f"stage_{s}/b_{i}") for s in range(2) for i in range(11)],
  ),
  "inception": lambda: (
    dense(*INCEPTION, *(f"{mixed}/branch_{i}" for mixed in MIXED for i in range(2)), "fc"),
    ["Conv2d_*", "Mixed_*", "fc"],
    [*INCEPTION, *MIXED, "fc"],
  ),
  "a denoiser of few modules": lambda: (
    dense(*DENOISER),
    ["conv_in", "down_*", "mid", "up_*", "conv_out"],
    DENOISER,
  ),
  "a name at the root and below": lambda: (
    dense("Dense_0", "blocks/Dense_0", "blocks/Dense_1"),
    ["/Dense_0", "blocks/*"],
    ["Dense_0", "blocks/Dense_0", "blocks/Dense_1"],
  ),
  "stages of stacks": lambda: (
    {f"stage_{i}": tree("w", "b", shape=(2 + i, 4)) for i in range(2)} | tree("head"),
    ["stage_*[*]", "head"],
    [*(f"stage_0/[{i}]" for i in range(2)), *(f"stage_1/[{i}]" for i in range(3)), "head"],
  ),
  "stacks along different axes, of which a layer has both": lambda: (
    {"a": array(3, 2), "b": array(2, 3), "c": array()},
    ["a[*]|b[:,*]", "c"],
    [*((f"a/[{i}]", f"b/[:, {i}]") for i in range(3)), "c"],
  ),
  "a list of arrays": lambda: (
    [array(4)] * 12,
    ["0", "[1-4]", "5|6|7|8|9|10", "11"],
    ["0", ("1", "2", "3", "4"), ("5", "6", "7", "8", "9", "10"), "11"],
  ),
  "a list of pairs": lambda: ([(array(4, 4), array(4))] * 12, ["*"], [f"{i}" for i in range(12)]),
  "names with brackets": lambda: (
    {"up": {"w[0,0] 4x0e": array(4, 8), "w[1,1] 4x1o": array(2, 4)}, "l[0]": array(2)},
    ["up/w[0,0] 4x0e", "w[1,1] 4x1o[*]", "l[0]"],
    ["up/w[0,0] 4x0e", *(f"up/w[1,1] 4x1o/[{i}]" for i in range(2)), "l[0]"],
  ),
  "names with what patterns can't have": lambda: (
    {"dense (1)": array(2), "x^2": {"a+b": array(2), "c|d": array(2)}},
    ["dense ?1?", "x?2/a+b", "c?d"],
    ["dense (1)", "x^2/a+b", "x^2/c|d"],
  ),
  "hidden leaves, and some without a size or axes": lambda: (
    {"a": None, "b": optax.MaskedNode(), "c": array(0, 3), "d": array(), "e": {"f": array(2)}},
    ["c|d", "e"],
    [("c", "d"), "e"],
  ),
  "one array": lambda: (array(3), ["*"], [""]),
  "one stack": lambda: (array(2, 3), ["*[*]"], ["/[0]", "/[1]"]),
}


@functools.cache
def model(name):
  return MODELS[name]()


def entries(paths, beginning):
  """The entries of a group that has what begins so: whole leaves, or a layer of each."""
  layer = re.fullmatch(r"(.*)/\[(:, )?(\d+)\]", beginning)
  module = re.split("[/.]", layer[1] if layer else beginning.rstrip("/"))
  inside = [path for path in paths if re.split("[/.]", path)[: len(module)] == module]
  if layer is None:
    return inside
  name = layer[3]
  return [f"{path or 'params'}[{layer[2] or ''}{name}:{int(name) + 1}]" for path in inside]


def expected_groups(name):
  params, _, groups = model(name)
  paths = _paths.leaf_paths(params)
  groups = [(group,) if isinstance(group, str) else group for group in groups]
  return [{e for beginning in group for e in entries(paths, beginning)} for group in groups]


@pytest.mark.parametrize("name", MODELS)
def test_the_names_of_a_model_make_its_groups(name):
  params, names, _ = model(name)
  groups, expected = optax_boost.layer_groups(params, names), expected_groups(name)
  assert [set(map(str, group)) for group in groups.groups] == expected
  assert all(expected)
  assert sum(map(len, groups.groups)) == sum(map(len, expected))
  assert len(groups) == len(groups.sizes) == len(expected)
  assert sum(groups.sizes) == sum(leaf.size for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("name", MODELS)
def test_the_error_of_a_wrong_name_lists_names_that_can_be_copied(name):
  params = model(name)[0]
  with pytest.raises(ValueError, match="'misspelt', which matches no leaf") as error:
    optax_boost.layer_groups(params, ["misspelt"])
  names = ast.literal_eval(re.search(r"forward pass: (\[.*\])", str(error.value))[1])
  groups = optax_boost.layer_groups(params, names)
  assert sorted(entry for group in groups.groups for entry in group) == sorted(
    _paths.leaf_paths(params)
  )


@pytest.mark.parametrize("num_groups", [1, 2, 3, 7, 10])
@pytest.mark.parametrize("name", ["gpt2", "bert scanned", "linen, stacked along axis 1"])
def test_fewer_groups_have_equal_numbers_of_neighbouring_blocks(name, num_groups):
  params, names, _ = model(name)
  blocks = expected_groups(name)
  num_groups = min(num_groups, len(blocks))
  groups = optax_boost.layer_groups(params, names, num_groups=num_groups)
  # The blocks of each group: several layers of a leaf are one entry.
  whole = {
    path: array.shape
    for path, array in zip(_paths.leaf_paths(params), jax.tree.leaves(params), strict=True)
  }

  def layers(entry):
    if not isinstance(entry, LayerSlice):
      stacked = {block for group in blocks for block in group if block.startswith(f"{entry}[")}
      return stacked or {entry}
    colons = ":, " * entry.axis
    assert 0 <= entry.start < entry.stop <= whole[entry.path][entry.axis]
    return {f"{entry.path}[{colons}{i}:{i + 1}]" for i in range(entry.start, entry.stop)}

  found = [set().union(*map(layers, group)) for group in groups.groups]
  joined = [set() for _ in range(num_groups)]
  for i, block in enumerate(blocks):
    joined[i * num_groups // len(blocks)] |= block
  assert found == joined
  assert sum(groups.sizes) == sum(leaf.size for leaf in jax.tree.leaves(params))


def test_printed_groups_have_their_leaves_in_the_order_of_the_forward_pass_and_their_sizes():
  params = {
    "blocks": {"w": array(4, 2, 2), "b": array(2, 4)},
    "embed": array(5, 2),
    "head": {"w": array(2, 3), "scale": array()},
    "tail": array(0, 3),
  }
  names = ["embed", "blocks/w[*]|blocks/b[:,*]", "head|tail"]
  assert str(optax_boost.layer_groups(params, names, num_groups=4)).splitlines() == [
    "group 0: 16 parameters (39.0 %), frozen first: embed, blocks/b[:, 0:1], blocks/w[0:1]",
    "group 1: 6 parameters (14.6 %): blocks/b[:, 1:2], blocks/w[1:2]",
    "group 2: 12 parameters (29.3 %): blocks/b[:, 2:4], blocks/w[2:4]",
    "group 3: 7 parameters (17.1 %), never frozen: head/scale, head/w, tail",
  ]


SIBLINGS = dense("Dense_0", "blocks/Dense_0", "blocks/Dense_1", "head")


@pytest.mark.parametrize(
  ("params", "names", "words"),
  [
    (
      SIBLINGS,
      ["Dense_0", "blocks/*", "head"],
      "once; got 'Dense_0' and 'blocks/*', which both match 'blocks/Dense_0/bias'. A slash in front"
      " means a name at the root: '/Dense_0'.",
    ),
    (SIBLINGS, ["/Dense_0", "blocks", "blocks/*"], "got 'blocks' and 'blocks/*', which both match"),
    (
      SIBLINGS,
      ["/Dense_0", "head"],
      "'bloc.... Put these names, which are in the order of the tree, into the order of the forward"
      " pass: ['/Dense_0', 'blocks/Dense_*', 'head']. The tree doesn't tell that order; in its own,"
      " the head may freeze first.",
    ),
    (SIBLINGS, ["blocks/*", "haed"], "'haed', which matches no leaf. Put these names"),
    (
      SIBLINGS,
      ["Dense_*", "head"],
      "'Dense_*', which matches ['Dense_0', 'blocks/Dense_0', 'blocks/Dense_1']; no number tells"
      " their order. Write a pattern for each; a slash in front means a name at the root: '/norm'.",
    ),
    (SIBLINGS, ["*"], "matches ['Dense_0', 'blocks', 'head']; no number tells their order."),
    (SIBLINGS, ["**/kernel", "**/bias"], "'**/kernel', which matches ['Dense_0/kernel', 'blocks/D"),
    (dense("a_0", "a_1", "b_0", "b_1"), ["*"], "['a_0', 'a_1', 'b_0', 'b_1']; no number tells"),
    (
      {"a": array(3, 2), "b": {"c": array(2), "d": array(3)}},
      ["a[*]", "b[*]"],
      "'b[*]', whose leaves must stack the same number of layers; got {'b/c': (2,), 'b/d': (3,)}.",
    ),
    ({"a": array(3, 2), "b": array()}, ["b[*]", "a"], "same number of layers; got {'b': ()}."),
    ({"a": array(3, 2), "b": array(0)}, ["b[*]", "a"], "same number of layers; got {'b': (0,)}."),
    ({"a": array(3, 2), "b": array(3)}, ["a[:,*]|b"], "layers; got {'a': (3, 2), 'b': (3,)}."),
    ({"a": array(3, 2), "b": array(3)}, ["a[*]|b"], "layers; got {'a': (3, 2), 'b': (3,)}."),
    ({}, ["a"], "'a', which matches no leaf."),
    ({"a": array(3)}, ["[*]"], "which is not a pattern: each part between bars needs a name"),
  ],
)
def test_names_that_do_not_divide_the_leaves_are_refused(params, names, words):
  with pytest.raises(ValueError, match=re.escape(words)):
    optax_boost.layer_groups(params, names)


@pytest.mark.parametrize("names", ["blocks/*", {"blocks": 0}, [], [3], SIBLINGS, None])
def test_names_must_be_in_a_list(names):
  words = "`blocks` must be a list of patterns in the order of the forward pass, as ['embed', 'bl"
  with pytest.raises(TypeError, match=re.escape(words)):
    optax_boost.layer_groups(SIBLINGS, names)


@pytest.mark.parametrize(("num_groups", "words"), [(5, "must be <= 4; got 5"), (0, "must be >= 1")])
def test_there_are_at_most_as_many_groups_as_blocks(num_groups, words):
  with pytest.raises(ValueError, match=f"`num_groups` {words}"):
    optax_boost.layer_groups(SIBLINGS, ["/Dense_0", "blocks/*", "head"], num_groups=num_groups)


def test_a_leaf_belongs_to_the_first_part_between_bars_that_matches_it():
  groups = optax_boost.layer_groups(SIBLINGS, ["/Dense_0", "blocks/*|*/Dense_*", "head"])
  assert [group[0] for group in groups.groups] == [
    *(f"{name}/bias" for name in ("Dense_0", "blocks/Dense_0", "blocks/Dense_1", "head"))
  ]

"""Groups of layers are cut between the blocks of models whose layers are written out."""

from flax import linen as nn, nnx
import jax
import jax.numpy as jnp
import optax
import pytest

import optax_boost
from optax_boost import LayerSlice, linen as ob_linen, nnx as ob_nnx
from optax_boost._foundation import _paths

LAYERS, WIDTH = 4, 8
TOKENS = jnp.zeros((2, 3), jnp.int32)
X = jnp.ones((2, 3, WIDTH))


def normalized(x, p):
  return (x - jnp.mean(x, -1, keepdims=True)) * p["scale"] + p["bias"]


def attention(x, p):
  q, k, v = (x @ p[name]["kernel"] for name in ("query", "key", "value"))
  return jax.nn.softmax(q @ k.mT) @ v @ p["out"]["kernel"]


def transformer_params():
  kernel, norm = {"kernel": jnp.eye(WIDTH)}, {"scale": jnp.ones(WIDTH), "bias": jnp.zeros(WIDTH)}
  block = {
    "attn": {name: kernel for name in ("key", "out", "query", "value")},
    "mlp": [kernel, kernel],
    "norm1": norm,
    "norm2": norm,
  }
  return {
    "embed": jnp.ones((5, WIDTH)),
    "final": norm,
    "head": kernel,
    "layers": [block] * LAYERS,
  }


def transformer_loss(params, tokens):
  x = params["embed"][tokens]
  for p in params["layers"]:
    x += attention(normalized(x, p["norm1"]), p["attn"])
    up, down = p["mlp"]
    x += jax.nn.relu(normalized(x, p["norm2"]) @ up["kernel"]) @ down["kernel"]
  return jnp.mean(normalized(x, params["final"]) @ params["head"]["kernel"])


class Block(nn.Module):
  """A pre-norm block whose submodules Linen names."""

  @nn.compact
  def __call__(self, x):
    x += nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x))
    return x + nn.Dense(WIDTH)(nn.relu(nn.Dense(WIDTH)(nn.LayerNorm()(x))))


class Encoder(nn.Module):
  """Blocks that Linen names."""

  @nn.compact
  def __call__(self, x):
    for _ in range(LAYERS):
      x = Block()(x)
    return x


class Transformer(nn.Module):
  """A numbered module of which there is one."""

  @nn.compact
  def __call__(self, tokens):
    x = Encoder()(nn.Embed(5, WIDTH)(tokens))
    return nn.Dense(1)(nn.LayerNorm()(x))


def plain_groups(**options):
  return optax_boost.layer_groups(transformer_loss, transformer_params(), TOKENS, **options)


def linen_groups(**options):
  module = Transformer()
  variables = jax.eval_shape(module.init, jax.random.key(0), TOKENS)
  split = ob_linen.split_loss(lambda model, x: jnp.mean(model(x)), module, variables)
  return optax_boost.layer_groups(*split, TOKENS, **options)


class NnxBlock(nnx.Module):
  """Attention with a norm before it."""

  def __init__(self, rngs):
    self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
    self.attention = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs)
    self.up, self.down = (nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2))

  def __call__(self, x):
    x += self.attention(self.norm(x))
    return x + self.down(nnx.relu(self.up(x)))


def nnx_groups(**options):
  rngs = nnx.Rngs(0)
  model = nnx.Sequential(
    nnx.Embed(5, WIDTH, rngs=rngs),
    *(NnxBlock(rngs) for _ in range(LAYERS)),
    nnx.Linear(WIDTH, 1, rngs=rngs),
  )
  split = ob_nnx.split_loss(lambda model, x: jnp.mean(model(x)), model)
  return optax_boost.layer_groups(*split, TOKENS, **options)


# The paths of a layer, up to its number, and the first number.
LAYER = {
  plain_groups: ("layers/", 0),
  linen_groups: ("Encoder_0/Block_", 0),
  nnx_groups: ("layers/", 1),
}


def layers_of(group, form):
  prefix, first = LAYER[form]
  parts = {path.removeprefix(prefix).split("/")[0] for path in group if path.startswith(prefix)}
  return {int(part) - first for part in parts} & set(range(LAYERS))


@pytest.mark.parametrize("num_groups", [2, 3, 4, LAYERS + 2])
@pytest.mark.parametrize("form", LAYER)
def test_a_layer_is_in_one_group_with_its_norms(form, num_groups):
  plan = form(num_groups=num_groups)
  # An embedding, the layers, a head: evenly.
  group_of = [number * num_groups // (LAYERS + 2) for number in range(LAYERS + 2)]
  for number, group in enumerate(plan.groups):
    expected = {layer for layer in range(LAYERS) if group_of[layer + 1] == number}
    assert layers_of(group, form) == expected
  assert plan.reused == ()


@pytest.mark.parametrize("form", LAYER)
def test_no_block_is_cut_by_default(form):
  assert form().groups == form(num_groups=LAYERS + 2).groups


@pytest.mark.parametrize("form", LAYER)
def test_more_groups_than_blocks_cut_blocks(form):
  kernels = 2 + 6 * LAYERS
  plan = form(num_groups=kernels)
  assert sum("query" in path and path.endswith("kernel") for path in plan.groups[1]) == 1
  assert not any("out/kernel" in path for path in plan.groups[1])
  with pytest.raises(ValueError, match=rf"of {kernels} blocks .* num_groups={kernels} or fewer"):
    form(num_groups=kernels + 1)


def staged(widths=(2, 2)):
  block = {"conv1": jnp.eye(WIDTH), "conv2": jnp.eye(WIDTH)}
  return {f"stage{i}": [block] * blocks for i, blocks in enumerate(widths)}


def staged_loss(params, x):
  for stage in sorted(params):
    for block in params[stage]:
      x = jnp.tanh(x @ block["conv1"]) @ block["conv2"]
  return jnp.mean(x)


def test_a_stage_is_a_block_and_more_groups_than_stages_are_cut_between_layers():
  def groups(params, **options):
    plan = optax_boost.layer_groups(staged_loss, params, X, **options)
    return [[path.replace("/conv", ".") for path in group] for group in plan.groups]

  first, second = ["stage0/0.1", "stage0/0.2"], ["stage0/1.1", "stage0/1.2"]
  assert groups(staged())[0] == groups(staged(), num_groups=2)[0] == first + second
  assert groups(staged(), num_groups=3)[0] == [*first, "stage0/1.1"]  # of eight layers 3, 3, 2
  assert groups(staged(), blocks="stage*/*")[:2] == [first, second]
  assert groups(staged(), num_groups=8)[:2] == [first[:1], first[1:]]
  assert groups(staged((2, 4)), num_groups=2)[0] == first + second
  # The line is right of a stage with one block, too.
  words = str(optax_boost.layer_groups(staged_loss, staged((1, 3)), X))
  assert 'for 4 finer ones pass blocks="stage*/*"' in words
  assert len(groups(staged((1, 3)), blocks="stage*/*")) == 4
  with pytest.raises(ValueError, match=r"5 groups of 4 blocks .* Pass num_groups=4 or fewer"):
    groups(staged(), num_groups=5, blocks="stage*/*")


def test_a_module_used_in_two_places_does_not_make_a_block():
  params = {"level0": {"a": X[0, :1].T, "z": X[0, :1]}, "level1": {"a": X[0, :1].T, "z": X[0, :1]}}

  def loss(params, x):
    for half in "az":
      for level in ("level0", "level1"):
        x = x @ params[level][half]
    return jnp.mean(x)

  params = jax.tree.map(lambda _: jnp.eye(WIDTH), params)
  plan = optax_boost.layer_groups(loss, params, X, num_groups=2)
  assert plan.groups == (("level0/a", "level1/a"), ("level0/z", "level1/z"))
  assert plan.reused == ()


def test_different_modules_in_a_sequence_do_not_make_blocks():
  body, head = {"in": jnp.eye(WIDTH), "out": jnp.eye(WIDTH)}, {"out": jnp.eye(WIDTH)}

  def loss(params, x):
    body, head = params["layers"]
    return jnp.mean(x @ body["in"] @ body["out"] @ head["out"])

  plan = optax_boost.layer_groups(loss, {"layers": [body, head]}, X, num_groups=2)
  assert plan.groups == (("layers/0/in", "layers/0/out"), ("layers/1/out",))
  plan = optax_boost.layer_groups(loss, {"layers": [body, head]}, X)
  assert len(plan.groups) == 3


def test_the_pieces_of_a_cut_block_are_in_order():
  kernel, norm = {"kernel": jnp.eye(WIDTH)}, {"scale": jnp.ones(WIDTH), "bias": jnp.zeros(WIDTH)}
  block = {"dense": [kernel, kernel], "norm": norm}
  around = block | {"in": kernel, "out": kernel}

  def loss(params, x):
    for p in params["layers"]:
      x = normalized(x, p["norm"]) @ p.get("in", kernel)["kernel"]
      for dense in p["dense"]:
        x = x @ dense["kernel"]
      x = x @ p.get("out", kernel)["kernel"]
    return jnp.mean(x)

  # Only the norm is left: it goes with the kernel before it, or the first.
  plan = optax_boost.layer_groups(loss, {"layers": [block] * 2}, X, num_groups=4)
  names = [[path for path in group if path.endswith("kernel")] for group in plan.groups]
  assert names == [[f"layers/{i}/dense/{j}/kernel"] for i in range(2) for j in range(2)]
  assert "layers/0/norm/scale" in plan.groups[0]
  # A kernel remains on either side of the cut.
  plan = optax_boost.layer_groups(loss, {"layers": [around] * 2}, X, num_groups=8)
  names = [[path for path in group if path.endswith("kernel")] for group in plan.groups]
  parts = ("in", "dense/0", "dense/1", "out")
  assert names == [[f"layers/{i}/{part}/kernel"] for i in range(2) for part in parts]


def test_a_dot_in_a_key_separates_modules():
  nested = transformer_params()
  leaves, structure = jax.tree.flatten(nested)
  names = [path.replace("/", ".") for path in _paths.leaf_paths(nested)]

  def loss(flat, tokens):
    return transformer_loss(jax.tree.unflatten(structure, [flat[n] for n in names]), tokens)

  flat = dict(zip(names, leaves, strict=True))
  for num_groups in (None, 3, 14):
    plan = optax_boost.layer_groups(loss, flat, TOKENS, num_groups=num_groups)
    nested = plain_groups(num_groups=num_groups).groups
    assert plan.groups == tuple(tuple(path.replace("/", ".") for path in group) for group in nested)
  # The layers that the program takes from a flat leaf are blocks, too.
  stacked = {"layers.w": jnp.stack([jnp.eye(WIDTH)] * 2), "layers.bias": jnp.ones((2, WIDTH))}

  def unrolled(params, x):
    for i in range(2):
      x = jnp.tanh(x + params["layers.bias"][i]) @ params["layers.w"][i]
    return jnp.mean(x)

  groups = optax_boost.layer_groups(unrolled, stacked, X).groups
  assert groups == tuple(
    tuple(LayerSlice(f"layers.{name}", 0, i, i + 1) for name in ("bias", "w")) for i in range(2)
  )


@pytest.mark.parametrize("scanned", [False, True])
def test_a_vector_at_the_root_is_grouped_by_its_use(scanned):
  kernels = jnp.stack([jnp.eye(WIDTH)] * LAYERS)
  params = {"embed": jnp.ones((5, WIDTH)), "final": jnp.ones(WIDTH), "position": jnp.ones(WIDTH)}
  params["layers"] = {"w": kernels} if scanned else [{"w": kernel} for kernel in kernels]

  def loss(params, tokens):
    x = params["embed"][tokens] + params["position"]
    if scanned:
      x, _ = jax.lax.scan(lambda x, p: (jnp.tanh(x @ p["w"]), None), x, params["layers"])
    else:
      for p in params["layers"]:
        x = jnp.tanh(x @ p["w"])
    return jnp.mean((x * params["final"]) @ params["embed"].T)

  plan = optax_boost.layer_groups(loss, params, TOKENS)
  layers = [LayerSlice("layers/w", 0, i, i + 1) if scanned else f"layers/{i}/w" for i in range(4)]
  *first, last = layers
  assert plan.groups == (("embed", "position"), *((layer,) for layer in first), (last, "final"))


KERNEL, VECTOR = jnp.eye(WIDTH), jnp.ones(WIDTH)


def test_a_scale_before_a_stack_is_with_its_first_layer():
  params = {"after": VECTOR, "before": VECTOR, "stack": jnp.stack([KERNEL] * 3)}

  def loss(params, x):
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x * params["before"], params["stack"])
    return jnp.mean(x * params["after"])

  layers = [LayerSlice("stack", 0, i, i + 1) for i in range(3)]
  plan = optax_boost.layer_groups(loss, params, X)
  assert plan.groups == (("before", layers[0]), (layers[1],), (layers[2], "after"))


def groups_in_order(params, names, **options):
  return plan_in_order(params, names, **options).groups


def plan_in_order(params, names, **options):
  """The plan of a model that multiplies by its leaves in the order of `names`."""
  flat = dict(zip(_paths.leaf_paths(params), range(100), strict=False))

  def loss(params, x):
    leaves = jax.tree.leaves(params)
    for name in names:
      leaf = leaves[flat[name]]
      x = jnp.tanh(x @ leaf if leaf.ndim > 1 else x * leaf)
    return jnp.mean(x)

  return optax_boost.layer_groups(loss, params, X, **options)


@pytest.mark.parametrize("form", ["arrays", "modules"])
def test_layers_of_one_kernel_are_groups_like_those_beside_them(form):
  layers = [KERNEL if form == "arrays" else {"w": KERNEL}] * 12
  params = {"patch": KERNEL, "layers": layers, "norm": VECTOR, "head": KERNEL}
  names = [f"layers/{i}" if form == "arrays" else f"layers/{i}/w" for i in range(12)]
  groups = groups_in_order(params, ["patch", *names, "norm", "head"])
  *first, last = names
  assert groups == (("patch",), *((name,) for name in first), (last, "norm"), ("head",))


@pytest.mark.parametrize("scanned", [False, True])
def test_layers_of_one_kernel_are_the_blocks_of_a_model_that_ends_in_two_heads(scanned):
  kernels = jnp.stack([KERNEL] * 3)
  params = {"actor": KERNEL, "critic": KERNEL, "embed": KERNEL}
  params["layers"] = kernels if scanned else [{"w": kernel} for kernel in kernels]

  def loss(params, x):
    x = x @ params["embed"]
    if scanned:
      x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])
    else:
      for layer in params["layers"]:
        x = jnp.tanh(x @ layer["w"])
    return jnp.mean(x @ params["actor"]) + jnp.mean((x @ params["critic"]) ** 2)

  layers = [LayerSlice("layers", 0, i, i + 1) if scanned else f"layers/{i}/w" for i in range(3)]
  plan = optax_boost.layer_groups(loss, params, X)
  assert plan.groups == (("embed",), *((layer,) for layer in layers), ("actor", "critic"))


def test_two_numbered_kernels_do_not_make_the_others_one_group():
  names = ["conv_a", "conv_b", "conv_c", "fc1", "fc2"]
  params = {name: {"w": KERNEL} for name in names}
  paths = [f"{name}/w" for name in names]
  assert groups_in_order(params, paths) == tuple((path,) for path in paths)


def test_biases_and_norms_of_a_series_stay_with_the_kernels_of_that_series():
  params = {"weights": [KERNEL] * 3, "biases": [VECTOR] * 3}
  pairs = [(f"weights/{i}", f"biases/{i}") for i in range(3)]
  assert groups_in_order(params, [name for pair in pairs for name in pair]) == tuple(pairs)
  # Norms before kernels, and one after the last: no norm is a group of its own.
  params = {f"Dense_{i}": {"kernel": KERNEL} for i in range(3)}
  params |= {f"LayerNorm_{i}": {"scale": VECTOR} for i in range(4)}
  names = [f(i) for i in range(3) for f in ("LayerNorm_{}/scale".format, "Dense_{}/kernel".format)]
  assert groups_in_order(params, [*names, "LayerNorm_3/scale"]) == (
    (*names[:2], names[2]),
    (names[3], names[4]),
    (names[5], "LayerNorm_3/scale"),
  )


def two_stacks():
  """Two stacks, the second of which goes on with the result of the first."""
  block = {"up": KERNEL, "down": KERNEL}
  stack = {"embed": KERNEL, "layers": [block] * 2, "norm": VECTOR}
  params = {"image": stack, "text": stack, "projector": {"first": KERNEL, "second": KERNEL}}
  layers = [f"layers/{i}/{name}" for i in range(2) for name in ("up", "down")]
  names = ["embed", *layers, "norm"]
  order = [f"image/{name}" for name in names] + ["projector/first", "projector/second"]
  return params | {"head": KERNEL}, [*order, *(f"text/{name}" for name in names), "head"]


def test_leaves_between_the_blocks_of_two_stacks_are_with_the_block_before_them():
  params, order = two_stacks()
  assert groups_in_order(params, order, blocks="image/layers/*|text/layers/*") == (
    ("image/embed",),
    ("image/layers/0/up", "image/layers/0/down"),
    (
      *("image/layers/1/up", "image/layers/1/down", "image/norm"),
      *("projector/first", "projector/second", "text/embed"),
    ),
    ("text/layers/0/up", "text/layers/0/down"),
    ("text/layers/1/up", "text/layers/1/down"),
    ("text/norm", "head"),
  )


def test_with_the_pattern_of_one_stack_all_other_leaves_are_before_or_after_it():
  params, order = two_stacks()
  assert groups_in_order(params, order, blocks="text/layers/*") == (
    tuple(order[: order.index("text/layers/0/up")]),
    ("text/layers/0/up", "text/layers/0/down"),
    ("text/layers/1/up", "text/layers/1/down"),
    ("text/norm", "head"),
  )


def test_a_rename_of_modules_in_a_block_changes_no_group():
  def groups(names):
    block = {name: {"a": KERNEL, "b": KERNEL} for name in names}
    params = {f"layer_{i}": block for i in range(3)} | {"head": KERNEL}
    order = [f"layer_{i}/{name}/{leaf}" for i in range(3) for name in names for leaf in "ab"]
    numbers = {name: number for number, name in enumerate(names)}
    return [
      [tuple(numbers.get(part, part) for part in path.split("/")) for path in group]
      for group in groups_in_order(params, [*order, "head"])
    ]

  found = groups(("up", "down"))
  assert len(found) == 4
  assert groups(("fc1", "fc2")) == groups(("w_2", "w_1")) == groups(("0", "1")) == found


def parallel(params, x):
  return sum(jnp.mean(jnp.tanh(x @ p["up"]) @ p["down"]) for p in params.values())


def test_numbered_modules_side_by_side_are_not_a_series():
  params = {f"cell_{i}": {"up": KERNEL, "down": KERNEL} for i in range(2)}
  words = (
    r'told the blocks of this model: .* Pass blocks=\("cell_0", "cell_1"\) if they are side by'
  )
  with pytest.raises(ValueError, match=words):
    optax_boost.layer_groups(parallel, params, X)
  plan = optax_boost.layer_groups(parallel, params, X, blocks=("cell_0", "cell_1"))
  assert [len(group) for group in plan.groups] == [4]


def unnumbered(nested):
  """Two blocks of parallel kernels, in modules of their own if nested; and their loss."""
  kernel = {"kernel": KERNEL} if nested else KERNEL
  params = {name: {"q": kernel, "k": kernel, "out": kernel} for name in ("first", "second")}

  def loss(params, x):
    x = x @ params["embed"]
    for name in ("first", "second"):
      q, k, out = (jax.tree.leaves(params[name][part])[0] for part in ("q", "k", "out"))
      x += jnp.tanh((x @ q) * (x @ k)) @ out
    return jnp.mean(x)

  return loss, params | {"embed": KERNEL}


def test_modules_without_numbers_are_asked_about():
  loss, params = unnumbered(nested=True)
  words = r'Pass blocks="first\|second" for each of these, one after the other; or blocks="embed\|'
  for num_groups in (None, 6):
    with pytest.raises(ValueError, match=words):
      optax_boost.layer_groups(loss, params, X, num_groups=num_groups)
  plan = optax_boost.layer_groups(loss, params, X, blocks="first|second")
  assert [(len(group), group[0].split("/")[0]) for group in plan.groups] == [
    (1, "embed"),
    (3, "first"),
    (3, "second"),
  ]
  assert plan.groups == optax_boost.layer_groups(loss, params, X, blocks="*").groups


def test_a_number_of_groups_cuts_no_layers_that_are_side_by_side():
  loss, params = unnumbered(nested=True)
  plan = optax_boost.layer_groups(loss, params, X, num_groups=5)
  assert [[path.removesuffix("/kernel") for path in group] for group in plan.groups] == [
    ["embed"],
    *(
      [f"{name}/q", f"{name}/k"] if part else [f"{name}/out"]
      for name in ("first", "second")
      for part in (1, 0)
    ),
  ]
  assert "layers, those side by side together" in str(plan)

  def towers(params, x):
    left = jnp.tanh(x @ params["a1"]) @ params["a2"]
    return jnp.mean(left * (jnp.tanh(x @ params["b1"]) @ params["b2"]))

  params = {name: KERNEL for name in ("a1", "a2", "b1", "b2")}
  with pytest.raises(ValueError, match="the layers are no plain chain"):
    optax_boost.layer_groups(towers, params, X, num_groups=2)


def test_parallel_arrays_of_one_module_are_one_layer():
  loss, params = unnumbered(nested=False)
  plan = optax_boost.layer_groups(loss, params, X)
  assert [(len(group), group[0].split("/")[0]) for group in plan.groups] == [
    (1, "embed"),
    (3, "first"),
    (3, "second"),
  ]


@pytest.mark.parametrize(
  ("blocks", "expected"),
  [
    ("layers/*", ["embed", "layers/0", "layers/1", "layers/2", "layers/3", "norm"]),
    ("layers.*", ["embed", "layers/0", "layers/1", "layers/2", "layers/3", "norm"]),
    ("layers/[13]", ["embed", "layers/1", "layers/3", "norm"]),
    ("layers/0|layers/2", ["embed", "layers/0", "layers/2", "layers/3"]),
    (
      "**/up",
      ["embed", "layers/0/up", "layers/1/up", "layers/2/up", "layers/3/up", "layers/3/down"],
    ),
    ("layers", ["embed", "layers/0", "norm"]),
    # A single name selects the outermost modules, at whatever depth they are.
    ("[1-3]", ["embed", "layers/1", "layers/2", "layers/3", "norm"]),
    ("up", ["embed", "layers/0/up", "layers/1/up", "layers/2/up", "layers/3/up", "layers/3/down"]),
    ("l*|/embed", ["embed", "layers/0", "norm"]),
    # Two stars are as few names as possible.
    ("layers/**", ["embed", "layers/0", "norm"]),
    ("layers/**/*", ["embed", "layers/0", "layers/1", "layers/2", "layers/3", "norm"]),
    (["layers/[01]", "layers/[23]"], ["embed", "layers/0", "layers/1", "norm"]),
  ],
)
def test_a_pattern_selects_the_modules_whose_paths_begin_like_it(blocks, expected):
  params = {"embed": KERNEL, "layers": [{"up": KERNEL, "down": KERNEL}] * 4, "norm": VECTOR}
  order = ["embed", *(f"layers/{i}/{name}" for i in range(4) for name in ("up", "down")), "norm"]
  groups = groups_in_order(params, order, blocks=blocks)
  assert len(groups) == len(expected)
  for group, prefix in zip(groups, expected, strict=True):
    assert group[0].startswith(prefix)


def test_a_printed_pattern_of_one_name_selects_no_module_of_this_name_elsewhere():
  block = {"up": KERNEL, "down": KERNEL}
  layers = {f"layer_{i}": block for i in range(3)}
  params = layers | {"stem": {"layer_norm": {"scale": VECTOR}, "layer_0": KERNEL}, "head": KERNEL}
  order = ["stem/layer_0", "stem/layer_norm/scale"]
  order += [f"layer_{i}/{name}" for i in range(3) for name in ("up", "down")] + ["head"]
  plan = plan_in_order(params, order)
  assert [group[0] for group in plan.groups] == [order[0], *(f"{n}/up" for n in layers), "head"]
  assert plan.origin.startswith('blocks: "/layer_*" (3 modules)')
  assert plan_in_order(params, order, blocks="/layer_*") == plan
  assert plan_in_order(params, order, blocks="layer_*") != plan


def test_the_patterns_of_a_question_select_no_module_of_their_names_elsewhere():
  loss, params = unnumbered(nested=True)

  def deeper(params, x):
    return loss(params, jnp.tanh(x @ params["stem"]["second"]))

  params["stem"] = {"second": KERNEL}
  with pytest.raises(ValueError, match=r'Pass blocks="first\|/second" for each'):
    optax_boost.layer_groups(deeper, params, X)
  plan = optax_boost.layer_groups(deeper, params, X, blocks="first|/second")
  assert [group[0].split("/")[0] for group in plan.groups] == ["stem", "first", "second"]


@pytest.mark.parametrize("blocks", ["layers", "layers/*", "layers[*]", "layers/up", "layers/up[*]"])
def test_any_pattern_for_leaves_of_one_scan_selects_its_steps(blocks):
  params = {"embed": KERNEL, "layers": {"up": jnp.stack([KERNEL] * 3)}, "head": KERNEL}
  params["layers"]["down"] = params["layers"]["up"]

  def loss(params, x):
    def body(x, p):
      return jnp.tanh(x @ p["up"]) @ p["down"], None

    return jnp.mean(jax.lax.scan(body, x @ params["embed"], params["layers"])[0] @ params["head"])

  plan = optax_boost.layer_groups(loss, params, X, blocks=blocks)
  assert plan.groups == optax_boost.layer_groups(loss, params, X).groups
  assert plan.groups[1] == tuple(LayerSlice(f"layers/{n}", 0, 0, 1) for n in ("up", "down"))
  with pytest.raises(ValueError, match=r"no scan over layers slices these leaves\. Omit '\[\*\]'"):
    optax_boost.layer_groups(loss, params, X, blocks="embed[*]")


@pytest.mark.parametrize(
  ("blocks", "error", "words"),
  [
    (3, TypeError, r"must be a pattern of paths, as 'encoder/layers/\*', or a sequence .*; got 3"),
    ((), TypeError, r"sequence of patterns, one for each series side by side; got \(\)"),
    ([None], TypeError, r"one for each series side by side; got \[None\]"),
    ("layer/*", ValueError, r"'layer/\*', which selects nothing .* as one of 'layers', 'head'"),
    ("layers/*|", ValueError, r"has 'layers/\*|', which is not a pattern: each part between bars"),
    (("layers/0", "layers/*"), ValueError, r"'layers/0' and 'layers/\*' for 'layers/0/(up|down)'"),
    ("layers/0|layers/*/up", ValueError, r"'layers/0' and 'layers/\*/up' for 'layers/0/up'"),
  ],
)
def test_patterns_that_select_nothing_or_a_leaf_twice_are_refused(blocks, error, words):
  params = {"layers": [{"up": KERNEL, "down": KERNEL}] * 2, "head": KERNEL}
  order = [f"layers/{i}/{name}" for i in range(2) for name in ("up", "down")]
  with pytest.raises(error, match=words):
    groups_in_order(params, [*order, "head"], blocks=blocks)


@pytest.mark.parametrize(
  ("groups", "words"),
  [
    (
      ((LayerSlice("w", 0, 0, 1),), (LayerSlice("w", 0, 2, 3), "v")),
      r"they have layers \[0, 2\] along axis 0 of the leaf 'w' of",
    ),
    (
      ((LayerSlice("w", 0, 0, 1), "v"), (LayerSlice("w", 0, 1, 3),)),
      r"they have layers \[0, 1, 2\] along axis 0 of the leaf 'w'",
    ),
    (
      ((LayerSlice("w", 1, 0, 1), "v"), (LayerSlice("w", 1, 2, 3),)),
      r"they have layers \[0, 2\] along axis 1 of the leaf 'w'",
    ),
    (
      ((LayerSlice("w", 0, 0, 2), "v"), (LayerSlice("w", 0, 1, 2),)),
      r"each of its layers along one axis, is once; got 'w\[1:2\]'",
    ),
    (
      ((LayerSlice("w", 0, 0, 1), "v"), (LayerSlice("w", 1, 1, 2),)),
      r"along one axis, is once; got 'w\[:, 1:2\]' in group 1",
    ),
    ((("w", "v"), ("w",)), r"is once; got 'w' in group 1"),
    ((("w", "v"), (LayerSlice("w", 0, 0, 2),)), r"is once; got 'w\[0:2\]' in group 1"),
    (((LayerSlice("w", 0, 0, 2), "v"), ("w",)), r"is once; got 'w' in group 1"),
    ((("w",), ()), r"they have no group with the leaf 'v'"),
  ],
)
def test_groups_made_by_hand_must_have_each_layer_once(groups, words):
  params = {"w": jnp.ones((2, 2)), "v": jnp.ones(2)}
  plan = optax_boost.LayerGroups(groups, (1,) * len(groups))
  with pytest.raises(ValueError, match=words):
    optax_boost.layerwise_decay(optax.sgd(0.1), plan).init(params)
  frozen = optax_boost.fixed_freezing(len(groups), 1)
  with pytest.raises(ValueError, match=words):
    optax_boost.freeze_layers(optax.sgd(0.1), plan, frozen).init(params)


def test_groups_made_by_hand_may_list_layers_in_any_order():
  params = {"w": jnp.ones((2, 3))}
  plan = optax_boost.LayerGroups(
    ((LayerSlice("w", 1, 2, 3),), (LayerSlice("w", 1, 0, 1), LayerSlice("w", 1, 1, 2))), (2, 4)
  )
  decay = optax_boost.layerwise_decay(optax.identity(), plan, 0.5)
  updates, _ = decay.update(params, decay.init(params))
  assert updates["w"].tolist() == [[1.0, 1.0, 0.5]] * 2

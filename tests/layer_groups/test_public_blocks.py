"""The groups of public models at tiny sizes, written by hand: by default, and as patterns ask.

ViT with a MAP head and SigLIP (big_vision), a mixture of experts, DETR, Perceiver IO, DiT, ALBERT,
an LSTM and a BiLSTM (Flax), and adapters. lm1b and gemma are in
`tests/layer_axes/test_public_layouts.py`, encoders, decoders and convolutional networks in
`tests/layer_axes/test_block_layouts.py`.
"""

import re

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
from optax_boost import linen as ob_linen
from optax_boost._foundation import _paths
from tests.layer_axes.block_layouts import (
  HIDDEN,
  QKV,
  VOCAB,
  WIDTH,
  apply_conv,
  apply_dense,
  apply_norm,
  attend,
  basic_block,
  conv,
  dense,
  norm,
  projections,
  residual,
  shape,
  stacked,
)

LAYERS = 3
PATCHES = jax.ShapeDtypeStruct((2, 5, WIDTH), jnp.float32)
TOKENS = jax.ShapeDtypeStruct((2, 6), jnp.int32)


def mlp():
  return {"Dense_0": dense(WIDTH, HIDDEN), "Dense_1": dense(HIDDEN, WIDTH)}


def apply_mlp(p, x):
  return apply_dense(p["Dense_1"], jax.nn.gelu(apply_dense(p["Dense_0"], x)))


def block():
  return {
    "LayerNorm_0": norm(),
    "MultiHeadDotProductAttention_0": projections(QKV),
    "LayerNorm_1": norm(),
    "MlpBlock_0": mlp(),
  }


def apply_block(p, x, memory=None):
  y = apply_norm(p["LayerNorm_0"], x)
  x += attend(QKV, p["MultiHeadDotProductAttention_0"], y, memory)
  return x + apply_mlp(p["MlpBlock_0"], apply_norm(p["LayerNorm_1"], x))


def encoder(layers=LAYERS):
  return {f"encoderblock_{i}": block() for i in range(layers)} | {"encoder_norm": norm()}


def apply_encoder(p, x):
  for i in range(len(p) - 1):
    x = apply_block(p[f"encoderblock_{i}"], x)
  return apply_norm(p["encoder_norm"], x)


def groups_of(loss, params, *args, **options):
  return optax_boost.layer_groups(loss, params, *args, **options)


def holds(plan, params, *prefixes):
  """Asserts that the groups are exactly the leaves with these prefixes, each leaf once.

  A prefix `path[i]` is layer i of the leaves of a path.
  """
  paths, seen = _paths.leaf_paths(params), []
  for number, group_prefixes in enumerate(prefixes):
    expected = set()
    for prefix in group_prefixes.split():
      head, bracket, layer = prefix.rstrip("]").partition("[")
      leaves = [path for path in paths if path == head or path.startswith(f"{head}/")]
      assert leaves, f"no leaf of {prefix}"
      expected |= {f"{path}[{layer}:{int(layer) + 1}]" if bracket else path for path in leaves}
      seen += leaves
    assert set(map(str, plan.groups[number])) == expected, number
  assert len(plan.groups) == len(prefixes)
  assert set(seen) == set(paths)


def asked(words, *args):
  """The code of the answers to the question that a loss is answered by."""
  with pytest.raises(ValueError, match=words) as question:
    groups_of(*args)
  return re.findall(r"blocks=(\(.*?\)|\".*?\")", str(question.value))


def pasted(code):
  return eval(code, {})


# ---- ViT with a MAP head, SigLIP


def vit(layers=LAYERS):
  return {
    "embedding": dense(WIDTH, WIDTH),
    "pos_embedding": shape(1, 5, WIDTH),
    "Transformer": encoder(layers),
    "MAPHead_0": {"probe": shape(1, 1, WIDTH), **block()},
  }


def apply_vit(p, x):
  x = apply_encoder(p["Transformer"], apply_dense(p["embedding"], x) + p["pos_embedding"])
  head = p["MAPHead_0"]
  probe = jnp.tile(head["probe"], (len(x), 1, 1))
  y = attend(QKV, head["MultiHeadDotProductAttention_0"], probe, x)
  y = apply_norm(head["LayerNorm_0"], y)
  return (y + apply_mlp(head["MlpBlock_0"], apply_norm(head["LayerNorm_1"], y)))[:, 0]


def test_a_vit_with_a_map_head_has_a_group_for_each_block_and_two_more():
  params = vit() | {"head": dense(WIDTH, 3)}
  plan = groups_of(lambda p, x: jnp.mean(apply_dense(p["head"], apply_vit(p, x))), params, PATCHES)
  holds(
    plan,
    params,
    "embedding pos_embedding",
    *(f"Transformer/encoderblock_{i}" for i in range(LAYERS)),
    "Transformer/encoder_norm MAPHead_0 head",
  )
  assert 'blocks: "Transformer/encoderblock_*" (3 modules)' in str(plan)


def siglip(layers=LAYERS):
  text = {"Embed_0": {"embedding": shape(VOCAB, WIDTH)}, "pos_embedding": shape(1, 6, WIDTH)}
  text |= {"Encoder_0": encoder(), "head": dense(WIDTH, WIDTH)}
  return {"img": vit(layers), "txt": text, "t": shape(1), "b": shape(1)}


def siglip_loss(p, batch):
  images, tokens = batch
  text = p["txt"]
  image = apply_vit(p["img"], images)
  y = text["Embed_0"]["embedding"][tokens] + text["pos_embedding"]
  y = apply_dense(text["head"], apply_encoder(text["Encoder_0"], y)[:, -1])
  return jnp.mean(jax.nn.log_sigmoid(image @ y.T * jnp.exp(p["t"]) + p["b"]))


def test_the_towers_of_siglip_are_asked_about_and_have_equal_rates_because_they_are_side_by_side():
  params, batch = siglip(), (PATCHES, TOKENS)
  answers = asked(r"finds 2 series of blocks", siglip_loss, params, batch)
  # Neither tower follows the other, so side by side is the first answer.
  assert pasted(answers[0]) == ("img/Transformer/encoderblock_*", "txt/Encoder_0/encoderblock_*")
  plan = groups_of(siglip_loss, params, batch, blocks=pasted(answers[0]))
  towers = ("img/Transformer", "txt/Encoder_0")
  holds(
    plan,
    params,
    "img/embedding img/pos_embedding txt/Embed_0 txt/pos_embedding",
    *(" ".join(f"{tower}/encoderblock_{i}" for tower in towers) for i in range(LAYERS)),
    "img/Transformer/encoder_norm img/MAPHead_0 txt/Encoder_0/encoder_norm txt/head t b",
  )


def test_towers_of_different_depths_are_counted_from_their_last_blocks():
  params, batch = siglip(layers=LAYERS + 2), (PATCHES, TOKENS)
  towers = ("img/Transformer/encoderblock_*", "txt/Encoder_0/encoderblock_*")
  plan = groups_of(siglip_loss, params, batch, blocks=towers)
  image, text = "img/Transformer/encoderblock_", "txt/Encoder_0/encoderblock_"
  holds(
    plan,
    params,
    "img/embedding img/pos_embedding",
    f"{image}0",
    f"{image}1 txt/Embed_0 txt/pos_embedding",
    *(f"{image}{i + 2} {text}{i}" for i in range(LAYERS)),
    "img/Transformer/encoder_norm img/MAPHead_0 txt/Encoder_0/encoder_norm txt/head t b",
  )
  # The rates of each tower are those of the recipe for this tower alone.
  ones = jax.tree.map(lambda _: np.ones((), np.float32), params)
  decay = optax_boost.layerwise_decay(optax.identity(), plan, 0.5)
  rates, _ = decay.update(ones, decay.init(ones))
  for tower, layers in (
    (rates["img"]["Transformer"], LAYERS + 2),
    (rates["txt"]["Encoder_0"], LAYERS),
  ):
    found = [tower[f"encoderblock_{i}"]["LayerNorm_0"]["scale"] for i in range(layers)]
    assert found == [0.5 ** (layers - i) for i in range(layers)]
  assert rates["txt"]["pos_embedding"] == 0.5 ** (LAYERS + 1)


# ---- A mixture of experts


def experts(number=4):
  return {"router": dense(WIDTH, number), "wi": shape(number, WIDTH, HIDDEN)} | {
    "wo": shape(number, HIDDEN, WIDTH)
  }


def apply_experts(p, x, scanned):
  weights = jax.nn.softmax(apply_dense(p["router"], x))
  if not scanned:
    h = jax.nn.gelu(jnp.einsum("btd,edh->beth", x, p["wi"]))
    return x + jnp.einsum("beth,ehd,bte->btd", h, p["wo"], weights)

  def add(total, expert):
    wi, wo, weight = expert
    return total + weight[..., None] * (jax.nn.gelu(x @ wi) @ wo), None

  mixed = (p["wi"], p["wo"], jnp.moveaxis(weights, -1, 0))
  return x + jax.lax.scan(add, jnp.zeros_like(x), mixed)[0]


def apply_moe(p, x, scanned):
  return apply_experts(p["moe"], x + attend(QKV, p["attention"], x), scanned)


def moe_params(layers):
  return {"embed": shape(VOCAB, WIDTH), "layers": layers, "norm": norm(), "head": dense(WIDTH, 3)}


@pytest.mark.parametrize("scanned", [False, True])
def test_a_mixture_of_experts_that_scans_over_layers_has_a_group_for_each_layer(scanned):
  params = moe_params(stacked({"attention": projections(QKV), "moe": experts()}, LAYERS))

  def loss(p, tokens):
    def body(x, layer):
      return apply_moe(layer, x, scanned), None

    x, _ = jax.lax.scan(body, p["embed"][tokens], p["layers"])
    return jnp.mean(apply_dense(p["head"], apply_norm(p["norm"], x)))

  plan = groups_of(loss, params, TOKENS)
  holds(plan, params, "embed", *(f"layers[{i}]" for i in range(LAYERS)), "norm head")
  assert 'blocks: "layers[*]" (3 stacked layers)' in str(plan)


def test_a_scan_over_experts_is_inside_its_layer():
  layers = [{"attention": projections(QKV), "moe": experts()}] * LAYERS
  params = moe_params(layers)

  def loss(p, tokens):
    x = p["embed"][tokens]
    for layer in p["layers"]:
      x = apply_moe(layer, x, scanned=True)
    return jnp.mean(apply_dense(p["head"], apply_norm(p["norm"], x)))

  plan = groups_of(loss, params, TOKENS)
  holds(plan, params, "embed", *(f"layers/{i}" for i in range(LAYERS)), "norm head")


# ---- DETR, Perceiver IO, DiT


def detr():
  layer = {
    "self_attn": projections(QKV),
    "norm1": norm(),
    "linear1": dense(WIDTH, HIDDEN),
    "linear2": dense(HIDDEN, WIDTH),
  }
  return {
    "backbone": {
      "conv1": conv(3, 3),
      "bn1": norm(),
      **{f"layer{s}": {str(i): residual(s > 1 and i == 0) for i in range(2)} for s in (1, 2)},
    },
    "input_proj": conv(1),
    "query_embed": {"weight": shape(4, WIDTH)},
    "transformer": {
      "encoder": {"layers": {str(i): layer for i in range(LAYERS)}},
      "decoder": {
        "layers": {
          str(i): layer | {"multihead_attn": projections(QKV), "norm2": norm()}
          for i in range(LAYERS)
        },
        "norm": norm(),
      },
    },
    "class_embed": dense(WIDTH, 3),
    "bbox_embed": {"layers": {str(i): dense(WIDTH, WIDTH) for i in range(3)}},
  }


def detr_loss(p, images):
  backbone, transformer = p["backbone"], p["transformer"]
  x = jax.nn.relu(apply_norm(backbone["bn1"], apply_conv(backbone["conv1"], images, 2)))
  for stage in ("layer1", "layer2"):
    for i in "01":
      x = basic_block(backbone[stage][i], x, 2 if "downsample" in backbone[stage][i] else 1)
  memory = apply_conv(p["input_proj"], x).reshape(len(images), -1, WIDTH)

  def feed_forward(layer, x):
    return x + apply_dense(layer["linear2"], jax.nn.relu(apply_dense(layer["linear1"], x)))

  for i in range(LAYERS):
    layer = transformer["encoder"]["layers"][str(i)]
    memory = apply_norm(layer["norm1"], memory + attend(QKV, layer["self_attn"], memory))
    memory = feed_forward(layer, memory)
  queries = jnp.tile(p["query_embed"]["weight"], (len(images), 1, 1))
  y = jnp.zeros_like(queries)
  for i in range(LAYERS):
    layer = transformer["decoder"]["layers"][str(i)]
    y = apply_norm(layer["norm1"], y + attend(QKV, layer["self_attn"], y + queries))
    y += attend(QKV, layer["multihead_attn"], y + queries, memory)
    y = feed_forward(layer, apply_norm(layer["norm2"], y))
  y = apply_norm(transformer["decoder"]["norm"], y)
  boxes = y
  for i in range(3):
    boxes = jnp.tanh(apply_dense(p["bbox_embed"]["layers"][str(i)], boxes))
  return jnp.mean(apply_dense(p["class_embed"], y)) + jnp.mean(boxes)


def test_detr_is_asked_about_because_it_has_a_backbone_an_encoder_and_a_decoder():
  params, images = detr(), jax.ShapeDtypeStruct((2, 8, 8, 3), jnp.float32)
  answers = asked(r"finds 3 series of blocks", detr_loss, params, images)
  encoder, decoder = "transformer/encoder/layers/", "transformer/decoder/layers/"
  # Each follows the one before, so one series is the first answer.
  assert pasted(answers[0]) == f"backbone/layer*|{encoder}*|{decoder}*"
  plan = groups_of(detr_loss, params, images, blocks=pasted(answers[0]))
  holds(
    plan,
    params,
    "backbone/conv1 backbone/bn1",
    "backbone/layer1",
    "backbone/layer2 input_proj",
    *(f"{encoder}{i}" for i in range(LAYERS)),
    # The queries meet data inside of the decoder's first layer.
    f"{decoder}0 query_embed",
    *(f"{decoder}{i}" for i in range(1, LAYERS)),
    "transformer/decoder/norm class_embed bbox_embed",
  )


def test_perceiver_io_has_a_group_for_each_block_of_self_attention():
  params = {
    "latents": shape(4, WIDTH),
    "input": dense(WIDTH, WIDTH),
    "encoder": {
      "cross_attend": block(),
      **{f"self_attend_{i}": block() for i in range(LAYERS)},
    },
    "decoder": {"query": shape(2, WIDTH), "cross_attend": block()},
    "head": dense(WIDTH, 3),
  }

  def loss(p, x):
    encoder, decoder = p["encoder"], p["decoder"]
    x = apply_dense(p["input"], x)
    y = apply_block(encoder["cross_attend"], jnp.tile(p["latents"], (len(x), 1, 1)), x)
    for _ in range(2):  # the same blocks twice, as in the paper
      for i in range(LAYERS):
        y = apply_block(encoder[f"self_attend_{i}"], y)
    out = apply_block(decoder["cross_attend"], jnp.tile(decoder["query"], (len(x), 1, 1)), y)
    return jnp.mean(apply_dense(p["head"], out))

  plan = groups_of(loss, params, PATCHES)
  holds(
    plan,
    params,
    "latents input encoder/cross_attend",
    *(f"encoder/self_attend_{i}" for i in range(LAYERS)),
    "decoder head",
  )


def test_a_dit_has_a_group_for_each_block_and_its_embedders_are_before_them():
  params = {
    "x_embedder": dense(WIDTH, WIDTH),
    "t_embedder": {"mlp": {"0": dense(WIDTH, WIDTH), "2": dense(WIDTH, WIDTH)}},
    "y_embedder": shape(VOCAB, WIDTH),
    "blocks": {
      str(i): {"adaLN_modulation": {"1": dense(WIDTH, 2 * WIDTH)}, "attn": projections(QKV)}
      | {"mlp": {"fc1": dense(WIDTH, HIDDEN), "fc2": dense(HIDDEN, WIDTH)}}
      for i in range(LAYERS)
    },
    "final_layer": {"adaLN_modulation": {"1": dense(WIDTH, WIDTH)}, "linear": dense(WIDTH, WIDTH)},
  }

  def loss(p, x, time, label):
    t = p["t_embedder"]["mlp"]
    c = apply_dense(t["2"], jax.nn.silu(apply_dense(t["0"], time))) + p["y_embedder"][label]
    x = apply_dense(p["x_embedder"], x)
    for i in range(LAYERS):
      layer = p["blocks"][str(i)]
      modulation = apply_dense(layer["adaLN_modulation"]["1"], jax.nn.silu(c))[:, None]
      first, second = jnp.split(modulation, 2, -1)
      x += attend(QKV, layer["attn"], x * first)
      h = jax.nn.gelu(apply_dense(layer["mlp"]["fc1"], x * second))
      x += apply_dense(layer["mlp"]["fc2"], h)
    final = p["final_layer"]
    x *= apply_dense(final["adaLN_modulation"]["1"], jax.nn.silu(c))[:, None]
    return jnp.mean(apply_dense(final["linear"], x))

  time = jax.ShapeDtypeStruct((2, WIDTH), jnp.float32)
  plan = groups_of(loss, params, PATCHES, time, jax.ShapeDtypeStruct((2,), jnp.int32))
  holds(
    plan,
    params,
    "x_embedder t_embedder y_embedder",
    *(f"blocks/{i}" for i in range(LAYERS)),
    "final_layer",
  )


# ---- Layers that are used again and again


@pytest.mark.parametrize("scanned", [False, True])
def test_the_one_layer_of_albert_is_one_group(scanned):
  params = {
    "embeddings": {"word": shape(VOCAB, WIDTH), "position": shape(6, WIDTH), "LayerNorm": norm()},
    "embedding_hidden_mapping_in": dense(WIDTH, WIDTH),
    "albert_layer_groups": {"0": {"albert_layers": {"0": block()}}},
    "pooler": dense(WIDTH, WIDTH),
    "classifier": dense(WIDTH, 3),
  }

  def loss(p, tokens):
    x = p["embeddings"]["word"][tokens] + p["embeddings"]["position"][jnp.arange(6)]
    x = apply_norm(p["embeddings"]["LayerNorm"], x)
    x = apply_dense(p["embedding_hidden_mapping_in"], x)
    layer = p["albert_layer_groups"]["0"]["albert_layers"]["0"]
    if scanned:
      x, _ = jax.lax.scan(lambda x, _: (apply_block(layer, x), None), x, length=LAYERS)
    else:
      for _ in range(LAYERS):
        x = apply_block(layer, x)
    x = jnp.tanh(apply_dense(p["pooler"], x[:, 0]))
    return jnp.mean(apply_dense(p["classifier"], x))

  plan = groups_of(loss, params, TOKENS)
  holds(
    plan,
    params,
    "embeddings",
    "embedding_hidden_mapping_in",
    "albert_layer_groups",
    "pooler",
    "classifier",
  )
  assert "blocks: each layer" in str(plan)


class Recurrent(nn.Module):
  """Embeds tokens, runs LSTMs of some kind over them and classifies."""

  form: str

  @nn.compact
  def __call__(self, tokens):
    x = nn.Embed(VOCAB, WIDTH)(tokens)

    def cell():
      return nn.RNN(nn.OptimizedLSTMCell(WIDTH))

    for _ in range({"one": 1, "three": 3}.get(self.form, 0)):
      x = cell()(x)
    for _ in range({"both ways": 1, "both ways, twice": 2}.get(self.form, 0)):
      x = nn.Bidirectional(cell(), cell())(x)
    return nn.Dense(3)(x)


def recurrent(form):
  module = Recurrent(form)
  variables = jax.eval_shape(module.init, jax.random.key(0), TOKENS)
  loss, params, state = ob_linen.split_loss(lambda model, x: jnp.mean(model(x)), module, variables)
  return loss, params, state, TOKENS


def test_an_lstm_is_a_group_and_so_is_each_of_several():
  loss, params, *args = recurrent("one")
  plan = groups_of(loss, params, *args)
  holds(plan, params, "Embed_0", "OptimizedLSTMCell_0", "Dense_0")
  loss, params, *args = recurrent("three")
  plan = groups_of(loss, params, *args)
  holds(plan, params, "Embed_0", *(f"OptimizedLSTMCell_{i}" for i in range(3)), "Dense_0")


def test_the_directions_of_a_bilstm_are_not_a_chain_and_are_asked_about():
  loss, params, *args = recurrent("both ways")
  answers = asked(r"must be told the blocks", loss, params, *args)
  cells = ("OptimizedLSTMCell_0", "OptimizedLSTMCell_1")
  assert pasted(answers[0]) == cells
  plan = groups_of(loss, params, *args, blocks=pasted(answers[0]))
  holds(plan, params, "Embed_0", " ".join(cells), "Dense_0")
  # Nothing is cut between the directions, so a number of groups is an answer, too.
  assert groups_of(loss, params, *args, num_groups=3) == plan
  loss, params, *args = recurrent("both ways, twice")
  answers = asked(r"must be told the blocks", loss, params, *args)
  plan = groups_of(loss, params, *args, blocks=pasted(answers[0]))
  assert groups_of(loss, params, *args, blocks=["*LSTMCell_[02]", "*LSTMCell_[13]"]) == plan
  pairs = (f"OptimizedLSTMCell_{i} OptimizedLSTMCell_{i + 1}" for i in (0, 2))
  holds(plan, params, "Embed_0", *pairs, "Dense_0")


# ---- Adapters


@pytest.mark.parametrize("names", [("lora_a", "lora_b"), ("w1", "w2"), ("down", "up")])
@pytest.mark.parametrize("trained", ["adapters", "all"])
def test_adapters_on_every_second_kernel_are_grouped_by_the_block_around_them(names, trained):
  kernels = ("query", "key", "value", "out", "fc1", "fc2")
  adapter = {names[0]: shape(WIDTH, 2), names[1]: shape(2, WIDTH)}
  block = {name: adapter for name in kernels[::2]}
  base = {name: {"kernel": shape(WIDTH, WIDTH)} for name in kernels}
  if trained == "all":
    block = {name: base[name] | block.get(name, {}) for name in kernels}
  params = {"blocks": [block] * LAYERS}
  if trained == "all":
    params |= {"embed": shape(VOCAB, WIDTH), "head": dense(WIDTH, 3)}

  def loss(p, tokens):
    eye = jnp.eye(WIDTH)
    x = p["embed"][tokens] if "embed" in p else jnp.eye(VOCAB, WIDTH)[tokens]

    def apply(layer, name, x):
      leaves = layer.get(name, {})
      y = x @ leaves.get("kernel", eye)
      return y + x @ leaves[names[0]] @ leaves[names[1]] if names[0] in leaves else y

    for layer in p["blocks"]:
      q, k, v = (apply(layer, name, x) for name in kernels[:3])
      x += apply(layer, "out", jax.nn.softmax(q @ k.mT) @ v)
      x += apply(layer, "fc2", jax.nn.relu(apply(layer, "fc1", x)))
    return jnp.mean(apply_dense(p["head"], x) if "head" in p else x)

  plan = groups_of(loss, params, TOKENS)
  blocks = [f"blocks/{i}" for i in range(LAYERS)]
  holds(plan, params, *(["embed", *blocks, "head"] if trained == "all" else blocks))


def test_adapters_on_every_second_layer_of_a_chain_have_a_group_each():
  kernels = [jnp.eye(WIDTH)] * 6
  params = {str(i): {"a": shape(WIDTH, 2), "b": shape(2, WIDTH)} for i in range(0, 6, 2)}

  def loss(p, x):
    for i, kernel in enumerate(kernels):
      adapter = p.get(str(i))
      x = jnp.tanh(x @ (kernel if adapter is None else kernel + adapter["a"] @ adapter["b"]))
    return jnp.mean(x)

  holds(groups_of(loss, params, PATCHES), params, "0", "2", "4")

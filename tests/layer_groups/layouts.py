"""Public models at tiny sizes, for their names, their modules and the order in which they run.

Vision transformer (Flax), BERT and T5 (transformers), T5X, GPT-2, gemma, ResNet (Flax's example and
torchvision), ConvNeXt (timm and its authors'), U-Nets (diffusers and a plain one).
Shapes are abstract: only traces are read.
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

LAYERS, VOCAB, WIDTH, HIDDEN, HEADS = 12, 11, 8, 12, 2
TOKENS = jax.ShapeDtypeStruct((2, 6), jnp.int32)
IMAGES = jax.ShapeDtypeStruct((2, 16, 16, 3), jnp.float32)


class Layout(NamedTuple):
  """A model, the names that a user gives to `layer_groups`, and the groups that these make.

  A group is a prefix of its paths, or several; of a scan `prefix[i]` is its layer i.
  """

  loss: Callable[..., Any]
  params: Any
  args: tuple[Any, ...]
  names: list[str]
  groups: list[str | tuple[str, ...]]


def shape(*sizes: int) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(sizes, jnp.float32)


def dense(inputs: int, outputs: int) -> Any:
  return {"kernel": shape(inputs, outputs), "bias": shape(outputs)}


def norm() -> Any:
  return {"scale": shape(WIDTH), "bias": shape(WIDTH)}


def conv(size: int, inputs: int = WIDTH, outputs: int = WIDTH) -> Any:
  return {"kernel": shape(size, size, inputs, outputs)}


def apply_dense(p: Any, x: Any) -> Any:
  return x @ p["kernel"] + p["bias"]


def apply_norm(p: Any, x: Any) -> Any:
  x = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)
  return x * p["scale"] + p["bias"]


def apply_conv(p: Any, x: Any, stride: int = 1, groups: int = 1) -> Any:
  return jax.lax.conv_general_dilated(
    x,
    p["kernel"],
    (stride, stride),
    "SAME",
    dimension_numbers=("NHWC", "HWIO", "NHWC"),
    feature_group_count=groups,
  )


def project(p: Any, x: Any) -> Any:
  return x @ p["kernel"] + p.get("bias", 0)


def attend(names: str, p: Any, x: Any, memory: Any = None, bias: Any = 0.0) -> Any:
  """Attention whose four projections have the names `names`, separated by spaces."""
  memory = x if memory is None else memory
  query, key, value, out = names.split()
  q, k, v = (
    project(p[name], y).reshape(*y.shape[:2], HEADS, -1)
    for name, y in ((query, x), (key, memory), (value, memory))
  )
  scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) + bias
  mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
  return project(p[out], mixed.reshape(x.shape))


def projections(names: str) -> Any:
  return {name: dense(WIDTH, WIDTH) for name in names.split()}


def stacked(tree: Any, length: int = LAYERS) -> Any:
  return jax.tree.map(lambda x: shape(length, *x.shape), tree)


def run(block: Callable[..., Any], x: Any, layers: Any, scanned: bool) -> Any:
  """The layers one after the other: a list of their params, or in one scan over stacked ones."""
  if scanned:
    return jax.lax.scan(lambda x, p: (block(p, x), None), x, layers)[0]
  for p in layers:
    x = block(p, x)
  return x


def numbered(params: Any, prefix: str) -> list[Any]:
  """The modules of a prefix, in the order of their numbers."""
  keys = [key for key in params if key.startswith(prefix) and key.removeprefix(prefix).isdigit()]
  return [params[key] for key in sorted(keys, key=lambda key: int(key.removeprefix(prefix)))]


def layers_of(name: str, separator: str, block: Any, scanned: bool) -> Any:
  """An entry of params for each layer, or one for all."""
  if scanned:
    return {name: stacked(block)}
  if separator == "/":
    return {name: {str(i): block for i in range(LAYERS)}}
  return {f"{name}{separator}{i}": block for i in range(LAYERS)}


def series_of(name: str, separator: str, scanned: bool) -> str:
  return f"{name}[*]" if scanned else f"{name}{separator}*"


def paths_of(name: str, separator: str, scanned: bool) -> list[str | tuple[str, ...]]:
  if scanned:
    return [f"{name}/[{i}]" for i in range(LAYERS)]
  return [f"{name}{separator}{i}/" for i in range(LAYERS)]


def get_layers(params: Any, name: str, separator: str, scanned: bool) -> Any:
  if scanned:
    return params[name]
  return numbered(params[name], "") if separator == "/" else numbered(params, f"{name}{separator}")


# ---- Transformers

QKV = "query key value out"


def vit(scanned: bool, pool: bool = False) -> Layout:
  block = {
    "LayerNorm_0": norm(),
    "MultiHeadDotProductAttention_0": projections(QKV),
    "LayerNorm_1": norm(),
    "MlpBlock_0": {"Dense_0": dense(WIDTH, HIDDEN), "Dense_1": dense(HIDDEN, WIDTH)},
  }
  params = {
    "embedding": conv(4, 3) | {"bias": shape(WIDTH)},
    "cls": shape(1, 1, WIDTH),
    "Transformer": {
      "posembed_input": {"pos_embedding": shape(1, 17, WIDTH)},
      "encoder_norm": norm(),
      **layers_of("encoderblock", "_", block, scanned),
    },
    "pre_logits": dense(WIDTH, WIDTH),
    "head": dense(WIDTH, 5),
  }

  def apply_block(p, x):
    x += attend(QKV, p["MultiHeadDotProductAttention_0"], apply_norm(p["LayerNorm_0"], x))
    h = jax.nn.gelu(apply_dense(p["MlpBlock_0"]["Dense_0"], apply_norm(p["LayerNorm_1"], x)))
    return x + apply_dense(p["MlpBlock_0"]["Dense_1"], h)

  def loss(params, images):
    x = apply_conv(params["embedding"], images, 4) + params["embedding"]["bias"]
    x = x.reshape(len(images), -1, WIDTH)
    x = jnp.concatenate([jnp.tile(params["cls"], (len(x), 1, 1)), x], axis=1)
    encoder = params["Transformer"]
    x += encoder["posembed_input"]["pos_embedding"]
    x = run(apply_block, x, get_layers(encoder, "encoderblock", "_", scanned), scanned)
    x = apply_norm(encoder["encoder_norm"], x)
    x = x.mean(1) if pool else x[:, 0]
    x = jnp.tanh(apply_dense(params["pre_logits"], x))
    return jnp.mean(apply_dense(params["head"], x))

  block_names = "Transformer/encoderblock", "_", scanned
  first = "embedding", "cls", "Transformer/posembed_input"
  last = "Transformer/encoder_norm", "pre_logits", "head"
  names = ["|".join(first), series_of(*block_names), "|".join(last)]
  return Layout(loss, params, (IMAGES,), names, [first, *paths_of(*block_names), last])


def bert(scanned: bool, masked_lm: bool = False) -> Layout:
  block = {
    "attention": {
      "self": projections("query key value"),
      "output": {"dense": dense(WIDTH, WIDTH), "LayerNorm": norm()},
    },
    "intermediate": {"dense": dense(WIDTH, HIDDEN)},
    "output": {"dense": dense(HIDDEN, WIDTH), "LayerNorm": norm()},
  }
  params = {
    "embeddings": {
      "word_embeddings": {"embedding": shape(VOCAB, WIDTH)},
      "position_embeddings": {"embedding": shape(16, WIDTH)},
      "token_type_embeddings": {"embedding": shape(2, WIDTH)},
      "LayerNorm": norm(),
    },
    "encoder": layers_of("layer", "/", block, scanned),
  }
  if masked_lm:
    head = {"transform": {"dense": dense(WIDTH, WIDTH), "LayerNorm": norm()}, "bias": shape(VOCAB)}
    params["cls"] = {"predictions": head}
  else:
    params |= {"pooler": {"dense": dense(WIDTH, WIDTH)}, "classifier": dense(WIDTH, 3)}

  def apply_block(p, x):
    attention = {**p["attention"]["self"], "out": p["attention"]["output"]["dense"]}
    x = apply_norm(p["attention"]["output"]["LayerNorm"], x + attend(QKV, attention, x))
    h = jax.nn.gelu(apply_dense(p["intermediate"]["dense"], x))
    return apply_norm(p["output"]["LayerNorm"], x + apply_dense(p["output"]["dense"], h))

  def loss(params, tokens):
    embeddings = params["embeddings"]
    words = embeddings["word_embeddings"]["embedding"]
    x = words[tokens] + embeddings["position_embeddings"]["embedding"][: tokens.shape[1]]
    x += embeddings["token_type_embeddings"]["embedding"][jnp.zeros_like(tokens)]
    x = apply_norm(embeddings["LayerNorm"], x)
    x = run(apply_block, x, get_layers(params["encoder"], "layer", "/", scanned), scanned)
    if masked_lm:
      head = params["cls"]["predictions"]
      x = jax.nn.gelu(apply_dense(head["transform"]["dense"], x))
      x = apply_norm(head["transform"]["LayerNorm"], x)
      return jnp.mean(x @ words.T + head["bias"])
    x = jnp.tanh(apply_dense(params["pooler"]["dense"], x[:, 0]))
    return jnp.mean(apply_dense(params["classifier"], x))

  last = ("cls",) if masked_lm else ("pooler", "classifier")
  names = ["embeddings", series_of("encoder/layer", "/", scanned), "|".join(last)]
  groups = ["embeddings", *paths_of("encoder/layer", "/", scanned), last]
  return Layout(loss, params, (TOKENS,), names, groups)


def gpt2(scanned: bool, tied: bool = True) -> Layout:
  block = {
    "ln_1": norm(),
    "attn": {"c_attn": dense(WIDTH, 3 * WIDTH), "c_proj": dense(WIDTH, WIDTH)},
    "ln_2": norm(),
    "mlp": {"c_fc": dense(WIDTH, HIDDEN), "c_proj": dense(HIDDEN, WIDTH)},
  }
  params = {
    "wte": {"embedding": shape(VOCAB, WIDTH)},
    "wpe": {"embedding": shape(16, WIDTH)},
    "ln_f": norm(),
    **layers_of("h", "/", block, scanned),
  }
  if not tied:
    params["lm_head"] = {"kernel": shape(WIDTH, VOCAB)}

  def apply_block(p, x):
    q, k, v = jnp.split(apply_dense(p["attn"]["c_attn"], apply_norm(p["ln_1"], x)), 3, -1)
    x += apply_dense(p["attn"]["c_proj"], jax.nn.softmax(q @ k.mT) @ v)
    h = jax.nn.gelu(apply_dense(p["mlp"]["c_fc"], apply_norm(p["ln_2"], x)))
    return x + apply_dense(p["mlp"]["c_proj"], h)

  def loss(params, tokens):
    table = params["wte"]["embedding"]
    x = table[tokens] + params["wpe"]["embedding"][jnp.arange(tokens.shape[1])]
    x = run(apply_block, x, get_layers(params, "h", "/", scanned), scanned)
    x = apply_norm(params["ln_f"], x)
    return jnp.mean(x @ (table.T if tied else params["lm_head"]["kernel"]))

  last = ("ln_f",) if tied else ("ln_f", "lm_head")
  names = ["wte|wpe", series_of("h", "/", scanned), "|".join(last)]
  return Layout(
    loss, params, (TOKENS,), names, [("wte", "wpe"), *paths_of("h", "/", scanned), last]
  )


def gemma(scanned: bool) -> Layout:
  scale = {"scale": shape(WIDTH)}
  block = {
    "pre_attention_norm": scale,
    "attn": {
      "q_einsum": {"w": shape(HEADS, WIDTH, WIDTH // HEADS)},
      "kv_einsum": {"w": shape(2, 1, WIDTH, WIDTH // HEADS)},
      "attn_vec_einsum": {"w": shape(HEADS, WIDTH // HEADS, WIDTH)},
    },
    "post_attention_norm": scale,
    "pre_ffw_norm": scale,
    "mlp": {"gating_einsum": shape(2, WIDTH, HIDDEN), "linear": shape(HIDDEN, WIDTH)},
    "post_ffw_norm": scale,
  }
  params = {
    "embedder": {"input_embedding": shape(VOCAB, WIDTH)},
    "final_norm": scale,
    **layers_of("layer", "_", block, scanned),
  }

  def rms(p, x):
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * (1 + p["scale"])

  def apply_block(p, x):
    h = rms(p["pre_attention_norm"], x)
    q = jnp.einsum("btd,ndh->btnh", h, p["attn"]["q_einsum"]["w"])
    k, v = jnp.einsum("bsd,ckdh->cbskh", h, p["attn"]["kv_einsum"]["w"])
    probs = jax.nn.softmax(jnp.einsum("btnh,bskh->bnts", q, k))
    h = jnp.einsum("bnts,bskh->btnh", probs, v)
    h = jnp.einsum("btnh,nhd->btd", h, p["attn"]["attn_vec_einsum"]["w"])
    x += rms(p["post_attention_norm"], h)
    gate, up = jnp.einsum("btd,cdf->cbtf", rms(p["pre_ffw_norm"], x), p["mlp"]["gating_einsum"])
    return x + rms(p["post_ffw_norm"], (jax.nn.gelu(gate) * up) @ p["mlp"]["linear"])

  def loss(params, tokens):
    table = params["embedder"]["input_embedding"]
    x = table[tokens] * jnp.sqrt(WIDTH)
    x = run(apply_block, x, get_layers(params, "layer", "_", scanned), scanned)
    return jnp.mean(jnp.tanh(rms(params["final_norm"], x) @ table.T))

  names = ["embedder", series_of("layer", "_", scanned), "final_norm"]
  groups = ["embedder", *paths_of("layer", "_", scanned), "final_norm"]
  return Layout(loss, params, (TOKENS,), names, groups)


T5_NAMES = "q k v o"


def relative_bias(table: Any, queries: int, keys: int) -> Any:
  distance = jnp.arange(keys)[None] - jnp.arange(queries)[:, None]
  return jnp.moveaxis(table[jnp.clip(distance + 4, 0, 7)], -1, 0)


def t5() -> Layout:
  """The layout of transformers: the table of relative positions is in the first block."""
  scale = {"weight": shape(WIDTH)}

  def sublayer(name, inner):
    return {name: inner, "layer_norm": scale}

  def block(decoder, first):
    attention = projections(T5_NAMES)
    if first:
      attention["relative_attention_bias"] = {"embedding": shape(8, HEADS)}
    mlp = {"wi": dense(WIDTH, HIDDEN), "wo": dense(HIDDEN, WIDTH)}
    sublayers = [sublayer("SelfAttention", attention), sublayer("DenseReluDense", mlp)]
    if decoder:
      sublayers.insert(1, sublayer("EncDecAttention", projections(T5_NAMES)))
    return {"layer": {str(i): layer for i, layer in enumerate(sublayers)}}

  def stack(decoder):
    blocks = {str(i): block(decoder, i == 0) for i in range(LAYERS)}
    return {"block": blocks, "final_layer_norm": scale}

  params = {
    "shared": {"embedding": shape(VOCAB, WIDTH)},
    "encoder": stack(False),
    "decoder": stack(True),
    "lm_head": {"kernel": shape(WIDTH, VOCAB)},
  }

  def rms(p, x):
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * p["weight"]

  def apply_stack(p, x, memory):
    table = p["block"]["0"]["layer"]["0"]["SelfAttention"]["relative_attention_bias"]["embedding"]
    bias = relative_bias(table, x.shape[1], x.shape[1])
    for block in numbered(p["block"], ""):
      for layer in numbered(block["layer"], ""):
        h = rms(layer["layer_norm"], x)
        if "SelfAttention" in layer:
          x += attend(T5_NAMES, layer["SelfAttention"], h, bias=bias)
        elif "EncDecAttention" in layer:
          x += attend(T5_NAMES, layer["EncDecAttention"], h, memory)
        else:
          h = jax.nn.relu(apply_dense(layer["DenseReluDense"]["wi"], h))
          x += apply_dense(layer["DenseReluDense"]["wo"], h)
    return rms(p["final_layer_norm"], x)

  def loss(params, tokens):
    table = params["shared"]["embedding"]
    memory = apply_stack(params["encoder"], table[tokens], None)
    x = apply_stack(params["decoder"], table[tokens[:, :4]], memory)
    return jnp.mean(x @ params["lm_head"]["kernel"])

  params = jax.tree.map(lambda x: x, params)
  # Projections of T5 have no biases.
  for stack_name in ("encoder", "decoder"):
    for block_params in params[stack_name]["block"].values():
      for layer in block_params["layer"].values():
        for name in ("SelfAttention", "EncDecAttention"):
          for kernel in T5_NAMES.split():
            layer.get(name, {}).get(kernel, {}).pop("bias", None)
  names = ["shared", "encoder/block/*", "encoder/final_layer_norm", "decoder/block/*"]
  groups = [
    "shared",
    *(f"encoder/block/{i}/" for i in range(LAYERS)),
    "encoder/final_layer_norm",
    *(f"decoder/block/{i}/" for i in range(LAYERS)),
    ("decoder/final_layer_norm", "lm_head"),
  ]
  names.append("decoder/final_layer_norm|lm_head")
  return Layout(loss, params, (TOKENS,), names, groups)


def t5x(scanned: bool) -> Layout:
  """The layout of T5X: the tables of relative positions are beside the layers that share them."""
  scale = {"scale": shape(WIDTH)}

  def layer(decoder):
    params = {
      "pre_self_attention_layer_norm": scale,
      "self_attention": {name: {"kernel": shape(WIDTH, WIDTH)} for name in QKV.split()},
      "pre_mlp_layer_norm": scale,
      "mlp": {"wi": {"kernel": shape(WIDTH, HIDDEN)}, "wo": {"kernel": shape(HIDDEN, WIDTH)}},
    }
    if decoder:
      cross = {name: {"kernel": shape(WIDTH, WIDTH)} for name in QKV.split()}
      params |= {"pre_cross_attention_layer_norm": scale, "encoder_decoder_attention": cross}
    return params

  def stack(name, decoder):
    return {
      "relpos_bias": {"rel_embedding": shape(8, HEADS)},
      f"{name}_norm": scale,
      **layers_of("layers", "_", layer(decoder), scanned),
    }

  params = {
    "token_embedder": {"embedding": shape(VOCAB, WIDTH)},
    "encoder": stack("encoder", False),
    "decoder": stack("decoder", True) | {"logits_dense": {"kernel": shape(WIDTH, VOCAB)}},
  }

  def rms(p, x):
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * p["scale"]

  def apply_stack(name, p, x, memory):
    bias = relative_bias(p["relpos_bias"]["rel_embedding"], x.shape[1], x.shape[1])

    def block(layer, x):
      h = rms(layer["pre_self_attention_layer_norm"], x)
      x += attend(QKV, layer["self_attention"], h, bias=bias)
      if memory is not None:
        h = rms(layer["pre_cross_attention_layer_norm"], x)
        x += attend(QKV, layer["encoder_decoder_attention"], h, memory)
      h = rms(layer["pre_mlp_layer_norm"], x) @ layer["mlp"]["wi"]["kernel"]
      return x + jax.nn.relu(h) @ layer["mlp"]["wo"]["kernel"]

    x = run(block, x, get_layers(p, "layers", "_", scanned), scanned)
    return rms(p[f"{name}_norm"], x)

  def loss(params, tokens):
    table = params["token_embedder"]["embedding"]
    memory = apply_stack("encoder", params["encoder"], table[tokens], None)
    x = apply_stack("decoder", params["decoder"], table[tokens[:, :4]], memory)
    return jnp.mean(x @ params["decoder"]["logits_dense"]["kernel"])

  encoder, decoder = (paths_of(f"{name}/layers", "_", scanned) for name in ("encoder", "decoder"))
  first = "token_embedder", "encoder/relpos_bias"
  middle = "encoder/encoder_norm", "decoder/relpos_bias"
  last = "decoder/decoder_norm", "decoder/logits_dense"
  names = [
    "|".join(first),
    series_of("encoder/layers", "_", scanned),
    "|".join(middle),
    series_of("decoder/layers", "_", scanned),
    "|".join(last),
  ]
  return Layout(loss, params, (TOKENS,), names, [first, *encoder, middle, *decoder, last])


# ---- Convolutional networks


def basic_block(p: Any, x: Any, stride: int) -> Any:
  h = jax.nn.relu(apply_norm(p["bn1"], apply_conv(p["conv1"], x, stride)))
  h = apply_norm(p["bn2"], apply_conv(p["conv2"], h))
  if "downsample" in p:
    x = apply_norm(p["downsample"]["1"], apply_conv(p["downsample"]["0"], x, stride))
  return jax.nn.relu(x + h)


def resnet(blocks: tuple[int, ...]) -> Layout:
  """torchvision's: stages of residual blocks, the first of a stage with a projection."""
  params = {"conv1": conv(3, 3), "bn1": norm(), "fc": dense(WIDTH, 5)}
  for stage, number in enumerate(blocks):
    params[f"layer{stage + 1}"] = {str(i): residual(stage and i == 0) for i in range(number)}

  def loss(params, images):
    x = jax.nn.relu(apply_norm(params["bn1"], apply_conv(params["conv1"], images, 2)))
    for stage in numbered(params, "layer"):
      for block in numbered(stage, ""):
        x = basic_block(block, x, 2 if "downsample" in block else 1)
    return jnp.mean(apply_dense(params["fc"], x.mean((1, 2))))

  paths = [f"layer{s + 1}/{i}/" for s, number in enumerate(blocks) for i in range(number)]
  names = ["/conv1|/bn1", "layer*/*", "fc"]
  return Layout(loss, params, (IMAGES,), names, [("conv1", "bn1"), *paths, "fc"])


def residual(projects: bool) -> Any:
  block = {"conv1": conv(3), "bn1": norm(), "conv2": conv(3), "bn2": norm()}
  return block | ({"downsample": {"0": conv(1), "1": norm()}} if projects else {})


def flax_resnet() -> Layout:
  """Flax's ImageNet example: residual blocks in one series."""
  params = {"conv_init": conv(3, 3), "bn_init": norm(), "Dense_0": dense(WIDTH, 5)}
  strides = (1, 1, 2, 1, 2, 1, 2, 1)
  for i, stride in enumerate(strides):
    block = {"Conv_0": conv(3), "BatchNorm_0": norm(), "Conv_1": conv(3), "BatchNorm_1": norm()}
    if stride > 1:
      block |= {"conv_proj": conv(1), "norm_proj": norm()}
    params[f"ResNetBlock_{i}"] = block

  def loss(params, images):
    x = jax.nn.relu(apply_norm(params["bn_init"], apply_conv(params["conv_init"], images, 2)))
    for p, stride in zip(numbered(params, "ResNetBlock_"), strides, strict=True):
      h = jax.nn.relu(apply_norm(p["BatchNorm_0"], apply_conv(p["Conv_0"], x, stride)))
      h = apply_norm(p["BatchNorm_1"], apply_conv(p["Conv_1"], h))
      if "conv_proj" in p:
        x = apply_norm(p["norm_proj"], apply_conv(p["conv_proj"], x, stride))
      x = jax.nn.relu(x + h)
    return jnp.mean(apply_dense(params["Dense_0"], x.mean((1, 2))))

  paths = [f"ResNetBlock_{i}/" for i in range(len(strides))]
  names = ["conv_init|bn_init", "ResNetBlock_*", "Dense_0"]
  return Layout(loss, params, (IMAGES,), names, [("conv_init", "bn_init"), *paths, "Dense_0"])


def convnext(timm: bool) -> Layout:
  """timm's: a stage has its downsampling; and its authors': downsamplings are beside the stages."""
  depths = (2, 2, 3, 2)
  block = {
    "conv_dw": {"kernel": shape(3, 3, 1, WIDTH)},
    "norm": norm(),
    "mlp": {"fc1": dense(WIDTH, HIDDEN), "fc2": dense(HIDDEN, WIDTH)},
    "gamma": shape(WIDTH),
  }
  downsamples = [{"0": norm(), "1": conv(2)} for _ in depths[1:]]
  stages = [{str(i): block for i in range(depth)} for depth in depths]
  head = {"norm": norm(), "fc": dense(WIDTH, 5)}
  if timm:
    stage_params = [{"blocks": stage} for stage in stages]
    for stage, downsample in zip(stage_params[1:], downsamples, strict=True):
      stage["downsample"] = downsample
    stage_tree = {str(i): stage for i, stage in enumerate(stage_params)}
    params = {"stem": {"0": conv(2, 3), "1": norm()}, "stages": stage_tree, "head": head}
  else:
    layers = [{"0": conv(2, 3), "1": norm()}, *downsamples]
    params = {
      "downsample_layers": {str(i): layer for i, layer in enumerate(layers)},
      "stages": {str(i): stage for i, stage in enumerate(stages)},
      **head,
    }

  def loss(params, images):
    stem = params["stem"] if timm else params["downsample_layers"]["0"]
    x = apply_norm(stem["1"], apply_conv(stem["0"], images, 2))
    for s in range(len(depths)):
      stage = params["stages"][str(s)]
      if s:
        p = stage["downsample"] if timm else params["downsample_layers"][str(s)]
        x = apply_conv(p["1"], apply_norm(p["0"], x), 2)
      for p in numbered(stage["blocks"] if timm else stage, ""):
        h = apply_norm(p["norm"], apply_conv(p["conv_dw"], x, groups=WIDTH))
        h = apply_dense(p["mlp"]["fc2"], jax.nn.gelu(apply_dense(p["mlp"]["fc1"], h)))
        x += p["gamma"] * h
    head = params["head"] if timm else params
    return jnp.mean(apply_dense(head["fc"], apply_norm(head["norm"], x.mean((1, 2)))))

  if timm:
    names = ["stem", "stages/*", "head"]
    groups = ["stem", *(f"stages/{s}/" for s in range(len(depths))), "head"]
  else:
    names = ["downsample_layers/*|stages/*", "/norm|fc"]
    groups = [(f"downsample_layers/{s}/", f"stages/{s}/") for s in range(len(depths))]
    groups.append(("norm", "fc"))
  return Layout(loss, params, (IMAGES,), names, groups)


def unet() -> Layout:
  """A plain U-Net: a block down and up at each resolution, and one at the bottom."""
  down = {"conv_0": conv(3), "conv_1": conv(3)}
  up = {"up": conv(2), "conv_0": conv(3, 2 * WIDTH), "conv_1": conv(3)}
  params = {
    "stem": conv(3, 3),
    "head": conv(1, WIDTH, 2),
    "bottleneck": down,
    **{f"down_{i}": down for i in range(3)},
    **{f"up_{i}": up for i in range(3)},
  }

  def loss(params, images):
    x, skips = apply_conv(params["stem"], images), []
    for p in numbered(params, "down_"):
      x = jax.nn.relu(apply_conv(p["conv_1"], jax.nn.relu(apply_conv(p["conv_0"], x))))
      skips.append(x)
      x = x[:, ::2, ::2]
    p = params["bottleneck"]
    x = jax.nn.relu(apply_conv(p["conv_1"], jax.nn.relu(apply_conv(p["conv_0"], x))))
    for p in numbered(params, "up_"):
      x = apply_conv(p["up"], x.repeat(2, 1).repeat(2, 2))
      x = jnp.concatenate([x, skips.pop()], -1)
      x = jax.nn.relu(apply_conv(p["conv_1"], jax.nn.relu(apply_conv(p["conv_0"], x))))
    return jnp.mean(apply_conv(params["head"], x))

  paths = [*(f"down_{i}/" for i in range(3)), "bottleneck/", *(f"up_{i}/" for i in range(3))]
  names = ["stem", "down_*", "bottleneck", "up_*", "head"]
  return Layout(loss, params, (IMAGES,), names, ["stem", *paths, "head"])


def diffusion_unet() -> Layout:
  """The one of diffusers: pairs of a residual block and an attention at each resolution."""

  def resnet_block(inputs=WIDTH):
    block = {
      "norm1": {"scale": shape(inputs), "bias": shape(inputs)},
      "conv1": conv(3, inputs),
      "time_emb_proj": dense(WIDTH, WIDTH),
      "norm2": norm(),
      "conv2": conv(3),
    }
    return block | ({"conv_shortcut": conv(1, inputs)} if inputs != WIDTH else {})

  attention = {"norm": norm(), **projections(QKV)}
  params = {
    "conv_in": conv(3, 3),
    "time_embedding": {"linear_1": dense(WIDTH, WIDTH), "linear_2": dense(WIDTH, WIDTH)},
    "mid_block": {
      "resnets_0": resnet_block(),
      "attentions_0": attention,
      "resnets_1": resnet_block(),
    },
    "conv_norm_out": norm(),
    "conv_out": conv(3, WIDTH, 3),
  }
  for i in range(3):
    for j in range(2):
      down = params.setdefault(f"down_blocks_{i}", {})
      up = params.setdefault(f"up_blocks_{i}", {})
      down |= {f"resnets_{j}": resnet_block(), f"attentions_{j}": attention}
      up |= {f"resnets_{j}": resnet_block(2 * WIDTH), f"attentions_{j}": attention}
    if i < 2:
      down["downsamplers_0"] = {"conv": conv(3)}
      up["upsamplers_0"] = {"conv": conv(3)}

  def apply_resnet(p, x, embedded):
    h = apply_conv(p["conv1"], jax.nn.silu(apply_norm(p["norm1"], x)))
    h += apply_dense(p["time_emb_proj"], jax.nn.silu(embedded))[:, None, None]
    h = apply_conv(p["conv2"], jax.nn.silu(apply_norm(p["norm2"], h)))
    return h + (apply_conv(p["conv_shortcut"], x) if "conv_shortcut" in p else x)

  def apply_attention(p, x):
    flat = x.reshape(len(x), -1, WIDTH)
    return (flat + attend(QKV, p, apply_norm(p["norm"], flat))).reshape(x.shape)

  def loss(params, images, times):
    angles = times[:, None] * jnp.arange(1.0, WIDTH // 2 + 1)
    embedded = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
    embedded = jax.nn.silu(apply_dense(params["time_embedding"]["linear_1"], embedded))
    embedded = apply_dense(params["time_embedding"]["linear_2"], embedded)
    x, skips = apply_conv(params["conv_in"], images), []
    for block in numbered(params, "down_blocks_"):
      for j in range(2):
        x = apply_resnet(block[f"resnets_{j}"], x, embedded)
        x = apply_attention(block[f"attentions_{j}"], x)
        skips.append(x)
      if "downsamplers_0" in block:
        x = apply_conv(block["downsamplers_0"]["conv"], x, 2)
    middle = params["mid_block"]
    x = apply_resnet(middle["resnets_0"], x, embedded)
    x = apply_attention(middle["attentions_0"], x)
    x = apply_resnet(middle["resnets_1"], x, embedded)
    for block in numbered(params, "up_blocks_"):
      for j in range(2):
        x = jnp.concatenate([x, skips.pop()], -1)
        x = apply_attention(
          block[f"attentions_{j}"], apply_resnet(block[f"resnets_{j}"], x, embedded)
        )
      if "upsamplers_0" in block:
        x = apply_conv(block["upsamplers_0"]["conv"], x.repeat(2, 1).repeat(2, 2))
    return jnp.mean(apply_conv(params["conv_out"], apply_norm(params["conv_norm_out"], x)))

  names = ["conv_in|time_embedding", "down_blocks_*", "mid_block", "up_blocks_*"]
  groups = [
    ("conv_in", "time_embedding"),
    *(f"down_blocks_{i}/" for i in range(3)),
    "mid_block",
    *(f"up_blocks_{i}/" for i in range(3)),
    ("conv_norm_out", "conv_out"),
  ]
  times = jax.ShapeDtypeStruct((2,), jnp.float32)
  return Layout(loss, params, (IMAGES, times), [*names, "conv_norm_out|conv_out"], groups)


LAYOUTS = {
  "vit": functools.partial(vit, False),
  "vit scanned": functools.partial(vit, True),
  "vit pooled": functools.partial(vit, False, pool=True),
  "bert": functools.partial(bert, False),
  "bert scanned": functools.partial(bert, True),
  "bert, masked words": functools.partial(bert, False, masked_lm=True),
  "gpt2": functools.partial(gpt2, False),
  "gpt2 scanned": functools.partial(gpt2, True),
  "gpt2 untied": functools.partial(gpt2, False, tied=False),
  "gpt2 untied scanned": functools.partial(gpt2, True, tied=False),
  "gemma": functools.partial(gemma, False),
  "gemma scanned": functools.partial(gemma, True),
  "t5": t5,
  "t5x": functools.partial(t5x, False),
  "t5x scanned": functools.partial(t5x, True),
  "resnet 18": functools.partial(resnet, (2, 2, 2, 2)),
  "resnet 34": functools.partial(resnet, (3, 4, 6, 3)),
  "flax resnet": flax_resnet,
  "convnext": functools.partial(convnext, True),
  "convnext of its authors": functools.partial(convnext, False),
  "unet": unet,
  "diffusion unet": diffusion_unet,
}

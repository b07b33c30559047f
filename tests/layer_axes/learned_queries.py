"""Small models whose kernels meet params or constants before they meet data, with their axes.

Each is a loss, its params, its other arguments, and by hand the fan-in of its kernels and the axes
of layers of its stacked leaves. All leaves without an entry have no fan-in, and are one layer.
Shapes are abstract: only traces are read.
"""

from collections.abc import Callable, Mapping
import functools
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

D, H, K, LAYERS, VOCAB = 6, 2, 3, 3, 11


class Structure(NamedTuple):
  """A model and the axes of its leaves, by hand."""

  loss: Callable[..., Any]
  params: Any
  args: tuple[Any, ...]
  fan_in: dict[str, tuple[int, ...]]
  stacked: Mapping[str, tuple[int, ...]] = types.MappingProxyType({})


def shape(*sizes: int) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(sizes, jnp.float32)


X = shape(4, 7, D)
ROWS = shape(4, D)
TOKENS = jax.ShapeDtypeStruct((4, 7), jnp.int32)


def dense(inputs: int = D, outputs: int = D) -> Any:
  return {"kernel": shape(inputs, outputs), "bias": shape(outputs)}


def norm() -> Any:
  return {"scale": shape(D), "bias": shape(D)}


def attention() -> Any:
  """Attention of Flax: kernels and biases have an axis of heads."""
  into = {"kernel": shape(D, H, K), "bias": shape(H, K)}
  out = {"kernel": shape(H, K, D), "bias": shape(D)}
  return {"query": into, "key": into, "value": into, "out": out}


def into_heads(p: Any, x: Any) -> Any:
  return jnp.einsum("...qd,dhk->...qhk", x, p["kernel"]) + p["bias"]


def attend(p: Any, x: Any, memory: Any, values: Any = None) -> Any:
  """Attention of `x` [..., queries, D] to `memory`."""
  values = memory if values is None else values
  q, k, v = (
    into_heads(p[name], y) for name, y in (("query", x), ("key", memory), ("value", values))
  )
  scores = jax.nn.softmax(jnp.einsum("...qhk,...lhk->...hql", q / np.sqrt(K), k))
  mixed = jnp.einsum("...hql,...lhk->...qhk", scores, v)
  return jnp.einsum("...qhk,hkd->...qd", mixed, p["out"]["kernel"]) + p["out"]["bias"]


def project(p: Any, x: Any) -> Any:
  return x @ p["kernel"] + p["bias"]


def normalize(p: Any, x: Any) -> Any:
  x = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)
  return x * p["scale"] + p["bias"]


def mlp() -> Any:
  return {"up": dense(D, 8), "down": dense(8, D)}


def apply_mlp(p: Any, x: Any) -> Any:
  return project(p["down"], jax.nn.gelu(project(p["up"], x)))


def tiled(table: Any, x: Any) -> Any:
  return jnp.tile(table, (len(x), 1, 1))


def kernels(params: Any, offset: int = 0) -> dict[str, tuple[int, ...]]:
  """The fan-in of kernels in Flax's layout, behind `offset` axes of layers."""
  found = {}
  for keys, leaf in jax.tree.leaves_with_path(params):
    path = "/".join(key.key for key in keys)
    if path.endswith("kernel"):
      inputs = 2 if path.endswith("out/kernel") and len(leaf.shape) - offset == 3 else 1
      found[path] = tuple(range(offset, offset + inputs))
  return found


def all_stacked(params: Any) -> dict[str, tuple[int, ...]]:
  return {"/".join(key.key for key in keys): (0,) for keys, _ in jax.tree.leaves_with_path(params)}


def stack(tree: Any, length: int = LAYERS) -> Any:
  return jax.tree.map(lambda x: shape(length, *x.shape), tree)


# ---- Learned queries


def map_head(probes: int = 1) -> Structure:
  """Attention pooling of big_vision's vision transformer, as in SigLIP."""
  params = {
    "embedding": {"kernel": shape(4, 4, 3, D), "bias": shape(D)},
    "pos_embedding": shape(1, 16, D),
    "block": {"ln": norm(), "attn": attention()},
    "head": {"probe": shape(1, probes, D), "attn": attention(), "ln": norm(), "mlp": mlp()},
    "logits": dense(D, 5),
  }

  def loss(p, images):
    x = jax.lax.conv_general_dilated(
      images, p["embedding"]["kernel"], (4, 4), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    x = (x + p["embedding"]["bias"]).reshape(len(images), -1, D) + p["pos_embedding"]
    y = normalize(p["block"]["ln"], x)
    x += attend(p["block"]["attn"], y, y)
    head = p["head"]
    x = attend(head["attn"], tiled(head["probe"], x), x)
    x += apply_mlp(head["mlp"], normalize(head["ln"], x))
    return jnp.mean(project(p["logits"], x[:, 0]))

  fan_in = kernels(params) | {"embedding/kernel": (0, 1, 2)}
  return Structure(loss, params, (shape(4, 16, 16, 3),), fan_in)


def map_head_of_one_vector() -> Structure:
  """A query without an axis of queries, against keys that the heads share."""
  params = {
    "probe": shape(D),
    "query": {"kernel": shape(D, H, K), "bias": shape(H, K)},
    "key": dense(D, K),
  }

  def loss(p, x):
    q = jnp.einsum("d,dhk->hk", p["probe"], p["query"]["kernel"]) + p["query"]["bias"]
    return jnp.mean(jnp.einsum("hk,blk->bhl", q, project(p["key"], x)))

  return Structure(loss, params, (X,), kernels(params))


def shared_keys_and_query_norm() -> Structure:
  """Heads share their keys, and queries are normalized after the projection."""
  params = {
    "latents": shape(5, D),
    "to_q": shape(D, H, K),
    "offset": shape(H, K),
    "query_norm": {"gain": shape(H, K), "offset": shape(1, 1, K)},
    "to_k": shape(D, K),
  }

  def loss(p, x):
    q = jnp.einsum("qd,dhk->qhk", p["latents"], p["to_q"]) + p["offset"]
    q /= jnp.linalg.norm(q, axis=-1, keepdims=True)
    q = q * p["query_norm"]["gain"] + p["query_norm"]["offset"]
    return jnp.mean(jnp.einsum("qhk,blk->bhql", q, x @ p["to_k"]))

  return Structure(loss, params, (X,), {"to_q": (0,), "to_k": (0,)})


def in_torch_layout(probes: int = 5, biased: bool = True) -> Structure:
  """Kernels have their outputs first, and a stack of linear layers acts on each query."""
  linear = {"weight": shape(D, D)} | ({"bias": shape(D)} if biased else {})
  params = {"query": shape(probes, D), "norm": {"weight": shape(D), "bias": shape(D)}}
  params |= {name: linear for name in ("first", "second", "q_proj", "k_proj")}

  def apply(p, x):
    return p["weight"] @ x + p.get("bias", 0)

  def loss(p, x):
    def project(query):
      query = query / jnp.linalg.norm(query) * p["norm"]["weight"] + p["norm"]["bias"]
      return apply(p["q_proj"], apply(p["second"], jax.nn.relu(apply(p["first"], query))))

    queries = jax.vmap(project)(p["query"])
    keys = jax.vmap(jax.vmap(functools.partial(apply, p["k_proj"])))(x)
    return jnp.mean(jnp.einsum("qd,bld->bql", queries, keys))

  fan_in = {f"{name}/weight": (1,) for name in ("first", "second", "q_proj", "k_proj")}
  return Structure(loss, params, (X,), fan_in)


def fused_projections() -> Structure:
  """PyTorch's attention: one kernel and one bias for queries, keys and values."""
  params = {
    "query_embed": {"weight": shape(5, D)},
    "in_proj_weight": shape(3 * D, D),
    "in_proj_bias": shape(3 * D),
    "out_proj": {"weight": shape(D, D), "bias": shape(D)},
  }

  def loss(p, x):
    wq, wk, wv = jnp.split(p["in_proj_weight"], 3)
    bq, bk, bv = jnp.split(p["in_proj_bias"], 3)
    q = (p["query_embed"]["weight"] @ wq.T + bq).reshape(-1, H, K)
    k, v = ((x @ w.T + b).reshape(*x.shape[:2], H, K) for w, b in ((wk, bk), (wv, bv)))
    weights = jax.nn.softmax(jnp.einsum("qhk,blhk->bhql", q, k))
    mixed = jnp.einsum("bhql,blhk->bqhk", weights, v).reshape(len(x), -1, D)
    return jnp.mean(mixed @ p["out_proj"]["weight"].T + p["out_proj"]["bias"])

  return Structure(loss, params, (X,), {"in_proj_weight": (1,), "out_proj/weight": (1,)})


def rows_of_stacked_leaves() -> Structure:
  """Queries, keys and values have one leaf of kernels and one of biases."""
  params = {"queries": shape(5, D), "w": shape(3, D, H, K), "b": shape(3, H, K)}

  def loss(p, x):
    q = jnp.einsum("qd,dhk->qhk", p["queries"], p["w"][0]) + p["b"][0]
    k, v = (jnp.einsum("bld,dhk->blhk", x, p["w"][i]) + p["b"][i] for i in (1, 2))
    weights = jax.nn.softmax(jnp.einsum("qhk,blhk->bhql", q, k))
    return jnp.mean(jnp.einsum("bhql,blhk->bqhk", weights, v))

  return Structure(loss, params, (X,), {"w": (1,)}, {"w": (0,), "b": (0,)})


def rotated_queries() -> Structure:
  """Rotary positions and grouped heads, after the projection."""
  params = {"latents": shape(5, D), "q": shape(D, 4 * 4), "q_bias": shape(16), "k": shape(D, 2, 4)}

  def rotate(x):
    angles = np.arange(x.shape[-3])[:, None, None] * np.ones(2)
    first, second = jnp.split(x, 2, axis=-1)
    sin, cos = np.sin(angles).astype(np.float32), np.cos(angles).astype(np.float32)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

  def loss(p, x):
    q = rotate((p["latents"] @ p["q"] + p["q_bias"]).reshape(5, 4, 4)).reshape(5, 2, 2, 4)
    k = rotate(jnp.einsum("bld,dgk->blgk", x, p["k"]))
    return jnp.mean(jnp.einsum("qghk,blgk->bghql", q, k))

  return Structure(loss, params, (X,), {"q": (0,), "k": (0,)})


def perceiver() -> Structure:
  """Learned latents attend to the inputs, then to each other; learned outputs attend to latents."""
  params = {
    "latents": shape(5, D),
    "positions": shape(7, D),
    "cross": {"ln_q": norm(), "ln_kv": norm(), "attn": attention(), "ln": norm(), "mlp": mlp()},
    "self": {"ln": norm(), "attn": attention()},
    "decoder": {"output_queries": shape(3, D), "ln": norm(), "attn": attention()},
    "logits": dense(D, 5),
  }

  def loss(p, x):
    z, cross = tiled(p["latents"], x), p["cross"]
    memory = normalize(cross["ln_kv"], x + p["positions"])
    z += attend(cross["attn"], normalize(cross["ln_q"], z), memory)
    z += apply_mlp(cross["mlp"], normalize(cross["ln"], z))
    y = normalize(p["self"]["ln"], z)
    z += attend(p["self"]["attn"], y, y)
    decoder = p["decoder"]
    queries = tiled(normalize(decoder["ln"], decoder["output_queries"]), x)
    return jnp.mean(project(p["logits"], attend(decoder["attn"], queries, z)))

  return Structure(loss, params, (X,), kernels(params))


def perceiver_of_layers() -> Structure:
  """The carry of a scan over layers begins with the latents."""
  layers = stack({"ln": norm(), "cross": attention(), "mlp": mlp()})
  params = {"latents": shape(5, D), "layers": layers, "logits": dense(D, 5)}

  def loss(p, x):
    def layer(z, p):
      z += attend(p["cross"], normalize(p["ln"], z), x)
      return z + apply_mlp(p["mlp"], z), None

    z, _ = jax.lax.scan(layer, tiled(p["latents"], x), p["layers"])
    return jnp.mean(project(p["logits"], z))

  fan_in = kernels({"logits": params["logits"]}) | kernels({"layers": layers}, offset=1)
  return Structure(loss, params, (X,), fan_in, all_stacked({"layers": layers}))


def recurrent() -> Structure:
  """The first state of a recurrent network is learned."""
  params = {"state": shape(1, 8), "h": shape(8, 8), "x": dense(D, 8), "out": shape(8, 2)}

  def loss(p, x):
    step = lambda h, row: (jnp.tanh(h @ p["h"] + project(p["x"], row)), None)  # noqa: E731
    state = jnp.broadcast_to(p["state"], (len(x), 8))
    return jnp.mean(jax.lax.scan(step, state, jnp.moveaxis(x, 1, 0))[0] @ p["out"])

  return Structure(loss, params, (X,), {"h": (0,), "x/kernel": (0,), "out": (0,)})


def generator() -> Structure:
  """Noise alone goes into a generator, and its images into a discriminator."""
  params = {"generator": mlp(), "shift": shape(4, D), "discriminator": mlp(), "out": shape(D, 1)}

  def loss(p, x, key):
    def score(x):
      return jnp.mean(apply_mlp(p["discriminator"], x) @ p["out"])

    made = apply_mlp(p["generator"], jax.random.normal(key, x.shape) + p["shift"])
    return score(x) - score(made)

  key = jax.eval_shape(jax.random.key, 0)
  return Structure(loss, params, (ROWS, key), kernels(params) | {"out": (0,)})


def leaky() -> Structure:
  """The first state of a recurrence without kernels."""
  params = {"state": shape(4, D), "leak": shape(1, D), "out": shape(D, 2)}

  def loss(p, x):
    step = lambda h, row: (jnp.tanh(h * p["leak"] + row), None)  # noqa: E731
    return jnp.mean(jax.lax.scan(step, p["state"], jnp.moveaxis(x, 1, 0))[0] @ p["out"])

  return Structure(loss, params, (X,), {"out": (0,)})


def detr_layer() -> Any:
  norms = {name: norm() for name in ("norm1", "norm2", "norm3")}
  return {"self": attention(), "cross": attention(), "mlp": mlp()} | norms


def detr(form: str) -> Structure:
  """Object queries meet each other in the first layer of the decoder, then the image's features."""
  layers = stack(detr_layer()) if form == "scan" else {str(i): detr_layer() for i in range(LAYERS)}
  params = {
    "query_embed": {"weight": shape(5, D)},
    "decoder": layers,
    "norm": norm(),
    "class_embed": dense(D, 4),
    "bbox": {"first": dense(D, D), "last": dense(D, 4)},
  }

  def apply_layer(p, target, queries, memory):
    q = target + queries
    target = normalize(p["norm1"], target + attend(p["self"], q, q, target))
    target += attend(p["cross"], target + queries, memory)
    target = normalize(p["norm2"], target)
    return normalize(p["norm3"], target + apply_mlp(p["mlp"], target))

  def loss(p, memory):
    queries = tiled(p["query_embed"]["weight"], memory)
    target = jnp.zeros_like(queries) if form != "learned" else queries
    if form == "scan":
      step = lambda target, layer: (apply_layer(layer, target, queries, memory), None)  # noqa: E731
      target, _ = jax.lax.scan(step, target, p["decoder"])
    else:
      for i in range(LAYERS):
        target = apply_layer(p["decoder"][str(i)], target, queries, memory)
    y = normalize(p["norm"], target)
    boxes = project(p["bbox"]["last"], jax.nn.relu(project(p["bbox"]["first"], y)))
    return jnp.mean(project(p["class_embed"], y)) + jnp.mean(jax.nn.sigmoid(boxes))

  if form != "scan":
    return Structure(loss, params, (X,), kernels(params))
  decoder = {"decoder": layers}
  fan_in = kernels({**params, "decoder": {}}) | kernels(decoder, offset=1)
  return Structure(loss, params, (X,), fan_in, all_stacked(decoder))


def q_former() -> Structure:
  """BLIP-2's: BERT's layers, of which the first has only met the query tokens."""
  layer = {
    "self": attention(),
    "self_norm": norm(),
    "cross": attention(),
    "cross_norm": norm(),
    "mlp": mlp(),
    "mlp_norm": norm(),
  }
  layers = {str(i): layer for i in range(2)}
  params = {"query_tokens": shape(1, 5, D), "embeddings_norm": norm(), "layer": layers}
  params["projection"] = dense(D, 4)

  def loss(p, image):
    x = normalize(p["embeddings_norm"], tiled(p["query_tokens"], image))
    for i in range(2):
      q = p["layer"][str(i)]
      x = normalize(q["self_norm"], x + attend(q["self"], x, x))
      x = normalize(q["cross_norm"], x + attend(q["cross"], x, image))
      x = normalize(q["mlp_norm"], x + apply_mlp(q["mlp"], x))
    return jnp.mean(project(p["projection"], x))

  return Structure(loss, params, (X,), kernels(params))


def inducing_points() -> Structure:
  """The Set Transformer's induced attention, whose heads are joined to the batch."""
  block = {name: dense() for name in ("fc_q", "fc_k", "fc_v", "fc_o")}
  params = {"inducing": shape(1, 5, D), "mab0": block, "mab1": block, "seed": shape(1, 2, D)}
  params |= {"pma": block, "out": dense(D, 2)}

  def attend_block(p, x, y):
    q, k, v = project(p["fc_q"], x), project(p["fc_k"], y), project(p["fc_v"], y)
    q_, k_, v_ = (jnp.concatenate(jnp.split(a, H, axis=2)) for a in (q, k, v))
    weights = jax.nn.softmax(q_ @ k_.mT / np.sqrt(D))
    out = jnp.concatenate(jnp.split(q_ + weights @ v_, H), axis=2)
    return out + jax.nn.relu(project(p["fc_o"], out))

  def loss(p, x):
    hidden = attend_block(p["mab0"], tiled(p["inducing"], x), x)
    x = attend_block(p["mab1"], x, hidden)
    x = attend_block(p["pma"], tiled(p["seed"], x), x)
    return jnp.mean(project(p["out"], x))

  return Structure(loss, params, (X,), kernels(params))


def slots() -> Structure:
  """Slot attention: queries from learned moments and noise."""
  params = {"mu": shape(1, 1, D), "log_sigma": shape(1, 1, D), "norm": norm()}
  params |= {"attn": attention(), "mlp": mlp()}

  def loss(p, x, key):
    noise = jax.random.normal(key, (len(x), 4, D))
    z = p["mu"] + jnp.exp(p["log_sigma"]) * noise
    for _ in range(2):
      z += attend(p["attn"], normalize(p["norm"], z), x)
      z += apply_mlp(p["mlp"], z)
    return jnp.mean(z)

  key = jax.eval_shape(jax.random.key, 0)
  return Structure(loss, params, (X, key), kernels(params))


def layers_of_queries() -> Structure:
  """Learned queries go through a scan over layers before they meet data."""
  layers = stack({"attn": attention(), "norm": norm(), "mlp": mlp()})
  params = {"queries": shape(5, D), "layers": layers, "cross": attention()}

  def layer(z, p):
    y = normalize(p["norm"], z)
    z += attend(p["attn"], y, y)
    return z + apply_mlp(p["mlp"], z), None

  def loss(p, x):
    z, _ = jax.lax.scan(layer, p["queries"], p["layers"])
    return jnp.mean(attend(p["cross"], tiled(z, x), x))

  fan_in = kernels({"cross": params["cross"]}) | kernels({"layers": layers}, offset=1)
  return Structure(loss, params, (X,), fan_in, all_stacked({"layers": layers}))


def pooling_in_each_layer(form: str) -> Structure:
  """Each layer has a probe and a pooling of its own; in a scan, or by ``vmap`` over the layers."""
  layers = stack({"probe": shape(2, D), "attn": attention(), "mlp": mlp()})
  params = {"layers": layers, "head": dense(D, 1)}

  def pool(p, x):
    return apply_mlp(p["mlp"], attend(p["attn"], tiled(p["probe"], x), x))

  def loss(p, x):
    if form == "scan":
      step = lambda x, layer: (x + pool(layer, x).mean(1, keepdims=True), None)  # noqa: E731
      x, _ = jax.lax.scan(step, x, p["layers"])
    else:
      x = jax.vmap(pool, in_axes=(0, None))(p["layers"], x).mean(0)
    return jnp.mean(project(p["head"], x))

  fan_in = kernels({"head": params["head"]}) | kernels({"layers": layers}, offset=1)
  return Structure(loss, params, (X,), fan_in, all_stacked({"layers": layers}))


def queries_of_tokens() -> Structure:
  """Learned queries attend to other learned tokens, are mixed by constants, and meet data."""
  params = {name: shape(5, D) for name in ("queries", "tokens", "values")}
  params |= {name: shape(D, D) for name in ("q", "k", "v", "o", "q2", "k2")}
  params |= {"q_offset": shape(1, D), "k_offset": shape(1, D), "gain": shape(D, 1)}

  def loss(p, x):
    q = p["queries"] @ p["q"] + p["q_offset"]
    k = p["tokens"] @ p["k"] + p["k_offset"]
    z = jax.nn.softmax(q @ k.T) @ (p["values"] @ p["v"]) @ p["o"]
    z = (np.ones((2, 5), np.float32) @ z) @ (p["gain"] * p["q2"])
    return jnp.mean(jnp.einsum("qd,bld->bql", z, x @ p["k2"]))

  return Structure(loss, params, (X,), {name: (0,) for name in ("q", "k", "v", "o", "q2", "k2")})


def style_tokens() -> Structure:
  """Data attends to learned tokens, whose keys and values are projected."""
  params = {"tokens": shape(5, D), "q": shape(D, D), "k": shape(D, D), "v": shape(D, D)}

  def loss(p, x):
    tokens = jnp.tanh(p["tokens"])
    weights = jax.nn.softmax(x @ p["q"] @ (tokens @ p["k"]).T)
    return jnp.mean(weights @ (tokens @ p["v"]))

  return Structure(loss, params, (X,), dict.fromkeys("qkv", (0,)))


def prefix() -> Structure:
  """Learned tokens before the data's, made by a network of their own."""
  params = {"prefix": shape(2, D), "network": mlp(), "cls": shape(1, 1, D), "attn": attention()}

  def loss(p, x):
    made = tiled(apply_mlp(p["network"], p["prefix"]), x)
    x = jnp.concatenate([tiled(p["cls"], x), made, x], axis=1)
    return jnp.mean(attend(p["attn"], x, x))

  return Structure(loss, params, (X,), kernels(params))


# ---- Constants


def relative_positions() -> Structure:
  """Transformer-XL's: keys from waves, and two biases of the queries."""
  params = {"q": shape(D, H, K), "k": shape(D, H, K), "r": {"kernel": shape(D, H, K)}}
  params |= {"r_bias": shape(H, K), "u": shape(H, K), "v": shape(H, K)}

  def loss(p, x):
    angles = np.arange(7)[:, None] / np.arange(1, D // 2 + 1)
    waves = np.concatenate([np.sin(angles), np.cos(angles)], 1).astype(np.float32)
    q, k = (jnp.einsum("bld,dhk->blhk", x, p[name]) for name in "qk")
    r = jnp.einsum("ld,dhk->lhk", waves, p["r"]["kernel"]) + p["r_bias"]
    content = jnp.einsum("bqhk,blhk->bhql", q + p["u"], k)
    return jnp.mean(content + jnp.einsum("bqhk,lhk->bhql", q + p["v"], r))

  return Structure(loss, params, (X,), {"q": (0,), "k": (0,), "r/kernel": (0,)})


def implicit_filters() -> Structure:
  """A network of positions makes the kernel of a depthwise convolution."""
  params = {"network": {"up": dense(D, 8), "down": dense(8, D)}, "gain": shape(D)}

  def loss(p, x):
    waves = jnp.sin(np.arange(3, dtype=np.float32)[:, None] * np.arange(1, D + 1))
    filters = apply_mlp(p["network"], waves)[:, None]
    y = jax.lax.conv_general_dilated(
      x,
      filters,
      (1,),
      "SAME",
      dimension_numbers=("NWC", "WIO", "NWC"),
      feature_group_count=D,
    )
    return jnp.mean(p["gain"] * y)

  return Structure(loss, params, (X,), kernels(params))


def resized_kernel() -> Structure:
  """FlexiViT's: constants resize the kernel of the patches."""
  params = {"patches": shape(4, 4, 3, D), "head": shape(D, 2)}

  def loss(p, images):
    resize = np.ones((2 * 2, 4 * 4), np.float32)
    resize_kernels = jax.vmap(
      jax.vmap(lambda k: (resize @ k.reshape(-1)).reshape(2, 2), 2, 2), 3, 3
    )
    x = jax.lax.conv_general_dilated(
      images,
      resize_kernels(p["patches"]),
      (2, 2),
      "VALID",
      dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    return jnp.mean(x.mean((1, 2)) @ p["head"])

  fan_in = {"patches": (0, 1, 2), "head": (0,)}
  return Structure(loss, params, (shape(4, 8, 8, 3),), fan_in)


def fixed_projections() -> Structure:
  """Kernels between fixed matrices, which are constants or a part of the model."""
  params = {"before": shape(D, 4), "after": shape(D, 4)}

  def loss(p, x):
    y = jnp.tanh(x @ (np.ones((D, D), np.float32) @ p["before"]))
    return jnp.mean(y) + jnp.mean(x @ (p["after"] @ np.ones((4, 4), np.float32)))

  return Structure(loss, params, (X,), {"before": (0,), "after": (0,)})


# ---- Products and norms of kernels


def adapters(form: str) -> Structure:
  """LoRA: the first kernel meets data, the second meets the first one's outputs."""
  torch = form.startswith("torch")
  params = {"kernel": shape(5, D) if torch else shape(D, 5), "bias": shape(5)}
  params |= {"a": shape(2, D), "b": shape(5, 2)} if torch else {"a": shape(D, 2), "b": shape(2, 5)}
  if form == "DoRA":
    params["magnitude"] = shape(1, 5)

  def loss(p, x):
    if form == "apart":
      y = x @ p["kernel"] + 0.5 * (x @ p["a"] @ p["b"])
    elif torch:
      y = x @ (p["kernel"] + 0.5 * (p["b"] @ p["a"])).T
    else:
      merged = p["kernel"] + 0.5 * (p["a"] @ p["b"])
      if form == "DoRA":
        merged = p["magnitude"] * merged / jnp.linalg.norm(merged, axis=0, keepdims=True)
      y = x @ merged
    return jnp.mean(jnp.tanh(y + p["bias"]))

  return Structure(loss, params, (X,), dict.fromkeys(("kernel", "a", "b"), (int(torch),)))


def adapters_of_heads() -> Structure:
  """The first kernel has an axis of heads, which are outputs."""
  params = {"a": shape(D, 2, H), "b": shape(2, K)}

  def loss(p, x):
    kernel = jnp.einsum("drh,rk->dhk", p["a"], p["b"])
    return jnp.mean(jnp.tanh(jnp.einsum("bld,dhk->blhk", x, kernel)))

  return Structure(loss, params, (X,), {"a": (0,), "b": (0,)})


def random_subspace() -> Structure:
  """Fixed directions make a kernel of a few numbers, which are no kernel themselves."""
  params = {"coordinates": shape(4), "head": shape(5, 2)}

  def loss(p, x):
    kernel = (np.ones((D * 5, 4), np.float32) @ p["coordinates"]).reshape(D, 5)
    return jnp.mean(jnp.tanh(x @ kernel) @ p["head"])

  return Structure(loss, params, (X,), {"head": (0,)})


def adapters_of_layers() -> Structure:
  """The same in a scan over layers, added to kernels that are not trained."""
  layers = {"a": shape(LAYERS, D, 2), "b": shape(LAYERS, 2, D), "bias": shape(LAYERS, D)}
  params = {"layers": layers, "head": shape(D, 1)}

  def loss(p, x):
    def layer(x, slices):
      p, fixed = slices
      return jnp.tanh(x @ (fixed + p["a"] @ p["b"]) + p["bias"]), None

    x, _ = jax.lax.scan(layer, x, (p["layers"], jnp.ones((LAYERS, D, D))))
    return jnp.mean(x @ p["head"])

  fan_in = {"layers/a": (1,), "layers/b": (1,), "head": (0,)}
  return Structure(loss, params, (X,), fan_in, all_stacked({"layers": layers}))


def product_of_kernels(form: str) -> Structure:
  """A kernel that is a product of two or three."""
  params = {"a": shape(D, 4), "b": shape(4, 3), "c": shape(3, 5), "bias": shape(5)}

  def loss(p, x):
    right = form == "from the right"
    kernel = p["a"] @ (p["b"] @ p["c"]) if right else p["a"] @ p["b"] @ p["c"]
    return jnp.mean(jnp.tanh(x @ kernel + p["bias"]))

  return Structure(loss, params, (X,), dict.fromkeys("abc", (0,)))


def normalized_kernels(form: str) -> Structure:
  """A direction and a magnitude, spectral normalization, or a learned mask."""
  params = {"v": shape(D, 5), "bias": shape(5)}
  fan_in = {"v": (0,)}
  if form == "weight norm":
    params["g"] = shape(1, 5)
  elif form == "scaled inputs":
    params["g"] = shape(D, 1)
  elif form == "mask":
    params["mask"] = shape(D, 5)
    fan_in["mask"] = (0,)
  elif form == "rank one":
    params |= {"r": shape(D), "s": shape(5)}

  def loss(p, x):
    v = p["v"]
    if form in ("weight norm", "scaled inputs"):
      kernel = p["g"] * v / jnp.sqrt(jnp.einsum("io,io->o", v, v))
    elif form == "spectral":
      left, right = np.ones(D, np.float32), np.ones(5, np.float32)
      kernel = v / (left @ v @ right)
    elif form == "mask":
      kernel = v * jax.nn.sigmoid(p["mask"])
    else:
      kernel = v * jnp.outer(p["r"], p["s"])
    return jnp.mean(jnp.tanh(x @ kernel + p["bias"]))

  return Structure(loss, params, (X,), fan_in)


def penalized_product() -> Structure:
  """A weight decay of the product of two kernels tells nothing of them."""
  params = {"a": shape(D, 4), "b": shape(4, 5)}

  def loss(p, x):
    return jnp.mean(jnp.tanh(x @ p["a"]) @ p["b"]) + jnp.sum((p["a"] @ p["b"]) ** 2)

  return Structure(loss, params, (X,), {"a": (0,), "b": (0,)})


def hypernetwork() -> Structure:
  """A learned code is the input of the kernel that makes a kernel."""
  params = {"code": shape(4), "make": dense(4, D * 5), "head": shape(5, 2)}

  def loss(p, x):
    kernel = project(p["make"], p["code"]).reshape(D, 5)
    return jnp.mean(jnp.tanh(x @ kernel) @ p["head"])

  return Structure(loss, params, (X,), {"make/kernel": (0,), "head": (0,)})


# ---- Tables, scales and biases


def tables_and_biases() -> Structure:
  """Embeddings, tied and not; positions; LayerScale; biases of several shapes."""
  params = {
    "wte": shape(VOCAB, D),
    "segments": shape(2, D),
    "wpe": shape(7, D),
    "embed_norm": norm(),
    "attn": attention(),
    "layer_scale": shape(1, 1, D),
    "score_bias": shape(H, 7, 7),
    "gate": {"kernel": shape(D, D), "bias": shape(1, D)},
  }

  def loss(p, tokens):
    x = p["wte"][tokens] + p["segments"][(tokens > 3).astype(int)] + p["wpe"][: tokens.shape[1]]
    x = normalize(p["embed_norm"], x)
    q, k, v = (into_heads(p["attn"][name], x) for name in ("query", "key", "value"))
    scores = jnp.einsum("bqhk,blhk->bhql", q, k) + p["score_bias"]
    mixed = jnp.einsum("bhql,blhk->bqhk", jax.nn.softmax(scores), v)
    y = jnp.einsum("bqhk,hkd->bqd", mixed, p["attn"]["out"]["kernel"]) + p["attn"]["out"]["bias"]
    x += p["layer_scale"] * y * jax.nn.sigmoid(project(p["gate"], x))
    return jnp.mean(jax.nn.log_softmax(x @ p["wte"].T))

  return Structure(loss, params, (TOKENS,), kernels(params))


STRUCTURES = {
  "MAP head": map_head,
  "MAP head of several probes": functools.partial(map_head, 4),
  "MAP head of one vector": map_head_of_one_vector,
  "shared keys, normalized queries": shared_keys_and_query_norm,
  "torch layout": in_torch_layout,
  "torch layout of one probe": functools.partial(in_torch_layout, 1),
  "torch layout without biases": functools.partial(in_torch_layout, biased=False),
  "fused projections": fused_projections,
  "rows of stacked leaves": rows_of_stacked_leaves,
  "rotated queries": rotated_queries,
  "Perceiver": perceiver,
  "Perceiver of layers": perceiver_of_layers,
  "recurrent": recurrent,
  "leaky": leaky,
  "generator": generator,
  "DETR": functools.partial(detr, "layers"),
  "DETR scanned": functools.partial(detr, "scan"),
  "DETR of learned targets": functools.partial(detr, "learned"),
  "Q-Former": q_former,
  "inducing points": inducing_points,
  "slots": slots,
  "layers of queries": layers_of_queries,
  "pooling in each layer of a scan": functools.partial(pooling_in_each_layer, "scan"),
  "pooling in each layer of vmap": functools.partial(pooling_in_each_layer, "vmap"),
  "queries of tokens": queries_of_tokens,
  "style tokens": style_tokens,
  "prefix": prefix,
  "relative positions": relative_positions,
  "implicit filters": implicit_filters,
  "resized kernel": resized_kernel,
  "fixed projections": fixed_projections,
  "LoRA": functools.partial(adapters, "apart"),
  "LoRA merged": functools.partial(adapters, "merged"),
  "LoRA merged, torch layout": functools.partial(adapters, "torch"),
  "DoRA": functools.partial(adapters, "DoRA"),
  "LoRA of heads": adapters_of_heads,
  "LoRA of layers": adapters_of_layers,
  "random subspace": random_subspace,
  "product of kernels": functools.partial(product_of_kernels, "from the left"),
  "product from the right": functools.partial(product_of_kernels, "from the right"),
  "weight norm": functools.partial(normalized_kernels, "weight norm"),
  "scaled inputs": functools.partial(normalized_kernels, "scaled inputs"),
  "spectral norm": functools.partial(normalized_kernels, "spectral"),
  "mask": functools.partial(normalized_kernels, "mask"),
  "rank one": functools.partial(normalized_kernels, "rank one"),
  "penalized product": penalized_product,
  "hypernetwork": hypernetwork,
  "tables and biases": tables_and_biases,
}

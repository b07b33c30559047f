"""Models of the sizes that accelerators train: ResNet-50 and GPT-2."""

from collections.abc import Callable
import dataclasses
from typing import Any, Literal

from flax import linen as nn
import jax
import jax.numpy as jnp
import optax

# The first 30 convolutions of `ResNet`, of 53, and all after them: two groups of layers.
HALVES = ("Conv_?|Conv_[12]?|BatchNorm_?|BatchNorm_[12]?", "Dense_0")


class ResNet(nn.Module):
  """A bottleneck ResNet; as it stands it is ResNet-50 in bfloat16, its params in float32.

  Attributes:
    blocks: in each stage.
    width: of the first stage.
    classes: how many.
    dtype: of the arithmetic.
  """

  blocks: tuple[int, ...] = (3, 4, 6, 3)
  width: int = 64
  classes: int = 1000
  dtype: Any = jnp.bfloat16

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps images [batch, height, width, channels] to logits."""

    def conv_norm(x: jax.Array, width: int, size: int, stride: int = 1) -> jax.Array:
      x = nn.Conv(width, (size, size), (stride, stride), use_bias=False, dtype=self.dtype)(x)
      return nn.BatchNorm(use_running_average=False, dtype=self.dtype)(x)

    x = nn.relu(conv_norm(x.astype(self.dtype), self.width, 7, 2))
    x = nn.max_pool(x, (3, 3), (2, 2), padding="SAME")
    for stage, count in enumerate(self.blocks):
      width = self.width * 2**stage
      for block in range(count):
        stride = 2 if stage and not block else 1
        h = nn.relu(conv_norm(x, width, 1))
        h = nn.relu(conv_norm(h, width, 3, stride))
        h = conv_norm(h, 4 * width, 1)
        x = nn.relu(h + (x if block else conv_norm(x, 4 * width, 1, stride)))
    return nn.Dense(self.classes)(jnp.mean(x.astype(jnp.float32), (1, 2)))


def image_loss(model: Callable[[jax.Array], jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
  """Cross-entropy."""
  return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()


@dataclasses.dataclass(frozen=True)
class GPT2:
  """GPT-2 in plain JAX; as it stands, its smallest size.

  Sequences may be shorter than `length`. The loss takes the params of `init`, and scans over the
  blocks, or those of `unstacked`, and then the program has the blocks written out.

  Attributes:
    layers: blocks.
    width: of the residual stream.
    heads: of the attention.
    vocabulary: tokens.
    length: the longest sequence.
    dtype: of the arithmetic.
    rotary: whether queries and keys are rotated by their positions, instead of learned positions.
    causal: whether a token attends to those before it alone.
    rematerialized: whether the backward pass computes the blocks again.
    attention: the `implementation` of `jax.nn.dot_product_attention`; None: JAX chooses.
  """

  layers: int = 12
  width: int = 768
  heads: int = 12
  vocabulary: int = 50257
  length: int = 1024
  dtype: Any = jnp.bfloat16
  rotary: bool = False
  causal: bool = True
  rematerialized: bool = True
  attention: Literal["cudnn", "xla"] | None = None

  def init(self, key: jax.Array) -> dict[str, Any]:
    """Params in float32; the blocks' are stacked along the first axis."""
    width = self.width
    shapes = {
      "attention_in": (width, 3 * width),
      "attention_out": (width, width),
      "mlp_in": (width, 4 * width),
      "mlp_out": (4 * width, width),
    }
    keys = iter(jax.random.split(key, len(shapes) + 2))

    def normal(*shape: int) -> jax.Array:
      return 0.02 * jax.random.normal(next(keys), shape)

    def norm(*leading: int) -> dict[str, jax.Array]:
      return {"scale": jnp.ones((*leading, width)), "bias": jnp.zeros((*leading, width))}

    blocks = {
      name: {"kernel": normal(self.layers, *shape), "bias": jnp.zeros((self.layers, shape[1]))}
      for name, shape in shapes.items()
    }
    blocks |= {name: norm(self.layers) for name in ("attention_norm", "mlp_norm")}
    tables = {"tokens": normal(self.vocabulary, width)}
    if not self.rotary:
      tables["positions"] = normal(self.length, width)
    return {**tables, "blocks": blocks, "norm": norm()}

  def unstacked(self, params: dict[str, Any]) -> dict[str, Any]:
    """The same params with a dict for each block: 148 leaves."""
    blocks = {
      f"block_{i:02d}": jax.tree.map(lambda x, i=i: x[i], params["blocks"])
      for i in range(self.layers)
    }
    return {**{name: part for name, part in params.items() if name != "blocks"}, **blocks}

  def loss(self, params: dict[str, Any], tokens: jax.Array) -> jax.Array:
    """Cross-entropy of the next token, of tokens int32 [batch, length + 1]."""
    return jnp.mean(self.losses(params, tokens[:, :-1], tokens[:, 1:]))

  def masked_loss(self, params: dict[str, Any], batch: dict[str, jax.Array]) -> jax.Array:
    """Mean cross-entropy of `targets`, given `tokens`, weighted by `weights`: [batch, length]."""
    losses = self.losses(params, batch["tokens"], batch["targets"])
    return jnp.average(losses, weights=batch["weights"])

  def losses(self, params: dict[str, Any], inputs: jax.Array, targets: jax.Array) -> jax.Array:
    """Cross-entropy of each target, of inputs and targets int32 [batch, length]."""
    x = params["tokens"][inputs]
    if not self.rotary:
      x = x + params["positions"][: inputs.shape[1]]

    def body(x: jax.Array, block: dict[str, Any]) -> tuple[jax.Array, None]:
      return self._block(x, block), None

    if self.rematerialized:
      body = jax.checkpoint(body)
    x = x.astype(self.dtype)
    if "blocks" in params:
      x, _ = jax.lax.scan(body, x, params["blocks"])
    else:
      for i in range(self.layers):
        x, _ = body(x, params[f"block_{i:02d}"])
    logits = _normalize(params["norm"], x) @ params["tokens"].T.astype(self.dtype)
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets)

  def _block(self, x: jax.Array, block: dict[str, Any]) -> jax.Array:
    batch, length, _ = x.shape
    h = _dense(block["attention_in"], _normalize(block["attention_norm"], x))
    q, k, v = jnp.split(h.reshape(batch, length, 3 * self.heads, -1), 3, axis=2)
    if self.rotary:
      q, k = _rotate(q), _rotate(k)
    h = jax.nn.dot_product_attention(
      q, k, v, is_causal=self.causal, implementation=self.attention
    ).reshape(x.shape)
    x = x + _dense(block["attention_out"], h)
    h = jax.nn.gelu(_dense(block["mlp_in"], _normalize(block["mlp_norm"], x)))
    return x + _dense(block["mlp_out"], h)


def _rotate(x: jax.Array) -> jax.Array:
  """Rotary positions (Su et al., arXiv:2104.09864): x [batch, length, heads, size]."""
  half = x.shape[-1] // 2
  angles = jnp.arange(x.shape[1])[:, None] * 1e4 ** (-jnp.arange(half) / half)
  sine, cosine = jnp.sin(angles)[:, None, :], jnp.cos(angles)[:, None, :]
  first, second = jnp.split(x, 2, axis=-1)
  rotated = [first * cosine - second * sine, second * cosine + first * sine]
  return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def _dense(layer: dict[str, jax.Array], x: jax.Array) -> jax.Array:
  return x @ layer["kernel"].astype(x.dtype) + layer["bias"].astype(x.dtype)


def _normalize(layer: dict[str, jax.Array], x: jax.Array) -> jax.Array:
  wide = x.astype(jnp.float32)
  wide = jax.nn.standardize(wide, axis=-1, epsilon=1e-5)
  return (wide * layer["scale"] + layer["bias"]).astype(x.dtype)

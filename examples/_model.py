"""The network that large_batch.py trains, and its loss."""

from flax import nnx
import jax
import jax.numpy as jnp
import optax

# One for all layers and models: flax 0.11 compares it where it compares their structures.
_HE = nnx.initializers.he_normal()


class CNN(nnx.Module):
  """Six convolutions, BatchNorm after the first only, dropout and a linear head.

  Without normalization between them the layers' gradients differ in size, and one learning rate
  must suit them all: the case for which LARS was made. BatchNorm after every convolution takes
  that difficulty away, and with it most of the methods' advantage
  (`python -m benchmarks.races normalized`).
  """

  def __init__(self, channels: int, classes: int, *, rngs: nnx.Rngs):
    def conv(fan_in: int, fan_out: int, strides: int = 1) -> nnx.Conv:
      return nnx.Conv(fan_in, fan_out, (3, 3), strides, kernel_init=_HE, rngs=rngs)

    self.conv_1 = conv(channels, 16)
    # The statistics follow within a few steps: the slow default of 0.99 would be measured instead
    # of the methods in runs as short as these.
    self.norm = nnx.BatchNorm(16, momentum=0.5, rngs=rngs)
    self.conv_2 = conv(16, 32, strides=2)
    self.conv_3 = conv(32, 32)
    self.conv_4 = conv(32, 32)
    self.conv_5 = conv(32, 64, strides=2)
    self.conv_6 = conv(64, 64)
    self.dropout = nnx.Dropout(0.2, rngs=rngs)
    self.head = nnx.Linear(64, classes, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps images ``(n, h, w, c)`` of any size to logits ``(n, classes)``."""
    x = nnx.relu(self.norm(self.conv_1(x)))
    for conv in (self.conv_2, self.conv_3, self.conv_4, self.conv_5, self.conv_6):
      x = nnx.relu(conv(x))
    return self.head(self.dropout(jnp.mean(x, axis=(1, 2))))


def loss_fn(model: CNN, batch: dict[str, jax.Array]) -> jax.Array:
  """Mean cross-entropy of a batch with the keys ``images`` and ``labels``."""
  logits = model(batch["images"])
  return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]))

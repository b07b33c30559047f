"""Trains a CNN in float16: alone it fails, with the mixed-precision stack it learns as in float32.

Params, activations and gradients are float16. Alone, Adam divides zero by zero: squares of small
gradients and its epsilon vanish. The stack starts with too large a loss scale on purpose, and
skips the first steps until it has found one that fits. Prints test accuracy over the seeds, the
steps skipped, and the scale at the end.
"""

import argparse
from collections.abc import Callable
from typing import NamedTuple

from _data import batches, digits
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

import optax_boost
import optax_boost.nnx

BATCH_SIZE = 64


class Recipe(NamedTuple):
  """A dtype for the model, and an optimizer for its params."""

  dtype: jnp.dtype
  make: Callable[[], optax.GradientTransformation]


def adam() -> optax.GradientTransformation:
  """The optimizer that all recipes share."""
  return optax.adam(2e-3)


RECIPES = {
  "float32": Recipe(jnp.dtype("float32"), adam),
  "float16 alone": Recipe(jnp.dtype("float16"), adam),
  "float16, stack": Recipe(
    jnp.dtype("float16"),
    lambda: optax_boost.master_weights(
      optax_boost.dynamic_loss_scale(adam(), initial_scale=2.0**24, growth_interval=100)
    ),
  ),
}


class CNN(nnx.Module):
  """Two convolutions and a linear head."""

  def __init__(self, dtype: jnp.dtype, *, rngs: nnx.Rngs):
    kinds = {"dtype": dtype, "param_dtype": dtype, "rngs": rngs}
    self.conv_1 = nnx.Conv(1, 16, (3, 3), **kinds)
    self.conv_2 = nnx.Conv(16, 32, (3, 3), strides=2, **kinds)
    self.head = nnx.Linear(32 * 16, 10, **kinds)

  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps images ``(n, 8, 8, 1)`` to logits ``(n, 10)``."""
    x = nnx.relu(self.conv_2(nnx.relu(self.conv_1(x))))
    return self.head(x.reshape(len(x), -1))


def loss_fn(model: CNN, batch: dict[str, jax.Array]) -> jax.Array:
  """Mean cross-entropy, of float32 logits as is usual."""
  logits = model(batch["images"]).astype(jnp.float32)
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
  return jnp.mean(losses)


def run(recipe: Recipe, epochs: int, seed: int) -> tuple[float, int, float]:
  """Trains one model.

  Args:
    recipe: dtype and optimizer.
    epochs: passes over the training images.
    seed: of the initial weights and the order of the images.

  Returns:
    Test accuracy, skipped steps, and the loss scale at the end (1 without the stack).
  """
  data = digits()
  model = CNN(recipe.dtype, rngs=nnx.Rngs(seed))
  optimizer = nnx.Optimizer(model, recipe.make(), wrt=nnx.Param)
  step = optax_boost.nnx.make_train_step(loss_fn)
  metrics = {}
  for batch in batches(data.train, BATCH_SIZE, epochs, seed):
    metrics = step(model, optimizer, batch)
  right = jnp.argmax(model(data.test.images), -1) == data.test.labels
  return (
    float(np.mean(right)),
    int(metrics.get("notfinite_count", 0)),
    float(metrics.get("loss_scale", 1.0)),
  )


def main() -> None:
  """Trains with every recipe and prints the table."""
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--epochs", type=int, default=15)
  parser.add_argument("--seeds", type=int, default=3)
  options = parser.parse_args()
  if options.epochs < 1 or options.seeds < 1:
    parser.error("--epochs and --seeds must be at least 1")
  print(f"{'':16}  test accuracy    skipped steps  last loss scale")
  for name, recipe in RECIPES.items():
    seeds = tqdm(range(options.seeds), desc=name, unit="seed", leave=False)
    accuracy, skipped, scale = zip(*(run(recipe, options.epochs, s) for s in seeds), strict=True)
    spread = f"{100 * np.mean(accuracy):5.1f} +- {100 * np.std(accuracy):.1f} %"
    print(f"{name:16}  {spread:15}  {np.mean(skipped):13.1f}  {np.mean(scale):15,.0f}")


if __name__ == "__main__":
  main()

"""Trains the network with several methods, and measures it on the test part."""

from collections.abc import Mapping
from collections.abc import Sequence

from _data import Data
from _data import Part
from _model import CNN
from _model import loss_fn
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_boost.nnx
from optax_boost.race import RaceResult

BATCH_SIZE = 512
STEPS = 40  # about as many are made where the number of epochs is left open
POINTS = 40  # how often the test accuracy is measured in a run, at most
ACCURACY = "test accuracy"


def steps_per_epoch(data: Data, batch_size: int) -> int:
  """The number of whole batches in the training part."""
  return len(data.train.labels) // batch_size


def default_epochs(data: Data, batch_size: int) -> int:
  """The number of epochs that makes about `STEPS` steps."""
  return max(1, round(STEPS / steps_per_epoch(data, batch_size)))


@nnx.jit
def _count_right(model: CNN, images: jax.Array, labels: jax.Array) -> jax.Array:
  return jnp.sum(jnp.argmax(model(images), -1) == labels)


def accuracy(model: CNN, part: Part, batch_size: int) -> float:
  """The share of images that the model classifies rightly.

  Args:
    model: the model, in evaluation mode.
    part: the images.
    batch_size: images evaluated at once. The last batch is filled up with images of the label -1,
      which the model never answers.

  Returns:
    The share, in percent.
  """
  size = min(batch_size, len(part.labels))
  right = 0
  for start in range(0, len(part.labels), size):
    images, labels = part.images[start : start + size], part.labels[start : start + size]
    missing = size - len(labels)
    images = np.pad(images, [(0, missing), (0, 0), (0, 0), (0, 0)])
    right += int(_count_right(model, images, np.pad(labels, (0, missing), constant_values=-1)))
  return 100 * right / len(part.labels)


def race(
  data: Data,
  transformations: Mapping[str, optax.GradientTransformation],
  *,
  batch_size: int,
  epochs: int,
  seeds: Sequence[int],
  baseline: str | None = None,
  points: int = POINTS,
) -> RaceResult:
  """Trains with each transformation and each seed.

  Args:
    data: the images.
    transformations: by name.
    batch_size: images in a batch.
    epochs: passes over the images.
    seeds: the seeds.
    baseline: the transformation that the others are compared with; None: the first.
    points: how often the test accuracy is measured in a run, at most.

  Returns:
    The curves, with the test accuracy in percent.
  """
  steps = epochs * steps_per_epoch(data, batch_size)
  # Not so often that it takes longer than the training, whose steps cost three evaluations.
  evaluations_in_a_step = 3 * batch_size / len(data.test.labels)
  return optax_boost.nnx.race(
    loss_fn,
    lambda seed: CNN(data.train.images.shape[-1], data.classes, rngs=nnx.Rngs(seed)),
    data.train._asdict(),
    transformations,
    steps=steps,
    batch_size=batch_size,
    seeds=seeds,
    evaluate=lambda model: {ACCURACY: accuracy(model, data.test, batch_size)},
    jit_evaluate=False,
    points=max(1, min(points, int(steps * evaluations_in_a_step))),
    baseline=baseline,
  )

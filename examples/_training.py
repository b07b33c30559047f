"""Trains the network with one method and records its curves."""

from collections.abc import Callable
from collections.abc import Iterator
import time
from typing import NamedTuple

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

BATCH_SIZE = 512
STEPS = 40  # about as many are made where the number of epochs is left open
POINTS = 40  # how often the test accuracy is measured in a run, at most


class Curves(NamedTuple):
  """What one run left behind, at ``m`` points of the training.

  Attributes:
    steps: ``(m,)``, the number of steps made.
    loss: ``(m,)``, mean training loss of the steps since the point before.
    accuracy: ``(m,)``, share of the test images classified rightly.
    speed: ``(m,)``, training steps per second since the point before.
  """

  steps: np.ndarray
  loss: np.ndarray
  accuracy: np.ndarray
  speed: np.ndarray


def steps_per_epoch(data: Data, batch_size: int) -> int:
  """The number of whole batches in the training part."""
  return len(data.train.labels) // batch_size


def default_epochs(data: Data, batch_size: int) -> int:
  """The number of epochs that makes about `STEPS` steps."""
  return max(1, round(STEPS / steps_per_epoch(data, batch_size)))


def batches(part: Part, batch_size: int, epochs: int, seed: int) -> Iterator[dict[str, np.ndarray]]:
  """Shuffles the images anew for each epoch and cuts them into batches.

  Args:
    part: the images.
    batch_size: images in a batch. What is left over sits out that epoch: a smaller batch would be
      compiled and weighted differently.
    epochs: passes over the images.
    seed: seeds the shuffling.

  Yields:
    Batches with the keys ``images`` and ``labels``.
  """
  rng = np.random.default_rng(seed)
  for _ in range(epochs):
    order = rng.permutation(len(part.labels))
    for start in range(0, len(order) - batch_size + 1, batch_size):
      chosen = order[start : start + batch_size]
      yield {"images": part.images[chosen], "labels": part.labels[chosen]}


@nnx.jit
def _count_right(model: CNN, images: jax.Array, labels: jax.Array) -> jax.Array:
  return jnp.sum(jnp.argmax(model(images), -1) == labels)


def accuracy(model: CNN, part: Part, batch_size: int) -> float:
  """The share of images that the model classifies rightly, without dropout.

  Args:
    model: the model, in training mode; left so.
    part: the images.
    batch_size: images evaluated at once. The last batch is filled up with images of the label -1,
      which the model never answers.

  Returns:
    The share, from 0 to 1.
  """
  model.eval()
  size = min(batch_size, len(part.labels))
  right = 0
  for start in range(0, len(part.labels), size):
    images, labels = part.images[start : start + size], part.labels[start : start + size]
    missing = size - len(labels)
    images = np.pad(images, [(0, missing), (0, 0), (0, 0), (0, 0)])
    right += int(_count_right(model, images, np.pad(labels, (0, missing), constant_values=-1)))
  model.train()
  return right / len(part.labels)


class Trainer:
  """Trains with one transformation; compiled once, whatever the number of seeds."""

  def __init__(
    self, data: Data, tx: optax.GradientTransformation, batch_size: int, epochs: int
  ) -> None:
    self._data = data
    self._tx = tx
    self._batch_size = batch_size
    self._epochs = epochs
    self._step = optax_boost.nnx.make_train_step(loss_fn)

  def _start(self, seed: int) -> tuple[CNN, nnx.Optimizer]:
    channels = self._data.train.images.shape[-1]
    model = CNN(channels, self._data.classes, rngs=nnx.Rngs(seed))
    return model, nnx.Optimizer(model, self._tx, wrt=nnx.Param)

  def compile(self) -> None:
    """Trains and evaluates a model that is thrown away, so that runs are timed without."""
    model, optimizer = self._start(seed=0)
    for batch in batches(self._data.train, self._batch_size, epochs=1, seed=0):
      jax.block_until_ready(self._step(model, optimizer, batch))
      break
    accuracy(model, self._data.test, self._batch_size)

  def run(self, seed: int, on_step: Callable[[], object] = lambda: None) -> Curves:
    """Trains from scratch.

    Args:
      seed: decides initial weights, dropout and the order of the images; the same for every
        method.
      on_step: called after each step.

    Returns:
      The curves.
    """
    model, optimizer = self._start(seed)
    total = self._epochs * steps_per_epoch(self._data, self._batch_size)
    # Not so often that it takes longer than the training, whose steps cost three evaluations.
    every = max(-(-total // POINTS), len(self._data.test.labels) // (3 * self._batch_size))
    points, losses, begin = [], [], time.perf_counter()
    feed = batches(self._data.train, self._batch_size, self._epochs, seed)
    for count, batch in enumerate(feed, start=1):
      losses.append(self._step(model, optimizer, batch)["loss"])
      on_step()
      if count % every == 0 or count == total:
        loss = float(np.mean([float(loss) for loss in losses]))
        speed = len(losses) / (time.perf_counter() - begin)
        share = accuracy(model, self._data.test, self._batch_size)
        points.append((count, loss, share, speed))
        losses, begin = [], time.perf_counter()
    return Curves(*(np.array(column) for column in zip(*points, strict=True)))

"""Trains the network with several methods, and measures it on the test part."""

from collections.abc import Callable, Mapping, Sequence

from _data import Data, Part
from _model import CNN, loss_fn
from flax import nnx
import jax
import jax.numpy as jnp
import optax

import optax_boost
from optax_boost import RaceResult
import optax_boost.nnx

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


def accuracy(model: nnx.Module, part: Part, batch_size: int) -> jax.Array:
  """Measures a model.

  Args:
    model: the model, which is set to evaluation mode.
    part: the images.
    batch_size: images evaluated at once.

  Returns:
    The share, in percent.
  """
  model.eval()
  classes = jax.lax.map(
    lambda image: jnp.argmax(model(image[None])[0]), part.images, batch_size=batch_size
  )
  return 100 * jnp.mean(classes == part.labels)


def race(
  data: Data,
  transformations: Mapping[str, optax.GradientTransformation],
  *,
  batch_size: int,
  epochs: int,
  seeds: Sequence[int],
  points: int = POINTS,
  network: Callable[..., nnx.Module] = CNN,
  loss_fn: Callable[..., jax.Array] = loss_fn,
) -> RaceResult:
  """Trains with each transformation and each seed.

  Args:
    data: the images.
    transformations: by name; the others are compared with the first.
    batch_size: images in a batch.
    epochs: passes over the images.
    seeds: the seeds.
    points: how often the test accuracy is measured in a run, at most.
    network: from the numbers of channels and classes, and `rngs`, to the model.
    loss_fn: its loss.

  Returns:
    The curves, with the test accuracy in percent.
  """
  steps = epochs * steps_per_epoch(data, batch_size)
  # Not so often that it takes longer than the training, whose steps cost three evaluations.
  evaluations_in_a_step = 3 * batch_size / len(data.test.labels)

  def make(key: jax.Array) -> nnx.Module:
    return network(data.train.images.shape[-1], data.classes, rngs=nnx.Rngs(key))

  model = make(jax.random.key(0))
  loss, *_ = optax_boost.nnx.split_loss(loss_fn, model)
  measure, *_ = optax_boost.nnx.split_loss(lambda *args: accuracy(*args, batch_size), model)
  measure = jax.jit(measure)
  return optax_boost.race(
    loss,
    lambda key: optax_boost.nnx.split_loss(loss_fn, make(key))[1:],
    data.train._asdict(),
    transformations,
    has_model_state=True,
    steps=steps,
    batch_size=batch_size,
    seeds=seeds,
    evaluate=lambda params, state: {ACCURACY: measure(params, state, data.test)[0]},
    points=max(1, min(points, int(steps * evaluations_in_a_step))),
  )

"""What evidence runs share: images, batches, losses and scores."""

import functools
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from sklearn import datasets

PARTS = ("train", "validation", "test")


def file_of(name):
  """The file of a data set in the folder OPTAX_BOOST_DATA, or None."""
  folder = os.environ.get("OPTAX_BOOST_DATA")
  files = sorted(pathlib.Path(folder).glob(f"{name}*")) if folder else []
  return files[0] if files else None


def need(*names):
  """Skips the test if a data set is missing; digits come with scikit-learn."""
  for name in names:
    if name != "digits" and file_of(name) is None:
      pytest.skip(f"no {name}* in the folder OPTAX_BOOST_DATA")


def _raw(name):
  """The three parts of a data set, pixels as stored, and the largest pixel."""
  if name == "digits":
    x, y = datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(y))
    x, y = x[order].reshape(-1, 8, 8, 1), y[order]
    return [(x[a:b], y[a:b]) for a, b in ((0, 1024), (1024, 1397), (1397, None))], 16
  with np.load(file_of(name)) as file:
    x, y, *test = (
      file[f"{part}_{of}"] for part in ("train", "test") for of in ("images", "labels")
    )
  cut = len(x) - {"mnist": 10_000, "cifar10": 4_000}[name]
  return [(x[:cut], y[:cut]), (x[cut:], y[cut:]), tuple(test)], 255


@functools.cache
def images(name, halved=False, unit=False):
  """Images (n, height, width, channels) and labels by part.

  Args:
    name: ``"digits"``, with 1,024, 373 and 400 images, ``"mnist"`` (50,000, 10,000 and 10,000), or
      ``"cifar10"``, of which 24,000 are used (16,000, 4,000 and 4,000).
    halved: whether to average squares of four pixels.
    unit: whether pixels are from 0 to 1, instead of standardized by channel.
  """
  parts, largest = _raw(name)

  def floats(x):
    x = x.reshape(*x.shape[:3], -1).astype(np.float32) / largest
    n, height, width, channels = x.shape
    return x.reshape(n, height // 2, 2, width // 2, 2, channels).mean((2, 4)) if halved else x

  parts = {p: (floats(x), y.astype(np.int32)) for p, (x, y) in zip(PARTS, parts, strict=True)}
  mean, spread = (f(parts["train"][0], (0, 1, 2)) for f in (np.mean, np.std))
  return parts if unit else {p: ((x - mean) / spread, y) for p, (x, y) in parts.items()}


def batches(x, y, size, rng):
  """Batches in random order without end; an epoch's incomplete last one is left out."""
  while True:
    order = rng.permutation(len(y))
    for i in range(len(y) // size):
      rows = order[i * size : (i + 1) * size]
      yield {"x": x[rows], "y": y[rows]}


def cross_entropy(logits, labels):
  return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def classify(model, batch):
  """The loss of a Linen or NNX model."""
  return cross_entropy(model(batch["x"]), batch["y"])


def scores(predict, x, y):
  """The mean loss, and the accuracy in percent, of logits computed 1,000 images at a time."""
  logits = np.concatenate([predict(x[i : i + 1000]) for i in range(0, len(y), 1000)])
  loss, accuracy = cross_entropy(logits, y), np.mean(logits.argmax(-1) == y)
  return {"loss": float(loss), "accuracy": 100 * float(accuracy)}


def rectified(params, x, padding, pooled):
  """The logits of layers without biases: kernels of convolutions, then of dense layers, in order.

  After the convolutions whose numbers are in `pooled`, squares of four are reduced to their
  maximum.
  """
  *hidden, last = params.values()
  for i, kernel in enumerate(hidden):
    if kernel.ndim == 4:
      names = ("NHWC", "HWIO", "NHWC")
      x = jax.lax.conv_general_dilated(x, kernel, (1, 1), padding, dimension_numbers=names)
      if i in pooled:
        n, height, width, channels = x.shape
        x = x[:, : height // 2 * 2, : width // 2 * 2]
        x = x.reshape(n, height // 2, 2, width // 2, 2, channels).max((2, 4))
    else:
      x = x.reshape(len(x), -1) @ kernel
    x = jax.nn.relu(x)
  return x.reshape(len(x), -1) @ last


def assert_permuted(before, after):
  """Asserts that each weight vector of an output holds the same values, to the bit."""
  for was, now in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
    vectors = (np.sort(np.reshape(kernel, (-1, kernel.shape[-1])), 0) for kernel in (was, now))
    assert np.array_equal(*vectors), "not a permutation of the initial weights"
